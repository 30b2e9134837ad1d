"""The CPU swap pool: pages of requests that had to leave the cache, to be copied back instead of computed again."""

import torch

from cbgen.cache.storage import KVStorage, as_words


class SwapPool:
    """A fixed buffer of page slots in CPU memory, uint8 [num_slots, page_bytes]; a request's pages lie in any slots.

    cache   [ page | page | page | page | ... ]
                │ store: all leaving requests in one transfer
                ▼
    buffer  [ slot | slot | slot | ... ]     pinned where the cache is on another device
                │ restore: all returning requests in one transfer
                ▼
    cache   [ page | page | page | page | ... ]     other pages than before
    """

    def __init__(self, num_bytes: int, storage: KVStorage):
        page_bytes, device = storage.pages.shape[1], storage.pages.device
        self.num_slots = num_bytes // page_bytes
        self._storage = storage
        self._buffer = torch.empty(self.num_slots, page_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._slots: dict[int, list[int]] = {}  # request id -> slots of its pages, in order

    @property
    def num_free_slots(self) -> int:
        return len(self._free)

    def store(self, pages_of: dict[int, list[int]]) -> set[int]:
        """Takes in as many of the requests' pages as fit, whole requests in the order given; returns who is in."""
        pages: list[int] = []
        slots: list[int] = []
        stored: set[int] = set()
        for request_id, request_pages in pages_of.items():
            if len(request_pages) <= len(self._free):
                own = [self._free.pop() for _ in request_pages]
                self._slots[request_id] = own
                pages += request_pages
                slots += own
                stored.add(request_id)
        pages_as_words, buffer = as_words(self._storage.pages), as_words(self._buffer)
        for page_index, slot_index in self._storage.staged(pages, slots):
            buffer[slot_index] = pages_as_words[page_index].to(buffer.device)
        return stored

    def restore(self, pages_of: dict[int, list[int]]) -> None:
        """Copies requests back to `pages_of`, and forgets them.

        A request's pages may be fewer than it had: its first ones are at hand already, shared with others.
        """
        pages: list[int] = []
        slots: list[int] = []
        for request_id, request_pages in pages_of.items():
            own = self._slots[request_id]
            pages += request_pages
            slots += own[len(own) - len(request_pages) :]
        pages_as_words, buffer = as_words(self._storage.pages), as_words(self._buffer)
        for page_index, slot_index in self._storage.staged(pages, slots):
            pages_as_words[page_index] = buffer[slot_index].to(pages_as_words.device)
        for request_id in pages_of:
            self.discard(request_id)

    def discard(self, request_id: int) -> None:
        """Forgets a request; one that is not here is fine."""
        self._free += self._slots.pop(request_id, [])

    def check_integrity(self, expected_ids: set[int]) -> None:
        """Asserts that each slot is free or of one request, and that exactly the expected requests are here."""
        slots = sorted(self._free + [slot for own in self._slots.values() for slot in own])
        assert slots == list(range(self.num_slots)), "swap slots lost or doubled"
        assert self._slots.keys() == expected_ids, "the swap pool holds other requests than it should"
