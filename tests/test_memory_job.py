"""Jobs against the memory they have: outgrown caches, common prefixes and samples, by the figures of the summary."""

import json
from pathlib import Path
from typing import Any

import pytest
from job_harness import run_tiny, write_jsonl

NUM_ROWS, MAX_TOKENS = 32, 96
# A byte is a token: 32 rows of 20 to 51 tokens of prompt and 96 of output need some 4,200 tokens.
NEEDED_TOKENS = sum(20 + row + MAX_TOKENS for row in range(NUM_ROWS))


def prompts(tmp_path: Path) -> Path:
    rows = [{"prompt": f"{row:3}. {'words and words ' * 4}"[: 20 + row]} for row in range(NUM_ROWS)]
    return write_jsonl(tmp_path / "in.jsonl", rows)


def run(source: Path, out: Path, *options: object) -> tuple[list[Any], dict[str, Any]]:
    """The token ids of every row, and the summary."""
    summary = out.with_suffix(".json")
    rows = run_tiny(source, out, "--output-token-ids", "--summary", summary, *options)
    return [row["completion_ids"] for row in rows], json.loads(summary.read_text(encoding="utf-8"))


@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first"])
def test_a_job_that_needs_four_times_its_cache(tmp_path: Path, scheduler: str) -> None:
    """Every row is as in a roomy cache; with a swap pool nothing is computed twice, without one a share is."""
    source, common = prompts(tmp_path), ["--max-tokens", MAX_TOKENS, "--ignore-eos", "--scheduler-type", scheduler]
    small = ["--page-size", 8, "--num-blocks", NEEDED_TOKENS // 4 // 8]
    expected, roomy = run(source, tmp_path / "roomy.parquet", *common)
    computed, reset = run(source, tmp_path / "reset.parquet", *common, *small)
    swapped, swap = run(source, tmp_path / "swap.parquet", *common, *small, "--cpu-offload-space", 0.01)
    assert computed == swapped == expected
    assert roomy["offloads"] == 0
    assert reset["offloads"] == reset["soft_resets"] > 0 < reset["recomputed_tokens"]
    assert swap["offloads"] == swap["swaps"] > 0 == swap["recomputed_tokens"]
    share = reset["recomputed_tokens"] / (reset["recomputed_tokens"] + reset["output_tokens"] + reset["prompt_tokens"])
    print(f"{scheduler}: {reset['offloads']} soft resets, {share:.1%} computed again; {swap['swaps']} swaps, 0 %")


def test_a_common_system_prompt_is_computed_once(tmp_path: Path) -> None:
    """128 prompts behind 512 tokens in common: within 3 % of the ideal, though batches hold a few at a time."""
    rows = [{"prompt": f"question {row * row}, row {row}"} for row in range(128)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    _, summary = run(
        source, tmp_path / "out.parquet", "--system-prompt", "s" * 512, "--max-tokens", 1, "--max-num-seqs", 24
    )
    own = summary["prompt_tokens"] - 128 * 512
    ideal = 512 + own
    print(f"computed {summary['computed_prompt_tokens']} prompt tokens, ideal {ideal}")
    assert summary["computed_prompt_tokens"] <= 1.03 * ideal
    assert summary["computed_prompt_tokens"] + summary["prefix_hit_tokens"] == summary["prompt_tokens"]


@pytest.mark.parametrize("sharing", [[], ["--no-enable-prefix-caching"]])
def test_the_samples_of_a_row_compute_its_prompt_once(tmp_path: Path, sharing: list[str]) -> None:
    """--n reads the prompt once per row, whether blocks are shared or copied."""
    rows = [{"prompt": chr(65 + row) * (10 + 20 * row)} for row in range(4)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    options = ["--n", 5, "--temperature", 0.9, "--max-tokens", 6, *sharing]
    _, summary = run(source, tmp_path / "out.parquet", *options)
    assert summary["rows_ok"] == 20
    assert summary["computed_prompt_tokens"] == sum(len(row["prompt"]) for row in rows)
    assert summary["prompt_tokens"] == 5 * summary["computed_prompt_tokens"]
