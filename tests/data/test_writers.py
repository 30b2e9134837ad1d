"""Publishing: a part is there as a whole or not at all, whatever happens while it is written."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from parts_harness import assert_every_page_is_checked, at_once, ok

from cbgen.data.manifest import Manifest, PartsFolder, told_by_part
from cbgen.data.rows import PART_SCHEMA, OutputRow
from cbgen.data.writers import PartWriter

HOURS_S = 3600.0
NOTHING_PUBLISHED = {"lock", "manifest.json"}
# The process may write no file beyond so many bytes, which no waiting changes; then it may.
FILL = """
import pathlib, resource, sys
from cbgen.data.files import DiskPatience
from cbgen.data.manifest import Manifest, PartsFolder
from cbgen.data.rows import OutputRow
from cbgen.data.writers import PartWriter
from cbgen.errors import OutputError
folder = PartsFolder(pathlib.Path(sys.argv[1]))
folder.open(Manifest({}), "if-possible")
writer = PartWriter(folder, 1_000_000, 3600.0, DiskPatience(3600.0, print))
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
    folder.open(Manifest({}), "if-possible")
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
    writer = PartWriter(folder, 3, HOURS_S, at_once())
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
    writer = PartWriter(folder, 6, HOURS_S, at_once())
    writer.add([result(2, 1), result(0, 1), result(10, 0), result(2, 0), result(10, 1), result(0, 0)])
    assert published(folder) == [["0.0", "0.1", "2.0", "2.1", "10.0", "10.1"]]


def test_parts_are_published_by_age(folder: PartsFolder) -> None:
    """A part whose oldest row has waited long enough is published, and an empty one never."""
    writer = PartWriter(folder, 100, 0.0, at_once())
    writer.flush_if_due()
    assert published(folder) == []
    writer.add([result(0)])
    writer.flush_if_due()
    assert published(folder) == [["0.0"]]


def test_a_part_has_the_fixed_schema(folder: PartsFolder) -> None:
    """The types are those of PART_SCHEMA although every optional value is null."""
    writer = PartWriter(folder, 1, HOURS_S, at_once())
    writer.add([result(0)])
    ((_, table),) = folder.parts()
    assert table.schema.equals(PART_SCHEMA)
    assert table.to_pylist()[0] == {name: getattr(result(0), name) for name in PART_SCHEMA.names}


def test_a_later_writer_continues_the_numbers(folder: PartsFolder) -> None:
    """Parts are immutable: a run that resumes adds parts and overwrites none."""
    for index in (5, 4):
        writer = PartWriter(folder, 100, HOURS_S, at_once())
        writer.add([result(index)])
        writer.flush()
    assert published(folder) == [["5.0"], ["4.0"]]


@pytest.mark.skipif(sys.platform == "win32", reason="the limit of file sizes is POSIX")
def test_a_disk_that_fills_up_loses_no_row(tmp_path: Path) -> None:
    """A part that has no room leaves no trace and one clear line; all its rows are published once there is room.

    A file too large is not waited for, however patient the job is with a full disk: nobody makes room for it.
    """
    command = [sys.executable, "-c", FILL, str(tmp_path / "out.parquet")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    message, left, rows = done.stdout.splitlines()
    assert "part-00000000.parquet: cannot be written" in message
    assert left == str(sorted(NOTHING_PUBLISHED))
    assert rows == "2000"


def test_a_part_tells_of_itself_without_its_rows(folder: PartsFolder) -> None:
    """Generation, counts, when it was published and when its run began."""
    before = time.time()
    writer = PartWriter(folder, 100, HOURS_S, at_once(), generation=3)
    begun = time.time()
    for rows in ([result(0), ok(1), result(2)], [ok(3)]):
        writer.add(rows)
        writer.flush()
    first, second = (told_by_part(pq.read_schema(path).metadata) for path in folder.part_paths())
    assert [part.pop("published") >= begun for part in (first, second)] == [True, True]
    assert before <= first["run_started"] <= begun
    assert first.pop("bytes") > second.pop("bytes") > 0
    assert first == {"generation": 3, "rows": 3, "failed": 2, "run_started": second["run_started"]}
    assert (second["rows"], second["failed"]) == (1, 0)


def test_every_page_has_a_checksum(folder: PartsFolder) -> None:
    """Bytes that change on the disk are told from those that were written."""
    writer = PartWriter(folder, 1, HOURS_S, at_once())
    writer.add([ok(0, text="A" * 64)])
    (path,) = folder.part_paths()
    assert_every_page_is_checked(path)


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is POSIX")
def test_a_process_killed_while_writing_publishes_nothing(folder: PartsFolder) -> None:
    """What it leaves is not taken for a part, and does not stop the next run from publishing one."""
    command = [sys.executable, "-c", DIE, str(folder.part_path(0))]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert published(folder) == []
    writer = PartWriter(folder, 1, HOURS_S, at_once())
    writer.add([result(0)])
    assert published(folder) == [["0.0"]]
    folder.remove()
    assert not folder.path.exists()
