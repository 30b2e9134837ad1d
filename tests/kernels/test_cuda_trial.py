"""Before a kernel serves, it is tried: one that fails or gives something else is found out."""

import pytest
import torch
from kernels.varlen_reference import varlen_reference

from cbgen.kernels.cuda import VarlenAttention
from cbgen.kernels.cuda_trial import tried_problem
from cbgen.kernels.sdpa import SdpaAttention

CPU = torch.device("cpu")


def trial(kernel: object, num_kv_heads: int = 2, dtype: torch.dtype = torch.bfloat16) -> str | None:
    backend = VarlenAttention(16, 4, num_kv_heads, 16, dtype, kernel=kernel)
    return tried_problem(backend, SdpaAttention(16, num_kv_heads, 16, dtype), CPU)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_kernel_that_does_as_documented_may_serve(num_kv_heads: int, dtype: torch.dtype) -> None:
    """The reference is one."""
    assert trial(varlen_reference, num_kv_heads, dtype) is None


def test_a_kernel_that_fails_may_not() -> None:
    """Its first line says why."""

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel image is available for execution on the device\nand so on")

    assert trial(fails) == "it fails here: no kernel image is available for execution on the device"


@pytest.mark.parametrize("changed", ["window_size", "seqused_k", "block_table", "scale"])
def test_a_kernel_that_ignores_an_argument_may_not(changed: str) -> None:
    """Each of them changes what comes out."""
    others = {
        "window_size": lambda value: (-1, -1),
        "seqused_k": lambda value: value.clamp(max=5),
        "block_table": lambda value: value.flip(1),
        "scale": lambda value: 2 * value,
    }

    def deaf(*args: object, **keywords: object) -> torch.Tensor:
        return varlen_reference(*args, **keywords | {changed: others[changed](keywords[changed])})

    assert "it gives other results here" in (trial(deaf) or "")
