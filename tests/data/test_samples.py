"""Where the samples of rows are, whether all rows have as many or each its own number."""

import numpy as np
import pytest

from cbgen.data.samples import SampleCounts

COUNTS = [[3, 3, 3, 3], [2, 1, 5, 1, 1], [7], []]


def counted(counts: list[int]) -> list[SampleCounts]:
    """As an array, and as one number where that says the same."""
    same = [SampleCounts(len(counts), counts[0])] if len(set(counts)) == 1 else []
    return [SampleCounts(len(counts), np.array(counts, dtype=np.uint16)), *same]


@pytest.mark.parametrize("counts", COUNTS)
def test_places_of_samples(counts: list[int]) -> None:
    """Rows follow each other, each with its samples side by side; there is no place for a sample beyond them."""
    flat = [(row, sample) for row, count in enumerate(counts) for sample in range(count)]
    for samples in counted(counts):
        assert samples.total == len(flat)
        assert [samples.start(row) for row in range(len(counts) + 1)] == [
            sum(counts[:row]) for row in range(len(counts) + 1)
        ]
        rows, numbers = samples.at(0, len(flat))
        assert list(zip(rows.tolist(), numbers.tolist(), strict=True)) == flat
        assert samples.places(rows, numbers).tolist() == list(range(len(flat)))
        assert samples.places(rows, numbers + max(counts, default=0)).tolist() == [-1] * len(flat)
        assert samples.repeated(0, len(counts)).tolist() == [row for row, _ in flat]
        assert [samples.row_of(place) for place in range(len(flat) + 1)] == [*(row for row, _ in flat), len(counts)]


def test_a_row_that_is_not_known_has_no_place() -> None:
    """-1, as a table of keys says it, stays -1."""
    for samples in (SampleCounts(2, 3), SampleCounts(2, np.array([3, 3]))):
        assert samples.places(np.array([-1, 1]), np.array([0, 2])).tolist() == [-1, 5]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("most", [1, 4, 6.5, 100])
def test_lots_are_of_whole_rows(counts: list[int], most: float) -> None:
    """Each lot has as many rows as fit, or the one that does not fit alone."""
    expected: list[list[int]] = []
    for row, count in enumerate(counts):
        if expected and sum(counts[other] for other in expected[-1]) + count <= most:
            expected[-1].append(row)
        else:
            expected.append([row])
    for samples in counted(counts):
        lots = [list(range(first, first + count)) for first, count in samples.lots(most)]
        assert lots == expected
        assert [count for _, count in samples.lots(100, most_rows=2)] == [2] * (len(counts) // 2) + [1] * (
            len(counts) % 2
        )
