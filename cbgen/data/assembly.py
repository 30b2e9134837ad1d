"""Results in input order: where each lies in the parts, and the rows of the output made of input and results."""

import json
from collections.abc import Iterator
from datetime import datetime
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from cbgen.data.key_table import KeyTable, key_array
from cbgen.data.manifest import PartsFolder, told_by_part
from cbgen.data.published import FAILED, statuses
from cbgen.data.rows import KEY_BYTES, RESULT_SCHEMA, OutputLayout
from cbgen.data.samples import SampleCounts
from cbgen.data.selection import Selection, taken
from cbgen.errors import OutputError

# One pass over the parts gathers results for so many bytes of Arrow, which holds a few times as much while it sorts.
PASS_BYTES = 64 << 20
MOST_PASS_ROWS = 262_144
# So many bytes of Arrow become Python objects, of a dozen times the size, at a time.
RECORDS_BYTES = 4 << 20
# Keys that are looked up or stored at a time: temporary arrays stay small.
KEYS_AT_ONCE = 65_536
FEWER_RESULTS = "there are fewer results than rows: run the same command again"
# Results on their way from parts to the final file: texts with 64-bit offsets, since parts add up.
GATHER_SCHEMA = pa.schema(
    [field.with_type(pa.large_string()) if field.type == pa.string() else field for field in RESULT_SCHEMA]
)


class Results:
    """Where the result of each sample of this input lies in the parts; 9 bytes of memory for each, and the keys.

    keys: the rows' keys in input order, KEY_BYTES each. num_samples: of every row, or integers [rows].
    Of several results for one sample, the newest success counts, or else the newest failure. Parts may hold rows that
    the input no longer has, and samples that a row no longer asks for: num_foreign counts both.
    """

    def __init__(self, folder: PartsFolder, keys: bytes | bytearray, num_samples: int | np.ndarray):
        self.num_foreign = 0
        self.samples = SampleCounts(len(keys) // KEY_BYTES, num_samples)
        self._most_bytes_per_result = 1.0
        self._folder = folder
        self._keys = keys
        self._paths: list[Path] = []
        self._part = np.full(self.samples.total, -1, dtype=np.int32)
        self._row = np.zeros_like(self._part)
        self._failed = np.zeros(self._part.shape, dtype=bool)
        named, rows = key_array(keys), KeyTable(self.samples.num_rows)
        for first in range(0, len(named), KEYS_AT_ONCE):
            lot = named[first : first + KEYS_AT_ONCE]
            rows.put(lot, np.arange(first, first + len(lot)))
        for path, table in folder.parts(["key", "sample_index", "finish_reason", "error"]):
            self._index_part(path, table, rows)

    def _index_part(self, path: Path, table: pa.Table, rows: KeyTable) -> None:
        found = rows.find(key_array(table["key"].to_pylist()))
        places = self.samples.places(found, table["sample_index"].to_numpy())
        failed = statuses(table) == FAILED
        known = np.flatnonzero(places >= 0)
        self.num_foreign += len(places) - len(known)
        places = places[known]
        success_stays = failed[known] & (self._part[places] >= 0) & ~self._failed[places]
        known, places = known[~success_stays], places[~success_stays]
        self._part[places] = len(self._paths)
        self._row[places] = known
        self._failed[places] = failed[known]
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
        """The results in input order, all of a row side by side, as tables of GATHER_SCHEMA of whole rows."""
        # As if all parts were like the one with the longest rows: they may all lie together.
        for first, count in self.samples.lots(self.most_within(PASS_BYTES), MOST_PASS_ROWS):
            piece = slice(self.samples.start(first), self.samples.start(first + count))
            yield self._gather(self._part[piece], self._row[piece])

    def most_within(self, num_bytes: int) -> int:
        """Results of so many bytes in all, at least one."""
        return max(1, int(num_bytes / self._most_bytes_per_result))

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
    schema, samples = output_schema(source, layout), results.samples
    types = [RESULT_SCHEMA.field(name).type for name in layout.columns]
    gathered = _Stream(results.tables())
    for first, rows in _pieces(source, samples, results.most_within(PASS_BYTES)):
        repeated = samples.repeated(first, rows.num_rows)
        result = gathered.take(len(repeated)).select(layout.columns)
        columns = [
            *(rows if samples.are_single else taken(rows, repeated)).columns,
            *(_shard_columns(source, results, first, rows.num_rows, repeated) if layout.is_shard else []),
            *(column.cast(type_) for column, type_ in zip(result.columns, types, strict=True)),
        ]
        yield pa.table(columns, schema=schema)


def _pieces(source: Selection, samples: SampleCounts, most: int) -> Iterator[tuple[int, pa.Table]]:
    """The input's tables, cut where they have many samples: each has no more of these than its table has rows, and than
    `most`, or is of one row; and the number of its first row. Raises OutputError when there are more rows."""
    place = 0
    for table in source.tables():
        first, end = place, place + table.num_rows
        while place < end:
            if place == samples.num_rows:
                raise OutputError(FEWER_RESULTS)
            count = min(samples.rows_within(place, min(most, table.num_rows)), end - place, samples.num_rows - place)
            yield place, table.slice(place - first, count)
            place += count


def _shard_columns(source: Selection, results: Results, first: int, count: int, repeated: np.ndarray) -> list[pa.Array]:
    """See SHARD_FIELDS. repeated: to which of these rows each sample belongs."""
    indices = source.row_indices[first : first + count]
    return [pa.array(indices[repeated]), pa.array(results.hex_keys(first, count)).take(pa.array(repeated))]


def output_records(source: Selection, results: Results, layout: OutputLayout) -> Iterator[list[dict[str, Any]]]:
    """For every row its output rows, one for each of its samples, as JSON holds them: the values as the input has them,
    then the output columns. Raises OutputError when there are not as many results as rows."""
    names, samples = [layout.prefix + name for name in layout.columns], results.samples
    tables = (table.select(layout.columns).rename_columns(names) for table in results.tables())
    step = results.most_within(RECORDS_BYTES)
    slices = (table.slice(first, step) for table in tables for first in range(0, table.num_rows, step))
    outputs = chain.from_iterable(piece.to_pylist() for piece in slices)
    for row, record in enumerate(source.records()):  # to its end: the input sees whether it was changed meanwhile
        if row == samples.num_rows:
            raise OutputError(FEWER_RESULTS)
        own: dict[str, Any] = {}
        if layout.is_shard:
            own = dict(zip(layout.names, (int(source.row_indices[row]), *results.hex_keys(row, 1)), strict=False))
        yield [{**record, **own, **one} for one in islice(outputs, samples.start(row + 1) - samples.start(row))]


def json_line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, default=_json_value) + "\n"


def _json_value(value: Any) -> Any:
    """Values of Parquet that JSON does not know, as text."""
    return value.isoformat() if isinstance(value, datetime) else str(value)


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
                    raise OutputError(FEWER_RESULTS)
            piece = self._table.slice(self._first, num_rows)
            self._first += piece.num_rows
            num_rows -= piece.num_rows
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else pa.concat_tables(pieces)
