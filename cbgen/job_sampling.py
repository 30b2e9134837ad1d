"""How a job generates where its rows say nothing: the user's options, over the model's generation config."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cbgen.engine.sampling_params import DEFAULT_MAX_TOKENS, SamplingParams
from cbgen.errors import RowError, UsageError
from cbgen.jobspec import JobSpec, option_name
from cbgen.models.loading import ModelDescription
from cbgen.row_params import OPTION_COLUMNS, check_vocabulary

# The seed of a job is no row's: each row's draws come from it and from the row.
_OF_THE_JOB = {"seed"}
ALL_COLUMNS, NO_COLUMNS = "auto", "none"
# What other tools call parameters.
OTHER_NAMES = {
    "include_stop_str_in_output": "include_stop",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "stop_sequences": "stop",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "response_format": "json_schema",
}


def resolve_sampling(spec: JobSpec, model: ModelDescription) -> SamplingParams:
    """What rows without options of their own ask for. Raises UsageError with the option that is out of range."""
    given = _given(spec)
    for name, read in (("json_schema", _schema_text), ("grammar", _grammar_text)):
        if name in given:
            given[name] = read(given[name])
    own: dict[str, Any] = {name: model.sampling_defaults[name] for name in from_the_model(spec, model)}
    try:
        silent = SamplingParams(**{"max_tokens": DEFAULT_MAX_TOKENS, **own})
    except RowError as error:
        raise UsageError(
            f"the model's generation config: {error}; give the option, or --generation-config none"
        ) from error
    try:
        defaults = silent.updated(**given)
        check_vocabulary(defaults, model.vocab_size)
    except RowError as error:
        raise UsageError(_as_option(str(error))) from error
    return defaults


def from_the_model(spec: JobSpec, model: ModelDescription) -> list[str]:
    """The parameters that the model's generation config says and the user does not."""
    if spec.generation_config == "none":
        return []
    given = _given(spec)
    return [name for name in OPTION_COLUMNS if name in model.sampling_defaults and name not in given]


def _given(spec: JobSpec) -> dict[str, Any]:
    """The parameters that the user gives, as given."""
    return {
        name: value
        for name in OPTION_COLUMNS
        if name not in _OF_THE_JOB and (value := getattr(spec, name)) != JobSpec.model_fields[name].default
    }


def heeded_columns(spec: JobSpec, available: Sequence[str]) -> tuple[str, ...]:
    """The columns that are a row's own options, of all that could be. Raises UsageError for a name that could not."""
    if spec.row_options == NO_COLUMNS:
        return ()
    if spec.row_options == ALL_COLUMNS:
        return tuple(name for name in OPTION_COLUMNS if name in available)
    names = [name.strip() for name in spec.row_options.split(",")]
    for name in names:
        if name not in OPTION_COLUMNS:
            raise UsageError(f"--row-options: {name!r} is none of {', '.join(OPTION_COLUMNS)}; or give auto, or none")
        if name not in available:
            raise UsageError(f"--row-options: the input has no column {name!r}")
    return tuple(dict.fromkeys(names))


def sampling_line(spec: JobSpec, model: ModelDescription, defaults: SamplingParams, heeded: Sequence[str]) -> str:
    """All that differs from the plain case, where it comes from, and which columns override it."""
    shown = {"max_tokens": defaults.max_tokens, "n": defaults.n, **defaults.named(), "seed": spec.seed}
    shown = {name: value for name, value in shown.items() if name != "temperature"}
    how = "greedy" if defaults.is_greedy else f"temperature {defaults.temperature:g}"
    told = ", ".join([how, *(f"{name} {_shown(value)}" for name, value in shown.items())])
    own = from_the_model(spec, model)
    origin = f"; {', '.join(own)} from the model's generation config" if own else ""
    return told + origin + (f"; a row's own {', '.join(heeded)} override" if heeded else "; the same for all rows")


def without_effect(spec: JobSpec, defaults: SamplingParams, heeded: Sequence[str]) -> Iterator[str]:
    """Warnings about options that change nothing."""
    if defaults.is_greedy and "temperature" not in heeded:
        given = [name for name in ("top_p", "top_k", "min_p") if getattr(spec, name) is not None]
        if given:
            names = " and ".join(option_name(name) for name in given)
            yield f"{names} {'have' if len(given) > 1 else 'has'} no effect at temperature 0"
        if spec.n > 1:
            yield f"--n {spec.n} at temperature 0 gives the same completion {spec.n} times; give --temperature"
    if spec.include_stop and not (defaults.stop or defaults.stop_token_ids or {"stop", "stop_token_ids"} & set(heeded)):
        yield "--include-stop has no effect without --stop or --stop-token-ids"


def unread_columns(available: Sequence[str], heeded: Sequence[str]) -> Iterator[str]:
    """Warnings about columns that bear another name of a parameter, and do not count."""
    for name, ours in OTHER_NAMES.items():
        if name in available and ours not in heeded:
            yield f"the column {name} is not read: the parameter's name is {ours}"


def _shown(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


def _as_option(message: str) -> str:
    """A parameter's message with its name, and others that it mentions, as the command line has them."""
    first, rest = re.match(r"(\w*)(.*)", message, re.DOTALL).groups()  # type: ignore[union-attr]
    spelt = re.sub(r"\w+_\w+", lambda found: option_name(found[0]) if found[0] in OPTION_COLUMNS else found[0], rest)
    return (option_name(first) if first in OPTION_COLUMNS else first) + spelt


def _schema_text(value: Any) -> Any:
    """A file's content, unless it is JSON itself."""
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        return _file_text("json_schema", value)
    return value


def _grammar_text(value: str) -> str:
    """A file's content, unless it is a grammar itself, which has more than one line, or a rule."""
    return value if "\n" in value or ":" in value else _file_text("grammar", value)


def _file_text(name: str, path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{option_name(name)} {path}: cannot be read: {reason}") from error
