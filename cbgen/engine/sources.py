"""Where the engine's requests come from."""

from typing import Protocol

from cbgen.engine.requests import RequestState


class RequestSource(Protocol):
    """Where the manager pulls requests from: many, few or none are ready at a given moment."""

    def take(self, limit: int, wait: bool) -> list[RequestState]:
        """Up to `limit` requests that are ready. With `wait`, blocks until one is or the source is exhausted."""

    @property
    def exhausted(self) -> bool:
        """True when nothing will come any more."""


class ListSource:
    """Requests that are all there from the start."""

    def __init__(self, requests: list[RequestState]):
        self._requests = requests
        self._next = 0

    def take(self, limit: int, wait: bool) -> list[RequestState]:
        taken = self._requests[self._next : self._next + limit]
        self._next += len(taken)
        return taken

    @property
    def exhausted(self) -> bool:
        return self._next >= len(self._requests)
