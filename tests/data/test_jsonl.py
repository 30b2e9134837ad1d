"""JSONL shards: bad lines are error rows, mixed types find one Arrow type, and records keep what the line says."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cbgen.data.batches import BATCH_ROWS as BATCH_LINES
from cbgen.data.jsonl import JsonlFile
from cbgen.data.origins import Origin
from cbgen.data.readers import open_input
from cbgen.errors import UsageError

GOOD = b'{"x": "one"}'


def opened(folder: Path, content: bytes) -> JsonlFile:
    path = folder / "rows.jsonl"
    path.write_bytes(content)
    return JsonlFile(Origin.local(path))


def with_values(folder: Path, values: list[Any]) -> JsonlFile:
    """One line for each value of the column `x`."""
    return opened(folder, b"".join(json.dumps({"x": value}).encode() + b"\n" for value in values))


def records(file: JsonlFile) -> list[dict[str, Any]]:
    return [values for values, _ in file.records(None)]


def column(file: JsonlFile, name: str = "x") -> list[Any]:
    """The column's values as Arrow holds them, after a round trip through Parquet."""
    table = pa.concat_tables(file.tables(file.schema))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return pq.read_table(pa.BufferReader(sink.getvalue()))[name].to_pylist()


@pytest.mark.parametrize(
    "content",
    [
        b'{"x": "one"}\n{"x": "two"}\n',
        b'{"x": "one"}\n{"x": "two"}',
        b'\xef\xbb\xbf{"x": "one"}\n{"x": "two"}\n',
        b'{"x": "one"}\r\n{"x": "two"}\r\n',
        b'\n\n{"x": "one"}\n \t \r\n{"x": "two"}\n\n',
        b'\xef\xbb\xbf\r\n  {"x": "one"}  \r\n{"x": "two"}',
    ],
    ids=["plain", "no last newline", "byte-order mark", "CRLF", "blank lines", "all"],
)
def test_framing_does_not_matter(tmp_path: Path, content: bytes) -> None:
    """Byte-order mark, CRLF, blank lines and a missing last newline are read as if they were not there."""
    file = opened(tmp_path, content)
    assert list(file.records(None)) == [({"x": "one"}, None), ({"x": "two"}, None)]
    assert column(file) == ["one", "two"]
    assert file.num_rows == 2


BAD_LINES = {
    "cut": (b'{"x": "two", "y', "not valid JSON"),
    "not JSON": (b"two", "not valid JSON"),
    "raw control character": (b'{"x": "a\x00b"}', "not valid JSON"),
    "two objects": (b"{}{}", "not valid JSON"),
    "number of 5,000 digits": (b'{"x": ' + b"9" * 5000 + b"}", "not valid JSON"),
    "invalid UTF-8": (b'{"x": "caf\xe9"}', "not UTF-8"),
    "surrogate as three bytes": (b'{"x": "\xed\xa0\xbd"}', "not UTF-8"),
    "list": (b'["x"]', "a JSON object is expected"),
    "number": (b"3", "a JSON object is expected"),
    "text": (b'"x"', "a JSON object is expected"),
    "null": (b"null", "a JSON object is expected"),
    "nested too deeply": (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested more than 200 deep"),
}


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_an_error_row(tmp_path: Path, line: bytes, reason: str) -> None:
    """It is a row whose error names file, line (blank ones counted) and reason; its neighbours are unharmed."""
    file = opened(tmp_path, b"\n".join([GOOD, b"", line, GOOD, b""]))
    (first, bad, last) = file.records(["x"])
    assert first == last == ({"x": "one"}, None)
    assert bad[0] == {"x": None}
    assert str(bad[1]).startswith("rows.jsonl, line 3: ")
    assert reason in str(bad[1])
    assert records(file)[1] == {}
    assert column(file) == ["one", None, "one"]
    assert file.num_rows == 3


def test_a_surrogate_deep_inside_costs_no_other_row(tmp_path: Path) -> None:
    """A line that can be parsed but not searched for surrogates at its depth is a row, good or bad, like any other."""
    deep = b'{"x": ' + b"[" * 700 + rb'"\ud83d"' + b"]" * 700 + b"}"
    file = opened(tmp_path, b"\n".join([GOOD, deep, GOOD]))
    first, _, last = file.records(["x"])
    assert first == last == ({"x": "one"}, None)
    assert file.num_rows == 3


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (rb"\ud83d", "\\ud83d"),
        (rb"a\uDE00b", "a\\ude00b"),
        (rb"\ud83d\ude00", "\U0001f600"),
        (rb"\\ud83d", "\\ud83d"),
        (rb"\u0000", "\x00"),
        (rb"\ue000\uf8ff", "\ue000\uf8ff"),
        ("\U0010fffd\ue000".encode(), "\U0010fffd\ue000"),
        (rb"\u2028", "\u2028"),
    ],
    ids=["half", "other half", "pair", "not an escape", "NUL", "private use", "raw private use", "line separator"],
)
def test_unusual_characters_are_kept(tmp_path: Path, written: bytes, read: str) -> None:
    """Half a surrogate pair stays readable as its escape; any real character stays as it is, in keys and values."""
    file = opened(tmp_path, b'{"x": "%s", "%s": [{"k": "%s"}]}\n' % (written, written, written))
    assert records(file) == [{"x": read, read: [{"k": read}]}]
    assert column(file) == [read]
    assert column(file, read) == [[{"k": read}]]


MIXED = {
    "int and text": ([1, "1"], ["1", "1"]),
    "truth and int": ([True, 1], ["true", "1"]),
    "text and list": (["é", ["é", None]], ["é", '["é", null]']),
    "list and object": ([[1], {"a": 1.5}], ["[1]", '{"a": 1.5}']),
    "lists of two types": ([["a"], [1]], ['["a"]', "[1]"]),
    "content as text and as parts": (
        [{"content": "a"}, {"content": ["a"]}],
        ['{"content": "a"}', '{"content": ["a"]}'],
    ),
    "beyond 64 bits": ([1, 2**70], ["1", str(2**70)]),
    "beyond 63 bits, and negative": ([-1, 2**63], ["-1", str(2**63)]),
}


@pytest.mark.parametrize("distance", [1, BATCH_LINES])
@pytest.mark.parametrize(("values", "texts"), MIXED.values(), ids=MIXED)
def test_a_column_without_a_common_type_is_json_text(
    tmp_path: Path, values: list[Any], texts: list[str], distance: int
) -> None:
    """In Arrow what is no string becomes JSON text, near or far from each other; records stay verbatim."""
    lines = [values[0]] * distance + [values[1], None]
    file = with_values(tmp_path, lines)
    assert file.schema.field("x").type == pa.string()
    assert column(file) == [texts[0]] * distance + [texts[1], None]
    assert [record["x"] for record in records(file)] == lines


ROUNDED = 2**60 + 1
WIDENED = {
    "numbers": ([1, 2.5], [1.0, 2.5]),
    "in a list": ([[1], [2.5, None]], [[1.0], [2.5, None]]),
    "in an object": ([{"a": 1}, {"a": 2.5}], [{"a": 1.0}, {"a": 2.5}]),
    "an integer that a float rounds": ([0.5, ROUNDED], [0.5, float(ROUNDED)]),
    "the same, inside": ([{"a": [0.5]}, {"a": [ROUNDED]}], [{"a": [0.5]}, {"a": [float(ROUNDED)]}]),
}


@pytest.mark.parametrize("distance", [1, BATCH_LINES])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize(("values", "widened"), WIDENED.values(), ids=WIDENED)
def test_integers_and_floats_widen(
    tmp_path: Path, values: list[Any], widened: list[Any], order: tuple[int, int], distance: int
) -> None:
    """Integers beside floats are floats, whichever comes first and however many lines lie between."""
    first, second = order
    file = with_values(tmp_path, [values[first]] * distance + [values[second]])
    assert file.schema.field("x").type == pa.array(widened).type
    assert column(file) == [widened[first]] * distance + [widened[second]]


@pytest.mark.parametrize("value", [{}, [{}], {"a": {}}, {"a": [{"b": {}}]}])
@pytest.mark.parametrize("distance", [1, BATCH_LINES])
def test_empty_objects_can_be_written_to_parquet(tmp_path: Path, value: Any, distance: int) -> None:
    """Parquet has no type for an object without keys, so such a column is JSON text, and no row is lost."""
    file = with_values(tmp_path, [value] * distance + [None])
    assert column(file) == [json.dumps(value)] * distance + [None]
    assert [record["x"] for record in records(file)] == [value] * distance + [None]


def test_an_object_that_is_empty_at_first_has_the_later_keys(tmp_path: Path) -> None:
    """An empty object beside others is one whose keys are all null."""
    file = with_values(tmp_path, [{}] * BATCH_LINES + [{"a": 1}])
    assert column(file) == [{"a": None}] * BATCH_LINES + [{"a": 1}]


@pytest.mark.parametrize("value", ["text", 7, 2.5, True, {"a": ["b"]}, [{"a": 1}]])
def test_a_column_that_is_null_for_2000_lines_takes_the_later_type(tmp_path: Path, value: Any) -> None:
    """The type is that of the whole file, not that of its beginning."""
    lines = [None] * 2000 + [value]
    file = with_values(tmp_path, lines)
    assert file.schema.field("x").type == pa.array([value]).type
    assert column(file) == lines


def test_missing_keys_are_null_in_arrow_and_absent_in_records(tmp_path: Path) -> None:
    """Columns come in order of first appearance; a record has the keys of its own line only."""
    lines = [{"b": 1}, {"a": "x"}, {}, {"a": None, "c": [1]}]
    file = opened(tmp_path, b"\n".join(json.dumps(line).encode() for line in lines))
    assert file.schema.names == ["b", "a", "c"]
    assert [column(file, name) for name in "bac"] == [
        [1, None, None, None],
        [None, "x", None, None],
        [None] * 3 + [[1]],
    ]
    assert records(file) == lines
    assert [values for values, _ in file.records(["c", "zzz"])] == [{"c": c, "zzz": None} for c in [None] * 3 + [[1]]]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", 0),
        (b"\n \r\n", 0),
        (b"\xef\xbb\xbf", 0),
        (b"{}", 1),
        (GOOD + b"\n[]\n\n{", 3),
        ((GOOD + b"\n") * 3000, 3000),
    ],
)
def test_num_rows_counts_every_line_with_something_on_it(tmp_path: Path, content: bytes, expected: int) -> None:
    """Malformed lines are rows; blank lines are none; records() gives exactly as many."""
    file = opened(tmp_path, content)
    assert file.num_rows == len(records(file)) == expected


def test_a_jsonl_shard_takes_the_type_of_the_whole_input(tmp_path: Path) -> None:
    """Beside other shards, integers are given as floats, an all-null column and a missing one as the others' type."""
    pq.write_table(pa.table({"x": [0.5], "y": ["a"], "z": [1]}), tmp_path / "a.parquet")
    opened(tmp_path, b'{"x": 1, "y": null}\n{"x": 9007199254740993, "y": null}\n')
    tables = list(open_input([str(tmp_path)]).tables())
    assert [field.type for field in tables[1].schema] == [pa.float64(), pa.string(), pa.int64()]
    assert tables[1].to_pylist() == [{"x": 1.0, "y": None, "z": None}, {"x": float(2**53), "y": None, "z": None}]


def test_what_cannot_be_opened_is_a_usage_error(tmp_path: Path) -> None:
    """A path that is no file is refused in one line that names it."""
    with pytest.raises(UsageError, match="cannot be read") as caught:
        JsonlFile(Origin.local(tmp_path))
    assert str(tmp_path) in str(caught.value)
