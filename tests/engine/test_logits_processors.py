"""Processors against those of transformers: random logits, random histories, every parameter, equal to 1e-5."""

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cbgen.engine.draws import TorchDraws, filtered_weights, plain_weights
from cbgen.engine.generated_text import TextCodec
from cbgen.engine.logits_processors import LogitsProcessors
from cbgen.engine.requests import RequestState
from cbgen.engine.sampler import NOTHING_LEFT, Sampler
from cbgen.engine.sampling_params import SamplingParams
from cbgen.kernels.cpu.sampling import RowDraws
from cbgen.models import tiny_random

VOCABULARY = 258
EOS = frozenset([5, 257])
TOKENIZER = tiny_random.build_tokenizer()  # a token for each byte
CODEC = TextCodec(TOKENIZER)
ROWS = 40


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def request_with(rng: random.Random, params: SamplingParams, words: str = "abcab ") -> RequestState:
    """Prompt and output of letters that come again and again, so that penalties and bad words have something to see."""
    request = RequestState(0, rng.choices(ids_of(words), k=rng.randint(1, 30)), params)
    request.token_ids += rng.choices(ids_of(words), k=rng.randint(0, 12))
    return request


class OutputPenalty(LogitsProcessor):
    """Presence and frequency penalties, which transformers has not, as OpenAI's documentation has them."""

    def __init__(self, params: SamplingParams, num_prompt_tokens: int):
        self.params, self.num_prompt_tokens = params, num_prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self.num_prompt_tokens :], minlength=scores.shape[-1])
        return scores - self.params.frequency_penalty * counts - self.params.presence_penalty * (counts > 0)


def theirs(params: SamplingParams, request: RequestState) -> list[LogitsProcessor]:
    """The processors of transformers for the same parameters, in the order of its generate."""
    found: list[LogitsProcessor] = []
    if params.logit_bias:
        found.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.logit_bias]))
    if params.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        found.append(OutputPenalty(params, request.num_prompt_tokens))
    if params.bad_words:
        words = [list(ids) for ids in CODEC.words_as_ids(params.bad_words)]
        found.append(NoBadWordsLogitsProcessor(words, eos_token_id=None))
    if params.min_tokens:
        ends = [*({} if params.ignore_eos else EOS), *params.stop_token_ids]
        found.append(MinNewTokensLengthLogitsProcessor(request.num_prompt_tokens, params.min_tokens, ends))
    return found


ONE_EACH: dict[str, Callable[[random.Random], dict[str, object]]] = {
    "logit_bias": lambda rng: {"logit_bias": {rng.randrange(VOCABULARY): rng.uniform(-100, 100) for _ in range(5)}},
    "repetition_penalty": lambda rng: {"repetition_penalty": rng.uniform(0.5, 2)},
    "presence_penalty": lambda rng: {"presence_penalty": rng.uniform(-2, 2)},
    "frequency_penalty": lambda rng: {"frequency_penalty": rng.uniform(-2, 2)},
    "bad_words": lambda rng: {"bad_words": rng.sample(["a", "ab", "cab", "b c", "bca"], k=2)},
    "min_tokens": lambda rng: {"min_tokens": rng.randint(1, 12)},
    "min_tokens and stop_token_ids": lambda rng: {"min_tokens": rng.randint(1, 12), "stop_token_ids": [3, 200]},
    "min_tokens without eos": lambda rng: {"min_tokens": 9, "stop_token_ids": [3], "ignore_eos": True},
}


def everything(rng: random.Random) -> dict[str, object]:
    return {name: value for draw in list(ONE_EACH.values())[:7] for name, value in draw(rng).items()}


@pytest.mark.parametrize("draw", [*ONE_EACH.values(), everything], ids=[*ONE_EACH, "everything"])
def test_processed_logits_are_those_of_transformers(draw: Callable[[random.Random], dict[str, object]]) -> None:
    """A batch of rows, each with values and a history of its own, beside rows that ask for nothing."""
    rng = random.Random(1)
    logits = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(2)) * 4
    params = [SamplingParams(20, **(draw(rng) if row % 4 else {})) for row in range(ROWS)]
    requests = [request_with(rng, one) for one in params]
    expected = logits.clone()
    for row, request in enumerate(requests):
        for processor in theirs(request.params, request):
            expected[row] = processor(torch.tensor([request.token_ids]), expected[row : row + 1].clone())[0]
    found = logits.clone()
    changing = [(row, request) for row, request in enumerate(requests) if request.needs_host]
    LogitsProcessors(EOS, CODEC, None).apply(found, changing)
    assert len(changing) == ROWS * 3 // 4
    assert not torch.equal(expected, logits)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_penalties_see_what_comes_later() -> None:
    """A history that grows token by token is the one that is made of all of them at once."""
    rng = random.Random(3)
    params = SamplingParams(200, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
    growing = RequestState(0, rng.choices(range(VOCABULARY), k=20), params)
    for _ in range(150):
        growing.token_ids.append(rng.randrange(VOCABULARY))
        fresh = RequestState(1, growing.token_ids[:20], params)
        fresh.token_ids += growing.token_ids[20:]
        logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(len(growing.token_ids)))
        one, other = logits.clone(), logits.clone()
        LogitsProcessors(EOS, None, None).apply(one, [(0, growing)])
        LogitsProcessors(EOS, None, None).apply(other, [(0, fresh)])
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.3},
        {"temperature": 1.9, "top_k": 7},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.1, "min_p": 0.06},
        {"temperature": 1.2, "top_k": 30, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 1.0, "top_k": 100, "min_p": 0.2},
        {"temperature": 1.0, "top_p": 0.99, "min_p": 0.001},
    ],
    ids=str,
)
def test_filters_are_those_of_transformers(params: dict[str, float]) -> None:
    """The probabilities that tokens are drawn by; the compiled kernel is held against these in test_draw_kernel."""
    logits = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(4)) * 3
    scores = TemperatureLogitsWarper(params["temperature"])(None, logits)
    if "top_k" in params:
        scores = TopKLogitsWarper(int(params["top_k"]))(None, scores)
    if "top_p" in params:
        scores = TopPLogitsWarper(params["top_p"])(None, scores)
    if "min_p" in params:
        scores = MinPLogitsWarper(params["min_p"])(None, scores)
    draws = RowDraws(
        np.full(ROWS, params["temperature"], np.float32),
        np.full(ROWS, params.get("top_k", 0), np.int64),
        np.full(ROWS, params.get("top_p", 1.0), np.float64),
        np.full(ROWS, params.get("min_p", 0.0), np.float32),
        np.zeros(ROWS),
    )
    weigh = filtered_weights if "top_k" in params or "top_p" in params else plain_weights
    weights = weigh(logits, TorchDraws.on(logits.device, draws))
    torch.testing.assert_close(weights / weights.sum(-1, keepdim=True), scores.softmax(-1), rtol=1e-5, atol=1e-5)


def test_rows_without_processors_keep_their_bits() -> None:
    """What the neighbours ask for changes nothing."""
    rng = random.Random(5)
    logits = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(6))
    plain = SamplingParams(20, temperature=0.9, top_p=0.9)
    requests = [request_with(rng, replace(plain, seed=row)) for row in range(ROWS)]
    alone = Sampler(EOS, CODEC).sample(logits.clone(), requests).token_ids
    for row in range(0, ROWS, 2):
        ids, params = requests[row].token_ids, requests[row].params
        prompt = ids[: requests[row].num_prompt_tokens]
        requests[row] = RequestState(row, prompt, replace(params, **everything(rng)))
        requests[row].token_ids += ids[len(prompt) :]
    beside = Sampler(EOS, CODEC).sample(logits.clone(), requests).token_ids
    assert beside[1::2] == alone[1::2]
    assert beside[::2] != alone[::2]


def test_nothing_left_to_choose_is_that_rows_error() -> None:
    """All tokens banned: the row has no token and a reason, its neighbour has one."""
    logits = torch.full((2, 2), 1.0)
    banned = SamplingParams(4, min_tokens=2, stop_token_ids=(0, 1))
    requests = [RequestState(0, [1], banned), RequestState(1, [1], SamplingParams(4))]
    sampled = Sampler().sample(logits, requests)
    assert sampled.token_ids == [None, 0]
    assert sampled.errors == {0: NOTHING_LEFT}


def test_log_probabilities_are_those_before_processors() -> None:
    """A biased row's token is chosen by the bias, and told with the model's own log-probability and rank."""
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(7))
    biased = SamplingParams(4, logit_bias={9: 100.0}, logprobs=3)
    requests = [RequestState(row, [1], params) for row, params in enumerate([SamplingParams(4), biased, biased])]
    sampled = Sampler().sample(logits.clone(), requests)
    expected = logits.log_softmax(-1)
    assert sampled.token_ids == [int(logits[0].argmax()), 9, 9]
    assert sampled.logprobs.keys() == {1, 2}
    for row, scores in sampled.logprobs.items():
        assert scores.logprobs[0] == pytest.approx(expected[row, 9].item(), abs=1e-5)
        assert scores.ranks[0] == (expected[row] > expected[row, 9]).sum() + 1
        assert scores.top_ids[0].tolist() == expected[row].topk(3).indices.tolist()
        np.testing.assert_allclose(scores.top_logprobs[0], expected[row].topk(3).values, atol=1e-5)
