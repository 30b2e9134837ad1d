"""What happens to the process, the disk and the clock while a whole job runs, where other tools lost work."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from job_harness import (
    REPOSITORY,
    SAMPLES,
    TIMEOUT_S,
    cbgen,
    read_rows,
    run_tiny,
    start_process,
    without_timing,
    write_jsonl,
)

from cbgen import report
from cbgen.data.outputs import ParquetOutput
from cbgen.data.rows import OPTIONAL_COLUMNS, RESULT_SCHEMA
from cbgen.models import tiny_random

# Each thing that happens, and the tests that show what becomes of the job; those of other files by their path.
CASES = {
    "stopped or killed at any moment": [
        "tests/test_signals.py::test_a_signal_drains",
        "tests/test_signals.py::test_a_second_signal_stops_at_once",
        "tests/test_resume.py::test_killed_between_the_final_file_and_the_end",
        "tests/test_kill.py::test_killed_many_times",
    ],
    "disk full, quota, read-only folder": [
        "test_a_folder_that_is_read_only",
        "test_a_folder_that_becomes_read_only",
        "test_a_full_disk_and_a_second_run",
        "tests/test_resume.py::test_a_full_disk",
        "tests/test_signals.py::test_a_read_only_folder_is_waited_for",
    ],
    "every row fails": ["test_every_row_fails"],
    "progress under a non-terminal": ["test_progress_as_lines", "test_output_of_a_process_is_short"],
    "10 million rows": ["tests/test_scale.py::test_memory_per_row"],
    "an output column's name in the input": ["test_a_column_of_an_output_name", "test_an_output_as_input_again"],
    "midnight passes": ["test_the_date_is_the_job_s_own"],
    "two runs on one output": ["test_two_runs_at_once", "tests/test_resume.py::test_two_runs_on_one_output"],
    "the clock is set back": ["test_a_clock_that_goes_back"],
}

JOB = ("--model", "tiny-random", "--max-tokens", 16, "--temperature", 0.8)
SLOWLY = ("--max-requests-per-batch", 2, "--part-rows", 2, "--part-interval", 0.1)


def test_every_case_has_its_tests() -> None:
    """Each of the nine kinds names tests that are there, and every test here belongs to one."""
    assert len(CASES) == 9
    assert all(CASES.values())
    named = {name for names in CASES.values() for name in names}
    elsewhere = {name for name in named if "::" in name}
    here = {name for name in globals() if name.startswith("test_")} - {"test_every_case_has_its_tests"}
    assert named - elsewhere == here
    for path, function in (name.split("::") for name in elsewhere):
        assert f"def {function}(" in (REPOSITORY / path).read_text(encoding="utf-8"), f"{path}::{function}"


def questions(tmp_path: Path, copies: int = 1) -> Path:
    rows = read_rows(SAMPLES / "questions.jsonl")
    return write_jsonl(tmp_path / "in.jsonl", [row | {"copy": n} for n in range(copies) for row in rows])


def assert_equals_uninterrupted(tmp_path: Path, source: Path, out: Path) -> None:
    """All but the timing equals a run to which nothing happened."""
    run_tiny(source, tmp_path / "whole.parquet", *JOB[2:])
    assert without_timing(pq.read_table(out)).equals(without_timing(pq.read_table(tmp_path / "whole.parquet")))


def mounted(tmp_path: Path, script: str, *job: object) -> subprocess.CompletedProcess[str]:
    """Runs a shell script as one that may mount, on folders nobody else sees; "$@" in it is `cbgen JOB`."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("no user namespaces here, so nothing can be mounted")
    (tmp_path / "script.sh").write_text(f"set -e; cd {tmp_path}\n{script}")
    command: Sequence[object] = ("unshare", "-rm", "sh", tmp_path / "script.sh", sys.executable, "-m", "cbgen", *job)
    return subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False, timeout=TIMEOUT_S, cwd=REPOSITORY
    )


@pytest.mark.parametrize("what", ["out", "parts", "summary"])
def test_a_folder_that_is_read_only(tmp_path: Path, what: str) -> None:
    """A folder that may not be written, of output, parts or summary, is one line before work starts."""
    source, out = questions(tmp_path), tmp_path / "disk" / "out.parquet"
    (tmp_path / "disk").mkdir()
    locked = {"out": tmp_path / "disk", "parts": tmp_path / "disk/out.parquet.parts", "summary": tmp_path / "figures"}
    locked[what].mkdir(exist_ok=True)
    job = ("run", source, "--out", out, *JOB, "--publish-timeout", 0, "--summary", tmp_path / "figures/s.json")
    (tmp_path / "figures").mkdir(exist_ok=True)
    refused = mounted(
        tmp_path, f'mount --bind {locked[what]} {locked[what]}\nmount -o remount,bind,ro {locked[what]}\n"$@"\n', *job
    )
    assert refused.returncode == 1, refused.stderr
    (line,) = refused.stderr.strip().splitlines()
    assert "cannot be written: Read-only file system" in line
    assert str(locked[what]) in line
    assert not out.exists()
    assert cbgen(*job).exit_code == 0
    assert_equals_uninterrupted(tmp_path, source, out)


def test_a_folder_that_becomes_read_only(tmp_path: Path) -> None:
    """One that turns read-only under a job that runs is waited for, and told of once; then the job goes on."""
    source, out = questions(tmp_path, copies=2), tmp_path / "disk" / "out.parquet"
    (tmp_path / "disk").mkdir()
    # Another folder over that of the parts, as a mount of a file that is open cannot be made read-only.
    script = (
        "mkdir locked\nmount --bind locked locked\nmount -o remount,bind,ro locked\n"
        '"$@" 2>errors &\nchild=$!\n'
        "while ! ls disk/out.parquet.parts/part-* >done 2>&1; do sleep 0.05; kill -0 $child; done\n"
        "mount --bind locked disk/out.parquet.parts\n"
        "while ! grep -q paused errors; do sleep 0.1; kill -0 $child; done\n"
        "umount disk/out.parquet.parts\nwait $child\n"
    )
    finished = mounted(tmp_path, script, "run", source, "--out", out, *JOB, *SLOWLY)
    told = (tmp_path / "errors").read_text()
    assert finished.returncode == 0, told + finished.stderr
    assert "Read-only file system" in told
    assert (told.count("paused: "), told.count("going on")) == (1, 1)
    assert_equals_uninterrupted(tmp_path, source, out)


@pytest.mark.parametrize(
    "size_kib", [pytest.param(8, marks=pytest.mark.long), 64], ids=["no part fits", "some parts fit"]
)
def test_a_full_disk_and_a_second_run(tmp_path: Path, size_kib: int) -> None:
    """Without patience a full disk ends the job in one line, with exit code 1; with room made, it goes on."""
    source, out = questions(tmp_path, copies=2), tmp_path / "disk" / "out.parquet"
    (tmp_path / "disk").mkdir()
    script = (
        f"mount -t tmpfs -o size={size_kib}k tmpfs disk\n"
        '"$@" --publish-timeout 0 2>first || echo $? >code\nls -A disk disk/out.parquet.parts >left\n'
        'mount -o remount,size=64m disk\n"$@" 2>second\ncp disk/out.parquet .\n'
    )
    finished = mounted(tmp_path, script, "run", source, "--out", out, *JOB, *SLOWLY)
    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "code").read_text().strip() == "1"
    first, second = ((tmp_path / name).read_text() for name in ("first", "second"))
    assert "Traceback" not in first
    last = first.splitlines()[-1]
    assert "No space left on device" in last and "run the same command again" in last
    assert ".tmp-" not in (tmp_path / "left").read_text()
    assert ("results are there already" in second) == (size_kib == 64)
    assert_equals_uninterrupted(tmp_path, source, tmp_path / "out.parquet")


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize(
    "bad",
    [{"prompt": ""}, {"prompt": "a", "temperature": -1}, {"prompt": "x" * 3000}, None],
    ids=["prompt", "option", "length", "line"],
)
def test_every_row_fails(tmp_path: Path, bad: dict[str, Any] | None, suffix: str) -> None:
    """Whatever they fail of, before the engine or in it: exit code 5, and each row with its reason."""
    source, out = tmp_path / "in.jsonl", tmp_path / f"out{suffix}"
    lines = ['{"prompt": "x'] * 7 if bad is None else [json.dumps(bad)] * 8
    source.write_text("\n".join(['{"prompt": null}', *lines]))
    result = cbgen("run", source, "--out", out, *JOB)
    assert result.exit_code == 5, result.output
    rows = read_rows(out)
    assert len(rows) == len(lines) + 1
    assert all(row["error"] and row["finish_reason"] == "error" and row["completion"] is None for row in rows)
    assert f"{len(rows)} of {len(rows)} rows failed" in result.output


def test_progress_as_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no terminal shows it, progress is a line at every interval that stands by itself, without control codes."""
    monkeypatch.setattr(report, "PLAIN_INTERVAL_S", 0.2)
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"row {number}"} for number in range(4)])
    options = ("--max-tokens", 1000, "--ignore-eos", "--max-requests-per-batch", 2)
    started_s = time.monotonic()
    result = cbgen("run", source, "--model", "tiny-random", "--out", tmp_path / "out.parquet", *options)
    running_s = time.monotonic() - started_s
    lines = re.findall(r"^\d/4 rows, \d+ tokens/s, batch \d+, cache \d+%, ETA (?:unknown|\d+ s)$", result.output, re.M)
    assert 1 <= len(lines) <= running_s / 0.2
    assert not re.search(r"[\r\x1b\x08]", result.output)


def test_output_of_a_process_is_short(tmp_path: Path) -> None:
    """A job of 2,000 rows into a pipe prints some twenty lines, however long it takes, and no control codes."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"row {number}"} for number in range(2000)])
    process = start_process("run", source, "--out", tmp_path / "out.parquet", *JOB, "--part-rows", 100)
    started_s = time.monotonic()
    output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    most = 25 + (time.monotonic() - started_s) / report.PLAIN_INTERVAL_S
    assert len((output + errors).splitlines()) <= most
    assert len(output + errors) < 100 * most
    assert not re.search(r"[\r\x1b\x08]", output + errors)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    "name",
    # Those that every output has, and those that are there because a row asks for them by this very name.
    [name for name in RESULT_SCHEMA.names if name not in ("sample_index", *OPTIONAL_COLUMNS)],
)
def test_a_column_of_an_output_name(tmp_path: Path, name: str, kind: str) -> None:
    """An input column that bears the name of an output column is refused by that name; a prefix keeps them apart."""
    rows = [{"prompt": "a", name: 7}, {"prompt": "b", name: 8}]
    source, out = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / f"out.{kind}"
    job = ("run", source, "--model", "tiny-random", "--max-tokens", 1, "--out", out)
    refused = cbgen(*job)
    assert refused.exit_code == 2
    (line,) = refused.output.strip().splitlines()
    assert name in line and "--output-prefix" in line
    assert not list(tmp_path.glob("out*"))
    assert cbgen(*job, "--output-prefix", "new_").exit_code == 0
    kept = read_rows(out)
    assert [{"prompt": row["prompt"], name: row[name]} for row in kept] == rows
    assert all(f"new_{column}" in kept[0] for column in ("completion", "error", "finish_time"))


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_an_output_as_input_again(tmp_path: Path, kind: str) -> None:
    """cbgen's own output fed back is refused, or generated anew beside the old results, which stay as they were."""
    first, second = tmp_path / f"first.{kind}", tmp_path / f"second.{kind}"
    before = run_tiny(SAMPLES / "questions.jsonl", first, "--max-tokens", 2, "--limit", 4)
    assert cbgen("run", first, "--model", "tiny-random", "--out", second).exit_code == 2
    assert not second.exists()
    after = run_tiny(first, second, "--max-tokens", 4, "--output-prefix", "again_")
    assert [{name: row[name] for name in before[0]} for row in after] == before
    assert all(row["again_completion"].startswith(row["completion"]) for row in after)


DATED_TEMPLATE = "{{ strftime_now('%d %B %Y') }}: {{ messages[0]['content'] }}"


def test_the_date_is_the_job_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that prints the date prints that of the manifest, on whatever day the job goes on: rows keep keys."""
    monkeypatch.setattr(tiny_random, "CHAT_TEMPLATE", DATED_TEMPLATE)
    rows: list[dict[str, Any]] = [{"prompt": f"early {number}", "max_tokens": 1} for number in range(3)]
    rows += [{"prompt": "x" * 2048}]  # too long for the context: the failure at which the job stops
    rows += [{"prompt": f"late {number}", "max_tokens": 300} for number in range(30)]
    source, out = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.parquet"
    job = ("run", source, "--model", "tiny-random", "--chat", "--out", out, "--ignore-eos")
    slowly = (*job, "--order", "arrival", "--max-requests-per-batch", 2, "--max-errors", 0)
    assert cbgen(*slowly).exit_code == 5
    parts = tmp_path / "out.parquet.parts"
    manifest = json.loads((parts / "manifest.json").read_text())
    (parts / "manifest.json").write_text(json.dumps(manifest | {"date": "2001-09-03"}))
    for part in parts.glob("part-*"):  # of the real day: the job begins anew on the other one
        part.unlink()
    that_day = cbgen(*slowly)
    assert that_day.exit_code == 5
    assert "  | 03 September 2001: early 0" in that_day.output
    done = sum(pq.read_metadata(part).num_rows for part in parts.glob("part-*.parquet"))
    assert 2 < done < len(rows)
    today = cbgen(*job)
    assert today.exit_code == 3, today.output
    assert f"{done} of {len(rows)} results are there already" in today.output
    assert "03 September 2001: late" in today.output
    dated = [row["prompt_tokens"] - len(row["prompt"]) for row in read_rows(out)]
    assert set(dated) == {len("03 September 2001: ")}
    footer = ParquetOutput(out).read_footer()
    assert footer is not None and footer["date"] == "2001-09-03"


@pytest.mark.long
def test_two_runs_at_once(tmp_path: Path) -> None:
    """Three runs started together: one does the job, the others are refused or find it done, and it comes out whole."""
    source, out = questions(tmp_path, copies=3), tmp_path / "out.parquet"
    processes = [start_process("run", source, "--out", out, *JOB, *SLOWLY) for _ in range(3)]
    told = [process.communicate(timeout=TIMEOUT_S)[1] for process in processes]
    codes = [process.returncode for process in processes]
    assert 0 in codes and set(codes) <= {0, 4}, told
    for code, errors in zip(codes, told, strict=True):
        assert "Traceback" not in errors
        assert code == 0 or "another run is writing this output" in errors
    assert_equals_uninterrupted(tmp_path, source, out)
    assert not (tmp_path / "out.parquet.parts").exists()


@pytest.mark.parametrize("step_s", [-3600.0, 86_400.0], ids=["back", "forth"])
def test_a_clock_that_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    """A wall clock that is an hour earlier, or a day later, at every look makes no duration negative, nor wrong."""
    source, out = questions(tmp_path), tmp_path / "out.parquet"
    started_s = time.time()
    looks: list[float] = []

    def stepping_clock() -> float:
        looks.append(started_s + step_s * len(looks))
        return looks[-1]

    begun_s = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", stepping_clock)
        rows = run_tiny(source, out, *JOB[2:], "--summary", tmp_path / "s.json", "--part-rows", 3)
    running_s = time.monotonic() - begun_s
    assert len(looks) > 40, "the clock was looked at"
    for row in rows:
        durations = [row[name] for name in ("queue_s", "prefill_s", "decode_s", "ttft_s", "tpot_s")]
        assert all(0 <= duration <= running_s for duration in durations if duration is not None)
        assert 0 <= (row["finish_time"] - row["arrival_time"]).total_seconds() <= running_s
    summary = json.loads((tmp_path / "s.json").read_text())
    assert 0 < summary["elapsed_s"] <= running_s and 0 < summary["load_s"] <= running_s
    assert min(value for value in summary.values() if isinstance(value, int | float)) >= 0
    assert_equals_uninterrupted(tmp_path, source, out)
