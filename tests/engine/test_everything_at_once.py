"""Two hundred rows with two hundred sets of parameters in one batch: each as it is by itself."""

import json
import random
from typing import Any

import pytest
import torch
from engine_harness import Watch
from tiny_models import ModelUnderTest

import cbgen.engine.grammars
from cbgen.config import ContinuousBatchingConfig
from cbgen.device import free_memory_bytes
from cbgen.engine.build import Engine, build_engine
from cbgen.engine.grammars import Grammars
from cbgen.engine.requests import FinishReason, RequestState
from cbgen.engine.sampling_params import SamplingParams
from cbgen.engine.sources import ListSource
from cbgen.models import tiny_random
from cbgen.models.loading import describe, load

CPU = torch.device("cpu")
NUM_ROWS = 200
NAME = "tiny-random"
DESCRIPTION = describe(NAME, None, "float32", CPU)
CONFIG = {"page_size": 16, "num_blocks": 2048, "deterministic": True}
SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["a"]},
    {"type": "array", "items": {"enum": ["x", "yy", 3]}, "maxItems": 4},
    {"type": "string", "maxLength": 9},
]
CHOICES: dict[str, Any] = {
    "temperature": lambda rng: rng.choice([0.0, 0.3, 0.9, 1.6]),
    "top_p": lambda rng: rng.choice([1.0, 0.4, 0.9, 0.99]),
    "top_k": lambda rng: rng.choice([0, 1, 5, 60]),
    "min_p": lambda rng: rng.choice([0.0, 0.02, 0.3]),
    "repetition_penalty": lambda rng: rng.choice([1.0, 0.8, 1.2, 1.7]),
    "presence_penalty": lambda rng: rng.choice([0.0, 0.6, -1.0]),
    "frequency_penalty": lambda rng: rng.choice([0.0, 0.3, -0.2]),
    "logit_bias": lambda rng: rng.choice([{}, {65: 9.0, 66: -100.0}, {32: 9.0}]),
    "bad_words": lambda rng: rng.choice([[], ["a"], ["ab", "\n"]]),
    "stop": lambda rng: rng.choice([[], ["A", "e"], [" ", "q\n"]]),
    "stop_token_ids": lambda rng: rng.choice([[], [10, 20]]),
    "include_stop": lambda rng: rng.random() < 0.3,
    "min_tokens": lambda rng: rng.choice([0, 3, 7]),
    "ignore_eos": lambda rng: rng.random() < 0.5,
    "logprobs": lambda rng: rng.choice([None, 0, 4]),
    "prompt_logprobs": lambda rng: rng.choice([None, None, None, 2]),
    "max_tokens": lambda rng: rng.randint(8, 24),
}
FORMS = [
    lambda rng: {"json_schema": rng.choice(SCHEMAS)},
    lambda rng: {"regex": rng.choice(["[a-c]{2,9}", "(yes|no)+x", "[0-9]+\\.[0-9]{2}"])},
    lambda rng: {"choice": rng.choice([["yes", "no"], ["alpha", "alphabet", "beta"]])},
    lambda rng: {"grammar": 'start: "(" start ")" | "x"'},
]


def parameters(number: int) -> SamplingParams:
    """One in five rows has a form of its output, which leaves no place for stop texts and the like."""
    rng = random.Random(number)
    values = {name: draw(rng) for name, draw in CHOICES.items()}
    if number % 5 == 0:
        kept = {name: values[name] for name in ("temperature", "top_p", "repetition_penalty", "logprobs")}
        values = {**kept, "max_tokens": 40, **FORMS[number // 5 % len(FORMS)](rng)}
    return SamplingParams(seed=number, **values)


def requests() -> list[RequestState]:
    rng = random.Random(0)
    prefix = rng.choices(range(256), k=48)
    prompts = [rng.choices(range(256), k=rng.randint(1, 60)) for _ in range(NUM_ROWS)]
    prompts = [[*prefix, *ids] if number % 3 == 0 else ids for number, ids in enumerate(prompts)]
    return [RequestState(number, list(ids), parameters(number)) for number, ids in enumerate(prompts)]


@pytest.fixture(scope="module")
def tiny_random_model() -> ModelUnderTest:
    model, shape = load(DESCRIPTION, CPU)
    return ModelUnderTest(NAME, model, tiny_random.build_model(torch.float32), shape, frozenset([257]))


def engine_of(model: ModelUnderTest, **options: Any) -> Engine:
    tokenizer = DESCRIPTION.tokenizer
    return build_engine(
        model.model,
        model.shape,
        torch.float32,
        ContinuousBatchingConfig(**CONFIG | options).resolve("cpu"),
        DESCRIPTION.eos_token_ids,
        CPU,
        free_memory_bytes(CPU),
        tokenizer=tokenizer,
        grammars=Grammars(tokenizer, DESCRIPTION.vocab_size, DESCRIPTION.eos_token_ids),
    )


def outcome(request: RequestState) -> tuple[Any, ...]:
    """All that becomes of a row, log-probabilities by their bits."""
    scores = [
        buffer and [array.tobytes() for array in vars(buffer.value).values()]
        for buffer in (request.logprobs, request.prompt_logprobs)
    ]
    return request.generated_ids, request.finish_reason, request.stop_reason, request.error, scores


def run(engine: Engine, wanted: list[RequestState]) -> list[tuple[Any, ...]]:
    watch, source = Watch(engine, wanted), ListSource(wanted)
    while engine.manager.scheduler.has_work or not source.exhausted:
        ended = engine.manager.pull(source)
        watch.check_step([*ended, *(engine.manager.step() if engine.manager.scheduler.has_work else [])])
    watch.check_end()
    return [outcome(request) for request in wanted]


WAYS = {
    "two hundred at once": {"max_requests_per_batch": 200, "max_batch_tokens": 512},
    "seven at a time": {"max_requests_per_batch": 7},
    "pieces of 13 tokens": {"max_batch_tokens": 13},
    "a small cache": {"num_blocks": 24, "safety_margin": 0.0},
    "a small cache and a swap pool": {"num_blocks": 24, "safety_margin": 0.0, "cpu_offload_space": 0.01},
    "prompts first": {"scheduler_type": "prefill_first"},
}


@pytest.fixture(scope="module")
def alone(tiny_random_model: ModelUnderTest) -> list[tuple[Any, ...]]:
    engine = engine_of(tiny_random_model, max_requests_per_batch=1)
    return [outcome_ for request in requests() for outcome_ in run(engine, [request])]


@pytest.mark.parametrize("way", WAYS)
def test_each_row_is_as_it_is_alone(tiny_random_model: ModelUnderTest, alone: list[tuple[Any, ...]], way: str) -> None:
    """Tokens, endings and log-probabilities to the bit, in every way of serving them together."""
    together = run(engine_of(tiny_random_model, **WAYS[way]), requests())
    different = [number for number, pair in enumerate(zip(together, alone, strict=True)) if pair[0] != pair[1]]
    assert not different


def test_the_rows_are_worth_the_name(alone: list[tuple[Any, ...]]) -> None:
    """Two hundred different sets, ended in every way, and forms kept."""
    rows = requests()
    assert len({request.params for request in rows}) == NUM_ROWS
    reasons = [reason for _, reason, *_ in alone]
    assert min(reasons.count(FinishReason.STOP), reasons.count(FinishReason.LENGTH)) > 20
    assert {type(stop) for _, _, stop, *_ in alone} == {type(None), str, int}
    decode = DESCRIPTION.tokenizer.decode
    for (generated, reason, *_), request in zip(alone, rows, strict=True):
        if request.params.choice and reason is FinishReason.STOP:
            assert decode(generated, skip_special_tokens=True) in request.params.choice
        if request.params.json_schema and reason is FinishReason.STOP:
            json.loads(decode(generated, skip_special_tokens=True))


def test_a_form_that_breaks_on_the_way_is_an_error(
    tiny_random_model: ModelUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many states for the library: no end of the sequence passes for the end of the form."""
    monkeypatch.setattr(cbgen.engine.grammars, "MOST_STATES", 60)
    params = SamplingParams(60, temperature=1.0, regex="([a-z]x|[b-y]{3}z|q[0-9]{2,7}){20}")
    wanted = [RequestState(number, [1, 2, 3], params.with_seed(number)) for number in range(6)]
    wanted.append(RequestState(6, [4, 5], SamplingParams(5, ignore_eos=True)))
    *forms, free = run(engine_of(tiny_random_model), wanted)
    assert free[1] is FinishReason.LENGTH
    for _, reason, _, error, _ in forms:
        assert reason is FinishReason.ERROR
        assert error is not None and error.startswith("regex: ")


def test_a_form_that_cannot_be_had_ends_its_row_alone(tiny_random_model: ModelUnderTest) -> None:
    """Whoever made the requests should have asked before; the engine goes on all the same."""
    wanted = [RequestState(0, [1], SamplingParams(5, regex="(a")), RequestState(1, [1], SamplingParams(5, regex="ab"))]
    bad, good = run(engine_of(tiny_random_model), wanted)
    assert bad[1] is FinishReason.ERROR and bad[3].startswith("regex cannot be followed")
    assert DESCRIPTION.tokenizer.decode(good[0]) == "ab"


def test_min_tokens_puts_off_the_end_of_a_form(tiny_random_model: ModelUnderTest) -> None:
    """As long as the form leaves something else; complete, it ends all the same."""
    open_end = [SamplingParams(30, temperature=1.0, seed=n, regex="[ab]*", min_tokens=9) for n in range(8)]
    wanted = [RequestState(n, [1, 2], params) for n, params in enumerate(open_end)]
    wanted.append(RequestState(8, [1, 2], SamplingParams(30, regex="[ab]{3}", min_tokens=9)))
    *long, short = run(engine_of(tiny_random_model), wanted)
    assert all(error is None and len(generated) >= 9 for generated, _, _, error, _ in long)
    assert (len(short[0]), short[1]) == (3, FinishReason.STOP)
