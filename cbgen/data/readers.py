"""Input files as rows, lazily, and as Arrow tables with every column unchanged.

    --in a.parquet b.jsonl "shards/*.parquet" folder/      files in the order given; globs and folders in natural order

A line of JSONL that is not a JSON object is a row with an error that names file and line; the next line is unharmed.
"""

import glob
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from cbgen.data.jsonl import JsonlFile
from cbgen.data.rows import PromptRow
from cbgen.errors import InputChangedError, UsageError

PARQUET_SUFFIXES = (".parquet", ".pq")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
BATCH_ROWS = 1024


class InputFile(Protocol):
    """One shard. `schema` is fixed when it is opened; `num_rows` counts malformed rows too."""

    path: Path
    schema: pa.Schema
    num_rows: int

    def records(self, columns: list[str] | None) -> Iterator[tuple[dict[str, Any], str | None]]:
        """Each row's values (of all columns for None) and its error, if it could not be read."""

    def tables(self, schema: pa.Schema) -> Iterator[pa.Table]:
        """The rows again, as tables of the given schema, which this file's own was unified into."""


class ParquetFile:
    """A Parquet shard, read by row batches."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with pq.ParquetFile(path) as file:
                self.schema = file.schema_arrow
                self.num_rows = file.metadata.num_rows
        except (pa.ArrowInvalid, OSError) as error:
            raise UsageError(f"{path}: not a readable Parquet file: {_first_line(error)}") from error

    def records(self, columns: list[str] | None) -> Iterator[tuple[dict[str, Any], str | None]]:
        wanted = self.schema.names if columns is None else [name for name in columns if name in self.schema.names]
        for batch in self._batches(wanted):
            for values, error in _python_rows(batch, self.path):
                yield {name: values.get(name) for name in columns or wanted}, error

    def tables(self, schema: pa.Schema) -> Iterator[pa.Table]:
        for batch in self._batches(self.schema.names):
            yield _cast(pa.Table.from_batches([batch]), schema)

    def _batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        with pq.ParquetFile(self.path) as file:
            if columns:
                yield from file.iter_batches(batch_size=BATCH_ROWS, columns=columns)
            else:  # pyarrow gives no batches for no columns, but the rows are there
                rest = [min(BATCH_ROWS, self.num_rows - first) for first in range(0, self.num_rows, BATCH_ROWS)]
                empty = pa.struct([])
                yield from (pa.RecordBatch.from_struct_array(pa.array([{}] * size, empty)) for size in rest)


@dataclass(frozen=True)
class _Identity:
    """What tells, without reading a file, that it was changed."""

    path: str
    size_bytes: int
    modified_ns: int


class Input:
    """All shards of a job as one sequence of rows, with one schema."""

    def __init__(self, files: list[InputFile], limit: int | None = None):
        """limit: only the first so many rows. Raises UsageError when the shards' schemas cannot be unified."""
        self._files = files
        self._identities = [_identity(file.path) for file in files]
        self._limit = limit
        self.schema = _unify(files)
        total = sum(file.num_rows for file in files)
        self.num_rows = total if limit is None else min(limit, total)

    @property
    def identity(self) -> list[list[Any]]:
        """Paths, sizes and times of change, as JSON holds them, and the limit: equal for an input left alone."""
        return [[i.path, i.size_bytes, i.modified_ns] for i in self._identities] + [["limit", self._limit]]

    def rows(self, columns: list[str]) -> Iterator[PromptRow]:
        """Every row in order, with the values of the given columns (None where a shard lacks one)."""
        index = 0
        for file in self._files:
            for values, error in file.records(columns):
                if index >= self.num_rows:
                    return
                yield PromptRow(index, values, error)
                index += 1

    def records(self) -> Iterator[dict[str, Any]]:
        """Every row in order, with all its values as the file has them; a malformed row is empty."""
        self.check_unchanged()
        index = 0
        for file in self._files:
            for values, _ in file.records(None):
                if index >= self.num_rows:
                    return
                yield values
                index += 1

    def tables(self) -> Iterator[pa.Table]:
        """Every row in order, as tables of `schema`."""
        self.check_unchanged()
        left = self.num_rows
        for file in self._files:
            for table in file.tables(self.schema):
                if left > 0:
                    yield table.slice(0, left)
                left -= table.num_rows

    def check_unchanged(self) -> None:
        """Raises InputChangedError when a file is not what it was when the input was opened."""
        for file, identity in zip(self._files, self._identities, strict=True):
            if not file.path.exists() or _identity(file.path) != identity:
                raise InputChangedError(
                    f"{file.path} was changed while the job ran; run the same command again: finished rows are kept"
                )


def open_input(sources: Iterable[str], limit: int | None = None) -> Input:
    """Opens files, globs and folders. Raises UsageError for what is missing, empty or of another format."""
    files: list[InputFile] = []
    for path in _expand(sources):
        if path.suffix in PARQUET_SUFFIXES:
            files.append(ParquetFile(path))
        elif path.suffix in JSONL_SUFFIXES:
            files.append(JsonlFile(path))
        else:
            known = ", ".join(PARQUET_SUFFIXES + JSONL_SUFFIXES)
            raise UsageError(f"{path}: the format is told by the extension, one of {known}")
    if not files:
        raise UsageError("no input: give at least one file, folder or glob")
    return Input(files, limit)


def _expand(sources: Iterable[str]) -> Iterator[Path]:
    for source in sources:
        path = Path(source).expanduser()
        if path.is_file():
            yield path
            continue
        if path.is_dir():
            found = [p for p in path.iterdir() if p.suffix in PARQUET_SUFFIXES + JSONL_SUFFIXES and p.is_file()]
        else:
            found = [Path(match) for match in glob.glob(str(path), recursive=True) if Path(match).is_file()]
        if not found:
            what = "has no .parquet or .jsonl file" if path.is_dir() else "no such file, folder or glob match"
            raise UsageError(f"{source}: {what}")
        yield from sorted(found, key=lambda p: _natural(str(p)))


def _natural(text: str) -> list[Any]:
    """A sorting key that puts part-2 before part-10."""
    return [int(piece) if piece.isdecimal() else piece for piece in re.split(r"(\d+)", text)]


def _identity(path: Path) -> _Identity:
    stat = path.stat()
    return _Identity(str(path), stat.st_size, stat.st_mtime_ns)


def _unify(files: list[InputFile]) -> pa.Schema:
    """Columns by name in order of first appearance; numbers widen, a missing or all-null column is null there."""
    schema = files[0].schema
    for file in files[1:]:
        try:
            schema = pa.unify_schemas([schema, file.schema], promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise UsageError(_conflict(files, file) or f"{file.path}: {_first_line(error)}") from error
    for place, field in enumerate(schema):
        present = [file.schema.get_field_index(field.name) for file in files]
        for file, own in zip(files, present, strict=True):
            if own >= 0 and not _widens(file.schema.field(own).type, field.type):
                raise UsageError(
                    _conflict(files, file) or f"{file.path}: column {field.name!r} does not become {field.type}"
                )
        if min(present) < 0:
            schema = schema.set(place, field.with_nullable(True))
    return schema


def _widens(narrow: pa.DataType, wide: pa.DataType) -> bool:
    """Whether every value of one type can be written as the other; integers may be rounded to floats."""
    if narrow == wide or pa.types.is_null(narrow):
        return True
    if pa.types.is_integer(narrow):
        bits = narrow.bit_width + (pa.types.is_unsigned_integer(narrow) and pa.types.is_signed_integer(wide))
        return pa.types.is_floating(wide) or (pa.types.is_integer(wide) and bits <= wide.bit_width)
    if pa.types.is_struct(narrow) and pa.types.is_struct(wide):
        return all(_widens(field.type, wide.field(field.name).type) for field in narrow)
    if pa.types.is_nested(narrow) and narrow.num_fields == 1 == wide.num_fields:
        return _widens(narrow.field(0).type, wide.field(0).type)
    kinds = (pa.types.is_floating, _is_text, _is_bytes)
    return any(kind(narrow) and kind(wide) for kind in kinds)


def _is_text(type_: pa.DataType) -> bool:
    return pa.types.is_string(type_) or pa.types.is_large_string(type_)


def _is_bytes(type_: pa.DataType) -> bool:
    return pa.types.is_binary(type_) or pa.types.is_large_binary(type_)


def _conflict(files: list[InputFile], culprit: InputFile) -> str | None:
    """Names the column and the two files that disagree on it, if it is two."""
    for other in files:
        for field in culprit.schema:
            place = other.schema.get_field_index(field.name)
            theirs = other.schema.field(place).type if place >= 0 else field.type
            if not _widens(theirs, field.type) and not _widens(field.type, theirs):
                types = f"{theirs} in {other.path} and {field.type} in {culprit.path}"
                return f"column {field.name!r} is {types}; give it one type"
    return None


def _cast(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with the columns and types of a schema that it widens to; large integers become floats rounded."""
    if table.schema.equals(schema, check_metadata=False):
        return table
    present = set(table.schema.names)
    columns = [
        table[field.name].cast(field.type, safe=False)
        if field.name in present
        else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _python_rows(batch: pa.RecordBatch, path: Path) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Rows as Python values, dates and times as text; text that is not UTF-8 is escaped, and is its row's error."""
    for place, field in enumerate(batch.schema):
        if pa.types.is_temporal(field.type):  # Python's own dates end in the year 9999 and know no nanoseconds
            batch = batch.set_column(place, field.name, batch.column(place).cast(pa.string()))
    try:
        yield from ((row, None) for row in batch.to_pylist())
    except UnicodeDecodeError:
        for number in range(batch.num_rows):
            yield _escaped_row(batch.slice(number, 1), path)


def _escaped_row(row: pa.RecordBatch, path: Path) -> tuple[dict[str, Any], str | None]:
    values, broken = {}, None
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            values[name] = column[0].as_py()
        except UnicodeDecodeError:
            broken = f"{path.name}: column {name!r} of this row is not UTF-8"
            flat = _is_text(column.type)
            values[name] = (
                column.cast(pa.large_binary())[0].as_py().decode("utf-8", "backslashreplace") if flat else None
            )
    return values, broken


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
