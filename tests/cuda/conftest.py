"""Where the tests of this folder run: on a GPU, if there is one, and in a rehearsal on the CPU."""

from collections.abc import Iterator

import pytest
import torch
from cuda_harness import REHEARSAL, World

from cbgen.device import release_unused_memory

ON_CUDA = pytest.param("cuda", marks=pytest.mark.cuda)


def cuda_device() -> torch.device:
    """The GPU. Skips the test without one."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device, or a torch without CUDA")
    return torch.device("cuda")


@pytest.fixture(scope="session", params=[ON_CUDA, "rehearsal"])
def world(request: pytest.FixtureRequest) -> World:
    """bfloat16 on a GPU; a rehearsal of the same test on the CPU."""
    return REHEARSAL if request.param == "rehearsal" else World.on(cuda_device())


@pytest.fixture(scope="session", params=[ON_CUDA, "rehearsal"])
def float32_world(request: pytest.FixtureRequest) -> World:
    return REHEARSAL if request.param == "rehearsal" else World(cuda_device(), torch.float32)


@pytest.fixture(autouse=True)
def memory_is_given_back() -> Iterator[None]:
    """What one test leaves in torch's cache is no other's."""
    yield
    if torch.cuda.is_available():
        release_unused_memory(torch.device("cuda"))
