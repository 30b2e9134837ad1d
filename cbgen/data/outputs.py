"""What a finished job leaves behind: one Parquet or JSONL file, or a folder of Parquet shards; and how it is told."""

import contextlib
import functools
import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cbgen.data.assembly import Results, json_line, output_records, output_schema, output_tables
from cbgen.data.files import DiskPatience, check_writable, delete, publish, publish_text
from cbgen.data.manifest import PartsFolder
from cbgen.data.rows import OutputLayout, OutputRow
from cbgen.data.samples import SampleCounts
from cbgen.data.selection import Selection
from cbgen.errors import OutputError, ResumeRefusedError, first_line

FOOTER_KEY = b"cbgen"
FOOTER_KEYS = {"job_id", "fingerprint", "input", "columns", "rows_ok", "rows_failed"}
# A row group is closed at the first of these.
ROW_GROUP_ROWS, ROW_GROUP_BYTES = 131_072, 128 << 20
HASH_PIECE_BYTES = 1 << 20
FOLDER_MARKER = "_job.json"
SHARD_NAME = re.compile(r"part-(\d{5,})-of-(\d{5,})\.parquet")


class Output(ABC):
    """Where the final rows go. Nothing is there under its name before it is whole."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def exists(self) -> bool:
        return self.path.exists()

    @property
    def files(self) -> list[Path]:
        """The files that hold the rows, in order."""
        return [self.path]

    @property
    def new_files(self) -> list[Path]:
        """What is going to be written, as far as it is known before."""
        return [self.path]

    def read_footer(self) -> dict[str, Any] | None:
        """What a finished output records about its job; None for one that cbgen did not finish."""
        try:
            footer = self._footer()
            return footer if footer.keys() >= FOOTER_KEYS else None
        except (pa.ArrowInvalid, OSError, ValueError, LookupError, TypeError, AttributeError):
            return None

    def errors_in(self, layout: OutputLayout) -> str:
        """Where the user finds why rows failed."""
        return f"column {layout.prefix}error"

    def damage(self, footer: dict[str, Any]) -> str | None:
        """What of a finished output's files is not as it was recorded; checksums inside of Parquet are seen later."""
        folder = self._record.parent
        for name, (_, digest) in footer.get("files", {}).items():
            if not (folder / name).is_file() or file_hash(folder / name) != digest:
                return f"{folder / name} is not what was written"
        return None

    @property
    def _record(self) -> Path:
        """The file that tells of the job."""
        return self.path

    def finished_rows(self) -> Iterator[OutputRow] | None:
        """The results of a finished output, where its rows tell their keys; None where the keys must be found."""
        return None

    def refuse_foreign(self) -> None:
        """Raises ResumeRefusedError when something that cbgen did not finish is in the way."""
        if self.exists and self.read_footer() is None:
            raise ResumeRefusedError(f"{self.path}: is not a finished output of cbgen; move it or choose another --out")

    @abstractmethod
    def write(
        self, source: Selection, results: Results, layout: OutputLayout, footer: dict[str, Any], patience: DiskPatience
    ) -> None:
        """Publishes every row in order. footer: what is recorded about the job."""

    @abstractmethod
    def _footer(self) -> dict[str, Any]:
        """Raises what json and pyarrow do for a file that is not one."""


class ParquetOutput(Output):
    """One file, with the footer in its metadata. A file that was cut has none."""

    def write(
        self, source: Selection, results: Results, layout: OutputLayout, footer: dict[str, Any], patience: DiskPatience
    ) -> None:
        schema = schema_with_footer(source, layout, footer)

        def write(path: Path) -> None:
            write_parquet(path, schema, output_tables(source, results, layout))
            _check_count(self.path, pq.read_metadata(path).num_rows, results.samples)

        patience.publish(self.path, write)

    def _footer(self) -> dict[str, Any]:
        return json.loads((pq.read_schema(self.path).metadata or {})[FOOTER_KEY])


class JsonlOutput(Output):
    """One file, and beside it another that records the job.

    The record is published first, with size and hash of what is about to be renamed: a file that does not match it is
    that of a run that was killed in between, or nobody's.
    """

    @property
    def sidecar(self) -> Path:
        return self.path.with_name(self.path.name + ".job.json")

    @property
    def _record(self) -> Path:
        return self.sidecar

    @property
    def exists(self) -> bool:
        return any(path.exists() for path in self.files)

    def refuse_foreign(self) -> None:
        if self.exists and self.read_footer() is None and not self._was_being_published():
            there = next(path for path in self.files if path.exists())
            raise ResumeRefusedError(f"{there}: is not a finished output of cbgen; move it or choose another --out")

    def write(
        self, source: Selection, results: Results, layout: OutputLayout, footer: dict[str, Any], patience: DiskPatience
    ) -> None:
        def write(path: Path) -> None:
            count = 0
            with open(path, "w", encoding="utf-8") as file:
                for rows in output_records(source, results, layout):
                    file.writelines(json_line(row) for row in rows)
                    count += len(rows)
            _check_count(self.path, count, results.samples)
            publish_sidecar(self.sidecar, footer, {self.path: path})

        patience.publish(self.path, write)

    def _was_being_published(self) -> bool:
        """Whether a run whose parts are still there recorded what it was about to rename."""
        try:
            recorded = json.loads(self.sidecar.read_text(encoding="utf-8"))
            begun = PartsFolder(self.path).read_manifest()
            return begun is not None and recorded["job_id"] == begun.job_id
        except (OSError, ValueError, LookupError, TypeError):
            return False

    def _footer(self) -> dict[str, Any]:
        return read_sidecar(self.sidecar, self.path.parent)


class FolderOutput(Output):
    """Parquet shards of so many rows, each with the footer, and a marker that is written last.

    out/part-00000-of-00037.parquet ... part-00036-of-00037.parquet, _job.json
    """

    def __init__(self, path: Path, rows_per_shard: int):
        super().__init__(path)
        self._rows_per_shard = rows_per_shard

    @property
    def marker(self) -> Path:
        return self.path / FOLDER_MARKER

    @property
    def _record(self) -> Path:
        return self.marker

    @property
    def exists(self) -> bool:
        """An empty folder is no output."""
        return self.path.is_file() or (self.path.is_dir() and any(self.path.iterdir()))

    @property
    def files(self) -> list[Path]:
        return sorted(path for path in self.path.iterdir() if SHARD_NAME.fullmatch(path.name))

    def refuse_foreign(self) -> None:
        """Shards without a marker are those of a job that was stopped while it wrote them, if its parts are there."""
        if not self.path.is_dir():
            return super().refuse_foreign()
        known = {FOLDER_MARKER, *(path.name for path in self.files)}
        strangers = sorted(path.name for path in self.path.iterdir() if path.name not in known and path.name[0] != ".")
        if strangers or (self.marker.exists() and self.read_footer() is None):
            raise ResumeRefusedError(
                f"{self.path}: holds {strangers[0] if strangers else 'shards'} that no job of cbgen finished; move it "
                "or choose another --out"
            )
        return None

    def write(
        self, source: Selection, results: Results, layout: OutputLayout, footer: dict[str, Any], patience: DiskPatience
    ) -> None:
        paths: list[Path] = []
        # A disk that is full begins the whole folder anew once there is room: the tables come only once.
        patience.run(lambda: paths.extend(self._write_shards(source, results, layout, footer)))
        patience.run(lambda: publish_sidecar(self.marker, footer, {path: path for path in paths}))

    def _write_shards(
        self, source: Selection, results: Results, layout: OutputLayout, footer: dict[str, Any]
    ) -> list[Path]:
        schema = schema_with_footer(source, layout, {name: told for name, told in footer.items() if name != "runs"})
        paths = self.write_tables(schema, output_tables(source, results, layout), results.samples)
        _check_count(self.path, sum(pq.read_metadata(path).num_rows for path in paths), results.samples)
        return paths

    def write_tables(self, schema: pa.Schema, tables: Iterator[pa.Table], samples: SampleCounts) -> list[Path]:
        """Publishes the rows of all samples as shards, and deletes earlier ones; the marker is to be written after.

        The samples of a row are in one shard.
        """
        check_writable(self.path)
        for old in (self.marker, *self.path.glob(".part-*.tmp-*")):  # and what a killed run had not finished
            delete(old)
        lots = list(samples.lots(self._rows_per_shard)) or [(0, 0)]
        sizes = [samples.start(first + count) - samples.start(first) for first, count in lots]
        paths = [self.path / f"part-{number:05d}-of-{len(lots):05d}.parquet" for number in range(len(lots))]
        for path, piece in zip(paths, _cut(tables, sizes), strict=True):
            publish(path, functools.partial(write_parquet, schema=schema, tables=piece))
        if next(tables, None) is not None:  # which also lets the input see whether it was changed meanwhile
            raise OutputError(
                f"{self.path}: there are more rows than {samples.total}; the parts are kept, run it again"
            )
        for stale in set(self.files) - set(paths):
            delete(stale)
        return paths

    def _footer(self) -> dict[str, Any]:
        return read_sidecar(self.marker, self.path)


def open_output(path: Path, is_folder: bool, rows_per_shard: int) -> Output:
    """A file by the extension of its path, or a folder."""
    if is_folder:
        return FolderOutput(path, rows_per_shard)
    return JsonlOutput(path) if path.suffix == ".jsonl" else ParquetOutput(path)


def schema_with_footer(source: Selection, layout: OutputLayout, footer: dict[str, Any]) -> pa.Schema:
    metadata = {**(source.schema.metadata or {}), FOOTER_KEY: json.dumps(footer, ensure_ascii=False).encode()}
    return output_schema(source, layout).with_metadata(metadata)


def write_parquet(path: Path, schema: pa.Schema, tables: Iterator[pa.Table]) -> None:
    """Tables of any sizes as row groups of sane ones, with a checksum of every page."""
    pending: list[pa.Table] = []
    num_rows = num_bytes = 0
    try:
        with pq.ParquetWriter(path, schema, write_page_checksum=True) as writer:
            for table in tables:
                pending.append(table)
                num_rows, num_bytes = num_rows + table.num_rows, num_bytes + table.nbytes
                if num_rows >= ROW_GROUP_ROWS or num_bytes >= ROW_GROUP_BYTES:
                    writer.write_table(_joined(pending, schema), row_group_size=ROW_GROUP_ROWS)
                    num_rows = num_bytes = 0
            if pending:
                writer.write_table(_joined(pending, schema), row_group_size=ROW_GROUP_ROWS)
    except pa.ArrowException as error:
        raise OutputError(
            f"a column of the input cannot be written as Parquet: {first_line(error)}; the results are kept: drop the "
            "column from the input and run the same command again"
        ) from error


def _joined(pending: list[pa.Table], schema: pa.Schema) -> pa.Table:
    """Empties the list."""
    joined = pa.concat_tables(pending).replace_schema_metadata(schema.metadata)
    pending.clear()
    return joined


def publish_sidecar(path: Path, footer: dict[str, Any], files: dict[Path, Path]) -> None:
    """Records the job, and of each file its name seen from here, size and hash, by which damage is found later.

    files: where each lies by now, which may be a temporary name.
    """
    told = {
        os.path.relpath(file, path.parent): [there.stat().st_size, file_hash(there)] for file, there in files.items()
    }
    rest = {"files": told, **{name: value for name, value in footer.items() if name != "runs"}}
    text = json.dumps(rest, indent=2, ensure_ascii=False)
    if "runs" in footer:  # long lists of numbers, in one line
        text = f'{text[:-2]},\n  "runs": {json.dumps(footer["runs"], ensure_ascii=False)}\n}}'
    publish_text(path, text)


def read_sidecar(path: Path, folder: Path) -> dict[str, Any]:
    """Raises ValueError when one of the files that it tells of has another size or is missing."""
    footer = json.loads(path.read_text(encoding="utf-8"))
    for name, (size, _) in footer["files"].items():
        with contextlib.suppress(FileNotFoundError):
            if (folder / name).stat().st_size == size:
                continue
        raise ValueError(f"{folder / name} is not what {path} records")
    return footer


def file_hash(path: Path) -> str:
    digest = hashlib.blake2b()
    with open(path, "rb") as file:
        while piece := file.read(HASH_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _cut(tables: Iterator[pa.Table], sizes: list[int]) -> Iterator[Iterator[pa.Table]]:
    """The same tables for shards of these sizes; each one's are to be taken before the next one's."""
    pending: list[pa.Table] = []

    def shard(left: int) -> Iterator[pa.Table]:
        while left and (table := pending.pop() if pending else next(tables, None)) is not None:
            piece = table.slice(0, left)
            left -= piece.num_rows
            if piece.num_rows < table.num_rows:
                pending.append(table.slice(piece.num_rows))
            yield piece

    for size in sizes:
        yield shard(size)


def _check_count(path: Path, num_rows: int, samples: SampleCounts) -> None:
    if num_rows != samples.total:
        raise OutputError(f"{path}: {num_rows} rows were written of {samples.total}; the parts are kept, run it again")
