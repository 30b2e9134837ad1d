"""The job as the user writes it: what is wrong is told in one line, with the option and the nearest right name."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from cbgen.errors import UsageError
from cbgen.jobspec import JobSpec, build_spec, is_folder, option_name, read_spec_file
from cbgen.stopping import parse_duration

NEEDED = {"input": ["a.jsonl"], "model": "tiny-random", "out": "out.parquet"}


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as caught:
        build_spec(values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_need_input_model_and_out_only() -> None:
    """Everything else has a default, and a spec cannot be changed."""
    spec = build_spec(NEEDED)
    assert (spec.resume, spec.n, spec.limit, spec.temperature) == ("if-possible", 1, None, None)
    with pytest.raises(ValueError, match="frozen"):
        spec.n = 2


@pytest.mark.parametrize(("given", "expected"), [("a.jsonl", ["a.jsonl"]), (["a", "b"], ["a", "b"])])
def test_input_may_be_one_text_or_many(given: Any, expected: list[str]) -> None:
    """One path need not be a list."""
    assert build_spec(NEEDED | {"input": given}).input == expected


@pytest.mark.parametrize("name", ["model", "out"])
def test_what_is_missing_is_named(name: str) -> None:
    """As the command line spells it."""
    values = {option: value for option, value in NEEDED.items() if option != name}
    assert refusal(values) == f"{option_name(name)} is missing"


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("max_token", "max_tokens"),
        ("max-tokens", "max_tokens"),
        ("temprature", "temperature"),
        ("imput", "input"),
        ("retries", "retry"),
    ],
)
def test_an_unknown_option_has_the_nearest_name(name: str, near: str) -> None:
    """A slip of the pen is told with the name that was meant."""
    assert refusal(NEEDED | {name: 1}) == f"unknown option {name!r}; did you mean {near}?"


def test_an_unknown_option_like_no_other_has_no_hint() -> None:
    """Nothing is guessed."""
    assert refusal(NEEDED | {"zzzz": 1}) == "unknown option 'zzzz'"


def test_a_needed_option_with_a_slip_is_told_as_such() -> None:
    """`modle: x` is a wrong name, not a missing model."""
    values = {"input": "a.jsonl", "modle": "tiny-random", "out": "out.parquet"}
    assert refusal(values) == "unknown option 'modle'; did you mean model?"


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("resume", "maybe", ["--resume", "if-possible", "always", "never"]),
        ("out", "out.csv", ["--out", "out.csv", ".parquet", ".jsonl"]),
        ("out", "out.csv", ["a folder ends with /"]),
        ("out", "folder.d/out.txt", ["--out", "folder.d/out.txt", ".parquet", ".jsonl"]),
        ("retry", "everything", ["--retry", "everything", "failed, truncated", "comma"]),
        ("retry", "failed,cut", ["--retry", "cut"]),
        ("retry", "", ["--retry", "failed, truncated"]),
        ("retry", "failed,", ["--retry", "failed, truncated"]),
        ("max_errors", True, ["--max-errors"]),
        ("time_limit", [90], ["--time-limit"]),
        ("rows_per_shard", 0, ["--rows-per-shard"]),
        ("shard_index", -1, ["--shard-index"]),
        ("shard_count", 0, ["--shard-count"]),
        ("drain_timeout", -1, ["--drain-timeout"]),
        ("publish_timeout", -0.5, ["--publish-timeout"]),
        ("publish_timeout", "long", ["--publish-timeout"]),
        ("format", "csv", ["--format", "auto", "openai-batch"]),
        ("deterministic", "perhaps", ["--deterministic"]),
        ("input", 3, ["INPUT"]),
        ("input", [3], ["INPUT"]),
        ("n", 0, ["--n"]),
        ("limit", -1, ["--limit"]),
        ("part_rows", 0, ["--part-rows"]),
        ("part_interval", float("nan"), ["--part-interval"]),
        ("max_tokens", "many", ["--max-tokens"]),
        ("model", None, ["--model"]),
        ("chat_template_kwargs", ["a"], ["--chat-template-kwargs"]),
        ("use_cuda_graph", "sometimes", ["--use-cuda-graph", "sometimes"]),
        ("enforce_eager", "sometimes", ["--enforce-eager", "true or false", "sometimes"]),
        ("enforce_eager", None, ["--enforce-eager", "true or false"]),
    ],
)
def test_a_wrong_value_is_named_with_what_is_right(name: str, value: Any, parts: list[str]) -> None:
    """The option as the command line spells it, and what it takes."""
    message = refusal(NEEDED | {name: value})
    assert all(part in message for part in parts)


@pytest.mark.parametrize("out", ["out.parquet", "folder/out.jsonl", "~/out.parquet", "folder/", "folder.d/", "folder"])
def test_the_output_path_is_expanded(out: str) -> None:
    """`~` is the user's home folder."""
    assert build_spec(NEEDED | {"out": out}).output == Path(out).expanduser()


@pytest.mark.parametrize(
    ("out", "expected"),
    [
        ("out/", True),
        ("out.d/", True),
        ("out", True),
        ("out.parquet/", True),
        ("out.parquet", False),
        ("o.jsonl", False),
    ],
)
def test_what_is_a_folder(out: str, expected: bool) -> None:
    """A name that ends with a slash or has no extension; what has one of a file is a file."""
    assert is_folder(build_spec(NEEDED | {"out": out}).out) == expected


def test_a_folder_that_is_there_is_one(tmp_path: Path) -> None:
    """Whatever its name."""
    (tmp_path / "run.2").mkdir()
    assert is_folder(build_spec(NEEDED | {"out": str(tmp_path / "run.2")}).out)
    assert "run.3" in refusal(NEEDED | {"out": str(tmp_path / "run.3")})


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        (None, ()),
        ("failed", ("failed",)),
        ("truncated", ("truncated",)),
        ("failed,truncated", ("failed", "truncated")),
        ("truncated, failed,truncated", ("failed", "truncated")),
    ],
)
def test_what_is_tried_again(given: str | None, kinds: tuple[str, ...]) -> None:
    """One kind or both, in one order, so that the same retry is known as the same."""
    assert build_spec(NEEDED | {"retry": given}).retry_kinds == kinds


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_errors", 5, "5"),
        ("max_errors", "5%", "5%"),
        ("time_limit", 90, "90"),
        ("time_limit", 1.5, "1.5"),
        ("time_limit", "7h30m", "7h30m"),
    ],
)
def test_limits_may_be_numbers_or_texts(name: str, value: Any, expected: str) -> None:
    """YAML makes a number of what looks like one."""
    assert getattr(build_spec(NEEDED | {name: value}), name) == expected


def test_engine_options_reach_the_engine() -> None:
    """Each option of the engine goes to its configuration under the same name."""
    options = {
        "page_size": 8,
        "num_blocks": 64,
        "max_batch_tokens": 256,
        "max_requests_per_batch": 4,
        "max_memory_percent": 0.5,
        "scheduler_type": "prefill_first",
        "safety_margin": 0.1,
        "use_cuda_graph": True,
        "use_async_batching": False,
        "q_padding_interval_size": 16,
        "kv_padding_interval_size": 512,
        "max_cached_graphs": 7,
    }
    config = build_spec(NEEDED | options).engine_config()
    assert {name: getattr(config, name) for name in options} == options


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (None, None)),
        ({"enforce_eager": True}, (False, None)),
        ({"enforce_eager": False}, (None, None)),
        ({"use_cuda_graph": True, "enforce_eager": False}, (True, None)),
        ({"enforce_eager": True, "use_cuda_graph": True}, (True, None)),
        ({"use_cuda_graph": True, "enforce_eager": True}, (False, None)),
        ({"async_scheduling": True}, (None, True)),
        ({"async_scheduling": False, "use_async_batching": True}, (None, True)),
    ],
    ids=str,
)
def test_names_of_vllm_for_graphs(given: dict[str, bool], expected: tuple[bool | None, bool | None]) -> None:
    """One says the opposite, and leaves the choice to cbgen when it is false; the later of two names counts."""
    spec = build_spec(NEEDED | given)
    assert (spec.use_cuda_graph, spec.use_async_batching) == expected


def test_a_spec_file_gives_its_options(tmp_path: Path) -> None:
    """What it holds is what build_spec takes, in UTF-8."""
    path = tmp_path / "job.yaml"
    path.write_text("model: tiny-random\ninput: é.jsonl\nout: out.jsonl\nn: 2\n", encoding="utf-8")
    values = read_spec_file(path)
    assert values == {"model": "tiny-random", "input": "é.jsonl", "out": "out.jsonl", "n": 2}
    assert isinstance(build_spec(values), JobSpec)


IN_YAML = """
dataset: owner/name
dataset_config: plain
split: train
format: openai-batch
id_column: id
shard_index: 2
shard_count: 8
deterministic: true
error_file: errors.jsonl
rows_per_shard: 500
retry: failed,truncated
max_errors: 5
time_limit: 90
drain_timeout: 10
publish_timeout: 0
use_cuda_graph: true
use_async_batching: false
q_padding_interval_size: 32
kv_padding_interval_size: 1024
max_cached_graphs: 16
"""


def test_every_option_of_a_job_can_stand_in_a_file(tmp_path: Path) -> None:
    """Those of the job layer, as YAML has them; every other field has a value there that validates too."""
    path = tmp_path / "job.yaml"
    path.write_text("model: tiny-random\nout: shards/\n" + IN_YAML, encoding="utf-8")
    given = read_spec_file(path)
    spec = build_spec(given)
    told = {name: getattr(spec, name) for name in given}
    assert told == given | {"max_errors": "5", "time_limit": "90"}
    path.write_text(yaml.safe_dump(spec.model_dump()), encoding="utf-8")
    assert build_spec(read_spec_file(path)) == spec


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("7h30m", 27_000), ("07:30:00", 27_000), ("7:30:00", 27_000), ("7:30", 450)],
)
def test_a_time_limit_in_a_file_means_what_it_says(tmp_path: Path, text: str, seconds: float) -> None:
    """YAML reads 7:30:00 as a number to base 60, which is the same seconds."""
    path = tmp_path / "job.yaml"
    path.write_text(f"model: m\nout: o.jsonl\ntime_limit: {text}\n", encoding="utf-8")
    limit = build_spec(read_spec_file(path)).time_limit
    assert limit is not None
    assert parse_duration("--time-limit", limit) == seconds


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "mapping"),
        (b"- model", "mapping"),
        (b"model", "mapping"),
        (b"1: model", "mapping"),
        (b"model: [", "YAML"),
        (b"model: caf\xe9", "YAML"),
        (b"model: \x00", "YAML"),
        (b"model: !!python/object/apply:os.getcwd []", "YAML"),
        (b"revision: 2024-13-45", "YAML"),
    ],
    ids=["empty", "list", "text", "number as name", "cut", "not UTF-8", "NUL", "code", "impossible date"],
)
def test_a_file_that_is_no_spec_is_refused(tmp_path: Path, content: bytes, part: str) -> None:
    """One line with the file and what is wrong."""
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_spec_file(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["absent.yaml", "."])
def test_a_spec_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    """One that is missing, and a folder."""
    with pytest.raises(UsageError, match=str(tmp_path)):
        read_spec_file(tmp_path / name)
