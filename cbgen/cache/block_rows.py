"""The blocks of every request as rows of one array, which a batch is laid out from without going through lists."""

from collections.abc import Sequence

import numpy as np

from cbgen.cache.pool import READ_RESERVE_CHUNK

_FIRST_ROWS, _FIRST_WIDTH = 64, 16
# What pads a row: a page of the read reserve, which is chunk 0 and so begins at page 0.
_PADDING = READ_RESERVE_CHUNK


class BlockRows:
    """int64 [rows, width], both growing by doubling; a request's row is its blocks in token order, then padding.

    request 7   row 0   [ 12  13  31   0   0   0   0   0 ]
    request 9   row 1   [ 14  15   0   0   0   0   0   0 ]
    nobody      row 2   [  0   0   0   0   0   0   0   0 ]
    """

    def __init__(self, least_width: int = 0):
        """least_width: of the rows that `of` returns, whoever asks."""
        self._blocks = np.full((_FIRST_ROWS, max(_FIRST_WIDTH, least_width)), _PADDING, dtype=np.int64)
        self._row_of: dict[int, int] = {}
        self._free = list(range(_FIRST_ROWS - 1, -1, -1))

    def extend(self, request_id: int, first: int, blocks: Sequence[int]) -> None:
        """A request that owned `first` blocks owns these too."""
        row = self._row_of.get(request_id)
        if row is None:
            row = self._row_of[request_id] = self._take_row()
        last = first + len(blocks)
        while last > self._blocks.shape[1]:
            self._blocks = np.concatenate([self._blocks, np.full_like(self._blocks, _PADDING)], axis=1)
        self._blocks[row, first:last] = blocks

    def drop(self, request_id: int, num_blocks: int) -> None:
        """A request that owned so many blocks owns none any more; one that never had any is fine."""
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self._blocks[row, :num_blocks] = _PADDING
            self._free.append(row)

    def of(self, request_ids: Sequence[int]) -> np.ndarray:
        """A copy of the rows of these requests, [len(request_ids), width]."""
        row_of = self._row_of
        return self._blocks[[row_of[request_id] for request_id in request_ids]]

    def _take_row(self) -> int:
        if not self._free:
            num_rows = len(self._blocks)
            self._blocks = np.concatenate([self._blocks, np.full_like(self._blocks, _PADDING)])
            self._free = list(range(2 * num_rows - 1, num_rows - 1, -1))
        return self._free.pop()

    def check_integrity(self, tables: dict[int, list[int]]) -> None:
        """Asserts that the rows say what the lists do, and that no row is lost or of two requests."""
        assert self._row_of.keys() == tables.keys()
        assert sorted([*self._free, *self._row_of.values()]) == list(range(len(self._blocks)))
        for request_id, row in self._row_of.items():
            blocks = self._blocks[row]
            assert blocks[: len(tables[request_id])].tolist() == tables[request_id]
            assert (blocks[len(tables[request_id]) :] == _PADDING).all()
