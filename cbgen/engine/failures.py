"""What a forward pass may raise, named by what can be done about it."""

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import clear_frames

import torch

from cbgen.errors import CbgenError, DeviceFaultError, ForwardPassError, PassMemoryError, first_line

# How libraries say in a RuntimeError of no type of its own that there was no memory.
_NO_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "STATUS_ALLOC_FAILED")
# Of its own type in newer torch only.
_DEVICE_FAULTS: tuple[type[Exception], ...] = (torch.AcceleratorError,) if hasattr(torch, "AcceleratorError") else ()


@contextmanager
def named_failures() -> Iterator[None]:
    """Whatever is raised inside comes out as a CbgenError; cbgen's own pass as they are.

    PassMemoryError: fewer tokens may do. DeviceFaultError: nothing will work in this process any more.
    ForwardPassError: everything else, the fault of some request in the pass as far as one can tell.
    """
    try:
        yield
    except CbgenError:
        raise
    except Exception as error:
        raise _named(error) from error


def _named(error: Exception) -> CbgenError:
    what = f"{type(error).__name__}: {first_line(error)}"
    if _is_out_of_memory(error):
        clear_frames(error.__traceback__)  # which would keep the tensors of the pass
        return PassMemoryError(f"the forward pass failed: {what}")
    if isinstance(error, _DEVICE_FAULTS) or _says(error, "CUDA error"):
        return DeviceFaultError(f"the device failed: {what}; the same command continues the job")
    return ForwardPassError(f"the forward pass failed: {what}")


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


def _says(error: Exception, text: str) -> bool:
    return isinstance(error, RuntimeError) and str(error).startswith(text)
