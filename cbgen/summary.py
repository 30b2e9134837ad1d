"""The figures of one run, put together from who counted them."""

from typing import Any

from cbgen.collector import Collector
from cbgen.device import peak_memory_bytes
from cbgen.generation import EngineRun
from cbgen.pipeline import Feeder
from cbgen.report import Summary
from cbgen.resolution import ResolvedJob
from cbgen.run_log import run_figures


def summarize(
    job: ResolvedJob, run: EngineRun, feeder: Feeder, collector: Collector, rows_total: int, num_failed: int
) -> Summary:
    """rows_total, num_failed: output rows of the whole job."""
    figures: dict[str, Any] = run_figures(run.metrics)
    return Summary(
        rows_total=rows_total,
        rows_ok=rows_total - num_failed,
        rows_failed=num_failed,
        rows_resumed=feeder.num_already_done,
        deduplicated=collector.num_deduplicated,
        load_s=run.load_s,
        clamped_max_tokens=feeder.num_clamped,
        peak_memory_bytes=peak_memory_bytes(job.device),
        **figures,
    )
