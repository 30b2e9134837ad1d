"""Reference attention in plain torch: any device, any head size, over gathered copies of each request's pages."""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from cbgen.kernels.backend import AttentionBatch, align_bytes

# Decodes are attended together when their lengths round up to the same multiple of so many tokens.
DECODE_BUCKET_TOKENS = 64


@dataclass(frozen=True)
class DecodeGroup:
    """D requests with one query token each, padded to N pages with pages of the read reserve.

    rows: [D], their query tokens in the packed batch. blocks: [D, N]. visible: bool [D, 1, 1, N * page_size].
    hidden: [H], the places of invisible tokens among the D * N * page_size gathered.
    """

    rows: torch.Tensor
    blocks: torch.Tensor
    visible: torch.Tensor
    hidden: torch.Tensor


@dataclass(frozen=True)
class PrefillPiece:
    """One request with Q query tokens at start..end of the packed batch, the last of its kv_length tokens.

    mask: bool [Q, kv_length], or None where the prompt is whole and the mask is simply causal.
    """

    start: int
    end: int
    kv_length: int
    blocks: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True)
class SdpaPlan:
    """A forward pass, sorted into what is attended together."""

    write_blocks: torch.Tensor
    write_offsets: torch.Tensor
    decodes: list[DecodeGroup]
    prefills: list[PrefillPiece]


class SdpaAttention:
    """Attention over pages that hold K, then V, each [page_size, kv_heads, head_dim] in the model's dtype."""

    name = "sdpa"

    def __init__(self, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype):
        self._page_size = page_size
        self._page_shape = (page_size, num_kv_heads, head_dim)
        self._dtype = dtype
        self._half_bytes = page_size * num_kv_heads * head_dim * dtype.itemsize
        self.page_bytes = align_bytes(2 * self._half_bytes)

    def view_pages(self, raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """raw: uint8 [num_blocks, page_bytes]. Returns K and V, each [num_blocks, page_size, kv_heads, head_dim]."""
        halves = (raw[:, : self._half_bytes], raw[:, self._half_bytes : 2 * self._half_bytes])
        keys, values = (half.view(self._dtype).unflatten(1, self._page_shape) for half in halves)
        return keys, values

    def prepare(self, batch: AttentionBatch) -> SdpaPlan:
        """Sorts the requests of a batch into decodes of like length and single pieces of prompts."""
        buckets: dict[int, list[tuple[int, int]]] = {}  # pages after rounding up -> (request, query token)
        prefills = []
        start = 0
        for request, (query_length, kv_length) in enumerate(zip(batch.query_lengths, batch.kv_lengths, strict=True)):
            if query_length == 1:
                bucket_tokens = -(-kv_length // DECODE_BUCKET_TOKENS) * DECODE_BUCKET_TOKENS
                buckets.setdefault(self._num_pages(bucket_tokens), []).append((request, start))
            else:
                blocks = batch.block_tables[request, : self._num_pages(kv_length)]
                mask = None if query_length == kv_length else _causal_mask(query_length, kv_length, blocks.device)
                prefills.append(PrefillPiece(start, start + query_length, kv_length, blocks, mask))
            start += query_length
        decodes = [self._decode_group(batch, num_pages, members) for num_pages, members in buckets.items()]
        return SdpaPlan(batch.write_blocks, batch.write_offsets, decodes, prefills)

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def _decode_group(self, batch: AttentionBatch, num_pages: int, members: list[tuple[int, int]]) -> DecodeGroup:
        device = batch.block_tables.device
        requests, rows = (torch.tensor(column, device=device) for column in zip(*members, strict=True))
        num_pages = min(num_pages, batch.block_tables.shape[1])
        lengths = torch.tensor([batch.kv_lengths[request] for request, _ in members], device=device)
        visible = torch.arange(num_pages * self._page_size, device=device) < lengths[:, None]
        hidden = torch.nonzero(~visible.flatten())[:, 0]
        return DecodeGroup(rows, batch.block_tables[requests, :num_pages], visible[:, None, None, :], hidden)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        plan: SdpaPlan,
        scaling: float,
    ) -> torch.Tensor:
        """See AttentionBackend.attend."""
        key_pages, value_pages = pages
        key_pages[plan.write_blocks, plan.write_offsets] = key
        value_pages[plan.write_blocks, plan.write_offsets] = value
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for group in plan.decodes:
            output[group.rows] = _attend_decodes(query[group.rows], key_pages, value_pages, group, scaling)
        for piece in plan.prefills:
            keys, values = (_gather(half, piece.blocks)[: piece.kv_length] for half in pages)
            output[piece.start : piece.end] = _attend_prefill(
                query[piece.start : piece.end], keys, values, piece.mask, scaling
            )
        return output


def _gather(half: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """A copy of some pages of K or V [num_blocks, page_size, ...] in order: [tokens, kv_heads, head_dim].

    Pages are selected as flat rows, which torch copies several times faster than through four dimensions.
    """
    return half.flatten(1).index_select(0, blocks).view(-1, *half.shape[2:])


def _attend_decodes(
    query: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor, group: DecodeGroup, scaling: float
) -> torch.Tensor:
    """query: [D, heads, head_dim], one token per request. Returns the same shape.

    The query heads that share a KV head take the place of query tokens, so that K and V are not repeated in memory.
    What lies past a request's length may be NaN, and 0 x NaN is NaN: it is overwritten in the copy before use.
    """
    keys, values = (_gather(half, group.blocks.flatten()) for half in (key_pages, value_pages))
    keys, values = (
        half.index_fill_(0, group.hidden, 0).unflatten(0, (len(group.rows), -1)) for half in (keys, values)
    )  # each [D, L, kv_heads, head_dim]
    heads = scaled_dot_product_attention(
        query.unflatten(1, (keys.shape[2], -1)),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=group.visible,
        scale=scaling,
    )
    return heads.flatten(1, 2)


def _attend_prefill(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """query [Q, heads, head_dim] are the last Q of the L tokens in keys and values [L, kv_heads, head_dim].

    Returns [Q, heads, head_dim].
    """
    kv_length, num_kv_heads, head_dim = keys.shape
    grouped = query.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)  # [kv_heads, group, Q, head_dim]
    shape = (num_kv_heads, grouped.shape[1], kv_length, head_dim)
    heads = scaled_dot_product_attention(
        grouped,
        keys.transpose(0, 1).unsqueeze(1).expand(shape),
        values.transpose(0, 1).unsqueeze(1).expand(shape),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
    )
    return heads.permute(2, 0, 1, 3).flatten(1, 2)


def _causal_mask(query_length: int, kv_length: int, device: torch.device) -> torch.Tensor:
    """bool [query_length, kv_length], true where a query token sees a KV token; the last query sees all."""
    return torch.ones(query_length, kv_length, dtype=torch.bool, device=device).tril(kv_length - query_length)
