"""A short real run over some of a job's rows, whose passes are timed one by one.

short prompts   [many rows] [half] [quarter] ... [1]     what a pass costs by how many rows it has
whole prompts   [chunk][chunk][chunk] [rows] [half] ...   what prompts cost, and what long contexts add
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from cbgen.cache.paged_cache import PagedCache
from cbgen.engine.build import Engine
from cbgen.engine.requests import RequestState, RequestStatus
from cbgen.engine.sampling_params import SamplingParams
from cbgen.engine.scheduler import ScheduledBatch
from cbgen.engine.sources import ListSource
from cbgen.errors import ModelError
from cbgen.ordering import WaitingRequest, unpack_ids
from cbgen.plan.costs import CostModel, fit, size_of

SHORT_PROMPT = 16
STEPS_EACH = 3
# Tokens of whole prompts that are computed, at most: some ten seconds of a small model on two cores.
WHOLE_PROMPT_TOKENS = 8192
MOST_TOKENS = 128
DEADLINE_S = 40.0
WARM_UP_STEPS = 2


class _Watched:
    """Notes what is in each pass that an engine lays out."""

    def __init__(self, lay_out: Callable[[ScheduledBatch, PagedCache], Any]):
        self._lay_out = lay_out
        self.size = np.zeros(0)

    def lay_out(self, batch: ScheduledBatch, cache: PagedCache) -> Any:
        """In the place of Passes.lay_out."""
        inputs = self._lay_out(batch, cache)
        self.size = size_of(batch, cache)
        return inputs


class Calibration:
    """Runs an engine that has nothing to do, and leaves it like that; what it computes is thrown away."""

    def __init__(self, engine: Engine):
        self._manager = engine.manager
        self._most_requests = engine.config.max_requests_per_batch
        self._sizes: list[np.ndarray] = []
        self._seconds: list[float] = []
        self._num_requests = 0
        self._deadline_s = 0.0

    def measure(self, rows: list[WaitingRequest]) -> CostModel:
        """rows: of the job, as it would hand them to the engine, none too large for its cache. Raises ModelError for
        passes that fail."""
        self._deadline_s = time.perf_counter() + DEADLINE_S
        passes: Any = self._manager.passes
        plain = passes.lay_out
        watched = _Watched(plain)
        passes.lay_out = watched.lay_out
        try:
            with passes.watched(records=True):
                self._run_all(rows, watched)
        finally:
            passes.lay_out = plain
        return fit(self._sizes, self._seconds)

    def _run_all(self, rows: list[WaitingRequest], watched: _Watched) -> None:
        spread = rows[:: max(1, len(rows) // self._most_requests)][: self._most_requests]
        for _ in range(WARM_UP_STEPS):
            self._run(spread[:2], SHORT_PROMPT, watched)
        self._sizes.clear()
        self._seconds.clear()
        self._run(_repeated(spread, self._most_requests), SHORT_PROMPT, watched)
        self._run(_within(spread, WHOLE_PROMPT_TOKENS), None, watched)

    def _run(self, rows: Iterable[WaitingRequest], prompt_tokens: int | None, watched: _Watched) -> None:
        """Prompts are computed, then fewer and fewer rows decode, those with the longest prompts ending first."""
        source = ListSource([self._request(row, prompt_tokens) for row in rows])
        manager = self._manager
        manager.pull(source)
        manager.scheduler.limit_active(None)  # nobody is held back for an even end
        while self._has_prompts and not self._is_late:
            self._step(watched)
        while manager.scheduler.has_work and not self._is_late:
            for _ in range(STEPS_EACH):
                if manager.scheduler.has_work:
                    self._step(watched)
            leaving = sorted(manager.scheduler.unfinished, key=lambda request: -len(request.token_ids))
            self._cancel(leaving[: (len(leaving) + 1) // 2])
        self._cancel(list(manager.scheduler.unfinished))

    @property
    def _has_prompts(self) -> bool:
        """Whether somebody has not begun to decode."""
        scheduler = self._manager.scheduler
        return scheduler.has_work and any(
            request.status is not RequestStatus.DECODING for request in scheduler.unfinished
        )

    @property
    def _is_late(self) -> bool:
        return time.perf_counter() > self._deadline_s

    def _cancel(self, requests: list[RequestState]) -> None:
        for request in requests:
            self._manager.cancel(request)

    def _step(self, watched: _Watched) -> None:
        start_s = time.perf_counter()
        for request in self._manager.step():
            if request.error is not None:
                raise ModelError(f"a row that is used for calibration failed: {request.error}")
        self._seconds.append(time.perf_counter() - start_s)
        self._sizes.append(watched.size)

    def _request(self, row: WaitingRequest, prompt_tokens: int | None) -> RequestState:
        self._num_requests += 1
        ids = unpack_ids(row.packed_ids)[:prompt_tokens]
        most_tokens = min(max(MOST_TOKENS, row.max_tokens), self._manager.max_model_len - len(ids))
        if not self._manager.cache.fits_empty(len(ids) + most_tokens - 1):
            most_tokens = row.max_tokens
        return RequestState(self._num_requests, ids, never_ending(row.members[0][0], most_tokens))


def never_ending(params: SamplingParams, max_tokens: int) -> SamplingParams:
    """Tokens are chosen as the row asks, until there are so many of them."""
    ends = {"json_schema": None, "regex": None, "choice": (), "grammar": None, "stop": (), "stop_token_ids": ()}
    return params.updated(**ends, min_tokens=0, ignore_eos=True, max_tokens=max_tokens)


def _repeated(rows: list[WaitingRequest], count: int) -> list[WaitingRequest]:
    return [rows[place % len(rows)] for place in range(count)]


def _within(rows: list[WaitingRequest], num_tokens: int) -> list[WaitingRequest]:
    """The first rows whose prompts come to so many tokens at most, one at least."""
    taken: list[WaitingRequest] = []
    left = num_tokens
    for row in rows:
        left -= row.num_tokens
        if taken and left < 0:
            break
        taken.append(row)
    return taken
