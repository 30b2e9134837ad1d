"""From free memory to chunks, and back: one formula, its exact inverse, and the message when it does not work out.

free memory x max_memory_percent
[ activations | logits | workspace | (buffers, graphs) | (CPU swap pool) | chunk 0, 1 (reserved) | chunk 2 ... n - 1 ]
  max_batch_     max_requests_ of the    where passes are   where the cache is                    num_blocks x
  tokens         per_batch     kernel    recorded           in CPU memory too                     page_size tokens
"""

from dataclasses import dataclass, replace

from cbgen.cache.layout import CacheLayout
from cbgen.cache.pool import NUM_RESERVED_CHUNKS
from cbgen.config import ModelShape, ResolvedConfig
from cbgen.errors import MemoryPlanError, UsageError
from cbgen.kernels.backend import AttentionBackend

# Tensors of one hidden size, and of one inner MLP size, that are alive at once in a decoder layer run without autograd.
# The inner size is taken as four hidden sizes. Sampling with top-p holds eleven times the float32 logits at its peak:
# scaled and sorted copies, 64-bit order, probabilities, and their 64-bit sums.
LIVE_HIDDEN_TENSORS = 8 + 3 * 4
LOGITS_COPIES = 11
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class CachePlan:
    """A cache that fits: num_chunks includes the reserved ones, num_blocks does not."""

    layout: CacheLayout
    num_chunks: int
    num_blocks: int
    chunk_bytes: int
    activation_bytes: int
    buffer_bytes: int = 0

    @property
    def cache_bytes(self) -> int:
        return self.num_chunks * self.chunk_bytes

    def num_requests(self, num_tokens: int) -> int:
        """How many requests of `num_tokens` tokens each, at least one, fit at once, none sharing a prefix."""
        assert num_tokens >= 1
        data_chunks = self.num_chunks - NUM_RESERVED_CHUNKS
        count = data_chunks // max(1, self.layout.chunks_for_tokens(num_tokens))  # each in chunks of its own: a start
        while self._chunks_for_requests(count + 1, num_tokens) <= data_chunks:
            count += 1
        return count

    def _chunks_for_requests(self, count: int, num_tokens: int) -> int:
        groups = self.layout.groups
        return sum(-(-count * group.num_blocks_for(num_tokens) // group.blocks_per_chunk) for group in groups)


def activation_bytes(shape: ModelShape, config: ResolvedConfig, backend: AttentionBackend) -> int:
    """Bytes that one forward pass of the largest batch takes beside weights and cache; an estimate on the safe side."""
    hidden = hidden_bytes(shape, config)
    logits = config.max_requests_per_batch * shape.vocab_size * FLOAT32_BYTES * LOGITS_COPIES
    return hidden + logits + backend.workspace_bytes(config.max_batch_tokens, shape.max_model_len)


def hidden_bytes(shape: ModelShape, config: ResolvedConfig) -> int:
    """The part of that which the layers take, one after another."""
    return config.max_batch_tokens * shape.hidden_size * shape.dtype_bytes * LIVE_HIDDEN_TENSORS


def chunks_from_bytes(num_bytes: int, chunk_bytes: int) -> int:
    """Chunks, the reserved ones included, that fit in `num_bytes`."""
    return num_bytes // chunk_bytes


def bytes_from_chunks(num_chunks: int, chunk_bytes: int) -> int:
    """The least number of bytes for which `chunks_from_bytes` gives `num_chunks`."""
    return num_chunks * chunk_bytes


def plan_cache(
    shape: ModelShape,
    config: ResolvedConfig,
    backend: AttentionBackend,
    free_bytes: int,
    swap_shares_memory: bool = True,
    buffer_bytes: int = 0,
) -> CachePlan:
    """Sizes the cache. A pinned `num_blocks` must fit; otherwise the cache takes what it may, and no more than useful.

    Useful at most: every request of a full batch at the model's whole context. swap_shares_memory: whether the CPU swap
    pool comes out of the same memory. buffer_bytes: what static buffers and graphs take. Raises MemoryPlanError with
    what would fit.
    """
    layout = CacheLayout.of(shape, config.page_size)
    chunk_bytes = layout.pages_per_chunk * backend.page_bytes
    activations = activation_bytes(shape, config, backend)
    taken = activations + buffer_bytes + (config.cpu_offload_bytes if swap_shares_memory else 0)
    budget_bytes = max(0, int(free_bytes * config.max_memory_percent) - taken)
    fitting = max(0, chunks_from_bytes(budget_bytes, chunk_bytes) - NUM_RESERVED_CHUNKS)
    if config.num_blocks is None:
        data_chunks = min(fitting, _useful_chunks(layout, config.max_requests_per_batch, shape.max_model_len))
    else:
        data_chunks = layout.chunks_for_blocks(config.num_blocks)
    num_blocks = layout.blocks_in_chunks(data_chunks) if config.num_blocks is None else config.num_blocks
    if data_chunks > fitting or num_blocks < 1:
        wanted = max(1, num_blocks)
        needed = bytes_from_chunks(layout.chunks_for_blocks(wanted) + NUM_RESERVED_CHUNKS, chunk_bytes) + taken
        offload = ", --cpu-offload-space" if swap_shares_memory and config.cpu_offload_bytes else ""
        raise MemoryPlanError(
            f"a cache of {wanted} blocks ({wanted * config.page_size} tokens) needs {mib(needed)} with activations; "
            f"of {mib(free_bytes)} free, {config.max_memory_percent:.0%} may be used, room for "
            f"{layout.blocks_in_chunks(fitting)} blocks; lower --num-blocks, --max-batch-tokens{offload} or "
            "--max-requests-per-batch, or raise --max-memory-percent"
        )
    return CachePlan(layout, data_chunks + NUM_RESERVED_CHUNKS, num_blocks, chunk_bytes, activations, buffer_bytes)


def _useful_chunks(layout: CacheLayout, num_requests: int, max_model_len: int) -> int:
    blocks = ((group, num_requests * group.num_blocks_for(max_model_len)) for group in layout.groups)
    return sum(-(-count // group.blocks_per_chunk) for group, count in blocks)


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
    """In whole MiB; of less, KiB."""
    return f"{num_bytes / 2**20:,.0f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:,.0f} KiB"
