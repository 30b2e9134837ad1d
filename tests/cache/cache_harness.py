"""Layouts, caches and snapshots of them for the tests of the cache."""

from itertools import zip_longest
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cbgen.cache.layout import CacheLayout, LayerGroup
from cbgen.cache.paged_cache import PagedCache
from cbgen.cache.pool import NUM_RESERVED_CHUNKS
from cbgen.config import FULL_ATTENTION, SLIDING_ATTENTION, ModelShape

CPU = torch.device("cpu")
PAGE_SIZE = 4
WINDOW = 6  # a ring of two pages


def shape_of(num_full: int, num_sliding: int = 0, window: int = WINDOW, **options: Any) -> ModelShape:
    """A small model whose layers of both types take turns as long as there are both."""
    pairs = zip_longest([SLIDING_ATTENTION] * num_sliding, [FULL_ATTENTION] * num_full)
    values: dict[str, Any] = {
        "layer_types": tuple(layer_type for pair in pairs for layer_type in pair if layer_type is not None),
        "sliding_window": window if num_sliding else None,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 16,
        "hidden_size": 128,
        "vocab_size": 1000,
        "max_model_len": 250,
        "dtype_bytes": 4,
    }
    return ModelShape(**{**values, **options})


def layout_of(num_full: int, num_sliding: int = 0, window: int = WINDOW, page_size: int = PAGE_SIZE) -> CacheLayout:
    return CacheLayout.of(shape_of(num_full, num_sliding, window), page_size)


def group_of(attention_type: str, num_layers: int, pages_per_chunk: int) -> LayerGroup:
    """A group by itself, in chunks of any number of pages."""
    window = WINDOW if attention_type == SLIDING_ATTENTION else None
    return LayerGroup(attention_type, tuple(range(num_layers)), window, PAGE_SIZE, pages_per_chunk)


def cache_of(layout: CacheLayout, num_data_chunks: int, allow_block_sharing: bool = True) -> PagedCache:
    return PagedCache(layout, num_data_chunks + NUM_RESERVED_CHUNKS, allow_block_sharing)


def hold(cache: PagedCache, request_id: int, token_ids: list[int]) -> None:
    """A request that shares nothing yet is admitted with all its tokens, and they are written."""
    assert cache.admit(request_id, token_ids, len(token_ids))
    cache.register(request_id, token_ids, len(token_ids))


def snapshot(part: Any) -> Any:
    """Everything that a part of the cache knows, to its last field and in order, in values that can be compared."""
    if isinstance(part, dict):
        return [(key, snapshot(value)) for key, value in part.items()]
    if isinstance(part, list | tuple):
        return [snapshot(value) for value in part]
    if type(part).__module__.startswith("cbgen.cache"):
        return [type(part).__name__, snapshot(vars(part))]
    return part


def block_tables(cache: PagedCache) -> list[dict[int, list[int]]]:
    """Who owns what, for each allocator."""
    return [{request: list(a.block_table(request)) for request in a.request_ids} for a in cache.allocators]


def allocator_has_room(cache: PagedCache, demand: tuple[int, ...]) -> bool:
    """Whether the demand fits, worked out from the block tables alone: the slow way to what the cache counts."""
    needed = used = 0
    for tables, allocator, missing in zip(block_tables(cache), cache.allocators, demand, strict=True):
        group = allocator.group
        owned = {block for table in tables.values() for block in table}
        chunks = {block // group.pages_per_chunk for block in owned}
        spare = len(chunks) * group.blocks_per_chunk - len(owned)
        used += len(chunks)
        needed += -(-max(0, missing - spare) // group.blocks_per_chunk)
    return used + needed <= cache._pool.num_data_chunks


class CopyCounter(TorchDispatchMode):
    """Inside, counts the copies from tensor to tensor that torch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.copies += function is torch.ops.aten.copy_.default
        return function(*args, **(kwargs or {}))
