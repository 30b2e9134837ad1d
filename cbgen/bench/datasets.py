"""The requests of a benchmark, by the names and meanings that `vllm bench throughput` has for them."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from cbgen.bench.dataset_files import Made, custom, sharegpt
from cbgen.bench.dataset_options import (
    CUSTOM,
    DEFAULT_INPUT_LEN,
    DEFAULT_NUM_PREFIXES,
    DEFAULT_NUM_PROMPTS,
    DEFAULT_OUTPUT_LEN,
    DEFAULT_PREFIX_LEN,
    PREFIX_REPETITION,
    RANDOM,
    SHAREGPT,
    BenchRequest,
    DatasetOptions,
)
from cbgen.errors import UsageError
from cbgen.models.loading import ModelDescription

# The warm-up: so many requests, tokens of prompt and tokens of output at most.
WARM_UP_REQUESTS, WARM_UP_PROMPT, WARM_UP_OUTPUT = 4, 32, 16
WARM_UP_SEED = "warm-up"  # a text, so that no --seed is the same


@dataclass(frozen=True)
class Workload:
    """Requests in order. `warnings`: what was asked for, or stands in a file, and is not done.

    warm_up: a few small requests of the same kind, of other tokens: an engine that keeps what it computed has nothing
    of the timed ones.
    """

    name: str
    requests: list[BenchRequest]
    warm_up: list[BenchRequest]
    warnings: tuple[str, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """A prompt counts once, however many samples it has."""
        return sum(len(request.prompt_ids) for request in self.requests)

    @property
    def output_tokens(self) -> int:
        """Of all samples."""
        return sum(request.n * request.max_tokens for request in self.requests)


def make_workload(options: DatasetOptions, model: ModelDescription) -> Workload:
    """The same requests every time for the same options. Raises UsageError for a workload that cannot be."""
    options.check()
    if not options.is_of_file:
        _check_lengths(options, model.max_model_len)
    requests, warnings = _MAKERS[options.kind](options, model)
    for number, request in enumerate(requests, start=1):
        prompt, output = len(request.prompt_ids), request.max_tokens
        if prompt + output > model.max_model_len:
            raise UsageError(
                f"--dataset-name {options.kind}: request {number} has a prompt of {prompt} tokens and asks for "
                f"{output}, which together exceed the context of {model.max_model_len}"
            )
    requests = [replace(request, n=options.n) for request in requests]
    if len(requests) < (options.num_prompts or 0):
        warnings.append(f"--num-prompts {options.num_prompts}: there are {len(requests)}, which are used")
    name = f"{options.kind} {options.dataset_path}" if options.is_of_file else options.kind
    return Workload(name, requests, _warm_up(requests, model), (*options.ignored, *warnings))


def _check_lengths(options: DatasetOptions, context: int) -> None:
    """Raises UsageError where generated requests might not fit, before any is made: lengths can be of any size."""
    ratio = (options.random_range_ratio or 0.0) if options.kind == RANDOM else 0.0
    asked = (options.input_len or DEFAULT_INPUT_LEN, options.output_len or DEFAULT_OUTPUT_LEN)
    own, output = (length if length > context else _longest(length, ratio) for length in asked)
    prompt = _or(options.prefix_len, DEFAULT_PREFIX_LEN[options.kind]) + own
    if prompt + output > context:
        most = "up to " if ratio else ""
        raise UsageError(
            f"--dataset-name {options.kind}: prompts of {most}{prompt} tokens that ask for {most}{output} exceed the "
            f"context of {context}"
        )


def _longest(mean: int, ratio: float) -> int:
    return math.ceil(mean * (1 + ratio))


def _warm_up(requests: list[BenchRequest], model: ModelDescription) -> list[BenchRequest]:
    """As long as the first requests, cut down. None begins with a token that a request begins with, if others are
    left."""
    plain = _plain_ids(model)
    taken = {request.prompt_ids[0] for request in requests}
    firsts = [token_id for token_id in plain if token_id not in taken] or plain
    rng = random.Random(WARM_UP_SEED)
    warm_up = []
    for request in requests[:WARM_UP_REQUESTS]:
        length = min(len(request.prompt_ids), WARM_UP_PROMPT)
        prompt = [rng.choice(firsts), *rng.choices(plain, k=length - 1)]
        warm_up.append(BenchRequest(prompt, min(request.max_tokens, WARM_UP_OUTPUT), request.n))
    return warm_up


def _plain_ids(model: ModelDescription) -> list[int]:
    """All tokens that are not special."""
    special = set(model.tokenizer.all_special_ids)
    return [token_id for token_id in range(model.vocab_size) if token_id not in special]


def _random(options: DatasetOptions, model: ModelDescription) -> Made:
    """Random prompts behind one random prefix, all lengths within the range; the prefix has its length."""
    plain, rng = _plain_ids(model), random.Random(options.seed)
    ratio = options.random_range_ratio or 0.0
    prefix = rng.choices(plain, k=_or(options.prefix_len, DEFAULT_PREFIX_LEN[RANDOM]))

    def length(mean: int) -> int:
        return rng.randint(max(1, math.floor(mean * (1 - ratio))), _longest(mean, ratio))

    requests = []
    for _ in range(options.num_prompts or DEFAULT_NUM_PROMPTS):
        own = rng.choices(plain, k=length(options.input_len or DEFAULT_INPUT_LEN))
        requests.append(BenchRequest(prefix + own, length(options.output_len or DEFAULT_OUTPUT_LEN)))
    return requests, []


def _prefix_repetition(options: DatasetOptions, model: ModelDescription) -> Made:
    """Several random prefixes, each before as many prompts as the others or one more; the prompts in random order."""
    plain, rng = _plain_ids(model), random.Random(options.seed)
    num_prompts = options.num_prompts or DEFAULT_NUM_PROMPTS
    num_prefixes = min(options.num_prefixes or DEFAULT_NUM_PREFIXES, num_prompts)
    prefix_len = _or(options.prefix_len, DEFAULT_PREFIX_LEN[PREFIX_REPETITION])
    prefixes = [rng.choices(plain, k=prefix_len) for _ in range(num_prefixes)]
    input_len = options.input_len or DEFAULT_INPUT_LEN
    prompts = [prefixes[number % num_prefixes] + rng.choices(plain, k=input_len) for number in range(num_prompts)]
    rng.shuffle(prompts)
    return [BenchRequest(prompt, options.output_len or DEFAULT_OUTPUT_LEN) for prompt in prompts], []


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


_MAKERS: dict[str, Callable[[DatasetOptions, ModelDescription], Made]] = {
    RANDOM: _random,
    PREFIX_REPETITION: _prefix_repetition,
    SHAREGPT: sharegpt,
    CUSTOM: custom,
}
