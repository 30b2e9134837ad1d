"""Options that commands have because a class has fields, each spelt as in `options`: they are listed in one place."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import typer

from cbgen import options
from cbgen.config import ContinuousBatchingConfig
from cbgen.jobspec import JobSpec

# Name and default of every option of a job: the fields of a spec file, so that it and the command line cannot differ.
JOB_OPTIONS: dict[str, Any] = {
    name: None if field.is_required() or isinstance(field.default, list | dict) else field.default
    for name, field in JobSpec.model_fields.items()
}
# The same of the engine.
_CONFIG = [(own.name, own.default) for own in fields(ContinuousBatchingConfig)]
_MEMORY = 1 + [name for name, _ in _CONFIG].index("max_memory_percent")  # two ways to say how much stand together
ENGINE_OPTIONS: dict[str, Any] = dict([*_CONFIG[:_MEMORY], ("gpu_memory_utilization", None), *_CONFIG[_MEMORY:]])
# Those that decide on what fits in memory.
SIZE_OPTIONS = {
    name: ENGINE_OPTIONS[name]
    for name in (
        "page_size",
        "num_blocks",
        "max_batch_tokens",
        "max_requests_per_batch",
        "max_memory_percent",
        "gpu_memory_utilization",
        "cpu_offload_space",
        "kv_cache_dtype",
        "use_cuda_graph",
        "use_async_batching",
        "q_padding_interval_size",
        "kv_padding_interval_size",
        "max_cached_graphs",
    )
}


def with_options(defaults: Mapping[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command, which has the context first, these options too: before its keyword-only ones.

    The command is not handed them: they are in the context's params.
    """

    def extend(command: Callable[..., None]) -> Callable[..., None]:
        context, *own = inspect.signature(command).parameters.values()
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=_option(name))
            for name, default in defaults.items()
        ]
        own_first = [one for one in own if one.kind is not inspect.Parameter.KEYWORD_ONLY]
        own_last = [one for one in own if one.kind is inspect.Parameter.KEYWORD_ONLY]
        parameters = [
            one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (context, *own_first, *added, *own_last)
        ]

        def extended(**values: Any) -> None:
            command(values[context.name], **{one.name: values[one.name] for one in own})

        extended.__name__, extended.__doc__ = command.__name__, command.__doc__
        extended.__annotations__ = {one.name: one.annotation for one in parameters}
        extended.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return extended

    return extend


def given_options(context: typer.Context, names: Mapping[str, Any]) -> dict[str, Any]:
    """Of these options, the values of those that stand on the command line."""
    return {
        name: value
        for name, value in context.params.items()
        if name in names and (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
    }


def _option(name: str) -> Any:
    return getattr(options, "".join(word.capitalize() for word in name.split("_")))
