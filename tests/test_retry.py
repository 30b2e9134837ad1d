"""Rows that are generated again because they failed or were cut short: these rows, and no others."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_harness import SAMPLES, cbgen, read_rows, run_tiny, without_timing, write_jsonl

from cbgen.data.manifest import Manifest, PartsFolder, Retry
from cbgen.data.outputs import ParquetOutput

QUESTIONS = SAMPLES / "questions.jsonl"
# A cache of 64 tokens: some questions fit, some do not; by arrival they take turns.
SMALL = ("--num-blocks", 2, "--page-size", 32, "--order", "arrival")


def retry(source: Path, out: Path, kinds: str, *options: object, code: int = 0) -> tuple[list[Any], dict[str, Any]]:
    """The output rows of a run with --retry, and its summary."""
    summary = out.with_suffix(".summary")
    rows = run_tiny(source, out, "--retry", kinds, "--summary", summary, *options, code=code)
    return rows, json.loads(summary.read_text(encoding="utf-8"))


def results(out: Path) -> pa.Table:
    return without_timing(pq.read_table(out))


@pytest.fixture
def half_failed(tmp_path: Path) -> tuple[Path, list[Any]]:
    """A finished output in which some rows failed for want of cache, and its rows."""
    out = tmp_path / "out.parquet"
    rows = run_tiny(QUESTIONS, out, "--max-tokens", 12, *SMALL, code=3)
    assert {row["error"] is None for row in rows} == {True, False}
    return out, rows


def test_failed_rows_of_a_finished_output_are_generated_again(
    tmp_path: Path, half_failed: tuple[Path, list[Any]]
) -> None:
    """With more cache they are as they would have been; the others keep their results, timing included."""
    out, before = half_failed
    rows, summary = retry(QUESTIONS, out, "failed", "--max-tokens", 12)
    num_ok = sum(row["error"] is None for row in before)
    assert summary["rows_resumed"] == num_ok
    assert [new for new, old in zip(rows, before, strict=True) if old["error"] is None] == [
        row for row in before if row["error"] is None
    ]
    run_tiny(QUESTIONS, tmp_path / "whole.parquet", "--max-tokens", 12)
    assert results(out).equals(results(tmp_path / "whole.parquet"))
    assert not (tmp_path / "out.parquet.parts").exists()


def test_failed_rows_may_fail_again(half_failed: tuple[Path, list[Any]]) -> None:
    """Once in each retry; the exit code tells, and the rows are as before."""
    out, before = half_failed
    for _ in range(2):
        rows, summary = retry(QUESTIONS, out, "failed", "--max-tokens", 12, *SMALL, code=3)
        assert summary["rows_failed"] == sum(row["error"] is not None for row in before)
        assert [row["error"] for row in rows] == [row["error"] for row in before]


def test_without_retry_nothing_is_generated_again(half_failed: tuple[Path, list[Any]]) -> None:
    """A finished job stays as it is, and says how its failed rows could be tried."""
    out, before = half_failed
    again = cbgen("run", QUESTIONS, "--model", "tiny-random", "--out", out, "--max-tokens", 12)
    assert again.exit_code == 3
    assert "--retry failed generates those again" in again.output.replace("\n", " ")
    assert read_rows(out) == before


def test_a_plain_resume_does_not_try_failed_rows(tmp_path: Path) -> None:
    """A job that --max-errors ended goes on with the rows that it had not come to; --retry tries the failed ones."""
    out, job = tmp_path / "out.parquet", ("--max-tokens", 12)
    small = (*SMALL, "--max-requests-per-batch", 1)
    ended = cbgen("run", QUESTIONS, "--model", "tiny-random", "--out", out, *job, *small, "--max-errors", 1)
    assert ended.exit_code == 5, ended.output
    assert "--max-errors is 1" in ended.output
    parts = [row for path in sorted((tmp_path / "out.parquet.parts").glob("part-*")) for row in read_rows(path)]
    num_failed = sum(row["error"] is not None for row in parts)
    assert num_failed >= 2
    assert len(parts) < 40
    rows = run_tiny(QUESTIONS, out, *job, code=3)
    assert sum(row["error"] is not None for row in rows) == num_failed
    rows, _ = retry(QUESTIONS, out, "failed", *job)
    run_tiny(QUESTIONS, tmp_path / "whole.parquet", *job)
    assert results(out).equals(results(tmp_path / "whole.parquet"))


def test_rows_that_were_cut_short_are_generated_again(tmp_path: Path) -> None:
    """With more tokens; what had come to its end stays, and so does what failed."""
    rows = [{"prompt": f"question {number}"} for number in range(6)] + [{"prompt": ""}]
    source, out = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.parquet"
    ids = "--output-token-ids"
    before = run_tiny(source, out, "--max-tokens", 4, ids, code=3)
    assert [row["finish_reason"] for row in before] == ["length"] * 6 + ["error"]
    after, summary = retry(source, out, "truncated", "--max-tokens", 9, ids, code=3)
    assert summary["rows_resumed"] == 1
    for old, new in zip(before[:6], after[:6], strict=True):
        assert new["completion_ids"][:4] == old["completion_ids"]
        assert new["completion_tokens"] == 9 or new["finish_reason"] == "stop"
    assert after[6]["error"] == before[6]["error"]
    again = cbgen("run", source, "--model", "tiny-random", "--out", out, "--max-tokens", 9, ids)
    assert again.exit_code == 3
    assert read_rows(out) == after


def test_both_kinds_at_once(tmp_path: Path) -> None:
    """Nothing but what came to its end by itself is left alone."""
    rows = [{"prompt": "a"}, {"prompt": "x" * 40}, {"prompt": "stop here", "max_tokens": 600}]
    source, out = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    small = ("--num-blocks", 2, "--page-size", 16)
    before = run_tiny(source, out, "--max-tokens", 4, *small, code=3)
    after, summary = retry(source, out, "truncated,failed", "--max-tokens", 8)
    expected = run_tiny(source, tmp_path / "whole.jsonl", "--max-tokens", 8)
    assert summary["rows_resumed"] == sum(row["finish_reason"] == "stop" for row in before)
    assert [row["completion"] for row in after] == [row["completion"] for row in expected]


def test_other_max_tokens_need_a_retry(tmp_path: Path) -> None:
    """Without one they are refused, with one nothing else may differ."""
    source, out = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "out.parquet"
    run_tiny(source, out, "--max-tokens", 2)
    content = out.read_bytes()
    job = ("run", source, "--model", "tiny-random", "--out", out, "--max-tokens", 4)
    refused = cbgen(*job)
    assert (refused.exit_code, "max_tokens is 4 now and was 2" in refused.output.replace("\n", " ")) == (4, True)
    refused = cbgen(*job, "--retry", "truncated", "--seed", 1)
    assert (refused.exit_code, "seed is 1 now and was 0" in refused.output.replace("\n", " ")) == (4, True)
    assert out.read_bytes() == content


def test_a_retry_of_samples(tmp_path: Path) -> None:
    """The samples of a row are drawn as before, only longer."""
    source, out = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}]), tmp_path / "out.parquet"
    options = ("--n", 3, "--temperature", 1, "--output-token-ids")
    before = run_tiny(source, out, "--max-tokens", 3, *options)
    after, _ = retry(source, out, "truncated", "--max-tokens", 6, *options)
    assert [row["completion_ids"][:3] for row in after] == [row["completion_ids"] for row in before]
    assert [row["sample_index"] for row in after] == [0, 1, 2] * 2


def test_a_retry_of_a_job_without_results(tmp_path: Path) -> None:
    """It is the job's first run."""
    rows, summary = retry(QUESTIONS, tmp_path / "out.parquet", "failed", "--max-tokens", 2)
    assert (len(rows), summary["rows_resumed"]) == (40, 0)


def test_another_job_does_not_take_over_a_job_that_was_stopped_before_its_first_part(tmp_path: Path) -> None:
    """A finished output that was to go on with more rows is still that job's, when nothing is published yet."""
    source, out = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}]), tmp_path / "out.parquet"
    run_tiny(source, out, "--max-tokens", 3)
    content, footer = out.read_bytes(), ParquetOutput(out).read_footer()
    assert footer is not None
    # What is left of a run that is killed before the results that are there are parts again.
    folder = PartsFolder(out)
    folder.open(Manifest(footer["fingerprint"], rows_total=3, retry=Retry(1), base="pending"), "if-possible")
    folder.close()
    other = cbgen("run", source, "--model", "tiny-random", "--out", out, "--max-tokens", 6)
    assert other.exit_code == 4, other.output
    assert out.read_bytes() == content


def test_never_starts_anew_where_shards_were_being_written(tmp_path: Path) -> None:
    """A job that was killed between the shards of its folder can be given up like any other."""
    source, out = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}]), tmp_path / "out"
    options = ("--max-tokens", 3, "--rows-per-shard", 1)
    run_tiny(source, out, *options)
    footer = json.loads((out / "_job.json").read_text(encoding="utf-8"))
    (out / "_job.json").unlink()
    folder = PartsFolder(out)
    folder.open(Manifest(footer["fingerprint"], rows_total=2), "if-possible")
    folder.close()
    run_tiny(source, out, *options, "--resume", "never")
    assert (out / "_job.json").exists()


@pytest.mark.parametrize("out", ["out.parquet", "out.jsonl", "out/"])
def test_failed_rows_are_known_again_in_every_format(tmp_path: Path, out: str) -> None:
    """A number that a table widens, an object that it pads or keeps as JSON: what failed is not tried again unasked."""
    rows = [
        {"prompt": "a", "temperature": -1, "logit_bias": {"5": 1000}, "choice": [1, 2]},
        {"prompt": "b", "temperature": 0.5, "logit_bias": {"6": 1}, "choice": ["x"]},
        {"prompt": "c", "temperature": 0.5, "logit_bias": {"5": 1000}},
        {"prompt": "d", "temperature": 1, "choice": [1, 2]},
    ]
    job = ("run", tmp_path / "in.jsonl", "--model", "tiny-random", "--max-tokens", 3, "--out", f"{tmp_path}/{out}")
    write_jsonl(tmp_path / "in.jsonl", rows)
    assert cbgen(*job).exit_code == 3
    write_jsonl(tmp_path / "in.jsonl", [*rows, {"prompt": "e", "temperature": 0}])
    again = cbgen(*job)
    assert again.exit_code == 3
    assert "resuming  4 of 5" in again.output, again.output
