"""The bytes behind the blocks."""

from collections.abc import Callable

import torch

from cbgen.cache.layout import CacheLayout
from cbgen.cache.pool import READ_RESERVE_CHUNK
from cbgen.device import empty_in_large_pages
from cbgen.kernels.backend import AttentionBackend


def run_at_once(work: Callable[[], None]) -> None:
    """The `submit` of a device on which work is done when the call returns."""
    work()


class KVStorage:
    """Pages by number: uint8 [num_chunks * pages_per_chunk, page_bytes]; a page is laid out by the attention backend.

        page 0             C             2C
             [ read reserve | write reserve | data ...                      ]     C = pages_per_chunk
    layer of place k in its group: the same pages, seen from the k-th on, so that a block's number finds its page

    Memory is not initialized, but for the read reserve, which padding reads: uninitialized bytes may be NaN.

    submit: is handed whatever copies or clears pages here, and runs it, at once or later, but all of it in the order in
    which it was handed over, and each forward pass in its place among it. So nobody waits for a copy: what is free by
    the books may be given away at once, since the bytes of its next owner move after those of the one before.

        the books     page 7 of A to slot 3    page 7 is B's       slot 3 to page 9 of A    page 5 of D to slot 3
        submitted     [ 7 ──► slot 3 ]         [ pass writes 7 ]   [ slot 3 ──► 9 ]         [ 5 ──► slot 3 ]
    """

    def __init__(
        self,
        num_chunks: int,
        layout: CacheLayout,
        backend: AttentionBackend,
        device: torch.device,
        submit: Callable[[Callable[[], None]], None] = run_at_once,
    ):
        num_pages = num_chunks * layout.pages_per_chunk
        shape = (num_pages, backend.page_bytes)
        if device.type == "cpu":
            self.pages = empty_in_large_pages(shape, torch.uint8)
        else:
            self.pages = torch.empty(shape, dtype=torch.uint8, device=device)
        self._submit = submit
        first = READ_RESERVE_CHUNK * layout.pages_per_chunk
        read_reserve = self.pages[first : first + layout.pages_per_chunk]
        submit(lambda: _clear(read_reserve))
        places = {layer: place for group in layout.groups for place, layer in enumerate(group.layers)}
        self.layers = [backend.view_pages(self.pages[places[layer] :]) for layer in sorted(places)]

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copies pages (from, to); no page is both."""
        self.submit_copies(self.pages, self.pages, pairs)

    def submit_copies(self, source: torch.Tensor, target: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
        """Hands over copies of rows (from, to) between tensors of pages, of which this storage's is one.

        Nothing is read or written before it is run. Within one tensor, no row is both.
        """
        runs = runs_of(pairs)
        if runs:
            self._submit(lambda: _copy_runs(source, target, runs))


def runs_of(pairs: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """The pairs (from, to) as (from, to, count): one where both numbers go up by one from pair to pair."""
    runs: list[tuple[int, int, int]] = []
    first_source = first_target = count = 0
    for source, target in pairs:
        if count and source == first_source + count and target == first_target + count:
            count += 1
            continue
        if count:
            runs.append((first_source, first_target, count))
        first_source, first_target, count = source, target, 1
    return [*runs, (first_source, first_target, count)] if count else runs


def _copy_runs(source: torch.Tensor, target: torch.Tensor, runs: list[tuple[int, int, int]]) -> None:
    # Only CUDA orders copies from and to the CPU's memory like all else that it is given.
    non_blocking = "cuda" in (source.device.type, target.device.type)
    for first, place, count in runs:
        target[place : place + count].copy_(source[first : first + count], non_blocking=non_blocking)


def _clear(pages: torch.Tensor) -> None:
    pages.zero_()
