"""Figures of the memory system: a job that outgrows its cache, a common system prompt, and what planning costs.

python benchmarks/memory.py            all three; the first needs the model smollm2, some three minutes
python benchmarks/memory.py planning   one of: outgrown, prefix, planning
"""

import sys
import time
from statistics import median

import torch

from cbgen.cache.layout import CacheLayout
from cbgen.cache.paged_cache import PagedCache
from cbgen.cache.pool import NUM_RESERVED_CHUNKS
from cbgen.config import FULL_ATTENTION, ContinuousBatchingConfig, ModelShape
from cbgen.engine.build import Engine, build_engine
from cbgen.engine.requests import RequestState, SamplingParams
from cbgen.engine.scheduler import SCHEDULERS
from cbgen.engine.sources import ListSource
from cbgen.models.loading import SMOLLM2, TINY_RANDOM, describe, load

CPU = torch.device("cpu")
PAGE_SIZE = 32


def engine_of(name: str, **options: object) -> tuple[Engine, int]:
    """An engine that knows no end-of-sequence token, and the size of its vocabulary."""
    model, shape = load(describe(name, None, "float32", CPU), CPU)
    config = ContinuousBatchingConfig(**{"page_size": PAGE_SIZE, **options}).resolve("cpu")
    return build_engine(model, shape, torch.float32, config, frozenset(), CPU, 8 << 30), shape.vocab_size


def run(engine: Engine, requests: list[RequestState]) -> tuple[float, list[list[int]]]:
    """Seconds, and each request's tokens."""
    start_s = time.perf_counter()
    finished = {request.request_id: request for request in engine.manager.run(ListSource(requests))}
    assert all(request.error is None for request in finished.values())
    return time.perf_counter() - start_s, [finished[request.request_id].generated_ids for request in requests]


def outgrown() -> None:
    """24 requests whose tokens need four times the cache, against the same in a roomy one."""
    generator = torch.Generator().manual_seed(0)
    lengths = [16 + 6 * number for number in range(24)]
    max_tokens = 96
    num_blocks = sum(lengths) // 4 // PAGE_SIZE + len(lengths) * max_tokens // 4 // PAGE_SIZE
    expected: list[list[int]] | None = None
    print("cache        swap   offloads  soft resets  swaps  recomputed  seconds  rows as in the roomy cache")
    for blocks, swap_gib in ((1024, 0.0), (num_blocks, 0.0), (num_blocks, 0.5)):
        engine, vocab_size = engine_of(SMOLLM2, num_blocks=blocks, cpu_offload_space=swap_gib)
        generator.manual_seed(0)
        prompts = [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]
        seconds, rows = run(engine, [RequestState(n, p, SamplingParams(max_tokens)) for n, p in enumerate(prompts)])
        expected = rows if expected is None else expected
        equal = sum(a == b for a, b in zip(rows, expected, strict=True))
        m = engine.manager.metrics
        share = m.recomputed_tokens / (m.computed_prompt_tokens + m.recomputed_tokens + m.output_tokens)
        print(
            f"{blocks:4} blocks  {swap_gib:3} GiB  {m.offloads:8}  {m.soft_resets:11}  {m.swaps:5}  {share:10.1%}  "
            f"{seconds:7.1f}  {equal} of {len(rows)}"
        )


def prefix() -> None:
    """128 prompts with a common system prompt of 512 tokens and 40 of their own, 8 tokens each."""
    common = [3 + number * 7 % 250 for number in range(512)]
    print("sharing  computed prompt tokens  ideal  difference")
    for sharing in (True, False):
        engine, _ = engine_of(TINY_RANDOM, allow_block_sharing=sharing)
        prompts = [common + [3 + (row * 31 + n * n) % 250 for n in range(40)] for row in range(128)]
        run(engine, [RequestState(n, p, SamplingParams(8)) for n, p in enumerate(prompts)])
        computed, ideal = engine.manager.metrics.computed_prompt_tokens, 512 + 128 * 40
        print(f"{'on' if sharing else 'off':7}  {computed:22}  {ideal:5}  {computed / ideal - 1:10.1%}")


def planning() -> None:
    """One step of the scheduler with 100 decodes at work, where nobody waiting can be admitted."""
    print("waiting   scheduler      budget of requests spent   none fits the cache     milliseconds, median of 400")
    for name, scheduler_class in SCHEDULERS.items():
        for num_waiting in (100, 100_000):
            spent, full = (plan_times_ms(scheduler_class, num_waiting, limit) for limit in (100, 128))
            print(f"{num_waiting:7}   {name:13}  {spent:24.3f}   {full:19.3f}")


def plan_times_ms(scheduler_class: type, num_waiting: int, max_requests_per_batch: int) -> float:
    shape = ModelShape((FULL_ATTENTION,) * 2, None, 4, 4, 16, 64, 100, 4096, 4)
    config = ContinuousBatchingConfig(
        max_batch_tokens=4096, max_requests_per_batch=max_requests_per_batch, safety_margin=0.0
    ).resolve("cpu")
    cache = PagedCache(CacheLayout.of(shape, PAGE_SIZE), 100 * 16 + 20 + NUM_RESERVED_CHUNKS)
    scheduler = scheduler_class(cache, config)
    decodes = [RequestState(number, [number % 90] * 5, SamplingParams(500)) for number in range(100)]
    waiting = [RequestState(100 + number, [number % 90] * 3000, SamplingParams(9)) for number in range(num_waiting)]
    for request in (*decodes, *waiting):
        scheduler.add(request)
    times = []
    for _ in range(401):
        start_s = time.perf_counter()
        batch = scheduler.schedule()
        times.append(time.perf_counter() - start_s)
        for entry in batch.admitted:
            entry.request.admit(entry.start, 0.0)
        for entry in batch.scheduled:
            entry.request.advance(entry.query_length)
            if entry.samples:
                entry.request.append_token(7, 0.0)
    return 1000 * median(times[1:])


if __name__ == "__main__":
    parts = {"outgrown": outgrown, "prefix": prefix, "planning": planning}
    for part in sys.argv[1:] or parts:
        parts[part]()
        print()
