"""A row's own columns over the job's parameters: as JSONL and Parquet hold them, and what names the row."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_harness import write_jsonl

from cbgen.data.readers import open_input
from cbgen.engine.sampling_params import SamplingParams
from cbgen.errors import RowError
from cbgen.row_params import OPTION_COLUMNS, RowParams

JOB = SamplingParams(max_tokens=16, temperature=0.5, stop="job", logit_bias={3: 1})
VOCABULARY = 258
ROWS = RowParams(JOB, VOCABULARY)


def read(path: Path, job: SamplingParams = JOB) -> list[tuple[SamplingParams, str]]:
    """The parameters of each row of a file, and what names it, as it is hashed."""
    rows = RowParams(job, VOCABULARY)
    with open_input([str(path)]) as source:
        read = [rows.of(row.values) for row in source.rows(["prompt", *OPTION_COLUMNS])]
    return [(params, json.dumps(named)) for params, named in read]


def test_rows_without_options_share_those_of_the_job() -> None:
    """The very same objects: nothing is checked or copied for them."""
    first, second = ROWS.of({"prompt": "a", "stop": None}), ROWS.of({"prompt": "b"})
    assert first[0] is second[0] is JOB
    assert first[1] is second[1]


TABLE = {
    "max_tokens": pa.array([5, None], pa.int16()),
    "temperature": pa.array([0.25, None], pa.float16()),
    "top_p": pa.array(["0.90", None]).cast(pa.decimal128(5, 2)),
    "ignore_eos": pa.array([True, None]),
    "seed": pa.array([2**64 - 1, None], pa.uint64()),
    "stop": pa.array([["x", "y"], None], pa.large_list(pa.string_view())),
    "bad_words": pa.array(["x", None]).dictionary_encode(),
    "stop_token_ids": pa.array([[7, 5], None], pa.list_(pa.uint32(), 2)),
    "logit_bias": pa.array([[(5, 1.5)], None], pa.map_(pa.int32(), pa.float32())),
}


def test_every_type_of_parquet(tmp_path: Path) -> None:
    """Narrow numbers, decimals, lists of any kind, maps and dictionaries are what JSON has; null is not given."""
    pq.write_table(pa.table({"prompt": ["a", "b"], **TABLE}), tmp_path / "in.parquet")
    (own, named), (plain, _) = read(tmp_path / "in.parquet")
    assert plain is not own and plain == JOB
    expected = {
        "max_tokens": 5,
        "temperature": 0.25,
        "top_p": 0.9,
        "ignore_eos": True,
        "seed": 2**64 - 1,
        "stop": ["x", "y"],
        "bad_words": "x",
        "stop_token_ids": [5, 7],
        "logit_bias": {"5": 1.5},
    }
    assert own == JOB.updated(**expected)
    [(same, same_name)] = read(write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a", **expected}]))
    assert (same, same_name) == (own, named)


SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}, "required": ["a"]},
    {"type": "object", "properties": {"b": {"enum": ["x", None]}}, "additionalProperties": False},
    {"type": "array", "items": {"$ref": "#/$defs/n"}, "$defs": {"n": {"type": "number", "maximum": 1}}},
    {"type": "array", "items": {"type": "number", "maximum": 0.5, "default": None}},
]


def test_objects_are_the_same_in_both_formats(tmp_path: Path) -> None:
    """Parquet pads them with null and widens their numbers, and that changes nothing that is asked for."""
    rows = [{"prompt": "a", "json_schema": schema, "logit_bias": {str(n): 1}} for n, schema in enumerate(SCHEMAS)]
    job = JOB.updated(stop=None)
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    assert pa.types.is_struct(pq.read_schema(tmp_path / "in.parquet").field("json_schema").type)
    as_text = [row | {name: json.dumps(row[name]) for name in ("json_schema", "logit_bias")} for row in rows]
    pq.write_table(pa.Table.from_pylist(as_text), tmp_path / "text.parquet")
    expected = read(source, job)
    assert len({named for _, named in expected}) == len(SCHEMAS)
    # Arrow's structs order keys as they were first seen, and JSON writes them so.
    assert [(json.loads(p.json_schema or ""), p.logit_bias) for p, _ in read(tmp_path / "in.parquet", job)] == [
        (json.loads(p.json_schema or ""), p.logit_bias) for p, _ in expected
    ]
    assert read(tmp_path / "text.parquet", job) == expected


ALIKE = [
    [{"max_tokens": 1}, {"max_tokens": 1.0}],
    [{"temperature": 1}, {"temperature": 1.0}],
    [{"temperature": 0.5}, {}, {"top_p": 1}, {"top_k": -1}, {"stop": "job"}, {"stop": ["job", "job"]}, {"n": 4}],
    [{"temperature": 0}, {"temperature": -0.0}],
    [{"seed": 7}, {"seed": 7.0}],
    [{"stop": "x"}, {"stop": ["x"]}],
    [{"stop_token_ids": 5}, {"stop_token_ids": [5, 5]}, {"stop_token_ids": "[5]"}],
    [{"stop_token_ids": [5, 6]}, {"stop_token_ids": [6, 5.0]}],
    [{"logit_bias": {"5": 1, "6": 0}}, {"logit_bias": {"6": -0.0, "5": 1.0}}, {"logit_bias": '{"6": 0, "5": 1}'}],
    [{"stop": [], "choice": ["a"]}, {"stop": [], "choice": '["a"]'}],
    [{"stop": [], "json_schema": {"a": 1}}, {"stop": [], "json_schema": '{"a":1.0}'}],
]


@pytest.mark.parametrize("rows", ALIKE, ids=str)
def test_what_is_asked_for_alike_is_named_alike(rows: list[dict[str, Any]]) -> None:
    """Numbers of either kind, one or a list of one, keys in any order; and each otherwise than the others."""
    names = {json.dumps(ROWS.of(row)[1]) for row in rows}
    assert len(names) == 1
    others = {json.dumps(ROWS.of(other[0])[1]) for other in ALIKE if other is not rows}
    assert len(others) == len(ALIKE) - 1
    assert not names & others


def test_the_jobs_max_tokens_may_grow() -> None:
    """It names no row, and a row's own does, also where it is that of the job."""
    longer = RowParams(JOB.updated(max_tokens=99), VOCABULARY)
    for values in ({}, {"top_k": 5}, {"max_tokens": 16}):
        assert longer.of(values)[1] == ROWS.of(values)[1]
    assert ROWS.of({"max_tokens": 16})[1] != ROWS.of({})[1]
    assert ROWS.of({"max_tokens": 16})[0] == JOB


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"logit_bias": {"258": 1}}, "logit_bias names token 258, those of this model are 0 to 257"),
        ({"stop_token_ids": [5, 258]}, "stop_token_ids names token 258"),
        ({"regex": "a"}, "regex and stop: give one of them"),
        ({"stop": [], "regex": "a", "choice": ["b"]}, "regex and choice: give one of them"),
        ({"temperature": "warm"}, "temperature is 'warm', a number is expected"),
    ],
)
def test_a_row_that_cannot_be_followed(values: dict[str, Any], words: str) -> None:
    """Its own error, which names the parameter."""
    with pytest.raises(RowError) as caught:
        ROWS.of(values)
    assert words in str(caught.value)


def test_a_row_may_not_end_before_the_jobs_least() -> None:
    """Both numbers are told; with a least of its own it may."""
    rows = RowParams(SamplingParams(max_tokens=64, min_tokens=20), VOCABULARY)
    with pytest.raises(RowError, match=r"min_tokens is 20, more than max_tokens \(8\)"):
        rows.of({"max_tokens": 8})
    assert rows.of({"max_tokens": 8, "min_tokens": 0})[0] == SamplingParams(max_tokens=8)


def test_a_form_of_its_own_takes_the_place_of_the_jobs() -> None:
    """Of whatever kind either is; other options leave the job's form as it is."""
    rows = RowParams(SamplingParams(json_schema={"type": "object"}), VOCABULARY)
    assert rows.of({"regex": "a"})[0].structure == ("regex", "a")
    assert rows.of({"choice": ["a"]})[0].structure == ("choice", '["a"]')
    assert rows.of({"top_k": 3})[0].structure == ("json_schema", '{"type": "object"}')


def test_only_heeded_columns_are_read() -> None:
    """Others may hold anything."""
    rows = RowParams(JOB, VOCABULARY, ("seed",))
    assert rows.of({"stop": 5, "n": "first", "seed": None})[0] is JOB
    assert rows.of({"stop": 5, "seed": 9})[0] == JOB.with_seed(9)


@pytest.mark.parametrize("as_text", [True, False])
def test_a_constant_null_is_no_padding(as_text: bool) -> None:
    """Beside annotations it is what the value must be, in objects and texts; in a text also beside other keywords."""
    schema = {
        "type": "object",
        "properties": {"a": {"const": None, "title": "t"}, "b": {"const": None, "type": "null"}},
    }
    params = SamplingParams(json_schema=json.dumps(schema) if as_text else schema)
    kept = json.loads(params.json_schema or "")["properties"]
    assert kept["a"] == {"const": None, "title": "t"}
    assert kept["b"] == ({"const": None, "type": "null"} if as_text else {"type": "null"})
