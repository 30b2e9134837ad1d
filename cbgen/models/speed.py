"""A loaded model made fast on a CPU: its layers are replaced by ours, as far as the model then answers as before."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cbgen.errors import ModelError
from cbgen.kernels.cpu.library import Library
from cbgen.kernels.cpu.linear import PackedWeight, Workspace
from cbgen.models.cpu_layer import FastDecoderLayer, fast_decoder_layer
from cbgen.models.cpu_modules import Multiplier, Replacer, fast_norm, gated_mlp, linear_groups, places

# The logits of the model as it was and of the one sped up may differ so far, relative to the largest.
MODEL_TOLERANCE = 1e-4
# A forward pass over a trial batch: its logits, and what each layer asks of its attention.
Trial = Callable[[], tuple[torch.Tensor, dict[int, dict[str, Any]]]]


@torch.inference_mode()
def speed_up(model: nn.Module, library: Library, run: Trial, weight_of: Multiplier | None = None) -> str:
    """Replaces what can be replaced in a float32 model on the CPU; returns how much stayed: "layers",
    "modules" or "none".

    Whole decoder layers are tried first, then single norms, MLPs and linear layers. Where the model's logits come out
    otherwise, everything is put back. weight_of: makes the weights of another precision once that is known.
    """
    expected, asked = run()

    def packed(weight: torch.Tensor, bias: torch.Tensor | None, _: str) -> PackedWeight:
        return PackedWeight(library, weight, bias)

    for extent in ("layers", "modules"):
        replacer = Replacer(library)
        _replace(model, replacer, run, packed, asked if extent == "layers" else {})
        if _answers(run, expected):
            if weight_of is not None:
                replacer.restore()
                _replace(model, replacer, run, weight_of, asked if extent == "layers" else {})
            has_layers = any(isinstance(module, FastDecoderLayer) for module in model.modules())
            return "layers" if has_layers else "modules"
        replacer.restore()
    return "none"


def _replace(
    model: nn.Module, replacer: Replacer, run: Trial, weight_of: Multiplier, asked: dict[int, dict[str, Any]]
) -> None:
    """asked: by layer number, for those that may be replaced as a whole."""
    library = replacer.library
    workspaces: dict[tuple[int, ...], Workspace] = {}
    if asked:
        for place in list(places(model)):
            layer = fast_decoder_layer(library, place.module, asked, weight_of, place.path, workspaces)
            if layer is not None:
                replacer.put(place, layer)
    for place in list(places(model)):
        mlp = gated_mlp(library, place.module, weight_of, place.path)
        if mlp is not None:
            replacer.put(place, mlp)
    for place in list(places(model)):
        norm = fast_norm(library, place.module)
        if norm is not None:
            replacer.put(place, norm)
    replacer.replace_linears(linear_groups(model, run), weight_of)


def _answers(run: Trial, expected: torch.Tensor) -> bool:
    try:
        got = run()[0]
    except (RuntimeError, TypeError, AttributeError, ValueError, KeyError, ModelError):
        return False  # code that looks into the modules it calls
    return bool((got - expected).abs().max() <= MODEL_TOLERANCE * expected.abs().max())
