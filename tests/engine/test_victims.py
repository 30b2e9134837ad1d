"""Who is chosen to leave the cache, on integers: newest first, as few as cover the demand, never the last."""

import copy
import random

import pytest
from engine.integer_world import PAGE, World, layout_of

from cbgen.cache.paged_cache import Demand, PagedCache
from cbgen.engine.offloading import choose_victims
from cbgen.engine.requests import RequestState
from cbgen.engine.scheduler import ScheduledBatch

LAYOUTS = {"full": layout_of(2), "sliding": layout_of(0, 2, 12), "hybrid": layout_of(2, 5, 12)}


def victims_of(world: World, batch: ScheduledBatch) -> list[int]:
    return [victim.request_id for victim in choose_victims(batch, world.scheduler.active, world.cache)]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([8, 8], [1]), ([4, 4, 4, 4], [3, 2]), ([8, 4, 4], [2, 1]), ([4, 4, 8], [2])],
)
def test_with_nothing_scheduled_the_newest_leave_and_as_few_as_needed(lengths: list[int], expected: list[int]) -> None:
    """Each needs one block more: whoever leaves gives its blocks and its demand."""
    world = World(4)
    world.add(*lengths, max_tokens=4)
    world.step()
    batch = world.scheduler.schedule()
    assert not batch
    assert len(batch.stalled) == len(lengths)
    assert victims_of(world, batch) == expected


def test_with_a_batch_scheduled_only_stalled_requests_leave() -> None:
    """A newer request that is in the batch keeps its cache; the older one that found no room leaves."""
    world = World(4)
    world.add(8, 7, max_tokens=4)
    world.step()
    batch = world.scheduler.schedule()
    assert world.passes[-1].plan == [(1, 1)]
    assert victims_of(world, batch) == [0]


def test_of_several_stalled_requests_the_newest_leave() -> None:
    """Two of three are stalled, and what the newer one gives is enough for the older one."""
    world = World(6, max_batch_tokens=64)
    world.add(8, 8, 7, max_tokens=4)
    world.step()
    batch = world.scheduler.schedule()
    assert [request.request_id for request, _ in batch.stalled] == [0, 1]
    assert victims_of(world, batch) == [1]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_last_active_request_is_never_chosen(name: str) -> None:
    """Whatever is demanded, one request keeps its cache."""
    world = World(12, LAYOUTS[name])
    requests = world.add(4, 4, 4, max_tokens=2)
    world.step()
    demand = (100,) * len(world.cache.allocators)
    assert victims_of(world, ScheduledBatch(stalled=[(request, demand) for request in requests])) == [2, 1]
    assert victims_of(world, ScheduledBatch(stalled=[(requests[0], demand)])) == [2, 1]
    world.manager.cancel(requests[1])
    world.manager.cancel(requests[2])
    assert victims_of(world, ScheduledBatch(stalled=[(requests[0], demand)])) == []


def test_only_blocks_that_nobody_else_owns_count_as_given() -> None:
    """Three requests share three pages, and each gives the one block of its own that it has."""
    world = World(7, max_batch_tokens=64)
    world.add(13, 13, 13, max_tokens=4, prefix=12)
    world.add(4, max_tokens=4)
    world.step()
    assert world.cache.free_share == 0.0
    assert world.cache.num_owned_blocks(2) == 4
    batch = ScheduledBatch(stalled=[(request, (2,)) for request in world.requests[:3]])
    assert victims_of(world, batch) == [3, 2, 1], "two blocks given do not cover four; all that 2 owns would"


def test_blocks_that_all_their_owners_give_up_count_once() -> None:
    """Shared pages come free when the last of those who share them leaves, and only then."""
    world = World(6, max_batch_tokens=64)
    world.add(4, max_tokens=4)
    world.add(13, 13, max_tokens=4, prefix=12)
    world.step()
    first = world.requests[0]
    assert world.cache.free_share == 0.0
    assert victims_of(world, ScheduledBatch(stalled=[(first, (1,))])) == [2]
    assert victims_of(world, ScheduledBatch(stalled=[(first, (2,))])) == [2, 1]
    assert victims_of(world, ScheduledBatch(stalled=[(first, (5,))])) == [2, 1]
    assert world.cache.covers((5,), after_releasing=[1, 2])
    assert not world.cache.covers((6,), after_releasing=[1, 2])


def has_room(cache: PagedCache, demand: Demand) -> bool:
    """Worked out from the block tables alone: chunks that are in use, and free blocks in those."""
    num_chunks = 0
    for allocator, missing in zip(cache.allocators, demand, strict=True):
        owned = {block for request_id in allocator.request_ids for block in allocator.block_table(request_id)}
        chunks = {block // allocator.group.pages_per_chunk for block in owned}
        spare = len(chunks) * allocator.group.blocks_per_chunk - len(owned)
        num_chunks += len(chunks) + -(-max(0, missing - spare) // allocator.group.blocks_per_chunk)
    return num_chunks <= cache._pool.num_data_chunks


def fewest_by_trial(batch: ScheduledBatch, active: list[RequestState], cache: PagedCache) -> list[int]:
    """Takes the newest candidates out of a copy of the cache, one more each time, until the rest find room."""
    candidates = [request for request, _ in batch.stalled] if batch else active
    newest = sorted((request.request_id for request in candidates), reverse=True)
    for count in range(len(newest) + 1):
        trial = copy.deepcopy(cache)
        for request_id in newest[:count]:
            trial.release(request_id)
        rest = [demand for request, demand in batch.stalled if request.request_id not in newest[:count]]
        if not rest or has_room(trial, tuple(map(sum, zip(*rest, strict=True)))):
            break
    return newest[: min(count, len(active) - 1)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", LAYOUTS)
def test_victims_are_those_found_by_trial(name: str, seed: int) -> None:
    """Whenever somebody is stalled in a random crowd, with and without a batch: the same as trying it on a copy."""
    rng = random.Random(seed)
    world = World(rng.choice([5, 8, 12]), LAYOUTS[name], scheduler_type=rng.choice(["fifo", "prefill_first"]))
    prefix = 2 * PAGE if seed % 2 else 0
    for _ in range(16):
        world.add(rng.randint(1, 12), max_tokens=rng.randint(1, 9), prefix=prefix)
    schedule, tried = world.scheduler.schedule, []

    def try_out() -> ScheduledBatch:
        batch = schedule()
        if batch.stalled:
            active = world.scheduler.active
            assert victims_of(world, batch) == fewest_by_trial(batch, active, world.cache)
            tried.append(bool(batch))
        return batch

    world.scheduler.schedule = try_out
    assert len(world.run()) == 16
    assert tried
