"""Blocks of full-attention layers: one page per layer, kept for every token of a request."""

from cbgen.cache.pool import CachePool


class FullAttentionCacheAllocator:
    """Splits chunks into blocks and keeps each request's block list.

        chunk c   [ block c·n | block c·n + 1 | ... | block c·n + n - 1 ]      n = blocks_per_chunk
        block     [ page of layer 0 | page of layer 1 | ... ]                  page = page_size tokens of one layer

    A chunk whose blocks are all uninitialized goes back to the pool.
    """

    def __init__(self, pool: CachePool, page_size: int, blocks_per_chunk: int = 1):
        self.page_size = page_size
        self.num_full_blocks = pool.num_data_chunks * blocks_per_chunk
        self._pool = pool
        self._blocks_per_chunk = blocks_per_chunk
        self._uninitialized: dict[int, list[int]] = {}  # chunk -> its free blocks; only of chunks taken from the pool
        self._num_uninitialized = 0
        self._owned: dict[int, list[int]] = {}  # request id -> its blocks, in token order

    @property
    def num_free_blocks(self) -> int:
        """Blocks that an allocation could take, in the pool or already split."""
        return self._pool.num_free_chunks * self._blocks_per_chunk + self._num_uninitialized

    def num_missing_blocks(self, request_id: int, num_tokens: int) -> int:
        """Blocks a request needs beside its own to hold `num_tokens` tokens."""
        return max(0, self.num_blocks_for(num_tokens) - len(self._owned.get(request_id, ())))

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def num_owned_blocks(self, request_id: int) -> int:
        return len(self._owned.get(request_id, ()))

    def block_table(self, request_id: int) -> list[int]:
        """The request's blocks in token order. Not to be changed by the caller."""
        return self._owned[request_id]

    def grow(self, request_id: int, num_blocks: int) -> None:
        """Gives a request `num_blocks` more; the caller has checked that there are as many free."""
        blocks = self._owned.setdefault(request_id, [])
        for _ in range(num_blocks):
            blocks.append(self._take_block())

    def release(self, request_id: int) -> int:
        """Takes all blocks from a request and returns how many there were; a request without any is fine."""
        blocks = self._owned.pop(request_id, [])
        for block in blocks:
            self._free_block(block)
        return len(blocks)

    def _take_block(self) -> int:
        if not self._num_uninitialized:
            chunk = self._pool.take()
            first = chunk * self._blocks_per_chunk
            self._uninitialized[chunk] = list(range(first + self._blocks_per_chunk - 1, first - 1, -1))
            self._num_uninitialized += self._blocks_per_chunk
        chunk = next(reversed(self._uninitialized))
        block = self._uninitialized[chunk].pop()
        if not self._uninitialized[chunk]:
            del self._uninitialized[chunk]
        self._num_uninitialized -= 1
        return block

    def _free_block(self, block: int) -> None:
        chunk = block // self._blocks_per_chunk
        free = self._uninitialized.setdefault(chunk, [])
        free.append(block)
        self._num_uninitialized += 1
        if len(free) == self._blocks_per_chunk:
            del self._uninitialized[chunk]
            self._num_uninitialized -= self._blocks_per_chunk
            self._pool.give_back(chunk)

    def check_integrity(self) -> list[int]:
        """Asserts law 1 for blocks and returns the chunks that this allocator holds."""
        owned = [block for blocks in self._owned.values() for block in blocks]
        free = [block for blocks in self._uninitialized.values() for block in blocks]
        assert len(free) == self._num_uninitialized, "count of uninitialized blocks is wrong"
        chunks = sorted({block // self._blocks_per_chunk for block in owned + free})
        expected = [c * self._blocks_per_chunk + i for c in chunks for i in range(self._blocks_per_chunk)]
        assert sorted(owned + free) == expected, "a block is owned twice, owned and free, or lost"
        return chunks
