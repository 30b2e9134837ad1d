"""Several samples of one prompt: as forks of the first of them, and as requests of their own."""

import numpy as np
import torch
from engine_harness import engine_for, run_all
from tiny_models import PARITY, ModelUnderTest

from cbgen.engine.draws import uniform_draws
from cbgen.engine.requests import RequestState
from cbgen.engine.sampling_params import SamplingParams

NUM_SAMPLES = 5
NEAR_DRAW = 1e-6  # two tokens' cumulated probabilities are told apart no better


def samples(prompt: list[int], max_tokens: int, first_id: int = 0, temperature: float = 1.0) -> list[RequestState]:
    """n requests for one prompt, each with draws of its own."""
    return [
        RequestState(first_id + k, list(prompt), SamplingParams(max_tokens, temperature=temperature, seed=7 * k + 1))
        for k in range(NUM_SAMPLES)
    ]


def fork_group(prompt: list[int], max_tokens: int, first_id: int = 0, temperature: float = 1.0) -> RequestState:
    """The first sample, and the others as its forks."""
    leader, *leader.forks = samples(prompt, max_tokens, first_id, temperature)
    return leader


def members_of(leaders: list[RequestState]) -> list[RequestState]:
    return [member for leader in leaders for member in (leader, *leader.forks)]


_expected: dict[tuple[str, int, tuple[int, ...]], list[list[int]]] = {}


def expected_samples(under_test: ModelUnderTest, prompt: list[int], max_tokens: int) -> list[list[int]]:
    """The same samples as separate requests that share nothing; one that fails has the tokens up to there."""
    key = (under_test.name, max_tokens, tuple(prompt))
    if key not in _expected:
        engine = engine_for(under_test, allow_block_sharing=False)
        _expected[key] = [request.generated_ids for request in run_all(engine, samples(prompt, max_tokens))]
    return _expected[key]


def assert_as_expected(under_test: ModelUnderTest, members: list[RequestState]) -> None:
    """Token for token what each sample is as a request of its own."""
    for member in members:
        assert member.error is None
        assert_sample(under_test, member)


def assert_sample(under_test: ModelUnderTest, member: RequestState) -> None:
    """The tokens of a separate request, or law 9: at the first difference the draw falls between the two tokens."""
    prompt, ours = member.token_ids[: member.num_prompt_tokens], member.generated_ids
    expected = expected_samples(under_test, prompt, member.params.max_tokens)[member.params.seed // 7]
    if ours == expected:
        return
    place = next(n for n, pair in enumerate(zip(ours, expected, strict=False)) if pair[0] != pair[1])
    low, high = sorted((ours[place], expected[place]))
    with torch.inference_mode():
        logits = under_test.reference(torch.tensor([prompt + ours[:place]]), use_cache=False).logits[0, -1].double()
    cumulated = logits.softmax(-1).cumsum(-1)
    draw = uniform_draws(np.array([member.params.seed], dtype=np.uint64), np.array([place], dtype=np.uint64))[0]
    assert cumulated[high - 1] - NEAR_DRAW < draw < cumulated[low] + NEAR_DRAW, (member.request_id, place)
    PARITY[f"{under_test.name}: sampled tokens differed at a near draw"] += 1
