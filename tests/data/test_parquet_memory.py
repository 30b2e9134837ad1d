"""Parquet in bounded memory: what is held at a time is some megabytes, and not a row group."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cbgen.data.batches import BATCH_BYTES, BATCH_ROWS
from cbgen.data.readers import open_input

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


def text(length: int) -> str:
    """Nothing that could be compressed to much less."""
    return os.urandom(length // 2).hex()


SHAPES: dict[str, Callable[[], dict[str, Any]]] = {
    "large texts": lambda: {"x": [text(50_000) for _ in range(6_000)]},
    "one text everywhere": lambda: {"x": ["x" * 50_000] * 6_000},
    "one text in messages": lambda: {"x": pa.array([[{"role": "user", "content": "y" * 50_000}]] * 6_000)},
    "long lists of one number": lambda: {"x": pa.array([[7] * 20_000] * 2_000)},
    "many small rows": lambda: {"x": [text(300) for _ in range(600_000)], "y": list(range(600_000))},
}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES)
def test_one_row_group_of_everything_is_never_held_as_a_whole(tmp_path: Path, make: Callable[[], dict]) -> None:
    """Some 300 MB as Arrow has them, in one row group, of pages of usual size, are read in a small part of that."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(make()), path, row_group_size=10**7, write_batch_size=16)
    done = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 120


@pytest.mark.parametrize("row_group_size", [1, 10, 10_000])
def test_batches_are_bounded_in_bytes(tmp_path: Path, row_group_size: int) -> None:
    """Large rows and small ones, each a half of the file: few of the former at a time, and many of the latter."""
    values = [text(200_000) for _ in range(200)] + ["small"] * 3_000
    pq.write_table(pa.table({"x": values}), tmp_path / "a.parquet", row_group_size=row_group_size)
    tables = list(open_input([str(tmp_path / "a.parquet")]).tables())
    assert [value for table in tables for value in table["x"].to_pylist()] == values
    assert max(table.nbytes for table in tables) <= 2 * BATCH_BYTES
    if row_group_size == 1:
        assert max(table.num_rows for table in tables) == BATCH_ROWS
