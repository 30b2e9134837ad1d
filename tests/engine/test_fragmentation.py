"""Chunks of a hybrid model broken for both types of attention: whoever is left alone in too many of them leaves too."""

import pytest
from engine.integer_world import PAGE, World, layout_of
from engine_harness import Prompt, assert_parity, engine_for, greedy_requests, random_ids, run_all
from tiny_models import ModelUnderTest

from cbgen.engine.manager import Manager
from cbgen.engine.requests import RequestState

# Two full and five sliding layers: chunks of ten pages, five full blocks or two sliding ones.
NUM_FULL, NUM_SLIDING = 2, 5  # as tiny_coarse has them
# Data chunks, window, and prompt lengths with which one request is left alone without room for its next token.
CASES = [
    pytest.param(4, 12, [3, 5], 24, id="two"),
    pytest.param(4, 16, [12, 13], 24, id="two with long prompts"),
    pytest.param(3, 8, [1, 10, 11, 4], 24, id="four"),
]


def watch_last_ones(manager: Manager, seen: list[tuple[RequestState, list[int]]]) -> None:
    """Notes every request that is sent away though it is the only active one, and what it owns of each type."""
    offload = manager._offload

    def watched(victims: list[RequestState]) -> None:
        active = manager.scheduler.active
        if victims == active:
            (last,) = active
            owned = [allocator.num_owned_blocks(last.request_id) for allocator in manager.cache.allocators]
            seen.append((last, owned))
        offload(victims)

    manager._offload = watched


@pytest.mark.parametrize(("num_chunks", "window", "lengths", "max_tokens"), CASES)
@pytest.mark.parametrize("scheduler_type", ["fifo", "prefill_first"])
def test_the_last_one_leaves_and_one_runs_alone(
    num_chunks: int, window: int, lengths: list[int], max_tokens: int, scheduler_type: str
) -> None:
    """On integers: its blocks lie in more chunks than they need; the oldest starts over, alone until it is done."""
    world = World(num_chunks, layout_of(NUM_FULL, NUM_SLIDING, window), scheduler_type=scheduler_type)
    requests = world.add(*lengths, max_tokens=max_tokens)
    seen: list[tuple[RequestState, list[int]]] = []
    watch_last_ones(world.manager, seen)
    while not seen:
        world.step()
    last, owned = seen[0]
    assert sum(owned) > 0
    assert world.cache.layout.chunks_for_tokens(last.num_prompt_tokens + max_tokens - 1) <= num_chunks
    alone = next(request for request in requests if not request.is_finished)
    while not alone.is_finished:
        assert world.scheduler.active == [alone]
        assert [request_id for request_id, _ in world.step()] == [alone.request_id]
    assert len(seen) == 1, "alone from the start, its blocks lie as closely as they can"
    world.run()
    assert all(request.num_generated_tokens == max_tokens for request in requests)


@pytest.mark.parametrize("cpu_offload_space", [0.0, 0.01], ids=["soft reset", "swap"])
def test_a_fragmented_cache_of_a_real_model(tiny_coarse: ModelUnderTest, cpu_offload_space: float) -> None:
    """The same case with a model: the tokens are those of model.generate, whether it starts over or is swapped."""
    prompts = [Prompt(random_ids(length, seed=length), 24) for length in (3, 5)]
    engine = engine_for(
        tiny_coarse,
        page_size=PAGE,
        num_blocks=5,
        safety_margin=0.0,
        cpu_offload_space=cpu_offload_space,
        max_batch_tokens=16,
    )
    assert engine.manager.cache._pool.num_data_chunks == 4
    seen: list[tuple[RequestState, list[int]]] = []
    watch_last_ones(engine.manager, seen)
    finished = run_all(engine, greedy_requests(prompts))
    assert_parity(tiny_coarse, prompts, finished)
    assert len(seen) == 1
    assert (engine.manager.metrics.recomputed_tokens == 0) == (cpu_offload_space > 0)


@pytest.mark.parametrize("name", ["full", "sliding"])
def test_models_of_one_type_never_send_the_last_one_away(name: str) -> None:
    """One block is one chunk there, so that what others leave is of use as it is."""
    world = World(6, layout_of(2) if name == "full" else layout_of(0, 2, window=5 * PAGE))
    world.add(*[1 + n % 10 for n in range(20)], max_tokens=14)
    seen: list[tuple[RequestState, list[int]]] = []
    watch_last_ones(world.manager, seen)
    world.run()
    assert world.manager.metrics.offloads > 0
    assert not seen
