"""A job killed again and again, at any moment, ends as if nothing had ever happened to it."""

import random
import signal
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from job_harness import SAMPLES, cbgen, read_rows, run_tiny, start_process, wait_for_parts, without_timing, write_jsonl

JOB = ("--model", "tiny-random", "--max-tokens", 12, "--deterministic")
SLOWLY = ("--max-requests-per-batch", 2, "--part-rows", 2, "--part-interval", 0.1)
# Of a process: to be imported, to open the input and load the model. A kill within it finds nothing begun.
START_S = 4.0


def mixed_rows(tmp_path: Path, num_rows: int) -> Path:
    """Greedy rows, sampled ones and some that fail, in turns."""
    prompts = [row["prompt"] for row in read_rows(SAMPLES / "questions.jsonl")]
    kinds = [{}, {"temperature": 0.8}, {"temperature": 1.0, "top_k": 5}, {}, {"temperature": -1}]
    rows = [{"prompt": f"{n // 40} {prompts[n % 40]}", **kinds[n % 5]} for n in range(num_rows)]
    names = ["prompt", "temperature", "top_k"]
    return write_jsonl(tmp_path / "in.jsonl", [{name: row.get(name) for name in names} for row in rows])


def kill_at_random(rng: random.Random, parts: Path, job: tuple[object, ...]) -> bool:
    """Starts the job and kills it: most often with some work done, now and then while it starts or ends.

    False when the job was over before.
    """
    process = start_process(*job)
    if rng.random() < 0.15:
        time.sleep(rng.random() * START_S)
    else:
        done = len(list(parts.glob("part-*.parquet")))
        try:
            wait_for_parts(process, parts, done + rng.randint(1, 3))
        except AssertionError:
            assert process.poll() in (0, 3), process.communicate()[1]
            return False
        time.sleep(rng.random() * 0.1)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("num_kills", "num_rows"), [(4, 80), pytest.param(100, 1500, marks=pytest.mark.long)], ids=["4 times", "100 times"]
)
def test_killed_many_times(tmp_path: Path, num_kills: int, num_rows: int) -> None:
    """kill -9 at random moments: the output equals the uninterrupted one in everything but timing."""
    source, out = mixed_rows(tmp_path, num_rows), tmp_path / "out.parquet"
    parts, rng = tmp_path / "out.parquet.parts", random.Random(0)
    job = ("run", source, "--out", out, *JOB)
    for number in range(num_kills):
        assert kill_at_random(rng, parts, (*job, *SLOWLY)), f"the job was over before kill {number + 1}"
        assert not out.exists()
    last = cbgen(*job)
    assert last.exit_code == 3, last.output
    assert "results are there already" in last.output
    run_tiny(source, tmp_path / "whole.parquet", *JOB[2:], code=3)
    survived, whole = (without_timing(pq.read_table(path)) for path in (out, tmp_path / "whole.parquet"))
    assert survived.num_rows == num_rows
    assert survived.equals(whole)
    assert not parts.exists()
