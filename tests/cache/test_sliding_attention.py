"""SlidingAttentionCacheAllocator: a ring of pages over the window, the same blocks for as long as a request lives."""

import pytest
from cache.cache_harness import PAGE_SIZE, WINDOW, cache_of, group_of, layout_of

from cbgen.cache.layout import LayerGroup
from cbgen.cache.pool import CachePool
from cbgen.cache.sliding_attention import SlidingAttentionCacheAllocator
from cbgen.config import SLIDING_ATTENTION


def test_blocks_grow_with_the_tokens_up_to_the_ring():
    """A prompt shorter than the window takes what it needs; from the whole ring on nothing more is missing."""
    allocator = SlidingAttentionCacheAllocator(CachePool(9), group_of(SLIDING_ATTENTION, 2, 2))
    assert WINDOW <= 2 * PAGE_SIZE
    assert [allocator.num_missing_blocks(0, n) for n in (0, 1, 4, 5, 8, 9, 1000)] == [0, 1, 1, 2, 2, 2, 2]
    allocator.grow(0, 1)
    assert [allocator.num_missing_blocks(0, n) for n in (0, 1, 4, 5, 8, 9, 1000)] == [0, 0, 0, 1, 1, 1, 1]
    allocator.grow(0, 1)
    assert [allocator.num_missing_blocks(0, n) for n in (4, 9, 1000)] == [0, 0, 0]


def test_a_ring_is_recycled_in_place():
    """However long a request generates, it keeps its two blocks, and nobody else gets them."""
    cache = cache_of(layout_of(0, 3), 4)
    assert cache.allocate(0, 1) and cache.allocate(1, 100)
    assert cache.allocate(0, 8)
    (allocator,) = cache.allocators
    ring = list(allocator.block_table(0))
    for num_tokens in range(9, 60):
        assert cache.allocate(0, num_tokens)
        assert allocator.block_table(0) == ring
    assert set(ring).isdisjoint(allocator.block_table(1))
    cache.check_integrity()


@pytest.mark.parametrize("page_size", [1, 2, 4, 5])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 6, 8, 9, 13])
def test_what_a_token_sees_is_still_in_the_ring_once_it_is_stored(window, page_size):
    """Token after token is stored over the oldest one, then attends: all of its window is there, itself included."""
    group = LayerGroup(SLIDING_ATTENTION, (0,), window, page_size, 1)
    ring: dict[int, int] = {}
    for position in range(5 * window + 3 * page_size):
        assert group.num_blocks_for(position + 1) <= group.max_blocks
        ring[position % (group.max_blocks * page_size)] = position
        visible = set(range(group.first_visible(position), position + 1))
        assert len(visible) == min(window, position + 1)
        assert visible <= set(ring.values())


def test_nothing_is_shared_and_nothing_is_remembered():
    """Law 5: the same prompt twice is computed twice, and nothing of it stays when it leaves."""
    cache, prompt = cache_of(layout_of(0, 3), 8), list(range(12))
    assert not cache.shares_blocks
    for request_id in (0, 1):
        match = cache.match(request_id, prompt)
        assert (match.blocks, match.must_wait) == ([], False)
        assert cache.admit(request_id, prompt, len(prompt), match)
        cache.register(request_id, prompt, len(prompt))
    (allocator,) = cache.allocators
    assert set(allocator.block_table(0)).isdisjoint(allocator.block_table(1))
    cache.release(0)
    cache.release(1)
    assert cache.free_share == 1.0
    cache.check_integrity(set())
