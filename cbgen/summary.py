"""The figures of one run, put together from who counted them."""

from cbgen.collector import Collector
from cbgen.device import peak_memory_bytes
from cbgen.generation import EngineRun
from cbgen.pipeline import Feeder
from cbgen.report import Summary
from cbgen.resolution import ResolvedJob


def summarize(
    job: ResolvedJob, run: EngineRun, feeder: Feeder, collector: Collector, rows_total: int, num_failed: int
) -> Summary:
    """rows_total, num_failed: output rows of the whole job."""
    metrics = run.metrics
    per_second = 1.0 / metrics.elapsed_s if metrics.elapsed_s > 0 else 0.0
    return Summary(
        rows_total=rows_total,
        rows_ok=rows_total - num_failed,
        rows_failed=num_failed,
        rows_resumed=feeder.num_already_done,
        deduplicated=collector.num_deduplicated,
        prompt_tokens=metrics.prompt_tokens,
        computed_prompt_tokens=metrics.computed_prompt_tokens,
        output_tokens=metrics.output_tokens,
        elapsed_s=metrics.elapsed_s,
        load_s=run.load_s,
        requests_per_second=metrics.requests_ok * per_second,
        total_tokens_per_second=(metrics.prompt_tokens + metrics.output_tokens) * per_second,
        output_tokens_per_second=metrics.output_tokens * per_second,
        prefix_hit_tokens=metrics.prefix_hit_tokens,
        offloads=metrics.offloads,
        soft_resets=metrics.soft_resets,
        swaps=metrics.swaps,
        recomputed_tokens=metrics.recomputed_tokens,
        forward_failures=metrics.forward_failures,
        budget_shrinks=metrics.budget_shrinks,
        clamped_max_tokens=feeder.num_clamped,
        mean_batch_requests=metrics.mean_batch_requests,
        peak_cache_used_share=metrics.peak_used_share,
        peak_memory_bytes=peak_memory_bytes(job.device),
    )
