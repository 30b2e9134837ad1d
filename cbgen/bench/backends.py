"""The engines that a benchmark compares: the script of each, the Python that runs it, and the model it loads."""

import os
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import cbgen
from cbgen.config import ContinuousBatchingConfig, ResolvedConfig
from cbgen.errors import UsageError
from cbgen.models import tiny_random
from cbgen.models.loading import ModelDescription
from cbgen.models.quantization import Quantization

CBGEN, VLLM, OPENVINO = "cbgen", "vllm", "openvino"
PEERS = Path(__file__).parent / "peers"
# The script of each backend.
BACKENDS = {
    CBGEN: "peer_cbgen.py",
    "hf": "peer_hf.py",
    "hf-cb": "peer_hf_cb.py",
    VLLM: "peer_vllm.py",
    OPENVINO: "peer_openvino.py",
}
# Backends that have an environment of their own as a rule, since their dependencies are not cbgen's.
FOREIGN = (VLLM, OPENVINO)
# What pip calls a module that goes by another name.
PACKAGES = {"openvino_genai": "openvino-genai", "cbgen": "cbgen-llm"}


def interpreters(backends: tuple[str, ...], given: Iterable[str]) -> dict[str, str]:
    """The Python of each backend, from values of --python: NAME=PATH, or PATH where one backend is foreign.

    Raises UsageError for what is not a file, or not for a backend that takes part.
    """
    chosen = dict.fromkeys(backends, sys.executable)
    for text in given:
        name, path = _assigned("--python", text, backends)
        file = Path(path).expanduser()
        if not file.is_file():
            raise UsageError(f"--python {text}: no such file")
        chosen[name] = str(file.absolute())  # and not resolved: a virtual environment's Python is a link
    return chosen


def peer_models(backends: tuple[str, ...], given: Iterable[str]) -> dict[str, str]:
    """The folder of each backend that has one of its own, from values of --peer-model. Raises UsageError, as above."""
    chosen = {}
    for text in given:
        name, path = _assigned("--peer-model", text, backends)
        folder = Path(path).expanduser()
        if not folder.is_dir():
            raise UsageError(f"--peer-model {text}: no such folder")
        chosen[name] = str(folder.absolute())
    if OPENVINO in backends and OPENVINO not in chosen:
        raise UsageError(
            f"--backend {OPENVINO}: it loads only what was exported for it: `optimum-cli export openvino`, then give "
            f"--peer-model {OPENVINO}=FOLDER"
        )
    return chosen


def _assigned(option: str, text: str, backends: tuple[str, ...]) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not equals or name not in BACKENDS:
        foreign = [own for own in backends if own in FOREIGN]
        if len(foreign) != 1:
            raise UsageError(f"{option} {text}: for which backend? NAME=PATH is expected, such as {FOREIGN[0]}={text}")
        return foreign[0], text
    if name not in backends:
        raise UsageError(f"{option} {text}: {name} is not among the backends: {', '.join(backends)}")
    return name, path


@dataclass(frozen=True)
class BackendOptions:
    """What backends are made from; `engine` and what follows is of cbgen alone, but vLLM has gpu_memory_utilization
    too. models: those of --peer-model."""

    model: ModelDescription
    device: torch.device
    models: dict[str, str]
    engine: ContinuousBatchingConfig
    gpu_memory_utilization: float | None = None
    quantization: Quantization | None = None
    order: str = "auto"

    @property
    def resolved(self) -> ResolvedConfig:
        return self.engine.resolve(self.device.type)


class PeerOptions:
    """What the script of each backend is told at load. As a context it keeps a copy of a model made in memory, which
    others than cbgen load from a folder."""

    def __init__(self, options: BackendOptions):
        self._options = options

    def __enter__(self) -> "PeerOptions":
        return self

    def __exit__(self, *exc: object) -> None:
        if "_saved" in vars(self):
            self._saved.cleanup()

    def of(self, name: str) -> dict[str, Any]:
        """As JSON holds it."""
        options, model = self._options, self._options.model
        common = {
            "model": options.models.get(name) or self._own_model(name),
            "revision": None if name in options.models else model.revision,
            "dtype": dtype_name(model),
            "device": str(options.device),
            "max_model_len": model.max_model_len,
            "max_requests": options.resolved.max_requests_per_batch,
            "gpu_memory_utilization": options.gpu_memory_utilization,
        }
        if name != CBGEN:
            return common
        quantization = None if options.quantization is None else asdict(options.quantization)
        return common | {
            "engine": asdict(options.engine),
            "quantization": quantization,
            "order": options.order,
        }

    def _own_model(self, name: str) -> str:
        model = self._options.model
        if name == CBGEN:
            return model.name
        return self._saved.name if model.location is None else model.location

    @cached_property
    def _saved(self) -> "TemporaryDirectory[str]":
        folder = TemporaryDirectory(prefix="cbgen-bench-")
        tiny_random.build_model(self._options.model.dtype).save_pretrained(folder.name)
        tiny_random.build_tokenizer().save_pretrained(folder.name)
        return folder


def peer_environment(interpreter: str) -> dict[str, str]:
    """This process's, with this very cbgen for the Python that runs it."""
    if interpreter != sys.executable:
        return dict(os.environ)
    paths = [str(Path(cbgen.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def how_to_install(name: str, module: str, interpreter: str) -> str:
    """For a backend whose Python lacks a module: one line that says what to do."""
    root = module.partition(".")[0]
    package = PACKAGES.get(root, root)
    return (
        f"{package} is not installed in {interpreter}; pip install {package} there, or give --python "
        f"{name}=/path/to/python of an environment that has it"
    )


def dtype_name(model: ModelDescription) -> str:
    return str(model.dtype).removeprefix("torch.")
