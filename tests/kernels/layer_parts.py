"""A small decoder layer with random weights, for the kernels that run one."""

from collections.abc import Callable

import torch

from cbgen.kernels.cpu.library import Library
from cbgen.kernels.cpu.linear import LayerParts, PackedWeight

WIDTH, HEADS, KV_HEADS, DIM, INNER = 48, 6, 2, 20, 70


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer_parts(
    library: Library, kind: Callable[..., PackedWeight], head_norms: bool, activation: str
) -> tuple[LayerParts, list]:
    """A layer with biases, and the weights and biases of its four products."""
    shapes = [((HEADS + 2 * KV_HEADS) * DIM, WIDTH), (WIDTH, HEADS * DIM), (2 * INNER, WIDTH), (WIDTH, INNER)]
    weights = [(0.2 * randn(*shape, seed=n), randn(shape[0], seed=n + 9)) for n, shape in enumerate(shapes)]
    norms = [(randn(size, seed=20 + size), 1e-5) for size in (WIDTH, WIDTH + 1, DIM, DIM + 1)]
    norms[1], norms[3] = (norms[1][0][1:], 1e-5), (norms[3][0][1:], 1e-5)
    packed = [kind(library, *weight) for weight in weights]
    head = (norms[2], norms[3]) if head_norms else (None, None)
    return LayerParts(HEADS, KV_HEADS, DIM, activation, norms[0], norms[1], *head, *packed), weights
