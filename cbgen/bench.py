"""`cbgen bench`: the same requests through several engines in turn, and where cbgen's own time goes."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from cbgen.bench_backends import BACKENDS, CBGEN, BackendOptions
from cbgen.bench_report import Results, profile_figures, profile_lines, table_of
from cbgen.bench_worker import Worker
from cbgen.bench_workloads import Workload, WorkloadSizes, make_workload
from cbgen.config import ContinuousBatchingConfig
from cbgen.data.files import check_writable, publish_text
from cbgen.device import pick_device
from cbgen.errors import EXIT_DONE, EXIT_FATAL, CbgenError, UsageError
from cbgen.models.loading import ModelDescription, describe
from cbgen.models.quantization import kernels_for, resolve_quantization
from cbgen.ordering import ORDERS
from cbgen.report import print_line, print_resolved, versions


@dataclass(frozen=True)
class BenchSpec:
    """Every option of a benchmark. engine: cbgen's options; the other backends take none of them."""

    model: str
    workload: str
    backends: tuple[str, ...]
    runs: int
    sizes: WorkloadSizes
    profile: bool
    output_json: Path | None
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
        for name in self.backends:
            if name not in BACKENDS:
                raise UsageError(f"--backend {name}: not one of {', '.join(BACKENDS)}")
        if len(set(self.backends)) < len(self.backends):
            raise UsageError("--backend: a backend is named twice; --runs repeats all of them")
        if self.runs < 1:
            raise UsageError(f"--runs {self.runs}: at least 1 is expected")
        self.sizes.check()


def bench_spec(options: dict[str, Any]) -> BenchSpec:
    """The spec from the options of the command line, by their names there."""

    def of(kind: Any) -> dict[str, Any]:
        return {own.name: options[own.name] for own in fields(kind) if own.name in options}

    output_json = options["output_json"]
    return BenchSpec(
        **of(BenchSpec)
        | {
            "backends": tuple(options["backend"] or [CBGEN]),
            "sizes": WorkloadSizes(**of(WorkloadSizes)),
            "engine": ContinuousBatchingConfig(**of(ContinuousBatchingConfig)),
            "output_json": None if output_json is None else Path(output_json).expanduser(),
        }
    )


def run_bench(spec: BenchSpec, console: Console, screen: Console) -> int:
    """Runs every backend and prints the figures; returns the exit code, 1 when a backend could not run.

    console: for what goes on. screen: for the figures. Raises CbgenError for what is wrong before anything is run.
    """
    spec.check()
    device = pick_device(spec.device)
    config = spec.engine.resolve(device.type)
    if spec.output_json is not None:
        check_writable(spec.output_json.parent)
    model = describe(
        spec.model, spec.revision, spec.dtype, device, spec.max_model_len, lambda text: print_line(console, text)
    )
    quantization = resolve_quantization(spec.quantization, spec.calibration, kernels_for(device, model.dtype))
    workload = make_workload(spec.workload, spec.sizes, model)
    for warning in [*workload.warnings, *_warnings_about(spec, model, device)]:
        print_line(console, f"warning: {warning}")
    print_resolved(console, _resolved_lines(workload, model, device))
    results = _Contest(spec, workload, console).hold(
        BackendOptions(model, device, config, spec.gpu_memory_utilization, quantization, spec.order)
    )
    if not results.rows:
        return EXIT_FATAL
    screen.print(table_of(results))
    figures = None
    if results.profile is not None:
        figures = profile_figures(results.profile, results.median_wall_s(CBGEN))
        print_resolved(screen, profile_lines(figures))
    if spec.output_json is not None:
        outcome = {"runs": results.rows, "profile": figures, "failures": results.failures}
        report = {**_settings(spec, workload, model, device), **outcome}
        publish_text(spec.output_json, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    return EXIT_FATAL if results.failures else EXIT_DONE


class _Contest:
    """The workers of one benchmark: loaded one after the other, then run in turn, never two at once."""

    def __init__(self, spec: BenchSpec, workload: Workload, console: Console):
        self._spec = spec
        self._workload = workload
        self._console = console
        self._workers: dict[str, Worker] = {}
        self._results = Results(workload)

    def hold(self, options: BackendOptions) -> Results:
        """Loads and warms up every backend, times them in turn, and watches cbgen once more; who fails drops out."""
        try:
            for name in self._spec.backends:
                self._attempt(name, partial(self._load, name, options))
            for number in range(1, self._spec.runs + 1):
                for name in list(self._workers):
                    self._attempt(name, partial(self._time, name, number))
            if self._spec.profile and CBGEN in self._workers:
                self._attempt(CBGEN, self._profile)
        finally:
            for worker in self._workers.values():
                worker.close()
        return self._results

    def _attempt(self, name: str, task: Callable[[], None]) -> None:
        try:
            task()
        except CbgenError as error:
            self._results.failures[name] = str(error)
            print_line(self._console, f"cbgen: --backend {name}: {error}")
            if name in self._workers:
                self._workers.pop(name).close()

    def _load(self, name: str, options: BackendOptions) -> None:
        self._workers[name] = Worker(name, options)
        self._workers[name].run(self._workload.warm_up)

    def _time(self, name: str, number: int) -> None:
        run = self._workers[name].run(self._workload.requests)
        self._results.add(name, number, run)
        print_line(self._console, f"run {number} of {self._spec.runs}, {name}: {run.wall_s:.2f} s")

    def _profile(self) -> None:
        self._results.profile = self._workers[CBGEN].profile(self._workload.requests)


def _warnings_about(spec: BenchSpec, model: ModelDescription, device: torch.device) -> Iterator[str]:
    """What the user asked for and will not see, or not as expected; each as a line that says why."""
    if CBGEN not in spec.backends:
        changed = [own for own in fields(spec.engine) if getattr(spec.engine, own.name) != own.default]
        given = [f"no_{own.name}" if own.default is True else own.name for own in changed]
        given += ["gpu_memory_utilization"] if spec.gpu_memory_utilization is not None else []
        for name in given:
            yield f"--{name.replace('_', '-')} has no effect without --backend {CBGEN}"
        if not spec.profile:
            yield f"--no-profile has no effect without --backend {CBGEN}"
    if spec.revision is not None and model.is_local:
        yield "--revision has no effect: the model is not on a hub"
    if spec.gpu_memory_utilization is not None and spec.engine.max_memory_percent is not None:
        yield "--max-memory-percent has no effect beside --gpu-memory-utilization"
    if spec.engine.cpu_offload_space > 0 and device.type != "cuda":
        yield "--cpu-offload-space: swap pool and cache are the same memory here; it takes what the cache could have"


def _resolved_lines(workload: Workload, model: ModelDescription, device: torch.device) -> dict[str, str]:
    return {
        "workload": f"{workload.name}: {len(workload.requests)} requests, {workload.prompt_tokens:,} prompt tokens, "
        f"{workload.output_tokens:,} output tokens, greedy, end-of-sequence tokens ignored",
        "model": f"{model.name}, {dtype_name(model)} on {device}, torch threads: {torch.get_num_threads()}",
    }


def _settings(spec: BenchSpec, workload: Workload, model: ModelDescription, device: torch.device) -> dict[str, Any]:
    """What was measured, for the JSON file."""
    return {
        "model": model.name,
        "model_identity": model.identity,
        "dtype": dtype_name(model),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "workload": {
            "name": workload.name,
            "requests": len(workload.requests),
            "prompt_tokens": workload.prompt_tokens,
            "output_tokens": workload.output_tokens,
        },
        "engine": asdict(spec.engine.resolve(device.type))
        | {"gpu_memory_utilization": spec.gpu_memory_utilization, "max_model_len": model.max_model_len},
        "versions": versions(),
    }


def dtype_name(model: ModelDescription) -> str:
    return str(model.dtype).removeprefix("torch.")
