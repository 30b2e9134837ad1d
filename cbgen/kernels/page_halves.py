"""Pages that hold K, then V, as tensors of the model's own dtype: the layout of the backends that leave it to torch."""

from typing import Any

import torch

from cbgen.kernels.backend import align_bytes


class PageHalves:
    """The layout inside a page, for a backend to inherit.

    page    [ K of page_size tokens | V of page_size tokens | idle up to a multiple of 64 bytes ]
    half    [page_size, kv_heads, head_dim]
    """

    def __init__(self, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype):
        self.page_size = page_size
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self._page_shape = (page_size, num_kv_heads, head_dim)
        self.dtype = dtype
        self._half_bytes = page_size * num_kv_heads * head_dim * dtype.itemsize
        self.page_bytes = align_bytes(2 * self._half_bytes)

    @property
    def _token_bytes(self) -> int:
        """What K and V of one token take in a page."""
        return -(-self.page_bytes // self.page_size)

    def view_pages(self, raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """raw: uint8 [num_pages, page_bytes]. Returns K and V, each [num_pages, page_size, kv_heads, head_dim]."""
        halves = (raw[:, : self._half_bytes], raw[:, self._half_bytes : 2 * self._half_bytes])
        keys, values = (half.view(self.dtype).unflatten(1, self._page_shape) for half in halves)
        return keys, values

    def direct(self, pages: Any, plan: Any, options: Any) -> None:
        """See AttentionBackend: there is none."""


def store(
    key: torch.Tensor,
    value: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    write_pages: torch.Tensor,
    write_offsets: torch.Tensor,
) -> None:
    """Puts key and value [T, kv_heads, head_dim] where they belong; see AttentionBatch for the places [T]."""
    for half, new in zip(pages, (key, value), strict=True):
        half[write_pages, write_offsets] = new
