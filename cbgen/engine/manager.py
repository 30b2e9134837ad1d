"""The continuous-batching loop: pull, plan, lay out, run, sample, apply, relieve. It alone changes requests."""

import time
from collections import deque
from collections.abc import Callable, Iterator

import torch

from cbgen.cache.paged_cache import PagedCache
from cbgen.cache.swap_pool import SwapPool
from cbgen.engine.endings import Endings
from cbgen.engine.flight import Flight, scores_in
from cbgen.engine.logprobs import TokenLogprobs
from cbgen.engine.metrics import EngineMetrics
from cbgen.engine.offloading import Offloader, choose_victims
from cbgen.engine.passes import Passes
from cbgen.engine.recovery import Recovery
from cbgen.engine.refusal import refusal
from cbgen.engine.requests import FinishReason, RequestState, heir_of
from cbgen.engine.sampler import NOT_FINITE, Sampled
from cbgen.engine.sampling_params import SamplingParams
from cbgen.engine.scheduler import ScheduledBatch, ScheduledRequest, Scheduler
from cbgen.engine.sources import RequestSource
from cbgen.engine.step_log import StepClock, StepLog
from cbgen.engine.tail import BalancedTail
from cbgen.errors import ForwardPassError

_SCORED_ID = -1  # of no request that comes from outside


class Manager:
    """Steps requests through the engine until each has finished.

    depth 1    plan N │ launch N │ collect N │ plan N+1 │ launch N+1 │ collect N+1
    depth 2    plan N │ launch N │ plan N+1 │ launch N+1 │ collect N │ plan N+2 │ launch N+2 │ collect N+1

    At depth 2 a pass is planned as if everybody in the one before went on; ends by length are foreseen. Who ended there
    by what was sampled gets nothing from the pass launched meanwhile, and has given up its blocks already.

    passes: launches forward passes and chooses tokens. endings: tells when a request has ended. max_model_len: the
    context. max_waiting: how many requests wait in the queue; more are pulled when there are fewer. balance_tail: once
    all are known, as many are active as keep the batch evenly filled until the longest is done. notify: is told in one
    line what the engine does about a forward pass that failed.
    """

    def __init__(
        self,
        cache: PagedCache,
        scheduler: Scheduler,
        passes: Passes,
        swap_pool: SwapPool | None,
        endings: Endings,
        max_model_len: int,
        max_waiting: int,
        balance_tail: bool = True,
        notify: Callable[[str], None] = lambda line: None,
    ):
        self.metrics = EngineMetrics()
        self.log = StepLog()
        self._clock = StepClock()
        self.cache = cache
        self.scheduler = scheduler
        self.offloader = Offloader(cache, swap_pool, self.metrics)
        self.passes = passes
        self._in_flight: deque[Flight] = deque()
        self._recovery = Recovery(scheduler, self.offloader, passes, self.metrics, notify)
        self._endings = endings
        self.max_model_len = max_model_len
        self._max_waiting = max_waiting
        self._tail = BalancedTail(scheduler) if balance_tail else None

    def run(self, source: RequestSource) -> Iterator[RequestState]:
        """Yields every request of the source once it has finished, in the order of finishing."""
        while self.scheduler.has_work or not source.exhausted:
            yield from self.pull(source)
            if self.scheduler.has_work:
                yield from self.step()

    def step(self) -> list[RequestState]:
        """Launches a forward pass and collects the oldest. Returns who finished. Raises DeviceFaultError."""
        self._clock.start()
        finished = self._collect_down_to(0) if self._must_know_all else []
        batch = self._plan()
        start_s = self._clock.lap("planning")
        finished += self._launch(batch, start_s) if batch else []
        finished += self._collect_down_to(self.passes.depth - 1 if batch else 0)
        self._relieve(batch)
        self._let_go()
        return finished

    @property
    def _must_know_all(self) -> bool:
        """Whether the next pass can only be planned when what was launched is known: the host chooses the tokens, or it
        is being found out who makes passes fail."""
        return bool(self._recovery.suspects) or any(flight.needs_host for flight in self._in_flight)

    def stop_admitting(self) -> None:
        """Forgets all requests that were never active; those that have begun go on, with their forks.

        The source must be exhausted from now on: what it still gave would be admitted.
        """
        self._tail = None
        self.scheduler.limit_active(None)
        dropped = self.scheduler.drop_new()
        self._recovery.suspects.drop(dropped)
        for request in dropped:
            self.cache.release(request.request_id)  # which may know it as one that waits
        self._let_go()

    def score(self, token_ids: list[int]) -> Iterator[torch.Tensor]:
        """Logits [T, vocab] after each token of a text, in pieces of T tokens as long as a forward pass may be.

        For measuring: nothing else may be active, and nothing of the text stays in the cache. Raises ValueError when it
        does not fit there.
        """
        assert not self.scheduler.has_work, "a text is scored when nothing is generated"
        request = RequestState(_SCORED_ID, list(token_ids), SamplingParams(1))
        if not self.cache.admit(_SCORED_ID, token_ids, len(token_ids)):
            raise ValueError(f"a text of {len(token_ids)} tokens does not fit in the cache")
        step = self.passes.max_batch_tokens
        try:
            for start in range(0, len(token_ids), step):
                length = min(step, len(token_ids) - start)
                batch = ScheduledBatch([ScheduledRequest(request, start, length, 0, samples=True)])
                yield self.passes.logits_of(batch, self.cache)
        finally:
            self.cache.release(_SCORED_ID)

    def pull(self, source: RequestSource) -> list[RequestState]:
        """Fills the queue; returns the requests that were refused, finished as errors."""
        room = self._max_waiting - self.scheduler.num_waiting
        taken = source.take(room, wait=not self.scheduler.has_work) if room > 0 else []
        refused: list[RequestState] = []
        for request in taken:
            members = [request, *request.forks]
            for member in members:
                member.arrive()
            most_tokens = max(member.params.max_tokens for member in members)
            reason = refusal(request.num_prompt_tokens, most_tokens, self.max_model_len, self.cache)
            if reason is None:
                self.scheduler.add(request)
            else:
                refused += self._fail(request, reason)
        if self._tail is not None and source.exhausted:
            self._tail.balance()
        return refused

    def cancel(self, request: RequestState) -> None:
        """Ends a request that was pulled, unless it has finished; it holds nothing then. Its forks go on without it."""
        if request.is_finished:
            return
        heirs, request.forks = request.forks, []
        leader = next((other for other in self.scheduler.unfinished if request in other.forks), None)
        if leader is not None:
            leader.forks.remove(request)
        else:
            self.scheduler.remove(request)
        self.cache.release(request.request_id)
        self.offloader.discard(request)
        self._recovery.suspects.drop([request])
        request.finish(FinishReason.ERROR, time.perf_counter(), "cancelled")
        self._queue_forks(heirs)
        self._let_go()

    def check_integrity(self) -> None:
        """Asserts the laws of the cache and of the queues; tests call it after every step."""
        self.cache.check_integrity({request.request_id for request in self.scheduler.waiting})
        self.offloader.check_integrity(self.scheduler.waiting)
        holders = {request.request_id for request in self.scheduler.active}
        assert self.cache.holders == holders, "a request that is not active holds blocks, or the other way round"

    def _fail(self, request: RequestState, reason: str) -> list[RequestState]:
        """Finishes a request and the forks that wait for it as errors, and returns them."""
        members = [request, *request.forks]
        request.forks = []
        for member in members:
            member.finish(FinishReason.ERROR, time.perf_counter(), reason)
        return members

    def _plan(self) -> ScheduledBatch:
        """Schedules, and offloads and schedules again until a batch fits; brings in whom it admitted. Empty when all
        depends on what is in flight."""
        self.scheduler.confine(self._recovery.suspects.turn)
        batch = self.scheduler.schedule()
        while not batch and not self._in_flight and self.scheduler.has_work:
            self._make_room(batch)
            batch = self.scheduler.schedule()
        admitted = batch.admitted
        self.offloader.restore(admitted)
        now_s = time.perf_counter()
        for entry in admitted:
            self.metrics.count_taken_over(entry.request, entry.num_matched)
            entry.request.admit(entry.start, now_s, entry.num_matched)
        return batch

    def _make_room(self, batch: ScheduledBatch) -> None:
        """Offloads so that somebody can be scheduled."""
        if self._offload_outsiders():
            return
        active = self.scheduler.active
        victims = choose_victims(batch, active, self.cache)
        if not victims:
            # The last one leaves to come back alone: its blocks lie in more chunks than they need.
            assert len(active) == 1, "no request can be scheduled and none can leave: the scheduler is at fault"
            victims = active
        self._offload(victims)

    def _launch(self, batch: ScheduledBatch, start_s: float) -> list[RequestState]:
        """Starts the forward pass, the forks that begin with it, and the choice of tokens. Returns who ended with an
        earlier pass or with this one, if it failed."""
        try:
            inputs = self.passes.lay_out(batch, self.cache)
            self._clock.lap("layout")
            launched = self.passes.launch(inputs)
            sampling, rows, forks = self._sampling(batch)
            self.passes.choose(launched, rows, sampling)
        except ForwardPassError as error:
            return self._recover_launch(batch, error)
        for entry in batch.scheduled:
            entry.request.launch(entry.query_length, int(entry.samples))
        for _, fork in forks:
            fork.launch(0, 1)
        departures = [entry.request.num_departures for entry in batch.scheduled]
        sampling_departures = [request.num_departures for request in sampling]
        flight = Flight(batch, launched, start_s, sampling, forks, departures, sampling_departures)
        self._in_flight.append(flight)
        self._clock.lap("forward")
        return []

    def _sampling(
        self, batch: ScheduledBatch
    ) -> tuple[list[RequestState], list[int], list[tuple[RequestState, RequestState]]]:
        """Who gets a token from the pass, the row of its logits for each, and the forks that begin, with parents."""
        sampling: list[RequestState] = []
        rows: list[int] = []
        forks: list[tuple[RequestState, RequestState]] = []
        copies: list[tuple[int, int]] = []
        row = 0
        for entry in batch.scheduled:
            row += len(entry.scored)
            if entry.samples:
                started = self._fork(entry.request, copies) if entry.request.forks else []
                forks += [(entry.request, fork) for fork in started]
                sampling += [entry.request, *started]
                rows += [row] * (1 + len(started))
                row += 1
        if copies:
            self.passes.copy_pages(copies)
        return sampling, rows, forks

    def _collect_down_to(self, num_in_flight: int) -> list[RequestState]:
        """Collects the oldest passes until so many are left. Returns who finished."""
        finished: list[RequestState] = []
        while len(self._in_flight) > num_in_flight:
            finished += self._collect(self._in_flight.popleft())
        return finished

    def _collect(self, flight: Flight) -> list[RequestState]:
        """Waits for a pass and applies what came of it."""
        try:
            logits, sampled = self.passes.read(flight.launched)
            scored = scores_in(logits, flight.batch)
        except ForwardPassError as error:
            return self._recovery.after(ScheduledBatch(flight.present()), error)
        end_s = self._clock.lap("sampling")
        batch = flight.batch
        if self._recovery.suspects:
            self._recovery.suspects.acquit(ScheduledBatch(flight.present()))
        self.metrics.count_step(flight.start_s, end_s, len(batch.scheduled), self.cache.used_share)
        finished = self._apply(flight, sampled, scored)
        self._clock.lap("applying")
        self.log.add(batch, self._clock, self.metrics, self.scheduler, self.cache)
        return finished

    def _let_go(self) -> None:
        """Nothing stays in flight when there is nobody left for whom it could be."""
        if not self.scheduler.has_work:
            self._collect_down_to(0)

    def _recover_launch(self, batch: ScheduledBatch, error: ForwardPassError) -> list[RequestState]:
        """After a pass that could not be launched. What was before it is collected first. Returns who ended."""
        finished = self._collect_down_to(0)
        active = set(self.scheduler.active_ids)
        present = [entry for entry in batch.scheduled if entry.request.request_id in active]
        return finished + self._recovery.after(ScheduledBatch(present), error)

    def _fork(self, parent: RequestState, copies: list[tuple[int, int]]) -> list[RequestState]:
        """Starts the further samples of a prompt that was just computed, as far as there is room; the rest queue.

        copies: the pages to copy are added here.
        """
        forks, parent.forks = parent.forks, []
        started = 0
        while started < len(forks) and self.scheduler.may_start_fork:
            fork = forks[started]
            pairs = self.cache.fork(parent.request_id, fork.request_id, fork.num_prompt_tokens)
            if pairs is None:
                break
            copies += pairs
            self.metrics.count_taken_over(fork, fork.num_prompt_tokens)
            fork.start_as_fork(parent)
            self.scheduler.activate(fork)
            started += 1
        self._queue_forks(forks[started:])
        return forks[:started]

    def _queue_forks(self, forks: list[RequestState]) -> None:
        """The first of them computes the prompt once more, or takes over what the cache has of it, for the others."""
        heir = heir_of(forks)
        if heir is not None:
            self.scheduler.add_first(heir)

    def _apply(
        self, flight: Flight, sampled: Sampled, scored: list[tuple[RequestState, TokenLogprobs]]
    ) -> list[RequestState]:
        """Advances every request of the pass, appends what was sampled and finishes who is done."""
        now_s = time.perf_counter()
        for entry in flight.present():
            if not entry.request.is_new_ground:
                self.metrics.count_computed(entry.request, entry.query_length)
            entry.request.land(entry.query_length, int(entry.samples))
        for request, scores in flight.scored(scored) if scored else ():
            assert request.prompt_logprobs is not None
            request.prompt_logprobs.extend(scores)
        for parent, fork in flight.present_forks():
            fork.land(0, 1)
            fork.prompt_logprobs = parent.prompt_logprobs  # complete by now
        finished = []
        for row, request in flight.receivers():
            if self._apply_token(request, row, sampled, now_s):
                self._release(request)
                finished.append(request)
        return finished

    def _release(self, request: RequestState) -> None:
        """A request has finished: what it held is free, and what it computed may be taken over."""
        self.scheduler.remove(request)
        if request.error is None:
            self.cache.register(request.request_id, request.token_ids, request.num_computed_tokens)
        self.cache.release(request.request_id)
        self.metrics.count_finished(request)

    def _apply_token(self, request: RequestState, row: int, sampled: Sampled, now_s: float) -> bool:
        """Appends one token, if there is one; True when the request has finished with it."""
        token_id = sampled.token_ids[row]
        if token_id is None and row in sampled.errors:
            request.finish(FinishReason.ERROR, now_s, sampled.errors[row])
            return True
        if token_id is None:
            return self._without_token(request, now_s)
        request.append_token(token_id, now_s)
        if request.logprobs is not None:
            request.logprobs.extend(sampled.logprobs[row])
        self.metrics.output_tokens += 1
        ending = self._endings.of(request)
        if ending is not None:
            request.finish(ending.reason, now_s, None, ending.stop_reason, ending.num_hidden_tokens)
        return request.is_finished

    def _without_token(self, request: RequestState, now_s: float) -> bool:
        """The model's logits were not finite; True when that was the end."""
        if request.num_matched_tokens:
            # A NaN reaches earlier tokens of the pass it turns up in (0 x NaN in a masked product), and their
            # blocks are shared: this one is tried again all by itself.
            self.offloader.start_over(request)
            request.computes_alone = True
            self.scheduler.requeue([request])
            return False
        self.cache.distrust(request.request_id)
        request.finish(FinishReason.ERROR, now_s, NOT_FINITE)
        return True

    def _relieve(self, batch: ScheduledBatch) -> None:
        """Offloads stalled requests whose demand what finished in this step did not cover."""
        if not (batch and batch.stalled):
            return
        active = set(self.scheduler.active_ids)
        batch.stalled = [pair for pair in batch.stalled if pair[0].request_id in active]
        if batch.stalled and not self._offload_outsiders():
            self._offload(choose_victims(batch, self.scheduler.active, self.cache))

    def _offload(self, victims: list[RequestState]) -> None:
        self.offloader.offload(victims)
        if victims:
            self.scheduler.put_back(victims)

    def _offload_outsiders(self) -> bool:
        """While some are tried by themselves, those who only wait for that leave first; False: there are none."""
        outsiders = self.scheduler.outsiders
        if outsiders:
            self.offloader.offload(outsiders)
            self.scheduler.requeue(outsiders)
        return bool(outsiders)
