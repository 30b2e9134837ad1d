"""`cbgen plan` on the command line: counts that can be checked by hand, and that nothing is written."""

import json
from pathlib import Path
from typing import Any

import pytest
from job_harness import SAMPLES, cbgen, read_rows, run_tiny, write_jsonl

from cbgen.models.tiny_random import build_tokenizer
from cbgen.plan.rows import histogram, sample_of

MODEL = ("--model", "tiny-random")


def plan_of(source: object, *options: object) -> dict[str, Any]:
    result = cbgen("plan", source, *MODEL, *options, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_what_rows_ask_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has one thing: a limit it is over, an equal one, a prefix in common; and no file is made."""
    monkeypatch.chdir(tmp_path)
    shared = list(range(10, 90))
    rows: list[dict[str, Any]] = [
        {"prompt_ids": [*shared, 100], "max_tokens": 5},
        {"prompt_ids": [*shared, 101], "max_tokens": 6},
        {"prompt_ids": [*shared, 101], "max_tokens": 6},
        {"prompt_ids": [7] * 2000, "max_tokens": 100},
        {"prompt_ids": [7] * 3000, "max_tokens": 1},
        {"prompt_ids": [], "max_tokens": 1},
        {"prompt_ids": [5, 6], "max_tokens": 0},
    ]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    plan = plan_of(source, "--no-calibrate", "--page-size", 16)
    assert (plan["rows_total"], plan["rows_read"], plan["rows_of_shard"]) == (7, 7, 7)
    assert (plan["rows_failing"], plan["rows_clamped"]) == (3, 1)
    assert plan["rows_deduplicated"] == 1
    assert plan["prompt_tokens"] == 3 * 81 + 2000
    assert plan["output_tokens"] == 5 + 6 + 6 + 48
    assert plan["shared_prompt_tokens"] == 80
    assert plan["prompt_tokens_histogram"] == [
        [64, 127, 3],
        [128, 255, 0],
        [256, 511, 0],
        [512, 1023, 0],
        [1024, 2047, 1],
    ]
    assert sum(plan["failures"].values()) == 3
    assert plan["prediction"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_counts_are_those_of_the_run(tmp_path: Path) -> None:
    """Tokens of prompts and outputs, rows failing and alike, as the job then has them."""
    rows = [*read_rows(SAMPLES / "questions.jsonl"), {"prompt": ""}]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    job = ("--max-tokens", 12, "--ignore-eos", "--n", 2)
    plan, summary = plan_of(source, *job), tmp_path / "s.json"
    done = run_tiny(source, tmp_path / "out.parquet", *job, "--summary", summary, code=3)
    told = json.loads(summary.read_text())
    assert plan["rows_deduplicated"] == told["deduplicated"]
    assert plan["rows_failing"] == 1
    assert plan["output_tokens"] == sum(row["completion_tokens"] for row in done)
    prediction = plan["prediction"]
    assert prediction["output_tokens"] == told["output_tokens"]
    assert prediction["mean_batch_requests"] == pytest.approx(told["mean_batch_requests"])
    assert prediction["generation_s"] > 0
    assert prediction["num_timed_passes"] > 20


def test_fewer_tokens_are_expected(tmp_path: Path) -> None:
    """Each row as much less as the others; the rest of the input is like the rows that are read."""
    rows = [{"prompt": f"row {number}", "max_tokens": 10 * (number + 1)} for number in range(8)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    assert plan_of(source, "--no-calibrate")["output_tokens"] == 360
    assert plan_of(source, "--no-calibrate", "--expected-tokens", 9)["output_tokens"] == 72
    whole, half = plan_of(source, "--max-tokens", 10), plan_of(source, "--max-tokens", 10, "--rows", 4)
    assert half["rows_read"] == 4
    assert half["prediction"]["output_tokens"] == 200
    assert whole["prediction"]["output_tokens"] == 360
    assert half["prediction"]["share"] == 0.5


def test_what_the_screen_shows(tmp_path: Path) -> None:
    """A line for each thing, bars for the histograms."""
    result = cbgen("plan", SAMPLES / "mixed.jsonl", *MODEL, "--max-tokens", 8)
    assert result.exit_code == 0, result.output
    names = [line.split()[0] for line in result.stdout.splitlines() if line[0] != " "]
    assert [name for name in names if name not in ("clamped", "alike")] == [
        *("rows", "prompts", "outputs", "failing", "prefixes", "cache", "disk", "time")
    ]
    assert "####" in result.stdout
    assert "output tokens/s" in result.stdout


def test_all_rows_fail(tmp_path: Path) -> None:
    """There is nothing to time, and no model is loaded."""
    plan = plan_of(write_jsonl(tmp_path / "in.jsonl", [{"prompt": ""}] * 3))
    assert (plan["rows_failing"], plan["prediction"], plan["prompt_tokens"]) == (3, None, 0)


def test_an_openai_batch() -> None:
    """Planned like any other job, without --out."""
    lines = cbgen("plan", SAMPLES / "openai_batch.jsonl", *MODEL, "--format", "openai-batch")
    assert lines.exit_code == 0, lines.output
    assert "time " in lines.stdout


@pytest.mark.parametrize("num_blocks", [1, 3, 4, 40])
def test_rows_that_the_cache_cannot_hold(tmp_path: Path, num_blocks: int) -> None:
    """They fail in the plan as in the run, and the time is that of the others; none may be left."""
    rows = [{"prompt_ids": [5 + number] * (20 + 20 * (number % 2)), "max_tokens": 24} for number in range(12)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    engine = ("--num-blocks", num_blocks, "--page-size", 16)
    plan = plan_of(source, *engine)
    failing = {1: 12, 3: 6, 4: 0, 40: 0}[num_blocks]
    done = run_tiny(source, tmp_path / "out.parquet", *engine, "--ignore-eos", code={12: 5, 6: 3, 0: 0}[failing])
    assert plan["rows_failing"] == sum(row["error"] is not None for row in done) == failing
    if failing == 12:
        assert plan["prediction"] is None
    else:
        assert plan["prediction"]["output_tokens"] == sum(row["completion_tokens"] for row in done)


def test_a_shard_is_planned_alone(tmp_path: Path) -> None:
    """Its own rows, as the run of the shard deals them; the others are another's."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"row {number}"} for number in range(40)])
    counts = []
    for index in range(3):
        shard = ("--shard-index", index, "--shard-count", 3, "--max-tokens", 4, "--ignore-eos")
        plan, out = plan_of(source, *shard), tmp_path / f"{index}.parquet"
        assert plan["rows_of_shard"] == len(run_tiny(source, out, *shard))
        assert plan["prediction"]["output_tokens"] == 4 * plan["rows_of_shard"]
        counts.append(plan["rows_of_shard"])
    assert sum(counts) == 40


def test_what_a_run_would_refuse(tmp_path: Path) -> None:
    """Another job's output in the place of its own."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}])
    run_tiny(source, tmp_path / "out.parquet", "--max-tokens", 2)
    result = cbgen("plan", source, *MODEL, "--max-tokens", 3, "--out", tmp_path / "out.parquet")
    assert result.exit_code == 4, result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rows", 0], "--rows 0: at least 1"),
        (["--expected-tokens", 0], "--expected-tokens 0: more than 0"),
        (["--expected-tokens", "nan"], "--expected-tokens nan: more than 0"),
        (["--expected-tokens", "inf"], "--expected-tokens inf: more than 0"),
        (["--max-tokens", 8, "--expected-tokens", 9], "rows may generate 8 on average, no more"),
        (["--page-size", 0], "page_size: 0"),
        (["--prompt-column", "nothing"], "nothing"),
    ],
)
def test_wrong_options(options: list[object], words: str) -> None:
    """One line, exit code 2."""
    result = cbgen("plan", SAMPLES / "questions.jsonl", *MODEL, *options)
    assert result.exit_code == 2, result.output
    assert words in result.stderr.splitlines()[-1]


def test_powers_of_two() -> None:
    """Every value is in one of the ranges."""
    assert list(histogram([])) == []
    assert list(histogram([0, 1, 2, 3, 4, 9])) == [(1, 0, 1), (1, 1, 1), (2, 3, 2), (4, 7, 1), (8, 15, 1)]


def test_neighbours_are_sampled_together() -> None:
    """Stretches from all over a list, of which nothing is taken twice."""
    assert sample_of([1, 2, 3], 3) == [1, 2, 3]
    taken = sample_of(list(range(10_000)), 1000)
    assert len(taken) == len(set(taken)) == 1000
    assert taken[:100] == list(range(100))
    assert taken[-1] == 9999


def test_tokens_of_the_sample_text() -> None:
    """The histogram's numbers are tokens as the model's tokenizer counts them."""
    prompts = [row["prompt"] for row in read_rows(SAMPLES / "questions.jsonl")]
    tokenizer = build_tokenizer()
    assert plan_of(SAMPLES / "questions.jsonl", "--no-calibrate")["prompt_tokens"] == sum(
        len(tokenizer(prompt)["input_ids"]) for prompt in prompts
    )
