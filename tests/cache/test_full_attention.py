"""FullAttentionCacheAllocator: blocks split out of chunks, owned by requests, and back."""

import random

import pytest

from cbgen.cache.full_attention import FullAttentionCacheAllocator
from cbgen.cache.pool import NUM_RESERVED_CHUNKS, CachePool

PAGE_SIZE = 4


def build(num_data_chunks: int, blocks_per_chunk: int) -> tuple[CachePool, FullAttentionCacheAllocator]:
    pool = CachePool(num_data_chunks + NUM_RESERVED_CHUNKS)
    return pool, FullAttentionCacheAllocator(pool, PAGE_SIZE, blocks_per_chunk)


def check(pool: CachePool, allocator: FullAttentionCacheAllocator) -> None:
    pool.check_integrity(allocator.check_integrity())


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_started_page_is_a_whole_block(num_tokens, num_blocks):
    """Tokens round up to blocks, and what a request owns already is not missing."""
    _, allocator = build(5, 1)
    assert allocator.num_blocks_for(num_tokens) == num_blocks
    assert allocator.num_missing_blocks(0, num_tokens) == num_blocks
    allocator.grow(0, 2)
    assert allocator.num_missing_blocks(0, num_tokens) == max(0, num_blocks - 2)
    assert allocator.num_missing_blocks(1, num_tokens) == num_blocks


@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 3])
def test_all_blocks_can_be_owned_and_none_is_of_a_reserved_chunk(blocks_per_chunk):
    """The capacity is exactly the data chunks' blocks; block b lies in chunk b // blocks_per_chunk."""
    pool, allocator = build(5, blocks_per_chunk)
    assert allocator.num_full_blocks == allocator.num_free_blocks == 5 * blocks_per_chunk
    allocator.grow(0, allocator.num_free_blocks)
    first, last = NUM_RESERVED_CHUNKS * blocks_per_chunk, pool.num_chunks * blocks_per_chunk
    assert sorted(allocator.block_table(0)) == list(range(first, last))
    assert allocator.num_free_blocks == pool.num_free_chunks == 0
    check(pool, allocator)


def test_growing_appends_and_leaves_the_blocks_before_in_place():
    """A block table is in token order: the KV already written keeps its place."""
    _, allocator = build(9, 3)
    allocator.grow(0, 2)
    before = list(allocator.block_table(0))
    allocator.grow(1, 2)
    allocator.grow(0, 3)
    assert allocator.block_table(0)[:2] == before
    assert allocator.num_owned_blocks(0) == 5
    assert set(allocator.block_table(0)).isdisjoint(allocator.block_table(1))


def test_releasing_reports_what_was_held():
    """A released request holds nothing; releasing it again, or one never seen, frees nothing."""
    pool, allocator = build(4, 3)
    allocator.grow(7, 5)
    assert allocator.release(7) == 5
    assert allocator.num_owned_blocks(7) == allocator.release(7) == allocator.release(8) == 0
    assert allocator.num_free_blocks == allocator.num_full_blocks
    check(pool, allocator)


def test_a_chunk_returns_only_when_all_its_blocks_are_free():
    """Law 6: two requests share a chunk, and it is theirs until both have left."""
    pool, allocator = build(2, 3)
    allocator.grow(0, 1)
    allocator.grow(1, 2)
    assert pool.num_free_chunks == 1
    assert {block // 3 for block in allocator.block_table(0) + allocator.block_table(1)} == {NUM_RESERVED_CHUNKS}
    allocator.release(0)
    assert pool.num_free_chunks == 1, "request 1 still owns two blocks of the chunk"
    assert allocator.num_free_blocks == 4
    check(pool, allocator)
    allocator.release(1)
    assert pool.num_free_chunks == 2
    check(pool, allocator)


def test_blocks_of_split_chunks_are_used_before_a_new_chunk():
    """Otherwise every request would break open a chunk of its own and none would ever return whole."""
    pool, allocator = build(4, 3)
    allocator.grow(0, 2)
    allocator.grow(1, 4)
    assert pool.num_free_chunks == 2
    allocator.release(0)
    allocator.grow(2, 2)
    assert pool.num_free_chunks == 2
    check(pool, allocator)


class Replay:
    """Random steps on an allocator beside a plain account of who owns what."""

    def __init__(self, blocks_per_chunk: int, seed: int):
        self.rng = random.Random(seed)
        self.pool, self.allocator = build(7, blocks_per_chunk)
        self.tables: dict[int, list[int]] = {}

    def step(self) -> None:
        request = self.rng.randrange(6)
        if self.rng.random() < 0.4:
            assert self.allocator.release(request) == len(self.tables.pop(request, []))
        else:
            number = self.rng.randint(0, min(5, self.allocator.num_free_blocks))
            self.allocator.grow(request, number)
            before, after = self.tables.get(request, []), list(self.allocator.block_table(request))
            assert after[: len(before)] == before
            assert len(after) == len(before) + number
            self.tables[request] = after

    def check(self) -> None:
        check(self.pool, self.allocator)
        for request, table in self.tables.items():
            assert self.allocator.block_table(request) == table, "another request's step changed this one"
        owned = sum(map(len, self.tables.values()))
        assert self.allocator.num_free_blocks == self.allocator.num_full_blocks - owned
        used_chunks = {b // (self.allocator.num_full_blocks // 7) for t in self.tables.values() for b in t}
        assert self.pool.num_free_chunks == 7 - len(used_chunks), "a chunk without an owned block is in the pool"


@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_random_steps_keep_the_laws_and_leak_nothing(blocks_per_chunk, seed):
    """After every grow or release each block has one owner and the counts add up; at the end all is free."""
    replay = Replay(blocks_per_chunk, seed)
    for _ in range(1000):
        replay.step()
        replay.check()
    for request in list(replay.tables):
        replay.allocator.release(request)
    check(replay.pool, replay.allocator)
    assert replay.pool.num_free_chunks == replay.pool.num_data_chunks
    assert replay.allocator.num_free_blocks == replay.allocator.num_full_blocks


@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda mine, other: mine.pop(), id="lost"),
        pytest.param(lambda mine, other: mine.append(other[0]), id="owned twice"),
        pytest.param(lambda mine, other: mine.append(mine[-1] + 2), id="owned and free"),
        pytest.param(lambda mine, other: mine.append(0), id="reserved"),
    ],
)
def test_integrity_check_finds_what_breaks_law_1(blocks_per_chunk, damage):
    """The laws are only as good as their assertions: a damaged block table is found."""
    pool, allocator = build(4, blocks_per_chunk)
    allocator.grow(0, 1)
    allocator.grow(1, 1)
    check(pool, allocator)
    damage(allocator.block_table(0), allocator.block_table(1))
    with pytest.raises(AssertionError):
        check(pool, allocator)
