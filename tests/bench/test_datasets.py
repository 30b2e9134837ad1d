"""The requests of a benchmark: sizes, draws, files, and what is said about options that change nothing."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from engine_harness import CPU
from job_harness import write_jsonl

from cbgen.bench.dataset_files import read_prompts
from cbgen.bench.dataset_options import BenchRequest, DatasetOptions
from cbgen.bench.datasets import Workload, make_workload
from cbgen.errors import UsageError
from cbgen.models.loading import ModelDescription, describe

NAMES = ("random", "prefix-repetition")


@pytest.fixture(scope="module")
def model() -> ModelDescription:
    """A token for each byte, and a context of 2,048."""
    return describe("tiny-random", None, "float32", CPU)


def made(model: ModelDescription, **options: Any) -> Workload:
    return make_workload(DatasetOptions(**options), model)


def prompts_of(workload: Workload) -> list[list[int]]:
    return [request.prompt_ids for request in workload.requests]


@pytest.mark.parametrize("name", NAMES)
def test_generated_requests_are_the_same_every_time(model: ModelDescription, name: str) -> None:
    """For one seed; another one's differ. Special tokens do not occur, and no option is told to be without effect."""
    options: dict[str, Any] = {"dataset_name": name, "num_prompts": 6, "input_len": 20, "prefix_len": 8}
    workload = made(model, **options)
    assert made(model, **options) == workload
    assert made(model, **options, seed=1) != workload
    assert workload.warnings == ()
    assert not set(model.tokenizer.all_special_ids) & {
        token_id for prompt in prompts_of(workload) for token_id in prompt
    }


def test_random_has_its_defaults(model: ModelDescription) -> None:
    """64 prompts of 128 tokens that ask for 64, without a prefix."""
    workload = made(model)
    assert (workload.prompt_tokens, workload.output_tokens) == (64 * 128, 64 * 64)
    assert {(len(request.prompt_ids), request.max_tokens, request.n) for request in workload.requests} == {(128, 64, 1)}
    assert len({tuple(prompt[:8]) for prompt in prompts_of(workload)}) == 64


def test_a_random_prefix_is_common(model: ModelDescription) -> None:
    """It comes before input_len tokens of a prompt's own; 0 of them is none."""
    prompts = prompts_of(made(model, num_prompts=5, input_len=20, prefix_len=11))
    assert [len(prompt) for prompt in prompts] == [31] * 5
    assert len({tuple(prompt[:11]) for prompt in prompts}) == 1
    assert len({prompt[11] for prompt in prompts}) > 1
    assert made(model, prefix_len=0) == made(model)


def test_lengths_vary_within_the_range(model: ModelDescription) -> None:
    """Both ends are reached and not passed; the prefix keeps its length; nothing is shorter than one token."""
    workload = made(model, num_prompts=400, input_len=20, output_len=10, prefix_len=5, random_range_ratio=0.25)
    inputs = {len(prompt) - 5 for prompt in prompts_of(workload)}
    assert (min(inputs), max(inputs)) == (15, 25)
    assert {request.max_tokens for request in workload.requests} == set(range(7, 14))
    short = made(model, num_prompts=100, input_len=1, output_len=1, random_range_ratio=0.9)
    assert {len(prompt) for prompt in prompts_of(short)} == {1, 2}


def test_samples_are_counted(model: ModelDescription) -> None:
    """The prompt once, the output of each sample."""
    workload = made(model, num_prompts=3, input_len=10, output_len=7, n=4)
    assert {request.n for request in workload.requests} == {4}
    assert (workload.prompt_tokens, workload.output_tokens) == (30, 84)


@pytest.mark.parametrize("name", ["prefix-repetition", "prefix_repetition"])
def test_prefixes_are_spread_evenly(model: ModelDescription, name: str) -> None:
    """Under either name: each is before as many prompts as another or one more, and they do not come in turn."""
    options: dict[str, Any] = {"dataset_name": name, "num_prompts": 23, "input_len": 9, "prefix_len": 30}
    workload = made(model, **options, num_prefixes=4)
    assert workload.name == "prefix-repetition"
    prefixes = [tuple(prompt[:30]) for prompt in prompts_of(workload)]
    assert sorted(Counter(prefixes).values()) == [5, 6, 6, 6]
    assert len({tuple(prompt[30:]) for prompt in prompts_of(workload)}) == 23
    assert prefixes != [prefixes[number % 4] for number in range(23)]
    assert {len(prompt) for prompt in prompts_of(workload)} == {39}


def test_prefix_repetition_has_its_defaults(model: ModelDescription) -> None:
    """Ten prefixes of 256 tokens before 128 others; fewer prompts have a prefix each."""
    workload = made(model, dataset_name="prefix-repetition")
    assert {(len(request.prompt_ids), request.max_tokens) for request in workload.requests} == {(384, 64)}
    assert len({tuple(prompt[:256]) for prompt in prompts_of(workload)}) == 10
    few = made(model, dataset_name="prefix-repetition", num_prompts=3)
    assert len({tuple(prompt[:256]) for prompt in prompts_of(few)}) == 3


@pytest.mark.parametrize("name", NAMES)
def test_the_warm_up_warms_nothing(model: ModelDescription, name: str) -> None:
    """It is a small part, of the same kind, and begins with no token that a request begins with."""
    workload = made(model, dataset_name=name, prefix_len=64, input_len=8, output_len=40, n=2, num_prompts=20)
    assert [(len(one.prompt_ids), one.max_tokens, one.n) for one in workload.warm_up] == [(32, 16, 2)] * 4
    firsts = {prompt[0] for prompt in prompts_of(workload)}
    assert firsts.isdisjoint(one.prompt_ids[0] for one in workload.warm_up)
    assert len({tuple(one.prompt_ids) for one in workload.warm_up}) == 4
    (short,) = made(model, num_prompts=1, input_len=3, output_len=2).warm_up
    assert (len(short.prompt_ids), short.max_tokens) == (3, 2)


def test_a_workload_of_all_tokens_has_a_warm_up_all_the_same(model: ModelDescription) -> None:
    """Where every token begins a request, pages still differ."""
    workload = made(model, num_prompts=2000, input_len=40, output_len=1)
    assert len({prompt[0] for prompt in prompts_of(workload)}) == 256
    heads = {tuple(prompt[:8]) for prompt in prompts_of(workload)}
    assert heads.isdisjoint(tuple(one.prompt_ids[:8]) for one in workload.warm_up)


def of_file(model: ModelDescription, path: Path, **options: Any) -> Workload:
    return made(model, dataset_name="custom", dataset_path=str(path), **options)


def test_the_first_lines_of_a_file(tmp_path: Path, model: ModelDescription) -> None:
    """--num-prompts takes so many, in order; the warm-up has none of their tokens."""
    rows: list[dict[str, Any]] = [{"prompt_ids": [*range(n, 100)], "max_tokens": 40 + n} for n in range(5)]
    source = write_jsonl(tmp_path / "work.jsonl", [*rows, {"prompt": "How high is a house?", "max_tokens": 3}])
    workload = of_file(model, source, num_prompts=5)
    assert workload.requests == [BenchRequest(row["prompt_ids"], row["max_tokens"]) for row in rows]
    assert (workload.name, workload.warnings) == (f"custom {source}", ())
    assert [len(one.prompt_ids) for one in workload.warm_up] == [32] * 4
    assert {one.prompt_ids[0] for one in workload.warm_up}.isdisjoint(range(5))
    whole = of_file(model, source)
    assert whole.requests[5] == BenchRequest(model.tokenizer("How high is a house?")["input_ids"], 3)
    assert of_file(model, source, num_prompts=9).warnings == ("--num-prompts 9: there are 6, which are used",)


def test_output_len_is_for_lines_without_max_tokens(tmp_path: Path, model: ModelDescription) -> None:
    """A null is none; where every line has its own the option warns."""
    rows = [{"prompt": "a", "max_tokens": 3}, {"prompt": "b"}, {"prompt": "c", "max_tokens": None}]
    source = write_jsonl(tmp_path / "work.jsonl", rows)
    workload = of_file(model, source, output_len=8)
    assert [request.max_tokens for request in workload.requests] == [3, 8, 8]
    assert workload.warnings == ()
    assert of_file(model, source, output_len=8, num_prompts=1).warnings == (
        "--output-len has no effect on --dataset-name custom: every line has max_tokens",
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1, 2]", "a JSON object is expected"),
        ('{"max_tokens": 3}', "neither prompt_ids nor prompt"),
        ('{"prompt": "a"}', "max_tokens is None, a number is expected, here or by --output-len"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens is 0, at least 1"),
        ('{"prompt": "a", "max_tokens": 1.5}', "max_tokens is 1.5, a whole number"),
        ('{"prompt": "a", "max_tokens": "3"}', "max_tokens is '3', a number"),
        ('{"prompt": "", "max_tokens": 1}', "prompt is empty"),
        ('{"prompt_ids": [], "max_tokens": 1}', "prompt_ids is empty"),
        ('{"prompt_ids": [258], "max_tokens": 1}', "prompt_ids holds 258"),
        ('{"prompt": "a", "max_tokens": 5000}', "exceed the context of 2048"),
    ],
    ids=lambda value: value[:40],
)
def test_a_wrong_line_is_named(tmp_path: Path, model: ModelDescription, line: str, words: str) -> None:
    """With its place, blank lines counted, and the reason."""
    source = tmp_path / "work.jsonl"
    source.write_text('{"prompt": "a", "max_tokens": 1}\n\n' + line + "\n", encoding="utf-8")
    with pytest.raises(UsageError) as raised:
        of_file(model, source)
    assert words in str(raised.value)
    assert "line 3" in str(raised.value) or "request 2" in str(raised.value)


def test_what_is_no_workload_is_refused(tmp_path: Path, model: ModelDescription) -> None:
    """A file without lines, and one that is no text."""
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    for name, words in (("empty", "holds no requests"), ("binary", "not UTF-8")):
        with pytest.raises(UsageError, match=words):
            of_file(model, tmp_path / f"{name}.jsonl")
    with pytest.raises(UsageError, match="not UTF-8"):
        list(read_prompts(str(tmp_path / "binary.jsonl"), model))


def test_lines_that_ask_for_more_than_is_done(tmp_path: Path, model: ModelDescription) -> None:
    """Counted, in a line each."""
    rows: list[dict[str, Any]] = [{"prompt": "a", "max_tokens": 1, "ignore_eos": False, "temperature": 0.5}] * 2
    rows.append({"prompt": "a", "max_tokens": 1, "ignore_eos": True, "temperature": 0})
    assert of_file(model, write_jsonl(tmp_path / "work.jsonl", rows)).warnings == (
        "2 requests have ignore_eos false and generate all of their max_tokens nevertheless",
        "2 requests have a temperature and are generated greedily nevertheless",
    )


def conversation(prompt: str, answer: str) -> dict[str, Any]:
    turns = [{"from": "human", "value": prompt}, {"from": "gpt", "value": answer}, {"from": "human", "value": "More"}]
    return {"id": prompt[:4], "conversations": turns}


# With tiny-random a token is a byte.
GOOD = [conversation(f"Question {number}", "x" * (4 + number)) for number in range(12)]
BAD: list[dict[str, Any]] = [
    {"conversations": [{"from": "human", "value": "alone"}]},
    {"id": "none"},
    {"conversations": [{"from": "human", "value": None}, {"value": "null"}]},
    {"conversations": ["texts", "are no turns"]},
    conversation("Why", "three tokens"),
    conversation("Why not?", "no"),
    conversation("long " * 205, "1,025 tokens of prompt"),
    conversation("long " * 200, "y" * 1049),
]


def of_sharegpt(model: ModelDescription, path: Path, **options: Any) -> Workload:
    return made(model, dataset_name="sharegpt", dataset_path=str(path), **options)


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_the_first_two_turns_make_a_request(tmp_path: Path, model: ModelDescription, suffix: str) -> None:
    """The first one is the prompt, the second one as long as the output; in an order drawn from the seed."""
    source = tmp_path / f"talk.{suffix}"
    if suffix == "json":
        source.write_text("\n " + json.dumps([*BAD, *GOOD], indent=1), encoding="utf-8")
    else:
        write_jsonl(source, [*BAD, *GOOD])
    workload = of_sharegpt(model, source)
    texts = {model.tokenizer.decode(request.prompt_ids): request.max_tokens for request in workload.requests}
    assert texts == {f"Question {number}": 4 + number for number in range(12)}
    assert list(texts.values()) != sorted(texts.values())
    assert of_sharegpt(model, source) == workload
    assert of_sharegpt(model, source, seed=3).requests != workload.requests
    (warning,) = workload.warnings
    assert warning.startswith("conversations left out: ")
    for words in ("4 without two turns of text", "2 too short (under 4 tokens)", "2 too long (over 1,024 tokens"):
        assert words in warning


def test_as_many_conversations_as_are_asked_for(tmp_path: Path, model: ModelDescription) -> None:
    """The first of the same order; where there are fewer, a line says how many are used."""
    source = write_jsonl(tmp_path / "talk.jsonl", GOOD)
    assert of_sharegpt(model, source, num_prompts=5).requests == of_sharegpt(model, source).requests[:5]
    assert of_sharegpt(model, source, num_prompts=5).warnings == ()
    assert of_sharegpt(model, source, num_prompts=13).warnings == ("--num-prompts 13: there are 12, which are used",)


def test_output_len_replaces_the_answer_s(tmp_path: Path, model: ModelDescription) -> None:
    """Then answers may be short; what the context is too short for is left out."""
    source = write_jsonl(tmp_path / "talk.jsonl", [*GOOD, conversation("Why not?", "no"), conversation("a" * 99, "no")])
    assert {request.max_tokens for request in of_sharegpt(model, source, output_len=2).requests} == {2}
    assert len(of_sharegpt(model, source, output_len=2).requests) == 14
    short = describe("tiny-random", None, "float32", CPU, max_model_len=64)
    workload = of_sharegpt(short, source, output_len=9)
    assert len(workload.requests) == 13
    assert workload.warnings == ("conversations left out: 1 longer than the context of 64",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "no conversation can be used (it is empty)"),
        ('[{"id": 1}]', "no conversation can be used (1 without two turns of text)"),
        ("[1]", "entry 1: a JSON object is expected"),
        ('[{"id": 1}', "not valid JSON"),
        ('{"id": 1}\n3\n', "line 2: a JSON object is expected"),
    ],
)
def test_files_without_conversations(tmp_path: Path, model: ModelDescription, content: str, words: str) -> None:
    """One line with the file and the reason."""
    source = tmp_path / "talk.json"
    source.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError) as raised:
        of_sharegpt(model, source)
    assert words in str(raised.value)
    assert str(source) in str(raised.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"dataset_name": "sonnet"},
            "--dataset-name sonnet: not one of random, prefix-repetition, sharegpt, custom; a",
        ),
        ({"dataset_name": "work.jsonl"}, "a file is read with --dataset-name custom or sharegpt, and --dataset-path"),
        ({"dataset_name": "custom"}, "--dataset-name custom: --dataset-path is missing"),
        ({"dataset_name": "sharegpt"}, "--dataset-name sharegpt: --dataset-path is missing"),
        ({"dataset_name": "custom", "dataset_path": "nowhere.jsonl"}, "--dataset-path nowhere.jsonl: no such file"),
        ({"random_range_ratio": 1.2}, "--random-range-ratio 1.2: at least 0 and below 1 is expected"),
        ({"random_range_ratio": 1.0}, "--random-range-ratio 1: at least 0"),
        ({"random_range_ratio": float("nan")}, "--random-range-ratio nan: at least 0"),
        ({"num_prompts": 0}, "--num-prompts 0: at least 1 is expected"),
        ({"input_len": 0}, "--input-len 0: at least 1"),
        ({"output_len": -1}, "--output-len -1: at least 1"),
        ({"prefix_len": -1}, "--prefix-len -1: at least 0"),
        ({"num_prefixes": 0}, "--num-prefixes 0: at least 1"),
        ({"n": 0}, "--n 0: at least 1"),
        ({"seed": -1}, "--seed -1: at least 0"),
        ({"input_len": 3000}, "prompts of 3000 tokens that ask for 64 exceed the context of 2048"),
        ({"input_len": 10**400}, "that ask for 64 exceed the context of 2048"),
        ({"output_len": 10**400, "random_range_ratio": 0.5}, "exceed the context of 2048"),
        ({"prefix_len": 2000}, "prompts of 2128 tokens that ask for 64 exceed"),
        (
            {"prefix_len": 100, "input_len": 1000, "output_len": 700, "random_range_ratio": 0.2, "num_prompts": 1},
            "prompts of up to 1300 tokens that ask for up to 840 exceed the context of 2048",
        ),
        (
            {"dataset_name": "prefix-repetition", "input_len": 1800},
            "--dataset-name prefix-repetition: prompts of 2056 tokens that ask for 64 exceed",
        ),
        (
            {"dataset_name": "prefix-repetition", "num_prompts": 4, "num_prefixes": 5},
            "--num-prefixes 5: more than the 4",
        ),
    ],
)
def test_wrong_options(model: ModelDescription, options: dict[str, Any], words: str) -> None:
    """The option, its value and what is right."""
    with pytest.raises(UsageError) as raised:
        made(model, **options)
    assert words in str(raised.value)


def test_options_without_effect_warn(tmp_path: Path, model: ModelDescription) -> None:
    """Each in a line of its own, also with the value that would change nothing elsewhere."""
    source = write_jsonl(tmp_path / "work.jsonl", [{"prompt": "a", "max_tokens": 1}])
    write_jsonl(tmp_path / "talk.jsonl", GOOD)
    lengths: dict[str, Any] = {"input_len": 3, "prefix_len": 0, "num_prefixes": 1, "random_range_ratio": 0.0}
    ignored = ["--input-len", "--prefix-len", "--num-prefixes", "--random-range-ratio"]
    assert of_file(model, source, **lengths, seed=2).warnings == tuple(
        f"{name} has no effect on --dataset-name custom" for name in [*ignored, "--seed"]
    )
    assert [
        line.split()[0] for line in of_sharegpt(model, tmp_path / "talk.jsonl", **lengths, seed=2).warnings
    ] == ignored
    assert made(model, dataset_path=str(source), num_prefixes=2).warnings == (
        "--dataset-path has no effect on --dataset-name random",
        "--num-prefixes has no effect on --dataset-name random",
    )
    assert made(model, dataset_name="prefix_repetition", random_range_ratio=0.5).warnings == (
        "--random-range-ratio has no effect on --dataset-name prefix-repetition",
    )


def test_what_just_fits_is_made(model: ModelDescription) -> None:
    """With the upper end of the range; a ratio that prefix-repetition does not take counts for nothing there."""
    lengths: dict[str, Any] = {"prefix_len": 48, "input_len": 1000, "num_prompts": 2}
    assert len(made(model, **lengths, output_len=333, random_range_ratio=0.5).requests) == 2
    options: dict[str, Any] = {"dataset_name": "prefix-repetition", "random_range_ratio": 0.5, "output_len": 1000}
    assert made(model, **lengths, **options).prompt_tokens == 2 * 1048
