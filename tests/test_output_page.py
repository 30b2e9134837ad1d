"""docs/output.md names every column as the schema has it, and everything that is recorded beside the rows."""

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_harness import REPOSITORY, SAMPLES, run_tiny

from cbgen.data.rows import OPTIONAL_COLUMNS, RESULT_SCHEMA, SHARD_FIELDS

PAGE = (REPOSITORY / "docs" / "output.md").read_text(encoding="utf-8")
FIELDS = [*SHARD_FIELDS, *RESULT_SCHEMA]


def table(heading: str, first: str) -> list[list[str]]:
    """The cells of a section's table, whose first column is headed so; without its two lines of head."""
    lines = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert rows[0][0] == first
    return rows[2:]


COLUMNS = {row[0].strip("`"): row for row in table("Columns", "column")}


def plain(type_: pa.DataType) -> str:
    """As the page writes a type: without the names of list items, which differ between versions, and null is apart."""
    return re.sub(r"(item|element): | not null", "", str(type_))


def test_the_columns_are_those_of_the_schema_in_its_order() -> None:
    assert list(COLUMNS) == [field.name for field in FIELDS]


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_a_column_has_its_type_and_says_whether_it_may_be_null(field: pa.Field) -> None:
    _, type_, unit, there, null = COLUMNS[field.name]
    assert type_ == plain(field.type)
    assert null.startswith("never") != field.nullable
    assert unit
    assert (there != "always") == (field.name in (*OPTIONAL_COLUMNS, "sample_index", "row_index", "row_key"))


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl", "out"])
def test_the_record_has_the_keys_of_the_page(name: str, tmp_path: Path) -> None:
    """In each of the three places, and `files` where it is said to be."""
    out = tmp_path / name
    if out.suffix:
        run_tiny(SAMPLES / "questions.jsonl", out, "--max-tokens", 2, "--limit", 2)
    else:
        run_tiny(SAMPLES / "questions.jsonl", tmp_path / "out", "--max-tokens", 2, "--limit", 2)
    places = {"out.jsonl": tmp_path / "out.jsonl.job.json", "out": out / "_job.json"}
    text = places[name].read_bytes() if name in places else (pq.read_schema(out).metadata or {})[b"cbgen"]
    named = {key for row in table("What is recorded of the job", "key") for key in re.findall(r"`(\w+)`", row[0])}
    assert json.loads(text).keys() == named - (set() if name in places else {"files"})


def test_what_is_null_is_as_the_page_says(tmp_path: Path) -> None:
    """In good rows and bad ones, with all columns that may be there."""
    options = ("--logprobs", 1, "--prompt-logprobs", 0, "--output-token-ids", "--strip-reasoning", "--stop", "THE")
    rows = run_tiny(
        SAMPLES / "mixed.jsonl",
        tmp_path / "out.parquet",
        "--max-tokens",
        8,
        "--truncate-prompt",
        "left",
        *options,
        code=3,
    )
    failed, ok = ([row for row in rows if (row["error"] is None) == good] for good in (False, True))
    assert {len(failed), len(ok)} == {6, 14}
    for row in failed:
        nulls = {name for name in COLUMNS if name in row and row[name] is None}
        assert nulls == {
            *("completion", "stop_reason", "reasoning", "clamped_max_tokens"),
            *("completion_logprobs", "prompt_token_logprobs", "queue_s", "prefill_s", "decode_s", "ttft_s", "tpot_s"),
            *("arrival_time", "finish_time"),
        }
        assert (row["prompt_tokens"], row["completion_tokens"], row["completion_ids"]) == (0, 0, [])
    for row in ok:
        nulls = {name for name in COLUMNS if name in row and row[name] is None}
        assert nulls == {"error", "stop_reason", "reasoning", "clamped_max_tokens"}
        assert (row["prompt_token_logprobs"][0]["logprob"], row["prompt_token_logprobs"][0]["top"]) == (None, [])
        assert len(row["completion_logprobs"]) == len(row["completion_ids"]) == row["completion_tokens"]


def test_the_columns_in_sql_are_columns() -> None:
    """The queries are not run, for want of an engine; what they name is there."""
    (queries,) = re.findall(r"^```sql\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    words = set(re.findall(r"[a-z]\w*", re.sub(r"'[^']*'|\w+\(|\w+ :=", "", queries)))
    assert words - {"id", "true"} <= set(COLUMNS), words
    assert len(words) > 3
