"""How many rows are held at a time, so that memory is bounded by bytes and not by what a row may be."""

import math
from collections.abc import Iterator

import pyarrow as pa

BATCH_ROWS = 1024
BATCH_BYTES = 8 << 20
# In much data rows are uneven, and a batch may hold the largest ones together.
UNEVENNESS = 4


def rows_per_batch(bytes_per_row: float, total_bytes: float) -> int:
    """A power of two, so that neighbours of nearly the same size have the same one.

    total_bytes: of all rows that the average is from; where they fit together, they need not be even.
    """
    room_bytes = BATCH_BYTES if total_bytes <= BATCH_BYTES else BATCH_BYTES / UNEVENNESS
    rows = max(1.0, room_bytes / max(1.0, bytes_per_row))
    return min(BATCH_ROWS, 1 << int(math.log2(rows)))


def rows_without_columns(num_rows: int) -> Iterator[pa.RecordBatch]:
    """Batches of no column, which Arrow's readers do not give."""
    for first in range(0, num_rows, BATCH_ROWS):
        yield pa.RecordBatch.from_struct_array(pa.array([{}] * min(BATCH_ROWS, num_rows - first), pa.struct([])))
