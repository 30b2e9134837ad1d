"""SwapPool: whole requests out to CPU memory and back into other pages, byte for byte."""

import random

import pytest
import torch
from cache.cache_harness import CPU, CopyCounter, layout_of

from cbgen.cache.storage import KVStorage
from cbgen.cache.swap_pool import SwapPool
from cbgen.kernels.sdpa import SdpaAttention


def storage_of(num_chunks: int = 20) -> KVStorage:
    """Pages that all differ from each other."""
    storage = KVStorage(num_chunks, layout_of(2), SdpaAttention(4, 1, 8, torch.float32), CPU)
    generator = torch.Generator().manual_seed(0)
    storage.pages.copy_(torch.randint(0, 256, storage.pages.shape, dtype=torch.uint8, generator=generator))
    return storage


def pool_of(storage: KVStorage, num_slots: int) -> SwapPool:
    return SwapPool(num_slots * storage.pages.shape[1], storage)


@pytest.mark.parametrize(("extra_bytes", "num_slots"), [(-1, 4), (0, 5), (1, 5)])
def test_a_pool_has_as_many_slots_as_whole_pages_fit(extra_bytes, num_slots):
    """The user gives bytes; what does not hold a page is left over."""
    storage = storage_of()
    pool = SwapPool(5 * storage.pages.shape[1] + extra_bytes, storage)
    assert pool.num_slots == pool.num_free_slots == num_slots
    pool.check_integrity(set())


def test_requests_come_back_into_other_pages_byte_for_byte():
    """Several out in one call, overwritten meanwhile, and back in another order."""
    storage = storage_of()
    pool, before = pool_of(storage, 10), storage.pages.clone()
    out = {7: [4, 5, 8, 9], 3: [12, 13], 5: [30, 6]}
    assert pool.store(out) == {3, 5, 7}
    assert pool.num_free_slots == 2
    pool.check_integrity({3, 5, 7})
    storage.pages.zero_()
    back = {3: [9, 4], 7: [20, 21, 5, 18]}
    pool.restore(back)
    pool.check_integrity({5})
    for request_id, pages in back.items():
        assert torch.equal(storage.pages[pages], before[out[request_id]])
    others = [page for page in range(len(before)) if page not in {9, 4, 20, 21, 5, 18}]
    assert not storage.pages[others].any(), "no other page is written"
    pool.restore({5: [6, 30]})
    assert torch.equal(storage.pages[[6, 30]], before[[30, 6]])
    assert pool.num_free_slots == 10
    pool.check_integrity(set())


def test_requests_are_taken_in_whole_and_in_order():
    """Who does not fit is left out altogether; a smaller one behind may still fit."""
    storage = storage_of()
    pool = pool_of(storage, 6)
    assert pool.store({4: [4, 5, 6], 2: [7, 8, 9, 10], 9: [11, 12], 1: [13, 14]}) == {4, 9}
    assert pool.num_free_slots == 1
    pool.check_integrity({4, 9})
    assert pool.store({2: [7, 8]}) == set()
    assert pool.store({1: [7]}) == {1}
    pool.check_integrity({1, 4, 9})


def test_a_request_may_need_only_its_last_pages_back():
    """Its first blocks were matched: shared with others, they are in the cache already."""
    storage = storage_of()
    pool, before = pool_of(storage, 8), storage.pages.clone()
    assert pool.store({0: [4, 5, 6, 7], 1: [8, 9]}) == {0, 1}
    storage.pages.zero_()
    pool.restore({0: [20, 21], 1: []})
    assert torch.equal(storage.pages[[20, 21]], before[[6, 7]])
    assert not storage.pages[:20].any()
    assert not storage.pages[22:].any()
    assert pool.num_free_slots == 8
    pool.check_integrity(set())


def test_a_block_is_one_copy_each_way():
    """Blocks of two pages each, anywhere: one copy for each, and one for those that happen to be neighbours."""
    storage = storage_of()
    pool = pool_of(storage, 16)
    with CopyCounter() as counter:
        assert pool.store({0: [4, 5, 10, 11], 1: [12, 13, 30, 31]}) == {0, 1}
    assert counter.copies == 3
    with CopyCounter() as counter:
        pool.restore({1: [8, 9, 20, 21], 0: [4, 5, 6, 7]})
    assert counter.copies == 3


def test_blocks_stay_whole_however_slots_come_free():
    """Slots are given back in any order; a hole is of whole blocks, so no later block is torn into two copies."""
    rng, storage = random.Random(0), storage_of()
    pool, here = pool_of(storage, 40), []
    with CopyCounter() as counter:
        for request_id in range(300):
            firsts = rng.sample(range(4, 40, 2), rng.randint(1, 5))
            before = counter.copies
            if pool.store({request_id: [page for first in firsts for page in (first, first + 1)]}):
                here.append(request_id)
                assert counter.copies - before <= len(firsts)
            while here and (pool.num_free_slots < 10 or rng.random() < 0.4):
                pool.discard(here.pop(rng.randrange(len(here))))
    for request_id in here:
        pool.discard(request_id)
    assert pool._free == [range(40)], "the books stay as short as what they say"
    pages = list(range(4, 40))
    with CopyCounter() as counter:
        assert pool.store({300: pages}) == {300}
    assert counter.copies == 1, "what is free side by side is given out side by side"


def test_a_discarded_request_leaves_its_slots():
    """Cancelled while it waits; one that is not here is fine."""
    pool = pool_of(storage_of(), 4)
    assert pool.store({0: [4, 5, 6]}) == {0}
    for request_id in (0, 0, 8):
        pool.discard(request_id)
        assert pool.num_free_slots == 4
        pool.check_integrity(set())


def test_a_pool_without_slots_takes_nobody_in():
    """Less than a page of memory: every request is reset instead, and nothing breaks."""
    storage = storage_of()
    pool = SwapPool(storage.pages.shape[1] - 1, storage)
    assert pool.store({0: [4], 1: [5, 6]}) == set()
    pool.restore({})
    pool.check_integrity(set())


@pytest.mark.parametrize("seed", range(3))
def test_random_swaps_lose_no_byte_and_no_slot(seed):
    """Out, back and discarded at random; the pages that come back are those that left."""
    rng, storage = random.Random(seed), storage_of()
    pool, kept, left_out = pool_of(storage, 16), {}, 0
    for request_id in range(0, 900, 3):
        leaving = {request_id + n: rng.sample(range(4, 40), rng.randint(1, 6)) for n in range(rng.randint(1, 3))}
        content = {owner: storage.pages[pages].clone() for owner, pages in leaving.items()}
        stored = pool.store(leaving)
        left_out += len(leaving) - len(stored)
        kept.update({owner: content[owner] for owner in stored})
        pool.check_integrity(set(kept))
        storage.pages[rng.randrange(40)] = rng.randrange(256)
        returning = rng.sample(sorted(kept), rng.randint(0, min(2, len(kept))))
        pages = iter(rng.sample(range(4, 40), 12))
        back = {owner: [next(pages) for _ in kept[owner]] for owner in returning}
        pool.restore(back)
        for owner in returning:
            assert torch.equal(storage.pages[back[owner]], kept.pop(owner))
        if kept and rng.random() < 0.2:
            owner = rng.choice(sorted(kept))
            pool.discard(owner)
            del kept[owner]
        pool.check_integrity(set(kept))
    assert left_out > 20, "the run must have filled the pool"


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda pool: pool._slots[0].pop(), id="lost"),
        pytest.param(lambda pool: pool._free.append(pool._slots[0][0]), id="owned and free"),
        pytest.param(lambda pool: pool._slots.update({1: [pool._free.pop()]}), id="of a request not expected"),
        pytest.param(lambda pool: pool.discard(0), id="an expected request is missing"),
    ],
)
def test_integrity_check_finds_damage(damage):
    """Slots add up, and who is here is who should be."""
    pool = pool_of(storage_of(), 4)
    assert pool.store({0: [4, 5]}) == {0}
    pool.check_integrity({0})
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check_integrity({0})
