"""`cbgen size`: what fits in how much memory, worked out as a run would, before anything is loaded."""

import re

import torch

from cbgen.cache.layout import LayerGroup
from cbgen.cache.sizing import CachePlan, mib, with_memory_utilization
from cbgen.config import ModelShape, ResolvedConfig
from cbgen.engine.execution import choose_execution
from cbgen.errors import MemoryPlanError, UsageError
from cbgen.models.loading import ModelDescription
from cbgen.models.shape import expected_shape, weight_bytes

UNIT_BITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
DEFAULT_LENGTHS = (256, 1024, 4096, 16_384, 65_536)


def parse_bytes(text: str) -> int:
    """Bytes of "8GiB", "8GB", "8g" (all binary, as memory is) or a plain number. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    if match is None:
        raise UsageError(f"--memory {text}: a size is expected, such as 24GiB or 512MiB")
    return int(float(match[1]) * 2 ** UNIT_BITS[match[2]])


def size_lines(
    model: ModelDescription,
    config: ResolvedConfig,
    memory_bytes: int,
    gpu_memory_utilization: float | None,
    lengths: list[int],
    device_type: str,
) -> dict[str, str]:
    """The plan, one line per fact. memory_bytes: what is there for weights and all else. lengths: tokens of requests.

    Raises MemoryPlanError when the weights or the smallest cache do not fit.
    """
    shape, weights = expected_shape(model), weight_bytes(model)
    free_bytes = memory_bytes - weights
    if free_bytes <= 0:
        raise MemoryPlanError(f"the weights of {model.name} alone take {mib(weights)} of {mib(memory_bytes)}")
    if gpu_memory_utilization is not None:
        config = with_memory_utilization(config, gpu_memory_utilization, memory_bytes, free_bytes)
    notes: list[str] = []
    execution = choose_execution(shape, model.dtype, config, torch.device(device_type), notes.append)
    plan = execution.plan(shape, config, free_bytes)
    kinds = " and ".join(f"{group.pages_per_block} {group.attention_type} layers" for group in plan.layout.groups)
    return {
        "model": f"{model.name}: {kinds}, {shape.num_kv_heads} KV heads of {shape.head_dim}, "
        f"{str(model.dtype).removeprefix('torch.')}, context {shape.max_model_len}",
        "weights": mib(weights),
        "memory": f"{mib(memory_bytes)}, {mib(free_bytes)} without the weights, of which "
        f"{config.max_memory_percent:.0%} may be used",
        "batch": f"{mib(plan.activation_bytes + plan.buffer_bytes)} for {config.max_batch_tokens} tokens of "
        f"{config.max_requests_per_batch} requests",
        **({"swap pool": mib(config.cpu_offload_bytes)} if config.cpu_offload_bytes else {}),
        "attention": "; ".join(notes) or execution.described,
        "cache": f"{mib(plan.cache_bytes)}: {plan.num_blocks} blocks of {config.page_size} tokens, in "
        f"{plan.num_chunks} chunks of {plan.chunk_bytes / 2**20:.2f} MiB, 2 of them reserved",
        "tokens": "; ".join(_token_cost(group, execution.backend.page_bytes) for group in plan.layout.groups),
        "fits": f"{_fitting(plan, shape, lengths)} in the cache, without a common prefix; up to "
        f"{config.max_requests_per_batch} run at once",
    }


def _token_cost(group: LayerGroup, page_bytes: int) -> str:
    per_block = group.pages_per_block * page_bytes
    if group.max_blocks is None:
        return f"{per_block / group.page_size:,.0f} bytes each in {group.attention_type} layers"
    return (
        f"{mib(group.max_blocks * per_block)} at most per request in {group.attention_type} layers, over a window of "
        f"{group.window}"
    )


def _fitting(plan: CachePlan, shape: ModelShape, lengths: list[int]) -> str:
    chosen = lengths or [*(length for length in DEFAULT_LENGTHS if length < shape.max_model_len), shape.max_model_len]
    for length in chosen:
        if not 1 <= length <= shape.max_model_len:
            raise UsageError(f"--tokens {length}: not between 1 and the context of {shape.max_model_len}")
    return ", ".join(f"{plan.num_requests(length):,} requests of {length:,} tokens" for length in chosen)
