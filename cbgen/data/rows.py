"""What goes in and what comes out, row by row, and the Arrow types of it: fixed, never inferred from the first row."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

KEY_BYTES = 16


def parts_path(output: Path) -> Path:
    """The folder beside an output in which its results are published while the job runs."""
    return output.with_name(output.name + ".parts")


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
    prompt_tokens: int
    completion_tokens: int
    completion_ids: list[int]
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    arrival_time: datetime | None
    finish_time: datetime | None


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


@dataclass(frozen=True)
class OutputLayout:
    """The final file beside the input's columns: so many rows for each input row, and which result columns.

    sample_index is there for several samples only, completion_ids only when asked for.
    """

    num_samples: int = 1
    with_token_ids: bool = False
    prefix: str = ""

    @property
    def columns(self) -> list[str]:
        """Names in RESULT_SCHEMA, in order."""
        hidden = set() if self.with_token_ids else {"completion_ids"}
        hidden |= {"sample_index"} if self.num_samples == 1 else set()
        return [name for name in RESULT_SCHEMA.names if name not in hidden]

    @property
    def names(self) -> list[str]:
        """The same columns as the file names them."""
        return [self.prefix + name for name in self.columns]


def part_table(rows: list[OutputRow]) -> pa.Table:
    """A part file's content, sorted by place in the input and sample."""
    ordered = sorted(rows, key=lambda row: (row.index, row.sample_index))
    columns = {name: [getattr(row, name) for row in ordered] for name in PART_SCHEMA.names}
    return pa.table(columns, schema=PART_SCHEMA)
