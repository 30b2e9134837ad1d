"""Prompt and output share the context: prompts that are cut, outputs that are bounded, and what is recorded of it."""

from pathlib import Path
from typing import Any

import pytest
from job_harness import cbgen, run_tiny, write_jsonl

from cbgen.engine.sampling_params import SamplingParams
from cbgen.length_policy import LengthPolicy
from cbgen.models.tiny_random import BOS, build_tokenizer

BOS_ID = 0


@pytest.mark.parametrize(
    ("policy", "max_tokens", "num_tokens", "kept"),
    [
        ("none", 4, 20, [*range(1, 21)]),
        ("left", 4, 6, [1, 2, 3, 4, 5, 6]),
        ("left", 4, 8, [3, 4, 5, 6, 7, 8]),
        ("right", 4, 8, [1, 2, 3, 4, 5, 6]),
        ("middle", 4, 8, [1, 2, 3, 6, 7, 8]),
        ("middle", 5, 8, [1, 2, 3, 7, 8]),
        ("left", 9, 8, [4, 5, 6, 7, 8]),
        ("right", 1000, 8, [1, 2, 3, 4, 5]),
        ("left", 1000, 5, [1, 2, 3, 4, 5]),
        ("left", 1, 30, [*range(22, 31)]),
    ],
)
def test_where_a_prompt_is_cut(policy: str, max_tokens: int, num_tokens: int, kept: list[int]) -> None:
    """Of a context of 10: what max_tokens leaves, at least 5; the beginning gets the odd token."""
    assert LengthPolicy(10, policy).cut([*range(1, num_tokens + 1)], max_tokens) == kept


@pytest.mark.parametrize("policy", ["left", "right", "middle"])
@pytest.mark.parametrize("context", [2, 3, 7, 10])
@pytest.mark.parametrize("max_tokens", [1, 3, 100])
def test_a_bos_token_stays(policy: str, context: int, max_tokens: int) -> None:
    """At the front, where the prompt begins with one; the length is as without."""
    ids, rule = [BOS_ID, *range(1, 20)], LengthPolicy(context, policy, BOS_ID)
    kept = rule.cut(ids, max_tokens)
    assert kept[0] == BOS_ID
    assert len(kept) == len(rule.cut([*range(1, 21)], max_tokens)) == max(context - max_tokens, context // 2)
    assert sorted(set(kept)) == kept, "in order"
    assert context - len(kept) > 0, "room for one token at least"


def test_a_clamped_output_asks_for_no_more_than_there_is_room_for() -> None:
    """min_tokens is lowered with max_tokens; what fits, and what is left without room, stays as it is."""
    policy = LengthPolicy(10)
    params = SamplingParams(max_tokens=8, min_tokens=6)
    clamped = policy.clamped(params, 7)
    assert (clamped.max_tokens, clamped.min_tokens) == (3, 3)
    for num_tokens in (1, 2, 10, 11):
        assert policy.clamped(params, num_tokens) is params


# Jobs: the tiny tokenizer has a token for each byte.

LONG = "".join(chr(ord("a") + number % 26) for number in range(50))
PROMPTS = {"left": LONG[-30:], "right": LONG[:30], "middle": LONG[:15] + LONG[-15:]}


@pytest.mark.parametrize("policy", PROMPTS)
def test_a_job_that_cuts(tmp_path: Path, policy: str) -> None:
    """A long prompt is generated as the cut one would be, whether text or ids; short ones are untouched."""
    context = ("--max-model-len", 40, "--max-tokens", 10)
    rows: list[dict[str, Any]] = [{"prompt": LONG}, {"prompt": PROMPTS[policy]}, {"prompt": "short"}]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    out = run_tiny(source, tmp_path / "out.parquet", *context, "--truncate-prompt", policy)
    assert [row["truncated_prompt_tokens"] for row in out] == [20, 0, 0]
    assert [row["prompt_tokens"] for row in out] == [30, 30, 5]
    assert out[0]["completion"] == out[1]["completion"], "they share a request, and each has its own facts"
    assert [row["clamped_max_tokens"] for row in out] == [None] * 3
    assert [row["prompt"] for row in out] == [row["prompt"] for row in rows], "the input's column is as it was"
    ids = write_jsonl(tmp_path / "ids.jsonl", [{"prompt_ids": build_tokenizer()(LONG)["input_ids"]}])
    (same,) = run_tiny(ids, tmp_path / "ids.parquet", *context, "--truncate-prompt", policy)
    assert (same["completion"], same["truncated_prompt_tokens"]) == (out[0]["completion"], 20)


def test_without_a_policy_a_long_prompt_is_an_error(tmp_path: Path) -> None:
    """It names both lengths, nothing is cut, and there is no column for it."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": LONG}, {"prompt": "short"}])
    long, short = run_tiny(source, tmp_path / "out.parquet", "--max-model-len", 40, "--max-tokens", 10, code=3)
    assert "50" in long["error"] and "40" in long["error"]
    assert "truncated_prompt_tokens" not in short
    assert short["completion_tokens"] == 10


def test_the_first_prompt_is_shown_as_it_is_cut(tmp_path: Path) -> None:
    """A BOS token stays in it; validate tells the same, and how many are cut."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": BOS + LONG}, {"prompt": "short"}, {"prompt": LONG}])
    job = (source, "--model", "tiny-random", "--out", tmp_path / "out.parquet", "--max-model-len", 20)
    options = ("--max-tokens", 100, "--truncate-prompt", "left")
    plain = cbgen("validate", *job, "--max-tokens", 100)
    assert plain.exit_code == 3
    assert "truncated" not in plain.output
    checked = cbgen("validate", *job, *options)
    assert checked.exit_code == 0, checked.output
    assert "truncated 2 prompts are cut" in checked.output
    assert "clamped   3 rows" in checked.output
    done = cbgen("run", *job, *options)
    for result in (checked, done):
        assert f"{BOS}{LONG[-9:]}" in result.output
        assert LONG not in result.output


def test_what_was_clamped_is_recorded_for_every_row(tmp_path: Path) -> None:
    """Rows of unlike max_tokens may come to the same request; who got all that it asked for has null."""
    asked = [100, 200, 15, 10, 100]
    rows = [{"prompt": "hello", "max_tokens": number} for number in asked[:-1]] + [{"prompt": "other!"}]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    job = ("--max-model-len", 20, "--max-tokens", 100, "--ignore-eos")
    out = run_tiny(source, tmp_path / "out.jsonl", *job, "--summary", tmp_path / "s.json")
    assert [row["clamped_max_tokens"] for row in out] == [15, 15, None, None, 14]
    assert [row["completion_tokens"] for row in out] == [15, 15, 15, 10, 14]
    assert len({row["completion"] for row in out[:3]}) == 1
    drawn = run_tiny(source, tmp_path / "drawn.parquet", *job, "--n", 2, "--temperature", 1)
    assert [row["clamped_max_tokens"] for row in drawn] == [15] * 4 + [None] * 4 + [14] * 2
