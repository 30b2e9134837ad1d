"""Who leaves the cache when active requests cannot grow, and where their KV goes: the swap pool, or nowhere."""

from cbgen.cache.paged_cache import PagedCache
from cbgen.cache.swap_pool import SwapPool
from cbgen.engine.metrics import EngineMetrics
from cbgen.engine.requests import RequestState
from cbgen.engine.scheduler import ScheduledBatch, ScheduledRequest


def choose_victims(batch: ScheduledBatch, active: list[RequestState], cache: PagedCache) -> list[RequestState]:
    """The requests to offload so that the rest of the stalled ones can allocate; changes nothing.

    Newest first, as few as cover the demand, never the last active one. batch: with something scheduled, only stalled
    requests may leave, so that the scheduled ones keep their cache; with nothing scheduled, any active one may.
    active: every request that holds cache, by arrival.
    """
    missing = {request.request_id: demand for request, demand in batch.stalled}
    candidates = [request for request, _ in batch.stalled] if batch else active
    victims: list[RequestState] = []
    for request in sorted(candidates, key=lambda request: request.request_id, reverse=True):
        demand = tuple(map(sum, zip(*missing.values(), strict=True)))
        leaving = [victim.request_id for victim in victims]
        if not missing or cache.covers(demand, leaving) or len(victims) + 1 == len(active):
            break
        victims.append(request)
        missing.pop(request.request_id, None)
    return victims


class Offloader:
    """Moves requests out of the cache and back; says what happened in the metrics.

    victims ──► copied to the swap pool, as many as fit, in one transfer ──► restored when they are admitted again
            └─► the rest, or all without a swap pool: soft reset ──► computed again
    """

    def __init__(self, cache: PagedCache, swap_pool: SwapPool | None, metrics: EngineMetrics):
        self._cache = cache
        self._swap_pool = swap_pool
        self._metrics = metrics

    def offload(self, victims: list[RequestState]) -> None:
        """Takes the cache from active requests; they are pending afterwards, with every token they had."""
        stored: set[int] = set()
        if self._swap_pool is not None:
            computed = (request for request in victims if request.num_computed_tokens and not request.is_in_flight)
            stored = self._swap_pool.store(
                {r.request_id: self._cache.pages_of(r.request_id, r.num_computed_tokens) for r in computed}
            )
        for request in victims:
            self._cache.release(request.request_id)
            if request.request_id in stored:
                request.swap_out()
            else:
                request.soft_reset()
        self._metrics.offloads += len(victims)
        self._metrics.swaps += len(stored)
        self._metrics.soft_resets += len(victims) - len(stored)

    def start_over(self, request: RequestState) -> None:
        """Soft-resets an active request whose KV may be wrong: nobody takes it over, and what it replaced is lost."""
        self._cache.distrust(request.request_id)
        self._cache.release(request.request_id)
        request.soft_reset()
        self._metrics.offloads += 1
        self._metrics.soft_resets += 1

    def restore(self, entries: list[ScheduledRequest]) -> None:
        """Copies the KV of swapped requests that were just admitted into the blocks they got. Not yet `admit`ted."""
        if self._swap_pool is None:
            return
        pages_of = {
            entry.request.request_id: self._cache.pages_of(
                entry.request.request_id, entry.request.num_computed_tokens, entry.num_matched
            )
            for entry in entries
            if entry.request.is_swapped
        }
        if pages_of:
            self._swap_pool.restore(pages_of)

    def discard(self, request: RequestState) -> None:
        """A request is not coming back."""
        if self._swap_pool is not None:
            self._swap_pool.discard(request.request_id)

    def check_integrity(self, waiting: list[RequestState]) -> None:
        """Asserts that the swap pool holds exactly the waiting requests that say so."""
        swapped = {request.request_id for request in waiting if request.is_swapped}
        if self._swap_pool is None:
            assert not swapped
        else:
            self._swap_pool.check_integrity(swapped)
