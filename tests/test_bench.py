"""`cbgen bench`: the same work for every backend, its figures, and what it refuses. Nothing here looks at a speed."""

import json
import os
import random
import signal
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from engine_harness import CPU, engine_for, greedy_requests, mixed_prompts
from job_harness import cbgen, write_jsonl
from models.causal_zoo import EXPERTS, build
from tiny_models import ModelUnderTest
from typer.main import get_command
from typer.testing import Result

from cbgen.bench import bench_spec
from cbgen.bench_backends import BackendOptions
from cbgen.bench_profile import PARTS, profiling
from cbgen.bench_work import ModelCosts, expert_weights, visible_tokens
from cbgen.bench_worker import Worker
from cbgen.bench_workloads import BenchRequest, WorkloadSizes, make_workload
from cbgen.cli import app
from cbgen.config import ContinuousBatchingConfig
from cbgen.engine.manager import ListSource
from cbgen.errors import ModelError, UsageError
from cbgen.models.loading import describe
from cbgen.models.tiny_random import build_tokenizer

LENGTHS = [(1, 9), (40, 1), (70, 12), (33, 5), (2, 30)]  # prompt tokens, output tokens


def lines_of_message(result: Result) -> list[str]:
    return [line for line in result.stderr.splitlines() if line.startswith("cbgen: ")]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, dict[str, Any]]:
    """All three backends on a few requests of mixed lengths, without sharing; what was printed, and the JSON."""
    folder = tmp_path_factory.mktemp("bench")
    rng = random.Random(0)
    rows: list[dict[str, Any]] = [
        {"prompt_ids": rng.choices(range(200), k=prompt), "max_tokens": output, "ignore_eos": True}
        for prompt, output in LENGTHS
    ]
    rows += [{"prompt": "How high is a house?", "max_tokens": 4, "ignore_eos": False, "temperature": 0.5}]
    source = write_jsonl(folder / "work.jsonl", rows)
    backends = [word for name in ("cbgen", "hf", "hf-cb") for word in ("--backend", name)]
    options = ("--dtype", "float32", "--max-batch-tokens", 48, "--no-allow-block-sharing", "--runs", 2)
    report = folder / "bench.json"
    model = ("--model", "tiny-random", "--workload", source)
    result = cbgen("bench", *model, *backends, *options, "--output-json", report)
    assert result.exit_code == 0, result.output
    return result, json.loads(report.read_text(encoding="utf-8"))


def test_backends_take_turns_and_give_the_same_tokens(compared: tuple[Result, dict[str, Any]]) -> None:
    """Each runs once, then each once more; every row equals the first backend's."""
    _, report = compared
    names = ["cbgen", "hf", "hf-cb"]
    assert [(run["backend"], run["run"]) for run in report["runs"]] == [(name, n) for n in (1, 2) for name in names]
    assert all(run["equal_share"] == 1.0 for run in report["runs"])
    assert report["failures"] == {}


def test_figures_belong_together(compared: tuple[Result, dict[str, Any]]) -> None:
    """Rates are counts over the wall time; the counts are those of the file."""
    _, report = compared
    text_tokens = len(build_tokenizer()("How high is a house?")["input_ids"])
    prompt_tokens = sum(prompt for prompt, _ in LENGTHS) + text_tokens
    output_tokens = sum(output for _, output in LENGTHS) + 4
    workload = report["workload"]
    assert (workload["prompt_tokens"], workload["output_tokens"]) == (prompt_tokens, output_tokens)
    for run in report["runs"]:
        assert run["output_tokens_per_second"] * run["wall_s"] == pytest.approx(output_tokens)
        assert run["total_tokens_per_second"] * run["wall_s"] == pytest.approx(prompt_tokens + output_tokens)
        assert run["requests_per_second"] * run["wall_s"] == pytest.approx(len(LENGTHS) + 1)
        assert run["peak_rss_bytes"] > 100 << 20
    assert report["dtype"] == "float32"
    assert report["engine"]["max_batch_tokens"] == 48


def test_the_split_of_the_steps_adds_up(compared: tuple[Result, dict[str, Any]]) -> None:
    """Shares are of the whole, none is missing, and what was computed is every token but the last of each row."""
    _, report = compared
    profile = report["profile"]
    assert list(profile["step_time_shares"]) == list(PARTS)
    assert all(share > 0 for share in profile["step_time_shares"].values())
    assert sum(profile["step_time_shares"].values()) == pytest.approx(1.0)
    assert sum(profile["step_time_s"].values()) <= profile["wall_s"]
    workload = report["workload"]
    computed = workload["prompt_tokens"] + workload["output_tokens"] - workload["requests"]
    assert profile["query_tokens"] == computed
    assert profile["mean_query_tokens"] * profile["num_steps"] == pytest.approx(computed)
    assert profile["ceilings"]["dtype"] == "float32"
    assert 0 < profile["share_of_matrix_ceiling"] < 1


def test_the_screen_has_the_table_and_the_split(compared: tuple[Result, dict[str, Any]]) -> None:
    """A row per run on stdout with nothing cut, then the lines about cbgen; warnings go to stderr."""
    result, _ = compared
    rows = [line.split()[:2] for line in result.stdout.splitlines() if line.strip().startswith(("cbgen", "hf"))]
    assert rows == [[name, number] for number in "12" for name in ("cbgen", "hf", "hf-cb")]
    assert "…" not in result.stdout
    for words in ("step time linear", "scheduling and layout", "query tokens on average", "GFLOP/s", "GB/s read"):
        assert words in result.stdout
    assert "warning: 1 requests have ignore_eos false" in result.stderr
    assert "warning: 1 requests have a temperature" in result.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not valid JSON"),
        ("[1, 2]", "a JSON object is expected"),
        ('{"max_tokens": 3}', "neither prompt_ids nor prompt"),
        ('{"prompt": "a"}', "max_tokens is None"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens is 0, at least 1"),
        ('{"prompt": "a", "max_tokens": 1.5}', "max_tokens is 1.5, a whole number"),
        ('{"prompt": "", "max_tokens": 1}', "prompt is empty"),
        ('{"prompt_ids": [], "max_tokens": 1}', "prompt_ids is empty"),
        ('{"prompt_ids": [258], "max_tokens": 1}', "prompt_ids holds 258"),
        ('{"prompt": "a", "max_tokens": 5000}', "exceed the context of 2048"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    """One line of message with the place and the reason, exit code 2, before anything is run."""
    source = tmp_path / "work.jsonl"
    source.write_text('{"prompt": "a", "max_tokens": 1}\n\n' + line + "\n", encoding="utf-8")
    result = cbgen("bench", "--model", "tiny-random", "--workload", source)
    assert result.exit_code == 2, result.output
    (message,) = lines_of_message(result)
    assert words in message
    assert "line 3" in message or "request 2" in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--model is missing"),
        (["--workload", "nowhere.jsonl"], "not random, shared-prefix or a JSONL file"),
        (["--backend", "vllm"], "--backend vllm: not one of cbgen, hf, hf-cb"),
        (["--backend", "hf", "--backend", "hf"], "named twice"),
        (["--runs", 0], "--runs 0"),
        (["--num-prompts", 0], "--num-prompts 0"),
        (["--prefix-len", -1], "--prefix-len -1"),
        (["--input-len", 3000], "exceed the context of 2048"),
        (["--page-size", 0], "page_size: 0 is too small"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else None,
)
def test_wrong_options(options: list[object], words: str) -> None:
    """One line, exit code 2."""
    model = ["--model", "tiny-random"] if options else []
    result = cbgen("bench", *model, *options)
    assert result.exit_code == 2, result.output
    (message,) = lines_of_message(result)
    assert words in message


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    """So is one that is no text."""
    model = describe("tiny-random", None, "float32", CPU)
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    for name, words in (("empty", "holds no requests"), ("binary", "not UTF-8")):
        with pytest.raises(UsageError, match=words):
            make_workload(str(tmp_path / f"{name}.jsonl"), WorkloadSizes(), model)


def test_generated_workloads_have_the_sizes_asked_for() -> None:
    """The prefix is common, the rest is not, special tokens do not occur, and it is the same every time."""
    model = describe("tiny-random", None, "float32", CPU)
    sizes = WorkloadSizes(num_prompts=5, input_len=20, output_len=7, prefix_len=11)
    for name in ("random", "shared-prefix"):
        workload = make_workload(name, sizes, model)
        prompts = [request.prompt_ids for request in workload.requests]
        assert [len(prompt) for prompt in prompts] == [31] * 5
        assert {request.max_tokens for request in workload.requests} == {7}
        assert len({tuple(prompt[:11]) for prompt in prompts}) == 1
        assert len({prompt[11] for prompt in prompts}) > 1
        assert not set(model.tokenizer.all_special_ids) & {token_id for prompt in prompts for token_id in prompt}
        assert make_workload(name, sizes, model) == workload
    shared = make_workload("shared-prefix", WorkloadSizes(num_prompts=2), model).requests
    assert shared[0].prompt_ids[:512] == shared[1].prompt_ids[:512]


def test_the_first_lines_of_a_file(tmp_path: Path) -> None:
    """--num-prompts takes so many; sizes of generated prompts have no effect and warn; the warm-up is a small part."""
    rows = [{"prompt_ids": list(range(100)), "max_tokens": 40}] * 6
    source = write_jsonl(tmp_path / "work.jsonl", rows)
    model = describe("tiny-random", None, "float32", CPU)
    workload = make_workload(str(source), WorkloadSizes(num_prompts=5, input_len=3), model)
    assert workload.requests == [BenchRequest(list(range(100)), 40)] * 5
    assert workload.warnings == ("--input-len has no effect on a workload from a file",)
    assert workload.warm_up == [BenchRequest(list(range(32)), 16)] * 4


def test_who_cannot_run_drops_out_in_a_line(tmp_path: Path) -> None:
    """A model that cbgen refuses: hf runs all the same, the exit code is 1, and the JSON says why."""
    build("bloom").save_pretrained(tmp_path / "bloom")
    build_tokenizer().save_pretrained(tmp_path / "bloom")
    sizes = ("--num-prompts", 3, "--input-len", 4, "--output-len", 2, "--runs", 1)
    options = ("--max-model-len", 64, "--backend", "cbgen", "--backend", "hf", "--output-json", tmp_path / "b.json")
    result = cbgen("bench", "--model", tmp_path / "bloom", *sizes, *options)
    assert result.exit_code == 1, result.output
    (message,) = lines_of_message(result)
    assert message.startswith("cbgen: --backend cbgen: ")
    assert "not supported" in message
    report = json.loads((tmp_path / "b.json").read_text())
    assert [run["backend"] for run in report["runs"]] == ["hf"]
    assert "not supported" in report["failures"]["cbgen"]
    assert report["profile"] is None


def test_options_of_cbgen_have_no_effect_on_others() -> None:
    """They warn; so does --no-profile. Where nothing ran there is no table."""
    options = ("--page-size", 16, "--no-allow-block-sharing", "--gpu-memory-utilization", 0.5, "--no-profile")
    sizes = ("--num-prompts", 1, "--input-len", 1, "--output-len", 1, "--runs", 1)
    result = cbgen("bench", "--model", "tiny-random", *sizes, "--backend", "hf", *options)
    assert result.exit_code == 0, result.output
    warnings = [line.split()[1] for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert warnings == ["--page-size", "--no-allow-block-sharing", "--gpu-memory-utilization", "--no-profile"]


def test_a_process_that_dies_is_told() -> None:
    """Killed between two runs, as the kernel does when memory runs out."""
    model = describe("tiny-random", None, "float32", CPU)
    worker = Worker("hf", BackendOptions(model, CPU, ContinuousBatchingConfig().resolve("cpu"), None))
    try:
        assert len(worker.run([BenchRequest([5, 6], 3)]).token_ids[0]) == 3
        os.kill(worker._process.pid, signal.SIGKILL)
        with pytest.raises(ModelError, match="killed by signal 9"):
            worker.run([BenchRequest([5, 6], 3)])
    finally:
        worker.close()


@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_visible_tokens_are_counted_one_by_one(window: int | None) -> None:
    """The closed form against a loop over query tokens."""
    for start in (0, 1, 4, 5, 6, 50):
        for end in (start + 1, start + 3, start + 120):
            one_by_one = sum(min(position + 1, window or end) for position in range(start, end))
            assert visible_tokens(start, end, window) == one_by_one


def test_watching_an_engine_changes_nothing(tiny: ModelUnderTest) -> None:
    """Same tokens, functions as before, parts that add up to the steps, and the work that the prompts come to."""
    prompts = mixed_prompts(6, tiny.shape.vocab_size, longest=60, most=8)
    engine = engine_for(tiny, allow_block_sharing=False, max_batch_tokens=50)
    before = {name: dict(vars(owner)) for name, owner in owners(engine, tiny)}
    requests = greedy_requests(prompts)
    with profiling(engine, tiny.model, tiny.shape, CPU) as profiler:
        list(engine.manager.run(ListSource(requests)))
    for prompt, request in zip(prompts, requests, strict=True):
        tiny.assert_parity(prompt.token_ids, prompt.max_tokens, request.generated_ids)
    assert {name: vars(owner).keys() for name, owner in owners(engine, tiny)} == {
        name: values.keys() for name, values in before.items()
    }
    assert sum(profiler.seconds.values()) == pytest.approx(profiler._inner_s[0])
    assert len(profiler._inner_s) == 1
    assert all(seconds > 0 for seconds in profiler.seconds.values())
    lengths = [request.num_computed_tokens for request in requests]
    work = profiler.work
    assert work.num_steps == engine.manager.metrics.num_steps
    assert work.query_tokens == sum(lengths)
    assert work.sampled_tokens == sum(request.num_generated_tokens for request in requests)
    layers = [(window, count) for window, count in work.layers for _ in lengths]
    seen = [n * visible_tokens(0, length, w) for (w, n), length in zip(layers, lengths * len(work.layers), strict=True)]
    assert work.attended_tokens == sum(seen)


def owners(engine: Any, tiny: ModelUnderTest) -> list[tuple[str, Any]]:
    """Everything that a profiler puts a function into."""
    from cbgen.engine import manager as module

    manager = engine.manager
    parts = [module, manager, manager.scheduler, manager._buffers, manager._runner, manager._runner._backend]
    return [(str(number), owner) for number, owner in enumerate([*parts, *tiny.model.modules()])]


def test_parameters_used_per_token() -> None:
    """All matrices of a dense model but its embedding, whatever class they have; of experts, those that are taken."""
    for name in ("llama", "gpt2", "qwen3_moe"):
        under_test = ModelUnderTest.of(name, build(name), frozenset())
        model = under_test.reference  # as it was loaded, with transformers' own modules
        costs = ModelCosts.of(model, under_test.shape, kv_token_bytes=1.0)
        embeddings = sum(w.numel() for part, w in model.named_parameters() if "embed" in part or "wte" in part)
        positions = sum(w.numel() for part, w in model.named_parameters() if "wpe" in part)
        head = 0 if model.config.tie_word_embeddings else model.get_output_embeddings().weight.numel()
        vectors = sum(weights.numel() for weights in model.parameters() if weights.dim() == 1)
        routers = sum(w.numel() for part, w in model.named_parameters() if part.endswith("mlp.gate.weight"))
        experts = sum(weights.numel() for weights in expert_weights(model))
        taken = experts * (getattr(model.config, "num_experts_per_tok", 0) / EXPERTS)
        whole = sum(weights.numel() for weights in model.parameters())
        assert (experts > 0) == (name == "qwen3_moe")
        left = whole - embeddings - positions - head - vectors - routers - experts
        assert costs.layer_parameters == left + taken
        assert costs.head_parameters == model.get_output_embeddings().weight.numel()


def test_the_command_line_becomes_a_spec() -> None:
    """Every engine option that `run` has is there, and ends in the engine's config."""
    commands = get_command(app).commands
    words = [
        "--model",
        "m",
        "--max-num-seqs",
        "7",
        "--no-enable-prefix-caching",
        "--backend",
        "hf",
        "--backend",
        "cbgen",
    ]
    spec = bench_spec(commands["bench"].make_context("bench", words).params)
    assert spec.engine == ContinuousBatchingConfig(max_requests_per_batch=7, allow_block_sharing=False)
    assert spec.backends == ("hf", "cbgen")
    assert (spec.runs, spec.profile, spec.sizes) == (2, True, WorkloadSizes())
    of_run, of_bench = ({option.name for option in commands[name].params} for name in ("run", "bench"))
    assert {own.name for own in fields(ContinuousBatchingConfig)} & of_run <= of_bench
