"""The manager on real tiny models: what ends a request, what fails one, and what is left behind."""

from dataclasses import replace

import pytest
from engine.outgrown_harness import options_for, outgrowing_prompts
from engine_harness import (
    POISON,
    Prompt,
    assert_parity,
    engine_for,
    greedy_requests,
    mixed_prompts,
    poisoned,
    run_all,
)
from tiny_models import ModelUnderTest

from cbgen.engine.metrics import request_times
from cbgen.engine.requests import FinishReason, RequestState
from cbgen.engine.sampling_params import SamplingParams
from cbgen.engine.sources import ListSource


def test_stops_at_any_eos_token(tiny_llama: ModelUnderTest) -> None:
    """Generation ends with the first EOS token, which stays in the ids; a request may ignore it."""
    prompt = [5, 6, 7, 8]
    free = run_all(engine_for(tiny_llama), greedy_requests([Prompt(prompt, 20)]))[0].generated_ids
    eos = frozenset([free[6], 999])
    under_test = ModelUnderTest("llama", tiny_llama.model, tiny_llama.reference, tiny_llama.shape, eos)
    requests = greedy_requests([Prompt(prompt, 20)])
    requests.append(RequestState(1, list(prompt), SamplingParams(20, ignore_eos=True)))
    stopped, ignoring = run_all(engine_for(under_test), requests)
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.generated_ids == free[: free.index(free[6]) + 1]
    assert ignoring.finish_reason is FinishReason.LENGTH
    assert ignoring.generated_ids == free


def test_a_request_that_can_never_fit_fails_before_it_starts(tiny_llama: ModelUnderTest) -> None:
    """A single request that can never fit: error row before it starts, which names both lengths; others complete."""
    prompts = [Prompt([5] * 10, 4), Prompt([5] * 600, 4), Prompt([5] * 200, 100), Prompt([6] * 10, 4)]
    good, too_long, too_large, also_good = run_all(engine_for(tiny_llama, num_blocks=8), greedy_requests(prompts))
    assert good.finish_reason is also_good.finish_reason is FinishReason.LENGTH
    assert too_long.finish_reason is too_large.finish_reason is FinishReason.ERROR
    assert "600 tokens" in str(too_long.error)
    assert "512" in str(too_long.error)
    assert "200 tokens" in str(too_large.error)
    assert "128 tokens" in str(too_large.error)
    assert too_long.generated_ids == too_large.generated_ids == []


def test_a_request_as_large_as_the_cache_runs(tiny_llama: ModelUnderTest) -> None:
    """The KV of the last token is never needed, so prompt and output may exceed the cache by that one."""
    prompts = [Prompt([5] * 100, 29)]
    assert run_all(engine_for(tiny_llama, num_blocks=8), greedy_requests(prompts))[0].num_generated_tokens == 29
    prompts = [Prompt([5] * 100, 30)]
    assert run_all(engine_for(tiny_llama, num_blocks=8), greedy_requests(prompts))[0].error is not None


def test_non_finite_logits_fail_their_row_alone(tiny_llama: ModelUnderTest) -> None:
    """Non-finite logits in one row: an error row; its neighbours, and those that get its pages next, are unharmed."""
    under_test = poisoned(tiny_llama)
    prompts = [
        Prompt([POISON, 5, 6], 8) if place % 4 == 1 else prompt
        for place, prompt in enumerate(mixed_prompts(12, 320, most=12, seed=3))
    ]
    finished = run_all(engine_for(under_test, num_blocks=14, max_requests_per_batch=4), greedy_requests(prompts))
    for place, (prompt, request) in enumerate(zip(prompts, finished, strict=True)):
        if place % 4 == 1:
            assert request.finish_reason is FinishReason.ERROR
            assert "not finite" in str(request.error)
        else:
            under_test.assert_parity(prompt.token_ids, prompt.max_tokens, request.generated_ids)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("cpu_offload_space", [0.0, 0.01], ids=["soft reset", "swap"])
def test_a_second_job_in_the_same_engine_is_as_the_first(
    request: pytest.FixtureRequest, name: str, cpu_offload_space: float
) -> None:
    """A second job in the same process is as the first, no state left over: also with the ids of the first one."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    engine = engine_for(under_test, cpu_offload_space=cpu_offload_space, **options_for(name))
    prompts = outgrowing_prompts()[:6]
    before = replace(engine.manager.metrics)
    jobs = []
    for _ in range(2):
        requests = run_all(engine, greedy_requests(prompts))
        now = engine.manager.metrics
        counts = (now.num_steps - before.num_steps, now.offloads - before.offloads)
        jobs.append(([r.generated_ids for r in requests], None if engine.manager.cache.shares_blocks else counts))
        before = replace(now)
    assert jobs[0] == jobs[1]
    assert_parity(under_test, prompts, requests)


def test_two_engines_of_one_model_do_not_disturb_each_other(tiny_gemma3: ModelUnderTest) -> None:
    """Stepped by turns, each serves its own requests from its own cache."""
    prompts = mixed_prompts(6, 320, longest=60, most=10, seed=4)
    halves = [prompts[::2], prompts[1::2]]
    jobs = [
        (engine_for(tiny_gemma3, page_size=size).manager, greedy_requests(half))
        for size, half in zip((5, 16), halves, strict=True)
    ]
    for manager, requests in jobs:
        manager.pull(ListSource(requests))
    while any(manager.scheduler.has_work for manager, _ in jobs):
        for manager, _ in jobs:
            if manager.scheduler.has_work:
                manager.step()
                manager.check_integrity()
    for half, (_, requests) in zip(halves, jobs, strict=True):
        assert_parity(tiny_gemma3, half, requests)


def test_requests_are_pulled_while_few_wait(tiny_llama: ModelUnderTest) -> None:
    """Of a long source only as many are taken as the queue may hold, and all come out, each as soon as it is done."""
    engine = engine_for(tiny_llama, max_requests_per_batch=2)
    source = ListSource(greedy_requests([Prompt([5 + n], 1 + n % 4) for n in range(30)]))
    most = 0
    finished = []
    for request in engine.manager.run(source):
        assert request.is_finished
        most = max(most, engine.manager.scheduler.num_waiting)
        finished.append(request.request_id)
    assert sorted(finished) == list(range(30))
    assert finished != sorted(finished), "in the order of finishing"
    assert most == 2 * 2


def test_timing_of_every_request_adds_up(tiny_llama: ModelUnderTest) -> None:
    """Queue, prefill and decode are never negative and together span arrival to finish."""
    for request in run_all(engine_for(tiny_llama, max_requests_per_batch=3), greedy_requests(mixed_prompts(9, 320))):
        times = request_times(request)
        parts = (times.queue_s, times.prefill_s, times.decode_s)
        assert all(part is not None and part >= 0 for part in parts)
        span = (times.finish_time - times.arrival_time).total_seconds()
        assert abs(sum(part for part in parts if part is not None) - span) < 1e-5
        assert (times.tpot_s is None) == (request.num_generated_tokens == 1)
