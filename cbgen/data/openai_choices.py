"""The samples of a request as the choices of an OpenAI answer, and such an answer as samples again.

A sample is the result columns of one output row, by name; its tokens are as TOKEN_LOGPROB has them. An answer keeps all
that it is made of, but for times, the ids and ranks of generated tokens, and how many of them each choice has: made
samples and an answer once more, it is the same to the byte.
"""

from typing import Any

# In place of minus infinity, as in OpenAI's answers: JSON has no such number.
LEAST_LOGPROB = -9999.0
# Of a decoded token that is no whole character.
REPLACEMENT = "\ufffd"
# An answer tells which token it was by its text only.
UNKNOWN_ID = -1


def choice_of(index: int, sample: dict[str, Any], is_chat: bool) -> dict[str, Any]:
    text, logprobs = sample["completion"], sample["completion_logprobs"]
    thought = {} if sample["reasoning"] is None else {"reasoning_content": sample["reasoning"]}
    return {
        "index": index,
        **({"message": {"role": "assistant", "content": text, **thought}} if is_chat else {"text": text, **thought}),
        "logprobs": logprobs if logprobs is None else (_chat_logprobs if is_chat else _completion_logprobs)(logprobs),
        "finish_reason": sample["finish_reason"],
        "stop_reason": sample["stop_reason"],
    }


def sample_of(choice: dict[str, Any]) -> dict[str, Any]:
    """What choice_of made a choice of."""
    said, logprobs = choice.get("message", choice), choice["logprobs"]
    if logprobs is not None:
        logprobs = _tokens_of_chat(logprobs) if "message" in choice else _tokens_of_completion(logprobs)
    return {
        "completion": said["content" if "message" in choice else "text"],
        "reasoning": said.get("reasoning_content"),
        "completion_logprobs": logprobs,
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice["stop_reason"],
    }


def prompt_logprobs_of(tokens: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
    """As vLLM has them: for each token null, or the token itself and then the others, by token id."""
    return [None if token["logprob"] is None else _by_id(token) for token in tokens]


def tokens_of_prompt(told: list[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """What prompt_logprobs_of made a list of."""
    return [_token(UNKNOWN_ID, "", None) if by_id is None else _from_ids(by_id) for by_id in told]


def _chat_logprobs(tokens: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": [{**_told(token), "top_logprobs": [_told(other) for other in token["top"]]} for token in tokens]}


def _told(token: dict[str, Any]) -> dict[str, Any]:
    """The bytes of part of a character are not known."""
    text = token["token"]
    content = None if REPLACEMENT in text else list(text.encode("utf-8"))
    return {"token": text, "logprob": _finite(token["logprob"]), "bytes": content}


def _tokens_of_chat(logprobs: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        _token(
            UNKNOWN_ID,
            token["token"],
            token["logprob"],
            top=[_other(other["token"], other["logprob"]) for other in token["top_logprobs"]],
        )
        for token in logprobs["content"]
    ]


def _completion_logprobs(tokens: list[dict[str, Any]]) -> dict[str, Any]:
    """Offsets are in characters of the tokens' texts. The token itself is the first of its alternatives."""
    offsets, end = [], 0
    for token in tokens:
        offsets.append(end)
        end += len(token["token"])
    return {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [_finite(token["logprob"]) for token in tokens],
        "top_logprobs": [_by_text([token, *token["top"]]) for token in tokens],
        "text_offset": offsets,
    }


def _by_text(tokens: list[dict[str, Any]]) -> dict[str, float]:
    """Of tokens that look alike the first, which is the more likely one, or the one that was generated."""
    found: dict[str, float] = {}
    for token in tokens:
        found.setdefault(token["token"], _finite(token["logprob"]))
    return found


def _tokens_of_completion(logprobs: dict[str, Any]) -> list[dict[str, Any]]:
    columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
    return [
        _token(UNKNOWN_ID, text, logprob, top=[_other(*pair) for pair in others.items()])
        for text, logprob, others in zip(*columns, strict=True)
    ]


def _by_id(token: dict[str, Any]) -> dict[str, Any]:
    found = {str(token["token_id"]): _ranked(token, token["rank"])}
    for rank, other in enumerate(token["top"], start=1):
        found.setdefault(str(other["token_id"]), _ranked(other, rank))
    return found


def _ranked(token: dict[str, Any], rank: int | None) -> dict[str, Any]:
    return {"logprob": _finite(token["logprob"]), "rank": rank, "decoded_token": token["token"]}


def _from_ids(by_id: dict[str, Any]) -> dict[str, Any]:
    """Where a rank is left out among the alternatives, it is that of the token itself."""
    (own_id, own), *others = by_id.items()
    top = [_other(told["decoded_token"], told["logprob"], int(token_id)) for token_id, told in others]
    ranks = [told["rank"] for _, told in others]
    gap = next((place for place, rank in enumerate(ranks) if rank != place + 1), None)
    if gap is not None:
        top.insert(gap, _other(own["decoded_token"], own["logprob"], int(own_id)))
    return _token(int(own_id), own["decoded_token"], own["logprob"], own["rank"], top)


def _token(
    token_id: int, text: str, logprob: float | None, rank: int | None = None, top: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    return {"token_id": token_id, "token": text, "logprob": logprob, "rank": rank, "top": top or []}


def _other(text: str, logprob: float, token_id: int = UNKNOWN_ID) -> dict[str, Any]:
    return {"token_id": token_id, "token": text, "logprob": logprob}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
