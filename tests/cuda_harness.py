"""Engines on a GPU in half precision, rehearsed on the CPU, and what their tokens are compared with.

A rehearsal attends by a reference of the GPU's kernel, and records passes by keeping the function: it shows that a test
can pass and can fail, not that a GPU does what it should. On a GPU whose torch has no such kernel, one of plain
operations stands in for it.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from dense_varlen import dense_varlen
from engine_harness import CPU, NAN_BYTE
from kernels.varlen_reference import varlen_reference
from staged_harness import DeferredStreams
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from cbgen.cache.pool import WRITE_RESERVE_CHUNK
from cbgen.config import ContinuousBatchingConfig, ModelShape, ResolvedConfig
from cbgen.engine.build import Engine, build_engine
from cbgen.engine.draws import uniform_draws
from cbgen.engine.execution import Execution
from cbgen.engine.requests import RequestState
from cbgen.engine.sampling_params import SamplingParams
from cbgen.kernels.cuda import VarlenAttention, torch_varlen_attn, varlen_problem
from cbgen.models import seam
from cbgen.streams import CudaStreams, InOrderStreams, Streams

CONTEXT = 2048
VOCABULARY = 320
PAGE = 256  # the least that the kernel takes
WINDOW = 300  # no multiple of a page: rings hold more than the window
FREE_BYTES = 4 << 30
EOS = frozenset([1])
# Weights large enough that a token follows from its context, and so small that rounding is not amplified: with 0.25,
# two right computations in bfloat16 differ by up to 12 % of the range of the logits.
COMMON = {"vocab_size": VOCABULARY, "initializer_range": 0.1, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
DECODER = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**COMMON, **DECODER),
    "qwen3": Qwen3Config(**COMMON, **DECODER | {"head_dim": 128}),
    "mixtral": MixtralConfig(**COMMON, **DECODER, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "gpt2": GPT2Config(**COMMON, n_embd=256, n_layer=3, n_head=4, n_positions=CONTEXT),
    "mistral": MistralConfig(**COMMON, **DECODER, sliding_window=WINDOW),
    "gemma3": Gemma3TextConfig(
        **COMMON,
        **DECODER,
        sliding_window=WINDOW,
        tie_word_embeddings=False,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}


@dataclass(frozen=True)
class HalfModel:
    """A model that attends through cbgen, beside an untouched copy that answers what is right, on one device."""

    model: PreTrainedModel
    reference: PreTrainedModel
    shape: ModelShape


@dataclass(frozen=True)
class World:
    """Where engines run, and in what their models compute."""

    device: torch.device
    dtype: torch.dtype
    stand_in: Callable[..., Any] | None = None  # for torch's kernel

    @classmethod
    def on(cls, device: torch.device) -> "World":
        """bfloat16 on a GPU, with torch's kernel if it has it."""
        problem = varlen_problem(
            torch_varlen_attn(), torch.cuda.get_device_capability(device), torch.bfloat16, PAGE, 64, ()
        )
        return cls(device, torch.bfloat16, None if problem is None else dense_varlen)

    @property
    def is_rehearsal(self) -> bool:
        return self.device.type == "cpu"

    def model(self, name: str, **changes: object) -> HalfModel:
        config = copy.deepcopy(CONFIGS[name])
        for key, value in changes.items():
            setattr(config, key, value)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            reference = AutoModelForCausalLM.from_config(config, dtype=self.dtype).eval().to(self.device)
        model = copy.deepcopy(reference)
        reference.set_attn_implementation("eager")
        return HalfModel(model, reference, seam.attach(model, name, CONTEXT))

    def engine(
        self,
        under_test: HalfModel,
        graphs: bool | None = True,
        overlaps: bool | None = True,
        notify: Callable[[str], None] = lambda line: None,
        poison: bool = True,
        free_bytes: int = FREE_BYTES,
        **options: object,
    ) -> Engine:
        """On a GPU as a user gets it. graphs: None lets the engine choose, as the CPU's own does in a rehearsal.
        poison: memory that counts as not initialized is NaN (law 8)."""
        config = self.config(graphs, overlaps, options)
        execution = None
        if self.stand_in is not None and graphs is not None:
            execution = self.execution(under_test.shape, config, graphs, bool(overlaps))
        engine = build_engine(
            under_test.model,
            under_test.shape,
            self.dtype,
            config,
            EOS,
            self.device,
            free_bytes,
            notify,
            execution=execution,
        )
        if poison:
            pages = engine.manager.passes.runner._storage.pages
            self.synchronize()
            pages[WRITE_RESERVE_CHUNK * engine.plan.layout.pages_per_chunk :].fill_(NAN_BYTE)
            self.synchronize()
        return engine

    def config(self, graphs: bool | None, overlaps: bool | None, options: dict[str, object]) -> ResolvedConfig:
        less: dict[str, object] = {"max_cached_graphs": 24}  # of which half are recorded in advance: that takes time
        if self.is_rehearsal:
            less |= {"max_requests_per_batch": 16, "max_cached_graphs": 8}
        config = ContinuousBatchingConfig(**{"page_size": PAGE, "num_blocks": 48, **less, **options})
        if not self.is_rehearsal and graphs is not None:
            config = replace(config, use_cuda_graph=graphs, use_async_batching=overlaps)
        return config.resolve(self.device.type)

    def execution(self, shape: ModelShape, config: ResolvedConfig, graphs: bool, overlaps: bool) -> Execution:
        """With what stands in for torch's kernel."""
        sizes = (config.page_size, shape.num_heads, shape.num_kv_heads, shape.head_dim)
        backend = VarlenAttention(*sizes, self.dtype, kernel=self.stand_in)
        streams: Streams = DeferredStreams(0)
        if not self.is_rehearsal:
            streams = CudaStreams(self.device) if overlaps else InOrderStreams(self.device)
        return Execution(backend, streams, 2 if overlaps else 1, graphs)

    def synchronize(self) -> None:
        """All that the device was given is done."""
        if not self.is_rehearsal:
            torch.cuda.synchronize(self.device)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """How many prompts a test runs, the longest of them, and the most tokens that one asks for."""
        return (4, 290, 5) if self.is_rehearsal else (16, 900, 48)


REHEARSAL = World(CPU, torch.float32, varlen_reference)  # a CPU is slow in half precision


@functools.cache
def model_of(world: World, name: str) -> HalfModel:
    """Built once for all tests: engines change nothing in it."""
    return world.model(name)


@torch.inference_mode()
def logits_after(under_test: HalfModel, prompt: list[int], output: list[int]) -> torch.Tensor:
    """float32 [len(output), vocab]: what the reference gives before each token of an output that is prescribed."""
    ids = torch.tensor([prompt + output[:-1]], device=under_test.reference.device)
    return under_test.reference(ids, use_cache=False, logits_to_keep=len(output)).logits[0].float()


def shortfalls(logits: torch.Tensor, chosen: list[int]) -> torch.Tensor:
    """[N]: by how much of the range of a row of logits [N, vocab] the chosen token is below the best one."""
    own = logits.gather(1, torch.tensor(chosen, device=logits.device)[:, None])[:, 0]
    best = logits.amax(-1)
    return (best - own) / (best - logits.amin(-1))


def draw_errors(logits: torch.Tensor, chosen: list[int], params: SamplingParams) -> np.ndarray:
    """[N]: how far a row's draw lies outside the stretch of cumulated probability of the token that it gave."""
    cumulated = (logits.double() / params.temperature).softmax(-1).cumsum(-1).cpu().numpy()
    places = np.arange(len(chosen))
    draws = uniform_draws(np.full(len(chosen), params.seed, np.uint64), places.astype(np.uint64))
    ends, tokens = cumulated[places, chosen], np.array(chosen)
    starts = np.where(tokens > 0, cumulated[places, np.maximum(tokens - 1, 0)], 0.0)
    return np.maximum(0.0, np.maximum(starts - draws, draws - ends))


def assert_complete(request: RequestState) -> None:
    """It generated all that it may, or ended at the end of the text."""
    assert request.error is None, request.error
    ids = request.generated_ids
    assert len(ids) == request.params.max_tokens or ids[-1] in EOS, (request.request_id, len(ids))
