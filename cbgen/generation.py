"""The engine's part of a job: the model is loaded, stepped until nothing is left or the run is asked to stop."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console

from cbgen.cache.sizing import mib, with_memory_utilization
from cbgen.collector import Collector
from cbgen.device import free_memory_bytes, total_memory_bytes
from cbgen.engine.build import Engine, build_engine
from cbgen.engine.manager import Manager
from cbgen.engine.metrics import EngineMetrics
from cbgen.errors import EXIT_TOO_MANY_FAILED, CbgenError
from cbgen.models.loading import load
from cbgen.pipeline import Feeder
from cbgen.report import ProgressReporter, Snapshot, print_line, print_resolved
from cbgen.resolution import ResolvedJob
from cbgen.run_log import FINISHED, RunLog
from cbgen.stopping import ErrorLimit, StopSwitch


@dataclass(frozen=True)
class EngineRun:
    """What one run of the engine left behind; no engine when nothing was left to generate."""

    engine: Engine | None
    metrics: EngineMetrics
    load_s: float


def generate(
    job: ResolvedJob,
    feeder: Feeder,
    collector: Collector,
    stop: StopSwitch,
    num_failed_before: int,
    console: Console,
    log: RunLog,
) -> EngineRun:
    """Loads the model, if a row is left to generate, and steps it to the end. What finished is published anyway.

    num_failed_before: failures of earlier runs, which --max-errors counts too. Raises Stopped when the run was asked to
    end before its end.
    """
    try:
        if not feeder.wait_for_first():
            run = EngineRun(None, EngineMetrics(), 0.0)
        else:
            started_s = time.perf_counter()
            engine = load_engine(job, lambda text: print_line(console, text))
            load_s = time.perf_counter() - started_s
            print_resolved(console, _engine_lines(engine, load_s))
            log.begin(engine, load_s)
            loop = _Loop(job, engine.manager, feeder, collector, stop, num_failed_before, log)
            feeder.arrange(job.spec.order, engine.config.page_size if engine.manager.cache.shares_blocks else None)
            with ProgressReporter(console, loop.snapshot), stop.draining():
                loop.run(lambda text: print_line(console, text))
            run = EngineRun(engine, engine.manager.metrics, load_s)
    except CbgenError as error:
        log.end(f"failed: {error}")
        raise
    finally:
        with stop.draining():  # a first signal does not cut off the last publication
            feeder.close()
            collector.close()
    log.end(FINISHED if stop.reason is None else f"stopped: {stop.reason}")
    if stop.is_asked:
        raise stop.stopped()
    return run


class _Loop:
    """Pulls, steps and hands over, watching for what ends a run early."""

    def __init__(
        self,
        job: ResolvedJob,
        manager: Manager,
        feeder: Feeder,
        collector: Collector,
        stop: StopSwitch,
        num_failed_before: int,
        log: RunLog,
    ):
        self._manager = manager
        self._feeder = feeder
        self._collector = collector
        self._stop = stop
        self._limit = ErrorLimit(job.spec.max_errors)
        self._num_failed_before = num_failed_before
        self._num_rows = job.num_rows
        self._log = log
        stop.on_ask = feeder.stop

    def run(self, notify: Callable[[str], None]) -> None:
        """Until everything is done, or what may be done before the deadline is."""
        manager, stop = self._manager, self._stop
        draining = False
        while manager.scheduler.has_work or not self._feeder.exhausted:
            self._ask_if_too_many_failed()
            if stop.is_asked and not draining:
                draining = True
                self._feeder.stop()
                manager.stop_admitting()
                notify(f"stopping: {stop.reason}; {manager.scheduler.num_active} rows that have begun are finished")
            if stop.is_overdue:
                return
            self._log.publish_if_due()
            for request in [*manager.pull(self._feeder), *(manager.step() if manager.scheduler.has_work else [])]:
                self._collector.put(request)

    def snapshot(self) -> Snapshot:
        metrics = self._manager.metrics
        return Snapshot(
            rows_total=self._feeder.samples_of(self._num_rows),
            rows_resumed=self._feeder.num_already_done,
            rows_done=self._feeder.num_already_done + self._num_done,
            output_tokens=metrics.output_tokens,
            active_requests=self._manager.scheduler.num_active,
            cache_used_share=self._manager.cache.used_share,
            elapsed_s=metrics.elapsed_s,
        )

    @property
    def _num_done(self) -> int:
        return self._collector.num_ok + self._collector.num_failed

    def _ask_if_too_many_failed(self) -> None:
        num_failed = self._num_failed_before + self._collector.num_failed
        reason = self._limit.exceeded(num_failed, self._feeder.num_already_done + self._num_done)
        if reason is not None:
            self._stop.ask(reason, EXIT_TOO_MANY_FAILED)


def load_engine(job: ResolvedJob, notify: Callable[[str], None]) -> Engine:
    """With the weights, and a cache sized to what memory is left."""
    model, shape = load(job.model, job.device, job.quantization)
    config = job.spec.engine_config().resolve(job.device.type)
    free_bytes = free_memory_bytes(job.device)
    if job.spec.gpu_memory_utilization is not None:
        config = with_memory_utilization(
            config, job.spec.gpu_memory_utilization, total_memory_bytes(job.device), free_bytes
        )
    return build_engine(
        model,
        shape,
        job.model.dtype,
        config,
        job.model.eos_token_ids,
        job.device,
        free_bytes,
        notify,
        tokenizer=job.model.tokenizer,
        grammars=job.grammars,
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
        f"{config.max_requests_per_batch}, safety_margin {config.safety_margin:g}, attention {engine.kernel}{windows}"
        + (", deterministic" if config.deterministic else ""),
        "cache": f"{plan.num_blocks} blocks of {config.page_size} tokens, {mib(plan.cache_bytes)}{swap}, "
        f"prefix sharing {sharing}",
        "loaded in": f"{load_s:.1f} s",
    }
