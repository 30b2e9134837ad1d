"""A hundred JSON schemas: each is served, and whatever tokens are drawn, complete outputs are what the schema says."""

import json
from typing import Any

import pytest
from engine.grammar_harness import allows, byte_grammars, random_outputs, schema_structure
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for
from structured_schemas import SCHEMAS

from cbgen.engine.grammars import Grammars

MOST_TOKENS = 400


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return byte_grammars()


def check(schema: dict[str, Any], text: str) -> None:
    """Against the draft that the schema names, 2020-12 where it names none; formats too."""
    kind = validator_for(schema, Draft202012Validator)
    kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text))


def test_there_are_a_hundred() -> None:
    """As many as promised, each one valid itself."""
    assert len(SCHEMAS) == 100
    for schema in SCHEMAS.values():
        validator_for(schema, Draft202012Validator).check_schema(schema)


@pytest.mark.parametrize("name", SCHEMAS)
def test_it_can_be_followed(grammars: Grammars, name: str) -> None:
    """The library takes the schema with every keyword in it."""
    assert grammars.problem(schema_structure(SCHEMAS[name])) is None


@pytest.mark.parametrize("seed", range(4))
def test_complete_outputs_are_valid(grammars: Grammars, seed: int) -> None:
    """Random tokens out of those allowed: at least 90 of 100 outputs end, and each of these is valid."""
    structures = [schema_structure(schema) for schema in SCHEMAS.values()]
    texts = random_outputs(grammars, structures, seed, MOST_TOKENS)
    for schema, text in zip(SCHEMAS.values(), texts, strict=True):
        if text is not None:
            check(schema, text)
    assert sum(text is not None for text in texts) >= 90


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"const": 1}}, "contains"),
        ({"type": "array", "unevaluatedItems": False}, "unevaluatedItems"),
        ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"type": "object", "properties": {"a": {"items": {"minProperties": 3}}}}, "minProperties"),
        ({"$ref": "#/parts/a", "parts": {"a": {"type": "object", "minProperties": 3}}}, "minProperties"),
        ({"if": {"type": "string"}, "then": {"maxLength": 3}}, "if"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "string", "format": "regex"}, "format: regex"),
        ({"type": "string", "pattern": "^(?!a)"}, "look-ahead"),
        ({"$ref": "https://example.com/schema"}, "https://example.com/schema"),
        ({"$ref": "#/$defs/missing"}, "/$defs/missing"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
        ({"enum": []}, "empty"),
        ({"type": "words"}, "words"),
        ({"type": "object", "required": "a"}, "required"),
        ({"type": "object", "minProperties": 2, "required": 5}, "minProperties"),
        ({"type": "string", "format": "date", "allOf": 5}, "allOf"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "no token can begin"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_supported_is_refused(grammars: Grammars, schema: dict[str, Any], keyword: str) -> None:
    """Nothing that would change which outputs are valid is passed over; the message names it, on one line."""
    problem = grammars.problem(schema_structure(schema))
    assert problem is not None
    assert problem.startswith("json_schema cannot be followed: ")
    assert keyword in problem
    assert "\n" not in problem


def test_minimum_of_properties_that_are_required(grammars: Grammars) -> None:
    """Names that the schema lists come once each, so they can be counted; data that look like keywords are data."""
    for schema in (
        {"type": "object", "required": ["a", "b"], "additionalProperties": {"type": "integer"}, "minProperties": 3},
        {"type": "object", "properties": {"minProperties": {"type": "integer"}}},
        {"const": {"minProperties": 4, "type": "object"}},
    ):
        assert grammars.problem(schema_structure(schema)) is None


@pytest.mark.parametrize("text", ['{"a": 1, "\\u0061": "x"}', '{"\\u0061": "x"}', '{"a": 1, "a": "x"}'])
def test_no_second_value_for_a_property(grammars: Grammars, text: str) -> None:
    """A name among others is not a listed one, however it is written."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    assert allows(grammars, schema_structure(schema), '{"a": 1, "b": "x"}')
    assert not allows(grammars, schema_structure(schema), text)


@pytest.mark.parametrize("day", ["2023-02-29", "1900-02-29", "2023-02-30", "2023-04-31", "0000-01-01", "2023-13-01"])
@pytest.mark.parametrize(("name", "rest"), [("date", ""), ("date-time", "T10:00:00Z")])
def test_days_are_in_the_calendar(grammars: Grammars, name: str, rest: str, day: str) -> None:
    """29 February is a day of leap years only."""
    structure = schema_structure({"anyOf": [{"type": "null"}, {"type": "string", "format": name}]})
    assert not allows(grammars, structure, f'"{day}{rest}"')
    for real in ("2024-02-29", "2000-02-29", "1900-02-28", "2023-12-31"):
        assert allows(grammars, structure, f'"{real}{rest}"')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": [1, 2], "b": "ü"}', True),
        ('{"a":[1,2],"b":"ü"}', True),
        ('{"a":[1, 2],"b": "line\\nbreak"}', True),
        ('{"a":  [1], "b": ""}', False),
        ('{ "a": [1], "b": ""}', False),
        ('{"a": [1] , "b": ""}', False),
        ('{"a": [1],\n "b": ""}', False),
        ('{"a": [1], "b": ""} ', False),
        ('{"a": [1], "b": "\\u00fc"}', False),
    ],
)
def test_white_space(grammars: Grammars, text: str, expected: bool) -> None:
    """One space after a comma or a colon, or none; nowhere else, so that no output is white space without end."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "string"}},
        "required": ["a", "b"],
    }
    assert allows(grammars, schema_structure(schema), text) is expected
