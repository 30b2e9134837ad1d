"""The continuous-batching loop: pull, plan, lay out, run, sample, apply, relieve. It alone changes requests."""

import time
from collections.abc import Iterator
from typing import Protocol

from cbgen.cache.paged_cache import PagedCache
from cbgen.engine.input_outputs import InputBuffers
from cbgen.engine.metrics import EngineMetrics
from cbgen.engine.model_runner import ModelRunner
from cbgen.engine.offloading import choose_victims
from cbgen.engine.requests import FinishReason, RequestState, RequestStatus
from cbgen.engine.sampler import sample
from cbgen.engine.scheduler import FIFOScheduler, ScheduledBatch


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

    eos_token_ids: the tokens that end a generation, unless the request ignores them. max_model_len: the context.
    max_waiting: how many requests wait in the queue; more are pulled when there are fewer.
    """

    def __init__(
        self,
        cache: PagedCache,
        scheduler: FIFOScheduler,
        buffers: InputBuffers,
        runner: ModelRunner,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        max_waiting: int,
    ):
        self.metrics = EngineMetrics()
        self.cache = cache
        self.scheduler = scheduler
        self._buffers = buffers
        self._runner = runner
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._max_waiting = max_waiting

    def run(self, source: RequestSource) -> Iterator[RequestState]:
        """Yields every request of the source once it has finished, in the order of finishing."""
        while self.scheduler.has_work or not source.exhausted:
            yield from self.pull(source)
            if self.scheduler.has_work:
                yield from self.step()

    def step(self) -> list[RequestState]:
        """One forward pass. Returns the requests that finished in it."""
        batch = self._plan()
        start_s = time.perf_counter()
        logits = self._runner.forward(self._buffers.lay_out(batch, self.cache))
        token_ids = sample(logits, [entry.request for entry in batch.scheduled if entry.samples])
        self._count(batch, start_s)
        finished = self._apply(batch, token_ids)
        self._relieve(batch)
        return finished

    def pull(self, source: RequestSource) -> list[RequestState]:
        """Fills the queue; returns the requests that were refused, finished as errors."""
        room = self._max_waiting - self.scheduler.num_waiting
        taken = source.take(room, wait=not self.scheduler.has_work) if room > 0 else []
        refused = []
        for request in taken:
            request.arrive()
            reason = self._refusal(request)
            if reason is None:
                self.scheduler.add(request)
            else:
                request.finish(FinishReason.ERROR, time.perf_counter(), reason)
                refused.append(request)
        return refused

    def _refusal(self, request: RequestState) -> str | None:
        """Why a request could never be served, or None: it must fit the model's context and an empty cache."""
        prompt, most = request.num_prompt_tokens, request.num_prompt_tokens + request.params.max_tokens
        if prompt >= self._max_model_len:
            return (
                f"the prompt has {prompt} tokens and leaves no room for output in the context of {self._max_model_len}"
            )
        if most > self._max_model_len:
            return f"prompt ({prompt} tokens) and max_tokens together exceed the context of {self._max_model_len}"
        if not self.cache.fits_empty(most - 1):  # the KV of the last token is never needed
            capacity = self.cache.num_blocks * self.cache.page_size
            return (
                f"the prompt ({prompt} tokens) and max_tokens ({request.params.max_tokens}) need more than the whole "
                f"cache, which holds {capacity} tokens"
            )
        return None

    def _plan(self) -> ScheduledBatch:
        """Schedules, and offloads and schedules again until a batch fits."""
        batch = self.scheduler.schedule()
        while not batch:
            if not self._offload(choose_victims(batch, self.scheduler.active, self.cache)):
                raise AssertionError("no request can be scheduled and none can leave: the scheduler is at fault")
            batch = self.scheduler.schedule()
        now_s = time.perf_counter()
        for entry in batch.scheduled:
            if entry.request.status is RequestStatus.PENDING:
                entry.request.schedule_first(now_s)
        return batch

    def _apply(self, batch: ScheduledBatch, token_ids: list[int | None]) -> list[RequestState]:
        """Advances every request of the batch, appends sampled tokens (None: not finite) and finishes who is done."""
        now_s = time.perf_counter()
        finished = []
        sampled = iter(token_ids)
        for entry in batch.scheduled:
            samples = entry.samples
            self.metrics.count_computed(entry.request, entry.query_length)
            entry.request.advance(entry.query_length)
            if samples and self._apply_token(entry.request, next(sampled), now_s):
                self.scheduler.remove(entry.request)
                self.cache.release(entry.request.request_id)
                self.metrics.count_finished(entry.request)
                finished.append(entry.request)
        return finished

    def _apply_token(self, request: RequestState, token_id: int | None, now_s: float) -> bool:
        """Appends one token; True when the request has finished with it."""
        if token_id is None:
            request.finish(FinishReason.ERROR, now_s, "the model's logits are not finite (NaN or infinity)")
            return True
        request.append_token(token_id, now_s)
        self.metrics.output_tokens += 1
        if token_id in self._eos_token_ids and not request.params.ignore_eos:
            request.finish(FinishReason.STOP, now_s)
        elif request.num_generated_tokens >= request.params.max_tokens:
            request.finish(FinishReason.LENGTH, now_s)
        return request.is_finished

    def _relieve(self, batch: ScheduledBatch) -> None:
        """Offloads stalled requests whose demand what finished in this step did not cover."""
        if batch.stalled:
            self._offload(choose_victims(batch, self.scheduler.active, self.cache))

    def _offload(self, victims: list[RequestState]) -> bool:
        """Soft-resets the victims: their generated tokens join the prompt and they queue again. False without any."""
        for request in victims:
            self.cache.release(request.request_id)
            request.soft_reset()
        if victims:
            self.scheduler.put_back(victims)
            self.metrics.offloads += len(victims)
            self.metrics.soft_resets += len(victims)
        return bool(victims)

    def _count(self, batch: ScheduledBatch, start_s: float) -> None:
        self.metrics.count_step(start_s, time.perf_counter(), len(batch.scheduled), self.cache.used_share)
