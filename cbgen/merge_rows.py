"""The rows of all shards of a job in the order of the input, each there once."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from cbgen.data.outputs import Output
from cbgen.data.rows import SHARD_FIELDS, OutputLayout
from cbgen.data.samples import SampleCounts
from cbgen.data.selection import taken
from cbgen.errors import InputError
from cbgen.finished_rows import checked_tables, json_records

# So many shards are read by batches of the usual size; of more, each gets its share of that.
FULL_BATCHES = 16


@dataclass(frozen=True)
class Shard:
    """A finished output of one shard. index counts from 0."""

    output: Output
    footer: dict[str, Any]
    index: int
    count: int


def shard_names(layout: OutputLayout) -> list[str]:
    return [layout.prefix + field.name for field in SHARD_FIELDS]


def samples_of(shards: list[Shard], layout: OutputLayout, footer: dict[str, Any]) -> SampleCounts:
    """Of all rows. Where they vary, they are counted: 12 bytes of memory for each row. Raises InputError."""
    num_rows = footer["input_rows"]
    if layout.num_samples is not None:
        return SampleCounts(num_rows, layout.num_samples)
    counts, name = np.zeros(num_rows, dtype=np.int32), shard_names(layout)[0]
    for path in (path for shard in shards for path in shard.output.files):
        for table in checked_tables(path, [name]):
            indices = table[name].to_numpy()
            np.add.at(counts, indices[(indices >= 0) & (indices < num_rows)], 1)
    missing = np.flatnonzero(counts == 0)
    if missing.size:
        raise _not_once(int(missing[0]))
    samples = SampleCounts(num_rows, counts)
    if samples.total != footer["rows_total"]:
        raise InputError(
            f"the shards hold {samples.total} rows and record {footer['rows_total']}; `cbgen verify` tells which one "
            "is damaged"
        )
    return samples


def merged_tables(shards: list[Shard], layout: OutputLayout, samples: SampleCounts) -> Iterator[pa.Table]:
    """All rows in the order of the input, with the columns of a shard. Raises InputError unless each is there once."""
    share, place = -(-len(shards) // FULL_BATCHES), 0
    heads = [head for shard in shards if (head := _Head(shard, layout, share)).table is not None]
    while heads:
        last = min(int(head.indices[-1]) for head in heads)
        joined = pa.concat_tables([head.take_to(last) for head in heads])
        table = taken(joined, np.argsort(joined[shard_names(layout)[0]].to_numpy(), kind="stable"))
        _check_places(table, place, layout, samples)
        place += table.num_rows
        yield table
        heads = [head for head in heads if head.table is not None]
    if place != samples.total:
        raise _not_once(samples.row_of(place))


def merged_records(shards: list[Shard], layout: OutputLayout, footer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The same of the lines of JSONL outputs. footer: of all shards."""
    index_name, sample_name = shard_names(layout)[0], layout.prefix + "sample_index"
    records = heapq.merge(*(json_records(shard.output.path) for shard in shards), key=lambda record: record[index_name])
    count, row, sample = 0, -1, 0
    for record in records:
        found = (record[index_name], record.get(sample_name, 0))
        expected = [(row, sample + 1), (row + 1, 0)]
        if layout.num_samples is not None:
            expected = [divmod(count, layout.num_samples)]
        if found not in expected:
            raise _not_once(min(found[0], expected[-1][0]))
        count, (row, sample) = count + 1, found
        yield record
    if (count, row + 1) != (footer["rows_total"], footer["input_rows"]):
        raise _not_once(row + 1)


def _check_places(table: pa.Table, first: int, layout: OutputLayout, samples: SampleCounts) -> None:
    """first: place of the table's first row among the rows of the merged output."""
    rows, numbers = samples.at(first, table.num_rows)
    wrong = table[shard_names(layout)[0]].to_numpy() != rows
    if "sample_index" in layout.columns:
        wrong |= table[layout.prefix + "sample_index"].to_numpy() != numbers
    if wrong.any():
        raise _not_once(int(rows[np.flatnonzero(wrong)[0]]))


def _not_once(row: int) -> InputError:
    return InputError(
        f"row {row + 1} of the input is not there once in all shards; `cbgen verify` tells which one is damaged"
    )


class _Head:
    """The next rows of a shard: `table` and their places in the input, or None at its end."""

    def __init__(self, shard: Shard, layout: OutputLayout, share: int):
        self._tables = (table for path in shard.output.files for table in checked_tables(path, share=share))
        self._index_name = shard_names(layout)[0]
        self.indices = np.zeros(0, dtype=np.int64)
        self.table: pa.Table | None = None
        self._next()

    def take_to(self, last: int) -> pa.Table:
        """The rows up to this place in the input; there may be none."""
        assert self.table is not None
        count = int(np.count_nonzero(self.indices <= last))
        rows, self.table, self.indices = self.table.slice(0, count), self.table.slice(count), self.indices[count:]
        if not self.table.num_rows:
            self._next()
        return rows

    def _next(self) -> None:
        self.table = next(self._tables, None)
        if self.table is not None:
            self.indices = self.table[self._index_name].to_numpy()
