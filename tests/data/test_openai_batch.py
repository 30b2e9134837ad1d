"""Lines of an OpenAI batch as rows: which are followed, and which are error rows that say why."""

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from job_harness import write_jsonl

from cbgen.data.openai_batch import COLUMNS, open_batch, request_columns
from cbgen.data.openai_body import CHAT_URL, OPTIONS
from cbgen.data.rows import PromptRow
from cbgen.engine.sampling_params import SamplingParams
from cbgen.errors import RowError, UsageError
from cbgen.row_params import OPTION_COLUMNS

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


def asked(line: dict[str, Any]) -> dict[str, Any]:
    """The columns of a line beside its prompt."""
    columns = request_columns(line)
    for name in ("messages", "prompt"):
        columns.pop(name, None)
    return columns


PLAIN = {
    "max_tokens": 4,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {"5": 1},
    "bad_words": ["x"],
    "stop": ["a", "b"],
    "stop_token_ids": [7],
    "include_stop": True,
    "min_tokens": 2,
    "ignore_eos": True,
    "n": 3,
    "seed": 7,
    "prompt_logprobs": 1,
    "skip_special_tokens": False,
}
FORMS = {"json_schema": '{"type": "object"}', "regex": "a+", "choice": ["a", "b"], "grammar": "start: A"}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [None, "é"]}, "b": {"const": None}}}


def test_every_parameter_of_rows_can_be_given() -> None:
    """Under its own name it is the column of that name, for both urls, with the values that every row's check takes."""
    assert OPTIONS == OPTION_COLUMNS
    assert {*PLAIN, *FORMS, "logprobs"} == set(OPTIONS)
    for make in (chat, completion):
        assert asked(make(model="m", **PLAIN)) == {"model": "m", **PLAIN}
        for name, value in FORMS.items():
            assert asked(make(**{name: value})) == {name: value}
            SamplingParams(**asked(make(**{name: value})))
        SamplingParams(**asked(make(**PLAIN)))


def test_null_is_not_given() -> None:
    """Whatever the parameter, and in the fields of those that have some."""
    assert asked(chat(**dict.fromkeys([*PLAIN, *FORMS, "logprobs", "tools", "response_format", "nonsense"]))) == {}
    assert asked(chat(response_format={"type": "text", "json_schema": None})) == {}
    assert asked(chat(structured_outputs={"regex": None, "choice": ["a"]})) == {"choice": ["a"]}


@pytest.mark.parametrize(
    ("body", "columns"),
    [
        ({"max_completion_tokens": 6}, {"max_tokens": 6}),
        ({"max_completion_tokens": 6, "max_tokens": 4}, {"max_tokens": 6}),
        ({"max_completion_tokens": None, "max_tokens": 4}, {"max_tokens": 4}),
        ({"include_stop_str_in_output": True}, {"include_stop": True}),
        ({"stop": "\n"}, {"stop": "\n"}),
        ({"n": 2, "best_of": 2}, {"n": 2}),
        ({"best_of": 1}, {}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": '{"type": "object"}'}),
        ({"guided_json": {"type": "array"}}, {"json_schema": '{"type": "array"}'}),
        ({"guided_json": '{"type": "array"}'}, {"json_schema": '{"type": "array"}'}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"guided_grammar": "start: A"}, {"grammar": "start: A"}),
        ({"structured_outputs": {"json": {"type": "array"}}}, {"json_schema": '{"type": "array"}'}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a"]}}, {"choice": ["a"]}),
        ({"structured_outputs": {"grammar": "start: A"}}, {"grammar": "start: A"}),
        ({"structured_outputs": {"json_object": True}}, {"json_schema": '{"type": "object"}'}),
        ({"structured_outputs": {"json_object": False, "regex": "a"}}, {"regex": "a"}),
    ],
)
def test_other_names(body: dict[str, Any], columns: dict[str, Any]) -> None:
    """What OpenAI and vLLM call otherwise, for both urls."""
    assert asked(chat(**body)) == columns
    assert asked(completion(**body)) == columns


def test_a_response_format_with_a_schema() -> None:
    """The schema as it is written, with every null that it holds."""
    described = {"name": "answer", "description": "one", "strict": True, "schema": SCHEMA}
    columns = asked(chat(response_format={"type": "json_schema", "json_schema": described}))
    assert columns.keys() == {"json_schema"}
    assert json.loads(columns["json_schema"]) == SCHEMA


def test_logprobs() -> None:
    """A chat says whether, and how many beside it; a completion says how many."""
    assert asked(chat(logprobs=True)) == {"logprobs": 0}
    assert asked(chat(logprobs=True, top_logprobs=5)) == {"logprobs": 5}
    assert asked(chat(logprobs=False, top_logprobs=0)) == {}
    assert asked(completion(logprobs=0)) == {"logprobs": 0}
    assert asked(completion(logprobs=5)) == {"logprobs": 5}
    assert asked(completion(logprobs=False, top_logprobs=0)) == {}


def test_tools() -> None:
    """They are passed on, unless the request itself has them left out."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert asked(chat(tools=tools)) == asked(chat(tools=tools, tool_choice="auto")) == {"tools": tools}
    assert asked(chat(tools=tools, parallel_tool_calls=True)) == {"tools": tools}
    assert asked(chat(tools=tools, tool_choice="none", parallel_tool_calls=False)) == {}
    assert asked(chat(tools=[], tool_choice="auto")) == {}
    assert asked(completion(tools=[], tool_choice="none")) == {}


@pytest.mark.parametrize(
    "body",
    [
        {"stream": False, "echo": False, "suffix": "", "parallel_tool_calls": False},
        {"add_generation_prompt": True, "continue_final_message": False, "length_penalty": 1.0},
        {"use_beam_search": False, "spaces_between_special_tokens": True},
        {"user": "u", "metadata": {"a": 1}, "store": True, "service_tier": "flex", "safety_identifier": "u"},
        {"priority": 3, "request_id": "r", "cache_salt": "s", "prompt_cache_key": "k"},
    ],
)
def test_parameters_without_effect_are_passed_over(body: dict[str, Any]) -> None:
    """A value that changes nothing is no reason to refuse a request."""
    assert asked(chat(**body)) == asked(completion(**body)) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream", True),
        ("echo", True),
        ("echo", 0),
        ("suffix", "end"),
        ("best_of", 3),
        ("best_of", True),
        ("add_generation_prompt", False),
        ("continue_final_message", True),
        ("use_beam_search", True),
        ("length_penalty", 2),
        ("truncate_prompt_tokens", 8),
        ("reasoning_effort", "low"),
        ("model", 3),
        ("response_format", "json"),
        ("response_format", {}),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": ["text"]}),
        ("response_format", {"type": "text", "more": 1}),
        ("response_format", {"type": "json_object", "json_schema": {"schema": SCHEMA}}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": []}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a"}}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": "text"}}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": SCHEMA, "mode": 1}}),
        ("structured_outputs", ["a"]),
        ("structured_outputs", {"whitespace_pattern": " "}),
        ("structured_outputs", {"json_object": 1}),
        ("structured_outputs", {"regex": "a", "choice": ["a"]}),
        ("guided_whitespace_pattern", " "),
    ],
)
def test_parameters_that_cannot_be_followed(name: str, value: Any) -> None:
    """The row's error names the parameter, whether it is known or not."""
    assert reason(chat(**{name: value})).startswith(name)
    assert reason(completion(**{name: value})).startswith(name)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (chat(prompt="of another url"), "prompt: is no parameter of /v1/chat/completions"),
        (chat(logprobs=2), "logprobs is 2, true or false is expected; top_logprobs"),
        (chat(logprobs=0), "logprobs is 0, true or false"),
        (chat(top_logprobs=2), "top_logprobs is 2: give logprobs: true"),
        (chat(logprobs=False, top_logprobs=2), "top_logprobs is 2: give logprobs: true"),
        (completion(top_logprobs=2), "top_logprobs is 2: is no parameter of /v1/completions"),
        (chat(tools="all"), 'tools is "all", a list'),
        (chat(tools=["f"]), "tools is"),
        (chat(tools=[{}], parallel_tool_calls=False), "parallel_tool_calls is false"),
        (chat(tool_choice="required"), 'tool_choice is "required": auto or none is expected'),
        (chat(tool_choice={"type": "function"}), "tool calls are not parsed"),
        (completion(tools=[{}]), "tools is [{}]: is no parameter"),
        (completion(tool_choice="auto"), 'tool_choice is "auto": is no parameter'),
        (chat(n=2, best_of=1), "best_of is 1: only as many as n (2)"),
        (chat(n=1, best_of=2), "best_of is 2"),
        (chat(guided_regex="a", regex="b"), "regex and guided_regex: give one of them"),
        (chat(guided_regex="a", response_format={"type": "json_object"}), "guided_regex and response_format"),
        (chat(structured_outputs={"regex": "a", "json": {}}), "structured_outputs.json and structured_outputs.regex"),
    ],
)
def test_what_does_not_go_together(line: dict[str, Any], words: str) -> None:
    """Parameters of the other url, and those that contradict each other or ask for parsed tool calls."""
    assert words in reason(line)


def test_values_are_checked_as_those_of_every_row() -> None:
    """A value of the wrong type or out of range goes on as it is, to be refused with all others of its kind."""
    for body in ({"n": 0}, {"stop": 5}, {"logit_bias": [1]}, {"seed": "x"}, {"guided_json": {}}, {"min_p": True}):
        with pytest.raises(RowError):
            SamplingParams(**asked(chat(**body)))
    with pytest.raises(RowError, match="logprobs is 21"):
        SamplingParams(**asked(chat(logprobs=True, top_logprobs=21)))


def test_all_parameters_at_fault_are_named() -> None:
    """One look at the error tells all that is to be changed."""
    told = reason(completion(stream=True, best_of=3, messages=MESSAGES, response_format=1))
    assert told.count("; ") >= 4
    parts = (
        "stream is true: a batch is not streamed",
        "best_of is 3",
        "messages: is no parameter",
        "response_format is",
    )
    assert all(part in told for part in parts)


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
        json.dumps({"custom_id": "b", **chat(stream=True)}),
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
    assert str(rows[1].error).startswith("stream is")
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
