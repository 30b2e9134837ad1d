"""Jobs whose passes are recorded and overlap, on a device that does everything late, beside jobs as a CPU does them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from job_harness import cbgen, run_tiny, write_jsonl
from kernels.varlen_reference import varlen_reference
from staged_harness import DeferredStreams

import cbgen.engine.build as engine_build
from cbgen.config import ModelShape, ResolvedConfig
from cbgen.engine.execution import Execution
from cbgen.engine.sampling_params import SamplingParams
from cbgen.errors import EXIT_FAILED_ROWS
from cbgen.kernels.cuda import VarlenAttention
from cbgen.llm import LLM

COLUMNS = ("completion", "finish_reason", "stop_reason", "completion_tokens", "error", "sample_index")


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> list[Execution]:
    """From now on engines run as on a GPU; those that were built are listed."""
    built: list[Execution] = []

    def choose(shape: ModelShape, dtype: torch.dtype, config: ResolvedConfig, *_: object) -> Execution:
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        backend = VarlenAttention(config.page_size, *heads, dtype, kernel=varlen_reference)
        built.append(Execution(backend, DeferredStreams(len(built)), depth=2, records=True))
        return built[-1]

    monkeypatch.setattr(engine_build, "choose_execution", choose)
    return built


def rows_of_every_kind(path: Path) -> Path:
    """Greedy, drawn, stopped, penalized, in a form, with samples of their own number, and one that fails."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "n": 3, "seed": 6},
        {"stop": ["a", "e", "th"]},
        {"repetition_penalty": 1.3},
        {"regex": "[ab]{4,9}"},
        {"logprobs": 2},
        {"min_tokens": 6, "stop": ["a", "b", "c"]},
    ]
    rows = [{"prompt": f"{number}: {'word ' * (number % 7)}", **kinds[number % len(kinds)]} for number in range(24)]
    return write_jsonl(path, [*rows, {"prompt": None}, {"prompt": "too long " * 2000}])


def job(source: Path, out: Path, *options: object) -> list[dict[str, Any]]:
    common = ("--max-tokens", 16, "--seed", 3)
    rows = run_tiny(source, out, *common, *options, code=EXIT_FAILED_ROWS)
    return [{name: row.get(name) for name in COLUMNS} for row in rows]


def test_a_job_is_the_same_job(tmp_path: Path, staged: list[Execution], monkeypatch: pytest.MonkeyPatch) -> None:
    """Row for row, roomy and in a cache that they outgrow, in one go and in two."""
    source = rows_of_every_kind(tmp_path / "in.jsonl")
    small = ("--num-blocks", 24, "--page-size", 8, "--max-batch-tokens", 64, "--cpu-offload-space", 0.01)
    roomy, outgrown = job(source, tmp_path / "a.parquet"), job(source, tmp_path / "b.parquet", *small)
    assert len(staged) == 2
    monkeypatch.undo()
    assert job(source, tmp_path / "c.parquet") == roomy == outgrown
    assert sum(row["error"] is not None for row in roomy) == 2


def test_bench_and_plan_time_single_passes(tmp_path: Path, staged: list[Execution]) -> None:
    """Both watch an engine, and neither is confused by passes in flight."""
    result = cbgen_command("bench", "--num-prompts", 6, "--input-len", 20, "--output-len", 8, "--runs", 1)
    assert "output tokens/s" in result
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"prompt {number}"} for number in range(40)])
    assert "40 of 40 read" in cbgen_command("plan", source, "--max-tokens", 8)


def cbgen_command(command: str, *arguments: object) -> str:
    result = cbgen(command, *arguments, "--model", "tiny-random")
    assert result.exit_code == 0, result.output
    return result.output


def test_a_call_that_is_given_up_leaves_nothing_in_flight(staged: list[Execution]) -> None:
    """Whoever stops listening in the middle may ask again, and gets what he would have got."""
    prompts = [f"prompt {number}" for number in range(12)]
    params = SamplingParams(12, ignore_eos=True)
    llm = LLM("tiny-random", max_requests_per_batch=4)
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, ordered=True)]
    for output in llm.generate(prompts, params):
        assert output.outputs[0].token_ids == expected[output.index]
        break
    again = [output.outputs[0].token_ids for output in llm.generate(prompts, params, ordered=True)]
    assert again == expected
    assert len(staged) == 1
