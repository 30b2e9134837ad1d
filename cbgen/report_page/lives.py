"""The lives of requests in the order of their arrival: a bar for each, or, of many, seen from afar."""

from typing import Any

import numpy as np

from cbgen.report_page.active_time import ActiveTime, active_time
from cbgen.report_page.row_table import RowTable, chunks

STATES = ("queue", "prefill", "decode")
MAX_BARS = 300
NUM_CLOSE = 80
MAX_GROUPS, MAX_COLUMNS = 150, 300
# A share is written as one of these.
DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def lives(table: RowTable, order: np.ndarray, time: ActiveTime) -> dict[str, Any] | None:
    """For the page: {"bars": ...} of few requests, {"cells": ..., "close": ...} of many; None without any.

    bars: see `_bars`. cells: see `_cells`. close: see `_close_up`.
    """
    if not len(order):
        return None
    if len(order) <= MAX_BARS:
        return {"bars": _bars(table, order, time)}
    return {"cells": _cells(table, order, time), "close": _close_up(table, order)}


def bounds(rows: np.ndarray, time: ActiveTime) -> np.ndarray:
    """float64 [4, N]: positions between which a request waits, reads its prompt, and generates.

    A request that failed may not have come to the later ones: what it spent until its end counts as the state it was
    in.
    """
    arrival, end = rows["arrival"], rows["arrival"] + rows["latency"]
    queued = np.where(np.isnan(rows["queue"]), end, arrival + rows["queue"])
    prefilled = np.where(np.isnan(rows["prefill"]), end, queued + rows["prefill"])
    moments = np.stack([arrival, np.minimum(queued, end), np.minimum(prefilled, end), end])
    return np.stack([time.position(np.maximum(each, arrival)) for each in moments])


def _bars(table: RowTable, order: np.ndarray, time: ActiveTime) -> list[list[float]]:
    """For each [row number from 0, position of its arrival, of the end of its queueing, of its first token, of its end,
    failed]; positions in seconds of work."""
    rows = table.rows[order]
    positions = np.round(bounds(rows, time), 4).T.tolist()
    failed = (rows["failure"] > 0).astype(int).tolist()
    return [[int(row["place"]), *at, bad] for row, at, bad in zip(rows, positions, failed, strict=True)]


def _close_up(table: RowTable, order: np.ndarray) -> dict[str, Any]:
    """Consecutive requests out of the middle, as bars with a time of their own. first: how many arrived before."""
    first = (len(order) - NUM_CLOSE) // 2
    chosen = order[first : first + NUM_CLOSE]
    time = active_time((), table, chosen)
    return {"first": first, "bars": _bars(table, chosen, time), **time.as_json()}


def _cells(table: RowTable, order: np.ndarray, time: ActiveTime) -> dict[str, Any]:
    """edges: of the columns. groups: requests before each group of consecutive ones, and all of them. rows: for each
    group its first column that is not empty, and from there the digits of STATES of each column: shares in 63rds."""
    edges = time.grid(MAX_COLUMNS)
    groups = np.linspace(0, len(order), MAX_GROUPS + 1).astype(np.int64)
    shares = state_seconds(table, order, time, edges, groups)
    shares /= np.diff(groups)[None, :, None] * np.diff(edges)
    levels = np.clip(np.rint(shares * 63), 0, 63).astype(int)
    return {
        "edges": [round(float(edge), 4) for edge in edges],
        "groups": groups.tolist(),
        "rows": [_encoded(levels[:, group]) for group in range(MAX_GROUPS)],
    }


def state_seconds(
    table: RowTable, order: np.ndarray, time: ActiveTime, edges: np.ndarray, groups: np.ndarray
) -> np.ndarray:
    """float64 [3, G, C]: seconds that the requests of a group spent in a state within a column, exactly.

    The time that a request is in a state before an edge e is (e - start)+ - (e - end)+, and the sum of (e - x)+ over
    many x is e times their number less their sum: so it takes counts and sums by column, and no loop over columns.
    """
    num_columns, num_groups = len(edges) - 1, len(groups) - 1
    counts = np.zeros((4, num_groups * (num_columns + 1)))
    sums = np.zeros_like(counts)
    first = 0
    for chunk in chunks(order):
        group = np.searchsorted(groups, np.arange(first, first + len(chunk)), side="right") - 1
        for number, positions in enumerate(bounds(table.rows[chunk], time)):
            column = np.clip(np.searchsorted(edges, positions, side="left"), 0, num_columns)
            cell = group * (num_columns + 1) + column
            counts[number] += np.bincount(cell, minlength=counts.shape[1])
            sums[number] += np.bincount(cell, weights=positions, minlength=counts.shape[1])
        first += len(chunk)
    shape = (4, num_groups, num_columns + 1)
    passed = edges * np.cumsum(counts.reshape(shape), axis=2) - np.cumsum(sums.reshape(shape), axis=2)
    before = passed[:-1] - passed[1:]
    return np.maximum(np.diff(before, axis=2), 0.0)


def _encoded(levels: np.ndarray) -> list[Any]:
    """levels: int [3, C]."""
    used = np.flatnonzero(levels.any(axis=0))
    if not used.size:
        return [0, ""]
    first, last = int(used[0]), int(used[-1])
    return [first, "".join(DIGITS[level] for level in levels[:, first : last + 1].T.ravel())]
