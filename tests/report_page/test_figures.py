"""What the charts of a report are drawn from: sums stay exact, pauses are left out, the right values are marked."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_page.report_harness import STARTED, busy, failure, life, many_lives, run, write_finished

from cbgen.report_page.active_time import ActiveTime, active_time, union_s
from cbgen.report_page.course_charts import course_charts
from cbgen.report_page.descriptions import describe_course
from cbgen.report_page.histograms import histogram, percentile
from cbgen.report_page.lives import DIGITS, bounds, lives, state_seconds
from cbgen.report_page.row_table import ROW, RowTable, read_rows
from cbgen.report_page.runs import Run, Totals, course_of, generating_span
from cbgen.report_page.wording import count, duration, moment
from cbgen.status import look


def table_of(folder: Path, rows: list[dict[str, Any]]) -> RowTable:
    return read_rows(look(str(write_finished(folder / "out.parquet", rows))))


def time_of(*spans: tuple[float, float]) -> ActiveTime:
    starts, ends = np.array(spans).T
    return ActiveTime(starts, ends)


def spans_of(runs: Sequence[Run]) -> list[tuple[float, float]]:
    return [span for each in runs if (span := generating_span(each))]


def test_rows_become_numbers(tmp_path: Path) -> None:
    """Each column as it was; failures that differ by numbers alone are of one kind; small enough for millions."""
    rows = [life(1.0, 0.5, 0.25, 2.0), failure("has 30 tokens"), life(0.0), failure("has 31 tokens"), failure("empty")]
    table = table_of(tmp_path, rows)
    first = table.rows[0]
    assert [first[name] for name in ("queue", "prefill", "decode", "latency")] == [0.5, 0.25, 2.0, 2.75]
    assert first["arrival"] == STARTED + 1.0
    assert table.is_failed.tolist() == [False, True, False, True, True]
    assert table.failures == ["", "has 30 tokens", "empty"]
    assert table.rows["failure"].tolist() == [0, 1, 0, 1, 2]
    assert [table.reasons[code] for code in table.rows["reason"]] == ["stop", "error", "stop", "error", "error"]
    assert table.by_arrival().tolist() == [2, 0]
    assert ROW.itemsize <= 40


def test_far_more_kinds_of_failures_than_are_told_apart(tmp_path: Path) -> None:
    """Memory stays bounded, and every failed row is counted."""
    table = table_of(tmp_path, [failure(f"reason {'x' * number}") for number in range(400)])
    assert len(table.failures) == 202
    assert table.failures[-1] == "other reasons"
    assert np.bincount(table.rows["failure"])[-1] == 200


def test_time_leaves_out_pauses(tmp_path: Path) -> None:
    """A gap of more than a second without run or request is none of the time at work, however many there are."""
    rows = [life(0.0), life(2.0), life(5.0), life(90_000.0)]
    table = table_of(tmp_path, rows)
    time = active_time([(STARTED + 90_002.0, STARTED + 90_010.0)], table, table.by_arrival())
    assert (time.starts - STARTED).tolist() == [0.0, 90_000.0]
    assert (time.ends - STARTED).tolist() == pytest.approx([7.75, 90_010.0])
    moments = np.array([0.0, 7.75, 500.0, 90_000.0, 90_004.0]) + STARTED
    assert time.position(moments).tolist() == pytest.approx([0.0, 7.75, 7.75, 7.75, 11.75])
    scattered = table_of(tmp_path, [life(100.0 * number**2) for number in range(40)])
    many = active_time((), scattered, scattered.by_arrival())
    assert len(many.starts) == 16
    assert many.starts[0] == STARTED
    assert many.ends[-1] == pytest.approx(STARTED + 100.0 * 39**2 + 2.75)
    regular = table_of(tmp_path, [life(100.0 * number) for number in range(40)])
    alike = active_time((), regular, regular.by_arrival())
    assert len(alike.starts) == 16
    assert (alike.starts[1:] - alike.ends[:-1]).tolist() == pytest.approx([97.25] * 15)


def test_grid_never_spans_a_break() -> None:
    """Every break is an edge, and so are both ends; a short stretch has a column too."""
    time = time_of((0.0, 100.0), (200.0, 200.5), (300.0, 350.0))
    edges = time.grid(50)
    assert {0.0, 100.0, 100.5, 150.5} <= set(np.round(edges, 9).tolist())
    assert len(edges) <= 52
    assert (np.diff(edges) > 0).all()
    assert np.diff(time.grid(50, 20.0)).tolist() == pytest.approx([20.0] * 5 + [0.5] + [25.0] * 2)


def test_seconds_in_a_state_are_exact(tmp_path: Path) -> None:
    """By columns and groups they are what adding up each request's overlaps gives, and in all what the rows tell."""
    rows = many_lives(700) + many_lives(500, seed=1, start_s=5_000.0)
    table = table_of(tmp_path, rows)
    order = table.by_arrival()
    time = active_time((), table, order)
    edges, groups = time.grid(60), np.linspace(0, len(order), 41).astype(int)
    seconds = state_seconds(table, order, time, edges, groups)
    for state, name in enumerate(("queue", "prefill", "decode")):
        assert seconds[state].sum() == pytest.approx(sum(row[f"{name}_s"] for row in rows), rel=1e-6)
    positions = bounds(table.rows[order[groups[7] : groups[8]]], time)
    for state in range(3):
        start, end = positions[state][:, None], positions[state + 1][:, None]
        overlaps = np.clip(np.minimum(end, edges[1:]) - np.maximum(start, edges[:-1]), 0, None).sum(axis=0)
        assert seconds[state][7] == pytest.approx(overlaps, abs=1e-6)


def test_few_lives_are_bars_and_many_are_cells(tmp_path: Path) -> None:
    """Bars have the times themselves; cells hold shares, which a few characters tell, beside some lives from close."""
    table = table_of(tmp_path, [life(1.0), life(0.0), failure("none")])
    order = table.by_arrival()
    seen = lives(table, order, active_time((), table, order))
    assert seen == {"bars": [[1, 0.0, 0.5, 0.75, 2.75, 0], [0, 1.0, 1.5, 1.75, 3.75, 0]]}
    table = table_of(tmp_path, many_lives(1_000))
    order = table.by_arrival()
    time = active_time((), table, order)
    seen = lives(table, order, time)
    assert seen is not None
    cells, close = seen["cells"], seen["close"]
    assert cells["groups"][-1] == 1_000
    assert (close["first"], len(close["bars"])) == (460, 80)
    shares = state_seconds(table, order, time, np.array(cells["edges"]), np.array(cells["groups"]))
    shares /= np.diff(cells["groups"])[None, :, None] * np.diff(cells["edges"])
    for group, (first, text) in enumerate(cells["rows"]):
        told = np.array([DIGITS.index(digit) for digit in text]).reshape(-1, 3).T / 63
        assert told == pytest.approx(shares[:, group, first : first + told.shape[1]], abs=0.01)
    assert table_of(tmp_path, [failure("none")]).by_arrival().size == 0


def test_course_keeps_sums_and_adds_up_runs_at_the_same_time() -> None:
    """Two shards side by side and a run a day later: amounts add up exactly, batches add up, shares are averaged."""
    shard = run(0.0, 40, shard=0, **busy())
    other = run(2.0, 32, shard=1, **busy(owned_share=8.0, initialized_share=0.0, requests=20.0))
    later = run(86_400.0, 16, 0.5, **busy())
    runs = [shard, other, later]
    time = ActiveTime(np.array([0.0, 86_400.0]) + STARTED, np.array([10.0, 86_408.0]) + STARTED)
    course = course_of(runs, time, 30)
    assert course is not None
    for name in ("output_tokens", "steps", "forward", "prefix_hit_tokens"):
        told = sum(sum(each["timeline"]["series"][name]) for each in runs)
        assert course.sums[name].sum() == pytest.approx(told)
    alone, together, after = (int(np.searchsorted(course.edges, second)) for second in (0.5, 5.0, 12.0))
    assert course.means["requests"][[alone, together, after]].tolist() == pytest.approx([6.0, 8.0, 6.0])
    assert course.means["owned_share"][[alone, together, after]].tolist() == pytest.approx([0.4, 0.6, 0.4])
    drawn = course_charts(course, runs)
    assert drawn["rates"]["output"][together] == pytest.approx(400.0)
    assert drawn["rates"]["output"][after] == pytest.approx(100.0)
    assert drawn["batch"]["limit"] is None
    totals = Totals.of(runs)
    assert totals.generating_s == pytest.approx(18.0)
    assert totals.per_second(totals.figures["output_tokens"]) == pytest.approx((40 + 32 + 16) * 50 / 18.0)
    assert union_s(spans_of(runs)) == pytest.approx(18.0)


def test_runs_together() -> None:
    """Figures add up, loading too; the mean batch is of all steps, and not of runs that made few of them in long."""
    quick, slow = run(0.0, 16, steps=10.0, requests=60.0), run(60.0, 16, steps=1.0, requests=20.0)
    totals = Totals.of([quick, slow])
    assert totals.generating_s == pytest.approx(8.0)
    assert totals.load_s == pytest.approx(6.0)
    assert totals.requests == pytest.approx(20)
    assert totals.mean_batch == pytest.approx(80 / 11)
    untold = [each | {"timeline": None} for each in (quick, slow)]
    assert Totals.of([quick, untold[1]]).mean_batch == pytest.approx((6.0 + 20.0) / 2)
    assert Totals.of(untold).mean_batch == pytest.approx((6.0 + 20.0) / 2)
    assert Totals.of(untold).generating_s == pytest.approx(8.0)
    nothing = untold[0] | {"summary": {}}
    assert (Totals.of([nothing]).mean_batch, Totals.of([nothing]).generating_s) == (0.0, 0.0)


def test_a_step_longer_than_its_bins() -> None:
    """Its share of a bin is no whole number, and may be less than a step in all."""
    runs = [run(0.0, 2, steps=0.25, requests=1.5, forward=0.1, sampling=0.0)]
    course = course_of(runs, time_of((STARTED, STARTED + 0.5)), 10)
    assert course is not None
    drawn = course_charts(course, runs)
    told = describe_course(course, drawn)
    assert set(drawn["batch"]["requests"]) == {6}
    assert "6.00 in the mean step, 6.00 at the busiest" in told["batch"]
    assert told["steps"].endswith("the mean one takes 400\u202fms.")


def test_what_no_chart_could_show_is_left_out(tmp_path: Path) -> None:
    """Numbers without bounds, and moments of no year, as an edited file may hold them."""
    rows = [life(0.0) | {"queue_s": float("inf")}, life(1.0) | {"decode_s": 1e300}]
    table = table_of(tmp_path, rows)
    assert np.isnan(table.rows["queue"][0]) and np.isnan(table.rows["decode"][1])
    late = run(0.0, 4)
    late["timeline"]["started"] = 1e300
    assert generating_span(late) is None
    assert course_of([late], time_of((STARTED, STARTED + 1.0)), 10) is None
    assert (moment(1e300), duration(float("inf")), count(float("inf"))) == ("–", "–", "–")


def test_time_without_a_step_has_no_mean() -> None:
    """Between two runs that requests connect, a column has rates of 0 and no batch; none is drawn as 0."""
    runs = [run(0.0, 8, **busy()), run(6.0, 8, **busy())]
    course = course_of(runs, time_of((STARTED, STARTED + 8.0)), 40)
    assert course is not None
    drawn = course_charts(course, runs)
    idle = int(np.searchsorted(course.edges, 4.0))
    assert drawn["batch"]["requests"][idle] is None
    assert drawn["rates"]["output"][idle] == 0
    assert drawn["batch"]["limit"] == 8
    assert course_of([{**runs[0], "timeline": None}], time_of((STARTED, STARTED + 8.0)), 40) is None


@pytest.mark.parametrize(
    "values",
    [
        np.array([7], np.int32),
        np.array([0, 0, 1, 5000], np.int32),
        np.arange(1, 2000, dtype=np.int32),
        np.random.default_rng(0).lognormal(0, 2, 5000).astype(np.float32),
        np.array([0.0, 0.0, 1e-9, 3.0], np.float32),
        np.array([0.1034, 0.1035], np.float32),
        np.array([np.nan, 2.0, 8.0, 3.0], np.float32),
    ],
)
def test_histograms_count_every_value_once(values: np.ndarray) -> None:
    """Bins cover all values, widen only upwards, and hold what lies between their edges; the marks are values."""
    known = np.sort(values[~np.isnan(values)])
    told = histogram(values.copy())
    assert told is not None
    edges, counts = np.array(told["edges"]), np.array(told["counts"])
    assert (np.diff(edges) > 0).all()
    assert counts.sum() == told["n"] == len(known)
    assert len(counts) <= 30
    assert edges[0] <= known[0] + 1e-6 and known[-1] <= edges[-1] * (1 + 1e-5)
    assert counts == pytest.approx(np.histogram(known, edges)[0], abs=len(known) / 500)
    assert told["median"] == pytest.approx(float(known[(len(known) - 1) // 2]), rel=1e-5)
    assert told["p99"] == pytest.approx(float(known[int(np.ceil(0.99 * len(known))) - 1]), rel=1e-5)


def test_percentile_of_little() -> None:
    """The value that so many do not exceed is one of them; of nothing it is none."""
    assert percentile(np.array([1.0, 2.0, 3.0, 4.0]), 0.5) == 2.0
    assert percentile(np.array([5.0]), 0.99) == 5.0
    assert np.isnan(percentile(np.array([]), 0.5))
    assert histogram(np.array([np.nan], np.float32)) is None
