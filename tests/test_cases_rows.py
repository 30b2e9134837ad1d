"""Rows and files that broke other tools: each goes in as a whole job, and what comes out is looked at."""

import datetime
import gzip
import json
import shutil
import uuid
from collections.abc import Callable
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_harness import SAMPLES, cbgen, read_rows, run_tiny, start_process, without_timing, write_jsonl

from cbgen.models import tiny_random

# Each kind of input, and the tests that show what becomes of it.
CASES = {
    "a prompt too long for context or cache": ["test_a_prompt_that_never_fits"],
    "a prompt that is no text": ["test_a_prompt_that_is_no_text"],
    "identical prompts": ["test_identical_prompts"],
    "duplicate ids": ["test_duplicate_ids"],
    "a torn line": ["test_a_torn_line", "test_values_nested_ever_deeper", "test_a_deep_value_beside_a_text"],
    "byte-order mark, CRLF, blank lines": ["test_marks_and_blank_lines"],
    "characters that are none": ["test_odd_characters", "test_a_text_that_is_not_utf8"],
    "several compressed frames": ["test_several_frames"],
    "shards of differing schemas": [
        "test_shards_are_unified",
        "test_shards_are_refused",
        "test_a_type_that_changes_late",
    ],
    "all null in the first part": ["test_all_null_at_first"],
    "messages of several forms": ["test_messages_of_several_forms", "test_keys_that_arrow_padded"],
    "columns of any type": ["test_columns_pass_through", "test_an_extension_type_that_is_not_known"],
    "row groups of any size": ["test_row_groups_of_any_size", "test_a_column_above_two_gib"],
    "the input changes between runs": ["test_input_changed_after_a_stop", "test_input_changed_after_the_end"],
    "the output holds another job's files": ["test_an_output_of_another_job", "test_a_folder_with_other_files"],
    "a torn output": ["test_a_torn_output"],
}


def test_every_case_has_its_tests() -> None:
    """Each of the sixteen kinds names tests that are here, and every test here belongs to one."""
    assert len(CASES) == 16
    here = {name for name in globals() if name.startswith("test_")} - {"test_every_case_has_its_tests"}
    assert {name for names in CASES.values() for name in names} == here
    assert all(CASES.values())


def assert_passed_through(table: pa.Table, out: Path, num_samples: int = 1) -> None:
    """Every column of the input with its types and values, in order, once for each sample."""
    result = pq.read_table(out).select(table.schema.names).replace_schema_metadata(None).combine_chunks()
    # Row by row, since not every type can be taken from by a list of places.
    expected = pa.concat_tables(table.slice(row, 1) for row in range(table.num_rows) for _ in range(num_samples))
    assert result.schema.equals(table.schema.remove_metadata(), check_metadata=True)
    assert result.equals(expected.replace_schema_metadata(None).combine_chunks())


def write_shards(folder: Path, *shards: dict[str, Any]) -> Path:
    """A folder of Parquet files a.parquet, b.parquet, ..."""
    folder.mkdir()
    for letter, columns in zip("abcdef", shards, strict=False):
        pq.write_table(pa.table(columns), folder / f"{letter}.parquet")
    return folder


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize(
    ("options", "lengths"),
    [(("--max-model-len", 100), ("120", "100")), (("--num-blocks", 5, "--page-size", 16), ("120", "80"))],
    ids=["context", "cache"],
)
def test_a_prompt_that_never_fits(tmp_path: Path, suffix: str, options: tuple[object, ...], lengths: Any) -> None:
    """One prompt among good ones is longer than context or cache: an error row with both lengths, the others finish."""
    rows = [{"id": number, "prompt": "x" * length} for number, length in enumerate((4, 120, 40, 1))]
    out = run_tiny(
        write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / f"out{suffix}", "--max-tokens", 2, *options, code=3
    )
    assert [(row["id"], row["prompt"]) for row in out] == [(row["id"], row["prompt"]) for row in rows]
    assert [row["finish_reason"] for row in out] == ["length", "error", "length", "length"]
    assert [row["completion_tokens"] for row in out] == [2, 0, 2, 2]
    assert all(length in out[1]["error"] for length in lengths), out[1]["error"]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_prompt_that_is_no_text(tmp_path: Path, suffix: str) -> None:
    """Empty, null, number, truth value, list, object and absent prompts are error rows; white space is a prompt."""
    prompts = ["", " ", "\n\t", None, 42, 4.5, True, ["a"], {"a": "b"}]
    rows = [{"id": number, "prompt": prompt} for number, prompt in enumerate(prompts)] + [{"id": 9}]
    out = run_tiny(write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / f"out{suffix}", "--max-tokens", 2, code=3)
    words = ["empty", None, None, "null", "a number (42)", "4.5", "a truth value", "a list", "an object", "null"]
    assert [row["id"] for row in out] == list(range(10))
    for row, told in zip(out, words, strict=True):
        assert (row["error"] is None) == (told is None), row
        assert told is None or told in row["error"]
    assert [row["completion_tokens"] for row in out[1:3]] == [2, 2]
    if suffix == ".jsonl":
        assert [row.get("prompt") for row in out] == [*prompts, None], "written back as they were"


@pytest.mark.parametrize("count", [2, 1000])
def test_identical_prompts(tmp_path: Path, count: int) -> None:
    """As many rows come out as went in, each with its own columns; greedy ones are generated once."""
    rows = [{"id": number, "prompt": "same"} for number in range(count)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    out = run_tiny(source, tmp_path / "out.parquet", "--max-tokens", 4, "--summary", tmp_path / "s.json")
    assert [row["id"] for row in out] == list(range(count))
    assert len({(row["completion"], row["completion_tokens"], row["error"]) for row in out}) == 1
    summary = json.loads((tmp_path / "s.json").read_text())
    assert (summary["deduplicated"], summary["output_tokens"]) == (count - 1, 4)
    drawn = run_tiny(source, tmp_path / "drawn.parquet", "--max-tokens", 4, "--temperature", 1.5)
    assert len(drawn) == count
    assert len({row["completion"] for row in drawn}) > 1, "sampled ones are drawn apart"


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_duplicate_ids(tmp_path: Path, kind: str) -> None:
    """An id that is there twice is refused before work starts, with the first pair of rows by name."""
    ids = ["a", "b", "c", "b", "a"]
    if kind == "jsonl":
        source = write_jsonl(tmp_path / "in.jsonl", [{"id": own, "prompt": own} for own in ids])
    else:
        source = tmp_path / "in.parquet"
        pq.write_table(pa.table({"id": ids, "prompt": ids}), source, row_group_size=2)
    place = "line" if kind == "jsonl" else "row"
    job = ("run", source, "--model", "tiny-random", "--out", tmp_path / "out.parquet", "--max-tokens", 1)
    refused = cbgen(*job, "--id-column", "id")
    assert refused.exit_code == 2
    assert refused.output.strip() == (
        f"cbgen: --id-column id: 'b' is there twice, at in.{kind}, {place} 2 and in.{kind}, {place} 4; ids must differ"
    )
    assert not list(tmp_path.glob("out*"))
    assert cbgen(*job).exit_code == 0, "without an id column they are columns like others"


@pytest.mark.parametrize("cut", ['{"id": 1, "prompt": "to', '{"id": 1, "prompt": "a"}{', '{"id": 1,', "\x00\x00\x00"])
def test_a_torn_line(tmp_path: Path, cut: str) -> None:
    """A line cut in the middle is an error row with file and line; the next one is unharmed; so with a last one."""
    good = '{"id": 0, "prompt": "a"}\n'
    (tmp_path / "in.jsonl").write_text(f"{good}{cut}\n{good}{good.strip()}")
    first, torn, third, last = run_tiny(tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--max-tokens", 2, code=3)
    assert torn["error"].startswith("in.jsonl, line 2: ")
    assert torn["finish_reason"] == "error"
    assert "id" not in torn and torn["completion"] is None
    for row in (first, third, last):
        assert (row["id"], row["completion_tokens"], row["error"]) == (0, 2, None)
    (tmp_path / "in.jsonl").write_text(f"{good}{cut}")
    rows = run_tiny(tmp_path / "in.jsonl", tmp_path / "last.parquet", "--max-tokens", 2, code=3)
    assert [row["id"] for row in rows] == [0, None]
    assert rows[1]["error"].startswith("in.jsonl, line 2: ")


def test_values_nested_ever_deeper(tmp_path: Path) -> None:
    """However deep a line nests, it is an error row or a whole one: none is generated and written without values."""
    depths = [*range(150, 240, 5), *range(850, 1020, 5)]
    lines = [f'{{"prompt": "a", "x{depth}": {"[" * depth}{"]" * depth}}}' for depth in depths]
    (tmp_path / "in.jsonl").write_text("\n".join(['{"prompt": "a"}', *lines]))
    rows = run_tiny(tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--max-tokens", 1, code=3)[1:]
    assert len(rows) == len(depths)
    cut = [
        d for d, row in zip(depths, rows, strict=True) if row["error"] is None and not {"prompt", f"x{d}"} <= row.keys()
    ]
    assert cut == []


def test_a_deep_value_beside_a_text(tmp_path: Path) -> None:
    """A column that holds a text in one row and very deep lists in another is text, or an error row; never a crash."""
    lines = ['{"prompt": "a", "x": "text"}', f'{{"prompt": "b", "x": {"[" * 600}{"]" * 600}}}', '{"prompt": "c"}']
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    job = ("run", tmp_path / "in.jsonl", "--model", "tiny-random", "--max-tokens", 1, "--out", tmp_path / "out.parquet")
    assert cbgen(*job).exit_code in (0, 3)
    rows = read_rows(tmp_path / "out.parquet")
    assert [row["error"] is None for row in rows][::2] == [True, True]
    assert [row["x"] for row in rows][::2] == ["text", None]


@pytest.mark.parametrize("content", ["{0}\n{1}\n{2}\n", "{0}\n\n \n{1}\n\n{2}", "\n\n{0}\n{1}\n{2}\n\n\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_marks_and_blank_lines(tmp_path: Path, content: str, mark: str, end: str) -> None:
    """Byte-order mark, CRLF and blank lines are read as if they were not there."""
    rows = [{"id": number, "prompt": f"p{number}"} for number in range(3)]
    text = mark + content.format(*map(json.dumps, rows)).replace("\n", end)
    (tmp_path / "in.jsonl").write_bytes(text.encode())
    out = run_tiny(tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--max-tokens", 1)
    assert [{"id": row["id"], "prompt": row["prompt"]} for row in out] == rows


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_odd_characters(tmp_path: Path, suffix: str) -> None:
    """Half a surrogate pair stands as its escape; NUL, private use and the like come back as they were."""
    prompts = ["fine", "a\x00b", "\x00", "\ue000\U000f0000", "\ufffe\uffff", "\u202eabc\u0085\u2028", "\U0001f600"]
    lines = [json.dumps({"prompt": prompt, "copy": prompt}) for prompt in prompts]
    lines += [r'{"prompt": "\ud83d", "copy": "\udc00\ud800"}', r'{"prompt": "\ud83d\ude00", "copy": "\ud83d\\ud83d"}']
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    path = tmp_path / f"out{suffix}"
    result = cbgen("run", tmp_path / "in.jsonl", "--model", "tiny-random", "--out", path, "--max-tokens", 2)
    assert result.exit_code == 0, result.output
    # A line of JSON ends at a line feed and at no other of the characters that end a line of text.
    out = read_rows(path) if suffix == ".parquet" else [json.loads(line) for line in path.read_bytes().splitlines()]
    texts = [(row["prompt"], row["copy"]) for row in out]
    assert texts[:-2] == [(prompt, prompt) for prompt in prompts]
    assert texts[-2:] == [(r"\ud83d", r"\udc00\ud800"), ("\U0001f600", r"\ud83d\ud83d")]
    assert all(row["completion_tokens"] == 2 and row["error"] is None for row in out)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_text_that_is_not_utf8(tmp_path: Path, suffix: str) -> None:
    """A prompt in Parquet that no decoder takes is an error row with file and row, and its neighbours are generated."""
    prompts = pa.array([b"a", b"caf\xe9", b"b"]).view(pa.string())
    pq.write_table(pa.table({"id": [0, 1, 2], "prompt": prompts}), tmp_path / "in.parquet")
    out = tmp_path / f"out{suffix}"
    result = cbgen("run", tmp_path / "in.parquet", "--model", "tiny-random", "--out", out, "--max-tokens", 2)
    assert result.exit_code == 3, result.output
    if suffix == ".parquet":
        assert pq.read_table(out)["prompt"].cast(pa.binary()).to_pylist() == [b"a", b"caf\xe9", b"b"]
        rows = pq.read_table(out, columns=["id", "error", "completion_tokens"]).to_pylist()
    else:
        rows = read_rows(out)
        assert rows[1]["prompt"] == r"caf\xe9"
    assert [(row["id"], row["completion_tokens"]) for row in rows] == [(0, 2), (1, 0), (2, 2)]
    assert rows[1]["error"] == "in.parquet, row 2: column 'prompt' is not UTF-8"


@pytest.mark.parametrize("pieces", [1, 2, 5])
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_several_frames(tmp_path: Path, suffix: str, pieces: int) -> None:
    """Compressed files put one after the other are read to the last, also where a frame ends within a line."""
    rows = [{"id": number, "prompt": f"row {number}"} for number in range(10)]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    compress: Callable[[bytes], bytes] = gzip.compress
    if suffix == ".zst":
        compress = pa.Codec("zstd").compress
    bounds = [len(content) * place // pieces for place in range(pieces + 1)]
    frames = [compress(content[start:end]) for start, end in pairwise(bounds)]
    source = tmp_path / f"in.jsonl{suffix}"
    source.write_bytes(b"".join(bytes(frame) for frame in frames))
    out = run_tiny(source, tmp_path / "out.jsonl", "--max-tokens", 1)
    assert [{"id": row["id"], "prompt": row["prompt"]} for row in out] == rows


UNIFIED = {
    "missing": (None, pa.array(["t"]), pa.string()),
    "null first": (pa.nulls(1), pa.array(["t"]), pa.string()),
    "null later": (pa.array(["t"]), pa.nulls(1), pa.string()),
    "null before a list": (pa.nulls(1), pa.array([[{"a": 1}]]), pa.list_(pa.struct([("a", pa.int64())]))),
    "widths": (pa.array([1], pa.int32()), pa.array([2**40]), pa.int64()),
    "int and float": (pa.array([1]), pa.array([0.5]), pa.float64()),
    "string and large": (pa.array(["t"]), pa.array(["u"], pa.large_string()), pa.large_string()),
    "fields of a struct": (
        pa.array([{"a": 1}]),
        pa.array([{"b": "x"}]),
        pa.struct([("a", pa.int64()), ("b", pa.string())]),
    ),
}


@pytest.mark.parametrize(("first", "second", "type_"), UNIFIED.values(), ids=UNIFIED)
def test_shards_are_unified(tmp_path: Path, first: pa.Array | None, second: pa.Array, type_: pa.DataType) -> None:
    """A column that is missing, null or narrower in one shard takes the common type, and no value changes."""
    own = {} if first is None else {"x": first}
    folder = write_shards(tmp_path / "in", {"prompt": ["a"], **own}, {"prompt": ["b"], "x": second})
    run_tiny(folder, tmp_path / "out.parquet", "--max-tokens", 1)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table["prompt"].to_pylist() == ["a", "b"]
    assert table.schema.field("x").type == type_
    first_value = None if first is None else first[0].as_py()
    expected = pa.array([first_value, second[0].as_py()], type_)
    assert table["x"].combine_chunks().equals(expected)


REFUSED = {
    "int and string": (pa.array([1]), pa.array(["1"])),
    "string and list": (pa.array(["t"]), pa.array([["t"]])),
    "string and bool": (pa.array(["t"]), pa.array([True])),
    "within a struct": (pa.array([{"a": 1}]), pa.array([{"a": "x"}])),
    "time and text": (pa.array([datetime.datetime(2024, 2, 29)]), pa.array(["2024-02-29"])),
}


@pytest.mark.parametrize("name", ["x", "prompt", "max_tokens"])
@pytest.mark.parametrize(("first", "second"), REFUSED.values(), ids=REFUSED)
def test_shards_are_refused(tmp_path: Path, first: pa.Array, second: pa.Array, name: str) -> None:
    """A column without a common type is refused before work starts, in a line with the column and both files."""
    shards = [{"prompt": ["a"]}, {"prompt": ["c"], name: first}, {"prompt": ["b"], name: second}]
    folder = write_shards(tmp_path / "in", *(shards if name != "prompt" else shards[1:]))
    refused = cbgen("run", folder, "--model", "tiny-random", "--out", tmp_path / "out.parquet")
    assert refused.exit_code == 2
    (line,) = refused.output.strip().splitlines()
    files = ("b.parquet", "c.parquet") if name != "prompt" else ("a.parquet", "b.parquet")
    assert all(word in line for word in (repr(name), *files)), line
    assert not list(tmp_path.glob("out*"))


def test_a_type_that_changes_late(tmp_path: Path) -> None:
    """A column of JSONL that is a number in 3,000 lines and a text in the next one is text, from the first row on."""
    rows = [{"prompt": "a", "x": number} for number in range(3000)] + [{"prompt": "a", "x": "text"}]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    out = run_tiny(source, tmp_path / "out.parquet", "--max-tokens", 1)
    assert [row["x"] for row in out] == [str(row["x"]) for row in rows]
    kept = run_tiny(source, tmp_path / "out.jsonl", "--max-tokens", 1)
    assert [row["x"] for row in kept] == [row["x"] for row in rows]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_all_null_at_first(tmp_path: Path, kind: str) -> None:
    """A column, and `error`, that hold nothing in the first parts and text later have one type from end to end."""
    rows: list[dict[str, Any]] = [{"prompt": f"p{number % 7}", "note": None, "top_p": None} for number in range(1500)]
    rows += [{"prompt": "p", "note": "text", "top_p": 2.0}, {"prompt": "p", "note": "more", "top_p": None}]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    if kind == "parquet":
        source = tmp_path / "in.parquet"
        pq.write_table(pa.Table.from_pylist(rows), source, row_group_size=100)
    options = ("--max-tokens", 1, "--part-rows", 100)
    out = run_tiny(source, tmp_path / "out.parquet", *options, code=3)
    assert [row["note"] for row in out] == [row["note"] for row in rows]
    assert [row["error"] is None for row in out] == [True] * 1500 + [False, True]
    schema = pq.read_schema(tmp_path / "out.parquet")
    assert {schema.field(name).type for name in ("note", "error", "completion")} == {pa.string()}
    run_tiny(source, tmp_path / "folder", *options, "--rows-per-shard", 600, code=3)
    shards = sorted((tmp_path / "folder").glob("*.parquet"))
    assert [pq.read_schema(shard).equals(schema) for shard in shards] == [True] * 3


def test_messages_of_several_forms(tmp_path: Path) -> None:
    """Content as a text or as a list of text parts is the same prompt; parts of another kind are an error row."""
    contents: list[Any] = [
        "Hello",
        [{"type": "text", "text": "Hello"}],
        [{"type": "text", "text": "Hel"}, {"text": "lo"}],
    ]
    contents += [[{"type": "image", "image": "b64"}], None, 7]
    rows = [{"id": number, "messages": [{"role": "user", "content": c}]} for number, c in enumerate(contents)]
    out = run_tiny(write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", "--max-tokens", 4, code=3)
    assert [{"id": row["id"], "messages": row["messages"]} for row in out] == rows, "written back as they were"
    assert len({(row["completion"], row["prompt_tokens"]) for row in out[:3]}) == 1
    assert [row["error"] is None for row in out] == [True] * 3 + [False] * 3
    assert "only parts of type text" in out[3]["error"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_keys_that_arrow_padded(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that a message has only because another one has them are null, and no template sees them."""
    shown = "{% for message in messages %}<{{ message | list | sort | join('+') }}>{% endfor %}"
    monkeypatch.setattr(tiny_random, "CHAT_TEMPLATE", shown)
    padded: dict[str, Any] = {"role": "user", "content": "a", "name": None, "tool_calls": None}
    named = {"role": "user", "content": "a", "name": "n"}
    messages = [[{"role": "user", "content": "a"}], [padded], [named], [named, padded]]
    source = write_jsonl(tmp_path / "in.jsonl", [{"messages": own} for own in messages])
    if kind == "parquet":
        fields = [
            ("role", pa.string()),
            ("content", pa.string()),
            ("name", pa.string()),
            ("tool_calls", pa.list_(pa.string())),
        ]
        source = tmp_path / "in.parquet"
        pq.write_table(pa.table({"messages": pa.array(messages, pa.list_(pa.struct(fields)))}), source)
    out = run_tiny(source, tmp_path / "out.parquet", "--max-tokens", 1)
    plain, full = len("<content+role>"), len("<content+name+role>")
    assert [row["prompt_tokens"] for row in out] == [plain, plain, full, full + plain]


NOON = datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.timezone.utc)
WORDS = ["a", None, "c", "a", ""]
NESTED = pa.list_(pa.struct([("tags", pa.map_(pa.string(), pa.int8())), ("when", pa.timestamp("ns", tz="UTC"))]))
ANY_TYPES = pa.table(
    {
        "prompt": ["a", None, "b", "c", "d"],
        "null": pa.nulls(5),
        "int8": pa.array([1, None, -3, 4, 5], pa.int8()),
        "uint64": pa.array([2**64 - 1, None, 0, 1, 2], pa.uint64()),
        "float16": pa.array([0.5, None, float("inf"), -0.0, 2], pa.float16()),
        "float32": pa.array([0.1, None, float("-inf"), -0.0, 1e-40], pa.float32()),
        "string": WORDS,
        "large_string": pa.array(WORDS, pa.large_string()),
        "string_view": pa.array(WORDS, pa.string_view()),
        "binary": pa.array([b"\xff\x00", None, b"", b"a", b"b"]),
        "fixed": pa.array([b"abc", None, b"def", b"\x00\x00\x00", b"abc"], pa.binary(3)),
        "decimal": pa.array([Decimal("1.10"), None, Decimal("-3.00"), 0, 9], pa.decimal128(12, 2)),
        "decimal256": pa.array([Decimal("1e40"), None, 0, 1, 2], pa.decimal256(60, 5)),
        "date": pa.array([NOON.date(), None, NOON.date(), None, None]),
        "time": pa.array([1, None, 3, 4, 5], pa.time64("ns")),
        "zoned": pa.array([NOON, None, NOON, NOON, None], pa.timestamp("us", tz="Europe/Paris")),
        "naive": pa.array([1, None, -(2**60), 2**62, 5], pa.timestamp("ns")),
        "duration": pa.array([1, None, -3, 4, 2**60], pa.duration("ns")),
        "dictionary": pa.array(WORDS).dictionary_encode(),
        "small dictionary": pa.array(WORDS).dictionary_encode().cast(pa.dictionary(pa.int8(), pa.string())),
        "nested": pa.array(
            [[{"tags": [("k", 1)], "when": NOON}], None, [], [None], [{"tags": None, "when": None}]], NESTED
        ),
        "struct": pa.array([{"a": {"b": [1, None]}}, None, {"a": None}, {"a": {"b": []}}, {"a": {"b": None}}]),
        "large_list": pa.array([["a", None], None, [], ["b"], None], pa.large_list(pa.string())),
        "pair": pa.array([[1, 2], None, [3, None], [5, 6], [7, 8]], pa.list_(pa.int32(), 2)),
        "map": pa.array([[("k", 1)], None, [], [("a", None)], None], pa.map_(pa.string(), pa.int64())),
        "uuid": pa.array([uuid.UUID(int=7).bytes, None, uuid.UUID(int=8).bytes, None, None], pa.uuid()),
        "a.b": [1, 2, 3, 4, 5],
        "": ["no", "name", "at", "all", None],
    }
)


@pytest.mark.parametrize("num_samples", [1, 2])
@pytest.mark.parametrize("rows_per_group", [2, 5])
def test_columns_pass_through(tmp_path: Path, rows_per_group: int, num_samples: int) -> None:
    """Nested, dictionary, large, decimal, zoned, extension and other columns: the same types and values come out."""
    pq.write_table(ANY_TYPES, tmp_path / "in.parquet", row_group_size=rows_per_group)
    table = pq.read_table(tmp_path / "in.parquet")
    out, options = tmp_path / "out.parquet", ("--max-tokens", 1, "--temperature", 1, "--n", num_samples)
    result = cbgen("run", tmp_path / "in.parquet", "--model", "tiny-random", "--out", out, *options)
    assert result.exit_code == 3, result.output
    assert_passed_through(table, out, num_samples)
    failed = [error is not None for error in pq.read_table(out)["error"].to_pylist()]
    assert failed == [place == 1 for place in range(5) for _ in range(num_samples)]


class Label(pa.ExtensionType):
    """A type of somebody else's library."""

    def __init__(self) -> None:
        super().__init__(pa.string(), "somebody.label")

    def __arrow_ext_serialize__(self) -> bytes:
        return b"v1"

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> "Label":
        return cls()


@pytest.mark.parametrize("is_known", [True, False])
def test_an_extension_type_that_is_not_known(tmp_path: Path, is_known: bool) -> None:
    """A column of a type that only another program knows still has that type when the program reads the output."""
    column = pa.ExtensionArray.from_storage(Label(), pa.array(["x", None]))
    table = pa.table({"prompt": ["a", "b"], "label": column})
    pq.write_table(table, tmp_path / "in.parquet")
    if not is_known:
        run_tiny(tmp_path / "in.parquet", tmp_path / "out.parquet", "--max-tokens", 1)
    pa.register_extension_type(Label())
    try:
        if is_known:
            run_tiny(tmp_path / "in.parquet", tmp_path / "out.parquet", "--max-tokens", 1)
        assert_passed_through(table, tmp_path / "out.parquet")
    finally:
        pa.unregister_extension_type("somebody.label")


@pytest.mark.parametrize("rows_per_group", [1, 300])
def test_row_groups_of_any_size(tmp_path: Path, rows_per_group: int) -> None:
    """One row per row group or one group of everything: all rows in order, in an output of one row group."""
    table = pa.table({"prompt": [f"p{number % 5}" for number in range(300)], "id": range(300)})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=rows_per_group)
    run_tiny(tmp_path / "in.parquet", tmp_path / "out.parquet", "--max-tokens", 1)
    assert_passed_through(table, tmp_path / "out.parquet")
    assert pq.read_metadata(tmp_path / "out.parquet").num_row_groups == 1


@pytest.mark.long
@pytest.mark.parametrize("rows_per_group", [2200, 1])
def test_a_column_above_two_gib(tmp_path: Path, rows_per_group: int) -> None:
    """A column of 2.2 GiB of text, more than its offsets can count, is carried over in a fraction of that memory."""
    chunk = pa.array(["x" * (1 << 20)] * 50)
    table = pa.table({"id": range(2200), "prompt": ["a"] * 2200, "text": pa.chunked_array([chunk] * 44)})
    pq.write_table(table, tmp_path / "in.parquet", rows_per_group, use_dictionary=False, compression="zstd")
    peaks = []
    for name, limit in (("small", 50), ("all", 2200)):
        out, summary = tmp_path / f"{name}.parquet", tmp_path / f"{name}.json"
        options = ("--max-tokens", 1, "--limit", limit, "--summary", summary)
        process = start_process("run", tmp_path / "in.parquet", "--model", "tiny-random", "--out", out, *options)
        _, errors = process.communicate()
        assert process.returncode == 0, errors
        peaks.append(json.loads(summary.read_text())["peak_memory_bytes"])
    assert peaks[1] - peaks[0] < 1 << 30
    metadata = pq.read_metadata(out)
    assert 2 <= metadata.num_row_groups <= 40
    group = pq.ParquetFile(out).read_row_group(metadata.num_row_groups - 1, columns=["id", "text"])
    assert group["id"].to_pylist() == list(range(2200 - len(group), 2200))
    assert set(group["text"].to_pylist()) == {chunk[0].as_py()}


CHANGES: dict[str, Callable[[list[dict[str, Any]]], list[dict[str, Any]]]] = {
    "nothing": lambda rows: rows,
    "reordered": lambda rows: rows[::-1],
    "appended": lambda rows: [*rows, {"id": "new", "prompt": "One more?"}],
    "put before": lambda rows: [{"id": "new", "prompt": "One more?"}, *rows],
    "edited": lambda rows: [{**rows[0], "prompt": "Another one?"}, *rows[1:]],
    "other columns": lambda rows: [{**row, "id": row["id"] * 2} for row in rows],
    "removed": lambda rows: rows[2:],
}
NUM_NEW = {"appended": 1, "put before": 1, "edited": 1}
JOB = ("--max-tokens", 6, "--temperature", 0.8)


def moments(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """When each prompt was finished: a row that was not generated again keeps it."""
    return {row["prompt"]: row["finish_time"] for row in rows}


def assert_as_if_never_run(tmp_path: Path, source: Path, out: Path) -> None:
    """All but timing equals a run of the changed input alone."""
    whole = tmp_path / f"whole{out.suffix}"
    run_tiny(source, whole, *JOB)
    if out.suffix == ".parquet":
        assert without_timing(pq.read_table(out)).equals(without_timing(pq.read_table(whole)))
    told = ("id", "prompt", "completion", "finish_reason", "error", "completion_tokens")
    assert [[row[name] for name in told] for row in read_rows(out)] == [
        [row[name] for name in told] for row in read_rows(whole)
    ]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize("change", [change for change in CHANGES if change != "nothing"])
def test_input_changed_after_the_end(tmp_path: Path, change: str, suffix: str) -> None:
    """A finished job whose input is edited, reordered or appended to generates what is new, and that alone."""
    rows = read_rows(SAMPLES / "questions.jsonl")[:12]
    source, out = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / f"out{suffix}"
    before = moments(run_tiny(source, out, *JOB))
    write_jsonl(source, CHANGES[change](rows))
    again = ("--summary", tmp_path / "s.json")
    if change == "removed":  # an output does not get smaller unasked
        refused = cbgen("run", source, "--model", "tiny-random", "--out", out, *JOB)
        assert refused.exit_code == 4
        assert "--resume always leaves out" in refused.output
        again += ("--resume", "always")
    after = moments(run_tiny(source, out, *JOB, *again))
    fresh = [prompt for prompt, moment in after.items() if before.get(prompt) != moment]
    assert len(fresh) == NUM_NEW.get(change, 0)
    assert json.loads((tmp_path / "s.json").read_text())["rows_resumed"] == len(after) - len(fresh)
    assert_as_if_never_run(tmp_path, source, out)


@pytest.fixture(scope="module")
def stopped_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with in.jsonl and the parts of a job that stopped itself, over a failed row, with some of it done."""
    folder = tmp_path_factory.mktemp("stopped")
    rows = [{**row, "max_tokens": 1} for row in read_rows(SAMPLES / "questions.jsonl")[:6]]
    rows += [{"id": "long", "prompt": "x" * 2048, "max_tokens": 1}]  # fills the context, so that it fails
    rows += [{"id": f"late {number}", "prompt": f"late {number}", "max_tokens": 300} for number in range(30)]
    source = write_jsonl(folder / "in.jsonl", rows)
    slowly = ("--order", "arrival", "--max-requests-per-batch", 2, "--ignore-eos", "--max-errors", 0)
    result = cbgen("run", source, "--model", "tiny-random", "--out", folder / "out.parquet", *JOB, *slowly)
    assert result.exit_code == 5, result.output
    # What each prompt that the tests have comes to, with nothing stopped.
    every = [*rows, {"id": "new", "prompt": "One more?"}, {"id": "edited", "prompt": "Another one?", "max_tokens": 1}]
    everything = write_jsonl(folder / "everything.jsonl", every)
    run_tiny(everything, folder / "whole.parquet", *JOB, "--ignore-eos", code=3)
    return folder


@pytest.mark.parametrize("change", CHANGES)
def test_input_changed_after_a_stop(tmp_path: Path, stopped_folder: Path, change: str) -> None:
    """A job that stopped and whose input was changed since goes on with what it had done of the rows still there."""
    shutil.copytree(stopped_folder, tmp_path, dirs_exist_ok=True)
    source, out = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    parts = pa.concat_tables(map(pq.read_table, (tmp_path / "out.parquet.parts").glob("part-*.parquet")))
    done = {moment for moment in parts["finish_time"].to_pylist() if moment is not None}
    assert 2 < len(parts) < 37
    rows = CHANGES[change](read_rows(source))
    write_jsonl(source, rows)
    options = ("--ignore-eos", "--summary", tmp_path / "s.json")
    after = run_tiny(source, out, *JOB, *options, code=3)
    assert [row["id"] for row in after] == [row["id"] for row in rows]
    resumed = json.loads((tmp_path / "s.json").read_text())["rows_resumed"]
    num_gone = {"edited": 1, "removed": 2}.get(change, 0)
    assert resumed == len(parts) - num_gone
    assert len([row for row in after if row["finish_time"] in done]) == resumed
    whole = {row["prompt"]: row["completion"] for row in read_rows(tmp_path / "whole.parquet")}
    assert [row["completion"] for row in after] == [whole[row["prompt"]] for row in rows]


@pytest.mark.parametrize("state", ["finished", "stopped"])
@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl", "folder"])
def test_an_output_of_another_job(tmp_path: Path, name: str, state: str) -> None:
    """Results of another job at the output, finished or not, are refused by what differs, and stay as they are."""
    source, out = SAMPLES / "questions.jsonl", tmp_path / name
    job = ("run", source, "--model", "tiny-random", "--out", out)
    if state == "finished":
        assert cbgen(*job, "--max-tokens", 2, "--limit", 5).exit_code == 0
    else:
        bad = write_jsonl(tmp_path / "bad.jsonl", [{"prompt": "a"}, {"prompt": ""}])
        assert cbgen("run", bad, *job[2:], "--max-tokens", 2, "--max-errors", 0).exit_code == 5
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    refused = cbgen(*job, "--max-tokens", 3, "--limit", 5)
    assert refused.exit_code == 4, refused.output
    assert "max_tokens is 3 now and was 2" in refused.output
    assert len(refused.output.strip().splitlines()) == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("other", ["notes.txt", "part-00000.parquet", "data.jsonl", "subfolder"])
def test_a_folder_with_other_files(tmp_path: Path, other: str) -> None:
    """A folder that holds what cbgen did not write is refused as an output, and nothing in it is touched."""
    out = tmp_path / "answers"
    out.mkdir()
    if other == "subfolder":
        (out / other).mkdir()
    else:
        (out / other).write_bytes(b"precious")
    job = ("run", SAMPLES / "questions.jsonl", "--model", "tiny-random", "--out", f"{out}/", "--limit", 2)
    for resume in ("if-possible", "never"):
        refused = cbgen(*job, "--max-tokens", 1, "--resume", resume)
        assert refused.exit_code == 4
        assert other in refused.output
        assert [path.name for path in out.iterdir()] == [other]


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl", "folder"])
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
def test_a_torn_output(tmp_path: Path, name: str, keep: float) -> None:
    """An output that was cut is not taken as done: the job is refused, and what is there is left for a look at it."""
    job = ("run", SAMPLES / "questions.jsonl", "--model", "tiny-random", "--max-tokens", 1, "--limit", 5)
    out = tmp_path / name
    assert cbgen(*job, "--out", out).exit_code == 0
    torn = next(out.glob("*.parquet")) if name == "folder" else out
    content = torn.read_bytes()
    torn.write_bytes(content[: int(keep * len(content))])
    cut = torn.read_bytes()
    refused = cbgen(*job, "--out", out)
    assert refused.exit_code == 4, refused.output
    assert len(refused.output.strip().splitlines()) == 1
    assert torn.read_bytes() == cut
    assert cbgen("verify", out).exit_code != 0
