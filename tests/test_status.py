"""`cbgen status`: what it tells of a job while it runs, when it was stopped, and after; it disturbs nothing."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from job_harness import SAMPLES, TIMEOUT_S, cbgen, read_rows, run_tiny, start_process, wait_for_parts, write_jsonl

JOB = ("--model", "tiny-random", "--max-tokens", 24, "--temperature", 0.8)
SLOWLY = ("--max-requests-per-batch", 4, "--part-rows", 5, "--part-interval", 0.2)


def questions(tmp_path: Path, copies: int = 3) -> Path:
    rows = read_rows(SAMPLES / "questions.jsonl")
    return write_jsonl(tmp_path / "in.jsonl", [row | {"copy": n} for n in range(copies) for row in rows])


def status_of(out: Path, *options: object) -> dict[str, Any]:
    result = cbgen("status", out, "--json", *options)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def killed_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job over 120 rows that was killed with a part of them published; not to be changed."""
    folder = tmp_path_factory.mktemp("killed")
    process = start_process("run", questions(folder), "--out", folder / "out.parquet", *JOB, *SLOWLY)
    wait_for_parts(process, folder / "out.parquet.parts", 4)
    process.kill()
    process.communicate()
    return folder


@pytest.fixture
def stopped_job(killed_job: Path, tmp_path: Path) -> Path:
    """The output of a copy of it."""
    return shutil.copytree(killed_job, tmp_path / "job") / "out.parquet"


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_job_at_work_until_it_is_complete(tmp_path: Path) -> None:
    """Asked again and again, also while the parts are deleted, it never fails, never counts back, and harms nothing."""
    source, out = questions(tmp_path), tmp_path / "out.parquet"
    process = start_process("run", source, "--out", out, *JOB, *SLOWLY)
    wait_for_parts(process, tmp_path / "out.parquet.parts", 2)
    seen = [status_of(out)]
    assert seen[0]["state"] == "running"
    assert seen[0]["model"] == "tiny-random"
    assert seen[0]["done"] >= 10
    assert seen[0]["rows_per_second"] > 0
    assert seen[0]["eta_s"] == pytest.approx(seen[0]["pending"] / seen[0]["rows_per_second"])
    while process.poll() is None:
        seen.append(status_of(out, "--preview", 2))
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    seen.append(status_of(out))
    counts = [status["done"] for status in seen if status["rows_total"] is not None]
    assert counts == sorted(counts)
    assert {status["state"] for status in seen} <= {"running", "complete", "stopped"}
    last = seen[-1]
    figures = ("state", "rows_total", "done", "failed", "pending", "eta_s")
    assert [last[name] for name in figures] == ["complete", 120, 120, 0, 0, None]
    assert pq.read_metadata(out).num_rows == 120


def test_a_stopped_job_counts_as_the_run_that_continues_it(stopped_job: Path) -> None:
    """Done is what the next run finds done; nothing in the folder changes when it is looked at."""
    parts = stopped_job.with_name("out.parquet.parts")
    before = files_of(parts)
    status = status_of(stopped_job)
    assert files_of(parts) == before
    assert status["state"] == "stopped"
    assert status["done"] == sum(pq.read_metadata(path).num_rows for path in parts.glob("part-*"))
    assert status["done"] + status["pending"] == status["rows_total"] == 120
    assert status["eta_s"] is None
    text = cbgen("status", stopped_job).output
    assert f"120: {status['done']} done, 0 of them failed; {status['pending']} pending" in text
    assert "rows/s" in text
    again = cbgen("run", stopped_job.with_name("in.jsonl"), "--out", stopped_job, *JOB)
    assert f"{status['done']} of 120 results are there already" in again.output


def test_a_torn_part_is_counted_and_left_alone(stopped_job: Path) -> None:
    """Its rows are pending again; the file keeps its name and content, since a run may be at work."""
    parts = stopped_job.with_name("out.parquet.parts")
    done = status_of(stopped_job)["done"]
    torn = sorted(parts.glob("part-*"))[0]
    num_rows = pq.read_metadata(torn).num_rows
    torn.write_bytes(torn.read_bytes()[:100])
    before = files_of(parts)
    status = status_of(stopped_job, "--preview", 200)
    assert (status["unreadable_parts"], status["done"]) == (1, done - num_rows)
    assert len(status["preview"]) == done - num_rows
    assert files_of(parts) == before


def test_preview_shows_the_newest_rows(stopped_job: Path) -> None:
    """Of an unfinished job by finish time from the newest parts, with keys; of a finished one by its rows."""
    tables = [pq.read_table(path) for path in stopped_job.with_name("out.parquet.parts").glob("part-*")]
    rows = [row for table in tables for row in table.to_pylist()]
    newest = max(rows, key=lambda row: row["finish_time"])
    shown = status_of(stopped_job, "--preview", 3)["preview"]
    assert len(shown) == 3
    same = ("completion", "finish_reason", "prompt_tokens", "completion_tokens", "error")
    assert [shown[0][name] for name in same] == [newest[name] for name in same]
    assert shown[0]["key"] == newest["key"].hex()[:8]
    run_tiny(stopped_job.with_name("in.jsonl"), stopped_job, *JOB[2:])
    times = pq.read_table(stopped_job)["finish_time"].to_pylist()
    (last,) = status_of(stopped_job, "--preview", 1)["preview"]
    assert times[int(last["key"].removeprefix("row "))] == max(times)


def test_preview_of_long_texts_and_failed_rows(tmp_path: Path) -> None:
    """A completion is cut at 200 characters; a row that failed shows why."""
    out = tmp_path / "out.jsonl"
    run_tiny(SAMPLES / "mixed.jsonl", out, "--max-tokens", 300, "--ignore-eos", code=3)
    shown = status_of(out, "--preview", 20)["preview"]
    texts = [row["completion"] for row in shown if row["error"] is None]
    assert len(shown) == 20
    assert len(texts) == 14
    assert max(map(len, texts)) == 200
    assert sum(row["error"] is not None for row in shown) == 6
    assert "error: " in cbgen("status", out, "--preview", 20).output


def test_a_retry_in_progress(tmp_path: Path) -> None:
    """Rows that are to be tried again are pending, and the status names the retry."""
    source, out = questions(tmp_path), tmp_path / "out.parquet"
    run_tiny(source, out, *JOB[2:])
    retry = ("--retry", "truncated", "--max-tokens", 48)
    process = start_process("run", source, "--out", out, *JOB[:2], *JOB[4:], *retry, *SLOWLY)
    wait_for_parts(process, tmp_path / "out.parquet.parts", 3)
    process.kill()
    process.communicate()
    status = status_of(out)
    assert status["state"] == "stopped"
    assert status["retry"] == {"generation": 1, "kinds": ["truncated"]}
    assert 0 < status["pending"] < 120
    assert "truncated rows" in cbgen("status", out).output


@pytest.mark.parametrize("name", ["none.parquet", "none.jsonl", "none/"])
def test_what_never_was_is_a_usage_error(tmp_path: Path, name: str) -> None:
    """An output that no job has begun is told in one line."""
    result = cbgen("status", f"{tmp_path}/{name}")
    assert result.exit_code == 2
    assert "there is no such output" in result.output
    (tmp_path / "other.parquet").write_bytes(b"PAR1 of somebody else")
    assert cbgen("status", tmp_path / "other.parquet").exit_code == 2


def test_a_shard_says_about_how_many_rows_it_has(tmp_path: Path) -> None:
    """How rows are dealt is known at the end: until then the total is an estimate, and afterwards it is not."""
    source, out = questions(tmp_path), tmp_path / "out.parquet"
    shard = ("--shard-index", 1, "--shard-count", 2)
    process = start_process("run", source, "--out", out, *JOB, *SLOWLY, *shard)
    wait_for_parts(process, tmp_path / "out.parquet.parts", 2)
    process.kill()
    process.communicate()
    status = status_of(out)
    assert (status["rows_total"], status["is_estimate"]) == (60, True)
    assert "about 60" in cbgen("status", out).output
    rows = run_tiny(source, out, *JOB[2:], *shard)
    status = status_of(out)
    assert (status["rows_total"], status["is_estimate"]) == (len(rows), False)
