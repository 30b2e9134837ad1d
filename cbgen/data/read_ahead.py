"""Reading in a thread of its own, so that neither a slow nor a fast source holds up who works on what it gives."""

import threading
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

# How long a list that is not full waits for more: a burst comes as one list, a trickle is not held back.
LINGER_S = 0.05
LISTS_AHEAD = 4
# A read that hangs is not waited for at the end; its thread ends with the process.
CLOSE_S = 1.0

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """The items of an iterable in lists of at most `size`, and of fewer where the next item lets wait.

    for rows in ReadAhead(source, 128): ...       raises, after the items before it, what the iterable raised
    """

    def __init__(self, items: Iterable[T], size: int):
        self._items = items
        self._size = size
        self._read: list[T] = []
        self._failure: BaseException | None = None
        self._ended = False
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="cbgen-reader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[list[T]]:
        while items := self._next():
            yield items
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stops reading; what was read and not taken is gone."""
        with self._condition:
            self._read = []
            self._end()
        self._thread.join(CLOSE_S)

    def _next(self) -> list[T]:
        """Empty at the end."""
        with self._condition:
            self._condition.wait_for(lambda: self._read or self._ended)
            self._condition.wait_for(lambda: len(self._read) >= self._size or self._ended, LINGER_S)
            items, self._read = self._read[: self._size], self._read[self._size :]
            self._condition.notify_all()
            return items

    def _work(self) -> None:
        try:
            for item in self._items:
                with self._condition:
                    self._condition.wait_for(lambda: len(self._read) < LISTS_AHEAD * self._size or self._ended)
                    if self._ended:
                        return
                    self._read.append(item)
                    if len(self._read) in (1, self._size):  # what _next waits for
                        self._condition.notify_all()
        except BaseException as error:  # noqa: BLE001 (a panic of a Rust library is no Exception)
            self._failure = error
        with self._condition:
            self._end()

    def _end(self) -> None:
        self._ended = True
        self._condition.notify_all()
