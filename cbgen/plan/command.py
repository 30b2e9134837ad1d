"""Puts a plan together, for the screen and as JSON."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from cbgen.cache.paged_cache import PagedCache
from cbgen.cache.sizing import CachePlan, mib, with_memory_utilization
from cbgen.config import ResolvedConfig
from cbgen.device import free_memory_bytes, total_memory_bytes
from cbgen.engine.build import Engine
from cbgen.engine.execution import choose_execution
from cbgen.engine.metrics import EngineMetrics
from cbgen.errors import UsageError
from cbgen.generation import load_engine
from cbgen.job_files import free_disk_bytes
from cbgen.jobspec import JobSpec
from cbgen.models.shape import expected_shape, weight_bytes
from cbgen.ordering import WaitingRequest, arrange
from cbgen.plan.calibration import Calibration
from cbgen.plan.rows import PlannedRows, histogram, read_rows, sample_of
from cbgen.plan.simulation import simulate
from cbgen.resolution import ResolvedJob, resolve_job, space_bytes, warnings_about
from cbgen.validation import what_is_there

SIMULATED_REQUESTS = 2000
BAR_WIDTH = 32
SHOWN_REASONS = 5


@dataclass(frozen=True)
class Prediction:
    """How long the whole input takes, in seconds: load_s, and generation_s from the first forward pass to the last.

    output_tokens: generated in that time, rows alike once. error: by what share timed passes differ from what they are
    predicted to take, at the median. share: of the input's rows, how many were simulated.
    """

    load_s: float
    generation_s: float
    output_tokens: float
    mean_batch_requests: float
    prefix_hit_share: float
    recomputed_share: float
    num_timed_passes: int
    calibration_s: float
    error: float
    share: float


@dataclass(frozen=True)
class Plan:
    """See `lines`. scale: rows of the input for each row that was read."""

    job: ResolvedJob
    rows: PlannedRows
    config: ResolvedConfig
    cache: CachePlan
    prediction: Prediction | None
    expected_tokens: float | None

    @property
    def scale(self) -> float:
        return _scale(self.job, self.rows)

    @property
    def shared_tokens(self) -> int | None:
        """Prompt tokens of the rows read that need not be computed; None where nothing is shared."""
        if not (self.config.allow_block_sharing and self.cache.layout.supports_sharing):
            return None
        return self.rows.shared_tokens(self.config.page_size)

    @property
    def disk_bytes(self) -> int:
        results, tokens = self.rows.num_results * self.scale, self.rows.result_tokens * self.scale
        return space_bytes(self.job, round(results), round(tokens))


def make_plan(
    spec: JobSpec, num_rows: int, calibrate: bool, expected_tokens: float | None, notify: Callable[[str], None]
) -> Plan:
    """Raises what a run would, before it begins."""
    if num_rows < 1:
        raise UsageError(f"--rows {num_rows}: at least 1 is expected")
    if expected_tokens is not None and not 0 < expected_tokens < math.inf:
        raise UsageError(f"--expected-tokens {expected_tokens:g}: more than 0 is expected")
    job = resolve_job(spec, notify)
    with job.source:
        for warning in warnings_about(job):
            notify(f"warning: {warning}")
        what_is_there(job)
        rows = read_rows(job, num_rows)
    if expected_tokens is not None:
        rows = rows.expecting(expected_tokens)
    if not (calibrate and rows.requests):
        config, cache = _cache_of(job)
        return Plan(job, _fitting(rows, job, config, cache), config, cache, None, expected_tokens)
    started_s = time.perf_counter()
    engine = load_engine(job, notify)
    load_s = time.perf_counter() - started_s
    rows = _fitting(rows, job, engine.config, engine.plan)
    prediction = _predict(job, rows, engine, load_s) if rows.requests else None
    return Plan(job, rows, engine.config, engine.plan, prediction, expected_tokens)


def _fitting(rows: PlannedRows, job: ResolvedJob, config: ResolvedConfig, plan: CachePlan) -> PlannedRows:
    cache = PagedCache(plan.layout, plan.num_chunks, config.allow_block_sharing)
    return rows.without_too_large(cache, job.model.max_model_len)


def _scale(job: ResolvedJob, rows: PlannedRows) -> float:
    """Rows of the job for each that was read."""
    return job.source.num_rows / rows.num_inspected if rows.num_inspected else 1.0


def _predict(job: ResolvedJob, rows: PlannedRows, engine: Engine, load_s: float) -> Prediction:
    page_tokens = engine.config.page_size if engine.manager.cache.shares_blocks else None
    ordered = arrange(rows.requests, job.spec.order, page_tokens)
    started_s = time.perf_counter()
    costs = Calibration(engine).measure(ordered)
    calibration_s = time.perf_counter() - started_s
    chosen = sample_of(ordered, SIMULATED_REQUESTS)
    simulated = simulate(engine, chosen, costs)
    metrics = simulated.metrics
    scale = _scale(job, rows) * rows.output_tokens / max(1, metrics.output_tokens)
    return Prediction(
        load_s=load_s,
        generation_s=simulated.seconds * scale,
        output_tokens=metrics.output_tokens * scale,
        mean_batch_requests=metrics.mean_batch_requests,
        prefix_hit_share=_hit_share(chosen, metrics),
        recomputed_share=metrics.recomputed_tokens / max(1, metrics.prompt_tokens + metrics.output_tokens),
        num_timed_passes=costs.num_passes,
        calibration_s=calibration_s,
        error=costs.error,
        share=1.0 / scale,
    )


def _hit_share(requests: list[WaitingRequest], metrics: EngineMetrics) -> float:
    """Of the prompts, each once however many samples it has, what was not computed."""
    num_tokens = sum(request.num_tokens for request in requests)
    return max(0.0, 1.0 - metrics.computed_prompt_tokens / max(1, num_tokens))


def _cache_of(job: ResolvedJob) -> tuple[ResolvedConfig, CachePlan]:
    """As `cbgen size` works it out, from the model's config."""
    shape, free_bytes = expected_shape(job.model), free_memory_bytes(job.device) - weight_bytes(job.model)
    config = job.spec.engine_config().resolve(job.device.type)
    if job.spec.gpu_memory_utilization is not None:
        total_bytes = total_memory_bytes(job.device)
        config = with_memory_utilization(config, job.spec.gpu_memory_utilization, total_bytes, free_bytes)
    execution = choose_execution(shape, job.model.dtype, config, job.device)
    return config, execution.plan(shape, config, free_bytes)


def plan_lines(plan: Plan) -> list[tuple[str, str]]:
    """(name, what there is to tell); a line without a name belongs to the one above."""
    rows = plan.rows
    lines = [("rows", _rows_line(plan))]
    if rows.lengths:
        lines += [("prompts", _tokens_line(rows.lengths, "tokens"))]
        lines += [("", line) for line in _bars(rows.lengths)]
        what = "tokens at most" if plan.expected_tokens is None else "tokens, as expected"
        lines += [("outputs", _tokens_line(rows.max_tokens, what))]
        lines += [("", line) for line in _bars(rows.max_tokens)]
    lines += _limit_lines(rows)
    if rows.lengths:
        lines += [("prefixes", _prefix_line(plan)), ("cache", _cache_line(plan))]
    free_bytes = free_disk_bytes(plan.job.output.path.parent)
    lines.append(("disk", f"up to {mib(plan.disk_bytes)} for output and parts; {mib(free_bytes)} free"))
    if plan.prediction is not None:
        lines += _time_lines(plan.prediction)
    return lines


def plan_json(plan: Plan) -> dict[str, Any]:
    rows, prediction = plan.rows, plan.prediction
    return {
        "rows_total": plan.job.source.num_rows,
        "rows_read": rows.num_inspected,
        "rows_of_shard": rows.num_rows,
        "rows_failing": sum(rows.failures.values()),
        "failures": dict(rows.failures.most_common()),
        "rows_clamped": rows.num_clamped,
        "rows_truncated": rows.num_cut,
        "rows_deduplicated": rows.num_alike,
        "prompt_tokens": sum(rows.lengths),
        "prompt_tokens_histogram": list(histogram(rows.lengths)),
        "output_tokens": rows.result_tokens,
        "output_tokens_histogram": list(histogram(rows.max_tokens)),
        "shared_prompt_tokens": plan.shared_tokens,
        "num_blocks": plan.cache.num_blocks,
        "page_size": plan.config.page_size,
        "disk_bytes": plan.disk_bytes,
        "prediction": None if prediction is None else dict(vars(prediction)),
    }


def _rows_line(plan: Plan) -> str:
    total = plan.job.source.num_rows
    told = f"{plan.rows.num_inspected:,} of {total:,} read"
    if plan.job.shard is not None:
        index, count = plan.job.shard
        told += f", {plan.rows.num_rows:,} of them of shard {index} of {count} (from 0)"
    if plan.rows.num_inspected < total:
        told += "; times and sizes below are of all, the rest of those read"
    return told


def _tokens_line(values: list[int], what: str) -> str:
    mean = sum(values) / len(values)
    return f"{sum(values):,} {what}: {min(values):,} to {max(values):,}, median {median(values):,.0f}, mean {mean:,.1f}"


def _bars(values: list[int]) -> list[str]:
    bins = list(histogram(values))
    most = max(count for *_, count in bins)
    width = max(len(f"{low:,}-{high:,}") for low, high, _ in bins)
    return [
        f"{f'{low:,}-{high:,}':>{width}}  {'#' * -(-count * BAR_WIDTH // most):<{BAR_WIDTH}} {count:,}"
        for low, high, count in bins
    ]


def _limit_lines(rows: PlannedRows) -> list[tuple[str, str]]:
    lines = []
    if rows.failures:
        lines.append(("failing", f"{sum(rows.failures.values()):,} rows would be error rows"))
        lines += [("", f"{count:,}: {reason}") for reason, count in rows.failures.most_common(SHOWN_REASONS)]
        if len(rows.failures) > SHOWN_REASONS:
            more = len(rows.failures) - SHOWN_REASONS
            lines.append(("", f"and {more:,} more reason{'s' if more > 1 else ''}"))
    if rows.num_cut:
        lines.append(("truncated", f"{rows.num_cut:,} prompts are cut to leave room for what is generated"))
    if rows.num_clamped:
        lines.append(("clamped", f"{rows.num_clamped:,} rows reach the context before their max_tokens"))
    if rows.num_alike:
        lines.append(("alike", f"{rows.num_alike:,} output rows take the result of an equal one"))
    return lines


def _prefix_line(plan: Plan) -> str:
    shared, total = plan.shared_tokens, plan.rows.prompt_tokens
    if shared is None:
        return "not shared: " + (
            "--no-allow-block-sharing"
            if not plan.config.allow_block_sharing
            else "the model has layers that do not keep all tokens"
        )
    told = f"{shared:,} of {total:,} prompt tokens ({shared / total:.0%}) are in pages that an earlier row computes"
    if plan.prediction is not None:
        told += f"; this cache and order save {plan.prediction.prefix_hit_share:.0%}"
    return told


def _cache_line(plan: Plan) -> str:
    longest = max(plan.rows.lengths) + max(plan.rows.max_tokens)
    mean = round(sum(plan.rows.lengths) / len(plan.rows.lengths) + plan.rows.result_tokens / len(plan.rows.max_tokens))
    cache, most = plan.cache, plan.config.max_requests_per_batch
    fitting = cache.num_requests(mean)
    told = (
        f"{cache.num_blocks:,} blocks of {plan.config.page_size} tokens, {mib(cache.cache_bytes)}: room for "
        f"{fitting:,} requests of the mean {mean:,} tokens, {cache.num_requests(longest):,} of {longest:,}; "
        f"{most} run at once"
    )
    return told + ("" if fitting >= most else ", so that the cache is what bounds the batch")


def _time_lines(prediction: Prediction) -> list[tuple[str, str]]:
    rate = prediction.output_tokens / prediction.generation_s
    lines = [
        (
            "time",
            f"{duration(prediction.generation_s)} of generation, {rate:,.1f} output tokens/s, "
            f"{prediction.mean_batch_requests:.1f} requests in the mean batch; loading took {prediction.load_s:.1f} s",
        )
    ]
    if prediction.recomputed_share > 0.001:
        lines.append(("", f"{prediction.recomputed_share:.1%} of the tokens are computed again for want of cache"))
    lines.append(
        (
            "",
            f"from {prediction.num_timed_passes} forward passes timed in {prediction.calibration_s:.0f} s, which "
            f"differ by {prediction.error:.0%} at the median from what is predicted of them",
        )
    )
    if prediction.share < 0.99:
        lines.append(("", f"{prediction.share:.1%} of the input were simulated, the rest goes on like that"))
    return lines


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"
