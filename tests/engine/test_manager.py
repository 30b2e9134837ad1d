"""The manager on real tiny models: what ends a request, what fails one, and what is left behind."""

import torch
from engine_harness import Prompt, engine_for, greedy_requests, mixed_prompts, run_all
from tiny_models import ModelUnderTest, build

from cbgen.engine.metrics import request_times
from cbgen.engine.requests import FinishReason, RequestState, SamplingParams


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
    """It names both lengths, and the others complete."""
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


def test_non_finite_logits_fail_their_row_alone() -> None:
    """A row that turns NaN becomes an error; its neighbours, and those that take its blocks over, do not notice."""
    model = build("llama")
    poison = 9
    under_test = ModelUnderTest.of("llama", model, frozenset())
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = torch.nan
    healthy = mixed_prompts(12, 320, seed=3)
    prompts = [
        Prompt([poison, 5, 6], 8) if place % 4 == 1 else Prompt([t for t in p.token_ids if t != poison] or [5], 24)
        for place, p in enumerate(healthy)
    ]
    finished = run_all(engine_for(under_test, num_blocks=14, max_requests_per_batch=4), greedy_requests(prompts))
    for place, (prompt, request) in enumerate(zip(prompts, finished, strict=True)):
        if place % 4 == 1:
            assert request.finish_reason is FinishReason.ERROR
            assert "not finite" in str(request.error)
        else:
            under_test.assert_parity(prompt.token_ids, prompt.max_tokens, request.generated_ids)


def test_a_second_job_in_the_same_engine_is_as_the_first(tiny_llama: ModelUnderTest) -> None:
    """No state is left over between two runs of one manager."""
    engine = engine_for(tiny_llama, num_blocks=24)
    prompts = mixed_prompts(10, 320, seed=4)
    first = run_all(engine, greedy_requests(prompts))
    second = run_all(engine, greedy_requests(prompts, first_id=100))
    assert [r.generated_ids for r in first] == [r.generated_ids for r in second]


def test_sampled_rows_do_not_depend_on_the_batch(tiny_llama: ModelUnderTest) -> None:
    """Temperature, top-k and top-p rows with seeds of their own give the same tokens alone and in any company."""
    prompts = mixed_prompts(10, 320, seed=5)
    params = [
        SamplingParams(
            prompt.max_tokens, temperature=0.8 + 0.1 * (n % 3), top_k=5 * (n % 2), top_p=1 - 0.2 * (n % 4 == 3), seed=n
        )
        for n, prompt in enumerate(prompts)
    ]

    def run(**options: object) -> list[list[int]]:
        requests = [RequestState(n, list(p.token_ids), s) for n, (p, s) in enumerate(zip(prompts, params, strict=True))]
        return [request.generated_ids for request in run_all(engine_for(tiny_llama, **options), requests)]

    alone = run(max_requests_per_batch=1)
    assert run(max_requests_per_batch=64) == alone
    assert run(max_requests_per_batch=5, max_batch_tokens=16) == alone
    assert run(num_blocks=14, safety_margin=0.0) == alone


def test_timing_of_every_request_adds_up(tiny_llama: ModelUnderTest) -> None:
    """Queue, prefill and decode are never negative and together span arrival to finish."""
    for request in run_all(engine_for(tiny_llama, max_requests_per_batch=3), greedy_requests(mixed_prompts(9, 320))):
        times = request_times(request)
        parts = (times.queue_s, times.prefill_s, times.decode_s)
        assert all(part is not None and part >= 0 for part in parts)
        span = (times.finish_time - times.arrival_time).total_seconds()
        assert abs(sum(part for part in parts if part is not None) - span) < 1e-5
        assert (times.tpot_s is None) == (request.num_generated_tokens == 1)


def test_static_inputs_keep_their_addresses(tiny_llama: ModelUnderTest) -> None:
    """Every step is laid out in the same buffers, as recorded graphs will need."""
    engine = engine_for(tiny_llama)
    seen = set()
    forward = engine.manager._runner.forward

    def watch(inputs: object) -> torch.Tensor:
        seen.add((inputs.input_ids.data_ptr(), inputs.position_ids.data_ptr(), inputs.logits_indices.data_ptr()))
        return forward(inputs)

    engine.manager._runner.forward = watch
    run_all(engine, greedy_requests(mixed_prompts(6, 320)))
    assert len(seen) == 1
