"""The bytes behind the blocks."""

import torch

from cbgen.cache.layout import CacheLayout
from cbgen.cache.pool import READ_RESERVE_CHUNK
from cbgen.kernels.backend import AttentionBackend


class KVStorage:
    """Pages by number: uint8 [num_chunks * pages_per_chunk, page_bytes]; a page is laid out by the attention backend.

        page 0             C             2C
             [ read reserve | write reserve | data ...                      ]     C = pages_per_chunk
    layer of place k in its group: the same pages, seen from the k-th on, so that a block's number finds its page

    Memory is not initialized, but for the read reserve, which padding reads: uninitialized bytes may be NaN.
    """

    def __init__(self, num_chunks: int, layout: CacheLayout, backend: AttentionBackend, device: torch.device):
        num_pages = num_chunks * layout.pages_per_chunk
        self.pages = torch.empty(num_pages, backend.page_bytes, dtype=torch.uint8, device=device)
        first = READ_RESERVE_CHUNK * layout.pages_per_chunk
        self.pages[first : first + layout.pages_per_chunk].zero_()
        places = {layer: place for group in layout.groups for place, layer in enumerate(group.layers)}
        self.layers = [backend.view_pages(self.pages[places[layer] :]) for layer in sorted(places)]

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copies pages (from, to), all at once; no page is both."""
        if pairs:
            sources, targets = torch.tensor(pairs, device=self.pages.device).T
            self.pages[targets] = self.pages[sources]
