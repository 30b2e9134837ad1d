"""Results as a job publishes them, and inputs beside them: what tests of parts and outputs are made of."""

import hashlib
import json
import random
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cbgen.data.assembly import Results
from cbgen.data.files import DiskPatience
from cbgen.data.manifest import PartsFolder
from cbgen.data.outputs import Output, open_output
from cbgen.data.readers import Input, open_input
from cbgen.data.rows import KEY_BYTES, OutputLayout, OutputRow
from cbgen.data.selection import Selection
from cbgen.data.writers import PartWriter

FOOTER = {
    "job_id": "0" * 32,
    "fingerprint": {"model": "smollm2", "system_prompt": "« é »"},
    "input": [],
    "columns": [],
    "rows_ok": 3,
    "rows_failed": 0,
}
NOON = datetime(2024, 2, 29, 12, tzinfo=timezone.utc)


def at_once() -> DiskPatience:
    """One that waits for no room."""
    return DiskPatience(0.0, print)


def key(index: int) -> bytes:
    """As in a job, keys are not in the order of the rows."""
    return hashlib.blake2b(str(index).encode(), digest_size=KEY_BYTES).digest()


def keys(count: int) -> bytes:
    return b"".join(map(key, range(count)))


def ok(index: int, sample_index: int = 0, text: str | None = None, finish_reason: str = "stop") -> OutputRow:
    text = f"{index}.{sample_index}" if text is None else text
    times = [0.5, 0.25, 1.0, 0.75, None]
    return OutputRow(key(index), index, sample_index, text, finish_reason, None, 3, 2, [7, index], *times, NOON, NOON)


def failed(index: int, sample_index: int = 0) -> OutputRow:
    """A row that was never a request: everything that may be null is null."""
    return OutputRow(key(index), index, sample_index, None, "error", "too long", 0, 0, [], *[None] * 7)


def publish_parts(folder: PartsFolder, *parts: list[OutputRow], generation: int = 0) -> None:
    writer = PartWriter(folder, 1_000_000, 3600.0, at_once(), generation)
    for rows in parts:
        writer.add(rows)
        writer.flush()


def publish_shuffled(folder: PartsFolder, count: int, num_samples: int = 1) -> None:
    """Results of all rows, scattered over three parts."""
    rows = [ok(index, sample) for index in range(count) for sample in range(num_samples)]
    random.Random(0).shuffle(rows)
    publish_parts(folder, *(rows[first::3] for first in range(3)))


def parquet_input(folder: Path, columns: Any, **options: Any) -> Input:
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), folder / "in.parquet", **options)
    return open_input([str(folder / "in.parquet")])


def write_output(
    folder: PartsFolder,
    source: Input,
    name: str = "out.parquet",
    rows_per_shard: int = 100_000,
    is_mine: np.ndarray | None = None,
    patience: DiskPatience | None = None,
    counts: list[int] | None = None,
    **layout: Any,
) -> Output:
    """The final output beside the parts of rows 0 to N - 1, or of those that a mask chooses. A name without an
    extension is a folder. counts: samples of each row, where they vary."""
    output = open_output(folder.path.parent / name, not Path(name).suffix, rows_per_shard)
    selection, choice = Selection(source, is_mine), OutputLayout(**({"num_samples": None} if counts else {}) | layout)
    wanted = b"".join(key(int(index)) for index in selection.row_indices)
    results = Results(folder, wanted, choice.num_samples or np.array(counts))
    output.write(selection, results, choice, FOOTER, patience or at_once())
    return output


def file_rows(path: Path) -> list[dict[str, Any]]:
    """Of a Parquet or a JSONL file, or of a folder of Parquet files."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return pq.read_table(path).to_pylist()


def assert_every_page_is_checked(path: Path) -> None:
    """A changed bit at the end of each column of each row group is found when the file is read."""
    whole, metadata = path.read_bytes(), pq.read_metadata(path)
    for group in range(metadata.num_row_groups):
        for place in range(metadata.num_columns):
            column = metadata.row_group(group).column(place)
            first = column.data_page_offset if column.dictionary_page_offset is None else column.dictionary_page_offset
            changed = bytearray(whole)
            changed[first + column.total_compressed_size - 1] ^= 1
            with pytest.raises(OSError, match="CRC checksum verification failed"):
                pq.read_table(pa.BufferReader(bytes(changed)), page_checksum_verification=True)
