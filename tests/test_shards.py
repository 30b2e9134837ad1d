"""One job on several machines that know nothing of each other, and what comes of it."""

import signal
from pathlib import Path

import pyarrow.parquet as pq
from job_harness import (
    SAMPLES,
    TIMEOUT_S,
    cbgen,
    read_rows,
    run_tiny,
    start_process,
    wait_for_parts,
    without_timing,
    write_jsonl,
)

JOB = ("--model", "tiny-random", "--max-tokens", 16, "--temperature", 0.8, "--n", 2)
SLOWLY = ("--max-requests-per-batch", 2, "--part-rows", 2, "--part-interval", 0.1)


def test_three_processes_at_once(tmp_path: Path) -> None:
    """One of three shards is killed and resumed; merged, they equal the single run, which counts as done then."""
    prompts = [row["prompt"] for row in read_rows(SAMPLES / "questions.jsonl")]
    # Equal rows are told apart over the whole input, so that shards draw for them what one run would.
    rows = [{"prompt": prompts[number % 30], "number": number} for number in range(60)] + [{"prompt": ""}]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    job = ("run", source, *JOB, "--out", tmp_path / "out-{shard}.parquet", "--shard-count", 3)
    outs = [tmp_path / f"out-{number:05d}-of-00003.parquet" for number in range(3)]
    processes = [start_process(*job, "--shard-index", number, *SLOWLY) for number in range(3)]
    parts = outs[1].with_name(outs[1].name + ".parts")
    wait_for_parts(processes[1], parts, 1)
    processes[1].send_signal(signal.SIGKILL)
    for number, process in enumerate(processes):
        _, errors = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode in ({-signal.SIGKILL} if number == 1 else {0, 3}), errors
    merged, merge = tmp_path / "merged.parquet", ("merge", *outs, "--out", tmp_path / "merged.parquet")
    refused = cbgen(*merge)
    assert refused.exit_code == 2, refused.output
    assert outs[1].name in refused.output
    assert cbgen(*job, "--shard-index", 1).exit_code in (0, 3)
    assert cbgen(*merge).exit_code == 3
    whole = tmp_path / "whole.parquet"
    run_tiny(source, whole, *JOB[2:], code=3)
    assert without_timing(pq.read_table(merged)).equals(without_timing(pq.read_table(whole)))
    assert all(0 < pq.read_metadata(out).num_rows < 122 for out in outs)
    again = cbgen("run", source, *JOB, "--out", merged)
    assert again.exit_code == 3
    assert "is complete: 120 rows ok, 2 failed" in again.output
