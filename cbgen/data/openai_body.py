"""The body of an OpenAI request as columns of a row: each parameter by the name that cbgen has for it, or a refusal.

Names are OpenAI's and those that vLLM adds; null is as if not given, and so is `logprobs: false`. Values go on as they
are: whether they are in range is checked where every row's are.

    max_completion_tokens           max_tokens, whatever that says itself
    include_stop_str_in_output      include_stop
    logprobs, top_logprobs          logprobs: the number of alternatives
    response_format, guided_*,      json_schema, regex, choice or grammar
    structured_outputs
    tools, tool_choice              tools
    best_of                         nothing: it may only say what n does
"""

import json
from collections.abc import Iterator
from typing import Any

from cbgen.errors import RowError

CHAT_URL = "/v1/chat/completions"
PROMPT_FIELDS = {CHAT_URL: "messages", "/v1/completions": "prompt"}
FORMS = ("json_schema", "regex", "choice", "grammar")
OPTIONS = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words"),
    *("stop", "stop_token_ids", "include_stop", "min_tokens", "ignore_eos"),
    *("n", "seed", "logprobs", "prompt_logprobs", "skip_special_tokens", *FORMS),
)
RENAMED = {"max_completion_tokens": "max_tokens", "include_stop_str_in_output": "include_stop"}
AS_THEY_ARE = {name: name for name in OPTIONS if name not in ("logprobs", *FORMS)} | RENAMED
FORM_FIELDS = {name: name for name in FORMS} | {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
STRUCTURED_OUTPUTS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
ANY_OBJECT = '{"type": "object"}'
# They say nothing about the result.
WITHOUT_EFFECT = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("priority", "request_id", "cache_salt"),
}
# Not supported, but for the value that changes nothing.
HARMLESS_VALUES: dict[str, Any] = {
    "stream": False,
    "echo": False,
    "suffix": "",
    "add_generation_prompt": True,
    "continue_final_message": False,
    "use_beam_search": False,
    "length_penalty": 1,
    "spaces_between_special_tokens": True,
    "modalities": ["text"],
}
# Of chats; completions may say that they want none.
CHAT_ONLY: dict[str, Any] = {"top_logprobs": 0, "tools": [], "tool_choice": "none"}
ADVICE = {
    "stream": "a batch is not streamed; leave it out",
    "continue_final_message": "leave it out, and give --continue-final-message for the whole job",
    "add_generation_prompt": "leave it out; --continue-final-message continues what ends with the assistant",
}
NO_TOOL_CALLS = "auto or none is expected, since the output is the model's text as it is: tool calls are not parsed"


def body_columns(given: dict[str, Any], url: str) -> dict[str, Any]:
    """What a body asks for beside its prompt, by name of column. given: the body without what is null.

    Raises RowError with all that cannot be done.
    """
    columns = {column: given[name] for name, column in AS_THEY_ARE.items() if name in given}
    refusals = list(_refusals(given, url))
    for read in (_form, _samples, *((_chat_logprobs, _tools) if url == CHAT_URL else (_completion_logprobs,))):
        try:
            columns |= read(given)
        except RowError as error:
            refusals.append(str(error))
    if refusals:
        raise RowError("; ".join(refusals))
    return columns


def shown(value: Any) -> str:
    """The beginning of a value, as JSON."""
    return "missing" if value is None else json.dumps(value, ensure_ascii=False)[:60]


def _refusals(given: dict[str, Any], url: str) -> Iterator[str]:
    """Each parameter that asks for what there is not, by its name alone, and why."""
    followed = {PROMPT_FIELDS[url], "model", "logprobs", "best_of", "parallel_tool_calls", "response_format"}
    followed |= {"structured_outputs", *AS_THEY_ARE, *FORM_FIELDS, *WITHOUT_EFFECT}
    harmless = dict(HARMLESS_VALUES)
    if url == CHAT_URL:
        followed |= CHAT_ONLY.keys()
    else:
        harmless |= CHAT_ONLY
    if not isinstance(given.get("model", ""), str):
        yield f"model is {shown(given['model'])}, a text is expected"
    for name, value in given.items():
        if name in harmless and not _equal(value, harmless[name]):
            what = f"is no parameter of {url}" if name in CHAT_ONLY else ADVICE.get(name, "not supported")
            yield f"{name} is {shown(value)}: {what}"
        elif name not in harmless and name not in followed:
            yield f"{name}: is no parameter of {url} that cbgen knows"


def _samples(given: dict[str, Any]) -> dict[str, Any]:
    """All samples are given back, so that there is nothing to choose the best of."""
    wanted = given.get("n", 1)
    if "best_of" in given and not _equal(given["best_of"], wanted):
        raise RowError(f"best_of is {shown(given['best_of'])}: only as many as n ({shown(wanted)}) can be had")
    return {}


def _completion_logprobs(given: dict[str, Any]) -> dict[str, Any]:
    asked = given.get("logprobs", False)
    return {} if asked is False else {"logprobs": asked}


def _chat_logprobs(given: dict[str, Any]) -> dict[str, Any]:
    asked, alternatives = given.get("logprobs", False), given.get("top_logprobs", 0)
    if not isinstance(asked, bool):
        raise RowError(f"logprobs is {shown(asked)}, true or false is expected; top_logprobs takes the number")
    if not asked and not _equal(alternatives, 0):
        raise RowError(f"top_logprobs is {shown(alternatives)}: give logprobs: true beside it")
    return {"logprobs": alternatives} if asked else {}


def _tools(given: dict[str, Any]) -> dict[str, Any]:
    tools, choice = given.get("tools", []), given.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise RowError(f"tool_choice is {shown(choice)}: {NO_TOOL_CALLS}")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(f"tools is {shown(tools)}, a list of tools is expected")
    if choice == "none" or not tools:
        return {}
    if given.get("parallel_tool_calls") is False:
        raise RowError("parallel_tool_calls is false: is not supported, tool calls are not parsed")
    return {"tools": tools}


def _form(given: dict[str, Any]) -> dict[str, Any]:
    """The one form that the output is to have, if any."""
    forms = [(name, column, given[name]) for name, column in FORM_FIELDS.items() if name in given]
    if "response_format" in given:
        forms += _response_format(given["response_format"])
    if "structured_outputs" in given:
        forms += _structured_outputs(given["structured_outputs"])
    if len(forms) > 1:
        raise RowError(f"{' and '.join(name for name, _, _ in forms)}: give one of them, an output has one form")
    # An object goes on as text: where rows are tables, nulls in an object are padding, and in a schema they count.
    return {column: _text(value) if column == "json_schema" else value for _, column, value in forms}


def _response_format(value: Any) -> list[tuple[str, str, Any]]:
    """The form as a list of at most one: the name in the body, the column and its value."""
    name = "response_format"
    given = _known(name, value, {"type", "json_schema"})
    kind = given.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise RowError(f"{name}.type is {shown(kind)}, text, json_object or json_schema is expected")
    if (kind == "json_schema") != ("json_schema" in given):
        raise RowError(f"{name} is {shown(value)}: type json_schema and the field of that name go together")
    if kind == "text":
        return []
    if kind == "json_object":
        return [(name, "json_schema", ANY_OBJECT)]
    described = _known(f"{name}.json_schema", given["json_schema"], {"name", "description", "strict", "schema"})
    if not isinstance(described.get("schema"), dict):
        raise RowError(f"{name}.json_schema.schema is {shown(described.get('schema'))}, an object is expected")
    return [(name, "json_schema", described["schema"])]


def _structured_outputs(value: Any) -> list[tuple[str, str, Any]]:
    """See _response_format; more than one where the value asks for more."""
    name = "structured_outputs"
    given = _known(name, value, {"json_object", *STRUCTURED_OUTPUTS})
    forms = [(f"{name}.{key}", column, given[key]) for key, column in STRUCTURED_OUTPUTS.items() if key in given]
    any_object = given.get("json_object", False)
    if not isinstance(any_object, bool):
        raise RowError(f"{name}.json_object is {shown(any_object)}, true or false is expected")
    return [*forms, (f"{name}.json_object", "json_schema", ANY_OBJECT)] if any_object else forms


def _known(name: str, value: Any, keys: set[str]) -> dict[str, Any]:
    """An object's fields that are not null. Raises RowError for another value, and for a field that is none of keys."""
    if not isinstance(value, dict):
        raise RowError(f"{name} is {shown(value)}, an object is expected")
    given = {key: item for key, item in value.items() if item is not None}
    unknown = [key for key in given if key not in keys]
    if unknown:
        raise RowError(f"{name}.{unknown[0]}: is no field that cbgen knows")
    return given


def _text(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


def _equal(value: Any, other: Any) -> bool:
    """As JSON has it: false is not 0."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
