"""Readers: which files an input is, how their schemas become one, and that every value comes through as it was."""

import json
import os
import uuid
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cbgen.data.batches import BATCH_ROWS
from cbgen.data.readers import Input, open_input
from cbgen.errors import InputError, UsageError

DAY = datetime(2024, 2, 29, 12, 30, tzinfo=timezone.utc)
WORDS = pa.array(["red", None, "blue"])
COLUMNS = {
    "string": WORDS,
    "large_string": WORDS.cast(pa.large_string()),
    "string_view": WORDS.cast(pa.string_view()),
    "dictionary": WORDS.dictionary_encode(),
    "binary": pa.array([b"\x00\xff", None, b""]),
    "unsigned": pa.array([2**64 - 1, None, 0], pa.uint64()),
    "decimal": pa.array([Decimal("1.10"), None, Decimal("-3.00")], pa.decimal128(12, 2)),
    "zoned": pa.array([DAY, None, DAY], pa.timestamp("us", tz="Europe/Paris")),
    "nanoseconds": pa.array([1_709_209_800_000_000_001, None, -1], pa.timestamp("ns")),
    "date": pa.array([date(2024, 2, 29), None, date(1900, 1, 1)]),
    "duration": pa.array([timedelta(seconds=1), None, timedelta(days=-1)]),
    "nested": pa.array([{"tags": ["a", None], "at": {"x": 1}}, None, {"tags": [], "at": None}]),
    "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
    "fixed_list": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int16(), 2)),
    "uuid": pa.array([uuid.UUID(int=7).bytes, None, uuid.UUID(int=8).bytes], pa.uuid()),
    "null": pa.nulls(3),
}


def save(path: Path, columns: Any, **options: Any) -> str:
    """Writes a Parquet shard."""
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path, **options)
    return str(path)


def save_lines(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def column(source: Input, name: str) -> list[Any]:
    return [row.values[name] for row in source.rows([name])]


def whole(source: Input) -> pa.Table:
    """All tables as one, each of which must have the input's schema."""
    tables = list(source.tables())
    assert all(table.schema.equals(source.schema) for table in tables)
    return pa.concat_tables(tables)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A folder of three shards, a note and a shard in a sub-folder; `x` tells which is which."""
    for number in (10, 2):
        save(tmp_path / f"part-{number}.parquet", {"x": [number]})
    save_lines(tmp_path / "part-1.jsonl", {"x": 1})
    (tmp_path / "notes.txt").write_text("not a shard")
    (tmp_path / "sub").mkdir()
    save(tmp_path / "sub" / "part-3.pq", {"x": [3]})
    return tmp_path


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (["."], [1, 2, 10]),
        (["part-*.parquet"], [2, 10]),
        (["**/part-*.p*"], [2, 10, 3]),
        (["part-10.parquet", "part-1.jsonl"], [10, 1]),
        (["part-*0.parquet", "sub", "part-2.parquet"], [10, 3, 2]),
    ],
)
def test_sources_are_read_in_the_order_given_and_naturally_within(
    shards: Path, sources: list[str], expected: list[int]
) -> None:
    """Files stay in the order given; a glob or a folder is read with part-2 before part-10."""
    source = open_input(str(shards / name) for name in sources)
    assert column(source, "x") == expected
    assert source.num_rows == len(expected)


def test_any_file_name_can_be_sorted(tmp_path: Path) -> None:
    """Digits that are no decimal digits, such as a superscript, are ordinary characters of a name."""
    for number in (10, 9):
        save(tmp_path / f"r1²{number}.parquet", {"x": [number]})
    assert column(open_input([str(tmp_path)]), "x") == [9, 10]


@pytest.mark.parametrize(
    ("make", "names", "message"),
    [
        (lambda folder: (folder / "rows.csv").write_text("a,b"), ["rows.csv"], ".parquet, .pq, .jsonl"),
        (lambda folder: None, ["absent.parquet"], "no such file"),
        (lambda folder: None, ["absent-*.parquet"], "no such file"),
        (lambda folder: (folder / "empty").mkdir(), ["empty"], "has no file of .parquet"),
        (lambda folder: (folder / "torn.parquet").write_bytes(b"PAR1 cut"), ["torn.parquet"], "not a readable Parquet"),
        (lambda folder: (folder / "zero.parquet").touch(), ["zero.parquet"], "not a readable Parquet"),
        (lambda folder: None, [], ""),
    ],
    ids=["extension", "file", "glob", "folder", "torn", "zero", "nothing"],
)
def test_what_cannot_be_an_input_is_refused_by_name(tmp_path: Path, make: Any, names: list[str], message: str) -> None:
    """A wrong, missing, empty or unreadable source is a one-line UsageError that names it."""
    make(tmp_path)
    with pytest.raises(UsageError) as caught:
        open_input(str(tmp_path / name) for name in names)
    assert message in str(caught.value)
    assert all(name in str(caught.value) for name in names)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 5, 99, None])
def test_limit_holds_for_rows_records_and_tables(tmp_path: Path, limit: int | None) -> None:
    """Only the first rows are given, however they are read and wherever a shard ends."""
    paths = [
        save(tmp_path / "a.parquet", {"x": [0, 1]}),
        save_lines(tmp_path / "b.jsonl", {"x": 2}, {"x": 3}),
        save(tmp_path / "c.parquet", {"x": [4]}),
    ]
    source = open_input(paths, limit)
    expected = list(range(5))[:limit]
    assert source.num_rows == len(expected)
    assert [(row.index, row.values["x"]) for row in source.rows(["x"])] == [(x, x) for x in expected]
    assert [record["x"] for record in source.records()] == expected
    assert [x for table in source.tables() for x in table["x"].to_pylist()] == expected


UNIFIED = {
    "int32+int64": (pa.array([1], pa.int32()), pa.array([2**40]), pa.int64()),
    "uint32+int32": (pa.array([2**32 - 1], pa.uint32()), pa.array([-1], pa.int32()), pa.int64()),
    "int+float32": (pa.array([2**40 + 1]), pa.array([0.5], pa.float32()), pa.float64()),
    "null+string": (pa.nulls(1), WORDS, pa.string()),
    "string+null": (WORDS, pa.nulls(1), pa.string()),
    "null+dictionary": (pa.nulls(1), COLUMNS["dictionary"], COLUMNS["dictionary"].type),
    "null+map": (pa.nulls(1), COLUMNS["map"], COLUMNS["map"].type),
    "null+uuid": (pa.nulls(1), COLUMNS["uuid"], pa.uuid()),
    "missing+nested": (None, COLUMNS["nested"], COLUMNS["nested"].type),
    "nested+missing": (COLUMNS["nested"], None, COLUMNS["nested"].type),
    "string+large": (WORDS, COLUMNS["large_string"], pa.large_string()),
    "dictionary indices": (
        WORDS.dictionary_encode().cast(pa.dictionary(pa.int8(), pa.string())),
        pa.array(["green"]).dictionary_encode(),
        pa.dictionary(pa.int32(), pa.string()),
    ),
}


@pytest.mark.parametrize(("first", "second", "expected"), UNIFIED.values(), ids=UNIFIED)
def test_schemas_unify_without_changing_a_value(
    tmp_path: Path, first: pa.Array | None, second: pa.Array | None, expected: pa.DataType
) -> None:
    """Numbers widen; a column that one shard lacks, or has only nulls in, takes the other's type and is null there."""
    values = []
    for name, array in (("a", first), ("b", second)):
        present = {} if array is None else {"x": array}
        save(tmp_path / f"{name}.parquet", {"id": [name] * (1 if array is None else len(array)), **present})
        values += [None] if array is None else array.to_pylist()
    source = open_input([str(tmp_path)])
    assert source.schema.field("x").type == expected
    assert whole(source)["x"].to_pylist() == values
    assert [row.values["x"] for row in source.rows(["id", "x"])] == values


def test_messages_with_other_fields_in_another_order_unify(tmp_path: Path) -> None:
    """Lists of structs are unified by field name: an absent field is null, an order of fields is no difference."""
    first = [{"role": "user", "content": "a"}]
    second = [{"content": "b", "name": "n", "role": "user"}]
    for name, value in (("a", first), ("b", second)):
        save(tmp_path / f"{name}.parquet", {"messages": pa.array([value])})
    source = open_input([str(tmp_path)])
    assert whole(source)["messages"].to_pylist() == [[first[0] | {"name": None}], second]
    assert column(source, "messages") == [first, second]


CONFLICTS = {
    "int+string": (pa.array([1]), WORDS, "int64", "string"),
    "bool+int": (pa.array([True]), pa.array([1]), "bool", "int64"),
    "list+int": (pa.array([[1]]), pa.array([1]), "list<element: int64>", "int64"),
    "no zone+zone": (COLUMNS["nanoseconds"], COLUMNS["zoned"], "timestamp[ns]", "timestamp[us, tz=Europe/Paris]"),
    "string+dictionary": (WORDS, COLUMNS["dictionary"], "string", "dictionary"),
}


@pytest.mark.parametrize(("first", "second", "one", "other"), CONFLICTS.values(), ids=CONFLICTS)
def test_schemas_that_disagree_are_refused(
    tmp_path: Path, first: pa.Array, second: pa.Array, one: str, other: str
) -> None:
    """The refusal names the column, both types and both files, whatever agreeing shard lies between the two."""
    save(tmp_path / "a.parquet", {"id": [0] * len(first), "x": first})
    save(tmp_path / "b.parquet", {"id": [0]})
    save(tmp_path / "c.parquet", {"x": second})
    with pytest.raises(UsageError) as caught:
        open_input([str(tmp_path)])
    for part in ("'x'", one, other, "a.parquet", "c.parquet"):
        assert part in str(caught.value)
    assert "b.parquet" not in str(caught.value)


UNFIT = {
    "int+float": (pa.array([2**60 + 1]), pa.array([0.5])),
    "uint64+int64": (pa.array([2**64 - 1], pa.uint64()), pa.array([-1])),
    "decimal+int": (pa.array([Decimal("1.10")], pa.decimal128(10, 2)), pa.array([2**60])),
    "coarse+fine time": (pa.array([-(2**50)], pa.timestamp("ms")), pa.array([1], pa.timestamp("ns"))),
}


@pytest.mark.parametrize(("first", "second"), UNFIT.values(), ids=UNFIT)
def test_values_that_do_not_fit_the_common_type_are_no_crash_at_the_end(
    tmp_path: Path, first: pa.Array, second: pa.Array
) -> None:
    """Shards are refused when they are opened, with column and files, or every one of their rows can be read."""
    for name, array in (("a", first), ("b", second)):
        save(tmp_path / f"{name}.parquet", {"x": array})
    try:
        source = open_input([str(tmp_path)])
    except UsageError as error:
        assert all(part in str(error) for part in ("'x'", "a.parquet", "b.parquet"))
    else:
        assert whole(source).num_rows == 2


def test_a_required_column_that_another_shard_lacks_becomes_optional(tmp_path: Path) -> None:
    """Nulls are filled in for a missing column, so the common schema may not forbid them."""
    required = pa.schema([pa.field("x", pa.int64(), nullable=False), pa.field("y", pa.int64())])
    save(tmp_path / "a.parquet", pa.table([[1], [2]], schema=required))
    save(tmp_path / "b.parquet", {"y": [3]})
    source = open_input([str(tmp_path)])
    assert source.schema.field("x").nullable
    pq.write_table(whole(source), tmp_path / "all.parquet")
    assert pq.read_table(tmp_path / "all.parquet").to_pylist() == [{"x": 1, "y": 2}, {"x": None, "y": 3}]


def test_every_type_comes_back_as_it_was(tmp_path: Path) -> None:
    """tables() gives the types and the values that the file has, in batches that cross its row groups."""
    path = save(tmp_path / "a.parquet", COLUMNS, row_group_size=2)
    source = open_input([path])
    assert whole(source).equals(pq.read_table(path))
    assert [list(record) for record in source.records()] == [list(COLUMNS)] * 3


@pytest.mark.parametrize("row_group_size", [1, 700, 10_000])
def test_row_groups_of_any_size_are_read_in_bounded_batches(tmp_path: Path, row_group_size: int) -> None:
    """One row per row group and one row group of everything give the same rows, a bounded number at a time."""
    count = 2 * BATCH_ROWS + 5
    path = save(tmp_path / "a.parquet", {"x": list(range(count))}, row_group_size=row_group_size)
    source = open_input([path])
    assert column(source, "x") == list(range(count))
    assert whole(source)["x"].to_pylist() == list(range(count))
    assert max(table.num_rows for table in source.tables()) <= BATCH_ROWS


@pytest.mark.parametrize("columns", [["prompt"], ["prompt", "id"], ["id"], ["prompt", "max_tokens"]])
def test_a_shard_without_the_columns_still_has_its_rows(tmp_path: Path, columns: list[str]) -> None:
    """Every row of every shard is given, with None for what its shard lacks, even if that is all that was asked for."""
    paths = [
        save(tmp_path / "a.parquet", {"id": list(range(1500))}),
        save(tmp_path / "b.parquet", {"prompt": ["p"], "id": [1500]}),
        save_lines(tmp_path / "c.jsonl", {"id": 1501}),
    ]
    full = [{"id": i, "prompt": "p" if i == 1500 else None, "max_tokens": None} for i in range(1502)]
    rows = list(open_input(paths).rows(columns))
    assert [row.index for row in rows] == list(range(1502))
    assert [row.values for row in rows] == [{name: row[name] for name in columns} for row in full]


def test_a_text_that_is_not_utf8_costs_one_row_only(tmp_path: Path) -> None:
    """Parquet promises UTF-8 but no writer is made to keep it: the bad row is an error row, the next is unharmed."""
    offsets = pa.array([0, 2, 3], pa.int32()).buffers()[1]
    text = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"\xff\xfea")])
    rows = list(open_input([save(tmp_path / "a.parquet", {"x": text})]).rows(["x"]))
    assert [row.error is None for row in rows] == [False, True]
    assert "a.parquet" in str(rows[0].error)
    assert rows[1].values == {"x": "a"}


def test_a_column_name_with_a_dot_is_not_a_path(tmp_path: Path) -> None:
    """`a.b` is the column of that name, not the field `b` of the column `a`."""
    source = open_input([save(tmp_path / "a.parquet", {"a.b": [1], "a": pa.array([{"b": 3}])})])
    assert column(source, "a.b") == [1]
    assert column(source, "a") == [{"b": 3}]


CHANGES = {
    "appended": lambda path: path.write_bytes(path.read_bytes() + b'{"x": 3}\n'),
    "touched": lambda path: os.utime(path, ns=(0, 0)),
    "replaced": lambda path: path.with_suffix(".new").replace(path),
    "deleted": lambda path: path.unlink(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("read", [Input.records, Input.tables])
def test_a_file_changed_between_two_readings_is_noticed(tmp_path: Path, read: Any, change: Any) -> None:
    """The second reading raises InputError with the file's name instead of giving other rows."""
    paths = [Path(save_lines(tmp_path / f"{name}.jsonl", {"x": 1})) for name in "ab"]
    save_lines(tmp_path / "b.new", {"x": 1, "longer": True})
    source = open_input(map(str, paths))
    assert len(list(read(source))) == 2
    change(paths[1])
    with pytest.raises(InputError, match=r"b\.jsonl"):
        list(read(source))


def test_identity_tells_one_input_from_another(tmp_path: Path) -> None:
    """It survives JSON, stays the same for an input left alone, and differs with the limit and with any change."""
    path = save_lines(tmp_path / "a.jsonl", {"x": 1})
    identity = open_input([path]).identity
    assert json.loads(json.dumps(identity)) == identity == open_input([path]).identity
    assert open_input([path], limit=1).identity != identity
    os.utime(path, ns=(0, 0))
    assert open_input([path]).identity != identity


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    """Which of them a row's value would come from, nobody could say."""
    path = save(tmp_path / "a.parquet", pa.table([[1], [2]], names=["x", "x"]))
    with pytest.raises(UsageError, match=r"a\.parquet: 2 columns are called 'x'"):
        open_input([path])


BEYOND_PYTHON = {
    "time stamp": (pa.timestamp("ns"), 1_001, "1970-01-01T00:00:00.000001001"),
    "time of day": (pa.time64("ns"), 1, "00:00:00.000000001"),
    "duration": (pa.duration("ns"), 1, "1"),
    "whole duration": (pa.duration("ns"), 5_000, timedelta(microseconds=5)),
    "date after the year 9999": (pa.timestamp("us"), 2**58, "11103-08-29T17:22:31.711744"),
    "beyond any calendar": (pa.timestamp("us"), 2**60, str(2**60)),
}


@pytest.mark.parametrize(("type_", "stored", "value"), BEYOND_PYTHON.values(), ids=BEYOND_PYTHON)
@pytest.mark.parametrize("wrap", ["column", "list", "struct", "map"])
def test_what_python_cannot_hold_is_text_at_any_depth(
    tmp_path: Path, type_: pa.DataType, stored: int, value: Any, wrap: str
) -> None:
    """The same whether pandas is installed or not; its neighbours are unharmed."""
    inner = pa.array([stored, 0]).view(type_)
    array = {
        "column": inner,
        "list": pa.ListArray.from_arrays([0, 1, 2], inner),
        "struct": pa.StructArray.from_arrays([inner, pa.array(["a", "b"])], ["t", "s"]),
        "map": pa.MapArray.from_arrays([0, 1, 2], pa.array(["k", "k"]), inner),
    }[wrap]
    expected = {"column": value, "list": [value], "struct": {"t": value, "s": "a"}, "map": [("k", value)]}[wrap]
    source = open_input([save(tmp_path / "a.parquet", {"x": array, "y": [1, 2]})])
    first, second = source.rows(["x", "y"])
    assert first.values == {"x": expected, "y": 1}
    assert (second.values["y"], first.error, second.error) == (2, None, None)
    assert whole(source)["x"].combine_chunks() == array


def test_a_nested_text_that_is_not_utf8_names_file_and_row(tmp_path: Path) -> None:
    """It is escaped where it stands, and the other fields of its row are there."""
    offsets = pa.array([0, 1, 3], pa.int32()).buffers()[1]
    text = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"a\xff\xfe")])
    messages = pa.ListArray.from_arrays([0, 1, 2], pa.StructArray.from_arrays([text], ["content"]))
    rows = list(open_input([save(tmp_path / "a.parquet", {"x": messages, "y": [1, 2]})]).rows(["x", "y"]))
    assert rows[0].error is None
    assert rows[1].error == "a.parquet, row 2: column 'x' is not UTF-8"
    assert rows[1].values == {"x": [{"content": "\\xff\\xfe"}], "y": 2}


@pytest.mark.parametrize("num_rows", [1, 5])
def test_nested_dictionaries_and_views_can_be_read_and_written(tmp_path: Path, num_rows: int) -> None:
    """Pyarrow joins no nested dictionaries of two row groups, and slices no nested views."""
    words = [f"w{number}" for number in range(num_rows)]
    codes = pa.ListArray.from_arrays(list(range(num_rows + 1)), pa.array(words).dictionary_encode())
    views = pa.StructArray.from_arrays([pa.array(words, pa.string_view())], ["v"])
    schema = pa.schema([("codes", codes.type), ("views", views.type)])
    with pq.ParquetWriter(tmp_path / "a.parquet", schema) as writer:
        for place in range(num_rows):
            row = {"codes": codes.slice(place, 1).to_pylist(), "views": [{"v": words[place]}]}
            writer.write_table(pa.table({name: pa.array(row[name], schema.field(name).type) for name in schema.names}))
    source = open_input([str(tmp_path / "a.parquet")])
    assert column(source, "codes") == [[word] for word in words]
    assert column(source, "views") == [{"v": word} for word in words]
    table = whole(source)
    pq.write_table(table, tmp_path / "b.parquet", row_group_size=2)
    assert pq.read_table(tmp_path / "b.parquet").to_pylist() == table.to_pylist()


def test_what_lies_in_the_folder_of_the_output_is_no_input(shards: Path) -> None:
    """At any depth; a file that is given by its own name is input all the same."""
    sources = [str(shards / "**" / "part-*.p*")]
    assert column(open_input(sources, output=shards / "sub"), "x") == [2, 10]
    assert column(open_input([str(shards / "sub" / "part-3.pq")], output=shards / "sub"), "x") == [3]
