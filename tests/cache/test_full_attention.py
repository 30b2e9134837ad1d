"""FullAttentionCacheAllocator: a block for every page of tokens; with sharing, one block may have several owners."""

import copy
import random

import pytest
from cache.cache_harness import group_of

from cbgen.cache.full_attention import FullAttentionCacheAllocator
from cbgen.cache.pool import NUM_RESERVED_CHUNKS, CachePool
from cbgen.config import FULL_ATTENTION


def build(num_data_chunks: int, allow_block_sharing: bool = True) -> tuple[CachePool, FullAttentionCacheAllocator]:
    """A model of full attention only, with two layers: a chunk is a block of two pages."""
    pool = CachePool(num_data_chunks + NUM_RESERVED_CHUNKS)
    return pool, FullAttentionCacheAllocator(pool, group_of(FULL_ATTENTION, 2, 2), allow_block_sharing)


def check(pool: CachePool, allocator: FullAttentionCacheAllocator) -> None:
    pool.check_integrity(allocator.check_integrity())


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
@pytest.mark.parametrize("allow_block_sharing", [True, False])
def test_a_started_page_is_a_whole_block(num_tokens, num_blocks, allow_block_sharing):
    """Tokens round up to blocks, and what a request owns already is not missing."""
    _, allocator = build(5, allow_block_sharing)
    assert allocator.num_missing_blocks(0, num_tokens) == num_blocks
    allocator.grow(0, 2)
    assert allocator.num_missing_blocks(0, num_tokens) == max(0, num_blocks - 2)
    assert allocator.num_missing_blocks(1, num_tokens) == num_blocks


def test_sharing_needs_a_chunk_for_each_block():
    """An initialized block is a chunk that the pool can have back; with two in a chunk that would not hold."""
    with pytest.raises(AssertionError):
        FullAttentionCacheAllocator(CachePool(5), group_of(FULL_ATTENTION, 2, 4), allow_block_sharing=True)


def test_an_adopted_block_stays_until_its_last_owner_leaves():
    """Reference counts, whoever leaves first."""
    for leavers in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        pool, allocator = build(4)
        blocks = allocator.grow(0, 2)
        allocator.adopt(1, blocks)
        allocator.adopt(2, blocks[:1])
        check(pool, allocator)
        for left, request_id in enumerate(leavers, start=1):
            allocator.release(request_id)
            check(pool, allocator)
            remaining = {block for other in leavers[left:] for block in allocator.block_table(other)}
            assert pool.num_free_chunks == 4 - len(remaining)


def test_who_adopted_grows_in_blocks_of_its_own():
    """A shared head and a private tail; the first owner's table does not move."""
    pool, allocator = build(6)
    head = allocator.grow(0, 2)
    allocator.adopt(1, head)
    tail = allocator.grow(1, 2)
    allocator.grow(0, 1)
    assert allocator.block_table(1) == head + tail
    assert set(allocator.block_table(0)) & set(allocator.block_table(1)) == set(head)
    assert pool.num_free_chunks == 1
    check(pool, allocator)


def test_a_shared_block_is_freed_only_by_all_its_owners_together():
    """Offloading counts on this: of three owners two leaving free nothing but what is theirs alone."""
    _, allocator = build(9)
    head = allocator.grow(0, 2)
    for request_id in (1, 2):
        allocator.adopt(request_id, head)
        allocator.grow(request_id, request_id)
    assert allocator.freed_by_release([1]) == (0, 1)
    assert allocator.freed_by_release([1, 2]) == (0, 3)
    assert allocator.freed_by_release([0]) == (0, 0)
    assert allocator.freed_by_release([0, 1, 2]) == (0, 5)
    assert allocator.freed_by_release([7]) == allocator.freed_by_release([]) == (0, 0)


@pytest.mark.parametrize("seed", range(3))
def test_what_a_release_frees_is_foretold_with_sharing(seed):
    """Random owners of random blocks: the forecast is what a copy of the allocator frees when they really leave."""
    rng = random.Random(seed)
    pool, allocator = build(14)
    shared_seen = 0
    for _ in range(600):
        request = rng.randrange(6)
        tables = {r: allocator.block_table(r) for r in allocator.request_ids}
        if request not in tables and tables:
            donor = rng.choice(sorted(tables))
            allocator.adopt(request, tables[donor][: rng.randint(0, len(tables[donor]))])
        elif rng.random() < 0.4:
            allocator.release(request)
        else:
            allocator.grow(request, rng.randint(0, min(3, pool.num_free_chunks)))
        check(pool, allocator)
        leaving = rng.sample(range(8), rng.randint(0, 8))
        foretold = allocator.freed_by_release(leaving)
        copied_pool, copied = copy.deepcopy((pool, allocator))
        for other in leaving:
            copied.release(other)
        assert foretold == (0, copied_pool.num_free_chunks - pool.num_free_chunks)
        tables = [allocator.block_table(r) for r in allocator.request_ids]
        shared_seen += sum(map(len, tables)) > len({block for table in tables for block in table})
    assert shared_seen > 100, "the run must have had shared blocks"


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda mine, other: mine.pop(), id="an owner less than counted"),
        pytest.param(lambda mine, other: mine.append(other[-1]), id="an owner more than counted"),
        pytest.param(lambda mine, other: mine.append(mine[0]), id="owned twice by one"),
        pytest.param(lambda mine, other: mine.append(0), id="reserved"),
    ],
)
def test_integrity_check_finds_what_breaks_the_reference_counts(damage):
    """Sharing makes two owners legal; what is counted must still be what the tables say."""
    pool, allocator = build(6)
    head = allocator.grow(0, 1)
    allocator.adopt(1, head)
    allocator.grow(1, 1)
    check(pool, allocator)
    damage(allocator.block_table(0), allocator.block_table(1))
    with pytest.raises(AssertionError):
        check(pool, allocator)
