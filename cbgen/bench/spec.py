"""The options of a benchmark, and what can be said of them before anything is loaded."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from cbgen.bench.backends import BACKENDS, CBGEN, VLLM
from cbgen.bench.dataset_options import DatasetOptions
from cbgen.bench.latency import Slo, parse_slo
from cbgen.config import ContinuousBatchingConfig
from cbgen.errors import UsageError
from cbgen.models.loading import ModelDescription
from cbgen.ordering import ORDERS

DEFAULT_MAX_REGRESSION = "10%"
DEFAULT_ORDER = "auto"


@dataclass(frozen=True)
class BenchSpec:
    """Every option of a benchmark. engine, order, quantization: cbgen's own; the other backends take none of them.

    backends: the first is what others are compared with. python, peer_model: as they are given, NAME=PATH.
    max_regression: a share, of the throughput in the file `baseline`.
    """

    model: str
    backends: tuple[str, ...]
    dataset: DatasetOptions
    runs: int
    profile: bool
    markdown: bool
    slo: Slo | None
    output_json: Path | None
    baseline: Path | None
    max_regression: float
    python: tuple[str, ...]
    peer_model: tuple[str, ...]
    revision: str | None
    device: str
    dtype: str
    quantization: str | None
    calibration: str | None
    order: str
    max_model_len: int | None
    engine: ContinuousBatchingConfig
    gpu_memory_utilization: float | None

    def check(self) -> None:
        """Raises UsageError for what is wrong by itself."""
        if self.order not in ORDERS:
            raise UsageError(f"--order {self.order}: not one of {', '.join(ORDERS)}")
        if self.runs < 1:
            raise UsageError(f"--runs {self.runs}: at least 1 is expected")
        self.dataset.check()


def bench_spec(options: dict[str, Any]) -> BenchSpec:
    """The spec from the options of the command line, by their names there. Raises UsageError."""

    def of(kind: Any) -> dict[str, Any]:
        return {own.name: options[own.name] for own in fields(kind) if own.name in options}

    baseline, max_regression = _path(options["baseline"]), options["max_regression"]
    if max_regression is not None and baseline is None:
        raise UsageError("--max-regression: needs --baseline, the report that it is about")
    slo = options["slo"]
    return BenchSpec(
        **of(BenchSpec)
        | {
            "backends": _backends(options["backend"], options["compare"]),
            "dataset": DatasetOptions(**of(DatasetOptions)),
            "engine": ContinuousBatchingConfig(**of(ContinuousBatchingConfig)),
            "slo": None if slo is None else parse_slo(slo),
            "output_json": _output_path(options["output_json"]),
            "baseline": baseline,
            "max_regression": parse_share(DEFAULT_MAX_REGRESSION if max_regression is None else max_regression),
            "python": tuple(options["python"] or ()),
            "peer_model": tuple(options["peer_model"] or ()),
        }
    )


def parse_share(text: str) -> float:
    """Of --max-regression: "10%" or "0.1"; at least 0, less than 1. Raises UsageError."""
    number, percent, rest = text.strip().partition("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = -1.0
    if rest or not 0 <= share < 1:
        raise UsageError(f"--max-regression {text}: a share below 100% is expected, such as 10%")
    return share


def _backends(backend: str | None, compare: str | None) -> tuple[str, ...]:
    if backend is not None and compare is not None:
        raise UsageError("--backend and --compare: one of them; --compare names all backends")
    known = ", ".join(BACKENDS)
    if compare is None:
        name = CBGEN if backend is None else backend
        if name not in BACKENDS:
            raise UsageError(f"--backend {name}: not one of {known}")
        return (name,)
    names = tuple(name.strip() for name in compare.split(","))
    for name in names:
        if name not in BACKENDS:
            raise UsageError(f"--compare {name}: not one of {known}")
    if len(set(names)) < len(names):
        raise UsageError("--compare: a backend is named twice; --runs repeats all of them")
    return names


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text).expanduser()


def _output_path(text: str | None) -> Path | None:
    """Of --output-json. Raises UsageError for what can be no file."""
    path = _path(text)
    if path is not None and text is not None and (not text or text.endswith(("/", os.sep)) or path.is_dir()):
        raise UsageError(f"--output-json {text or repr(text)}: the name of a file is expected, not of a folder")
    return path


def warnings_about(spec: BenchSpec, model: ModelDescription, device: torch.device) -> Iterator[str]:
    """What the user asked for and will not see, or not as expected; each as a line that says why."""
    if CBGEN not in spec.backends:
        values = {own.name: getattr(spec.engine, own.name) for own in fields(spec.engine)}
        changed = [own.name for own in fields(spec.engine) if values[own.name] != own.default]
        given = [f"no_{name}" if values[name] is False else name for name in changed]
        given += [] if spec.quantization is None else ["quantization"]
        for name in given:
            if name != "max_requests_per_batch":  # foreign engines take it too
                yield f"--{name.replace('_', '-')} has no effect without {CBGEN} among the backends"
        if spec.gpu_memory_utilization is not None and VLLM not in spec.backends:
            yield f"--gpu-memory-utilization has no effect without {CBGEN} or {VLLM} among the backends"
        if spec.order != DEFAULT_ORDER:
            yield f"--order has no effect without {CBGEN} among the backends"
        if not spec.profile:
            yield f"--no-profile has no effect without {CBGEN} among the backends"
    if spec.revision is not None and model.is_local:
        yield "--revision has no effect: the model is not on a hub"
    if spec.gpu_memory_utilization is not None and spec.engine.max_memory_percent is not None:
        yield "--max-memory-percent has no effect beside --gpu-memory-utilization"
    if spec.engine.cpu_offload_space > 0 and device.type != "cuda":
        yield "--cpu-offload-space: swap pool and cache are the same memory here; it takes what the cache could have"
    if CBGEN in spec.backends:
        yield from spec.engine.warnings_about_graphs(device.type)
