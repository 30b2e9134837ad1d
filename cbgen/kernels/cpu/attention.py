"""Attention over pages in C: decodes and pieces of prompts alike read keys and values where they lie."""

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cbgen.kernels.backend import AttentionBatch, AttentionOptions, align_bytes
from cbgen.kernels.cpu.library import Library
from cbgen.kernels.cpu.prefixes import shared_prefixes

# Tokens whose keys lie together, and numbers of values that do: TILE of kernels.h.
TILE = 16
# KV is attended in splits of about so many tokens, whole pages, from token 0 on: see attention.h.
SPLIT_TOKENS = 128
# Query tokens times query heads per KV head that pass over a page together: their scores stay in the cache of a core.
ROW_TILE = 96
# A request with few query tokens takes several KV heads at once: as many as have so many bytes of KV in a split.
BYTES_TOGETHER = 256 << 10
# Long requests are cut into single splits for the threads when there are fewer items of work than so many per thread.
ITEMS_PER_THREAD = 4

KV_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
Int64 = ctypes.c_int64
Address = ctypes.c_void_p


class _Attention(ctypes.Structure):
    """struct attention of kernels.h, field by field."""

    _fields_ = [
        ("pages", Address),
        *(
            (name, Int64)
            for name in ("page_bytes", "page_size", "slots", "kv_heads", "group", "dim", "padded_dim", "kind")
        ),
        *((name, Int64) for name in ("values", "key_scales", "value_scales", "split_pages", "window", "max_rows")),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("sinks", Address),
        ("query", Address),
        ("query_token", Int64),
        ("query_head", Int64),
        ("out", Address),
        ("out_token", Int64),
        ("out_head", Int64),
        ("tables", Address),
        ("table_firsts", Address),
        ("table_width", Int64),
        *((name, Address) for name in ("tokens", "starts", "positions", "prefix_splits", "split_places")),
        *((name, Address) for name in ("items", "prefix_items", "prefix_tokens", "single_items")),
        *((name, Int64) for name in ("num_items", "num_prefix_items", "num_single_items")),
        ("prefix_states", Address),
        ("split_states", Address),
        ("scratch", Address),
        ("scratch_bytes", Int64),
    ]


@dataclass
class _Part:
    """Requests attended in one call: arrays and tensors that `call` points to, kept alive."""

    call: _Attention
    kept: list[Any] = field(default_factory=list)
    sinks: torch.Tensor | None = None


@dataclass(frozen=True)
class _Side:
    """Pieces of prompts in a sliding layer. The ring has no room for all that they see, so they read side pages of this
    pass: `targets` [C] of them begin as copies of the ring's `sources`; `tokens` [N] are then written to `pages` and
    `offsets` there."""

    num_pages: int
    sources: torch.Tensor
    targets: torch.Tensor
    tokens: torch.Tensor
    pages: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True)
class _Plan:
    write_pages: np.ndarray
    write_offsets: np.ndarray
    paged: _Part | None
    sliding: _Part | None
    side: _Side | None


@dataclass(frozen=True)
class DirectAttention:
    """What a layer in C needs to attend by itself (layer_run of layer.h), for one layer of one forward pass."""

    call: _Attention
    pages: int
    write_pages: int
    write_offsets: int


class PagedAttention:
    """Attention in C over pages in float32, bfloat16 or int8, the last with a scale for each token and head."""

    is_batch_invariant = True
    reads_tensors_alone = False

    def __init__(
        self,
        library: Library,
        page_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        kv_dtype: torch.dtype,
    ):
        self.name = f"c-{library.isa}"
        self._heads = num_heads
        slots, padded_dim = (align_bytes(count, TILE) for count in (page_size, head_dim))
        # Keys in int8 lie in fours, filled up as quantized queries are.
        key_dim = align_bytes(head_dim, 4) if kv_dtype == torch.int8 else head_dim
        key_bytes = num_kv_heads * slots * key_dim * kv_dtype.itemsize
        value_bytes = num_kv_heads * slots * padded_dim * kv_dtype.itemsize
        scale_bytes = num_kv_heads * slots * 4 if kv_dtype == torch.int8 else 0
        values = align_bytes(key_bytes)
        key_scales = align_bytes(values + value_bytes)
        self.page_bytes = align_bytes(key_scales + 2 * scale_bytes)
        self._group = num_heads // num_kv_heads
        self._split_pages = max(1, SPLIT_TOKENS // page_size)
        self._tile_tokens = max(1, ROW_TILE // self._group)
        max_rows = self._tile_tokens * self._group
        split_bytes = self._split_pages * slots * (head_dim + padded_dim) * kv_dtype.itemsize
        self._heads_together = max(1, min(num_kv_heads, BYTES_TOGETHER // split_bytes, max_rows // self._group))
        self._scratch_bytes = _scratch_bytes(max_rows, head_dim, padded_dim, self._split_pages * slots)
        self._threads = torch.get_num_threads()
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._fixed = _Attention(
            page_bytes=self.page_bytes,
            page_size=page_size,
            slots=slots,
            kv_heads=num_kv_heads,
            group=self._group,
            dim=head_dim,
            padded_dim=padded_dim,
            kind=KV_KINDS[kv_dtype],
            values=values,
            key_scales=key_scales,
            value_scales=key_scales + scale_bytes,
            split_pages=self._split_pages,
            max_rows=max_rows,
            scratch_bytes=self._scratch_bytes,
        )
        call = ctypes.POINTER(_Attention)
        self._attend = library.function("attend", call)
        tensor = (Address, Int64, Int64)
        self._store = library.function("store", call, Address, *tensor, *tensor, Int64, Address, Address)

    def workspace_bytes(self, max_batch_tokens: int, max_model_len: int) -> int:
        """See AttentionBackend: scratch of the threads, what waits between two phases, side pages of sliding layers."""
        state_bytes = self._heads * (self._fixed.padded_dim + 2) * 4
        split_tokens = self._split_pages * self._fixed.page_size
        singles = ITEMS_PER_THREAD * self._threads * self._tile_tokens * -(-max_model_len // split_tokens)
        side_pages = max_batch_tokens + -(-max_model_len // self._fixed.page_size)
        states = state_bytes * (max_batch_tokens + min(singles, 64 * max_batch_tokens))
        return self._threads * self._scratch_bytes + states + min(side_pages * self.page_bytes, 1 << 30)

    def view_pages(self, raw: torch.Tensor) -> torch.Tensor:
        """raw: uint8 [num_pages, page_bytes], which the kernel reads as it is."""
        return raw

    def prepare(self, batch: AttentionBatch) -> _Plan:
        """What each request reads, cut into items of work; pieces of prompts in sliding layers apart from the rest."""
        self._threads = torch.get_num_threads()
        if self._scratch.numel() < self._threads * self._scratch_bytes + 64:
            self._scratch = torch.empty(self._threads * self._scratch_bytes + 64, dtype=torch.uint8)
        query_lengths, kv_lengths, firsts = (
            np.array(column, dtype=np.int64) for column in (batch.query_lengths, batch.kv_lengths, batch.first_tokens)
        )
        tables, ends = batch.page_tables.numpy(), np.cumsum(query_lengths)
        apart = (query_lengths > 1) if batch.window is not None else np.zeros(len(ends), dtype=bool)
        paged, sliding = np.flatnonzero(~apart), np.flatnonzero(apart)
        starts = ends - query_lengths
        common = (starts, query_lengths, kv_lengths, firsts, batch.window)
        side, side_tables = self._side(batch, sliding, starts) if len(sliding) else (None, tables)
        return _Plan(
            np.ascontiguousarray(batch.write_pages.numpy()),
            np.ascontiguousarray(batch.write_offsets.numpy()),
            self._part(paged, tables[paged], *common) if len(paged) else None,
            self._part(sliding, side_tables, *common) if len(sliding) else None,
            side,
        )

    def _side(self, batch: AttentionBatch, requests: np.ndarray, starts: np.ndarray) -> tuple[_Side, np.ndarray]:
        """Side pages for pieces of prompts, and the rows of page tables that name them."""
        page_size, tables = self._fixed.page_size, batch.page_tables.numpy()
        sources, targets, tokens, pages, offsets, rows = [], [], [], [], [], []
        taken = 0
        for request in requests.tolist():
            first, kv_length, length = (
                column[request] for column in (batch.first_tokens, batch.kv_lengths, batch.query_lengths)
            )
            count = -(-(kv_length - first) // page_size)
            read = -(-(kv_length - length - first) // page_size)
            rows.append(np.arange(taken, taken + count))
            sources.append(tables[request, :read])
            targets.append(rows[-1][:read])
            places = np.arange(kv_length - length, kv_length) - first
            tokens.append(np.arange(starts[request], starts[request] + length))
            pages.append(taken + places // page_size)
            offsets.append(places % page_size)
            taken += count
        padded = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        for row, own in zip(padded, rows, strict=True):
            row[: len(own)] = own
        return (
            _Side(
                taken,
                sources=torch.from_numpy(np.concatenate(sources)),
                targets=torch.from_numpy(np.concatenate(targets)),
                tokens=torch.from_numpy(np.concatenate(tokens)),
                pages=np.concatenate(pages),
                offsets=np.concatenate(offsets),
            ),
            padded,
        )

    def _part(
        self,
        requests: np.ndarray,
        tables: np.ndarray,
        starts: np.ndarray,
        query_lengths: np.ndarray,
        kv_lengths: np.ndarray,
        firsts: np.ndarray,
        window: int | None,
    ) -> _Part:
        """One call for some requests of the batch. Tables have a row for each of them."""
        lengths, contexts, firsts = (
            query_lengths[requests],
            kv_lengths[requests] - query_lengths[requests],
            firsts[requests],
        )
        own_starts = np.concatenate([[0], np.cumsum(lengths)])
        within = np.arange(own_starts[-1]) - np.repeat(own_starts[:-1], lengths)
        tokens = np.repeat(starts[requests], lengths) + within
        positions = np.zeros(starts[-1] + query_lengths[-1], dtype=np.int64)
        positions[tokens] = np.repeat(contexts, lengths) + within
        split_tokens = self._split_pages * self._fixed.page_size
        prefix_splits = np.zeros(len(requests), dtype=np.int64)
        groups = [] if window is not None else shared_prefixes(tables, contexts // split_tokens, self._split_pages)
        for members, splits in groups:
            prefix_splits[members] = splits
        items = self._items(lengths, own_starts, contexts)
        lows = np.zeros_like(contexts) if window is None else np.maximum(0, contexts - window + 1)
        firsts_left = np.maximum(prefix_splits, lows // split_tokens)
        lasts = (contexts + lengths - 1) // split_tokens
        singles, places, num_places = self._singles(lengths, firsts_left, lasts, len(items))
        prefix_items, prefix_tokens = self._prefix_items(groups, own_starts, tokens)
        arrays = {
            "tables": tables,
            "table_firsts": firsts,
            "tokens": tokens,
            "starts": own_starts,
            "positions": positions,
            "prefix_splits": prefix_splits,
            "split_places": places,
            "items": items,
            "prefix_items": prefix_items,
            "prefix_tokens": prefix_tokens,
            "single_items": singles,
        }
        state = self._heads * (self._fixed.padded_dim + 2)
        states = {
            "prefix_states": torch.empty(len(positions) * state if len(prefix_items) else 0),
            "split_states": torch.empty(num_places * state),
        }
        call = _Attention.from_buffer_copy(self._fixed)
        part = _Part(call, [*states.values()])
        for name, array in arrays.items():
            kept = np.ascontiguousarray(array, dtype=np.int64)
            part.kept.append(kept)
            setattr(call, name, kept.ctypes.data)
        for name, tensor in states.items():
            setattr(call, name, tensor.data_ptr())
        call.window, call.table_width = window or 0, tables.shape[1]
        call.num_items, call.num_prefix_items, call.num_single_items = len(items), len(prefix_items), len(singles)
        call.scratch = -(-self._scratch.data_ptr() // 64) * 64
        return part

    def _items(self, lengths: np.ndarray, starts: np.ndarray, contexts: np.ndarray) -> np.ndarray:
        """[n, 5] of kernels.h, what takes longest first; few query tokens take several KV heads at once."""
        tiles = -(-lengths // self._tile_tokens)
        requests = np.repeat(np.arange(len(lengths)), tiles)
        number = np.arange(len(requests)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
        begins = starts[requests] + number * self._tile_tokens
        ends = np.minimum(begins + self._tile_tokens, starts[requests + 1])
        work = (contexts[requests] + ends - starts[requests]) * (ends - begins)
        order = np.argsort(-work, kind="stable")
        items = np.stack([requests, begins, ends], axis=1)[order]
        heads = self._fixed.kv_heads
        few = (items[:, 2] - items[:, 1]) * self._group * self._heads_together <= self._fixed.max_rows
        if few.sum() * -(-heads // self._heads_together) < ITEMS_PER_THREAD * self._threads:
            few[:] = False
        width = np.where(few, self._heads_together, 1)
        parts = -(-heads // width)
        repeated = np.repeat(items, parts, axis=0)
        first = (np.arange(len(repeated)) - np.repeat(np.cumsum(parts) - parts, parts)) * np.repeat(width, parts)
        last = np.minimum(first + np.repeat(width, parts), heads)
        return np.column_stack([repeated, first, last])

    def _singles(
        self, lengths: np.ndarray, firsts: np.ndarray, lasts: np.ndarray, num_items: int
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Splits worked out one by one [n, 3], each request's first place for their results, and how many places."""
        places = np.full(len(lengths), -1, dtype=np.int64)
        rows: list[tuple[int, int, int]] = []
        taken = 0
        if num_items < ITEMS_PER_THREAD * self._threads:
            for request in np.flatnonzero((lasts > firsts) & (lengths <= self._tile_tokens)).tolist():
                places[request] = taken
                for split in range(int(firsts[request]), int(lasts[request]) + 1):
                    rows.append((request, split, taken))
                    taken += int(lengths[request])
        return np.array(rows, dtype=np.int64).reshape(-1, 3), places, taken

    def _prefix_items(
        self, groups: list[tuple[np.ndarray, int]], starts: np.ndarray, tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """[n, 4] of kernels.h, and the query tokens they name."""
        rows, lists, taken = [], [], 0
        for members, splits in groups:
            own = np.concatenate([tokens[starts[member] : starts[member + 1]] for member in members])
            lists.append(own)
            for begin in range(0, len(own), self._tile_tokens):
                end = min(begin + self._tile_tokens, len(own))
                rows.append((int(members[0]), taken + begin, taken + end, splits))
            taken += len(own)
        return (
            np.array(rows, dtype=np.int64).reshape(-1, 4),
            np.concatenate(lists) if lists else np.zeros(0, dtype=np.int64),
        )

    def direct(self, pages: torch.Tensor, plan: _Plan, options: AttentionOptions) -> DirectAttention | None:
        """See AttentionBackend. Pieces of prompts in sliding layers read side pages, which `attend` makes."""
        if plan.paged is None or plan.sliding is not None:
            return None
        self._ask(plan.paged, options)
        return DirectAttention(
            plan.paged.call, pages.data_ptr(), plan.write_pages.ctypes.data, plan.write_offsets.ctypes.data
        )

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pages: torch.Tensor,
        plan: _Plan,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """See AttentionBackend.attend. Arithmetic is in float32 whatever the model's."""
        dtype = query.dtype
        query, key, value = (_dense(tensor) for tensor in (query, key, value))
        side_pages = None
        if plan.side is not None:
            side = plan.side
            side_pages = torch.empty(side.num_pages, self.page_bytes, dtype=torch.uint8)
            side_pages[side.targets] = pages[side.sources]
            own = side.tokens
            self._write(side_pages, key[own], value[own], side.pages, side.offsets)
        self._write(pages, key, value, plan.write_pages, plan.write_offsets)
        output = torch.empty(query.shape, dtype=torch.float32)
        for part, read in ((plan.paged, pages), (plan.sliding, side_pages)):
            if part is not None and read is not None:
                self._run(part, read, query, output, options)
        return output.to(dtype)

    def _write(
        self, pages: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: np.ndarray, offsets: np.ndarray
    ) -> None:
        halves = [(half.data_ptr(), half.stride(0), half.stride(1)) for half in (key, value)]
        targets = (places.ctypes.data, offsets.ctypes.data)
        self._store(self._fixed, pages.data_ptr(), *halves[0], *halves[1], len(places), *targets)

    def _run(
        self, part: _Part, pages: torch.Tensor, query: torch.Tensor, output: torch.Tensor, options: AttentionOptions
    ) -> None:
        call = part.call
        self._ask(part, options)
        call.pages, call.query, call.out = pages.data_ptr(), query.data_ptr(), output.data_ptr()
        call.query_token, call.query_head = query.stride(0), query.stride(1)
        call.out_token, call.out_head = output.stride(0), output.stride(1)
        self._attend(call)

    @staticmethod
    def _ask(part: _Part, options: AttentionOptions) -> None:
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        part.sinks = sinks
        part.call.scaling, part.call.softcap = options.scaling, options.softcap or 0.0
        part.call.sinks = None if sinks is None else sinks.data_ptr()


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, dim] in float32, each vector without gaps."""
    tensor = tensor.float()
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def _scratch_bytes(rows: int, dim: int, padded_dim: int, split_slots: int) -> int:
    """What a thread needs, in the order of struct scratch of page_products.h, each part from a multiple of 64 bytes."""
    query = rows * (dim + 2)  # or for int8, a quarter as many numbers and two more
    counts = [query, rows * split_slots, rows, rows * padded_dim, rows * padded_dim, split_slots * padded_dim]
    return sum(align_bytes(4 * count) for count in [*counts, *[rows] * 4, 2 * rows, 2 * rows])
