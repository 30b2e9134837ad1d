"""Results in input order: where each lies in the parts, and the rows of the output made of input and results."""

import json
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from cbgen.data.key_table import KeyTable, key_array
from cbgen.data.manifest import PartsFolder, told_by_part
from cbgen.data.published import FAILED, statuses
from cbgen.data.rows import KEY_BYTES, RESULT_SCHEMA, OutputLayout
from cbgen.data.selection import Selection, taken
from cbgen.errors import OutputError

# One pass over the parts gathers results for so many bytes of Arrow, which holds a few times as much while it sorts.
PASS_BYTES = 64 << 20
LEAST_PASS_ROWS, MOST_PASS_ROWS = 1_024, 262_144
# Keys that are looked up or stored at a time: temporary arrays stay small.
KEYS_AT_ONCE = 65_536
# Results on their way from parts to the final file: texts with 64-bit offsets, since parts add up.
GATHER_SCHEMA = pa.schema(
    [field.with_type(pa.large_string()) if field.type == pa.string() else field for field in RESULT_SCHEMA]
)


class Results:
    """Where the result of each (row, sample) of this input lies in the parts; 9 bytes of memory for each, and the keys.

    keys: the rows' keys in input order, KEY_BYTES each. Of several results for one sample, the newest success counts,
    or else the newest failure. Parts may hold rows that the input no longer has: num_foreign counts them.
    """

    def __init__(self, folder: PartsFolder, keys: bytes | bytearray, num_samples: int):
        self.num_foreign = 0
        self._most_bytes_per_result = 1.0
        self._folder = folder
        self._keys = keys
        self._paths: list[Path] = []
        self._num_samples = num_samples
        self._part = np.full((len(keys) // KEY_BYTES, num_samples), -1, dtype=np.int32)
        self._row = np.zeros_like(self._part)
        self._failed = np.zeros(self._part.shape, dtype=bool)
        named, places = key_array(keys), KeyTable(len(self._part))
        for first in range(0, len(named), KEYS_AT_ONCE):
            lot = named[first : first + KEYS_AT_ONCE]
            places.put(lot, np.arange(first, first + len(lot)))
        for path, table in folder.parts(["key", "sample_index", "finish_reason", "error"]):
            self._index_part(path, table, places)

    def _index_part(self, path: Path, table: pa.Table, places: KeyTable) -> None:
        rows = places.find(key_array(table["key"].to_pylist()))
        samples = table["sample_index"].to_numpy()
        failed = statuses(table) == FAILED
        known = np.flatnonzero((rows >= 0) & (samples < self._num_samples))
        self.num_foreign += len(rows) - len(known)
        rows, columns = rows[known], samples[known]
        success_stays = failed[known] & (self._part[rows, columns] >= 0) & ~self._failed[rows, columns]
        known, rows, columns = known[~success_stays], rows[~success_stays], columns[~success_stays]
        self._part[rows, columns] = len(self._paths)
        self._row[rows, columns] = known
        self._failed[rows, columns] = failed[known]
        self._paths.append(path)
        told = told_by_part(table.schema.metadata)
        self._most_bytes_per_result = max(self._most_bytes_per_result, told["bytes"] / max(1, told["rows"]))

    def hex_keys(self, first: int, count: int) -> list[str]:
        """The keys of so many rows in input order."""
        return [self._keys[KEY_BYTES * row : KEY_BYTES * (row + 1)].hex() for row in range(first, first + count)]

    @property
    def num_missing(self) -> int:
        return int((self._part < 0).sum())

    @property
    def num_failed(self) -> int:
        return int(self._failed.sum())

    def tables(self) -> Iterator[pa.Table]:
        """The results in input order, `num_samples` for each row, as tables of GATHER_SCHEMA of whole rows."""
        step = self._rows_per_pass()
        for first in range(0, len(self._part), step):
            piece = slice(first, first + step)
            yield self._gather(self._part[piece].ravel(), self._row[piece].ravel())

    def _rows_per_pass(self) -> int:
        """As if all parts were like the one with the longest rows: they may all lie together."""
        least = max(1, LEAST_PASS_ROWS // self._num_samples)
        return min(MOST_PASS_ROWS, max(least, int(PASS_BYTES / self._most_bytes_per_result / self._num_samples)))

    def _gather(self, parts: np.ndarray, rows: np.ndarray) -> pa.Table:
        """The given rows of the given parts, in this order; reads each part it needs once."""
        pieces, positions = [], []
        for part in np.unique(parts):
            wanted = np.flatnonzero(parts == part)
            path = self._paths[part]
            table = self._folder.read_part(path, GATHER_SCHEMA.names)
            if table is None:
                raise OutputError(f"{path}: is damaged and was set aside; run the same command again for its rows")
            pieces.append(table.replace_schema_metadata(None).take(rows[wanted]).cast(GATHER_SCHEMA))
            positions.append(wanted)
        order = np.argsort(np.concatenate(positions), kind="stable")
        return pa.concat_tables(pieces).take(order)


def output_schema(source: Selection, layout: OutputLayout) -> pa.Schema:
    """Every input column unchanged, then the output columns; without metadata."""
    return pa.schema([*source.schema.remove_metadata(), *layout.fields])


def output_tables(source: Selection, results: Results, layout: OutputLayout) -> Iterator[pa.Table]:
    """Every row in order with its results, as tables of `output_schema` as large as the input's own.

    Raises OutputError when there are not as many results as rows.
    """
    schema, samples = output_schema(source, layout), layout.num_samples
    gathered = _Stream(results.tables())
    first = 0
    for rows in source.tables():
        result = gathered.take(rows.num_rows * samples).select(layout.columns)
        types = [RESULT_SCHEMA.field(name).type for name in layout.columns]
        columns = [
            *(_repeated(rows, samples) if samples > 1 else rows).columns,
            *(_shard_columns(source, results, first, rows.num_rows, samples) if layout.is_shard else []),
            *(column.cast(type_) for column, type_ in zip(result.columns, types, strict=True)),
        ]
        first += rows.num_rows
        yield pa.table(columns, schema=schema)


def _shard_columns(source: Selection, results: Results, first: int, count: int, samples: int) -> list[pa.Array]:
    """See SHARD_FIELDS."""
    repeated = np.repeat(np.arange(count), samples)
    indices = source.row_indices[first : first + count]
    return [pa.array(indices[repeated]), pa.array(results.hex_keys(first, count)).take(pa.array(repeated))]


def output_records(source: Selection, results: Results, layout: OutputLayout) -> Iterator[list[dict[str, Any]]]:
    """For every row its output rows as JSON holds them: the values as the input has them, then the output columns."""
    records = source.records()
    count, samples = 0, layout.num_samples
    names = [layout.prefix + name for name in layout.columns]
    for result in results.tables():
        outputs = iter(result.select(layout.columns).rename_columns(names).to_pylist())
        for record in islice(records, result.num_rows // samples):
            own: dict[str, Any] = {}
            if layout.is_shard:
                own = dict(
                    zip(layout.names, (int(source.row_indices[count]), *results.hex_keys(count, 1)), strict=False)
                )
            yield [{**record, **own, **sample} for sample in islice(outputs, samples)]
            count += 1
    if next(records, None) is not None:  # which also lets the input see whether it was changed meanwhile
        raise OutputError("there are fewer results than rows: run the same command again")


def json_line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, default=_json_value) + "\n"


def _json_value(value: Any) -> Any:
    """Values of Parquet that JSON does not know, as text."""
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _repeated(rows: pa.Table, times: int) -> pa.Table:
    return taken(rows, np.repeat(np.arange(rows.num_rows), times))


class _Stream:
    """Rows taken from tables, so many at a time as are wanted."""

    def __init__(self, tables: Iterator[pa.Table]):
        self._tables = tables
        self._table: pa.Table | None = None
        self._first = 0

    def take(self, num_rows: int) -> pa.Table:
        pieces = []
        while num_rows:
            if self._table is None or self._first == self._table.num_rows:
                self._table, self._first = next(self._tables, None), 0
                if self._table is None:
                    raise OutputError("there are fewer results than rows: run the same command again")
            piece = self._table.slice(self._first, num_rows)
            self._first += piece.num_rows
            num_rows -= piece.num_rows
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else pa.concat_tables(pieces)
