"""Parts to the final file, in input order, with every input column, once all rows have a result."""

import json
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cbgen.data.files import publish, publish_text
from cbgen.data.manifest import PartsFolder
from cbgen.data.readers import Input
from cbgen.data.rows import KEY_BYTES, RESULT_SCHEMA, OutputLayout
from cbgen.errors import OutputError

FOOTER_KEY = b"cbgen"
# Input rows per pass over the parts, which is also the row group of the final file.
ASSEMBLY_ROWS = 65_536


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
        part_keys = np.frombuffer(table["key"].combine_chunks().buffers()[-1], dtype=ordered.dtype)
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

    def count_failed(self) -> int:
        """Results that are errors; reads that column of every part."""
        failed = 0
        for part, path in enumerate(self._tables):
            errors = pq.read_table(path, columns=["error"])["error"].is_valid().to_numpy()
            failed += int(errors[self._row[self._part == part]].sum())
        return failed

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


def assemble(output: Path, source: Input, results: Results, layout: OutputLayout, footer: dict[str, Any]) -> None:
    """Writes the final file, every input row in order with its results, by one rename, after checking it is whole.

    footer: what the file records about the job; a JSONL file, which has no footer, has it in a file beside it.
    """
    if output.suffix == ".jsonl":
        publish(output, lambda path: _check_rows(path, _write_jsonl(path, source, results, layout), source, layout))
        publish_text(sidecar_path(output), json.dumps(footer, indent=2, ensure_ascii=False))
    else:
        publish(
            output,
            lambda path: _check_rows(path, _write_parquet(path, source, results, layout, footer), source, layout),
        )


def sidecar_path(output: Path) -> Path:
    """Where a JSONL output records its job."""
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


def _write_parquet(path: Path, source: Input, results: Results, layout: OutputLayout, footer: dict[str, Any]) -> int:
    """Returns the number of rows that the written file says it holds."""
    fields = [RESULT_SCHEMA.field(column).with_name(layout.prefix + column) for column in layout.columns]
    metadata = {**(source.schema.metadata or {}), FOOTER_KEY: json.dumps(footer, ensure_ascii=False).encode()}
    schema = pa.schema([*source.schema, *fields]).with_metadata(metadata)
    inputs = _rechunked(source, ASSEMBLY_ROWS)
    with pq.ParquetWriter(path, schema) as writer:
        for result in results.tables(ASSEMBLY_ROWS):
            rows = next(inputs)
            if layout.num_samples > 1:
                rows = rows.take(np.repeat(np.arange(rows.num_rows), layout.num_samples))
            writer.write_table(pa.table([*rows.columns, *result.select(layout.columns).columns], schema=schema))
    return pq.read_metadata(path).num_rows


def _rechunked(source: Input, num_rows: int) -> Iterator[pa.Table]:
    """The input's tables again, cut to `num_rows` rows each; the last may be shorter."""
    pending: list[pa.Table] = []
    for table in source.tables():
        pending.append(table.replace_schema_metadata(None))
        if sum(piece.num_rows for piece in pending) >= num_rows:
            joined = pa.concat_tables(pending)
            yield joined.slice(0, num_rows)
            pending = [joined.slice(num_rows)]
    yield pa.concat_tables(pending)


def _write_jsonl(path: Path, source: Input, results: Results, layout: OutputLayout) -> int:
    """Returns the number of lines written."""
    records = source.records()
    count = 0
    with open(path, "w", encoding="utf-8") as file:
        for result in results.tables(ASSEMBLY_ROWS):
            samples = iter(result.select(layout.columns).rename_columns(layout.names).to_pylist())
            for record in islice(records, result.num_rows // layout.num_samples):
                for sample in islice(samples, layout.num_samples):
                    file.write(json.dumps({**record, **sample}, ensure_ascii=False, default=_json_value) + "\n")
                    count += 1
    return count


def _json_value(value: Any) -> Any:
    """Values of Parquet that JSON does not know, as text."""
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _check_rows(path: Path, num_rows: int, source: Input, layout: OutputLayout) -> None:
    expected = source.num_rows * layout.num_samples
    if num_rows != expected:
        raise OutputError(f"{path}: {num_rows} rows were written of {expected}; the parts are kept, run it again")
