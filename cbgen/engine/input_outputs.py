"""Lays a scheduled batch out in tensors. Reads request state, never writes it."""

from dataclasses import dataclass

import numpy as np
import torch

from cbgen.cache.paged_cache import PagedCache
from cbgen.cache.pool import READ_RESERVE_CHUNK
from cbgen.engine.scheduler import ScheduledBatch
from cbgen.kernels.backend import AttentionBatch


@dataclass(frozen=True)
class BatchInputs:
    """What one forward pass reads: T query tokens packed request after request, S of which give logits.

    input_ids, position_ids: [1, T]. logits_indices: [S], places in T, in batch order.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    logits_indices: torch.Tensor
    attention: AttentionBatch


class InputBuffers:
    """The static tensors of one forward pass, overwritten by every call of `lay_out`.

    request        0          1    2
    input_ids      [a b c d]  [e]  [f g]        tokens not computed yet
    position_ids   [0 1 2 3]  [9]  [64 65]      their places in the request
    logits_indices       3     4       6        last query of each request that reaches its end
    """

    def __init__(self, max_batch_tokens: int, max_requests_per_batch: int, device: torch.device):
        self._device = device
        # One row each: input ids, positions, page and offset of the KV written.
        self._tokens = torch.zeros(4, max_batch_tokens, dtype=torch.int64, device=device)
        self._logits_indices = torch.zeros(max_requests_per_batch, dtype=torch.int64, device=device)

    def lay_out(self, batch: ScheduledBatch, cache: PagedCache) -> BatchInputs:
        """Fills the buffers with a batch whose blocks are allocated, and returns views of their used part."""
        tables = [cache.block_table(entry.request.request_id) for entry in batch.scheduled]
        token_rows, ends = self._host_rows(batch, tables, cache.page_size)
        samples = [end - 1 for end, entry in zip(ends, batch.scheduled, strict=True) if entry.samples]
        num_tokens = token_rows.shape[1]
        self._tokens[:, :num_tokens].copy_(torch.from_numpy(token_rows))
        self._logits_indices[: len(samples)].copy_(torch.tensor(samples, dtype=torch.int64))
        input_ids, position_ids, write_blocks, write_offsets = self._tokens[:, :num_tokens]
        attention = AttentionBatch(
            query_lengths=[entry.query_length for entry in batch.scheduled],
            kv_lengths=[entry.kv_length for entry in batch.scheduled],
            block_tables=self._block_tables(tables),
            write_blocks=write_blocks,
            write_offsets=write_offsets,
        )
        return BatchInputs(input_ids[None], position_ids[None], self._logits_indices[: len(samples)], attention)

    def _host_rows(
        self, batch: ScheduledBatch, tables: list[list[int]], page_size: int
    ) -> tuple[np.ndarray, list[int]]:
        """int64 [4, T] in the order of `_tokens`, and the end of each request's query tokens in T."""
        rows = np.empty((4, batch.num_query_tokens), dtype=np.int64)
        ends, start = [], 0
        for entry, table in zip(batch.scheduled, tables, strict=True):
            first, last = entry.request.num_computed_tokens, entry.kv_length
            end = start + entry.query_length
            rows[0, start:end] = entry.request.token_ids[first:last]
            rows[1, start:end] = np.arange(first, last)
            first_page, last_page = first // page_size, (last - 1) // page_size
            pages = np.array(table[first_page : last_page + 1], dtype=np.int64)
            rows[2, start:end] = pages[rows[1, start:end] // page_size - first_page]
            ends.append(end)
            start = end
        rows[3] = rows[1] % page_size
        return rows, ends

    def _block_tables(self, tables: list[list[int]]) -> torch.Tensor:
        """int64 [R, widest table], padded with the read reserve."""
        padded = np.full((len(tables), max(map(len, tables))), READ_RESERVE_CHUNK, dtype=np.int64)
        for row, table in enumerate(tables):
            padded[row, : len(table)] = table
        return torch.from_numpy(padded).to(self._device)
