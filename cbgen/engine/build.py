"""Puts an engine together for a loaded model: kernel, cache sized to the free memory, scheduler, runner, manager."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from cbgen.cache.paged_cache import PagedCache
from cbgen.cache.sizing import CachePlan, mib, plan_cache
from cbgen.cache.storage import KVStorage
from cbgen.cache.swap_pool import SwapPool
from cbgen.config import ModelShape, ResolvedConfig
from cbgen.device import free_memory_bytes
from cbgen.engine.endings import Endings
from cbgen.engine.generated_text import TextCodec
from cbgen.engine.grammars import Grammars
from cbgen.engine.input_outputs import InputBuffers
from cbgen.engine.manager import Manager
from cbgen.engine.model_runner import ModelRunner
from cbgen.engine.sampler import Sampler
from cbgen.engine.scheduler import SCHEDULERS
from cbgen.errors import MemoryPlanError, UsageError
from cbgen.kernels.backend import AttentionBackend
from cbgen.kernels.cpu.attention import KV_KINDS, PagedAttention
from cbgen.kernels.cpu.library import load_library
from cbgen.kernels.sdpa import SdpaAttention


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
) -> Engine:
    """free_bytes: memory free on the device with the weights loaded. notify: see Manager. tokenizer, grammars: for
    requests that ask for bad words or stop texts, or for a form of the output.

    Raises MemoryPlanError when no cache fits.
    """
    backend = attention_backend(shape, dtype, config, device.type)
    if config.deterministic and not backend.is_batch_invariant:
        raise UsageError(
            f"--deterministic: attention through {backend.name} depends on the batch; it needs cbgen's compiled "
            "kernels (CPU)"
        )
    plan = plan_cache(shape, config, backend, free_bytes, swap_shares_memory=device.type != "cuda")
    config = replace(config, num_blocks=plan.num_blocks)
    cache = PagedCache(plan.layout, plan.num_chunks, config.allow_block_sharing)
    host_bytes = free_memory_bytes(torch.device("cpu"))
    if config.cpu_offload_bytes > host_bytes:
        raise MemoryPlanError(
            f"--cpu-offload-space {config.cpu_offload_space:g}: {mib(config.cpu_offload_bytes)} of CPU memory are "
            f"asked for, {mib(host_bytes)} are free"
        )
    codec = None if tokenizer is None else TextCodec(tokenizer)
    sampler = Sampler(eos_token_ids, codec, grammars)
    storage = KVStorage(plan.num_chunks, plan.layout, backend, device)
    manager = Manager(
        cache=cache,
        scheduler=SCHEDULERS[config.scheduler_type](cache, config),
        buffers=InputBuffers(config.max_batch_tokens, config.max_requests_per_batch, len(plan.layout.groups), device),
        runner=ModelRunner(model, plan.layout, storage, backend, config.deterministic),
        swap_pool=SwapPool(config.cpu_offload_bytes, storage) if config.cpu_offload_bytes else None,
        sampler=sampler,
        endings=Endings(eos_token_ids, codec, sampler.processors.is_complete),
        max_model_len=shape.max_model_len,
        max_waiting=2 * config.max_requests_per_batch,
        balance_tail=config.balance_tail,
        notify=notify,
    )
    return Engine(manager, config, plan, backend.name)


def attention_backend(
    shape: ModelShape, dtype: torch.dtype, config: ResolvedConfig, device_type: str
) -> AttentionBackend:
    """The kernel that attends for a model. Raises UsageError for a kind of KV that the one there is cannot hold."""
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else getattr(torch, config.kv_cache_dtype)
    library = load_library() if device_type == "cpu" else None
    if library is not None and kv_dtype in KV_KINDS:
        return PagedAttention(library, config.page_size, shape.num_heads, shape.num_kv_heads, shape.head_dim, kv_dtype)
    if kv_dtype != dtype:
        where = "without its compiled kernels" if device_type == "cpu" else f"on {device_type}"
        raise UsageError(f"--kv-cache-dtype {config.kv_cache_dtype}: cbgen {where} holds KV in the model's own dtype")
    return SdpaAttention(config.page_size, shape.num_kv_heads, shape.head_dim, dtype)
