"""What the runs of a job tell of themselves: figures that add up, and how their time passed."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from cbgen.data.runs import Run, checked_runs, read_runs
from cbgen.engine.step_log import PER_STEP, SERIES
from cbgen.report_page.active_time import ActiveTime, union_s
from cbgen.status import Situation

SHARES = ("owned_share", "initialized_share")
# Figures of which the largest counts; all others of a summary add up, but for means and rates.
_LARGEST = ("peak_cache_used_share", "peak_memory_bytes")
# Seconds since 1970 that no clock tells.
LATEST_S = 1e11


def runs_of(situation: Situation) -> list[Run]:
    """Oldest first; empty for an output of a version that did not record them."""
    footer = situation.footer
    return read_runs(situation.folder.path) if footer is None else checked_runs(footer.get("runs"))


def generating_span(run: Run) -> tuple[float, float] | None:
    """Seconds since 1970 from the first step to the last; None for a run that made no step, or did not tell."""
    timeline, length_s = run["timeline"], run["summary"].get("elapsed_s", 0.0)
    started = run["started"] + run["load_s"]
    if timeline is not None:
        started, bins_s = timeline["started"], timeline["bin_s"] * len(timeline["series"]["steps"])
        length_s = min(bins_s, length_s) if length_s > 0 else bins_s  # the last bin goes on after the last step
    return (started, started + length_s) if length_s > 0 and 0 <= started < LATEST_S - length_s else None


@dataclass(frozen=True)
class Totals:
    """Figures of all runs together, by their names in a summary.

    generating_s: seconds in which at least one made steps; shards may overlap. load_s: of all runs one after another.
    """

    generating_s: float
    load_s: float
    requests: float
    mean_batch: float
    figures: dict[str, float]

    @classmethod
    def of(cls, runs: list[Run]) -> "Totals":
        summaries = [run["summary"] for run in runs]
        names = {name for summary in summaries for name in summary}
        figures = {name: sum(summary.get(name, 0) for summary in summaries) for name in names}
        figures |= {name: max(summary.get(name, 0) for summary in summaries) for name in names & set(_LARGEST)}
        requests = sum(s.get("requests_per_second", 0.0) * s.get("elapsed_s", 0.0) for s in summaries)
        generating_s = union_s(span for run in runs if (span := generating_span(run)))
        return cls(generating_s, sum(run["load_s"] for run in runs), requests, _mean_batch(runs), figures)

    def per_second(self, amount: float) -> float:
        return amount / self.generating_s if self.generating_s else 0.0


def _mean_batch(runs: list[Run]) -> float:
    """Requests in the mean step of all runs. One that does not tell of its steps counts as if it had made as many in
    a second as the others."""
    requests = steps = told_s = 0.0
    untold: list[dict[str, float]] = []
    for run in runs:
        series = run["timeline"]["series"] if run["timeline"] is not None else {"steps": []}
        if sum(series["steps"]) > 0:
            requests, steps = requests + sum(series.get("requests", ())), steps + sum(series["steps"])
            told_s += run["summary"].get("elapsed_s", 0.0)
        else:
            untold.append(run["summary"])
    steps_per_s = steps / told_s if told_s > 0 else 1.0
    for summary in untold:
        made = summary.get("elapsed_s", 0.0) * steps_per_s
        requests, steps = requests + summary.get("mean_batch_requests", 0.0) * made, steps + made
    return requests / steps if steps > 0 else 0.0


@dataclass(frozen=True)
class Course:
    """How time passed, in columns of a grid; of runs at the same time together.

    edges: float64 [C + 1], seconds of work. sums: for each of SERIES float64 [C]. means: for each of PER_STEP float64
    [C], of the mean step: requests and tokens of runs at the same time add up, shares are averaged; NaN where there was
    no step.
    """

    edges: np.ndarray
    sums: dict[str, np.ndarray]
    means: dict[str, np.ndarray]

    @property
    def widths_s(self) -> np.ndarray:
        return np.diff(self.edges)


def course_of(runs: list[Run], time: ActiveTime, max_columns: int) -> Course | None:
    """None when no run tells of its steps."""
    spans = [(run["timeline"], generating_span(run)) for run in runs if run["timeline"] is not None]
    timelines = [(timeline, span) for timeline, span in spans if span is not None]
    if not timelines:
        return None
    edges = time.grid(max_columns, max(timeline["bin_s"] for timeline, _ in timelines))
    sums = {name: np.zeros(len(edges) - 1) for name in SERIES}
    means = {name: np.zeros(len(edges) - 1) for name in PER_STEP}
    at_work = np.zeros(len(edges) - 1)
    for timeline, span in timelines:
        spread = _spread(timeline, span, time, edges)
        steps = spread["steps"]
        at_work += steps > 1e-9
        for name in SERIES:
            sums[name] += spread[name]
        for name in PER_STEP:
            means[name] += np.divide(spread[name], steps, out=np.zeros_like(steps), where=steps > 1e-9)
    for name in PER_STEP:
        means[name] = np.where(at_work > 0, means[name], np.nan)
    for name in SHARES:
        means[name] = means[name] / np.maximum(at_work, 1)
    return Course(edges, sums, means)


def _spread(
    timeline: dict[str, Any], span: tuple[float, float], time: ActiveTime, edges: np.ndarray
) -> dict[str, np.ndarray]:
    """The bins of one run dealt out to the columns that they overlap, so that every sum stays what it is."""
    bins = len(timeline["series"]["steps"])
    moments = np.minimum(timeline["started"] + timeline["bin_s"] * np.arange(bins + 1), span[1])
    positions = time.position(moments)
    dealt = {}
    for name in SERIES:
        values = np.asarray(timeline["series"].get(name, np.zeros(bins)), dtype=np.float64)
        so_far = np.concatenate([[0.0], np.cumsum(values)])
        dealt[name] = np.diff(_interpolated(edges, positions, so_far))
    return dealt


def _interpolated(edges: np.ndarray, positions: np.ndarray, so_far: np.ndarray) -> np.ndarray:
    """so_far at the edges. Where bins have no length, all of them counts at their end."""
    distinct = np.concatenate([positions[1:] > positions[:-1], [True]])
    return np.interp(edges, positions[distinct], so_far[distinct], left=0.0)
