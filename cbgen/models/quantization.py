"""int8 weights: how a scheme is chosen, and how a short text decides what is moved from activations into weights.

    y = x W^T = (x / s) (W s)^T          s per input channel, 1 where nothing is known

Channels in which activations are large are made smaller and their weights larger by s, so that both fit 8 bits better
(SmoothQuant, arXiv 2211.10438). For every weight s = max|x|^a / max|W|^(1 - a), with the a of ALPHAS whose quantized
products come closest to the exact ones on the calibration text, each relative to its own size: a few tokens, first ones
above all, have products so large that they would decide alone. Activations of 16 bits need no such help.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cbgen.errors import UsageError
from cbgen.kernels.cpu.library import Library, load_library
from cbgen.kernels.cpu.linear import GROUP, IntegerWeight, PackedWeight

SCHEMES = {"w8a8": 8, "w8a16": 16}  # the bits of activations
CALIBRATION_TOKENS = 2048
SEQUENCE_TOKENS = 512
# Rows of each layer's input that are kept to compare products on, spread evenly over the text.
KEPT_ROWS = 256
# Outputs of a weight, spread evenly, that are compared at least where it has as many.
COMPARED_OUTPUTS = 512
ALPHAS = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
LEVELS = 127


@dataclass(frozen=True)
class Quantization:
    """A scheme of SCHEMES and the text that calibrates it: None where it needs none."""

    scheme: str
    text: str | None

    @property
    def identity(self) -> str:
        """What results depend on."""
        digest = "" if self.text is None else " " + hashlib.blake2b(self.text.encode(), digest_size=8).hexdigest()
        return self.scheme + digest


def kernels_for(device: torch.device, dtype: torch.dtype) -> Library | None:
    """The kernels that replace a model's linear layers there, if any do."""
    return load_library() if device.type == "cpu" and dtype == torch.float32 else None


def resolve_quantization(asked: str | None, calibration: str | None, library: Library | None) -> Quantization | None:
    """The scheme for "int8", "w8a8" or "w8a16". int8 takes activations of 8 bits where a processor multiplies bytes
    fastest, and of 16 bits elsewhere, where they cost nothing. Raises UsageError."""
    if asked is None:
        return None
    if asked != "int8" and asked not in SCHEMES:
        raise UsageError(f"--quantization {asked}: not one of int8, {', '.join(SCHEMES)}")
    if library is None:
        raise UsageError(f"--quantization {asked}: needs cbgen's compiled kernels and a model in float32 on the CPU")
    scheme = asked if asked in SCHEMES else "w8a8" if library.multiplies_bytes else "w8a16"
    return Quantization(scheme, _calibration_text(calibration) if SCHEMES[scheme] == 8 else None)


def _calibration_text(path: str | None) -> str:
    if path is None:
        return files("cbgen.models").joinpath("calibration.txt").read_text(encoding="utf-8")
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"--calibration {path}: not a readable text file: {error}") from error
    if not text.strip():
        raise UsageError(f"--calibration {path}: the file is empty")
    return text


@dataclass
class _Inputs:
    """What a linear layer read: the largest size of each channel, and some rows."""

    most: torch.Tensor
    rows: list[torch.Tensor] = field(default_factory=list)


class Calibrator:
    """Makes the integer weights of a model, given what its linear layers read of the calibration text."""

    def __init__(self, library: Library, quantization: Quantization):
        self._library = library
        self._bits = SCHEMES[quantization.scheme]
        self._inputs: dict[str, _Inputs] = {}

    @torch.inference_mode()
    def observe(self, model: nn.Module, run: Callable[[torch.Tensor], object], token_ids: list[int]) -> None:
        """Runs the model as it was loaded over the text. run: a forward pass over ids [1, T]."""
        with self._watching(model):
            for first in range(0, min(len(token_ids), CALIBRATION_TOKENS), SEQUENCE_TOKENS):
                run(torch.tensor([token_ids[first : first + SEQUENCE_TOKENS]]))

    @contextmanager
    def _watching(self, model: nn.Module) -> Iterator[None]:
        handles = [
            module.register_forward_pre_hook(self._note(path))
            for path, module in model.named_modules()
            if type(module) is nn.Linear
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, path: str) -> Callable[..., None]:
        def note(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            x = inputs[0].reshape(-1, inputs[0].shape[-1]).float()
            own = self._inputs.setdefault(path, _Inputs(torch.zeros(x.shape[1])))
            own.most = torch.maximum(own.most, x.abs().amax(0))
            own.rows.append(x[:: CALIBRATION_TOKENS // KEPT_ROWS].clone())

        return note

    def weight_of(self, weight: torch.Tensor, bias: torch.Tensor | None, path: str) -> PackedWeight:
        """The integer weight of the layer at a path, or of that layer and those that read the same."""
        inputs = self._inputs.get(path)
        if self._bits != 8 or inputs is None:
            return IntegerWeight(self._library, weight, bias, self._bits)
        scales = _best_scales(weight.float(), inputs)
        return IntegerWeight(self._library, weight * scales, bias, self._bits, 1 / scales)


def _best_scales(weight: torch.Tensor, inputs: _Inputs) -> torch.Tensor:
    """s [k] for a weight [n, k]."""
    rows = torch.cat(inputs.rows)
    most_weight, most_input = weight.abs().amax(0).clamp_min(1e-5), inputs.most.clamp_min(1e-5)
    weight = weight[:: max(1, len(weight) // COMPARED_OUTPUTS)]
    exact = rows @ weight.T
    sizes = exact.square().mean(1, keepdim=True).clamp_min(1e-12)
    best: tuple[float, torch.Tensor] | None = None
    for alpha in ALPHAS:
        scales = most_input**alpha / most_weight ** (1 - alpha) if alpha else torch.ones_like(most_input)
        got = _in_groups(rows / scales) @ _quantized(weight * scales).T
        error = float(((got - exact).square() / sizes).mean())
        if best is None or error < best[0]:
            best = error, scales
    assert best is not None
    return best[1]


def _quantized(rows: torch.Tensor) -> torch.Tensor:
    """Each row as its nearest levels with one scale say."""
    scale = rows.abs().amax(-1, keepdim=True).clamp_min(1e-30) / LEVELS
    return (rows / scale).round() * scale


def _in_groups(rows: torch.Tensor) -> torch.Tensor:
    """The same with a scale for each group of a row."""
    padded = nn.functional.pad(rows, (0, -rows.shape[1] % GROUP))
    return _quantized(padded.view(len(rows), -1, GROUP)).flatten(1)[:, : rows.shape[1]]
