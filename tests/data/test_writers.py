"""Publishing: a part is there as a whole or not at all, whatever happens while it is written."""

import errno
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cbgen.data.files import check_writable, publish, publish_text
from cbgen.data.manifest import PartsFolder
from cbgen.data.rows import PART_SCHEMA, OutputRow
from cbgen.data.writers import PartWriter
from cbgen.errors import OutputError

HOURS_S = 3600.0
NOTHING_PUBLISHED = {"lock", "manifest.json"}
FULL = Path("/dev/full")
# A disk that fills up: the process may write no file beyond so many bytes, then there is room again.
FILL = """
import pathlib, resource, sys
from cbgen.data.manifest import PartsFolder
from cbgen.data.rows import OutputRow
from cbgen.data.writers import PartWriter
from cbgen.errors import OutputError
folder = PartsFolder(pathlib.Path(sys.argv[1]))
folder.open({}, "if-possible")
writer = PartWriter(folder, 1_000_000, 3600.0)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
for i in range(2000):
    key, ids = i.to_bytes(16, "big"), [i * j % 32_003 for j in range(50)]
    writer.add([OutputRow(key, i, 0, str(ids), "stop", None, 1, 50, ids, *[None] * 7)])
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
try:
    writer.flush()
except OutputError as error:
    print(error)
print(sorted(path.name for path in folder.path.iterdir()))
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
writer.flush()
print(sum(table.num_rows for _, table in folder.parts()))
"""
# Power that goes while a part is being written.
DIE = """
import os, pathlib, signal, sys
from cbgen.data.files import publish
def write(path):
    path.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
publish(pathlib.Path(sys.argv[1]), write)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[PartsFolder]:
    folder = PartsFolder(tmp_path / "out.parquet")
    folder.open({}, "if-possible")
    yield folder
    folder.close()


def result(index: int, sample_index: int = 0) -> OutputRow:
    """A failed row: everything that may be null is null."""
    key = index.to_bytes(16, "big")
    return OutputRow(key, index, sample_index, None, "error", f"{index}.{sample_index}", 0, 0, [], *[None] * 7)


def published(folder: PartsFolder) -> list[list[str]]:
    """What tells the rows of each part."""
    return [table["error"].to_pylist() for _, table in folder.parts()]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_parts_are_published_by_rows_and_on_flush(folder: PartsFolder) -> None:
    """Nothing is there before a part has its rows; flush publishes the rest, once; no temporary file is left."""
    writer = PartWriter(folder, 3, HOURS_S)
    writer.add([result(0), result(1)])
    writer.add([])
    writer.flush_if_due()
    assert names(folder.path) == NOTHING_PUBLISHED
    writer.add([result(2)])
    writer.add([result(3)])
    assert published(folder) == [["0.0", "1.0", "2.0"]]
    writer.flush()
    writer.flush()
    assert published(folder) == [["0.0", "1.0", "2.0"], ["3.0"]]
    assert names(folder.path) == NOTHING_PUBLISHED | {"part-00000000.parquet", "part-00000001.parquet"}


def test_a_part_is_sorted_by_index_and_sample(folder: PartsFolder) -> None:
    """However the results arrive, the part has input order."""
    writer = PartWriter(folder, 6, HOURS_S)
    writer.add([result(2, 1), result(0, 1), result(10, 0), result(2, 0), result(10, 1), result(0, 0)])
    assert published(folder) == [["0.0", "0.1", "2.0", "2.1", "10.0", "10.1"]]


def test_parts_are_published_by_age(folder: PartsFolder) -> None:
    """A part whose oldest row has waited long enough is published, and an empty one never."""
    writer = PartWriter(folder, 100, 0.0)
    writer.flush_if_due()
    assert published(folder) == []
    writer.add([result(0)])
    writer.flush_if_due()
    assert published(folder) == [["0.0"]]


def test_a_part_has_the_fixed_schema(folder: PartsFolder) -> None:
    """The types are those of PART_SCHEMA although every optional value is null."""
    writer = PartWriter(folder, 1, HOURS_S)
    writer.add([result(0)])
    ((_, table),) = folder.parts()
    assert table.schema.equals(PART_SCHEMA)
    assert table.to_pylist()[0] == {name: getattr(result(0), name) for name in PART_SCHEMA.names}


def test_a_later_writer_continues_the_numbers(folder: PartsFolder) -> None:
    """Parts are immutable: a run that resumes adds parts and overwrites none."""
    for index in (5, 4):
        writer = PartWriter(folder, 100, HOURS_S)
        writer.add([result(index)])
        writer.flush()
    assert published(folder) == [["5.0"], ["4.0"]]


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


@pytest.mark.skipif(sys.platform == "win32", reason="the limit of file sizes is POSIX")
def test_a_disk_that_fills_up_loses_no_row(tmp_path: Path) -> None:
    """A part that has no room leaves no trace and one clear line; all its rows are published once there is room."""
    command = [sys.executable, "-c", FILL, str(tmp_path / "out.parquet")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    message, left, rows = done.stdout.splitlines()
    assert "part-00000000.parquet: cannot be written" in message
    assert left == str(sorted(NOTHING_PUBLISHED))
    assert rows == "2000"


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is POSIX")
def test_a_process_killed_while_writing_publishes_nothing(folder: PartsFolder) -> None:
    """What it leaves is not taken for a part, and does not stop the next run from publishing one."""
    command = [sys.executable, "-c", DIE, str(folder.part_path(0))]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert published(folder) == []
    writer = PartWriter(folder, 1, HOURS_S)
    writer.add([result(0)])
    assert published(folder) == [["0.0"]]
    folder.remove()
    assert not folder.path.exists()


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
