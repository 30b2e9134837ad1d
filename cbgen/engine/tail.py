"""How many requests to run at once at the end of a job, so that its last forward passes are not almost empty.

rows    all at once             held back            A pass with few rows costs almost as much as a full one, because
of a    ████████                                     all weights are read for it. The longest request takes as many
pass    ████████▂▂▂▂▂▂▂▂▂▂      ████████████████▆    passes either way.
"""

from heapq import heapify, heapreplace

from cbgen.engine.requests import RequestState
from cbgen.engine.scheduler import Scheduler

# With so many rows a forward pass is no longer bound by reading the weights: fewer would not be cheaper.
MIN_ACTIVE_AT_END = 32


class BalancedTail:
    """Once all requests are known, new ones wait as long as that lets the batch stay evenly filled to the end."""

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self._balanced_for: tuple[int, int] | None = None  # active and waiting when it was last worked out

    def balance(self) -> None:
        """Worked out anew when somebody came, left or finished: all who are active come one token nearer to their end
        at every step, which changes nothing."""
        members = (self._scheduler.num_active, self._scheduler.num_waiting)
        if self._scheduler.num_waiting and members != self._balanced_for:
            self._balanced_for = members
            active, waiting = (_tokens_left(requests) for requests in (self._scheduler.active, self._scheduler.waiting))
            self._scheduler.limit_active(active_at_end(active, waiting))


def _tokens_left(requests: list[RequestState]) -> list[int]:
    """What each request and each of its forks may still generate."""
    return [
        member.params.max_tokens - member.num_generated_tokens
        for request in requests
        for member in (request, *request.forks)
    ]


def active_at_end(active: list[int], waiting: list[int]) -> int:
    """The fewest places that let all be done when the longest is, if each takes the tokens that it may.

    active, waiting: tokens that requests may still generate; those waiting take places that come free in this order.
    """
    longest = max(active + waiting, default=0)
    least = max(len(active), MIN_ACTIVE_AT_END)
    most = max(least, len(active) + len(waiting))
    while least < most:
        middle = (least + most) // 2
        if passes_needed(active, waiting, middle) <= longest:
            most = middle
        else:
            least = middle + 1
    return least


def passes_needed(active: list[int], waiting: list[int], places: int) -> int:
    """Forward passes until all are done, when waiting requests take each of `places` as soon as it is free."""
    until = active + [0] * (places - len(active))
    heapify(until)
    for tokens in waiting:
        heapreplace(until, until[0] + tokens)
    return max(until)
