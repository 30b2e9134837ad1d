"""How a job generates where rows say nothing: options, files, YAML, and the model's generation config."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from job_harness import cbgen, write_jsonl
from tiny_models import build
from transformers import GenerationConfig

from cbgen.engine.sampling_params import SamplingParams
from cbgen.errors import UsageError
from cbgen.job_sampling import from_the_model, heeded_columns, resolve_sampling, sampling_line, without_effect
from cbgen.jobspec import JobSpec, build_spec, read_spec_file
from cbgen.models import tiny_random
from cbgen.models.loading import ModelDescription, describe

NEEDED = {"input": ["a.jsonl"], "model": "tiny-random", "out": "out.parquet"}
CPU = torch.device("cpu")
SAMPLES_BY = {
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "max_new_tokens": 77,
}
FROM_ALL = {name: value for name, value in SAMPLES_BY.items() if name not in ("do_sample", "max_new_tokens")}


def spec_of(**values: Any) -> JobSpec:
    return build_spec(NEEDED | values)


def model_with(folder: Path, **generation: Any) -> ModelDescription:
    """A tiny model in a folder, with this generation_config.json."""
    folder.mkdir(exist_ok=True)
    build("llama").config.save_pretrained(folder)
    tiny_random.build_tokenizer().save_pretrained(folder)
    GenerationConfig(eos_token_id=45).save_pretrained(folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | generation))
    return describe(str(folder), None, "auto", CPU)


@pytest.fixture(scope="module")
def tiny() -> ModelDescription:
    return describe("tiny-random", None, "auto", CPU)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (SAMPLES_BY, FROM_ALL | {"max_tokens": 77}),
        (SAMPLES_BY | {"do_sample": False}, {"repetition_penalty": 1.1, "max_tokens": 77}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"temperature": 0.6}, {}),
        ({}, {}),
    ],
    ids=["samples", "greedy", "samples plainly", "says not how", "nothing"],
)
def test_what_the_user_leaves_open_is_the_models(tmp_path: Path, generation: Any, expected: Any) -> None:
    """Without do_sample it says nothing of how tokens are drawn; --generation-config none passes over all of it."""
    model = model_with(tmp_path / "m", **generation)
    defaults = {"max_tokens": 512} | expected
    assert resolve_sampling(spec_of(), model) == SamplingParams(**defaults)
    assert set(from_the_model(spec_of(), model)) == expected.keys()
    given = {"temperature": 0.0, "max_tokens": 9, "repetition_penalty": 1.0}
    assert resolve_sampling(spec_of(**given), model) == SamplingParams(**defaults | given)
    assert resolve_sampling(spec_of(generation_config="none"), model) == SamplingParams(max_tokens=512)


def test_what_is_used_is_told_with_its_origin(tmp_path: Path) -> None:
    """And which columns override it."""
    model = model_with(tmp_path / "m", **SAMPLES_BY)
    spec = spec_of(top_p=0.5, seed=4)
    line = sampling_line(spec, model, resolve_sampling(spec, model), ("stop", "n"))
    used, origin, columns = line.split("; ")
    assert used == (
        "temperature 0.6, max_tokens 77, n 1, top_p 0.5, top_k 20, min_p 0.05, repetition_penalty 1.1, seed 4"
    )
    assert origin == "max_tokens, temperature, top_k, min_p, repetition_penalty from the model's generation config"
    assert columns == "a row's own stop, n override"
    spec = spec_of(generation_config="none", stop="x" * 100)
    line = sampling_line(spec, model, resolve_sampling(spec, model), ())
    assert line.startswith('greedy, max_tokens 512, n 1, stop ["xxx')
    assert line.endswith("..., seed 0; the same for all rows")


def test_what_is_used_is_recorded(tmp_path: Path) -> None:
    """In the footer; another value there is another job, and the option is named with both."""
    source, out = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "o.jsonl"
    job = ("run", source, "--model", "tiny-random", "--out", out, "--max-tokens", 2)
    assert cbgen(*job, "--min-p", 0.2, "--temperature", 0.7, "--stop", "zz").exit_code == 0
    recorded = json.loads(out.with_name("o.jsonl.job.json").read_text())["fingerprint"]
    assert (recorded["min_p"], recorded["temperature"], recorded["stop"], recorded["n"]) == (0.2, 0.7, ["zz"], 1)
    refused = cbgen(*job, "--min-p", 0.3, "--temperature", 0.7, "--stop", "zz", "--resume", "always")
    assert refused.exit_code == 4, refused.output
    assert "min_p is 0.3 now and was 0.2" in refused.output


def test_what_is_not_followed_is_named(tmp_path: Path) -> None:
    """Only where it would change something."""
    neutral = {"typical_p": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": [], "min_length": 0, "num_beams": 1}
    assert model_with(tmp_path / "m", **neutral).not_followed == ()
    model = model_with(tmp_path / "m", typical_p=0.9, no_repeat_ngram_size=3, num_beams=4)
    assert model.not_followed == ("typical_p", "no_repeat_ngram_size", "num_beams")


def test_a_generation_config_out_of_range(tmp_path: Path) -> None:
    """It is told as the model's, and what the user gives instead is taken."""
    model = model_with(tmp_path / "m", do_sample=True, min_p=7.0)
    with pytest.raises(UsageError, match=r"^the model's generation config: min_p is 7.0, .*--generation-config none"):
        resolve_sampling(spec_of(), model)
    assert resolve_sampling(spec_of(min_p=0.5), model).min_p == 0.5
    assert resolve_sampling(spec_of(generation_config="none"), model).is_greedy


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("stop: x", {"stop": "x"}),
        ("stop: [x, y]", {"stop": ["x", "y"]}),
        ("stop:", {}),
        ("stop_token_ids: 5", {"stop_token_ids": 5}),
        ("stop_token_ids: [6, 5]", {"stop_token_ids": [5, 6]}),
        ("logit_bias: {5: 1.5, '6': -2}", {"logit_bias": {5: 1.5, 6: -2}}),
        ("json_schema: {type: object, required: [a]}", {"json_schema": {"type": "object", "required": ["a"]}}),
        ('json_schema: \'{"type": "null"}\'', {"json_schema": {"type": "null"}}),
        ("choice: ['yes', 'no']", {"choice": ["yes", "no"]}),
        ('grammar: |\n  start: a\n  a: "b"', {"grammar": 'start: a\na: "b"\n'}),
        ("top_k: -1\nlogprobs: 0", {"logprobs": 0}),
        ("skip_special_tokens: false\nn: 3", {"skip_special_tokens": False, "n": 3}),
    ],
)
def test_options_in_yaml(tmp_path: Path, tiny: ModelDescription, written: str, expected: Any) -> None:
    """One or a list, mappings with keys of either kind, texts of several lines."""
    (tmp_path / "job.yaml").write_text(f"model: tiny-random\nout: o.jsonl\n{written}\n", encoding="utf-8")
    found = resolve_sampling(build_spec(read_spec_file(tmp_path / "job.yaml")), tiny)
    assert found == SamplingParams(**{"max_tokens": 512} | expected)


def test_schemas_and_grammars_from_files(tmp_path: Path, tiny: ModelDescription) -> None:
    """What a file holds, or what stands in its place; the same either way."""
    schema, grammar = tmp_path / "a.json", tmp_path / "a.lark"
    schema.write_text('\n{"type":  "object"}\n', encoding="utf-8")
    grammar.write_text('start: "é"\n', encoding="utf-8")
    by_file = resolve_sampling(spec_of(json_schema=str(schema)), tiny)
    assert by_file == resolve_sampling(spec_of(json_schema=' {"type": "object"}'), tiny)
    assert by_file.json_schema == '{"type": "object"}'
    assert resolve_sampling(spec_of(grammar=str(grammar)), tiny).grammar == 'start: "é"\n'


WRONG = [
    ({"top_p": 0}, "--top-p is 0.0, more than 0 and at most 1 is expected"),
    ({"n": 10_001}, "--n is 10001, 1 to 10000 is expected"),
    ({"min_tokens": 600}, "--min-tokens is 600, more than --max-tokens (512)"),
    ({"regex": "a", "json_schema": "{}"}, "--json-schema is empty"),
    ({"regex": "a", "json_schema": '{"a": 1}'}, "--json-schema and regex: give one of them"),
    ({"choice": ["a"], "stop_token_ids": [3]}, "--choice and --stop-token-ids: give one of them"),
    ({"json_schema": "{"}, "--json-schema is not valid JSON"),
    ({"json_schema": {"a": {1, 2}}}, "--json-schema cannot be written as JSON"),
    ({"json_schema": "nowhere.json"}, "--json-schema nowhere.json: cannot be read: No such file"),
    ({"json_schema": "a\0"}, "cannot be read"),
    ({"grammar": "."}, "--grammar .: cannot be read: Is a directory"),
    ({"stop": ""}, "--stop holds an empty text"),
    ({"stop_token_ids": [True]}, "--stop-token-ids is True, a number is expected"),
    ({"stop_token_ids": [258]}, "--stop-token-ids names token 258, those of this model are 0 to 257"),
    ({"logit_bias": {"258": 1}}, "--logit-bias names token 258"),
    ({"logit_bias": {5: True}}, "--logit-bias of token 5 is True, a number is expected"),
    ({"logit_bias": {"x": 1}}, "a token of --logit-bias is 'x'"),
    ({"logprobs": 21}, "--logprobs is 21, 0 to 20 is expected"),
]


@pytest.mark.parametrize(("values", "words"), WRONG, ids=str)
def test_wrong_options_are_told_as_typed(tiny: ModelDescription, values: dict[str, Any], words: str) -> None:
    """One line with the option as the command line spells it, before anything is generated."""
    with pytest.raises(UsageError) as caught:
        resolve_sampling(spec_of(**values), tiny)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("auto", ("temperature", "stop", "n")),
        ("none", ()),
        ("stop", ("stop",)),
        ("n, temperature,n", ("n", "temperature")),
    ],
)
def test_which_columns_are_options(given: str, expected: tuple[str, ...]) -> None:
    """All that bear such a name, none, or those that are named."""
    available = ["prompt", "n", "stop", "temperature", "id"]
    assert heeded_columns(spec_of(row_options=given), available) == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [("stop,id", "'id' is none of max_tokens, "), ("", "'' is none of"), ("top_k", "the input has no column 'top_k'")],
)
def test_columns_that_are_no_options(given: str, words: str) -> None:
    """With those that could be."""
    with pytest.raises(UsageError) as caught:
        heeded_columns(spec_of(row_options=given), ["prompt", "stop", "id"])
    assert str(caught.value).startswith("--row-options: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("values", "heeded", "words"),
    [
        ({"top_p": 0.5}, (), ["--top-p has no effect at temperature 0"]),
        ({"top_p": 0.5, "min_p": 0.1}, (), ["--top-p and --min-p have no effect at temperature 0"]),
        ({"top_p": 0.5, "n": 2}, ("temperature",), []),
        ({"top_p": 0.5, "temperature": 1.0, "n": 2}, (), []),
        ({"n": 2}, (), ["the same completion 2 times"]),
        ({"include_stop": True}, (), ["--include-stop has no effect"]),
        ({"include_stop": True, "stop": "x"}, (), []),
        ({"include_stop": True}, ("stop_token_ids",), []),
    ],
)
def test_options_without_effect(tiny: ModelDescription, values: Any, heeded: Any, words: list[str]) -> None:
    """They are told, unless rows may give them one."""
    spec = spec_of(**values)
    told = list(without_effect(spec, resolve_sampling(spec, tiny), heeded))
    assert len(told) == len(words)
    assert all(word in line for word, line in zip(words, told, strict=True))


def test_a_column_by_another_tools_name_warns(tmp_path: Path) -> None:
    """What is not read is told, with the name that is; nothing is said where columns do not count."""
    source = write_jsonl(
        tmp_path / "in.jsonl", [{"prompt": "a", "max_new_tokens": 3, "guided_choice": ["x"], "stop": "b"}]
    )
    job = ("run", source, "--model", "tiny-random", "--max-tokens", 2)
    told = cbgen(*job, "--out", tmp_path / "a.jsonl").output
    assert "the column max_new_tokens is not read: the parameter's name is max_tokens" in told
    assert "the column guided_choice is not read: the parameter's name is choice" in told
    assert "is not read" not in cbgen(*job, "--out", tmp_path / "b.jsonl", "--row-options", "none").output


@pytest.mark.parametrize(
    ("name", "ours", "value"),
    [
        ("max_num_seqs", "max_requests_per_batch", 3),
        ("max_num_batched_tokens", "max_batch_tokens", 40),
        ("enable_prefix_caching", "allow_block_sharing", False),
    ],
)
def test_names_of_vllm_in_a_spec(name: str, ours: str, value: Any) -> None:
    """As on the command line."""
    assert getattr(spec_of(**{name: value}), ours) == value


def test_a_value_of_the_wrong_type_is_shown() -> None:
    """YAML reads `yes` as a truth value."""
    with pytest.raises(UsageError, match=r"--choice: .*, not True; put it in quotes"):
        spec_of(choice=[True, False])
