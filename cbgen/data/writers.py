"""Results to part files while the job runs, and parts to the final file, in input order, once it is done."""

import json
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cbgen.data.files import publish
from cbgen.data.manifest import PartsFolder
from cbgen.data.readers import Input
from cbgen.data.rows import KEY_BYTES, RESULT_SCHEMA, OutputRow, part_table
from cbgen.errors import OutputError

FOOTER_KEY = b"cbgen"
# Input rows per pass over the parts, which is also the row group of the final file.
ASSEMBLY_ROWS = 65_536


class PartWriter:
    """Collects results and publishes them as immutable parts, every `max_rows` rows or `max_age_s` seconds."""

    def __init__(self, folder: PartsFolder, max_rows: int, max_age_s: float):
        self._folder = folder
        self._max_rows = max_rows
        self._max_age_s = max_age_s
        self._next_number = folder.next_part_number()
        self._rows: list[OutputRow] = []
        self._oldest_s = 0.0

    def add(self, rows: list[OutputRow]) -> None:
        if rows and not self._rows:
            self._oldest_s = time.monotonic()
        self._rows += rows
        if len(self._rows) >= self._max_rows:
            self.flush()

    def flush_if_due(self) -> None:
        if self._rows and time.monotonic() - self._oldest_s >= self._max_age_s:
            self.flush()

    def flush(self) -> None:
        """Publishes what was collected. The rename is the commit: before it nothing is done, after it all is."""
        if self._rows:
            table = part_table(self._rows)
            publish(self._folder.part_path(self._next_number), lambda path: pq.write_table(table, path))
            self._next_number += 1
            self._rows = []


class Results:
    """Where the result of each (row, sample) of this input lies in the parts; 8 bytes of memory for each.

    keys: the rows' keys in input order, KEY_BYTES each. Parts may hold rows that the input no longer has.
    """

    def __init__(self, folder: PartsFolder, keys: bytes, num_samples: int):
        self._tables: list[Path] = []
        self._num_samples = num_samples
        self._part = np.full((len(keys) // KEY_BYTES, num_samples), -1, dtype=np.int32)
        self._row = np.zeros_like(self._part)
        by_key = np.frombuffer(keys, dtype=[("high", ">u8"), ("low", ">u8")])
        order = np.argsort(by_key, order=("high", "low"))
        ordered = by_key[order]
        for path, table in folder.parts():
            self._index_part(path, table, ordered, order)

    def _index_part(self, path: Path, table: pa.Table, ordered: np.ndarray, order: np.ndarray) -> None:
        if not table.num_rows or not len(ordered):
            return
        part_keys = np.frombuffer(b"".join(table["key"].to_pylist()), dtype=ordered.dtype)
        places = np.searchsorted(ordered, part_keys).clip(max=len(ordered) - 1)
        samples = table["sample_index"].to_numpy()
        known = (ordered[places] == part_keys) & (samples < self._num_samples)
        rows = order[places[known]]
        self._part[rows, samples[known]] = len(self._tables)
        self._row[rows, samples[known]] = np.flatnonzero(known)
        self._tables.append(path)

    @property
    def num_missing(self) -> int:
        return int((self._part < 0).sum())

    def tables(self, rows_per_table: int) -> Iterator[pa.Table]:
        """The results in input order, `num_samples` for each row, as tables of RESULT_SCHEMA for so many input rows."""
        for first in range(0, len(self._part), rows_per_table):
            yield self._gather(
                self._part[first : first + rows_per_table].ravel(), self._row[first : first + rows_per_table].ravel()
            )

    def _gather(self, parts: np.ndarray, rows: np.ndarray) -> pa.Table:
        """The given rows of the given parts, in this order; reads each part it needs once."""
        pieces, positions = [], []
        for part in np.unique(parts):
            wanted = np.flatnonzero(parts == part)
            pieces.append(pq.read_table(self._tables[part], columns=RESULT_SCHEMA.names).take(rows[wanted]))
            positions.append(wanted)
        order = np.argsort(np.concatenate(positions), kind="stable")
        return pa.concat_tables(pieces).take(order).cast(RESULT_SCHEMA)


def assemble(
    output: Path, source: Input, results: Results, columns: list[str], prefix: str, num_samples: int, footer: dict[str, Any]
) -> None:
    """Writes the final file, every input row in order with its results, by one rename; verifies it was written whole.

    columns: result columns in order, each named with `prefix`. footer: what the file records about the job.
    """
    write: Callable[[Path], int]
    if output.suffix == ".jsonl":
        write = lambda path: _write_jsonl(path, source, results, columns, prefix, num_samples)  # noqa: E731
    else:
        write = lambda path: _write_parquet(path, source, results, columns, prefix, num_samples, footer)  # noqa: E731
    publish(output, lambda path: _check_rows(path, write(path), source.num_rows * num_samples))
    if output.suffix == ".jsonl":
        text = json.dumps(footer, indent=2, ensure_ascii=False)
        publish(sidecar_path(output), lambda path: _write_text(path, text))


def sidecar_path(output: Path) -> Path:
    """Where a JSONL output, which has no footer, records its job."""
    return output.with_name(output.name + ".job.json")


def read_footer(output: Path) -> dict[str, Any] | None:
    """What a finished output records about its job; None for a file that cbgen did not finish."""
    if output.suffix == ".jsonl":
        path = sidecar_path(output)
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    try:
        metadata = pq.read_schema(output).metadata or {}
    except (pa.ArrowInvalid, OSError):
        return None
    return json.loads(metadata[FOOTER_KEY]) if FOOTER_KEY in metadata else None


def _write_parquet(
    path: Path,
    source: Input,
    results: Results,
    columns: list[str],
    prefix: str,
    num_samples: int,
    footer: dict[str, Any],
) -> int:
    fields = [RESULT_SCHEMA.field(name).with_name(prefix + name) for name in columns]
    metadata = {**(source.schema.metadata or {}), FOOTER_KEY: json.dumps(footer, ensure_ascii=False).encode()}
    schema = pa.schema([*source.schema, *fields], metadata=metadata)
    rest = pa.table([pa.array([], field.type) for field in source.schema], schema=source.schema)
    inputs = source.tables()
    with pq.ParquetWriter(path, schema) as writer:
        for result in results.tables(ASSEMBLY_ROWS):
            wanted = result.num_rows // num_samples
            while rest.num_rows < wanted:
                rest = pa.concat_tables([rest, next(inputs).replace_schema_metadata(source.schema.metadata)])
            rows = rest.slice(0, wanted)
            rest = rest.slice(wanted)
            if num_samples > 1:
                rows = rows.take(np.repeat(np.arange(wanted), num_samples))
            writer.write_table(pa.table([*rows.columns, *result.select(columns).columns], schema=schema))
    return pq.read_metadata(path).num_rows


def _write_jsonl(
    path: Path, source: Input, results: Results, columns: list[str], prefix: str, num_samples: int
) -> int:
    records = source.records()
    count = 0
    with open(path, "w", encoding="utf-8") as file:
        for result in results.tables(ASSEMBLY_ROWS):
            samples = iter(result.select(columns).to_pylist())
            for record in islice(records, result.num_rows // num_samples):
                for sample in islice(samples, num_samples):
                    row = {**record, **{prefix + name: value for name, value in sample.items()}}
                    file.write(json.dumps(row, ensure_ascii=False, default=_json_value) + "\n")
                    count += 1
    return count


def _json_value(value: Any) -> Any:
    """Values of Parquet that JSON does not know, as text."""
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _check_rows(path: Path, num_rows: int, expected: int) -> None:
    if num_rows != expected:
        raise OutputError(f"{path}: {num_rows} rows were written of {expected}; the parts are kept, run it again")


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
