"""Where a job is stopped late, goes on another day, or on a folder that was half deleted: nothing is lost or redone."""

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date, datetime, tzinfo
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import Result
from job_harness import TIMEOUT_S, TIMING_COLUMNS, cbgen, read_rows, run_tiny, start_process, write_jsonl

from cbgen import finished
from cbgen.data import files, outputs
from cbgen.data.jsonl import JsonlFile
from cbgen.data.outputs import open_output
from cbgen.duplicates import Recipients
from cbgen.engine.sampling_params import SamplingParams
from cbgen.errors import OutputError
from cbgen.models import tiny_random
from cbgen.ordering import WaitingRequest, pack_ids
from cbgen.row_window import RowWindow, WindowLimits

JOB = ("--model", "tiny-random", "--max-tokens", 4)
ROWS = [{"prompt": f"question {number}"} for number in range(40)]
NEW = {"prompt": "one more"}
DATED_TEMPLATE = "{{ strftime_now('%d %B %Y') }}: {{ messages[0]['content'] }}"
FIRST_DAY, NEXT_DAY = date(2001, 9, 3), date(2001, 9, 4)
# `cbgen`, with something done to it first; the file that is meant is named ahead of the command.
PREPARED = """
import os, signal, sys, time
from pathlib import Path
from cbgen.cli import main
from cbgen.data import files
name = sys.argv[1]
{preparation}
sys.argv = ["cbgen", *sys.argv[5:]]
main()
"""
# A part has fewer than ten rows, however slow the disk is.
KILLED_BEFORE_DELETING = """
import cbgen.collector
cbgen.collector.WRITE_ROWS = 5
unlink = Path.unlink
def killed(path, missing_ok=False):
    if path.name == name:
        os.kill(os.getpid(), signal.SIGKILL)
    unlink(path, missing_ok)
Path.unlink = killed
"""
# Who is told to stop has the time to, before the file is on the disk.
TERMINATED_WHILE_PUBLISHING = """
fsync = files._fsync
def terminated(path):
    if path.name.startswith("." + name):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    fsync(path)
files._fsync = terminated
"""


def run_prepared(preparation: str, name: str, *arguments: object) -> tuple[int, str]:
    """Exit code and errors of `cbgen ARGUMENTS`."""
    process = start_process(*arguments, under=(sys.executable, "-c", PREPARED.format(preparation=preparation), name))
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert "Traceback" not in errors, errors
    return process.returncode, errors


def summary_of(tmp_path: Path, *job: object) -> dict[str, Any]:
    """Of the run of a job that ends well."""
    result = cbgen(*job, "--summary", tmp_path / "s.json")
    assert result.exit_code == 0, result.output
    return json.loads((tmp_path / "s.json").read_text())


def without_timing(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: row[name] for name in row if name not in TIMING_COLUMNS} for row in rows]


def num_published(out: Path) -> int:
    return sum(pq.read_metadata(part).num_rows for part in out.with_name(out.name + ".parts").glob("part-*.parquet"))


@pytest.fixture
def calendar(monkeypatch: pytest.MonkeyPatch) -> Callable[[date], None]:
    """Sets the day on which jobs begin, of a model whose chat template prints it."""
    monkeypatch.setattr(tiny_random, "CHAT_TEMPLATE", DATED_TEMPLATE)

    def set_day(day: date) -> None:
        class Clock(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> "Clock":
                return cls(day.year, day.month, day.day, 23, tzinfo=tz)

        monkeypatch.setattr(finished, "datetime", Clock)

    return set_day


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_finished_job_that_goes_on_another_day_keeps_its_date(
    tmp_path: Path, calendar: Callable[[date], None], suffix: str
) -> None:
    """Finished rows are recognised, and new ones get the first day's date; only a job begun anew gets the new one."""
    source, out = write_jsonl(tmp_path / "in.jsonl", ROWS), tmp_path / f"out{suffix}"
    job = ("run", source, "--out", out, *JOB, "--chat")
    calendar(FIRST_DAY)
    assert summary_of(tmp_path, *job)["rows_resumed"] == 0
    before = read_rows(out)
    calendar(NEXT_DAY)
    write_jsonl(source, [*ROWS, NEW])
    assert summary_of(tmp_path, *job)["rows_resumed"] == len(ROWS)
    *same, new = read_rows(out)
    assert same == before
    assert new["prompt_tokens"] == len("03 September 2001: ") + len(NEW["prompt"])
    footer = open_output(out, False, 1).read_footer()
    assert footer is not None and footer["date"] == FIRST_DAY.isoformat()
    as_if = run_tiny(source, tmp_path / f"as-if{suffix}", *JOB[2:], "--chat", "--date", FIRST_DAY)
    assert without_timing([*same, new]) == without_timing(as_if)
    assert "04 September 2001: question 0" in cbgen(*job, "--resume", "never").output


def test_shards_of_a_template_that_prints_the_date(tmp_path: Path, calendar: Callable[[date], None]) -> None:
    """Without --date they are refused; with it, begun on two days, they are merged to what one run of that date is."""
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    outs = [tmp_path / f"{index}.parquet" for index in range(2)]
    for index, day in enumerate((FIRST_DAY, NEXT_DAY)):
        calendar(day)
        job = ("run", source, "--out", outs[index], *JOB, "--chat", "--shard-index", index, "--shard-count", 2)
        refused = cbgen(*job)
        assert refused.exit_code == 2
        (line,) = refused.output.strip().splitlines()
        assert "--date" in line and "YYYY-MM-DD" in line
        assert list(tmp_path.glob("*.parquet*")) == outs[:index]
        assert cbgen(*job, "--date", FIRST_DAY).exit_code == 0
    assert cbgen("merge", *outs, "--out", tmp_path / "merged.parquet").exit_code == 0
    merged = read_rows(tmp_path / "merged.parquet")
    for name, day, same in (("same", FIRST_DAY, True), ("other", NEXT_DAY, False)):
        whole = run_tiny(source, tmp_path / f"{name}.parquet", *JOB[2:], "--chat", "--date", day)
        assert (without_timing(merged) == without_timing(whole)) == same
    refused = cbgen("run", source, "--out", tmp_path / "same.parquet", *JOB, "--chat", "--date", NEXT_DAY)
    assert refused.exit_code == 4
    assert "date is '2001-09-04' now and was '2001-09-03'" in " ".join(refused.output.split())


@pytest.mark.parametrize("text", ["3.9.2001", "2001-09-31", "yesterday", ""])
def test_a_date_that_is_none(tmp_path: Path, text: str) -> None:
    """One line that names the option, before anything is done."""
    source = write_jsonl(tmp_path / "in.jsonl", ROWS[:1])
    refused = cbgen("run", source, "--out", tmp_path / "out.jsonl", *JOB, "--date", text)
    assert refused.exit_code == 2
    (line,) = refused.output.strip().splitlines()
    assert line.startswith("cbgen: --date: ")
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("options", [(), pytest.param(("--retry", "failed"), marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["part-00000002.parquet", pytest.param("manifest.json", marks=pytest.mark.long)])
def test_killed_while_parts_are_deleted(tmp_path: Path, name: str, options: tuple[object, ...]) -> None:
    """The output is whole by then: with a row appended, or failures tried again, no finished row is generated again."""
    source, out = write_jsonl(tmp_path / "in.jsonl", ROWS), tmp_path / "out.parquet"
    job = ("run", source, "--out", out, *JOB, "--part-rows", 5, "--max-requests-per-batch", 4)
    code, errors = run_prepared(KILLED_BEFORE_DELETING, name, *job)
    assert code == -signal.SIGKILL, errors
    before = read_rows(out)
    assert (tmp_path / "out.parquet.parts" / name).exists()
    if not options:
        write_jsonl(source, [*ROWS, NEW])
    summary = summary_of(tmp_path, *job, *options)
    assert summary["rows_resumed"] == len(ROWS)
    assert summary["output_tokens"] <= 4 * (not options)
    assert read_rows(out)[: len(ROWS)] == before
    assert not (tmp_path / "out.parquet.parts").exists()


class TimeIsUp:
    """Lets the limit of a run that has an hour come at the moment under test."""

    times_called = 0

    def come(self) -> None:
        assert callable(signal.getsignal(signal.SIGALRM)), "the run listens to its limit"
        self.times_called += 1
        if self.times_called == 1:
            signal.setitimer(signal.ITIMER_REAL, 0.2)


def assert_stopped(result: Result, out: Path, published: int) -> None:
    """Exit 75 in one line, with what was published before, and no output."""
    assert result.exit_code == 75, result.output
    assert "--time-limit is near; what finished is published, and the same" in " ".join(result.output.split())
    assert num_published(out) == published
    assert not out.exists()
    assert not list(out.parent.glob(".*"))


def test_a_time_limit_ends_an_assembly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it would take; the next run generates nothing and assembles."""
    source, out = write_jsonl(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    job, limit, output_records = ("run", source, "--out", out, *JOB), TimeIsUp(), outputs.output_records

    def slow_records(*arguments: Any) -> Iterator[Any]:
        for records in output_records(*arguments):
            limit.come()
            time.sleep(1)
            yield records

    with monkeypatch.context() as patch:
        patch.setattr(outputs, "output_records", slow_records)
        result = cbgen(*job, "--time-limit", "1h")
    assert_stopped(result, out, len(ROWS))
    assert 0 < limit.times_called < len(ROWS)
    assert summary_of(tmp_path, *job)["output_tokens"] == 0
    assert without_timing(read_rows(out)) == without_timing(run_tiny(source, tmp_path / "whole.jsonl", *JOB[2:]))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_time_limit_ends_a_wait_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """A disk that is full when the output is written is not waited for beyond it, whatever --publish-timeout is."""
    source, out = write_jsonl(tmp_path / "in.jsonl", ROWS), tmp_path / f"out{suffix}"
    job, limit, fsync = ("run", source, "--out", out, *JOB), TimeIsUp(), files._fsync

    def full(path: Path) -> None:
        if path.name.startswith(f".{out.name}.tmp-"):
            limit.come()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "_fsync", full)
        result = cbgen(*job, "--time-limit", "1h", "--publish-timeout", 100)
    assert "paused: " in result.output
    assert_stopped(result, out, len(ROWS))
    assert summary_of(tmp_path, *job)["output_tokens"] == 0
    assert len(read_rows(out)) == len(ROWS)


def test_a_time_limit_ends_reading_where_nothing_is_left_to_generate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that has all results and only reads the input again ends before its end."""
    source, out = write_jsonl(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    job, limit, records = ("run", source, "--out", out, *JOB), TimeIsUp(), JsonlFile.records

    def stop(*_: object) -> None:
        raise OutputError("stop here")

    def slow_records(file: JsonlFile, columns: list[str] | None) -> Iterator[tuple[dict[str, Any], str | None]]:
        for record in records(file, columns):
            limit.come()
            time.sleep(0.5)
            yield record

    with monkeypatch.context() as patch:
        patch.setattr(outputs.JsonlOutput, "write", stop)
        assert cbgen(*job).exit_code == 1
        patch.setattr(JsonlFile, "records", slow_records)
        result = cbgen(*job, "--time-limit", "1h")
    assert_stopped(result, out, len(ROWS))
    assert 0 < limit.times_called < len(ROWS)
    assert summary_of(tmp_path, *job)["rows_resumed"] == len(ROWS)


def test_a_signal_while_the_last_rows_are_published(tmp_path: Path) -> None:
    """It loses none of them: exit 75, and the next run has nothing left to generate."""
    source, out = write_jsonl(tmp_path / "in.jsonl", ROWS), tmp_path / "out.parquet"
    job = ("run", source, "--out", out, *JOB)
    code, errors = run_prepared(TERMINATED_WHILE_PUBLISHING, "part-00000000.parquet", *job)
    assert code == 75 and "cbgen: SIGTERM; what finished is published" in errors.splitlines()[-1], errors
    assert num_published(out) == len(ROWS)
    summary = summary_of(tmp_path, *job)
    assert (summary["rows_resumed"], summary["output_tokens"]) == (len(ROWS), 0)
    assert len(read_rows(out)) == len(ROWS)


def test_a_window_is_full_by_the_samples_of_its_rows() -> None:
    """Each counts as a request; with the lot that was handed over they no longer do."""
    window = RowWindow(WindowLimits(max_requests=8, patience_s=1e6))

    def row(number: int, num_samples: int) -> WaitingRequest:
        members = [(SamplingParams(4, seed=seed), Recipients([])) for seed in range(num_samples)]
        return WaitingRequest(number, pack_ids([1]), members)

    first, second, third = row(1, 4), row(2, 3), row(3, 1)
    window.add([first, second])
    assert window.take(9, wait=False) == []
    window.add([third])
    assert window.take(9, wait=False) == [first, second, third]
    window.add([row(4, 7)])
    assert window.wait_for_room()
    assert window.take(9, wait=False) == []
