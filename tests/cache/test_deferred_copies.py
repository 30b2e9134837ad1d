"""Copies that run later than they are asked for, as on a GPU: in order, so no byte is overwritten too soon."""

import random
from collections import deque
from collections.abc import Callable
from itertools import count

import pytest
import torch
from cache.cache_harness import CPU, layout_of

from cbgen.cache.storage import KVStorage
from cbgen.cache.swap_pool import SwapPool
from cbgen.kernels.sdpa import SdpaAttention

NUM_CHUNKS, NUM_SLOTS = 12, 18
FIRST_PAGE, NUM_PAGES = 4, 2 * NUM_CHUNKS  # two layers, two reserved chunks


class Lane:
    """Runs what it is handed in order, when it is told to."""

    def __init__(self) -> None:
        self.waiting: deque[Callable[[], None]] = deque()

    def submit(self, work: Callable[[], None]) -> None:
        self.waiting.append(work)

    def run(self, most: int) -> None:
        for _ in range(min(most, len(self.waiting))):
            self.waiting.popleft()()


class Rehearsal:
    """Storage and pool on a lane, and beside them what each page and slot would hold if all were done at once."""

    def __init__(self, seed: int):
        self.rng, self.lane, self.value = random.Random(seed), Lane(), count(1)
        backend = SdpaAttention(4, 1, 8, torch.float32)
        self.storage = KVStorage(NUM_CHUNKS, layout_of(2), backend, CPU, self.lane.submit)
        self.pool = SwapPool(NUM_SLOTS * backend.page_bytes, self.storage)
        self.pages = dict.fromkeys(range(FIRST_PAGE, NUM_PAGES), 0)
        self.swapped: dict[int, list[int]] = {}
        self.next_id = self.num_left_out = 0
        for page in self.pages:
            self._write(page)

    def _write(self, page: int) -> None:
        value = self.pages[page] = next(self.value)
        words = self.storage.pages.view(torch.int64)
        self.lane.submit(lambda: words[page].fill_(value))

    def _some_pages(self, number: int) -> list[int]:
        """In blocks for the most part, at times one by one."""
        blocks = self.rng.sample(range(FIRST_PAGE, NUM_PAGES, 2), -(-number // 2))
        pages = [page for block in blocks for page in (block, block + 1)]
        return (self.rng.sample(sorted(self.pages), number) if self.rng.random() < 0.2 else pages)[:number]

    def write(self) -> None:
        for page in self._some_pages(self.rng.randint(1, 6)):
            self._write(page)

    def copy(self) -> None:
        pages = self._some_pages(2 * self.rng.randint(1, 4))
        half = len(pages) // 2
        pairs = list(zip(pages[:half], pages[half:], strict=True))
        self.storage.copy_pages(pairs)
        self.pages.update({target: self.pages[source] for source, target in pairs})

    def store(self) -> None:
        leaving, free = {}, self.pool.num_free_slots
        for _ in range(self.rng.randint(1, 3)):
            leaving[self.next_id] = self._some_pages(self.rng.randint(1, 8))
            self.next_id += 1
        stored = self.pool.store(leaving)
        self.num_left_out += len(leaving) - len(stored)
        for request_id, pages in leaving.items():
            assert (request_id in stored) == (len(pages) <= free)
            if request_id in stored:
                free -= len(pages)
                self.swapped[request_id] = [self.pages[page] for page in pages]

    def restore(self) -> None:
        returning = self.rng.sample(sorted(self.swapped), min(len(self.swapped), self.rng.randint(1, 2)))
        kept = {owner: self.swapped.pop(owner) for owner in returning}
        for owner, values in kept.items():
            if self.rng.random() < 0.3:  # the first ones are at hand
                kept[owner] = values[self.rng.randint(0, len(values)) :]
        pages = self._some_pages(sum(map(len, kept.values())))
        back = {owner: [pages.pop() for _ in values][::-1] for owner, values in kept.items()}
        self.pool.restore(back)
        for owner, values in kept.items():
            self.pages.update(zip(back[owner], values, strict=True))

    def discard(self) -> None:
        if self.swapped:
            owner = self.rng.choice(sorted(self.swapped))
            del self.swapped[owner]
            self.pool.discard(owner)

    def check_books(self) -> None:
        self.pool.check_integrity(set(self.swapped))
        assert self.pool.num_free_slots == NUM_SLOTS - sum(
            len(pages) for owner in self.swapped for pages in self.pool._slots[owner]
        )

    def check_bytes(self) -> None:
        """All that was handed over must have run."""
        words = self.storage.pages.view(torch.int64)
        expected = torch.tensor([self.pages[page] for page in sorted(self.pages)])
        assert torch.equal(words[FIRST_PAGE:], expected[:, None].expand(-1, words.shape[1]))
        assert not words[:2].any(), "the read reserve is cleared, and stays so"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("at_a_time", "least_waiting"),
    [
        pytest.param((1000, 1000), 1, id="at once"),
        pytest.param((0, 3), 20, id="some after each operation"),
        pytest.param((0, 0), 500, id="all at the end"),
    ],
)
def test_what_is_run_later_in_order_gives_the_same_bytes(seed, at_a_time, least_waiting):
    """However far the bytes are behind the books, pages hold in the end what the plain model says."""
    rehearsal = Rehearsal(seed)
    longest, actions = 0, [rehearsal.write, rehearsal.copy, rehearsal.store, rehearsal.restore, rehearsal.discard]
    for _ in range(600):
        rehearsal.rng.choices(actions, weights=[3, 2, 4, 3, 1])[0]()
        rehearsal.check_books()
        longest = max(longest, len(rehearsal.lane.waiting))
        rehearsal.lane.run(rehearsal.rng.randint(*at_a_time))
        if not rehearsal.lane.waiting:
            rehearsal.check_bytes()
    assert longest >= least_waiting
    assert rehearsal.num_left_out > 20, "the run must have filled the pool"
    rehearsal.lane.run(len(rehearsal.lane.waiting))
    rehearsal.check_bytes()


def test_nothing_moves_before_it_is_run():
    """The books are settled at the call; the bytes are as they were until the lane gets there."""
    lane = Lane()
    backend = SdpaAttention(4, 1, 8, torch.float32)
    storage = KVStorage(NUM_CHUNKS, layout_of(2), backend, CPU, lane.submit)
    pool = SwapPool(4 * backend.page_bytes, storage)
    lane.run(1)
    storage.pages[FIRST_PAGE:] = 1
    storage.pages[4:6] = 7
    before = storage.pages.clone()
    storage.copy_pages([(4, 8), (5, 9)])
    assert pool.store({0: [8, 9]}) == {0}
    assert pool.num_free_slots == 2
    pool.restore({0: [10, 11]})
    assert pool.num_free_slots == 4
    pool.check_integrity(set())
    assert torch.equal(storage.pages, before)
    lane.run(2)
    assert torch.equal(storage.pages[10:12], before[10:12])
    lane.run(1)
    assert torch.equal(storage.pages[10:12], before[4:6])
    assert not lane.waiting


def test_what_moves_nothing_is_not_handed_over():
    """A step without forks, or a restore of pages that are all at hand, costs nothing."""
    lane = Lane()
    backend = SdpaAttention(4, 1, 8, torch.float32)
    storage = KVStorage(NUM_CHUNKS, layout_of(2), backend, CPU, lane.submit)
    pool = SwapPool(4 * backend.page_bytes, storage)
    assert pool.store({0: [4, 5]}) == {0}
    lane.run(2)
    storage.copy_pages([])
    assert pool.store({1: [4, 5, 6]}) == set()
    pool.restore({0: []})
    pool.restore({})
    assert not lane.waiting
