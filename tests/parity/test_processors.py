"""Greedy rows with processors against `model.generate` with the same ones, each alone: law 9 where logits change."""

from typing import Any

import pytest
import torch
from engine_harness import engine_for, random_ids, run_all
from tiny_models import PARITY, ModelUnderTest
from transformers import PreTrainedTokenizerFast

from cbgen.engine.endings import Endings
from cbgen.engine.generated_text import TextCodec
from cbgen.engine.requests import RequestState
from cbgen.engine.sampler import Sampler
from cbgen.engine.sampling_params import SamplingParams
from cbgen.models import tiny_random

MODELS = ["llama", "mistral", "gemma3"]
WAYS = {
    "roomy": {},
    "pieces of 9 tokens": {"max_batch_tokens": 9},
    "a tiny cache": {"num_blocks": 12, "page_size": 8, "safety_margin": 0.0},
    "a tiny cache and a swap pool": {"num_blocks": 12, "page_size": 8, "safety_margin": 0.0, "cpu_offload_space": 0.01},
}
TOKENIZER: PreTrainedTokenizerFast = tiny_random.build_tokenizer()
CODEC = TextCodec(TOKENIZER)
# Ours, and what generate is given for the same.
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    ({"repetition_penalty": 0.7}, {"repetition_penalty": 0.7}),
    ({"min_tokens": 14}, {"min_new_tokens": 14}),
    ({"logit_bias": {9: 6.0, 40: -9.0}}, {"sequence_bias": [[[9], 6.0], [[40], -9.0]]}),
    (
        {"bad_words": ["a", "bc"], "repetition_penalty": 1.2},
        {"bad_words_ids": [list(w) for w in CODEC.words_as_ids(("a", "bc"))], "repetition_penalty": 1.2},
    ),
    ({"stop_token_ids": [11, 200, 77]}, {"eos_token_id": [1, 11, 77, 200]}),
]


def requests() -> list[RequestState]:
    return [
        RequestState(number, random_ids(5 + 11 * (number % 7), seed=number, vocab_size=256), params)
        for number, params in enumerate(SamplingParams(20, **ours) for ours, _ in CASES * 3)
    ]


@torch.inference_mode()
def expected(under_test: ModelUnderTest, request: RequestState, options: dict[str, Any]) -> list[int]:
    prompt = torch.tensor([request.token_ids[: request.num_prompt_tokens]])
    given = {"eos_token_id": [1], "pad_token_id": 2, "do_sample": False, "max_new_tokens": 20, **options}
    output = under_test.reference.generate(prompt, attention_mask=torch.ones_like(prompt), **given)
    return output[0, request.num_prompt_tokens :].tolist()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_processed_rows_are_those_of_generate(request: pytest.FixtureRequest, name: str, way: str) -> None:
    """All cases side by side in one batch, some of them cut up, moved out and computed again."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    engine = engine_for(under_test, **WAYS[way])
    sampler = Sampler(under_test.eos_token_ids, CODEC)
    engine.manager.passes.sampler = sampler
    engine.manager._endings = Endings(under_test.eos_token_ids, CODEC, sampler.processors.is_complete)
    rows = run_all(engine, requests())
    plain = [row.generated_ids for row in rows[:: len(CASES)]]
    for number, row in enumerate(rows):
        assert row.error is None
        assert row.generated_ids == expected(under_test, row, CASES[number % len(CASES)][1])
        PARITY[f"{name} with processors: equal throughout"] += 1
    assert any(row.generated_ids not in plain for row in rows)
    if "tiny cache" in way and name == "llama":
        assert engine.manager.metrics.offloads > 0
