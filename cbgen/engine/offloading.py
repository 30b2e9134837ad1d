"""Who leaves the cache when active requests cannot grow: newest first, as few as cover the demand, never the last."""

from cbgen.cache.paged_cache import PagedCache
from cbgen.engine.requests import RequestState
from cbgen.engine.scheduler import ScheduledBatch


def choose_victims(batch: ScheduledBatch, active: list[RequestState], cache: PagedCache) -> list[RequestState]:
    """The requests to offload so that the rest of the stalled ones can allocate; changes nothing.

    batch: with something scheduled, only stalled requests may leave, so that the scheduled ones keep their cache; with
        nothing scheduled, any active one may.
    active: every request that holds cache, by arrival.
    """
    missing = {request.request_id: num_blocks for request, num_blocks in batch.stalled}
    demand, free = sum(missing.values()), cache.num_free_blocks
    candidates = [request for request, _ in batch.stalled] if batch else active
    victims: list[RequestState] = []
    for request in sorted(candidates, key=lambda request: request.request_id, reverse=True):
        if demand <= free or len(victims) + 1 == len(active):
            break
        victims.append(request)
        free += cache.num_owned_blocks(request.request_id)
        demand -= missing.get(request.request_id, 0)
    return victims
