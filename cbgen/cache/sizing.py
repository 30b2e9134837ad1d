"""From free memory to chunks, and back: one formula, its exact inverse, and the message when it does not work out.

free memory x max_memory_percent
[ activations | logits | chunk 0 (reserved) | chunk 1 (reserved) | chunk 2 ... chunk n - 1 ]
  max_batch_     max_requests_                                     num_blocks x page_size tokens
  tokens         per_batch
"""

from dataclasses import dataclass, replace

from cbgen.cache.pool import NUM_RESERVED_CHUNKS
from cbgen.config import ModelShape, ResolvedConfig
from cbgen.errors import MemoryPlanError, UsageError

# Tensors of one hidden size, and of one inner MLP size, that are alive at once in a decoder layer run without autograd.
# The inner size is taken as four hidden sizes. Sampling with top-p holds eleven times the float32 logits at its peak:
# scaled and sorted copies, 64-bit order, probabilities, and their 64-bit sums.
LIVE_HIDDEN_TENSORS = 8 + 3 * 4
LOGITS_COPIES = 11
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class CachePlan:
    """A cache that fits: num_chunks includes the reserved ones, num_blocks does not."""

    num_chunks: int
    num_blocks: int
    chunk_bytes: int
    activation_bytes: int

    @property
    def cache_bytes(self) -> int:
        return self.num_chunks * self.chunk_bytes


def activation_bytes(shape: ModelShape, config: ResolvedConfig) -> int:
    """Bytes that one forward pass of the largest batch takes beside weights and cache; an estimate on the safe side."""
    hidden = config.max_batch_tokens * shape.hidden_size * shape.dtype_bytes * LIVE_HIDDEN_TENSORS
    logits = config.max_requests_per_batch * shape.vocab_size * FLOAT32_BYTES * LOGITS_COPIES
    return hidden + logits


def chunks_from_bytes(num_bytes: int, chunk_bytes: int) -> int:
    """Chunks, the reserved ones included, that fit in `num_bytes`."""
    return num_bytes // chunk_bytes


def bytes_from_chunks(num_chunks: int, chunk_bytes: int) -> int:
    """The least number of bytes for which `chunks_from_bytes` gives `num_chunks`."""
    return num_chunks * chunk_bytes


def plan_cache(shape: ModelShape, config: ResolvedConfig, chunk_bytes: int, free_bytes: int) -> CachePlan:
    """Sizes the cache. A pinned `num_blocks` must fit; otherwise the cache takes what it may, and no more than useful.

    Useful at most: every request of a full batch at the model's whole context.
    Raises MemoryPlanError with what would fit.
    """
    activations = activation_bytes(shape, config)
    budget_bytes = int(free_bytes * config.max_memory_percent) - activations
    fitting = chunks_from_bytes(max(0, budget_bytes), chunk_bytes) - NUM_RESERVED_CHUNKS
    num_blocks = config.num_blocks
    if num_blocks is None:
        num_blocks = min(fitting, config.max_requests_per_batch * -(-shape.max_model_len // config.page_size))
    if num_blocks > fitting or num_blocks < 1:
        wanted = max(1, num_blocks)
        needed = bytes_from_chunks(wanted + NUM_RESERVED_CHUNKS, chunk_bytes) + activations
        raise MemoryPlanError(
            f"a cache of {wanted} blocks ({wanted * config.page_size} tokens) needs {mib(needed)} with activations; "
            f"of {mib(free_bytes)} free, {config.max_memory_percent:.0%} may be used, room for {max(0, fitting)} "
            "blocks; lower --num-blocks, --max-batch-tokens or --max-requests-per-batch, or raise --max-memory-percent"
        )
    return CachePlan(num_blocks + NUM_RESERVED_CHUNKS, num_blocks, chunk_bytes, activations)


def with_memory_utilization(config: ResolvedConfig, share: float, total_bytes: int, free_bytes: int) -> ResolvedConfig:
    """The config for a share of all memory, what is in use already included, instead of a share of what is free."""
    budget = share * total_bytes - (total_bytes - free_bytes)
    if not 0.0 < share <= 1.0:
        raise UsageError(f"--gpu-memory-utilization: {share} is not a share between 0 (excluded) and 1")
    if budget <= 0:
        raise MemoryPlanError(
            f"--gpu-memory-utilization {share}: {mib(total_bytes - free_bytes)} of {mib(total_bytes)} are in use, the "
            "weights included, so nothing is left for the cache; raise it"
        )
    return replace(config, max_memory_percent=budget / free_bytes)


def mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
