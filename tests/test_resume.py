"""A job that is stopped, by whatever, and run again ends as if it had never been stopped; another job is refused."""

import random
import shutil
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
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

JOB = ("--model", "tiny-random", "--max-tokens", 24, "--temperature", 0.8)
# Small batches and small parts, so that a job lives long enough to be stopped with something done and something left.
SLOWLY = ("--max-requests-per-batch", 4, "--part-rows", 5, "--part-interval", 0.2)


def questions(tmp_path: Path, copies: int = 2) -> Path:
    rows = read_rows(SAMPLES / "questions.jsonl")
    return write_jsonl(tmp_path / "in.jsonl", [row | {"copy": n} for n in range(copies) for row in rows])


def assert_equals_uninterrupted(tmp_path: Path, source: Path, out: Path) -> None:
    """All but the timing equals a run that nothing stopped."""
    run_tiny(source, tmp_path / "whole.parquet", *JOB[2:])
    assert without_timing(pq.read_table(out)).equals(without_timing(pq.read_table(tmp_path / "whole.parquet")))


def test_killed_five_times(tmp_path: Path) -> None:
    """kill -9 at five moments of a job's life; what comes out equals the uninterrupted run."""
    source, out = questions(tmp_path, copies=6), tmp_path / "out.parquet"
    rng, parts = random.Random(0), tmp_path / "out.parquet.parts"
    for _ in range(5):
        done = len(list(parts.glob("part-*.parquet")))
        process = start_process("run", source, "--out", out, *JOB, *SLOWLY)
        wait_for_parts(process, parts, done + rng.randint(1, 4))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        process.communicate()
        assert not out.exists()
    assert pq.read_table(sorted(parts.glob("part-*.parquet"))[0]).num_rows > 0
    last = cbgen("run", source, "--out", out, *JOB, "--summary", tmp_path / "s.json")
    assert last.exit_code == 0, last.output
    assert "of 240 results are there already" in last.output
    assert pq.read_metadata(out).num_rows == 240
    assert_equals_uninterrupted(tmp_path, source, out)
    assert '"rows_resumed": 0' not in (tmp_path / "s.json").read_text()
    assert not parts.exists()


@pytest.fixture(scope="module")
def killed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with in.jsonl and the parts of a job to out.parquet that was killed in the middle."""
    folder = tmp_path_factory.mktemp("killed")
    process = start_process("run", questions(folder), "--out", folder / "out.parquet", *JOB, *SLOWLY)
    wait_for_parts(process, folder / "out.parquet.parts", 2)
    process.kill()
    process.communicate()
    return folder


@pytest.fixture
def stopped_job(killed_folder: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of it: the paths of input and output."""
    shutil.copytree(killed_folder, tmp_path, dirs_exist_ok=True)
    return tmp_path / "in.jsonl", tmp_path / "out.parquet"


def test_another_job_on_the_same_output_is_refused(tmp_path: Path, stopped_job: tuple[Path, Path]) -> None:
    """A changed option that changes results is named with both values; what does not change results is free."""
    source, out = stopped_job
    before = sorted(path.name for path in (tmp_path / "out.parquet.parts").glob("part-*"))
    refused = cbgen("run", source, "--out", out, *JOB, "--temperature", 0.7)
    assert refused.exit_code == 4
    assert "temperature is 0.7 now and was 0.8" in refused.output
    assert sorted(path.name for path in (tmp_path / "out.parquet.parts").glob("part-*")) == before
    assert cbgen("run", source, "--out", out, *JOB, "--max-num-batched-tokens", 100, "--page-size", 8).exit_code == 0


def test_edited_reordered_and_appended_input(tmp_path: Path, stopped_job: tuple[Path, Path]) -> None:
    """Finished rows are recognised by what they ask for; only new ones run; other columns show new values."""
    source, out = stopped_job
    done = sum(pq.read_metadata(part).num_rows for part in (tmp_path / "out.parquet.parts").glob("part-*"))
    rows = read_rows(source)
    changed = [{**row, "id": "new " + row["id"]} for row in reversed(rows)] + [
        {"id": "z", "prompt": "Another?", "copy": 9}
    ]
    write_jsonl(source, changed)
    resumed = run_tiny(source, out, *JOB[2:], "--summary", tmp_path / "s.json")
    assert [row["id"] for row in resumed] == [row["id"] for row in changed]
    assert f'"rows_resumed": {done}' in (tmp_path / "s.json").read_text()
    by_prompt = {row["prompt"]: set() for row in resumed}
    for row in resumed:
        by_prompt[row["prompt"]].add(row["completion"])
    for row in run_tiny(questions(tmp_path), tmp_path / "whole.parquet", *JOB[2:]):
        assert row["completion"] in by_prompt[row["prompt"]]


def test_killed_between_the_final_file_and_the_end(
    tmp_path: Path, killed_folder: Path, stopped_job: tuple[Path, Path]
) -> None:
    """With the final file there and some parts not deleted yet, the job is complete: nothing is generated again."""
    source, out = stopped_job
    run_tiny(source, out, *JOB[2:])
    content, parts = out.read_bytes(), tmp_path / "out.parquet.parts"
    shutil.copytree(killed_folder / "out.parquet.parts", parts)
    sorted(parts.glob("part-*"))[0].unlink()
    again = cbgen("run", source, "--out", out, *JOB)
    assert again.exit_code == 0
    assert "is complete: 80 rows ok" in again.output
    assert out.read_bytes() == content
    assert not parts.exists()


def test_a_foreign_file_is_kept_though_the_job_has_parts(stopped_job: tuple[Path, Path]) -> None:
    """What somebody put at the output while the job was stopped is not overwritten."""
    source, out = stopped_job
    out.write_bytes(b"precious")
    assert cbgen("run", source, "--out", out, *JOB).exit_code == 4
    assert out.read_bytes() == b"precious"


def test_a_row_whose_own_max_tokens_changes_is_generated_again(tmp_path: Path) -> None:
    """Results go with the row that asked for them, also when two rows differ in max_tokens alone and change places."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"prompt": "q", "max_tokens": 2}, {"prompt": "q", "max_tokens": 9}, {"prompt": "long", "max_tokens": 600}]
    slow_row = ("--model", "tiny-random", "--out", out, "--ignore-eos", "--part-rows", 2)
    process = start_process("run", write_jsonl(source, rows), *slow_row)
    wait_for_parts(process, tmp_path / "out.jsonl.parts", 1)
    process.kill()
    process.communicate()
    write_jsonl(source, [rows[1], rows[0], {"prompt": "q", "max_tokens": 5}])
    assert cbgen("run", source, *slow_row).exit_code == 0
    assert [(row["max_tokens"], row["completion_tokens"]) for row in read_rows(out)] == [(9, 9), (2, 2), (5, 5)]


def test_failed_rows_are_tried_again_when_asked(tmp_path: Path) -> None:
    """A row that failed for want of cache stays failed, until --retry generates it with more of it."""
    # So many rows that the job is far from its end at the twelfth part, however fast rows fail.
    source, out = questions(tmp_path, copies=8), tmp_path / "out.parquet"
    # 64 tokens: some questions fit, some do not; by arrival they take turns.
    small = ("--num-blocks", 2, "--page-size", 32, "--order", "arrival")
    process = start_process("run", source, "--out", out, *JOB, *small, *SLOWLY)
    wait_for_parts(process, tmp_path / "out.parquet.parts", 12)
    process.kill()
    process.communicate()
    errors = [pq.read_table(part)["error"] for part in (tmp_path / "out.parquet.parts").glob("part-*")]
    num_failed = sum(len(column) - column.null_count for column in errors)
    assert 0 < num_failed < sum(map(len, errors))
    rows = run_tiny(source, out, *JOB[2:], code=3)
    assert sum(row["error"] is not None for row in rows) == num_failed
    run_tiny(source, out, *JOB[2:], "--retry", "failed")
    assert_equals_uninterrupted(tmp_path, source, out)


def test_a_job_that_published_nothing_locks_nothing(tmp_path: Path) -> None:
    """After a run that ended before its first part, other options are free."""
    source, out = SAMPLES / "questions.jsonl", tmp_path / "out.parquet"
    failed = cbgen("run", source, "--out", out, "--model", "tiny-random", "--max-tokens", 3, "--num-blocks", 10**9)
    assert failed.exit_code == 1
    assert run_tiny(source, out, "--max-tokens", 4)[0]["completion_tokens"] == 4


def test_a_full_disk(tmp_path: Path) -> None:
    """A part that cannot be written ends the job in one line; with room made, the same command finishes it."""
    source, out = questions(tmp_path), tmp_path / "out.parquet"
    # No file may grow beyond 8 blocks of 512 bytes: enough for the manifest, and for no part of 40 rows.
    small_disk = ["sh", "-c", 'ulimit -f 8; exec "$@"', "sh"]
    process = start_process("run", source, "--out", out, *JOB, "--part-rows", 40, under=small_disk)
    output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1, errors
    assert "Traceback" not in errors
    assert "cannot be written" in errors.splitlines()[-1]
    assert "run the same command again" in errors.splitlines()[-1]
    assert "Throughput" not in output
    assert not out.exists()
    assert not list((tmp_path / "out.parquet.parts").glob(".*")), "no temporary file is left"
    run_tiny(source, out, *JOB[2:])
    assert_equals_uninterrupted(tmp_path, source, out)


def test_a_finished_job_answers_at_once_and_is_not_overwritten(tmp_path: Path) -> None:
    """Run again, it says so; with other options, or by a foreign file's name, it is refused; `never` starts anew."""
    source, out = SAMPLES / "questions.jsonl", tmp_path / "out.parquet"
    run_tiny(source, out, "--max-tokens", 3)
    content = out.read_bytes()
    again = cbgen("run", source, "--model", "tiny-random", "--out", out, "--max-tokens", 3)
    assert again.exit_code == 0
    assert "is complete: 40 rows ok" in again.output.replace("\n", " ")
    other = cbgen("run", source, "--model", "tiny-random", "--out", out, "--max-tokens", 4)
    assert other.exit_code == 4
    assert "max_tokens is 4 now and was 3" in other.output
    assert out.read_bytes() == content
    assert run_tiny(source, out, "--max-tokens", 4, "--resume", "never")[0]["completion_tokens"] == 4


@pytest.mark.parametrize("content", [b"", b"PAR1 torn", b"anything"])
def test_a_foreign_or_torn_output_is_neither_done_nor_overwritten(tmp_path: Path, content: bytes) -> None:
    """A file without cbgen's footer at the output is refused, even with `--resume never`."""
    out = tmp_path / "out.parquet"
    out.write_bytes(content)
    for resume in ("if-possible", "never"):
        refused = cbgen("run", SAMPLES / "chat.jsonl", "--model", "tiny-random", "--out", out, "--resume", resume)
        assert refused.exit_code == 4
        assert out.read_bytes() == content


def test_a_lost_part_is_generated_again(tmp_path: Path, stopped_job: tuple[Path, Path]) -> None:
    """A part that is torn or deleted costs its rows, which run again, and nothing else."""
    source, out = stopped_job
    first, second, *_ = sorted((tmp_path / "out.parquet.parts").glob("part-*.parquet"))
    first.write_bytes(first.read_bytes()[:100])
    second.unlink()
    run_tiny(source, out, *JOB[2:])
    assert_equals_uninterrupted(tmp_path, source, out)


def test_two_runs_on_one_output(tmp_path: Path) -> None:
    """The second is refused while the first is at work, and does it no harm."""
    source, out = questions(tmp_path, copies=10), tmp_path / "out.parquet"
    process = start_process("run", source, "--out", out, *JOB, *SLOWLY)
    wait_for_parts(process, tmp_path / "out.parquet.parts", 1)
    refused = cbgen("run", source, "--out", out, *JOB)
    assert refused.exit_code == 4
    assert "another run is writing this output" in refused.output
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    assert pq.read_metadata(out).num_rows == 400
