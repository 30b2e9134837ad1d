"""Dense attention in float64, and requests taken through passes laid out as the engine does, over pages of NaN."""

from dataclasses import dataclass

import numpy as np
import torch

from cbgen.cache.layout import CacheLayout
from cbgen.cache.paged_cache import PagedCache
from cbgen.cache.pool import NUM_RESERVED_CHUNKS, READ_RESERVE_CHUNK, WRITE_RESERVE_CHUNK
from cbgen.cache.storage import KVStorage
from cbgen.config import FULL_ATTENTION, SLIDING_ATTENTION, ModelShape
from cbgen.engine.input_outputs import InputBuffers
from cbgen.engine.requests import RequestState
from cbgen.engine.sampling_params import SamplingParams
from cbgen.engine.scheduler import ScheduledBatch, ScheduledRequest
from cbgen.kernels.backend import AttentionOptions
from cbgen.kernels.sdpa import SdpaAttention
from cbgen.streams import InOrderStreams

CPU = torch.device("cpu")
FULL, SLIDING = FULL_ATTENTION, SLIDING_ATTENTION
POISON = 0xFF  # of bytes: NaN in any float type
NUM_KV_HEADS = 2
MAX_BATCH_TOKENS, MAX_REQUESTS, MAX_MODEL_LEN = 1024, 16, 4096
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def dense_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first: int,
    window: int | None,
    options: AttentionOptions,
) -> torch.Tensor:
    """float64 [Q, heads, head_dim]: query [Q, heads, head_dim] are the tokens from `first` on of those in keys, values.

    Token t sees tokens 0 to t, or the last `window` of them. Query head h reads KV head h // group.
    """
    last, group = first + len(query), query.shape[1] // keys.shape[1]
    keys, values = (half[:last].double().repeat_interleave(group, dim=1) for half in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * options.scaling
    if options.softcap is not None:
        scores = options.softcap * (scores / options.softcap).tanh()
    distance = torch.arange(first, last)[:, None] - torch.arange(last)[None, :]
    visible = (distance >= 0) & (distance < (last if window is None else window))
    weights = scores.exp() * visible
    total = weights.sum(-1, keepdim=True)
    if options.sinks is not None:
        total = total + options.sinks.double().exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", weights / total, values)


def assert_equals_dense(output: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> None:
    assert output.isfinite().all(), "something that no token may see was read"
    torch.testing.assert_close(output.double(), expected, atol=tolerance or TOLERANCE[output.dtype], rtol=0)


@dataclass
class Sequence:
    """A request, and for each layer its queries, keys and values, each [length, heads, head_dim]."""

    request: RequestState
    layers: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

    @property
    def num_remaining(self) -> int:
        return self.request.num_remaining_tokens


class EngineBench:
    """Requests in a real cache, laid out by the engine's input buffers. Free pages and the write reserve hold NaN."""

    def __init__(
        self,
        layer_types: list[str],
        window: int | None,
        page_size: int,
        group: int = 2,
        head_dim: int = 16,
        dtype: torch.dtype = torch.float32,
        softcap: float | None = None,
        with_sinks: bool = False,
        num_tokens: int = 512,
        share: bool = False,
        tolerance: float | None = None,
        seed: int = 0,
    ):
        """num_tokens: what MAX_REQUESTS requests together may hold of the cache."""
        self.rng = np.random.default_rng(seed)
        self.num_heads, self.head_dim = NUM_KV_HEADS * group, head_dim
        self.dtype, self.tolerance = dtype, tolerance
        shape = ModelShape(tuple(layer_types), window, self.num_heads, NUM_KV_HEADS, head_dim, 1, 1, 1, dtype.itemsize)
        self.layout = CacheLayout.of(shape, page_size)
        num_chunks = self.layout.chunks_for_blocks(num_tokens // page_size + MAX_REQUESTS) + NUM_RESERVED_CHUNKS
        self.cache = PagedCache(self.layout, num_chunks, allow_block_sharing=share)
        self.backend = SdpaAttention(page_size, NUM_KV_HEADS, head_dim, dtype)
        self.storage = KVStorage(num_chunks, self.layout, self.backend, CPU)
        self.storage.pages[self.layout.pages_per_chunk :] = POISON
        self.buffers = InputBuffers(MAX_BATCH_TOKENS, MAX_REQUESTS, self.layout, MAX_MODEL_LEN, InOrderStreams(CPU))
        self.options = [
            AttentionOptions(1.3 * head_dim**-0.5, softcap, 2 * self.random(1, self.num_heads)[0, :, 0])
            if with_sinks
            else AttentionOptions(1.3 * head_dim**-0.5, softcap)
            for _ in layer_types
        ]
        self.sequences: list[Sequence] = []

    def random(self, num_tokens: int, num_heads: int) -> torch.Tensor:
        """[num_tokens, num_heads, head_dim]"""
        return torch.from_numpy(self.rng.standard_normal((num_tokens, num_heads, self.head_dim))).to(self.dtype)

    def add(self, length: int, shared: tuple[Sequence, int] | None = None) -> Sequence:
        """A new request. shared: another one, and how many of its tokens are the first of the new one, too."""
        token_ids = self.rng.integers(1 << 30, size=length).tolist()
        layers = [
            tuple(self.random(length, heads) for heads in (self.num_heads, NUM_KV_HEADS, NUM_KV_HEADS))
            for _ in self.options
        ]
        if shared is not None:
            other, count = shared
            token_ids[:count] = other.request.token_ids[:count]
            for own, theirs in zip(layers, other.layers, strict=True):
                for mine, their in zip(own, theirs, strict=True):
                    mine[:count] = their[:count]
        self.sequences.append(Sequence(RequestState(len(self.sequences), token_ids, SamplingParams(1)), layers))
        return self.sequences[-1]

    def run(self, pieces: list[tuple[Sequence, int]]) -> list[torch.Tensor]:
        """One pass over the next so many tokens of each; outputs and pages are checked. Returns each layer's output."""
        batch = ScheduledBatch([self._schedule(sequence.request, length) for sequence, length in pieces])
        spans = [(entry.start, entry.kv_length) for entry in batch.scheduled]
        members = [sequence for sequence, _ in pieces]
        before = self.storage.pages.clone()
        inputs = self.buffers.lay_out(batch, self.cache)
        plans = [self.backend.prepare(attention) for attention in inputs.attention]
        outputs = []
        for layer, options in enumerate(self.options):
            number = next(n for n, group in enumerate(self.layout.groups) if layer in group.layers)
            q, k, v = (
                torch.cat([s.layers[layer][part][slice(*span)] for s, span in zip(members, spans, strict=True)])
                .transpose(0, 1)
                .contiguous()
                .transpose(0, 1)  # the strides that a model's heads have
                for part in range(3)
            )
            output = self.backend.attend(q, k, v, self.storage.layers[layer], plans[number], options)
            assert (output.shape, output.dtype) == (q.shape, self.dtype)
            expected = torch.cat([self._reference(s, layer, *span) for s, span in zip(members, spans, strict=True)])
            assert_equals_dense(output, expected, self.tolerance)
            outputs.append(output)
        self._check_pages(before, members, spans)
        for entry in batch.scheduled:
            if entry in batch.admitted:
                entry.request.admit(entry.start, 0.0)
            entry.request.advance(entry.query_length)
        self.cache.check_integrity()
        return outputs

    def finish(self, sequence: Sequence) -> None:
        """The request leaves; what it held is NaN from now on, unless others may share it."""
        request = sequence.request
        if not self.cache.shares_blocks:
            pages = self.cache.pages_of(request.request_id, request.num_computed_tokens)
            self.storage.pages[pages] = POISON
        self.cache.release(request.request_id)

    def _schedule(self, request: RequestState, query_length: int) -> ScheduledRequest:
        """As the scheduler does it: matched blocks are taken over, the rest is allocated."""
        request_id, start, num_matched = request.request_id, request.num_computed_tokens, 0
        if request_id in self.cache.holders:
            assert self.cache.allocate(request_id, start + query_length)
        else:
            match = self.cache.match(request_id, request.token_ids)
            start = num_matched = len(match.blocks) * self.cache.page_size
            assert self.cache.admit(request_id, request.token_ids, start + query_length, match)
        kv_length = start + query_length
        self.cache.register(request_id, request.token_ids, kv_length)
        return ScheduledRequest(request, start, query_length, num_matched, kv_length == len(request.token_ids))

    def _reference(self, sequence: Sequence, layer: int, first: int, last: int) -> torch.Tensor:
        query, keys, values = sequence.layers[layer]
        window = next(group.window for group in self.layout.groups if layer in group.layers)
        return dense_attention(query[first:last], keys, values, first, window, self.options[layer])

    def _check_pages(self, before: torch.Tensor, members: list[Sequence], spans: list[tuple[int, int]]) -> None:
        """The pass wrote each token where it belongs, as far as rings keep it, and nothing else."""
        for number, group in enumerate(self.layout.groups):
            for sequence, (first, last) in zip(members, spans, strict=True):
                table = self.cache.allocators[number].block_table(sequence.request.request_id)
                kept = last if group.max_blocks is None else group.max_blocks * group.page_size
                tokens = torch.arange(max(first, last - kept), last)
                blocks = torch.tensor(table)[tokens // group.page_size % (group.max_blocks or len(table))]
                for place, layer in enumerate(group.layers):
                    views = self.backend.view_pages(before)
                    for view, half in zip(views, sequence.layers[layer][1:], strict=True):
                        view[blocks + place, tokens % group.page_size] = half[tokens]
        size = self.layout.pages_per_chunk
        self.storage.pages[WRITE_RESERVE_CHUNK * size : (WRITE_RESERVE_CHUNK + 1) * size] = POISON
        assert torch.equal(self.storage.pages, before), "pages do not hold what they should"
        assert not self.storage.pages[READ_RESERVE_CHUNK * size : (READ_RESERVE_CHUNK + 1) * size].any()


def drive(bench: EngineBench, lengths: list[int], longest_piece: int, num_at_once: int = 5) -> None:
    """Takes requests through passes of random pieces to their end; who is done makes room for the next."""
    rng, waiting, active = bench.rng, list(lengths), []
    while waiting or active:
        while waiting and len(active) < num_at_once:
            active.append(bench.add(waiting.pop()))
        chosen = rng.permutation(len(active))[: rng.integers(1, num_at_once + 1)]
        wishes = [1, 1, 1, int(rng.integers(2, longest_piece + 1)), int(rng.integers(2, longest_piece + 1)), 1 << 30]
        bench.run([(active[i], min(wishes[rng.integers(len(wishes))], active[i].num_remaining)) for i in chosen])
        for sequence in [s for s in active if not s.num_remaining]:
            bench.finish(sequence)
            active.remove(sequence)
