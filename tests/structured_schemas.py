"""A hundred JSON schemas as users write them, small enough that outputs of random tokens come to their end."""

from typing import Any

Schema = dict[str, Any]

BOOLEAN: Schema = {"type": "boolean"}
DIGIT: Schema = {"type": "integer", "minimum": 0, "maximum": 9}
PERCENT: Schema = {"type": "integer", "minimum": 0, "maximum": 100}
PRICE: Schema = {"type": "number", "minimum": 0, "maximum": 999}
CURRENCY: Schema = {"enum": ["EUR", "USD", "CHF"]}
DATE: Schema = {"type": "string", "format": "date"}
UUID: Schema = {"type": "string", "format": "uuid"}
SKU: Schema = {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}


def text(longest: int, least: int = 0) -> Schema:
    return {"type": "string", "minLength": least, "maxLength": longest}


def some(items: Schema, most: int, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def pattern(regex: str) -> Schema:
    return {"type": "string", "pattern": regex}


def formatted(name: str) -> Schema:
    return {"type": "string", "format": name}


def record(required: dict[str, Schema], optional: dict[str, Schema] | None = None, **more: Any) -> Schema:
    """An object of named properties and no others."""
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
        "additionalProperties": False,
        **more,
    }


SCALARS: dict[str, Schema] = {
    "boolean": BOOLEAN,
    "null": {"type": "null"},
    "digit": DIGIT,
    "negative integer": {"type": "integer", "minimum": -50, "exclusiveMaximum": 0},
    "wide integer": {"type": "integer", "minimum": -1000, "maximum": 12345},
    "multiple of seven": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "probability": {"type": "number", "minimum": 0, "maximum": 1},
    "open interval": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    "temperature": {"type": "number", "minimum": -40, "maximum": 60},
    "quarters": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 20},
    "short text": text(12),
    "text of some length": text(10, 4),
    "one character": text(1, 1),
    "enum of texts": {"type": "string", "enum": ["red", "green", "blue", "été", 'a "quote"', "tab\tand\\slash"]},
    "enum of many types": {"enum": [1, "one", None, True, [1], {"n": 1}, 1.5]},
    "const text": {"const": "fixed"},
    "const object": {"const": {"kind": "fixed", "list": [1, 2, {"deep": None}]}},
    "nullable integer": {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
    "three types": {"type": ["boolean", "null", "string"], "maxLength": 5},
}

STRINGS: dict[str, Schema] = {
    "stock keeping unit": SKU,
    "hex colour": pattern("^#[0-9a-fA-F]{6}$"),
    "phone number": pattern(r"^\+\d{1,3} \d{6,10}$"),
    "slug": pattern("^[a-z0-9]{1,8}(-[a-z0-9]{1,8}){0,2}$"),
    "semantic version": pattern(r"^(0|[1-9]\d?)\.(0|[1-9]\d?)\.(0|[1-9]\d?)$"),
    "licence plate": pattern("^[A-ZÄÖÜ]{1,3}-[A-Z]{1,2} [1-9][0-9]{0,3}$"),
    "clock": pattern("^([01][0-9]|2[0-3]):[0-5][0-9]$"),
    "pattern anywhere": {"type": "string", "pattern": "[0-9]", "maxLength": 8},
    "pattern and length": {"type": "string", "pattern": "^[ab]*$", "minLength": 3, "maxLength": 6},
    "alternatives at both ends": {"type": "string", "pattern": "^x|y$", "maxLength": 4},
    "quoted characters": pattern(r'^["\\/]{1,4}$'),
    "currency amount": pattern(r"^(€|\$|£)\d{1,4}\.\d{2}$"),
    "iso country": pattern("^(DE|FR|IT|AT|CH)$"),
    "date": DATE,
    "time": formatted("time"),
    "date and time": formatted("date-time"),
    "duration": {"type": "string", "format": "duration", "maxLength": 20},
    "uuid": UUID,
    "ip address": formatted("ipv4"),
    "new ip address": formatted("ipv6"),
    "email": {"type": "string", "format": "email", "maxLength": 40},
    "host": {"type": "string", "format": "hostname", "maxLength": 30},
    "address of a page": {"type": "string", "format": "uri", "maxLength": 60},
}

ARRAYS: dict[str, Schema] = {
    "digits": some(DIGIT, 5),
    "exactly three": some(BOOLEAN, 3, 3),
    "tags": some({"enum": ["new", "sale", "hot"]}, 4, 1),
    "matrix": some(some(DIGIT, 3, 3), 3, 3),
    "pair": {"type": "array", "prefixItems": [text(6), DIGIT], "items": False, "minItems": 2},
    "head and tail": {"type": "array", "prefixItems": [BOOLEAN], "items": DIGIT, "minItems": 2, "maxItems": 5},
    "coordinates": some({"type": "number", "minimum": -90, "maximum": 90}, 2, 2),
    "texts or nulls": some({"type": ["string", "null"], "maxLength": 4}, 4),
    "empty list": {"type": "array", "maxItems": 0},
    "old tuple": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [DIGIT, BOOLEAN],
        "additionalItems": False,
        "minItems": 2,
    },
    "points": some(record({"x": DIGIT, "y": DIGIT}), 4),
}

OBJECTS: dict[str, Schema] = {
    "empty object": record({}),
    "all required": record({"name": text(10), "age": PERCENT, "member": BOOLEAN}),
    "all optional": record({}, {"name": text(8), "age": PERCENT, "member": BOOLEAN}),
    "at least one": record({}, {"a": DIGIT, "b": DIGIT, "c": DIGIT}, minProperties=1),
    "required and optional": record({"id": UUID}, {"note": text(10), "score": PERCENT}),
    "names to be escaped": record({'the "name"': DIGIT, "back\\slash": BOOLEAN, "größe": DIGIT, "": BOOLEAN}),
    "map of digits": {"type": "object", "additionalProperties": DIGIT, "maxProperties": 3},
    "named and others": {
        "type": "object",
        "properties": {"a": DIGIT},
        "required": ["a"],
        "additionalProperties": {"type": "string", "maxLength": 4},
        "maxProperties": 3,
    },
    "names by pattern": {
        "type": "object",
        "patternProperties": {"^n_[a-z]{1,4}$": DIGIT, "^t_[a-z]{1,4}$": text(4)},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    "required without a schema": {
        "type": "object",
        "required": ["id"],
        "additionalProperties": DIGIT,
        "maxProperties": 2,
    },
    "nested": record({"a": record({"b": record({"c": record({"d": DIGIT})})})}),
    "nullable object": {"anyOf": [record({"a": DIGIT}), {"type": "null"}]},
    "annotated": record(
        {"a": {"type": "integer", "title": "A", "description": "A digit.", "default": 3, "maximum": 9, "minimum": 0}},
        title="Annotated",
        description="Nothing here changes what is valid.",
        examples=[{"a": 1}],
    ),
    "properties called like keywords": record({"type": DIGIT, "properties": BOOLEAN, "minProperties": DIGIT}),
}

COMBINED: dict[str, Schema] = {
    "any of scalars": {"anyOf": [DIGIT, BOOLEAN, text(5)]},
    "one of types": {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 99}, text(6), {"type": "null"}]},
    "one of kinds": {
        "oneOf": [
            record({"kind": {"const": "circle"}, "radius": PERCENT}),
            record({"kind": {"const": "square"}, "side": PERCENT}),
            record({"kind": {"const": "line"}, "from": DIGIT, "to": DIGIT}),
        ]
    },
    "all of numbers": {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 30}]},
    "all of objects": {
        "allOf": [
            {"type": "object", "properties": {"a": DIGIT}, "required": ["a"]},
            {"type": "object", "properties": {"b": BOOLEAN}, "required": ["b"], "maxProperties": 2},
        ]
    },
    "all of patterns": {"type": "string", "allOf": [{"pattern": "^[a-z]{3,5}$"}, {"pattern": "^a"}]},
    "any of with siblings": {"type": "string", "maxLength": 6, "anyOf": [{"pattern": "^x"}, {"pattern": "^y"}]},
    "definition": {
        "$defs": {"digit": DIGIT},
        **record({"a": {"$ref": "#/$defs/digit"}, "b": {"$ref": "#/$defs/digit"}}),
    },
    "definition of definitions": {
        "$defs": {"point": some({"$ref": "#/$defs/digit"}, 2, 2), "digit": DIGIT},
        **some({"$ref": "#/$defs/point"}, 3),
    },
    "old definitions": {"definitions": {"flag": BOOLEAN}, **record({"on": {"$ref": "#/definitions/flag"}})},
    "reference with siblings": {"$defs": {"short": text(9)}, "$ref": "#/$defs/short", "minLength": 2},
    "linked list": {
        "$defs": {"node": record({"value": DIGIT, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}})},
        "$ref": "#/$defs/node",
    },
    "tree": record({"name": pattern("^[a-z]{1,3}$")}, {"children": some({"$ref": "#"}, 2)}),
    "expression": {
        "$defs": {
            "expression": {
                "anyOf": [
                    DIGIT,
                    BOOLEAN,
                    record({"op": {"enum": ["+", "*"]}, "of": some({"$ref": "#/$defs/expression"}, 2, 1)}),
                ]
            }
        },
        "$ref": "#/$defs/expression",
    },
    "anchor": {"$defs": {"d": {"$anchor": "digit", **DIGIT}}, **record({"a": {"$ref": "#digit"}})},
}

REAL: dict[str, Schema] = {
    "person": record({"first": text(10, 1), "last": text(10, 1), "born": DATE}, {"email": formatted("email")}),
    "address": record(
        {
            "street": text(15, 1),
            "postcode": pattern("^[0-9]{5}$"),
            "city": text(10, 1),
            "country": {"enum": ["DE", "AT"]},
        }
    ),
    "invoice": record(
        {
            "number": pattern("^INV-[0-9]{4}$"),
            "issued": DATE,
            "currency": CURRENCY,
            "lines": some(record({"sku": SKU, "count": DIGIT, "price": PRICE}), 2, 1),
        }
    ),
    "order": record({"id": UUID, "state": {"enum": ["open", "paid", "sent"]}, "total": PRICE, "gift": BOOLEAN}),
    "product": record(
        {"sku": SKU, "price": record({"amount": PRICE, "currency": CURRENCY})},
        {"stock": PERCENT, "tags": some(text(5), 2)},
    ),
    "review": record(
        {"stars": {"type": "integer", "minimum": 1, "maximum": 5}, "mood": {"enum": ["good", "bad"]}, "words": text(20)}
    ),
    "sentiment": record({"label": {"enum": ["positive", "negative", "neutral"]}, "confidence": SCALARS["probability"]}),
    "entities": record({"entities": some(record({"text": text(8, 1), "type": {"enum": ["PER", "ORG", "LOC"]}}), 3)}),
    "classification": record({"labels": some({"enum": ["spam", "ads", "news", "mail"]}, 3, 1), "sure": BOOLEAN}),
    "question and answer": record(
        {"question": text(20, 5), "answer": text(20, 1), "source": {"type": ["string", "null"], "maxLength": 8}}
    ),
    "multiple choice": record(
        {"stem": text(20, 5), "options": some(text(8, 1), 4, 4), "right": {"enum": [0, 1, 2, 3]}}
    ),
    "weather tool": record(
        {
            "name": {"const": "get_weather"},
            "arguments": record({"city": text(10, 1)}, {"unit": {"enum": ["celsius", "fahrenheit"]}}),
        }
    ),
    "tool calls": some(
        {
            "anyOf": [
                record({"name": {"const": "search"}, "arguments": record({"query": text(10, 1), "limit": DIGIT})}),
                record(
                    {"name": {"const": "open"}, "arguments": record({"url": pattern("^https://[a-z]{1,8}\\.com/$")})}
                ),
            ]
        },
        2,
        1,
    ),
    "meeting": record({"title": text(12, 1), "start": formatted("date-time"), "minutes": PERCENT, "online": BOOLEAN}),
    "recipe": record({"name": text(10, 1), "serves": DIGIT, "steps": some(text(10, 1), 3, 1)}),
    "log line": record(
        {"level": {"enum": ["DEBUG", "INFO", "WARN", "ERROR"]}, "message": text(20)}, {"host": formatted("ipv4")}
    ),
    "bank transfer": record({"iban": pattern("^DE[0-9]{20}$"), "amount": PRICE, "when": DATE}, {"reference": text(10)}),
    "translation": record({"from": {"const": "de"}, "to": {"enum": ["en", "fr"]}, "text": text(25, 1)}),
}

SCHEMAS: dict[str, Schema] = SCALARS | STRINGS | ARRAYS | OBJECTS | COMBINED | REAL
