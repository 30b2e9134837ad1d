"""Log-probabilities of jobs: nested columns, the same in every format, verified, and kept when an output goes on."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from job_harness import cbgen, read_rows, write_jsonl

from cbgen.data.rows import TOKEN_LOGPROB
from cbgen.data.writers import MOST_PART_BYTES, PartWriter

ROWS: list[dict[str, Any]] = [
    {"id": 0, "prompt": "one", "logprobs": 2, "prompt_logprobs": 1},
    {"id": 1, "prompt": "two words", "logprobs": 0},
    {"id": 2, "prompt": "three", "logprobs": None, "prompt_logprobs": 3, "temperature": 1.0},
    {"id": 3, "prompt": "", "logprobs": 1},
    {"id": 4, "prompt": "five", "logprobs": 21},
    *({"id": number, "prompt": f"row {number}", "logprobs": 1} for number in range(5, 25)),
]
COLUMNS = ("completion", "completion_ids", "completion_logprobs", "prompt_token_logprobs")


def run(source: Path, out: Path, *options: object) -> list[dict[str, Any]]:
    job = ("run", source, "--model", "tiny-random", "--max-tokens", 5, "--output-token-ids", "--out", out)
    result = cbgen(*job, *options)
    assert result.exit_code == 3, result.output
    return pq.read_table(out).to_pylist() if out.is_dir() else read_rows(out)


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl", "out"])
def test_every_format_has_them_and_goes_on(tmp_path: Path, name: str) -> None:
    """What was asked for, row by row; kept to the bit when rows are appended; sound to verify."""
    (tmp_path / "out").mkdir()
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    rows = run(source, tmp_path / name, "--part-rows", 3)
    assert [row["error"] is None for row in rows[:5]] == [True, True, True, False, False]
    first, second, third = rows[:3]
    assert [token["token_id"] for token in first["completion_logprobs"]] == first["completion_ids"]
    assert {len(token["top"]) for token in first["completion_logprobs"]} == {2}
    assert all(token["top"] == [] for token in second["completion_logprobs"])
    assert third["completion_logprobs"] is None and len(third["prompt_token_logprobs"]) == third["prompt_tokens"]
    assert third["prompt_token_logprobs"][0]["logprob"] is None
    assert rows[3]["completion_logprobs"] is rows[3]["prompt_token_logprobs"] is None
    for token in first["completion_logprobs"]:
        assert token["rank"] == 1 and token["logprob"] == token["top"][0]["logprob"] <= 0
    assert cbgen("verify", tmp_path / name).exit_code == 0
    write_jsonl(source, [*reversed(ROWS), {"id": 99, "prompt": "more", "logprobs": 1}])
    again = {row["id"]: row for row in run(source, tmp_path / name)}
    assert len(again.pop(99)["completion_logprobs"]) == 5
    assert [[again[row["id"]][column] for column in COLUMNS] for row in rows] == [
        [row[column] for column in COLUMNS] for row in rows
    ]
    assert cbgen("verify", tmp_path / name).exit_code == 0


def test_columns_are_of_one_type(tmp_path: Path) -> None:
    """In Parquet whatever rows ask for, and only where the job may ask for it."""
    run(write_jsonl(tmp_path / "in.jsonl", ROWS), tmp_path / "out.parquet")
    schema = pq.read_schema(tmp_path / "out.parquet")
    for name in ("completion_logprobs", "prompt_token_logprobs"):
        assert schema.field(name).type.value_type == TOKEN_LOGPROB
    plain = write_jsonl(tmp_path / "plain.jsonl", [{"prompt": "a"}, {"prompt": ""}])
    run(plain, tmp_path / "plain.parquet")
    assert not {"completion_logprobs", "prompt_token_logprobs"} & set(pq.read_schema(tmp_path / "plain.parquet").names)


def test_parts_are_published_by_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows of many log-probabilities are a part of their own, long before --part-rows."""
    assert MOST_PART_BYTES == 64 << 20
    monkeypatch.setattr("cbgen.data.writers.MOST_PART_BYTES", 4096)
    monkeypatch.setattr("cbgen.data.rows.LOT_BYTES", 4096)
    published: list[int] = []
    flush = PartWriter.flush

    def counted(self: PartWriter) -> None:
        published.append(len(self._rows))
        flush(self)

    monkeypatch.setattr(PartWriter, "flush", counted)
    rows = [{"id": n, "prompt": f"row {n}", "logprobs": 20} for n in range(30)] + [{"id": 30, "prompt": ""}]
    run(write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl")
    assert sum(published) == 31
    assert max(published) <= 4, "a row here is some 2 kB"
