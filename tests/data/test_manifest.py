"""The folder of parts: whose it is, what in it is done, and that only one run at a time has it."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any

import filelock
import pyarrow.parquet as pq
import pytest

from cbgen.data.manifest import (
    MANIFEST_NAME,
    Manifest,
    PartsFolder,
    Retry,
    differences,
    fingerprint_conflict,
    part_metadata,
)
from cbgen.data.rows import KEY_BYTES, OutputRow, part_table
from cbgen.errors import ResumeRefusedError

JOB = {"model": "smollm2", "temperature": 0.5, "system_prompt": "« réponds »", "chat_template_kwargs": {"a": [1, None]}}
HOLD = """
import json, pathlib, sys
from cbgen.data.manifest import Manifest, PartsFolder
folder = PartsFolder(pathlib.Path(sys.argv[1]))
folder.open(Manifest(json.loads(sys.argv[2])), "if-possible")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.parquet"


@pytest.fixture
def folder(output: Path) -> Iterator[PartsFolder]:
    """A folder that JOB has begun and holds."""
    folder = PartsFolder(output)
    folder.open(Manifest(JOB), "if-possible")
    yield folder
    folder.close()


def write_part(folder: PartsFolder, number: int) -> Path:
    """A part with one row, whose completion is the part's number."""
    row = OutputRow(bytes(KEY_BYTES), 0, 0, str(number), "stop", None, 1, 1, [1], 0.0, 0.0, 0.0, 0.0, None, None, None)
    path = folder.part_path(number)
    table = part_table([row])
    pq.write_table(table.replace_schema_metadata(part_metadata(0, table, 0.0)), path)
    return path


def completions(folder: PartsFolder) -> list[str]:
    return [text for _, table in folder.parts() for text in table["completion"].to_pylist()]


def rewrite_manifest(folder: PartsFolder, **changes: Any) -> None:
    path = folder.path / MANIFEST_NAME
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def reopen(
    output: Path,
    fingerprint: dict[str, Any],
    resume: str = "if-possible",
    retry: tuple[str, ...] = (),
    settings: dict[str, Any] | None = None,
) -> Manifest:
    """Opens the folder as a later run does, and lets it go."""
    folder = PartsFolder(output)
    try:
        return folder.open(Manifest(fingerprint, settings or {}), resume, retry)
    finally:
        folder.close()


def test_a_first_start_begins_the_job_today(output: Path) -> None:
    """The folder is made, is begun, and bears today's date in UTC."""
    folder = PartsFolder(output)
    assert not folder.is_begun
    before = datetime.now(timezone.utc).date()
    started = folder.open(Manifest(JOB), "if-possible").date
    assert before <= started <= datetime.now(timezone.utc).date()
    assert folder.is_begun
    assert completions(folder) == []
    folder.close()


@pytest.mark.parametrize("resume", ["if-possible", "always"])
def test_a_matching_job_continues_with_its_parts_and_its_first_date(
    folder: PartsFolder, output: Path, resume: str
) -> None:
    """Parts stay, and the date is that of the first start however often it is resumed."""
    write_part(folder, 0)
    rewrite_manifest(folder, date="2001-02-03")
    folder.close()
    for _ in range(2):
        assert reopen(output, dict(reversed(JOB.items())), resume).date == date(2001, 2, 3)
    assert completions(folder) == ["0"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"temperature": 0.7}, ["temperature", "0.7", "0.5"]),
        ({"model": "tiny-random"}, ["model", "'tiny-random'", "'smollm2'"]),
        ({"system_prompt": None}, ["system_prompt", "None", "réponds"]),
        ({"top_k": 5}, ["top_k", "5", "None"]),
        ({"chat_template_kwargs": {"a": [1]}}, ["chat_template_kwargs", "[1]", "[1, None]"]),
    ],
)
@pytest.mark.parametrize("resume", ["if-possible", "always"])
def test_another_job_is_refused(
    folder: PartsFolder, output: Path, change: dict[str, Any], named: list[str], resume: str
) -> None:
    """The refusal names the option and both values on one line, and nothing in the folder changes."""
    write_part(folder, 0)
    folder.close()
    with pytest.raises(ResumeRefusedError) as caught:
        reopen(output, JOB | change, resume)
    assert all(part in str(caught.value) for part in [*named, folder.path.name])
    assert "\n" not in str(caught.value)
    assert differences(JOB | change, JOB)[0] in str(caught.value)
    assert completions(folder) == ["0"]


def test_an_option_of_an_earlier_job_that_is_gone_is_a_conflict() -> None:
    """An option that only one of the two jobs has is named; equal fingerprints have no conflict."""
    assert fingerprint_conflict(Manifest({}), Manifest({"n": 2}), retrying=False) == "n is None now and was 2"
    assert fingerprint_conflict(Manifest(JOB), Manifest(json.loads(json.dumps(JOB))), retrying=False) is None


def test_everything_that_differs_is_named_at_once(folder: PartsFolder, output: Path) -> None:
    """Every option that changes results, and apart from them those that do not, each with both values."""
    rewrite_manifest(folder, settings={"order": "auto", "page_size": 8, "num_blocks": None})
    write_part(folder, 0)
    folder.close()
    other = JOB | {"temperature": 0.7, "model": "tiny-random"}
    with pytest.raises(ResumeRefusedError) as caught:
        reopen(output, other, settings={"order": "prefix", "page_size": 8, "num_blocks": 64})
    conflict, harmless = str(caught.value).split("also, without effect on results: ")
    assert "model is 'tiny-random' now and was 'smollm2'; temperature is 0.7 now and was 0.5" in conflict
    assert "order is 'prefix' now and was 'auto'" in harmless
    assert "num_blocks is 64 now and was None" in harmless
    assert "page_size" not in str(caught.value)


def test_what_does_not_change_results_is_free_and_recorded_anew(folder: PartsFolder, output: Path) -> None:
    """A job goes on with other settings and more rows, and its manifest tells the newest ones."""
    write_part(folder, 0)
    folder.close()
    opened = reopen(output, JOB, settings={"order": "prefix"})
    assert (opened.settings, PartsFolder(output).read_manifest()) == ({"order": "prefix"}, opened)


def test_a_manifest_is_read_back_as_it_was_written(folder: PartsFolder) -> None:
    """Every field, through JSON."""
    written = Manifest(JOB, {"order": "auto"}, 12, date(2001, 2, 3), Retry(3, ("failed", "truncated")), "pending")
    folder.write_manifest(written)
    assert folder.read_manifest() == written


def test_a_job_that_published_nothing_locks_nothing(folder: PartsFolder, output: Path) -> None:
    """With no part there is nothing that another job's results could be mixed with."""
    folder.close()
    assert reopen(output, JOB | {"temperature": 0.7}).fingerprint["temperature"] == 0.7
    assert reopen(output, JOB | {"temperature": 0.7}, "always").fingerprint["temperature"] == 0.7


def test_a_job_that_begins_has_nothing_to_try_again(output: Path) -> None:
    """--retry with no results there is the job's first run."""
    assert reopen(output, JOB, retry=("failed",)).retry == Retry()


def test_a_retry_goes_on_until_another_one_is_asked_for(folder: PartsFolder, output: Path) -> None:
    """Without --retry and with the same kinds it is continued; other kinds begin a new generation."""
    write_part(folder, 0)
    folder.close()
    assert reopen(output, JOB).retry == Retry(0)
    assert reopen(output, JOB, retry=("failed",)).retry == Retry(1, ("failed",))
    assert reopen(output, JOB).retry == Retry(1, ("failed",))
    assert reopen(output, JOB, "always", retry=("failed",)).retry == Retry(1, ("failed",))
    assert reopen(output, JOB, retry=("failed", "truncated")).retry == Retry(2, ("failed", "truncated"))
    assert reopen(output, JOB, retry=("truncated",)).retry == Retry(3, ("truncated",))


def test_a_retry_may_come_with_other_max_tokens(output: Path) -> None:
    """They begin a new generation and are what the job goes on with; all else is refused as ever."""
    few, many = JOB | {"max_tokens": 5}, JOB | {"max_tokens": 50}
    reopen(output, few)
    write_part(PartsFolder(output), 0)
    with pytest.raises(ResumeRefusedError, match="max_tokens is 50 now and was 5"):
        reopen(output, many)
    assert reopen(output, many, retry=("truncated",)).retry == Retry(1, ("truncated",))
    assert reopen(output, many, retry=("truncated",)).retry == Retry(1, ("truncated",))
    assert reopen(output, many).retry == Retry(1, ("truncated",))
    assert reopen(output, many | {"max_tokens": 60}, retry=("truncated",)).retry == Retry(2, ("truncated",))
    with pytest.raises(ResumeRefusedError, match="max_tokens is 50 now and was 60"):
        reopen(output, many)
    with pytest.raises(ResumeRefusedError, match=r"temperature is 0\.7 now and was 0\.5"):
        reopen(output, many | {"temperature": 0.7}, retry=("truncated",))


def test_always_wants_something_to_resume(output: Path) -> None:
    """With nothing there it is refused, and leaves the way free for a fresh start."""
    with pytest.raises(ResumeRefusedError, match="nothing to resume"):
        reopen(output, JOB, "always")
    assert not PartsFolder(output).is_begun
    reopen(output, JOB, "if-possible")


@pytest.mark.parametrize(
    "manifest", [json.dumps({"version": 1, "fingerprint": {}, "date": "2001-02-03"}), None, "torn {"]
)
def test_never_discards_what_is_there(folder: PartsFolder, output: Path, manifest: str | None) -> None:
    """Parts and manifest of any job, or of none, make room for this one with today's date."""
    write_part(folder, 3)
    (folder.path / MANIFEST_NAME).unlink()
    if manifest is not None:
        (folder.path / MANIFEST_NAME).write_text(manifest)
    folder.close()
    assert reopen(output, JOB, "never").date > date(2001, 2, 3)
    assert completions(folder) == []
    assert folder.next_part_number() == 0
    assert reopen(output, JOB, "always")


def test_parts_without_a_manifest_are_refused(folder: PartsFolder, output: Path) -> None:
    """Whose results they are is not known, so they are neither used nor overwritten."""
    write_part(folder, 0)
    (folder.path / MANIFEST_NAME).unlink()
    folder.close()
    with pytest.raises(ResumeRefusedError, match=MANIFEST_NAME):
        reopen(output, JOB, "if-possible")
    assert completions(folder) == ["0"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "torn {",
        "[]",
        "{}",
        '{"version": 3}',
        '{"version": 99, "new": true}',
        '{"version": 1, "fingerprint": {}, "date": "2001-02-03"}',
        '{"version": 3, "fingerprint": {}, "settings": {}, "rows_total": 3, "date": "soon", "base": "imported"}',
    ],
)
def test_a_manifest_that_is_not_ours_is_refused(output: Path, content: str) -> None:
    """A foreign, torn or newer manifest is a one-line refusal that names the file, which stays as it was."""
    manifest = PartsFolder(output).path / MANIFEST_NAME
    manifest.parent.mkdir()
    manifest.write_text(content)
    with pytest.raises(ResumeRefusedError) as caught:
        reopen(output, {}, "if-possible")
    assert str(manifest) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert manifest.read_text() == content


def test_a_second_run_on_one_output_is_refused(folder: PartsFolder, output: Path) -> None:
    """While the folder is held every other opening is refused, also one that would discard; then it is free again."""
    write_part(folder, 0)
    for resume in ("if-possible", "always", "never"):
        with pytest.raises(ResumeRefusedError, match="another run"):
            reopen(output, JOB, resume)
    assert completions(folder) == ["0"]
    folder.close()
    reopen(output, JOB, "always")


def test_whether_a_run_is_at_work_is_told_without_disturbing_it(folder: PartsFolder, output: Path) -> None:
    """While it is held, after it was let go, and where there never was a folder."""
    other = PartsFolder(output)
    assert other.is_locked
    folder.close()
    assert not other.is_locked
    reopen(output, JOB, "always")
    absent = PartsFolder(output.with_name("absent.parquet"))
    assert not absent.is_locked
    assert not absent.path.exists()


def test_a_lock_that_is_held_for_a_moment_is_waited_for(folder: PartsFolder, output: Path) -> None:
    """Somebody who only looks whether a run is at work does not keep one from starting."""
    folder.close()
    held = threading.Event()

    def look() -> None:
        with filelock.FileLock(folder.path / "lock"):
            held.set()
            time.sleep(0.1)

    looking = threading.Thread(target=look)
    looking.start()
    assert held.wait(60)
    assert reopen(output, JOB, "always").fingerprint == JOB
    looking.join()


@pytest.mark.parametrize("end", ["close", "kill"])
def test_a_run_in_another_process_holds_the_folder_until_it_ends(output: Path, end: str) -> None:
    """The second process is refused; when the first ends, by itself or by kill -9, the folder is free."""
    command = [sys.executable, "-c", HOLD, str(output), json.dumps(JOB)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ResumeRefusedError, match="another run"):
            reopen(output, JOB, "if-possible")
        other.stdin.close() if end == "close" else other.kill()
        other.wait()
    reopen(output, JOB, "always")


def test_a_manifest_is_utf8_whatever_the_locale(folder: PartsFolder, output: Path) -> None:
    """A job that is resumed under another locale than it began in is the same job."""
    folder.close()
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", HOLD, str(output), json.dumps(JOB)]
    done = subprocess.run(command, env=env, input="", capture_output=True, text=True, check=False)
    assert done.stdout == "held\n", done.stderr


@pytest.mark.parametrize(
    "spoil",
    [lambda whole: b"", lambda whole: whole[:-20], lambda whole: whole[20:], lambda whole: b"not Parquet at all"],
    ids=["zero", "no footer", "no start", "foreign"],
)
def test_an_unreadable_part_is_set_aside(folder: PartsFolder, spoil: Any) -> None:
    """Its rows count as not done, the other parts are read in order, and the file is kept under another name."""
    paths = [write_part(folder, number) for number in (2, 0, 1)]
    spoiled = spoil(paths[2].read_bytes())
    paths[2].write_bytes(spoiled)
    assert completions(folder) == ["0", "2"]
    assert not paths[2].exists()
    assert paths[2].with_name(paths[2].name + ".unreadable").read_bytes() == spoiled
    assert completions(folder) == ["0", "2"]


def test_a_damaged_page_is_found_by_its_checksum(folder: PartsFolder) -> None:
    """One changed bit makes a part unreadable, however well it could be parsed, and its rows run again."""
    row = OutputRow(bytes(KEY_BYTES), 0, 0, "A" * 64, "stop", None, 1, 1, [1], *[None] * 7)
    table = part_table([row])
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    table = table.replace_schema_metadata(part_metadata(0, table, 0.0))
    pq.write_table(table, folder.part_path(0), write_page_checksum=True, **plain)
    assert completions(folder) == ["A" * 64]
    content = folder.part_path(0).read_bytes()
    folder.part_path(0).write_bytes(content.replace(b"A" * 64, b"A" * 63 + b"B"))
    assert pq.read_table(folder.part_path(0))["completion"].to_pylist() == ["A" * 63 + "B"]
    assert completions(folder) == []
    assert not folder.part_path(0).exists()


def test_leftovers_of_a_killed_run_are_deleted(folder: PartsFolder, output: Path) -> None:
    """Half a part and half an output of this job; nothing of another one's."""
    folder.close()
    mine = [folder.path / ".part-00000007.parquet.tmp-12", output.with_name(f".{output.name}.tmp-12")]
    others = [output.with_name(".other.parquet.tmp-12"), output.with_name("out.parquet.tmp-12")]
    for path in [*mine, *others]:
        path.write_bytes(b"half")
    reopen(output, JOB)
    assert [path.exists() for path in [*mine, *others]] == [False, False, True, True]


@pytest.mark.parametrize(("present", "expected"), [([], 0), ([0], 1), ([0, 1, 7], 8), ([12], 13)])
def test_the_next_part_comes_after_all_others(folder: PartsFolder, present: list[int], expected: int) -> None:
    """A gap is not filled, so that a newer part always has the greater number; temporary files are no parts."""
    for number in present:
        write_part(folder, number)
    (folder.path / ".part-00000099.parquet.tmp-1").write_bytes(b"half")
    assert folder.next_part_number() == expected
    assert not folder.part_path(expected).exists()
    assert completions(folder) == [str(number) for number in present]


def test_remove_leaves_nothing(folder: PartsFolder, output: Path) -> None:
    """After the final file is whole, parts, manifest and lock are gone, and closing again does no harm."""
    write_part(folder, 0)
    folder.remove()
    folder.close()
    assert list(output.parent.iterdir()) == []
