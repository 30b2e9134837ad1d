"""Puts an engine together for a loaded model: kernel, cache sized to the free memory, scheduler, runner, manager."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from cbgen.cache.layout import CacheLayout
from cbgen.cache.paged_cache import PagedCache
from cbgen.cache.sizing import CachePlan, mib
from cbgen.cache.storage import KVStorage
from cbgen.cache.swap_pool import SwapPool
from cbgen.config import ModelShape, ResolvedConfig
from cbgen.device import free_memory_bytes, host_bytes_for, synchronize
from cbgen.engine.async_batching import BufferPair, StagedPasses
from cbgen.engine.cuda_graphs import GraphCache
from cbgen.engine.endings import Endings
from cbgen.engine.execution import Execution, choose_execution, padding_of
from cbgen.engine.generated_text import TextCodec
from cbgen.engine.grammars import Grammars
from cbgen.engine.input_outputs import InputBuffers
from cbgen.engine.manager import Manager
from cbgen.engine.model_runner import ModelRunner
from cbgen.engine.passes import DirectPasses
from cbgen.engine.sampler import Sampler
from cbgen.engine.scheduler import SCHEDULERS
from cbgen.errors import MemoryPlanError, UsageError
from cbgen.streams import COMPUTE


@dataclass(frozen=True)
class Engine:
    """A manager ready to run, and what it was built from: the config now has its num_blocks."""

    manager: Manager
    config: ResolvedConfig
    plan: CachePlan
    kernel: str


def build_engine(
    model: torch.nn.Module,
    shape: ModelShape,
    dtype: torch.dtype,
    config: ResolvedConfig,
    eos_token_ids: frozenset[int],
    device: torch.device,
    free_bytes: int,
    notify: Callable[[str], None] = lambda line: None,
    tokenizer: Any = None,
    grammars: Grammars | None = None,
    execution: Execution | None = None,
) -> Engine:
    """free_bytes: memory free on the device with the weights loaded. notify: see Manager. tokenizer, grammars: for
    requests that ask for bad words or stop texts, or for a form of the output. execution: the best
    there is unless given.

    Raises MemoryPlanError when no cache fits.
    """
    execution = execution or choose_execution(shape, dtype, config, device, notify)
    backend = execution.backend
    if config.deterministic and not backend.is_batch_invariant:
        raise UsageError(
            f"--deterministic: attention through {backend.name} depends on the batch; it needs cbgen's compiled "
            "kernels (CPU) or varlen_attn (CUDA)"
        )
    plan = execution.plan(shape, config, free_bytes)
    config = replace(config, num_blocks=plan.num_blocks)
    cache = PagedCache(plan.layout, plan.num_chunks, config.allow_block_sharing)
    host_bytes = free_memory_bytes(torch.device("cpu"))
    swap_bytes = host_bytes_for(config.cpu_offload_bytes, device)
    if swap_bytes > host_bytes:
        raise MemoryPlanError(
            f"--cpu-offload-space {config.cpu_offload_space:g}: {mib(swap_bytes)} of CPU memory are asked for, "
            f"{mib(host_bytes)} are free"
        )
    codec = None if tokenizer is None else TextCodec(tokenizer)
    sampler = Sampler(eos_token_ids, codec, grammars)
    synchronize(device)  # what was freed may still be written to by work that streams of their own do not wait for
    storage = KVStorage(plan.num_chunks, plan.layout, backend, device, partial(execution.streams.submit, COMPUTE))
    runner = ModelRunner(model, plan.layout, storage, backend, config.deterministic)
    passes = _passes(execution, shape, dtype, config, plan.layout, runner, sampler, notify)
    if isinstance(passes, StagedPasses):
        passes.warm_up(cache, shape.max_model_len)
        _refuse_if_asked(config, None if passes.graphs is None else passes.graphs.failure)
        execution = replace(execution, depth=passes.depth, records=passes.records)
    manager = Manager(
        cache=cache,
        scheduler=SCHEDULERS[config.scheduler_type](cache, config),
        passes=passes,
        swap_pool=SwapPool(config.cpu_offload_bytes, storage) if config.cpu_offload_bytes else None,
        endings=Endings(eos_token_ids, codec, sampler.processors.is_complete),
        max_model_len=shape.max_model_len,
        max_waiting=2 * config.max_requests_per_batch,
        balance_tail=config.balance_tail,
        notify=notify,
    )
    return Engine(manager, config, plan, execution.described)


def _refuse_if_asked(config: ResolvedConfig, failure: str | None) -> None:
    """Raises UsageError when passes could not be recorded and that is what was asked for."""
    if failure is not None and config.use_cuda_graph:
        raise UsageError(f"--use-cuda-graph: this model cannot be recorded: {failure}")
    if failure is not None and config.use_async_batching:
        raise UsageError(f"--use-async-batching: it needs graphs, and this model cannot be recorded: {failure}")


def _passes(
    execution: Execution,
    shape: ModelShape,
    dtype: torch.dtype,
    config: ResolvedConfig,
    layout: CacheLayout,
    runner: ModelRunner,
    sampler: Sampler,
    notify: Callable[[str], None],
) -> DirectPasses | StagedPasses:
    sizes = (config.max_batch_tokens, config.max_requests_per_batch, layout, shape.max_model_len, execution.streams)
    if not execution.is_staged:
        return DirectPasses(InputBuffers(*sizes), runner, sampler)
    pairs = [
        BufferPair(InputBuffers(*sizes, padding_of(config)), shape.vocab_size, dtype, execution.streams)
        for _ in range(execution.depth)
    ]
    synchronize(execution.streams.device)  # buffers are cleared before a stream of its own writes to them
    graphs = GraphCache(execution.streams, config.max_cached_graphs, notify) if execution.records else None
    return StagedPasses(pairs, runner, sampler, execution.streams, graphs)
