"""The paged cache as the engine sees it: admission over every allocator, sharing, forks, and what is free."""

from collections.abc import Iterable

from cbgen.cache.allocator import CacheAllocator
from cbgen.cache.full_attention import FullAttentionCacheAllocator
from cbgen.cache.layout import CacheLayout
from cbgen.cache.pool import CachePool
from cbgen.cache.prefix_cache import PrefixMatch
from cbgen.cache.sliding_attention import SlidingAttentionCacheAllocator
from cbgen.config import FULL_ATTENTION

Demand = tuple[int, ...]  # missing blocks, one number per allocator
NO_MATCH = PrefixMatch([])


class PagedCache:
    """Integers only: who owns which block. All-or-nothing: a request gets all it asks for, or nothing changes.

    PagedCache ─┬─ FullAttentionCacheAllocator ──── PrefixCache (models of full attention only)
                ├─ SlidingAttentionCacheAllocator
                └─ CachePool, which both take chunks from
    """

    def __init__(self, layout: CacheLayout, num_chunks: int, allow_block_sharing: bool = True):
        """num_chunks: the reserved ones included."""
        self.layout = layout
        self.page_size = layout.page_size
        self._pool = CachePool(num_chunks)
        sharing = allow_block_sharing and layout.supports_sharing
        self.allocators: list[CacheAllocator] = [
            FullAttentionCacheAllocator(self._pool, group, sharing)
            if group.attention_type == FULL_ATTENTION
            else SlidingAttentionCacheAllocator(self._pool, group)
            for group in layout.groups
        ]
        first = self.allocators[0]
        self._full = first if isinstance(first, FullAttentionCacheAllocator) else None
        self._prefix_cache = self._full.prefix_cache if self._full is not None else None

    @property
    def shares_blocks(self) -> bool:
        return self._prefix_cache is not None

    @property
    def num_blocks(self) -> int:
        """Capacity in whole-model blocks of `page_size` tokens."""
        return self.layout.blocks_in_chunks(self._pool.num_data_chunks)

    @property
    def free_share(self) -> float:
        """Free blocks, with and without content, over all data blocks, in [0, 1]."""
        broken = sum(a.num_uninitialized / a.group.blocks_per_chunk for a in self.allocators)
        return (self._num_free_chunks + broken) / self._pool.num_data_chunks

    @property
    def used_share(self) -> float:
        return 1.0 - self.free_share

    @property
    def initialized_share(self) -> float:
        """Free blocks whose content is kept for reuse, over all data blocks; a part of the free share."""
        num_initialized = 0 if self._full is None else self._full.num_initialized  # a chunk each
        return num_initialized / self._pool.num_data_chunks

    def max_request_tokens(self, most: int) -> int:
        """Tokens of the longest request that this cache could serve alone, `most` at most."""
        return self.layout.max_request_tokens(self._pool.num_data_chunks, most)

    def fits_empty(self, num_tokens: int) -> bool:
        """Whether one request of `num_tokens` tokens could be served by this cache alone."""
        return self.layout.chunks_for_tokens(num_tokens) <= self._pool.num_data_chunks

    def match(self, request_id: int, token_ids: list[int]) -> PrefixMatch:
        """What a waiting request could take over of its tokens' KV; nothing changes by it."""
        return NO_MATCH if self._prefix_cache is None else self._prefix_cache.match(request_id, token_ids)

    def admit(self, request_id: int, token_ids: list[int], num_tokens: int, match: PrefixMatch = NO_MATCH) -> bool:
        """Gives a request that holds nothing room for its first `num_tokens` tokens, matched blocks included.

        False, and nothing changed, when there is none. token_ids: all it has; what of them is still to be written is
        promised to others (see PrefixCache).
        """
        if not self.has_room_for(request_id, num_tokens, match):
            return False
        if self._prefix_cache is not None and self._full is not None:
            self._full.adopt(request_id, match.blocks)
        for allocator, count in zip(self.allocators, self.missing_blocks(request_id, num_tokens), strict=True):
            allocator.grow(request_id, count)
        if self._prefix_cache is not None:
            self._prefix_cache.promise(request_id, token_ids)
        return True

    def has_room_for(self, request_id: int, num_tokens: int, match: PrefixMatch = NO_MATCH) -> bool:
        """Whether a request that holds nothing could be admitted with its first `num_tokens` tokens."""
        first, *others = self.missing_blocks(request_id, num_tokens)
        taken = 0 if self._prefix_cache is None else self._prefix_cache.num_initialized_among(match.blocks)
        # Matched blocks need not be found, and are not free (law 2).
        return self._covers((first - len(match.blocks), *others), self._num_free_chunks - taken)

    def allocate(self, request_id: int, num_tokens: int) -> bool:
        """Makes room for an active request's first `num_tokens` tokens. False, and nothing changed, without any."""
        return self._grow_if_covered(request_id, self.missing_blocks(request_id, num_tokens))

    def register(self, request_id: int, token_ids: list[int], num_tokens: int) -> None:
        """The next pass writes the request's tokens up to `num_tokens`: full blocks may be shared (law 4)."""
        if self._prefix_cache is not None and self._full is not None:
            self._prefix_cache.register(request_id, token_ids, self._full.block_table(request_id), num_tokens)

    def distrust(self, request_id: int) -> None:
        """What the request's blocks hold may be wrong: nobody else is to take them over."""
        if self._prefix_cache is not None and self._full is not None:
            for block in self._full.block_table(request_id):
                self._prefix_cache.unname(block)

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> list[tuple[int, int]] | None:
        """Gives a child the parent's first `num_tokens` tokens: full blocks by reference, or all as copies.

        Returns the pages to copy (from, to), or None, and nothing changed, when there is no room.
        """
        num_shared = num_tokens // self.page_size if self.shares_blocks else 0
        missing = self.missing_blocks(child_id, num_tokens)
        missing = (missing[0] - num_shared, *missing[1:])
        if not self._covers(missing, self._num_free_chunks):
            return None
        if self._prefix_cache is not None and self._full is not None:
            self._full.adopt(child_id, self._full.block_table(parent_id)[:num_shared])
            self._prefix_cache.adopt_chain(parent_id, child_id, num_shared)
        pairs: list[tuple[int, int]] = []
        for allocator, count in zip(self.allocators, missing, strict=True):
            copies = allocator.grow(child_id, count)
            originals = allocator.block_table(parent_id)[num_shared : num_shared + count]
            for original, copy in zip(originals, copies, strict=True):
                pairs += [(original + page, copy + page) for page in range(allocator.group.pages_per_block)]
        return pairs

    def release(self, request_id: int) -> None:
        """Takes everything from a request, waiting ones included; one that holds nothing is fine."""
        for allocator in self.allocators:
            allocator.release(request_id)

    def missing_blocks(self, request_id: int, num_tokens: int) -> Demand:
        """Blocks the request lacks to hold `num_tokens` tokens, per allocator."""
        return tuple(allocator.num_missing_blocks(request_id, num_tokens) for allocator in self.allocators)

    def num_pages(self, demand: Demand) -> int:
        """Pages in so many blocks of each allocator."""
        return sum(a.group.pages_per_block * count for a, count in zip(self.allocators, demand, strict=True))

    def covers(self, demand: Demand, after_releasing: Iterable[int] = ()) -> bool:
        """Whether `demand` could be allocated, now or once the given requests had left."""
        leaving = list(after_releasing)
        if not leaving:
            return self._covers(demand, self._num_free_chunks)
        free_chunks, needed = self._num_free_chunks, 0
        for allocator, missing in zip(self.allocators, demand, strict=True):
            spare, whole = allocator.freed_by_release(leaving)
            free_chunks += whole
            needed += allocator.num_chunks_for(missing, spare)
        return needed <= free_chunks

    def pages_of(self, request_id: int, num_tokens: int, num_skipped: int = 0) -> list[int]:
        """The pages that hold a request's first `num_tokens` tokens, without those of its first `num_skipped`.

        The order depends on the counts alone. num_skipped: whole blocks, and 0 unless the model is of full attention.
        """
        return [
            block + page
            for allocator in self.allocators
            for block in allocator.block_table(request_id)[
                num_skipped // self.page_size : allocator.group.num_blocks_for(num_tokens)
            ]
            for page in range(allocator.group.pages_per_block)
        ]

    def num_owned_blocks(self, request_id: int) -> int:
        """Blocks of all allocators together."""
        return sum(allocator.num_owned_blocks(request_id) for allocator in self.allocators)

    @property
    def holders(self) -> set[int]:
        """The requests that own blocks."""
        return {request_id for allocator in self.allocators for request_id in allocator.request_ids}

    @property
    def _num_free_chunks(self) -> int:
        """Chunks in the pool, and those it can have back: initialized blocks are a chunk each."""
        return self._pool.num_free_chunks + (0 if self._full is None else self._full.num_initialized)

    def _covers(self, demand: Demand, free_chunks: int) -> bool:
        needed = sum(a.num_chunks_for(missing) for a, missing in zip(self.allocators, demand, strict=True))
        return needed <= free_chunks

    def _grow_if_covered(self, request_id: int, missing: Demand) -> bool:
        if not any(missing):  # most decodes, at most steps
            return True
        if not self._covers(missing, self._num_free_chunks):
            return False
        for allocator, count in zip(self.allocators, missing, strict=True):
            allocator.grow(request_id, count)
        return True

    def check_integrity(self, waiting_ids: set[int] | None = None) -> None:
        """Asserts the laws of the cache; tests call it after every step.

        waiting_ids: requests that may be known without owning blocks; not checked unless given.
        """
        self._pool.check_integrity([chunk for allocator in self.allocators for chunk in allocator.check_integrity()])
        if self._prefix_cache is not None and waiting_ids is not None:
            assert self._prefix_cache.known_ids <= self.holders | waiting_ids, "a request that left is remembered"
