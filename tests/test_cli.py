"""What users get wrong: one line that says what, where and what to do, the documented exit code, never a traceback."""

import json
from pathlib import Path

import pytest
from job_harness import SAMPLES, cbgen, read_rows, run_tiny, write_jsonl

QUESTIONS = SAMPLES / "questions.jsonl"


def message(*arguments: object, code: int) -> str:
    """The one line that a failed command prints."""
    result = cbgen(*arguments)
    assert result.exit_code == code, result.output
    lines = [line for line in result.output.splitlines() if line.startswith("cbgen: ")]
    assert len(lines) == 1, result.output
    assert "Traceback" not in result.output
    return lines[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl: no such file, folder or glob match"),
        (["pyproject.toml"], "the format is told by the extension"),
        ([QUESTIONS, "--prompt-column", "text"], "no column 'text'; it has: id, prompt"),
        ([QUESTIONS, "--template", "{{ question }}"], "no column 'question'"),
        ([QUESTIONS, "--template", "{{ prompt"], "--template, line 1"),
        ([QUESTIONS, "--template", "x", "--prompt-column", "prompt"], "give one of them"),
        ([QUESTIONS, "--chat-template-kwargs", "{"], "--chat-template-kwargs: not valid JSON"),
        ([QUESTIONS, "--chat-template-kwargs", "[1]"], "a JSON object is expected"),
        ([QUESTIONS, "--chat-template-kwargs", '{"tokenize": true}'], "tokenize is set by cbgen"),
        ([QUESTIONS, "--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization"),
        ([QUESTIONS, "--temperature", "-1"], "--temperature is -1"),
        ([QUESTIONS, "--top-p", "0"], "--top-p is 0"),
        ([QUESTIONS, "--max-tokens", "0"], "--max-tokens is 0"),
        ([QUESTIONS, "--n", "0"], "--n: Input should be greater than 0"),
        ([QUESTIONS, "--page-size", "0"], "page_size: 0 is too small"),
        ([QUESTIONS, "--max-memory-percent", "1.5"], "max_memory_percent: 1.5"),
        ([QUESTIONS, "--safety-margin", "1"], "safety_margin: 1"),
        ([QUESTIONS, "--scheduler-type", "random"], "scheduler_type: 'random' is not one of: fifo"),
        ([QUESTIONS, "--q-padding-interval-size", "0"], "q_padding_interval_size: 0 is too small"),
        ([QUESTIONS, "--kv-padding-interval-size", "0"], "kv_padding_interval_size: 0 is too small"),
        ([QUESTIONS, "--max-cached-graphs", "0"], "max_cached_graphs: 0 is too small"),
        ([QUESTIONS, "--device", "cpu", "--use-cuda-graph"], "use_cuda_graph: only CUDA devices record graphs"),
        ([QUESTIONS, "--device", "cpu", "--use-async-batching"], "use_async_batching: batches overlap on the streams"),
        ([QUESTIONS, "--device", "cpu", "--async-scheduling"], "use_async_batching: batches overlap on the streams"),
        ([QUESTIONS, "--resume", "maybe"], "--resume"),
        ([QUESTIONS, "--device", "tpu9"], "--device tpu9"),
        ([QUESTIONS, "--device", "cuda:99"], "--device cuda:99"),
        ([QUESTIONS, "--dtype", "int4"], "--dtype int4: not one of auto, float32"),
        ([QUESTIONS, "--max-model-len", "100000"], "the context of this model is 2048"),
        ([QUESTIONS, "--limit", "-1"], "--limit"),
        ([QUESTIONS, "--retry", "everything"], "'everything' is none of failed, truncated"),
        ([QUESTIONS, "--time-limit", "soon"], "--time-limit soon: a duration such as"),
        ([QUESTIONS, "--max-errors", "many"], "--max-errors many: a number of rows"),
        ([QUESTIONS, "--shard-index", "1"], "--shard-index and --shard-count go together"),
        (
            [QUESTIONS, "--shard-index", "2", "--shard-count", "2"],
            "--shard-index 2: is shard 2, and 2 shards are 0 to 1",
        ),
        ([QUESTIONS, "--id-column", "name"], "--id-column name: the input has no such column; it has: id, prompt"),
        ([QUESTIONS, "--rows-per-shard", "0"], "--rows-per-shard"),
        ([], "no input: give at least one file"),
    ],
    ids=lambda value: " ".join(str(word) for word in value[-2:]) or "nothing" if isinstance(value, list) else None,
)
def test_wrong_options(tmp_path: Path, options: list[object], words: str) -> None:
    """Exit code 2, and nothing is written."""
    line = message("run", *options, "--model", "tiny-random", "--out", tmp_path / "out.parquet", code=2)
    assert words in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("model", "code", "words"),
    [
        ("./no-such-folder", 2, "no such model folder or .gguf file"),
        ("missing.gguf", 2, "no such file"),
        ("nobody/such-a-model-does-not-exist", 1, "not in the local cache"),
        ("not a name!", 1, "hub id"),
        (str(SAMPLES), 1, "config.json"),
    ],
)
def test_wrong_models(tmp_path: Path, model: str, code: int, words: str) -> None:
    """A missing or unreadable model says what to do."""
    assert words in message("run", QUESTIONS, "--model", model, "--out", tmp_path / "out.parquet", code=code)


def test_required_options(tmp_path: Path) -> None:
    """Without a model or an output there is nothing to do."""
    assert "--model is missing" in message("run", QUESTIONS, "--out", tmp_path / "o.parquet", code=2)
    assert "--out is missing" in message("run", QUESTIONS, "--model", "tiny-random", code=2)
    line = message("run", QUESTIONS, "--model", "tiny-random", "--out", "o.csv", code=2)
    assert "one of .parquet, .jsonl; a folder ends with /" in line


def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    """A folder that cannot be made is told before any work."""
    (tmp_path / "file").write_text("x")
    line = message("run", QUESTIONS, "--model", "tiny-random", "--out", tmp_path / "file" / "out.parquet", code=1)
    assert "cannot be written" in line


def test_a_summary_that_cannot_be_written(tmp_path: Path) -> None:
    """It is told before the work, not after."""
    (tmp_path / "file").write_text("x")
    options = ("--model", "tiny-random", "--out", tmp_path / "o.parquet", "--summary", tmp_path / "file" / "s.json")
    assert "cannot be written" in message("run", QUESTIONS, *options, code=1)
    assert not (tmp_path / "o.parquet").exists()


def test_a_cache_that_does_not_fit(tmp_path: Path) -> None:
    """The message says what would fit."""
    line = message(
        "run", QUESTIONS, "--model", "tiny-random", "--out", tmp_path / "o.parquet", "--num-blocks", 10**9, code=1
    )
    assert "room for" in line
    assert "--num-blocks" in line


def test_job_spec_file(tmp_path: Path) -> None:
    """A YAML file holds the same options; the command line wins; an unknown key is refused with the nearest name."""
    spec = tmp_path / "job.yaml"
    spec.write_text(f"input: {QUESTIONS}\nmodel: tiny-random\nmax_tokens: 3\nlimit: 4\nout: {tmp_path / 'a.jsonl'}\n")
    assert cbgen("run", spec).exit_code == 0
    assert [row["completion_tokens"] for row in read_rows(tmp_path / "a.jsonl")] == [3] * 4
    assert cbgen("run", spec, "--max-tokens", 2, "--out", tmp_path / "b.jsonl").exit_code == 0
    assert [row["completion_tokens"] for row in read_rows(tmp_path / "b.jsonl")] == [2] * 4
    spec.write_text(spec.read_text() + "max_token: 5\n")
    assert "unknown option 'max_token'; did you mean max_tokens?" in message("run", spec, code=2)


def test_the_command_line_wins_over_another_name_in_a_file(tmp_path: Path) -> None:
    """What vLLM's name turned off is asked for again, and refused here, where there are no graphs."""
    spec = tmp_path / "job.yaml"
    options = (
        f"input: {QUESTIONS}\nmodel: tiny-random\nmax_tokens: 1\nlimit: 1\nout: {tmp_path / 'a.jsonl'}\ndevice: cpu\n"
    )
    spec.write_text(options + "enforce_eager: true\nmax_cached_graphs: 4\n")
    assert "use_cuda_graph: only CUDA devices record graphs" in message("run", spec, "--use-cuda-graph", code=2)
    result = cbgen("run", spec)
    assert result.exit_code == 0, result.output
    assert "warning: --max-cached-graphs has no effect on cpu" in result.output


def test_options_that_users_know_from_elsewhere(tmp_path: Path) -> None:
    """vLLM's names work, and end in the same place."""
    options = (
        "--max-num-seqs",
        3,
        "--max-num-batched-tokens",
        40,
        "--max-model-len",
        512,
        "--seed",
        4,
        "--dtype",
        "float32",
        "--enforce-eager",
        "--no-async-scheduling",
    )
    run_tiny(QUESTIONS, tmp_path / "o.parquet", *options, "--max-tokens", 2, "--summary", tmp_path / "s.json")
    config = json.loads((tmp_path / "s.json").read_text())["config"]
    assert config["engine"]["max_requests_per_batch"] == 3
    assert config["engine"]["max_batch_tokens"] == 40
    assert (config["max_model_len"], config["seed"], config["dtype"]) == (512, 4, "float32")
    assert (config["engine"]["use_cuda_graph"], config["engine"]["use_async_batching"]) == (False, False)


def test_memory_utilization_is_converted(tmp_path: Path) -> None:
    """A share of all memory, what is in use included; one that leaves nothing is refused."""
    run_tiny(QUESTIONS, tmp_path / "o.parquet", "--gpu-memory-utilization", 0.9, "--max-tokens", 1, "--limit", 1)
    options = ("--model", "tiny-random", "--out", tmp_path / "p.parquet", "--gpu-memory-utilization", 0.0001)
    assert "in use" in message("run", QUESTIONS, *options, code=1)


def test_everything_resolved_is_printed(tmp_path: Path) -> None:
    """Before work starts: input, output, model, sampling, engine, cache, and the first prompt as the model reads it."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "[bold]Hello[/bold]\nthere"}])
    result = cbgen("run", source, "--model", "tiny-random", "--out", tmp_path / "o.parquet", "--chat")
    for words in (
        "1 rows, prompts from column prompt",
        "greedy, max_tokens 512, n 1, seed 0; the same for all rows",
        "float32 on cpu",
        "blocks of 32 tokens",
    ):
        assert words in result.output
    assert "  | <|begin|>user\n  | [bold]Hello[/bold]\n  | there<|end|><|begin|>assistant" in result.output


def test_env() -> None:
    """`cbgen env` prints versions, device and kernels."""
    output = cbgen("env").output
    assert all(word in output for word in ("cbgen", "torch", "transformers", "device", "kernels"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--top-p", 0.5], "--top-p has no effect at temperature 0"),
        (["--min-p", 0.1, "--top-k", 3], "--top-k and --min-p have no effect at temperature 0"),
        (["--include-stop"], "--include-stop has no effect"),
        (["--n", 2], "the same completion 2 times"),
        (["--revision", "main"], "--revision has no effect"),
        (["--chat-template-kwargs", '{"a": 1}'], "--chat-template-kwargs has no effect"),
        (["--max-memory-percent", 0.5, "--gpu-memory-utilization", 0.9], "--max-memory-percent has no effect"),
        (["--messages-column", "messages", "--chat"], "--chat has no effect"),
        (["--cpu-offload-space", 0.01], "takes what the cache could have"),
        (["--q-padding-interval-size", 32], "--q-padding-interval-size has no effect on cpu"),
        (["--max-cached-graphs", 8, "--enforce-eager"], "--max-cached-graphs has no effect on cpu"),
        (["--rows-per-shard", 10], "--rows-per-shard has no effect: --out is one file"),
        (["--split", "train"], "--split have no effect without --dataset"),
        (["--error-file", "errors.jsonl"], "--error-file has no effect"),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, list) else None,
)
def test_an_option_without_effect_warns(tmp_path: Path, options: list[object], words: str) -> None:
    """The job runs, and says what it did not use."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}])
    options = options if "--messages-column" in options else ["--prompt-column", "prompt", *options]
    result = cbgen("run", source, "--model", "tiny-random", "--out", tmp_path / "o.jsonl", "--max-tokens", 1, *options)
    assert result.exit_code == 0, result.output
    assert any(line.startswith("warning: ") and words in line for line in result.output.splitlines())
