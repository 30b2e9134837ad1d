"""The bytes behind the blocks."""

from collections.abc import Iterator

import torch

from cbgen.cache.layout import CacheLayout
from cbgen.cache.pool import READ_RESERVE_CHUNK
from cbgen.device import empty_in_large_pages
from cbgen.kernels.backend import AttentionBackend

# Pages on their way to another place are gathered first, so many bytes at a time: few enough to stay in a CPU's cache.
MAX_STAGED_BYTES = 4 << 20


class KVStorage:
    """Pages by number: uint8 [num_chunks * pages_per_chunk, page_bytes]; a page is laid out by the attention backend.

        page 0             C             2C
             [ read reserve | write reserve | data ...                      ]     C = pages_per_chunk
    layer of place k in its group: the same pages, seen from the k-th on, so that a block's number finds its page

    Memory is not initialized, but for the read reserve, which padding reads: uninitialized bytes may be NaN.
    """

    def __init__(self, num_chunks: int, layout: CacheLayout, backend: AttentionBackend, device: torch.device):
        num_pages = num_chunks * layout.pages_per_chunk
        shape = (num_pages, backend.page_bytes)
        if device.type == "cpu":
            self.pages = empty_in_large_pages(shape, torch.uint8)
        else:
            self.pages = torch.empty(shape, dtype=torch.uint8, device=device)
        first = READ_RESERVE_CHUNK * layout.pages_per_chunk
        self.pages[first : first + layout.pages_per_chunk].zero_()
        places = {layer: place for group in layout.groups for place, layer in enumerate(group.layers)}
        self.layers = [backend.view_pages(self.pages[places[layer] :]) for layer in sorted(places)]

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copies pages (from, to); no page is both."""
        sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
        for own, other in self.staged(sources, targets):
            words = as_words(self.pages)
            words[other.to(words.device)] = words[own]

    def staged(self, pages: list[int], places: list[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pieces of both lists, each small enough to gather: an index of these pages, and one on the CPU of places."""
        step = max(1, MAX_STAGED_BYTES // self.pages.shape[1])
        for first in range(0, len(pages), step):
            own = torch.tensor(pages[first : first + step], device=self.pages.device)
            yield own, torch.tensor(places[first : first + step])


def as_words(pages: torch.Tensor) -> torch.Tensor:
    """The same memory in 64-bit words, of which pages are made up: torch copies selected rows element by element."""
    return pages.view(torch.int64)
