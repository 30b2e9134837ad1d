"""From parts to the final file: every row, in input order, beside its own columns, of types that never change."""

import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from parts_harness import (
    FOOTER,
    NOON,
    at_once,
    failed,
    file_rows,
    key,
    keys,
    ok,
    parquet_input,
    publish_parts,
    publish_shuffled,
    write_output,
)

import cbgen.data.assembly
from cbgen.data.assembly import Results
from cbgen.data.manifest import Manifest, PartsFolder
from cbgen.data.outputs import open_output
from cbgen.data.readers import Input, open_input
from cbgen.data.rows import OPTIONAL_COLUMNS, RESULT_SCHEMA, TOKEN_LOGPROB, OutputLayout, OutputRow
from cbgen.data.selection import Selection
from cbgen.errors import OutputError

# Writes a JSONL file from a Parquet one where pandas, which cbgen does not depend on, is not installed.
WITHOUT_PANDAS = """
import pathlib, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "pandas":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
from cbgen.data.assembly import Results
from cbgen.data.files import DiskPatience
from cbgen.data.manifest import PartsFolder
from cbgen.data.outputs import open_output
from cbgen.data.readers import open_input
from cbgen.data.rows import OutputLayout
from cbgen.data.selection import Selection
output = pathlib.Path(sys.argv[1])
results = Results(PartsFolder(output), bytes.fromhex(sys.argv[3]), 1)
selection = Selection(open_input([sys.argv[2]]))
open_output(output, False, 100).write(selection, results, OutputLayout(), {}, DiskPatience(0.0, print))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[PartsFolder]:
    """The parts folder of a job; outputs of any name may be assembled from it."""
    folder = PartsFolder(tmp_path / "out.parquet")
    folder.open(Manifest({}), "if-possible")
    yield folder
    folder.close()


def written(folder: PartsFolder, source: Input, name: str = "out.parquet", **layout: Any) -> Path:
    """The path of the final output."""
    return write_output(folder, source, name, **layout).path


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl", "out"])
@pytest.mark.parametrize("num_samples", [1, 3])
def test_rows_come_in_input_order_with_their_own_result(folder: PartsFolder, name: str, num_samples: int) -> None:
    """However results are spread over parts, each input row is followed by its samples, in order."""
    publish_shuffled(folder, 50, num_samples)
    source = parquet_input(folder.path.parent, {"x": list(range(50))})
    rows = file_rows(written(folder, source, name, num_samples=num_samples))
    expected = [(index, f"{index}.{sample}") for index in range(50) for sample in range(num_samples)]
    assert [(row["x"], row["completion"]) for row in rows] == expected
    assert [row.get("sample_index", 0) for row in rows] == [*range(num_samples)] * 50
    assert ("sample_index" in rows[0]) == (num_samples > 1)


def passes_of(monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
    """Whatever rows take, a pass gathers about so many."""
    monkeypatch.setattr(Results, "most_within", lambda self, num_bytes: num_rows)


@pytest.mark.parametrize("rows_per_pass", [1, 100, 1024, 1500])
@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl", "out"])
@pytest.mark.parametrize("num_samples", [1, 2])
def test_many_rows_are_assembled_in_several_passes(
    folder: PartsFolder, monkeypatch: pytest.MonkeyPatch, rows_per_pass: int, name: str, num_samples: int
) -> None:
    """Rows are the same whatever the size of a pass and wherever batches and row groups of the input end."""
    count = 60 if rows_per_pass == 1 else 2600
    passes_of(monkeypatch, rows_per_pass)
    publish_shuffled(folder, count, num_samples)
    source = parquet_input(folder.path.parent, {"x": list(range(count))}, row_group_size=900)
    rows = file_rows(written(folder, source, name, rows_per_shard=700, num_samples=num_samples))
    expected = [(index, f"{index}.{sample}") for index in range(count) for sample in range(num_samples)]
    assert [(row["x"], row["completion"]) for row in rows] == expected


@pytest.mark.parametrize("rows_per_pass", [1, 100, 1500])
@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl", "out"])
@pytest.mark.parametrize("is_shard", [False, True])
def test_rows_have_samples_of_their_own_number(
    folder: PartsFolder, monkeypatch: pytest.MonkeyPatch, rows_per_pass: int, name: str, is_shard: bool
) -> None:
    """Each row has its own samples and no others, whatever the size of a pass; a file of a folder holds whole rows."""
    count = 60 if rows_per_pass == 1 else 2600
    passes_of(monkeypatch, rows_per_pass)
    wanted = [(1, 4, 2, 70)[index % 4] if index < 500 else 1 for index in range(count)]
    publish_parts(folder, [ok(index, sample) for index in range(count) for sample in range(wanted[index] + 1)])
    source = parquet_input(folder.path.parent, {"x": list(range(count))}, row_group_size=900)
    out = written(folder, source, name, rows_per_shard=101, counts=wanted, is_shard=is_shard)
    rows = file_rows(out)
    expected = [(index, sample, f"{index}.{sample}") for index in range(count) for sample in range(wanted[index])]
    assert [(row["x"], row["sample_index"], row["completion"]) for row in rows] == expected
    if is_shard:
        assert [(row["row_index"], row["row_key"]) for row in rows] == [
            (index, key(index).hex()) for index, *_ in expected
        ]
    for file in out.glob("*.parquet"):
        table = pq.read_table(file)
        assert table.num_rows <= 101 and table["sample_index"][0].as_py() == 0


def test_results_of_samples_that_vary_are_counted(folder: PartsFolder) -> None:
    """What is missing or failed, of the samples that rows ask for; the others are foreign."""
    publish_parts(folder, [failed(0), ok(0, 1), ok(1, 1), ok(2), failed(2, 1), ok(9)])
    results = Results(folder, keys(3), np.array([2, 1, 3], dtype=np.uint16))
    assert (results.num_missing, results.num_failed, results.num_foreign) == (2, 2, 2)


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl"])
@pytest.mark.parametrize("counts", [[2, 2], [2, 2, 1, 1]], ids=["fewer", "more"])
def test_counts_that_are_not_those_of_the_input(folder: PartsFolder, name: str, counts: list[int]) -> None:
    """Of other rows than the input has now: one line, and no output."""
    publish_shuffled(folder, 4, 2)
    source = parquet_input(folder.path.parent, {"x": [0, 1, 2]})
    selection, layout = Selection(source), OutputLayout(None)
    output, results = (
        open_output(folder.path.with_name(name), False, 10),
        Results(folder, keys(len(counts)), np.array(counts)),
    )
    with pytest.raises(OutputError, match=r"run (it|the same command) again"):
        output.write(selection, results, layout, FOOTER, at_once())
    assert not output.path.exists()


def test_a_pass_gathers_whole_rows(folder: PartsFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables are in order and as large as a pass, each row with all its samples; results of other rows are not
    among them."""
    passes_of(monkeypatch, 30)
    publish_shuffled(folder, 25, 3)
    publish_parts(folder, [ok(99), ok(98, 2)], [ok(3, 1, text="newest")])
    results = Results(folder, keys(25), 3)
    tables = list(results.tables())
    assert [table.num_rows for table in tables] == [30, 30, 15]
    texts = [text for table in tables for text in table["completion"].to_pylist()]
    expected = [f"{index}.{sample}" for index in range(25) for sample in range(3)]
    expected[3 * 3 + 1] = "newest"
    assert texts == expected
    assert (results.num_foreign, results.num_missing, results.num_failed) == (2, 0, 0)


@pytest.mark.parametrize(
    "is_common",
    [
        False,
        True,
    ],
    ids=["texts of their own", "one text for all"],
)
def test_a_pass_is_bounded_by_the_bytes_of_its_results(
    folder: PartsFolder, monkeypatch: pytest.MonkeyPatch, is_common: bool
) -> None:
    """Rows that are long make fewer of them, also where a part holds a repeated text once."""
    monkeypatch.setattr(cbgen.data.assembly, "PASS_BYTES", 1 << 20)
    texts = [("" if is_common else f"{index:05}") + "x" * 50_000 for index in range(300)]
    publish_parts(folder, [ok(index, text=text) for index, text in enumerate(texts)])
    tables = list(Results(folder, keys(300), 1).tables())
    assert sum(table.num_rows for table in tables) == 300
    assert max(table.nbytes for table in tables) <= 2 << 20


def test_keys_are_told_in_hex(folder: PartsFolder) -> None:
    """Of so many rows, from any one on."""
    results = Results(folder, keys(5), 1)
    assert results.hex_keys(1, 3) == [key(index).hex() for index in (1, 2, 3)]
    assert results.hex_keys(5, 0) == []


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl", "out"])
@pytest.mark.parametrize("num_samples", [1, 2])
def test_the_output_of_a_shard(folder: PartsFolder, name: str, num_samples: int) -> None:
    """Its own rows in input order, each with its place in the whole input and its key, by which shards are merged."""
    is_mine = np.arange(2600) % 3 == 1
    mine = np.flatnonzero(is_mine).tolist()
    rows = [ok(index, sample) for index in mine for sample in range(num_samples)]
    publish_parts(folder, rows[::2], rows[1::2])
    source = parquet_input(folder.path.parent, {"x": list(range(2600))}, row_group_size=900)
    options = {"is_mine": is_mine, "is_shard": True, "num_samples": num_samples, "prefix": "new_"}
    told = file_rows(written(folder, source, name, **options))
    expected = [(index, key(index).hex(), f"{index}.{n}") for index in mine for n in range(num_samples)]
    assert [(row["new_row_index"], row["new_row_key"], row["new_completion"]) for row in told] == expected
    assert [row["x"] for row in told] == [row["new_row_index"] for row in told]
    assert list(told[0]) == ["x", *OutputLayout(num_samples, prefix="new_", is_shard=True).names]


def test_a_newer_part_wins(folder: PartsFolder) -> None:
    """Of two results for one sample the one in the newer part is used, and only that one is counted."""
    publish_parts(folder, [failed(0), ok(1, text="old")], [ok(0, text="retried")], [ok(1, text="new")])
    source = parquet_input(folder.path.parent, {"x": [0, 1]})
    assert Results(folder, keys(2), 1).num_failed == 0
    assert [row["completion"] for row in file_rows(written(folder, source))] == ["retried", "new"]


def test_a_success_beats_a_newer_failure(folder: PartsFolder) -> None:
    """A row that was generated once stays generated."""
    publish_parts(folder, [ok(0, text="generated")], [failed(0)])
    source = parquet_input(folder.path.parent, {"x": [0]})
    assert Results(folder, keys(1), 1).num_failed == 0
    assert [row["completion"] for row in file_rows(written(folder, source))] == ["generated"]


def test_results_that_the_input_does_not_ask_for_are_ignored(folder: PartsFolder) -> None:
    """Keys of rows that are gone and samples beyond n are passed over; they are neither missing nor failed."""
    publish_parts(folder, [ok(0), failed(0, 1), failed(8), ok(1)], [failed(9)])
    results = Results(folder, keys(2), 1)
    assert (results.num_missing, results.num_failed, results.num_foreign) == (0, 0, 3)
    source = parquet_input(folder.path.parent, {"x": [0, 1]})
    assert [row["completion"] for row in file_rows(written(folder, source))] == ["0.0", "1.0"]


def test_missing_and_failed_results_are_counted(folder: PartsFolder) -> None:
    """Each sample counts; an unreadable part holds nothing."""
    assert Results(folder, keys(3), 2).num_missing == 6
    publish_parts(folder, [ok(2), failed(0)], [failed(2, 1)], [ok(1), ok(1, 1)])
    folder.part_path(2).write_bytes(b"torn")
    results = Results(folder, keys(3), 2)
    assert results.num_missing == 3
    assert results.num_failed == 2
    assert results.num_foreign == 0
    assert Results(folder, b"", 2).num_missing == 0


def full(index: int) -> OutputRow:
    """A result that has all that there is, and a prompt of one token."""
    best = {"token_id": 7, "token": "é", "logprob": -0.5}
    tokens = [best | {"rank": 1, "top": [best]}, best | {"token_id": index, "rank": 9, "top": []}]
    first = {"token_id": 1, "token": "<s>", "logprob": None, "rank": None, "top": []}
    return replace(
        ok(index),
        stop_reason="END",
        reasoning="because",
        clamped_max_tokens=9,
        truncated_prompt_tokens=4,
        completion_logprobs=pa.array(tokens, TOKEN_LOGPROB),
        prompt_token_logprobs=pa.array([first], TOKEN_LOGPROB),
    )


def value_of(row: OutputRow, name: str) -> Any:
    value = getattr(row, name)
    return value.to_pylist() if isinstance(value, pa.Array) else value


@pytest.mark.parametrize("make", [full, ok, failed], ids=["values", "some", "nulls"])
def test_output_types_do_not_depend_on_the_values(folder: PartsFolder, make: Callable[[int], OutputRow]) -> None:
    """Result columns follow the input's, of the fixed types also when all that may be null is null."""
    publish_parts(folder, [make(0), make(1)])
    columns = pa.table({"x": [1, 2]}).replace_schema_metadata({"owner": "somebody"})
    output = written(folder, parquet_input(folder.path.parent, columns), optional=frozenset(OPTIONAL_COLUMNS))
    schema = pq.read_schema(output)
    expected = [field for field in RESULT_SCHEMA if field.name != "sample_index"]
    assert schema.names == ["x", *(field.name for field in expected)]
    assert [field.type for field in schema][1:] == [field.type for field in expected]
    assert schema.metadata[b"owner"] == b"somebody"
    wanted = [{name: value_of(make(index), name) for name in schema.names[1:]} for index in range(2)]
    assert [{name: row[name] for name in schema.names[1:]} for row in file_rows(output)] == wanted


def test_jsonl_keeps_each_line_and_adds_the_result(folder: PartsFolder) -> None:
    """A record's values, of whatever types, come first and verbatim; a malformed line has its result only."""
    lines = ['{"x": [1, "a"], "big": 1%s}' % ("0" * 30), '{"x', '{"x": {}, "é": "\\ud83d\\u0000"}']
    (folder.path.parent / "in.jsonl").write_text("\n".join(lines), encoding="utf-8")
    publish_parts(folder, [ok(0), failed(1), ok(2)])
    output = written(folder, open_input([str(folder.path.parent / "in.jsonl")]), "out.jsonl")
    rows = file_rows(output)
    result = [name for name in RESULT_SCHEMA.names if name not in ("sample_index", *OPTIONAL_COLUMNS)]
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
        output = write_output(folder, source, name, prefix="v2_", num_samples=2)
        footer = output.read_footer()
        assert footer is not None and FOOTER.items() <= footer.items()
        rows = file_rows(output.path)
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
    table = pq.read_table(written(folder, source, num_samples=num_samples))
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
    assert file_rows(written(folder, source, "out.jsonl"))[0]["x"] == expected


def test_a_time_beyond_the_calendar_does_not_stop_jsonl(folder: PartsFolder) -> None:
    """Arrow holds moments of the year 36,000; the row is written all the same."""
    publish_shuffled(folder, 2)
    source = parquet_input(folder.path.parent, {"x": pa.array([2**60, 0], pa.timestamp("us"))})
    rows = file_rows(written(folder, source, "out.jsonl"))
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
    assert file_rows(output)[0]["x"] == "2024-02-29T12:00:00.000000001"


def test_a_damaged_result_ends_in_one_line(folder: PartsFolder) -> None:
    """A part whose texts were damaged on the disk is told as such; nothing of it reaches the output."""
    rows = [ok(index, text=f"{index:05}" * 20) for index in range(200)]
    publish_parts(folder, rows)
    path = folder.part_path(0)
    content, metadata = bytearray(path.read_bytes()), pq.read_metadata(path)
    columns = [metadata.row_group(0).column(place) for place in range(metadata.num_columns)]
    column = next(column for column in columns if column.path_in_schema == "completion")
    content[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    path.write_bytes(content)
    source = parquet_input(folder.path.parent, {"x": range(200)})
    with pytest.raises(OutputError, match=r"part-00000000\.parquet"):
        written(folder, source)
    assert not (folder.path.parent / "out.parquet").exists()
