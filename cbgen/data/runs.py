"""What the runs of a job say of themselves: a small file for each beside the parts, later all of them in the footer.

Telling, not truth: results are in the parts alone, and a run whose file is lost, torn or of another make is only not
told of.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import pydantic

from cbgen.data.files import publish_text

# Of all runs of a job together, in the footer of its output: some hundred kilobytes.
MOST_FOOTER_BINS = 1024
MOST_RUNS = 256
Run = dict[str, Any]
Number = Annotated[float, pydantic.Field(allow_inf_nan=False, strict=True)]
Seconds = Annotated[float, pydantic.Field(ge=0, le=1e11, allow_inf_nan=False, strict=True)]
Count = Annotated[int, pydantic.Field(ge=0, strict=True)]


class _Timeline(pydantic.BaseModel):
    """See engine/step_log.py. started: seconds since 1970."""

    started: Seconds
    bin_s: Annotated[float, pydantic.Field(gt=0, le=1e11, allow_inf_nan=False, strict=True)]
    series: dict[str, list[Number]]

    @pydantic.field_validator("series")
    @classmethod
    def _of_one_length(cls, series: dict[str, list[float]]) -> dict[str, list[float]]:
        if "steps" not in series or len({len(values) for values in series.values()}) > 1:
            raise ValueError("every series has a value for each bin, and steps are one of them")
        return series


class _Run(pydantic.BaseModel):
    """started, ended: seconds since 1970. how: "finished", or why it was stopped; None of a run that was killed.

    shard: of a merged output, which one it was for. rows: output rows it finished. summary: see run_log.run_figures.
    engine: its options as resolved. timeline: None where no step was made.
    """

    started: Seconds
    ended: Seconds
    how: str | None
    shard: Count | None
    load_s: Seconds
    rows: Count
    summary: dict[str, Number]
    engine: dict[str, Any]
    timeline: _Timeline | None


def new_run_path(folder: Path) -> Path:
    """Where the next run of a job tells of itself."""
    numbers = [int(path.stem.removeprefix("run-")) for path in run_paths(folder)]
    return folder / f"run-{max(numbers, default=-1) + 1:06d}.json"


def run_paths(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(folder.glob(f"run-{'[0-9]' * 6}.json"))


def write_run(path: Path, run: Run) -> None:
    """Raises OutputError."""
    publish_text(path, json.dumps(run, ensure_ascii=False, separators=(",", ":")))


def read_runs(folder: Path) -> list[Run]:
    """The newest of them, as far as they can be read, oldest first and condensed."""
    return condensed(run for path in run_paths(folder)[-MOST_RUNS:] if (run := _read_run(path)) is not None)


def checked_runs(value: Any) -> list[Run]:
    """Of what a footer says of runs, those that are whole; oldest first and condensed."""
    return condensed(run for one in (value if isinstance(value, list) else []) if (run := _checked(one)) is not None)


def _read_run(path: Path) -> Run | None:
    try:
        return _checked(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return None


def _checked(value: Any) -> Run | None:
    try:
        return _Run.model_validate(value).model_dump()
    except pydantic.ValidationError:
        return None


def condensed(runs: Iterable[Run]) -> list[Run]:
    """The newest MOST_RUNS of them, by when they started, with timelines coarse enough to go into a footer together."""
    kept: list[Run] = []
    for run in runs:
        kept.append(run)
        if sum(map(_num_bins, kept)) > 4 * MOST_FOOTER_BINS:  # so that not all are ever there as they were
            kept = _thinned(kept)
    return _thinned(sorted(kept, key=lambda run: run["started"])[-MOST_RUNS:])


def _thinned(runs: list[Run]) -> list[Run]:
    lengths, most = [_num_bins(run) for run in runs], MOST_FOOTER_BINS
    while sum(min(length, most) for length in lengths) > MOST_FOOTER_BINS and most > 1:
        most //= 2
    return [run if _num_bins(run) <= most else {**run, "timeline": coarser(run["timeline"], most)} for run in runs]


def coarser(timeline: dict[str, Any], max_bins: int) -> dict[str, Any]:
    """The same, with so many bins at most: as many as are needed are added up to one."""
    series = timeline["series"]
    joined = math.ceil(max((len(values) for values in series.values()), default=0) / max_bins)
    return {
        **timeline,
        "bin_s": timeline["bin_s"] * joined,
        "series": {
            name: [round(sum(values[first : first + joined]), 4) for first in range(0, len(values), joined)]
            for name, values in series.items()
        },
    }


def _num_bins(run: Run) -> int:
    return 0 if run["timeline"] is None else len(run["timeline"]["series"]["steps"])
