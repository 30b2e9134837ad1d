"""What the runs of a job tell of themselves, and that it comes along: over kills, in every format, through a merge."""

import json
import signal
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from engine_harness import CPU, engine_for, greedy_requests, mixed_prompts, run_all
from job_harness import TIMEOUT_S, cbgen, run_tiny, start_process, wait_for_parts, write_jsonl
from tiny_models import ModelUnderTest

from cbgen.data.outputs import open_output
from cbgen.data.runs import read_runs
from cbgen.run_log import RunLog

JOB = ("--model", "tiny-random", "--max-tokens", 16, "--ignore-eos")
SLOWLY = ("--max-requests-per-batch", 2, "--part-rows", 2, "--part-interval", 0.05, "--no-deduplicate")


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"Question {number} of many"} for number in range(count)]


def recorded(out: Path) -> list[dict[str, Any]]:
    footer = open_output(out, out.is_dir(), rows_per_shard=1).read_footer()
    assert footer is not None
    return footer["runs"]


def test_each_run_of_a_job_is_told_of(tmp_path: Path) -> None:
    """One was killed, one stopped, one came to the end; what the last one counted is what its summary says."""
    source, out, summary = write_jsonl(tmp_path / "in.jsonl", rows(60)), tmp_path / "out.parquet", tmp_path / "s.json"
    parts = tmp_path / "out.parquet.parts"
    for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 75)):
        process = start_process("run", source, *JOB, *SLOWLY, "--out", out)
        wait_for_parts(process, parts, len(list(parts.glob("part-*.parquet"))) + 2)
        process.send_signal(number)
        _, errors = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == code, errors
    assert [run["how"] for run in read_runs(parts)] == [None, "stopped: SIGTERM"]
    run_tiny(source, out, *JOB[2:], "--summary", summary)
    runs = recorded(out)
    assert [run["how"] for run in runs] == [None, "stopped: SIGTERM", "finished"]
    assert all(earlier["ended"] < later["started"] for earlier, later in pairwise(runs))
    told = json.loads(summary.read_text())
    assert {name: told[name] for name in runs[2]["summary"]} == runs[2]["summary"] | {
        "peak_memory_bytes": told["peak_memory_bytes"]
    }
    assert 0 < runs[2]["summary"]["peak_memory_bytes"] <= told["peak_memory_bytes"]
    assert told["output_tokens"] == 16 * runs[2]["rows"]
    assert sum(runs[2]["timeline"]["series"]["output_tokens"]) == pytest.approx(told["output_tokens"], abs=0.1)
    assert runs[2]["rows"] + told["rows_resumed"] == 60
    assert runs[0]["engine"]["max_requests_per_batch"] == 2
    assert not parts.exists()


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl", "out/"])
def test_a_finished_output_that_goes_on_keeps_its_runs(tmp_path: Path, name: str) -> None:
    """And has those of its continuation beside them; a file of a folder does not repeat them."""
    source, out = tmp_path / "in.jsonl", tmp_path / name
    for count in (5, 8):
        write_jsonl(source, rows(count))
        result = cbgen("run", source, *JOB, "--out", f"{tmp_path}/{name}")
        assert result.exit_code == 0, result.output
    assert [(run["how"], run["rows"]) for run in recorded(out)] == [("finished", 5), ("finished", 3)]
    if out.is_dir():
        footers = [json.loads(pq.read_schema(path).metadata[b"cbgen"]) for path in out.glob("part-*")]
        assert [footer["rows_ok"] for footer in footers] == [8]
        assert "runs" not in footers[0]


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl"])
def test_a_merge_has_the_runs_of_its_shards(tmp_path: Path, name: str) -> None:
    """Each says which shard it was for."""
    source, outs = write_jsonl(tmp_path / "in.jsonl", rows(9)), []
    for index in range(3):
        outs.append(tmp_path / f"{index}-{name}")
        run_tiny(source, outs[-1], *JOB[2:], "--shard-index", index, "--shard-count", 3)
    assert cbgen("merge", *outs, "--out", tmp_path / name).exit_code == 0
    expected = [(index, recorded(out)[0]["rows"]) for index, out in enumerate(outs)]
    assert [(run["shard"], run["rows"]) for run in recorded(tmp_path / name)] == expected
    assert sum(count for _, count in expected) == 9


def test_a_run_that_did_nothing_is_not_told_of(tmp_path: Path) -> None:
    """Its rows are all broken: no engine was needed."""
    run_tiny(write_jsonl(tmp_path / "in.jsonl", [{"prompt": ""}]), tmp_path / "out.parquet", *JOB[2:], code=5)
    assert recorded(tmp_path / "out.parquet") == []


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl"])
def test_what_is_wrong_with_the_record_of_runs_stops_nothing(tmp_path: Path, name: str) -> None:
    """Neither in a file beside parts, nor in the record of an output that goes on: that run is not told of."""
    source, out = write_jsonl(tmp_path / "in.jsonl", rows(40)), tmp_path / name
    parts = tmp_path / f"{name}.parts"
    process = start_process("run", source, *JOB, *SLOWLY, "--out", out)
    wait_for_parts(process, parts, 2)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=TIMEOUT_S)
    wrong = json.loads((parts / "run-000000.json").read_text()) | {"timeline": {"bin_s": "x"}}
    (parts / "run-000000.json").write_text(json.dumps(wrong))
    page = tmp_path / "page.html"
    assert cbgen("run", source, *JOB, "--out", out, "--report", page).exit_code == 0
    assert [run["how"] for run in recorded(out)] == ["finished"]
    assert page.exists()
    if name == "out.jsonl":
        sidecar = tmp_path / "out.jsonl.job.json"
        sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | {"runs": [{"started": None}, 5]}))
        write_jsonl(source, rows(42))
        again = cbgen("run", source, *JOB, "--out", out, "--report", page)
        assert again.exit_code == 0, again.output
        assert [run["rows"] for run in recorded(out)] == [2]


def test_what_cannot_be_recorded_is_warned_about_once(tmp_path: Path, tiny_llama: ModelUnderTest) -> None:
    """And ends nothing."""
    engine, told = engine_for(tiny_llama), []
    run_all(engine, greedy_requests(mixed_prompts(2, 320)))
    counts = SimpleNamespace(num_ok=1, num_failed=0, num_deduplicated=0)
    log = RunLog(tmp_path / "gone", CPU, counts, 0.0, told.append)
    log.begin(engine, 1.0)
    log.publish_if_due()
    log.end("finished")
    assert len(told) == 1
    assert "is not recorded for `cbgen report`" in told[0]
    assert str(tmp_path / "gone") in told[0]
