"""How an engine runs its passes on a device: which kernel attends, recorded as graphs or not, one or two at a time."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cbgen.cache.layout import CacheLayout
from cbgen.cache.sizing import FLOAT32_BYTES, CachePlan, hidden_bytes, plan_cache
from cbgen.config import ModelShape, ResolvedConfig
from cbgen.engine.device_sampling import ARRAYS
from cbgen.engine.input_outputs import Padding, max_logits, max_words
from cbgen.errors import UsageError
from cbgen.kernels.backend import AttentionBackend
from cbgen.kernels.cpu.attention import KV_KINDS, PagedAttention
from cbgen.kernels.cpu.library import load_library
from cbgen.kernels.cuda import KERNEL_CAPABILITY, VarlenAttention, torch_varlen_attn, varlen_problem
from cbgen.kernels.cuda_trial import tried_problem
from cbgen.kernels.sdpa import SdpaAttention
from cbgen.streams import CudaStreams, InOrderStreams, Streams

# Estimates on the safe side. What the driver keeps of a recorded pass, for each layer of the model; and what libraries
# keep for each stream that they work on.
GRAPH_BYTES_PER_LAYER = 256 << 10
STREAM_BYTES = 64 << 20


@dataclass(frozen=True)
class Execution:
    """depth: how many passes are in flight, 1 or 2. records: whether passes become CUDA graphs."""

    backend: AttentionBackend
    streams: Streams
    depth: int = 1
    records: bool = False

    @property
    def is_staged(self) -> bool:
        """Whether passes go through static buffers: they must where they are recorded or overlap."""
        return self.backend.reads_tensors_alone

    @property
    def described(self) -> str:
        """In words for the user; graphs and passes in flight only where there can be any."""
        if not self.is_staged:
            return self.backend.name
        return f"{self.backend.name} ({'CUDA graphs' if self.records else 'no graphs'}, {self.depth} in flight)"

    def plan(self, shape: ModelShape, config: ResolvedConfig, free_bytes: int) -> CachePlan:
        """The cache beside all that passes need. Raises MemoryPlanError as plan_cache does."""
        return plan_cache(
            shape,
            config,
            self.backend,
            free_bytes,
            swap_shares_memory=self.streams.device.type != "cuda",
            buffer_bytes=self.buffer_bytes(shape, config),
        )

    def buffer_bytes(self, shape: ModelShape, config: ResolvedConfig) -> int:
        """Memory of the device for static buffers, a set for each pass in flight, and for what graphs hold: the
        memory that a recorded pass computes in, shared by all, and what the driver keeps of each."""
        if not self.is_staged:
            return 0
        padding, layout = padding_of(config), CacheLayout.of(shape, config.page_size)
        words = max_words(config.max_batch_tokens, config.max_requests_per_batch, layout, shape.max_model_len, padding)
        rows = max_logits(config.max_requests_per_batch, padding)
        words += (2 + ARRAYS) * (rows + 2 * config.max_requests_per_batch)  # what was chosen, and how
        logits = rows * shape.vocab_size
        pair_bytes = words * 8 + logits * shape.dtype_bytes
        if not self.records:
            return self.depth * pair_bytes
        workspace = self.backend.workspace_bytes(config.max_batch_tokens, shape.max_model_len)
        pool_bytes = 3 * STREAM_BYTES + hidden_bytes(shape, config) + workspace + logits * FLOAT32_BYTES
        return (
            self.depth * pair_bytes + pool_bytes + config.max_cached_graphs * shape.num_layers * GRAPH_BYTES_PER_LAYER
        )


def padding_of(config: ResolvedConfig) -> Padding:
    return Padding(config.q_padding_interval_size, config.kv_padding_interval_size)


def choose_execution(
    shape: ModelShape,
    dtype: torch.dtype,
    config: ResolvedConfig,
    device: torch.device,
    notify: Callable[[str], None] = lambda line: None,
) -> Execution:
    """The best that device, model and options allow. notify: told why, where that is less than a GPU can do.

    Raises UsageError for what was asked for and cannot be had.
    """
    if device.type != "cuda":
        return Execution(attention_backend(shape, dtype, config, device.type), InOrderStreams(device))
    problem = varlen_problem(
        torch_varlen_attn(),
        _compute_capability(device),
        dtype,
        config.page_size,
        shape.head_dim,
        shape.special_attention,
    )
    reference = attention_backend(shape, dtype, config, device.type)
    if problem is None:
        backend = VarlenAttention(
            config.page_size, shape.num_heads, shape.num_kv_heads, shape.head_dim, dtype, config.deterministic
        )
        problem = tried_problem(backend, reference, device) if torch.cuda.is_available() else None
    if problem is not None:
        _refuse_if_asked(config, problem)
        notify(
            "torch's SDPA attends, over copies of each request's KV, without CUDA graphs and asynchronous batching: "
            f"varlen_attn cannot serve, since {problem}"
        )
        return Execution(reference, InOrderStreams(device))
    records = config.use_cuda_graph is not False
    overlaps = records if config.use_async_batching is None else config.use_async_batching
    streams = CudaStreams(device) if overlaps and torch.cuda.is_available() else InOrderStreams(device)
    return Execution(backend, streams, 2 if overlaps else 1, records)


def _refuse_if_asked(config: ResolvedConfig, problem: str) -> None:
    if config.use_cuda_graph:
        raise UsageError(f"--use-cuda-graph: graphs need attention through varlen_attn, which cannot serve: {problem}")
    if config.use_async_batching:
        raise UsageError(
            f"--use-async-batching: it needs graphs, and those need varlen_attn, which cannot serve: {problem}"
        )


def attention_backend(
    shape: ModelShape, dtype: torch.dtype, config: ResolvedConfig, device_type: str
) -> AttentionBackend:
    """The kernel that attends, but for varlen_attn. Raises UsageError for a kind of KV that it cannot hold."""
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else getattr(torch, config.kv_cache_dtype)
    library = load_library() if device_type == "cpu" else None
    if library is not None and kv_dtype in KV_KINDS:
        return PagedAttention(library, config.page_size, shape.num_heads, shape.num_kv_heads, shape.head_dim, kv_dtype)
    refuse_other_kv(config, dtype, device_type)
    return SdpaAttention(config.page_size, shape.num_kv_heads, shape.head_dim, dtype)


def refuse_other_kv(config: ResolvedConfig, dtype: torch.dtype, device_type: str) -> None:
    """Raises UsageError for KV that is not kept as the model computes it."""
    if config.kv_cache_dtype not in ("auto", str(dtype).removeprefix("torch.")):
        where = "without its compiled kernels" if device_type == "cpu" else f"on {device_type}"
        raise UsageError(f"--kv-cache-dtype {config.kv_cache_dtype}: cbgen {where} holds KV in the model's own dtype")


def _compute_capability(device: torch.device) -> tuple[int, int]:
    """Enough where the device is not here, as for plans of another machine."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else KERNEL_CAPABILITY
