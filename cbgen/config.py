"""The engine's options as the user writes them, and as they are once resolved and frozen."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cbgen.errors import UsageError

DEFAULT_PAGE_SIZE = {"cpu": 32, "cuda": 256, "mps": 32}
DEFAULT_MAX_BATCH_TOKENS = {"cpu": 512, "cuda": 4096, "mps": 512}
DEFAULT_MAX_REQUESTS_PER_BATCH = {"cpu": 128, "cuda": 256, "mps": 64}
# Where the device shares memory with everything else on the machine, the cache leaves more of it alone.
DEFAULT_MAX_MEMORY_PERCENT = {"cpu": 0.5, "cuda": 0.9, "mps": 0.4}
DEFAULT_SAFETY_MARGIN = {"fifo": 0.15, "prefill_first": 0.0}
# Query tokens of a recorded pass, and KV tokens of its longest request, are padded to multiples of these, so that few
# graphs serve all passes.
DEFAULT_Q_PADDING_INTERVAL_SIZE = 64
DEFAULT_KV_PADDING_INTERVAL_SIZE = 2048
DEFAULT_MAX_CACHED_GRAPHS = 64
GRAPH_DETAILS = ("q_padding_interval_size", "kv_padding_interval_size", "max_cached_graphs")
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "int8")

# The two types of attention that the cache serves, as models' `layer_types` call them.
FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"


@dataclass(frozen=True)
class ModelShape:
    """What the cache and the engine need to know of a model; found by a probe at load, not read from names.

    `layer_types` has an entry per layer, FULL_ATTENTION or SLIDING_ATTENTION; a token of a sliding layer sees
    `sliding_window` tokens, itself included. `max_model_len` is the model's context in tokens; `dtype_bytes` the size
    of one activation. `special_attention` names what layers ask of their attention beyond scaling and windows, among
    "softcap" and "sinks"; only the probe sees it, and a shape foreseen from the config alone has none.
    """

    layer_types: tuple[str, ...]
    sliding_window: int | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    dtype_bytes: int
    special_attention: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)


@dataclass(frozen=True)
class ContinuousBatchingConfig:
    """Options of the engine, with the specification's names. None means: chosen from the hardware.

    Args:
        page_size: tokens of KV that one page holds for one layer.
        num_blocks: capacity of the cache in whole-model blocks of `page_size` tokens.
        max_batch_tokens: query tokens in one forward pass.
        max_requests_per_batch: requests in one forward pass.
        max_memory_percent: share of the free memory that the cache and the activations may take, in (0, 1].
        scheduler_type: "fifo" or "prefill_first".
        safety_margin: free share of the cache below which only decodes go on, in [0, 1); 0 disables it.
        allow_block_sharing: whether requests share the blocks of a common prefix (models of full attention only).
        cpu_offload_space: GiB of CPU memory that offloaded requests may take; 0 disables it.
        kv_cache_dtype: "auto", the model's own; or "float32", "bfloat16", "int8" (with a scale per token and head).
        balance_tail: whether the last requests of a job start so that the batch stays evenly filled to its end.
        deterministic: whether a row's logits have the same bits in every batch, however it is cut, shared or resumed.
        use_cuda_graph: whether forward passes are replayed from recorded graphs; None: where device and attention can.
        use_async_batching: whether a batch is prepared while the one before it runs; None: wherever graphs are used.
        q_padding_interval_size: query tokens of a recorded pass are a multiple of this.
        kv_padding_interval_size: KV tokens that a recorded pass reads of its longest request are a multiple of this.
        max_cached_graphs: recorded passes that are kept, at most.
    """

    page_size: int | None = None
    num_blocks: int | None = None
    max_batch_tokens: int | None = None
    max_requests_per_batch: int | None = None
    max_memory_percent: float | None = None
    scheduler_type: str = "fifo"
    safety_margin: float | None = None
    allow_block_sharing: bool = True
    cpu_offload_space: float = 0.0
    kv_cache_dtype: str = "auto"
    balance_tail: bool = True
    deterministic: bool = False
    use_cuda_graph: bool | None = None
    use_async_batching: bool | None = None
    q_padding_interval_size: int | None = None
    kv_padding_interval_size: int | None = None
    max_cached_graphs: int | None = None

    def kv_dtype_name(self, model_dtype: str) -> str:
        """What KV is kept in for a model of this dtype."""
        return model_dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    def resolve(self, device_type: str) -> "ResolvedConfig":
        """Fills in the defaults of a device type: "cpu", "cuda" or "mps". Raises UsageError on a value out of range."""
        if self.scheduler_type not in DEFAULT_SAFETY_MARGIN:
            known = ", ".join(DEFAULT_SAFETY_MARGIN)
            raise UsageError(f"scheduler_type: {self.scheduler_type!r} is not one of: {known}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise UsageError(f"kv_cache_dtype: {self.kv_cache_dtype!r} is not one of: {', '.join(KV_CACHE_DTYPES)}")
        self._refuse_graphs_that_cannot_be(device_type)
        return ResolvedConfig(
            page_size=_at_least(1, "page_size", _default(self.page_size, DEFAULT_PAGE_SIZE[device_type])),
            num_blocks=None if self.num_blocks is None else _at_least(1, "num_blocks", self.num_blocks),
            max_batch_tokens=_at_least(
                1, "max_batch_tokens", _default(self.max_batch_tokens, DEFAULT_MAX_BATCH_TOKENS[device_type])
            ),
            max_requests_per_batch=_at_least(
                1,
                "max_requests_per_batch",
                _default(self.max_requests_per_batch, DEFAULT_MAX_REQUESTS_PER_BATCH[device_type]),
            ),
            max_memory_percent=_share(
                "max_memory_percent", _default(self.max_memory_percent, DEFAULT_MAX_MEMORY_PERCENT[device_type])
            ),
            scheduler_type=self.scheduler_type,
            safety_margin=_margin(_default(self.safety_margin, DEFAULT_SAFETY_MARGIN[self.scheduler_type])),
            allow_block_sharing=self.allow_block_sharing,
            cpu_offload_space=_space(self.cpu_offload_space),
            kv_cache_dtype=self.kv_cache_dtype,
            balance_tail=self.balance_tail,
            deterministic=self.deterministic,
            use_cuda_graph=self.use_cuda_graph,
            use_async_batching=self.use_async_batching,
            q_padding_interval_size=_at_least(
                1, "q_padding_interval_size", _default(self.q_padding_interval_size, DEFAULT_Q_PADDING_INTERVAL_SIZE)
            ),
            kv_padding_interval_size=_at_least(
                1, "kv_padding_interval_size", _default(self.kv_padding_interval_size, DEFAULT_KV_PADDING_INTERVAL_SIZE)
            ),
            max_cached_graphs=_at_least(
                1, "max_cached_graphs", _default(self.max_cached_graphs, DEFAULT_MAX_CACHED_GRAPHS)
            ),
        )

    def _refuse_graphs_that_cannot_be(self, device_type: str) -> None:
        if self.use_cuda_graph and device_type != "cuda":
            raise UsageError(
                f"use_cuda_graph: only CUDA devices record graphs, and this is {device_type}; leave it out"
            )
        if self.use_async_batching and device_type != "cuda":
            raise UsageError(
                f"use_async_batching: batches overlap on the streams of CUDA devices, and this is {device_type}; leave "
                "it out"
            )
        if self.use_async_batching and self.use_cuda_graph is False:
            raise UsageError(
                "use_async_batching: batches overlap only where graphs are replayed, whose addresses never change, and "
                "use_cuda_graph is off; give one of them"
            )

    def warnings_about_graphs(self, device_type: str) -> Iterator[str]:
        """What is said of graphs where there will be none, as a line for the user."""
        given = [name for name in GRAPH_DETAILS if getattr(self, name) is not None]
        if not given or (device_type == "cuda" and self.use_cuda_graph is not False):
            return
        names = " and ".join("--" + name.replace("_", "-") for name in given)
        has = "has" if len(given) == 1 else "have"
        if device_type != "cuda":
            yield f"{names} {has} no effect on {device_type}: only CUDA devices record graphs"
        else:
            yield f"{names} {has} no effect with --no-use-cuda-graph"


@dataclass(frozen=True)
class ResolvedConfig:
    """The same options after `resolve`.

    `num_blocks` is None until the cache is sized, unless the user pinned it. `use_cuda_graph` and `use_async_batching`
    are None where whoever builds the engine decides, knowing what its attention can do.
    """

    page_size: int
    num_blocks: int | None
    max_batch_tokens: int
    max_requests_per_batch: int
    max_memory_percent: float
    scheduler_type: str
    safety_margin: float
    allow_block_sharing: bool
    cpu_offload_space: float
    kv_cache_dtype: str
    balance_tail: bool
    deterministic: bool
    use_cuda_graph: bool | None
    use_async_batching: bool | None
    q_padding_interval_size: int
    kv_padding_interval_size: int
    max_cached_graphs: int

    @property
    def cpu_offload_bytes(self) -> int:
        return int(self.cpu_offload_space * 2**30)


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _at_least(minimum: int, name: str, value: int) -> int:
    if value < minimum:
        raise UsageError(f"{name}: {value} is too small, at least {minimum} is needed")
    return value


def _share(name: str, value: float) -> float:
    if not 0.0 < value <= 1.0:
        raise UsageError(f"{name}: {value} is not a share between 0 (excluded) and 1")
    return value


def _margin(value: float) -> float:
    if not 0.0 <= value < 1.0:
        raise UsageError(f"safety_margin: {value} is not a share between 0 and 1 (excluded)")
    return value


def _space(value: float) -> float:
    if not 0.0 <= value < float("inf"):
        raise UsageError(f"cpu_offload_space: {value} is not a number of GiB, 0 or more")
    return value
