"""The course of a run in fixed memory: what its steps did, added up over stretches of time that widen as it goes on."""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cbgen.cache.paged_cache import PagedCache
from cbgen.engine.metrics import EngineMetrics
from cbgen.engine.scheduler import ScheduledBatch, Scheduler

# What a step spends its time on, in order; "between" is the time since the step before, in which rows are handed over.
PHASES = ("between", "planning", "layout", "forward", "sampling", "applying")
# Of a step, added up over a stretch: divide by `steps` for the mean. Shares are of the cache, at the end of the step.
PER_STEP = ("requests", "active", "waiting", "query_tokens", "owned_share", "initialized_share")
# Counted by EngineMetrics: what a stretch adds to it.
COUNTS = (
    "computed_prompt_tokens",
    "output_tokens",
    "prefix_hit_tokens",
    "recomputed_tokens",
    "offloads",
    "soft_resets",
)
SERIES = ("steps", *PHASES, *PER_STEP, *COUNTS)

MAX_BINS = 1024
FIRST_BIN_S = 0.25


@dataclass
class StepClock:
    """Splits the time of a step: each lap goes to the phase it is named after, until the log takes them."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    _last_s: float | None = None

    def start(self) -> None:
        """A step begins; what was since the one before goes to "between"."""
        self.lap("between")

    def take(self) -> dict[str, float]:
        """The time of each phase since the last call."""
        taken, self.seconds = self.seconds, dict.fromkeys(PHASES, 0.0)
        return taken

    def lap(self, phase: str) -> float:
        """Ends the phase; returns the moment on the monotonic clock, in seconds."""
        now_s = time.perf_counter()
        if self._last_s is not None:
            self.seconds[phase] += now_s - self._last_s
        self._last_s = now_s
        return now_s


class StepLog:
    """Every step adds a row of SERIES to the bins over which it lasted, to each its share of the step.

    a step              [========]
    bins         | 0.25 s | 0.25 s | ...            | 0.25 s |        when all MAX_BINS are in use,
    pairs join   |     0.5 s       | ...            |                 two and two become one, twice as wide
    """

    def __init__(self) -> None:
        self.bin_s = FIRST_BIN_S
        self._sums = np.zeros((MAX_BINS, len(SERIES)))
        self._num_bins = 0
        self._started_s: float | None = None
        self._started_wall_s = 0.0
        self._counted = dict.fromkeys(COUNTS, 0)

    def add(
        self, batch: ScheduledBatch, clock: StepClock, metrics: EngineMetrics, scheduler: Scheduler, cache: PagedCache
    ) -> None:
        """To be called when what came of a pass has been applied."""
        now_s = time.perf_counter()
        phases = clock.take()
        own_s = sum(seconds for phase, seconds in phases.items() if phase != "between")
        if self._started_s is None:
            self._started_s, self._started_wall_s = now_s - own_s, time.time() - own_s
        counted = {name: getattr(metrics, name) for name in COUNTS}
        per_step = (
            len(batch.scheduled),
            scheduler.num_active,
            scheduler.num_waiting,
            batch.num_query_tokens,
            cache.used_share,
            cache.initialized_share,
        )
        added = [counted[name] - self._counted[name] for name in COUNTS]
        end_s = now_s - self._started_s
        self._spread(max(0.0, end_s - own_s), end_s, np.array((1, *phases.values(), *per_step, *added)))
        self._counted = counted

    def total(self, name: str) -> float:
        """One of SERIES over all steps."""
        return float(self._sums[: self._num_bins, SERIES.index(name)].sum())

    def mean(self, name: str) -> float:
        """One of PER_STEP, of the mean step; 0 when there was none."""
        steps = self.total("steps")
        return self.total(name) / steps if steps else 0.0

    def as_json(self) -> dict[str, Any] | None:
        """{"started": seconds since 1970, "bin_s": width of a bin, "series": {name: a value for each bin}}; None when
        there was no step."""
        if self._started_s is None:
            return None
        used = self._sums[: self._num_bins]
        series = {name: [_short(value) for value in used[:, place]] for place, name in enumerate(SERIES)}
        return {"started": round(self._started_wall_s, 3), "bin_s": self.bin_s, "series": series}

    def _spread(self, start_s: float, end_s: float, values: np.ndarray) -> None:
        """Adds values, float64 [len(SERIES)], to the bins between two moments since the first step began."""
        last = self._bin_of(end_s)  # first, since it may widen the bins
        first = self._bin_of(start_s)
        if first == last:
            self._sums[first] += values
            return
        edges = np.clip(np.arange(first, last + 2) * self.bin_s, start_s, end_s)
        self._sums[first : last + 1] += np.outer(np.diff(edges) / (end_s - start_s), values)

    def _bin_of(self, elapsed_s: float) -> int:
        while elapsed_s >= MAX_BINS * self.bin_s:
            pairs = self._sums[::2] + self._sums[1::2]
            self._sums[:] = 0.0
            self._sums[: len(pairs)] = pairs
            self._num_bins = (self._num_bins + 1) // 2
            self.bin_s *= 2
        number = int(elapsed_s / self.bin_s)
        self._num_bins = max(self._num_bins, number + 1)
        return number


def _short(value: float) -> float | int:
    """Few digits, since there are many."""
    return int(value) if value == int(value) else round(value, 4)
