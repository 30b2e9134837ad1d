"""A decoder layer of the most common kind as one call into C, or as two around its attention.

The kind is that of Llama, Mistral, Qwen 2 and 3, SmolLM and others: a norm before attention and one before a gated MLP,
both added to their input; rotary embedding of whole heads' first numbers, half against half. A layer that merely looks
like it is found out by the model's logits.
"""

from typing import Any

import torch
from torch import nn

from cbgen.engine.model_runner import attention_forward, direct_attention, wanted_rows
from cbgen.kernels.cpu.library import Library
from cbgen.kernels.cpu.linear import LayerKernel, LayerParts, Workspace
from cbgen.models.cpu_modules import FastRMSNorm, Multiplier, fast_norm, gated_mlp, joined

LAYER_CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
HEAD_NORMS = ("q_norm", "k_norm")


class FastDecoderLayer(nn.Module):
    """Takes and gives hidden states [1, tokens, width], as the layer whose place it takes."""

    is_cbgen_linear = True

    def __init__(self, kernel: LayerKernel, layer_idx: int, is_last: bool, asked: dict[str, Any]):
        super().__init__()
        self.layer_idx, self._is_last = layer_idx, is_last
        self._kernel, self._asked = kernel, asked

    def forward(self, hidden_states: torch.Tensor, *_: Any, **keywords: Any) -> torch.Tensor:
        cosine, sine = (part[0].contiguous() for part in keywords["position_embeddings"])
        x = hidden_states[0].contiguous()
        direct = direct_attention(self.layer_idx, self._kernel.parts.dim, **self._asked)
        if direct is not None:
            wanted = wanted_rows() if self._is_last else None
            return self._kernel.run(x, cosine, sine, direct, wanted)[None]
        parts = self._kernel.parts
        qkv = self._kernel.begin(x, cosine, sine).transpose(0, 1)[None]
        query, key, value = qkv.split((parts.heads, parts.kv_heads, parts.kv_heads), dim=1)
        attended = attention_forward(self, query, key, value, None, **self._asked)[0]
        return self._kernel.end(x, attended.reshape(len(x), -1))[None]


def fast_decoder_layer(
    library: Library,
    module: nn.Module,
    asked: dict[int, dict[str, Any]],
    weight_of: Multiplier,
    path: str,
    workspaces: dict[tuple[int, ...], Workspace],
) -> FastDecoderLayer | None:
    """One of ours for a layer of the kind, or None. asked: what each layer asks of its attention, by its number."""
    if {name for name, _ in module.named_children()} != LAYER_CHILDREN:
        return None
    attention: Any = module.self_attn
    children = {name for name, _ in attention.named_children()}
    dim, number = getattr(attention, "head_dim", None), getattr(attention, "layer_idx", None)
    if (
        not set(PROJECTIONS) <= children <= {*PROJECTIONS, *HEAD_NORMS}
        or not isinstance(dim, int)
        or number not in asked
    ):
        return None
    projections: list[Any] = [getattr(attention, name) for name in PROJECTIONS]
    if not all(type(part) is nn.Linear and part.weight.dtype == torch.float32 for part in projections):
        return None
    layer: Any = module
    norms = [fast_norm(library, part) for part in (layer.input_layernorm, layer.post_attention_layernorm)]
    head_norms = [fast_norm(library, getattr(attention, name)) if name in children else None for name in HEAD_NORMS]
    mlp = gated_mlp(library, layer.mlp, weight_of, f"{path}.mlp")
    if None in norms or mlp is None or sum(norm is not None for norm in head_norms) != len(children) - len(PROJECTIONS):
        return None
    query, key, value, out = projections
    parts = LayerParts(
        heads=query.out_features // dim,
        kv_heads=key.out_features // dim,
        dim=dim,
        activation=mlp.activation,
        input_norm=_weights(norms[0]),
        mlp_norm=_weights(norms[1]),
        query_norm=_weights(head_norms[0]) if head_norms[0] else None,
        key_norm=_weights(head_norms[1]) if head_norms[1] else None,
        qkv=joined([query, key, value], weight_of, f"{path}.self_attn.q_proj"),
        out=joined([out], weight_of, f"{path}.self_attn.o_proj"),
        gate_up=mlp.gate_up,
        down=mlp.down,
    )
    own = parts.workspace()
    workspace = workspaces.setdefault(own.shape, own)
    return FastDecoderLayer(LayerKernel(library, parts, workspace), number, number == max(asked), asked[number])


def _weights(norm: FastRMSNorm | None) -> tuple[torch.Tensor, float]:
    assert norm is not None
    return norm.scale, norm.epsilon
