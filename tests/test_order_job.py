"""Jobs in every order and with rows that share a request: the same rows, only sooner."""

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_harness import cbgen, read_rows, run_tiny, start_process, wait_for_parts, without_timing, write_jsonl
from rich.console import Console

from cbgen.job import run_job
from cbgen.jobspec import build_spec
from cbgen.ordering import ORDERS
from cbgen.row_window import WindowLimits

PATIENT_S = 1e6  # windows end by their bounds or with the input
DOCUMENTS = ["".join(random.Random(n).choices("abcdefgh ", k=96)) for n in range(4)]


def mixed_rows() -> list[dict[str, Any]]:
    """Greedy and sampled, long and short, with prefixes in common, equal ones, and ones that fail in two ways."""
    rng = random.Random(0)
    rows: list[dict[str, Any]] = [
        {
            "prompt": f"{rng.choice(DOCUMENTS)} {number % 7}",
            "max_tokens": rng.choice([2, 5, 9]),
            "temperature": number % 2,
        }
        for number in range(40)
    ]
    rows += [{"prompt": "equal", "max_tokens": 6}] * 5
    rows += [{"prompt": ""}, {"prompt": "x" * 300}, {"prompt": "equal", "max_tokens": 0}, {"prompt": "x" * 300}]
    rng.shuffle(rows)
    return rows


def run(source: Path, out: Path, limits: WindowLimits | None = None, **options: Any) -> dict[str, Any]:
    """The summary of a run, with a window of another size."""
    values = {"input": [str(source)], "model": "tiny-random", "out": str(out), "summary": str(out) + ".json"}
    run_job(build_spec(values | options), Console(stderr=True), limits or WindowLimits(patience_s=PATIENT_S))
    return json.loads(Path(values["summary"]).read_text(encoding="utf-8"))


def results(out: Path) -> pa.Table:
    return without_timing(pq.read_table(out))


def by_arrival(out: Path) -> list[dict[str, Any]]:
    return sorted((row for row in read_rows(out) if row["arrival_time"] is not None), key=lambda r: r["arrival_time"])


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pa.Table]:
    """Rows of every kind, and their results by arrival with a request for each sample."""
    folder = tmp_path_factory.mktemp("mixed")
    source = write_jsonl(folder / "in.jsonl", mixed_rows())
    run(source, folder / "out.parquet", order="arrival", deduplicate=False, n=2, max_model_len=256)
    return source, results(folder / "out.parquet")


@pytest.mark.parametrize("deduplicate", [True, False])
@pytest.mark.parametrize("order", ORDERS)
def test_results_are_the_same_in_every_order(
    tmp_path: Path, mixed: tuple[Path, pa.Table], order: str, deduplicate: bool
) -> None:
    """Completions, errors and counts of every row and sample, whoever came first and whoever shared a request."""
    source, expected = mixed
    options = {"order": order, "deduplicate": deduplicate, "n": 2, "max_model_len": 256}
    summary = run(source, tmp_path / "out.parquet", max_requests_per_batch=5, page_size=8, **options)
    assert results(tmp_path / "out.parquet").equals(expected)
    assert (summary["deduplicated"] > 0) == deduplicate
    assert (summary["config"]["order"], summary["config"]["deduplicate"]) == (order, deduplicate)
    assert summary["rows_failed"] == 2 * 4
    assert summary["rows_ok"] == summary["rows_total"] - 8


@pytest.mark.parametrize("order", ["auto", "longest-first"])
def test_a_whole_input_is_put_in_order_before_the_first_row(tmp_path: Path, order: str) -> None:
    """Rows come to the engine longest first, over the whole input; longest-first looks at prompts too."""
    rows = [{"prompt": "p" * (1 + n % 3), "max_tokens": 1 + n * 7 % 11, "place": n} for n in range(300)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    run(source, tmp_path / "out.parquet", order=order, deduplicate=False)
    with_prompts = order == "longest-first"
    lengths = [
        (row["max_tokens"], row["prompt_tokens"] if with_prompts else -row["place"])
        for row in by_arrival(tmp_path / "out.parquet")
    ]
    assert len(lengths) == 300
    assert lengths == sorted(lengths, reverse=True)


def test_an_input_of_several_windows(tmp_path: Path) -> None:
    """Each window is put in order by itself; nothing is lost between them, and the results are the same."""
    rng = random.Random(1)
    rows = [{"prompt": f"row {number}", "max_tokens": rng.randint(1, 4)} for number in range(400)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    limits = WindowLimits(max_requests=20, patience_s=PATIENT_S)  # a batch of the feeder, 128 rows, fills it
    run(source, tmp_path / "out.parquet", limits, order="longest-first")
    run(source, tmp_path / "expected.parquet", order="arrival")
    assert results(tmp_path / "out.parquet").equals(results(tmp_path / "expected.parquet"))
    lengths = [row["max_tokens"] for row in by_arrival(tmp_path / "out.parquet")]
    ends = sum(one < other for one, other in pairwise(lengths))
    assert ends >= 3, "400 rows are at least four windows of 128"


def test_prefix_groups_compute_less_in_a_small_cache(tmp_path: Path) -> None:
    """Questions about eight documents in turn: together, each document is computed once; by arrival, many times."""
    documents = ["".join(random.Random(n).choices("abcdefgh ", k=128)) for n in range(8)]
    rows = [{"prompt": f"{document}{number:04}"} for number in range(6) for document in documents]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    computed = {
        order: run(
            *(source, tmp_path / f"{order}.parquet"),
            **{"order": order, "max_tokens": 2, "page_size": 8, "num_blocks": 40, "max_requests_per_batch": 2},
        )["computed_prompt_tokens"]
        for order in ORDERS
    }
    ideal = 8 * 128 + 48 * 4
    print(f"computed prompt tokens: {computed}, ideal {ideal}")
    assert computed["prefix"] == computed["auto"] == ideal
    assert computed["arrival"] > 2 * ideal


def test_equal_greedy_rows_are_generated_once(tmp_path: Path) -> None:
    """Every such row has the result and the timing of one request; what differs in what decides it is another."""
    kinds = [
        {"prompt": "a"},
        {"prompt": "a", "max_tokens": 3},
        {"prompt": "a", "ignore_eos": True, "max_tokens": 5},
        {"prompt": "b"},
        {"prompt": "b", "max_tokens": 10_000},  # clamped to the context
        {"prompt": "b", "max_tokens": 20_000},
        {"prompt": "x" * 70},
    ]
    rows = [kind | {"copy": copy} for copy in range(4) for kind in kinds]
    rows += [{"prompt": "a", "temperature": 1.0, "copy": copy} for copy in range(4)]
    source, options = write_jsonl(tmp_path / "in.jsonl", rows), {"max_model_len": 64, "max_tokens": 12}
    summary = run(source, tmp_path / "out.parquet", **options)
    run(source, tmp_path / "expected.parquet", deduplicate=False, **options)
    assert results(tmp_path / "out.parquet").equals(results(tmp_path / "expected.parquet"))
    out = read_rows(tmp_path / "out.parquet")
    by_kind = [out[kind : 4 * 7 : 7] for kind in range(7)]
    for rows_of_kind in by_kind:
        assert len({(row["arrival_time"], row["finish_time"], row["error"]) for row in rows_of_kind}) == 1
    assert all("70 tokens" in row["error"] for row in by_kind[-1])
    assert by_kind[4][0]["finish_time"] == by_kind[5][0]["finish_time"], "equal once both are clamped"
    assert summary["deduplicated"] == 4 * 7 - 6
    assert summary["clamped_max_tokens"] == 8
    assert summary["rows_failed"] == 4
    generated = [by_kind[kind][0] for kind in range(5)] + out[4 * 7 :]
    assert summary["output_tokens"] == sum(row["completion_tokens"] for row in generated)
    assert summary["prompt_tokens"] == sum(row["prompt_tokens"] for row in generated)
    assert summary["requests_per_second"] * summary["elapsed_s"] == pytest.approx(len(generated))
    assert summary["output_tokens_per_second"] == pytest.approx(summary["output_tokens"] / summary["elapsed_s"])


def test_greedy_samples_of_a_row_are_one_request(tmp_path: Path) -> None:
    """With n samples, two of three rows equal: two requests for nine output rows."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "same"}, {"prompt": "other"}, {"prompt": "same"}])
    summary = run(source, tmp_path / "out.parquet", n=3, max_tokens=6)
    run(source, tmp_path / "expected.parquet", n=3, max_tokens=6, deduplicate=False)
    assert results(tmp_path / "out.parquet").equals(results(tmp_path / "expected.parquet"))
    assert [row["sample_index"] for row in read_rows(tmp_path / "out.parquet")] == [0, 1, 2] * 3
    assert summary["deduplicated"] == 7
    assert summary["rows_ok"] == 9
    assert summary["requests_per_second"] * summary["elapsed_s"] == pytest.approx(2)


@pytest.mark.parametrize("limits", [{}, {"max_requests": 1}, {"max_duplicates": 1}])
def test_nothing_but_equal_rows(tmp_path: Path, limits: dict[str, int]) -> None:
    """Over several windows, and with no more of them waiting than may: all are there, and the job comes to its end."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "same", "place": number} for number in range(500)])
    summary = run(source, tmp_path / "out.parquet", WindowLimits(patience_s=0.05, **limits), max_tokens=4)
    rows = read_rows(tmp_path / "out.parquet")
    assert [row["place"] for row in rows] == list(range(500))
    assert len({row["completion"] for row in rows}) == 1
    num_generated = round(summary["requests_per_second"] * summary["elapsed_s"])
    assert summary["deduplicated"] + num_generated == 500
    assert num_generated <= 20


def test_killed_while_equal_rows_are_written(tmp_path: Path) -> None:
    """kill -9 with some of the rows of a request published; run again in another way, every row is there once."""
    # The first to be generated is asked for 3,000 times; then come 40 others, and take some time.
    rows = [{"prompt": f"q {n // 2 % 40}" if n % 2 else "the longest question", "copy": n} for n in range(6000)]
    source, out = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.parquet"
    slowly = ("--max-requests-per-batch", 1, "--part-rows", 200)
    job = ("--model", "tiny-random", "--max-tokens", 48)
    process = start_process("run", source, "--out", out, *job, *slowly)
    wait_for_parts(process, tmp_path / "out.parquet.parts", 1)
    process.kill()
    process.communicate()
    done = sum(pq.read_metadata(part).num_rows for part in (tmp_path / "out.parquet.parts").glob("part-*"))
    again = ("--order", "prefix", "--summary", tmp_path / "s.json")
    rows_out = run_tiny(source, out, "--max-tokens", 48, *again)
    summary = json.loads((tmp_path / "s.json").read_text())
    assert 0 < done == summary["rows_resumed"] < len(rows)
    assert [row["copy"] for row in rows_out] == list(range(len(rows)))
    run(source, tmp_path / "whole.parquet", max_tokens=48)
    assert results(out).equals(results(tmp_path / "whole.parquet"))
    num_generated = round(summary["requests_per_second"] * summary["elapsed_s"])
    assert summary["deduplicated"] + num_generated == len(rows) - done


def test_order_without_sharing_is_told(tmp_path: Path) -> None:
    """`prefix` has nothing to gain there."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}])
    options = ("--order", "prefix", "--no-enable-prefix-caching", "--max-tokens", 1)
    result = cbgen("run", source, "--model", "tiny-random", "--out", tmp_path / "out.parquet", *options)
    assert result.exit_code == 0
    assert "warning: --order prefix has nothing to gain" in result.output
