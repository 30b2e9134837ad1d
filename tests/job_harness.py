"""Runs `cbgen` as its users do: in this process for speed, or as a process of its own that can be killed."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from typer.testing import CliRunner, Result

from cbgen.cli import app

REPOSITORY = Path(__file__).parents[1]
SAMPLES = REPOSITORY / "sample_data"
TIMING_COLUMNS = ["queue_s", "prefill_s", "decode_s", "ttft_s", "tpot_s", "arrival_time", "finish_time"]
TIMEOUT_S = 300


def cbgen(*arguments: object) -> Result:
    """`cbgen ARGUMENTS` in this process. A traceback is a failure of the test, whatever the exit code."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def run_tiny(source: object, out: Path, *options: object, code: int = 0) -> list[dict[str, Any]]:
    """The output rows of a run with the tiny model."""
    result = cbgen("run", source, "--model", "tiny-random", "--out", out, *options)
    assert result.exit_code == code, result.output
    return read_rows(out)


def read_rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_bytes().splitlines()]
    return pq.read_table(path).to_pylist()


def without_timing(table: pa.Table) -> pa.Table:
    """What two runs of one job have in common."""
    return table.drop_columns(TIMING_COLUMNS).replace_schema_metadata(None)


def start_process(*arguments: object, under: Sequence[str] = ()) -> subprocess.Popen[str]:
    """`cbgen ARGUMENTS` as a process, started by the command `under`, if one is given."""
    return subprocess.Popen(
        [*under, sys.executable, "-m", "cbgen", *map(str, arguments)],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_parts(process: subprocess.Popen[str], folder: Path, count: int) -> None:
    """Until the job has published so many parts; fails when it ends before."""
    deadline = time.monotonic() + TIMEOUT_S
    while len(list(folder.glob("part-*.parquet"))) < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
