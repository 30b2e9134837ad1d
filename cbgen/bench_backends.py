"""The engines that a benchmark compares, behind one face: load at construction, then generate as often as asked."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers import ContinuousBatchingConfig as TransformersBatchingConfig

from cbgen.bench_profile import Profile, profiling
from cbgen.bench_work import Ceilings, ModelCosts, bare_model
from cbgen.bench_workloads import BenchRequest
from cbgen.cache.sizing import with_memory_utilization
from cbgen.config import ResolvedConfig
from cbgen.device import free_memory_bytes, total_memory_bytes
from cbgen.duplicates import Recipients
from cbgen.engine.build import Engine, build_engine
from cbgen.engine.manager import ListSource
from cbgen.engine.requests import RequestState
from cbgen.engine.sampling_params import SamplingParams
from cbgen.errors import ModelError
from cbgen.models import tiny_random
from cbgen.models.loading import ModelDescription, load
from cbgen.models.quantization import Quantization
from cbgen.ordering import WaitingRequest, arrange, pack_ids

STATIC_BATCH = 32
PADDING_ID = 0
# Of transformers' continuous batching on CPUs: the fastest of the sizes that were tried with SmolLM2-135M on two cores.
CB_PAGE_SIZE, CB_MIN_BLOCKS, CB_BATCH_TOKENS, CB_BATCH_REQUESTS = 128, 200, 256, 16
NO_EOS = -1


@dataclass(frozen=True)
class BackendOptions:
    """What backends are made from; the engine's options are of cbgen alone."""

    model: ModelDescription
    device: torch.device
    config: ResolvedConfig
    gpu_memory_utilization: float | None
    quantization: Quantization | None = None
    order: str = "arrival"


@dataclass(frozen=True)
class Generated:
    """The generated token ids of each request, in order, and the seconds from the first request to the last token."""

    token_ids: list[list[int]]
    wall_s: float


class Backend(Protocol):
    def generate(self, requests: list[BenchRequest]) -> Generated:
        """Greedy, exactly max_tokens for each request. What earlier calls have cached does not help."""


class CbgenBackend:
    """cbgen's engine, without the job around it: a new one, with an empty cache, for every run."""

    def __init__(self, options: BackendOptions):
        self._options = options
        self._model, self._shape = load(options.model, options.device, options.quantization)
        self._free_bytes = free_memory_bytes(options.device)
        self._config = options.config
        if options.gpu_memory_utilization is not None:
            total_bytes = total_memory_bytes(options.device)
            self._config = with_memory_utilization(
                options.config, options.gpu_memory_utilization, total_bytes, self._free_bytes
            )

    def generate(self, requests: list[BenchRequest]) -> Generated:
        return _run_engine(self._engine(), requests, self._options.order)

    def profile(self, requests: list[BenchRequest]) -> Profile:
        """One more run, watched."""
        engine, device = self._engine(), self._options.device
        with profiling(engine, self._model, self._shape, device) as profiler:
            generated = _run_engine(engine, requests, self._options.order)
        layout = engine.plan.layout
        kv_token_bytes = engine.plan.chunk_bytes / layout.pages_per_chunk / layout.page_size
        bare = bare_model(self._options.model)
        costs = ModelCosts.of(bare, self._shape, kv_token_bytes)
        assert engine.config.num_blocks is not None, "the cache is sized when an engine is built"
        return Profile(
            seconds=profiler.seconds,
            wall_s=generated.wall_s,
            work=profiler.work,
            flops=costs.flops(profiler.work),
            kv_bytes=costs.kv_bytes(profiler.work),
            ceilings=Ceilings.measure(bare, device),
            attention_backend=engine.kernel,
            num_blocks=engine.config.num_blocks,
        )

    def _engine(self) -> Engine:
        gc.collect()  # the cache of the engine before may hang on a cycle
        model, device = self._options.model, self._options.device
        return build_engine(
            self._model, self._shape, model.dtype, self._config, model.eos_token_ids, device, self._free_bytes
        )


def _run_engine(engine: Engine, requests: list[BenchRequest], order: str) -> Generated:
    """The requests as a job would hand them to the engine; putting them in order is part of the time."""
    params = [SamplingParams(request.max_tokens, ignore_eos=True) for request in requests]
    start_s = time.perf_counter()
    waiting = [
        WaitingRequest(number, pack_ids(request.prompt_ids), [(own, Recipients([]))])
        for number, (request, own) in enumerate(zip(requests, params, strict=True))
    ]
    page_tokens = engine.config.page_size if engine.manager.cache.shares_blocks else None
    states = [
        RequestState(place, list(requests[one.arrival].prompt_ids), params[one.arrival], tag=one.arrival)
        for place, one in enumerate(arrange(waiting, order, page_tokens))
    ]
    for state in engine.manager.run(ListSource(states)):
        if state.error is not None:
            raise ModelError(f"request {state.tag + 1}: {state.error}")
    wall_s = time.perf_counter() - start_s
    return Generated([state.generated_ids for state in sorted(states, key=lambda state: state.tag)], wall_s)


class HfBackend:
    """transformers' `generate`: batches of STATIC_BATCH in order, padded on the left, each as long as its longest."""

    def __init__(self, options: BackendOptions):
        self._model: Any = _plain_model(options)

    @torch.inference_mode()
    def generate(self, requests: list[BenchRequest]) -> Generated:
        start_s = time.perf_counter()
        token_ids: list[list[int]] = []
        for first in range(0, len(requests), STATIC_BATCH):
            token_ids += self._generate_batch(requests[first : first + STATIC_BATCH])
        return Generated(token_ids, time.perf_counter() - start_s)

    def _generate_batch(self, batch: list[BenchRequest]) -> list[list[int]]:
        width = max(len(request.prompt_ids) for request in batch)
        padding = [width - len(request.prompt_ids) for request in batch]
        pairs = list(zip(padding, batch, strict=True))
        input_ids = torch.tensor([[PADDING_ID] * padded + request.prompt_ids for padded, request in pairs])
        mask = torch.tensor([[0] * padded + [1] * (width - padded) for padded in padding])
        longest = max(request.max_tokens for request in batch)
        output = self._model.generate(
            input_ids=input_ids.to(self._model.device),
            attention_mask=mask.to(self._model.device),
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=PADDING_ID,
        )
        generated = output[:, width:].tolist()
        return [ids[: request.max_tokens] for ids, request in zip(generated, batch, strict=True)]


class HfContinuousBackend:
    """transformers' own continuous batching."""

    def __init__(self, options: BackendOptions):
        self._model: Any = _plain_model(options)

    @torch.inference_mode()
    def generate(self, requests: list[BenchRequest]) -> Generated:
        settings = GenerationConfig(do_sample=False, eos_token_id=NO_EOS, pad_token_id=PADDING_ID)
        config = self._batching_config(max(len(r.prompt_ids) + r.max_tokens for r in requests))
        with self._model.continuous_batching_context_manager(
            generation_config=settings, continuous_batching_config=config, block=True, warmup=False
        ) as manager:
            start_s = time.perf_counter()
            names = [
                manager.add_request(request.prompt_ids, max_new_tokens=request.max_tokens, eos_token_id=NO_EOS)
                for request in requests
            ]
            finished = self._collect(manager, len(names))
            wall_s = time.perf_counter() - start_s
        return Generated([finished[name] for name in names], wall_s)

    def _batching_config(self, longest_tokens: int) -> TransformersBatchingConfig:
        if self._model.device.type == "cuda":
            return TransformersBatchingConfig()  # it sizes itself to the memory there
        full_batch = CB_BATCH_REQUESTS * (longest_tokens // CB_PAGE_SIZE + 1)
        return TransformersBatchingConfig(
            page_size=CB_PAGE_SIZE,
            num_blocks=max(CB_MIN_BLOCKS, full_batch),
            max_batch_tokens=CB_BATCH_TOKENS,
            max_requests_per_batch=CB_BATCH_REQUESTS,
        )

    @staticmethod
    def _collect(manager: Any, count: int) -> dict[str, list[int]]:
        finished: dict[str, list[int]] = {}
        while len(finished) < count:
            output = manager.get_result(timeout=1.0)
            if output is not None and output.error is not None:
                raise ModelError(f"continuous batching failed: {output.error}")
            if output is not None and output.is_finished():
                finished[output.request_id] = output.generated_tokens
            if output is None and not manager.is_running():
                raise ModelError("continuous batching stopped before all requests were done")
        return finished


def _plain_model(options: BackendOptions) -> PreTrainedModel:
    """The model as transformers runs it, with torch's own attention (sdpa) if it has that, and nothing but defaults."""
    description = options.model
    if description.location is None:
        model: Any = tiny_random.build_model(description.dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(
            description.location, revision=description.revision, dtype=description.dtype
        )
    model.generation_config = GenerationConfig()  # its penalties, end tokens and sampling would be other work
    return model.to(options.device).eval()


CBGEN = "cbgen"
BACKENDS: dict[str, Callable[[BackendOptions], Backend]] = {
    CBGEN: CbgenBackend,
    "hf": HfBackend,
    "hf-cb": HfContinuousBackend,
}
