"""Cancelled requests hold nothing and stop nobody, whatever they were doing."""

import random

import pytest
from engine.outgrown_harness import options_for, outgrowing_prompts
from engine_harness import Prompt, assert_parity, engine_for, greedy_requests, random_ids, run_all
from tiny_models import ModelUnderTest

from cbgen.engine.manager import Manager
from cbgen.engine.requests import FinishReason, RequestState, RequestStatus
from cbgen.engine.sources import ListSource

MODELS = ["llama", "mistral", "gemma3"]
PROMPTS = [Prompt(random_ids(40, seed=n), 6) for n in range(2, 6)]


def cancel_when(request: RequestState, status: RequestStatus):
    """For run_all: cancels the request once it is seen in that state, and looks at what is left of it."""

    def cancel(manager: Manager) -> None:
        if request.status is status:
            manager.cancel(request)
            assert manager.cache.num_owned_blocks(request.request_id) == 0
            assert request not in [*manager.scheduler.active, *manager.scheduler.waiting]
            assert (request.finish_reason, request.error) == (FinishReason.ERROR, "cancelled")
            assert request.timing.finish_s is not None
            manager.check_integrity()

    return cancel


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize("status", [RequestStatus.PENDING, RequestStatus.PREFILLING, RequestStatus.DECODING])
def test_cancel_in_any_state(request: pytest.FixtureRequest, name: str, place: int, status: RequestStatus) -> None:
    """Waiting, in its prompt or generating: it ends there, and the others come out as ever."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    requests = greedy_requests(PROMPTS)
    engine = engine_for(under_test, max_batch_tokens=30, max_requests_per_batch=2)
    run_all(engine, requests, cancel_when(requests[place], status))
    assert requests[place].error == "cancelled"
    assert (requests[place].num_generated_tokens > 0) == (status is RequestStatus.DECODING)
    others = [number for number in range(4) if number != place]
    assert_parity(under_test, [PROMPTS[n] for n in others], [requests[n] for n in others])
    assert engine.manager.metrics.requests_ok == 3


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("status", [RequestStatus.PREFILLING, RequestStatus.DECODING])
@pytest.mark.parametrize("options", [{"max_requests_per_batch": 1}, {"num_blocks": 3}], ids=["by number", "by cache"])
def test_cancel_of_the_last_active_request_while_others_wait(
    request: pytest.FixtureRequest, name: str, status: RequestStatus, options: dict[str, int]
) -> None:
    """Cancel of the last active request while others wait: the others run."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    requests = greedy_requests(PROMPTS)
    engine = engine_for(under_test, max_batch_tokens=30, **options)
    manager = engine.manager

    def cancel(manager: Manager) -> None:
        if requests[0].status is status:
            assert manager.scheduler.active == requests[:1]
            manager.cancel(requests[0])
            assert manager.scheduler.num_active == 0
            assert manager.scheduler.has_work

    run_all(engine, requests, cancel)
    assert requests[0].error == "cancelled"
    assert_parity(under_test, PROMPTS[1:], requests[1:])
    assert not manager.scheduler.has_work


@pytest.mark.parametrize("cpu_offload_space", [0.0, 0.01], ids=["soft reset", "swap"])
@pytest.mark.parametrize("name", MODELS)
def test_cancel_of_the_last_active_request_while_offloaded_ones_wait(
    request: pytest.FixtureRequest, name: str, cpu_offload_space: float
) -> None:
    """Nobody is admitted until something finishes, and a cancelled request has: those who had to leave return."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    requests = greedy_requests(PROMPTS[:3])
    engine = engine_for(under_test, cpu_offload_space=cpu_offload_space, max_batch_tokens=100)

    def send_away_and_cancel(manager: Manager) -> None:
        if manager.metrics.num_steps == 1 and not requests[1].was_offloaded:
            manager._offload([requests[2], requests[1]])
            manager.cancel(requests[0])
            assert manager.scheduler.waiting == requests[1:]

    run_all(engine, requests, send_away_and_cancel)
    assert_parity(under_test, PROMPTS[1:3], requests[1:])
    assert engine.manager.metrics.recomputed_tokens == 0 or not cpu_offload_space


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cpu_offload_space", [0.0, 0.01], ids=["soft reset", "swap"])
@pytest.mark.parametrize("seed", [1])
def test_cancels_at_random(request: pytest.FixtureRequest, name: str, cpu_offload_space: float, seed: int) -> None:
    """Any request at any moment, in a cache too small for all: laws hold after each step, survivors are right."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    rng = random.Random(seed)
    prompts = outgrowing_prompts()
    requests = greedy_requests(prompts)
    cancelled: list[RequestState] = []

    def cancel(manager: Manager) -> None:
        present = [*manager.scheduler.active, *manager.scheduler.waiting]
        if present and rng.random() < 0.12:
            cancelled.append(rng.choice(present))
            manager.cancel(cancelled[-1])

    run_all(engine_for(under_test, cpu_offload_space=cpu_offload_space, **options_for(name)), requests, cancel)
    survivors = [number for number, r in enumerate(requests) if r not in cancelled]
    assert cancelled
    assert survivors
    assert_parity(under_test, [prompts[n] for n in survivors], [requests[n] for n in survivors])


def test_an_engine_whose_requests_were_all_cancelled_serves_on(tiny_llama: ModelUnderTest) -> None:
    """Nothing is left of them but pages that the next ones may take over."""
    engine = engine_for(tiny_llama, num_blocks=8, max_batch_tokens=30)
    requests = greedy_requests(PROMPTS[:3])
    engine.manager.pull(ListSource(requests))
    engine.manager.step()
    for cancelled in requests:
        engine.manager.cancel(cancelled)
        engine.manager.check_integrity()
    assert not engine.manager.scheduler.has_work
    assert engine.manager.cache.free_share == 1.0
    again = greedy_requests(PROMPTS, first_id=10)
    assert_parity(tiny_llama, PROMPTS, run_all(engine, again))
