"""The figures of a benchmark: each run's, each backend's over its runs, and one backend's over another's."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from cbgen.bench.answers import Run
from cbgen.bench.datasets import Workload
from cbgen.bench.latency import Slo, latency_figures
from cbgen.bench.profile import PARTS, Profile


@dataclass
class Results:
    """The timed runs in the order in which they were made, cbgen's profile, and who could not run and why.

    rows: the figures of each run; `runs` is what they were worked out from. versions: of each backend, its packages'.
    failures: backend to reason.
    """

    workload: Workload
    rows: list[dict[str, Any]] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    profile: Profile | None = None
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, backend: str, number: int, run: Run) -> None:
        """equal_share: of the samples, those with the same tokens as in the first run of the first that ran."""
        self.runs.append(run)
        reference = self.runs[0].token_ids
        equal = sum(ours == theirs for ours, theirs in zip(run.token_ids, reference, strict=True))
        self.rows.append(
            {
                "backend": backend,
                "run": number,
                "wall_s": run.wall_s,
                **rates(self.workload, run.wall_s),
                "peak_rss_bytes": run.peak_rss_bytes,
                "equal_share": equal / len(reference),
                "warm_cache": run.warm_cache,
            }
        )

    @property
    def backends(self) -> list[str]:
        """Those that ran at least once."""
        return list(dict.fromkeys(row["backend"] for row in self.rows))

    def of(self, backend: str) -> list[tuple[dict[str, Any], Run]]:
        return [(row, run) for row, run in zip(self.rows, self.runs, strict=True) if row["backend"] == backend]

    def median_run(self, backend: str) -> Run:
        """Of an even number of runs, the faster of the two in the middle."""
        runs = sorted((run for _, run in self.of(backend)), key=lambda run: run.wall_s)
        return runs[(len(runs) - 1) // 2]

    def median_wall_s(self, backend: str) -> float:
        return median(run.wall_s for _, run in self.of(backend))


def rates(workload: Workload, wall_s: float) -> dict[str, float]:
    """Per second of a run that took so long."""
    return {
        "requests_per_second": len(workload.requests) / wall_s,
        "total_tokens_per_second": (workload.prompt_tokens + workload.output_tokens) / wall_s,
        "output_tokens_per_second": workload.output_tokens / wall_s,
    }


def backend_figures(results: Results, backend: str, slo: Slo | None) -> dict[str, Any]:
    """Over all runs of a backend that ran. output_tokens_per_second: of the median time; spread: of all runs, and share
    of that figure.

    latencies: of the median run; engine: what the engine counted in it, if it tells.
    """
    own = [row for row, _ in results.of(backend)]
    speeds = [row["output_tokens_per_second"] for row in own]
    run = results.median_run(backend)
    middle = rates(results.workload, results.median_wall_s(backend))["output_tokens_per_second"]
    return {
        "output_tokens_per_second": middle,
        "spread": {"min": min(speeds), "max": max(speeds), "share": (max(speeds) - min(speeds)) / middle},
        "runs": len(own),
        "equal_share": min(row["equal_share"] for row in own),
        "latencies": latency_figures(run.latencies, slo, run.wall_s),
        "engine": run.figures or None,
        "versions": results.versions[backend],
    }


def ratios(results: Results) -> dict[str, dict[str, float]]:
    """Of each backend but the first that ran: the first one's output tokens per second over its own, round by round."""
    speeds = {(row["backend"], row["run"]): row["output_tokens_per_second"] for row in results.rows}
    first, *others = results.backends
    found = {}
    for other in others:
        rounds = list(_rounds(speeds, first, other))
        found[other] = {"median": median(rounds), "min": min(rounds), "max": max(rounds)}
    return found


def _rounds(speeds: dict[tuple[str, int], float], first: str, other: str) -> Iterator[float]:
    for (name, number), speed in speeds.items():
        if name == other and (first, number) in speeds:
            yield speeds[first, number] / speed


def profile_figures(profile: Profile, wall_s: float) -> dict[str, Any]:
    """What a profile says, for timed runs that took wall_s seconds (their median) for the same work.

    Rates are of the timed runs, where nothing is watched; the split of the steps is of the watched one.
    """
    work, ceilings = profile.work, profile.ceilings
    flops_per_s = profile.flops / wall_s
    read_bytes_per_s = (profile.weight_bytes + profile.kv_bytes) / wall_s
    return {
        "step_time_shares": {part: profile.share(part) for part in PARTS},
        "step_time_s": profile.seconds,
        "wall_s": profile.wall_s,
        "time_against_timed_runs": profile.wall_s / wall_s,
        "num_steps": work.num_steps,
        "query_tokens": work.query_tokens,
        "mean_query_tokens": work.query_tokens / work.num_steps,
        "model_flops": profile.flops,
        "model_flops_per_second": flops_per_s,
        "share_of_matrix_ceiling": flops_per_s / ceilings.matrix_flops_per_s,
        "weight_bytes_read": profile.weight_bytes,
        "weight_bytes_per_second": profile.weight_bytes / wall_s,
        "kv_bytes_read": profile.kv_bytes,
        "kv_bytes_per_second": profile.kv_bytes / wall_s,
        "read_bytes_per_second": read_bytes_per_s,
        "share_of_read_ceiling": read_bytes_per_s / ceilings.read_bytes_per_s,
        "ceilings": asdict(ceilings),
        "attention": profile.attention_backend,
        "num_blocks": profile.num_blocks,
    }


def json_text(report: dict[str, Any]) -> str:
    """As JSON has it: a figure that is not finite is null, since JSON has no such numbers."""
    return json.dumps(_with_nulls(report), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _with_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_nulls(own) for name, own in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nulls(own) for own in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
