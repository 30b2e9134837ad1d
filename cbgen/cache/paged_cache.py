"""The paged cache as the engine sees it: admission over every allocator, and the storage that kernels read."""

import torch

from cbgen.cache.full_attention import FullAttentionCacheAllocator
from cbgen.cache.pool import READ_RESERVE_CHUNK, CachePool
from cbgen.kernels.backend import AttentionBackend


class PagedCache:
    """Integers only: who owns which block. All-or-nothing: a request gets all it asks for, or nothing changes."""

    def __init__(self, num_chunks: int, page_size: int):
        self._pool = CachePool(num_chunks)
        self._full = FullAttentionCacheAllocator(self._pool, page_size)
        self.page_size = page_size

    @property
    def num_blocks(self) -> int:
        """Capacity in whole-model blocks of `page_size` tokens."""
        return self._full.num_full_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._full.num_free_blocks

    @property
    def free_share(self) -> float:
        """Free blocks over all data blocks, in [0, 1]."""
        return self._full.num_free_blocks / self._full.num_full_blocks

    @property
    def used_share(self) -> float:
        return 1.0 - self.free_share

    def fits_empty(self, num_tokens: int) -> bool:
        """Whether one request of `num_tokens` tokens could be served by this cache alone."""
        return self._full.num_blocks_for(num_tokens) <= self._full.num_full_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        return self._full.num_blocks_for(num_tokens)

    def num_missing_blocks(self, request_id: int, num_tokens: int) -> int:
        """Blocks the request lacks to hold `num_tokens` tokens."""
        return self._full.num_missing_blocks(request_id, num_tokens)

    def num_owned_blocks(self, request_id: int) -> int:
        return self._full.num_owned_blocks(request_id)

    def allocate(self, request_id: int, num_tokens: int) -> bool:
        """Makes room for a request's first `num_tokens` tokens. False, and nothing changed, when there is none."""
        missing = self._full.num_missing_blocks(request_id, num_tokens)
        if missing > self._full.num_free_blocks:
            return False
        self._full.grow(request_id, missing)
        return True

    def release(self, request_id: int) -> int:
        """Takes everything from a request; returns the number of blocks that became free."""
        return self._full.release(request_id)

    def block_table(self, request_id: int) -> list[int]:
        return self._full.block_table(request_id)

    def check_integrity(self) -> None:
        """Asserts the laws of the cache; tests call it after every step."""
        self._pool.check_integrity(self._full.check_integrity())


class KVStorage:
    """The bytes behind the blocks: uint8 [num_chunks, num_layers, page_bytes], one block per chunk.

        chunk b   [ page of layer 0 | page of layer 1 | ... | page of layer n - 1 ]
        page      laid out by the attention backend

    Memory is not initialized, but for the read reserve, which padding reads: uninitialized bytes may be NaN.
    """

    def __init__(self, num_chunks: int, num_layers: int, backend: AttentionBackend, device: torch.device):
        self._bytes = torch.empty(num_chunks, num_layers, backend.page_bytes, dtype=torch.uint8, device=device)
        self._bytes[READ_RESERVE_CHUNK].zero_()
        self.layers = [backend.view_pages(self._bytes[:, layer]) for layer in range(num_layers)]
