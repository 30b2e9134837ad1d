"""A job before any weight is loaded: which shard of how many it is, as told or as a Slurm job array numbers its tasks,
and what tells it from another job."""

from pathlib import Path
from typing import Any

import pytest
from job_harness import write_jsonl

from cbgen.errors import UsageError
from cbgen.job_files import resolve_shard
from cbgen.jobspec import build_spec
from cbgen.resolution import resolve_job, warnings_about


def slurm(**values: object) -> dict[str, str]:
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()} | {"SLURM_JOB_ID": "17"}


@pytest.mark.parametrize(("index", "count"), [(0, 2), (1, 2), (36, 37)])
def test_as_given(index: int, count: int) -> None:
    """The options, whatever the environment says."""
    assert resolve_shard(index, count, {}) == (index, count)
    assert resolve_shard(index, count, slurm(ID=5, COUNT=9, MIN=0, STEP=1)) == (index, count)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"ID": 0, "COUNT": 4, "MIN": 0, "STEP": 1}, (0, 4)),
        ({"ID": 3, "COUNT": 4, "MIN": 0, "STEP": 1}, (3, 4)),
        ({"ID": 1, "COUNT": 4, "MIN": 1, "STEP": 1}, (0, 4)),
        ({"ID": 4, "COUNT": 4, "MIN": 1, "STEP": 1}, (3, 4)),
        ({"ID": 10, "COUNT": 4, "MIN": 4, "STEP": 2}, (3, 4)),
        ({"ID": 2, "COUNT": 4}, (2, 4)),
    ],
)
def test_as_slurm_numbers_its_tasks(values: dict[str, int], expected: tuple[int, int]) -> None:
    """--array=0-3, 1-4, or 4-10:2: shards are numbered from 0 all the same."""
    assert resolve_shard(None, None, slurm(**values)) == expected


@pytest.mark.parametrize(
    "environment",
    [{}, slurm(), slurm(ID=3), slurm(COUNT=3), slurm(ID="", COUNT=3), slurm(ID="x", COUNT=3), slurm(ID=0, COUNT=1)],
)
def test_a_job_of_one(environment: dict[str, str]) -> None:
    """Outside of an array, in a Slurm job without one, and in an array of one task there are no shards."""
    assert resolve_shard(None, None, environment) is None


def test_one_shard_is_none() -> None:
    """The output of one of one is that of the job."""
    assert resolve_shard(0, 1, {}) is None


def test_one_shard_alone_takes_all_rows() -> None:
    """Also inside of an array, whose tasks are then jobs of their own."""
    assert resolve_shard(None, 1, slurm(ID=2, COUNT=4)) is None


@pytest.mark.parametrize(("index", "count"), [(1, None), (None, 3)])
def test_half_a_shard_is_refused(index: int | None, count: int | None) -> None:
    """Also inside of an array: one would not know whose number it is."""
    for environment in ({}, slurm(ID=0, COUNT=4)):
        with pytest.raises(UsageError, match="--shard-index and --shard-count go together"):
            resolve_shard(index, count, environment)


@pytest.mark.parametrize(
    ("index", "count", "environment"),
    [
        (3, 3, {}),
        # --array=1,5,9: the tasks are not evenly numbered, and two could not be told apart.
        (None, None, slurm(ID=9, COUNT=3, MIN=1, STEP=1)),
        (None, None, slurm(ID=0, COUNT=3, MIN=1, STEP=1)),
    ],
)
def test_a_shard_that_there_is_not_is_refused(
    index: int | None, count: int | None, environment: dict[str, str]
) -> None:
    """With the numbers that there are."""
    with pytest.raises(UsageError, match="shards are 0 to") as caught:
        resolve_shard(index, count, environment)
    assert "\n" not in str(caught.value)


def resolved(tmp_path: Path, **options: Any) -> tuple[dict[str, Any], list[str]]:
    """The fingerprint of a job with these options, and its warnings."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}])
    needed = {"input": str(source), "model": "tiny-random", "out": str(tmp_path / "o.jsonl"), "device": "cpu"}
    job = resolve_job(build_spec(needed | options), lambda line: None)
    try:
        return job.fingerprint, list(warnings_about(job))
    finally:
        job.source.close()


@pytest.mark.parametrize(
    "options",
    [
        {"use_cuda_graph": False},
        {"use_async_batching": False},
        {"q_padding_interval_size": 8},
        {"kv_padding_interval_size": 128},
        {"max_cached_graphs": 1},
    ],
    ids=lambda options: next(iter(options)),
)
def test_how_passes_are_run_is_no_part_of_the_job(tmp_path: Path, options: dict[str, Any]) -> None:
    """It is the same job, which goes on where it stopped; what says how graphs are recorded warns on a CPU."""
    fingerprint, warnings = resolved(tmp_path, **options)
    plain, silence = resolved(tmp_path)
    assert fingerprint == plain != resolved(tmp_path, seed=1)[0]
    told = [line for line in warnings if line not in silence]
    name, value = next(iter(options.items()))
    assert len(told) == (value is not False)
    assert all(line.startswith(f"--{name.replace('_', '-')} has no effect on cpu") for line in told)
