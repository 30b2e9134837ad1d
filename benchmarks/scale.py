"""A job of millions of rows without the time of a model: what reading, publishing, resuming and assembling cost.

python benchmarks/scale.py [--rows 5000000] [--folder DIR] [--json]

The forward pass alone is replaced by a constant; all else is the real job on the tiny model, one token for each row.
The first run is stopped with SIGTERM when half of the rows are published; the second one resumes and finishes. Prints
rows/s of each stage, and the peak memory of each run beside that of one of 300,000, which fills every buffer.
"""

import argparse
import contextlib
import json
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console

from cbgen import generation, job
from cbgen.data.outputs import ParquetOutput
from cbgen.engine.model_runner import ModelRunner
from cbgen.jobspec import build_spec
from cbgen.stopping import Stopped

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu")
BASE_ROWS = 300_000
POLL_S = 0.5
MIB = 1 << 20
VOCABULARY, ALWAYS = 320, 65


def write_input(path: Path, num_rows: int) -> Path:
    """Short prompts, no two of them alike."""
    rng = random.Random(0)
    with pq.ParquetWriter(path, pa.schema([("id", pa.int64()), ("prompt", pa.string())])) as writer:
        for first in range(0, num_rows, 100_000):
            ids = range(first, min(first + 100_000, num_rows))
            prompts = [f"{rng.choice(WORDS)} {number}" for number in ids]
            writer.write_table(pa.table({"id": list(ids), "prompt": prompts}, schema=writer.schema))
    return path


def constant_logits(self: ModelRunner, inputs: Any) -> torch.Tensor:
    """In place of a forward pass: the same token for everybody."""
    logits = torch.zeros(len(inputs.logits_indices), VOCABULARY)
    logits[:, ALWAYS] = 1.0
    return logits


@contextlib.contextmanager
def timed(owner: Any, name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Adds up the seconds spent in a function of a module or class, and when it was first called."""
    original: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        started_s = time.perf_counter()
        seconds.setdefault(f"{name} began", started_s)
        try:
            return original(*args, **kwargs)
        finally:
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started_s

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original)


def run_child(source: str, out: str) -> None:
    """One run of the job, in a process of its own; prints a line of figures."""
    ModelRunner.forward = constant_logits  # type: ignore[method-assign]
    seconds: dict[str, float] = {}
    stages = [(job, "PublishedResults"), (job, "generate"), (generation._Loop, "run"), (job, "Results")]
    options = {"max_tokens": 1, "ignore_eos": True, "num_blocks": 2048, "order": "arrival"}
    spec = build_spec({"input": source, "model": "tiny-random", "out": out, **options})
    started_s, outcome = time.perf_counter(), None
    with contextlib.ExitStack() as stack:
        for owner, name in [*stages, (ParquetOutput, "write")]:
            stack.enter_context(timed(owner, name, seconds))
        with contextlib.suppress(Stopped):
            outcome = job.run_job(spec, Console(file=sys.stderr))
    figures = {
        "seconds": seconds,
        "first_pass_s": seconds["run began"] - started_s,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "resumed": outcome.summary.rows_resumed if outcome and outcome.summary else 0,
    }
    print(json.dumps(figures))


def start(source: Path, out: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, __file__, "--child", str(source), str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def published_rows(out: Path) -> int:
    parts = out.with_name(out.name + ".parts").glob("part-*.parquet")
    return sum(pq.read_metadata(part).num_rows for part in parts)


def figures_of(process: "subprocess.Popen[str]") -> dict[str, Any]:
    output, _ = process.communicate()
    return json.loads(output.splitlines()[-1])


def measure(folder: Path, num_rows: int) -> dict[str, float]:
    """Rates in rows/s, memory in bytes."""
    base = figures_of(start(write_input(folder / "few.parquet", BASE_ROWS), folder / "few-out.parquet"))
    source, out = write_input(folder / "in.parquet", num_rows), folder / "out.parquet"
    first = start(source, out)
    while published_rows(out) < num_rows // 2:
        assert first.poll() is None, "the first run ended early"
        time.sleep(POLL_S)
    first.send_signal(signal.SIGTERM)
    stopped = figures_of(first)
    half = published_rows(out)
    finished = figures_of(start(source, out))
    assert finished["resumed"] == half, (finished["resumed"], half)
    assert pq.read_metadata(out).num_rows == num_rows
    seconds = finished["seconds"]
    return {
        "rows": num_rows,
        "rows_of_first_run": half,
        "generated_and_published_per_s": half / stopped["seconds"]["generate"],
        "indexed_per_s": half / seconds["PublishedResults"],
        "first_pass_after_resume_s": finished["first_pass_s"],
        "skipped_per_s": half / (finished["first_pass_s"]),
        "assembled_per_s": num_rows / (seconds["Results"] + seconds["write"]),
        "base_peak_bytes": base["peak_bytes"],
        "first_peak_bytes": stopped["peak_bytes"],
        "second_peak_bytes": finished["peak_bytes"],
        "bytes_per_row": (finished["peak_bytes"] - base["peak_bytes"]) / (num_rows - BASE_ROWS),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs=2)
    given = parser.parse_args()
    if given.child:
        run_child(*given.child)
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        figures = measure(Path(name), given.rows)
    if given.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        in_mib = name.endswith("peak_bytes")
        print(f"{name.replace('bytes', 'MiB') if in_mib else name:<32}{value / MIB if in_mib else value:,.1f}")


if __name__ == "__main__":
    main()
