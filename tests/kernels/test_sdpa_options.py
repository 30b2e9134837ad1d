"""Soft caps and sinks, alone and together, with and without windows, against dense attention in float64."""

import pytest
import torch
from kernels.bench import FULL, NUM_KV_HEADS, SLIDING, EngineBench, dense_attention, drive

from cbgen.kernels import sdpa
from cbgen.kernels.backend import AttentionOptions
from cbgen.kernels.sdpa import attend_sequence, visibility_mask

CAP = 1.5  # scores are of standard deviation 1.3: many of them are bent
KINDS = [
    pytest.param({"softcap": CAP}, id="softcap"),
    pytest.param({"with_sinks": True}, id="sinks"),
    pytest.param({"softcap": CAP, "with_sinks": True}, id="both"),
]
WINDOWS = [None, 5, 24]
MODES = {
    "whole prompts": [[70, 3, 30]],
    "chunked prompts": [[20, 2, 9], [2, 30, 40], [48, 38, 21]],
    "decodes": [[40, 3, 69], [1, 1, 1], [1, 1, 1]],
    "mixed": [[33, 1, 64], [1, 7, 5], [36, 1, 1]],
}


def bench_of(window: int | None, page_size: int = 4, **options: object) -> EngineBench:
    return EngineBench([FULL if window is None else SLIDING] * 2, window, page_size, **options)


def run(bench: EngineBench, passes: list[list[int]]) -> list[list[torch.Tensor]]:
    """Three requests in passes of so many tokens each."""
    sequences = [bench.add(sum(lengths)) for lengths in zip(*passes, strict=True)]
    return [bench.run(list(zip(sequences, lengths, strict=True))) for lengths in passes]


@pytest.mark.parametrize("passes", MODES.values(), ids=MODES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_options_equal_dense_attention(kind, group, window, passes):
    """Whatever is asked of a layer holds in every kind of pass; each query head has its own sink."""
    run(bench_of(window, group=group, **kind), passes)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kind", KINDS)
def test_random_passes_with_options_equal_dense_attention(kind, window, page_size):
    """Requests through passes of random pieces, rings recycled, with three query heads to each KV head."""
    drive(bench_of(window, page_size, group=3, seed=1, **kind), [60, 41, 1, 26, 100, 75], longest_piece=60)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kind", KINDS)
def test_options_in_bfloat16_equal_dense_attention(kind, window):
    """Only the rounding of bfloat16 products separates the result from float64 over the same values."""
    options = {"group": 3, "head_dim": 64, "dtype": torch.bfloat16, "tolerance": 5e-2, **kind}
    for passes in MODES.values():
        run(bench_of(window, 16, **options), passes)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_hidden_key_weighs_nothing_at_all(kind, window):
    """With one-hot values the output names the keys that took part, however little: the visible ones, no other."""
    bench = bench_of(window, head_dim=64, **kind)
    sequence, tokens = bench.add(60), torch.arange(60)
    for _, _, values in sequence.layers:
        values[:] = torch.eye(60, 64)[:, None]
    output = torch.cat([bench.run([(sequence, length)])[0] for length in (20, 1, 33, *[1] * 6)])
    distance = tokens[:, None] - tokens
    seen = (distance >= 0) & (distance < (window or 60))
    assert torch.equal(output[..., :60] > 0, seen[:, None].expand(-1, bench.num_heads, -1))


@pytest.mark.parametrize("limit", [1, 1000])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_computed_in_slices(kind, window, limit, monkeypatch):
    """Never more scores at once than the limit, or a single row; the results stay the same."""
    compute, passes = sdpa._attend_with_scores, [[70, 3, 30], [1, 20, 1]]
    whole = run(bench_of(window, group=3, **kind), passes)
    num_calls = 0

    def counted(query: torch.Tensor, keys: torch.Tensor, *others: object) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        assert query[..., 0].numel() * keys.shape[-2] <= limit or query.shape[-2] == 1
        return compute(query, keys, *others)

    monkeypatch.setattr(sdpa, "MAX_SCORES", limit)
    monkeypatch.setattr(sdpa, "_attend_with_scores", counted)
    sliced = run(bench_of(window, group=3, **kind), passes)
    num_groups = 2 if window is None else 1  # of decodes, whose rows are the three query heads of a KV head
    num_rows = 2 * (70 + 3 + 30 + 20 + 3 * num_groups)  # of two layers
    assert num_calls == num_rows if limit == 1 else 20 < num_calls < num_rows
    for one, other in zip(whole, sliced, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_attends_as_in_pages(kind, window):
    """The face that the trial of a model uses: one sequence, whole or its end, with the mask made for it."""
    bench = bench_of(window, group=2, **kind)
    query, keys, values = bench.add(13).layers[0]
    options = bench.options[0]
    for first in (0, 5, 12):
        mask = visibility_mask(13 - first, first, window, query.device)
        output = attend_sequence(query[first:], keys, values, mask, options)
        expected = dense_attention(query[first:], keys, values, first, window, options)
        torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=0)


def test_a_cap_and_sinks_matter():
    """The other tests could not tell them from plain attention if they hardly changed it."""
    bench = bench_of(None, softcap=CAP, with_sinks=True)
    query, keys, values = bench.add(30).layers[0]
    scaling, cap, sinks = bench.options[0].scaling, bench.options[0].softcap, bench.options[0].sinks
    assert sinks.shape == (bench.num_heads,)
    assert bench.num_heads > NUM_KV_HEADS
    asked = [AttentionOptions(scaling, *rest) for rest in ((), (cap,), (None, sinks), (cap, sinks))]
    asked.append(AttentionOptions(scaling, cap, sinks.flip(0)))
    outputs = [dense_attention(query, keys, values, 0, None, options) for options in asked]
    for number, one in enumerate(outputs):
        assert all((one - other).abs().max() > 0.1 for other in outputs[:number])
