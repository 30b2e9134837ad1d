"""What goes in and what comes out, row by row, and the Arrow types of it: fixed, never inferred from the first row."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
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
    """One generated sample, or one failure. `key` names the row by its content, `index` by its place in this input.

    stop_reason: the stop text or token that ended it. clamped_max_tokens: what the context left of max_tokens, if not
    all. completion_logprobs, prompt_token_logprobs: of TOKEN_LOGPROB, one for each token.
    """

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
    stop_reason: str | None = None
    reasoning: str | None = None
    clamped_max_tokens: int | None = None
    truncated_prompt_tokens: int = 0
    completion_logprobs: pa.Array | None = None
    prompt_token_logprobs: pa.Array | None = None

    @property
    def nested_bytes(self) -> int:
        """Memory of the log-probabilities."""
        arrays = (self.completion_logprobs, self.prompt_token_logprobs)
        return sum(array.nbytes for array in arrays if array is not None)


_UTC = pa.timestamp("us", tz="UTC")

_ALTERNATIVE = [
    pa.field("token_id", pa.int32(), nullable=False),
    pa.field("token", pa.string(), nullable=False),
    pa.field("logprob", pa.float32(), nullable=False),
]
# A token, its log-probability and its rank (1: none was more likely), and the most likely ones at its place. The first
# token of a prompt has no log-probability, and no rank.
TOKEN_LOGPROB = pa.struct(
    [
        *_ALTERNATIVE[:2],
        pa.field("logprob", pa.float32()),
        pa.field("rank", pa.int32()),
        pa.field("top", pa.list_(pa.field("element", pa.struct(_ALTERNATIVE), nullable=False)), nullable=False),
    ]
)
_LOGPROBS = pa.list_(pa.field("element", TOKEN_LOGPROB, nullable=False))

RESULT_SCHEMA = pa.schema(
    [
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("completion", pa.string()),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("error", pa.string()),
        pa.field("prompt_tokens", pa.int64(), nullable=False),
        pa.field("completion_tokens", pa.int64(), nullable=False),
        pa.field("completion_ids", pa.list_(pa.int32())),
        pa.field("stop_reason", pa.string()),
        pa.field("reasoning", pa.string()),
        pa.field("clamped_max_tokens", pa.int64()),
        pa.field("truncated_prompt_tokens", pa.int64(), nullable=False),
        pa.field("completion_logprobs", _LOGPROBS),
        pa.field("prompt_token_logprobs", _LOGPROBS),
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


# Output rows are handed on in lots of so many, or of so many bytes of log-probabilities.
LOT_ROWS, LOT_BYTES = 1024, 8 << 20
NESTED_COLUMNS = ("completion_logprobs", "prompt_token_logprobs")
NESTED_ROWS = 8
# Result columns that an output has only where the job may fill them.
OPTIONAL_COLUMNS = (
    "completion_ids",
    "stop_reason",
    "reasoning",
    "truncated_prompt_tokens",
    "completion_logprobs",
    "prompt_token_logprobs",
)


@dataclass(frozen=True)
class OutputLayout:
    """The final file beside the input's columns: how many rows for each input row, and which result columns.

    num_samples: of every row; None: each has its own. optional: those of OPTIONAL_COLUMNS that are there. sample_index
    is there unless every row has one sample, SHARD_FIELDS only in the output of one shard of several.
    """

    num_samples: int | None = 1
    optional: frozenset[str] = frozenset()
    prefix: str = ""
    is_shard: bool = False

    @property
    def columns(self) -> list[str]:
        """Of the results: names in RESULT_SCHEMA, in order."""
        hidden = {name for name in OPTIONAL_COLUMNS if name not in self.optional}
        hidden |= {"sample_index"} if self.num_samples == 1 else set()
        return [name for name in RESULT_SCHEMA.names if name not in hidden]

    @property
    def rows_at_once(self) -> int:
        """How many rows may be Python objects together: log-probabilities make them many megabytes each."""
        return LOT_ROWS if self.optional.isdisjoint(NESTED_COLUMNS) else NESTED_ROWS

    @property
    def fields(self) -> list[pa.Field]:
        """Everything beside the input's columns, as the file names it."""
        own = SHARD_FIELDS if self.is_shard else ()
        results = [RESULT_SCHEMA.field(column) for column in self.columns]
        return [field.with_name(self.prefix + field.name) for field in (*own, *results)]

    @property
    def names(self) -> list[str]:
        return [field.name for field in self.fields]


def lots_of(rows: Iterable[OutputRow]) -> Iterator[list[OutputRow]]:
    """The same rows, not all at once."""
    lot: list[OutputRow] = []
    num_bytes = 0
    for row in rows:
        lot.append(row)
        num_bytes += row.nested_bytes
        if len(lot) == LOT_ROWS or num_bytes >= LOT_BYTES:
            yield lot
            lot, num_bytes = [], 0
    if lot:
        yield lot


def part_table(rows: list[OutputRow]) -> pa.Table:
    """A part file's content, sorted by place in the input and sample."""
    ordered = sorted(rows, key=lambda row: (row.index, row.sample_index))
    columns = [_column([getattr(row, field.name) for row in ordered], field.type) for field in PART_SCHEMA]
    return pa.table(columns, schema=PART_SCHEMA)


def _column(values: list[Any], type_: pa.DataType) -> pa.Array:
    """Of Python values, or of lists that are arrays already."""
    lists = [value for value in values if isinstance(value, pa.Array)]
    if not lists:
        return pa.array(values, type_)
    lengths = np.array([0 if value is None else len(value) for value in values])
    offsets = pa.array(np.concatenate([[0], lengths.cumsum()]), pa.int32())
    missing = pa.array([value is None for value in values])
    return pa.ListArray.from_arrays(offsets, pa.concat_arrays(lists), type=type_, mask=missing)
