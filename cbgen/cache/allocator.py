"""What the allocators of both types of attention share: blocks cut out of chunks, and who owns them."""

from collections import Counter
from collections.abc import Iterable

from cbgen.cache.block_rows import BlockRows
from cbgen.cache.layout import LayerGroup
from cbgen.cache.pool import CachePool


class CacheAllocator:
    """Cuts chunks of the pool into blocks of one layer group and keeps each request's block list.

        pool ──take──► chunk ──cut──► [ uninitialized | uninitialized | ... ] ──grow──► owned by a request
          ▲                                    │      ▲                                       │
          └── all blocks of it uninitialized ──┘      └────────────────release────────────────┘

    Blocks of chunks that are broken already are handed out before a new chunk is.
    """

    def __init__(self, pool: CachePool, group: LayerGroup):
        self.group = group
        self._pool = pool
        self._uninitialized: dict[int, list[int]] = {}  # chunk -> its free blocks; only of chunks taken from the pool
        self._tables: dict[int, list[int]] = {}  # request id -> its blocks, in token order
        self.rows = BlockRows(group.max_blocks or 0)  # the same, to be read; of a ring, all of it
        self.num_uninitialized = 0

    @property
    def num_data_blocks(self) -> int:
        """Blocks there would be if this allocator held every data chunk."""
        return self._pool.num_data_chunks * self.group.blocks_per_chunk

    @property
    def request_ids(self) -> Iterable[int]:
        """The requests that own blocks."""
        return self._tables.keys()

    def num_missing_blocks(self, request_id: int, num_tokens: int) -> int:
        """Blocks a request needs beside its own to hold `num_tokens` tokens."""
        return max(0, self.group.num_blocks_for(num_tokens) - self.num_owned_blocks(request_id))

    def num_owned_blocks(self, request_id: int) -> int:
        return len(self._tables.get(request_id, ()))

    def block_table(self, request_id: int) -> list[int]:
        """The request's blocks in token order. Not to be changed by the caller."""
        return self._tables[request_id]

    def num_chunks_for(self, num_missing_blocks: int, num_spare_blocks: int | None = None) -> int:
        """Chunks to take from the pool for so many blocks; num_spare_blocks: free ones outside it, if not as now."""
        spare = self.num_uninitialized if num_spare_blocks is None else num_spare_blocks
        return -(-max(0, num_missing_blocks - spare) // self.group.blocks_per_chunk)

    def grow(self, request_id: int, num_blocks: int) -> list[int]:
        """Gives a request `num_blocks` more and returns them; the caller has checked that there are as many free."""
        blocks = [self._take_block() for _ in range(num_blocks)]
        self._own(request_id, blocks)
        return blocks

    def _own(self, request_id: int, blocks: list[int]) -> None:
        """The request owns these blocks after those that it has."""
        table = self._tables.setdefault(request_id, [])
        self.rows.extend(request_id, len(table), blocks)
        table += blocks

    def release(self, request_id: int) -> None:
        """Takes all blocks from a request, head to tail; a request without any is fine."""
        blocks = self._tables.pop(request_id, ())
        self.rows.drop(request_id, len(blocks))
        for block in blocks:
            self._give_up(block)

    def freed_by_release(self, request_ids: Iterable[int]) -> tuple[int, int]:
        """What would be free if these requests left: free blocks in broken chunks, and chunks made whole."""
        freed = Counter(block // self.group.pages_per_chunk for block in self._blocks_freed_by(request_ids))
        spare, whole = self.num_uninitialized, 0
        for chunk, num_freed in freed.items():
            already_free = len(self._uninitialized.get(chunk, ()))
            if already_free + num_freed == self.group.blocks_per_chunk:
                spare, whole = spare - already_free, whole + 1
            else:
                spare += num_freed
        return spare, whole

    def _blocks_freed_by(self, request_ids: Iterable[int]) -> list[int]:
        """Blocks that nobody would own if these requests left."""
        return [block for request_id in request_ids for block in self._tables.get(request_id, ())]

    def _give_up(self, block: int) -> None:
        """A request does not own the block any more."""
        self._free_block(block)

    def _take_block(self) -> int:
        if not self.num_uninitialized:
            chunk = self._pool.take()
            first, size = chunk * self.group.pages_per_chunk, self.group.pages_per_block
            blocks = [first + number * size for number in range(self.group.blocks_per_chunk)]
            self._uninitialized[chunk] = blocks[::-1]
            self.num_uninitialized += len(blocks)
        chunk = next(reversed(self._uninitialized))
        block = self._uninitialized[chunk].pop()
        if not self._uninitialized[chunk]:
            del self._uninitialized[chunk]
        self.num_uninitialized -= 1
        return block

    def _free_block(self, block: int) -> None:
        """The block is uninitialized from now on, and its chunk goes back to the pool if all of it is."""
        chunk = block // self.group.pages_per_chunk
        free = self._uninitialized.setdefault(chunk, [])
        free.append(block)
        self.num_uninitialized += 1
        if len(free) == self.group.blocks_per_chunk:
            del self._uninitialized[chunk]
            self.num_uninitialized -= self.group.blocks_per_chunk
            self._pool.give_back(chunk)

    def check_integrity(self) -> list[int]:
        """Asserts law 1 for blocks and returns the chunks that this allocator holds."""
        self.rows.check_integrity(self._tables)
        held = self._held_blocks()
        free = [block for blocks in self._uninitialized.values() for block in blocks]
        assert len(free) == self.num_uninitialized, "count of uninitialized blocks is wrong"
        size = self.group.pages_per_chunk
        chunks = sorted({block // size for block in held + free})
        expected = [
            c * size + i * self.group.pages_per_block for c in chunks for i in range(self.group.blocks_per_chunk)
        ]
        assert sorted(held + free) == expected, "a block is owned twice, owned and free, or lost"
        assert all(len(blocks) < self.group.blocks_per_chunk for blocks in self._uninitialized.values())
        return chunks

    def _held_blocks(self) -> list[int]:
        """Blocks that are not uninitialized, each once."""
        return [block for blocks in self._tables.values() for block in blocks]
