"""How many samples each row has, and where they are when the samples of all rows stand in one line."""

from collections.abc import Iterator

import numpy as np


class SampleCounts:
    """The same number of samples for every row, or each row its own; a row has 1 or more.

    counts  2  1  3             of row 1 there is one sample, the third of all
    places  0  2  3  (6)        8 bytes of memory for each row; none where all have the same number
    """

    def __init__(self, num_rows: int, counts: int | np.ndarray):
        """counts: of every row, or integers [num_rows]."""
        self.num_rows = num_rows
        self._same = counts if isinstance(counts, int) else None
        self._starts = np.zeros(0 if self._same else num_rows + 1, dtype=np.int64)
        if not isinstance(counts, int):
            np.cumsum(counts, out=self._starts[1:])

    @property
    def total(self) -> int:
        return self.start(self.num_rows)

    @property
    def are_single(self) -> bool:
        """Whether samples and rows are the same."""
        return self._same == 1

    def start(self, row: int) -> int:
        """The place of a row's first sample; of the row after the last, that behind all samples."""
        return row * self._same if self._same else int(self._starts[row])

    def places(self, rows: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """int64 [N]: of samples of rows, or -1 where a row has not so many, or is -1 itself."""
        if self._same:
            starts, counts = rows.astype(np.int64) * self._same, self._same
        else:
            starts = self._starts[rows]
            counts = self._starts[rows + 1] - starts
        return np.where((rows >= 0) & (samples < counts), starts + samples, -1)

    def rows_within(self, first: int, most_samples: float) -> int:
        """How many rows, from `first` on, have at most so many samples together; 1 at least."""
        if self._same:
            return max(1, int(most_samples // self._same))
        end = np.searchsorted(self._starts, self._starts[first] + most_samples, side="right")
        return max(1, int(end) - 1 - first)

    def lots(self, most_samples: float, most_rows: int | None = None) -> Iterator[tuple[int, int]]:
        """All rows, as (first, count) of neighbours that have at most so many samples; a row is not cut."""
        first = 0
        while first < self.num_rows:
            count = min(self.rows_within(first, most_samples), most_rows or self.num_rows, self.num_rows - first)
            yield first, count
            first += count

    def repeated(self, first: int, count: int) -> np.ndarray:
        """int64 [samples of these rows]: to which of `count` rows, numbered from 0, each sample belongs."""
        counts = self._same or np.diff(self._starts[first : first + count + 1])
        return np.repeat(np.arange(count), counts)

    def at(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Of so many places from `first` on: the row of each, and which of the row's samples, from 0; int64 [count]."""
        places = np.arange(first, first + count)
        if self._same:
            return np.divmod(places, self._same)
        rows = np.searchsorted(self._starts, places, side="right") - 1
        return rows, places - self._starts[rows]

    def row_of(self, place: int) -> int:
        """The row that the sample at a place belongs to; behind the last, the row after the last."""
        return int(self.at(place, 1)[0][0])
