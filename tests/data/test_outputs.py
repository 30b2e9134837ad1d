"""What a finished job leaves: whole files that tell of their job, and nothing that could be taken for one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from parts_harness import (
    FOOTER,
    assert_every_page_is_checked,
    at_once,
    file_rows,
    keys,
    ok,
    parquet_input,
    publish_parts,
    publish_shuffled,
    write_output,
)

import cbgen.data.outputs
from cbgen.data.assembly import Results
from cbgen.data.manifest import Manifest, PartsFolder
from cbgen.data.outputs import FolderOutput, JsonlOutput, ParquetOutput, file_hash, open_output
from cbgen.data.rows import OutputLayout
from cbgen.data.selection import Selection
from cbgen.errors import InputError, OutputError, ResumeRefusedError

KINDS = ["out.parquet", "out.jsonl", "out"]
# Of each kind, what tells of the job beside the rows.
RECORDS = {"out.parquet": None, "out.jsonl": "out.jsonl.job.json", "out": "out/_job.json"}
# Dies after so many shards, as by kill -9.
DIE_BETWEEN_SHARDS = """
import os, pathlib, signal, sys
sys.path.insert(0, sys.argv[2])
from parts_harness import parquet_input, write_output
from cbgen.data import outputs
from cbgen.data.manifest import PartsFolder
publish, left = outputs.publish, [2]
def publish_or_die(path, write):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    publish(path, write)
outputs.publish = publish_or_die
output = pathlib.Path(sys.argv[1])
write_output(PartsFolder(output), parquet_input(output.parent, {"x": range(10)}), output.name, rows_per_shard=3)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[PartsFolder]:
    """The parts folder of a job; outputs of any name may be assembled from it."""
    folder = PartsFolder(tmp_path / "out.parquet")
    folder.open(Manifest({}), "if-possible")
    yield folder
    folder.close()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def shard_names(count: int) -> list[str]:
    return [f"part-{number:05}-of-{count:05}.parquet" for number in range(count)]


def completions(folder: Path) -> list[list[str]]:
    """Of each shard."""
    return [pq.read_table(path)["completion"].to_pylist() for path in sorted(folder.glob("*.parquet"))]


def test_the_name_tells_the_kind(tmp_path: Path) -> None:
    """Parquet, JSONL, or a folder where one is asked for."""
    kinds = [(name, open_output(tmp_path / name, name == "out", 10)) for name in KINDS]
    assert [type(output) for _, output in kinds] == [ParquetOutput, JsonlOutput, FolderOutput]
    assert all(output.path.name == name and not output.exists for name, output in kinds)


@pytest.mark.parametrize("name", KINDS)
def test_the_job_is_recorded_with_the_output(folder: PartsFolder, name: str) -> None:
    """In the Parquet footer, or in a file beside the JSONL output or the shards, and read back as it was; no other file
    is left."""
    publish_shuffled(folder, 3)
    output = write_output(folder, parquet_input(folder.path.parent, {"x": [0, 1, 2]}), name)
    footer = output.read_footer()
    assert footer is not None and FOOTER.items() <= footer.items()
    output.refuse_foreign()
    record = RECORDS[name]
    expected = {"in.parquet", folder.path.name, name} | ({record} if record and "/" not in record else set())
    assert names(folder.path.parent) == expected
    assert not name.endswith("out") or names(output.path) == {"_job.json", *shard_names(1)}


def test_each_shard_tells_of_the_job_by_itself(folder: PartsFolder) -> None:
    """In its Parquet footer, beside what the input's said; so that one that was moved away is still told."""
    publish_shuffled(folder, 3)
    columns = pa.table({"x": [0, 1, 2]}).replace_schema_metadata({"owner": "somebody"})
    output = write_output(folder, parquet_input(folder.path.parent, columns), "out", rows_per_shard=2)
    for path in output.files:
        metadata = pq.read_schema(path).metadata
        assert (json.loads(metadata[b"cbgen"]), metadata[b"owner"]) == (FOOTER, b"somebody")


@pytest.mark.parametrize("name", ["out.jsonl", "out"])
def test_the_record_tells_size_and_hash_of_every_file(folder: PartsFolder, name: str) -> None:
    """By which damage is found later."""
    publish_shuffled(folder, 7)
    output = write_output(folder, parquet_input(folder.path.parent, {"x": range(7)}), name, rows_per_shard=3)
    record = RECORDS[name]
    assert record is not None
    told = json.loads((folder.path.parent / record).read_text(encoding="utf-8"))["files"]
    assert told == {path.name: [path.stat().st_size, file_hash(path)] for path in output.files}
    assert len({value[1] for value in told.values()}) == len(told) == (3 if name == "out" else 1)


@pytest.mark.parametrize("name", KINDS)
def test_an_input_without_rows_gives_an_output_without_rows(folder: PartsFolder, name: str) -> None:
    """It is finished, and of the right columns."""
    output = write_output(folder, parquet_input(folder.path.parent, {"x": pa.array([], pa.string())}), name)
    assert file_rows(output.path) == []
    assert output.read_footer() is not None
    if name != "out.jsonl":
        assert pq.read_schema(output.files[0]).names == ["x", *OutputLayout().names]


def test_row_groups_are_of_a_sane_size(folder: PartsFolder) -> None:
    """Not those of the input, which may be tiny, and no larger than 131,072 rows."""
    publish_parts(folder, [ok(index) for index in range(1000)])
    source = parquet_input(folder.path.parent, {"x": range(1000)}, row_group_size=10)
    metadata = pq.read_metadata(write_output(folder, source).path)
    assert metadata.num_row_groups == 1
    schema, count = pa.schema([("x", pa.int32())]), 2 * 131_072 + 5
    path = folder.path.parent / "large.parquet"
    tables = (pa.table({"x": range(first, min(first + 1000, count))}, schema=schema) for first in range(0, count, 1000))
    cbgen.data.outputs.write_parquet(path, schema, tables)
    metadata = pq.read_metadata(path)
    sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    assert sum(sizes) == count
    assert max(sizes) == 131_072
    assert pq.read_table(path)["x"].to_pylist() == list(range(count))


def test_row_groups_are_bounded_by_bytes(folder: PartsFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows are long there are fewer of them in a group."""
    monkeypatch.setattr(cbgen.data.outputs, "ROW_GROUP_BYTES", 1 << 20)
    publish_parts(folder, [ok(index, text="x" * 4096) for index in range(2000)])
    source = parquet_input(folder.path.parent, {"x": range(2000)})
    metadata = pq.read_metadata(write_output(folder, source).path)
    # A batch of 1,024 rows of the input is not divided.
    assert [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)] == [1024, 976]


@pytest.mark.parametrize("name", ["out.parquet", "out"])
def test_every_page_has_a_checksum(folder: PartsFolder, name: str) -> None:
    """Bytes that change on the disk are told from those that were written."""
    publish_shuffled(folder, 9)
    source = parquet_input(folder.path.parent, {"x": [str(row) * 20 for row in range(9)]})
    for path in write_output(folder, source, name, rows_per_shard=5).files:
        assert_every_page_is_checked(path)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def _shard(folder: Path) -> Path:
    return folder / shard_names(2)[0]


NOT_FINISHED: dict[str, tuple[str, Callable[[Path], object]]] = {
    "missing": ("out.parquet", Path.unlink),
    "torn": ("out.parquet", _truncate),
    "empty": ("out.parquet", lambda path: path.write_bytes(b"")),
    "foreign text": ("out.parquet", lambda path: path.write_text("not Parquet at all")),
    "foreign Parquet": ("out.parquet", lambda path: pq.write_table(pa.table({"x": [1]}), path)),
    "folder": ("out.parquet", lambda path: (path.unlink(), path.mkdir())),
    "missing lines": ("out.jsonl", Path.unlink),
    "torn lines": ("out.jsonl", _truncate),
    "foreign lines": ("out.jsonl", lambda path: path.write_text('{"x": 1}\n')),
    "no sidecar": ("out.jsonl", lambda path: path.with_name(RECORDS["out.jsonl"]).unlink()),
    "torn sidecar": ("out.jsonl", lambda path: _truncate(path.with_name(RECORDS["out.jsonl"]))),
    "foreign sidecar": ("out.jsonl", lambda path: path.with_name(RECORDS["out.jsonl"]).write_bytes(b"\xff")),
    "no marker": ("out", lambda path: (path / "_job.json").unlink()),
    "torn marker": ("out", lambda path: _truncate(path / "_job.json")),
    "foreign marker": ("out", lambda path: (path / "_job.json").write_text("[]")),
    "missing shard": ("out", lambda path: _shard(path).unlink()),
    "torn shard": ("out", lambda path: _truncate(_shard(path))),
    "longer shard": ("out", lambda path: _shard(path).write_bytes(_shard(path).read_bytes() + b"x")),
}


@pytest.mark.parametrize(("name", "spoil"), NOT_FINISHED.values(), ids=NOT_FINISHED)
def test_what_cbgen_did_not_finish_has_no_footer(
    folder: PartsFolder, name: str, spoil: Callable[[Path], object]
) -> None:
    """What is missing, torn or foreign is not taken as done, even where a finished output was before."""
    publish_shuffled(folder, 3)
    output = write_output(folder, parquet_input(folder.path.parent, {"x": [0, 1, 2]}), name, rows_per_shard=2)
    assert output.read_footer() is not None
    spoil(output.path)
    assert output.read_footer() is None
    if output.exists and not (name == "out" and not (output.path / "_job.json").exists()):
        with pytest.raises(ResumeRefusedError, match="move it") as caught:
            output.refuse_foreign()
        assert str(output.path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_an_input_changed_before_assembly_publishes_nothing(folder: PartsFolder) -> None:
    """The parts' keys are those of the input that was read; another input is not put beside them."""
    publish_shuffled(folder, 2)
    source = parquet_input(folder.path.parent, {"x": [0, 1]})
    parquet_input(folder.path.parent, {"x": [0, 1, 2]})
    for name in KINDS:
        with pytest.raises(InputError, match=r"in\.parquet"):
            write_output(folder, source, name)
    (folder.path.parent / "out").rmdir()  # empty, and so no output
    assert names(folder.path.parent) == {"in.parquet", folder.path.name}


def test_an_output_that_lacks_rows_is_not_published(folder: PartsFolder) -> None:
    """Nothing gets the name of the output."""
    publish_shuffled(folder, 2)
    source = parquet_input(folder.path.parent, {"x": [0, 1, 2]})
    output, results = open_output(folder.path.with_name("out.jsonl"), False, 10), Results(folder, keys(2), 1)
    with pytest.raises(OutputError, match="fewer results than rows"):
        output.write(Selection(source), results, OutputLayout(), FOOTER, at_once())
    assert names(folder.path.parent) == {"in.parquet", folder.path.name}


@pytest.mark.parametrize(
    ("rows_per_shard", "num_samples", "sizes"),
    [
        (4, 1, [4, 4, 2]),
        (5, 1, [5, 5]),
        (10, 1, [10]),
        (100, 1, [10]),
        (1, 1, [1] * 10),
        (5, 2, [4, 4, 4, 4, 4]),
        (4, 3, [3] * 10),
        (2, 3, [3] * 10),
        (14, 2, [14, 6]),
    ],
)
def test_a_folder_has_shards_of_so_many_rows(
    folder: PartsFolder, rows_per_shard: int, num_samples: int, sizes: list[int]
) -> None:
    """In order and numbered; the samples of a row are never parted, not even where a shard could hold fewer."""
    publish_shuffled(folder, 10, num_samples)
    source = parquet_input(folder.path.parent, {"x": range(10)}, row_group_size=3)
    output = write_output(folder, source, "out", rows_per_shard=rows_per_shard, num_samples=num_samples)
    assert [path.name for path in output.files] == shard_names(len(sizes))
    shards = completions(output.path)
    assert list(map(len, shards)) == sizes
    expected = [f"{index}.{sample}" for index in range(10) for sample in range(num_samples)]
    assert [text for shard in shards for text in shard] == expected


def test_a_folder_that_is_written_again_has_no_stale_shards(folder: PartsFolder) -> None:
    """Those of an earlier job with more or fewer of them are gone, and all that is told is of the new one."""
    publish_shuffled(folder, 10)
    source = parquet_input(folder.path.parent, {"x": range(10)})
    for rows_per_shard in (2, 5, 3):
        output = write_output(folder, source, "out", rows_per_shard=rows_per_shard)
        count = -(-10 // rows_per_shard)
        assert names(output.path) == {"_job.json", *shard_names(count)}
        assert [row["completion"] for row in file_rows(output.path)] == [f"{index}.0" for index in range(10)]
        assert output.read_footer() is not None


def test_the_marker_is_written_last(folder: PartsFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """And an old one is gone before the first shard is replaced: shards of two jobs never stand under one marker."""
    publish_shuffled(folder, 10)
    source = parquet_input(folder.path.parent, {"x": range(10)})
    output = write_output(folder, source, "out", rows_per_shard=4)
    renamed, replace = [], os.replace

    def recorded(old: Path, new: Path) -> None:
        renamed.append((new.name, (output.path / "_job.json").exists()))
        replace(old, new)

    monkeypatch.setattr(os, "replace", recorded)
    write_output(folder, source, "out", rows_per_shard=4)
    assert renamed == [(name, False) for name in [*shard_names(3), "_job.json"]]


@pytest.mark.parametrize("stranger", ["notes.txt", "part-0.parquet", "data.parquet", "sub"])
def test_a_folder_with_something_else_in_it_is_refused(folder: PartsFolder, stranger: str) -> None:
    """It is named, and stays."""
    output = open_output(folder.path.parent / "out", True, 10)
    (output.path / stranger).mkdir(parents=True)
    assert output.exists
    with pytest.raises(ResumeRefusedError, match=stranger) as caught:
        output.refuse_foreign()
    assert "\n" not in str(caught.value)
    publish_shuffled(folder, 2)
    (output.path / stranger).rmdir()
    write_output(folder, parquet_input(folder.path.parent, {"x": range(2)}), "out")
    output.refuse_foreign()
    (output.path / stranger).mkdir()
    with pytest.raises(ResumeRefusedError, match=stranger):
        output.refuse_foreign()


def test_an_empty_folder_is_no_output(tmp_path: Path) -> None:
    """Somebody made it for the job."""
    output = open_output(tmp_path, True, 10)
    assert not output.exists
    output.refuse_foreign()
    assert (output.read_footer(), output.files) == (None, [])


def test_a_file_where_a_folder_should_be_is_refused(tmp_path: Path) -> None:
    """It is somebody's."""
    (tmp_path / "out").write_text("precious")
    with pytest.raises(ResumeRefusedError, match="not a finished output"):
        open_output(tmp_path / "out", True, 10).refuse_foreign()


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is POSIX")
def test_killed_between_shards(tmp_path: Path) -> None:
    """Shards without a marker are no finished output; from the parts they are written again, whole."""
    folder = PartsFolder(tmp_path / "out")
    folder.open(Manifest({}), "if-possible")
    publish_shuffled(folder, 10)
    folder.close()
    tests = str(Path(__file__).parents[1])
    killed = subprocess.run([sys.executable, "-c", DIE_BETWEEN_SHARDS, str(folder.output), tests], check=False)
    assert killed.returncode == -9
    output = open_output(folder.output, True, 3)
    assert names(output.path) == set(shard_names(4)[:2])
    assert output.exists
    assert output.read_footer() is None
    output.refuse_foreign()  # whether they are this job's, its parts tell
    write_output(folder, parquet_input(tmp_path, {"x": range(10)}), "out", rows_per_shard=3)
    assert names(output.path) == {"_job.json", *shard_names(4)}
    assert [row["completion"] for row in file_rows(output.path)] == [f"{index}.0" for index in range(10)]


def test_other_shards_of_a_killed_run_do_not_stay(folder: PartsFolder) -> None:
    """Where it goes on with another number of rows per shard."""
    publish_shuffled(folder, 10)
    source = parquet_input(folder.path.parent, {"x": range(10)})
    output = write_output(folder, source, "out", rows_per_shard=3)
    (output.path / "_job.json").unlink()
    output.refuse_foreign()
    write_output(folder, source, "out", rows_per_shard=4)
    assert names(output.path) == {"_job.json", *shard_names(3)}


def test_half_a_shard_of_a_killed_run_does_not_stay(folder: PartsFolder) -> None:
    """It is no stranger, and gone when the job is finished."""
    publish_shuffled(folder, 10)
    source = parquet_input(folder.path.parent, {"x": range(10)})
    (folder.path.parent / "out").mkdir()
    (folder.path.parent / "out" / f".{shard_names(4)[3]}.tmp-7").write_bytes(b"half")
    open_output(folder.path.parent / "out", True, 3).refuse_foreign()
    output = write_output(folder, source, "out", rows_per_shard=3)
    assert names(output.path) == {"_job.json", *shard_names(4)}
