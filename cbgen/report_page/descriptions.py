"""The line under each chart: what it shows, in words and with the figures that matter."""

from typing import Any

import numpy as np

from cbgen.report_page.active_time import ActiveTime
from cbgen.report_page.lives import MAX_BARS, MAX_GROUPS
from cbgen.report_page.row_table import RowTable, chunks
from cbgen.report_page.runs import Course
from cbgen.report_page.wording import count, duration, percent, plural, rate


def describe_lives(table: RowTable, order: np.ndarray, time: ActiveTime) -> str:
    """Empty without a request."""
    if not len(order):
        return ""
    spent = _mean_times(table, order)
    each = "A bar for each request" if len(order) <= MAX_BARS else f"{MAX_GROUPS} groups of requests, from afar"
    text = (
        f"{each}, in order of arrival: {plural(len(order), 'request')} in {duration(time.length_s)}. On average one "
        f"waits {duration(spent[0])}, reads its prompt for {duration(spent[1])} and generates for {duration(spent[2])}."
    )
    without = len(table.rows) - len(order)
    if without:
        text += f" {plural(without, 'row is', 'rows are')} not here: no request was made of them, or no times are told."
    return text


def describe_close(close: dict[str, Any], num_requests: int) -> str:
    """See lives."""
    first, number = close["first"], len(close["bars"])
    return f"Requests {count(first + 1)} to {count(first + number)} of {count(num_requests)}, each a bar."


def _mean_times(table: RowTable, order: np.ndarray) -> list[float]:
    sums, counts = np.zeros(3), np.zeros(3)
    for chunk in chunks(order):
        rows = table.rows[chunk]
        for number, name in enumerate(("queue", "prefill", "decode")):
            sums[number] += np.nansum(rows[name], dtype=np.float64)
            counts[number] += np.count_nonzero(~np.isnan(rows[name]))
    return (sums / np.maximum(counts, 1)).tolist()


def describe_course(course: Course, drawn: dict[str, Any]) -> dict[str, str]:
    """By the name of the chart."""
    sums, steps = course.sums, float(course.sums["steps"].sum())
    total_s, blocks, limit = float(course.widths_s.sum()), drawn["cache"]["blocks"], drawn["batch"]["most"]
    active_s = max(total_s, 1e-9)
    owned, largest = course.means["owned_share"], course.means["requests"]
    most = "" if limit is None else f" of at most {count(limit)}"
    of_blocks = "" if blocks is None else f" of {count(blocks)} blocks"
    step_ms = 1000 * sum(float(sums[name].sum()) for name in drawn["steps"]) / max(steps, 1e-9)
    cached = float(sums["prefix_hit_tokens"].sum())
    return {
        "batch": f"Requests in a step{most}; {rate(_mean(sums['requests'], steps))} in the mean step, "
        f"{rate(_peak(largest))} at the busiest.",
        "output": f"Generated; {rate(float(sums['output_tokens'].sum()) / active_s)} on average, "
        f"{rate(_peak(sums['output_tokens'] / course.widths_s))} at the fastest.",
        "prompt": f"Computed; {rate(float(sums['computed_prompt_tokens'].sum()) / active_s)} on average. "
        f"{count(cached)} tokens more were in the cache already.",
        "cache": f"Shares{of_blocks}: owned by requests, kept for reuse, free. At most {percent(_peak(owned))} owned.",
        "steps": f"{plural(round(steps), 'step')}; the mean one takes {duration(step_ms / 1000)}.",
    }


def _mean(values: np.ndarray, steps: float) -> float:
    return float(values.sum()) / max(steps, 1e-9)


def _peak(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.max()) if known.size else 0.0
