"""Lays a scheduled batch out in tensors. Reads request state, never writes it."""

from dataclasses import dataclass

import numpy as np
import torch

from cbgen.cache.allocator import CacheAllocator
from cbgen.cache.paged_cache import PagedCache
from cbgen.cache.pool import READ_RESERVE_CHUNK, WRITE_RESERVE_CHUNK
from cbgen.engine.scheduler import ScheduledBatch, ScheduledRequest
from cbgen.kernels.backend import AttentionBatch


@dataclass(frozen=True)
class BatchInputs:
    """What one forward pass reads: T query tokens packed request after request, S of which give logits.

    input_ids, position_ids: [1, T]. logits_indices: [S], places in T, in batch order. attention: one for each layer
    group of the cache, in its order.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    logits_indices: torch.Tensor
    attention: list[AttentionBatch]


class InputBuffers:
    """The static tensors of one forward pass, overwritten by every call of `lay_out`.

    request        0          1    2
    input_ids      [a b c d]  [e]  [f g]        tokens not computed yet
    position_ids   [0 1 2 3]  [9]  [64 65]      their places in the request
    logits_indices       3     4       6        last query of each request that reaches its end, and before it those
                                                of a prompt that is scored
    """

    def __init__(self, max_batch_tokens: int, max_requests_per_batch: int, num_groups: int, device: torch.device):
        self.max_batch_tokens = max_batch_tokens
        self._device = device
        # Rows: input ids, positions, and for each layer group the page and offset of the KV written.
        self._tokens = torch.zeros(2 + 2 * num_groups, max_batch_tokens, dtype=torch.int64, device=device)
        self._logits_indices = torch.zeros(max_requests_per_batch, dtype=torch.int64, device=device)

    def lay_out(self, batch: ScheduledBatch, cache: PagedCache) -> BatchInputs:
        """Fills the buffers with a batch whose blocks are allocated, and returns views of their used part."""
        token_rows, ends = self._host_rows(batch, cache)
        wanted = [place for end, entry in zip(ends, batch.scheduled, strict=True) for place in _wanted(entry, end)]
        num_tokens = token_rows.shape[1]
        self._tokens[:, :num_tokens].copy_(torch.from_numpy(token_rows))
        self._logits_indices[: len(wanted)].copy_(torch.tensor(wanted, dtype=torch.int64))
        rows = self._tokens[:, :num_tokens]
        attention = [
            self._attention(batch, allocator, rows[2 + 2 * number], rows[3 + 2 * number])
            for number, allocator in enumerate(cache.allocators)
        ]
        return BatchInputs(rows[0][None], rows[1][None], self._logits_indices[: len(wanted)], attention)

    def _host_rows(self, batch: ScheduledBatch, cache: PagedCache) -> tuple[np.ndarray, list[int]]:
        """int64 [2 + 2 * groups, T] in the order of `_tokens`, and the end of each request's query tokens in T."""
        rows = np.empty((len(self._tokens), batch.num_query_tokens), dtype=np.int64)
        ends, start = [], 0
        for entry in batch.scheduled:
            end = start + entry.query_length
            rows[0, start:end] = entry.request.token_ids[entry.start : entry.kv_length]
            rows[1, start:end] = np.arange(entry.start, entry.kv_length)
            for number, allocator in enumerate(cache.allocators):
                rows[2 + 2 * number, start:end] = _write_pages(entry, allocator, rows[1, start:end])
            ends.append(end)
            start = end
        rows[3::2] = rows[1] % cache.page_size
        return rows, ends

    def _attention(
        self,
        batch: ScheduledBatch,
        allocator: CacheAllocator,
        write_pages: torch.Tensor,
        write_offsets: torch.Tensor,
    ) -> AttentionBatch:
        firsts, tables = zip(*(_read_pages(entry, allocator) for entry in batch.scheduled), strict=True)
        reserve = READ_RESERVE_CHUNK * allocator.group.pages_per_chunk
        padded = np.full((len(tables), max(1, *map(len, tables))), reserve, dtype=np.int64)
        for row, table in enumerate(tables):
            padded[row, : len(table)] = table
        return AttentionBatch(
            query_lengths=[entry.query_length for entry in batch.scheduled],
            kv_lengths=[entry.kv_length for entry in batch.scheduled],
            first_tokens=list(firsts),
            page_tables=torch.from_numpy(padded).to(self._device),
            write_pages=write_pages,
            write_offsets=write_offsets,
            window=allocator.group.window,
        )


def _wanted(entry: ScheduledRequest, end: int) -> list[int]:
    """Places among the query tokens whose logits are read, of a request whose own end at `end`."""
    first = end - entry.kv_length
    return [*(first + place for place in entry.scored), *([end - 1] if entry.samples else [])]


def _write_pages(entry: ScheduledRequest, allocator: CacheAllocator, positions: np.ndarray) -> np.ndarray:
    """The page for each query token of a request; the write reserve where a later one of the pass takes its place."""
    group, table = allocator.group, allocator.block_table(entry.request.request_id)
    first_page, last_page = entry.start // group.page_size, (entry.kv_length - 1) // group.page_size
    if group.max_blocks is None:
        return np.array(table[first_page : last_page + 1], dtype=np.int64)[positions // group.page_size - first_page]
    pages = np.array(table, dtype=np.int64)[positions // group.page_size % group.max_blocks]
    pages[: max(0, entry.query_length - group.max_blocks * group.page_size)] = (
        WRITE_RESERVE_CHUNK * group.pages_per_chunk
    )
    return pages


def _read_pages(entry: ScheduledRequest, allocator: CacheAllocator) -> tuple[int, list[int]]:
    """The first token of a request's row in AttentionBatch.page_tables, and the row."""
    group, table = allocator.group, allocator.block_table(entry.request.request_id)
    if group.max_blocks is None:
        return 0, table
    first_page = group.first_visible(entry.start) // group.page_size
    last = entry.start if entry.query_length == 1 else entry.start - 1
    pages = range(first_page, last // group.page_size + 1)
    return first_page * group.page_size, [table[page % group.max_blocks] for page in pages]
