"""`cbgen verify`: sound outputs of every kind pass, and each kind of damage is found and told."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import Result
from job_harness import SAMPLES, cbgen, read_rows, run_tiny, start_process, wait_for_parts, write_jsonl

from cbgen.data.outputs import file_hash

OPTIONS = ("--max-tokens", 5, "--temperature", 0.7, "--n", 2, "--limit", 17)
SHARD = ("--shard-index", 2, "--shard-count", 3)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an input of 20 rows and finished outputs over 17 of them, each kind whole and of one shard."""
    folder = tmp_path_factory.mktemp("job")
    source = shutil.copy(SAMPLES / "mixed.jsonl", folder / "in.jsonl")
    for name in ("whole.parquet", "whole.jsonl", "whole/", "shard.parquet", "shard.jsonl"):
        own = SHARD if name.startswith("shard") else ()
        run = ("run", source, "--model", "tiny-random", "--out", f"{folder}/{name}", *OPTIONS, *own)
        assert cbgen(*run, "--rows-per-shard", 10).exit_code == 3
    return folder


@pytest.fixture
def outputs(job: Path, tmp_path: Path) -> Path:
    """Copies of the outputs, whose input is still where it was."""
    return shutil.copytree(job, tmp_path / "job")


def assert_found(out: Path, *words: str) -> Result:
    """Verify ends with 1, and one of its problems has all the words."""
    result = cbgen("verify", out)
    assert result.exit_code == 1, result.output
    problems = [line for line in result.stdout.splitlines() if line.startswith("PROBLEM: ")]
    assert any(all(word in problem for word in words) for problem in problems), result.output
    told = json.loads(cbgen("verify", out, "--json").stdout)
    assert [f"PROBLEM: {problem}" for problem in told["problems"]] == problems
    return result


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    """Another table in the file, with the footer as it was."""
    table = pq.read_table(path)
    metadata = table.schema.metadata
    pq.write_table(change(table).replace_schema_metadata(metadata), path, write_page_checksum=True)


def flip(path: Path) -> None:
    """One bit, in the last byte of the first column's pages."""
    column = pq.read_metadata(path).row_group(0).column(0)
    content = bytearray(path.read_bytes())
    content[(column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size - 1] ^= 1
    path.write_bytes(content)


def record_again(path: Path, sidecar: Path) -> None:
    """Makes a sidecar tell of the file as it is now, so that only its rows can give the damage away."""
    footer = json.loads(sidecar.read_text())
    footer["files"][path.name] = [path.stat().st_size, file_hash(path)]
    sidecar.write_text(json.dumps(footer))


def taken(table: pa.Table, *rows: int) -> pa.Table:
    return table.take(list(rows))


@pytest.mark.parametrize("name", ["whole.parquet", "whole.jsonl", "whole", "shard.parquet", "shard.jsonl"])
def test_a_sound_output(job: Path, name: str) -> None:
    """Every check passes, against the input too, and the counts add up to the rows of the input."""
    result = cbgen("verify", job / name)
    assert result.exit_code == 0, result.output
    assert {line.split(":")[0] for line in result.stdout.splitlines()} == {"ok"}
    assert "ok: order: " in result.stdout
    told = json.loads(cbgen("verify", job / name, "--json").stdout)
    rows = [
        row for path in ((job / name).glob("*.parquet") if name == "whole" else [job / name]) for row in read_rows(path)
    ]
    failed = sum(row["error"] is not None for row in rows)
    counts = {"in": 40, "ok": len(rows) - failed, "failed": failed, "skipped": 40 - len(rows), "pending": 0}
    assert told == {"output": str(job / name), "state": "complete", **counts, "problems": []}


def with_column(table: pa.Table, name: str, values: object) -> pa.Table:
    """Another column in the place of the one of that name, with its type unless it has its own."""
    place = table.schema.get_field_index(name)
    if isinstance(values, list):
        return table.set_column(place, table.schema.field(place), pa.array(values))
    return table.set_column(place, name, values)


PARQUET_DAMAGE: dict[str, tuple[Callable[[pa.Table], pa.Table], tuple[str, ...]]] = {
    "removed": (lambda t: taken(t, *range(6), *range(8, 34)), ("order", "row 7:", "in.jsonl, line 4")),
    "removed at the end": (lambda t: t.slice(0, 32), ("order", "row 33:")),
    "one sample removed": (lambda t: taken(t, *range(7), *range(8, 34)), ("rows", "row 8:", "sample_index")),
    "doubled": (lambda t: taken(t, *range(8), 6, 7, *range(8, 34)), ("order", "row 9:")),
    "doubled at the end": (lambda t: taken(t, *range(34), 32, 33), ("order", "row 35:")),
    "swapped": (lambda t: taken(t, 2, 3, 0, 1, *range(4, 34)), ("order", "row 1:")),
    "samples swapped": (lambda t: taken(t, 1, 0, *range(2, 34)), ("rows", "row 1:", "sample_index")),
    "replaced": (lambda t: taken(t, 0, 1, 0, 1, *range(4, 34)), ("order", "row 3:")),
    "a type": (lambda t: with_column(t, "ttft_s", t["ttft_s"].cast("float32")), ("schema", "ttft_s")),
    "an input's type": (lambda t: with_column(t, "id", t["id"].cast("large_string")), ("schema", "'id'")),
    "a column gone": (lambda t: t.drop_columns("ttft_s"), ("schema", "the columns are")),
    "an input's value": (
        lambda t: with_column(t, "id", ["x", *t["id"].to_pylist()[1:]]),
        ("order", "row 1:", "'id'", "in.jsonl, line 1"),
    ),
    "a reason": (lambda t: with_column(t, "error", ["e"] * 34), ("rows", "row 1:", "finish_reason")),
}


@pytest.mark.parametrize(("change", "words"), PARQUET_DAMAGE.values(), ids=PARQUET_DAMAGE)
def test_damage_of_a_parquet_output(
    outputs: Path, change: Callable[[pa.Table], pa.Table], words: tuple[str, ...]
) -> None:
    """Rows removed, doubled or swapped, another type or value: each is found, at its place."""
    rewrite(outputs / "whole.parquet", change)
    assert_found(outputs / "whole.parquet", *words)


def test_a_byte_of_a_page(outputs: Path) -> None:
    """One bit in a page is found by its checksum, in a file and in a folder, and by the hash of the folder's file."""
    flip(outputs / "whole.parquet")
    assert_found(outputs / "whole.parquet", "content", "checksum")
    (first, *_) = sorted((outputs / "whole").glob("*.parquet"))
    flip(first)
    result = assert_found(outputs / "whole", "content", first.name)
    assert f"PROBLEM: files: {first} is not what was written" in result.output


def test_wrong_counts_in_the_footer(outputs: Path) -> None:
    """Each count that the footer records is held against the rows."""
    for name in ("rows_total", "rows_ok", "rows_failed"):
        path = Path(shutil.copy(outputs / "whole.parquet", outputs / f"{name}.parquet"))
        table = pq.read_table(path)
        footer = json.loads(table.schema.metadata[b"cbgen"])
        footer[name] += 1
        metadata = {**table.schema.metadata, b"cbgen": json.dumps(footer).encode()}
        pq.write_table(table.replace_schema_metadata(metadata), path, write_page_checksum=True)
        assert_found(path, "counts", name)


def test_a_folder_with_a_file_missing_or_too_many(outputs: Path) -> None:
    """A shard file that is gone is named; so is one that is none of the job's."""
    first, second, *_ = sorted((outputs / "whole").glob("*.parquet"))
    shutil.copy(first, outputs / "whole" / "part-00009-of-00010.parquet")
    assert_found(outputs / "whole", "files", "part-00009-of-00010.parquet", "none of the job's")
    (outputs / "whole" / "part-00009-of-00010.parquet").unlink()
    second.unlink()
    assert_found(outputs / "whole", "files", second.name, "missing")
    assert_found(outputs / "whole", "counts", "rows_total")


JSONL_DAMAGE: dict[str, tuple[Callable[[list[Any]], list[Any]], tuple[str, ...]]] = {
    "edited": (lambda rows: [{**rows[0], "id": "x"}, *rows[1:]], ("order", "row 1:", "line 1")),
    "removed": (lambda rows: rows[:6] + rows[8:], ("order", "row 7")),
    "doubled": (lambda rows: rows[:6] + rows[4:], ("order", "row 7")),
    "swapped": (lambda rows: rows[2:4] + rows[:2] + rows[4:], ("order", "row 1:")),
    "a type": (lambda rows: [{**rows[0], "prompt_tokens": "9"}, *rows[1:]], ("schema", "row 1:")),
    "a null": (lambda rows: [{**rows[0], "finish_reason": None}, *rows[1:]], ("schema", "row 1:")),
    "too many": (lambda rows: rows + rows[-2:], ("order", "row 35")),
}


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(("change", "words"), JSONL_DAMAGE.values(), ids=JSONL_DAMAGE)
def test_damage_of_a_jsonl_output(
    outputs: Path, change: Callable[[list[Any]], list[Any]], words: tuple[str, ...], recorded: bool
) -> None:
    """A line that was edited, removed, doubled or moved is found by the hash, and without it by what it says."""
    path = outputs / "whole.jsonl"
    write_jsonl(path, change(read_rows(path)))
    if recorded:
        record_again(path, path.with_name("whole.jsonl.job.json"))
    else:
        assert_found(path, "files", "whole.jsonl")
    assert_found(path, *words)


def test_lines_that_are_no_json(outputs: Path) -> None:
    """A torn line is named; a sidecar that is gone or broken leaves nothing to verify against."""
    path, sidecar = outputs / "whole.jsonl", outputs / "whole.jsonl.job.json"
    path.write_text(path.read_text()[:-20])
    assert_found(path, "content", "line 34")
    sidecar.write_text("{")
    assert_found(path, "record of the job", sidecar.name)
    sidecar.unlink()
    assert_found(path, "record of the job", sidecar.name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: taken(t, 2, 3, 0, 1, *range(4, len(t))), ("rows", "row 3:", "row_index")),
        (lambda t: taken(t, 0, 1, 0, 1, *range(2, len(t))), ("rows", "row 3:", "row_index")),
        (lambda t: t.slice(2), ("counts", "rows_total")),
    ],
    ids=["swapped", "doubled", "removed"],
)
def test_damage_of_a_shard(outputs: Path, change: Callable[[pa.Table], pa.Table], words: tuple[str, ...]) -> None:
    """A shard's rows must ascend by their place in the input, and be as many as were dealt to it."""
    rewrite(outputs / "shard.parquet", change)
    assert_found(outputs / "shard.parquet", *words)


def test_a_shard_whose_row_says_another_place(outputs: Path) -> None:
    """row_index is held against the input: a row that claims the place of another is found."""
    table = pq.read_table(outputs / "shard.parquet")
    indices = table["row_index"].to_pylist()
    free = next(place for place in range(indices[-1]) if place not in indices)
    near = max(place for place in indices if place < free) if indices[0] < free else indices[0]
    moved = pa.array([free if place == near else place for place in indices])
    place = table.schema.get_field_index("row_index")
    rewrite(outputs / "shard.parquet", lambda t: t.set_column(place, t.schema.field(place), moved))
    assert_found(outputs / "shard.parquet", "order", "is not what the input has")


def test_without_the_input(tmp_path: Path) -> None:
    """An input that was changed, is gone, or came through the standard input: told, and all else is still checked."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    shutil.copy(SAMPLES / "chat.jsonl", source)
    run_tiny(source, out, "--max-tokens", 2)
    assert "ok: order" in cbgen("verify", out).output
    source.write_text(source.read_text() + "\n")
    for change, reason in ((lambda: None, "was changed"), (source.unlink, "cannot be read")):
        change()
        result = cbgen("verify", out)
        assert result.exit_code == 0, result.output
        assert f"not checked: order: the input cannot be compared: {source}" in result.output
        assert reason in result.output
    rewrite(out, lambda t: t.slice(1))
    assert_found(out, "counts", "rows_total")
    piped = ["sh", "-c", f'"$@" < {SAMPLES / "chat.jsonl"}', "sh"]
    process = start_process(
        "run", "-", "--model", "tiny-random", "--max-tokens", 2, "--out", out.with_stem("p"), under=piped
    )
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    result = cbgen("verify", out.with_stem("p"))
    assert result.exit_code == 0
    assert "the standard input is no file" in result.output


def test_parts_of_an_unfinished_job(tmp_path: Path) -> None:
    """Sound parts: 75, with what is pending. A part that is damaged, torn, there twice, or says otherwise: 1."""
    rows = read_rows(SAMPLES / "questions.jsonl")
    source = write_jsonl(tmp_path / "in.jsonl", [row | {"copy": n} for n in range(2) for row in rows])
    out, parts = tmp_path / "out.parquet", tmp_path / "out.parquet.parts"
    options = ("--model", "tiny-random", "--max-tokens", 24, "--temperature", 0.8)
    process = start_process("run", source, "--out", out, *options, "--max-requests-per-batch", 4, "--part-rows", 5)
    wait_for_parts(process, parts, 3)
    process.kill()
    process.communicate()
    told = cbgen("verify", out, "--json")
    assert told.exit_code == 75, told.output
    counts = json.loads(told.stdout)
    assert counts["ok"] + counts["pending"] == counts["in"] == 80
    assert counts["pending"] > 0
    first, second, *_ = sorted(parts.glob("part-*"))
    shutil.copy(first, parts / "part-00000099.parquet")
    doubled = pq.read_metadata(first).num_rows  # 5, or more where the writer was late
    assert_found(out, "parts", f"part-00000099.parquet: {doubled} results are there twice")
    (parts / "part-00000099.parquet").unlink()
    content = first.read_bytes()
    flip(first)
    assert_found(out, "parts", first.name, "torn")
    first.write_bytes(content)
    rewrite(second, lambda table: table.slice(1))
    assert_found(out, "parts", second.name, "says otherwise")


def test_an_openai_batch(tmp_path: Path) -> None:
    """Both files are read and held against the requests; a line that was moved or edited is found."""
    body = {"prompt": "hello", "max_tokens": 3}
    lines = [{"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions", "body": body} for n in range(6)]
    lines[2]["body"] = {"prompt": ""}
    source, out = write_jsonl(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    run_tiny(source, out, "--format", "openai-batch", code=3)
    sound = cbgen("verify", out)
    assert sound.exit_code == 0, sound.output
    assert "6 in = 5 ok + 1 failed" in sound.output
    assert "ok: order: 6 of the input's 6 requests" in sound.output
    assert cbgen("status", out, "--preview", 6).output.count("error: ") == 1
    rows = read_rows(out)
    for damaged, words in (
        ([rows[1], rows[0], *rows[2:]], ("order", "request 1")),
        (rows[:-1], ("order", "request 6")),
        ([*rows, rows[-1]], ("order", "more lines")),
        ([{**rows[0], "response": None}, *rows[1:]], ("content", "line 1")),
    ):
        write_jsonl(out, damaged)
        record_again(out, tmp_path / "out.jsonl.job.json")
        assert_found(out, *words)


def test_what_never_was_is_a_usage_error(tmp_path: Path) -> None:
    """An output that no job has begun is told in one line; a file that is none of cbgen's is a problem."""
    assert cbgen("verify", tmp_path / "none.parquet").exit_code == 2
    (tmp_path / "other.parquet").write_bytes(b"PAR1 of somebody else")
    assert_found(tmp_path / "other.parquet", "record of the job", "other.parquet")
