"""Values of sampling parameters, checked and made alike; RowError names the parameter, the value and what is right."""

import json
import math
from collections.abc import Callable
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np

from cbgen.errors import RowError

LARGEST_NUMBER = 2**64
# No vocabulary is larger; a tensor of 32 bits holds it.
LARGEST_TOKEN_ID = 2**31 - 1
# Deeper ones are refused alike whatever room for recursion there is.
MAX_DEPTH = 200
# Of a JSON schema: keywords whose value is data, and those whose value is schemas by name.
OF_DATA = {"const", "enum", "default", "example", "examples"}
_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
OF_NAMES = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}

Check = Callable[[str, Any], Any]


def finite_number(name: str, value: Any) -> float:
    """Of any kind: Parquet has decimals, and NumPy numbers of its own."""
    if not _is_number(value):
        raise RowError(f"{name} is {_shown(value)}, a number is expected")
    try:
        number = float(value) + 0.0  # so that -0.0 is 0.0, which is written otherwise
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or abs(value) >= LARGEST_NUMBER:
        raise RowError(f"{name} is {number:g}, a number below 2**64 is expected")
    return number


def whole_number(name: str, value: Any) -> int:
    finite_number(name, value)
    whole = int(value)
    if whole != value:
        raise RowError(f"{name} is {value}, a whole number is expected")
    return whole


def number_where(holds: Callable[[float], bool], expected: str) -> Check:
    def check(name: str, value: Any) -> float:
        number = finite_number(name, value)
        if not holds(number):
            raise RowError(f"{name} is {value}, {expected} is expected")
        return number

    return check


def count_within(least: int, most: float, expected: str) -> Check:
    def check(name: str, value: Any) -> int:
        number = whole_number(name, value)
        if not least <= number <= most:
            raise RowError(f"{name} is {value}, {expected} is expected")
        return number

    return check


def optional(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def truth(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise RowError(f"{name} is {_shown(value)}, true or false is expected")
    return bool(value)


def top_k(name: str, value: Any) -> int:
    number = count_within(-1, math.inf, "0 (off) or more")(name, value)
    return min(max(0, number), LARGEST_TOKEN_ID)


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RowError(f"{name} is {_shown(value)}, a text is expected")
    if not value.strip():
        raise RowError(f"{name} is {_shown(value)}, which says nothing")
    _refuse_half_characters(name, value)
    return value


def texts(name: str, value: Any) -> tuple[str, ...]:
    """One text or several; none of them empty. A text that is the JSON of a list of texts counts as that list: a column
    of tables holds it where other rows have one text."""
    values = _none_one_or_many(_list_in_text(value), str)
    if values is None:
        raise RowError(f"{name} is {_shown(value)}, a text or a list of texts is expected")
    for item in values:
        if not isinstance(item, str):
            raise RowError(f"{name} holds {_shown(item)}, a text is expected")
        if not item:
            raise RowError(f"{name} holds an empty text")
        _refuse_half_characters(name, item)
    return tuple(dict.fromkeys(values))


def _list_in_text(value: Any) -> Any:
    if not (isinstance(value, str) and value.startswith("[") and value.endswith("]")):
        return value
    try:
        listed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return listed if listed and all(isinstance(item, str) for item in listed) else value


def choices(name: str, value: Any) -> tuple[str, ...]:
    """A list, or its JSON, even if it is of one: a text alone would be no choice."""
    value = _listed(name, value)
    if isinstance(value, str) or value == []:
        raise RowError(f"{name} is {_shown(value)}, a list of texts is expected")
    return texts(name, value)


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """One token id or several, or the JSON of a list; in ascending order, which means nothing."""
    value = _listed(name, value)
    values = _none_one_or_many(value, object)
    return tuple(sorted({_token_id(name, token_id) for token_id in values or ()}))


def biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """An object from token ids, which JSON has as texts, to numbers; its JSON; or pairs, as Arrow's maps come."""
    if isinstance(value, str):
        value = parsed_json(name, value)
    if value is None:
        return ()
    if not isinstance(value, dict | list | tuple):
        raise RowError(f"{name} is {_shown(value)}, an object from token ids to numbers is expected")
    given: dict[int, float] = {}
    for pair in value.items() if isinstance(value, dict) else value:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise RowError(f"{name} holds {_shown(pair)}, a token id and a number are expected")
        token, bias = pair
        if bias is None:  # padding of Arrow's structs
            continue
        token_id = _token_id(f"a token of {name}", _id_of_key(token))
        if token_id in given:
            raise RowError(f"{name} names token {token_id} twice")
        given[token_id] = _BIAS(f"{name} of token {token_id}", bias)
    return tuple(sorted(given.items()))


def schema(name: str, value: Any) -> str:
    """A JSON schema, given as an object or as its text, as text that is the same for both."""
    given = parsed_json(name, value) if isinstance(value, str) else value
    if not isinstance(given, dict):
        raise RowError(f"{name} is {_shown(value)}, an object is expected")
    tidied = _tidied(name, given, is_padded=not isinstance(value, str))
    try:
        written = json.dumps(tidied, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RowError(f"{name} cannot be written as JSON: {error}") from error
    if not tidied:
        raise RowError(f'{name} is empty; {{"type": "object"}} asks for any object')
    _refuse_half_characters(name, written)
    return written


def _tidied(name: str, node: Any, holds: str = "keywords", depth: int = 0, is_padded: bool = True) -> Any:
    """A schema as it is in every format: whole numbers are written as such, and null is no value of a keyword.

    Arrow pads objects with nulls for keys that other rows have. {"const": null} beside annotations, or in a text, means
    what it says, and so does all data. holds: "keywords", "names" (of schemas) or "data". is_padded:
    whether it may be Arrow that wrote a null.
    """
    if depth > MAX_DEPTH:
        raise RowError(f"{name} is nested more than {MAX_DEPTH} deep")
    if isinstance(node, float) and node.is_integer():
        return int(node)
    if isinstance(node, list | tuple):
        return [_tidied(name, item, holds, depth + 1, is_padded) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {
        key: _tidied(name, value, _held_by(key, holds), depth + 1, is_padded)
        for key, value in node.items()
        if value is not None or holds == "data" or (holds == "keywords" and key == "const" and not is_padded)
    }
    is_const = holds == "keywords" and "const" in node and _ANNOTATIONS.issuperset(kept)
    return {"const": None, **kept} if is_const else kept


def _held_by(key: str, holds: str) -> str:
    """What the value of a key holds, in an object that holds names, keywords or data."""
    if holds == "data" or (holds == "keywords" and key in OF_DATA):
        return "data"
    return "names" if holds == "keywords" and key in OF_NAMES else "keywords"


def _is_number(value: Any) -> bool:
    return isinstance(value, Real | Decimal) and not isinstance(value, bool)


def _token_id(name: str, value: Any) -> int:
    return _TOKEN_ID(name, value)


def _id_of_key(key: Any) -> Any:
    """The number that a key of a JSON object is; other keys as they are."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 20 else key


def _none_one_or_many(value: Any, kind: type) -> list[Any] | None:
    """As a list; None if it is neither a list nor of that kind."""
    if value is None:
        return []
    if isinstance(value, list | tuple):
        return list(value)
    return [value] if isinstance(value, kind) else None


def _listed(name: str, value: Any) -> Any:
    """The list that a text is the JSON of: a column of tables holds that where its values have no common type."""
    return parsed_json(name, value) if isinstance(value, str) and value.lstrip().startswith("[") else value


def parsed_json(name: str, written: str) -> Any:
    try:
        return json.loads(written)
    except RecursionError as error:
        raise RowError(f"{name} is nested more than {MAX_DEPTH} deep") from error
    except ValueError as error:
        raise RowError(f"{name} is not valid JSON: {error}") from error


def _refuse_half_characters(name: str, value: str) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(f"{name} holds half a surrogate pair, which is no character") from error


def _shown(value: Any) -> str:
    return f"{value!r:.60}"


_BIAS = number_where(lambda number: -100 <= number <= 100, "-100 to 100")
_TOKEN_ID = count_within(0, LARGEST_TOKEN_ID, "a token id")
