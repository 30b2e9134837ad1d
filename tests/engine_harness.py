"""Runs requests through a real engine with the laws of the cache asserted after every step."""

import random
from dataclasses import dataclass

import torch
from tiny_models import ModelUnderTest

from cbgen.config import ContinuousBatchingConfig
from cbgen.engine.build import Engine, build_engine
from cbgen.engine.manager import ListSource
from cbgen.engine.requests import RequestState, SamplingParams

CPU = torch.device("cpu")
FREE_BYTES = 4 << 30


@dataclass(frozen=True)
class Prompt:
    token_ids: list[int]
    max_tokens: int


def mixed_prompts(count: int, vocab_size: int, longest: int = 160, most: int = 24, seed: int = 0) -> list[Prompt]:
    """Prompts of 1 to `longest` random tokens that ask for 1 to `most`; one of a single token is always there."""
    rng = random.Random(seed)
    lengths = [1, longest, *(rng.randint(1, longest) for _ in range(count - 2))]
    return [Prompt([rng.randrange(3, vocab_size) for _ in range(n)], rng.randint(1, most)) for n in lengths]


def engine_for(under_test: ModelUnderTest, **options: object) -> Engine:
    config = ContinuousBatchingConfig(**{"page_size": 16, "num_blocks": 512, **options}).resolve("cpu")
    return build_engine(
        under_test.model, under_test.shape, torch.float32, config, under_test.eos_token_ids, CPU, FREE_BYTES
    )


def greedy_requests(prompts: list[Prompt], first_id: int = 0) -> list[RequestState]:
    return [
        RequestState(first_id + number, list(prompt.token_ids), SamplingParams(prompt.max_tokens), tag=number)
        for number, prompt in enumerate(prompts)
    ]


def run_all(engine: Engine, requests: list[RequestState]) -> list[RequestState]:
    """Every request, finished, in the order given. After each step nothing is lost and nobody holds too much."""
    manager, source = engine.manager, ListSource(requests)
    finished: dict[int, RequestState] = {}
    while manager.scheduler.has_work or not source.exhausted:
        for request in manager.pull(source):
            finished[request.request_id] = request
        if manager.scheduler.has_work:
            for request in manager.step():
                assert request.request_id not in finished, "a request finished twice"
                finished[request.request_id] = request
        manager.check_integrity()
        _check_holdings(engine)
    assert manager.cache.free_share == 1.0, "a finished engine holds no block"
    return [finished[request.request_id] for request in requests]


def _check_holdings(engine: Engine) -> None:
    """Active requests hold exactly the blocks of their computed tokens."""
    manager = engine.manager
    for request in manager.scheduler.active:
        for allocator in manager.cache.allocators:
            needed = allocator.group.num_blocks_for(request.num_computed_tokens)
            assert allocator.num_owned_blocks(request.request_id) == needed, request
