"""The compiled kernels: whether they are there, and which instruction set of them this processor runs."""

import ctypes
import importlib.machinery
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch  # noqa: F401 (its OpenMP runtime must be there first: the kernels then use the same one)

from cbgen.errors import UsageError

ISA_VARIABLE = "CBGEN_CPU_ISA"
ISAS = ("plain", "avx2", "avx512", "avx512vnni")


class Library:
    """The functions of one instruction set, by their names without its suffix.

    Pointers are addresses as ints: whoever calls keeps what they point to alive during the call.
    """

    def __init__(self, handle: ctypes.CDLL, isa: str):
        self.isa = isa
        self._handle = handle

    @property
    def multiplies_bytes(self) -> bool:
        """Whether 8-bit activations are multiplied faster than 16-bit ones."""
        return bool(self.function("multiplies_bytes", restype=ctypes.c_int64)())

    def function(self, name: str, *argtypes: Any, restype: Any = None) -> Any:
        """A function with its argument types set, without which ctypes would cut pointers to 32 bits."""
        found = getattr(self._handle, f"{name}_{self.isa}")
        found.argtypes, found.restype = argtypes, restype
        return found


@lru_cache(maxsize=1)
def load_library() -> Library | None:
    """The kernels for this processor, or None when this installation has none. CBGEN_CPU_ISA picks a lesser set.

    Raises UsageError for a set that it names and this processor does not run.

    Two OpenMP runtimes would fight for the cores, which is why this module imports torch.
    """
    path = _path()
    if path is None:
        return None
    handle = ctypes.CDLL(str(path))
    best = ISAS[handle.best_isa()]
    asked = os.environ.get(ISA_VARIABLE) or best
    runnable = ISAS[: ISAS.index(best) + 1]
    if asked not in runnable:
        raise UsageError(f"{ISA_VARIABLE}={asked}: this processor runs {', '.join(runnable)}; unset it for the best")
    return Library(handle, asked)


def kernels_here() -> str:
    """In a line, what attends and multiplies on this machine's CPU."""
    library = load_library()
    if library is None:
        return "none compiled in this installation: CPUs run on torch, several times slower; install with a C compiler"
    return f"cbgen's own for CPUs, {library.isa} of {', '.join(runnable_isas())}"


def library_for(isa: str) -> Library:
    """The kernels of one instruction set, which this processor has."""
    path = _path()
    assert path is not None, "this installation has no compiled kernels"
    return Library(ctypes.CDLL(str(path)), isa)


def runnable_isas() -> list[str]:
    """The instruction sets that this processor runs, the least first; none without compiled kernels."""
    path = _path()
    return [] if path is None else list(ISAS[: ctypes.CDLL(str(path)).best_isa() + 1])


def _path() -> Path | None:
    folder = Path(__file__).parent
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / f"_kernels{suffix}"
        if path.exists():
            return path
    return None
