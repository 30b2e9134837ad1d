"""A scheduled batch as arrays: which tokens, at which positions, and where their KV lies."""

from collections.abc import Mapping

import numpy as np

from cbgen.cache.allocator import CacheAllocator
from cbgen.cache.layout import LayerGroup
from cbgen.cache.pool import READ_RESERVE_CHUNK, WRITE_RESERVE_CHUNK
from cbgen.engine.scheduler import ScheduledBatch


class BatchRows:
    """The batch as arrays, int64, an entry for each request or query token.

    firsts, ends, lengths: [R], a request's query tokens are those from `firsts` to `ends` of its own. starts: [R + 1],
    where they begin in T. of_token: [T], the place of the request. positions, ids, carried: [T]. logits: [S].
    """

    def __init__(self, batch: ScheduledBatch, awaited: Mapping[int, int]):
        entries = batch.scheduled
        self.request_ids = [entry.request.request_id for entry in entries]
        self.firsts = np.array([entry.start for entry in entries], dtype=np.int64)
        self.lengths = np.array([entry.query_length for entry in entries], dtype=np.int64)
        self.ends = self.firsts + self.lengths
        self.starts = np.zeros(len(entries) + 1, dtype=np.int64)
        np.cumsum(self.lengths, out=self.starts[1:])
        self.num_tokens = int(self.starts[-1])
        self.max_query_length = int(self.lengths.max(initial=1))
        ids: list[int] = []
        carried: list[tuple[int, int]] = []  # place in T, row among the tokens awaited
        for entry in entries:
            token_ids = entry.request.token_ids
            if entry.query_length > 1:
                ids += token_ids[entry.start : entry.start + entry.query_length]
            elif entry.start < len(token_ids):
                ids.append(token_ids[entry.start])
            else:
                carried.append((len(ids), awaited[entry.request.request_id]))
                ids.append(0)
        self.ids = np.array(ids, dtype=np.int64)
        self.carried = np.full(self.num_tokens, -1, dtype=np.int64)
        if carried:
            places, sources = zip(*carried, strict=True)
            self.carried[list(places)] = sources
        if self.max_query_length == 1:
            self.of_token, self.positions = np.arange(len(entries)), self.firsts
        else:
            self.of_token = np.repeat(np.arange(len(entries)), self.lengths)
            self.positions = np.arange(self.num_tokens) + (self.firsts - self.starts[:-1])[self.of_token]
        self.logits = self._logits(batch)

    def _logits(self, batch: ScheduledBatch) -> np.ndarray:
        """Places in T whose logits are read."""
        if not any(entry.scored for entry in batch.scheduled):
            samples = np.fromiter((entry.samples for entry in batch.scheduled), bool, len(batch.scheduled))
            return self.starts[1:][samples] - 1
        wanted: list[int] = []
        for start, entry in zip(self.starts.tolist(), batch.scheduled, strict=False):
            wanted += [start + place - entry.start for place in entry.scored]
            if entry.samples:
                wanted.append(start + entry.query_length - 1)
        return np.array(wanted, dtype=np.int64)


class GroupRows:
    """Where the KV of a batch lies in the layers of one group."""

    def __init__(self, rows: BatchRows, allocator: CacheAllocator, page_size: int):
        self.layer_group, self.page_size = allocator.group, page_size
        self._rows = rows
        self._blocks = allocator.rows.of(rows.request_ids)

    def write_pages(self) -> np.ndarray:
        """[T]; the write reserve where a later token of the pass takes the place of an earlier one."""
        group, rows = self.layer_group, self._rows
        numbers = rows.positions // self.page_size
        if group.max_blocks is None:
            return self._blocks[rows.of_token, numbers]
        pages = self._blocks[rows.of_token, numbers % group.max_blocks]
        overtaken = rows.positions < (rows.ends - group.max_blocks * self.page_size)[rows.of_token]
        pages[overtaken] = WRITE_RESERVE_CHUNK * group.pages_per_chunk
        return pages

    def fill_tables(self, table: np.ndarray) -> np.ndarray:
        """Writes the page tables [R, N], and returns the first token [R] of each row of them."""
        group, rows, width = self.layer_group, self._rows, table.shape[1]
        if group.max_blocks is None:
            known = min(width, self._blocks.shape[1])
            table[:, :known] = self._blocks[:, :known]
            table[:, known:] = READ_RESERVE_CHUNK * group.pages_per_chunk
            return np.zeros(len(table), dtype=np.int64)
        firsts = first_pages(rows, group)
        numbers = firsts[:, None] + np.arange(width)
        pages = np.take_along_axis(self._blocks, numbers % group.max_blocks, axis=1)
        pages[numbers > last_pages(rows, group)[:, None]] = READ_RESERVE_CHUNK * group.pages_per_chunk
        table[:] = pages
        return firsts * self.page_size

    def gathered(self) -> tuple[np.ndarray, np.ndarray]:
        """See DeviceBatch.gather and gather_starts, the latter [requests of the batch + 1]."""
        group, rows, entries, lengths = self.layer_group, self._rows, [], np.zeros(len(self._rows.lengths), np.int64)
        assert group.max_blocks is not None
        for place in np.flatnonzero(rows.lengths > 1).tolist():
            first = group.first_visible(int(rows.firsts[place])) // self.page_size * self.page_size
            seen = np.arange(first, rows.firsts[place])
            pages = self._blocks[place, seen // self.page_size % group.max_blocks]
            own = -1 - np.arange(rows.starts[place], rows.starts[place + 1])
            entries += [pages * self.page_size + seen % self.page_size, own]
            lengths[place] = len(seen) + len(own)
        return np.concatenate(entries), np.concatenate([[0], np.cumsum(lengths)])


def first_pages(rows: BatchRows, group: LayerGroup) -> np.ndarray:
    """[R], of a sliding layer: the number, counted from a request's first page, of the page that a row begins with."""
    assert group.window is not None
    return np.maximum(rows.firsts - group.window + 1, 0) // group.page_size


def last_pages(rows: BatchRows, group: LayerGroup) -> np.ndarray:
    """[R], the page number that it ends with: of the one token, or of the one before several; -1 for none."""
    return (rows.firsts - (rows.lengths > 1)) // group.page_size
