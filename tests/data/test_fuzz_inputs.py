"""Inputs made up by chance: whatever the bytes, opening and reading ends in rows or in one named failure."""

import gzip
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbgen.data.readers import Input, open_input
from cbgen.errors import InputError, UsageError

LONG = pytest.mark.long


def examples(count: int) -> settings:
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))


@contextmanager
def saved(name: str, content: bytes) -> Iterator[str]:
    """A file that is there for one example."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(content)
        yield str(path)


def check_rows(source: Input, expected: int) -> None:
    """All ways to read give as many rows, in the input's schema, and these can be written to Parquet and to JSON."""
    assert source.num_rows == expected
    rows = list(source.rows(source.schema.names))
    assert [row.index for row in rows] == list(range(expected))
    assert len(list(source.rows(["absent"]))) == expected
    records = list(source.records())
    assert len(records) == expected
    json.dumps(records, default=str).encode()
    tables = list(source.tables())
    assert sum(table.num_rows for table in tables) == expected
    assert all(table.schema.equals(source.schema) for table in tables)
    if tables and source.schema.names:
        sink = pa.BufferOutputStream()
        pq.write_table(pa.concat_tables(tables), sink)
        assert pq.read_table(pa.BufferReader(sink.getvalue())).num_rows == expected
    for index in {0, expected - 1} & set(range(expected)):
        assert source.place_of(index)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["\ud83d", "\x00", "\ufeff", "\r", "2024-02-29T12:00:00Z"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc") | st.text(max_size=2), inner),
    max_leaves=6,
)
GOOD_LINES = st.dictionaries(st.sampled_from("xyz"), VALUES, max_size=3).map(lambda row: json.dumps(row).encode())
ODD_LINES = st.sampled_from(
    [
        b"",
        b" \t\r",
        b"\r",
        b"\xef\xbb\xbf",
        b"\x0b",
        b"\x1c",
        b"\x85",
        b"{}",
        b"[]",
        b"null",
        b"{",
        b'{"x": NaN}',
        b'{"x": 1e999}',
    ]
) | st.sampled_from([b'{"x": 1, "x": []}', b'{"": 0}', b'{"x": "\\ud83d"}', b'{"\\udc00": 1}', b'\x00{"x": 1}'])
LINES = GOOD_LINES | GOOD_LINES | ODD_LINES | st.binary(max_size=12).map(lambda line: line.replace(b"\n", b""))


@st.composite
def jsonl_files(draw: Any) -> bytes:
    """Lines with either end, the last one with or without, after a byte-order mark or none."""
    lines = draw(st.lists(st.tuples(LINES, st.sampled_from([b"\n", b"\r\n"])), max_size=8))
    content = b"".join(line + end for line, end in lines)
    return bytes(draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + (content if draw(st.booleans()) else content[:-1]))


def num_lines(content: bytes) -> int:
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return sum(bool(line.strip()) for line in lines)


def check_jsonl(content: bytes) -> None:
    """The plain file, and the same content compressed in two pieces, are so many rows."""
    half = len(content) // 2
    compressed = gzip.compress(content[:half]) + gzip.compress(content[half:])
    for name, data in (("rows.jsonl", content), ("rows.jsonl.gz", compressed)):
        with saved(name, data) as path:
            check_rows(open_input([path]), num_lines(content))


@given(jsonl_files())
@examples(120)
def test_any_jsonl_is_as_many_rows_as_lines(content: bytes) -> None:
    """Valid or not, each line that is not blank is a row, however it is read."""
    check_jsonl(content)


@LONG
@given(jsonl_files())
@examples(5000)
def test_any_jsonl_at_length(content: bytes) -> None:
    """The same with many more."""
    check_jsonl(content)


PRIMITIVES = st.sampled_from(
    [
        pa.null(),
        pa.bool_(),
        pa.int8(),
        pa.uint64(),
        pa.float16(),
        pa.float32(),
        pa.float64(),
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.binary(3),
        pa.decimal128(7, 2),
        pa.decimal256(60, 5),
        pa.date32(),
        pa.date64(),
        pa.time32("s"),
        pa.time64("ns"),
        pa.timestamp("s"),
        pa.timestamp("us", tz="Europe/Paris"),
        pa.timestamp("ns"),
        pa.timestamp("ns", tz="UTC"),
        pa.duration("s"),
        pa.duration("ns"),
        pa.uuid(),
        pa.dictionary(pa.int8(), pa.string()),
    ]
)


def nested(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    names = st.lists(st.sampled_from(["a", "b.c", "", "é"]), min_size=1, max_size=2, unique=True)
    structs = names.flatmap(lambda keys: st.tuples(*[inner] * len(keys)).map(lambda types: pa.struct(zip(keys, types))))  # noqa: B905
    return (
        inner.map(pa.list_)
        | inner.map(pa.large_list)
        | inner.map(lambda type_: pa.list_(type_, 2))
        | inner.map(lambda type_: pa.map_(pa.string(), type_))
        | structs
    )


TYPES = st.recursive(PRIMITIVES, nested, max_leaves=4)


def raw_array(type_: pa.DataType, seeds: list[int]) -> pa.Array:  # noqa: PLR0911 (a case for each kind of type)
    """An array of the type, one value per seed; -1 is null. Values are made from bits, so that none is out of reach."""
    if isinstance(type_, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(type_, raw_array(type_.storage_type, seeds))
    valid = pa.array([seed >= 0 for seed in seeds], pa.bool_())
    masked = pc.if_else(valid, pa.array(seeds, pa.int64()), None)
    if pa.types.is_null(type_):
        return pa.nulls(len(seeds))
    if pa.types.is_struct(type_):
        fields = [raw_array(type_.field(place).type, seeds) for place in range(type_.num_fields)]
        return pa.StructArray.from_arrays(fields, fields=list(type_), mask=pc.invert(valid))
    if pa.types.is_dictionary(type_):
        return masked.cast(pa.string()).dictionary_encode().cast(type_)
    if pa.types.is_nested(type_):
        return raw_lists(type_, seeds)
    if pa.types.is_decimal(type_) or pa.types.is_boolean(type_):
        return pa.array(
            [None if seed < 0 else seed % 99 if pa.types.is_decimal(type_) else seed % 2 == 0 for seed in seeds], type_
        )
    if pa.types.is_primitive(type_):
        width = type_.bit_width // 8
        bits = b"".join((max(seed, 0) * 2**56 % 2**63).to_bytes(8, "little")[-width:] for seed in seeds)
        return pa.Array.from_buffers(type_, len(seeds), [valid.buffers()[1], pa.py_buffer(bits)])
    if pa.types.is_fixed_size_binary(type_):
        return pa.array([None if seed < 0 else bytes([seed % 256]) * type_.byte_width for seed in seeds], type_)
    return masked.cast(pa.string()).cast(type_)


def raw_lists(type_: pa.DataType, seeds: list[int]) -> pa.Array:
    """Lists of 0 to 2 values, or of as many as the type says."""
    fixed = pa.types.is_fixed_size_list(type_)
    sizes = [2 if fixed else max(seed, 0) % 3 for seed in seeds]
    inner = [seed + place - (place % 2) for seed, size in zip(seeds, sizes, strict=True) for place in range(size)]
    mask = pa.array([seed < 0 for seed in seeds], pa.bool_())
    if fixed:
        return pa.FixedSizeListArray.from_arrays(raw_array(type_.value_type, inner), type=type_, mask=mask)
    offsets = [sum(sizes[:place]) for place in range(len(sizes) + 1)]
    if pa.types.is_map(type_):
        keys = pa.array([str(place) for place in range(len(inner))], pa.string())
        values = raw_array(type_.item_type, inner)
        marked = [None if seed < 0 else offset for seed, offset in zip(seeds, offsets, strict=False)]
        return pa.MapArray.from_arrays(pa.array([*marked, offsets[-1]], pa.int32()), keys, values, type_)
    kind = pa.LargeListArray if pa.types.is_large_list(type_) else pa.ListArray
    return kind.from_arrays(offsets, raw_array(type_.value_type, inner), type=type_, mask=mask)


@st.composite
def parquet_files(draw: Any) -> tuple[bytes, int]:
    """A file that pyarrow can write, and its number of rows."""
    num_rows = draw(st.integers(0, 6))
    seeds = st.lists(st.integers(-1, 300), min_size=num_rows, max_size=num_rows)
    columns = draw(st.dictionaries(st.sampled_from(["x", "a.b", "a", "é"]), TYPES, max_size=3))
    table = pa.table({name: raw_array(type_, draw(seeds)) for name, type_ in columns.items()})
    sink = pa.BufferOutputStream()
    options = {"row_group_size": draw(st.integers(1, 4)), "use_dictionary": draw(st.booleans())}
    try:
        pq.write_table(table, sink, **options)
    except (pa.ArrowException, OSError):
        return b"", 0
    return sink.getvalue().to_pybytes(), table.num_rows


def check_parquet(content: bytes, num_rows: int) -> None:
    """Opened, it is so many rows, and if pyarrow itself can read it, it is opened."""
    with saved("rows.parquet", content) as path:
        try:
            source = open_input([path])
            check_rows(source, num_rows)
        except (UsageError, InputError) as error:
            assert "\n" not in str(error)
            with pytest.raises((pa.ArrowException, OSError)):
                pq.read_table(path)


@given(parquet_files())
@examples(150)
def test_any_parquet_is_as_many_rows_as_it_says(made: tuple[bytes, int]) -> None:
    """Of any types nested in one another, with nulls at every level."""
    check_parquet(*made)


@LONG
@given(parquet_files())
@examples(5000)
def test_any_parquet_at_length(made: tuple[bytes, int]) -> None:
    """The same with many more."""
    check_parquet(*made)


@given(parquet_files(), st.data())
@examples(60)
def test_a_damaged_parquet_file_is_a_named_failure(made: tuple[bytes, int], data: Any) -> None:
    """A byte changed anywhere, or an end cut off: rows, or one line that says so."""
    content = bytearray(made[0])
    if content and data.draw(st.booleans()):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        content = content[: data.draw(st.integers(0, len(content)))]
    with saved("rows.parquet", bytes(content)) as path:
        try:
            source = open_input([path])
            for _ in source.rows(source.schema.names):
                pass
        except (UsageError, InputError) as error:
            assert "\n" not in str(error)


def test_a_damaged_name_of_a_column_is_a_named_failure() -> None:
    """One that is no text any more is told in one line."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"column_of_names": ["a"]}), sink)
    content = sink.getvalue().to_pybytes().replace(b"column_of_names", b"\xffolumn_of_names")
    with saved("rows.parquet", content) as path:
        with pytest.raises(UsageError, match="not a readable Parquet file") as caught:
            open_input([path])
        assert "\n" not in str(caught.value)
