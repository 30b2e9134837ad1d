"""How the figures of rows are spread: counts in bins that fit their range, median and 99th percentile."""

from typing import Any

import numpy as np

MAX_BINS = 28
# From here on the largest value is so far above the median that bins of one width would hide where most of them are.
SKEWED = 6.0
# At the least: bins of whole numbers, and the range of others as a share of the largest.
MIN_BINS, NARROW = 7, 0.05


def histogram(values: np.ndarray) -> dict[str, Any] | None:
    """Of float32 [N] or int32 [N], NaN left out; None when nothing is left. Sorts the values in place.

    edges: of the bins, the last one included. counts. n, mean, median, p99, min, max.
    """
    values = values[~np.isnan(values)] if values.dtype.kind == "f" else values
    if not values.size:
        return None
    values.sort()
    edges = bin_edges(values)
    # A value on an edge is of the bin that it begins; the largest of the last one.
    below = np.searchsorted(values, edges[1:-1].astype(values.dtype), side="left")
    counts = np.diff([0, *below, values.size])
    return {
        "edges": [_short(edge) for edge in edges],
        "counts": counts.tolist(),
        "n": int(values.size),
        "mean": _short(values.mean(dtype=np.float64)),
        "median": _short(percentile(values, 0.5)),
        "p99": _short(percentile(values, 0.99)),
        "min": _short(values[0]),
        "max": _short(values[-1]),
    }


def bin_edges(values: np.ndarray) -> np.ndarray:
    """float64 [B + 1], of sorted values; of whole numbers, whole. Widths grow with the value where it is skewed."""
    low, high = float(values[0]), float(values[-1])
    middle = float(values[values.size // 2])
    whole = values.dtype.kind != "f"
    if high <= SKEWED * max(middle, 1e-9) or high <= 0:
        return _even_edges(low, high, whole)
    # Values near zero, beside which all others are far away, are one bin.
    smallest = max(low, middle / 1000, 1.0 if whole else 1e-6)
    edges = np.geomspace(smallest, high + 1 if whole else high, MAX_BINS)
    edges = np.unique(np.rint(edges)) if whole else edges
    return np.concatenate([[low], edges]) if low < edges[0] else edges


def percentile(ordered: np.ndarray, share: float) -> float:
    """The smallest value that so large a share does not exceed; NaN of nothing."""
    if not ordered.size:
        return float("nan")
    return float(ordered[min(ordered.size - 1, max(0, int(np.ceil(share * ordered.size)) - 1))])


def _even_edges(low: float, high: float, whole: bool) -> np.ndarray:
    """Over a range that is not so narrow that it would show differences which are none."""
    missing = (MIN_BINS - (high - low + 1) if whole else NARROW * abs(high) + 1e-6 - (high - low)) / 2
    if missing > 0:
        low, high = max(0.0, low - missing), high + missing
    if not whole:
        return np.linspace(low, high, MAX_BINS + 1)
    low, high = np.floor(low), np.floor(high)
    width = -(-int(high - low + 1) // MAX_BINS)
    return np.arange(low, high + 1 + width, width)


def _short(value: float) -> float:
    """Six digits are enough to look at."""
    return float(f"{float(value):.6g}")
