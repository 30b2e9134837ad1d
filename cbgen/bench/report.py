"""What of a benchmark goes to the screen: a table of runs, or of backends in markdown, and lines below it."""

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from cbgen.bench.datasets import Workload
from cbgen.bench.figures import Results, rates
from cbgen.bench.latency import latency_lines

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
MARKDOWN_COLUMNS = ("workload", "backend", "output tokens/s", "runs", "ratio", "equal rows")


def table_of(results: Results) -> Table:
    table = Table(box=SIMPLE, pad_edge=False, collapse_padding=True)
    for heading, _ in COLUMNS:
        table.add_column(heading, justify="left" if heading == "backend" else "right")
    for row in results.rows:
        table.add_row(*(show(row) for _, show in COLUMNS))
    return table


def markdown_of(workload: Workload, backends: dict[str, dict[str, Any]], ratio: dict[str, dict[str, float]]) -> str:
    """A line per backend: the median of its runs, and how much faster the first one is."""
    lines = [MARKDOWN_COLUMNS, ("---",) * len(MARKDOWN_COLUMNS)]
    for name, figures in backends.items():
        shown = f"{ratio[name]['median']:.2f}" if name in ratio else "1"
        speed = f"{figures['output_tokens_per_second']:,.1f}"
        lines.append((workload.name, name, speed, str(figures["runs"]), shown, f"{figures['equal_share']:.1%}"))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def comparison_lines(backends: dict[str, dict[str, Any]], ratio: dict[str, dict[str, float]]) -> Iterator[str]:
    """How far the runs of each backend lie apart, and the first backend over each other one."""
    for name, figures in backends.items():
        spread = figures["spread"]
        if figures["runs"] > 1:
            yield (
                f"{'spread':<10}{name}: {spread['min']:,.1f} to {spread['max']:,.1f} output tokens/s, "
                f"{spread['share']:.1%} of the median"
            )
    first = next(iter(backends))
    for name, rounds in ratio.items():
        yield (
            f"{'ratio':<10}{first} over {name}: {rounds['median']:.2f} ({rounds['min']:.2f} to {rounds['max']:.2f}) in "
            "output tokens/s"
        )


def backend_lines(backends: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What is known of requests and of the engine; of several backends, with the name of each."""
    for name, figures in backends.items():
        own = f"{name}: " if len(backends) > 1 else ""
        told = latency_lines(figures["latencies"])
        told |= {} if figures["engine"] is None else engine_lines(figures["engine"])
        for about, value in told.items():
            yield f"{about:<10}{own}{value}"


def engine_lines(figures: dict[str, Any]) -> dict[str, str]:
    return {
        "batch": f"{figures['requests_per_step']:.1f} requests per step, {figures['share_of_max_requests']:.1%} of "
        f"max_requests_per_batch; {figures['query_tokens_per_step']:.1f} query tokens, "
        f"{figures['share_of_max_batch_tokens']:.1%} of max_batch_tokens",
        "cache": f"{figures['cache_used_mean']:.1%} in use, {figures['cache_used_peak']:.1%} at most; "
        f"{figures['prefix_hit_tokens']:,} prompt tokens taken from it, {figures['offloads']:,} offloads "
        f"({figures['soft_resets']:,} soft resets), {figures['recomputed_tokens']:,} tokens computed again",
    }


def throughput_lines(workload: Workload, wall_s: float) -> list[str]:
    """In the words of `vllm bench throughput`, for those who read them with a program."""
    own = rates(workload, wall_s)
    return [
        f"Throughput: {own['requests_per_second']:.2f} requests/s, "
        f"{own['total_tokens_per_second']:.2f} total tokens/s, {own['output_tokens_per_second']:.2f} output tokens/s",
        f"Total num prompt tokens:  {workload.prompt_tokens}",
        f"Total num output tokens:  {workload.output_tokens}",
    ]


def profile_lines(figures: dict[str, Any]) -> dict[str, str]:
    """The same for the eye, one line per fact."""
    ceilings = figures["ceilings"]
    shares = ", ".join(f"{part} {share:.1%}" for part, share in figures["step_time_shares"].items())
    return {
        "step time": shares,
        "steps": f"{figures['num_steps']:,}, with {figures['mean_query_tokens']:.1f} query tokens on average",
        "model": f"{figures['model_flops_per_second'] / GIGA:.1f} GFLOP/s, {figures['share_of_matrix_ceiling']:.1%} of "
        f"the {ceilings['matrix_flops_per_s'] / GIGA:.0f} that {ceilings['products']}'s {ceilings['dtype']} matrix "
        "products reach here",
        "memory": f"{figures['read_bytes_per_second'] / GIGA:.2f} GB/s read (weights "
        f"{figures['weight_bytes_per_second'] / GIGA:.2f}, KV {figures['kv_bytes_per_second'] / GIGA:.2f}), "
        f"{figures['share_of_read_ceiling']:.1%} of the {ceilings['read_bytes_per_s'] / GIGA:.1f} that a sum over "
        "memory reaches here",
        "profiled": f"in a run of its own, {figures['time_against_timed_runs']:.2f} times as long as the timed ones",
    }
