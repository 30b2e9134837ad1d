"""Structured output: what each kind allows, matchers that are made anew at any time, masks of a whole batch."""

import json
import re
import sys
import threading

import numpy as np
import pytest
import torch
from engine.grammar_harness import EOS_ID, TOKENIZER, allows, byte_grammars, random_outputs, schema_structure, tokens_of
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import cbgen.engine.grammars
from cbgen.engine.grammars import Grammars, Structure
from cbgen.engine.sampling_params import SamplingParams
from cbgen.errors import RowError

CHOICES = ["yes", "no", "yes, but", "Ünïcödé 😀", 'a "quote"', "back\\slash", "two\nlines", "<|end|>", "[a-z]+", "/x/"]
ARITHMETIC = (
    'start: sum\nsum: product ("+" product)~0..2\nproduct: NUMBER | "(" NUMBER "*" NUMBER ")"\nNUMBER: /[0-9]{1,3}/\n'
)
POINT = 'root ::= "(" ws number "," ws number ")"\nnumber ::= [0-9] [0-9]?\nws ::= [ ]?\n'
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
REGEXES = [r"[a-c]{2,5}", r"(yes|no)( indeed)?", r"\+[0-9]{1,3}-[0-9]{4,6}", r"^[^a]{3}$", r"(?i:hello) [äöü]{1,2}"]
STRUCTURES: list[Structure] = [
    schema_structure(PERSON),
    ("choice", json.dumps(CHOICES)),
    ("grammar", ARITHMETIC),
    ("grammar", POINT),
    *(("regex", regex) for regex in REGEXES),
]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return byte_grammars()


def is_sentence(structure: Structure, text: str) -> bool:
    """By means other than llguidance's."""
    kind, said = structure
    if kind == "choice":
        return text in json.loads(said)
    if kind == "json_schema":
        person = json.loads(text)
        return len(person["name"]) <= 8 and 0 <= person["age"] <= 120 and len(person) == 2
    forms = {ARITHMETIC: r"P(\+P){0,2}".replace("P", r"(\d{1,3}|\(\d{1,3}\*\d{1,3}\))"), POINT: r"\( ?\d\d?, ?\d\d?\)"}
    return re.fullmatch(forms.get(said, said), text) is not None


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda structure: f"{structure[0]} {structure[1][:20]}")
def test_every_output_is_in_the_structure(grammars: Grammars, structure: Structure) -> None:
    """Whatever allowed tokens are drawn, the text is what was asked for."""
    texts = random_outputs(grammars, [structure] * 40, seed=7, most=100)
    assert None not in texts
    assert len(set(texts)) > 3
    for text in texts:
        assert is_sentence(structure, text), text


def test_params_name_the_structure(grammars: Grammars) -> None:
    """Each kind as a row gives it can be followed."""
    for given in ({"json_schema": PERSON}, {"regex": "a+"}, {"choice": ["a"]}, {"grammar": POINT}):
        assert grammars.problem(SamplingParams(**given).structure) is None


def test_every_choice_can_be_chosen(grammars: Grammars) -> None:
    """Also those that begin alike, and with characters that mean something in other notations."""
    structure = ("choice", json.dumps(CHOICES))
    for choice in CHOICES:
        assert allows(grammars, structure, choice)
    assert not allows(grammars, structure, "yes, ")
    assert not allows(grammars, structure, "maybe")


def test_ends(grammars: Grammars) -> None:
    """may_end where the output satisfies the structure, is_complete where nothing else may follow."""
    matcher = grammars.matcher(("choice", '["yes", "yes, but"]'))
    states = []
    for token_id in tokens_of("yes, but"):
        matcher.advance([token_id])
        states.append((matcher.may_end, matcher.is_complete))
        assert bool(grammars.allowed([matcher])[0, EOS_ID]) is matcher.may_end
    assert states == [(False, False)] * 2 + [(True, False)] + [(False, False)] * 4 + [(True, True)]
    assert grammars.allowed([matcher])[0].nonzero().flatten().tolist() == [EOS_ID]


def test_caught_up_at_any_time(grammars: Grammars) -> None:
    """A matcher made anew goes on where the old one was; what was taken is not taken again; ends are left out."""
    generated = tokens_of('{"name": "Ada", "age": 36}')
    first = grammars.matcher(schema_structure(PERSON))
    for count in range(len(generated) + 1):
        first.catch_up(generated[:count])
        first.catch_up(generated[:count])
        anew = grammars.matcher(schema_structure(PERSON))
        anew.catch_up(generated[:count])
        masks = grammars.allowed([first, anew])
        assert torch.equal(masks[0], masks[1])
    first.catch_up([*generated, EOS_ID])
    assert first.is_complete
    assert first.error is None


def test_one_batch_equals_one_at_a_time(grammars: Grammars) -> None:
    """Structures of all kinds at different places: the masks do not hang on which others there are, or their order."""
    draws = np.random.default_rng(3)
    matchers = [grammars.matcher(structure) for structure in STRUCTURES]
    for _ in range(12):
        together = grammars.allowed(matchers)
        assert together.dtype == torch.bool
        assert together.shape == (len(matchers), 258)
        assert torch.equal(together, torch.cat([grammars.allowed([matcher]) for matcher in matchers]))
        assert torch.equal(together.flip(0), grammars.allowed(matchers[::-1]))
        for matcher, mask in zip(matchers, together.numpy(), strict=True):
            assert mask.any()
            if not matcher.is_complete:
                matcher.advance([int(draws.choice(np.flatnonzero(mask)))])
    assert grammars.allowed([]).shape == (0, 258)


def test_ids_without_a_token(grammars: Grammars) -> None:
    """Logits wider than the tokenizer: the ids beyond it are never allowed, the others as ever."""
    wide = byte_grammars(vocab_size=301)
    for structure in STRUCTURES:
        mask = wide.allowed([wide.matcher(structure)])
        assert mask.shape == (1, 301)
        assert not mask[:, 258:].any()
        assert torch.equal(mask[:, :258], grammars.allowed([grammars.matcher(structure)]))


def test_narrow_logits() -> None:
    """Logits narrower than the tokenizer: what they have no id for cannot be generated."""
    narrow = byte_grammars(vocab_size=200)
    assert narrow.allowed([narrow.matcher(("regex", "a"))]).shape == (1, 200)


@pytest.mark.parametrize("eos_ids", [frozenset({257}), frozenset({256, 257}), frozenset({256}), frozenset()])
def test_ends_of_sequence_are_the_models(eos_ids: frozenset[int]) -> None:
    """All of the model's and no other special token, whatever the tokenizer has; only where the output may end."""
    own = Grammars(TOKENIZER, 258, eos_ids)
    matcher = own.matcher(("regex", "a+"))
    assert not own.allowed([matcher])[0, 256:].any()
    matcher.advance(tokens_of("a"))
    assert {256 + int(i) for i in own.allowed([matcher])[0, 256:].nonzero()} == set(eos_ids)


@pytest.mark.parametrize(
    ("structure", "part"),
    [
        (("json_schema", "{}"), "not empty"),
        (("json_schema", "[]"), "an object"),
        (("json_schema", '{"type": '), "Expecting value"),
        (("json_schema", '{"items":' * 300 + "{}" + "}" * 300), "recursion limit"),
        (("regex", ""), "empty"),
        (("regex", "a(b"), "unclosed group"),
        (("regex", "a(?=b)"), "look-ahead"),
        (("regex", r"(a)\1"), "backreferences"),
        (("regex", r"\bword\b"), "lookarounds"),
        (("regex", r"[^\s\S]"), "no token can begin"),
        (("choice", "[]"), "a list of texts"),
        (("choice", '["a", ""]'), "a list of texts"),
        (("choice", '["a", 1]'), "a list of texts"),
        (("choice", '["\\ud800"]'), "parsing string"),
        (("grammar", " \n"), "empty"),
        (("grammar", "start: b"), "unknown name"),
        (("grammar", "hello"), "Expected token"),
        (("grammar", 'root ::= "a" ('), "GBNF"),
        (("grammar", 'top ::= "a"'), "No 'root' rule"),
        (("grammar", "start: a\na: a"), "no token can begin"),
        (("grammar", 'start: %json {"x-guidance": {"lenient": true}, "not": {}}'), "not"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_invalid_structures(grammars: Grammars, structure: Structure, part: str) -> None:
    """One line that says why, and the same again; no matcher."""
    problem = grammars.problem(structure)
    assert problem is not None
    assert problem.startswith(f"{structure[0]} cannot be followed: ")
    assert part in problem
    assert "\n" not in problem
    assert grammars.problem(structure) == problem
    with pytest.raises(RowError, match="cannot be followed"):
        grammars.matcher(structure)


def test_tokens_that_do_not_follow(grammars: Grammars) -> None:
    """Tokens that were not allowed are the row's error; its neighbours go on."""
    wrong, right = grammars.matcher(("regex", "ab+")), grammars.matcher(("regex", "ab+"))
    wrong.advance(tokens_of("ax"))
    right.advance(tokens_of("ab"))
    masks = grammars.allowed([wrong, right])
    assert wrong.error is not None
    assert wrong.error.startswith("regex: ")
    assert "\n" not in wrong.error
    assert not wrong.may_end
    assert masks[0].nonzero().flatten().tolist() == [EOS_ID]
    assert right.error is None
    assert masks[1].nonzero().flatten().tolist() == [tokens_of("b")[0], EOS_ID]


def test_rows_before_do_not_use_up_a_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states that a structure may have are counted over all its rows: when they are used up, it begins anew."""
    monkeypatch.setattr(cbgen.engine.grammars, "MOST_STATES", 1000)
    few = byte_grammars()
    structure = ("regex", "(a|b)*a(a|b){12}c")
    draws = np.random.default_rng(0)
    for _ in range(12):
        matcher = few.matcher(structure)
        for token_id in draws.choice(tokens_of("ab"), 200).tolist():
            assert few.allowed([matcher])[0, token_id]
            matcher.advance([token_id])
        assert matcher.error is None


def test_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matchers of a structure have one origin, which none of them changes; those not used for longest are given up."""
    monkeypatch.setattr(cbgen.engine.grammars, "CACHED_STRUCTURES", 2)
    small = byte_grammars()
    first, second, third = (("regex", text) for text in ("a+", "b+", "c+"))
    small.matcher(first).advance(tokens_of("aa"))
    assert not small.matcher(first).may_end
    for structure in (second, first, third):
        assert small.problem(structure) is None
    assert list(small._compiled) == [first, third]


def test_problems_are_told_by_any_thread(grammars: Grammars) -> None:
    """One thread checks structures while another draws masks; both come to what they come to alone."""
    checked: list[str | None] = []
    names = [f"n{number}" for number in range(300)]

    def check() -> None:
        checked.extend(grammars.problem(schema_structure({"type": "object", "required": [name]})) for name in names)

    thread = threading.Thread(target=check)
    thread.start()
    texts = [random_outputs(grammars, STRUCTURES, seed, most=100) for seed in (1, 2)]
    thread.join()
    assert checked == [None] * 300
    assert texts == [random_outputs(grammars, STRUCTURES, seed, most=100) for seed in (1, 2)]


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the extra to install."""
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    problem = byte_grammars().problem(("regex", "a+"))
    assert problem is not None
    assert "pip install 'cbgen-llm[structured]'" in problem


def test_tokenizers_that_do_not_fit() -> None:
    """A tokenizer whose tokens the library cannot read as bytes is one clear line."""
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b")))
    problem = Grammars(words, 2, frozenset({1})).problem(("regex", "a+"))
    assert problem is not None
    assert problem.startswith("structured output does not work with this model's tokenizer")
