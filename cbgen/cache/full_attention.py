"""Blocks of full-attention layers: kept for every token of a request, shared by those with a common prefix."""

from collections import Counter
from collections.abc import Iterable

from cbgen.cache.allocator import CacheAllocator
from cbgen.cache.layout import LayerGroup
from cbgen.cache.pool import CachePool
from cbgen.cache.prefix_cache import PrefixCache


class FullAttentionCacheAllocator(CacheAllocator):
    """A request owns a block for every page_size of its tokens; with sharing, several requests may own the same one."""

    def __init__(self, pool: CachePool, group: LayerGroup, allow_block_sharing: bool):
        """allow_block_sharing: only where the group is the whole model, so that a chunk is one block (law 5)."""
        super().__init__(pool, group)
        assert not allow_block_sharing or group.blocks_per_chunk == 1
        self.prefix_cache = PrefixCache(group.page_size) if allow_block_sharing else None

    @property
    def num_initialized(self) -> int:
        """Blocks that nobody owns and whose content is kept; each is a chunk that the pool can have back."""
        return 0 if self.prefix_cache is None else self.prefix_cache.num_initialized

    def adopt(self, request_id: int, blocks: list[int]) -> None:
        """Makes a request without blocks an owner of existing ones."""
        assert self.prefix_cache is not None
        assert request_id not in self._tables
        for block in blocks:
            self.prefix_cache.own(block)
        self._own(request_id, blocks)

    def grow(self, request_id: int, num_blocks: int) -> list[int]:
        """See CacheAllocator.grow; initialized blocks are demoted one by one when no other is left (law 6)."""
        blocks = super().grow(request_id, num_blocks)
        if self.prefix_cache is not None:
            for block in blocks:
                self.prefix_cache.own(block)
        return blocks

    def _take_block(self) -> int:
        if self.prefix_cache is not None and not self.num_uninitialized and not self._pool.num_free_chunks:
            self._free_block(self.prefix_cache.demote())
        return super()._take_block()

    def _give_up(self, block: int) -> None:
        if self.prefix_cache is None or self.prefix_cache.disown(block):
            self._free_block(block)

    def release(self, request_id: int) -> None:
        """See CacheAllocator.release; registered blocks stay initialized."""
        super().release(request_id)
        if self.prefix_cache is not None:
            self.prefix_cache.forget(request_id)

    def _blocks_freed_by(self, request_ids: Iterable[int]) -> list[int]:
        if self.prefix_cache is None:
            return super()._blocks_freed_by(request_ids)
        leaving = Counter(super()._blocks_freed_by(request_ids))
        return [block for block, owners in leaving.items() if owners == self.prefix_cache.num_owners(block)]

    def check_integrity(self) -> list[int]:
        """See CacheAllocator.check_integrity."""
        if self.prefix_cache is not None:
            self.prefix_cache.check_integrity(self._tables)
        return super().check_integrity()

    def _held_blocks(self) -> list[int]:
        if self.prefix_cache is None:
            return super()._held_blocks()
        return sorted(set(super()._held_blocks())) + self.prefix_cache.initialized_blocks
