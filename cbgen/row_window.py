"""What lies between the reader and the engine: requests that gather, are put in order, and are taken.

    feeder ──add──► [ gathering ] ──put in order, when nothing is left of the last lot──► [ ready ] ──take──► engine

One lot gathers while the last one is taken, so that the engine need not wait for the reader. Both are bounded.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cbgen.duplicates import MAX_DUPLICATES
from cbgen.ordering import WaitingRequest


@dataclass(frozen=True)
class WindowLimits:
    """How much is kept to be put in order.

    max_requests: samples of a row counted one by one; several times what any engine runs at once, so that ends of
    windows, where short requests of one meet long ones of the next, are rare. max_prompt_tokens: 16 MB at four bytes
    each. There are at most two windows at a time, each with one batch of the feeder beyond its bounds, so that memory
    is some 50 MB whatever the input.
    patience_s: how long an engine without work waits for a window to fill; a fast reader fills one while weights load.
    max_duplicates: see Duplicates.
    """

    max_requests: int = 8192
    max_prompt_tokens: int = 4_194_304
    patience_s: float = 2.0
    max_duplicates: int = MAX_DUPLICATES


class RowWindow:
    """See the module. `arrange` puts a lot in order; it may be set until the first request is taken."""

    def __init__(self, limits: WindowLimits):
        self.arrange: Callable[[list[WaitingRequest]], list[WaitingRequest]] = list
        self._limits = limits
        self._gathering: list[WaitingRequest] = []
        self._gathering_requests = self._gathering_tokens = 0
        self._ready: deque[WaitingRequest] = deque()
        self._ended = False
        self._closed = False
        self._stopped = False
        self._failure: BaseException | None = None
        self._asked_in_vain_s: float | None = None
        self._condition = threading.Condition()

    @property
    def exhausted(self) -> bool:
        """Whether nothing will come any more, not even a failure."""
        empty = not (self._gathering or self._ready)
        return self._stopped or (self._ended and self._failure is None and empty)

    def add(self, requests: list[WaitingRequest]) -> None:
        """Never blocks: wait_for_room keeps the bounds."""
        with self._condition:
            self._gathering += requests
            self._gathering_requests += sum(len(request.members) for request in requests)
            self._gathering_tokens += sum(request.num_tokens for request in requests)
            self._condition.notify_all()

    def wait_for_room(self) -> bool:
        """Blocks while the gathering lot is full; False once closed."""
        with self._condition:
            self._condition.wait_for(lambda: not self._is_full or self._closed)
            return not self._closed

    def end(self, failure: BaseException | None = None) -> None:
        """Nothing is added any more. failure: why, if not for the end of the input; it is raised by the next take."""
        with self._condition:
            self._ended = True
            self._failure = failure
            self._condition.notify_all()

    def stop(self) -> None:
        """Nothing is given out any more, as if the end had come; who waits for something is let go."""
        with self._condition:
            self._stopped = self._closed = True
            self._condition.notify_all()

    def close(self) -> None:
        """Lets go who waits for room."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def wait_for_first(self) -> bool:
        """Blocks until there is a request, and returns whether there is: False at the end. Nothing is put in order."""
        with self._condition:
            self._condition.wait_for(lambda: self._gathering or self._ready or self._ended or self._stopped)
            self._raise_failure()
            return not self.exhausted

    def take(self, limit: int, wait: bool) -> list[WaitingRequest]:
        """Up to `limit` requests in order; with `wait`, blocks until there is one or the end."""
        taken: list[WaitingRequest] = []
        with self._condition:
            while True:
                self._raise_failure()
                if self._stopped:
                    return []
                while len(taken) < limit and self._refill():
                    taken.append(self._ready.popleft())
                if taken or self.exhausted:
                    self._asked_in_vain_s = None
                    return taken
                left_s = self._patience_left_s()
                if not wait:
                    return taken
                self._condition.wait(left_s if left_s > 0 else None)  # with no patience left, whatever is added does

    @property
    def _is_full(self) -> bool:
        enough_requests = self._gathering_requests >= self._limits.max_requests
        return enough_requests or self._gathering_tokens >= self._limits.max_prompt_tokens

    def _refill(self) -> bool:
        """Whether a request is ready; puts the gathering lot in order if it is time to."""
        if self._ready:
            return True
        complete = self._is_full or self._ended
        if not self._gathering or not (complete or self._patience_left_s() <= 0):
            return False
        self._ready.extend(self.arrange(self._gathering))
        self._gathering = []
        self._gathering_requests = self._gathering_tokens = 0
        self._condition.notify_all()
        return True

    def _patience_left_s(self) -> float:
        """Of the time that the engine waits for a complete lot, since it first asked in vain."""
        now_s = time.monotonic()
        if self._asked_in_vain_s is None:
            self._asked_in_vain_s = now_s
        return self._asked_in_vain_s + self._limits.patience_s - now_s

    def _raise_failure(self) -> None:
        if self._failure is not None and not self._stopped:
            raise self._failure
