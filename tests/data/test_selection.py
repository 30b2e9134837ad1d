"""The rows of one run, as tables and as records: the same ones, whatever their types, whichever shard's they are."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from parts_harness import parquet_input

from cbgen.data.readers import open_input
from cbgen.data.selection import Selection, taken

NUM_ROWS = 2500
MASKS = {
    "none": np.zeros(NUM_ROWS, dtype=bool),
    "all": np.ones(NUM_ROWS, dtype=bool),
    "every third": np.arange(NUM_ROWS) % 3 == 1,
    "the last": np.arange(NUM_ROWS) == NUM_ROWS - 1,
    "the second half": np.arange(NUM_ROWS) >= NUM_ROWS // 2,
}
# Arrow has no take for some of these.
COLUMNS = {
    "string_view": pa.array(["a", None, "c"], pa.string_view()),
    "list of string_view": pa.array([["a"], None, []], pa.list_(pa.string_view())),
    "dictionary": pa.array(["a", None, "c"]).dictionary_encode(),
    "struct": pa.array([{"x": 1}, None, {"x": 3}]),
    "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
    "null": pa.nulls(3),
    "uuid": pa.array([b"0" * 16, None, b"1" * 16], pa.uuid()),
}


def values(selection: Selection) -> list[Any]:
    return [value for table in selection.tables() for value in table["x"].to_pylist()]


def test_without_a_mask_all_rows_are_there(tmp_path: Path) -> None:
    """As tables of the input's schema, as records, and by their places."""
    source = parquet_input(tmp_path, pa.table({"x": range(NUM_ROWS)}).replace_schema_metadata({"owner": "me"}))
    selection = Selection(source)
    assert selection.num_rows == NUM_ROWS
    assert values(selection) == [record["x"] for record in selection.records()] == list(range(NUM_ROWS))
    assert selection.row_indices.tolist() == list(range(NUM_ROWS))
    assert selection.schema.metadata[b"owner"] == b"me"
    assert {table.schema for table in selection.tables()} == {pa.schema([("x", pa.int64())])}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_mask_chooses_rows(tmp_path: Path, mask: np.ndarray) -> None:
    """In input order, over several files, batches and row groups; no table is empty."""
    for name, first, end in (("a", 0, 1100), ("b", 1100, 1101), ("c", 1101, NUM_ROWS)):
        pq.write_table(pa.table({"x": range(first, end)}), tmp_path / f"{name}.parquet", row_group_size=700)
    selection = Selection(open_input([str(tmp_path)]), mask)
    expected = np.flatnonzero(mask).tolist()
    assert selection.num_rows == len(expected)
    assert values(selection) == [record["x"] for record in selection.records()] == expected
    assert selection.row_indices.tolist() == expected
    assert all(table.num_rows for table in selection.tables())


@pytest.mark.parametrize("column", COLUMNS.values(), ids=COLUMNS)
def test_rows_of_any_type_can_be_chosen(tmp_path: Path, column: pa.Array) -> None:
    """Tables and records agree, and the type stays."""
    source = parquet_input(tmp_path, {"x": column})
    selection = Selection(source, np.array([True, False, True]))
    (table,) = selection.tables()
    assert table.schema.field("x").type == source.schema.field("x").type
    assert table["x"].to_pylist() == [column[0].as_py(), column[2].as_py()]
    assert [record["x"] for record in selection.records()] == table["x"].to_pylist()


@pytest.mark.parametrize("column", COLUMNS.values(), ids=COLUMNS)
def test_taken_rows_may_repeat_and_change_places(column: pa.Array) -> None:
    """The rows asked for, in that order; none where none was asked for."""
    table = pa.table({"x": column})
    assert taken(table, np.array([2, 0, 0, 1]))["x"].to_pylist() == [column[place].as_py() for place in (2, 0, 0, 1)]
    empty = taken(table, np.array([], dtype=np.int64))
    assert (empty.num_rows, empty.schema) == (0, table.schema)


def test_a_malformed_row_can_be_chosen(tmp_path: Path) -> None:
    """It is empty as a record, null in a table, and counts like any other."""
    (tmp_path / "in.jsonl").write_text('{"x": 0}\n{"x\n{"x": 2}\n{"x": 3}\n')
    selection = Selection(open_input([str(tmp_path / "in.jsonl")]), np.array([False, True, False, True]))
    assert list(selection.records()) == [{}, {"x": 3}]
    assert values(selection) == [None, 3]
