"""Requests in the pages of one layer, for attention in C; what nobody may read is NaN, scales of int8 too."""

from dataclasses import dataclass, field

import numpy as np
import torch
from kernels.bench import POISON, dense_attention

from cbgen.cache.pool import READ_RESERVE_CHUNK, WRITE_RESERVE_CHUNK
from cbgen.kernels.backend import AttentionBatch, AttentionOptions
from cbgen.kernels.cpu.attention import PagedAttention
from cbgen.kernels.cpu.library import library_for

MAX_PAGES = 1 << 20
TOLERANCE = 1e-5
# With KV in int8, weights have levels of 16 bits, which lose so much of sums up to 3.
INT8_TOLERANCE = 4e-4


@dataclass(frozen=True)
class Kind:
    """A layer and how its KV is held."""

    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    page_size: int = 16
    window: int | None = None
    kv_dtype: torch.dtype = torch.float32
    softcap: float | None = None
    sinks: bool = False


@dataclass
class Sequence:
    """A request: all its queries, keys and values [length, heads, head_dim], and its pages in the order of its ring."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    pages: list[int] = field(default_factory=list)
    context: int = 0  # tokens in the pages


class PagedBench:
    """A layer whose pages are spread over memory at random."""

    def __init__(self, isa: str, kind: Kind, num_pages: int, seed: int = 0):
        self.kind, self.rng = kind, np.random.default_rng(seed)
        heads = kind.kv_heads * kind.group
        self.backend = PagedAttention(
            library_for(isa), kind.page_size, heads, kind.kv_heads, kind.head_dim, kind.kv_dtype
        )
        self.pages = torch.full((num_pages + 2, self.backend.page_bytes), POISON, dtype=torch.uint8)
        self.pages[READ_RESERVE_CHUNK] = 0
        self._free = (self.rng.permutation(num_pages) + 2).tolist()
        sinks = 2 * self.random(1, heads)[0, :, 0] if kind.sinks else None
        self.options = AttentionOptions(1.3 * kind.head_dim**-0.5, kind.softcap, sinks)
        self._ring = MAX_PAGES if kind.window is None else -(-kind.window // kind.page_size)

    def random(self, num_tokens: int, num_heads: int) -> torch.Tensor:
        shape = (num_tokens, num_heads, self.kind.head_dim)
        return torch.from_numpy(self.rng.standard_normal(shape)).float()

    def sequence(self, length: int, context: int, like: tuple[Sequence, int] | None = None) -> Sequence:
        """A request with `context` tokens in its pages. like: another, and how many first tokens both have."""
        heads = self.kind.kv_heads * self.kind.group
        own = Sequence(*(self.random(length, count) for count in (heads, self.kind.kv_heads, self.kind.kv_heads)))
        if self.kind.kv_dtype == torch.int8:
            own.queries, own.keys, own.values = map(away_from_ties, (own.queries, own.keys, own.values))
        if like is not None:
            other, count = like
            own.keys[:count], own.values[:count] = other.keys[:count], other.values[:count]
        self.fill(own, context)
        return own

    def fill(self, own: Sequence, context: int, shared: list[int] | None = None) -> None:
        """Stores the first tokens as earlier passes would have. shared: pages that hold the first of them already."""
        own.pages = list(shared or [])
        first = len(own.pages) * self.kind.page_size
        pages, offsets = self._places(own, first, context)
        self.backend._write(self.pages, own.keys[first:context], own.values[first:context], pages, offsets)
        own.context = context

    def _places(self, own: Sequence, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Where tokens first to last go; those whose place a later one takes go to the write reserve."""
        page_size, ring = self.kind.page_size, self._ring
        while len(own.pages) < min(ring, -(-last // page_size)):
            own.pages.append(self._free.pop())
        tokens = np.arange(first, last)
        pages = np.array([own.pages[token // page_size % ring] for token in tokens], dtype=np.int64)
        pages[: max(0, len(tokens) - ring * page_size)] = WRITE_RESERVE_CHUNK
        return pages, tokens % page_size

    def batch(self, members: list[tuple[Sequence, int]]) -> AttentionBatch:
        """The next so many tokens of each, laid out as the engine does."""
        page_size, window = self.kind.page_size, self.kind.window
        places = [self._places(own, own.context, own.context + length) for own, length in members]
        firsts, tables = [], []
        for own, length in members:
            first = 0 if window is None else max(0, own.context - window + 1) // page_size
            end = own.context + length if window is None or length == 1 else own.context
            tables.append([own.pages[page % self._ring] for page in range(first, -(-end // page_size))])
            firsts.append(first * page_size)
        padded = torch.full((len(members), max(1, *map(len, tables), 1)), READ_RESERVE_CHUNK)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = torch.tensor(table, dtype=torch.int64)
        pages, offsets = (torch.from_numpy(np.concatenate(column)) for column in zip(*places, strict=True))
        lengths = [length for _, length in members]
        ends = [own.context + length for own, length in members]
        return AttentionBatch(lengths, ends, firsts, padded, pages, offsets, window)

    def attend(self, members: list[tuple[Sequence, int]], fused: bool = False) -> list[torch.Tensor]:
        """The outputs of the next so many tokens of each. fused: q, k and v lie in one tensor."""
        plan = self.backend.prepare(self.batch(members))
        spans = [slice(own.context, own.context + length) for own, length in members]
        parts = [
            torch.cat([getattr(own, name)[span] for (own, _), span in zip(members, spans, strict=True)])
            for name in ("queries", "keys", "values")
        ]
        if fused:
            parts = list(torch.cat(parts, dim=1).split([part.shape[1] for part in parts], dim=1))
        else:  # head after head
            parts = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in parts]
        output = self.backend.attend(*parts, self.pages, plan, self.options)
        assert output.shape == parts[0].shape
        for own, length in members:
            own.context += length
        return list(output.split([length for _, length in members]))

    def check(self, members: list[tuple[Sequence, int]], fused: bool = False) -> None:
        """One pass, against float64 on what the pages hold."""
        outputs = self.attend(members, fused)
        tolerance = INT8_TOLERANCE if self.kind.kv_dtype == torch.int8 else TOLERANCE
        for (own, length), output in zip(members, outputs, strict=True):
            assert output.isfinite().all(), "something that no token may see was read"
            torch.testing.assert_close(output.double(), self.expected(own, length), atol=tolerance, rtol=0)

    def expected(self, own: Sequence, length: int) -> torch.Tensor:
        """float64 [length, heads, head_dim] of the last `length` tokens of the context."""
        end = own.context
        first, kind = end - length, self.kind.kv_dtype
        keys, values = (as_held(half[:end], kind) for half in (own.keys, own.values))
        # Queries are quantized as keys in int8 are.
        queries = as_held(own.queries[first:end], kind if kind == torch.int8 else torch.float32)
        return dense_attention(queries, keys, values, first, self.kind.window, self.options)


def away_from_ties(half: torch.Tensor) -> torch.Tensor:
    """The same with nothing so near the middle between two levels of int8 that rounding could go either way."""
    step = half.abs().amax(-1, keepdim=True) / 127
    levels = half / step
    near = (levels - levels.floor() - 0.5).abs() < 1e-3
    return half - near * step / 100


def as_held(half: torch.Tensor, kv_dtype: torch.dtype) -> torch.Tensor:
    """Keys or values as pages of a kind give them back, in float64."""
    if kv_dtype != torch.int8:
        return half.to(kv_dtype).double()
    largest = half.abs().amax(-1, keepdim=True)
    return (half * (127 / largest)).round().double() * (largest / 127).double()
