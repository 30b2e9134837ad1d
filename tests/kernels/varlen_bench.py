"""Passes laid out in tensors alone and padded, as a recorded graph reads them, for VarlenAttention on its reference."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from kernels.bench import NUM_KV_HEADS, EngineBench
from kernels.varlen_reference import varlen_reference
from torch.fx.experimental.proxy_tensor import make_fx

from cbgen.cache.pool import READ_RESERVE_CHUNK, WRITE_RESERVE_CHUNK
from cbgen.kernels.backend import AttentionBatch, AttentionOptions, DeviceBatch
from cbgen.kernels.cuda import VarlenAttention


@dataclass(frozen=True)
class Sizes:
    """What a pass is padded to: T, R, N and G of DeviceBatch, the last None for a pass without it."""

    tokens: int
    requests: int
    pages: int
    gathered: int | None
    longest_query: int


def gather_of(batch: AttentionBatch, page_size: int) -> tuple[list[int], list[int]]:
    """The entries of DeviceBatch.gather without padding, and how many each request has."""
    entries: list[int] = []
    counts, start = [], 0
    for request, (length, kv_length) in enumerate(zip(batch.query_lengths, batch.kv_lengths, strict=True)):
        before = len(entries)
        if length > 1:
            position, first = kv_length - length, batch.first_tokens[request]
            for token in range(max(0, position - batch.window + 1), position):
                page = int(batch.page_tables[request, (token - first) // page_size])
                entries.append(page * page_size + token % page_size)
            entries.extend(-1 - query_token for query_token in range(start, start + length))
        counts.append(len(entries) - before)
        start += length
    return entries, counts


def sizes_of(batch: AttentionBatch, page_size: int) -> Sizes:
    """What a pass needs without padding."""
    longest = max(batch.query_lengths)
    gathered = len(gather_of(batch, page_size)[0]) if batch.window is not None and longest > 1 else None
    return Sizes(len(batch.write_pages), *batch.page_tables.shape, gathered, longest)


def padding_queries(num_tokens: int, num_requests: int, longest: int) -> list[int]:
    """Query tokens of each padding request: one for each while they last, or all for the last request."""
    if longest == 1:
        assert num_tokens <= num_requests
        return [1] * num_tokens + [0] * (num_requests - num_tokens)
    return [0] * (num_requests - 1) + [num_tokens] if num_requests else []


def padded(column: torch.Tensor, size: int, value: int) -> torch.Tensor:
    return torch.cat([column, column.new_full((size - len(column),), value)])


def starts_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0)


def on_device(batch: AttentionBatch, page_size: int, sizes: Sizes, pages_per_chunk: int) -> AttentionBatch:
    """The batch in tensors of these sizes, as DeviceBatch has it, without the lists. Padding reads the read reserve,
    and writes to the write reserve."""
    read_page, write_page = (chunk * pages_per_chunk for chunk in (READ_RESERVE_CHUNK, WRITE_RESERVE_CHUNK))
    num_tokens, (num_requests, num_pages) = len(batch.write_pages), batch.page_tables.shape
    tables = torch.full((sizes.requests, sizes.pages), read_page)
    tables[:num_requests, :num_pages] = batch.page_tables
    more = padding_queries(sizes.tokens - num_tokens, sizes.requests - num_requests, sizes.longest_query)
    own = [kv_length - first for kv_length, first in zip(batch.kv_lengths, batch.first_tokens, strict=True)]
    kv_lengths = own + [min(count, sizes.pages * page_size) for count in more]
    gather = gather_starts = None
    if sizes.gathered is not None:
        entries, counts = gather_of(batch, page_size)
        gather = padded(torch.tensor(entries, dtype=torch.int64), sizes.gathered, read_page * page_size)
        gather_starts = starts_of(counts + [0] * len(more))
    device = DeviceBatch(
        starts_of(batch.query_lengths + more),
        torch.tensor(kv_lengths),
        sizes.longest_query,
        sizes.pages * page_size,
        gather,
        gather_starts,
        sizes.gathered or 0,
    )
    write_pages = padded(batch.write_pages, sizes.tokens, write_page)
    write_offsets = padded(batch.write_offsets, sizes.tokens, 0)
    return AttentionBatch([], [], [], tables, write_pages, write_offsets, batch.window, device)


def tensors_of(batch: AttentionBatch) -> list[torch.Tensor]:
    """All that a backend which reads tensors alone reads of a batch."""
    device = batch.on_device
    tensors = [batch.page_tables, batch.write_pages, batch.write_offsets, device.query_starts, device.kv_lengths]
    return tensors if device.gather is None else [*tensors, device.gather, device.gather_starts]


def with_tensors(batch: AttentionBatch, tensors: list[torch.Tensor]) -> AttentionBatch:
    """The same sizes with other tensors, in the order of tensors_of."""
    old = batch.on_device
    tables, write_pages, write_offsets, query_starts, kv_lengths, *gather = tensors
    sizes = (old.max_query_length, old.max_kv_length)
    device = DeviceBatch(query_starts, kv_lengths, *sizes, *(gather or (None, None)), old.max_gathered)
    return AttentionBatch([], [], [], tables, write_pages, write_offsets, batch.window, device)


class PaddedVarlen:
    """Stands in for the backend of an EngineBench. Each pass is padded by random sizes, or to the sizes of a recording;
    its output without padding is compared with that of SdpaAttention on the same batch.

    Query, key and value of padding tokens are NaN, so that nothing of them may reach a row that counts.
    """

    def __init__(self, bench: EngineBench, recorded: dict[bool, Sizes] | None, batch_invariant: bool):
        """recorded: what passes are padded to, by whether each request has one query token; None: anything."""
        layout, self.rng, self.reference = bench.layout, bench.rng, bench.backend
        self.page_size, self.pages_per_chunk = layout.page_size, layout.pages_per_chunk
        self.calls: list[dict[str, Any]] = []
        heads = (bench.num_heads, NUM_KV_HEADS, bench.head_dim)
        self.varlen = VarlenAttention(self.page_size, *heads, bench.dtype, batch_invariant, self._kernel)
        self.view_pages, self.page_bytes = self.varlen.view_pages, self.varlen.page_bytes
        self.recorded, self.graphs = recorded, {}
        self.num_replays = 0

    def _kernel(self, *args: Any, **options: Any) -> torch.Tensor:
        self.calls.append(options | {"max_q": args[5], "max_k": args[6]})
        return varlen_reference(*args, **options)

    def prepare(self, batch: AttentionBatch) -> tuple[AttentionBatch, Any]:
        needed = sizes_of(batch, self.page_size)
        if self.recorded is None:
            sizes = self._more(needed)
        else:  # what has one token each fits in either
            sizes = self.recorded[needed.longest_query == 1 and bool(self.rng.integers(2))]
            sizes = sizes if batch.window is not None else replace(sizes, gathered=None)
        padded_batch = on_device(batch, self.page_size, sizes, self.pages_per_chunk)
        return padded_batch, self.reference.prepare(batch)

    def _more(self, needed: Sizes) -> Sizes:
        requests, pages, gathered = self.rng.integers(0, 3, size=3).tolist()
        tokens = int(self.rng.integers(requests + 1)) if needed.longest_query == 1 else 7 * bool(requests)
        return Sizes(
            needed.tokens + tokens,
            needed.requests + requests,
            needed.pages + pages,
            None if needed.gathered is None else needed.gathered + gathered,
            max(needed.longest_query, tokens) if needed.longest_query > 1 else 1,
        )

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        plan: tuple[AttentionBatch, Any],
        options: AttentionOptions,
    ) -> torch.Tensor:
        batch, reference_plan = plan
        copies = tuple(half.clone() for half in pages)
        expected = self.reference.attend(query, key, value, copies, reference_plan, options)
        rows = filled_up(len(batch.write_pages), query, key, value)
        run = self._eager if self.recorded is None else self._replay
        output = run(rows, pages, batch, options)
        assert output.shape == rows[0].shape
        torch.testing.assert_close(output[: len(query)], expected, atol=1e-5, rtol=0)
        return output[: len(query)]

    def _eager(self, rows: list[torch.Tensor], pages: Any, batch: AttentionBatch, options: AttentionOptions) -> Any:
        return self.varlen.attend(*rows, pages, self.varlen.prepare(batch), options)

    def _replay(self, rows: list[torch.Tensor], pages: Any, batch: AttentionBatch, options: AttentionOptions) -> Any:
        """By a recording of the operations of an earlier pass of the same sizes, in whose tensors are the new numbers.

        The recording refuses whatever looks at a number: to it, tensors have none.
        """
        tensors = [*rows, *tensors_of(batch)]
        sizes = (batch.window, *(tuple(tensor.shape) for tensor in tensors))
        if sizes not in self.graphs:
            static = [tensor.clone() for tensor in tensors]

            def record(keys: torch.Tensor, values: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
                plan = self.varlen.prepare(with_tensors(batch, list(inputs[3:])))
                return self.varlen.attend(*inputs[:3], (keys, values), plan, options)

            scratch = [half.clone() for half in pages]
            self.graphs[sizes] = (make_fx(record)(*scratch, *static), static)
        else:
            self.num_replays += 1
        graph, static = self.graphs[sizes]
        for own, new in zip(static, tensors, strict=True):
            own.copy_(new)
        return graph(*pages, *static)


def varlen_bench(
    layer_types: list[str],
    window: int | None,
    page_size: int,
    recorded: dict[bool, Sizes] | None = None,
    batch_invariant: bool = False,
    **options: Any,
) -> EngineBench:
    """An EngineBench whose passes go through a PaddedVarlen, its `backend`."""
    bench = EngineBench(layer_types, window, page_size, **options)
    bench.backend = PaddedVarlen(bench, recorded, batch_invariant)
    return bench


def filled_up(num_tokens: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Query, key and value [T, ...] with tokens of NaN as padding, which nobody may see."""
    missing = num_tokens - len(tensors[0])
    return [torch.cat([tensor, tensor.new_full((missing, *tensor.shape[1:]), torch.nan)]) for tensor in tensors]
