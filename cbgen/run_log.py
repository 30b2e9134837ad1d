"""What a run tells of itself while it goes on and when it ends: its course, its figures, how it was set up."""

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

import torch

from cbgen.data.runs import Run, new_run_path, write_run
from cbgen.device import peak_memory_bytes
from cbgen.engine.build import Engine
from cbgen.engine.metrics import EngineMetrics
from cbgen.errors import OutputError

FINISHED = "finished"


class RowCounts(Protocol):
    """Output rows that a run has finished: see Collector."""

    num_ok: int
    num_failed: int
    num_deduplicated: int


class RunLog:
    """Publishes a run's file in the folder of parts (see data/runs.py) now and then.

    A file that cannot be written is warned about once and ends nothing: no result is in it.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        counts: RowCounts,
        interval_s: float,
        notify: Callable[[str], None],
    ):
        """device: that of the engine, whose memory is looked at."""
        self._folder, self._device, self._counts = folder, device, counts
        self._interval_s, self._notify = interval_s, notify
        self._path: Path | None = None
        self._engine: Engine | None = None
        self._load_s = 0.0
        self._started = time.time()
        self._due_s = 0.0  # at once, so that a run that is killed early is told of
        self._has_warned = False

    def begin(self, engine: Engine, load_s: float) -> None:
        """The model is loaded, and the first step is next."""
        self._path, self._engine, self._load_s = new_run_path(self._folder), engine, load_s

    def publish_if_due(self) -> None:
        if time.monotonic() >= self._due_s:
            self._publish(None)

    def end(self, how: str) -> None:
        """how: "finished", or why it was stopped. A run that is killed has none."""
        self._publish(how)

    def _publish(self, how: str | None) -> None:
        if self._path is None or self._engine is None:
            return
        self._due_s = time.monotonic() + self._interval_s
        manager, counts = self._engine.manager, self._counts
        beside = {
            "deduplicated": counts.num_deduplicated,
            "peak_memory_bytes": peak_memory_bytes(self._device),
        }
        run: Run = {
            "started": self._started,
            "ended": time.time(),
            "how": how,
            "shard": None,
            "load_s": self._load_s,
            "rows": counts.num_ok + counts.num_failed,
            "summary": run_figures(manager.metrics) | beside,
            "engine": asdict(self._engine.config),
            "timeline": manager.log.as_json(),
        }
        try:
            write_run(self._path, run)
        except OutputError as error:
            if not self._has_warned:
                self._notify(f"warning: how this run goes is not recorded for `cbgen report`: {error}")
            self._has_warned = True


def run_figures(metrics: EngineMetrics) -> dict[str, float]:
    """The figures of one run, by their names in its summary. Rates are over the time of its forward passes."""
    per_second = 1.0 / metrics.elapsed_s if metrics.elapsed_s > 0 else 0.0
    return {
        "prompt_tokens": metrics.prompt_tokens,
        "computed_prompt_tokens": metrics.computed_prompt_tokens,
        "output_tokens": metrics.output_tokens,
        "elapsed_s": metrics.elapsed_s,
        "requests_per_second": metrics.requests_ok * per_second,
        "total_tokens_per_second": (metrics.prompt_tokens + metrics.output_tokens) * per_second,
        "output_tokens_per_second": metrics.output_tokens * per_second,
        "prefix_hit_tokens": metrics.prefix_hit_tokens,
        "offloads": metrics.offloads,
        "soft_resets": metrics.soft_resets,
        "swaps": metrics.swaps,
        "recomputed_tokens": metrics.recomputed_tokens,
        "forward_failures": metrics.forward_failures,
        "budget_shrinks": metrics.budget_shrinks,
        "mean_batch_requests": metrics.mean_batch_requests,
        "peak_cache_used_share": metrics.peak_used_share,
    }
