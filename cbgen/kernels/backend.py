"""The face that every attention kernel shows: how a page is laid out, and how to store and attend."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class AttentionBatch:
    """What one forward pass asks of the layers of one type: T query tokens of R requests, packed one after another.

        request           0            1          2
        query tokens      [0 1 2 3 4]  [0]        [0 1]        T = 8, query_lengths = [5, 1, 2]
        KV tokens         [ 5 ]        [ 37 ]     [ 66 ]       kv_lengths, the query tokens of this pass included

    page_tables: [R, N], a request's pages in token order, padded with the read reserve. Row r begins with the page that
        holds its token first_tokens[r], a multiple of page_size (0 for full attention). It ends with the page of its
        last token; for a sliding layer and several query tokens, with the page of the last token before those.
    write_pages, write_offsets: [T], page and place within it where the KV of each query token goes. Tokens of a sliding
        layer whose place a later one of the same pass takes go to the write reserve.
    window: how many tokens one sees, itself included; None: all.
    on_device: the same in tensors alone, for backends that read nothing else; None where the backend reads the lists.
    """

    query_lengths: list[int]
    kv_lengths: list[int]
    first_tokens: list[int]
    page_tables: torch.Tensor
    write_pages: torch.Tensor
    write_offsets: torch.Tensor
    window: int | None
    on_device: "DeviceBatch | None" = None


@dataclass(frozen=True)
class DeviceBatch:
    """An AttentionBatch that a recorded graph can read again and again: sizes are fixed, numbers lie in tensors.

    Sizes are padded, and the tensors of AttentionBatch with them: T, R and N count padding here. Padding tokens belong
    to padding requests, which read the read reserve and write to the write reserve.

    query_starts: int64 [R + 1], where each request's query tokens begin. kv_lengths: int64 [R], tokens from the first
    page of a row on: AttentionBatch.kv_lengths less first_tokens. max_query_length, max_kv_length: what no request
    exceeds; the latter is N * page_size.
    gather: for a sliding layer with several query tokens of one request, int64 [G]: what those requests attend to, one
    request after another, each from the page on that holds the first token that it sees, so that the place of a token
    does not depend on how the prompt is cut; its own tokens come last. An entry is the place in the
    pages as they were before this pass, page * page_size + offset, or -1 - t for query token t. gather_starts: int64
    [R + 1], where each request's entries begin; a request with a single query token has none. max_gathered: what no
    request exceeds.
    """

    query_starts: torch.Tensor
    kv_lengths: torch.Tensor
    max_query_length: int
    max_kv_length: int
    gather: torch.Tensor | None = None
    gather_starts: torch.Tensor | None = None
    max_gathered: int = 0


@dataclass(frozen=True)
class AttentionOptions:
    """What a layer asks of its attention beside the batch.

    softcap: scores s become softcap * tanh(s / softcap). sinks: [heads], logits that take part in the softmax and
    contribute nothing.
    """

    scaling: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class AttentionBackend(Protocol):
    """Owner of the layout inside a page. Everything else moves whole pages as bytes."""

    name: str
    page_bytes: int
    is_batch_invariant: bool  # whether what a token gets has the same bits whatever else is in the pass
    reads_tensors_alone: bool  # whether it attends by AttentionBatch.on_device, so that a pass can be recorded

    def workspace_bytes(self, max_batch_tokens: int, max_model_len: int) -> int:
        """The most that one call of `attend` takes beside its inputs and output; an estimate on the safe side."""

    def view_pages(self, raw: torch.Tensor) -> Any:
        """The pages of one layer as this backend reads them, from their bytes [num_pages, page_bytes]."""

    def prepare(self, batch: AttentionBatch) -> Any:
        """What is the same for every layer of one type in one forward pass, worked out once."""

    def direct(self, pages: Any, plan: Any, options: AttentionOptions) -> Any:
        """For layers in the same language as this backend: all that `attend` knows beside query, key and value.

        None where only `attend` can do it, as always for a backend that has no such layers.
        """

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pages: Any,
        plan: Any,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Stores key and value [T, kv_heads, head_dim] in the pages and attends causally over them and the pages.

        A full layer stores all of them before any token attends: requests of one pass may share what it writes. A
        sliding layer reads what several query tokens of a request see of its ring before it stores them.
        query: [T, heads, head_dim]. plan: of `prepare`. Returns [T, heads, head_dim].
        """


def align_bytes(num_bytes: int, alignment: int = 64) -> int:
    """The next multiple of `alignment`."""
    return -(-num_bytes // alignment) * alignment
