"""Memory of a GPU: pages that leave and come back, and what a whole run takes at most."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cuda_harness import World, model_of

REPOSITORY = Path(__file__).parents[2]
GIB = 1 << 30
# The driver loads kernels when they are first used, and cuBLAS has memory of its own: beside what torch allocates.
LOADED_BYTES = GIB


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_pages_come_back_from_the_swap_pool_byte_for_byte(world: World, name: str) -> None:
    """Stored, overwritten at once, and restored to other pages: all of it in the order in which it was asked for."""
    engine = world.engine(model_of(world, name), cpu_offload_space=0.01, poison=False)
    pool = engine.manager.offloader._swap_pool
    storage = pool._storage
    assert pool._buffer.is_pinned() != world.is_rehearsal
    generator = torch.Generator().manual_seed(0)
    known = torch.randint(0, 256, storage.pages.shape, dtype=torch.uint8, generator=generator)
    storage.pages.copy_(known)
    world.synchronize()
    first, second = [9, 10, 11, 30, 17], [40, 41, 8]
    assert pool.store({7: first, 8: second}) == {7, 8}
    storage.copy_pages([(50, page) for page in first + second])
    pool.restore({8: [9, 30, 12], 7: [60, 61, 63, 8, 20]})
    settle(world, engine.manager.passes)
    expected = known.clone()
    expected[first + second] = known[50]
    expected[[9, 30, 12, 60, 61, 63, 8, 20]] = known[second + first]
    assert torch.equal(storage.pages.cpu(), expected)
    pool.check_integrity(set())


def settle(world: World, passes: object) -> None:
    """What the storage handed over is done."""
    passes._streams.record("compute").synchronize()
    world.synchronize()


# What a tight share of a large GPU leaves: the cache is then as large as may be, to the last chunk.
CASES = {
    "overlapping": {"graphs": True, "overlaps": True, "dtype": "bfloat16"},
    "plain": {"graphs": False, "overlaps": False, "dtype": "bfloat16"},
    "float32 by SDPA": {"graphs": None, "overlaps": None, "dtype": "float32"},
}


@pytest.mark.parametrize(
    ("device", "case"),
    [
        pytest.param("cuda", "overlapping", marks=pytest.mark.cuda),
        pytest.param("cuda", "float32 by SDPA", marks=pytest.mark.cuda),
        ("cpu", "plain"),
    ],
)
def test_a_run_takes_no_more_than_its_share(device: str, case: str) -> None:
    """A full batch of greedy and of filtered sampled rows, with prompts in pieces, in a process of its own."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device, or a torch without CUDA")
    if CASES[case]["graphs"] and World.on(torch.device("cuda")).stand_in is not None:
        pytest.skip("this torch has no varlen_attn over pages")
    script = Path(__file__).with_name("memory_case.py")
    paths = [str(REPOSITORY), str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(CASES[case] | {"device": device})],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    print({name: f"{value / GIB:.3f} GiB" if name.endswith("bytes") else value for name, value in figures.items()})
    assert figures["finished"] == figures["requests"]
    assert figures["mean_requests"] > 0
    assert figures["reserved_bytes"] <= figures["allowed_bytes"]
    assert figures["used_bytes"] <= figures["allowed_bytes"] + LOADED_BYTES
    if device == "cuda":
        assert figures["cache_bytes"] > 0.2 * figures["allowed_bytes"], "the share was not tight"
        assert (figures["num_replayed"] > 0) == bool(CASES[case]["graphs"])
