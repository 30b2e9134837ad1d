"""One job from spec to final file: resolve, resume, feed, generate, publish, assemble."""

import json
import time
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

from rich.console import Console

from cbgen.cache.sizing import mib, with_memory_utilization
from cbgen.collector import Collector
from cbgen.data.assembly import Results, assemble
from cbgen.data.files import check_writable, publish_text
from cbgen.data.manifest import PartsFolder
from cbgen.data.writers import PartWriter
from cbgen.device import free_memory_bytes, peak_memory_bytes, total_memory_bytes
from cbgen.duplicates import Duplicates
from cbgen.engine.build import Engine, build_engine
from cbgen.engine.metrics import EngineMetrics
from cbgen.errors import EXIT_DONE, EXIT_FAILED_ROWS, OutputError
from cbgen.jobspec import JobSpec
from cbgen.models.loading import load
from cbgen.pipeline import Feeder, sample_key
from cbgen.prompting import OPTION_COLUMNS, Prompter
from cbgen.report import ProgressReporter, Snapshot, Summary, print_first_prompt, print_line, print_resolved, versions
from cbgen.resolution import ResolvedJob, finished_footer, resolve_job, resolved_lines, warnings_about
from cbgen.row_window import WindowLimits


@dataclass(frozen=True)
class Outcome:
    """How a job ended: the exit code, and the figures unless an earlier run had done everything."""

    exit_code: int
    summary: Summary | None


@dataclass(frozen=True)
class EngineRun:
    """What one run of the engine left behind; no engine when nothing was left to generate."""

    engine: Engine | None
    metrics: EngineMetrics
    load_s: float


def run_job(spec: JobSpec, console: Console, limits: WindowLimits | None = None) -> Outcome:
    """Runs a job to its final file, or continues one. Raises CbgenError; what was published until then is kept.

    limits: how many rows are put in order at a time, and how many wait for the result of another.
    """
    job = resolve_job(spec, lambda text: print_line(console, text))
    for warning in warnings_about(job):
        print_line(console, f"warning: {warning}")
    folder = PartsFolder(spec.output)
    finished = finished_footer(job, may_replace=folder.is_begun or spec.resume == "never")
    if finished is not None and spec.resume != "never":
        return _already_complete(finished, folder, console)
    for path in (spec.output, spec.summary_path or spec.output):
        check_writable(path.parent)
    try:
        today = folder.open(job.fingerprint, spec.resume)
        print_resolved(console, resolved_lines(job))
        feeder, collector = _start_pipeline(job, folder, today, console, limits or WindowLimits())
        run = _generate(job, feeder, collector, console)
        summary, config = _finish(job, folder, feeder, collector, run, today)
    finally:
        folder.close()
    if spec.summary_path is not None:
        publish_text(spec.summary_path, json.dumps(summary.as_json(config), indent=2, ensure_ascii=False) + "\n")
    return Outcome(_exit_code(summary.rows_failed), summary)


def _already_complete(finished: dict[str, Any], folder: PartsFolder, console: Console) -> Outcome:
    """Nothing is left to do, but perhaps to delete parts that a run was killed over."""
    if folder.path.exists():
        folder.remove()
    failed = finished["rows_failed"]
    advice = "; --resume never generates them all again" if failed else ""
    print_line(console, f"{folder.output} is complete: {finished['rows_ok']} rows ok, {failed} failed{advice}")
    return Outcome(_exit_code(failed), None)


def _start_pipeline(
    job: ResolvedJob, folder: PartsFolder, today: date, console: Console, limits: WindowLimits
) -> tuple[Feeder, Collector]:
    """Starts the threads beside the engine: rows begin to be read, rendered and tokenized while weights are loaded."""
    done = _done_samples(folder)
    if done:
        print_line(console, f"resuming  {len(done)} of {job.source.num_rows * job.spec.n} results are there already")
    prompter = Prompter(job.model.tokenizer, job.prompts, job.defaults, today, job.model.vocab_size)
    duplicates = Duplicates(limits.max_duplicates)
    collector = Collector(prompter, PartWriter(folder, job.spec.part_rows, job.spec.part_interval), duplicates)
    feeder = Feeder(
        job.source,
        [*job.prompts.columns, *OPTION_COLUMNS],
        prompter,
        done=done,
        num_samples=job.spec.n,
        job_seed=job.spec.seed,
        max_model_len=job.model.max_model_len,
        collector=collector,
        duplicates=duplicates,
        deduplicate=job.spec.deduplicate,
        limits=limits,
        on_first_prompt=lambda text: print_first_prompt(console, text),
    )
    return feeder, collector


def _generate(job: ResolvedJob, feeder: Feeder, collector: Collector, console: Console) -> EngineRun:
    """Loads the model, if a row is left to generate, and steps it to the end. What finished is published anyway."""
    try:
        if not feeder.wait_for_first():
            return EngineRun(None, EngineMetrics(), 0.0)
        started_s = time.perf_counter()
        engine = _load_engine(job)
        load_s = time.perf_counter() - started_s
        print_resolved(console, _engine_lines(engine, load_s))
        _step_to_the_end(job, engine, feeder, collector, console)
        return EngineRun(engine, engine.manager.metrics, load_s)
    finally:
        feeder.close()
        collector.close()


def _finish(
    job: ResolvedJob, folder: PartsFolder, feeder: Feeder, collector: Collector, run: EngineRun, today: date
) -> tuple[Summary, dict[str, Any]]:
    """Assembles the final file and deletes the parts. Returns the figures, and the configuration as it is recorded."""
    results = Results(folder, bytes(feeder.keys), job.spec.n)
    if results.num_missing:
        raise OutputError(f"{results.num_missing} results are not in {folder.path}: run the same command again")
    summary = _summarize(job, run, feeder, collector, results.num_failed)
    engine_config = asdict(run.engine.config) if run.engine else None
    chosen = {"order": job.spec.order, "deduplicate": job.spec.deduplicate, "device": str(job.device)}
    config = {**job.fingerprint, **chosen, "engine": engine_config}
    footer = {
        "fingerprint": job.fingerprint,
        "input": job.source.identity,
        "columns": job.layout.names,
        "revision": job.model.revision,
        "date": today.isoformat(),
        "rows_ok": summary.rows_ok,
        "rows_failed": summary.rows_failed,
        "config": config,
        "versions": versions(),
    }
    assemble(job.spec.output, job.source, results, job.layout, footer)
    folder.remove()
    return summary, config


def _done_samples(folder: PartsFolder) -> set[bytes]:
    """What earlier runs have generated. A failed row is tried again: the cache may be larger now, for one."""
    columns = ["key", "sample_index", "error"]
    return {
        sample_key(key, sample)
        for _, table in folder.parts(columns)
        for key, sample, error in zip(*(table[name].to_pylist() for name in columns), strict=True)
        if error is None
    }


def _load_engine(job: ResolvedJob) -> Engine:
    model, shape = load(job.model, job.device, job.quantization)
    config = job.spec.engine_config().resolve(job.device.type)
    free_bytes = free_memory_bytes(job.device)
    if job.spec.gpu_memory_utilization is not None:
        config = with_memory_utilization(
            config, job.spec.gpu_memory_utilization, total_memory_bytes(job.device), free_bytes
        )
    return build_engine(model, shape, job.model.dtype, config, job.model.eos_token_ids, job.device, free_bytes)


def _step_to_the_end(job: ResolvedJob, engine: Engine, feeder: Feeder, collector: Collector, console: Console) -> None:
    manager = engine.manager

    def snapshot() -> Snapshot:
        return Snapshot(
            rows_resumed=feeder.num_already_done,
            rows_done=feeder.num_already_done + collector.num_ok + collector.num_failed,
            output_tokens=manager.metrics.output_tokens,
            active_requests=manager.scheduler.num_active,
            cache_used_share=manager.cache.used_share,
            elapsed_s=manager.metrics.elapsed_s,
        )

    shares = manager.cache.shares_blocks
    feeder.arrange(job.spec.order, engine.config.page_size if shares else None)
    total_rows = job.source.num_rows * job.spec.n
    with ProgressReporter(console, total_rows, snapshot):
        for request in manager.run(feeder):
            collector.put(request)


def _summarize(job: ResolvedJob, run: EngineRun, feeder: Feeder, collector: Collector, num_failed: int) -> Summary:
    metrics = run.metrics
    rows_total = job.source.num_rows * job.spec.n
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
        clamped_max_tokens=feeder.num_clamped,
        mean_batch_requests=metrics.mean_batch_requests,
        peak_cache_used_share=metrics.peak_used_share,
        peak_memory_bytes=peak_memory_bytes(job.device),
    )


def _engine_lines(engine: Engine, load_s: float) -> dict[str, str]:
    config, plan = engine.config, engine.plan
    sharing = "on" if engine.manager.cache.shares_blocks else "off"
    if config.allow_block_sharing and not plan.layout.supports_sharing:
        sharing += " (not every layer keeps all tokens)"
    swap = f", swap pool {mib(config.cpu_offload_bytes)}" if config.cpu_offload_bytes else ""
    windows = "".join(f", window {group.window}" for group in plan.layout.groups if group.window is not None)
    return {
        "engine": f"{config.scheduler_type}, max_batch_tokens {config.max_batch_tokens}, max_requests_per_batch "
        f"{config.max_requests_per_batch}, safety_margin {config.safety_margin:g}, attention {engine.kernel}{windows}",
        "cache": f"{plan.num_blocks} blocks of {config.page_size} tokens, {mib(plan.cache_bytes)}{swap}, "
        f"prefix sharing {sharing}",
        "loaded in": f"{load_s:.1f} s",
    }


def _exit_code(num_failed: int) -> int:
    return EXIT_FAILED_ROWS if num_failed else EXIT_DONE
