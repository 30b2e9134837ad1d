"""Datasets: real folders, loaded by the real library; every refusal is one line."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cbgen.data.hf_dataset import DatasetSource
from cbgen.data.readers import open_input
from cbgen.errors import UsageError

ROWS = [{"prompt": "a", "messages": [{"role": "user", "content": "é"}]}, {"prompt": None, "messages": []}]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of the hub, and nothing left in the user's cache."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dataset of two splits and of three formats."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    (folder / "test.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    return folder


def test_rows_records_and_tables_of_a_split(folder: Path) -> None:
    """All three agree; a column that is not there is null; the limit holds."""
    source = open_input([], dataset=DatasetSource(str(folder)))
    assert source.num_rows == 2
    assert source.schema.names == ["prompt", "messages"]
    assert [row.values for row in source.rows(["messages", "absent"])] == [
        {"messages": row["messages"], "absent": None} for row in ROWS
    ]
    assert [row.values for row in source.rows(["absent"])] == [{"absent": None}] * 2
    assert list(source.records()) == ROWS
    tables = list(source.tables())
    assert [row for table in tables for row in table.to_pylist()] == ROWS
    assert all(table.schema.equals(source.schema) for table in tables)
    assert source.place_of(1) == f"{folder} (train), row 2"
    assert source.size_bytes > 0
    assert open_input([], 1, dataset=DatasetSource(str(folder), None, "test")).num_rows == 1
    assert list(open_input([], dataset=DatasetSource(str(folder), None, "train[1:]")).records()) == ROWS[1:]


def test_many_rows_come_in_order(tmp_path: Path) -> None:
    """Over batches and Arrow chunks."""
    (tmp_path / "data").mkdir()
    for name, first in (("a", 0), ("b", 3000)):
        pq.write_table(pa.table({"x": list(range(first, first + 3000))}), tmp_path / "data" / f"{name}.parquet")
    source = open_input([], dataset=DatasetSource(str(tmp_path / "data")))
    assert [row.values["x"] for row in source.rows(["x"])] == list(range(6000))
    assert [x for table in source.tables() for x in table["x"].to_pylist()] == list(range(6000))


IDENTITY = """
import json, sys, datasets
from cbgen.data.hf_dataset import DatasetSource
from cbgen.data.readers import open_input
datasets.config.HF_DATASETS_CACHE = sys.argv[2]
print(json.dumps(open_input([], dataset=DatasetSource(sys.argv[1], None, sys.argv[3])).identity))
"""


def identity_elsewhere(folder: Path, cache: Path, split: str = "train") -> tuple[list, str]:
    """In a process of its own, and what that wrote to the screen beside it."""
    command = [sys.executable, "-c", IDENTITY, str(folder), str(cache), split]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout), done.stderr


def test_identity_is_that_of_the_content(folder: Path, tmp_path: Path) -> None:
    """Equal in two processes and in two caches; another split, or a file that was changed, has another."""
    first, screen = identity_elsewhere(folder, tmp_path / "one")
    assert screen == ""
    assert first == identity_elsewhere(folder, tmp_path / "one")[0] == identity_elsewhere(folder, tmp_path / "two")[0]
    assert first[0][:4] == ["dataset", str(folder), None, "train"]
    assert first != identity_elsewhere(folder, tmp_path / "one", "test")[0]
    with open(folder / "train.jsonl", "a") as file:
        file.write(json.dumps(ROWS[0]) + "\n")
    assert first != identity_elsewhere(folder, tmp_path / "one")[0]


@pytest.mark.parametrize(
    ("config", "split", "parts"),
    [
        (None, "validation", ["validation", "'train'", "'test'"]),
        ("fr", "train", ["fr", "default"]),
        (None, "train[", ["train["]),
    ],
)
def test_a_split_or_config_that_is_not_there_names_those_that_are(
    folder: Path, config: str | None, split: str, parts: list[str]
) -> None:
    """In one line."""
    with pytest.raises(UsageError) as caught:
        open_input([], dataset=DatasetSource(str(folder), config, split))
    assert all(part in str(caught.value) for part in [str(folder), *parts])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["absent", "empty", "broken"])
def test_what_is_no_dataset_is_one_line(tmp_path: Path, name: str) -> None:
    """It names the dataset, and the failure beneath."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "train.jsonl").write_text('{"x": 1}\n{"x": "a')
    with pytest.raises(UsageError) as caught:
        open_input([], dataset=DatasetSource(str(tmp_path / name)))
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sources_and_a_dataset_exclude_each_other(folder: Path) -> None:
    """The line names both."""
    with pytest.raises(UsageError, match=r"INPUT .*--dataset"):
        open_input(["a.jsonl"], dataset=DatasetSource(str(folder)))
