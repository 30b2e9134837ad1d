"""Log-probabilities of prompts and outputs against a plain forward pass over the same tokens."""

import numpy as np
import pytest
import torch
from engine_harness import engine_for, random_ids, run_all
from tiny_models import ModelUnderTest

from cbgen.engine.logprobs import TokenLogprobs, token_logprobs
from cbgen.engine.requests import RequestState
from cbgen.engine.sampling_params import SamplingParams

MODELS = ["llama", "mistral", "gemma3"]
PREFIX = random_ids(64, seed=8)
WAYS = {
    "roomy": {},
    "pieces of 7 tokens": {"max_batch_tokens": 7},
    "five rows of logits": {"max_requests_per_batch": 5},
    "one at a time": {"max_requests_per_batch": 1},
    "prompts first": {"scheduler_type": "prefill_first", "max_batch_tokens": 40},
    "a small cache": {"num_blocks": 14, "safety_margin": 0.0},
    "a small cache and a swap pool": {"num_blocks": 14, "safety_margin": 0.0, "cpu_offload_space": 0.01},
}
TOP = 3


def rows() -> list[RequestState]:
    """Scored and not, with a prefix in common and without, sampled and greedy, one token long and many pages long."""
    lengths = [1, 2, 40, 90, 130, 17]
    requests = [
        RequestState(n, random_ids(length, seed=n), SamplingParams(6, prompt_logprobs=TOP, logprobs=TOP))
        for n, length in enumerate(lengths)
    ]
    for n in range(6, 14):
        scored = {"prompt_logprobs": TOP, "logprobs": n % 3} if n % 2 else {}
        params = SamplingParams(5 + n, temperature=0.7 * (n % 3), seed=n, **scored)
        requests.append(RequestState(n, [*PREFIX, *random_ids(n, seed=n)], params))
    return requests


@torch.inference_mode()
def expected_scores(under_test: ModelUnderTest, request: RequestState) -> torch.Tensor:
    """[T, vocab]: what each token but the first was chosen from."""
    logits = under_test.reference(torch.tensor([request.token_ids]), use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1)


def assert_scores(found: TokenLogprobs, expected: torch.Tensor, token_ids: list[int], num_top: int) -> None:
    """Equal to 1e-4; a rank or an order of tokens may only differ between those that are as close."""
    assert found.token_ids.tolist() == token_ids
    assert found.top_ids.shape == found.top_logprobs.shape == (len(token_ids), num_top)
    chosen = expected[torch.arange(len(token_ids)), torch.tensor(token_ids, dtype=torch.long)]
    np.testing.assert_allclose(found.logprobs, chosen, atol=1e-4)
    if num_top:
        np.testing.assert_allclose(found.top_logprobs, expected.topk(num_top, dim=-1).values, atol=1e-4)
        own = expected.gather(1, torch.from_numpy(found.top_ids.astype(np.int64)))
        np.testing.assert_allclose(found.top_logprobs, own, atol=1e-4)
    margin = 1e-4
    least = (expected > chosen[:, None] + margin).sum(-1).numpy() + 1
    most = (expected > chosen[:, None] - margin).sum(-1).numpy() + 1
    assert (least <= found.ranks).all() and (found.ranks <= most).all()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_scores_are_those_of_a_plain_forward_pass(request: pytest.FixtureRequest, name: str, way: str) -> None:
    """Whatever pieces a prompt is computed in, and also when others have its prefix in the cache already."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    engine, warm = engine_for(under_test, **WAYS[way]), [RequestState(99, [*PREFIX, 5], SamplingParams(2))]
    run_all(engine, warm)
    for one in run_all(engine, rows()):
        assert one.error is None
        expected, place = expected_scores(under_test, one), one.num_prompt_tokens - 1
        if one.params.prompt_logprobs is None:
            assert one.prompt_logprobs is None
        else:
            prompt_ids = one.token_ids[1 : place + 1]
            assert_scores(one.prompt_logprobs.value, expected[:place], prompt_ids, TOP)
        if one.params.logprobs is not None:
            assert_scores(one.logprobs.value, expected[place:], one.generated_ids, one.params.logprobs)


def test_a_scored_prompt_takes_nothing_from_the_cache_and_leaves_its_pages(tiny_llama: ModelUnderTest) -> None:
    """All of its tokens are computed; a later one that is not scored takes them over."""
    engine = engine_for(tiny_llama)
    metrics = engine.manager.metrics
    run_all(engine, [RequestState(0, [*PREFIX, 5], SamplingParams(1))])
    run_all(engine, [RequestState(1, [*PREFIX, 6], SamplingParams(1, prompt_logprobs=0))])
    assert metrics.prefix_hit_tokens == 0
    run_all(engine, [RequestState(2, [*PREFIX, 7], SamplingParams(1))])
    assert metrics.prefix_hit_tokens == len(PREFIX)


@pytest.mark.parametrize("way", ["roomy", "one at a time", "a small cache"])
def test_samples_of_a_prompt_share_its_scores(tiny_llama: ModelUnderTest, way: str) -> None:
    """Each fork has the scores of the whole prompt, and its own of what it generated."""
    params = SamplingParams(8, temperature=1.0, prompt_logprobs=TOP, logprobs=1)
    members = [RequestState(n, random_ids(70, seed=3), params.with_seed(n)) for n in range(4)]
    first, *first.forks = members
    run_all(engine_for(tiny_llama, **WAYS[way]), [first])
    assert len({tuple(member.generated_ids) for member in members}) > 1
    for member in members:
        expected = expected_scores(tiny_llama, member)
        assert_scores(member.prompt_logprobs.value, expected[:69], member.token_ids[1:70], TOP)
        assert_scores(member.logprobs.value, expected[69:], member.generated_ids, 1)


def test_rows_of_logits_are_bounded(tiny_llama: ModelUnderTest) -> None:
    """No pass gives more rows of logits than it may have requests, however long the prompts that are scored."""
    engine, seen = engine_for(tiny_llama, max_requests_per_batch=9), []
    forward = engine.manager.passes.runner.forward

    def recorded(inputs: object) -> torch.Tensor:
        logits = forward(inputs)
        seen.append(len(logits))
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.manager.passes.runner, "forward", recorded)
        run_all(engine, rows())
    assert max(seen) == 9


@pytest.mark.parametrize("way", ["roomy", "pieces of 7 tokens", "a small cache"])
def test_a_pass_that_fails_scores_nobody_twice(tiny_llama: ModelUnderTest, way: str) -> None:
    """Forks begin in a pass that raises as it draws for one: the others have the scores of their prompt once."""
    params = SamplingParams(6, temperature=1.0, prompt_logprobs=TOP)
    members = [RequestState(n, random_ids(50, seed=4), params.with_seed(n)) for n in range(4)]
    members[2].params = params.with_seed("none")  # type: ignore[arg-type]
    first, *first.forks = members
    run_all(engine_for(tiny_llama, **WAYS[way]), [first])
    assert str(members.pop(2).error).startswith("the forward pass failed: TypeError")
    for member in members:
        expected = expected_scores(tiny_llama, member)
        assert_scores(member.prompt_logprobs.value, expected[:49], member.token_ids[1:50], TOP)


def test_which_of_equal_alternatives_are_told_hangs_on_nobody_else() -> None:
    """Logits of bfloat16 are often equal: a row's alternatives are the first of its own, whatever others ask for."""
    logits = torch.randn(60, 3000, generator=torch.Generator().manual_seed(1)).bfloat16()
    most, few = (token_logprobs(logits, [0] * 60, num_top) for num_top in (20, 5))
    assert (most.top_ids[:, :5] == few.top_ids).all()
