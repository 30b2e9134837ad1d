"""What a step costs besides the model: the Python time between two forward passes of requests that all decode.

    python benchmarks/step_time.py [--requests 256] [--prompt-len 512] [--steps 200] [--page-size 256]
        [--layers full|sliding|hybrid] [--depth 0|1|2] [--repeats 5] [--profile]

Planning, layout and applying are the engine's own, for the shape of a model of 8B; the forward pass and the sampler are
stubs, and there are no weights and no KV. Prints microseconds per step of each phase of StepClock: the median of
several engines, each filled anew, so that all of them see the same contexts.
"""

import argparse
import cProfile
import math
import pstats
import random
import statistics
from contextlib import nullcontext
from typing import Any

import torch

from cbgen.cache.layout import CacheLayout
from cbgen.cache.paged_cache import PagedCache
from cbgen.cache.pool import NUM_RESERVED_CHUNKS
from cbgen.config import (
    DEFAULT_MAX_BATCH_TOKENS,
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    ContinuousBatchingConfig,
    ModelShape,
)
from cbgen.engine.async_batching import BufferPair, StagedPasses
from cbgen.engine.endings import Endings
from cbgen.engine.execution import padding_of
from cbgen.engine.input_outputs import BatchInputs, InputBuffers
from cbgen.engine.manager import Manager
from cbgen.engine.passes import DirectPasses
from cbgen.engine.requests import RequestState, RequestStatus
from cbgen.engine.sampler import Sampled
from cbgen.engine.sampling_params import SamplingParams
from cbgen.engine.scheduler import SCHEDULERS
from cbgen.engine.sources import ListSource
from cbgen.engine.step_log import PHASES
from cbgen.streams import InOrderStreams

CPU = torch.device("cpu")
NUM_LAYERS, VOCABULARY, FEW_TOKENS, WINDOW = 32, 128_256, 4, 512
# As in models that have both types of attention: one layer of six sees everything.
LAYERS = {
    "full": (FULL_ATTENTION,) * NUM_LAYERS,
    "sliding": (SLIDING_ATTENTION,) * NUM_LAYERS,
    "hybrid": tuple(FULL_ATTENTION if layer % 6 == 5 else SLIDING_ATTENTION for layer in range(NUM_LAYERS)),
}
WARM_UP_STEPS = 10
OWN_PHASES = tuple(phase for phase in PHASES if phase != "forward")
PROFILE_LINES = 30


class NoModel:
    """In the place of the runner: logits of few tokens, since to look for the best of them is the device's work."""

    def forward(self, inputs: BatchInputs) -> torch.Tensor:
        return torch.zeros(len(inputs.logits_indices), FEW_TOKENS)

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        assert not pairs, "nobody forks here"


class AnyToken:
    """In the place of the sampler: what the device chose, or any token."""

    def sample(self, logits: torch.Tensor, requests: list[RequestState]) -> Sampled:
        return Sampled([0] * len(requests))

    def described(
        self,
        logits: torch.Tensor,
        rows: list[int],
        requests: list[RequestState],
        token_ids: list[int],
        is_finite: list[bool],
    ) -> Sampled:
        return Sampled([token_id if ok else None for token_id, ok in zip(token_ids, is_finite, strict=True)])


def build(given: argparse.Namespace, max_tokens: int) -> Manager:
    """An engine with room for every request at its full length, and half as much again: nobody is held back."""
    shape = ModelShape(
        layer_types=LAYERS[given.layers],
        sliding_window=None if given.layers == "full" else WINDOW,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        hidden_size=4096,
        vocab_size=VOCABULARY,
        max_model_len=given.prompt_len + max_tokens,
        dtype_bytes=2,
    )
    config = ContinuousBatchingConfig(
        page_size=given.page_size,
        max_batch_tokens=max(DEFAULT_MAX_BATCH_TOKENS["cuda"], 2 * given.requests),
        max_requests_per_batch=given.requests,
    ).resolve("cuda")
    layout = CacheLayout.of(shape, config.page_size)
    num_blocks = 3 * given.requests * math.ceil(shape.max_model_len / config.page_size) // 2
    cache = PagedCache(layout, layout.chunks_for_blocks(num_blocks) + NUM_RESERVED_CHUNKS, config.allow_block_sharing)
    runner: Any = NoModel()
    sampler: Any = AnyToken()
    streams = InOrderStreams(CPU)
    sizes = (config.max_batch_tokens, config.max_requests_per_batch, layout, shape.max_model_len, streams)
    passes: Any = DirectPasses(InputBuffers(*sizes), runner, sampler)
    if given.depth:
        inputs = [InputBuffers(*sizes, padding_of(config)) for _ in range(given.depth)]
        pairs = [BufferPair(one, FEW_TOKENS, torch.bfloat16, streams) for one in inputs]
        passes = StagedPasses(pairs, runner, sampler, streams, None)
    return Manager(
        cache=cache,
        scheduler=SCHEDULERS[config.scheduler_type](cache, config),
        passes=passes,
        swap_pool=None,
        endings=Endings(frozenset(), None, lambda _: False),
        max_model_len=shape.max_model_len,
        max_waiting=2 * config.max_requests_per_batch,
        balance_tail=False,
    )


def requests_of(given: argparse.Namespace, max_tokens: int) -> list[RequestState]:
    """Prompts that have nothing in common."""
    rng = random.Random(0)
    params = SamplingParams(max_tokens, ignore_eos=True)
    return [
        RequestState(number, rng.choices(range(3, VOCABULARY), k=given.prompt_len), params)
        for number in range(given.requests)
    ]


def measure(given: argparse.Namespace, profile: cProfile.Profile | None = None) -> dict[str, float]:
    """Microseconds per step of each phase, of one engine."""
    # The first ones decode while the last ones' prompts are computed, a token of each in a step at the least.
    max_tokens = given.prompt_len + WARM_UP_STEPS + given.steps + 1
    manager = build(given, max_tokens)
    source = ListSource(requests_of(given, max_tokens))
    manager.pull(source)
    while any(request.status is not RequestStatus.DECODING for request in manager.scheduler.unfinished):
        manager.step()
    for _ in range(WARM_UP_STEPS):
        manager.pull(source)
        manager.step()
    before = {phase: manager.log.total(phase) for phase in OWN_PHASES}
    with profile or nullcontext():
        for _ in range(given.steps):
            manager.pull(source)
            manager.step()
    assert manager.scheduler.num_active == given.requests, "somebody ended or left while steps were measured"
    return {phase: (manager.log.total(phase) - before[phase]) / given.steps * 1e6 for phase in OWN_PHASES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--page-size", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", choices=LAYERS, default="full")
    parser.add_argument(
        "--depth", type=int, choices=(0, 1, 2), default=0, help="passes in flight as on a GPU; 0: CPU's"
    )
    parser.add_argument("--profile", action="store_true", help="also where the time of one more engine goes")
    given = parser.parse_args()
    runs = [measure(given) for _ in range(given.repeats)]
    for phase in OWN_PHASES:
        print(f"{phase:<10}{statistics.median(run[phase] for run in runs):>10,.0f} us/step")
    print(f"{'total':<10}{statistics.median(sum(run.values()) for run in runs):>10,.0f} us/step, no forward pass")
    if given.profile:
        profile = cProfile.Profile()
        measure(given, profile)
        pstats.Stats(profile).sort_stats("tottime").print_stats(PROFILE_LINES)


if __name__ == "__main__":
    main()
