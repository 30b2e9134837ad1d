"""The rows of a finished output held against what they must be: places, types, and the input that they came from."""

import io
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cbgen.data.assembly import json_line
from cbgen.data.batches import BATCH_ROWS
from cbgen.data.origins import Origin
from cbgen.data.outputs import JsonlOutput, Output
from cbgen.data.python_values import python_rows
from cbgen.data.readers import Input
from cbgen.data.rows import OutputLayout
from cbgen.data.selection import Selection, taken
from cbgen.errors import UsageError
from cbgen.finished_rows import checked_tables, file_schema, json_records


class RowChecks:
    """What can be told of rows without the input; they come in order, by tables or JSON records.

    problems: the first fault of each kind. is_mine: bool for each input row, those of this shard; None without shards.
    Rows are told by their place in the output, from 1.
    """

    def __init__(self, layout: OutputLayout, num_input_rows: int):
        self.num_rows = 0
        self.num_failed = 0
        self.has_unknown = False
        self.problems: dict[str, str] = {}
        self.is_mine = np.zeros(num_input_rows, dtype=bool) if layout.is_shard else None
        self._layout = layout
        self._last_index = -1

    def add(self, table: pa.Table) -> None:
        """A table with the columns of the layout, or those of them that are looked at: see `_names`."""
        error, reason, *places = (table[name] for name in self._names)
        failed = error.is_valid().to_numpy()
        self.num_failed += int(np.count_nonzero(failed))
        self._expect("finish_reason", pc.equal(reason, "error").to_numpy() == failed, "does not go with its error")
        if self._layout.num_samples > 1:
            expected = (self.num_rows + np.arange(table.num_rows)) % self._layout.num_samples
            self._expect("sample_index", places.pop().to_numpy() == expected, "is not the next one")
        if self.is_mine is not None:
            self._add_indices(places.pop().to_numpy(), self.is_mine)
        self.num_rows += table.num_rows

    def add_records(self, records: list[dict[str, Any]]) -> None:
        """Lines of a JSONL output."""
        fields = self._layout.fields
        sound = np.array([_has_types(record, fields) for record in records], dtype=bool)
        self._expect("columns", sound, "are not the input's and then the output's, each with its type")
        if sound.all():
            types = {field.name: field.type for field in fields}
            arrays = [pa.array([record[name] for record in records], types[name]) for name in self._names]
            self.add(pa.table(arrays, names=self._names))
        else:
            self.add_unknown(len(records))

    def add_unknown(self, num_rows: int) -> None:
        """Rows that have not the columns that are looked at."""
        self.num_rows += num_rows
        self.has_unknown = True

    @property
    def _names(self) -> list[str]:
        own = ["row_index"] if self._layout.is_shard else []
        own += ["sample_index"] if self._layout.num_samples > 1 else []
        return [self._layout.prefix + name for name in ("error", "finish_reason", *own)]

    def _add_indices(self, indices: np.ndarray, is_mine: np.ndarray) -> None:
        """The samples of a row have its row_index, and the next row a larger one."""
        starts = (self.num_rows + np.arange(len(indices))) % self._layout.num_samples == 0
        before = np.concatenate([[self._last_index], indices[:-1]])
        ascends = np.where(starts, indices > before, indices == before)
        self._expect("row_index", ascends & (indices < len(is_mine)), "does not follow the one before")
        is_mine[indices[(indices >= 0) & (indices < len(is_mine))]] = True
        self._last_index = int(indices[-1]) if len(indices) else self._last_index

    def _expect(self, kind: str, holds: np.ndarray, otherwise: str) -> None:
        wrong = np.flatnonzero(~holds)
        if wrong.size:
            self.problems.setdefault(kind, f"row {self.num_rows + wrong[0] + 1}: {kind} {otherwise}")


def _has_types(record: dict[str, Any], fields: list[pa.Field]) -> bool:
    names = [field.name for field in fields]
    return list(record)[-len(names) :] == names and all(_is_of(record[field.name], field) for field in fields)


def _is_of(value: Any, field: pa.Field) -> bool:
    if value is None:
        return field.nullable
    if pa.types.is_integer(field.type):
        return type(value) is int
    if pa.types.is_floating(field.type):
        return type(value) in (int, float)
    return isinstance(value, list if pa.types.is_list(field.type) else str)


def schema_problems(paths: Iterable[Path], layout: OutputLayout, source: Input | None) -> list[str]:
    """What is wrong with the columns of Parquet files: the input's, if it is known, and then those of the layout."""
    own = layout.fields
    expected = None if source is None else _as_stored(source.schema)
    for path in paths:
        schema = file_schema(path)
        inputs = pa.schema(list(schema)[: -len(own)])
        if expected is None:
            expected = inputs  # those of the first file
        wanted = [*expected, *own]
        if schema.names != [field.name for field in wanted]:
            return [f"{path}: the columns are {', '.join(schema.names)}"]
        faults = [
            f"{path}: column {field.name!r} is {schema.field(place)}, expected: {field}"
            for place, field in enumerate(wanted)
            if not schema.field(place).equals(field)
        ]
        if faults:
            return faults
    return []


def _as_stored(schema: pa.Schema) -> pa.Schema:
    """The same columns as they come back from a Parquet file, which has not all of Arrow's types."""
    file = io.BytesIO()
    pq.write_table(schema.empty_table(), file)
    return pq.read_schema(io.BytesIO(file.getvalue())).remove_metadata()


def unchanged_paths(identity: list[list[Any]]) -> list[str]:
    """The input files of a finished job. Raises UsageError when they cannot be had as they were."""
    paths = []
    for name, *rest in identity[:-1]:
        if len(rest) != 2 or not Path(str(name)).is_absolute():
            raise UsageError(f"{'the standard input' if name == '-' else name} is no file that can be read again")
        if list(Origin.local(Path(name)).identity) != [name, *rest]:
            raise UsageError(f"{name} was changed since")
        paths.append(name)
    return paths


def difference_from_input(output: Output, source: Input, layout: OutputLayout, is_mine: np.ndarray) -> str | None:
    """The first place where the input's columns in the output are not the input's rows in order, each once.

    is_mine: bool for each row of the source, those that the output covers.
    """
    selection = Selection(source, is_mine)
    if isinstance(output, JsonlOutput):
        found = _difference_of_records(json_records(output.path), selection, layout)
    elif source.schema.names:
        names = source.schema.names
        tables = (table for path in output.files for table in checked_tables(path, names))
        found = _difference_of_tables(_Rows(tables), selection, layout.num_samples)
    else:
        return None  # without a column any row is like any other, and rows have been counted
    if found is None:
        return None
    place, column = found
    row = place // layout.num_samples
    if column is None or row >= selection.num_rows:
        return f"row {place + 1}: is there no more in the input, or not in the output"
    where = source.place_of(int(selection.row_indices[row]))
    return f"row {place + 1}: {column} is not what the input has at its place ({where})"


def _difference_of_records(
    own: Iterator[dict[str, Any]], selection: Selection, layout: OutputLayout
) -> tuple[int, str | None] | None:
    names, place = set(layout.names), 0
    for record in islice(selection.records(), selection.num_rows):
        expected = json_line(record)
        for line in islice(own, layout.num_samples):
            if json_line({name: value for name, value in line.items() if name not in names}) != expected:
                return place, "the line"
            place += 1
        if place % layout.num_samples:
            return place, None
    return _ends(place, selection, layout.num_samples, goes_on=next(own, None) is not None)


def _difference_of_tables(own: "_Rows", selection: Selection, num_samples: int) -> tuple[int, str | None] | None:
    place = 0
    for expected in _pieces(selection, max(1, BATCH_ROWS // num_samples)):
        table = own.take(expected.num_rows * num_samples)
        differences = [
            (place + row * num_samples + sample, f"column {column!r}")
            for sample in range(num_samples)
            for row, column in _differences(taken(table, np.arange(sample, table.num_rows, num_samples)), expected)
        ]
        if differences:
            return min(differences)
        place += table.num_rows
        if table.num_rows < expected.num_rows * num_samples:
            return place, None
    return _ends(place, selection, num_samples, goes_on=own.take(1).num_rows > 0)


def _ends(place: int, selection: Selection, num_samples: int, goes_on: bool) -> tuple[int, str | None] | None:
    return (place, None) if goes_on or place < selection.num_rows * num_samples else None


def _pieces(selection: Selection, num_rows: int) -> Iterator[pa.Table]:
    """The rows of a selection, at most so many at a time; the input is read no further than needed."""
    left = selection.num_rows
    for table in selection.tables() if left else ():
        for first in range(0, table.num_rows, num_rows):
            yield table.slice(first, num_rows)
        left -= table.num_rows
        if not left:
            return


def _differences(own: pa.Table, expected: pa.Table) -> Iterator[tuple[int, str]]:
    """For each column that differs, the first row that does; of the rows that both have."""
    num_rows = min(own.num_rows, expected.num_rows)
    for name in expected.schema.names:
        mine, theirs = (table.select([name]).slice(0, num_rows) for table in (own, expected))
        if mine.column(0).equals(theirs.column(0)):
            continue
        pairs = zip(_texts(mine), _texts(theirs), strict=True)  # not a number is like itself, in any depth
        row = next((row for row, (one, other) in enumerate(pairs) if one != other), None)
        if row is not None:
            yield row, name


def _texts(table: pa.Table) -> Iterator[str]:
    return (repr(row) for row in chain.from_iterable(map(python_rows, table.to_batches())))


class _Rows:
    """Rows taken from tables, so many at a time as are wanted, or as are left."""

    def __init__(self, tables: Iterator[pa.Table]):
        self._tables = tables
        self._left: pa.Table | None = None

    def take(self, num_rows: int) -> pa.Table:
        pieces: list[pa.Table] = []
        while num_rows and (table := self._next()) is not None:
            pieces.append(table.slice(0, num_rows))
            self._left = table.slice(num_rows) if table.num_rows > num_rows else None
            num_rows -= pieces[-1].num_rows
        return pa.concat_tables(pieces) if pieces else pa.table({})

    def _next(self) -> pa.Table | None:
        table, self._left = self._left, None
        return table if table is not None else next(self._tables, None)
