"""How passes are run, by device, model and options; what is refused, and what is told."""

import pytest
import torch
from staged_harness import staged_engine
from tiny_models import ModelUnderTest

from cbgen.config import FULL_ATTENTION, SLIDING_ATTENTION, ContinuousBatchingConfig, ModelShape
from cbgen.engine.execution import Execution, choose_execution
from cbgen.errors import UsageError
from cbgen.streams import InOrderStreams

CUDA = torch.device("cuda")


def shape_of(head_dim: int = 128, special: tuple[str, ...] = ()) -> ModelShape:
    return ModelShape((FULL_ATTENTION,) * 32, None, 32, 8, head_dim, 4096, 128_256, 8192, 2, special)


def choose(
    dtype: torch.dtype = torch.bfloat16, shape: ModelShape | None = None, **options: object
) -> tuple[Execution, list[str]]:
    """What would be done on a GPU, and what is told of it."""
    notes: list[str] = []
    config = ContinuousBatchingConfig(**options).resolve("cuda")
    return choose_execution(shape or shape_of(), dtype, config, CUDA, notes.append), notes


@pytest.mark.parametrize(
    ("options", "records", "depth"),
    [
        ({}, True, 2),
        ({"use_cuda_graph": True}, True, 2),
        ({"use_async_batching": True}, True, 2),
        ({"use_async_batching": False}, True, 1),
        ({"use_cuda_graph": False}, False, 1),
        ({"use_cuda_graph": True, "use_async_batching": False}, True, 1),
        ({"use_cuda_graph": False, "use_async_batching": False}, False, 1),
    ],
)
def test_a_gpu_records_passes_and_overlaps_them(options: dict[str, bool], records: bool, depth: int) -> None:
    """Unless it is told not to; overlapping follows recording."""
    execution, notes = choose(**options)
    assert (execution.backend.name, execution.records, execution.depth) == ("varlen", records, depth)
    assert notes == []


@pytest.mark.parametrize(
    ("dtype", "shape", "options", "why"),
    [
        (torch.float32, shape_of(), {}, "float32"),
        (torch.bfloat16, shape_of(special=("softcap",)), {}, "soft caps"),
        (torch.bfloat16, shape_of(special=("sinks",)), {}, "sinks"),
        (torch.bfloat16, shape_of(head_dim=512), {}, "512"),
        (torch.bfloat16, shape_of(), {"page_size": 32}, "pages of a multiple of 256 tokens, not of 32"),
    ],
)
def test_what_the_kernel_cannot_serve_runs_on_sdpa_and_is_told(
    dtype: torch.dtype, shape: ModelShape, options: dict[str, int], why: str
) -> None:
    """With what is lost by it; and is refused to those who asked for what is lost."""
    execution, notes = choose(dtype, shape, **options)
    assert (execution.backend.name, execution.records, execution.depth) == ("sdpa", False, 1)
    (note,) = notes
    assert "SDPA" in note
    assert "without CUDA graphs and asynchronous batching" in note
    assert why in note
    for asked, named in (("use_cuda_graph", "--use-cuda-graph"), ("use_async_batching", "--use-async-batching")):
        with pytest.raises(UsageError, match=named) as refused:
            choose(dtype, shape, **options, **{asked: True})
        assert why in str(refused.value)
    assert choose(dtype, shape, **options, use_cuda_graph=False)[0].backend.name == "sdpa"


def test_deterministic_asks_the_kernel_for_one_split() -> None:
    """Without it, what a token gets may depend on the batch."""
    assert choose(deterministic=True)[0].backend.is_batch_invariant
    assert not choose()[0].backend.is_batch_invariant


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_elsewhere_nothing_is_recorded(device: str) -> None:
    """And nothing is told: there is nothing to be had."""
    notes: list[str] = []
    config = ContinuousBatchingConfig().resolve(device)
    execution = choose_execution(shape_of(), torch.float32, config, torch.device(device), notes.append)
    assert (execution.records, execution.depth, execution.is_staged, notes) == (False, 1, False, [])
    assert type(execution.streams) is InOrderStreams
    assert execution.buffer_bytes(shape_of(), config) == 0


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("depth", [1, 2])
def test_static_buffers_take_no_more_than_is_planned_for(request: pytest.FixtureRequest, name: str, depth: int) -> None:
    """Two pairs take twice as much as one."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    engine = staged_engine(under_test, depth, page_size=16, graphs=False)
    pairs = engine.manager.passes._pairs
    assert len(pairs) == depth
    assert sum(pair.num_bytes for pair in pairs) == engine.plan.buffer_bytes > 0
    with_graphs = staged_engine(under_test, depth, page_size=16)
    assert with_graphs.plan.buffer_bytes > engine.plan.buffer_bytes


def test_what_a_gpu_of_80_gib_holds_beside_the_cache() -> None:
    """For a model of 8B: more than nothing, less than a sixteenth of it."""
    for depth, options in ((2, {}), (1, {"use_async_batching": False}), (1, {"use_cuda_graph": False})):
        execution, _ = choose(**options)
        assert execution.depth == depth
        taken = execution.buffer_bytes(shape_of(), ContinuousBatchingConfig(**options).resolve("cuda"))
        assert 32 << 20 < taken < 5 << 30


def test_a_window_needs_room_for_what_it_collects() -> None:
    """Sliding layers make the buffers larger, since pieces of prompts are gathered there."""
    config = ContinuousBatchingConfig(use_cuda_graph=False).resolve("cuda")
    sliding = ModelShape((SLIDING_ATTENTION,) * 32, 4096, 32, 8, 128, 4096, 128_256, 8192, 2)
    full, _ = choose(use_cuda_graph=False)
    assert full.buffer_bytes(sliding, config) > full.buffer_bytes(shape_of(), config)
