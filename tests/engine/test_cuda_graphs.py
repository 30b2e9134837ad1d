"""Recorded passes, with a recorder that keeps what it was given and does it again: padding, keys, addresses, limits."""

from collections.abc import Hashable

import pytest
import torch
from engine_harness import Prompt, assert_parity, greedy_requests, mixed_prompts, run_all
from staged_harness import DeferredStreams, LoggedStreams, staged_engine
from tiny_models import ModelUnderTest

from cbgen.cache.pool import NUM_RESERVED_CHUNKS
from cbgen.engine.cuda_graphs import SHAPES_REMEMBERED_PER_GRAPH, GraphCache
from cbgen.engine.input_outputs import BatchInputs, InputBuffers
from cbgen.errors import ForwardPassError, UsageError
from cbgen.streams import Work


class Unrecordable(DeferredStreams):
    """A device on which recording fails from the n-th time on."""

    def __init__(self, num_recordable: int):
        super().__init__(0)
        self._left = num_recordable

    def record_graph(self, work: Work) -> Work:
        if not self._left:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        self._left -= 1
        return super().record_graph(work)


def tensors_of(inputs: BatchInputs) -> list[torch.Tensor]:
    """All that a pass reads."""
    found = [inputs.input_ids, inputs.position_ids, inputs.logits_indices, inputs.carried]
    for batch in inputs.attention:
        device = batch.on_device
        assert device is not None
        found += [batch.page_tables, batch.write_pages, batch.write_offsets, device.query_starts, device.kv_lengths]
        found += [tensor for tensor in (device.gather, device.gather_starts) if tensor is not None]
    return found


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_one_key_is_one_set_of_addresses_and_sizes(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whatever a recording read, the replay finds the next pass's numbers there, in the same sizes."""
    seen: dict[Hashable, tuple] = {}
    hits = 0
    plain = InputBuffers._lay_out

    def watched(self: InputBuffers, *args: object) -> BatchInputs:
        nonlocal hits
        inputs = plain(self, *args)
        numbers = tuple(
            (own.on_device.max_query_length, own.on_device.max_kv_length, own.on_device.max_gathered, own.window)
            for own in inputs.attention
        )
        places = [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors_of(inputs)]
        key = (id(self), inputs.shape)
        hits += key in seen
        assert seen.setdefault(key, (places, numbers)) == (places, numbers)
        return inputs

    monkeypatch.setattr(InputBuffers, "_lay_out", watched)
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    prompts = mixed_prompts(16, 320, longest=90, seed=8)
    engine = staged_engine(under_test, page_size=16, max_batch_tokens=40)
    assert_parity(under_test, prompts, run_all(engine, greedy_requests(prompts)))
    graphs = engine.manager.passes.graphs
    assert graphs.num_replayed > 0
    assert hits >= graphs.num_replayed
    assert len({len(places) for places, _ in seen.values()}) == (1 if name == "llama" else 2)


def test_passes_of_decodes_are_recorded_before_the_first_row(tiny_llama: ModelUnderTest) -> None:
    """A job of prompts of one token replays from its first pass on."""
    engine = staged_engine(tiny_llama, page_size=16, max_requests_per_batch=8)
    graphs = engine.manager.passes.graphs
    num_recorded = graphs.num_recorded
    assert num_recorded > 0
    assert graphs.num_replayed == 0
    prompts = [Prompt([5 + number], 12) for number in range(8)]
    assert_parity(tiny_llama, prompts, run_all(engine, greedy_requests(prompts)))
    assert graphs.num_recorded == num_recorded
    assert graphs.num_replayed == engine.manager.metrics.num_steps


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_padding_touches_nothing_but_the_reserves(request: pytest.FixtureRequest, name: str) -> None:
    """Passes of padding alone write to the write reserve, and read zeros."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    engine = staged_engine(under_test, page_size=16, streams=LoggedStreams())
    passes = engine.manager.passes
    pages = passes.runner._storage.pages
    size = engine.plan.layout.pages_per_chunk
    before = pages.clone()
    passes.warm_up(engine.manager.cache, under_test.shape.max_model_len)
    changed = {int(page) // size for page in (pages != before).any(dim=1).nonzero()[:, 0]}
    assert changed <= {NUM_RESERVED_CHUNKS - 1}, "only the write reserve"
    assert not pages[:size].any(), "the read reserve is zero"
    assert passes._pairs[0].is_finite[:8].all()


def test_the_graph_not_used_longest_goes(tiny_llama: ModelUnderTest) -> None:
    """There are never more than were asked for, and rows come out all the same."""
    prompts = mixed_prompts(12, 320, longest=90, seed=3)
    engine = staged_engine(tiny_llama, page_size=16, max_cached_graphs=2, max_batch_tokens=40)
    most = 0

    def count(manager: object) -> None:
        nonlocal most
        most = max(most, len(engine.manager.passes.graphs))

    assert_parity(tiny_llama, prompts, run_all(engine, greedy_requests(prompts), count))
    assert most == 2
    assert engine.manager.passes.graphs.num_recorded > 2


def test_graphs_by_key_in_the_order_of_use() -> None:
    """Work runs once a call, recorded or not."""
    streams, ran = LoggedStreams(), []
    graphs = GraphCache(streams, 2, ran.append)
    for key in ("a", "b", "a", "c", "a", "b"):  # c drives out b, not a, which was used since; b then drives out c
        graphs.run(key, lambda key=key: ran.append(key), comes_often=True)
    assert ran == ["a", "b", "a", "c", "a", "b"]
    assert (graphs.num_recorded, graphs.num_replayed, len(graphs)) == (4, 2, 2)
    graphs.clear()
    assert len(graphs) == 0


def test_what_may_not_come_again_is_recorded_when_it_does() -> None:
    """And a shape that was not seen for long counts as new."""
    streams, ran = LoggedStreams(), []
    graphs = GraphCache(streams, 1, ran.append)
    for _ in range(3):
        graphs.run("a", lambda: ran.append("a"), comes_often=False)
    assert ran == ["a"] * 3
    assert (graphs.num_recorded, graphs.num_replayed) == (1, 1)
    for key in ["b", *range(SHAPES_REMEMBERED_PER_GRAPH), "b"]:
        graphs.run(key, lambda: None, comes_often=False)
    assert graphs.num_recorded == 1
    graphs.run("b", lambda: None, comes_often=False)
    assert graphs.num_recorded == 2


def test_a_model_that_cannot_be_recorded_runs_without_graphs(tiny_llama: ModelUnderTest) -> None:
    """Nobody asked for graphs: one line says why there are none, and passes do not overlap either."""
    notes: list[str] = []
    engine = staged_engine(tiny_llama, streams=Unrecordable(0), notify=notes.append, page_size=16)
    prompts = mixed_prompts(6, 320, longest=40, seed=1)
    assert_parity(tiny_llama, prompts, run_all(engine, greedy_requests(prompts)))
    passes = engine.manager.passes
    assert passes.depth == 1
    assert passes.graphs.num_recorded == passes.graphs.num_replayed == 0
    assert notes == [
        "a pass could not be recorded as a CUDA graph, so none is from now on: operation not permitted when stream is "
        "capturing"
    ]


def test_a_recording_that_fails_in_the_middle_of_a_job(tiny_llama: ModelUnderTest) -> None:
    """What was recorded is replayed, the rest runs as it is, and no row is lost."""
    notes: list[str] = []
    engine = staged_engine(tiny_llama, streams=Unrecordable(9), notify=notes.append, page_size=16, max_batch_tokens=40)
    assert engine.manager.passes.depth == 2
    prompts = mixed_prompts(12, 320, longest=90, seed=3)
    assert_parity(tiny_llama, prompts, run_all(engine, greedy_requests(prompts)))
    assert len(notes) == 1
    assert engine.manager.passes.graphs.num_recorded == 9


def test_work_that_fails_is_not_recorded() -> None:
    """Its failure goes to the caller, and the next work under the key is tried anew."""
    graphs = GraphCache(LoggedStreams(), 2, lambda line: None)

    def fail() -> None:
        raise ForwardPassError("no")

    with pytest.raises(ForwardPassError, match="no"):
        graphs.run("a", fail, comes_often=True)
    assert len(graphs) == 0
    graphs.run("a", lambda: None, comes_often=True)
    assert (len(graphs), graphs.num_replayed) == (1, 0)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("use_cuda_graph", "--use-cuda-graph: this model cannot be recorded: operation not permitted"),
        ("use_async_batching", "--use-async-batching: it needs graphs, and this model cannot be recorded: operation"),
    ],
)
def test_what_was_asked_for_and_cannot_be_had_is_refused(tiny_llama: ModelUnderTest, option: str, words: str) -> None:
    """In one line that names the option."""
    with pytest.raises(UsageError, match=words):
        staged_engine(tiny_llama, streams=Unrecordable(0), page_size=16, **{option: True})
