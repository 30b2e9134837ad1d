"""The face that every attention kernel shows: how a page is laid out, and how to store and attend."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class AttentionBatch:
    """What one forward pass asks of attention: T query tokens of R requests, packed request after request.

        request           0            1          2
        query tokens      [0 1 2 3 4]  [0]        [0 1]        T = 8, query_lengths = [5, 1, 2]
        KV tokens         [ 5 ]        [ 37 ]     [ 66 ]       kv_lengths, the query tokens of this pass included

    block_tables: [R, max blocks of any request], the pages of request r in order, padded with the read reserve.
    write_blocks, write_offsets: [T], page and place within it where the KV of each query token goes.
    """

    query_lengths: list[int]
    kv_lengths: list[int]
    block_tables: torch.Tensor
    write_blocks: torch.Tensor
    write_offsets: torch.Tensor


class AttentionBackend(Protocol):
    """Owner of the layout inside a page. Everything else moves whole pages as bytes."""

    name: str
    page_bytes: int

    def view_pages(self, raw: torch.Tensor) -> Any:
        """The pages of one layer as this backend reads them, from their bytes [num_blocks, page_bytes]."""

    def prepare(self, batch: AttentionBatch) -> Any:
        """What is the same for every layer of one forward pass, worked out once."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pages: Any, plan: Any, scaling: float
    ) -> torch.Tensor:
        """Stores key and value [T, kv_heads, head_dim] in the pages, then attends causally over them.

        query: [T, heads, head_dim]. plan: of `prepare`. Returns [T, heads, head_dim].
        """


def align_bytes(num_bytes: int, alignment: int = 64) -> int:
    """The next multiple of `alignment`."""
    return -(-num_bytes // alignment) * alignment
