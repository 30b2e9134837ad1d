"""What both types of allocator do: cut chunks into blocks, hand them out, and give whole chunks back."""

import copy
import random

import pytest
from cache.cache_harness import group_of

from cbgen.cache.allocator import CacheAllocator
from cbgen.cache.full_attention import FullAttentionCacheAllocator
from cbgen.cache.pool import NUM_RESERVED_CHUNKS, CachePool
from cbgen.cache.sliding_attention import SlidingAttentionCacheAllocator
from cbgen.config import FULL_ATTENTION, SLIDING_ATTENTION

IDLE_PAGES = 1


def allocator_on(pool: CachePool, kind: str, num_layers: int, pages_per_chunk: int) -> CacheAllocator:
    group = group_of(kind, num_layers, pages_per_chunk)
    if kind == SLIDING_ATTENTION:
        return SlidingAttentionCacheAllocator(pool, group)
    return FullAttentionCacheAllocator(pool, group, allow_block_sharing=False)


def build(num_data_chunks: int, blocks_per_chunk: int, kind: str = FULL_ATTENTION) -> tuple[CachePool, CacheAllocator]:
    """Blocks of two pages, and a page that is idle at the end of each chunk."""
    pool = CachePool(num_data_chunks + NUM_RESERVED_CHUNKS)
    return pool, allocator_on(pool, kind, 2, 2 * blocks_per_chunk + IDLE_PAGES)


def check(pool: CachePool, *allocators: CacheAllocator) -> None:
    pool.check_integrity([chunk for allocator in allocators for chunk in allocator.check_integrity()])


def num_free(pool: CachePool, allocator: CacheAllocator) -> int:
    return pool.num_free_chunks * allocator.group.blocks_per_chunk + allocator.num_uninitialized


both_kinds = pytest.mark.parametrize("kind", [FULL_ATTENTION, SLIDING_ATTENTION])


@both_kinds
@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 3])
def test_all_blocks_can_be_owned_and_none_is_of_a_reserved_chunk(blocks_per_chunk, kind):
    """The capacity is exactly the data chunks' blocks, named by their first pages."""
    pool, allocator = build(5, blocks_per_chunk, kind)
    assert allocator.num_data_blocks == num_free(pool, allocator) == 5 * blocks_per_chunk
    allocator.grow(0, 5 * blocks_per_chunk)
    size = 2 * blocks_per_chunk + IDLE_PAGES
    expected = [chunk * size + 2 * n for chunk in range(NUM_RESERVED_CHUNKS, 7) for n in range(blocks_per_chunk)]
    assert sorted(allocator.block_table(0)) == expected
    assert num_free(pool, allocator) == 0
    check(pool, allocator)


@both_kinds
def test_growing_appends_and_leaves_the_blocks_before_in_place(kind):
    """A block table is in token order: the KV already written keeps its place."""
    _, allocator = build(9, 3, kind)
    first = allocator.grow(0, 2)
    allocator.grow(1, 2)
    added = allocator.grow(0, 3)
    assert allocator.block_table(0) == first + added
    assert allocator.num_owned_blocks(0) == 5
    assert set(allocator.block_table(0)).isdisjoint(allocator.block_table(1))


@both_kinds
def test_a_released_request_holds_nothing(kind):
    """Releasing again, or a request never seen, is fine and frees nothing more."""
    pool, allocator = build(4, 3, kind)
    allocator.grow(7, 5)
    for request_id in (7, 7, 8):
        allocator.release(request_id)
        assert allocator.num_owned_blocks(request_id) == 0
        assert not list(allocator.request_ids)
        assert num_free(pool, allocator) == allocator.num_data_blocks
        check(pool, allocator)


@both_kinds
def test_a_chunk_returns_only_when_all_its_blocks_are_free(kind):
    """Law 6: two requests share a chunk, and it is theirs until both have left."""
    pool, allocator = build(2, 3, kind)
    allocator.grow(0, 1)
    allocator.grow(1, 2)
    assert pool.num_free_chunks == 1
    allocator.release(0)
    assert (pool.num_free_chunks, allocator.num_uninitialized) == (1, 1), "request 1 owns two blocks of the chunk"
    check(pool, allocator)
    allocator.release(1)
    assert (pool.num_free_chunks, allocator.num_uninitialized) == (2, 0)
    check(pool, allocator)


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0)])
def test_a_chunk_that_returned_serves_the_other_type_of_attention(first, second):
    """The pool does not care whose a chunk was: full blocks and sliding blocks tile the same bytes."""
    pool = CachePool(1 + NUM_RESERVED_CHUNKS)
    kinds = [allocator_on(pool, FULL_ATTENTION, 2, 6), allocator_on(pool, SLIDING_ATTENTION, 3, 6)]
    before, after = kinds[first], kinds[second]
    taken = before.grow(0, before.group.blocks_per_chunk)
    assert after.num_chunks_for(1) == 1 and pool.num_free_chunks == 0
    check(pool, before, after)
    before.release(0)
    given = after.grow(1, after.group.blocks_per_chunk)
    assert {block // 6 for block in taken} == {block // 6 for block in given} == {NUM_RESERVED_CHUNKS}
    check(pool, before, after)


@both_kinds
def test_blocks_of_broken_chunks_are_used_before_a_new_chunk(kind):
    """Otherwise every request would break open a chunk of its own and none would ever return whole."""
    pool, allocator = build(4, 3, kind)
    allocator.grow(0, 2)
    allocator.grow(1, 4)
    assert pool.num_free_chunks == 2
    allocator.release(0)
    assert [allocator.num_chunks_for(n) for n in range(7)] == [0, 0, 0, 1, 1, 1, 2]
    allocator.grow(2, 2)
    assert pool.num_free_chunks == 2
    check(pool, allocator)


class Replay:
    """Random steps on an allocator beside a plain account of who owns what."""

    def __init__(self, kind: str, blocks_per_chunk: int, seed: int):
        self.rng = random.Random(seed)
        self.pool, self.allocator = build(7, blocks_per_chunk, kind)
        self.tables: dict[int, list[int]] = {}

    def step(self) -> None:
        request = self.rng.randrange(6)
        if self.rng.random() < 0.4:
            self.allocator.release(request)
            self.tables.pop(request, None)
        else:
            number = self.rng.randint(0, min(5, num_free(self.pool, self.allocator)))
            self.tables[request] = self.tables.get(request, []) + self.allocator.grow(request, number)

    def check(self) -> None:
        check(self.pool, self.allocator)
        for request, table in self.tables.items():
            assert self.allocator.block_table(request) == table, "another request's step changed this one"
        owned = sum(map(len, self.tables.values()))
        assert num_free(self.pool, self.allocator) == self.allocator.num_data_blocks - owned
        used_chunks = {b // self.allocator.group.pages_per_chunk for t in self.tables.values() for b in t}
        assert self.pool.num_free_chunks == 7 - len(used_chunks), "a chunk without an owned block is in the pool"

    def check_freed_by_release(self) -> None:
        """On a copy, some requests really leave."""
        leaving = self.rng.sample(range(8), self.rng.randint(0, 8))
        foretold = self.allocator.freed_by_release(leaving)
        pool, allocator = copy.deepcopy((self.pool, self.allocator))
        for request in leaving:
            allocator.release(request)
        assert foretold == (allocator.num_uninitialized, pool.num_free_chunks - self.pool.num_free_chunks)


@both_kinds
@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 3])
@pytest.mark.parametrize("seed", range(2))
def test_random_steps_keep_the_laws_and_leak_nothing(blocks_per_chunk, seed, kind):
    """Each block has one owner after every step, what a release would free is foretold, and at the end all is free."""
    replay = Replay(kind, blocks_per_chunk, seed)
    for _ in range(500):
        replay.step()
        replay.check()
        replay.check_freed_by_release()
    for request in list(replay.tables):
        replay.allocator.release(request)
    check(replay.pool, replay.allocator)
    assert replay.pool.num_free_chunks == replay.pool.num_data_chunks


@both_kinds
@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda mine, other: mine.pop(), id="lost"),
        pytest.param(lambda mine, other: mine.append(other[0]), id="owned twice"),
        pytest.param(lambda mine, other: mine.append(mine[-1] + 4), id="owned and free"),
        pytest.param(lambda mine, other: mine.append(mine[-1] + 1), id="no block begins there"),
        pytest.param(lambda mine, other: mine.append(0), id="reserved"),
    ],
)
def test_integrity_check_finds_what_breaks_law_1(blocks_per_chunk, damage, kind):
    """The laws are only as good as their assertions: a damaged block table is found."""
    pool, allocator = build(4, blocks_per_chunk, kind)
    allocator.grow(0, 1)
    allocator.grow(1, 1)
    check(pool, allocator)
    damage(allocator.block_table(0), allocator.block_table(1))
    with pytest.raises(AssertionError):
        check(pool, allocator)
