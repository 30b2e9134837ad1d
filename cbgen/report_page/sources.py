"""The rows of a job as tables of one kind, from whatever holds them: a finished output, or the parts of one at work."""

from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cbgen.data.batches import BATCH_ROWS
from cbgen.data.manifest import told_by_part
from cbgen.data.openai_output import OpenAIBatchOutput
from cbgen.data.outputs import JsonlOutput
from cbgen.data.rows import RESULT_SCHEMA, OutputRow, part_table
from cbgen.errors import InputError, first_line
from cbgen.finished_rows import checked_tables, file_schema, finished_layout, is_openai_batch, json_records
from cbgen.status import Situation

# What the charts are made of. Texts are read apart, of few rows.
COLUMNS = (
    "finish_reason",
    "error",
    "prompt_tokens",
    "completion_tokens",
    "queue_s",
    "prefill_s",
    "decode_s",
    "arrival_time",
    "finish_time",
)
PART_COLUMNS = ["key", "sample_index", *COLUMNS]
_SCHEMA = pa.schema([RESULT_SCHEMA.field(name).with_nullable(True) for name in COLUMNS])
# Microseconds since 1970 are not, of any year that there is.
LARGEST = 1e18
_MOMENTS = ("arrival_time", "finish_time")


def openai_output(situation: Situation) -> OpenAIBatchOutput | None:
    """The two files of a finished OpenAI batch; None for every other output."""
    footer = situation.footer
    if footer is None or not is_openai_batch(footer):
        return None
    answers, errors = (situation.output.path.parent / name for name in footer["files"])
    return OpenAIBatchOutput(answers, errors)


def parts_told(situation: Situation) -> list[tuple[int, int]]:
    """Generation and rows of each part of a job that is not finished, oldest first. A result of a later generation may
    replace an earlier one."""
    return [
        (told_by_part(table.schema.metadata)["generation"], pq.read_metadata(path).num_rows)
        for path, table in situation.folder.parts([])
    ]


def row_tables(situation: Situation) -> Iterator[pa.Table]:
    """Tables of COLUMNS in the order of the rows; of a job that is not finished of PART_COLUMNS, oldest part first.

    A column that the output has not, since it is of an earlier version or an OpenAI batch, is null. Raises InputError
    for an output that cannot be read, FileNotFoundError when the job has deleted its parts meanwhile.
    """
    batch = openai_output(situation)
    if situation.footer is None:
        for _, table in situation.folder.parts(PART_COLUMNS):
            yield table.replace_schema_metadata(None)
    elif batch is not None:
        yield from _batch_tables(batch)
    else:
        prefix = finished_layout(situation.footer).prefix
        for path in situation.output.files:
            is_jsonl = isinstance(situation.output, JsonlOutput)
            yield from _jsonl_tables(path, prefix) if is_jsonl else _parquet_tables(path, prefix)


def _parquet_tables(path: Path, prefix: str) -> Iterator[pa.Table]:
    there = set(file_schema(path).names)
    names = [name for name in COLUMNS if prefix + name in there]
    for table in checked_tables(path, [prefix + name for name in names]):
        columns = dict(zip(names, table.columns, strict=True))
        try:
            whole = _whole(columns, table.num_rows)
        except pa.ArrowException as error:
            raise _foreign(path, error) from error
        yield whole


def _jsonl_tables(path: Path, prefix: str) -> Iterator[pa.Table]:
    records = json_records(path)
    while batch := list(islice(records, BATCH_ROWS)):
        columns = {name: [record.get(prefix + name) for record in batch] for name in COLUMNS}
        try:
            for name in _MOMENTS:
                columns[name] = [value and datetime.fromisoformat(value) for value in columns[name]]
            arrays = {name: pa.array(values, _SCHEMA.field(name).type) for name, values in columns.items()}
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise _foreign(path, error) from error
        yield _whole(arrays, len(batch))


def batch_answers(output: OpenAIBatchOutput) -> Iterator[OutputRow]:
    """One for each request: its first sample, with which all tokens of the answer count."""
    return (row for row in output.finished_rows() if row.sample_index == 0)


def _batch_tables(output: OpenAIBatchOutput) -> Iterator[pa.Table]:
    rows = batch_answers(output)
    while batch := list(islice(rows, BATCH_ROWS)):
        yield part_table(batch).select(list(COLUMNS))


def _whole(columns: dict[str, Any], num_rows: int) -> pa.Table:
    """A table of all COLUMNS, null where there is none."""
    arrays = [columns.get(field.name, pa.nulls(num_rows, field.type)) for field in _SCHEMA]
    return pa.table(arrays, names=list(COLUMNS)).cast(_SCHEMA)


def _foreign(path: Path, error: Exception) -> InputError:
    return InputError(f"{path}: holds results that cbgen did not write: {first_line(error)}")


def moments(column: pa.ChunkedArray) -> np.ndarray:
    """float64 [N]: seconds since 1970, NaN for null."""
    micros = column.cast(pa.int64())
    return numbers(micros) / 1e6


def numbers(column: pa.ChunkedArray) -> np.ndarray:
    """float64 [N], NaN for null, and for what is too large to mean anything."""
    values = column.cast(pa.float64()).combine_chunks().to_numpy(zero_copy_only=False)
    return np.where(np.abs(values) < LARGEST, values, np.nan)
