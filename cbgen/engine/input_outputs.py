"""Lays a scheduled batch out in static memory. Reads request state, never writes it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from cbgen.cache.layout import CacheLayout, LayerGroup
from cbgen.cache.paged_cache import PagedCache
from cbgen.cache.pool import READ_RESERVE_CHUNK, WRITE_RESERVE_CHUNK
from cbgen.engine.batch_rows import BatchRows, GroupRows, first_pages, last_pages
from cbgen.engine.scheduler import ScheduledBatch
from cbgen.kernels.backend import AttentionBatch, DeviceBatch
from cbgen.streams import Streams


@dataclass(frozen=True)
class Padding:
    """What sizes are rounded up to, so that few differ: tokens of queries, and of the KV of the longest request."""

    query_tokens: int
    kv_tokens: int


class PassShape(NamedTuple):
    """Every size that reaches a kernel: passes of one shape can replay the graph recorded for it.

    query_tokens, requests, logits: T, R and S with padding. table_widths, gathered: of each layer group, pages in a row
    and what DeviceBatch.gather holds. max_query_length, max_gathered: as the kernels are told.
    """

    query_tokens: int
    requests: int
    max_query_length: int
    logits: int
    table_widths: tuple[int, ...]
    gathered: tuple[int, ...]
    max_gathered: tuple[int, ...]


@dataclass(frozen=True)
class BatchInputs:
    """What one forward pass reads: T query tokens packed request after request, S of which give logits.

    input_ids, position_ids: [1, T]. logits_indices: [S], places in T, in batch order. attention: one for each layer
    group of the cache, in its order. carried: [T], for each query token its row among the tokens that the pass before
    sampled, whose id is not known on the host yet, or -1. With padding, T and S count it, and `shape` says them all.
    num_logits: S without padding. num_words: of the static memory, how many are in use.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    logits_indices: torch.Tensor
    attention: list[AttentionBatch]
    carried: torch.Tensor
    shape: PassShape
    num_logits: int
    num_words: int

    def with_ids(self, input_ids: torch.Tensor) -> "BatchInputs":
        """The same with other ids [1, T]."""
        return replace(self, input_ids=input_ids)

    def with_logits(self, indices: torch.Tensor) -> "BatchInputs":
        """The same with other places in T that give logits."""
        return replace(self, logits_indices=indices, num_logits=len(indices))


class _Packer:
    """Places arrays one after another in the host's memory, and finds them again in the device's.

    words   [ ids | positions | carried | logits | group 0: pages, offsets, table, ... | group 1: ... | not used ]

    Where an array lies follows from the sizes before it, so that it is the same in every pass of one shape.
    """

    def __init__(self, host: np.ndarray, device: torch.Tensor):
        self._host, self._device = host, device
        self.num_words = 0

    def place(self, *shape: int) -> tuple[np.ndarray, torch.Tensor]:
        """Room for an array, to be filled on the host; and the same on the device."""
        first = self.num_words
        self.num_words += int(np.prod(shape))
        own = slice(first, self.num_words)
        return self._host[own].reshape(shape), self._device[own].view(shape)

    def put(self, values: np.ndarray) -> torch.Tensor:
        """Places a copy of an array."""
        host, device = self.place(*values.shape)
        host[:] = values
        return device


class InputBuffers:
    """The static memory of one forward pass, overwritten by every call of `lay_out`.

    request        0          1    2
    input_ids      [a b c d]  [e]  [f g]        tokens not computed yet
    position_ids   [0 1 2 3]  [9]  [64 65]      their places in the request
    logits_indices       3     4       6        last query of each request that reaches its end, and before it those
                                                of a prompt that is scored
    With padding, and every request with a single token: a padding request for each token that is added. Otherwise one
    padding request takes all tokens that are added, and others have none.

    host: int64 words, pinned where the device has memory of its own. device: the same words there; the host's own where
    it has none.
    """

    def __init__(
        self,
        max_batch_tokens: int,
        max_requests_per_batch: int,
        layout: CacheLayout,
        max_model_len: int,
        streams: Streams,
        padding: Padding | None = None,
    ):
        """padding: for a backend that reads tensors alone; None lays out what there is, and no DeviceBatch."""
        self.max_batch_tokens = max_batch_tokens
        self.max_requests_per_batch = max_requests_per_batch
        self._layout = layout
        self._max_model_len = max_model_len
        self.padding = padding
        num_words = max_words(max_batch_tokens, max_requests_per_batch, layout, max_model_len, padding)
        self.host, self.device = streams.allocate(num_words)

    def send(self, inputs: BatchInputs, non_blocking: bool = False) -> None:
        """Copies what was laid out to the device, in the order of its work. non_blocking: returns before that is done;
        nothing else may be laid out until the pass was waited for."""
        if self.device is not self.host:
            own = slice(inputs.num_words)
            self.device[own].copy_(self.host[own], non_blocking=non_blocking)

    def lay_out(
        self, batch: ScheduledBatch, cache: PagedCache, awaited: Mapping[int, int] | None = None
    ) -> BatchInputs:
        """Fills the host's memory with a batch whose blocks are allocated; returns views of the device's.

        awaited: by request, the row of its last token among those that the pass before samples.
        """
        rows = BatchRows(batch, awaited or {})
        return self._lay_out(rows, self._shape(rows), cache)

    def blank(self, query_tokens: int, kv_tokens: int, cache: PagedCache) -> BatchInputs:
        """A pass of nothing but padding, of the shape of so many decodes with so many tokens of KV."""
        assert self.padding is not None
        widths = tuple(self._padded_width(kv_tokens, group) for group in self._layout.groups)
        count, none = _round_up(query_tokens, self.padding.query_tokens), (0,) * len(widths)
        shape = PassShape(count, count, 1, count, widths, none, none)
        return self._lay_out(BatchRows(ScheduledBatch(), {}), shape, cache)

    def _lay_out(self, rows: BatchRows, shape: PassShape, cache: PagedCache) -> BatchInputs:
        packer = _Packer(self.host.numpy(), self.device)
        host, tokens = packer.place(3, 1, shape.query_tokens)
        host[:, 0, : rows.num_tokens] = rows.ids, rows.positions, rows.carried
        host[:2, 0, rows.num_tokens :] = 0
        host[2, 0, rows.num_tokens :] = -1
        logits = packer.put(_padded(rows.logits, shape.logits))
        starts = packer.put(_starts(rows, shape))
        attention = []
        for number, allocator in enumerate(cache.allocators):
            group = GroupRows(rows, allocator, cache.page_size)
            attention.append(self._attention(packer, rows, group, shape, number, starts))
        return BatchInputs(
            tokens[0], tokens[1], logits, attention, tokens[2, 0], shape, len(rows.logits), packer.num_words
        )

    def _shape(self, rows: BatchRows) -> PassShape:
        widths = tuple(self._table_width(rows, group) for group in self._layout.groups)
        if self.padding is None:
            none = (0,) * len(widths)
            return PassShape(
                rows.num_tokens, len(rows.lengths), rows.max_query_length, len(rows.logits), widths, none, none
            )
        step = self.padding.query_tokens
        query_tokens = _round_up(rows.num_tokens, step)
        gathered, max_gathered = zip(*(self._gathered(rows, group) for group in self._layout.groups), strict=True)
        if rows.max_query_length == 1:
            return PassShape(query_tokens, query_tokens, 1, query_tokens, widths, gathered, max_gathered)
        longest = _power_of_two(max(rows.max_query_length, query_tokens - rows.num_tokens))
        logits = min(_round_up(len(rows.logits), step), query_tokens)
        requests = min(_round_up(len(rows.lengths) + 1, step), query_tokens + 1)
        return PassShape(query_tokens, requests, min(longest, query_tokens), logits, widths, gathered, max_gathered)

    def _table_width(self, rows: BatchRows, group: LayerGroup) -> int:
        """Pages in a row of a group's table."""
        longest = int(rows.ends.max())
        if self.padding is None:
            if group.window is None:
                return -(-longest // group.page_size)
            firsts = first_pages(rows, group)
            return max(1, int((last_pages(rows, group) - firsts).max()) + 1)
        return self._padded_width(longest, group)

    def _padded_width(self, longest: int, group: LayerGroup) -> int:
        assert self.padding is not None
        if group.window is not None:
            return window_pages(group, self._max_model_len)
        most = min(_round_up(longest, self.padding.kv_tokens), _round_up(self._max_model_len, group.page_size))
        return -(-most // group.page_size)

    def _gathered(self, rows: BatchRows, group: LayerGroup) -> tuple[int, int]:
        """Entries of DeviceBatch.gather, and the most of one request; 0 where there is none."""
        assert self.padding is not None
        if group.window is None or rows.max_query_length == 1:
            return 0, 0
        own = (rows.firsts - first_pages(rows, group) * group.page_size + rows.lengths)[rows.lengths > 1]
        return _round_up(int(own.sum()), self.padding.kv_tokens), _power_of_two(int(own.max()))

    def _attention(
        self,
        packer: _Packer,
        rows: BatchRows,
        group: GroupRows,
        shape: PassShape,
        number: int,
        starts: torch.Tensor,
    ) -> AttentionBatch:
        size, layer_group = group.page_size, group.layer_group
        written, places = packer.place(2, shape.query_tokens)
        written[:, : rows.num_tokens] = group.write_pages(), rows.positions % size
        written[0, rows.num_tokens :] = WRITE_RESERVE_CHUNK * layer_group.pages_per_chunk
        written[1, rows.num_tokens :] = np.arange(shape.query_tokens - rows.num_tokens) % size
        table, tables = packer.place(shape.requests, shape.table_widths[number])
        table[len(rows.lengths) :] = READ_RESERVE_CHUNK * layer_group.pages_per_chunk
        first_tokens = group.fill_tables(table[: len(rows.lengths)])
        on_device = None
        if self.padding is not None:
            on_device = self._on_device(packer, rows, group, shape, number, starts, first_tokens)
        return AttentionBatch(
            query_lengths=rows.lengths.tolist(),
            kv_lengths=rows.ends.tolist(),
            first_tokens=first_tokens.tolist(),
            page_tables=tables,
            write_pages=places[0],
            write_offsets=places[1],
            window=layer_group.window,
            on_device=on_device,
        )

    def _on_device(
        self,
        packer: _Packer,
        rows: BatchRows,
        group: GroupRows,
        shape: PassShape,
        number: int,
        starts: torch.Tensor,
        first_tokens: np.ndarray,
    ) -> DeviceBatch:
        kv_lengths, on_device = packer.place(shape.requests)
        num_requests = len(rows.lengths)
        kv_lengths[:num_requests] = rows.ends - first_tokens
        kv_lengths[num_requests:] = 0
        if shape.query_tokens > rows.num_tokens:  # what padding tokens read: one token of the read reserve
            kv_lengths[num_requests : shape.requests if shape.max_query_length == 1 else num_requests + 1] = 1
        gather = gather_starts = None
        if shape.gathered[number]:
            entries, ends = group.gathered()
            gather = packer.put(_padded(entries, shape.gathered[number]))
            gather_starts = packer.put(_padded(ends, shape.requests + 1, last=int(ends[-1])))
        return DeviceBatch(
            query_starts=starts,
            kv_lengths=on_device,
            max_query_length=shape.max_query_length,
            max_kv_length=shape.table_widths[number] * group.page_size,
            gather=gather,
            gather_starts=gather_starts,
            max_gathered=shape.max_gathered[number],
        )


def _starts(rows: BatchRows, shape: PassShape) -> np.ndarray:
    """[R + 1], where the query tokens of each request begin: those of padding too."""
    if shape.max_query_length == 1:
        return np.arange(shape.requests + 1)
    return _padded(rows.starts, shape.requests + 1, last=shape.query_tokens)


def window_pages(group: LayerGroup, max_model_len: int) -> int:
    """The most pages over which the tokens lie that one token of a sliding layer sees."""
    assert group.window is not None
    return min(-(-(group.window - 1) // group.page_size) + 1, -(-max_model_len // group.page_size))


def max_logits(max_requests_per_batch: int, padding: Padding | None) -> int:
    """The most S, padding included."""
    return _round_up(max_requests_per_batch, 1 if padding is None else padding.query_tokens)


def max_words(
    max_batch_tokens: int,
    max_requests_per_batch: int,
    layout: CacheLayout,
    max_model_len: int,
    padding: Padding | None,
) -> int:
    """The most int64 words that a batch is laid out in."""
    step = 1 if padding is None else padding.query_tokens
    tokens = _round_up(max_batch_tokens, step)
    requests = min(_round_up(max_requests_per_batch + 1, step), tokens + 1)
    words = 3 * tokens + max(max_logits(max_requests_per_batch, padding), requests) + requests + 1
    for group in layout.groups:
        width = -(-max_model_len // group.page_size) if group.window is None else window_pages(group, max_model_len)
        words += 2 * tokens + requests * (width + 1)
        if padding is not None and group.window is not None:
            pieces = min(max_requests_per_batch, tokens // 2)
            words += _round_up(tokens + pieces * (group.window + group.page_size), padding.kv_tokens) + requests + 1
    return words


def _padded(values: np.ndarray, size: int, last: int = 0) -> np.ndarray:
    return np.pad(values, (0, size - len(values)), constant_values=last) if len(values) < size else values


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
