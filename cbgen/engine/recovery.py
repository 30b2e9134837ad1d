"""What happens after a forward pass that raised: smaller batches if memory ran out, else a search for who is guilty."""

import time
from collections.abc import Callable

from cbgen.engine.isolation import Suspect, Suspects
from cbgen.engine.metrics import EngineMetrics
from cbgen.engine.offloading import Offloader
from cbgen.engine.passes import Passes
from cbgen.engine.requests import FinishReason, RequestState, RequestStatus, heir_of
from cbgen.engine.scheduler import ScheduledBatch, Scheduler
from cbgen.errors import ForwardPassError, PassMemoryError


class Recovery:
    """Takes the requests of a failed pass out of the cache, and decides who is tried next.

    pass failed ──► its requests start over ─┬─ no memory ──► budgets are halved, everybody goes on
                                             └─ else, or at the smallest budgets ──► Suspects

    suspects: confine the scheduler to those whose turn it is. notify: is told one line of every change of course.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        offloader: Offloader,
        passes: Passes,
        metrics: EngineMetrics,
        notify: Callable[[str], None],
    ):
        self.suspects = Suspects()
        self._scheduler, self._offloader, self._passes = scheduler, offloader, passes
        self._metrics, self._notify = metrics, notify

    def after(self, batch: ScheduledBatch, error: ForwardPassError) -> list[RequestState]:
        """Returns who ended with the pass: the guilty one, if it is found."""
        accused = self._start_over(batch)
        if isinstance(error, PassMemoryError) and self._shrink():
            return []
        if not accused:  # everybody has left meanwhile
            return []
        self._metrics.forward_failures += 1
        if not self.suspects:
            self._notify(_told(error, len(accused)))
        guilty = self.suspects.accuse(accused)
        return [] if guilty is None else [self._convict(guilty, str(error))]

    def _start_over(self, batch: ScheduledBatch) -> list[Suspect]:
        """Soft-resets all for whom the pass has written or sampled; their blocks, and rings, may hold anything."""
        accused = [Suspect(entry.request, entry.kv_length) for entry in batch.scheduled]
        accused += [
            Suspect(request, request.num_computed_tokens)
            for request in self._scheduler.active
            if not request.num_remaining_tokens  # a fork that began in this pass
        ]
        requests = [suspect.request for suspect in accused]
        for request in requests:
            self._offloader.start_over(request)
        self._scheduler.start_over(requests)
        return accused

    def _shrink(self) -> bool:
        """Smaller batches from now on; False when they cannot get smaller."""
        self._passes.release_memory()
        if not self._scheduler.shrink_budgets():
            return False
        self._metrics.budget_shrinks += 1
        tokens, requests = self._scheduler.max_batch_tokens, self._scheduler.max_requests_per_batch
        self._notify(
            f"a forward pass ran out of memory: max_batch_tokens is now {tokens}, max_requests_per_batch {requests}"
        )
        return True

    def _convict(self, guilty: Suspect, reason: str) -> RequestState:
        """Ends a request as an error. The forks that waited for its prompt are tried in their own right."""
        request, heir = guilty.request, heir_of(guilty.request.forks)
        request.forks = []
        assert request.status is RequestStatus.PENDING, "it has started over"
        self._scheduler.remove(request)
        request.finish(FinishReason.ERROR, time.perf_counter(), reason)
        if heir is not None:
            self._scheduler.add_first(heir)
            self.suspects.add(Suspect(heir, min(guilty.kv_length, heir.num_prompt_tokens)))
        return request


def _told(error: ForwardPassError, num_requests: int) -> str:
    if num_requests == 1:
        return f"{error}: its one request ends as an error"
    return f"{error}: its {num_requests} requests are tried in smaller groups"
