"""Values of a row, checked: what is of the wrong type or out of range raises RowError with the column and the value."""

import math
from typing import Any

from cbgen.engine.requests import SamplingParams
from cbgen.errors import RowError

LARGEST_NUMBER = 2**64
# No vocabulary is larger; a tensor of the sampler holds it.
LARGEST_TOP_K = 2**31


def checked_params(max_tokens: Any, temperature: Any, top_p: Any, top_k: Any, ignore_eos: Any) -> SamplingParams:
    """Sampling parameters in range, or RowError with the one that is not. top_k -1 means off, as 0 does."""
    if not isinstance(ignore_eos, bool):
        raise RowError(f"ignore_eos is {ignore_eos!r}, true or false is expected")
    params = SamplingParams(
        max_tokens=whole_number("max_tokens", max_tokens),
        temperature=_number("temperature", temperature),
        top_p=_number("top_p", top_p),
        top_k=min(max(0, whole_number("top_k", top_k)), LARGEST_TOP_K),
        ignore_eos=ignore_eos,
    )
    for name, ok, expected in (
        ("max_tokens", params.max_tokens >= 1, "at least 1"),
        ("temperature", params.temperature >= 0, "0 or more"),
        ("top_p", 0 < params.top_p <= 1, "more than 0 and at most 1"),
        ("top_k", top_k >= -1, "0 (off) or more"),
    ):
        if not ok:
            raise RowError(f"{name} is {getattr(params, name) if name != 'top_k' else top_k}, {expected} is expected")
    return params


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


def checked_messages(value: Any, column: str) -> list[dict[str, Any]]:
    """Messages as a template wants them: keys that Arrow padded with null are dropped, lists of text parts joined."""
    if not isinstance(value, list) or not value:
        raise RowError(f"{column} is {_kind(value)}, a list of messages is expected")
    messages = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError(f"{column}: every message needs a role and a content")
        kept = {name: item for name, item in message.items() if item is not None}
        if isinstance(kept.get("content"), list):
            kept["content"] = _joined_parts(kept["content"], column)
        if not isinstance(kept.get("content"), str) and "tool_calls" not in kept:
            raise RowError(f"{column}: the content of a {message['role']} message is not a text")
        messages.append(kept)
    if messages[-1]["role"] == "assistant":
        raise RowError(f"{column}: the last message is the assistant's, so there is nothing to answer")
    return messages


def _joined_parts(parts: list[Any], column: str) -> str:
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise RowError(f"{column}: only parts of type text can be used in a message's content")
    return "".join(text for text in texts if text is not None)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RowError(f"{name} is {value!r}, a number is expected")
    if abs(value) >= LARGEST_NUMBER or not math.isfinite(value):
        raise RowError(f"{name} is {str(value)[:20]}, a number below 2**64 is expected")
    return float(value)


def whole_number(name: str, value: Any) -> int:
    if _number(name, value) != int(value):
        raise RowError(f"{name} is {value!r}, a whole number is expected")
    return int(value)


def _kind(value: Any) -> str:
    """What a value of the wrong type is, in words, with its beginning."""
    if value is None or value == []:
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
