"""CachePool: chunks by number, two of them reserved, each handed out once."""

import random

import pytest

from cbgen.cache.pool import NUM_RESERVED_CHUNKS, READ_RESERVE_CHUNK, WRITE_RESERVE_CHUNK, CachePool
from cbgen.errors import MemoryPlanError


@pytest.mark.parametrize("num_chunks", range(NUM_RESERVED_CHUNKS + 1))
def test_a_pool_without_data_chunks_is_refused(num_chunks):
    """Reserved chunks are not data: a pool that has nothing else is a plan that does not fit."""
    with pytest.raises(MemoryPlanError, match=f"{num_chunks} chunks"):
        CachePool(num_chunks)


@pytest.mark.parametrize("num_chunks", [3, 4, 17])
def test_every_data_chunk_is_handed_out_once(num_chunks):
    """All chunks but the two reserved ones come out, none twice, and the counts say so on the way."""
    pool = CachePool(num_chunks)
    assert pool.num_data_chunks == pool.num_free_chunks == num_chunks - NUM_RESERVED_CHUNKS
    taken = []
    while pool.num_free_chunks:
        taken.append(pool.take())
        assert pool.num_free_chunks == pool.num_data_chunks - len(taken)
        pool.check_integrity(taken)
    assert sorted(taken) == list(range(NUM_RESERVED_CHUNKS, num_chunks))
    assert {READ_RESERVE_CHUNK, WRITE_RESERVE_CHUNK}.isdisjoint(taken)


def test_the_chunk_that_came_back_last_is_taken_first():
    """Memory never used stays untouched while there is warm memory."""
    pool = CachePool(10)
    first, second = pool.take(), pool.take()
    pool.give_back(first)
    pool.give_back(second)
    assert [pool.take(), pool.take()] == [second, first]


def test_random_taking_and_giving_back_loses_nothing():
    """Law 1 for chunks holds after every step, and at the end all are free again."""
    rng, pool, taken = random.Random(0), CachePool(23), []
    for _ in range(2000):
        if taken and (not pool.num_free_chunks or rng.random() < 0.5):
            pool.give_back(taken.pop(rng.randrange(len(taken))))
        else:
            taken.append(pool.take())
        pool.check_integrity(taken)
    for chunk in taken:
        pool.give_back(chunk)
    pool.check_integrity([])
    assert pool.num_free_chunks == pool.num_data_chunks


@pytest.mark.parametrize(
    "claim",
    [
        pytest.param(lambda chunk: [], id="lost"),
        pytest.param(lambda chunk: [chunk, chunk], id="taken twice"),
        pytest.param(lambda chunk: [chunk, chunk + 1], id="taken and free"),
        pytest.param(lambda chunk: [chunk, READ_RESERVE_CHUNK], id="reserved"),
    ],
)
def test_integrity_check_finds_what_breaks_law_1(claim):
    """A check that cannot fail would prove nothing: each way to break the law is found."""
    pool = CachePool(6)
    chunk = pool.take()
    pool.check_integrity([chunk])
    with pytest.raises(AssertionError, match="lost or doubled"):
        pool.check_integrity(claim(chunk))


def test_integrity_check_finds_a_chunk_given_back_twice():
    """The same chunk twice in the free list would be handed to two owners."""
    pool = CachePool(6)
    chunk = pool.take()
    pool.give_back(chunk)
    pool.give_back(chunk)
    with pytest.raises(AssertionError, match="lost or doubled"):
        pool.check_integrity([])
