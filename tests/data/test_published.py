"""What counts as done: of each sample the best outcome so far, and, in a retry, when it was last tried."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from parts_harness import failed, key, ok, publish_parts

from cbgen.data.key_table import key_array, sample_keys
from cbgen.data.manifest import Manifest, PartsFolder, Retry
from cbgen.data.published import FAILED, STOPPED, TRUNCATED, PublishedResults, statuses
from cbgen.data.rows import OutputRow, part_table

FIRST_RUN = Retry()
BOTH = ("failed", "truncated")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[PartsFolder]:
    folder = PartsFolder(tmp_path / "out.parquet")
    folder.open(Manifest({}), "if-possible")
    yield folder
    folder.close()


def truncated(index: int, sample_index: int = 0) -> OutputRow:
    return ok(index, sample_index, finish_reason="length")


def pending(folder: PartsFolder, count: int, retry: Retry = FIRST_RUN, num_samples: int = 1) -> list[int]:
    """Which samples of rows 0 to count - 1 are to be generated, numbered row by row."""
    rows, samples = np.divmod(np.arange(count * num_samples), num_samples)
    named = sample_keys(key_array([key(int(row)) for row in rows]), samples)
    return np.flatnonzero(PublishedResults(folder, count * num_samples, retry).are_pending(named)).tolist()


def test_the_status_of_a_result() -> None:
    """It failed, was cut short, or came to its end."""
    rows = [ok(0), truncated(1), failed(2)]
    assert statuses(part_table(rows)).tolist() == [STOPPED, TRUNCATED, FAILED]


def test_nothing_is_done_where_nothing_is_published(folder: PartsFolder) -> None:
    """Every row is pending, also in a retry."""
    assert pending(folder, 3) == pending(folder, 3, Retry(1, BOTH)) == [0, 1, 2]
    assert PublishedResults(folder, 3, Retry()).count() == (0, 0)


def test_whatever_has_a_result_is_done(folder: PartsFolder) -> None:
    """A failure as well: without --retry it is not tried again."""
    publish_parts(folder, [ok(0), failed(2)], [truncated(4)])
    assert pending(folder, 6) == [1, 3, 5]
    assert PublishedResults(folder, 6, Retry()).count() == (3, 1)


def test_samples_of_a_row_are_done_one_by_one(folder: PartsFolder) -> None:
    """Also where a row's samples lie in several parts."""
    publish_parts(folder, [ok(0, 1), ok(1, 0)], [ok(0, 2)])
    assert pending(folder, 2, num_samples=3) == [0, 4, 5]


@pytest.mark.parametrize(
    ("kinds", "expected"), [((), [3]), (("failed",), [2, 3]), (("truncated",), [1, 3]), (BOTH, [1, 2, 3])]
)
def test_a_retry_generates_its_kinds_again(folder: PartsFolder, kinds: tuple[str, ...], expected: list[int]) -> None:
    """Those that failed, those that were cut short, or both; and rows that were never generated."""
    publish_parts(folder, [ok(0), truncated(1), failed(2)])
    assert pending(folder, 4, Retry(1, kinds)) == expected


@pytest.mark.parametrize("again", [ok, truncated, failed])
def test_a_retry_tries_each_result_once(folder: PartsFolder, again: object) -> None:
    """Whatever came of it; the next generation tries it once more, if it is still of the kind."""
    publish_parts(folder, [truncated(0), failed(1)])
    publish_parts(folder, [again(0), again(1)], generation=1)  # type: ignore[operator]
    assert pending(folder, 2, Retry(1, BOTH)) == []
    # A failure does not undo the completion that row 0 had.
    left = {ok: ([], []), truncated: ([], [0, 1]), failed: ([1], [0])}[again]  # type: ignore[index]
    assert (pending(folder, 2, Retry(2, ("failed",))), pending(folder, 2, Retry(2, ("truncated",)))) == left


def test_a_success_beats_a_failure(folder: PartsFolder) -> None:
    """Whichever came later."""
    publish_parts(folder, [failed(0), ok(1)])
    publish_parts(folder, [ok(0), failed(1)], generation=1)
    assert pending(folder, 2, Retry(2, BOTH)) == []
    assert PublishedResults(folder, 2, Retry(2, BOTH)).count() == (2, 0)


def test_what_is_counted(folder: PartsFolder) -> None:
    """Results that are done, and of them the failures that nobody tries again."""
    publish_parts(folder, [ok(0), ok(1), truncated(2), failed(3), failed(4)])
    publish_parts(folder, [failed(4)], generation=1)
    assert PublishedResults(folder, 9, Retry()).count() == (5, 2)
    assert PublishedResults(folder, 9, Retry(1, ("failed",))).count() == (4, 1)
    assert PublishedResults(folder, 9, Retry(1, BOTH)).count() == (3, 1)
    assert PublishedResults(folder, 9, Retry(2, ("failed",))).count() == (3, 0)


def test_more_results_than_expected(folder: PartsFolder) -> None:
    """An input that has shrunk: results of rows that are gone do no harm."""
    publish_parts(folder, [ok(index) for index in range(500)])
    published = PublishedResults(folder, 2, Retry())
    assert published.count() == (500, 0)
    assert not published.are_pending(key_array([key(index) for index in range(500)])).any()
    assert pending(folder, 502) == [500, 501]


def test_a_file_that_tells_nothing_of_itself_is_no_part(folder: PartsFolder) -> None:
    """It is set aside, and its rows are pending."""
    pq.write_table(part_table([failed(0), ok(1)]), folder.part_path(0))
    assert pending(folder, 2) == [0, 1]
    assert not folder.part_path(0).exists()


def test_a_torn_part_holds_nothing(folder: PartsFolder) -> None:
    """Its rows are pending; those of the others are not."""
    publish_parts(folder, [ok(0)], [ok(1)])
    folder.part_path(0).write_bytes(folder.part_path(0).read_bytes()[:100])
    assert pending(folder, 2) == [0]
