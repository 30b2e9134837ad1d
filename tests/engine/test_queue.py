"""Who leaves the queue when, on integers: overtaking, what a step looks at, and the return of offloaded requests."""

import gc
import time
from collections.abc import Callable

import pytest
from engine.integer_world import PAGE, World, layout_of

from cbgen.cache.paged_cache import Demand, PagedCache
from cbgen.cache.prefix_cache import PrefixMatch
from cbgen.engine.requests import RequestState, RequestStatus
from cbgen.engine.sampling_params import SamplingParams
from cbgen.engine.scheduler import MAX_OVERTAKEN, MAX_SKIPPED_PER_STEP


def test_requests_are_admitted_by_arrival() -> None:
    """As long as everybody fits, nobody is passed."""
    world = World(100, max_requests_per_batch=3)
    world.add(*[3] * 12, max_tokens=2)
    assert world.run() == list(range(12))


def test_a_small_request_passes_one_that_does_not_fit() -> None:
    """The batch is filled with whoever fits, and the one passed keeps its place."""
    world = World(8)
    world.add(16, max_tokens=4)
    world.step()
    large, small, larger, smaller = world.add(13, 2, 14, 1, max_tokens=2)
    world.step()
    assert [r.status for r in (large, small, larger, smaller)] == [RequestStatus.PENDING, RequestStatus.DECODING] * 2
    assert world.scheduler.waiting == [large, larger]


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_overtaking_is_bounded(max_tokens: int) -> None:
    """Smaller requests pass one that does not fit, but only so often: then the queue waits for it, and it runs."""
    world = World(40, max_batch_tokens=256, max_requests_per_batch=4)
    world.add(64, max_tokens=90)
    world.step()
    (large,) = world.add(120, max_tokens=1)
    small = world.add(*[4] * 300, max_tokens=max_tokens)
    while not large.is_finished:
        world.step()
    moments = [request.timing.first_scheduled_s for request in small]
    passed = sum(moment is not None and moment < large.timing.first_scheduled_s for moment in moments)
    assert MAX_OVERTAKEN <= passed < MAX_OVERTAKEN + world.config.max_requests_per_batch


@pytest.mark.parametrize("scheduler_type", ["fifo", "prefill_first"])
@pytest.mark.parametrize(("max_batch_tokens", "allow_block_sharing"), [(16, True), (256, False)])
def test_a_request_as_large_as_the_cache_finishes_in_a_long_queue(
    max_batch_tokens: int, allow_block_sharing: bool, scheduler_type: str
) -> None:
    """Hundreds of small requests come before and after it, and it is not left for the end."""
    world = World(
        20,
        max_batch_tokens=max_batch_tokens,
        allow_block_sharing=allow_block_sharing,
        scheduler_type=scheduler_type,
        safety_margin=None,
        max_requests_per_batch=16,
    )
    world.add(*[2 + n % 7 for n in range(20)], max_tokens=6)
    (large,) = world.add(60, max_tokens=20 * PAGE + 1 - 60)
    world.add(*[2 + n % 7 for n in range(250)], max_tokens=6)
    order = world.run(most_steps=1500)
    assert sorted(order) == list(range(271))
    assert large.num_generated_tokens == large.params.max_tokens
    assert order.index(large.request_id) < 20 + 2 * MAX_OVERTAKEN


class CountingCache(PagedCache):
    """Counts the requests that the scheduler asks about."""

    num_matches = 0
    num_demands = 0

    def match(self, request_id: int, token_ids: list[int]) -> PrefixMatch:
        self.num_matches += 1
        return super().match(request_id, token_ids)

    def missing_blocks(self, request_id: int, num_tokens: int) -> Demand:
        self.num_demands += 1
        return super().missing_blocks(request_id, num_tokens)


def test_planning_looks_at_a_bounded_part_of_the_queue(show: Callable[[str], None]) -> None:
    """A step asks about as many requests with 100,000 waiting as with 100, and only about some of those."""
    looked_at, lines = [], []
    for num_waiting in (100, 100_000):
        world = World(3, cache_type=CountingCache)
        world.add(7, max_tokens=3)
        world.step()
        prompts = [list(range(8))] * num_waiting
        prompts[MAX_SKIPPED_PER_STEP - 1] = [5]
        for number, prompt in enumerate(prompts, start=1):
            world.scheduler.add(RequestState(number, prompt, SamplingParams(2)))
        world.cache.num_matches = world.cache.num_demands = 0
        gc.collect()
        start_s = time.perf_counter()
        world.scheduler.schedule()
        lines.append(f"{num_waiting:,} waiting: planned in {(time.perf_counter() - start_s) * 1e6:.0f} us")
        assert world.passes[-1].plan == [(0, 1), (MAX_SKIPPED_PER_STEP, 1)]
        looked_at.append((world.cache.num_matches, world.cache.num_demands))
    show("; ".join(lines))
    assert looked_at[0] == looked_at[1]
    assert looked_at[0][0] == MAX_SKIPPED_PER_STEP + 1


def test_a_promised_prefix_is_waited_for() -> None:
    """A prompt begun finds no room in the cache budget: who shares what is left of it waits, and others go in."""
    world = World(100, cache_budget_pages=12, cache_type=CountingCache, max_requests_per_batch=6)
    world.add(4 * PAGE)
    world.step()
    world.add(10 * PAGE, prefix=5 * PAGE)
    assert world.step() == [(0, 1), (1, 15)]
    sharing = world.add(*[5 * PAGE + 1] * 1000, prefix=5 * PAGE)
    world.cache.num_matches = 0
    assert world.step() == [(0, 1)], "five pages for the first, and eight for the next piece of the second"
    assert world.cache.num_matches == 6 + MAX_SKIPPED_PER_STEP, "of a thousand that wait for the fourth page on"
    assert not any(world.cache.num_owned_blocks(request.request_id) for request in sharing)
    world.manager.cancel(world.requests[1])
    assert world.step() == [(0, 1), (2, 9), (3, 1)], "the first of them computes the rest, the next takes it over"


def hold_back(world: World, requests: list[RequestState]) -> None:
    """What the manager does when these must leave."""
    world.manager._offload(requests)


def test_offloaded_requests_return_oldest_first_and_before_new_ones() -> None:
    """They wait at the head of the queue until something finishes; nobody is let in before them."""
    world = World(12, max_batch_tokens=64)
    requests = world.add(8, 8, 8)
    world.step()
    world.add(1)
    hold_back(world, [requests[2], requests[1]])
    assert world.step() == [(0, 1)], "nothing has finished yet, though there is room for all"
    assert world.step() == [(0, 1)]
    world.manager.cancel(requests[0])
    assert [request_id for request_id, _ in world.step()] == [1, 2, 3]


def test_an_offloaded_request_returns_when_all_of_it_finds_room() -> None:
    """Its next piece would fit, and it would soon have to leave again: it waits, unless nothing else is active."""
    world = World(11, allow_block_sharing=False)
    first, second, third = world.add(20, 1, 24, max_tokens=9)
    world.step()
    assert world.step() == [(0, 4), (1, 1), (2, 11)]
    world.add(1)
    hold_back(world, [third])
    assert world.step() == [(0, 1), (1, 1)]
    world.manager.cancel(second)
    assert world.step() == [(0, 1)], "five blocks are free: enough for the next piece, not for all six"
    world.manager.cancel(first)
    assert world.step() == [(2, 16)]


def test_an_offloaded_request_that_shares_its_pages_needs_room_for_its_own_alone() -> None:
    """Five of its six pages are those of an active request, and three blocks are free."""
    world = World(9, max_batch_tokens=64)
    _, second, third = world.add(21, 1, 21, prefix=20, max_tokens=8)
    world.step()
    hold_back(world, [third])
    world.manager.cancel(second)
    assert world.step() == [(0, 1), (2, 2)]


def test_nobody_new_passes_an_offloaded_request() -> None:
    """Once something has finished, a small new request still waits behind an offloaded one that does not fit."""
    world = World(9, max_batch_tokens=64, allow_block_sharing=False)
    first, second, third = world.add(20, 12, 3, max_tokens=9)
    world.step()
    world.add(1, max_tokens=1)
    hold_back(world, [second])
    assert world.step() == [(0, 1), (2, 1)]
    world.manager.cancel(third)
    assert world.step() == [(0, 1)], "three blocks are free, and the second needs four"
    world.manager.cancel(first)
    assert world.step() == [(1, 13), (3, 1)]


def test_new_requests_come_in_when_no_offloaded_one_waits_any_more() -> None:
    """Admission is held for those who had to leave: once they are cancelled it is open again."""
    world = World(12, max_batch_tokens=64)
    _, second = world.add(8, 8)
    world.step()
    world.add(1)
    hold_back(world, [second])
    assert world.step() == [(0, 1)]
    world.manager.cancel(second)
    assert world.step() == [(0, 1), (2, 1)]


def test_no_other_cancel_of_a_waiting_request_opens_admission() -> None:
    """One of two offloaded requests, or a new one, held nothing: those let in for it would be too many still."""
    world = World(12, max_batch_tokens=64)
    first, second, third = world.add(8, 8, 8)
    world.step()
    news = world.add(1, 1, 1)
    hold_back(world, [third, second])
    world.manager.cancel(third)
    world.manager.cancel(news[0])
    assert world.step() == [(0, 1)]
    world.manager.cancel(first)
    assert [request_id for request_id, _ in world.step()] == [1, 4, 5]


def test_who_came_back_alone_stays_alone_when_a_new_request_is_cancelled() -> None:
    """Nobody offloaded waits any more, and the hold is for the one that runs."""
    world = World(12, max_batch_tokens=64)
    (first,) = world.add(8)
    world.step()
    news = world.add(1, 1)
    hold_back(world, [first])
    assert [request_id for request_id, _ in world.step()] == [0]
    world.manager.cancel(news[0])
    assert world.step() == [(0, 1)]
    world.manager.cancel(first)
    assert world.step() == [(2, 1)]


def test_whoever_was_offloaded_earlier_does_not_return_after_a_newer_one() -> None:
    """Offloaded at two occasions, the newer one last: the oldest still comes back first."""
    world = World(5)
    world.add(8, 6, 4, max_tokens=8)
    while sum(request.was_offloaded for request in world.scheduler.waiting) < 2:
        world.step()
    waiting = [request.request_id for request in world.scheduler.waiting]
    assert waiting == sorted(waiting)


def test_alone_until_it_finishes_when_the_last_one_had_to_leave() -> None:
    """With nothing active, one offloaded request is let in, and no other beside it although there is room."""
    world = World(30, layout_of(2, 5, window=3 * PAGE), max_batch_tokens=64)
    first, second = world.add(5, 5, max_tokens=6)
    world.step()
    world.add(1)
    hold_back(world, [second, first])
    while not first.is_finished:
        assert [request_id for request_id, _ in world.step()] == [first.request_id]
    assert [request_id for request_id, _ in world.step()] == [1, 2]
