"""Matrix products of torch whose rows have the same bits in any company.

The bits of a product depend on how many rows it has, since that chooses the kernel. With --deterministic all of them
have ROWS. To fill up whole forward passes instead would cost more, and would not do: with experts, how many rows each
of them multiplies depends on everybody's tokens.

rows        [ a b c ... ]   any number           experts   [ a a | b | c c c ]
products    [ a b c ... | ... 0 0 0 ]            each in pieces of its own
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from cbgen.errors import UsageError

ROWS = 32
# What else in torch multiplies matrices, as far as models call it from Python.
_OTHERS = frozenset(
    [
        *("addbmm", "addmm", "addmv", "baddbmm", "bilinear", "bmm", "chain_matmul", "conv1d", "conv2d", "conv3d"),
        *("dot", "einsum", "inner", "multi_dot", "mv", "rmatmul", "scaled_dot_product_attention"),
        *("scaled_grouped_mm", "scaled_mm", "tensordot", "vdot"),
    ]
)


def multiplies_in_torch(model: nn.Module) -> bool:
    """Whether a model has matrices that torch multiplies by: all but embeddings, since cbgen keeps its own apart."""
    return any(
        parameter.dim() > 1
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    )


class FixedProducts(TorchFunctionMode):
    """Inside, every product has ROWS rows; one that cannot be cut raises UsageError.

    Nothing here depends on the budgets of the scheduler, which may shrink.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", "").strip("_"), kwargs or {}
        if name == "linear":
            return _linear(*args, **kwargs)
        if name in ("matmul", "mm"):
            return _matmul(*args, **kwargs)
        if name == "addmm" and args[0].dim() == 1:
            bias, rows, matrix = args
            return _in_pieces(rows, lambda piece: torch.addmm(bias, piece, matrix, **kwargs))
        if name == "grouped_mm":
            return _grouped(*args, **kwargs)
        if name in _OTHERS:
            raise _refused(name)
        return func(*args, **kwargs)


def _linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return _in_pieces(rows, lambda piece: linear(piece, weight, bias))


def _matmul(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    if rows.shape[-1] == 1 and rows.dim() > 1 and matrix.dim() > 1:
        return torch.matmul(rows, matrix)  # sums of one number, as for angles of rotary embedding, are always the same
    if matrix.dim() != 2:
        raise _refused("matmul")
    return _in_pieces(rows, lambda piece: torch.matmul(piece, matrix))


def _grouped(rows: torch.Tensor, matrices: torch.Tensor, *, offs: torch.Tensor, **_: Any) -> torch.Tensor:
    """rows [n, k] in the order of the experts, whose matrices are [experts, k, m] and whose rows end at `offs`."""
    out = rows.new_zeros(len(rows), matrices.shape[-1])
    start = 0
    for matrix, end in zip(matrices, offs.tolist(), strict=True):
        if end > start:
            out[start:end] = _matmul(rows[start:end], matrix)
        start = end
    return out


def _in_pieces(rows: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """rows [..., k] -> [..., m], where `multiply` gets ROWS of them at a time."""
    flat = rows.reshape(-1, rows.shape[-1])
    filled = flat.new_zeros(-(-max(1, len(flat)) // ROWS) * ROWS, flat.shape[1])
    filled[: len(flat)] = flat
    out = torch.cat([multiply(piece) for piece in filled.split(ROWS)])
    return out[: len(flat)].reshape(*rows.shape[:-1], out.shape[-1])


def _refused(name: str) -> UsageError:
    return UsageError(f"--deterministic: this model calls torch.{name}, which cbgen cannot make deterministic")
