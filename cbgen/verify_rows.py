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
from cbgen.data.samples import SampleCounts
from cbgen.data.selection import Selection, taken
from cbgen.errors import UsageError
from cbgen.finished_rows import checked_tables, file_schema, json_records


class RowChecks:
    """What can be told of rows without the input; they come in order, by tables or JSON records.

    problems: the first fault of each kind. is_mine: bool for each input row, those of this shard; None without shards.
    Rows are told by their place in the output, from 1. 8 bytes of memory for each input row where samples vary.
    """

    def __init__(self, layout: OutputLayout, num_input_rows: int):
        self.num_rows = 0
        self.num_failed = 0
        self.has_unknown = False
        self.problems: dict[str, str] = {}
        self.is_mine = np.zeros(num_input_rows, dtype=bool) if layout.is_shard else None
        self._layout = layout
        self._last_index = self._last_sample = -1
        self._starts: list[np.ndarray] = []

    @property
    def are_placed(self) -> bool:
        """Whether it can be told which rows of the input these are."""
        varies = self._layout.num_samples is None
        return "row_index" not in self.problems and not (varies and "sample_index" in self.problems)

    def samples(self, num_input_rows: int) -> SampleCounts:
        """Of this output's rows, if sample_index is as it must be. num_input_rows: those that the output covers."""
        if self._layout.num_samples is not None:
            return SampleCounts(num_input_rows, self._layout.num_samples)
        starts = np.concatenate([*self._starts, [self.num_rows]])
        return SampleCounts(len(starts) - 1, np.diff(starts))

    def add(self, table: pa.Table) -> None:
        """A table with the columns of the layout, or those of them that are looked at: see `_names`."""
        error, reason, *places = (table[name] for name in self._names)
        failed = error.is_valid().to_numpy()
        starts = self._add_samples(places.pop().to_numpy() if self._shows_samples else np.zeros(table.num_rows))
        self.num_failed += int(np.count_nonzero(failed))
        self._expect("finish_reason", pc.equal(reason, "error").to_numpy() == failed, "does not go with its error")
        if self.is_mine is not None:
            self._add_indices(places.pop().to_numpy(), starts, self.is_mine)
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
    def records_at_once(self) -> int:
        return self._layout.rows_at_once

    @property
    def _names(self) -> list[str]:
        own = ["row_index"] if self._layout.is_shard else []
        own += ["sample_index"] if self._shows_samples else []
        return [self._layout.prefix + name for name in ("error", "finish_reason", *own)]

    @property
    def _shows_samples(self) -> bool:
        return "sample_index" in self._layout.columns

    def _add_samples(self, samples: np.ndarray) -> np.ndarray:
        """Those of a row count up from 0. bool [N]: where the next row is expected to begin."""
        if self._layout.num_samples is not None:
            expected = (self.num_rows + np.arange(len(samples))) % self._layout.num_samples
            self._expect("sample_index", samples == expected, "is not the next one")
            return expected == 0
        before = np.concatenate([[self._last_sample], samples[:-1]])
        starts = (samples == 0) | (before < 0)
        self._expect("sample_index", samples == np.where(starts, 0, before + 1), "is not the next one")
        self._last_sample = int(samples[-1]) if len(samples) else self._last_sample
        self._starts.append(self.num_rows + np.flatnonzero(starts))
        return starts

    def _add_indices(self, indices: np.ndarray, starts: np.ndarray, is_mine: np.ndarray) -> None:
        """The samples of a row have its row_index, and the next row a larger one."""
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


def difference_from_input(
    output: Output, source: Input, layout: OutputLayout, is_mine: np.ndarray, samples: SampleCounts
) -> str | None:
    """The first place where the input's columns in the output are not the input's rows in order, each once.

    is_mine: bool for each row of the source, those that the output covers. samples: of these rows.
    """
    selection = Selection(source, is_mine)
    if isinstance(output, JsonlOutput):
        found = _difference_of_records(json_records(output.path), selection, layout, samples)
    elif source.schema.names:
        names = source.schema.names
        tables = (table for path in output.files for table in checked_tables(path, names))
        found = _difference_of_tables(_Rows(tables), selection, samples)
    else:
        return None  # without a column any row is like any other, and rows have been counted
    if found is None:
        return None
    place, column = found
    row = samples.row_of(place)
    if column is None or row >= selection.num_rows:
        return f"row {place + 1}: is there no more in the input, or not in the output"
    where = source.place_of(int(selection.row_indices[row]))
    return f"row {place + 1}: {column} is not what the input has at its place ({where})"


def _difference_of_records(
    own: Iterator[dict[str, Any]], selection: Selection, layout: OutputLayout, samples: SampleCounts
) -> tuple[int, str | None] | None:
    names, place = set(layout.names), 0
    for row, record in enumerate(islice(selection.records(), min(selection.num_rows, samples.num_rows))):
        expected = json_line(record)
        for line in islice(own, samples.start(row + 1) - samples.start(row)):
            if json_line({name: value for name, value in line.items() if name not in names}) != expected:
                return place, "the line"
            place += 1
        if place < samples.start(row + 1):
            return place, None
    return _ends(place, selection, samples, goes_on=next(own, None) is not None)


def _difference_of_tables(own: "_Rows", selection: Selection, samples: SampleCounts) -> tuple[int, str | None] | None:
    place = 0
    for first, rows in _pieces(selection, samples):
        expected = taken(rows, samples.repeated(first, rows.num_rows))
        table = own.take(expected.num_rows)
        differences = [(place + row, f"column {column!r}") for row, column in _differences(table, expected)]
        if differences:
            return min(differences)
        place += table.num_rows
        if table.num_rows < expected.num_rows:
            return place, None
    return _ends(place, selection, samples, goes_on=own.take(1).num_rows > 0)


def _ends(place: int, selection: Selection, samples: SampleCounts, goes_on: bool) -> tuple[int, str | None] | None:
    return (place, None) if goes_on or samples.num_rows < selection.num_rows else None


def _pieces(selection: Selection, samples: SampleCounts) -> Iterator[tuple[int, pa.Table]]:
    """The rows of a selection, with few samples at a time, and the number of the first; the input is read no further
    than needed."""
    first, end = 0, min(selection.num_rows, samples.num_rows)
    for table in selection.tables() if end else ():
        left = table.slice(0, end - first)
        while left.num_rows:
            rows = left.slice(0, samples.rows_within(first, BATCH_ROWS))
            yield first, rows
            first, left = first + rows.num_rows, left.slice(rows.num_rows)
        if first == end:
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
