"""The engine without its model takes the steps that the engine takes."""

import numpy as np
import pytest
from engine_harness import Prompt, engine_for, mixed_prompts, random_ids
from tiny_models import ModelUnderTest

from cbgen.duplicates import Recipients
from cbgen.engine.requests import RequestState
from cbgen.engine.sampling_params import SamplingParams
from cbgen.engine.sources import ListSource
from cbgen.ordering import WaitingRequest, arrange, pack_ids
from cbgen.plan.calibration import Calibration
from cbgen.plan.costs import TERMS, CostModel
from cbgen.plan.simulation import simulate

A_SECOND_EACH = CostModel(np.array([1.0] + [0.0] * (len(TERMS) - 1)))
COUNTED = ("num_steps", "num_scheduled_requests", "output_tokens", "computed_prompt_tokens", "prefix_hit_tokens")
COUNTED += ("recomputed_tokens", "offloads", "soft_resets", "requests_ok", "prompt_tokens")


def waiting(prompts: list[Prompt], samples: int = 1) -> list[WaitingRequest]:
    return [
        WaitingRequest(
            number,
            pack_ids(prompt.token_ids),
            [(SamplingParams(prompt.max_tokens, ignore_eos=True), Recipients([]))] * samples,
        )
        for number, prompt in enumerate(prompts)
    ]


def requests_of(rows: list[WaitingRequest], prompts: list[Prompt]) -> list[RequestState]:
    requests, number = [], 0
    for row in rows:
        members = []
        for params, _ in row.members:
            number += 1
            members.append(RequestState(number, list(prompts[row.arrival].token_ids), params))
        first, *first.forks = members
        requests.append(first)
    return requests


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gemma3"])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("scheduler_type", ["fifo", "prefill_first"])
@pytest.mark.parametrize("num_blocks", [16, 512])
def test_the_same_steps(
    request: pytest.FixtureRequest, name: str, samples: int, scheduler_type: str, num_blocks: int
) -> None:
    """With prefixes in common, chunks, forks, soft resets and a balanced tail: all counts are those of the real run."""
    under_test = request.getfixturevalue(name)
    options = {"num_blocks": num_blocks, "max_batch_tokens": 48, "max_requests_per_batch": 9}
    engine = engine_for(under_test, scheduler_type=scheduler_type, **options)
    prefix = random_ids(48, seed=7)
    prompts = mixed_prompts(30, under_test.shape.vocab_size, longest=60, most=40)
    prompts = [Prompt(prefix * (n % 2) + one.token_ids, one.max_tokens) for n, one in enumerate(prompts)]
    rows = arrange(waiting(prompts, samples), "auto", 16 if engine.manager.cache.shares_blocks else None)
    simulated = simulate(engine, rows, A_SECOND_EACH)
    list(engine.manager.run(ListSource(requests_of(rows, prompts))))
    real = engine.manager.metrics
    assert {count: getattr(simulated.metrics, count) for count in COUNTED} == {
        count: getattr(real, count) for count in COUNTED
    }
    assert simulated.seconds == real.num_steps
    assert (real.offloads > 0) == (num_blocks == 16)


def test_scored_prompts_take_the_steps_that_they_take(tiny_llama: ModelUnderTest) -> None:
    """They share nothing, and a pass holds fewer of their tokens."""
    engine = engine_for(tiny_llama, max_batch_tokens=48, max_requests_per_batch=9)
    prefix = random_ids(48, seed=7)
    prompts = [Prompt([*prefix, *one.token_ids], one.max_tokens) for one in mixed_prompts(12, 320, longest=60, most=10)]
    rows = waiting(prompts)
    for row in rows[::2]:
        row.members[0] = (row.members[0][0].updated(prompt_logprobs=2, logprobs=1), row.members[0][1])
    simulated = simulate(engine, rows, A_SECOND_EACH)
    list(engine.manager.run(ListSource(requests_of(rows, prompts))))
    real = engine.manager.metrics
    assert {count: getattr(simulated.metrics, count) for count in COUNTED} == {
        count: getattr(real, count) for count in COUNTED
    }


def test_a_calibration_leaves_the_engine_as_it_was(tiny_llama: ModelUnderTest) -> None:
    """Passes of many sizes are timed; afterwards nothing is held, and the engine serves as before."""
    engine = engine_for(tiny_llama, max_batch_tokens=64, max_requests_per_batch=12)
    prompts = mixed_prompts(20, tiny_llama.shape.vocab_size, longest=100, most=10)
    calibration = Calibration(engine)
    costs = calibration.measure(waiting(prompts))
    assert costs.num_passes > 20
    seen = {int(size[TERMS.index("requests")]) for size in calibration._sizes}
    assert {1, 12} <= seen
    assert costs.seconds(calibration._sizes[-1]) > 0
    manager = engine.manager
    manager.check_integrity()
    assert not manager.scheduler.has_work
    assert manager.cache.free_share == 1.0
    rows = waiting(prompts)
    done = sorted(manager.run(ListSource(requests_of(rows, prompts))), key=lambda request: request.request_id)
    for prompt, request in zip(prompts, done, strict=True):
        tiny_llama.assert_parity(prompt.token_ids, prompt.max_tokens, request.generated_ids)
