"""torch's varlen_attn through VarlenAttention, in half precision, against SDPA in float32 and dense attention."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cuda_harness import PAGE, REHEARSAL, WINDOW, World
from cuda_varlen import DeviceVarlen
from dense_varlen import dense_varlen
from kernels.bench import FULL, SLIDING, EngineBench, drive
from kernels.varlen_bench import Sizes

from cbgen.kernels.cuda import torch_varlen_attn, varlen_problem

# Outputs are averages of numbers around 1, up to 4: one unit in the last place of such a number, and the rounding of
# the weights before the product with V.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3}
DTYPES = [torch.bfloat16, torch.float16]
LAYERS = {
    "full": ([FULL] * 2, None),
    "sliding": ([SLIDING] * 2, WINDOW),
    "hybrid": ([SLIDING, FULL, SLIDING], WINDOW),
}
# What recorded passes are padded to: with several query tokens of a request, and with one of each.
RECORDED = {False: Sizes(640, 8, 6, 2560, 640), True: Sizes(8, 8, 6, None, 1)}


DENSE_REHEARSAL = replace(REHEARSAL, stand_in=dense_varlen)


def bench_on(
    world: World, kind: str, dtype: torch.dtype, recorded: dict[bool, Sizes] | None = None, **options: Any
) -> EngineBench:
    layer_types, window = LAYERS[kind]
    bench = EngineBench(
        layer_types, window, PAGE, dtype=dtype, num_tokens=24 * PAGE, tolerance=TOLERANCE[dtype], **options
    )
    bench.backend = DeviceVarlen(bench, world.device, kernel_of(world, dtype, bench.head_dim), recorded)
    return bench


def kernel_of(world: World, dtype: torch.dtype, head_dim: int) -> Callable[..., Any]:
    if world.is_rehearsal:
        assert world.stand_in is not None
        return world.stand_in
    kernel = torch_varlen_attn()
    problem = varlen_problem(kernel, torch.cuda.get_device_capability(), dtype, PAGE, head_dim, ())
    if problem is not None:
        pytest.skip(f"varlen_attn: {problem}")
    assert kernel is not None
    return kernel


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("group", "head_dim"), [(1, 128), (4, 64)])
@pytest.mark.parametrize("kind", LAYERS)
def test_random_passes(world: World, kind: str, group: int, head_dim: int, dtype: torch.dtype) -> None:
    """Single tokens and pieces up to far beyond the window, in any order, padded by anything."""
    bench = bench_on(world, kind, dtype, group=group, head_dim=head_dim)
    lengths = [1, 2, PAGE, PAGE + 1, 420] if world.is_rehearsal else [1, 2, PAGE, PAGE + 1, 420, 500, 333, 480, 77]
    drive(bench, lengths, longest_piece=WINDOW + 20, num_at_once=2)
    assert bench.cache.free_share == 1.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_recorded_passes(world: World, kind: str, dtype: torch.dtype) -> None:
    """A decode whose ring has wrapped, pieces of prompts and one beyond the ring, and then decodes alone: recorded
    once, replayed with other numbers and other requests in the same tensors."""
    bench = bench_on(world, kind, dtype, RECORDED, head_dim=64)
    old, new, later, long = (bench.add(length) for length in (780, 70, 400, 940))
    for piece in (300, 350, 120):
        bench.run([(old, piece)])
    bench.run([(later, 330), (long, 90)])
    for piece in (20, 30):
        bench.run([(old, 1), (new, piece), (later, 13), (long, 400)])
    for _ in range(4):
        bench.run([(later, 1), (old, 1), (long, 1), (new, 1)])
    bench.run([(old, 1), (new, 1)])
    assert bench.backend.num_replays >= 3 * len(LAYERS[kind][0])


@pytest.mark.parametrize("kind", LAYERS)
def test_what_stands_in_for_the_kernel_on_a_gpu_without_it(kind: str) -> None:
    """By itself it is right, of single tokens and pieces in any order."""
    bench = bench_on(DENSE_REHEARSAL, kind, torch.bfloat16, group=4, head_dim=64)
    drive(bench, [1, PAGE + 1, 420, 77], longest_piece=WINDOW + 20, num_at_once=2)
    assert bench.cache.free_share == 1.0
