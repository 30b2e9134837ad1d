"""Values of a row, checked: what is of the wrong type or out of range raises RowError with the column and the value."""

import json
from typing import Any

from cbgen.data.python_values import without_nulls
from cbgen.engine.param_checks import parsed_json
from cbgen.errors import RowError


def checked_id(value: Any, column: str) -> str | int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RowError(f"{column} is {_kind(value)}, a text or a whole number that names the row is expected")
    return value


def checked_text(value: Any, column: str) -> str:
    if value is None:
        raise RowError(f"{column} is null, a text is expected")
    if not isinstance(value, str):
        raise RowError(f"{column} is {_kind(value)}, a text is expected")
    if not value:
        raise RowError(f"{column} is empty")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise RowError(f"{column} holds half a surrogate pair, which is no character")
    return value


def checked_ids(value: Any, vocabulary: int) -> list[int]:
    if not isinstance(value, list) or not value:
        raise RowError(f"prompt_ids is {_kind(value)}, a list of token ids is expected")
    for token_id in value:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocabulary:
            raise RowError(f"prompt_ids holds {token_id!r}, token ids of this model are 0 to {vocabulary - 1}")
    return value


def checked_messages(value: Any, column: str, may_continue: bool = False) -> list[dict[str, Any]]:
    """Messages as a template wants them: keys that Arrow padded with null are dropped, lists of text parts joined.

    The JSON of a list is as good, which a table holds where messages have no common type. may_continue: whether the
    last one may be the assistant's.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parsed_json(column, value)
    if not isinstance(value, list) or not value:
        raise RowError(f"{column} is {_kind(value)}, a list of messages is expected")
    messages = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError(f"{column}: every message needs a role and a content")
        kept = _without_padding(message, column)
        if isinstance(kept.get("content"), list):
            kept["content"] = _joined_parts(kept["content"], column)
        is_call = "content" not in kept and kept.get("tool_calls")
        if is_call:
            kept["content"] = ""  # as OpenAI's null: many templates add to it, whatever else is there
        if not isinstance(kept.get("content"), str):
            raise RowError(f"{column}: the content of a {message['role']} message is not a text")
        others = {name: item for name, item in kept.items() if not isinstance(item, str)}
        _check_is_json(others, f"{column}: a {message['role']} message")
        messages.append(kept)
    if messages[-1]["role"] == "assistant" and not may_continue:
        raise RowError(
            f"{column}: the last message is the assistant's, so there is nothing to answer; --continue-final-message "
            "goes on with it"
        )
    return messages


def checked_tools(value: Any, column: str) -> list[dict[str, Any]] | None:
    """Tools as a template wants them, from a list of objects or its JSON, and without what Arrow pads; None: none."""
    value = _without_padding(parsed_json(column, value or "null") if isinstance(value, str) else value, column)
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise RowError(f"{column} is {_kind(value)}, a list of objects is expected")
    for tool in value:
        if not isinstance(tool, dict) or not tool:
            raise RowError(f"{column} holds {_kind(tool)}, objects that describe a tool each are expected")
        _check_is_json(tool, column)
    return value


def _without_padding(value: Any, column: str) -> Any:
    try:
        return without_nulls(value)
    except RecursionError as error:
        raise RowError(f"{column} is nested too deep") from error


def _check_is_json(value: Any, what: str) -> None:
    """Of what else there is in Parquet, such as times, transformers would show a template the type only."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(f"{what} cannot be written as JSON: {error}") from error


def _joined_parts(parts: list[Any], column: str) -> str:
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise RowError(f"{column}: only parts of type text can be used in a message's content")
    return "".join(text for text in texts if text is not None)


def _kind(value: Any) -> str:
    """What a value of the wrong type is, in words, with its beginning."""
    if value is None or (isinstance(value, list) and not value):
        return "null" if value is None else "empty"
    names = {
        bool: "a truth value",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "an object",
    }
    return f"{names.get(type(value), type(value).__name__)} ({str(value)[:40]})"
