"""After stop_admitting: what had begun comes out, what had not is forgotten, and the cache remembers nothing of it."""

import pytest
from engine.fork_harness import assert_as_expected, fork_group, members_of
from engine_harness import POISON, Prompt, Watch, assert_parity, engine_for, greedy_requests, random_ids, refusing
from tiny_models import ModelUnderTest

from cbgen.engine.build import Engine
from cbgen.engine.requests import RequestState
from cbgen.engine.sources import ListSource

PREFIX = random_ids(48, seed=1)
PROMPTS = [Prompt([*PREFIX, *random_ids(8 + n, seed=n)], 4 + n % 7) for n in range(20)]


def drained(engine: Engine, requests: list[RequestState], steps_before: int) -> list[RequestState]:
    """Steps, stops admitting, and steps until there is no work; returns who was dropped."""
    manager, source = engine.manager, ListSource(requests)
    manager.pull(source)
    assert source.exhausted
    for _ in range(steps_before):
        manager.step()
        manager.check_integrity()
    dropped = [request for request in manager.scheduler.waiting if not request.was_offloaded]
    kept = [request for request in requests if request not in dropped]
    manager.stop_admitting()
    manager.check_integrity()
    while manager.scheduler.has_work:
        assert manager.pull(source) == []
        manager.step()
        manager.check_integrity()
    assert all(request.is_finished for request in kept)
    assert not any(request.is_finished or request.num_computed_tokens for request in dropped)
    Watch(engine, []).check_empty()
    return dropped


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("steps_before", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"max_requests_per_batch": 10},
        {"max_batch_tokens": 70, "balance_tail": False},
        {"num_blocks": 14, "safety_margin": 0.0},
        {"num_blocks": 14, "safety_margin": 0.0, "cpu_offload_space": 0.01},
    ],
    ids=["few at once", "small pieces", "a small cache", "a swap pool"],
)
def test_what_had_begun_comes_out(
    request: pytest.FixtureRequest, name: str, steps_before: int, options: dict[str, object]
) -> None:
    """At any moment: active and offloaded requests finish as ever, and nobody else begins."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    requests = greedy_requests(PROMPTS)
    engine = engine_for(under_test, **options)
    dropped = drained(engine, requests, steps_before)
    assert len(dropped) > 0
    assert (len(dropped) == 20) == (steps_before == 0)
    kept = [number for number, row in enumerate(requests) if row not in dropped]
    assert_parity(under_test, [PROMPTS[n] for n in kept], [requests[n] for n in kept])


def test_requests_that_wait_for_a_prefix_are_forgotten(tiny_llama: ModelUnderTest) -> None:
    """The cache knows their tokens, since it told them to wait; then it does not."""
    requests = greedy_requests(PROMPTS)
    engine = engine_for(tiny_llama, max_batch_tokens=20)
    known = engine.manager.cache._prefix_cache.known_ids
    assert drained(engine, requests, 1) == requests[1:]
    assert engine.manager.cache._prefix_cache.known_ids == known == set()
    again = greedy_requests(PROMPTS[1:], first_id=100)
    for finished in engine.manager.run(ListSource(again)):
        assert finished.error is None
    assert_parity(tiny_llama, PROMPTS[1:], again)


def test_samples_of_a_prompt_that_had_begun_go_on(tiny_llama: ModelUnderTest) -> None:
    """Those of a request that never began are forgotten with it."""
    leaders = [fork_group(PREFIX, 5), fork_group(PREFIX[:30], 5, first_id=10)]
    first, second = members_of(leaders[:1]), members_of(leaders[1:])
    engine = engine_for(tiny_llama, max_batch_tokens=40)
    assert drained(engine, leaders, 1) == leaders[1:]
    assert_as_expected(tiny_llama, first)
    assert not any(row.is_finished for row in second)


def test_a_drain_during_the_search_for_a_guilty_row(tiny_llama: ModelUnderTest) -> None:
    """Suspects had begun: the search goes on, and so do the others."""
    prompts = [*PROMPTS[:3], Prompt([*PREFIX, POISON], 4), *PROMPTS[3:]]
    requests = greedy_requests(prompts)
    engine = engine_for(refusing(tiny_llama), max_requests_per_batch=11)
    dropped = drained(engine, requests, 2)
    assert engine.manager.metrics.forward_failures > 1
    kept = [number for number, row in enumerate(requests) if row not in dropped]
    failed = [number for number in kept if requests[number].error is not None]
    assert failed == [3]
    good = [number for number in kept if number != 3]
    assert_parity(tiny_llama, [prompts[n] for n in good], [requests[n] for n in good])
