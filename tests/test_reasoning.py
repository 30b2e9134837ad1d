"""What a model thinks is parted from what it answers: by text, by special tokens, and with a tag in the prompt."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import pytest
from job_harness import cbgen, read_rows, run_tiny, write_jsonl
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from cbgen.collector import Collector
from cbgen.data.files import DiskPatience
from cbgen.data.manifest import Manifest, PartsFolder
from cbgen.data.rows import KEY_BYTES
from cbgen.data.writers import PartWriter
from cbgen.duplicates import Duplicates, Recipients, RowTag
from cbgen.engine.requests import FinishReason, RequestState
from cbgen.engine.sampling_params import SamplingParams
from cbgen.errors import UsageError
from cbgen.models.tiny_random import build_tokenizer
from cbgen.output_rows import OutputRows
from cbgen.prompting import Prompter, resolve_source
from cbgen.reasoning import DEFAULT_TAGS, ReasoningSplitter, parse_tags

OPEN, CLOSE = "<think>", "</think>"
KINDS = ["text", "token", "special", "special open", "special close"]


def tokenizer_with_tags(kind: str) -> PreTrainedTokenizerFast:
    """The byte tokenizer, for which a tag is text, a token of the vocabulary, or one that texts leave out."""
    tokenizer = build_tokenizer()
    if kind == "token":
        tokenizer.add_tokens([AddedToken(OPEN), AddedToken(CLOSE)])
    if kind in ("special", "special open"):
        tokenizer.add_tokens([AddedToken(OPEN, special=True)], special_tokens=True)
    if kind in ("special", "special close"):
        tokenizer.add_tokens([AddedToken(CLOSE, special=True)], special_tokens=True)
    return tokenizer


def split(tokenizer: PreTrainedTokenizerFast, prompt: str, text: str, skip: bool = True) -> tuple[str | None, str]:
    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=skip))

    prompt_ids, text_ids = tokenizer(prompt)["input_ids"], tokenizer(text)["input_ids"]
    return ReasoningSplitter(DEFAULT_TAGS, tokenizer).split(prompt_ids, text_ids, decode)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "completion"),
    [
        ("p", "<think>\nAh.\n</think>\n\nYes.", "Ah.", "Yes."),
        ("p", " \n<think>Ah.</think>Yes.", "Ah.", "Yes."),
        ("p", "<think> Ah. \n\n</think>\n Yes. \n", " Ah. ", " Yes. \n"),
        ("p", "<think></think>Yes.", "", "Yes."),
        ("p", "<think>Ah.</think>", "Ah.", ""),
        ("p", "<think>Ah. a < b", "Ah. a < b", ""),
        ("p", "<think>", "", ""),
        ("p<think>", "Ah.</think>Yes.", "Ah.", "Yes."),
        ("p<think>\n", "Ah.\n</think>\n\nYes.", "Ah.", "Yes."),
        ("p<think>\n", "<think>Ah.</think>Yes.", "Ah.", "Yes."),
        ("p<think>", "Ah.", "Ah.", ""),
        ("p<think>", "", "", ""),
        ("p", "Yes.", None, "Yes."),
        ("p", "", None, ""),
        ("p<think>\n\n</think>\n\n", "\nYes.", None, "\nYes."),
        ("what is <think> for?", "Yes.", None, "Yes."),
        ("p", "<think>Ah. é</think>é</think>e", "Ah. é", None),
    ],
)
def test_every_form(
    kind: str, skip: bool, prompt: str, text: str, reasoning: str | None, completion: str | None
) -> None:
    """With both tags, with one in the prompt, without the last, without any: for tags of every kind of token."""
    found = split(tokenizer_with_tags(kind), prompt, text, skip)
    assert found[0] == reasoning
    if completion is not None:
        assert found[1] == completion
    else:
        assert found[1].startswith("é")


@pytest.mark.parametrize("kind", KINDS)
def test_a_tag_in_the_middle_of_an_answer_is_none(kind: str) -> None:
    """Only what begins the output is thought."""
    tokenizer = tokenizer_with_tags(kind)
    for text in ("Yes. <think>no</think> maybe", "Yes.</think>no"):
        assert split(tokenizer, "p", text, skip=False) == (None, text)


def test_a_spelt_out_tag_is_no_special_token() -> None:
    """A model may write about the tags: where they are special tokens, only these count."""
    tokenizer = tokenizer_with_tags("special")
    ids = [*tokenizer(OPEN)["input_ids"], *build_tokenizer()("a </think> b")["input_ids"]]
    ids += tokenizer(CLOSE + "Yes.")["input_ids"]
    splitter = ReasoningSplitter(DEFAULT_TAGS, tokenizer)
    found = splitter.split([1], ids, lambda some: tokenizer.decode(some, skip_special_tokens=True))
    assert found == ("a </think> b", "Yes.")


@pytest.mark.parametrize("tags", ["", "<think>", " <think> ", "a b c"])
def test_tags_are_two_words(tags: str, tmp_path: Path) -> None:
    """Anything else is refused, whether they are used or not."""
    with pytest.raises(UsageError, match="--reasoning-tags"):
        parse_tags(tags)
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}])
    job = ("run", source, "--model", "tiny-random", "--out", tmp_path / "out.parquet", "--reasoning-tags", tags)
    assert cbgen(*job, "--strip-reasoning").exit_code == 2


# The collector


@contextmanager
def collecting(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[Collector, PartsFolder]]:
    """A collector that parts thoughts from answers, and where it publishes."""
    folder = PartsFolder(tmp_path / "out.parquet")
    folder.open(Manifest({}), "if-possible")
    prompter = Prompter(tokenizer, resolve_source(["prompt"]), SamplingParams(), date(2001, 2, 3))
    writer = PartWriter(folder, 10_000, 3600.0, DiskPatience(0.0, print))
    splitter = ReasoningSplitter(DEFAULT_TAGS, tokenizer)
    try:
        yield Collector(OutputRows(prompter, tokenizer, splitter), writer, Duplicates()), folder
    finally:
        folder.close()


def finished(number: int, prompt_ids: list[int], output_ids: list[int], params: SamplingParams) -> RequestState:
    tag = Recipients([RowTag(bytes([number]) * KEY_BYTES, number, 0)])
    request = RequestState(number, list(prompt_ids), params, tag)
    request.admit(0, 1.0)
    for token_id in output_ids:
        request.advance(request.num_remaining_tokens)
        request.append_token(token_id, 1.0)
    request.finish(FinishReason.LENGTH, 2.0)
    return request


def test_rows_say_whether_special_tokens_are_shown(tmp_path: Path) -> None:
    """Some rows with, some without, in one lot; thoughts are parted the same, and token counts hold them."""
    tokenizer = tokenizer_with_tags("special")
    output = tokenizer("<think>Ah.</think>Yes<|begin|>.")["input_ids"]
    with collecting(tmp_path, tokenizer) as (collector, folder):
        for number, skip in enumerate((True, False, True, False)):
            collector.put(finished(number, [1, 2], output, SamplingParams(skip_special_tokens=skip)))
        collector.close()
        rows = sorted((row for _, table in folder.parts() for row in table.to_pylist()), key=lambda row: row["key"])
    assert [row["completion"] for row in rows] == ["Yes.", "Yes<|begin|>."] * 2
    assert [row["reasoning"] for row in rows] == ["Ah."] * 4
    assert {row["completion_tokens"] for row in rows} == {len(output)}


def test_decode_shows_special_tokens_where_asked() -> None:
    """Texts come back in the order of the ids."""
    prompter = Prompter(build_tokenizer(), resolve_source(["prompt"]), SamplingParams(), date(2001, 2, 3))
    ids = build_tokenizer()("a<|begin|>")["input_ids"]
    assert prompter.decode([ids, ids, []], [False, True, False]) == ["a<|begin|>", "a", ""]
    assert prompter.decode([ids]) == ["a"]


def test_a_job_parts_thoughts_from_answers(tmp_path: Path) -> None:
    """The column is there only where it was asked for; rows that failed or did not think have null; equal rows too."""
    plain = write_jsonl(tmp_path / "plain.jsonl", [{"prompt": "What is a comet?<think>"}])
    (known,) = run_tiny(plain, tmp_path / "plain.parquet", "--max-tokens", 40)
    assert "reasoning" not in known
    text = known["completion"]
    place = next(place for place in range(5, len(text)) if text[place].isalnum() and text.index(text[place]) == place)
    rows = [{"prompt": "What is a comet?<think>"}] * 2 + [{"prompt": "What?"}, {"prompt": ""}]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    tags = f"<think> {text[place]}"
    options = ("--max-tokens", 40, "--strip-reasoning", "--reasoning-tags", tags)
    out = run_tiny(source, tmp_path / "out.parquet", *options, code=3)
    for row in out[:2]:
        assert row["reasoning"] == text[:place].strip("\n")
        assert row["completion"] == text[place + 1 :].lstrip("\n")
        assert row["completion_tokens"] == known["completion_tokens"]
    assert [row["reasoning"] for row in out[2:]] == [None, None]
    assert out[2]["completion"] and out[3]["completion"] is None
    other = cbgen("run", source, "--model", "tiny-random", "--out", tmp_path / "out.parquet", "--max-tokens", 40)
    assert other.exit_code == 4, "it is another job without"
    assert read_rows(tmp_path / "out.parquet") == out
