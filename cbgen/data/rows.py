"""What goes in and what comes out, row by row, and the Arrow types of it: fixed, never inferred from the first row."""

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

KEY_BYTES = 16


def parts_path(output: Path) -> Path:
    """The folder beside an output in which its results are published while the job runs."""
    named = output if output.name else output.resolve()  # "." has no name
    return named.with_name(named.name + ".parts")


@dataclass(frozen=True)
class PromptRow:
    """One input row. `values` holds the columns asked for; `error` says why it could not be read, and where."""

    index: int
    values: dict[str, Any]
    error: str | None = None


@dataclass(frozen=True)
class OutputRow:
    """One generated sample, or one failure. `key` names the row by its content, `index` by its place in this input."""

    key: bytes
    index: int
    sample_index: int
    completion: str | None
    finish_reason: str
    error: str | None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    completion_ids: list[int] = field(default_factory=list)
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    arrival_time: datetime | None = None
    finish_time: datetime | None = None


_UTC = pa.timestamp("us", tz="UTC")

RESULT_SCHEMA = pa.schema(
    [
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("completion", pa.string()),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("error", pa.string()),
        pa.field("prompt_tokens", pa.int64(), nullable=False),
        pa.field("completion_tokens", pa.int64(), nullable=False),
        pa.field("completion_ids", pa.list_(pa.int32())),
        pa.field("queue_s", pa.float64()),
        pa.field("prefill_s", pa.float64()),
        pa.field("decode_s", pa.float64()),
        pa.field("ttft_s", pa.float64()),
        pa.field("tpot_s", pa.float64()),
        pa.field("arrival_time", _UTC),
        pa.field("finish_time", _UTC),
    ]
)

# A part file: the row's key beside the result. Input columns are not copied; assembly reads them from the input again.
PART_SCHEMA = pa.schema([pa.field("key", pa.binary(KEY_BYTES), nullable=False), *RESULT_SCHEMA])


# Of the output of one shard: the row's place in the whole input, by which shards are merged, and its key in hex, which
# cannot be found again from the rows of one shard alone.
SHARD_FIELDS = (pa.field("row_index", pa.int64(), nullable=False), pa.field("row_key", pa.string(), nullable=False))


@dataclass(frozen=True)
class OutputLayout:
    """The final file beside the input's columns: so many rows for each input row, and which result columns.

    sample_index is there for several samples only, completion_ids only when asked for, SHARD_FIELDS only in the output
    of one shard of several.
    """

    num_samples: int = 1
    with_token_ids: bool = False
    prefix: str = ""
    is_shard: bool = False

    @property
    def columns(self) -> list[str]:
        """Of the results: names in RESULT_SCHEMA, in order."""
        hidden = set() if self.with_token_ids else {"completion_ids"}
        hidden |= {"sample_index"} if self.num_samples == 1 else set()
        return [name for name in RESULT_SCHEMA.names if name not in hidden]

    @property
    def fields(self) -> list[pa.Field]:
        """Everything beside the input's columns, as the file names it."""
        own = SHARD_FIELDS if self.is_shard else ()
        results = [RESULT_SCHEMA.field(column) for column in self.columns]
        return [field.with_name(self.prefix + field.name) for field in (*own, *results)]

    @property
    def names(self) -> list[str]:
        return [field.name for field in self.fields]


def part_table(rows: list[OutputRow]) -> pa.Table:
    """A part file's content, sorted by place in the input and sample."""
    ordered = sorted(rows, key=lambda row: (row.index, row.sample_index))
    columns = {name: [getattr(row, name) for row in ordered] for name in PART_SCHEMA.names}
    return pa.table(columns, schema=PART_SCHEMA)
