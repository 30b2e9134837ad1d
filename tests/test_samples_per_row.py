"""Whole jobs whose rows each say how many samples they want."""

import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_harness import (
    TIMEOUT_S,
    TIMING_COLUMNS,
    cbgen,
    read_rows,
    run_tiny,
    start_process,
    wait_for_parts,
    without_timing,
    write_jsonl,
)

# The job's n is for rows that have none; of those that cannot be read only n 0 is one that says none.
NS = [1, 3, None, 0, 2]
WANTED = [1, 3, 2, 1, 2]
JOB = ("--max-tokens", 4, "--temperature", 0.8, "--n", 2)
SLOWLY = ("--max-requests-per-batch", 2, "--part-rows", 2, "--part-interval", 0.1)


def rows_of(count: int, ns: list[int | None] = NS) -> list[dict[str, Any]]:
    return [{"prompt": f"row {number}", "n": ns[number % len(ns)]} for number in range(count)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "in.jsonl", rows_of(20))


def all_rows(out: Path) -> list[dict[str, Any]]:
    """Of a file, or of a folder's files one after another."""
    return [row for path in sorted(out.glob("*.parquet")) or [out] for row in read_rows(path)]


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in TIMING_COLUMNS} for row in rows]


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl", "out"])
def test_each_row_has_its_own_samples(tmp_path: Path, source: Path, name: str) -> None:
    """As many as its n, or the job's; one error row for an n that is none, and no file cuts a row's samples apart."""
    out, summary = tmp_path / name, tmp_path / "summary.json"
    result = cbgen(
        "run", source, "--model", "tiny-random", "--out", out, *JOB, "--rows-per-shard", 5, "--summary", summary
    )
    assert result.exit_code == 3, result.output
    rows = all_rows(out)
    expected = [(f"row {number}", sample) for number in range(20) for sample in range(WANTED[number % 5])]
    assert [(row["prompt"], row["sample_index"]) for row in rows] == expected
    assert {row["prompt"] for row in rows if row["error"]} == {f"row {number}" for number in range(3, 20, 5)}
    assert all(row["error"].startswith("n is 0") for row in rows if row["n"] == 0)
    assert len({row["completion"] for row in rows if row["prompt"] == "row 1"}) > 1, "samples are drawn on their own"
    assert '"rows_total": 36' in summary.read_text() and '"rows_failed": 4' in summary.read_text()
    if name == "out":
        firsts = [read_rows(path)[0]["sample_index"] for path in sorted(out.glob("*.parquet"))]
        assert firsts == [0] * len(firsts) and len(firsts) > 4
    verified = cbgen("verify", out)
    assert verified.exit_code == 0, verified.output
    assert "36 in = 32 ok + 4 failed + 0 skipped + 0 pending" in verified.output
    assert "36: 36 done" in cbgen("status", out).output
    assert (
        "is complete: 32 rows ok, 4 failed"
        in cbgen("run", source, *("--model", "tiny-random"), *JOB, "--out", out).output
    )


def test_n_of_a_column_that_is_not_heeded(tmp_path: Path, source: Path) -> None:
    """With --row-options none the job's n is everybody's, and the column is one like others."""
    rows = run_tiny(source, tmp_path / "out.parquet", *JOB, "--row-options", "none")
    assert [row["n"] for row in rows] == [n for n in NS * 4 for _ in range(2)]
    assert cbgen("verify", tmp_path / "out.parquet").exit_code == 0


def test_rows_that_fail_have_an_error_for_each_sample(tmp_path: Path) -> None:
    """A prompt that is too long for the model is known to have wanted three."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "x" * 5000, "n": 3}, {"prompt": "short", "n": 1}])
    rows = run_tiny(source, tmp_path / "out.parquet", *JOB, code=3)
    assert [(row["sample_index"], row["error"] is None) for row in rows] == [
        (0, False),
        (1, False),
        (2, False),
        (0, True),
    ]


def test_equal_greedy_rows_share_one_request(tmp_path: Path) -> None:
    """Whatever their n: everyone's samples are the one completion."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "same", "n": n} for n in (2, 1, 3)])
    rows = run_tiny(source, tmp_path / "out.parquet", "--max-tokens", 4)
    assert [row["sample_index"] for row in rows] == [0, 1, 0, 0, 1, 2]
    assert len({row["completion"] for row in rows}) == 1


def test_a_job_that_was_stopped_goes_on(tmp_path: Path) -> None:
    """Killed in the middle, it ends with what a run at one stretch gives; meanwhile its total is told as about."""
    source = write_jsonl(tmp_path / "in.jsonl", rows_of(40, [1, 3, 2]))
    job = ("run", source, "--model", "tiny-random", *JOB, "--out", tmp_path / "out.parquet")
    process = start_process(*job, *SLOWLY)
    wait_for_parts(process, tmp_path / "out.parquet.parts", 2)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=TIMEOUT_S)
    assert "about 80: " in cbgen("status", tmp_path / "out.parquet").output
    assert "about" in cbgen("verify", tmp_path / "out.parquet").output
    result = cbgen(*job)
    assert result.exit_code == 0, result.output
    assert "resuming" in result.output
    whole = run_tiny(source, tmp_path / "whole.parquet", *JOB)
    assert untimed(read_rows(tmp_path / "out.parquet")) == untimed(whole)


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl", "out"])
def test_a_finished_output_goes_on_with_other_n(tmp_path: Path, name: str) -> None:
    """Only the samples that are new are generated; those beyond a lower n are left out, also of a row that failed."""
    source, out = tmp_path / "in.jsonl", tmp_path / name
    job = ("run", source, "--model", "tiny-random", "--out", out, *JOB)
    write_jsonl(source, rows_of(20))
    assert cbgen(*job).exit_code == 3
    before = {(row["prompt"], row["sample_index"]): row for row in all_rows(out)}
    write_jsonl(source, rows_of(20, [2, 1, 4, 0, 2]))
    result = cbgen(*job)
    assert result.exit_code == 3, result.output
    assert "its 36 results are taken over" in result.output
    assert "8 results are of rows or samples that the input no longer asks for" in result.output
    after = {(row["prompt"], row["sample_index"]): row for row in all_rows(out)}
    new = {(f"row {number}", sample) for number in range(0, 20, 5) for sample in (1,)}
    new |= {(f"row {number}", sample) for number in range(2, 20, 5) for sample in (2, 3)}
    assert after.keys() - before.keys() == new
    assert len(after) == 40
    for place in after.keys() & before.keys():
        assert after[place]["completion"] == before[place]["completion"]
        assert after[place]["finish_time"] == before[place]["finish_time"], "it was kept, not generated again"
    assert cbgen("verify", out).exit_code == 0


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl", "out"])
def test_shards_make_one_run(tmp_path: Path, source: Path, name: str) -> None:
    """Merged, they are what the job without shards would have written, to the names of a folder's files."""
    whole, merged = tmp_path / "whole" / name, tmp_path / "merged" / name
    whole.parent.mkdir()
    merged.parent.mkdir()
    options = (*JOB, "--rows-per-shard", 6)
    outs = [tmp_path / f"{number}-{name}" for number in range(3)]
    for number, out in enumerate(outs):
        shard = ("--shard-index", number, "--shard-count", 3)
        assert cbgen("run", source, "--model", "tiny-random", "--out", out, *options, *shard).exit_code in (0, 3)
        assert cbgen("verify", out).exit_code == 0
    result = cbgen("merge", *outs, "--out", merged, "--rows-per-shard", 6)
    assert result.exit_code == 3, result.output
    assert cbgen("run", source, "--model", "tiny-random", "--out", whole, *options).exit_code == 3
    assert untimed(all_rows(merged)) == untimed(all_rows(whole))
    if name == "out":
        assert [path.name for path in sorted(merged.iterdir())] == [path.name for path in sorted(whole.iterdir())]
    if name == "out.parquet":
        assert without_timing(pq.read_table(merged)).equals(without_timing(pq.read_table(whole)))
    assert cbgen("verify", merged).exit_code == 0
    again = cbgen("run", source, "--model", "tiny-random", "--out", merged, *options)
    assert "is complete" in again.output, again.output


def without(table: pa.Table, place: int) -> pa.Table:
    return pa.concat_tables([table.slice(0, place), table.slice(place + 1)])


def moved(table: pa.Table, place: int) -> pa.Table:
    """The last sample of a row says that it is the first of another one."""
    column = table.schema.get_field_index("sample_index")
    samples = table["sample_index"].to_pylist()
    samples[place] = 0
    return table.set_column(column, table.schema.field(column), pa.array(samples, pa.int32()))


@pytest.mark.parametrize(
    ("damaged", "words"),
    [
        (lambda table: without(table, 2), "PROBLEM: rows: row 3: sample_index is not the next one"),
        (lambda table: without(table, 3), "PROBLEM: counts: rows_total is 35, 36 is recorded"),
        (lambda table: without(table, 0), "PROBLEM: order: row 1: column 'n' is not what the input has"),
        (lambda table: moved(table, 3), "PROBLEM: order: row 4: column 'n' is not what the input has"),
    ],
    ids=["removed within", "removed at the end", "a row removed", "taken for another row"],
)
def test_verify_finds_what_is_wrong_with_samples(tmp_path: Path, source: Path, damaged: Any, words: str) -> None:
    """A sample or a row that is gone, and one that is said to be of another row."""
    out = tmp_path / "out.parquet"
    run_tiny(source, out, *JOB, code=3)
    pq.write_table(damaged(pq.read_table(out)), out, write_page_checksum=True)
    result = cbgen("verify", out)
    assert result.exit_code == 1, result.output
    assert words in result.output


def test_shards_with_samples_that_are_gone_are_not_merged(tmp_path: Path, source: Path) -> None:
    """The last one of a row, and all of a row."""
    outs = [tmp_path / f"{number}.parquet" for number in range(2)]
    for number, out in enumerate(outs):
        run_tiny(source, out, *JOB, "--shard-index", number, "--shard-count", 2, code=3)
    table = pq.read_table(outs[0])
    ends = [place for place in range(1, len(table)) if table["sample_index"][place].as_py() == 0]
    last = next(end - 1 for end in ends if table["sample_index"][end - 1].as_py() > 0)
    single = next(place for place, end in zip([0, *ends], ends, strict=False) if end - place == 1)
    for place, words in ((last, "the shards hold 35 rows and record 36"), (single, "is not there once")):
        pq.write_table(without(table, place), outs[0], write_page_checksum=True)
        result = cbgen("merge", *outs, "--out", tmp_path / "merged.parquet")
        assert result.exit_code == 1, result.output
        assert words in result.output
        assert not (tmp_path / "merged.parquet").exists()


def test_validate_counts_the_tokens_of_all_samples(tmp_path: Path, source: Path) -> None:
    """Before anything is generated: the rows' own n, and none for those that fail."""
    result = cbgen("validate", source, "--model", "tiny-random", "--out", tmp_path / "out.parquet", *JOB)
    assert f"up to {32 * 4} tokens for these rows" in result.output, result.output
