"""What ends a benchmark before its time: a signal does at once, and nothing is left of it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from cbgen.errors import EXIT_SIGNALLED
from cbgen.stopping import Stopped

ENDING = ("SIGINT", "SIGTERM", "SIGHUP")


class EndingSignals:
    """As a context: the first signal ends what is inside; those after it are ignored, so that cleaning up is not cut
    short, and stay so, since the process ends.

    SIGINT raises KeyboardInterrupt, another one Stopped, with the exit code 128 and its number. A signal that the
    process was started with as ignored (nohup) stays so. Only the main thread hears signals; in another one nothing
    changes.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._is_heard = self._is_put_off = False
        self._pending: int | None = None

    def __enter__(self) -> "EndingSignals":
        if threading.current_thread() is threading.main_thread():
            numbers = [getattr(signal, name) for name in ENDING if hasattr(signal, name)]
            for number in numbers:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._is_heard:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """Inside, a signal waits for the end of it: for what takes no time and has to be whole."""
        self._is_put_off = True
        try:
            yield
        finally:
            self._is_put_off = False
            if self._pending is not None:
                self._end(self._pending)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if not self._is_put_off:
            self._end(number)
        if self._pending is None:
            self._pending = number

    def _end(self, number: int) -> NoReturn:
        self._is_heard = True
        for own in self._before:
            signal.signal(own, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise Stopped(f"stopped by {signal.Signals(number).name}", EXIT_SIGNALLED + number)
