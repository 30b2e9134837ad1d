"""`cbgen merge`: the outputs of shards become what the job writes without shards, or are refused by name."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_harness import SAMPLES, TIMING_COLUMNS, cbgen, read_rows, run_tiny, without_timing

SOURCE = SAMPLES / "mixed.jsonl"
OPTIONS = ("--max-tokens", 6, "--temperature", 0.7, "--limit", 17)
NAMES = {"parquet": "{}.parquet", "jsonl": "{}.jsonl", "folder": "{}/"}


def run_shards(folder: Path, name: str, *options: object, count: int = 3) -> list[str]:
    """The outputs of all shards of one job over SOURCE."""
    folder.mkdir(exist_ok=True)
    outs = [str(folder) + "/" + name.format(f"shard-{index}") for index in range(count)]
    for index, out in enumerate(outs):
        shard = ("--shard-index", index, "--shard-count", count)
        result = cbgen("run", SOURCE, "--model", "tiny-random", "--out", out, *OPTIONS, *shard, *options)
        assert result.exit_code in (0, 3, 5), result.output
    return outs


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """By kind of output: the three shards of a job, made once, and not to be changed."""
    made: dict[str, list[str]] = {}

    def of(kind: str) -> list[str]:
        if kind not in made:
            made[kind] = run_shards(tmp_path_factory.mktemp(kind), NAMES[kind])
        return made[kind]

    return of


def content_of(path: Path) -> Any:
    """All but the timing, which two runs do not share."""
    if path.suffix == ".jsonl":
        return [{name: row[name] for name in row if name not in TIMING_COLUMNS} for row in read_rows(path)]
    return without_timing(pq.read_table(path))


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("kind", NAMES)
def test_merged_shards_equal_the_run_without_shards(tmp_path: Path, kind: str, samples: int) -> None:
    """All rows in order, the columns of shards gone; `cbgen run` and `cbgen verify` take it for their own."""
    options = ("--n", samples, "--rows-per-shard", 5)
    outs = run_shards(tmp_path, NAMES[kind], *options)
    whole, merged = (f"{tmp_path}/{NAMES[kind].format(name)}" for name in ("whole", "merged"))
    run = ("run", SOURCE, "--model", "tiny-random", *OPTIONS, *options, "--out")
    assert cbgen(*run, whole).exit_code == 3
    result = cbgen("merge", *reversed(outs), "--out", merged, "--rows-per-shard", 5)
    assert result.exit_code == 3, result.output
    assert "3 shards are merged" in result.output
    if kind == "jsonl":
        assert content_of(Path(merged)) == content_of(Path(whole))
    else:
        assert content_of(Path(merged)).equals(content_of(Path(whole)))
    if kind == "folder":
        assert [path.name for path in sorted(Path(merged).iterdir())] == [
            path.name for path in sorted(Path(whole).iterdir())
        ]
    assert cbgen("verify", merged).exit_code == 0
    assert " is complete: " in cbgen(*run, merged).output.replace("\n", " ")


def test_many_rows_in_many_batches(tmp_path: Path) -> None:
    """Input of several files and batches, with types that JSONL does not have, is merged as it was."""
    count = 3000
    table = pa.table(
        {
            "prompt": pa.array([f"row {number}" for number in range(count)]),
            "label": pa.array([f"l{number % 3}" for number in range(count)]).dictionary_encode(),
            "nested": pa.array(
                [[{"a": number % 100}] for number in range(count)], pa.list_(pa.struct([("a", pa.int8())]))
            ),
            "score": pa.array([float("nan") if number % 7 == 0 else number / 3 for number in range(count)]),
        }
    )
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=700)
    options = ("--max-tokens", 1)
    outs = [tmp_path / f"{index}.parquet" for index in range(2)]
    for index, out in enumerate(outs):
        run_tiny(tmp_path / "in.parquet", out, *options, "--shard-index", index, "--shard-count", 2)
    assert cbgen("merge", *outs, "--out", tmp_path / "merged.parquet").exit_code == 0
    merged = pq.read_table(tmp_path / "merged.parquet")
    columns = table.drop_columns("score").schema.names
    assert merged.select(columns).replace_schema_metadata(None).equals(table.select(columns))
    for out in (*outs, tmp_path / "merged.parquet"):
        verified = cbgen("verify", out)
        assert verified.exit_code == 0, verified.output
        assert "each at its place and once" in verified.output


def test_merging_again_replaces_the_same_and_nothing_else(tmp_path: Path, shards: Callable[[str], list[str]]) -> None:
    """The output of an earlier merge is written anew; a shard, another job's or a foreign file is not."""
    outs, merged = shards("parquet"), tmp_path / "merged.parquet"
    assert cbgen("merge", *outs, "--out", merged).exit_code == 3
    assert cbgen("merge", *outs, "--out", merged).exit_code == 3
    onto_a_shard = cbgen("merge", *outs, "--out", outs[0])
    assert onto_a_shard.exit_code == 4
    assert "is not a merge of these shards" in onto_a_shard.output
    run_tiny(SOURCE, tmp_path / "other.parquet", *OPTIONS, "--seed", 5, code=3)
    assert cbgen("merge", *outs, "--out", tmp_path / "other.parquet").exit_code == 4
    (tmp_path / "foreign.parquet").write_bytes(b"anything")
    assert cbgen("merge", *outs, "--out", tmp_path / "foreign.parquet").exit_code == 4
    assert (tmp_path / "foreign.parquet").read_bytes() == b"anything"


def assert_refused(outs: list[str], merged: Path, *words: str, code: int = 2) -> None:
    result = cbgen("merge", *outs, "--out", merged)
    assert result.exit_code == code, result.output
    assert all(word in result.output for word in words), result.output
    assert len(result.output.strip().splitlines()) == 1
    assert not merged.exists()


def test_shards_that_do_not_make_up_a_job(tmp_path: Path, shards: Callable[[str], list[str]]) -> None:
    """A missing, doubled, unfinished or absent shard, and what is none, are named in one line."""
    outs, merged = shards("parquet"), tmp_path / "merged.parquet"
    assert_refused(outs[:2], merged, "missing: 2")
    assert_refused([outs[0], outs[0], outs[1]], merged, "shard 0 is there twice", "missing: 2")
    assert_refused([*outs[:2], f"{tmp_path}/none.parquet"], merged, "no such output", "none.parquet")
    run_tiny(SOURCE, tmp_path / "whole.parquet", *OPTIONS, code=3)
    assert_refused([*outs[:2], f"{tmp_path}/whole.parquet"], merged, "whole.parquet", "whole job")
    begun = shutil.copy(outs[2], tmp_path / "begun.parquet")
    (tmp_path / "begun.parquet.parts").mkdir()
    (tmp_path / "begun.parquet.parts" / "manifest.json").write_text("{}")
    assert_refused([*outs[:2], begun], merged, "not the finished output of a job", "begun.parquet")


def test_shards_of_other_jobs(tmp_path: Path, shards: Callable[[str], list[str]]) -> None:
    """Other options, another input, another count or other columns: the shard is named, and what differs."""
    outs, merged = shards("parquet"), tmp_path / "merged.parquet"
    own_copy = shutil.copy(SOURCE, tmp_path / "in.jsonl")
    others = {
        "seed": (SOURCE, 3, "--seed", 9),
        "the input files": (own_copy, 3),
        "--shard-count": (SOURCE, 4),
        "output columns": (SOURCE, 3, "--output-token-ids"),
    }
    for number, (word, (source, count, *options)) in enumerate(others.items()):
        out = tmp_path / f"other-{number}.parquet"
        shard = ("--shard-index", 2, "--shard-count", count)
        cbgen("run", source, "--model", "tiny-random", "--out", out, *OPTIONS, *shard, *options)
        assert_refused([*outs[:2], str(out)], merged, out.name, word)


def test_formats_are_not_changed(tmp_path: Path, shards: Callable[[str], list[str]]) -> None:
    """Shards in JSONL become JSONL; a missing or unknown --out is a usage error."""
    assert_refused(shards("jsonl"), tmp_path / "merged.parquet", "another format")
    assert_refused(shards("folder"), tmp_path / "merged.jsonl", "another format")
    assert_refused(shards("parquet"), tmp_path / "merged.csv", "the format is told by the extension")
    assert cbgen("merge", *shards("parquet")).exit_code == 2
    mixed = [shards("parquet")[0], *shards("folder")[1:]]
    assert cbgen("merge", *mixed, "--out", tmp_path / "merged.parquet").exit_code == 3


def test_a_damaged_shard_is_not_merged(tmp_path: Path, shards: Callable[[str], list[str]]) -> None:
    """A row that is doubled, a line that was edited, a page that was hurt: one line, and nothing is written."""
    outs = [shutil.copy(path, tmp_path) for path in shards("parquet")]
    table = pq.read_table(outs[1])
    pq.write_table(pa.concat_tables([table.slice(0, 1), table.slice(0, 1), table.slice(2)]), outs[1])
    assert_refused(outs, tmp_path / "merged.parquet", "not there once", code=1)
    column = pq.read_metadata(outs[2]).row_group(0).column(0)
    damaged = bytearray(Path(outs[2]).read_bytes())
    damaged[(column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size - 1] ^= 1
    shutil.copy(shards("parquet")[1], outs[1])
    Path(outs[2]).write_bytes(damaged)
    assert_refused(outs, tmp_path / "merged.parquet", "shard-2.parquet", "checksum", code=1)
    lines = [shutil.copy(path, tmp_path) for path in shards("jsonl")]
    for path in shards("jsonl"):
        shutil.copy(path + ".job.json", tmp_path)
    Path(lines[0]).write_text(Path(lines[0]).read_text().replace('"row_key": "', '"row_kez": "', 1))
    assert_refused(lines, tmp_path / "merged.jsonl", "shard-0.jsonl", "changed after it was written", code=1)
