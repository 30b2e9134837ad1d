"""Input files as rows, lazily, and as Arrow tables with every column unchanged.

    a.parquet b.jsonl "shards/*.parquet" folder/      files in the order given; globs and folders in natural order

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
from cbgen.data.rows import PromptRow, parts_path
from cbgen.data.schemas import cast, python_rows, unify
from cbgen.errors import InputError, UsageError, first_line

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
            raise UsageError(f"{path}: not a readable Parquet file: {first_line(error)}") from error

    def records(self, columns: list[str] | None) -> Iterator[tuple[dict[str, Any], str | None]]:
        wanted = self.schema.names if columns is None else [name for name in columns if name in self.schema.names]
        for batch in self._batches(wanted):
            for values, error in python_rows(batch, self.path):
                yield {name: values.get(name) for name in columns or wanted}, error

    def tables(self, schema: pa.Schema) -> Iterator[pa.Table]:
        for batch in self._batches(self.schema.names):
            yield cast(pa.Table.from_batches([batch]), schema)

    def _batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        if columns:
            try:
                with pq.ParquetFile(self.path) as file:
                    yield from file.iter_batches(batch_size=BATCH_ROWS, columns=columns)
            except (pa.ArrowInvalid, OSError) as error:
                raise InputError(f"{self.path}: cannot be read to its end: {first_line(error)}") from error
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
        self.schema = unify(files)
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
        """Raises InputError when a file is not what it was when the input was opened."""
        for file, identity in zip(self._files, self._identities, strict=True):
            if not file.path.exists() or _identity(file.path) != identity:
                raise InputError(
                    f"{file.path} was changed while the job ran; run the same command again: finished rows are kept"
                )


def open_input(sources: Iterable[str], limit: int | None = None, output: Path | None = None) -> Input:
    """Opens files, globs and folders. Raises UsageError for what is missing, empty or of another format.

    output: where results go; neither it nor its parts are input, should a folder or glob hold them.
    """
    files: list[InputFile] = []
    for path in _expand(sources, output):
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


def _expand(sources: Iterable[str], output: Path | None) -> Iterator[Path]:
    for source in sources:
        path = Path(source).expanduser()
        if path.is_file():
            yield path
            continue
        if path.is_dir():
            found = [p for p in path.iterdir() if p.suffix in PARQUET_SUFFIXES + JSONL_SUFFIXES and p.is_file()]
        else:
            found = [Path(match) for match in glob.glob(str(path), recursive=True) if Path(match).is_file()]
        found = [match for match in found if output is None or not _is_output(match, output)]
        if not found:
            what = "has no .parquet or .jsonl file" if path.is_dir() else "no such file, folder or glob match"
            raise UsageError(f"{source}: {what}")
        yield from sorted(found, key=lambda p: _natural(str(p)))


def _is_output(path: Path, output: Path) -> bool:
    own = (output.resolve(), parts_path(output).resolve())
    return path.resolve() in own or path.resolve().parent in own


def _natural(text: str) -> list[Any]:
    """A sorting key that puts part-2 before part-10."""
    return [int(piece) if piece.isdecimal() else piece for piece in re.split(r"(\d+)", text)]


def _identity(path: Path) -> _Identity:
    stat = path.stat()
    return _Identity(str(path.resolve()), stat.st_size, stat.st_mtime_ns)
