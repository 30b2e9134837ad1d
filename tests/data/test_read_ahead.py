"""Reading ahead in a thread: everything comes, in order; what is there is not held back by what is not."""

import os
import threading
from collections.abc import Iterator

import pytest

from cbgen.data.read_ahead import LISTS_AHEAD, ReadAhead


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000])
def test_everything_in_order(count: int) -> None:
    """Lists of at most the size asked for, none of them empty."""
    lists = list(ReadAhead(range(count), 8))
    assert [item for items in lists for item in items] == list(range(count))
    assert all(0 < len(items) <= 8 for items in lists)


def test_what_is_there_comes_while_the_next_item_lets_wait() -> None:
    """A pipe that is written to only once the line before was taken: with lists that had to be full, nobody moved."""
    reading, writing = os.pipe()
    with open(reading, encoding="utf-8") as lines, open(writing, "w", encoding="utf-8") as pipe:
        ahead = iter(ReadAhead(lines, 100))
        for number in range(3):
            print(number, file=pipe, flush=True)
            assert next(ahead) == [f"{number}\n"]
        pipe.close()
        assert list(ahead) == []


def test_a_failure_comes_after_what_was_read_before_it() -> None:
    """As the iterable raised it."""

    def items() -> Iterator[int]:
        yield from range(5)
        raise OSError("gone")

    taken: list[int] = []
    with pytest.raises(OSError, match="gone"):
        for some in ReadAhead(items(), 2):
            taken += some
    assert taken == [0, 1, 2, 3, 4]


def test_no_more_is_read_than_is_kept_ahead() -> None:
    """An endless source is read a few lists ahead, and closing ends that."""
    read, enough = [], threading.Event()

    def items() -> Iterator[int]:
        for number in range(10**9):
            read.append(number)
            if number == 4 * LISTS_AHEAD:  # one more than is kept; it waits for room
                enough.set()
            yield number

    ahead = ReadAhead(items(), 4)
    assert enough.wait(60)
    assert len(read) == 4 * LISTS_AHEAD + 1
    assert next(iter(ahead)) == [0, 1, 2, 3]
    ahead.close()
    assert list(ahead) == []


def test_closing_does_not_wait_for_a_read_that_hangs() -> None:
    """Nothing comes from the pipe, and the end comes all the same."""
    reading, writing = os.pipe()
    ahead = ReadAhead(open(reading, encoding="utf-8"), 4)  # noqa: SIM115 (its thread still reads when the test ends)
    ahead.close()
    assert list(ahead) == []
    os.close(writing)
