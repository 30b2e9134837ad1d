"""The cards at the top of the page, each a figure with what it is of."""

from dataclasses import dataclass

import numpy as np

from cbgen.report_page.active_time import ActiveTime
from cbgen.report_page.histograms import percentile
from cbgen.report_page.row_table import RowTable
from cbgen.report_page.runs import Run, Totals
from cbgen.report_page.wording import count, duration, percent, plural, rate, size


@dataclass(frozen=True)
class Card:
    """is_alarm: whether it should catch the eye."""

    label: str
    value: str
    note: str = ""
    is_alarm: bool = False


def cards(table: RowTable, time: ActiveTime, runs: list[Run]) -> list[Card]:
    """Of an older output, which tells of no run, rates are worked out of its rows."""
    totals = Totals.of(runs)
    if totals.figures.get("elapsed_s"):
        speed = _speed(totals, runs)
    elif time.length_s > 0:
        speed = _speed_of_rows(table, time)
    else:
        speed = []
    return [_rows_card(table), *speed, *_latency_cards(table), *_engine_cards(totals)]


def _rows_card(table: RowTable) -> Card:
    failed = int(np.count_nonzero(table.is_failed))
    ok = len(table.rows) - failed
    note = f"{count(ok)} ok, {count(failed)} failed" if failed else "none failed"
    return Card("rows", count(len(table.rows)), note if len(table.rows) else "", bool(failed))


def _speed(totals: Totals, runs: list[Run]) -> list[Card]:
    figures = totals.figures
    output, prompt = figures.get("output_tokens", 0), figures.get("prompt_tokens", 0)
    loading = f"and {duration(totals.load_s)} loading" if totals.load_s else ""
    return [
        Card("output tokens/s", rate(totals.per_second(output)), f"{count(output)} tokens"),
        Card("total tokens/s", rate(totals.per_second(output + prompt)), f"{count(prompt)} of prompts"),
        Card("requests/s", rate(totals.per_second(totals.requests)), f"{count(totals.requests)} requests"),
        Card("generating", duration(totals.generating_s), loading if len(runs) == 1 else _in_runs(runs)),
    ]


def _in_runs(runs: list[Run]) -> str:
    return f"in {plural(len(runs), 'run')}"


def _speed_of_rows(table: RowTable, time: ActiveTime) -> list[Card]:
    ok = ~table.is_failed
    output = float(table.rows["completion_tokens"][ok].sum(dtype=np.int64))
    prompt = float(table.rows["prompt_tokens"][ok].sum(dtype=np.int64))
    per_second = 1.0 / time.length_s
    return [
        Card("output tokens/s", rate(output * per_second), f"{count(output)} tokens"),
        Card("total tokens/s", rate((output + prompt) * per_second), f"{count(prompt)} of prompts"),
        Card("rows/s", rate(int(np.count_nonzero(ok)) * per_second), "by the times of rows"),
        Card("at work", duration(time.length_s), "first arrival to last finish"),
    ]


def _latency_cards(table: RowTable) -> list[Card]:
    times = ttft(table)
    times = times[~np.isnan(times)]
    if not times.size:
        return []
    times.sort()
    note = f"p99 {duration(percentile(times, 0.99))}"
    return [Card("time to first token", duration(percentile(times, 0.5)), f"median; {note}")]


def _engine_cards(totals: Totals) -> list[Card]:
    figures = totals.figures
    if not figures.get("elapsed_s"):
        return []
    hits, prompt = figures.get("prefix_hit_tokens", 0), figures.get("prompt_tokens", 0)
    moved = figures.get("offloads", 0) + figures.get("soft_resets", 0)
    again = figures.get("recomputed_tokens", 0)
    cards = [
        Card("mean batch", rate(totals.mean_batch), "requests in a step"),
        Card("from the cache", count(hits), f"prompt tokens, {percent(hits / prompt if prompt else 0.0)}"),
        Card("cache at its fullest", percent(figures.get("peak_cache_used_share")), "of all blocks owned"),
        Card("offloads", count(figures.get("offloads")), _resets(figures), bool(moved)),
    ]
    if again:
        cards.append(Card("computed again", count(again), "tokens, after offloads and resets", True))
    if figures.get("deduplicated"):
        cards.append(Card("deduplicated", count(figures["deduplicated"]), "rows took an equal one's result"))
    if figures.get("forward_failures"):
        cards.append(Card("failed passes", count(figures["forward_failures"]), "forward passes that raised", True))
    if figures.get("peak_memory_bytes"):
        cards.append(Card("peak memory", size(figures["peak_memory_bytes"]), "of the largest run"))
    return cards


def _resets(figures: dict[str, float]) -> str:
    resets, swaps = figures.get("soft_resets", 0), figures.get("swaps", 0)
    return f"{plural(resets, 'soft reset')}, {plural(swaps, 'swap')}"


def ttft(table: RowTable) -> np.ndarray:
    """float32 [N]: seconds from arrival to the first token, NaN without one."""
    return np.where(table.is_failed, np.float32("nan"), table.rows["queue"] + table.rows["prefill"])


def tpot_ms(table: RowTable) -> np.ndarray:
    """float32 [N]: milliseconds for each token after the first, NaN where there is none."""
    later = table.rows["completion_tokens"] - 1
    seconds = np.full(len(later), np.nan, np.float32)
    np.divide(table.rows["decode"], later, out=seconds, where=(later > 0) & ~table.is_failed, casting="unsafe")
    return seconds * np.float32(1000)
