"""Input of every kind as rows, lazily, and as Arrow tables with every column unchanged.

    a.parquet b.jsonl.gz "shards/*.parquet" folder/    files in the order given; globs and folders in natural order
    -                                                  the standard input, of any of these formats
    s3://bucket/folder hf://datasets/name/*.parquet    what fsspec reads: files, folders, globs
    DatasetSource("name", "config", "train")           what the library `datasets` loads

A line of JSONL that is not a JSON object is a row with an error that names file and line; the next line is unharmed.
"""

import glob
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import pyarrow as pa

from cbgen.data.hf_dataset import DatasetFile, DatasetSource
from cbgen.data.jsonl import JsonlFile
from cbgen.data.origins import PARQUET_SUFFIXES, SUFFIXES, Origin, checked_suffix, natural_key, suffix_of
from cbgen.data.parquet import ParquetFile
from cbgen.data.remote import copy_from_url, is_url
from cbgen.data.rows import PromptRow, parts_path
from cbgen.data.schemas import unify
from cbgen.data.spool import Spool
from cbgen.errors import InputError, UsageError

STDIN = "-"


class InputFile(Protocol):
    """One shard. `schema` is fixed when it is opened; `num_rows` counts malformed rows too."""

    origin: Origin
    schema: pa.Schema
    num_rows: int

    def records(self, columns: list[str] | None) -> Iterator[tuple[dict[str, Any], str | None]]:
        """Each row's values (of all columns for None) and its error, if it could not be read."""

    def tables(self, schema: pa.Schema) -> Iterator[pa.Table]:
        """The rows again, as tables of the given schema, which this file's own was unified into."""

    def place_of(self, index: int) -> str:
        """Where a row stands, as a user finds it; index counts from 0."""


class Input:
    """All shards of a job as one sequence of rows, with one schema."""

    def __init__(self, files: Sequence[InputFile], limit: int | None = None, spool: Spool | None = None):
        """limit: only the first so many rows. spool: the copies among the files, deleted by close().

        Raises UsageError when the shards' schemas cannot be unified.
        """
        self._files = files
        self._limit = limit
        self._spool = spool
        self.schema = unify(files)
        total = sum(file.num_rows for file in files)
        self.num_rows = total if limit is None else min(limit, total)

    def __enter__(self) -> "Input":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Deletes what was copied; the input cannot be read any more."""
        if self._spool is not None:
            self._spool.close()

    @property
    def identity(self) -> list[list[Any]]:
        """What each file was when it was opened, as JSON holds it, and the limit: equal for an input left alone."""
        return [list(file.origin.identity) for file in self._files] + [["limit", self._limit]]

    @property
    def size_bytes(self) -> int:
        """Of all files together, as they lie: compressed, and with the rows beyond the limit."""
        return sum(file.origin.size_bytes for file in self._files)

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
        """Every row in order, with all its values as the file has them; a malformed row is empty.

        Raises InputError for a file that was changed since it was opened, before the first row or after the last.
        """
        self.check_unchanged()
        for values, _ in islice(chain.from_iterable(file.records(None) for file in self._files), self.num_rows):
            yield values
        self.check_unchanged()

    def tables(self) -> Iterator[pa.Table]:
        """Every row in order, as tables of `schema`. Raises as `records` does."""
        self.check_unchanged()
        left = self.num_rows
        for file in self._files:
            for table in file.tables(self.schema):
                if left > 0:
                    yield table.slice(0, left)
                left -= table.num_rows
        self.check_unchanged()

    def place_of(self, index: int) -> str:
        """Where a row stands, for messages: "a.jsonl, line 7" or "b.parquet, row 12", counted from 1."""
        for file in self._files:
            if index < file.num_rows:
                return file.place_of(index)
            index -= file.num_rows
        raise IndexError(index)

    def check_unchanged(self) -> None:
        """Raises InputError when a file is not what it was when the input was opened."""
        for file in self._files:
            if file.origin.was_changed():
                raise InputError(
                    f"{file.origin.name} was changed while the job ran; run the same command again: finished rows are "
                    "kept"
                )


def open_input(
    sources: Iterable[str],
    limit: int | None = None,
    output: Path | None = None,
    dataset: DatasetSource | None = None,
    error_file: Path | None = None,
    open_file: Callable[[Origin], InputFile] | None = None,
) -> Input:
    """Opens files, globs, folders, URLs and the standard input; or a dataset instead of them.

    output, error_file: where results go, a file or a folder; neither it, what is in it, nor its parts are input, should
    a folder or glob hold them. open_file: how a file is read; by its suffix unless given. Raises UsageError for what is
    missing, broken or of another format. To be closed where it may hold copies.
    """
    own = [path for path in (output, error_file) if path is not None]
    sources = list(sources)
    if dataset is not None:
        if sources:
            raise UsageError(
                f"INPUT ({sources[0]}) and --dataset ({dataset.name}) exclude each other: give one of them"
            )
        return Input([DatasetFile(dataset)], limit)
    if not sources:
        raise UsageError("no input: give at least one file, folder or glob")
    if sources.count(STDIN) > 1:
        raise UsageError(f"{STDIN} is the standard input, which can be read only once: give it once")
    spool = Spool()
    with ExitStack() as on_failure:
        on_failure.callback(spool.close)
        origins = (origin for source in sources for origin in _origins(source, own, spool))
        files = [(open_file or open_by_suffix)(origin) for origin in origins]
        opened = Input(files, limit, spool)
        on_failure.pop_all()
    return opened


def open_by_suffix(origin: Origin) -> InputFile:
    """Parquet, or JSONL."""
    is_parquet = checked_suffix(str(origin.path)) in PARQUET_SUFFIXES
    return ParquetFile(origin) if is_parquet else JsonlFile(origin)


def _origins(source: str, outputs: list[Path], spool: Spool) -> Iterator[Origin]:
    """The files of one source, in order."""
    if source == STDIN:
        yield spool.add_stream(sys.stdin.buffer, "stdin", STDIN)
    elif is_url(source):
        yield from copy_from_url(source, spool)
    elif Path(source).is_fifo():  # such as <(zcat ...) of a shell
        with open(source, "rb") as pipe:
            yield spool.add_stream(pipe, source, source)
    else:
        yield from map(Origin.local, _local_files(source, outputs))


def _local_files(source: str, outputs: list[Path]) -> list[Path]:
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        found = [p for p in path.iterdir() if suffix_of(p.name) and p.is_file()]
    else:
        found = [Path(match) for match in glob.glob(str(path), recursive=True) if Path(match).is_file()]
    found = [match for match in found if not any(_is_output(match, output) for output in outputs)]
    if not found:
        what = f"has no file of {', '.join(SUFFIXES)}" if path.is_dir() else "no such file, folder or glob match"
        raise UsageError(f"{source}: {what}")
    return sorted(found, key=lambda p: natural_key(str(p)))


def _is_output(path: Path, output: Path) -> bool:
    own = {output.resolve(), parts_path(output).resolve()}
    return not own.isdisjoint((path.resolve(), *path.resolve().parents))
