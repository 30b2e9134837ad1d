"""cbgen: offline batch text generation on a continuous-batching engine of its own."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Where the names of the Python API live: imported when they are asked for, since they bring torch with them. The stub
# beside this module tells type checkers.
_HOMES = {
    "LLM": "cbgen.llm",
    "SamplingParams": "cbgen.engine.sampling_params",
    "RequestOutput": "cbgen.llm_outputs",
    "CompletionOutput": "cbgen.llm_outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'cbgen' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
