"""Requests that wait for another's prefill of their prefix: released when it is there, and when it will never be."""

import pytest
from engine_harness import POISON, Prompt, assert_parity, engine_for, greedy_requests, poisoned, random_ids, run_all
from tiny_models import ModelUnderTest

from cbgen.engine.manager import Manager
from cbgen.engine.requests import FinishReason, RequestStatus

PAGE = 16
PREFIX = random_ids(6 * PAGE, seed=1)
CHUNKED = {"max_batch_tokens": 20, "max_requests_per_batch": 8}


def sharing_prompts(count: int, max_tokens: int = 3) -> list[Prompt]:
    return [Prompt([*PREFIX, 3 + number], max_tokens) for number in range(count)]


def test_nobody_computes_what_another_is_about_to(tiny_llama: ModelUnderTest) -> None:
    """While the first is in its prompt, those that share it wait, and a stranger goes on in the same batches."""
    stranger = Prompt([7, 8, 9], 12)
    prompts = [stranger, *sharing_prompts(5)]
    requests = greedy_requests(prompts)
    seen: list[list[RequestStatus]] = []
    run_all(engine_for(tiny_llama, **CHUNKED), requests, lambda _: seen.append([r.status for r in requests]))
    assert_parity(tiny_llama, prompts, requests)
    during = [statuses for statuses in seen if statuses[1] is RequestStatus.PREFILLING]
    assert len(during) == 5
    for statuses in during:
        assert statuses[0] is RequestStatus.DECODING
        assert set(statuses[2:]) == {RequestStatus.PENDING}


@pytest.mark.parametrize("place", [0, 1, 5], ids=["the first, in its prompt", "one that waits", "the last that waits"])
@pytest.mark.parametrize("after_steps", [1, 3])
def test_cancel_releases_who_waits(tiny_llama: ModelUnderTest, place: int, after_steps: int) -> None:
    """Another takes the prefill over where the cancelled one got to; nobody waits for somebody who left."""
    prompts = sharing_prompts(6)
    requests = greedy_requests(prompts)
    engine = engine_for(tiny_llama, **CHUNKED)

    def cancel(manager: Manager) -> None:
        if manager.metrics.num_steps == after_steps and not requests[place].is_finished:
            manager.cancel(requests[place])

    run_all(engine, requests, cancel)
    assert requests[place].error == "cancelled"
    others = [number for number in range(6) if number != place]
    assert_parity(tiny_llama, [prompts[n] for n in others], [requests[n] for n in others])
    computed, whole_pages = engine.manager.metrics.computed_prompt_tokens, after_steps * 20 // PAGE * PAGE
    lost = after_steps * 20 - whole_pages if place == 0 else 0
    assert computed == len(PREFIX) + len(others) + lost


@pytest.mark.parametrize("max_batch_tokens", [20, 400])
def test_failure_releases_who_waits(tiny_llama: ModelUnderTest, max_batch_tokens: int) -> None:
    """The one that computes the prefix fails at the end of its prompt: who shares the prefix is unharmed."""
    under_test = poisoned(tiny_llama)
    failing = Prompt([*PREFIX, POISON, *random_ids(30, seed=2)], 4)
    prompts = [failing, *sharing_prompts(5)]
    engine = engine_for(under_test, max_batch_tokens=max_batch_tokens)
    failed, *others = run_all(engine, greedy_requests(prompts))
    assert failed.finish_reason is FinishReason.ERROR
    assert "not finite" in str(failed.error)
    assert_parity(under_test, prompts[1:], others)
    assert all(request.computes_alone for request in others if request.num_soft_resets)


def test_poison_in_the_prefix_fails_all_who_share_it_and_nobody_else(tiny_llama: ModelUnderTest) -> None:
    """Blocks of NaN are as good a prefix as any: their rows fail, also those that only took them over."""
    under_test = poisoned(tiny_llama)
    prompts = [Prompt([*PREFIX[:5], POISON, *PREFIX[5:], 3 + number], 4) for number in range(4)]
    prompts += [Prompt([*PREFIX[:5], 7, *PREFIX[5:], 3 + number], 4) for number in range(4)]
    engine = engine_for(under_test, num_blocks=20)
    finished = run_all(engine, greedy_requests(prompts))
    assert [request.finish_reason for request in finished[:4]] == [FinishReason.ERROR] * 4
    assert_parity(under_test, prompts[4:], finished[4:])
    assert engine.manager.metrics.prefix_hit_tokens == 2 * 3 * len(PREFIX)


def test_a_failed_request_releases_who_waited_for_its_prompt(tiny_llama: ModelUnderTest) -> None:
    """Those that wait for the prefill of a request that fails go on, with nobody else active."""
    under_test = poisoned(tiny_llama)
    prompts = [Prompt([POISON, *PREFIX], 4), Prompt([POISON, *PREFIX, 5], 4), Prompt([8, 9], 2)]
    engine = engine_for(under_test, max_batch_tokens=20)
    first, second, third = run_all(engine, greedy_requests(prompts))
    assert "not finite" in str(first.error)
    assert "not finite" in str(second.error)
    assert_parity(under_test, prompts[2:], [third])
    assert engine.manager.metrics.prefix_hit_tokens == len(PREFIX)


@pytest.mark.parametrize("cpu_offload_space", [0.0, 0.01], ids=["soft reset", "swap"])
def test_offloading_releases_who_waits(tiny_llama: ModelUnderTest, cpu_offload_space: float) -> None:
    """The one that computes the prefix has to leave within its prompt; another goes on from the pages it left."""
    prompts = sharing_prompts(4)
    requests = greedy_requests(prompts)
    engine = engine_for(tiny_llama, cpu_offload_space=cpu_offload_space, **CHUNKED)

    def send_away(manager: Manager) -> None:
        if manager.metrics.num_steps == 2:
            manager._offload([requests[0]])

    run_all(engine, requests, send_away)
    assert_parity(tiny_llama, prompts, requests)
    metrics = engine.manager.metrics
    assert metrics.offloads == 1
    assert metrics.computed_prompt_tokens == len(PREFIX) + 4
    assert metrics.recomputed_tokens == (0 if cpu_offload_space else 40 % PAGE)
