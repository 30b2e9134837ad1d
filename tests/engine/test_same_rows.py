"""The same rows, served in another way, give the same tokens: greedy and sampled ones side by side."""

import random

import pytest
from engine_harness import assert_parity, engine_for, mixed_prompts, run_all
from tiny_models import ModelUnderTest

from cbgen.engine.requests import RequestState
from cbgen.engine.sampling_params import SamplingParams

MODELS = ["llama", "mistral", "gemma3"]
PROMPTS = mixed_prompts(8, 320, longest=50, most=10, seed=5)
WAYS = {
    "one in a batch": {"max_requests_per_batch": 1},
    "three in a batch": {"max_requests_per_batch": 3},
    "pieces of 16 tokens": {"max_batch_tokens": 16},
    "pieces of 5 tokens": {"max_batch_tokens": 5, "max_requests_per_batch": 5},
    "prompts first": {"max_batch_tokens": 16, "scheduler_type": "prefill_first"},
    "pages of 5 tokens": {"page_size": 5},
    "pages of 64 tokens": {"page_size": 64},
    "nothing shared": {"allow_block_sharing": False},
    "a small cache": {"num_blocks": 6, "safety_margin": 0.0},
    "a small cache and a margin": {"num_blocks": 8, "safety_margin": 0.5, "max_batch_tokens": 16},
    "a small cache and a swap pool": {"num_blocks": 6, "safety_margin": 0.0, "cpu_offload_space": 0.01},
}

LONG = ("three in a batch", "pieces of 16 tokens", "pages of 64 tokens")


def params_of(number: int) -> SamplingParams:
    """Greedy, plain, top-k, top-p and both, with seeds of their own."""
    options = [{}, {}, {"temperature": 0.8}, {"temperature": 0.9, "top_k": 5}, {"temperature": 1.0, "top_p": 0.8}]
    return SamplingParams(PROMPTS[number].max_tokens, seed=number * 1000 + 1, **options[number % 5])


def tokens_of(under_test: ModelUnderTest, order: list[int], **options: object) -> list[list[int]]:
    """By row, whatever the order in which they are served."""
    requests = [
        RequestState(place, list(PROMPTS[number].token_ids), params_of(number)) for place, number in enumerate(order)
    ]
    finished = dict(zip(order, run_all(engine_for(under_test, **options), requests), strict=True))
    greedy = [number for number in order if params_of(number).temperature == 0]
    assert_parity(under_test, [PROMPTS[number] for number in greedy], [finished[number] for number in greedy])
    return [finished[number].generated_ids for number in range(len(PROMPTS))]


_expected: dict[str, list[list[int]]] = {}


def expected(under_test: ModelUnderTest) -> list[list[int]]:
    """The tokens of all rows at once in a roomy engine."""
    if under_test.name not in _expected:
        _expected[under_test.name] = tokens_of(under_test, list(range(len(PROMPTS))))
    return _expected[under_test.name]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.long) if way in LONG else way for way in WAYS])
def test_another_batch_size_or_budget(request: pytest.FixtureRequest, name: str, way: str) -> None:
    """Same rows with another batch size, order or budget: same tokens."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    order = list(range(len(PROMPTS)))
    assert tokens_of(under_test, order, **WAYS[way]) == expected(under_test)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", [1, 2])
def test_another_order(request: pytest.FixtureRequest, name: str, seed: int) -> None:
    """Who comes first, and in whose company, changes nothing for a row."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    order = random.Random(seed).sample(range(len(PROMPTS)), len(PROMPTS))
    for options in ({}, {"num_blocks": 6, "safety_margin": 0.0, "max_requests_per_batch": 4}):
        assert tokens_of(under_test, order, **options) == expected(under_test)
