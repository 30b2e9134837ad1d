"""Law 9: greedy float32 tokens equal those of `model.generate` for one prompt alone, however they are batched."""

import json
from pathlib import Path

import pytest
from engine_harness import Prompt, engine_for, greedy_requests, mixed_prompts, run_all
from tiny_models import ModelUnderTest
from transformers import AutoTokenizer

from cbgen.models import gguf, loading

SAMPLES = Path(__file__).parents[2] / "sample_data"
MATRIX = [(tokens, requests) for tokens in (16, 64, 2048) for requests in (1, 3, 64)]


def check(under_test: ModelUnderTest, prompts: list[Prompt], **options: object) -> None:
    finished = run_all(engine_for(under_test, **options), greedy_requests(prompts))
    for prompt, request in zip(prompts, finished, strict=True):
        assert request.error is None
        under_test.assert_parity(prompt.token_ids, prompt.max_tokens, request.generated_ids)


@pytest.mark.parametrize(("max_batch_tokens", "max_requests_per_batch"), MATRIX)
def test_tiny_models(tiny: ModelUnderTest, max_batch_tokens: int, max_requests_per_batch: int) -> None:
    """40 prompts of 1 to 160 tokens, chunked or whole, alone or together."""
    prompts = mixed_prompts(40, tiny.shape.vocab_size)
    check(tiny, prompts, max_batch_tokens=max_batch_tokens, max_requests_per_batch=max_requests_per_batch)


@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_page_sizes(tiny_llama: ModelUnderTest, page_size: int) -> None:
    """The size of a page is nobody's business but the cache's."""
    check(tiny_llama, mixed_prompts(12, 320, seed=1), page_size=page_size, num_blocks=4096 // page_size)


@pytest.mark.parametrize("safety_margin", [0.0, 0.15])
@pytest.mark.parametrize("num_blocks", [12, 20])
def test_outgrown_cache(tiny: ModelUnderTest, num_blocks: int, safety_margin: float) -> None:
    """Requests that outgrow the cache are soft-reset, and come out as if they had not been."""
    prompts = [Prompt(prompt.token_ids, 40) for prompt in mixed_prompts(16, tiny.shape.vocab_size, longest=90, seed=2)]
    engine = engine_for(tiny, num_blocks=num_blocks, safety_margin=safety_margin)
    finished = run_all(engine, greedy_requests(prompts))
    for prompt, request in zip(prompts, finished, strict=True):
        tiny.assert_parity(prompt.token_ids, prompt.max_tokens, request.generated_ids)
    metrics = engine.manager.metrics
    assert metrics.soft_resets == metrics.offloads == sum(request.num_soft_resets for request in finished) > 0
    assert metrics.recomputed_tokens > 0
    assert metrics.computed_prompt_tokens == sum(len(prompt.token_ids) for prompt in prompts)


def smollm2_prompts(count: int, most: int) -> list[Prompt]:
    """Real prompts of mixed lengths and languages, as the model's tokenizer has them."""
    folder = gguf.converted_folder(gguf.smollm2_path(), loading.DTYPES["float32"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [
        json.loads(line)["prompt"]
        for name in ("languages.jsonl", "code.jsonl")
        for line in (SAMPLES / name).read_text(encoding="utf-8").splitlines()
    ]
    return [Prompt(ids, 1 + number * 5 % most) for number, ids in enumerate(tokenizer(texts)["input_ids"][:count])]


@pytest.mark.parametrize(("max_batch_tokens", "max_requests_per_batch"), [(16, 3), (64, 64), (2048, 3)])
def test_smollm2(smollm2: ModelUnderTest, max_batch_tokens: int, max_requests_per_batch: int) -> None:
    """The real model on a few real prompts."""
    prompts = smollm2_prompts(10, most=8)
    check(smollm2, prompts, max_batch_tokens=max_batch_tokens, max_requests_per_batch=max_requests_per_batch)


@pytest.mark.long
@pytest.mark.parametrize(("max_batch_tokens", "max_requests_per_batch"), MATRIX)
def test_smollm2_whole_matrix(smollm2: ModelUnderTest, max_batch_tokens: int, max_requests_per_batch: int) -> None:
    """The real model on 40 real prompts, the whole matrix."""
    prompts = smollm2_prompts(40, most=24)
    assert len(prompts) == 40
    check(smollm2, prompts, max_batch_tokens=max_batch_tokens, max_requests_per_batch=max_requests_per_batch)
