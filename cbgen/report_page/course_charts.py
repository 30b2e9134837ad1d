"""What the charts of the engine's time are drawn from."""

from itertools import pairwise
from typing import Any

import numpy as np

from cbgen.engine.step_log import PHASES
from cbgen.report_page.runs import Course, Run, generating_span

BATCH = ("requests", "active", "waiting")
# A limit so many times above everything else would leave no room for it.
FAR_LIMIT = 2.5
EVENTS = ("offloads", "soft_resets", "recomputed_tokens")
DIGITS = 5


def common_setting(runs: list[Run], name: str) -> int | None:
    """An option of the engine, a number, if all runs that tell of it had the same."""
    values = {value for run in runs if isinstance(value := (run["engine"] or {}).get(name), int) and value > 0}
    return values.pop() if len(values) == 1 else None


def runs_overlap(runs: list[Run]) -> bool:
    """Whether runs made steps at the same time, as those of shards do."""
    spans = sorted(span for run in runs if (span := generating_span(run)))
    return any(after[0] < before[1] for before, after in pairwise(spans))


def course_charts(course: Course, runs: list[Run]) -> dict[str, Any]:
    """For the page: {"edges": [C + 1], and of each chart {series: [C]}}; null where there was no step.

    batch has most, the limit of requests in a step, and limit, the same where the chart shows it.
    """
    steps, widths_s = course.sums["steps"], course.widths_s
    most = None if runs_overlap(runs) else common_setting(runs, "max_requests_per_batch")
    num_blocks = common_setting(runs, "num_blocks")
    owned, initialized = course.means["owned_share"], course.means["initialized_share"]
    free = 1.0 - owned - initialized
    blocks = num_blocks or 100
    return {
        "edges": [round(float(edge), 4) for edge in course.edges],
        "batch": {name: listed(course.means[name]) for name in BATCH} | {"most": most, "limit": _shown(most, course)},
        "rates": {
            "output": listed(course.sums["output_tokens"] / widths_s),
            "prompt": listed(course.sums["computed_prompt_tokens"] / widths_s),
            "cached": listed(course.sums["prefix_hit_tokens"] / widths_s),
        },
        "cache": {
            "owned": listed(owned * blocks),
            "initialized": listed(initialized * blocks),
            "free": listed(np.maximum(free, 0.0) * blocks),
            "blocks": num_blocks,
        },
        "steps": {name: listed(_per_step(course.sums[name] * 1000, steps)) for name in PHASES},
        "events": {name: listed(course.sums[name]) for name in EVENTS if course.sums[name].sum() > 0},
    }


def phase_totals(course: Course) -> list[tuple[str, float, float]]:
    """Of each phase its name, seconds, and share of all of them."""
    seconds = {name: float(course.sums[name].sum()) for name in PHASES}
    total_s = sum(seconds.values())
    return [(name, each, each / total_s if total_s else 0.0) for name, each in seconds.items()]


def listed(values: np.ndarray) -> list[float | int | None]:
    """Few digits, since there are many; None for what is no number."""
    return [None if not np.isfinite(value) else _short(value) for value in values.tolist()]


def _shown(limit: int | None, course: Course) -> int | None:
    peak = max((float(np.nanmax(course.means[name], initial=0.0)) for name in BATCH), default=0.0)
    return limit if limit is not None and limit <= FAR_LIMIT * peak else None


def _short(value: float) -> float | int:
    short = float(f"{value:.{DIGITS - 1}g}")
    return int(short) if short == int(short) else short


def _per_step(values: np.ndarray, steps: np.ndarray) -> np.ndarray:
    return np.divide(values, steps, out=np.full_like(steps, np.nan), where=steps > 1e-9)
