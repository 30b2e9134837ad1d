"""Publishing a file: it is there as a whole or not at all; and a disk that is full is waited for."""

import errno
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cbgen.data.files import DiskPatience, check_writable, publish, publish_text
from cbgen.errors import OutputError

FULL = Path("/dev/full")
OPEN_FILES = Path("/proc/self/fd")
FOREVER_S = 1e9
# A disk of 64 kB, most of which is taken, is made and left by a process that may mount one for itself.
SMALL_DISK = ("unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs "$1" && shift && exec "$@"', "sh")
ON_A_SMALL_DISK = """
import os, pathlib, sys, threading
from cbgen.data import files
from cbgen.errors import OutputError
folder, attempts, told = pathlib.Path(sys.argv[1]), [], []
ballast = folder / "ballast"
ballast.write_bytes(bytes(40_000))
files.FIRST_PAUSE_S = 0.01
def write(path):
    attempts.append(path)
    path.write_bytes(bytes(40_000))
def names():
    return sorted(path.name for path in folder.iterdir())
"""
MAKE_ROOM = (
    ON_A_SMALL_DISK
    + """
def write_in_the_end(path):
    if len(attempts) == 3:
        ballast.unlink()
    write(path)
files.DiskPatience(1e9, told.append).publish(folder / "part", write_in_the_end)
print(len(attempts), names(), (folder / "part").stat().st_size)
print(*told, sep="\\n")
"""
)
RUN_OUT_OF_TIME = (
    ON_A_SMALL_DISK
    + """
try:
    files.DiskPatience(float(sys.argv[2]), told.append).publish(folder / "part", write)
except OutputError as error:
    print(len(attempts) > 1, len(told), names(), error)
"""
)
ABANDON = (
    ON_A_SMALL_DISK
    + """
files.FIRST_PAUSE_S = files.LONGEST_PAUSE_S = 1e6
patience = files.DiskPatience(1e9, lambda text: threading.Timer(0.05, patience.abandon).start())
for number in range(2):
    try:
        patience.publish(folder / "part", write)
    except OutputError as error:
        print(len(attempts), names(), error)
"""
)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.skipif(not OPEN_FILES.is_dir(), reason="the system does not tell which file a descriptor is of")
def test_what_is_published_is_durable_before_and_after_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is written, brought to the disk whole, renamed, and then the folder is brought to the disk."""
    calls: list[tuple[str, str, int]] = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor: int) -> None:
        path = (OPEN_FILES / str(descriptor)).readlink()
        calls.append(("fsync", path.name, path.stat().st_size if path.is_file() else 0))
        fsync(descriptor)

    def recorded_replace(source: Path, target: Path) -> None:
        calls.append(("rename", f"{source.name} {target.name}", source.stat().st_size))
        replace(source, target)

    def write(path: Path) -> None:
        path.write_bytes(bytes(100_000))
        calls.append(("write", path.name, path.stat().st_size))

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    publish(tmp_path / "part", write)
    temporary = f".part.tmp-{os.getpid()}"
    assert calls == [
        ("write", temporary, 100_000),
        ("fsync", temporary, 100_000),
        ("rename", f"{temporary} part", 100_000),
        ("fsync", tmp_path.name, 0),
    ]


@pytest.mark.parametrize("before", [None, "old"])
@pytest.mark.parametrize(
    ("failure", "raised"),
    [(OSError(errno.ENOSPC, "No space left on device"), OutputError), (ValueError("no"), ValueError)],
)
def test_a_write_that_fails_leaves_nothing_new(
    tmp_path: Path, before: str | None, failure: Exception, raised: type[Exception]
) -> None:
    """Neither half a file nor a temporary one is left, an older file stays, and a full disk is an OutputError."""
    target = tmp_path / "part.parquet"
    if before is not None:
        target.write_text(before)

    def write(path: Path) -> None:
        path.write_text("half of i")
        assert (target.read_text() if target.exists() else None) == before
        raise failure

    with pytest.raises(raised) as caught:
        publish(target, write)
    assert names(tmp_path) == (set() if before is None else {"part.parquet"})
    assert before is None or target.read_text() == before
    assert raised is ValueError or "No space left on device" in str(caught.value)


def test_a_published_file_replaces_the_old_one(tmp_path: Path) -> None:
    """The new content is there under the name, in UTF-8, and nothing else is."""
    for text in ("old", "new: é\ue000"):
        publish_text(tmp_path / "manifest.json", text)
    assert (tmp_path / "manifest.json").read_bytes() == "new: é\ue000".encode()
    assert names(tmp_path) == {"manifest.json"}


UNWRITABLE: dict[str, Callable[[Path], Path]] = {
    "parent is a file": lambda folder: folder / "file" / "part.parquet",
    "parent is missing": lambda folder: folder / "missing" / "part.parquet",
    "target is a folder": lambda folder: folder / "folder",
    "name is too long": lambda folder: folder / ("x" * 300),
}


@pytest.mark.parametrize("target", UNWRITABLE.values(), ids=UNWRITABLE)
def test_a_target_that_cannot_be_written_is_one_clear_line(tmp_path: Path, target: Callable[[Path], Path]) -> None:
    """OutputError names the path and what to do, and nothing is left behind."""
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError) as caught:
        publish_text(target(tmp_path), "content")
    assert str(caught.value).startswith(f"{target(tmp_path)}: cannot be written: ")
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == {"file", "folder"}
    assert names(tmp_path / "folder") == set()


@pytest.mark.skipif(
    not FULL.exists() or not stat.S_ISCHR(FULL.stat().st_mode), reason="there is no device that is full"
)
def test_a_full_device_is_one_clear_line(tmp_path: Path) -> None:
    """The system's own words for a full disk reach the user; only the writing goes to the device, never the rename."""
    with pytest.raises(OutputError) as caught:
        publish(tmp_path / "part.parquet", lambda _: FULL.write_text("content"))
    assert os.strerror(errno.ENOSPC) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == set()


def test_check_writable_makes_the_folder_and_leaves_it_empty(tmp_path: Path) -> None:
    """A folder that is missing is made, with its parents."""
    check_writable(tmp_path / "a" / "b")
    check_writable(tmp_path / "a" / "b")
    assert names(tmp_path / "a" / "b") == set()


def test_check_writable_refuses_before_any_work(tmp_path: Path) -> None:
    """Where no file can be made, OutputError says so in one line that names the folder."""
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be written") as caught:
        check_writable(tmp_path / "file" / "below")
    assert str(tmp_path / "file" / "below") in str(caught.value)
    assert "\n" not in str(caught.value)


def failing(code: int, attempts: list[int], times: int = 10**9) -> Callable[[], None]:
    """An action that the system refuses so many times."""

    def action() -> None:
        attempts.append(code)
        if len(attempts) <= times:
            try:
                raise OSError(code, os.strerror(code))
            except OSError as error:
                raise OutputError(f"part: {error.strerror}") from error

    return action


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS])
def test_what_an_administrator_can_mend_is_waited_for(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, a quota, permissions: tried again until it succeeds, and told once when it begins and ends."""
    monkeypatch.setattr("cbgen.data.files.FIRST_PAUSE_S", 0.001)
    attempts: list[int] = []
    told: list[str] = []
    DiskPatience(FOREVER_S, told.append).run(failing(code, attempts, times=4))
    assert len(attempts) == 5
    paused, going_on = told
    assert paused.startswith(f"paused: part: {os.strerror(code)}; waiting for room")
    assert going_on.startswith("going on")


@pytest.mark.parametrize("code", [errno.EFBIG, errno.EIO, errno.ENAMETOOLONG, errno.ENOTDIR])
def test_what_waiting_does_not_change_is_not_waited_for(code: int) -> None:
    """A file too large, a broken disk, a wrong path: raised at once, however long the job would wait."""
    attempts: list[int] = []
    told: list[str] = []
    with pytest.raises(OutputError, match=os.strerror(code)):
        DiskPatience(FOREVER_S, told.append).run(failing(code, attempts))
    assert (len(attempts), told) == (1, [])


def test_a_failure_of_another_kind_is_not_waited_for() -> None:
    """Rows that are missing are no want of room."""
    told: list[str] = []

    def lacks_rows() -> None:
        raise OutputError("2 rows were written of 3")

    with pytest.raises(OutputError, match="2 rows were written of 3"):
        DiskPatience(FOREVER_S, told.append).run(lacks_rows)
    assert told == []


def test_without_patience_nothing_is_waited_for() -> None:
    """A timeout of 0 is one attempt, and nothing is told."""
    attempts: list[int] = []
    told: list[str] = []
    with pytest.raises(OutputError):
        DiskPatience(0.0, told.append).run(failing(errno.ENOSPC, attempts))
    assert (len(attempts), told) == (1, [])


def on_a_small_disk(folder: Path, script: str, *arguments: str) -> list[str]:
    """The lines that a Python script prints, whose first argument is a folder that is a disk of 64 kB."""
    folder.mkdir()
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare, so no disk can be made")
    probe = subprocess.run([*SMALL_DISK, str(folder), "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"no disk can be made here: {probe.stderr.strip()}")
    command = [*SMALL_DISK, str(folder), sys.executable, "-c", script, str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_full_disk_is_waited_for_until_there_is_room(tmp_path: Path) -> None:
    """On a real one: every attempt takes its half file away, the last one publishes, and two lines are told."""
    result, paused, going_on = on_a_small_disk(tmp_path / "disk", MAKE_ROOM)
    assert result == "4 ['part'] 40000"
    assert paused.startswith("paused: ") and os.strerror(errno.ENOSPC) in paused
    assert going_on.startswith("going on")


def test_a_full_disk_is_waited_for_no_longer_than_asked(tmp_path: Path) -> None:
    """Then the failure is raised, with nothing left behind; with a timeout of 0 at once, and nothing is told."""
    (line,) = on_a_small_disk(tmp_path / "disk", RUN_OUT_OF_TIME, "0.05")
    assert line.startswith("True 1 ['ballast'] ") and os.strerror(errno.ENOSPC) in line
    (line,) = on_a_small_disk(tmp_path / "other", RUN_OUT_OF_TIME, "0")
    assert line.startswith("False 0 ['ballast'] ") and os.strerror(errno.ENOSPC) in line


def test_who_waits_for_room_can_be_told_to_give_up(tmp_path: Path) -> None:
    """From another thread, in the middle of a long pause; later publications do not wait either."""
    first, second = on_a_small_disk(tmp_path / "disk", ABANDON)
    assert first.startswith("1 ['ballast'] ") and os.strerror(errno.ENOSPC) in first
    assert second.startswith("2 ['ballast'] ")


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    """A pipe stays a pipe, whose reader gets the text; a full device is an error in one line."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True)
    publish_text(pipe, "told\n")
    assert reader.communicate(timeout=60)[0] == "told\n"
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
    if FULL.exists():
        with pytest.raises(OutputError, match="No space left on device"):
            publish_text(FULL, "x" * 100_000)
        assert stat.S_ISCHR(FULL.stat().st_mode)
