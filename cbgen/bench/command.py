"""`cbgen bench`: the same requests through one or several engines in turn, and where cbgen's time goes."""

import json
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from hashlib import blake2b
from typing import Any

import torch
from rich.console import Console

from cbgen.bench.backends import CBGEN, BackendOptions, PeerOptions, dtype_name, interpreters, peer_models
from cbgen.bench.baseline import Baseline
from cbgen.bench.contest import Contest
from cbgen.bench.datasets import Workload, make_workload
from cbgen.bench.ending import EndingSignals
from cbgen.bench.figures import Results, backend_figures, json_text, profile_figures, rates, ratios
from cbgen.bench.hardware import hardware
from cbgen.bench.report import (
    backend_lines,
    comparison_lines,
    markdown_of,
    profile_lines,
    table_of,
    throughput_lines,
)
from cbgen.bench.spec import BenchSpec, warnings_about
from cbgen.data.files import check_writable, publish_text
from cbgen.device import pick_device
from cbgen.errors import EXIT_DONE, EXIT_FATAL
from cbgen.models.loading import ModelDescription, describe
from cbgen.models.quantization import kernels_for, resolve_quantization
from cbgen.report import print_line, print_resolved, versions


def run_bench(spec: BenchSpec, console: Console, screen: Console, signals: EndingSignals) -> int:
    """Runs every backend and prints the figures; returns the exit code, 1 when a backend could not run or the first is
    slower than the baseline allows.

    console: for what goes on. screen: for the figures. signals: what may end it on the way. Raises CbgenError for what
    is wrong before anything is run.
    """
    spec.check()
    pythons = interpreters(spec.backends, spec.python)
    baseline = None if spec.baseline is None else Baseline(spec.baseline)
    if spec.output_json is not None:
        check_writable(spec.output_json.parent)
    options = _backend_options(spec, console)
    workload = make_workload(spec.dataset, options.model)
    settings = _settings(spec, workload, options)
    differences = [] if baseline is None else baseline.compare(settings)
    for warning in [*workload.warnings, *warnings_about(spec, options.model, options.device), *differences]:
        print_line(console, f"warning: {warning}")
    print_resolved(console, _resolved_lines(workload, options.model, options.device))
    with PeerOptions(options) as peers:
        results = Contest(spec, workload, pythons, console, signals).hold(peers)
    if not results.rows:
        return EXIT_FATAL
    outcome = _Outcome.of(spec, results)
    _show(outcome, spec, screen)
    if spec.output_json is not None:
        publish_text(spec.output_json, json_text(outcome.report(settings)))
    is_slower = baseline is not None and _is_slower(baseline, outcome, spec, console, screen)
    return EXIT_FATAL if results.failures or is_slower else EXIT_DONE


@dataclass(frozen=True)
class _Outcome:
    """All figures. first: the backend that the others are compared with; backends: see backend_figures."""

    results: Results
    first: str
    backends: dict[str, dict[str, Any]]
    ratios: dict[str, dict[str, float]]
    profile: dict[str, Any] | None

    @classmethod
    def of(cls, spec: BenchSpec, results: Results) -> "_Outcome":
        profile = None
        if results.profile is not None:
            profile = profile_figures(results.profile, results.median_wall_s(CBGEN))
        backends = {name: backend_figures(results, name, spec.slo) for name in results.backends}
        return cls(results, results.backends[0], backends, ratios(results), profile)

    @property
    def elapsed_s(self) -> float:
        """The median of the first backend's runs."""
        return self.results.median_wall_s(self.first)

    @property
    def versions(self) -> dict[str, str]:
        """Of what runs here, and of what the backends say they are: the first one's word counts most."""
        found = versions()
        for name in self.results.backends[1:]:
            found |= {package: own for package, own in self.results.versions[name].items() if package not in found}
        return found | self.results.versions[self.first]

    def report(self, settings: dict[str, Any]) -> dict[str, Any]:
        """For --output-json: the conventional keys of a throughput benchmark first, then all the rest."""
        results, workload = self.results, self.results.workload
        own = rates(workload, self.elapsed_s)
        return {
            "elapsed_time": self.elapsed_s,
            "num_requests": len(workload.requests),
            "total_num_tokens": workload.prompt_tokens + workload.output_tokens,
            "requests_per_second": own["requests_per_second"],
            "tokens_per_second": own["total_tokens_per_second"],
            "output_tokens_per_second": own["output_tokens_per_second"],
            **settings,
            "backend": self.first,
            "versions": self.versions,
            "backends": self.backends,
            "ratios": self.ratios,
            "runs": results.rows,
            "profile": self.profile,
            "failures": results.failures,
        }


def _backend_options(spec: BenchSpec, console: Console) -> BackendOptions:
    device = pick_device(spec.device)
    spec.engine.resolve(device.type)
    models = peer_models(spec.backends, spec.peer_model)
    model = describe(
        spec.model, spec.revision, spec.dtype, device, spec.max_model_len, lambda text: print_line(console, text)
    )
    quantization = resolve_quantization(spec.quantization, spec.calibration, kernels_for(device, model.dtype))
    return BackendOptions(model, device, models, spec.engine, spec.gpu_memory_utilization, quantization, spec.order)


def _show(outcome: _Outcome, spec: BenchSpec, screen: Console) -> None:
    workload = outcome.results.workload
    if spec.markdown:
        print_line(screen, markdown_of(workload, outcome.backends, outcome.ratios))
    else:
        screen.print(table_of(outcome.results))
    lines = [*comparison_lines(outcome.backends, outcome.ratios), *backend_lines(outcome.backends)]
    for line in lines:
        print_line(screen, line)
    if outcome.profile is not None:
        print_resolved(screen, profile_lines(outcome.profile))
    if len(spec.backends) == 1:
        for line in throughput_lines(workload, outcome.elapsed_s):
            print_line(screen, line)


def _is_slower(baseline: Baseline, outcome: _Outcome, spec: BenchSpec, console: Console, screen: Console) -> bool:
    """Whether the first backend has become too slow. One that could not run is not: that is said already."""
    if outcome.first != spec.backends[0]:
        return False
    for warning in baseline.compare_versions(outcome.versions):
        print_line(console, f"warning: {warning}")
    rate = outcome.backends[outcome.first]["output_tokens_per_second"]
    line, regression = baseline.verdict(rate, spec.max_regression)
    print_line(screen, line)
    if regression is not None:
        print_line(console, f"cbgen: {regression}")
    return regression is not None


def _resolved_lines(workload: Workload, model: ModelDescription, device: torch.device) -> dict[str, str]:
    return {
        "workload": f"{workload.name}: {len(workload.requests)} requests, {workload.prompt_tokens:,} prompt tokens, "
        f"{workload.output_tokens:,} output tokens, greedy, end-of-sequence tokens ignored",
        "model": f"{model.name}, {dtype_name(model)} on {device}, torch threads: {torch.get_num_threads()}",
    }


def _settings(spec: BenchSpec, workload: Workload, options: BackendOptions) -> dict[str, Any]:
    """What is measured, for the JSON file and for the comparison with an earlier one."""
    model, quantization = options.model, options.quantization
    dataset = replace(spec.dataset, dataset_name=spec.dataset.kind)
    return {
        "backend": spec.backends[0],
        "model": model.name,
        "model_identity": model.identity,
        "dtype": dtype_name(model),
        "device": str(options.device),
        "quantization": None if quantization is None else quantization.identity,
        "seed": dataset.seed,
        "dataset_name": dataset.dataset_name,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "threads": torch.get_num_threads(),
        "workload": {
            "name": workload.name,
            "dataset_name": dataset.dataset_name,
            "requests": len(workload.requests),
            "n": dataset.n,
            "prompt_tokens": workload.prompt_tokens,
            "output_tokens": workload.output_tokens,
            "seed": dataset.seed,
            "requests_digest": _digest(workload),
        },
        "engine": asdict(options.resolved)
        | {
            "order": spec.order,
            "gpu_memory_utilization": spec.gpu_memory_utilization,
            "max_model_len": model.max_model_len,
        },
        "config": json.loads(json.dumps(asdict(replace(spec, dataset=dataset)), default=str)),
        "hardware": hardware(options.device),
    }


def _digest(workload: Workload) -> str:
    """Tells one list of requests from another."""
    requests = [(request.prompt_ids, request.max_tokens, request.n) for request in workload.requests]
    return blake2b(json.dumps(requests).encode(), digest_size=8).hexdigest()
