"""Who computes what in the next forward pass: budgets counted down over candidates in order."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from cbgen.cache.paged_cache import PagedCache
from cbgen.config import ResolvedConfig
from cbgen.engine.requests import RequestState, RequestStatus

# How many later requests may be admitted ahead of a waiting one that does not fit yet.
MAX_OVERTAKEN = 64
# How many waiting requests that do not fit one step looks at, so that planning costs the batch and not the queue.
MAX_SKIPPED_PER_STEP = 8


@dataclass(frozen=True)
class ScheduledRequest:
    """A request and the number of its tokens that the next forward pass computes."""

    request: RequestState
    query_length: int

    @property
    def samples(self) -> bool:
        """Whether the pass reaches the request's last token, and so gives its next one."""
        return self.query_length == self.request.num_remaining_tokens

    @property
    def kv_length(self) -> int:
        """Tokens of KV the pass attends to at most, its own included."""
        return self.request.num_computed_tokens + self.query_length


@dataclass
class ScheduledBatch:
    """One forward pass. `stalled` are the active requests that found no room, with the blocks each needs."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    stalled: list[tuple[RequestState, int]] = field(default_factory=list)

    @property
    def num_query_tokens(self) -> int:
        return sum(entry.query_length for entry in self.scheduled)

    def __bool__(self) -> bool:
        return bool(self.scheduled)


@dataclass
class _Budget:
    """What is left to spend in one forward pass; counted down here and nowhere else."""

    query_tokens: int
    cache_blocks: int
    requests: int

    def query_length_for(self, request: RequestState) -> int:
        """As many of the request's next tokens as the budgets of tokens and requests allow; 0 when one is spent."""
        if not self.requests:
            return 0
        return min(request.num_remaining_tokens, self.query_tokens)

    def spend(self, query_length: int, num_blocks: int) -> None:
        self.query_tokens -= query_length
        self.cache_blocks -= num_blocks
        self.requests -= 1
        assert min(self.query_tokens, self.cache_blocks, self.requests) >= 0, self

    @property
    def is_spent(self) -> bool:
        return not (self.query_tokens and self.requests)


class FIFOScheduler:
    """Decodes first, then prompts begun, then waiting requests, each in order of arrival.

        waiting   [ offloaded, oldest first | new, by arrival ]    ──admission──►    active   [ by arrival ]

    Only the scheduler changes `waiting` and `active`; it never changes a request.
    """

    def __init__(self, cache: PagedCache, config: ResolvedConfig, cache_budget_blocks: int | None = None):
        """cache_budget_blocks: blocks that one forward pass may read; the whole cache unless given."""
        self._cache = cache
        self._config = config
        self._cache_budget_blocks = cache.num_blocks if cache_budget_blocks is None else cache_budget_blocks
        self._waiting: deque[RequestState] = deque()
        self._active: dict[int, RequestState] = {}
        self._overtaken: dict[int, int] = {}
        self._admission_held = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        return len(self._active)

    @property
    def active(self) -> list[RequestState]:
        """The requests that hold cache, by arrival."""
        return list(self._active.values())

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._active)

    def add(self, request: RequestState) -> None:
        """A new request joins the end of the queue."""
        self._waiting.append(request)

    def remove(self, request: RequestState) -> None:
        """A request has finished; what it held is free for others."""
        self._active.pop(request.request_id, None)
        self._overtaken.pop(request.request_id, None)
        self._admission_held = False

    def put_back(self, requests: list[RequestState]) -> None:
        """Offloaded requests return to the head of the queue, oldest first.

        Admission then waits until something finishes: blocks come free in no other way, and a request let in before
        would only be offloaded again.
        """
        for request in sorted(requests, key=lambda request: request.request_id, reverse=True):
            del self._active[request.request_id]
            self._waiting.appendleft(request)
        self._admission_held = bool(self._active)

    def schedule(self) -> ScheduledBatch:
        """Plans one forward pass and allocates what it needs; see the module docstring."""
        batch = ScheduledBatch()
        budget = _Budget(self._config.max_batch_tokens, self._cache_budget_blocks, self._config.max_requests_per_batch)
        decoding = [r for r in self._active.values() if r.status is RequestStatus.DECODING]
        prefilling = [r for r in self._active.values() if r.status is RequestStatus.PREFILLING]
        for request in self.candidate_order(decoding, prefilling):
            if budget.is_spent:
                return batch
            exempt = request.status is RequestStatus.DECODING or not (decoding or batch)
            if exempt or self._above_margin():
                self._schedule_active(request, budget, batch)
        if not batch.stalled:
            self._admit(budget, batch, may_exceed_margin=not decoding)
        return batch

    def candidate_order(self, decoding: list[RequestState], prefilling: list[RequestState]) -> list[RequestState]:
        """The order in which active requests are served."""
        return decoding + prefilling

    def _above_margin(self) -> bool:
        return self._cache.free_share >= self._config.safety_margin

    def _schedule_active(self, request: RequestState, budget: _Budget, batch: ScheduledBatch) -> None:
        if self._try_schedule(request, budget, batch):
            return
        num_tokens = request.num_computed_tokens + budget.query_length_for(request)
        missing = self._cache.num_missing_blocks(request.request_id, num_tokens)
        if missing > self._cache.num_free_blocks:
            batch.stalled.append((request, missing))

    def _try_schedule(self, request: RequestState, budget: _Budget, batch: ScheduledBatch) -> bool:
        """Puts the request's next tokens in the batch if budget and cache allow it; all or nothing."""
        query_length = budget.query_length_for(request)
        kv_length = request.num_computed_tokens + query_length
        num_blocks = self._cache.num_blocks_for(kv_length)
        if not query_length or num_blocks > budget.cache_blocks:
            return False
        if not self._cache.allocate(request.request_id, kv_length):
            return False
        budget.spend(query_length, num_blocks)
        batch.scheduled.append(ScheduledRequest(request, query_length))
        return True

    def _admit(self, budget: _Budget, batch: ScheduledBatch, may_exceed_margin: bool) -> None:
        """Lets waiting requests in, in order; one that does not fit is skipped, a bounded number of times."""
        if self._admission_held:
            return
        admitted: list[RequestState] = []
        skipped: list[RequestState] = []
        for request in self._candidates_for_admission():
            if budget.is_spent or len(skipped) == MAX_SKIPPED_PER_STEP:
                break
            exempt = may_exceed_margin and not batch
            if not (exempt or self._above_margin()):
                break
            if self._try_schedule(request, budget, batch):
                admitted.append(request)
                self._count_overtaken(skipped)
            elif request.num_soft_resets or self._overtaken.get(request.request_id, 0) >= MAX_OVERTAKEN:
                break
            else:
                skipped.append(request)
        self._move_to_active(admitted, len(admitted) + len(skipped), skipped)

    def _candidates_for_admission(self) -> Iterator[RequestState]:
        return islice(self._waiting, self._config.max_requests_per_batch + MAX_SKIPPED_PER_STEP)

    def _count_overtaken(self, skipped: list[RequestState]) -> None:
        for request in skipped:
            self._overtaken[request.request_id] = self._overtaken.get(request.request_id, 0) + 1

    def _move_to_active(self, admitted: list[RequestState], num_seen: int, skipped: list[RequestState]) -> None:
        """Of the first num_seen waiting requests, `admitted` leave the queue and `skipped` stay at its head."""
        if not admitted:
            return
        for _ in range(num_seen):
            self._waiting.popleft()
        self._waiting.extendleft(reversed(skipped))
        for request in admitted:
            self._overtaken.pop(request.request_id, None)
            self._active[request.request_id] = request
        order = list(self._active)
        if order != sorted(order):  # who was overtaken or offloaded is older than some of those that are active
            self._active = dict(sorted(self._active.items()))
