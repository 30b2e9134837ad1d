"""The scheduler on integers: budgets, order, margin, all-or-nothing admission. No model is needed."""

import copy
import random
from typing import Any

import pytest
from engine.integer_world import PAGE, World, layout_of

from cbgen.cache.layout import CacheLayout
from cbgen.cache.paged_cache import PagedCache
from cbgen.config import ContinuousBatchingConfig
from cbgen.engine.requests import RequestStatus

LAYOUTS = {"full": layout_of(2), "sliding": layout_of(0, 2), "hybrid": layout_of(1, 2), "coarse": layout_of(2, 5, 12)}
STATUS_ORDER = {
    "fifo": [RequestStatus.DECODING, RequestStatus.PREFILLING, RequestStatus.PENDING],
    "prefill_first": [RequestStatus.PREFILLING, RequestStatus.DECODING, RequestStatus.PENDING],
}


def test_token_budget_splits_a_long_prompt() -> None:
    """A prompt beyond max_batch_tokens is computed in pieces, and others fill what the last piece leaves."""
    world = World(100)
    world.add(40, 10)
    assert world.step() == [(0, 16)]
    assert world.step() == [(0, 16)]
    assert world.step() == [(0, 8), (1, 8)]
    assert world.step() == [(0, 1), (1, 2)]


def test_request_limit() -> None:
    """No batch holds more than max_requests_per_batch requests, and a freed place is taken in the next one."""
    world = World(100, max_requests_per_batch=2)
    requests = world.add(1, 1, 1)
    assert world.step() == [(0, 1), (1, 1)]
    world.manager.cancel(requests[0])
    assert world.step() == [(1, 1), (2, 1)]


@pytest.mark.parametrize(("allow_block_sharing", "expected"), [(True, [(0, 12), (1, 4)]), (False, [(0, 12)])])
def test_cache_budget_counts_distinct_pages(allow_block_sharing: bool, expected: list[tuple[int, int]]) -> None:
    """Two requests of three pages that share two of them cost four, and six if they do not share."""
    world = World(100, cache_budget_pages=5, allow_block_sharing=allow_block_sharing, max_batch_tokens=64)
    world.add(12, 12, prefix=8)
    assert world.step() == expected
    assert len(world.passes[-1].pages) == (4 if allow_block_sharing else 3)
    assert world.step() == [(0, 1)], "each needs one page more: the first has four now, the second would add two"


def test_cache_budget_skips_to_who_fits() -> None:
    """A request whose pages exceed what is left of the budget waits, and a smaller one goes in."""
    world = World(100, layout_of(3), cache_budget_pages=9)
    world.add(8, 8, 4)
    assert world.step() == [(0, 8), (2, 4)]


def test_fifo_serves_decodes_first() -> None:
    """Decodes, then prompts begun, then waiting requests, each by arrival."""
    world = World(100)
    world.add(3, 30, 5)
    assert world.step() == [(0, 3), (1, 13)]
    assert world.step() == [(0, 1), (1, 15)]
    assert world.step() == [(0, 1), (1, 2), (2, 5)]


def test_prefill_first_finishes_prompts_that_were_begun() -> None:
    """Prompts begun, then decodes with what is left, then waiting requests."""
    world = World(100, scheduler_type="prefill_first")
    world.add(3, 30, 5)
    assert world.step() == [(0, 3), (1, 13)]
    assert world.step() == [(1, 16)]
    assert world.step() == [(1, 1), (0, 1), (2, 5)]
    assert world.step() == [(0, 1), (1, 1), (2, 1)]


@pytest.mark.parametrize(
    ("scheduler_type", "safety_margin", "admits"),
    [("fifo", None, False), ("fifo", 0.0, True), ("prefill_first", None, True), ("prefill_first", 0.15, False)],
)
def test_default_margins(scheduler_type: str, safety_margin: float | None, admits: bool) -> None:
    """FIFO keeps 15 % of the cache for decodes, prefill_first nothing; 0 disables it."""
    default = ContinuousBatchingConfig(scheduler_type=scheduler_type).resolve("cpu").safety_margin
    assert default == {"fifo": 0.15, "prefill_first": 0.0}[scheduler_type]
    world = World(100, scheduler_type=scheduler_type, safety_margin=safety_margin, max_batch_tokens=400)
    world.add(85 * PAGE, 2)
    assert world.step() == [(0, 85 * PAGE), (1, 2)], "free are exactly 15 %: that is not below"
    assert world.cache.free_share == 0.14
    world.add(2)
    assert world.step() == [(0, 1), (1, 1), *([(2, 2)] if admits else [])]


def test_margin_holds_back_prompts_but_not_decodes() -> None:
    """Below the margin only decodes go on; above it prompts begun and admission resume."""
    world = World(10, safety_margin=0.5)
    world.add(14)
    (second,) = world.add(9, max_tokens=2)
    assert world.step() == [(0, 14), (1, 2)]
    assert world.cache.free_share == 0.5, "not below the margin yet"
    assert world.step() == [(0, 1), (1, 7)]
    (third,) = world.add(20)
    assert world.step() == [(0, 1), (1, 1)]
    assert second.is_finished
    assert world.step() == [(0, 1), (2, 15)]
    assert world.cache.free_share < 0.5
    assert world.step() == [(0, 1)], "the prompt that was begun waits too"
    assert third.status is RequestStatus.PREFILLING


def test_margin_spares_the_first_candidate_when_nothing_decodes() -> None:
    """A long prompt may use the margin, whether it waits or was begun, and nobody beside it may."""
    world = World(12, safety_margin=0.9)
    world.add(40, 2, max_tokens=1)
    assert world.step() == [(0, 16)]
    assert world.step() == [(0, 16)]
    assert world.step() == [(0, 8)], "there is room in the batch, but the second candidate is not exempt"
    assert world.step() == [(1, 2)]


@pytest.mark.parametrize("scheduler_type", ["fifo", "prefill_first"])
def test_margin_spares_nobody_while_something_decodes(scheduler_type: str) -> None:
    """A prompt waits for the decodes to end, however long it has waited."""
    world = World(12, safety_margin=0.9, scheduler_type=scheduler_type)
    world.add(6, max_tokens=5)
    assert world.step() == [(0, 6)]
    world.add(2)
    assert [world.step() for _ in range(4)] == [[(0, 1)]] * 4
    assert world.step() == [(1, 2)]


def state_of(cache: PagedCache) -> list[Any]:
    """All that allocators and pool know of who owns what."""
    parts = [(a._tables, a._uninitialized, a.num_uninitialized) for a in cache.allocators]
    return copy.deepcopy([cache._pool._free, *parts])


@pytest.mark.parametrize(
    ("layout", "num_chunks", "first_length", "second_length", "alone"),
    [
        pytest.param(layout_of(1, 2, window=2 * PAGE), 4, 9, PAGE, [True, False], id="no sliding"),
        pytest.param(layout_of(2, 1, window=PAGE), 7, 22, 2 * PAGE, [False, True], id="no full"),
    ],
)
def test_admission_is_all_or_nothing_on_a_hybrid_layout(
    layout: CacheLayout, num_chunks: int, first_length: int, second_length: int, alone: list[bool]
) -> None:
    """One type of attention has room for the request and the other has not: nothing changes, it stays where it is."""
    world = World(num_chunks, layout, max_batch_tokens=64)
    world.add(first_length, max_tokens=2)
    world.step()
    before = state_of(world.cache)
    (second,) = world.add(second_length, max_tokens=2)
    missing = world.cache.missing_blocks(second.request_id, second_length)
    demands = [(*missing[:1], 0), (0, *missing[1:])]
    assert [world.cache.covers(demand) for demand in demands] == alone
    world.scheduler.schedule()
    assert world.passes[-1].plan == [(0, 1)]
    assert state_of(world.cache) == before
    assert world.scheduler.waiting == [second]


def test_stalled_requests_are_reported_with_their_demand() -> None:
    """An active request without room is stalled, and while somebody is stalled nobody new is admitted."""
    world = World(5)
    world.add(8, 6, 1, max_tokens=8)
    world.step()
    assert world.cache.free_share == 0.0
    (fourth,) = world.add(1, max_tokens=1)
    batch = world.scheduler.schedule()
    assert [(request.request_id, demand) for request, demand in batch.stalled] == [(0, (1,))]
    assert world.passes[-1].plan == [(1, 1), (2, 1)]
    assert fourth.status is RequestStatus.PENDING


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_pass_exceeds_a_budget_or_leaves_the_order(name: str, seed: int) -> None:
    """Random requests in a cache too small for them, to completion: tokens, requests and pages are within bounds."""
    rng = random.Random(seed)
    scheduler_type = rng.choice(list(STATUS_ORDER))
    budget = LAYOUTS[name].groups[0].pages_per_chunk * rng.choice([8, 11, 30])
    world = World(
        rng.choice([8, 12, 30]),
        LAYOUTS[name],
        cache_budget_pages=budget,
        scheduler_type=scheduler_type,
        max_batch_tokens=rng.choice([4, 16, 64]),
        max_requests_per_batch=rng.choice([1, 3, 8]),
        safety_margin=rng.choice([0.0, 0.15]),
    )
    for _ in range(12):
        world.add(rng.randint(1, 14), max_tokens=rng.randint(1, 14), prefix=rng.choice([0, 0, 9]))
    assert len(world.run()) == 12
    for planned in world.passes:
        assert sum(query_length for _, query_length in planned.plan) <= world.config.max_batch_tokens
        assert len(planned.plan) <= world.config.max_requests_per_batch
        assert len(planned.pages) <= budget
        ranks = [STATUS_ORDER[scheduler_type].index(status) for status in planned.statuses]
        assert ranks == sorted(ranks)
        active = [pair for pair in zip(ranks, planned.plan, strict=True) if pair[0] < 2]
        assert active == sorted(active, key=lambda pair: (pair[0], pair[1][0])), "active requests go by arrival"
