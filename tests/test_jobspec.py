"""The job as the user writes it: what is wrong is told in one line, with the option and the nearest right name."""

from pathlib import Path
from typing import Any

import pytest

from cbgen.errors import UsageError
from cbgen.jobspec import JobSpec, build_spec, option_name, read_spec_file

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


@pytest.mark.parametrize("name", NEEDED)
def test_what_is_missing_is_named(name: str) -> None:
    """As the command line spells it."""
    values = {option: value for option, value in NEEDED.items() if option != name}
    assert refusal(values) == f"{option_name(name)} is missing"


@pytest.mark.parametrize(
    ("name", "near"),
    [("max_token", "max_tokens"), ("max-tokens", "max_tokens"), ("temprature", "temperature"), ("imput", "input")],
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
        ("out", "out", ["--out", ".parquet", ".jsonl"]),
        ("input", 3, ["INPUT"]),
        ("input", [3], ["INPUT"]),
        ("input", [], ["INPUT"]),
        ("n", 0, ["--n"]),
        ("limit", -1, ["--limit"]),
        ("part_rows", 0, ["--part-rows"]),
        ("part_interval", float("nan"), ["--part-interval"]),
        ("max_tokens", "many", ["--max-tokens"]),
        ("model", None, ["--model"]),
        ("chat_template_kwargs", ["a"], ["--chat-template-kwargs"]),
    ],
)
def test_a_wrong_value_is_named_with_what_is_right(name: str, value: Any, parts: list[str]) -> None:
    """The option as the command line spells it, and what it takes."""
    message = refusal(NEEDED | {name: value})
    assert all(part in message for part in parts)


@pytest.mark.parametrize("out", ["out.parquet", "folder/out.jsonl", "~/out.parquet"])
def test_the_output_path_is_expanded(out: str) -> None:
    """`~` is the user's home folder."""
    assert build_spec(NEEDED | {"out": out}).output == Path(out).expanduser()


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
    }
    config = build_spec(NEEDED | options).engine_config()
    assert {name: getattr(config, name) for name in options} == options


def test_a_spec_file_gives_its_options(tmp_path: Path) -> None:
    """What it holds is what build_spec takes, in UTF-8."""
    path = tmp_path / "job.yaml"
    path.write_text("model: tiny-random\ninput: é.jsonl\nout: out.jsonl\nn: 2\n", encoding="utf-8")
    values = read_spec_file(path)
    assert values == {"model": "tiny-random", "input": "é.jsonl", "out": "out.jsonl", "n": 2}
    assert isinstance(build_spec(values), JobSpec)


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
