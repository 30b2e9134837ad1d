"""From parts to the final file: every row, in input order, beside its own columns, of types that never change."""

import hashlib
import json
import random
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import cbgen.data.assembly
from cbgen.data.assembly import Results, assemble, read_footer, sidecar_path
from cbgen.data.manifest import PartsFolder
from cbgen.data.readers import Input, open_input
from cbgen.data.rows import KEY_BYTES, RESULT_SCHEMA, OutputLayout, OutputRow
from cbgen.data.writers import PartWriter
from cbgen.errors import InputError, OutputError

FOOTER = {
    "fingerprint": {"model": "smollm2", "system_prompt": "« é »"},
    "input": [],
    "columns": [],
    "rows_ok": 3,
    "rows_failed": 0,
}
NOON = datetime(2024, 2, 29, 12, tzinfo=timezone.utc)
# Writes a JSONL file from a Parquet one where pandas, which cbgen does not depend on, is not installed.
WITHOUT_PANDAS = """
import pathlib, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "pandas":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
from cbgen.data.assembly import Results, assemble
from cbgen.data.manifest import PartsFolder
from cbgen.data.readers import open_input
from cbgen.data.rows import OutputLayout
output = pathlib.Path(sys.argv[1])
results = Results(PartsFolder(output), bytes.fromhex(sys.argv[3]), 1)
assemble(output, open_input([sys.argv[2]]), results, OutputLayout(), {})
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[PartsFolder]:
    """The parts folder of a job; outputs of any name may be assembled from it."""
    folder = PartsFolder(tmp_path / "out.parquet")
    folder.open({}, "if-possible")
    yield folder
    folder.close()


def key(index: int) -> bytes:
    """As in a job, keys are not in the order of the rows."""
    return hashlib.blake2b(str(index).encode(), digest_size=KEY_BYTES).digest()


def keys(count: int) -> bytes:
    return b"".join(map(key, range(count)))


def ok(index: int, sample_index: int = 0, text: str | None = None) -> OutputRow:
    text = f"{index}.{sample_index}" if text is None else text
    times = [0.5, 0.25, 1.0, 0.75, None]
    return OutputRow(key(index), index, sample_index, text, "stop", None, 3, 2, [7, index], *times, NOON, NOON)


def failed(index: int, sample_index: int = 0) -> OutputRow:
    """A row that was never a request: everything that may be null is null."""
    return OutputRow(key(index), index, sample_index, None, "error", "too long", 0, 0, [], *[None] * 7)


def publish_parts(folder: PartsFolder, *parts: list[OutputRow]) -> None:
    writer = PartWriter(folder, 1_000_000, 3600.0)
    for rows in parts:
        writer.add(rows)
        writer.flush()


def publish_shuffled(folder: PartsFolder, count: int, num_samples: int = 1) -> None:
    """Results of all rows, scattered over three parts."""
    rows = [ok(index, sample) for index in range(count) for sample in range(num_samples)]
    random.Random(0).shuffle(rows)
    publish_parts(folder, *(rows[first::3] for first in range(3)))


def parquet_input(folder: Path, columns: Any, **options: Any) -> Input:
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), folder / "in.parquet", **options)
    return open_input([str(folder / "in.parquet")])


def run(folder: PartsFolder, source: Input, name: str = "out.parquet", **layout: Any) -> Path:
    """Assembles the final file and returns its path."""
    output = folder.path.parent / name
    choice = OutputLayout(**layout)
    assemble(output, source, Results(folder, keys(source.num_rows), choice.num_samples), choice, FOOTER)
    return output


def read_rows(output: Path) -> list[dict[str, Any]]:
    if output.suffix == ".jsonl":
        return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    return pq.read_table(output).to_pylist()


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl"])
@pytest.mark.parametrize("num_samples", [1, 3])
def test_rows_come_in_input_order_with_their_own_result(folder: PartsFolder, name: str, num_samples: int) -> None:
    """However results are spread over parts, each input row is followed by its samples, in order."""
    publish_shuffled(folder, 50, num_samples)
    source = parquet_input(folder.path.parent, {"x": list(range(50))})
    rows = read_rows(run(folder, source, name, num_samples=num_samples))
    expected = [(index, f"{index}.{sample}") for index in range(50) for sample in range(num_samples)]
    assert [(row["x"], row["completion"]) for row in rows] == expected
    assert [row.get("sample_index", 0) for row in rows] == [*range(num_samples)] * 50
    assert ("sample_index" in rows[0]) == (num_samples > 1)


@pytest.mark.parametrize("rows_per_pass", [100, 1024, 1500])
@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl"])
@pytest.mark.parametrize("num_samples", [1, 2])
def test_many_rows_are_assembled_in_several_passes(
    folder: PartsFolder, monkeypatch: pytest.MonkeyPatch, rows_per_pass: int, name: str, num_samples: int
) -> None:
    """Rows are the same whatever the size of a pass and wherever batches and row groups of the input end."""
    monkeypatch.setattr(cbgen.data.assembly, "ASSEMBLY_ROWS", rows_per_pass)
    publish_shuffled(folder, 2600, num_samples)
    source = parquet_input(folder.path.parent, {"x": list(range(2600))}, row_group_size=900)
    rows = read_rows(run(folder, source, name, num_samples=num_samples))
    expected = [(index, f"{index}.{sample}") for index in range(2600) for sample in range(num_samples)]
    assert [(row["x"], row["completion"]) for row in rows] == expected


def test_a_newer_part_wins(folder: PartsFolder) -> None:
    """Of two results for one sample the one in the newer part is used, and only that one is counted."""
    publish_parts(folder, [failed(0), ok(1, text="old")], [ok(0, text="retried")], [ok(1, text="new")])
    source = parquet_input(folder.path.parent, {"x": [0, 1]})
    assert Results(folder, keys(2), 1).num_failed == 0
    assert [row["completion"] for row in read_rows(run(folder, source))] == ["retried", "new"]


def test_a_success_beats_a_newer_failure(folder: PartsFolder) -> None:
    """A row that was generated once stays generated."""
    publish_parts(folder, [ok(0, text="generated")], [failed(0)])
    source = parquet_input(folder.path.parent, {"x": [0]})
    assert Results(folder, keys(1), 1).num_failed == 0
    assert [row["completion"] for row in read_rows(run(folder, source))] == ["generated"]


def test_results_that_the_input_does_not_ask_for_are_ignored(folder: PartsFolder) -> None:
    """Keys of rows that are gone and samples beyond n are passed over; they are neither missing nor failed."""
    publish_parts(folder, [ok(0), failed(0, 1), failed(8), ok(1)], [failed(9)])
    results = Results(folder, keys(2), 1)
    assert (results.num_missing, results.num_failed) == (0, 0)
    source = parquet_input(folder.path.parent, {"x": [0, 1]})
    assert [row["completion"] for row in read_rows(run(folder, source))] == ["0.0", "1.0"]


def test_missing_and_failed_results_are_counted(folder: PartsFolder) -> None:
    """Each sample counts; an unreadable part holds nothing."""
    assert Results(folder, keys(3), 2).num_missing == 6
    publish_parts(folder, [ok(2), failed(0)], [failed(2, 1)], [ok(1), ok(1, 1)])
    folder.part_path(2).write_bytes(b"torn")
    results = Results(folder, keys(3), 2)
    assert results.num_missing == 3
    assert results.num_failed == 2
    assert Results(folder, b"", 2).num_missing == 0


@pytest.mark.parametrize("make", [ok, failed], ids=["values", "nulls"])
def test_output_types_do_not_depend_on_the_values(folder: PartsFolder, make: Callable[[int], OutputRow]) -> None:
    """Result columns follow the input's, of the fixed types also when all that may be null is null."""
    publish_parts(folder, [make(0), make(1)])
    columns = pa.table({"x": [1, 2]}).replace_schema_metadata({"owner": "somebody"})
    output = run(folder, parquet_input(folder.path.parent, columns), with_token_ids=True)
    schema = pq.read_schema(output)
    expected = [field for field in RESULT_SCHEMA if field.name != "sample_index"]
    assert schema.names == ["x", *(field.name for field in expected)]
    assert [field.type for field in schema][1:] == [field.type for field in expected]
    assert schema.metadata[b"owner"] == b"somebody"
    wanted = [{name: getattr(make(index), name) for name in schema.names[1:]} for index in range(2)]
    assert [{name: row[name] for name in schema.names[1:]} for row in read_rows(output)] == wanted


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl"])
def test_the_job_is_recorded_with_the_output(folder: PartsFolder, name: str) -> None:
    """In the Parquet footer, or in a file beside the JSONL output, and read back as it was; no other file is left."""
    publish_shuffled(folder, 3)
    output = run(folder, parquet_input(folder.path.parent, {"x": [0, 1, 2]}), name)
    assert read_footer(output) == FOOTER
    expected = {"in.parquet", folder.path.name, name} | ({sidecar_path(output).name} if name == "out.jsonl" else set())
    assert {path.name for path in output.parent.iterdir()} == expected


def test_jsonl_keeps_each_line_and_adds_the_result(folder: PartsFolder) -> None:
    """A record's values, of whatever types, come first and verbatim; a malformed line has its result only."""
    lines = ['{"x": [1, "a"], "big": 1%s}' % ("0" * 30), '{"x', '{"x": {}, "é": "\\ud83d\\u0000"}']
    (folder.path.parent / "in.jsonl").write_text("\n".join(lines), encoding="utf-8")
    publish_parts(folder, [ok(0), failed(1), ok(2)])
    output = run(folder, open_input([str(folder.path.parent / "in.jsonl")]), "out.jsonl")
    rows = read_rows(output)
    result = [name for name in RESULT_SCHEMA.names if name not in ("sample_index", "completion_ids")]
    assert [list(row) for row in rows] == [["x", "big", *result], result, ["x", "é", *result]]
    assert rows[0]["x"] == [1, "a"] and rows[0]["big"] == 10**30
    assert rows[2]["x"] == {} and rows[2]["é"] == "\\ud83d\x00"
    assert rows[1]["error"] == "too long" and rows[0]["finish_time"] == "2024-02-29T12:00:00+00:00"


def test_a_prefix_keeps_an_input_column_of_an_output_name(folder: PartsFolder) -> None:
    """cbgen's own output can be an input: its columns and the new ones stand side by side, under the new footer."""
    publish_shuffled(folder, 2, 2)
    columns = pa.table({"completion": ["a", "b"], "error": [1, 2]}).replace_schema_metadata({"cbgen": "{}"})
    source = parquet_input(folder.path.parent, columns)
    for name in ("out.parquet", "out.jsonl"):
        output = run(folder, source, name, prefix="v2_", num_samples=2)
        assert read_footer(output) == FOOTER
        rows = read_rows(output)
        assert [(row["completion"], row["error"]) for row in rows] == [("a", 1), ("a", 1), ("b", 2), ("b", 2)]
        assert [row["v2_completion"] for row in rows] == ["0.0", "0.1", "1.0", "1.1"]
        assert list(rows[0])[2:] == OutputLayout(num_samples=2, prefix="v2_").names


PASSED_THROUGH = {
    "large_string": pa.array(["a", None, "c"], pa.large_string()),
    "string_view": pa.array(["a", None, "c"], pa.string_view()),
    "dictionary": pa.array(["a", None, "c"]).dictionary_encode(),
    "decimal": pa.array([Decimal("1.10"), None, Decimal("-3.00")], pa.decimal128(12, 2)),
    "zoned": pa.array([NOON, None, NOON], pa.timestamp("ns", tz="Europe/Paris")),
    "nested": pa.array([{"tags": ["a", None]}, None, {"tags": []}]),
    "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
    "uuid": pa.array([uuid.UUID(int=7).bytes, None, uuid.UUID(int=8).bytes], pa.uuid()),
    "null": pa.nulls(3),
}


@pytest.mark.parametrize("column", PASSED_THROUGH.values(), ids=PASSED_THROUGH)
@pytest.mark.parametrize("num_samples", [1, 2])
def test_input_columns_pass_through_unchanged(folder: PartsFolder, column: pa.Array, num_samples: int) -> None:
    """The same types and values, once for each sample, also where a second shard lacks the column."""
    publish_shuffled(folder, 4, num_samples)
    pq.write_table(pa.table({"id": [0, 1, 2], "x": column}), folder.path.parent / "a.parquet", row_group_size=2)
    pq.write_table(pa.table({"id": [3]}), folder.path.parent / "b.parquet")
    source = open_input([str(folder.path.parent / name) for name in ("a.parquet", "b.parquet")])
    table = pq.read_table(run(folder, source, num_samples=num_samples))
    assert table.schema.field("x").type == column.type
    values = [*column.to_pylist(), None]
    assert table["x"].to_pylist() == [value for value in values for _ in range(num_samples)]


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([Decimal("1.10")]), "1.10"),
        (pa.array([NOON], pa.timestamp("us", tz="UTC")), "2024-02-29T12:00:00+00:00"),
        (pa.array([NOON.date()]), "2024-02-29"),
        (pa.array([uuid.UUID(int=7).bytes], pa.uuid()), str(uuid.UUID(int=7))),
        (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())), [["k", 1]]),
    ],
)
def test_values_that_json_does_not_know_become_text(folder: PartsFolder, column: pa.Array, expected: Any) -> None:
    """A Parquet input can be written as JSONL: its values as JSON or as readable text."""
    publish_shuffled(folder, 1)
    source = parquet_input(folder.path.parent, {"x": column})
    assert read_rows(run(folder, source, "out.jsonl"))[0]["x"] == expected


def test_a_time_beyond_the_calendar_does_not_stop_jsonl(folder: PartsFolder) -> None:
    """Arrow holds moments of the year 36,000; the row is written all the same."""
    publish_shuffled(folder, 2)
    source = parquet_input(folder.path.parent, {"x": pa.array([2**60, 0], pa.timestamp("us"))})
    rows = read_rows(run(folder, source, "out.jsonl"))
    assert [row["completion"] for row in rows] == ["0.0", "1.0"]


def test_nanoseconds_do_not_stop_jsonl_where_pandas_is_absent(folder: PartsFolder) -> None:
    """pandas is no dependency: without it too, timestamps of its own default type come out whole."""
    publish_shuffled(folder, 1)
    parquet_input(folder.path.parent, {"x": pa.array([1_709_208_000_000_000_001], pa.timestamp("ns"))})
    output = folder.path.with_name("out.jsonl")
    folder.path.rename(folder.path.with_name("out.jsonl.parts"))
    command = [
        sys.executable,
        "-c",
        WITHOUT_PANDAS,
        str(output),
        str(folder.path.with_name("in.parquet")),
        keys(1).hex(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert read_rows(output)[0]["x"] == "2024-02-29T12:00:00.000000001"


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl"])
def test_an_input_without_rows_gives_an_output_without_rows(folder: PartsFolder, name: str) -> None:
    """It is a finished file of the right columns."""
    output = run(folder, parquet_input(folder.path.parent, {"x": pa.array([], pa.string())}), name)
    assert read_rows(output) == []
    assert read_footer(output) == FOOTER


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


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
    "no sidecar": ("out.jsonl", lambda path: sidecar_path(path).unlink()),
    "torn sidecar": ("out.jsonl", lambda path: _truncate(sidecar_path(path))),
    "foreign sidecar": ("out.jsonl", lambda path: sidecar_path(path).write_bytes(b"\xff")),
}


@pytest.mark.parametrize(("name", "spoil"), NOT_FINISHED.values(), ids=NOT_FINISHED)
def test_a_file_that_cbgen_did_not_finish_has_no_footer(
    folder: PartsFolder, name: str, spoil: Callable[[Path], object]
) -> None:
    """What is missing, torn or foreign is not taken as done, even where a finished output was before."""
    publish_shuffled(folder, 3)
    output = run(folder, parquet_input(folder.path.parent, {"x": [0, 1, 2]}), name)
    spoil(output)
    assert read_footer(output) is None


def test_an_input_changed_before_assembly_publishes_nothing(folder: PartsFolder) -> None:
    """The parts' keys are those of the input that was read; another input is not put beside them."""
    publish_shuffled(folder, 2)
    source = parquet_input(folder.path.parent, {"x": [0, 1]})
    parquet_input(folder.path.parent, {"x": [0, 1, 2]})
    for name in ("out.parquet", "out.jsonl"):
        with pytest.raises(InputError, match=r"in\.parquet"):
            run(folder, source, name)
    assert {path.name for path in folder.path.parent.iterdir()} == {"in.parquet", folder.path.name}


def test_an_output_that_lacks_rows_is_not_published(folder: PartsFolder) -> None:
    """The file is counted before it gets its name, and the message says how many rows were written of how many."""
    publish_shuffled(folder, 2)
    source = parquet_input(folder.path.parent, {"x": [0, 1, 2]})
    output = folder.path.with_name("out.jsonl")
    with pytest.raises(OutputError, match="2 rows were written of 3"):
        assemble(output, source, Results(folder, keys(2), 1), OutputLayout(), FOOTER)
    assert {path.name for path in output.parent.iterdir()} == {"in.parquet", folder.path.name}
