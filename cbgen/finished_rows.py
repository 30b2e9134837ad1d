"""A finished output read again: what it records of its job, and its rows, batch by batch, with every checksum."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cbgen.data.outputs import FOOTER_KEY, FOOTER_KEYS, FolderOutput, JsonlOutput, Output
from cbgen.data.parquet import READING, batch_sizes
from cbgen.data.rows import OPTIONAL_COLUMNS, RESULT_SCHEMA, OutputLayout
from cbgen.errors import InputError, first_line

RECORDED_KEYS = FOOTER_KEYS | {"input_rows", "rows_total", "generation"}
_FAILURES = (pa.ArrowException, OSError, ValueError)


def sidecar_of(output: Output) -> Path | None:
    """The file beside the rows that records the job; None where the rows' own file does."""
    if isinstance(output, JsonlOutput):
        return output.sidecar
    return output.marker if isinstance(output, FolderOutput) else None


def recorded_footer(output: Output) -> dict[str, Any]:
    """What is recorded of the job, whether or not the rows are still what they were. Raises InputError."""
    path = sidecar_of(output)
    try:
        if path is None:
            text = (pq.read_schema(output.path).metadata or {}).get(FOOTER_KEY, b"null")
        else:
            text = path.read_bytes()
        footer = json.loads(text)
    except _FAILURES as error:
        raise InputError(f"{path or output.path}: cannot be read: {first_line(error)}") from error
    if not isinstance(footer, dict) or not footer.keys() >= RECORDED_KEYS:
        raise InputError(f"{path or output.path}: records no job of cbgen")
    return footer


def is_openai_batch(footer: dict[str, Any]) -> bool:
    """Whether the rows are lines of a batch, and have no layout."""
    return footer["fingerprint"]["format"] == "openai-batch"


def finished_layout(footer: dict[str, Any]) -> OutputLayout:
    """The columns that the job of a footer has added to the input's."""
    names, last = footer["columns"], RESULT_SCHEMA.names[-1]
    prefix = names[-1].removesuffix(last)
    return OutputLayout(
        # An output that does not record it is of a time when it did not vary.
        num_samples=footer.get("num_samples", footer["fingerprint"]["n"]),
        optional=frozenset(name for name in OPTIONAL_COLUMNS if prefix + name in names),
        prefix=prefix,
        is_shard=footer["fingerprint"]["shard"] is not None,
    )


def file_schema(path: Path) -> pa.Schema:
    """Of a Parquet file, without metadata. Raises InputError."""
    try:
        return pq.read_schema(path).remove_metadata()
    except _FAILURES as error:
        raise InputError(f"{path}: not a readable Parquet file: {first_line(error)}") from error


def checked_tables(path: Path, columns: list[str] | None = None, share: int = 1) -> Iterator[pa.Table]:
    """All or some columns of a Parquet file, by batches of bounded size, each page against its checksum.

    share: how many files are read side by side, and divide the memory. Raises InputError.
    """
    try:
        with pq.ParquetFile(path, **READING) as file:
            wanted = file.schema_arrow.names if columns is None else columns
            sizes = batch_sizes(path, file.metadata, set(wanted))
            for group in range(file.num_row_groups):
                rows = max(1, sizes[group] // share)
                for batch in file.iter_batches(batch_size=rows, row_groups=[group], columns=wanted):
                    yield pa.Table.from_batches([batch]).replace_schema_metadata(None)
    except _FAILURES as error:
        raise InputError(f"{path}: cannot be read to its end: {first_line(error)}") from error


def json_records(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a JSONL output. Raises InputError for one that is no JSON object."""
    number = 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise InputError(f"{path}, line {number}: is no JSON object")
                yield record
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}, line {number}: not valid JSON: {first_line(error)}") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
