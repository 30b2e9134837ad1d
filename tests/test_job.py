"""The main job on the tiny model: what goes in, what comes out, what the summary says."""

import datetime
import json
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_harness import SAMPLES, TIMING_COLUMNS, cbgen, read_rows, run_tiny, without_timing, write_jsonl

from cbgen.data.outputs import ParquetOutput

# Dies as by kill -9 when the final rows are there and what records them is not, or the other way round.
DIE_AT_THE_RECORD = """
import os, signal, sys
from cbgen.cli import main
from cbgen.data import outputs
publish_sidecar, moment = outputs.publish_sidecar, sys.argv.pop(1)
def die(*arguments):
    if moment == "after":
        publish_sidecar(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
outputs.publish_sidecar = die
main()
"""
OUTPUT_COLUMNS = [
    "completion",
    "finish_reason",
    "error",
    "prompt_tokens",
    "completion_tokens",
    "clamped_max_tokens",
    *TIMING_COLUMNS,
]


def test_bad_rows_are_error_rows(tmp_path: Path) -> None:
    """20 rows, 6 of them bad in six ways: 20 rows out, 14 completions, 6 reasons, exit code 3."""
    rows = run_tiny(SAMPLES / "mixed.jsonl", tmp_path / "out.parquet", "--max-tokens", 8, code=3)
    assert len(rows) == 20
    good = [row for row in rows if row["error"] is None]
    bad = {number: row["error"] for number, row in enumerate(rows, start=1) if row["error"] is not None}
    assert len(good) == 14
    assert all(row["completion"] is not None and row["completion_tokens"] > 0 for row in good)
    expected = {3: "empty", 6: "temperature", 9: "null", 12: "line 12", 15: "a number (42)", 18: "max_tokens"}
    assert bad.keys() == expected.keys()
    assert all(words in bad[number] for number, words in expected.items()), bad
    assert all(rows[number - 1]["finish_reason"] == "error" for number in bad)


def test_schema_is_fixed_and_input_columns_are_kept(tmp_path: Path) -> None:
    """Every input column with its own type and values, then the result columns, whatever the rows hold."""
    table = pa.table(
        {
            "prompt": pa.array(["one", "two", None]),
            "when": pa.array(
                [datetime.datetime(2024, 5, 6, tzinfo=datetime.timezone.utc)] * 3, pa.timestamp("ms", "CET")
            ),
            "nested": pa.array([[{"a": 1}], [], None], pa.list_(pa.struct([("a", pa.int8())]))),
            "label": pa.array(["x", "y", "x"]).dictionary_encode(),
            "nothing": pa.nulls(3),
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    run_tiny(tmp_path / "in.parquet", tmp_path / "out.parquet", "--max-tokens", 1, code=3)
    result = pq.read_table(tmp_path / "out.parquet")
    assert result.schema.names == table.schema.names + OUTPUT_COLUMNS
    assert result.select(table.schema.names).replace_schema_metadata(None).equals(table)
    assert result.schema.field("error").type == pa.string()
    assert result.schema.field("finish_time").type == pa.timestamp("us", tz="UTC")
    assert result["tpot_s"].to_pylist() == [None] * 3, "one token has no time per later token"


def test_samples_of_a_row(tmp_path: Path) -> None:
    """n > 1 gives so many rows for each, with sample_index, in input order, and samples that differ."""
    options = ("--n", 3, "--temperature", 1, "--max-tokens", 6, "--limit", 5, "--output-token-ids")
    rows = run_tiny(SAMPLES / "questions.jsonl", tmp_path / "out.jsonl", *options)
    source = read_rows(SAMPLES / "questions.jsonl")[:5]
    assert [row["id"] for row in rows] == [row["id"] for row in source for _ in range(3)]
    assert [row["sample_index"] for row in rows] == [0, 1, 2] * 5
    assert len({tuple(row["completion_ids"]) for row in rows[:3]}) == 3
    assert all(len(row["completion_ids"]) == row["completion_tokens"] for row in rows)


def test_draws_depend_on_the_row_alone(tmp_path: Path) -> None:
    """The same job reordered, in other batches and in shards gives each row the same sample; another seed does not."""
    rows = read_rows(SAMPLES / "questions.jsonl")[:12]
    options = ("--temperature", 1, "--max-tokens", 8)

    def completions(name: str, part: list[dict[str, object]], *more: object) -> dict[str, str]:
        source = write_jsonl(tmp_path / f"{name}.jsonl", part)
        return {row["id"]: row["completion"] for row in run_tiny(source, tmp_path / f"{name}.parquet", *options, *more)}

    whole = completions("whole", rows)
    assert completions("reversed", rows[::-1], "--max-num-seqs", 3, "--max-num-batched-tokens", 32) == whole
    assert completions("first", rows[:5]) | completions("second", rows[5:]) == whole
    other = completions("seeded", rows, "--seed", 1)
    assert sum(other[name] != whole[name] for name in whole) > 6


def test_equal_rows_are_all_there(tmp_path: Path) -> None:
    """Identical prompts give as many rows; greedy ones are equal, sampled ones are drawn apart."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "same"}] * 10)
    assert len({row["completion"] for row in run_tiny(source, tmp_path / "greedy.parquet", "--max-tokens", 8)}) == 1
    sampled = run_tiny(source, tmp_path / "sampled.parquet", "--max-tokens", 8, "--temperature", 1)
    assert len(sampled) == 10
    assert len({row["completion"] for row in sampled}) > 5


def test_row_columns_override_the_command_line(tmp_path: Path) -> None:
    """max_tokens, temperature and seed of a row are its own; what a row leaves null comes from the command."""
    rows = [
        {"prompt": "a"},
        {"prompt": "a", "max_tokens": 3},
        {"prompt": "a", "temperature": 1.5, "seed": 5},
        {"prompt": "a", "temperature": 1.5, "seed": 5},
    ]
    plain, short, drawn, again = run_tiny(
        write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "o.jsonl", "--max-tokens", 9
    )
    assert (plain["completion_tokens"], short["completion_tokens"]) == (9, 3)
    assert drawn["completion"] == again["completion"] != plain["completion"]


def test_prompt_ids_messages_and_templates(tmp_path: Path) -> None:
    """The three forms of a prompt, and a template over columns, reach the model as the tokens they stand for."""
    rows = [
        {"prompt_ids": list(b"hello"), "messages": [{"role": "user", "content": "hi"}], "prompt": "x", "name": "Ann"}
    ]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    options = ("--max-tokens", 2, "--summary", tmp_path / "s.json")

    def prompt_tokens(*more: object) -> int:
        return run_tiny(source, tmp_path / "out.parquet", *options, *more, "--resume", "never")[0]["prompt_tokens"]

    assert prompt_tokens() == 5, "ids are taken first"
    assert prompt_tokens("--prompt-column", "prompt") == 1
    assert prompt_tokens("--template", "Hi {{ name }}!") == len("Hi Ann!")
    turn = len("user\nhi") + 2
    answer = 1 + len("assistant\n")
    assert prompt_tokens("--messages-column", "messages") == turn + answer
    system = len("system\nBe brief.") + 2
    assert prompt_tokens("--messages-column", "messages", "--system-prompt", "Be brief.") == system + turn + answer
    assert prompt_tokens("--prompt-column", "name", "--chat") == len("user\nAnn") + 2 + answer


def test_max_tokens_is_clamped_to_the_context_and_counted(tmp_path: Path) -> None:
    """A max_tokens beyond the context ends there, and the summary counts it; a prompt beyond it is an error."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "x" * 40}, {"prompt": "x" * 64}, {"prompt": "x" * 65}])
    options = ("--max-model-len", 64, "--summary", tmp_path / "s.json", "--ignore-eos")
    clamped, full, beyond = run_tiny(source, tmp_path / "out.parquet", *options, code=3)
    assert (clamped["completion_tokens"], clamped["finish_reason"]) == (24, "length")
    assert "64" in full["error"]
    assert "65 tokens" in beyond["error"]
    assert json.loads((tmp_path / "s.json").read_text())["clamped_max_tokens"] == 1


def test_summary_and_last_line(tmp_path: Path) -> None:
    """The last line is the throughput as vLLM prints it; the summary's figures agree with the rows."""
    result = cbgen(
        *("run", SAMPLES / "questions.jsonl", "--model", "tiny-random", "--out", tmp_path / "out.parquet"),
        *("--max-tokens", 5, "--summary", tmp_path / "s.json"),
    )
    rows, summary = read_rows(tmp_path / "out.parquet"), json.loads((tmp_path / "s.json").read_text())
    line = result.stdout.splitlines()[-1]
    assert line == (
        f"Throughput: {summary['requests_per_second']:.2f} requests/s, {summary['total_tokens_per_second']:.2f} total "
        f"tokens/s, {summary['output_tokens_per_second']:.2f} output tokens/s"
    )
    assert summary["rows_total"] == summary["rows_ok"] == len(rows) == 40
    assert summary["output_tokens"] == sum(row["completion_tokens"] for row in rows)
    assert summary["prompt_tokens"] == summary["computed_prompt_tokens"] == sum(row["prompt_tokens"] for row in rows)
    assert summary["total_tokens_per_second"] == pytest.approx(
        (summary["prompt_tokens"] + summary["output_tokens"]) / summary["elapsed_s"]
    )
    for name in ("rows_failed", "prefix_hit_tokens", "offloads", "soft_resets", "recomputed_tokens"):
        assert summary[name] == 0
    assert summary["peak_memory_bytes"] > 0
    assert summary["versions"]["torch"]
    assert summary["config"]["engine"]["num_blocks"] > 0


def test_footer_records_the_job(tmp_path: Path) -> None:
    """The Parquet footer names model, resolved options, template hash, seed and versions."""
    run_tiny(SAMPLES / "chat.jsonl", tmp_path / "out.parquet", "--max-tokens", 2, "--seed", 7)
    footer = ParquetOutput(tmp_path / "out.parquet").read_footer()
    assert footer is not None
    assert footer["fingerprint"]["model"] == "tiny-random"
    assert footer["fingerprint"]["max_tokens"] == 2
    assert footer["fingerprint"]["seed"] == 7
    assert len(footer["fingerprint"]["chat_template_sha256"]) == 64
    assert {"cbgen", "torch", "transformers"} <= footer["versions"].keys()
    assert not (tmp_path / "out.parquet.parts").exists()


def test_a_job_with_an_outgrown_cache_finishes(tmp_path: Path) -> None:
    """A cache far too small for the batch changes no token, and the summary says what happened."""
    roomy = run_tiny(SAMPLES / "questions.jsonl", tmp_path / "roomy.parquet", "--max-tokens", 60)
    options = (
        "--max-tokens",
        60,
        "--num-blocks",
        40,
        "--page-size",
        8,
        "--safety-margin",
        0,
        "--summary",
        tmp_path / "s",
    )
    tight = run_tiny(SAMPLES / "questions.jsonl", tmp_path / "tight.parquet", *options)
    assert [row["completion"] for row in tight] == [row["completion"] for row in roomy]
    summary = json.loads((tmp_path / "s").read_text())
    assert summary["soft_resets"] == summary["offloads"] > 0
    assert summary["recomputed_tokens"] > 0


def test_empty_input(tmp_path: Path) -> None:
    """No rows in, no rows out, with the schema, and that is no failure."""
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "in.parquet")
    assert run_tiny(tmp_path / "in.parquet", tmp_path / "out.parquet") == []
    assert pq.read_schema(tmp_path / "out.parquet").names == ["prompt", *OUTPUT_COLUMNS]


def test_only_failed_rows(tmp_path: Path) -> None:
    """When every row fails that is told by an exit code of its own, and no weights are needed to find out."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": ""}, {"prompt": None}])
    rows = run_tiny(source, tmp_path / "out.parquet", code=5)
    assert [row["finish_reason"] for row in rows] == ["error", "error"]
    again = cbgen("run", source, "--model", "tiny-random", "--out", tmp_path / "out.parquet")
    assert again.exit_code == 5
    assert "is complete: 0 rows ok, 2 failed; --retry failed generates those again" in again.output.replace("\n", " ")


@pytest.mark.parametrize("num_samples", [1, 3])
def test_an_output_folder(tmp_path: Path, num_samples: int) -> None:
    """Shards of so many rows hold together what one file does, and a marker tells of the job."""
    options = ("--max-tokens", 4, "--n", num_samples, "--temperature", 1)
    run_tiny(SAMPLES / "questions.jsonl", tmp_path / "one.parquet", *options)
    source, out = SAMPLES / "questions.jsonl", tmp_path / "shards"
    run_tiny(source, out, *options, "--rows-per-shard", 10)
    shards = sorted(out.glob("part-*.parquet"))
    rows = 10 // num_samples * num_samples
    assert len(shards) == -(-40 * num_samples // rows)
    assert [pq.read_metadata(path).num_rows for path in shards[:-1]] == [rows] * (len(shards) - 1)
    one = without_timing(pq.read_table(tmp_path / "one.parquet"))
    assert without_timing(pq.read_table(shards)).equals(one)
    assert json.loads((out / "_job.json").read_text(encoding="utf-8"))["rows_ok"] == 40 * num_samples
    again = cbgen("run", source, "--model", "tiny-random", "--out", out, *options, "--rows-per-shard", 10)
    assert again.exit_code == 0
    assert f"is complete: {40 * num_samples} rows ok" in again.output.replace("\n", " ")


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("name", ["shards", "out.jsonl"])
@pytest.mark.parametrize("retry", [False, True], ids=["first run", "retry"])
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is POSIX")
def test_killed_while_the_output_is_recorded(tmp_path: Path, moment: str, name: str, retry: bool) -> None:
    """The same command finishes the job, also where a finished output is being replaced."""
    source, out = (
        write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": ""}, {"prompt": "b"}]),
        tmp_path / name,
    )
    arguments = ["run", source, "--model", "tiny-random", "--out", out, "--max-tokens", 2]
    if retry:
        assert cbgen(*arguments).exit_code == 3
        arguments[-1:] = [4, "--retry", "truncated"]
    command = [sys.executable, "-c", DIE_AT_THE_RECORD, moment, *map(str, arguments)]
    assert subprocess.run(command, check=False, capture_output=True).returncode == -signal.SIGKILL
    again = cbgen(*arguments)
    assert again.exit_code == 3, again.output
    assert [row["completion_tokens"] for row in read_rows(out)] == ([4, 0, 4] if retry else [2, 0, 2])
    assert not (tmp_path / f"{name}.parts").exists()


def test_two_jobs_in_one_process_are_alike(tmp_path: Path) -> None:
    """Nothing of a job is left over for the next one."""
    for name in ("first", "second"):
        run_tiny(SAMPLES / "questions.jsonl", tmp_path / f"{name}.parquet", "--max-tokens", 6, "--temperature", 0.9)
    first, second = (without_timing(pq.read_table(tmp_path / f"{name}.parquet")) for name in ("first", "second"))
    assert first.equals(second)


def test_output_of_cbgen_as_input(tmp_path: Path) -> None:
    """Columns that bear an output column's name are refused, unless a prefix tells them apart."""
    run_tiny(SAMPLES / "questions.jsonl", tmp_path / "first.parquet", "--max-tokens", 2)
    refused = cbgen("run", tmp_path / "first.parquet", "--model", "tiny-random", "--out", tmp_path / "second.parquet")
    assert refused.exit_code == 2
    assert "--output-prefix" in refused.output
    rows = run_tiny(
        tmp_path / "first.parquet", tmp_path / "second.parquet", "--max-tokens", 2, "--output-prefix", "new_"
    )
    assert rows[0]["new_completion"] == rows[0]["completion"]


def test_an_output_in_the_input_folder_is_not_input(tmp_path: Path) -> None:
    """A job on a folder or glob may write into it, and be run again."""
    folder = tmp_path / "folder"
    folder.mkdir()
    write_jsonl(folder / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    for source in (folder, folder / "*.*"):
        assert len(run_tiny(source, folder / "out.parquet", "--max-tokens", 2)) == 2


def test_a_deeply_nested_value_is_text(tmp_path: Path) -> None:
    """What Parquet's readers cannot take comes out as JSON text, whatever its depth."""
    for depth in (10, 100, 190):
        line = '{"prompt": "a", "x": ' + "[" * depth + "1" + "]" * depth + "}\n"
        (tmp_path / "in.jsonl").write_text(line)
        (row,) = run_tiny(tmp_path / "in.jsonl", tmp_path / f"{depth}.parquet", "--max-tokens", 1)
        assert isinstance(row["x"], list if depth == 10 else str)


def test_a_damaged_input_ends_in_one_line(tmp_path: Path) -> None:
    """A Parquet file with a broken page is told as what it is, with what was finished kept."""
    table = pa.table({"prompt": [f"{number:064d}" for number in range(5000)]})
    pq.write_table(table, tmp_path / "in.parquet", compression="zstd", row_group_size=1000, use_dictionary=False)
    content = bytearray((tmp_path / "in.parquet").read_bytes())
    content[len(content) // 2 : len(content) // 2 + 400] = b"\xff" * 400
    (tmp_path / "in.parquet").write_bytes(content)
    result = cbgen(
        "run", tmp_path / "in.parquet", "--model", "tiny-random", "--out", tmp_path / "o.parquet", "--max-tokens", 1
    )
    assert result.exit_code == 1
    assert "in.parquet: cannot be read to its end" in result.output
