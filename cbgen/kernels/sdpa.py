"""Reference attention in plain torch: any device, any head size, over gathered copies of each request's pages."""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from cbgen.kernels.backend import AttentionBatch, AttentionOptions
from cbgen.kernels.page_halves import PageHalves, store

# Decodes are attended together when the tokens they read round up to the same multiple of so many, and as many at once
# as gather no more than the second number.
DECODE_BUCKET_TOKENS = 64
MAX_GATHERED_TOKENS = 32_768
# Scores that are in memory at once where they are computed here and not by torch's fused attention.
MAX_SCORES = 1 << 22


@dataclass(frozen=True)
class DecodeGroup:
    """D requests with one query token each, whose rows of pages are padded to N with the read reserve.

    rows: [D], their query tokens in the packed batch. pages: [D, N]. visible: bool [D, 1, 1, N * page_size].
    hidden: [H], the places of invisible tokens among the D * N * page_size gathered.
    """

    rows: torch.Tensor
    pages: torch.Tensor
    visible: torch.Tensor
    hidden: torch.Tensor


@dataclass(frozen=True)
class PrefillPiece:
    """One request with Q query tokens at start..end of the packed batch, and the H tokens before them that they see.

    Those lie in `pages`, from place `skipped` on. mask: bool [Q, H + Q], or None where it is simply causal and H is 0.
    """

    start: int
    end: int
    num_history: int
    skipped: int
    pages: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True)
class SdpaPlan:
    """A forward pass, sorted into what is attended together.

    reads_first: what pieces of prompts see of the pages is read before anything is stored.
    """

    write_pages: torch.Tensor
    write_offsets: torch.Tensor
    decodes: list[DecodeGroup]
    prefills: list[PrefillPiece]
    reads_first: bool


class SdpaAttention(PageHalves):
    """Attention of any dtype, by copies of what is read."""

    name = "sdpa"
    is_batch_invariant = False
    reads_tensors_alone = False

    def workspace_bytes(self, max_batch_tokens: int, max_model_len: int) -> int:
        """See AttentionBackend. K and V of what is read are in memory up to three times: gathered, joined or laid out
        anew for the product, and once more where query heads share them. Scores are float32, three at once."""
        decodes = 2 * MAX_GATHERED_TOKENS * self._token_bytes
        prefill = 3 * (max_model_len + max_batch_tokens) * self._token_bytes + max_batch_tokens * max_model_len
        return max(decodes, prefill) + 3 * 4 * MAX_SCORES

    def prepare(self, batch: AttentionBatch) -> SdpaPlan:
        """Sorts the requests of a batch into decodes of like length and single pieces of prompts."""
        buckets: dict[int, list[tuple[int, int]]] = {}  # pages after rounding up -> (request, query token)
        prefills = []
        start = 0
        for request, (query_length, kv_length) in enumerate(zip(batch.query_lengths, batch.kv_lengths, strict=True)):
            if query_length == 1:
                read = kv_length - batch.first_tokens[request]
                bucket_tokens = -(-read // DECODE_BUCKET_TOKENS) * DECODE_BUCKET_TOKENS
                buckets.setdefault(self._num_pages(bucket_tokens), []).append((request, start))
            else:
                prefills.append(self._prefill_piece(batch, request, start))
            start += query_length
        decodes = [
            self._decode_group(batch, num_pages, members[first : first + size])
            for num_pages, members in buckets.items()
            for size in [max(1, MAX_GATHERED_TOKENS // (num_pages * self.page_size))]
            for first in range(0, len(members), size)
        ]
        return SdpaPlan(batch.write_pages, batch.write_offsets, decodes, prefills, batch.window is not None)

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _prefill_piece(self, batch: AttentionBatch, request: int, start: int) -> PrefillPiece:
        query_length, device = batch.query_lengths[request], batch.page_tables.device
        position = batch.kv_lengths[request] - query_length
        earliest = 0 if batch.window is None else max(0, position - batch.window + 1)
        skipped, num_history = earliest - batch.first_tokens[request], position - earliest
        pages = batch.page_tables[request, : self._num_pages(skipped + num_history)]
        plain = num_history == 0 and (batch.window is None or query_length <= batch.window)
        mask = None if plain else visibility_mask(query_length, num_history, batch.window, device)
        return PrefillPiece(start, start + query_length, num_history, skipped, pages, mask)

    def _decode_group(self, batch: AttentionBatch, num_pages: int, members: list[tuple[int, int]]) -> DecodeGroup:
        device = batch.page_tables.device
        requests, rows = (torch.tensor(column, device=device) for column in zip(*members, strict=True))
        num_pages = min(num_pages, batch.page_tables.shape[1])
        firsts, lasts = (
            torch.tensor([column[request] for request, _ in members], device=device)[:, None]
            for column in (batch.first_tokens, batch.kv_lengths)
        )
        tokens = firsts + torch.arange(num_pages * self.page_size, device=device)
        visible = tokens < lasts
        if batch.window is not None:
            visible &= tokens >= lasts - batch.window
        hidden = torch.nonzero(~visible.flatten())[:, 0]
        return DecodeGroup(rows, batch.page_tables[requests, :num_pages], visible[:, None, None, :], hidden)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        plan: SdpaPlan,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """See AttentionBackend.attend."""
        read_before = [_history(pages, piece) for piece in plan.prefills] if plan.reads_first else None
        store(key, value, pages, plan.write_pages, plan.write_offsets)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for group in plan.decodes:
            output[group.rows] = _attend_decodes(query[group.rows], pages, group, options)
        for number, piece in enumerate(plan.prefills):
            history = _history(pages, piece) if read_before is None else read_before[number]
            own = slice(piece.start, piece.end)
            keys, values = (
                torch.cat([old, new[own]]) if len(old) else new[own]
                for old, new in zip(history, (key, value), strict=True)
            )
            output[own] = attend_sequence(query[own], keys, values, piece.mask, options)
        return output


def _gather(half: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """A copy of some pages of K or V [num_pages, page_size, ...] in order: [tokens, kv_heads, head_dim].

    Pages are selected as flat rows, which torch copies several times faster than through four dimensions.
    """
    return half.flatten(1).index_select(0, pages).view(-1, *half.shape[2:])


def _history(pages: tuple[torch.Tensor, torch.Tensor], piece: PrefillPiece) -> list[torch.Tensor]:
    """K and V [H, kv_heads, head_dim] of the tokens before a piece that it sees."""
    tokens = slice(piece.skipped, piece.skipped + piece.num_history)
    return [_gather(half, piece.pages)[tokens] for half in pages]


def _attend_decodes(
    query: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], group: DecodeGroup, options: AttentionOptions
) -> torch.Tensor:
    """query: [D, heads, head_dim], one token per request. Returns the same shape.

    The query heads that share a KV head take the place of query tokens, so that K and V are not repeated in memory.
    What is invisible may be NaN, and 0 x NaN is NaN: it is overwritten in the copy before use.
    """
    keys, values = (_gather(half, group.pages.flatten()) for half in pages)
    keys, values = (
        half.index_fill_(0, group.hidden, 0).unflatten(0, (len(group.rows), -1)).transpose(1, 2)
        for half in (keys, values)
    )  # each [D, kv_heads, L, head_dim]
    grouped = query.unflatten(1, (keys.shape[1], -1))  # [D, kv_heads, group, head_dim]
    sinks = None if options.sinks is None else options.sinks.view(*grouped.shape[1:3], 1)
    return _attend(grouped, keys, values, group.visible, options, sinks).flatten(1, 2)


def attend_sequence(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    options: AttentionOptions,
) -> torch.Tensor:
    """query [Q, heads, head_dim] are the last Q of the L tokens in keys and values [L, kv_heads, head_dim].

    mask: bool [Q, L], or None for Q = L and causal attention. Returns [Q, heads, head_dim].
    """
    grouped = query.unflatten(1, (keys.shape[1], -1)).permute(1, 2, 0, 3)  # [kv_heads, group, Q, head_dim]
    keys, values = (half.transpose(0, 1).unsqueeze(1).expand(-1, grouped.shape[1], -1, -1) for half in (keys, values))
    sinks = None if options.sinks is None else options.sinks.view(*grouped.shape[:2], 1, 1)
    return _attend(grouped, keys, values, mask, options, sinks).permute(2, 0, 1, 3).flatten(1, 2)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    options: AttentionOptions,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """query [..., Q, head_dim] over keys and values [..., L, head_dim]; mask and sinks broadcast to [..., Q, L] and
    [..., Q, 1]. Without a mask, causal with Q = L."""
    if options.softcap is None and sinks is None:
        causal = mask is None
        return scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=causal, scale=options.scaling
        )
    if mask is None:
        mask = visibility_mask(query.shape[-2], 0, None, query.device)
    rows = max(1, MAX_SCORES // (query[..., 0, 0].numel() * keys.shape[-2]))
    parts = [
        _attend_with_scores(
            query[..., first : first + rows, :],
            keys,
            values,
            mask[..., first : first + rows, :] if mask.shape[-2] > 1 else mask,
            options,
            sinks[..., first : first + rows, :] if sinks is not None and sinks.shape[-2] > 1 else sinks,
        )
        for first in range(0, query.shape[-2], rows)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)


def _attend_with_scores(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    options: AttentionOptions,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """As `_attend`, with the scores in float32 in between: what torch's fused attention has no option for."""
    scores = (query @ keys.transpose(-1, -2)).float() * options.scaling
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[-2]]
    return weights.to(values.dtype) @ values


def visibility_mask(query_length: int, num_history: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [Q, H + Q], true where a query token sees a KV token: itself, and those before it within the window."""
    mask = torch.ones(query_length, num_history + query_length, dtype=torch.bool, device=device).tril(num_history)
    return mask if window is None else mask.triu(num_history - window + 1)
