"""What may happen to an output when it is made, and after: kills, damage, refused calls, another input."""

import errno
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from itertools import count, product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_harness import TIMEOUT_S, TIMING_COLUMNS, cbgen, read_rows, run_tiny, start_process, write_jsonl

from cbgen.data import rows as output_rows
from cbgen.data.readers import Input

JOB = ("--model", "tiny-random", "--max-tokens", 4)
ROWS = [{"prompt": f"question {number:02d}", "tag": f"a{number:02d}"} for number in range(12)]
MORE = [*ROWS, {"prompt": "one more", "tag": "a12"}]
SHARD_0 = ("--shard-index", 0, "--shard-count", 2)
# `cbgen`, killed just before a file gets the name given ahead of the command.
KILLED_BEFORE = """
import os, signal, sys
from cbgen.cli import main
name, rename = sys.argv[1], os.replace
def replace(source, target):
    if os.path.basename(target) == name:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, target)
os.replace = replace
sys.argv = ["cbgen", *sys.argv[5:]]
main()
"""


def kill_before(name: str, *arguments: object) -> None:
    """Runs `cbgen ARGUMENTS` up to the moment before a file of this name is there."""
    process = start_process(*arguments, under=(sys.executable, "-c", KILLED_BEFORE, name))
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == -signal.SIGKILL, errors


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def content_of(path: Path) -> dict[str, bytes]:
    """Of a file, or of all files of a folder."""
    return {file.name: file.read_bytes() for file in ([path] if path.is_file() else path.iterdir())}


def resumed(tmp_path: Path, source: Path, out: Path | str, *options: object) -> int:
    """Runs the job to its end; how many results it had already."""
    summary = tmp_path / "s.json"
    result = cbgen("run", source, "--out", out, *JOB, *options, "--summary", summary)
    assert result.exit_code == 0, result.output
    return json.loads(summary.read_text())["rows_resumed"]


def without_timing(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: row[name] for name in row if name not in TIMING_COLUMNS} for row in rows]


def refuse_call(patch: pytest.MonkeyPatch, refused: int | Path) -> list[str]:
    """Lets the so many-th deletion or renaming fail, or those from or to a path. Returns what is tried, as it comes."""
    calls: list[str] = []

    def refusing(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            if refused in (len(calls), *arguments):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(arguments[0]))
            return real(*arguments, **options)

        return call

    for owner, name in ((os, "replace"), (Path, "unlink"), (Path, "rename")):
        patch.setattr(owner, name, refusing(name, getattr(owner, name)))
    return calls


def test_killed_between_the_record_and_the_reordered_lines(tmp_path: Path) -> None:
    """A JSONL output of the same size, recorded and not yet renamed, is not taken for the new one: that comes after."""
    source, out = write_jsonl(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    before, size_bytes = run_tiny(source, out, *JOB[2:]), out.stat().st_size
    write_jsonl(source, ROWS[::-1])
    kill_before(out.name, "run", source, "--out", out, *JOB)
    assert read_rows(out) == before
    assert (run_tiny(source, out, *JOB[2:]), out.stat().st_size) == (before[::-1], size_bytes)
    assert names_in(tmp_path) == ["in.jsonl", "out.jsonl", "out.jsonl.job.json"]
    assert cbgen("verify", out).exit_code == 0


def batch_line(number: int) -> dict[str, Any]:
    """Every fourth one fails."""
    body = {"prompt": f"question {number}" if number % 4 else "", "max_tokens": 4}
    return {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body}


@pytest.mark.parametrize("name", ["out.jsonl", "out.errors.jsonl"])
def test_killed_before_either_file_of_a_batch_is_renamed(tmp_path: Path, name: str) -> None:
    """With the record of a reordered batch there, and one or none of its files: then both are there, in order."""
    lines, job = [batch_line(number) for number in range(12)], ("--format", "openai-batch")
    source, out, errors = (tmp_path / file for file in ("in.jsonl", "out.jsonl", "out.errors.jsonl"))
    before = run_tiny(write_jsonl(source, lines), out, *job, code=3), read_rows(errors)
    assert [len(rows) for rows in before] == [9, 3]
    write_jsonl(source, lines[::-1])
    kill_before(name, "run", source, "--out", out, *JOB[:2], *job)
    assert read_rows(errors) == before[1]
    assert (read_rows(out) == before[0]) == (name == "out.jsonl")
    assert (run_tiny(source, out, *job, code=3), read_rows(errors)) == (before[0][::-1], before[1][::-1])
    assert names_in(tmp_path) == ["in.jsonl", "out.errors.jsonl", "out.jsonl", "out.jsonl.job.json"]
    assert cbgen("verify", out).exit_code == 0


def run_shards(source: Path, suffix: str) -> list[Path]:
    outs = [source.parent / f"{index}{suffix}" for index in range(2)]
    for index, out in enumerate(outs):
        run_tiny(source, out, *JOB[2:], "--shard-index", index, "--shard-count", 2)
    return outs


def test_merging_into_a_folder_of_somebody_else(tmp_path: Path) -> None:
    """Files named like shards that are no part of this merge are refused, and nothing is deleted or written."""
    shards = run_shards(write_jsonl(tmp_path / "in.jsonl", ROWS), ".parquet")
    assert cbgen("merge", *shards, "--out", tmp_path / "mine.parquet").exit_code == 0
    run_tiny(tmp_path / "in.jsonl", tmp_path / "other.parquet", *JOB[2:], "--seed", 1)
    pq.write_table(pa.table({"mine": [1, 2, 3]}), tmp_path / "table.parquet")
    (tmp_path / "text.parquet").write_text("precious")
    cases = {"text": ["text"], "table": ["table"], "other": ["other"], "shard": ["0"], "beside": ["mine", "table"]}
    for case, files in cases.items():
        folder = tmp_path / case
        folder.mkdir()
        for number, file in enumerate(files):
            shutil.copy(tmp_path / f"{file}.parquet", folder / f"part-{2 * number:05d}-of-00003.parquet")
        before = content_of(folder)
        refused = cbgen("merge", *shards, "--out", folder)
        assert (refused.exit_code, refused.output.count("\n")) == (4, 1), refused.output
        assert "is not a merge of these shards" in refused.output
        assert content_of(folder) == before, case


@pytest.mark.parametrize("merged_before", [False, True])
@pytest.mark.parametrize(("name", "missing"), [("m.jsonl", "m.jsonl"), ("m", "part-00001-of-00003.parquet")])
def test_a_merge_that_was_killed_half_way(tmp_path: Path, name: str, missing: str, merged_before: bool) -> None:
    """A record without its lines, some files of a folder, perhaps among those of an earlier merge: it is made anew."""
    source, merged = write_jsonl(tmp_path / "in.jsonl", ROWS), tmp_path / name
    suffix = merged.suffix or ".parquet"
    merge = ("merge", *run_shards(source, suffix), "--out", merged, "--rows-per-shard", 5)
    if merged_before:
        assert cbgen(*merge).exit_code == 0
    run_shards(write_jsonl(source, MORE), suffix)
    kill_before(missing, *merge)
    left = names_in(merged) if merged.is_dir() else names_in(tmp_path)
    assert (missing in left, "_job.json" in left) == (merged_before, False)
    assert cbgen(*merge).exit_code == 0
    whole = run_tiny(source, tmp_path / f"whole{suffix}", *JOB[2:])
    assert without_timing(read_rows(merged)) == without_timing(whole)
    assert cbgen("verify", merged).exit_code == 0


# In the last one, the last file of the folder is full.
WRITTEN = [*product(("out.parquet", "out.jsonl", "out"), ((), SHARD_0)), ("out", ("--rows-per-shard", 4))]


@pytest.mark.parametrize(("name", "options"), WRITTEN)
def test_an_input_that_is_rewritten_during_assembly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: tuple[object, ...]
) -> None:
    """Other values, in a file of the same length: exit 1 in one line, no output, no result lost."""
    source, out = write_jsonl(tmp_path / "in.jsonl", ROWS), tmp_path / name
    rewritten, check = source.read_bytes().replace(b'"tag": "a', b'"tag": "b'), Input.check_unchanged

    def check_and_rewrite(files: Input) -> None:
        check(files)
        source.write_bytes(rewritten)

    with monkeypatch.context() as patch:
        patch.setattr(Input, "check_unchanged", check_and_rewrite)
        refused = cbgen("run", source, "--out", out, *JOB, *options)
    assert refused.exit_code == 1, refused.output
    assert "in.jsonl was changed while the job ran" in refused.output.splitlines()[-1]
    assert not (out / "_job.json" if out.is_dir() else out).exists()
    num_rows = resumed(tmp_path, source, out, *options)
    rows = read_rows(out)
    assert num_rows == len(rows) > 0
    assert {row["tag"][0] for row in rows} == {"b"}


def change_a_bit(path: Path) -> None:
    """Of a number in JSONL, which is another number then; at the end of the last page in Parquet."""
    damaged = bytearray(path.read_bytes())
    behind_pages = len(damaged) - 8 - int.from_bytes(damaged[-8:-4], "little")
    damaged[damaged.index(b'"completion_tokens": 4') + 21 if path.suffix == ".jsonl" else behind_pages - 1] ^= 1
    path.write_bytes(damaged)


@pytest.mark.parametrize("name, code", [("out.jsonl", 4), ("out/part-00000-of-00001.parquet", 4), ("out.parquet", 1)])
def test_no_job_goes_on_from_a_damaged_output(tmp_path: Path, name: str, code: int) -> None:
    """More rows are refused in one line as long as the finished ones are not what was written; nothing is lost."""
    source, file, out = write_jsonl(tmp_path / "in.jsonl", ROWS), tmp_path / name, tmp_path / Path(name).parts[0]
    assert resumed(tmp_path, source, out) == 0
    whole, rows = file.read_bytes(), read_rows(out)
    change_a_bit(file)
    damaged = content_of(out)
    write_jsonl(source, MORE)
    refused = cbgen("run", source, "--out", out, *JOB)
    assert refused.exit_code == code, refused.output
    told = [line for line in refused.output.splitlines() if line.startswith("cbgen: ")]
    assert told == refused.output.splitlines()[-1:] and name in told[0]
    assert content_of(out) == damaged
    file.write_bytes(whole)
    assert resumed(tmp_path, source, out) == len(ROWS)
    assert read_rows(out)[: len(rows)] == rows


def test_a_part_with_a_changed_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is, in pages or footer: the part is as it was, or its rows run again, and the output is right."""
    source, out, kept = write_jsonl(tmp_path / "in.jsonl", ROWS), tmp_path / "out.parquet", tmp_path / "kept"
    parts, summary = tmp_path / "out.parquet.parts", tmp_path / "s.json"
    job = ("run", source, "--out", out, *JOB, "--part-rows", 6, "--max-requests-per-batch", 3, "--summary", summary)
    monkeypatch.setattr(output_rows, "LOT_ROWS", 6)  # no part has all rows, however slow the disk is
    with monkeypatch.context() as patch:
        refuse_call(patch, out)
        assert cbgen(*job, "--publish-timeout", 0).exit_code == 1
    shutil.copytree(parts, kept)
    first = sorted(kept.glob("part-*"))[0]
    others = len(ROWS) - pq.read_metadata(first).num_rows
    expected = without_timing(run_tiny(source, tmp_path / "whole.parquet", *JOB[2:]))
    whole, rng, ends = first.read_bytes(), random.Random(0), set()
    for place in (0, len(whole) - 6, len(whole) - 1, *rng.sample(range(len(whole)), 40)):
        out.unlink(missing_ok=True)
        shutil.copytree(kept, parts, dirs_exist_ok=True)
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        (parts / first.name).write_bytes(damaged)
        result = cbgen(*job)
        if result.exit_code:
            assert "set aside; run the same command again" in result.output.splitlines()[-1]
            assert cbgen(*job).exit_code == 0
        ends.add((result.exit_code, json.loads(summary.read_text())["rows_resumed"]))
        assert without_timing(read_rows(out)) == expected, place
        assert not parts.exists()
    # Whole, set aside at once, or set aside when its texts were read.
    assert ends == {(0, len(ROWS)), (0, others), (1, others)}


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet", "out"])
def test_a_deletion_or_renaming_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whichever it is: one line and exit 1, or a warning, with the output whole or for what only tells of the run; then
    the same command finishes."""
    whole = run_tiny(write_jsonl(tmp_path / "in.jsonl", ROWS[:4]), tmp_path / "whole.parquet", *JOB[2:])
    warned = failures = untold = 0
    for number in count(1):
        folder = tmp_path / str(number)
        folder.mkdir()
        source, out = write_jsonl(folder / "in.jsonl", ROWS[:4]), folder / name
        job = ("run", source, "--out", out, *JOB, "--publish-timeout", 0)
        with monkeypatch.context() as patch:
            calls = refuse_call(patch, number)
            result = cbgen(*job)
        if len(calls) < number:
            break
        told = [line for line in result.output.splitlines() if line.startswith(("cbgen: ", "warning: "))]
        if result.exit_code:
            assert result.exit_code == 1 and len(told) == 1 and "Permission denied" in told[0], result.output
            failures += 1
        elif told:
            assert len(told) == 1 and "Permission denied" in told[0], result.output
            if "how this run goes is not recorded for `cbgen report`" in told[0]:
                untold += 1
            else:
                assert "cannot be deleted" in told[0]
                warned += 1
            assert cbgen("verify", out).exit_code == 0
        assert cbgen(*job).exit_code == 0
        assert without_timing(read_rows(out)) == without_timing(whole)
        assert not [path for path in names_in(folder) if path.endswith(".parts") or ".tmp-" in path], calls
    assert failures >= 3 and (warned, untold) == (3, 2)


def test_a_leftover_of_a_batch_that_cannot_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line and exit 1; with leave to delete, the same command finishes."""
    source, leftover = write_jsonl(tmp_path / "in.jsonl", [batch_line(1)]), tmp_path / "e" / ".errors.jsonl.tmp-1"
    leftover.parent.mkdir()
    leftover.touch()
    options = ("--format", "openai-batch", "--error-file", leftover.with_name("errors.jsonl"))
    job = ("run", source, "--out", tmp_path / "out.jsonl", *JOB[:2], *options)
    with monkeypatch.context() as patch:
        refuse_call(patch, leftover)
        refused = cbgen(*job)
    assert refused.exit_code == 1
    assert "cannot be deleted: Permission denied" in refused.output.splitlines()[-1]
    assert cbgen(*job).exit_code == 0 and not leftover.exists()
