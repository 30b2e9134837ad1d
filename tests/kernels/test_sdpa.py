"""SdpaAttention of full layers over scattered pages against dense attention in float64."""

from dataclasses import dataclass
from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from kernels.bench import FULL, NUM_KV_HEADS, POISON, EngineBench, assert_equals_dense, dense_attention

from cbgen.cache.pool import READ_RESERVE_CHUNK
from cbgen.kernels import sdpa
from cbgen.kernels.backend import AttentionBatch, AttentionOptions
from cbgen.kernels.sdpa import DECODE_BUCKET_TOKENS, SdpaAttention

BUCKET = DECODE_BUCKET_TOKENS
PAGE_SIZES = [1, 4, 16, 32]


@dataclass
class Sequence:
    """One request: all its keys and values, [length, kv_heads, head_dim], and the pages it owns."""

    keys: torch.Tensor
    values: torch.Tensor
    blocks: list[int]


class Bench:
    """Pages of one layer, filled with NaN but for the read reserve, and sequences scattered over them."""

    def __init__(self, page_size, group, head_dim, lengths, dtype=torch.float32, seed=0):
        self.rng = np.random.default_rng(seed)
        self.page_size, self.dtype, self.options = page_size, dtype, AttentionOptions(1.3 * head_dim**-0.5)
        self.num_heads, self.head_dim = NUM_KV_HEADS * group, head_dim
        self.backend = SdpaAttention(page_size, NUM_KV_HEADS, head_dim, dtype)
        counts = [-(-length // page_size) + number % 2 for number, length in enumerate(lengths)]  # some own one more
        num_blocks = sum(counts) + 9
        self.raw = torch.full((num_blocks, self.backend.page_bytes), POISON, dtype=torch.uint8)
        self.raw[READ_RESERVE_CHUNK] = 0
        self.pages = self.backend.view_pages(self.raw)
        assert self.pages[0][1:].isnan().all()
        assert self.pages[1][1:].isnan().all()
        scattered = iter((self.rng.permutation(num_blocks - 1) + 1).tolist())
        self.sequences = [
            Sequence(*(self.random(length, NUM_KV_HEADS) for _ in range(2)), [next(scattered) for _ in range(count)])
            for length, count in zip(lengths, counts, strict=True)
        ]

    def random(self, num_tokens: int, num_heads: int) -> torch.Tensor:
        """[num_tokens, num_heads, head_dim], with the strides that a model's heads have."""
        shape = (num_heads, num_tokens, self.head_dim)
        return torch.from_numpy(self.rng.standard_normal(shape)).to(self.dtype).transpose(0, 1)

    def places(self, sequence: Sequence, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.arange(first, last)
        return torch.tensor(sequence.blocks)[tokens // self.page_size], tokens % self.page_size

    def write_before(self, index: int, num_tokens: int) -> None:
        """Puts the first tokens of a sequence in its pages, as earlier passes would have."""
        sequence = self.sequences[index]
        place = self.places(sequence, 0, num_tokens)
        self.pages[0][place] = sequence.keys[:num_tokens]
        self.pages[1][place] = sequence.values[:num_tokens]

    def batch(self, spans: list[tuple[int, int, int]]) -> AttentionBatch:
        """spans: (sequence, first, last) of the query tokens of each request in the pass."""
        members = [self.sequences[index] for index, _, _ in spans]
        tables = torch.full((len(spans), max(len(s.blocks) for s in members)), READ_RESERVE_CHUNK)
        for row, sequence in enumerate(members):
            tables[row, : len(sequence.blocks)] = torch.tensor(sequence.blocks)
        places = [self.places(self.sequences[i], first, last) for i, first, last in spans]
        blocks, offsets = (torch.cat(column) for column in zip(*places, strict=True))
        lengths, ends = [last - first for _, first, last in spans], [last for _, _, last in spans]
        return AttentionBatch(lengths, ends, [0] * len(spans), tables, blocks, offsets, window=None)

    def attend(self, spans: list[tuple[int, int, int]], query: torch.Tensor) -> torch.Tensor:
        keys, values = (
            torch.cat([getattr(self.sequences[i], name)[first:last] for i, first, last in spans])
            for name in ("keys", "values")
        )
        plan = self.backend.prepare(self.batch(spans))
        return self.backend.attend(query, keys, values, self.pages, plan, self.options)

    def check(self, spans: list[tuple[int, int, int]], query: torch.Tensor, output: torch.Tensor) -> None:
        assert output.shape == query.shape
        assert output.dtype == self.dtype
        start = 0
        for index, first, last in spans:
            end, sequence = start + last - first, self.sequences[index]
            expected = dense_attention(query[start:end], sequence.keys, sequence.values, first, None, self.options)
            assert_equals_dense(output[start:end], expected)
            start = end


def run_spans(bench: Bench, spans: list[tuple[int, int, int]]) -> None:
    """Everything before each span's first token is written; then one pass over all spans is checked."""
    for index, first, _ in spans:
        bench.write_before(index, first)
    query = bench.random(sum(last - first for _, first, last in spans), bench.num_heads)
    bench.check(spans, query, bench.attend(spans, query))


def mixed_spans(page_size: int) -> list[tuple[int, int, int]]:
    """Decodes, whole prompts and chunked prompts around page and bucket sizes, in mixed order."""
    edges = sorted({1, 2, page_size - 1, page_size, page_size + 1, BUCKET - 1, BUCKET, BUCKET + 1, 2 * BUCKET + 3})
    spans = []
    for length in (edge for edge in edges if edge > 0):
        for first in sorted({0, length // 3, length - 2, length - 1}):
            if 0 <= first < length:
                spans.append((first, length))
    order = np.random.default_rng(page_size).permutation(len(spans))
    return [(index, *spans[place]) for index, place in enumerate(order)]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("head_dim", [16, 64, 80])
@pytest.mark.parametrize("group", [1, 2, 3, 8])
def test_mixed_batches_equal_dense_attention(group, head_dim, page_size):
    """One pass of decodes, whole and chunked prompts, pages anywhere, gives every token what dense attention gives."""
    spans = mixed_spans(page_size)
    run_spans(Bench(page_size, group, head_dim, [last for _, _, last in spans], seed=group), spans)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("seed", range(4))
def test_random_batches_equal_dense_attention(page_size, seed):
    """Random lengths and query lengths, several passes over the same sequences in a row."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 3 * BUCKET, size=10).tolist()
    bench = Bench(page_size, 2, 16, lengths, seed=seed)
    computed = [0] * len(lengths)
    while computed != lengths:
        unfinished = [i for i, length in enumerate(lengths) if computed[i] < length]
        chosen = rng.permutation(unfinished)[: rng.integers(1, 7)].tolist()
        spans = [(i, computed[i], int(rng.integers(computed[i], lengths[i])) + 1) for i in chosen]
        query = bench.random(sum(last - first for _, first, last in spans), bench.num_heads)
        bench.check(spans, query, bench.attend(spans, query))
        for index, _, last in spans:
            computed[index] = last


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_decodes_around_bucket_boundaries_equal_dense_attention(page_size):
    """Decodes alone, at every length next to a multiple of the bucket or of the page, in one pass."""
    around = [step * multiple + delta for step in (page_size, BUCKET) for multiple in (1, 2, 3) for delta in (-1, 0, 1)]
    lengths = [length for length in around if length > 0]
    run_spans(Bench(page_size, 3, 16, lengths, seed=page_size), [(i, n - 1, n) for i, n in enumerate(lengths)])


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_short_decode_is_not_harmed_by_a_long_neighbour(page_size):
    """The block table is as wide as the longest request; the rows of the others are padding from their end on."""
    run_spans(
        Bench(page_size, 2, 16, [1, 5 * BUCKET, 2], seed=1), [(0, 0, 1), (1, 5 * BUCKET - 1, 5 * BUCKET), (2, 1, 2)]
    )


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pieces_then_decode_equal_the_whole(page_size):
    """What one pass writes the next one reads: a prompt in three pieces, then decodes, as if it were one prompt."""
    length, cuts = 75, [0, 20, 33, 72, 73, 74, 75]
    pieces, whole = Bench(page_size, 2, 16, [length], seed=2), Bench(page_size, 2, 16, [length], seed=2)
    query = pieces.random(length, pieces.num_heads)
    outputs = [pieces.attend([(0, a, b)], query[a:b]) for a, b in pairwise(cuts)]
    together = whole.attend([(0, 0, length)], query)
    torch.testing.assert_close(torch.cat(outputs), together, atol=1e-5, rtol=0)
    pieces.check([(0, 0, length)], query, torch.cat(outputs))
    assert torch.equal(pieces.raw, whole.raw), "the pages hold the same bytes either way"


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_pass_writes_its_own_tokens_and_nothing_else(page_size):
    """Afterwards exactly the places of the query tokens hold their K and V; every other byte is as it was."""
    bench = Bench(page_size, 2, 16, [40, 33, 5, 64], seed=3)
    spans = [(0, 39, 40), (1, 0, 33), (3, 30, 64)]
    for index, first, _ in spans:
        bench.write_before(index, first)
    expected = bench.raw.clone()
    halves = bench.backend.view_pages(expected)
    for index, first, last in spans:
        place = bench.places(bench.sequences[index], first, last)
        halves[0][place] = bench.sequences[index].keys[first:last]
        halves[1][place] = bench.sequences[index].values[first:last]
    query = bench.random(sum(last - first for _, first, last in spans), bench.num_heads)
    bench.attend(spans, query)
    assert torch.equal(bench.raw, expected)


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_requests_share_pages_that_their_pass_writes(page_size, order):
    """A prompt, another that begins with its first pages, and a decode after them, all in the pass that writes them."""
    shared = 2 * page_size
    bench = Bench(page_size, 2, 16, [shared + 7, shared + 5, shared + 1], seed=4)
    for sequence in bench.sequences[1:]:
        for mine, first in ((sequence.keys, bench.sequences[0].keys), (sequence.values, bench.sequences[0].values)):
            mine[:shared] = first[:shared]
        sequence.blocks[:2] = bench.sequences[0].blocks[:2]
    spans = [(0, 0, shared + 7), (1, shared, shared + 5), (2, shared, shared + 1)]
    spans = [spans[index] for index in order]
    query = bench.random(sum(last - first for _, first, last in spans), bench.num_heads)
    bench.check(spans, query, bench.attend(spans, query))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_shared_pages_as_the_engine_lays_them_out(page_size):
    """The cache matches what the pass is about to write; requests that leave do not harm those that stay."""
    bench = EngineBench([FULL, FULL], None, page_size, share=True)
    first = bench.add(3 * page_size + 2)
    second, third = bench.add(3 * page_size + 9, (first, 3 * page_size)), bench.add(page_size + 1, (first, page_size))
    bench.run([(first, 3 * page_size + 1), (second, 5), (third, 1)])
    tables = [bench.cache.allocators[0].block_table(number) for number in range(3)]
    assert tables[0][:3] == tables[1][:3]
    assert tables[0][:1] == tables[2][:1]
    bench.run([(second, 3), (first, 1)])
    bench.finish(third)
    bench.run([(second, 1)])


@pytest.mark.parametrize("limit", [1, 2 * BUCKET, 5 * BUCKET])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_decodes_are_split_when_they_gather_too_much(page_size, limit, monkeypatch):
    """No group gathers more than the limit, or it is a single request; the results stay the same."""
    monkeypatch.setattr(sdpa, "MAX_GATHERED_TOKENS", limit)
    lengths = [1 + 7 * number % (2 * BUCKET + 9) for number in range(24)]
    spans = [(number, length - 1, length) for number, length in enumerate(lengths)]
    bench = Bench(page_size, 2, 16, lengths, seed=5)
    groups = bench.backend.prepare(bench.batch(spans)).decodes
    assert all(group.pages.numel() * page_size <= limit or len(group.rows) == 1 for group in groups)
    assert sorted(torch.cat([group.rows for group in groups]).tolist()) == list(range(24))
    assert len(groups) == 24 if limit == 1 else 3 < len(groups) < 24
    run_spans(bench, spans)


@pytest.mark.parametrize("page_size", [4, 32])
def test_bfloat16_pages_equal_dense_attention(page_size):
    """The layout follows the dtype; only rounding separates the result from float64 over the same values."""
    spans = mixed_spans(page_size)
    run_spans(Bench(page_size, 3, 64, [last for _, _, last in spans], dtype=torch.bfloat16), spans)
