"""The scheduler on integers alone: budgets, order, margin, admission, overtaking. No model is needed."""

import pytest

from cbgen.cache.paged_cache import PagedCache
from cbgen.cache.pool import NUM_RESERVED_CHUNKS
from cbgen.config import ContinuousBatchingConfig
from cbgen.engine.offloading import choose_victims
from cbgen.engine.requests import RequestState, RequestStatus, SamplingParams
from cbgen.engine.scheduler import MAX_OVERTAKEN, FIFOScheduler, ScheduledBatch

PAGE = 4


class World:
    """A scheduler, its cache, and a stand-in for the forward pass that appends a token to who reaches the end."""

    def __init__(self, num_blocks: int, cache_budget_blocks: int | None = None, **options: object):
        values = {"max_batch_tokens": 16, "max_requests_per_batch": 8, "safety_margin": 0.0, **options}
        config = ContinuousBatchingConfig(page_size=PAGE, num_blocks=num_blocks, **values).resolve("cpu")
        self.cache = PagedCache(num_blocks + NUM_RESERVED_CHUNKS, PAGE)
        self.scheduler = FIFOScheduler(self.cache, config, cache_budget_blocks)
        self.requests: list[RequestState] = []

    def add(self, *prompt_lengths: int, max_tokens: int = 4) -> list[RequestState]:
        added = []
        for length in prompt_lengths:
            request = RequestState(len(self.requests), [7] * length, SamplingParams(max_tokens))
            self.requests.append(request)
            self.scheduler.add(request)
            added.append(request)
        return added

    def step(self) -> ScheduledBatch:
        batch = self.scheduler.schedule()
        for entry in batch.scheduled:
            request, samples = entry.request, entry.samples
            if request.status is RequestStatus.PENDING:
                request.schedule_first(0.0)
            request.advance(entry.query_length)
            if samples:
                request.append_token(7, 0.0)
        return batch

    def finish(self, request: RequestState) -> None:
        self.scheduler.remove(request)
        self.cache.release(request.request_id)


def plan(batch: ScheduledBatch) -> list[tuple[int, int]]:
    return [(entry.request.request_id, entry.query_length) for entry in batch.scheduled]


def test_token_budget_splits_a_long_prompt() -> None:
    """A prompt beyond max_batch_tokens is computed in pieces, and others fill what the last piece leaves."""
    world = World(100)
    world.add(40, 10)
    assert plan(world.step()) == [(0, 16)]
    assert plan(world.step()) == [(0, 16)]
    assert plan(world.step()) == [(0, 8), (1, 8)]
    assert plan(world.step()) == [(0, 1), (1, 2)]


def test_decodes_come_first() -> None:
    """Decodes, then prompts begun, then waiting requests, each by arrival."""
    world = World(100)
    world.add(3, 30, 5)
    world.step()
    assert plan(world.step()) == [(0, 1), (1, 15)]
    assert plan(world.step()) == [(0, 1), (1, 2), (2, 5)]


def test_request_limit() -> None:
    """No batch holds more than max_requests_per_batch requests, and a freed place is taken in the next one."""
    world = World(100, max_requests_per_batch=2)
    requests = world.add(1, 1, 1)
    assert plan(world.step()) == [(0, 1), (1, 1)]
    world.finish(requests[0])
    assert plan(world.step()) == [(1, 1), (2, 1)]


def test_cache_budget() -> None:
    """The pages that one pass reads are bounded, whatever the cache could hold."""
    world = World(100, cache_budget_blocks=3)
    world.add(8, 8, 4)
    assert plan(world.step()) == [(0, 8), (2, 4)]


def test_margin_holds_back_prompts_but_not_decodes() -> None:
    """Below the margin only decodes go on; above it admission resumes."""
    world = World(10, safety_margin=0.5)
    first, second = world.add(14, 9)
    assert plan(world.step()) == [(0, 14), (1, 2)]
    assert world.cache.free_share == 0.5, "not below the margin yet"
    assert plan(world.step()) == [(0, 1), (1, 7)]
    world.add(1)
    assert plan(world.step()) == [(0, 1), (1, 1)]
    world.finish(second)
    assert plan(world.step()) == [(0, 1), (2, 1)]
    world.finish(first)


def test_margin_cannot_lock_a_long_prompt() -> None:
    """When nothing decodes, the first candidate may use the margin."""
    world = World(10, safety_margin=0.9)
    world.add(40)
    assert [plan(world.step()) for _ in range(3)] == [[(0, 16)], [(0, 16)], [(0, 8)]]


def test_a_refused_admission_changes_nothing() -> None:
    """A request that does not fit stays where it is and holds nothing."""
    world = World(4)
    world.add(10, 12)
    assert plan(world.step()) == [(0, 10)]
    assert world.cache.num_owned_blocks(1) == 0
    assert world.scheduler.num_waiting == 1
    world.cache.check_integrity()


def test_overtaking_is_bounded() -> None:
    """Smaller requests pass one that does not fit, but only so often: then the queue waits for it, and it runs."""
    world = World(40, max_batch_tokens=256, max_requests_per_batch=4)
    blocker, large = world.add(64, 120)
    world.step()
    passed = 0
    while True:
        small = world.add(4)[0]
        if small.request_id not in {request for request, _ in plan(world.step())}:
            break
        passed += 1
        world.finish(small)
    assert passed == MAX_OVERTAKEN
    world.finish(blocker)
    assert large.request_id in {request for request, _ in plan(world.step())}


def test_planning_looks_at_a_bounded_part_of_the_queue() -> None:
    """A long queue of requests that do not fit is not walked to its end."""
    world = World(8)
    world.add(20)
    world.step()
    world.step()
    world.add(*[28] * 5000)
    looked_at: list[int] = []
    num_blocks_for = world.cache.num_blocks_for
    world.cache.num_blocks_for = lambda num_tokens: looked_at.append(num_tokens) or num_blocks_for(num_tokens)
    world.step()
    assert 1 < len(looked_at) < 20


def test_stalled_requests_are_reported_with_their_demand() -> None:
    """A decode without room is stalled, and while somebody is stalled nobody new is admitted."""
    world = World(4)
    world.add(8, 8, 1)
    world.step()
    batch = world.step()
    assert plan(batch) == []
    assert [(request.request_id, missing) for request, missing in batch.stalled] == [(0, 1), (1, 1)]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([8, 8], [1]), ([4, 4, 4, 4], [3, 2]), ([8, 4, 4], [2, 1]), ([4, 4, 8], [2])],
)
def test_victims_are_the_newest_and_as_few_as_needed(lengths: list[int], expected: list[int]) -> None:
    """With nothing scheduled any active request may leave; each of the rest needs one block more."""
    world = World(4)
    world.add(*lengths)
    world.step()
    batch = world.step()
    assert not batch
    victims = choose_victims(batch, world.scheduler.active, world.cache)
    assert [victim.request_id for victim in victims] == expected


def test_scheduled_requests_keep_their_cache() -> None:
    """With a batch planned, only stalled requests are offloaded."""
    world = World(5)
    world.add(8, 8)
    world.step()
    batch = world.step()
    assert plan(batch) == [(0, 1)]
    assert [victim.request_id for victim in choose_victims(batch, world.scheduler.active, world.cache)] == [1]


def test_the_last_active_request_never_leaves() -> None:
    """Whatever is demanded, one request keeps its cache."""
    world = World(3)
    (only,) = world.add(8)
    world.step()
    demand = ScheduledBatch(stalled=[(only, 100)])
    assert choose_victims(demand, world.scheduler.active, world.cache) == []


def test_offloaded_requests_return_oldest_first_and_before_new_ones() -> None:
    """They wait at the head of the queue until something finishes; nobody is let in before them."""
    world = World(12, max_batch_tokens=64)
    requests = world.add(8, 8, 8)
    world.step()
    world.add(1)
    for request in requests[1:]:
        world.cache.release(request.request_id)
        request.soft_reset()
    world.scheduler.put_back(requests[1:])
    assert plan(world.step()) == [(0, 1)], "nothing has finished yet"
    world.finish(requests[0])
    assert plan(world.step()) == [(1, 9), (2, 9), (3, 1)]
