"""Whole jobs over inputs made up by chance: a row comes out for every row that goes in, or one line says why not."""

import datetime
import json
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from job_harness import cbgen

from cbgen.errors import EXIT_DONE, EXIT_FAILED_ROWS, EXIT_TOO_MANY_FAILED, EXIT_USAGE

BOM = b"\xef\xbb\xbf"
SMALL_JOB = ("--model", "tiny-random", "--max-tokens", 2, "--num-blocks", 64)


def examples(count: int) -> settings:
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))


def check_job(name: str, content: bytes, ids: list[int | None]) -> None:
    """Runs a job over a file of this name, once for each kind of output. ids: the column `id` of each row, or None."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, name)
        source.write_bytes(content)
        for suffix in (".parquet", ".jsonl"):
            check_output(source, Path(folder, "out" + suffix), ids)


def check_output(source: Path, out: Path, ids: list[int | None]) -> None:
    result = cbgen("run", source, "--out", out, *SMALL_JOB)
    if result.exit_code == EXIT_USAGE:
        assert len(result.output.strip().splitlines()) == 1, result.output
        assert not out.exists()
        return
    rows = told_rows(out)
    failed = [row["error"] is not None for row in rows]
    assert [row.get("id") for row in rows] == ids
    assert all(failed[place] == (row["completion"] is None) for place, row in enumerate(rows))
    expected = EXIT_TOO_MANY_FAILED if failed and all(failed) else EXIT_FAILED_ROWS if any(failed) else EXIT_DONE
    assert result.exit_code == expected, result.output
    verified = cbgen("verify", out)
    assert verified.exit_code == 0, verified.output


def told_rows(out: Path) -> list[dict[str, Any]]:
    """The rows of an output without the input's own columns, of which Python cannot hold every value."""
    if out.suffix == ".jsonl":
        with open(out, "rb") as lines:  # which end at line feeds alone, whatever else ends a line of text
            return [json.loads(line) for line in lines]
    names = [name for name in ("id", "completion", "error") if name in pq.read_schema(out).names]
    return pq.read_table(out, columns=names).to_pylist()


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["\ud83d", "\x00", "\ue000", "\r\n", " ", "2024-02-29T12:00:00Z", 10**400])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc") | st.text(max_size=2), inner),
    max_leaves=5,
)
CONTENTS = st.text(max_size=4) | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=3)}))
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": CONTENTS | VALUES},
        optional={"name": VALUES},
    ),
    max_size=3,
)
TALKS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": st.text(max_size=4)}),
    min_size=1,
    max_size=2,
)
Typed = tuple[pa.DataType, st.SearchStrategy[Any]]
# Of each column, the type and values that it is meant for; any others may stand there too.
COLUMNS: dict[str, Typed] = {
    "messages": (pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])), TALKS),
    "prompt_ids": (pa.list_(pa.int32()), st.lists(st.integers(0, 258), max_size=4)),
    "max_tokens": (pa.int64(), st.integers(0, 3)),
    "temperature": (pa.float32(), st.floats(0, 2, width=32)),
    "top_p": (pa.float64(), st.floats(0, 1)),
    "top_k": (pa.int8(), st.integers(-2, 5)),
    "seed": (pa.uint64(), st.integers(0, 2**64 - 1)),
    "ignore_eos": (pa.bool_(), st.booleans()),
    "x": (pa.string(), st.text(max_size=3)),
}
PROMPTS = st.text(min_size=1, max_size=6) | st.just("a" * 2100) | st.just("b" * 1100)
ODD_LINES = [
    b"",
    b" \t\r",
    BOM,
    b"\x0b",
    b"\x85",
    b"{}",
    b"[]",
    b"null",
    b"{",
    b'{"prompt": NaN}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "prompt": []}',
    b'{"prompt": "a", "": 0}',
    *(b'{"prompt": "a", "x": ' + b"[" * depth + b"]" * depth + b"}" for depth in (198, 199, 200, 450, 970, 1000)),
    b'{"prompt": "\\ud83d"}',
    b'{"prompt": "a", "\\udc00": 1}',
    b'{"prompt": "a", "completion": "b"}',
    b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    b'\x00{"prompt": "a"}',
    *(b'{"prompt": "a", "x": ' + b"[" * depth + b"]" * depth + b"}" for depth in (30, 300, 100_000)),
]


def mostly(fitting: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Four of five values are what is meant, so that whole rows are, too."""
    odd = VALUES | MESSAGES
    return st.integers(0, 4).flatmap(lambda which: odd if which == 4 else fitting)


@st.composite
def object_lines(draw: Any) -> list[dict[str, Any]]:
    """Rows that share some columns, each with a prompt nearly always, of their own or of any type."""
    names = draw(st.lists(st.sampled_from(sorted(COLUMNS)), max_size=4, unique=True))
    rows = []
    for _ in range(draw(st.integers(0, 6))):
        row = {name: draw(mostly(COLUMNS[name][1])) for name in names if draw(st.integers(0, 3))}
        rows.append({"prompt": draw(mostly(PROMPTS)), **row} if draw(st.integers(0, 7)) else row)
    return rows


@st.composite
def jsonl_files(draw: Any) -> bytes:
    """Objects, broken lines and any bytes mixed, with either line end, after a byte-order mark or none."""
    rows = draw(object_lines())
    lines = [json.dumps({"id": number, **row}).encode() for number, row in enumerate(rows)]
    odd = st.sampled_from(ODD_LINES) | st.binary(max_size=12).map(lambda line: line.replace(b"\n", b""))
    for line in draw(st.lists(odd, max_size=3)):
        lines.insert(draw(st.integers(0, len(lines))), line)
    content = b"".join(line + draw(st.sampled_from([b"\n", b"\r\n"])) for line in lines)
    return bytes(draw(st.sampled_from([b"", BOM])) + (content if draw(st.booleans()) else content[:-1]))


def ids_of_lines(content: bytes) -> list[int | None]:
    """Of every line that is not blank: the id of the object on it, or None."""
    lines = [line.strip() for line in content.removeprefix(BOM).split(b"\n")]
    return [_id_of(line) for line in lines if line]


def _id_of(line: bytes) -> int | None:
    try:
        value = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return value.get("id") if isinstance(value, dict) else None


def check_jsonl(content: bytes) -> None:
    check_job("in.jsonl", content, ids_of_lines(content))


LATER = st.datetimes(datetime.datetime(1700, 1, 1), datetime.datetime(2200, 1, 1))
SIMPLE_TYPES: list[Typed] = [
    (pa.null(), st.none()),
    (pa.bool_(), st.booleans()),
    (pa.int8(), st.integers(-2, 3)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.float32(), st.floats(width=32)),
    (pa.float64(), st.floats(0, 2) | st.floats()),
    (pa.string(), st.text(max_size=5)),
    (pa.large_string(), st.text(max_size=5)),
    (pa.binary(), st.binary(max_size=3)),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
    (pa.decimal128(7, 2), st.integers(-(10**7) + 1, 10**7 - 1).map(lambda number: Decimal(number).scaleb(-2))),
    (pa.date32(), LATER.map(datetime.datetime.date)),
    (pa.time64("ns"), st.integers(0, 86_399 * 10**9)),
    (pa.timestamp("s"), st.integers(-(2**40), 2**40)),
    (pa.timestamp("us", tz="Europe/Paris"), LATER),
    (pa.timestamp("ns", tz="UTC"), st.integers(-(2**62), 2**62)),
    (pa.duration("ns"), st.integers(-(2**60), 2**60)),
    (pa.dictionary(pa.int8(), pa.string()), st.text(max_size=2)),
]


def nested_types(inner: st.SearchStrategy[Typed]) -> st.SearchStrategy[Typed]:
    def list_of(typed: Typed) -> Typed:
        return pa.list_(typed[0]), st.lists(st.none() | typed[1], max_size=2)

    def pair_of(typed: Typed) -> Typed:
        return pa.list_(typed[0], 2), st.lists(st.none() | typed[1], min_size=2, max_size=2)

    def map_to(typed: Typed) -> Typed:
        keys = st.lists(st.tuples(st.text(max_size=2), st.none() | typed[1]), max_size=2)
        return pa.map_(pa.string(), typed[0]), keys

    def message_of(typed: Typed) -> Typed:
        fields = {"role": st.just("user"), "content": st.none() | typed[1]}
        return pa.struct([("role", pa.string()), ("content", typed[0])]), st.fixed_dictionaries(fields)

    return inner.map(list_of) | inner.map(pair_of) | inner.map(map_to) | inner.map(message_of)


# Pyarrow writes views in columns of their own only.
VIEWS: Typed = (pa.string_view(), st.text(max_size=20))
TYPES = st.recursive(st.sampled_from(SIMPLE_TYPES), nested_types, max_leaves=3) | st.just(VIEWS)


def column(draw: Any, typed: Typed, num_rows: int) -> pa.Array:
    """Values of a type, some of them null."""
    type_, values = typed
    made = draw(st.lists(values | values | st.none(), min_size=num_rows, max_size=num_rows))
    if pa.types.is_dictionary(type_):
        return pa.array(made, type_.value_type).dictionary_encode().cast(type_)
    return pa.array(made, type_)


def not_utf8(num_rows: int) -> pa.Array:
    """Texts that no decoder takes, which Parquet files of other tools hold."""
    values = [[b"\xff\xfe", b"fine"][row % 2] for row in range(num_rows)]
    return pa.array(values, pa.binary()).view(pa.string())


@st.composite
def parquet_files(draw: Any) -> tuple[bytes, list[int | None]]:
    """A file that pyarrow can write, and the ids of its rows."""
    num_rows = draw(st.integers(0, 6))
    names = draw(st.lists(st.sampled_from(sorted(COLUMNS)), max_size=3, unique=True))
    prompts = draw(st.lists(PROMPTS, min_size=num_rows, max_size=num_rows))
    columns = {"id": pa.array(range(num_rows), pa.int64()), "prompt": pa.array(prompts, pa.string())}
    if not draw(st.integers(0, 4)):
        columns["prompt"] = not_utf8(num_rows) if draw(st.booleans()) else column(draw, draw(TYPES), num_rows)
    for name in names:
        typed = COLUMNS[name] if draw(st.integers(0, 2)) and name != "x" else draw(TYPES)
        columns[name] = column(draw, typed, num_rows)
    sink = pa.BufferOutputStream()
    options = {"row_group_size": draw(st.integers(1, 4)), "use_dictionary": draw(st.booleans())}
    try:
        pq.write_table(pa.table(columns), sink, **options)
    except pa.ArrowException:  # some nested arrays are more than pyarrow's own writer can do
        reject()
    return sink.getvalue().to_pybytes(), list(range(num_rows))


@given(jsonl_files())
@examples(40)
def test_any_jsonl_is_a_whole_job(content: bytes) -> None:
    """Whatever the lines hold, none is lost, doubled or moved, and nothing but the exit code tells of bad ones."""
    check_jsonl(content)


@pytest.mark.long
@given(jsonl_files())
@examples(600)
def test_any_jsonl_is_a_whole_job_at_length(content: bytes) -> None:
    """The same with many more."""
    check_jsonl(content)


@given(parquet_files())
@examples(40)
def test_any_parquet_is_a_whole_job(made: tuple[bytes, list[int | None]]) -> None:
    """Columns of any type, also those that override options, leave as many rows as there were, in order."""
    check_job("in.parquet", *made)


@pytest.mark.long
@given(parquet_files())
@examples(600)
def test_any_parquet_is_a_whole_job_at_length(made: tuple[bytes, list[int | None]]) -> None:
    """The same with many more."""
    check_job("in.parquet", *made)
