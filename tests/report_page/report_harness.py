"""Jobs to make reports of: rows that nobody generated, and runs that nobody ran, told as a job tells them."""

import json
import re
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cbgen.data.outputs import FolderOutput, publish_sidecar
from cbgen.data.rows import RESULT_SCHEMA
from cbgen.engine.metrics import EngineMetrics
from cbgen.engine.step_log import PHASES, SERIES
from cbgen.run_log import run_figures

STARTED = 1_790_000_000.0
COLUMNS = [
    "completion",
    "finish_reason",
    "error",
    "prompt_tokens",
    "completion_tokens",
    "queue_s",
    "prefill_s",
    "decode_s",
    "ttft_s",
    "tpot_s",
    "arrival_time",
    "finish_time",
]
FINGERPRINT = {"model": "tiny-random", "prompt_source": "prompt", "format": "auto", "n": 1, "shard": None}


def life(start_s: float, queue_s: float = 0.5, prefill_s: float = 0.25, decode_s: float = 2.0, **more: Any) -> dict:
    """A row that finished; start_s after STARTED it arrived."""
    arrival = datetime.fromtimestamp(STARTED, timezone.utc) + timedelta(seconds=start_s)
    return {
        "prompt": "Why is the sky blue?",
        "completion": "Because.",
        "finish_reason": "stop",
        "error": None,
        "prompt_tokens": 12,
        "completion_tokens": 5,
        "queue_s": queue_s,
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "ttft_s": queue_s + prefill_s,
        "tpot_s": decode_s / 4,
        "arrival_time": arrival,
        "finish_time": arrival + timedelta(seconds=queue_s + prefill_s + decode_s),
        **more,
    }


def failure(error: str, prompt: str | None = "") -> dict[str, Any]:
    """A row that was never a request."""
    nothing = dict.fromkeys(["prompt", *COLUMNS])
    return nothing | {
        "prompt": prompt,
        "finish_reason": "error",
        "error": error,
        "prompt_tokens": 0,
        "completion_tokens": 0,
    }


def many_lives(count: int, slots: int = 16, seed: int = 0, start_s: float = 0.0) -> list[dict[str, Any]]:
    """Requests that go through a batch of so many one after another, as long as chance wants."""
    chance, free, rows = np.random.default_rng(seed), [start_s] * slots, []
    for _ in range(count):
        slot = int(np.argmin(free))
        queue_s, prefill_s, decode_s = chance.uniform(0, 0.4), chance.uniform(0.05, 0.2), chance.exponential(2.0)
        tokens = {"prompt_tokens": int(chance.integers(5, 900)), "completion_tokens": 1 + int(decode_s * 50)}
        rows.append(life(free[slot], queue_s, prefill_s, decode_s, **tokens))
        free[slot] += prefill_s + decode_s
    return rows


def record_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What a finished job of these rows records of itself, but for its runs."""
    failed = sum(row["error"] is not None for row in rows)
    return {
        "job_id": "0" * 32,
        "fingerprint": FINGERPRINT,
        "input": [],
        "columns": COLUMNS,
        "num_samples": 1,
        "rows_total": len(rows),
        "rows_ok": len(rows) - failed,
        "rows_failed": failed,
        "config": {"order": "auto", "engine": {"page_size": 32, "num_blocks": 64}},
        "versions": {"cbgen": "0.1.0"},
    }


def write_finished(
    path: Path, rows: list[dict[str, Any]], runs: list[dict[str, Any]] | None = None, **edited: Any
) -> Path:
    """A Parquet output with the record of its job; without runs, as an earlier version left it. edited: see it."""
    footer = record_of(rows) | ({} if runs is None else {"runs": runs}) | edited
    fields = [pa.field("prompt", pa.string()), *(RESULT_SCHEMA.field(name) for name in COLUMNS)]
    schema = pa.schema(fields, metadata={b"cbgen": json.dumps(footer).encode()})
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return path


def write_folder(path: Path, rows: list[dict[str, Any]]) -> Path:
    """An output of one shard in a folder."""
    path.mkdir()
    shard = write_finished(path / "part-00000-of-00001.parquet", rows)
    publish_sidecar(FolderOutput(path, 1).marker, record_of(rows), {shard: shard})
    return path


def run(start_s: float, bins: int, bin_s: float = 0.25, shard: int | None = None, **series: float) -> dict[str, Any]:
    """A run of which every bin is the same, 10 steps of the given means and sums; loading took 3 s before."""
    sums = dict.fromkeys(SERIES, 0.0) | {"steps": 10.0, "forward": 0.2, "sampling": 0.05} | series
    elapsed_s = bins * bin_s
    return {
        "started": STARTED + start_s - 3.0,
        "ended": STARTED + start_s + elapsed_s,
        "how": "finished",
        "shard": shard,
        "load_s": 3.0,
        "rows": 10,
        "summary": run_figures(EngineMetrics())
        | {
            "elapsed_s": elapsed_s,
            "prompt_tokens": 400,
            "output_tokens": int(sums["output_tokens"] * bins),
            "requests_per_second": 10 / elapsed_s,
            "output_tokens_per_second": sums["output_tokens"] / bin_s,
            "mean_batch_requests": sums["requests"] / sums["steps"],
            "prefix_hit_tokens": 100,
            "offloads": int(sums["offloads"] * bins),
            "deduplicated": 0,
            "peak_cache_used_share": 0.5,
            "peak_memory_bytes": 3 << 30,
        },
        "engine": {"page_size": 32, "num_blocks": 64, "max_batch_tokens": 512, "max_requests_per_batch": 8},
        "timeline": {
            "started": STARTED + start_s,
            "bin_s": bin_s,
            "series": {name: [value] * bins for name, value in sums.items()},
        },
    }


def busy(**more: float) -> dict[str, float]:
    """Series of a bin in which much happens; see run."""
    shares = {name: 0.01 for name in PHASES if name != "forward"}
    mean = {"requests": 60.0, "active": 70.0, "waiting": 20.0, "owned_share": 4.0, "initialized_share": 2.0}
    return shares | mean | {"output_tokens": 50.0, "computed_prompt_tokens": 30.0, "prefix_hit_tokens": 5.0} | more


def data_of(page: str) -> dict[str, Any]:
    """What the script of a page draws from."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))
