"""docs/metrics.md names every figure there is, and what it says of some of them holds in a run."""

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from job_harness import REPOSITORY, cbgen, write_jsonl

from cbgen.bench.latency import METRICS, STATISTICS, latency_figures
from cbgen.bench.profile import PARTS
from cbgen.bench.work import Ceilings
from cbgen.engine.metrics import EngineMetrics, RequestTimes
from cbgen.engine.step_log import SERIES
from cbgen.report import Summary

PAGE = (REPOSITORY / "docs" / "metrics.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`([^`\n]+)`", PAGE))


def test_every_figure_is_on_the_page() -> None:
    """Of the summary, the engine, a row's times, the course of a run, and a benchmark."""
    names = {own.name for kind in (Summary, EngineMetrics, RequestTimes, Ceilings) for own in fields(kind)}
    names |= {name for name, value in vars(EngineMetrics).items() if isinstance(value, property)}
    names |= {*SERIES, *PARTS, *METRICS, *(f"{statistic}_ttft_ms" for statistic in STATISTICS)}
    others = {f"{statistic}_{metric}_ms" for statistic in STATISTICS for metric in METRICS}
    names |= set(latency_figures([], None, 1.0)) - others
    assert len(names) > 60
    assert names <= NAMED, names - NAMED


def test_links_within_the_page_lead_somewhere() -> None:
    """Each to a heading."""
    headings = {heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)}
    links = set(re.findall(r"\]\(#([\w-]+)\)", PAGE))
    assert links
    assert links <= headings


def test_the_formulas_hold_in_a_run(tmp_path: Path) -> None:
    """Rates over the time of the passes; computed and taken over are the prompt; the times of a row add up."""
    prefix = "What all of these prompts have in common is longer than a page. "
    rows: list[dict[str, Any]] = [{"prompt": prefix + f"Which number is this? {number}"} for number in range(12)]
    rows += [{"prompt": ""}, rows[0]]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    options = ("--model", "tiny-random", "--temperature", 0.8, "--n", 2, "--max-tokens", 6, "--ignore-eos")
    out, summary = tmp_path / "out.parquet", tmp_path / "run.json"
    assert cbgen("run", source, *options, "--out", out, "--summary", summary).exit_code == 3
    own = json.loads(summary.read_text(encoding="utf-8"))
    assert (own["rows_total"], own["rows_ok"], own["rows_failed"]) == (28, 26, 2)
    assert own["prefix_hit_tokens"] > 0
    assert own["prompt_tokens"] == own["computed_prompt_tokens"] + own["prefix_hit_tokens"]
    assert own["offloads"] == own["soft_resets"] + own["swaps"]
    tokens = own["prompt_tokens"] + own["output_tokens"]
    assert own["total_tokens_per_second"] * own["elapsed_s"] == pytest.approx(tokens)
    assert own["output_tokens_per_second"] * own["elapsed_s"] == pytest.approx(own["output_tokens"])
    assert own["requests_per_second"] * own["elapsed_s"] == pytest.approx(own["rows_ok"] - own["deduplicated"])
    done = [row for row in pq.read_table(out).to_pylist() if row["error"] is None]
    assert own["output_tokens"] == sum(row["completion_tokens"] for row in done) == 26 * 6
    assert own["prompt_tokens"] == sum(row["prompt_tokens"] for row in done)
    for row in done:
        assert row["ttft_s"] == pytest.approx(row["queue_s"] + row["prefill_s"])
        assert row["tpot_s"] == pytest.approx(row["decode_s"] / (row["completion_tokens"] - 1))
        lasted_s = (row["finish_time"] - row["arrival_time"]).total_seconds()
        assert lasted_s == pytest.approx(row["ttft_s"] + row["decode_s"], abs=1e-5)
