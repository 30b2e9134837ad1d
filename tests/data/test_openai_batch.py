"""Lines of an OpenAI batch as rows: which are followed, and which are error rows that say why."""

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from job_harness import write_jsonl

from cbgen.data.openai_batch import CHAT_URL, COLUMNS, open_batch, request_columns
from cbgen.data.rows import PromptRow
from cbgen.errors import RowError, UsageError

MESSAGES = [{"role": "user", "content": "hello"}]
COMPLETIONS_URL = "/v1/completions"


def chat(**body: Any) -> dict[str, Any]:
    return {"method": "POST", "url": CHAT_URL, "body": {"messages": MESSAGES, **body}}


def completion(**body: Any) -> dict[str, Any]:
    return {"method": "POST", "url": COMPLETIONS_URL, "body": {"prompt": "hello", **body}}


def read(*sources: object, limit: int | None = None, error_file: Path = Path("none.errors.jsonl")) -> list[PromptRow]:
    with open_batch([str(source) for source in sources], limit, Path("none.jsonl"), error_file) as source:
        rows = list(source.rows(list(COLUMNS)))
        assert source.num_rows == len(rows)
        return rows


def reason(line: dict[str, Any]) -> str:
    with pytest.raises(RowError) as caught:
        request_columns(line)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_url_chooses_the_prompt() -> None:
    """Messages for chat; for completions a text, or ids in a column of their own."""
    assert request_columns(chat()) == {"messages": MESSAGES}
    assert request_columns(completion()) == {"prompt": "hello"}
    assert request_columns(completion(prompt=[1, 2])) == {"prompt_ids": [1, 2]}


def test_parameters_become_columns() -> None:
    """Those that cbgen knows, as they are; max_completion_tokens wins over max_tokens; null is absent."""
    known = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 7, "ignore_eos": True, "model": "m"}
    assert request_columns(chat(max_tokens=4, **known)) == {"messages": MESSAGES, "max_tokens": 4, **known}
    assert request_columns(chat(max_tokens=4, max_completion_tokens=6))["max_tokens"] == 6
    assert request_columns(chat(max_tokens=4, max_completion_tokens=None))["max_tokens"] == 4
    assert request_columns(chat(stop=None, temperature=None, nonsense=None)) == {"messages": MESSAGES}


@pytest.mark.parametrize(
    "body",
    [
        {"n": 1, "best_of": 1, "stream": False, "echo": False, "suffix": ""},
        {"stop": [], "logit_bias": {}, "tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "logprobs": False, "top_logprobs": 0},
        {"response_format": {"type": "text"}},
        {"user": "u", "metadata": {"a": 1}, "store": True, "service_tier": "flex"},
    ],
)
def test_parameters_without_effect_are_passed_over(body: dict[str, Any]) -> None:
    """A value that changes nothing is no reason to refuse a request."""
    assert request_columns(chat(**body)) == {"messages": MESSAGES}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", True),
        ("stream", True),
        ("stop", "\n"),
        ("stop", ["a"]),
        ("frequency_penalty", 0.1),
        ("presence_penalty", -1),
        ("logit_bias", {"5": 1}),
        ("logprobs", True),
        ("logprobs", 0),
        ("top_logprobs", 2),
        ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "auto"),
        ("best_of", 3),
        ("echo", True),
        ("suffix", "end"),
        ("min_p", 0.1),
        ("prompt", "of another url"),
        ("model", 3),
    ],
)
def test_parameters_that_cannot_be_followed(name: str, value: Any) -> None:
    """The row's error names the parameter, whether it is known or not."""
    assert reason(chat(**{name: value})).startswith(name)


def test_all_parameters_at_fault_are_named() -> None:
    """One look at the error tells all that is to be changed."""
    told = reason(completion(stop=["x"], n=3, messages=MESSAGES))
    assert told.count(";") >= 2
    assert all(name in told for name in ("stop is", "n is 3: a request has one choice", "messages: is no parameter"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (chat() | {"method": "GET"}, 'method is "GET"'),
        ({"url": CHAT_URL, "body": {}}, "method is missing"),
        (chat() | {"url": "/v1/embeddings"}, 'url is "/v1/embeddings"'),
        (chat() | {"url": ["/v1"]}, "url is"),
        (chat() | {"body": "text"}, 'body is "text"'),
        ({"method": "POST", "url": CHAT_URL}, "body is missing"),
        (chat(messages=None), "body has no messages"),
        (completion(prompt=None), "body has no prompt"),
        (completion(prompt=["a", "b"]), "prompt is a list of 2 prompts"),
        (completion(prompt=[[1], [2]]), "prompt is a list of 2 prompts"),
    ],
)
def test_lines_that_are_no_request(line: dict[str, Any], words: str) -> None:
    """What is missing or of the wrong kind is named."""
    assert words in reason(line)


def test_rows_have_every_column(tmp_path: Path) -> None:
    """Rows in order; one with an error keeps its custom_id, and one without an id tells file and line."""
    path = tmp_path / "in.jsonl"
    lines = [
        json.dumps({"custom_id": "a", **chat(max_tokens=3)}),
        "",
        json.dumps({"custom_id": "b", **chat(stop=["x"])}),
        json.dumps(chat()),
        json.dumps({"custom_id": 5, **chat()}),
        '{"custom_id": "c", "method"',
        "[1]",
        json.dumps({"custom_id": "d", **completion(prompt=[1])}),
    ]
    path.write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    rows = read(path)
    assert [row.index for row in rows] == list(range(7))
    assert all(list(row.values) == list(COLUMNS) for row in rows)
    assert [row.values["custom_id"] for row in rows] == ["a", "b", None, None, None, None, "d"]
    assert (rows[0].values["messages"], rows[0].values["max_tokens"], rows[0].error) == (MESSAGES, 3, None)
    assert rows[6].values["prompt_ids"] == [1]
    assert str(rows[1].error).startswith("stop is")
    for row, line, words in zip(rows[2:6], (4, 5, 6, 7), ("missing", "5, a text", "JSON", "a list"), strict=True):
        assert str(row.error).startswith(f"in.jsonl, line {line}: "), row.error
        assert words in str(row.error)


def test_shards_whose_bodies_differ_in_type(tmp_path: Path) -> None:
    """Bodies need no common type: a folder mixes texts, ids, parts and compressed files."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    write_jsonl(tmp_path / "1.jsonl", [{"custom_id": "a", **completion(prompt=[1])}])
    write_jsonl(tmp_path / "2.jsonl", [{"custom_id": "b", **chat(messages=parts, metadata={"k": 1})}])
    line = json.dumps({"custom_id": "c", **completion(metadata={"k": [1]})})
    (tmp_path / "3.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    assert [row.values["custom_id"] for row in read(tmp_path)] == ["a", "b", "c"]
    assert [row.values["custom_id"] for row in read(tmp_path / "*.jsonl*", limit=2)] == ["a", "b"]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch can be piped in."""
    line = json.dumps({"custom_id": "a", **chat()}).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(line)))
    assert [row.values["custom_id"] for row in read("-")] == ["a"]


def test_tables_hold_what_rows_hold(tmp_path: Path) -> None:
    """As tables every column is text, and what was none stands as JSON."""
    path = write_jsonl(tmp_path / "in.jsonl", [{"custom_id": "a", **chat(max_tokens=3)}, {"custom_id": "b"}])
    with open_batch([str(path)], None, tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl") as source:
        (table,) = source.tables()
    first, second = table.to_pylist()
    assert (first["custom_id"], first["max_tokens"], json.loads(first["messages"])) == ("a", "3", MESSAGES)
    assert second == dict.fromkeys(COLUMNS) | {"custom_id": "b"}


def test_the_error_file_is_no_input(tmp_path: Path) -> None:
    """A folder that holds it is read without; named as an input it is refused, as is a folder of nothing else."""
    left = write_jsonl(tmp_path / "r.errors.jsonl", [{"custom_id": "old"}])
    with pytest.raises(UsageError, match="has no file of"):
        read(tmp_path, error_file=left)
    write_jsonl(tmp_path / "in.jsonl", [{"custom_id": "a", **chat()}])
    assert [row.values["custom_id"] for row in read(tmp_path, error_file=left)] == ["a"]
    with pytest.raises(UsageError, match="error file as well"):
        read(tmp_path / "in.jsonl", left, error_file=left)


def test_inputs_that_are_no_batch(tmp_path: Path) -> None:
    """Nothing at all, the standard input twice, and Parquet are refused."""
    (tmp_path / "in.parquet").touch()
    for sources, words in ((["-", "-"], "give it once"), ([tmp_path / "in.parquet"], "reads JSONL"), ([], "no input")):
        with pytest.raises(UsageError, match=words):
            read(*sources)
