"""The continuous-batching loop: pull, plan, lay out, run, sample, apply, relieve. It alone changes requests."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from cbgen.cache.paged_cache import PagedCache
from cbgen.cache.swap_pool import SwapPool
from cbgen.engine.endings import Endings
from cbgen.engine.failures import named_failures
from cbgen.engine.input_outputs import InputBuffers
from cbgen.engine.logprobs import TokenLogprobs, token_logprobs
from cbgen.engine.metrics import EngineMetrics
from cbgen.engine.model_runner import ModelRunner
from cbgen.engine.offloading import Offloader, choose_victims
from cbgen.engine.recovery import Recovery
from cbgen.engine.refusal import refusal
from cbgen.engine.requests import FinishReason, RequestState, heir_of
from cbgen.engine.sampler import NOT_FINITE, Sampled, Sampler
from cbgen.engine.sampling_params import SamplingParams
from cbgen.engine.scheduler import ScheduledBatch, ScheduledRequest, Scheduler
from cbgen.engine.step_log import StepClock, StepLog
from cbgen.engine.tail import BalancedTail
from cbgen.errors import ForwardPassError

_SCORED_ID = -1  # of no request that comes from outside


@dataclass(frozen=True)
class _Computed:
    """What came of a forward pass: who gets a token, which, the log-probabilities of tokens of prompts, and pairs of a
    parent and a fork that began."""

    sampling: list[RequestState]
    sampled: Sampled
    scored: list[tuple[RequestState, TokenLogprobs]]
    forks: list[tuple[RequestState, RequestState]]


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


class Manager:
    """Steps requests through the engine until each has finished.

    sampler: chooses tokens. endings: tells when a request has ended. max_model_len: the context. max_waiting: how many
    requests wait in the queue; more are pulled when there are fewer. balance_tail: once all are known, as many are
    active as keep the batch evenly filled until the longest is done. notify: is told in one line what the engine does
    about a forward pass that failed.
    """

    def __init__(
        self,
        cache: PagedCache,
        scheduler: Scheduler,
        buffers: InputBuffers,
        runner: ModelRunner,
        swap_pool: SwapPool | None,
        sampler: Sampler,
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
        self._recovery = Recovery(scheduler, self.offloader, runner, self.metrics, notify)
        self._buffers = buffers
        self._runner = runner
        self._sampler = sampler
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
        """One forward pass. Returns the requests that finished in it. Raises DeviceFaultError."""
        self._clock.start()
        batch = self._plan()
        start_s = self._clock.lap("planning")
        try:
            computed = self._compute(batch)
        except ForwardPassError as error:
            return self._recovery.after(batch, error)
        self.metrics.count_step(start_s, self._clock.lap("sampling"), len(batch.scheduled), self.cache.used_share)
        finished = self._apply(batch, computed)
        self._relieve(batch)
        self._clock.lap("applying")
        self.log.add(batch, self._clock, self.metrics, self.scheduler, self.cache)
        return finished

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

    def score(self, token_ids: list[int]) -> Iterator[torch.Tensor]:
        """Logits [T, vocab] after each token of a text, in pieces of T tokens as long as a forward pass may be.

        For measuring: nothing else may be active, and nothing of the text stays in the cache. Raises ValueError when it
        does not fit there.
        """
        assert not self.scheduler.has_work, "a text is scored when nothing is generated"
        request = RequestState(_SCORED_ID, list(token_ids), SamplingParams(1))
        if not self.cache.admit(_SCORED_ID, token_ids, len(token_ids)):
            raise ValueError(f"a text of {len(token_ids)} tokens does not fit in the cache")
        step = self._buffers.max_batch_tokens
        try:
            for start in range(0, len(token_ids), step):
                length = min(step, len(token_ids) - start)
                batch = ScheduledBatch([ScheduledRequest(request, start, length, 0, samples=True)])
                inputs = self._buffers.lay_out(batch, self.cache)
                yield self._runner.forward(replace(inputs, logits_indices=torch.arange(length)))
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
        """Schedules, and offloads and schedules again until a batch fits; brings in whom it admitted."""
        self.scheduler.confine(self._recovery.suspects.turn)
        batch = self.scheduler.schedule()
        while not batch:
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

    def _compute(self, batch: ScheduledBatch) -> "_Computed":
        """The forward pass: who gets a token from it, and which; and what it says of tokens of prompts."""
        inputs = self._buffers.lay_out(batch, self.cache)
        self._clock.lap("layout")
        logits = self._runner.forward(inputs)
        self._clock.lap("forward")
        scored, forks, start = [], [], 0
        sampling: list[RequestState] = []
        rows: list[int] = []
        copies: list[tuple[int, int]] = []
        for entry in batch.scheduled:
            end = start + len(entry.scored)
            if entry.scored:
                scored.append((entry.request, _score(logits[start:end], entry)))
            if entry.samples:
                started = self._fork(entry.request, copies)
                forks += [(entry.request, fork) for fork in started]
                sampling += [entry.request, *started]
                rows += [end] * (1 + len(started))
            start = end + entry.samples
        self._runner.copy_pages(copies)
        sampled = self._sampler.sample(logits if rows == list(range(len(logits))) else logits[rows], sampling)
        self._recovery.suspects.acquit(batch)
        return _Computed(sampling, sampled, scored, forks)

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

    def _apply(self, batch: ScheduledBatch, computed: "_Computed") -> list[RequestState]:
        """Advances every request of the batch, appends what was sampled and finishes who is done."""
        now_s = time.perf_counter()
        for entry in batch.scheduled:
            self.metrics.count_computed(entry.request, entry.query_length)
            entry.request.advance(entry.query_length)
        for request, scores in computed.scored:
            assert request.prompt_logprobs is not None
            request.prompt_logprobs.extend(scores)
        for parent, fork in computed.forks:  # complete by now; a pass that failed would have both scored again
            fork.prompt_logprobs = parent.prompt_logprobs
        finished = []
        for row, request in enumerate(computed.sampling):
            if self._apply_token(request, row, computed.sampled, now_s):
                self.scheduler.remove(request)
                self.cache.release(request.request_id)
                self.metrics.count_finished(request)
                finished.append(request)
        return finished

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


@named_failures()
@torch.inference_mode()
def _score(logits: torch.Tensor, entry: ScheduledRequest) -> TokenLogprobs:
    """Of the tokens of a prompt that follow those of `entry.scored`, whose logits are [N, vocab]."""
    buffer = entry.request.prompt_logprobs
    assert buffer is not None
    following = entry.request.token_ids[entry.scored.start + 1 : entry.scored.stop + 1]
    return token_logprobs(logits, following, buffer.num_top)
