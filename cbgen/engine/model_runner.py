"""Runs the model over a packed batch. Each attention layer calls back into one function: the only way up."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

import torch

from cbgen.cache.layout import CacheLayout
from cbgen.cache.storage import KVStorage
from cbgen.engine.failures import named_failures
from cbgen.engine.fixed_products import FixedProducts, multiplies_in_torch
from cbgen.engine.input_outputs import BatchInputs
from cbgen.kernels.backend import AttentionBackend, AttentionOptions


class LayerAttention(Protocol):
    """What an attention layer calls with its query, key and value after rotary embedding.

    query: [1, heads, T, head_dim]; key and value: [1, kv_heads, T, head_dim]. Returns [1, T, heads, head_dim].
    options: the keywords that the layer gives its attention function (softcap, sinks, window).
    """

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        options: dict[str, Any],
    ) -> torch.Tensor: ...

    def direct(self, layer: int, head_dim: int, scaling: float | None, options: dict[str, Any]) -> Any:
        """See AttentionBackend.direct."""

    @property
    def wanted(self) -> torch.Tensor | None:
        """The tokens whose hidden states are read after the last layer, ascending; None: all."""


_layer_attention: ContextVar[LayerAttention] = ContextVar("layer_attention")


@contextmanager
def serving_attention(attention: LayerAttention) -> Iterator[None]:
    """Inside, models whose attention implementation is cbgen's attend through `attention`.

    The batch goes this way and not through the model's keyword arguments, because some models drop those.
    """
    token = _layer_attention.set(attention)
    try:
        yield
    finally:
        _layer_attention.reset(token)


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function as transformers calls it, to be registered there; no mask is needed or read."""
    return _layer_attention.get()(module.layer_idx, query, key, value, scaling, options), None


def direct_attention(layer: int, head_dim: int, scaling: float | None = None, **options: Any) -> Any:
    """See AttentionBackend.direct; the keywords are those of `attention_forward`."""
    return _layer_attention.get().direct(layer, head_dim, scaling, options)


def wanted_rows() -> torch.Tensor | None:
    """See LayerAttention.wanted."""
    return _layer_attention.get().wanted


class _BatchAttention:
    """LayerAttention for one forward pass."""

    def __init__(
        self,
        backend: AttentionBackend,
        layers: Sequence[Any],
        group_of: dict[int, int],
        plans: list[Any],
        wanted: torch.Tensor,
    ):
        self._backend, self._layers, self._group_of, self._plans = backend, layers, group_of, plans
        self.wanted = wanted

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        asked = attention_options(query.shape[-1], scaling, options)
        plan = self._plans[self._group_of[layer]]
        return self._backend.attend(query, key, value, self._layers[layer], plan, asked)[None]

    def direct(self, layer: int, head_dim: int, scaling: float | None, options: dict[str, Any]) -> Any:
        asked = attention_options(head_dim, scaling, options)
        return self._backend.direct(self._layers[layer], self._plans[self._group_of[layer]], asked)


class ModelRunner:
    """A model, the storage of its KV and the kernel that attends over it."""

    def __init__(
        self,
        model: torch.nn.Module,
        layout: CacheLayout,
        storage: KVStorage,
        backend: AttentionBackend,
        deterministic: bool = False,
    ):
        self._model = model
        # Products of cbgen's own have the same bits in any company as they are.
        self._products = FixedProducts() if deterministic and multiplies_in_torch(model) else nullcontext()
        self._storage = storage
        self._backend = backend
        self._group_of = {layer: number for number, group in enumerate(layout.groups) for layer in group.layers}

    @named_failures()
    @torch.inference_mode()
    def forward(self, inputs: BatchInputs) -> torch.Tensor:
        """Writes the batch's KV and returns the logits [S, vocab] of the tokens that sample. Errors: failures.py."""
        plans = [self._backend.prepare(batch) for batch in inputs.attention]
        attention = _BatchAttention(self._backend, self._storage.layers, self._group_of, plans, inputs.logits_indices)
        with serving_attention(attention), self._products:
            output = self._model(
                input_ids=inputs.input_ids,
                position_ids=inputs.position_ids,
                use_cache=False,
                logits_to_keep=inputs.logits_indices,
            )
        return output.logits[0]

    def release_memory(self) -> None:
        """What torch keeps for later goes back to the device."""
        if self._storage.pages.device.type == "cuda":
            torch.cuda.empty_cache()

    @named_failures()
    @torch.inference_mode()
    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """See KVStorage.copy_pages."""
        self._storage.copy_pages(pairs)


def attention_options(head_dim: int, scaling: float | None, options: dict[str, Any]) -> AttentionOptions:
    """What a layer asks for, from the keywords that it gives its attention function."""
    scale = head_dim**-0.5 if scaling is None else scaling
    return AttentionOptions(scale, softcap=options.get("softcap"), sinks=options.get("s_aux"))
