"""What a run computed and read, and the most that this machine computes and reads in a second."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cbgen.config import DEFAULT_MAX_BATCH_TOKENS, FULL_ATTENTION, ModelShape
from cbgen.device import synchronize
from cbgen.engine.scheduler import ScheduledBatch
from cbgen.models.loading import ModelDescription

MATRIX_SECONDS = 1.0
READ_BYTES, READ_TRIES = 256 << 20, 8


@dataclass
class Work:
    """Counted over forward passes; tokens taken from the cache and padding are not computed and do not count.

    sampled_tokens: query tokens whose logits were computed. attended_tokens: how many tokens each query token sees,
    itself included, summed over query tokens and layers. kv_tokens_read: tokens of KV, of one layer each, that a pass
    reads: every request's own once per pass, also where requests share pages.
    layers: for each type of attention, the window (None: all) and how many layers have it.
    """

    layers: list[tuple[int | None, int]]
    num_steps: int = 0
    query_tokens: int = 0
    sampled_tokens: int = 0
    attended_tokens: int = 0
    kv_tokens_read: int = 0

    @classmethod
    def of(cls, shape: ModelShape) -> "Work":
        num_full = shape.layer_types.count(FULL_ATTENTION)
        kinds = [(None, num_full), (shape.sliding_window, shape.num_layers - num_full)]
        return cls([(window, count) for window, count in kinds if count])

    def count(self, batch: ScheduledBatch) -> None:
        self.num_steps += 1
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
    """What a model's arithmetic comes to, by the numbers that Work counts.

    layer_parameters: those of the matrix products that every token goes through; of a mixture of experts, those of the
    experts that one token takes. head_parameters: of the output head. attended_flops: operations for one query token
    and one token that it sees in one layer. kv_token_bytes: bytes of KV of one token in one layer.
    """

    layer_parameters: float
    head_parameters: int
    attended_flops: int
    kv_token_bytes: float

    @classmethod
    def of(cls, model: PreTrainedModel, shape: ModelShape, kv_token_bytes: float) -> "ModelCosts":
        """model: with transformers' own modules, see bare_model."""
        config = model.config.get_text_config()
        chosen = getattr(config, "num_experts_per_tok", None) or 0
        experts = sum(chosen * weights.numel() / len(weights) for weights in expert_weights(model))
        dense = sum(outputs * inputs for outputs, inputs in _layer_shapes(model))
        return cls(
            layer_parameters=dense + experts,
            head_parameters=shape.vocab_size * shape.hidden_size,
            attended_flops=4 * shape.head_dim * shape.num_heads,
            kv_token_bytes=kv_token_bytes,
        )

    def flops(self, work: Work) -> float:
        """Operations; a multiplication and an addition are two."""
        products = self.layer_parameters * work.query_tokens + self.head_parameters * work.sampled_tokens
        return 2 * products + self.attended_flops * work.attended_tokens

    def kv_bytes(self, work: Work) -> float:
        return self.kv_token_bytes * work.kv_tokens_read


@dataclass(frozen=True)
class Ceilings:
    """The most that this machine was seen to do. dtype: of the matrix products."""

    dtype: str
    matrix_flops_per_s: float
    read_bytes_per_s: float
    best_shape: list[int] = field(default_factory=list)

    @classmethod
    def measure(cls, model: PreTrainedModel, device: torch.device) -> "Ceilings":
        """Takes some two seconds. Matrix products are of a full batch, at the shapes of the layers of a bare model."""
        shapes = sorted(set(_layer_shapes(model)))
        num_tokens = DEFAULT_MAX_BATCH_TOKENS[device.type]
        rates = [
            (_product_rate(num_tokens, shape, model.dtype, device, MATRIX_SECONDS / len(shapes)), shape)
            for shape in shapes
        ]
        rate, best_shape = max(rates)
        dtype = str(model.dtype).removeprefix("torch.")
        return cls(dtype, rate, _read_rate(device), [num_tokens, *best_shape])


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


def _layer_shapes(model: PreTrainedModel) -> list[tuple[int, int]]:
    """(outputs, inputs) of every linear module but the output head."""
    head = model.get_output_embeddings()
    shapes = (_shape(module) for module in model.modules() if module is not head)
    return [shape for shape in shapes if shape is not None]


def _product_rate(
    num_tokens: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, seconds: float
) -> float:
    """Operations per second of the fastest of the products that fit in so many seconds, one at least."""
    inputs = torch.randn(num_tokens, shape[1], device=device).to(dtype)
    weights = torch.randn(*shape, device=device).to(dtype)
    best_s = _best_s(lambda: torch.nn.functional.linear(inputs, weights), device, seconds)
    return 2.0 * num_tokens * shape[0] * shape[1] / best_s


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
