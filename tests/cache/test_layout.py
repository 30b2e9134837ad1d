"""CacheLayout: how blocks of both types of attention tile the same chunks, and what tokens cost of each."""

import pytest
from cache.cache_harness import cache_of, layout_of, shape_of

from cbgen.cache.layout import MAX_IDLE_SHARE, CacheLayout, pages_per_chunk_for
from cbgen.cache.pool import NUM_RESERVED_CHUNKS
from cbgen.config import FULL_ATTENTION, SLIDING_ATTENTION

LAYOUTS = [
    pytest.param(layout_of(3), id="full"),
    pytest.param(layout_of(0, 3), id="sliding"),
    pytest.param(layout_of(2, 3), id="3 and 2 blocks a chunk"),
    pytest.param(layout_of(10, 52), id="5 and 1 blocks a chunk"),
    pytest.param(layout_of(5, 1, window=9), id="more full than sliding"),
    pytest.param(layout_of(4, 4, window=1), id="as many of each"),
    pytest.param(layout_of(1, 5, window=40), id="a window of many pages"),
]


def test_ten_full_and_fifty_two_sliding_layers_take_fifty_two_pages():
    """The least common multiple would be 260 pages; two idle pages in 52 are the better bargain."""
    layout = layout_of(10, 52)
    full, sliding = layout.groups
    assert layout.pages_per_chunk == full.pages_per_chunk == sliding.pages_per_chunk == 52
    assert (full.pages_per_block, full.blocks_per_chunk) == (10, 5)
    assert (sliding.pages_per_block, sliding.blocks_per_chunk) == (52, 1)


@pytest.mark.parametrize("num_layers", [1, 2, 7, 30, 64])
@pytest.mark.parametrize("attention_type", [FULL_ATTENTION, SLIDING_ATTENTION])
def test_a_model_of_one_type_has_one_block_per_chunk(num_layers, attention_type):
    """Nothing to tile: the chunk is the block, and nothing is idle."""
    layout = layout_of(num_layers) if attention_type == FULL_ATTENTION else layout_of(0, num_layers)
    (group,) = layout.groups
    assert group.attention_type == attention_type
    assert (group.pages_per_block, group.blocks_per_chunk, layout.pages_per_chunk) == (num_layers, 1, num_layers)


def test_no_pair_of_layer_counts_leaves_more_than_the_allowed_share_idle():
    """All pairs up to 64 layers of each type: the chunk is the smallest within the 5 %, in exact arithmetic."""
    assert MAX_IDLE_SHARE == 0.05

    def fits(pages: int, count: int) -> bool:
        return 20 * (pages % count) <= pages

    for first in range(1, 65):
        for second in range(1, first + 1):
            pages = pages_per_chunk_for([first, second])
            assert pages == pages_per_chunk_for([second, first])
            assert fits(pages, first) and fits(pages, second), (first, second)
            assert not any(fits(n, first) and fits(n, second) for n in range(first, pages)), (first, second)


def test_the_groups_hold_every_layer_once_full_attention_first():
    """Layers keep their number in the model, however the types take turns in it."""
    shape = shape_of(2, 3)
    layout = CacheLayout.of(shape, 4)
    assert [group.attention_type for group in layout.groups] == [FULL_ATTENTION, SLIDING_ATTENTION]
    for group in layout.groups:
        assert [shape.layer_types[layer] for layer in group.layers] == [group.attention_type] * len(group.layers)
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(5))


@pytest.mark.parametrize(("layout", "supports"), [(layout_of(3), True), (layout_of(0, 3), False), (layout_of(2, 3), 0)])
def test_only_a_model_of_full_attention_supports_sharing(layout, supports):
    """Law 5: one sliding layer that recycles its pages is enough to turn sharing off."""
    assert layout.supports_sharing == supports


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_and_chunks_are_exact_inverses(layout):
    """n blocks take so many chunks, not one less; and so many chunks hold no more than their blocks."""
    for num_blocks in [*range(200), 99_991, (1 << 40) + 1]:
        num_chunks = layout.chunks_for_blocks(num_blocks)
        assert layout.blocks_in_chunks(num_chunks) >= num_blocks
        assert num_blocks == 0 or layout.blocks_in_chunks(num_chunks - 1) < num_blocks
    for num_chunks in [*range(200), 99_991, (1 << 40) + 1]:
        most = layout.blocks_in_chunks(num_chunks)
        assert layout.chunks_for_blocks(most) <= num_chunks < layout.chunks_for_blocks(most + 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunks_for_tokens_is_what_one_request_takes_of_an_empty_cache(layout):
    """Counted on a real cache, token by token, until long after the window's ring is whole."""
    for num_tokens in range(1, 60):
        cache = cache_of(layout, 60)
        assert cache.allocate(0, num_tokens)
        assert cache._pool.num_data_chunks - cache._pool.num_free_chunks == layout.chunks_for_tokens(num_tokens)
    assert layout.chunks_for_tokens(0) == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("most", [3, 7, 25, 57])
def test_the_longest_request_that_fits_agrees_with_trying_all(layout, most):
    """The number a refusal tells the user: the longest one that would be served, the context at most."""
    for num_chunks in range(14):
        fitting = [n for n in range(most + 1) if layout.chunks_for_tokens(n) <= num_chunks]
        assert layout.max_request_tokens(num_chunks, most) == fitting[-1], num_chunks


def test_the_longest_request_that_fits_is_the_whole_context_where_there_is_room():
    """Contexts are mostly powers of two."""
    assert [layout_of(3).max_request_tokens(100, most) for most in (1, 2, 5, 8, 64)] == [1, 2, 5, 8, 64]


@pytest.mark.parametrize(
    ("window", "page_size", "ring"), [(1, 4, 1), (4, 4, 1), (5, 4, 2), (6, 4, 2), (8, 4, 2), (9, 4, 3), (4096, 32, 128)]
)
def test_the_ring_is_the_least_number_of_pages_over_the_window(window, page_size, ring):
    """A sliding layer needs no more of a request, however long it gets; a full one has no such end."""
    full, sliding = layout_of(1, 1, window, page_size).groups
    assert sliding.max_blocks == ring
    assert (ring - 1) * page_size < window <= ring * page_size
    assert full.max_blocks is None
    for num_tokens in range(3 * window if window < 100 else 0):
        assert full.num_blocks_for(num_tokens) == -(-num_tokens // page_size)
        assert sliding.num_blocks_for(num_tokens) == min(full.num_blocks_for(num_tokens), ring)
    assert sliding.num_blocks_for(10 * window) == ring


def test_a_token_sees_the_window_itself_included():
    """The first visible token is window - 1 places back, and never before the beginning."""
    full, sliding = layout_of(1, 1, window=6).groups
    assert [sliding.first_visible(position) for position in range(9)] == [0, 0, 0, 0, 0, 0, 1, 2, 3]
    assert {full.first_visible(position) for position in range(9)} == {0}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_are_named_by_their_first_page_and_do_not_overlap(layout):
    """No page belongs to two blocks of either type, and no block reaches over the end of its chunk."""
    cache, num_data_chunks = cache_of(layout, 12), 12
    for num_blocks in range(1, 12):
        for request_id in range(6):
            cache.allocate(request_id, num_blocks * layout.page_size)
    assert cache._pool.num_free_chunks < 3, "the cache must be nearly full"
    pages: list[int] = []
    for allocator in cache.allocators:
        size = allocator.group.pages_per_block
        for request_id in allocator.request_ids:
            for block in allocator.block_table(request_id):
                assert block // layout.pages_per_chunk == (block + size - 1) // layout.pages_per_chunk
                pages += range(block, block + size)
    assert len(pages) == len(set(pages))
    assert min(pages) >= NUM_RESERVED_CHUNKS * layout.pages_per_chunk
    assert max(pages) < (NUM_RESERVED_CHUNKS + num_data_chunks) * layout.pages_per_chunk
