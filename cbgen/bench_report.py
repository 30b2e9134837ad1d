"""The figures of a benchmark: a table of runs, lines about cbgen's own time and work, and all of it as JSON."""

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from cbgen.bench_profile import PARTS, Profile
from cbgen.bench_worker import Run
from cbgen.bench_workloads import Workload

GIB, GIGA = 2**30, 1e9
# Heading, and what of a run's figures stands below it.
COLUMNS = (
    ("backend", lambda row: row["backend"]),
    ("run", lambda row: str(row["run"])),
    ("wall s", lambda row: f"{row['wall_s']:.2f}"),
    ("output tokens/s", lambda row: f"{row['output_tokens_per_second']:,.1f}"),
    ("total tokens/s", lambda row: f"{row['total_tokens_per_second']:,.1f}"),
    ("requests/s", lambda row: f"{row['requests_per_second']:.2f}"),
    ("peak RSS GiB", lambda row: f"{row['peak_rss_bytes'] / GIB:.2f}"),
    ("equal rows", lambda row: f"{row['equal_share']:.1%}"),
)


@dataclass
class Results:
    """The timed runs in the order in which they were made, cbgen's profile, and who could not run and why.

    rows: the figures of each run. failures: backend to reason.
    """

    workload: Workload
    rows: list[dict[str, Any]] = field(default_factory=list)
    profile: Profile | None = None
    failures: dict[str, str] = field(default_factory=dict)
    _reference: list[list[int]] | None = None

    def add(self, backend: str, number: int, run: Run) -> None:
        """equal_share: of the rows, those with the same tokens as in the first run of the first backend that ran."""
        if self._reference is None:
            self._reference = run.token_ids
        count = len(self.workload.requests)
        equal = sum(ours == theirs for ours, theirs in zip(run.token_ids, self._reference, strict=True))
        output_tokens, prompt_tokens = self.workload.output_tokens, self.workload.prompt_tokens
        self.rows.append(
            {
                "backend": backend,
                "run": number,
                "wall_s": run.wall_s,
                "output_tokens_per_second": output_tokens / run.wall_s,
                "total_tokens_per_second": (prompt_tokens + output_tokens) / run.wall_s,
                "requests_per_second": count / run.wall_s,
                "peak_rss_bytes": run.peak_rss_bytes,
                "equal_share": equal / count,
            }
        )

    def median_wall_s(self, backend: str) -> float:
        return median(row["wall_s"] for row in self.rows if row["backend"] == backend)


def table_of(results: Results) -> Table:
    table = Table(box=SIMPLE, pad_edge=False, collapse_padding=True)
    for heading, _ in COLUMNS:
        table.add_column(heading, justify="left" if heading == "backend" else "right")
    for row in results.rows:
        table.add_row(*(show(row) for _, show in COLUMNS))
    return table


def profile_figures(profile: Profile, wall_s: float) -> dict[str, Any]:
    """What a profile says, for timed runs that took wall_s seconds (their median) for the same work.

    Rates are of the timed runs, where nothing is watched; the split of the steps is of the watched one.
    """
    work, ceilings = profile.work, profile.ceilings
    flops_per_s, kv_bytes_per_s = profile.flops / wall_s, profile.kv_bytes / wall_s
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
        "kv_bytes_read": profile.kv_bytes,
        "kv_bytes_per_second": kv_bytes_per_s,
        "share_of_read_ceiling": kv_bytes_per_s / ceilings.read_bytes_per_s,
        "ceilings": asdict(ceilings),
        "attention": profile.attention_backend,
        "num_blocks": profile.num_blocks,
    }


def profile_lines(figures: dict[str, Any]) -> dict[str, str]:
    """The same for the eye, one line per fact."""
    ceilings = figures["ceilings"]
    shares = ", ".join(f"{part} {share:.1%}" for part, share in figures["step_time_shares"].items())
    return {
        "step time": shares,
        "steps": f"{figures['num_steps']:,}, with {figures['mean_query_tokens']:.1f} query tokens on average",
        "model": f"{figures['model_flops_per_second'] / GIGA:.1f} GFLOP/s, {figures['share_of_matrix_ceiling']:.1%} of "
        f"the {ceilings['matrix_flops_per_s'] / GIGA:.0f} that torch's {ceilings['dtype']} matrix products reach here",
        "KV": f"{figures['kv_bytes_per_second'] / GIGA:.2f} GB/s read, {figures['share_of_read_ceiling']:.1%} of the "
        f"{ceilings['read_bytes_per_s'] / GIGA:.1f} that a sum over memory reaches here",
        "profiled": f"in a run of its own, {figures['time_against_timed_runs']:.2f} times as long as the timed ones",
    }
