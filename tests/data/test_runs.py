"""The files in which runs tell of themselves."""

import json
from pathlib import Path
from typing import Any

import pytest

from cbgen.data.runs import (
    MOST_FOOTER_BINS,
    MOST_RUNS,
    checked_runs,
    condensed,
    new_run_path,
    read_runs,
    write_run,
)
from cbgen.engine.step_log import SERIES


def run_of(started: float, num_bins: int) -> dict[str, Any]:
    series = {name: list(range(num_bins)) for name in SERIES}
    timeline = {"started": started, "bin_s": 0.5, "series": series} if num_bins else None
    own = {"how": "finished", "shard": None, "load_s": 1.0, "rows": 3, "summary": {}, "engine": {}}
    return {"started": started, "ended": started + 1, **own, "timeline": timeline}


def test_files_are_numbered_and_read_in_order(tmp_path: Path) -> None:
    """Beyond nine too; what is torn or another thing is left out."""
    for number in range(12):
        write_run(new_run_path(tmp_path), run_of(number, 1))
    (tmp_path / "run-000003.json").write_text('{"started": 1')
    (tmp_path / "run-000004.json").write_text("[]")
    (tmp_path / "run-000005.json").write_text("{}")
    (tmp_path / "run-of-mine.json").write_text(json.dumps(run_of(99, 1)))
    assert [run["started"] for run in read_runs(tmp_path)] == [0, 1, 2, 6, 7, 8, 9, 10, 11]
    assert new_run_path(tmp_path).name == "run-000012.json"


@pytest.mark.parametrize(
    "change",
    [
        {"started": None},
        {"started": 1e300},
        {"ended": float("nan")},
        {"rows": -1},
        {"rows": "3"},
        {"summary": 5},
        {"summary": {"output_tokens": None}},
        {"summary": {"output_tokens": 10**400}},
        {"engine": []},
        {"timeline": {}},
        {"timeline": 5},
        {"timeline": {"started": 1.0, "bin_s": 0.0, "series": {"steps": [1]}}},
        {"timeline": {"started": 1.0, "bin_s": 1.0, "series": {"steps": [1], "requests": [1, 2]}}},
        {"timeline": {"started": 1.0, "bin_s": 1.0, "series": {"requests": [1, 2]}}},
        {"timeline": {"started": 1.0, "bin_s": 1.0, "series": {"steps": ["1"]}}},
    ],
    ids=str,
)
def test_a_run_of_another_make_is_not_told_of(tmp_path: Path, change: dict[str, Any]) -> None:
    """In a file as in a footer; the others are."""
    wrong = run_of(1, 2) | change
    write_run(new_run_path(tmp_path), run_of(0, 2))
    (tmp_path / "run-000001.json").write_text(json.dumps(wrong))
    (tmp_path / "run-000002.json").write_text("[" * 200_000)
    (tmp_path / "run-²²²²²².json").write_text("{}")
    assert read_runs(tmp_path) == checked_runs([wrong, run_of(0, 2)]) == checked_runs([run_of(0, 2)])
    assert len(read_runs(tmp_path)) == 1
    assert new_run_path(tmp_path).name == "run-000003.json"


@pytest.mark.parametrize("value", [None, 5, "x", {}, [1], [[]], [None]])
def test_a_footer_without_runs(value: Any) -> None:
    """Of an earlier version, or edited."""
    assert checked_runs(value) == []


def test_a_footer_holds_many_runs_coarsely() -> None:
    """Sums stay, bins are bounded together, the newest runs are kept."""
    runs = [run_of(number, 1000 if number % 2 else 0) for number in range(20)]
    kept = condensed(reversed(runs))
    assert [run["started"] for run in kept] == list(range(20))
    timelines = [run["timeline"] for run in kept if run["timeline"] is not None]
    assert sum(len(timeline["series"]["steps"]) for timeline in timelines) <= MOST_FOOTER_BINS
    for timeline in timelines:
        assert all(sum(values) == pytest.approx(sum(range(1000))) for values in timeline["series"].values())
        assert timeline["bin_s"] * len(timeline["series"]["steps"]) >= 500
    many = condensed(run_of(number, 3) for number in range(MOST_RUNS + 9))
    assert (len(many), many[0]["started"]) == (MOST_RUNS, 9)
    assert condensed([run_of(0, 1000)])[0] == run_of(0, 1000)
