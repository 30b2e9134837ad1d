"""The time in which a job was at work: moments in a row, without the hours or days between its runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cbgen.report_page.row_table import RowTable, chunks

# A shorter pause is no break. Of more stretches than so many, those with the shortest pauses between them become one.
MIN_GAP_S = 1.0
MAX_SEGMENTS = 16


@dataclass(frozen=True)
class ActiveTime:
    """starts, ends: float64 [S], seconds since 1970, of each stretch of work, in order and apart from each other."""

    starts: np.ndarray
    ends: np.ndarray

    @property
    def length_s(self) -> float:
        return float((self.ends - self.starts).sum())

    @property
    def first_of(self) -> np.ndarray:
        """float64 [S]: where each stretch begins, in seconds of work."""
        lengths = self.ends - self.starts
        return np.cumsum(lengths) - lengths

    def as_json(self) -> dict[str, list[float]]:
        return {
            "starts": [round(start, 4) for start in self.starts.tolist()],
            "ends": [round(end, 4) for end in self.ends.tolist()],
        }

    def position(self, moments: np.ndarray) -> np.ndarray:
        """float64 [N]: seconds of work before each moment; one in a gap is at its beginning."""
        if not len(self.starts):
            return np.zeros(len(moments))
        place = np.maximum(0, np.searchsorted(self.starts, moments, side="right") - 1)
        return self.first_of[place] + np.clip(moments, self.starts[place], self.ends[place]) - self.starts[place]

    def grid(self, max_columns: int, min_width_s: float = 0.0) -> np.ndarray:
        """float64 [C + 1]: edges of columns of nearly the same width, in seconds of work; no column spans a break.

        min_width_s: columns are not narrower, but for short stretches. There are max_columns at most, or one of each
        stretch.
        """
        width_s = max(self.length_s / max(1, max_columns - len(self.starts)), min_width_s, 1e-6)
        edges = [0.0]
        for first, length in zip(self.first_of, self.ends - self.starts, strict=True):
            edges += list(first + np.linspace(0.0, length, max(1, round(length / width_s)) + 1)[1:])
        return np.array(edges)


def active_time(spans: Iterable[tuple[float, float]], table: RowTable, order: np.ndarray) -> ActiveTime:
    """Of what runs tell of themselves, and of all requests. order: see RowTable.by_arrival."""
    merged = _merge(sorted([*spans, *_spans_of_rows(table, order)]), MIN_GAP_S)
    bounds = np.array(merged, dtype=np.float64).reshape(-1, 2)
    starts, ends = bounds[:, 0], bounds[:, 1]
    gaps = starts[1:] - ends[:-1]
    longest = np.sort(np.argsort(-gaps, kind="stable")[: MAX_SEGMENTS - 1])
    return ActiveTime(np.concatenate([starts[:1], starts[longest + 1]]), np.concatenate([ends[longest], ends[-1:]]))


def union_s(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in which there is at least one."""
    return sum(end - start for start, end in _merge(sorted(spans), 0.0))


def _merge(spans: Sequence[tuple[float, float]], bridged_s: float) -> list[tuple[float, float]]:
    """Of spans in order: those that overlap, or are not further apart, become one."""
    merged: list[tuple[float, float]] = []
    for start, end in spans:
        if merged and start - merged[-1][1] <= bridged_s:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _spans_of_rows(table: RowTable, order: np.ndarray) -> list[tuple[float, float]]:
    """Where there was a request, without the short gaps."""
    merged: list[tuple[float, float]] = []
    for chunk in chunks(order):
        arrival = table.rows["arrival"][chunk]
        ended = np.maximum.accumulate(arrival + table.rows["latency"][chunk])
        if merged:
            ended = np.maximum(ended, merged[-1][1])
        before = np.concatenate([[merged[-1][1] if merged else arrival[0]], ended[:-1]])
        breaks = np.flatnonzero(arrival - before > MIN_GAP_S)
        firsts = np.concatenate([[0], breaks])
        lasts = np.concatenate([breaks - 1, [len(chunk) - 1]])
        # A chunk that begins within what came before has its first span joined to it; an empty first span is none.
        spans = [(float(arrival[a]), float(ended[b])) for a, b in zip(firsts, lasts, strict=True) if b >= a]
        merged = _merge([*merged, *spans], MIN_GAP_S)
    return merged
