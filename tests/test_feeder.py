"""The feeder on a real pipe, with a real engine: rows that come slowly, rows that others generate."""

import datetime
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pyarrow as pa
import pytest
import torch

from cbgen.collector import Collector
from cbgen.config import ContinuousBatchingConfig
from cbgen.data.files import DiskPatience
from cbgen.data.manifest import Manifest, PartsFolder, Retry
from cbgen.data.origins import Origin
from cbgen.data.published import PublishedResults
from cbgen.data.readers import Input
from cbgen.data.rows import KEY_BYTES
from cbgen.data.writers import PartWriter
from cbgen.device import free_memory_bytes
from cbgen.duplicates import Duplicates
from cbgen.engine.build import Engine, build_engine
from cbgen.engine.requests import RequestState
from cbgen.engine.sampling_params import SamplingParams
from cbgen.engine.sources import ListSource
from cbgen.models.loading import TINY_RANDOM, describe, load
from cbgen.models.tiny_random import build_tokenizer
from cbgen.output_rows import OutputRows
from cbgen.pipeline import Feeder
from cbgen.prompting import OPTION_COLUMNS, Prompter, resolve_source
from cbgen.row_window import WindowLimits

CPU = torch.device("cpu")
FOREVER_S = 1e6
Shard = tuple[int, int] | None


class PipedRows:
    """An InputFile whose lines come through a pipe, when they come."""

    def __init__(self, lines: TextIO):
        self.origin = Origin("pipe", "pipe", Path(os.devnull), 0, ("pipe",), is_copy=True)
        self.schema = pa.schema([("prompt", pa.string())])
        self.num_rows = 1000  # at most
        self._lines = lines

    def records(self, columns: list[str] | None) -> Iterator[tuple[dict[str, Any], str | None]]:
        for line in self._lines:
            values = json.loads(line)
            yield {name: values.get(name) for name in columns or values}, None

    def tables(self, schema: pa.Schema) -> Iterator[pa.Table]:
        raise NotImplementedError

    def place_of(self, index: int) -> str:
        return f"pipe, line {index + 1}"


class Pipeline:
    """Pipe, feeder, collector and parts, as a job puts them together."""

    def __init__(
        self,
        folder: PartsFolder,
        lines: TextIO,
        pipe: TextIO,
        limits: WindowLimits,
        shard: Shard,
        num_samples: int | None,
    ):
        self.pipe = pipe
        prompter = Prompter(
            build_tokenizer(), resolve_source(["prompt"]), SamplingParams(max_tokens=5), datetime.date(2001, 2, 3)
        )
        duplicates = Duplicates(limits.max_duplicates)
        self.folder = folder
        output_rows = OutputRows(prompter, build_tokenizer(), None)
        self.collector = Collector(
            output_rows, PartWriter(folder, 10_000, 3600.0, DiskPatience(0.0, print)), duplicates
        )
        self.feeder = Feeder(
            Input([PipedRows(lines)]),
            ["prompt", *OPTION_COLUMNS],
            prompter,
            published=PublishedResults(folder, 1000, Retry()),
            shard=shard,
            num_samples=num_samples,
            job_seed=0,
            max_model_len=512,
            collector=self.collector,
            duplicates=duplicates,
            deduplicate=True,
            limits=limits,
            on_first_prompt=lambda _: None,
        )
        self.feeder.arrange("longest-first", 32)

    def write(self, *prompts: str, **options: Any) -> None:
        for prompt in prompts:
            print(json.dumps({"prompt": prompt, **options}), file=self.pipe, flush=True)

    def written_rows(self) -> list[dict[str, Any]]:
        """All results, once everything handed over is published."""
        self.feeder.close()
        self.collector.close()
        return [row for _, table in self.folder.parts() for row in table.to_pylist()]


@contextmanager
def pipeline(tmp_path: Path, shard: Shard = None, num_samples: int | None = 1, **limits: float) -> Iterator[Pipeline]:
    """One that waits for complete windows for ever, unless told otherwise."""
    folder = PartsFolder(tmp_path / "out.parquet")
    folder.open(Manifest({}), "if-possible")
    reading, writing = os.pipe()
    with open(reading, encoding="utf-8") as lines, open(writing, "w", encoding="utf-8") as pipe:
        own = WindowLimits(**{"patience_s": FOREVER_S, **limits})  # type: ignore[arg-type]
        made = Pipeline(folder, lines, pipe, own, shard, num_samples)
        try:
            yield made
        finally:
            pipe.close()
            made.feeder.close()
            folder.close()


@pytest.fixture
def engine() -> Engine:
    description = describe(TINY_RANDOM, None, "float32", CPU)
    model, shape = load(description, CPU)
    config = ContinuousBatchingConfig(max_requests_per_batch=4).resolve("cpu")
    eos = description.eos_token_ids
    return build_engine(model, shape, torch.float32, config, eos, CPU, free_memory_bytes(CPU))


def prompt_of(request: RequestState) -> str:
    return build_tokenizer().decode(request.token_ids[: request.num_prompt_tokens])


def test_a_slow_reader_does_not_hold_up_the_engine(tmp_path: Path, engine: Engine) -> None:
    """Each row is written to the pipe only when the one before was generated: nobody may wait for a window to fill."""
    with pipeline(tmp_path, patience_s=0.01) as job:
        prompts = iter(["first", "second", "third"])
        job.write(next(prompts))
        generated = []
        for request in engine.manager.run(job.feeder):
            generated.append(prompt_of(request))
            job.collector.put(request)
            following = next(prompts, None)
            if following is None:
                job.pipe.close()
            else:
                job.write(following)
        assert generated == ["first", "second", "third"]
        assert len(job.written_rows()) == 3


def test_an_input_is_held_until_it_is_complete(tmp_path: Path) -> None:
    """With patience, what is there is not handed over; at the end of the input all of it is, in order."""
    with pipeline(tmp_path) as job:
        job.write("a", "bbb", "cc")
        assert job.feeder.wait_for_first()
        assert job.feeder.take(10, wait=False) == []
        job.pipe.close()
        taken = job.feeder.take(10, wait=True)
        assert [prompt_of(request) for request in taken] == ["bbb", "cc", "a"]
        assert [request.request_id for request in taken] == [1, 2, 3], "the engine goes by these"
        assert job.feeder.exhausted


def test_rows_join_a_request_until_it_has_finished(tmp_path: Path, engine: Engine) -> None:
    """Those read while it waits or is at work, over several windows; the next one after it is generated again."""
    with pipeline(tmp_path, max_requests=1) as job:

        def generate(requests: list[RequestState]) -> None:
            for request in engine.manager.run(ListSource(requests)):
                job.collector.put(request)

        job.write("same")
        first = job.feeder.take(10, wait=True)
        job.write(*["same"] * 300, "other")
        other = job.feeder.take(10, wait=True)  # it comes after them, so they have been read
        assert [prompt_of(request) for request in first + other] == ["same", "other"]
        generate(first + other)
        while job.collector.num_ok < 302:
            time.sleep(0.01)  # the collector has its own pace
        assert job.collector.num_deduplicated == 300
        job.write("same")
        job.pipe.close()
        generate(job.feeder.take(10, wait=True))
        rows = job.written_rows()
        assert len(rows) == len({row["key"] for row in rows}) == 303
        assert len({row["completion"] for row in rows if row["prompt_tokens"] == 4}) == 1


def test_stopping_lets_go_at_once(tmp_path: Path) -> None:
    """Nothing more is handed over, whatever waits in the window or in the pipe, and the source counts as exhausted."""
    with pipeline(tmp_path) as job:
        job.write("a", "b")
        assert job.feeder.wait_for_first()
        stopping = threading.Timer(0.05, job.feeder.stop)
        stopping.start()
        assert job.feeder.take(10, wait=True) == []
        assert job.feeder.exhausted
        assert job.feeder.take(10, wait=False) == []


def test_shards_share_the_rows_among_them(tmp_path: Path) -> None:
    """Each row is in one shard, with its place in the whole input and its own key."""
    prompts = [f"row {number % 50}" for number in range(100)]
    seen: list[str] = []
    keys: list[set[bytes]] = []
    for index in range(3):
        with pipeline(tmp_path / str(index), shard=(index, 3)) as job:
            job.write(*prompts)
            job.pipe.close()
            taken = job.feeder.take(1000, wait=True)
            rows = [row for request in taken for row in request.tag.rows]
            assert job.feeder.is_mine is not None
            assert sorted(row.index for row in rows) == job.feeder.is_mine.nonzero()[0].tolist()
            own = bytes(job.feeder.keys)
            keys.append({own[first : first + KEY_BYTES] for first in range(0, len(own), KEY_BYTES)})
            assert keys[-1] == {row.key for row in rows}
            seen += [prompts[row.index] for row in rows]
    assert all(keys)
    assert sorted(seen) == sorted(prompts)
    assert sum(map(len, keys)) == len(set.union(*keys)) == 100


def test_rows_that_are_done_are_not_handed_over_again(tmp_path: Path, engine: Engine) -> None:
    """Those that an earlier run published, failures among them, are counted and passed by."""
    prompts = ["a", "", "bb", "a"]
    with pipeline(tmp_path) as job:
        job.write(*prompts)
        job.pipe.close()
        for request in engine.manager.run(job.feeder):
            job.collector.put(request)
        assert len(job.written_rows()) == 4
    with pipeline(tmp_path) as job:
        job.write(*prompts, "new")
        job.pipe.close()
        assert [prompt_of(request) for request in job.feeder.take(10, wait=True)] == ["new"]
        assert job.feeder.num_already_done == 4


def test_closing_in_the_middle(tmp_path: Path) -> None:
    """A feeder that waits for a pipe, for room in the window or for rows to be written can be closed."""
    for limits in ({}, {"max_requests": 1}, {"max_duplicates": 0}):
        with pipeline(tmp_path / str(len(limits)) / str(limits), **limits) as job:
            job.write("a", "b")
            assert job.feeder.wait_for_first()


def test_samples_are_counted_where_each_row_has_its_own(tmp_path: Path) -> None:
    """Of a shard's rows in input order, 1 for a row that failed; the whole is about as many as the rows read had."""
    with pipeline(tmp_path, shard=(0, 2), num_samples=None, patience_s=0.0) as job:
        for n in (1, 3, 0, 2) * 10:
            job.write(f"wants {n}", n=n)
        job.pipe.close()
        while not job.feeder.exhausted:
            job.feeder.take(10, wait=True)
        job.feeder.close()
        assert job.feeder.is_mine is not None
        mine = [(1, 3, 1, 2)[index % 4] for index in range(40) if job.feeder.is_mine[index]]
        assert isinstance(job.feeder.num_samples, np.ndarray)
        assert job.feeder.num_samples.tolist() == mine
        assert len(job.feeder.keys) == len(mine) * KEY_BYTES
        assert job.feeder.samples_of(2 * len(mine)) == 2 * sum(mine)
