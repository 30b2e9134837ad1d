"""Rows worth a look: the slowest ones, and those that failed, by their reasons."""

from dataclasses import dataclass

import numpy as np

from cbgen.report_page.row_table import RowTable
from cbgen.report_page.texts import RowText, read_texts
from cbgen.status import Situation

NUM_SLOWEST = 10
MAX_EXAMPLES, MAX_EXAMPLES_OF_ONE = 50, 8


@dataclass(frozen=True)
class SlowRow:
    """Times in seconds; shares, from 0 to 1, of the slowest row's latency."""

    text: RowText
    latency_s: float
    times_s: tuple[float, float, float]
    shares: tuple[float, float, float]
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class FailureGroup:
    """Failed rows of one reason, with the first few of them."""

    reason: str
    count: int
    share: float
    examples: list[RowText]


def row_lists(situation: Situation, table: RowTable) -> tuple[list[SlowRow], list[FailureGroup]]:
    """Raises as `row_tables` does."""
    slow, groups = slowest(table), failure_examples(table)
    wanted = [*slow, *(row for rows in groups.values() for row in rows)]
    places = {row: int(table.rows["place"][row]) for row in wanted}
    texts = read_texts(situation, list(places.values()))
    counts = np.bincount(table.rows["failure"], minlength=len(table.failures))
    num_failed = int(counts[1:].sum())
    failed = [
        FailureGroup(
            table.failures[number],
            int(counts[number]),
            float(counts[number] / num_failed),
            [texts[places[row]] for row in rows],
        )
        for number, rows in groups.items()
    ]
    return [_slow_row(table, row, texts[places[row]], slow[0]) for row in slow], failed


def slowest(table: RowTable) -> list[int]:
    """From the slowest down, of all rows that finished without an error."""
    latency = np.where(table.is_failed | np.isnan(table.rows["latency"]), np.float32(-1), table.rows["latency"])
    count = min(NUM_SLOWEST, len(latency))
    if not count:
        return []
    found = np.argpartition(latency, len(latency) - count)[len(latency) - count :]
    found = found[np.argsort(-latency[found], kind="stable")]
    return [int(row) for row in found if latency[row] >= 0]


def failure_examples(table: RowTable) -> dict[int, list[int]]:
    """By kind of failure the first rows of it, the commonest kind first; all lists together are not too many."""
    failed = np.flatnonzero(table.is_failed)
    kinds = table.rows["failure"][failed]
    counts = np.bincount(kinds, minlength=len(table.failures))
    ordered = [int(kind) for kind in np.argsort(-counts, kind="stable") if counts[kind]][:MAX_EXAMPLES]
    each = max(1, min(MAX_EXAMPLES_OF_ONE, MAX_EXAMPLES // max(1, len(ordered))))
    return {kind: failed[kinds == kind][:each].tolist() for kind in ordered}


def _slow_row(table: RowTable, row: int, text: RowText, slowest_row: int) -> SlowRow:
    told = table.rows[row]
    times_s = tuple(float(np.nan_to_num(told[name])) for name in ("queue", "prefill", "decode"))
    longest_s = max(float(table.rows["latency"][slowest_row]), 1e-9)
    return SlowRow(
        text,
        float(told["latency"]),
        times_s,  # type: ignore[arg-type]
        tuple(min(1.0, each / longest_s) for each in times_s),  # type: ignore[arg-type]
        int(told["prompt_tokens"]),
        int(told["completion_tokens"]),
    )
