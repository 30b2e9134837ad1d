"""`cbgen run --report`: the page is there however the run ends, and stands in no run's way."""

import signal
from pathlib import Path

import pytest
from job_harness import TIMEOUT_S, cbgen, run_tiny, start_process, wait_for_parts, write_jsonl

JOB = ("--model", "tiny-random", "--max-tokens", 16, "--ignore-eos")
SLOWLY = ("--max-requests-per-batch", 2, "--part-rows", 2, "--part-interval", 0.05)


def test_stopped_and_finished_and_complete(tmp_path: Path) -> None:
    """Each says so; the last has all rows."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"Question {number}"} for number in range(40)])
    out, page = tmp_path / "out.parquet", tmp_path / "pages" / "{shard}.html"
    written = tmp_path / "pages" / "00000-of-00001.html"
    process = start_process("run", source, *JOB, *SLOWLY, "--out", out, "--report", page)
    wait_for_parts(process, tmp_path / "out.parquet.parts", 2)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 75, errors
    stopped = written.read_text()
    assert "stopped: SIGTERM" in stopped
    run_tiny(source, out, *JOB[2:], "--report", page)
    finished = written.read_text()
    assert "complete" in finished
    assert finished != stopped
    written.unlink()
    assert cbgen("run", source, *JOB, "--out", out, "--report", page).exit_code == 0
    assert written.exists()


def test_a_refused_job_writes_none(tmp_path: Path) -> None:
    """What lies at the output is another job's."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}])
    run_tiny(source, tmp_path / "out.parquet", *JOB[2:])
    page = tmp_path / "page.html"
    refused = cbgen("run", source, *JOB[:-2], 3, "--out", tmp_path / "out.parquet", "--report", page)
    assert refused.exit_code == 4, refused.output
    assert not page.exists()


def test_a_page_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    """A folder is refused before; one that turns up meanwhile is a warning."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"Question {number}"} for number in range(40)])
    out, page = tmp_path / "out.parquet", tmp_path / "page.html"
    process = start_process("run", source, *JOB, *SLOWLY, "--out", out, "--report", page)
    wait_for_parts(process, tmp_path / "out.parquet.parts", 1)
    (page / "in the way").mkdir(parents=True)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    assert f"warning: --report {page}: " in errors
    assert out.exists()
    again = cbgen("run", source, *JOB, "--out", out, "--report", page)
    assert again.exit_code == 2
    assert f"--report {page}: is a folder" in again.output


@pytest.mark.parametrize("option", ["--report", "--summary"])
@pytest.mark.parametrize("target", ["out.parquet", "in.jsonl", "out.parquet.parts/x.html", "link.html", "other"])
def test_rows_are_not_overwritten(tmp_path: Path, option: str, target: str) -> None:
    """The output, an input, the parts, by another name, and each other: refused before any work."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}])
    before = source.read_bytes()
    (tmp_path / "link.html").symlink_to(source)
    both = (
        ("--report", tmp_path / "x", "--summary", tmp_path / "x") if target == "other" else (option, tmp_path / target)
    )
    result = cbgen("run", source, *JOB, "--out", tmp_path / "out.parquet", *both)
    assert result.exit_code == 2, result.output
    assert "would overwrite" in result.output
    assert source.read_bytes() == before
    assert not (tmp_path / "out.parquet").exists()


def test_a_folder_of_rows_takes_no_page(tmp_path: Path) -> None:
    """It would be a stranger among its files."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}])
    result = cbgen("run", source, *JOB, "--out", f"{tmp_path}/out/", "--report", tmp_path / "out" / "page.html")
    assert result.exit_code == 2
    assert "would overwrite" in result.output
