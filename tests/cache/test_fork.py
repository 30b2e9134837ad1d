"""PagedCache.fork: a second sample of a prompt takes its blocks by reference where it can, and copies the rest."""

import pytest
from cache.cache_harness import PAGE_SIZE, WINDOW, cache_of, hold, layout_of, snapshot

from cbgen.cache.paged_cache import PagedCache

PROMPT = list(range(10))  # two whole pages and a half


def forked(cache: PagedCache, prompt: list[int]) -> tuple[list[list[int]], list[list[int]], list[tuple[int, int]]]:
    """The block tables of parent 0 and child 1, for each allocator, and the pages to copy."""
    hold(cache, 0, prompt)
    pairs = cache.fork(0, 1, len(prompt))
    assert pairs is not None
    cache.check_integrity(set())
    parents, children = ([list(a.block_table(request)) for a in cache.allocators] for request in (0, 1))
    return parents, children, pairs


def test_whole_blocks_are_shared_and_a_started_one_is_copied():
    """The child may write on behind its last token, so that page must be its own, in every layer."""
    cache = cache_of(layout_of(3), 12)
    (parent,), (child,), pairs = forked(cache, PROMPT)
    assert child[:2] == parent[:2]
    assert child[2] not in parent
    assert pairs == [(parent[2] + layer, child[2] + layer) for layer in range(3)]
    assert cache._pool.num_free_chunks == 12 - 4


def test_a_prompt_of_whole_pages_is_shared_without_a_copy():
    """Both go on in blocks of their own."""
    cache = cache_of(layout_of(3), 12)
    (parent,), (child,), pairs = forked(cache, PROMPT[:8])
    assert (child, pairs) == (parent, [])
    assert cache.allocate(0, 9) and cache.allocate(1, 9)
    tables = [cache.allocators[0].block_table(request) for request in (0, 1)]
    assert tables[0][:2] == tables[1][:2] == parent
    assert tables[0][2] != tables[1][2]
    cache.check_integrity(set())


@pytest.mark.parametrize(
    "layout", [pytest.param(layout_of(3), id="full, not shared"), pytest.param(layout_of(2, 3), id="hybrid")]
)
def test_without_sharing_everything_is_copied(layout):
    """Page by page, in the order of the block tables, full blocks and the sliding ring alike."""
    cache = cache_of(layout, 12, allow_block_sharing=False)
    parents, children, pairs = forked(cache, PROMPT)
    expected = [
        (original + page, copy + page)
        for parent, child, allocator in zip(parents, children, cache.allocators, strict=True)
        for original, copy in zip(parent, child, strict=True)
        for page in range(allocator.group.pages_per_block)
    ]
    assert pairs == expected
    assert pairs == list(zip(cache.pages_of(0, 10), cache.pages_of(1, 10), strict=True))
    sources, targets = (set(column) for column in zip(*pairs, strict=True))
    assert len(sources) == len(targets) == len(pairs)
    assert not sources & targets


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 2), (40, 2)])
def test_of_a_sliding_layer_the_ring_is_copied(num_tokens, num_blocks):
    """As much of it as there is: the child needs its own from the first token on."""
    assert WINDOW <= 2 * PAGE_SIZE
    (parent,), (child,), pairs = forked(cache_of(layout_of(0, 1), 12), list(range(num_tokens)))
    assert len(parent) == len(child) == num_blocks
    assert pairs == list(zip(parent, child, strict=True))
    assert not set(parent) & set(child)


@pytest.mark.parametrize(
    ("layout", "sharing", "enough"),
    [
        pytest.param(layout_of(3), True, 3 + 1, id="full, sharing"),
        pytest.param(layout_of(3), False, 3 + 3, id="full"),
        pytest.param(layout_of(0, 3), False, 2 + 2, id="sliding"),
        pytest.param(layout_of(2, 3), False, 2 + 2, id="hybrid"),
    ],
)
def test_a_fork_finds_room_for_all_or_changes_nothing(layout, sharing, enough):
    """The least cache in which it works, and one chunk less."""
    cache = cache_of(layout, enough, sharing)
    forked(cache, PROMPT)
    assert cache._pool.num_free_chunks == 0
    cache = cache_of(layout, enough - 1, sharing)
    hold(cache, 0, PROMPT)
    before = snapshot(cache)
    assert cache.fork(0, 1, len(PROMPT)) is None
    assert snapshot(cache) == before


def test_a_fork_demotes_what_it_needs_and_no_more():
    """Initialized blocks are free for a child as for anybody."""
    cache = cache_of(layout_of(2), 6)
    hold(cache, 9, list(range(100, 112)))
    initialized = list(cache.allocators[0].block_table(9))
    cache.release(9)
    hold(cache, 0, PROMPT)
    assert cache._prefix_cache.initialized_blocks == initialized
    assert cache.fork(0, 1, 10) is not None
    assert cache._prefix_cache.initialized_blocks == initialized[:2]
    cache.check_integrity(set())


def test_each_keeps_its_blocks_when_the_other_leaves():
    """Parent or child: the shared blocks stay until both are gone."""
    for first, second in ((0, 1), (1, 0)):
        cache = cache_of(layout_of(2), 12)
        _, tables, _ = forked(cache, PROMPT)
        table = list(cache.allocators[0].block_table(second))
        cache.release(first)
        cache.check_integrity(set())
        assert cache.allocators[0].block_table(second) == table
        assert cache._prefix_cache.initialized_blocks == []
        cache.release(second)
        assert cache._prefix_cache.initialized_blocks == tables[0][:2]
        assert cache.free_share == 1.0
        cache.check_integrity(set())


def test_parent_and_child_are_found_by_what_each_went_on_with():
    """The block that both had begun is named twice: once for the parent's tokens, once for the child's."""
    cache = cache_of(layout_of(2), 12)
    forked(cache, PROMPT)
    for request_id, token in ((0, 50), (1, 60)):
        assert cache.allocate(request_id, 12)
        cache.register(request_id, [*PROMPT, token, token], 12)
    for request_id, token in ((0, 50), (1, 60)):
        match = cache.match(2 + request_id, [*PROMPT, token, token, 7])
        assert match.blocks == cache.allocators[0].block_table(request_id)
    assert len(cache.match(4, [*PROMPT, 50, 60, 7]).blocks) == 2
    cache.check_integrity({2, 3, 4})


def test_a_child_of_the_first_tokens_only_goes_on_as_itself():
    """The parent has three pages; a child of two of them that takes another way must not be named after the third."""
    cache = cache_of(layout_of(2), 12)
    hold(cache, 0, list(range(12)))
    assert cache.fork(0, 1, 8) == []
    child = [*range(8), *range(60, 68)]
    assert cache.allocate(1, 16)
    cache.register(1, child, 16)
    wrong = cache.match(2, [*range(12), *range(64, 68), 7])
    assert wrong.blocks == cache.allocators[0].block_table(0), "KV of 64 to 67 was computed after 60 to 63"
    assert cache.match(3, [*child, 7]).blocks == cache.allocators[0].block_table(1)
