"""Draws by the compiled kernel: some twenty microseconds a row, where sorting a row takes milliseconds."""

import ctypes
from dataclasses import dataclass, fields

import numpy as np
import torch

from cbgen.kernels.cpu.library import Library


@dataclass(frozen=True)
class RowDraws:
    """How the rows of a batch are drawn: arrays [S]. temperatures float32, above 0; top_ks int64, 0 is off; top_ps
    float64 and min_ps float32, 1 and 0 are off; uniform float64 in [0, 1)."""

    temperatures: np.ndarray
    top_ks: np.ndarray
    top_ps: np.ndarray
    min_ps: np.ndarray
    uniform: np.ndarray

    def of(self, rows: np.ndarray) -> "RowDraws":
        """Some of the rows."""
        return RowDraws(*(getattr(self, field.name)[rows] for field in fields(self)))


def draw_rows(library: Library, logits: torch.Tensor, draws: RowDraws) -> list[int]:
    """A token of each row of float32 logits [S, vocab] on the CPU, finite but for what may not come (-infinity)."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    num_rows, vocabulary = logits.shape
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    bytes_per_thread = library.function("draw_scratch", size, restype=size)(vocabulary)
    scratch = np.empty(bytes_per_thread * torch.get_num_threads(), np.uint8)
    token_ids = np.empty(num_rows, np.int64)
    draw = library.function("draw_tokens", pointer, size, size, size, *[pointer] * 5, pointer, size, pointer)
    draw(
        logits.data_ptr(),
        logits.stride(0),
        num_rows,
        vocabulary,
        *(getattr(draws, field.name).ctypes.data for field in fields(draws)),
        scratch.ctypes.data,
        bytes_per_thread,
        token_ids.ctypes.data,
    )
    return token_ids.tolist()
