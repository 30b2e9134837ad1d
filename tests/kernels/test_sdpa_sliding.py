"""SdpaAttention over rings of pages, laid out by the engine, against dense attention with a window in float64."""

import numpy as np
import pytest
import torch
from kernels.bench import FULL, SLIDING, EngineBench, drive

WINDOWS = [1, 5, 16, 24]
PAGE_SIZES = [1, 4, 16]


def ring_tokens(window: int, page_size: int) -> int:
    return -(-window // page_size) * page_size


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("seed", range(2))
def test_random_passes_equal_dense_attention(window, page_size, seed):
    """Single tokens and pieces up to far beyond the ring, in any order, give what dense attention gives."""
    ring = ring_tokens(window, page_size)
    lengths = [1, 2, window, window + 1, ring + 1, 3 * ring + 2]
    bench = EngineBench([SLIDING, SLIDING], window, page_size, seed=seed)
    lengths += bench.rng.integers(1, 4 * ring + 4, size=6).tolist()
    drive(bench, bench.rng.permutation(lengths).tolist(), longest_piece=2 * ring + 3)
    assert bench.cache.free_share == 1.0


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("pieces", [[45], [1] * 45, [7, 1, 30, 2, 1, 4]], ids=lambda p: str(p[:3]))
def test_exactly_the_window_is_visible(window, page_size, pieces):
    """With one-hot values the output names the keys that were seen: the token itself and window - 1 before it."""
    bench = EngineBench([SLIDING], window, page_size, head_dim=64)
    sequence = bench.add(45)
    sequence.layers[0][2][:] = torch.eye(45, 64)[:, None]
    output = torch.cat([bench.run([(sequence, length)])[0] for length in pieces])
    tokens = np.arange(45)
    seen = (tokens <= tokens[:, None]) & (tokens > tokens[:, None] - window)
    for head in range(bench.num_heads):
        assert np.array_equal(output[:, head, :45].numpy() > 0, seen)
    assert seen.sum(1).tolist() == [min(token + 1, window) for token in tokens]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_ring_is_recycled_in_place(page_size):
    """Past the window a request holds the same pages for ever, however it goes on."""
    window = 24
    ring = ring_tokens(window, page_size)
    bench = EngineBench([SLIDING], window, page_size)
    sequence, tables = bench.add(7 * ring), []
    for piece in (ring - 1, 1, 1, 2 * ring, ring, *[1] * ring, 2 * ring - 1):
        bench.run([(sequence, piece)])
        tables.append(list(bench.cache.allocators[0].block_table(0)))
    assert not sequence.num_remaining
    assert all(table == tables[1] for table in tables[1:])
    assert len(tables[1]) == ring // page_size


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("window", [5, 16, 24])
def test_pieces_around_the_window_and_the_ring(window, page_size):
    """A first piece, a second one and a decode, all of lengths next to those of page, window and ring, in one pass."""
    ring = ring_tokens(window, page_size)
    edges = sorted({n + delta for n in (1, page_size, window, ring, 2 * ring) for delta in (-1, 0, 1)} - {-1, 0})
    for first in edges:
        bench = EngineBench([SLIDING], window, page_size, num_tokens=1024)
        sequences = [bench.add(first + second + 1) for second in edges]
        bench.run([(sequence, first) for sequence in sequences])
        bench.run([(sequence, second) for sequence, second in zip(sequences, edges, strict=True)])
        bench.run([(sequence, 1) for sequence in sequences])


HYBRIDS = [
    pytest.param([SLIDING, FULL, SLIDING], id="1 full, 2 sliding"),
    pytest.param([SLIDING, SLIDING, FULL, SLIDING, FULL], id="2 full, 3 sliding"),
    pytest.param([FULL, *[SLIDING] * 19, FULL, SLIDING, SLIDING], id="2 full, 21 sliding"),
    pytest.param([SLIDING, *[FULL] * 20, SLIDING, FULL], id="21 full, 2 sliding"),
]


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("layer_types", HYBRIDS)
def test_hybrids_equal_dense_attention(layer_types, page_size):
    """Blocks of both types tile the same chunks, some with idle pages; no layer touches what is another's."""
    bench = EngineBench(layer_types, 10, page_size, group=1, head_dim=8)
    drive(bench, [1, 11, 25, 40, 26, 33], longest_piece=30, num_at_once=3)
    assert bench.cache.free_share == 1.0


def test_hybrids_have_what_they_are_here_for():
    """Several blocks per chunk of either type, and idle pages of either type."""
    groups = [group for case in HYBRIDS for group in EngineBench(*case.values, 10, 4).layout.groups]
    idle = {(g.window is None, g.pages_per_chunk % g.pages_per_block > 0) for g in groups}
    several = {(g.window is None, g.blocks_per_chunk > 1) for g in groups}
    assert idle == several == {(kind, found) for kind in (True, False) for found in (True, False)}


def test_bfloat16_rings_equal_dense_attention():
    """Only rounding separates the result from float64 over the same values."""
    bench = EngineBench([SLIDING, FULL], 24, 16, group=3, head_dim=64, dtype=torch.bfloat16)
    drive(bench, [100, 60, 30], longest_piece=50)
