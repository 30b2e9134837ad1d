"""What a request may ask for: every kind of value that a file can hold, and what is said of wrong ones."""

import json
from dataclasses import fields
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from cbgen.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from cbgen.errors import RowError

PLAIN = SamplingParams(max_tokens=8)
HALF = "\ud83d"
OBJECT = {"type": "object"}


def refusal(**values: Any) -> str:
    """What is said, in one line and at no great length, also where the one parameter is changed later."""
    with pytest.raises(RowError) as caught:
        SamplingParams(**values)
    if len(values) == 1:
        with pytest.raises(RowError) as later:
            PLAIN.updated(**values)
        assert str(later.value) == str(caught.value)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 200
    return message


NUMBERS = [
    ("max_tokens", 1, 1),
    ("max_tokens", 8.0, 8),
    ("max_tokens", Decimal("8.00"), 8),
    ("max_tokens", np.int32(8), 8),
    ("temperature", 0, 0.0),
    ("temperature", -0.0, 0.0),
    ("temperature", Decimal("0.7"), 0.7),
    ("temperature", np.float64(0.7), 0.7),
    ("temperature", np.float32(0.5), 0.5),
    ("top_p", 1, 1.0),
    ("top_k", -1, 0),
    ("top_k", 2**40, 2**31 - 1),
    ("min_p", 1, 1.0),
    ("repetition_penalty", 1.3, 1.3),
    ("presence_penalty", -2, -2.0),
    ("frequency_penalty", 2, 2.0),
    ("min_tokens", 0, 0),
    ("n", 3.0, 3),
    ("seed", None, None),
    ("seed", -7, -7),
    ("seed", 2**63 + 1, 2**63 + 1),
    ("seed", 2**64 - 1, 2**64 - 1),
    ("seed", Decimal(2**63 + 1), 2**63 + 1),
    ("logprobs", 0, 0),
    ("prompt_logprobs", MAX_LOGPROBS, MAX_LOGPROBS),
    ("ignore_eos", np.True_, True),
]


@pytest.mark.parametrize(("name", "given", "expected"), NUMBERS)
def test_numbers_of_every_kind_are_one_number(name: str, given: Any, expected: Any) -> None:
    """Decimals, NumPy's, and whole ones that are written with a point come out as plain Python, written alike."""
    value = getattr(SamplingParams(**{name: given}), name)
    assert (value, type(value), repr(value)) == (expected, type(expected), repr(expected))
    assert getattr(PLAIN.updated(**{name: given}), name) == expected


TEXTS = [
    ("stop", "x", ("x",)),
    ("stop", ["b", "a", "b"], ("b", "a")),
    ("stop", "[1]", ("[1]",)),
    ("stop", "\n", ("\n",)),
    ("stop", [], ()),
    ("stop", None, ()),
    ("bad_words", ("é",), ("é",)),
    ("stop_token_ids", 5, (5,)),
    ("stop_token_ids", [7, 5.0, 7], (5, 7)),
    ("stop_token_ids", "[7, 5]", (5, 7)),
    ("stop_token_ids", None, ()),
    ("choice", ["yes"], ("yes",)),
    ("choice", '["yes", "no"]', ("yes", "no")),
    ("choice", None, ()),
    ("logit_bias", {"7": 1, "5": -0.0}, ((5, 0.0), (7, 1.0))),
    ("logit_bias", {5: 0, 7: Decimal("1.0")}, ((5, 0.0), (7, 1.0))),
    ("logit_bias", [("7", 1.0), (5, 0.0)], ((5, 0.0), (7, 1.0))),
    ("logit_bias", '{"7": 1, "5": 0}', ((5, 0.0), (7, 1.0))),
    ("logit_bias", {"7": 1.0, "5": 0.0, "9": None}, ((5, 0.0), (7, 1.0))),
    ("logit_bias", {}, ()),
    ("logit_bias", None, ()),
    ("regex", "a+", "a+"),
    ("grammar", 'start: "a"', 'start: "a"'),
]


@pytest.mark.parametrize(("name", "given", "expected"), TEXTS)
def test_lists_and_mappings_of_every_kind_are_one(name: str, given: Any, expected: Any) -> None:
    """One text or several, objects, Arrow's maps and padded structs, JSON: the same, written alike."""
    assert repr(getattr(SamplingParams(**{name: given}), name)) == repr(expected)


@pytest.mark.parametrize(
    "given",
    [
        {"type": "array", "items": {"enum": ["a", None, 1]}, "minItems": 2},
        '{"type" : "array", "items": {"enum": ["a", null, 1]},\n "minItems": 2}',
        {"type": "array", "items": {"enum": ["a", None, 1.0], "$ref": None}, "minItems": 2.0, "properties": None},
        {"type": "array", "items": {"enum": ("a", None, 1)}, "minItems": 2, "default": None},
    ],
    ids=["object", "text", "padded by Arrow", "null as default"],
)
def test_a_schema_is_the_same_text_however_it_is_given(given: Any) -> None:
    """Object or text; Arrow pads objects with null and widens numbers."""
    expected = '{"type": "array", "items": {"enum": ["a", null, 1]}, "minItems": 2}'
    assert SamplingParams(json_schema=given).json_schema == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"const": None}, {"const": None}),
        ({"const": None, "type": None}, {"const": None}),
        ({"const": None, "type": "string"}, {"type": "string"}),
        ({"enum": [{"a": None}]}, {"enum": [{"a": None}]}),
        ({"default": {"a": None}, "type": "object"}, {"default": {"a": None}, "type": "object"}),
        (
            {"properties": {"const": None, "enum": {"type": "null", "const": None}}},
            {"properties": {"enum": {"type": "null"}}},
        ),
        ({"b": {}, "a": {}}, {"b": {}, "a": {}}),
        ({"title": "é"}, {"title": "é"}),
        ({"maximum": 1.5, "const": 1e300}, {"maximum": 1.5, "const": int(1e300)}),
    ],
)
def test_nulls_that_mean_something_stay_in_a_schema(given: Any, expected: Any) -> None:
    """A constant that is null, and data; the order of keys stays, since outputs follow it."""
    written = SamplingParams(json_schema=given).json_schema
    assert written == json.dumps(expected, ensure_ascii=False)


WRONG = [
    *(("max_tokens", value, "at least 1") for value in (0, -1)),
    *(("max_tokens", value, "whole number") for value in (1.5, Decimal("1.5"))),
    *(("max_tokens", value, "a number is expected") for value in ("8", True, np.True_, None, [8], {}, 1j)),
    *((name, 10**400, "below 2**64") for name in ("max_tokens", "temperature", "top_k", "seed", "logprobs")),
    ("seed", 2**64, "below 2**64"),
    ("seed", 1.5, "whole number"),
    *(("temperature", value, "below 2**64") for value in (float("nan"), float("inf"), Decimal("NaN"), 1e30)),
    ("temperature", -0.1, "0 or more"),
    *(("top_p", value, "more than 0 and at most 1") for value in (0, -0.0, 1.01)),
    ("top_k", -2, "0 (off) or more"),
    *(("min_p", value, "0 to 1") for value in (-0.1, 1.1)),
    *(("repetition_penalty", value, "0.001 to 1000") for value in (0, -1, 1e-50, 1e9)),
    *((name, value, "-2 to 2") for name in ("presence_penalty", "frequency_penalty") for value in (-2.1, 3)),
    ("min_tokens", -1, "0 or more"),
    *(("n", value, "1 to 10000") for value in (0, 10_001)),
    *(("logprobs", value, "0 to 20") for value in (-1, 21)),
    ("logprobs", True, "a number is expected"),
    *((name, 1, "true or false") for name in ("ignore_eos", "include_stop", "skip_special_tokens")),
    ("ignore_eos", "true", "true or false"),
    ("stop", 5, "a text or a list of texts"),
    ("stop", {"a": "b"}, "a text or a list of texts"),
    ("stop", ["a", None], "holds None, a text is expected"),
    ("stop", "", "holds an empty text"),
    ("bad_words", ["a", ""], "holds an empty text"),
    ("stop", HALF, "half a surrogate pair"),
    ("choice", "yes", "a list of texts"),
    ("choice", [], "a list of texts"),
    ("choice", "[", "not valid JSON"),
    ("choice", "[1]", "holds 1, a text is expected"),
    ("stop_token_ids", "5", "a number is expected"),
    ("stop_token_ids", [None], "a number is expected"),
    ("stop_token_ids", [True], "a number is expected"),
    ("stop_token_ids", -1, "a token id"),
    ("stop_token_ids", 2**31, "a token id"),
    ("stop_token_ids", np.array([1, 2]), "a number is expected"),
    ("logit_bias", 5, "an object from token ids to numbers"),
    ("logit_bias", "{", "not valid JSON"),
    ("logit_bias", [5], "a token id and a number"),
    *(("logit_bias", {key: 1}, "a token of logit_bias") for key in ("x", "²", "٣", "-1", "1.5", "9" * 5000, 1.5, True)),
    ("logit_bias", {"5": 101}, "logit_bias of token 5 is 101, -100 to 100"),
    *(("logit_bias", {"5": value}, "logit_bias of token 5") for value in ("1", True, float("nan"))),
    ("logit_bias", {"5": 1, "05": 2}, "names token 5 twice"),
    ("json_schema", "{", "not valid JSON"),
    ("json_schema", "[" * 100_000, "nested more than 200 deep"),
    *(("json_schema", value, "an object is expected") for value in ([OBJECT], "true", 5, True)),
    *(("json_schema", value, "is empty") for value in ({}, "{}", {"type": None})),
    ("json_schema", {"const": float("nan")}, "cannot be written as JSON"),
    ("json_schema", {"const": Decimal(1)}, "cannot be written as JSON"),
    ("json_schema", '{"const": "\\ud83d"}', "half a surrogate pair"),
    *((name, value, "a text is expected") for name in ("regex", "grammar") for value in (5, ["a"])),
    *((name, value, "says nothing") for name in ("regex", "grammar") for value in ("", " \n")),
    ("regex", HALF, "half a surrogate pair"),
]


@pytest.mark.parametrize(("name", "value", "words"), WRONG, ids=lambda value: repr(value)[:24])
def test_a_wrong_value_is_told(name: str, value: Any, words: str) -> None:
    """The parameter, and what is expected."""
    message = refusal(**{name: value})
    assert name in message
    assert words in message


@pytest.mark.parametrize("depth", [201, 50_000])
def test_a_tower_of_a_schema_is_told(depth: int) -> None:
    """One that nests deeper than others can follow is an error of its row, in either form."""
    assert "nested more than 200 deep" in refusal(json_schema='{"not": ' * depth + "{}" + "}" * depth)
    tower: dict[str, Any] = OBJECT
    for _ in range(depth):
        tower = {"not": tower}
    assert "nested more than 200 deep" in refusal(json_schema=tower)
    while "not" in tower:  # the interpreter would need the stack to let go of it at once
        tower = tower["not"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_tokens": 8, "min_tokens": 9}, "min_tokens is 9, more than max_tokens (8)"),
        ({"json_schema": OBJECT, "regex": "a"}, "json_schema and regex: give one of them"),
        ({"choice": ["a"], "grammar": "a", "regex": "b"}, "regex and choice and grammar: give one of them"),
        ({"regex": "a", "stop": "b"}, "regex and stop: give one of them"),
        ({"choice": ["a"], "stop_token_ids": 3}, "choice and stop_token_ids: give one of them"),
    ],
)
def test_what_does_not_go_together_is_told(values: dict[str, Any], words: str) -> None:
    """Both are named, whichever of them came last."""
    assert words in refusal(**values)
    (first, value), *later = values.items()
    earlier = SamplingParams(**{first: value})
    with pytest.raises(RowError) as caught:
        earlier.updated(**dict(later))
    assert words in str(caught.value)


def test_what_is_named_is_what_differs() -> None:
    """As JSON has it; nothing for the defaults, whatever they are called."""
    assert SamplingParams().named() == {}
    assert SamplingParams(top_k=-1, stop=[], temperature=0, logit_bias={}).named() == {}
    named = SamplingParams(seed=0, stop="x", logit_bias={5: 1}, n=2).named()
    assert named == {"logit_bias": [(5, 1.0)], "stop": ["x"], "n": 2, "seed": 0}
    assert list(named) == [field.name for field in fields(SamplingParams) if field.name in named]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, None),
        ({"regex": "a"}, ("regex", "a")),
        ({"choice": ["b", "a"]}, ("choice", '["b", "a"]')),
        ({"json_schema": '{"type":"null"}'}, ("json_schema", '{"type": "null"}')),
        ({"grammar": "g"}, ("grammar", "g")),
    ],
)
def test_the_form_of_the_output(values: dict[str, Any], expected: Any) -> None:
    """Its kind and its text, which name a compiled one."""
    assert SamplingParams(**values).structure == expected


def test_copies_are_equal_but_for_what_is_changed() -> None:
    """They are parameters like others, and what they come from stays as it was."""
    params = SamplingParams(max_tokens=8, temperature=0.5, top_p=0.9, min_p=0.1, top_k=5, n=3, seed=1, stop="x")
    assert params.with_seed(9) == SamplingParams(**{**vars(params), "seed": 9})
    assert params.updated(stop="y", n=1) == SamplingParams(**{**vars(params), "stop": ("y",), "n": 1})
    assert params.without_draws() == SamplingParams(max_tokens=8, temperature=0.5, stop="x")
    assert params.seed == 1
    assert hash(params.updated(seed=2)) == hash(params.with_seed(2))
