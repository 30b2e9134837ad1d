"""The CachePool: the one owner of KV memory, handed out in chunks."""

from cbgen.errors import MemoryPlanError

NUM_RESERVED_CHUNKS = 2
READ_RESERVE_CHUNK = 0
WRITE_RESERVE_CHUNK = 1


class CachePool:
    """Chunks by number. The two ahead of the data serve padding reads and padding writes and belong to no request.

        chunk      0         1         2    3    4    ...   num_chunks - 1
                 [ read  | write ] [ data | data | data |       ...       ]
                   reserve              handed out to allocators

    Chunks that came back last are handed out first: their memory is warm, and memory never used stays untouched. How
    allocators cut a chunk into blocks is drawn in cache/layout.py.
    """

    def __init__(self, num_chunks: int):
        """num_chunks: the reserved ones included. Raises MemoryPlanError when none would be left for data."""
        if num_chunks <= NUM_RESERVED_CHUNKS:
            raise MemoryPlanError(
                f"a cache of {num_chunks} chunks has none for data, {NUM_RESERVED_CHUNKS} are reserved"
            )
        self.num_chunks = num_chunks
        self._free = list(range(num_chunks - 1, NUM_RESERVED_CHUNKS - 1, -1))

    @property
    def num_data_chunks(self) -> int:
        return self.num_chunks - NUM_RESERVED_CHUNKS

    @property
    def num_free_chunks(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Hands out one chunk; the caller has checked that there is one."""
        return self._free.pop()

    def give_back(self, chunk: int) -> None:
        self._free.append(chunk)

    def check_integrity(self, taken: list[int]) -> None:
        """Asserts law 1 for chunks: each data chunk is either free or taken, once."""
        together = sorted(self._free + taken)
        assert together == list(range(NUM_RESERVED_CHUNKS, self.num_chunks)), f"chunks lost or doubled: {together}"
