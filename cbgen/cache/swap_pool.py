"""The CPU swap pool: pages of requests that had to leave the cache, to be copied back instead of computed again."""

from itertools import chain

import torch

from cbgen.cache.storage import KVStorage


class SwapPool:
    """A fixed buffer of page slots in CPU memory, uint8 [num_slots, page_bytes]; a request's pages lie in any slots.

    cache   [ page | page | page | page | ... ]
                │ store: all leaving requests in one transfer
                ▼
    buffer  [ slot | slot | slot | ... ]     pinned where the cache is on another device
                │ restore: all returning requests in one transfer
                ▼
    cache   [ page | page | page | page | ... ]     other pages than before

    A call settles which slots are whose, and hands the copies over to the storage's `submit`, which may run them later;
    nothing here waits for them, see KVStorage. What lies side by side on both sides is one copy. The lowest free slots
    are given out first, and holes among them are of whole blocks, so with one type of attention no block is torn; with
    two, whose blocks differ in size, few are.
    """

    def __init__(self, num_bytes: int, storage: KVStorage):
        page_bytes, device = storage.pages.shape[1], storage.pages.device
        self.num_slots = num_bytes // page_bytes
        self._storage = storage
        self._buffer = torch.empty(self.num_slots, page_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._free = _joined([range(self.num_slots)])  # ascending, with something between each and the next
        self._slots: dict[int, list[range]] = {}  # request id -> slots of its pages, in order

    @property
    def num_free_slots(self) -> int:
        return sum(map(len, self._free))

    def store(self, pages_of: dict[int, list[int]]) -> set[int]:
        """Takes in as many of the requests' pages as fit, whole requests in the order given; returns who is in."""
        pairs: list[tuple[int, int]] = []
        stored: set[int] = set()
        for request_id, pages in pages_of.items():
            if len(pages) <= self.num_free_slots:
                own = self._slots[request_id] = self._take(len(pages))
                pairs += zip(pages, chain(*own), strict=True)
                stored.add(request_id)
        self._storage.submit_copies(self._storage.pages, self._buffer, pairs)
        return stored

    def restore(self, pages_of: dict[int, list[int]]) -> None:
        """Copies requests back to `pages_of`, and forgets them.

        A request's pages may be fewer than it had: its first ones are at hand already, shared with others.
        """
        pairs: list[tuple[int, int]] = []
        for request_id, pages in pages_of.items():
            own = list(chain(*self._slots[request_id]))
            pairs += zip(own[len(own) - len(pages) :], pages, strict=True)
        self._storage.submit_copies(self._buffer, self._storage.pages, pairs)
        for request_id in pages_of:
            self.discard(request_id)

    def discard(self, request_id: int) -> None:
        """Forgets a request; one that is not here is fine."""
        self._free = _joined(self._free + self._slots.pop(request_id, []))

    def _take(self, num_slots: int) -> list[range]:
        """The lowest free slots; there are so many."""
        taken: list[range] = []
        while num_slots:
            first = self._free[0]
            taken.append(first[:num_slots])
            self._free[:1] = [first[num_slots:]] if len(first) > num_slots else []
            num_slots -= len(taken[-1])
        return taken

    def check_integrity(self, expected_ids: set[int]) -> None:
        """Asserts that each slot is free or of one request, and that exactly the expected requests are here."""
        slots = sorted(chain(*self._free, *chain(*self._slots.values())))
        assert slots == list(range(self.num_slots)), "swap slots lost or doubled"
        assert self._slots.keys() == expected_ids, "the swap pool holds other requests than it should"


def _joined(slots: list[range]) -> list[range]:
    """The same slots in ascending order, those side by side as one; no slot is in two of them."""
    joined: list[range] = []
    for piece in sorted(slots, key=lambda piece: piece.start):
        if joined and joined[-1].stop == piece.start:
            joined[-1] = range(joined[-1].start, piece.stop)
        elif piece:
            joined.append(piece)
    return joined
