"""Compressed JSONL: read as the plain file is, in bounded memory; a cut or damaged one is refused by name."""

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import xxhash

from cbgen.data.compressed import ZSTD_MAGIC
from cbgen.data.readers import open_input
from cbgen.errors import InputError, UsageError


def zstd(content: bytes) -> bytes:
    """One frame."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


SKIPPABLE_FRAME = bytes.fromhex("502a4d18 03000000 616263")
COMPRESS = {"gz": gzip.compress, "zst": zstd}
LINES = [b'\xef\xbb\xbf{"x": "a"}\r\n', b"\n", b'{"x": "\\ud83d\\u0000"}\n', b"{torn\n", b'{"x": "d", "y": [1]}']


@pytest.mark.parametrize("suffix", ["jsonl.gz", "ndjson.gz", "jsonl.zst", "ndjson.zst", "JSONL.GZ"])
@pytest.mark.parametrize("pieces", [1, 2, 40])
def test_compressed_in_any_number_of_pieces_is_the_plain_file(tmp_path: Path, suffix: str, pieces: int) -> None:
    """All members or frames are read, wherever a line is cut by them: rows, errors with file and line, and tables."""
    content = b"".join(LINES)
    step = -(-len(content) // pieces)
    compress = COMPRESS[suffix.rsplit(".", maxsplit=1)[-1].lower()]
    data = b"".join(compress(content[first : first + step]) for first in range(0, len(content), step))
    plain, packed = tmp_path / "rows.jsonl", tmp_path / f"rows.{suffix}"
    plain.write_bytes(content)
    packed.write_bytes(data)
    expected, source = open_input([str(plain)]), open_input([str(packed)])
    rows = list(source.rows(["x"]))
    assert [row.values for row in rows] == [row.values for row in expected.rows(["x"])]
    assert [row.values["x"] for row in rows] == ["a", "\\ud83d\x00", None, "d"]
    assert str(rows[2].error).startswith(f"rows.{suffix}, line 4: not valid JSON")
    assert list(source.records()) == list(expected.records())
    assert list(source.tables()) == list(expected.tables())
    assert source.place_of(3) == f"rows.{suffix}, line 5"
    assert source.size_bytes == len(data)


def test_frames_that_hold_no_data_are_skipped(tmp_path: Path) -> None:
    """Parallel compressors write them between the frames, and empty frames too."""
    path = tmp_path / "rows.jsonl.zst"
    path.write_bytes(SKIPPABLE_FRAME + zstd(b'{"x": 1}\n') + SKIPPABLE_FRAME + zstd(b"") + zstd(b'{"x": 2}\n'))
    assert [record["x"] for record in open_input([str(path)]).records()] == [1, 2]


def test_padding_after_gzip_members_is_no_damage(tmp_path: Path) -> None:
    """Tapes and block devices fill up with zeros."""
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"x": 1}\n') + bytes(512))
    assert [record["x"] for record in open_input([str(path)]).records()] == [1]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "one byte": lambda data: data[:1],
    "in the header": lambda data: data[:5],
    "in the middle": lambda data: data[: len(data) // 2],
    "last byte": lambda data: data[:-1],
    "second piece cut": lambda data: data + data[:-1],
    "not compressed": lambda data: b'{"x": 1}\n',
    "garbage behind": lambda data: data + b"garbage",
    "overwritten": lambda data: data[:12] + bytes(20) + data[32:],
}


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_refused_when_it_is_opened(
    tmp_path: Path, suffix: str, damage: Callable[[bytes], bytes]
) -> None:
    """One line that names the file, instead of the rows up to the damage."""
    content = b"".join(b'{"x": "%x"}\n' % (number**29) for number in range(50))
    path = tmp_path / f"rows.jsonl.{suffix}"
    path.write_bytes(damage(COMPRESS[suffix](content)))
    with pytest.raises(UsageError, match="cannot be read to its end") as caught:
        open_input([str(path)])
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_checksum_of_zstd_is_checked(tmp_path: Path) -> None:
    """Pyarrow writes none; the command zstd does: a frame of one stored block, by hand."""
    content = b'{"x": 1}\n'
    checksum = xxhash.xxh64(content).intdigest().to_bytes(8, "little")[:4]
    path = tmp_path / "rows.jsonl.zst"
    for stored in (content, b'{"x": 2}\n'):
        block = (len(stored) << 3 | 1).to_bytes(3, "little") + stored
        path.write_bytes(ZSTD_MAGIC + bytes([0x24, len(stored)]) + block + checksum)
        if stored == content:
            assert list(open_input([str(path)]).records()) == [{"x": 1}]
    with pytest.raises(UsageError, match=r"rows\.jsonl\.zst: cannot be read to its end"):
        open_input([str(path)])


def test_a_file_that_was_cut_since_is_noticed(tmp_path: Path) -> None:
    """Reading rows ends in an InputError with the file's name, not in fewer rows."""
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"x": 1}\n' * 1000))
    source = open_input([str(path)])
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(InputError, match=r"rows\.jsonl\.gz"):
        list(source.rows(["x"]))


def test_folders_and_globs_find_compressed_files_in_natural_order(tmp_path: Path) -> None:
    """Beside all other formats."""
    for number, suffix in ((10, "jsonl.gz"), (9, "ndjson.zst"), (2, "jsonl")):
        compress = COMPRESS.get(suffix.rsplit(".", maxsplit=1)[-1], bytes)
        (tmp_path / f"part-{number}.{suffix}").write_bytes(compress(b'{"x": %d}\n' % number))
    (tmp_path / "part-1.csv.gz").write_bytes(gzip.compress(b"a,b"))
    for source in (tmp_path, tmp_path / "part-*.*son*"):
        assert [record["x"] for record in open_input([str(source)]).records()] == [2, 9, 10]


MEASURE = """
import sys
from cbgen.data.readers import open_input

def peak_mb():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024

before = peak_mb()
source = open_input(sys.argv[1:])
num_rows = sum(1 for _ in source.rows(source.schema.names)) + sum(table.num_rows for table in source.tables())
assert num_rows == 2 * source.num_rows
print(peak_mb() - before)
"""


def peak_growth_mb(*paths: Path) -> float:
    """Of a process that opens an input and reads it twice."""
    command = [sys.executable, "-c", MEASURE, *map(str, paths)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
@pytest.mark.parametrize("suffix", COMPRESS)
def test_memory_does_not_grow_with_the_file(tmp_path: Path, suffix: str) -> None:
    """300 MB of lines of 100 kB, compressed to little, are read in a part of that."""
    line = json.dumps({"prompt": "x" * 100_000}).encode() + b"\n"
    path = tmp_path / f"rows.jsonl.{suffix}"
    path.write_bytes(COMPRESS[suffix](line * 200) * 15)
    assert peak_growth_mb(path) < 150
