"""What the user sees of a run: what was resolved, how far it is, the throughput line, and the summary as JSON."""

import platform
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import cbgen

TERMINAL_INTERVAL_S = 0.5
PLAIN_INTERVAL_S = 30.0
PROMPT_PREVIEW_CHARS = 600
REPORTED_PACKAGES = ("torch", "transformers", "pyarrow", "tokenizers")


@dataclass(frozen=True)
class Summary:
    """The figures of one run. rows_* count output rows of the whole job, one per sample; the rest is this run's own.

    deduplicated: output rows that took the result of an equal one's request. Requests and tokens, and so the
    throughput, count what was generated.
    elapsed_s: from the start of the first forward pass to the end of the last; loading is load_s.
    """

    rows_total: int
    rows_ok: int
    rows_failed: int
    rows_resumed: int
    deduplicated: int
    prompt_tokens: int
    computed_prompt_tokens: int
    output_tokens: int
    elapsed_s: float
    load_s: float
    requests_per_second: float
    total_tokens_per_second: float
    output_tokens_per_second: float
    prefix_hit_tokens: int
    offloads: int
    soft_resets: int
    swaps: int
    recomputed_tokens: int
    forward_failures: int
    budget_shrinks: int
    clamped_max_tokens: int
    mean_batch_requests: float
    peak_cache_used_share: float
    peak_memory_bytes: int

    def throughput_line(self) -> str:
        return (
            f"Throughput: {self.requests_per_second:.2f} requests/s, "
            f"{self.total_tokens_per_second:.2f} total tokens/s, {self.output_tokens_per_second:.2f} output tokens/s"
        )

    def as_json(self, config: dict[str, Any]) -> dict[str, Any]:
        return {**asdict(self), "versions": versions(), "config": config}


def versions() -> dict[str, str]:
    """Of cbgen, Python and the packages that results depend on."""
    return {"cbgen": cbgen.__version__, "python": platform.python_version()} | {
        name: _version(name) for name in REPORTED_PACKAGES
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def print_line(console: Console, text: str) -> None:
    """Prints text as it is: no markup read into it, no line broken by the width of the terminal."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_resolved(console: Console, lines: dict[str, str]) -> None:
    """One line per fact: everything that was chosen, whoever chose it."""
    for name, value in lines.items():
        print_line(console, f"{name:<10}{value}")


def print_first_prompt(console: Console, text: str) -> None:
    """The first prompt as the model reads it, cut."""
    shown = text if len(text) <= PROMPT_PREVIEW_CHARS else text[:PROMPT_PREVIEW_CHARS] + " [...]"
    lines = ["first prompt, as rendered:", *(f"  | {line}" for line in shown.splitlines())]
    print_line(console, "\n".join(lines))


@dataclass(frozen=True)
class Snapshot:
    """Where a run stands: output rows, tokens generated, requests in the batch, share of the cache in use.

    rows_total may be an estimate. rows_done includes rows_resumed, which earlier runs had done.
    """

    rows_total: int
    rows_done: int
    rows_resumed: int
    output_tokens: int
    active_requests: int
    cache_used_share: float
    elapsed_s: float

    @property
    def output_tokens_per_second(self) -> float:
        return self.output_tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0

    def __str__(self) -> str:
        return (
            f"{self.output_tokens_per_second:.0f} tokens/s, batch {self.active_requests}, "
            f"cache {self.cache_used_share:.0%}"
        )


class ProgressReporter:
    """A progress bar on a terminal, a plain line now and then elsewhere; reads snapshots in a thread of its own.

    with ProgressReporter(console, snapshot): ...
    """

    def __init__(self, console: Console, snapshot: Callable[[], Snapshot]):
        self._console = console
        self._snapshot = snapshot
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="cbgen-progress", daemon=True)

    def __enter__(self) -> "ProgressReporter":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        if self._console.is_terminal:
            self._work_on_terminal()
        else:
            started_s = time.monotonic()
            while not self._stop.wait(PLAIN_INTERVAL_S):
                self._print_line(self._snapshot(), time.monotonic() - started_s)

    def _work_on_terminal(self) -> None:
        columns = (
            TextColumn("{task.completed}/{task.total} rows"),
            BarColumn(bar_width=10),
            TextColumn("{task.description}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task("starting", total=self._snapshot().rows_total)
            while not self._stop.wait(TERMINAL_INTERVAL_S):
                snapshot = self._snapshot()
                done, total = snapshot.rows_done, snapshot.rows_total
                progress.update(task, completed=done, total=total, description=str(snapshot))

    def _print_line(self, snapshot: Snapshot, running_s: float) -> None:
        fresh = snapshot.rows_done - snapshot.rows_resumed
        left_s = (snapshot.rows_total - snapshot.rows_done) * running_s / fresh if fresh > 0 else None
        eta = "unknown" if left_s is None else f"{left_s:.0f} s"
        print_line(self._console, f"{snapshot.rows_done}/{snapshot.rows_total} rows, {snapshot}, ETA {eta}")
