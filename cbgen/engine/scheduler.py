"""Who computes what in the next forward pass: budgets counted down over candidates in order."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice, takewhile
from typing import NamedTuple

from cbgen.cache.paged_cache import NO_MATCH, Demand, PagedCache
from cbgen.cache.prefix_cache import PrefixMatch
from cbgen.config import ResolvedConfig
from cbgen.engine.requests import RequestState, RequestStatus

# How many later requests may be admitted ahead of a waiting one that does not fit yet.
MAX_OVERTAKEN = 64
# How many waiting requests that do not fit one step looks at, so that planning costs the batch and not the queue.
MAX_SKIPPED_PER_STEP = 8


class ScheduledRequest(NamedTuple):
    """A request and the tokens that the next forward pass computes: query_length of them, from `start` on.

    num_matched: of those before `start`, how many it takes over from the cache as it is admitted.
    samples: whether the pass reaches the request's last token, and so gives its next one. scored: places in the request
    of tokens whose logits are wanted, since they tell how likely the next token of the prompt was.
    """

    request: RequestState
    start: int
    query_length: int
    num_matched: int
    samples: bool
    scored: range = range(0)

    @property
    def kv_length(self) -> int:
        """Tokens of KV the pass attends to at most, its own included."""
        return self.start + self.query_length


@dataclass
class ScheduledBatch:
    """One forward pass. `stalled` are the active requests that found no room, with the blocks each needs."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    stalled: list[tuple[RequestState, Demand]] = field(default_factory=list)

    @property
    def num_query_tokens(self) -> int:
        return sum(entry.query_length for entry in self.scheduled)

    @property
    def admitted(self) -> list[ScheduledRequest]:
        """Those that were waiting until now."""
        return [entry for entry in self.scheduled if entry.request.status is RequestStatus.PENDING]

    def __bool__(self) -> bool:
        return bool(self.scheduled)


@dataclass
class _Budget:
    """What is left to spend in one forward pass; counted down here and nowhere else.

    requests: also rows of logits, of which every request needs one at most; one whose prompt is scored needs a row for
    every token, and takes the place of so many. cache_pages: distinct physical pages that the pass may still read. None
    where the budget is the whole cache: a pass reads only pages that a request owns, of which there are no more.
    """

    query_tokens: int
    requests: int
    cache_pages: int | None
    read: set[int] = field(default_factory=set)

    def query_tokens_for(self, request: RequestState) -> int:
        """The most that it may compute."""
        is_scored = request.first_unscored is not None
        return min(self.query_tokens, self.requests) if is_scored else self.query_tokens

    def spend(self, query_length: int, num_scored: int, new_pages: set[int]) -> None:
        self.query_tokens -= query_length
        self.requests -= max(1, query_length if num_scored else 0)
        if self.cache_pages is not None:
            self.cache_pages -= len(new_pages)
            self.read |= new_pages
        assert min(self.query_tokens, self.requests) >= 0, self
        assert self.cache_pages is None or self.cache_pages >= 0, self

    @property
    def is_spent(self) -> bool:
        return not (self.query_tokens and self.requests)


class Scheduler(ABC):
    """Queues and budgets; what differs between schedulers is the order of active requests and the default margin.

        waiting   [ offloaded, oldest first | new, by arrival ]    ──admission──►    active   [ by arrival ]

    Only the scheduler changes `waiting` and `active`; it never changes a request.
    """

    def __init__(self, cache: PagedCache, config: ResolvedConfig, cache_budget_pages: int | None = None):
        """cache_budget_pages: distinct pages that one forward pass may read; the whole cache unless given."""
        self._cache = cache
        self._safety_margin = config.safety_margin
        self.max_batch_tokens = config.max_batch_tokens
        self.max_requests_per_batch = config.max_requests_per_batch
        self._cache_budget_pages = cache_budget_pages
        self._waiting: deque[RequestState] = deque()
        self._active: dict[int, RequestState] = {}
        self._overtaken: dict[int, int] = {}
        self._admission_held = False
        self._max_active: int | None = None
        self._confined_to: frozenset[int] | None = None

    @staticmethod
    @abstractmethod
    def candidate_order(decoding: list[RequestState], prefilling: list[RequestState]) -> list[RequestState]:
        """The order in which active requests are served; each list is by arrival."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        return len(self._active)

    @property
    def waiting(self) -> list[RequestState]:
        return list(self._waiting)

    @property
    def active(self) -> list[RequestState]:
        """The requests that hold cache, by arrival."""
        return list(self._active.values())

    @property
    def active_ids(self) -> Iterable[int]:
        """Their ids."""
        return self._active.keys()

    @property
    def unfinished(self) -> Iterator[RequestState]:
        return chain(self._active.values(), self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._active)

    @property
    def may_start_fork(self) -> bool:
        """Whether one more new request may become active now, without having waited in the queue."""
        held = self._admission_held or self._offloaded_wait or self._is_full(0)
        return not held and len(self._active) < self.max_requests_per_batch and self._above_margin

    @property
    def _offloaded_wait(self) -> bool:
        """Whether anybody in the queue was offloaded: they are its head."""
        return bool(self._waiting) and self._waiting[0].was_offloaded

    @property
    def _above_margin(self) -> bool:
        """Whether enough of the cache is free for more than decodes."""
        return self._cache.free_share >= self._safety_margin

    @property
    def outsiders(self) -> list[RequestState]:
        """The active requests that must wait because the scheduler is confined to others."""
        return [request for request in self._active.values() if not self._may_run(request)]

    def _may_run(self, request: RequestState) -> bool:
        return self._confined_to is None or request.request_id in self._confined_to

    def confine(self, request_ids: frozenset[int] | None) -> None:
        """Nobody else computes anything or is let in from now on; None: everybody may again."""
        self._confined_to = request_ids

    def shrink_budgets(self) -> bool:
        """Halves what a forward pass may hold, to a page of tokens and one request at least. False: it is there."""
        before = self.max_batch_tokens, self.max_requests_per_batch
        self.max_batch_tokens = min(self.max_batch_tokens, max(self._cache.page_size, self.max_batch_tokens // 2))
        self.max_requests_per_batch = max(1, self.max_requests_per_batch // 2)
        return before != (self.max_batch_tokens, self.max_requests_per_batch)

    def limit_active(self, max_active: int | None) -> None:
        """New requests wait while so many are active; None: the batch alone limits them."""
        self._max_active = max_active

    def _is_full(self, num_admitted: int) -> bool:
        return self._max_active is not None and len(self._active) + num_admitted >= self._max_active

    def add(self, request: RequestState) -> None:
        """A new request joins the end of the queue."""
        self._waiting.append(request)

    def add_first(self, request: RequestState) -> None:
        """A new request that has waited elsewhere comes before the other new ones, after those that were offloaded."""
        offloaded = self._take_offloaded()
        self._waiting.extendleft([request, *reversed(offloaded)])

    def activate(self, request: RequestState) -> None:
        """A request got its cache without waiting, as a fork of an active one."""
        self._active[request.request_id] = request
        self._keep_order()

    def remove(self, request: RequestState) -> None:
        """A request has finished, active or waiting; what it held is free for others."""
        self._overtaken.pop(request.request_id, None)
        if self._active.pop(request.request_id, None) is not None:
            self._admission_held = False
            return
        self._waiting.remove(request)
        if request.was_offloaded and not self._offloaded_wait:
            self._admission_held = False

    def put_back(self, requests: list[RequestState]) -> None:
        """Offloaded requests return to the head of the queue, oldest first.

        Admission then waits until something finishes: blocks come free in no other way, and a request let in before
        would only be offloaded again. When nothing is left active, one is let in, and runs alone until then. With the
        last offloaded one cancelled, nobody is left to wait for.
        """
        self.requeue(requests)
        self._admission_held = True

    def start_over(self, requests: list[RequestState]) -> None:
        """Requests of a failed pass return to the queue; what they gave up is room for those held back until now."""
        self.requeue(requests)
        self._admission_held = False

    def requeue(self, requests: list[RequestState]) -> None:
        """Active requests return to the head of the queue, with those that did before, oldest first."""
        for request in requests:
            del self._active[request.request_id]
        returning = sorted([*self._take_offloaded(), *requests], key=lambda request: request.request_id)
        self._waiting.extendleft(reversed(returning))

    def drop_new(self) -> list[RequestState]:
        """Takes out of the queue, and returns, all who were never active."""
        offloaded = self._take_offloaded()
        dropped, self._waiting = list(self._waiting), deque(offloaded)
        for request in dropped:
            self._overtaken.pop(request.request_id, None)
        return dropped

    def _take_offloaded(self) -> list[RequestState]:
        """Removes the offloaded requests from the queue, whose head they are."""
        offloaded = list(takewhile(lambda waiting: waiting.was_offloaded, self._waiting))
        for _ in offloaded:
            self._waiting.popleft()
        return offloaded

    def schedule(self) -> ScheduledBatch:
        """Plans one forward pass and allocates what it needs."""
        batch = ScheduledBatch()
        budget = _Budget(self.max_batch_tokens, self.max_requests_per_batch, self._cache_budget_pages)
        runnable = [request for request in self._active.values() if self._may_run(request)]
        decoding = [request for request in runnable if request.is_decoding]
        prefilling = [request for request in runnable if not request.is_decoding]
        for request in self.candidate_order(decoding, prefilling):
            if budget.is_spent:
                return batch
            if request.is_ending:
                continue
            if request.is_decoding:
                if not self._schedule_within_page(request, budget, batch):
                    self._schedule_active(request, budget, batch)
            elif not (decoding or batch) or self._above_margin:
                self._schedule_active(request, budget, batch)
        if not batch.stalled and not (self._admission_held and runnable):
            self._admit_waiting(budget, batch, may_exceed_margin=not decoding)
        return batch

    def _schedule_within_page(self, request: RequestState, budget: _Budget, batch: ScheduledBatch) -> bool:
        """Most decodes, at most steps: the one token goes into a page that the request owns, and does not fill it, so
        that the cache need not be asked or told. False, and nothing is done, for all others."""
        start = request.num_computed_tokens + request.num_flying_tokens
        place = start % self._cache.page_size
        if not 0 < place < self._cache.page_size - 1 or self._cache_budget_pages is not None:
            return False
        if len(request.token_ids) + request.num_awaited_tokens - start != 1:
            return False
        budget.query_tokens -= 1
        budget.requests -= 1
        batch.scheduled.append(ScheduledRequest(request, start, 1, 0, True))
        return True

    def _schedule_active(self, request: RequestState, budget: _Budget, batch: ScheduledBatch) -> None:
        start = request.num_planned_tokens
        kv_length = start + min(request.num_expected_tokens - start, budget.query_tokens_for(request))
        if not self._within_cache_budget(request, NO_MATCH, kv_length, budget):
            return
        if self._cache.allocate(request.request_id, kv_length):
            self._enter(request, start, kv_length, NO_MATCH, budget, batch)
        else:
            batch.stalled.append((request, self._cache.missing_blocks(request.request_id, kv_length)))

    def _admit(self, request: RequestState, match: PrefixMatch, budget: _Budget, batch: ScheduledBatch) -> bool:
        """Puts a waiting request's next tokens in the batch if budget and cache allow it; all or nothing."""
        start = max(request.num_computed_tokens, len(match.blocks) * self._cache.page_size)
        kv_length = start + min(len(request.token_ids) - start, budget.query_tokens_for(request))
        if not self._within_cache_budget(request, match, kv_length, budget) or not self._may_return(request, match):
            return False
        if not self._cache.admit(request.request_id, request.token_ids, kv_length, match):
            return False
        self._enter(request, start, kv_length, match, budget, batch)
        return True

    def _may_return(self, request: RequestState, match: PrefixMatch) -> bool:
        """An offloaded request comes back when all it had finds room: with less it would soon have to leave again."""
        if not (request.was_offloaded and self._active):
            return True
        return self._cache.has_room_for(request.request_id, len(request.token_ids), match)

    def _enter(
        self,
        request: RequestState,
        start: int,
        kv_length: int,
        match: PrefixMatch,
        budget: _Budget,
        batch: ScheduledBatch,
    ) -> None:
        self._cache.register(request.request_id, request.token_ids, kv_length)
        scored = _scored(request, start, kv_length)
        budget.spend(kv_length - start, len(scored), self._new_pages(request, kv_length, budget))
        num_matched = len(match.blocks) * self._cache.page_size
        samples = kv_length == request.num_expected_tokens
        batch.scheduled.append(ScheduledRequest(request, start, kv_length - start, num_matched, samples, scored))

    def _within_cache_budget(self, request: RequestState, match: PrefixMatch, kv_length: int, budget: _Budget) -> bool:
        """Whether the pages that the request would read, beside those read already, are within the budget."""
        if budget.cache_pages is None:
            return True
        missing = self._cache.missing_blocks(request.request_id, kv_length)
        owned = self._new_pages(request, kv_length, budget) if request.status is not RequestStatus.PENDING else set()
        num_pages = len(owned) + self._cache.num_pages(missing)
        if match.blocks:
            size = self._cache.allocators[0].group.pages_per_block
            num_pages -= sum(size for block in match.blocks if block in budget.read)
        return num_pages <= budget.cache_pages

    def _new_pages(self, request: RequestState, kv_length: int, budget: _Budget) -> set[int]:
        if budget.cache_pages is None:
            return set()
        return set(self._cache.pages_of(request.request_id, kv_length)) - budget.read

    def _admit_waiting(self, budget: _Budget, batch: ScheduledBatch, may_exceed_margin: bool) -> None:
        """Lets waiting requests in, in order; one that does not fit is skipped, a bounded number of times."""
        admitted: list[RequestState] = []
        passed_over: list[RequestState] = []
        num_skipped = 0
        for request in self._candidates_for_admission():
            if budget.is_spent or num_skipped == MAX_SKIPPED_PER_STEP or self._is_full(len(admitted)):
                break
            exempt = may_exceed_margin and not batch
            if not (exempt or self._above_margin):
                break
            match = self._match(request)
            if match.must_wait:  # for the prefill of a shared prefix, which is on its way
                passed_over.append(request)
            elif self._admit(request, match, budget, batch):
                admitted.append(request)
                self._count_overtaken(passed_over)
            elif request.was_offloaded or self._overtaken.get(request.request_id, 0) >= MAX_OVERTAKEN:
                break
            else:
                passed_over.append(request)
                num_skipped += 1
            if self._admission_held:
                break
        self._move_to_active(admitted)

    def _match(self, request: RequestState) -> PrefixMatch:
        """A prompt that is scored is computed as a whole, for the logits of all its tokens."""
        if request.computes_alone or request.first_unscored is not None:
            return NO_MATCH
        return self._cache.match(request.request_id, request.token_ids)

    def _candidates_for_admission(self) -> Iterator[RequestState]:
        candidates = filter(self._may_run, self._waiting)
        return islice(candidates, self.max_requests_per_batch + MAX_SKIPPED_PER_STEP)

    def _count_overtaken(self, passed_over: list[RequestState]) -> None:
        for request in passed_over:
            self._overtaken[request.request_id] = self._overtaken.get(request.request_id, 0) + 1

    def _move_to_active(self, admitted: list[RequestState]) -> None:
        """`admitted`, in the order of the queue, leave it; who stood between them stays at its head."""
        stay: list[RequestState] = []
        for request in admitted:
            while self._waiting[0] is not request:
                stay.append(self._waiting.popleft())
            self._waiting.popleft()
            self._overtaken.pop(request.request_id, None)
            self._active[request.request_id] = request
        self._waiting.extendleft(reversed(stay))
        self._keep_order()

    def _keep_order(self) -> None:
        """Active requests are by arrival: who was overtaken or offloaded is older than some of those before it."""
        order = list(self._active)
        if order != sorted(order):
            self._active = dict(sorted(self._active.items()))


def _scored(request: RequestState, start: int, kv_length: int) -> range:
    """See ScheduledRequest. The last token of a prompt tells of no other of it."""
    first = request.first_unscored
    if first is None:
        return range(0)
    return range(max(start, first), max(start, first, min(kv_length, request.num_prompt_tokens - 1)))


class FIFOScheduler(Scheduler):
    """Decodes first, then prompts begun, then waiting requests."""

    @staticmethod
    def candidate_order(decoding: list[RequestState], prefilling: list[RequestState]) -> list[RequestState]:
        return decoding + prefilling


class PrefillFirstScheduler(Scheduler):
    """Prompts begun are finished first, then decodes, then waiting requests: less is left half done in the cache."""

    @staticmethod
    def candidate_order(decoding: list[RequestState], prefilling: list[RequestState]) -> list[RequestState]:
        return prefilling + decoding


SCHEDULERS: dict[str, type[Scheduler]] = {"fifo": FIFOScheduler, "prefill_first": PrefillFirstScheduler}
