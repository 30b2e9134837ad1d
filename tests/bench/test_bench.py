"""`cbgen bench`: the same work for every backend, its figures, and what it refuses. Nothing here looks at a speed."""

import json
import random
import re
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from engine_harness import CPU, engine_for, greedy_requests, mixed_prompts
from job_harness import cbgen, write_jsonl
from models.causal_zoo import build
from tiny_models import ModelUnderTest
from typer.main import get_command
from typer.testing import Result

from cbgen.bench.dataset_options import DatasetOptions
from cbgen.bench.figures import json_text
from cbgen.bench.profile import PARTS, profiling
from cbgen.bench.spec import bench_spec, parse_share
from cbgen.bench.work import visible_tokens
from cbgen.cli import app
from cbgen.config import ContinuousBatchingConfig
from cbgen.engine.sources import ListSource
from cbgen.errors import UsageError
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
    backends = ("--compare", "cbgen,hf,hf-cb")
    options = ("--dtype", "float32", "--max-batch-tokens", 48, "--no-allow-block-sharing", "--runs", 2)
    report = folder / "bench.json"
    model = ("--model", "tiny-random", "--dataset-name", "custom", "--dataset-path", source)
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
    middle = median(run["wall_s"] for run in report["runs"] if run["backend"] == "cbgen")
    assert report["elapsed_time"] == middle
    assert report["num_requests"] == len(LENGTHS) + 1
    assert report["total_num_tokens"] == prompt_tokens + output_tokens
    assert report["tokens_per_second"] * middle == pytest.approx(prompt_tokens + output_tokens)
    assert report["output_tokens_per_second"] * middle == pytest.approx(output_tokens)
    assert (report["backend"], report["dtype"], report["dataset_name"]) == ("cbgen", "float32", "custom")
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
    assert "ratio     cbgen over hf: " in result.stdout
    assert "ratio     cbgen over hf-cb: " in result.stdout
    assert result.stdout.count("\nspread ") == 3
    assert "Throughput: " not in result.stdout
    assert result.stdout.count("this backend does not tell") == 2  # of hf and of hf-cb, once each
    assert "warning: 1 requests have ignore_eos false" in result.stderr
    assert "warning: 1 requests have a temperature" in result.stderr


def test_the_spread_and_the_ratios_are_of_the_runs(compared: tuple[Result, dict[str, Any]]) -> None:
    """Round by round, the first backend over each other one."""
    _, report = compared
    speeds: dict[str, list[float]] = {}
    for run in report["runs"]:
        speeds.setdefault(run["backend"], []).append(run["output_tokens_per_second"])
    assert list(report["backends"]) == list(speeds) == ["cbgen", "hf", "hf-cb"]
    for name, own in speeds.items():
        figures = report["backends"][name]
        assert (figures["spread"]["min"], figures["spread"]["max"]) == (min(own), max(own))
        assert min(own) <= figures["output_tokens_per_second"] <= max(own)
        assert figures["runs"] == 2
    for name in ("hf", "hf-cb"):
        rounds = [ours / theirs for ours, theirs in zip(speeds["cbgen"], speeds[name], strict=True)]
        assert report["ratios"][name] == {"median": median(rounds), "min": min(rounds), "max": max(rounds)}


def test_everybody_says_what_it_is(compared: tuple[Result, dict[str, Any]]) -> None:
    """Versions of cbgen and of each peer, the machine, the options, and what requests took as far as it is told."""
    _, report = compared
    assert report["versions"]["cbgen"] == report["backends"]["cbgen"]["versions"]["cbgen"]
    assert report["backends"]["hf"]["versions"]["transformers"] == report["versions"]["transformers"]
    assert report["hardware"]["cpu"]
    assert report["hardware"]["memory_bytes"] > 1 << 30
    assert report["config"]["engine"]["max_batch_tokens"] == 48
    assert report["config"]["dataset"]["dataset_name"] == "custom"
    ours, theirs = (report["backends"][name]["latencies"] for name in ("cbgen", "hf"))
    assert 0 < ours["median_ttft_ms"] <= ours["median_e2el_ms"]
    assert theirs["median_ttft_ms"] is None
    walls_s = [run["wall_s"] for run in report["runs"] if run["backend"] == "hf"]
    assert 0 < theirs["p99_e2el_ms"] <= 1e3 * max(walls_s)
    engine = report["backends"]["cbgen"]["engine"]
    assert engine["query_tokens_per_step"] * engine["num_steps"] == pytest.approx(report["profile"]["query_tokens"])
    assert engine["share_of_max_batch_tokens"] == pytest.approx(engine["query_tokens_per_step"] / 48)
    assert 0 < engine["cache_used_mean"] <= engine["cache_used_peak"] <= 1
    assert report["backends"]["hf"]["engine"] is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--model is missing"),
        (["--dataset-name", "custom", "--dataset-path", "nowhere.jsonl"], "--dataset-path nowhere.jsonl: no such file"),
        (["--backend", "tgi"], "--backend tgi: not one of cbgen, hf, hf-cb, vllm, openvino"),
        (["--compare", "hf,tgi"], "--compare tgi: not one of"),
        (["--compare", "hf, hf"], "named twice"),
        (["--compare", "cbgen,hf", "--backend", "hf"], "one of them"),
        (["--runs", 0], "--runs 0"),
        (["--num-prompts", 0], "--num-prompts 0"),
        (["--input-len", 3000], "exceed the context of 2048"),
        (["--input-len", 50_000_000, "--num-prompts", 2], "exceed the context of 2048"),
        (["--output-json", ""], "--output-json '': the name of a file is expected"),
        (["--output-json", "/"], "--output-json /: the name of a file is expected"),
        (["--output-json", "tests"], "--output-json tests: the name of a file is expected"),
        (["--output-json", "nowhere/"], "--output-json nowhere/: the name of a file is expected"),
        (["--page-size", 0], "page_size: 0 is too small"),
        (["--slo", "soon"], "--slo soon"),
        (["--python", "/usr/bin/python3"], "for which backend? NAME=PATH"),
        (["--python", "vllm=/usr/bin/python3"], "vllm is not among the backends: cbgen"),
        (["--backend", "vllm", "--python", "nowhere/python"], "--python nowhere/python: no such file"),
        (["--backend", "openvino"], "give --peer-model openvino=FOLDER"),
        (["--peer-model", "cbgen=nowhere"], "--peer-model cbgen=nowhere: no such folder"),
        (["--max-regression", "5%"], "--max-regression: needs --baseline"),
        (["--baseline", "nowhere.json"], "--baseline nowhere.json: no such file"),
        (["--baseline", "nowhere.json", "--max-regression", "much"], "--max-regression much: a share below 100%"),
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


def test_a_report_has_no_number_that_json_has_not() -> None:
    """Wherever it stands: null is in its place."""
    values = {"a": float("nan"), "b": [1, float("inf"), (0.5, -float("inf"))], "c": {"d": float("nan"), "e": "x"}}
    expected = {"a": None, "b": [1, None, [0.5, None]], "c": {"d": None, "e": "x"}}
    assert json.loads(json_text(values)) == expected


def test_who_cannot_run_drops_out_in_a_line(tmp_path: Path) -> None:
    """A model that cbgen refuses: hf runs all the same, the exit code is 1, and the JSON says why."""
    build("bloom").save_pretrained(tmp_path / "bloom")
    build_tokenizer().save_pretrained(tmp_path / "bloom")
    sizes = ("--num-prompts", 3, "--input-len", 4, "--output-len", 2, "--runs", 1)
    options = ("--max-model-len", 64, "--compare", "cbgen,hf", "--markdown", "--output-json", tmp_path / "b.json")
    result = cbgen("bench", "--model", tmp_path / "bloom", *sizes, *options)
    assert result.exit_code == 1, result.output
    (message,) = lines_of_message(result)
    assert message.startswith("cbgen: --backend cbgen: ")
    assert "not supported" in message
    assert ".log" not in message
    report = json.loads((tmp_path / "b.json").read_text())
    assert [run["backend"] for run in report["runs"]] == ["hf"]
    assert "not supported" in report["failures"]["cbgen"]
    assert report["profile"] is None
    assert (report["backend"], report["ratios"]) == ("hf", {})
    heading, rule, row = [line for line in result.stdout.splitlines() if line.startswith("|")]
    assert heading == "| workload | backend | output tokens/s | runs | ratio | equal rows |"
    assert rule == "| --- | --- | --- | --- | --- | --- |"
    speed = f"{report['output_tokens_per_second']:,.1f}"
    assert row == f"| random | hf | {speed} | 1 | 1 | 100.0% |"


def test_options_of_cbgen_have_no_effect_on_others() -> None:
    """They warn; so does --no-profile. One backend has its throughput in the conventional words at the end."""
    options = (
        "--page-size",
        16,
        "--no-allow-block-sharing",
        "--enforce-eager",
        "--max-cached-graphs",
        4,
        "--gpu-memory-utilization",
        0.5,
        "--no-profile",
        "--order",
        "prefix",
    )
    sizes = ("--num-prompts", 2, "--input-len", 3, "--output-len", 4, "--n", 2, "--runs", 1)
    result = cbgen("bench", "--model", "tiny-random", *sizes, "--backend", "hf", *options)
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    warnings = [line.split()[1] for line in lines]
    assert "warning: --gpu-memory-utilization has no effect without cbgen or vllm among the backends" in lines
    assert warnings == [
        "--page-size",
        "--no-allow-block-sharing",
        "--no-use-cuda-graph",
        "--max-cached-graphs",
        "--gpu-memory-utilization",
        "--order",
        "--no-profile",
    ]
    throughput, *totals = result.stdout.splitlines()[-3:]
    number = r"\d+\.\d\d"
    line = f"Throughput: {number} requests/s, {number} total tokens/s, {number} output tokens/s"
    assert re.fullmatch(line, throughput), throughput
    assert totals == ["Total num prompt tokens:  6", "Total num output tokens:  16"]


def test_the_command_line_becomes_a_spec() -> None:
    """Every engine option that `run` has is there, and ends in the engine's config."""
    commands = get_command(app).commands
    words = ["--model", "m", "--max-num-seqs", "7", "--no-enable-prefix-caching", "--compare", "hf,cbgen"]
    words += ["--dataset-name", "prefix-repetition", "--seed", "3", "--baseline", "b.json"]
    spec = bench_spec(commands["bench"].make_context("bench", words).params)
    assert spec.engine == ContinuousBatchingConfig(max_requests_per_batch=7, allow_block_sharing=False)
    assert spec.backends == ("hf", "cbgen")
    assert (spec.runs, spec.profile) == (2, True)
    assert spec.dataset == DatasetOptions("prefix-repetition", seed=3)
    assert (spec.baseline, spec.max_regression) == (Path("b.json"), 0.1)
    of_run, of_bench, of_size = ({option.name for option in commands[name].params} for name in ("run", "bench", "size"))
    engine = {own.name for own in fields(ContinuousBatchingConfig)} | {"gpu_memory_utilization"}
    assert engine & of_run == engine & of_bench
    assert {"page_size", "kv_cache_dtype", "gpu_memory_utilization"} <= of_size


@pytest.mark.parametrize(("text", "share"), [("10%", 0.1), ("0.25", 0.25), ("0", 0.0), (" 2.5% ", 0.025)])
def test_shares(text: str, share: float) -> None:
    """As a percentage or as a number."""
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "%", "100%", "-1%", "10%%", "nan"])
def test_what_is_no_share(text: str) -> None:
    """One line that names it."""
    with pytest.raises(UsageError, match="a share below 100%"):
        parse_share(text)


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
    parts = [
        module,
        manager,
        manager.scheduler,
        manager.passes.buffers,
        manager.passes.runner,
        manager.passes.runner._backend,
    ]
    return [(str(number), owner) for number, owner in enumerate([*parts, *tiny.model.modules()])]
