"""What a run computed and read, and the most that this machine computes and reads in a second.

Every figure is defined in docs/metrics.md.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cbgen.config import DEFAULT_MAX_BATCH_TOKENS, FULL_ATTENTION, ModelShape
from cbgen.device import synchronize
from cbgen.engine.scheduler import ScheduledBatch
from cbgen.kernels.cpu.linear import IntegerWeight, PackedWeight
from cbgen.models.loading import ModelDescription
from cbgen.models.quantization import SCHEMES, Quantization, kernels_for

SCALE_BYTES = 4  # of an output of an int8 weight
MATRIX_SECONDS = 1.5
READ_BYTES, READ_TRIES = 256 << 20, 8
TORCH, CBGEN, ONEDNN = "torch", "cbgen", "oneDNN"
Product = Callable[[], object]
Maker = Callable[[int, int, int], Product]


@dataclass
class Work:
    """Counted over forward passes; tokens taken from the cache and padding are not computed and do not count.

    sampled_tokens: query tokens whose logits were computed. attended_tokens: how many tokens each query token sees,
    itself included, summed over query tokens and layers. kv_tokens_read: tokens of KV, of one layer each, that a pass
    reads: every request's own once per pass, also where requests share pages. passes: at place t, how many there were
    of t query tokens; sampling_passes: how many computed logits at all.
    layers: for each type of attention, the window (None: all) and how many layers have it.
    """

    layers: list[tuple[int | None, int]]
    num_steps: int = 0
    query_tokens: int = 0
    sampled_tokens: int = 0
    attended_tokens: int = 0
    kv_tokens_read: int = 0
    passes: list[int] = field(default_factory=list)
    sampling_passes: int = 0

    @classmethod
    def of(cls, shape: ModelShape) -> "Work":
        num_full = shape.layer_types.count(FULL_ATTENTION)
        kinds = [(None, num_full), (shape.sliding_window, shape.num_layers - num_full)]
        return cls([(window, count) for window, count in kinds if count])

    def count(self, batch: ScheduledBatch) -> None:
        self.num_steps += 1
        tokens = batch.num_query_tokens
        self.passes += [0] * (tokens + 1 - len(self.passes))
        self.passes[tokens] += 1
        self.sampling_passes += any(entry.samples for entry in batch.scheduled)
        for entry in batch.scheduled:
            self.query_tokens += entry.query_length
            self.sampled_tokens += entry.samples
            for window, num_layers in self.layers:
                self.attended_tokens += num_layers * visible_tokens(entry.start, entry.kv_length, window)
                read = entry.kv_length if window is None else min(entry.kv_length, window + entry.query_length - 1)
                self.kv_tokens_read += num_layers * read


def visible_tokens(start: int, end: int, window: int | None) -> int:
    """How many tokens the query tokens at positions start to end - 1 see, themselves included, all together."""
    growing = end if window is None else min(end, max(start, window))
    return (start + 1 + growing) * (growing - start) // 2 + (end - growing) * (window or 0)


@dataclass(frozen=True)
class ModelCosts:
    """What a model's arithmetic and memory come to, by the numbers that Work counts.

    layer_parameters: those of the matrix products that every token goes through; of a mixture of experts, those of the
    experts that one token takes. head_parameters: of the output head. attended_flops: operations for one query token
    and one token that it sees in one layer. kv_token_bytes: bytes of KV of one token in one layer.
    layer_bytes, head_bytes: of the same weights as they are held, without those of experts. expert_bytes: of all
    experts; a token takes expert_share of them.
    """

    layer_parameters: float
    head_parameters: int
    attended_flops: int
    kv_token_bytes: float
    layer_bytes: int
    head_bytes: int
    expert_bytes: int
    expert_share: float

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        shape: ModelShape,
        kv_token_bytes: float,
        quantization: Quantization | None = None,
    ) -> "ModelCosts":
        """model: with transformers' own modules, see bare_model."""
        config = model.config.get_text_config()
        chosen = getattr(config, "num_experts_per_tok", None) or 0
        experts = sum(chosen * weights.numel() / len(weights) for weights in expert_weights(model))
        all_experts = sum(weights.numel() for weights in expert_weights(model))
        head_shape = (shape.vocab_size, shape.hidden_size)
        return cls(
            layer_parameters=experts + sum(outputs * inputs for outputs, inputs in _layer_shapes(model)),
            head_parameters=shape.vocab_size * shape.hidden_size,
            attended_flops=4 * shape.head_dim * shape.num_heads,
            kv_token_bytes=kv_token_bytes,
            layer_bytes=sum(
                _held_bytes(module, own, model.dtype, quantization) for module, own in _layer_products(model)
            ),
            head_bytes=_held_bytes(model.get_output_embeddings(), head_shape, model.dtype, quantization),
            expert_bytes=all_experts * model.dtype.itemsize,
            expert_share=experts / all_experts if all_experts else 0.0,
        )

    def flops(self, work: Work) -> float:
        """Operations; a multiplication and an addition are two."""
        products = self.layer_parameters * work.query_tokens + self.head_parameters * work.sampled_tokens
        return 2 * products + self.attended_flops * work.attended_tokens

    def kv_bytes(self, work: Work) -> float:
        return self.kv_token_bytes * work.kv_tokens_read

    def weight_bytes(self, work: Work) -> float:
        """Each weight once per pass: the head where a token is sampled, and of experts as many as tokens can take."""
        experts = sum(count * min(1.0, tokens * self.expert_share) for tokens, count in enumerate(work.passes))
        return self.layer_bytes * work.num_steps + self.head_bytes * work.sampling_passes + self.expert_bytes * experts

    def read_bytes(self, work: Work) -> float:
        """Weights and KV. Activations are not counted: they stay in the processor's caches, or should."""
        return self.weight_bytes(work) + self.kv_bytes(work)


def _held_bytes(module: Any, shape: tuple[int, int], dtype: torch.dtype, quantization: Quantization | None) -> int:
    """Of one weight, without padding. int8 is what torch's own linear layers become, no others."""
    outputs, inputs = shape
    if quantization is not None and type(module) is torch.nn.Linear:
        return outputs * inputs + outputs * SCALE_BYTES
    return outputs * inputs * dtype.itemsize


@dataclass(frozen=True)
class Ceilings:
    """The most that this machine was seen to do. dtype: of the matrix products: float32, bfloat16, float16 or int8.

    products: whose they were. best_shape: their rows, outputs and inputs.
    """

    dtype: str
    matrix_flops_per_s: float
    read_bytes_per_s: float
    best_shape: list[int] = field(default_factory=list)
    products: str = TORCH

    @classmethod
    def measure(
        cls, model: PreTrainedModel, device: torch.device, quantization: Quantization | None = None
    ) -> "Ceilings":
        """Takes some two seconds. Matrix products are of a full batch, at the shapes of the layers of a bare model.

        In the precision of the run: torch's and, where they serve the model, cbgen's own. With int8 weights, cbgen's
        with as many bits of activations, and where these are 8 oneDNN's, which has one scale for all of them and is
        faster for it. The fastest of all counts, whoever has it: a ceiling is not what cbgen happens to reach.
        """
        shapes = sorted(set(_layer_shapes(model)))
        num_rows = DEFAULT_MAX_BATCH_TOKENS[device.type]
        makers = _products(model.dtype, device, quantization)
        seconds = MATRIX_SECONDS / (len(shapes) * len(makers))
        rates = [
            (_product_rate(make(num_rows, *shape), num_rows, shape, device, seconds), shape, name)
            for shape in shapes
            for name, make in makers.items()
        ]
        rate, best_shape, name = max(rates)
        dtype = "int8" if quantization is not None else str(model.dtype).removeprefix("torch.")
        return cls(dtype, rate, _read_rate(device), [num_rows, *best_shape], name)


def bare_model(description: ModelDescription) -> PreTrainedModel:
    """The model without its weights, with the modules that transformers gives it: a loaded one may have others."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(description.config, dtype=description.dtype)


def is_linear(module: torch.nn.Module) -> bool:
    """Whether a module is matrix products with weights: torch's own, transformers' two others, or one of cbgen's."""
    own = getattr(module, "is_cbgen_linear", False) or _shape(module) is not None
    return own or any(weights.dim() == 3 for weights in module.parameters(recurse=False))


def expert_weights(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The weights [experts, ..., ...] that a mixture of experts keeps in one tensor."""
    return (weights for weights in model.parameters() if weights.dim() == 3)


def _shape(module: torch.nn.Module) -> tuple[int, int] | None:
    """(outputs, inputs) of a linear module of torch or transformers, None of any other."""
    if isinstance(module, Conv1D):
        return module.nf, module.nx
    return (module.out_features, module.in_features) if isinstance(module, torch.nn.Linear) else None


def _layer_products(model: PreTrainedModel) -> Iterator[tuple[torch.nn.Module, tuple[int, int]]]:
    """Every linear module but the output head, with (outputs, inputs)."""
    head = model.get_output_embeddings()
    for module in model.modules():
        shape = _shape(module)
        if shape is not None and module is not head:
            yield module, shape


def _layer_shapes(model: PreTrainedModel) -> list[tuple[int, int]]:
    return [shape for _, shape in _layer_products(model)]


def _products(dtype: torch.dtype, device: torch.device, quantization: Quantization | None) -> dict[str, Maker]:
    """By the names of those whose they are: a function that makes the product for rows, outputs and inputs."""
    library = kernels_for(device, dtype)

    def of_torch(rows: int, outputs: int, inputs: int) -> Product:
        x, weight = torch.randn(rows, inputs, device=device).to(dtype), torch.randn(outputs, inputs, device=device)
        weight = weight.to(dtype)
        return lambda: torch.nn.functional.linear(x, weight)

    def of_cbgen(rows: int, outputs: int, inputs: int) -> Product:
        assert library is not None
        x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
        if quantization is None:
            packed = PackedWeight(library, weight, None)
        else:
            packed = IntegerWeight(library, weight, None, SCHEMES[quantization.scheme])
        return lambda: packed.multiply(x)

    if quantization is None:
        return {TORCH: of_torch} if library is None else {TORCH: of_torch, CBGEN: of_cbgen}
    has_bytes = SCHEMES[quantization.scheme] == 8 and _multiplies_bytes()
    return {CBGEN: of_cbgen, ONEDNN: _of_onednn} if has_bytes else {CBGEN: of_cbgen}


def _of_onednn(rows: int, outputs: int, inputs: int) -> Product:
    """uint8 by int8 to float32, with one scale for all of the input and one for each output."""
    x = torch.randint(0, 256, (rows, inputs), dtype=torch.uint8)
    weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(weight, None)
    scales, zeros = torch.ones(outputs), torch.zeros(outputs, dtype=torch.int64)
    rest: tuple[Any, ...] = (None, 1.0, 0, torch.float32, "none", [], "")  # no bias, and nothing done to the output
    return lambda: torch.ops.onednn.qlinear_pointwise(x, 1.0, 128, packed, scales, zeros, *rest)


def _multiplies_bytes() -> bool:
    """Whether this torch has oneDNN's products of bytes, which are none of its public functions."""
    try:
        _of_onednn(1, 16, 16)()
    except (AttributeError, RuntimeError, TypeError):  # NotImplementedError is a RuntimeError
        return False
    return True


def _product_rate(
    product: Product, num_rows: int, shape: tuple[int, int], device: torch.device, seconds: float
) -> float:
    """Operations per second of the fastest of the products that fit in so many seconds, one at least."""
    return 2.0 * num_rows * shape[0] * shape[1] / _best_s(product, device, seconds)


def _read_rate(device: torch.device) -> float:
    """Bytes per second that a sum over a large tensor reads."""
    values = torch.ones(READ_BYTES // 4, device=device)
    return READ_BYTES / min(_best_s(values.sum, device, 0.0) for _ in range(READ_TRIES))


def _best_s(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The least time that one of several calls takes, the first not counted."""
    call()
    synchronize(device)
    best_s, started_s = float("inf"), time.perf_counter()
    while best_s == float("inf") or time.perf_counter() - started_s < seconds:
        begun_s = time.perf_counter()
        call()
        synchronize(device)
        best_s = min(best_s, time.perf_counter() - begun_s)
    return best_s
