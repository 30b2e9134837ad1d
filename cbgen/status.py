"""How far a job is, seen from beside it: nothing is locked, renamed or written here."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cbgen.data.batches import BATCH_ROWS
from cbgen.data.manifest import Manifest, PartsFolder, told_by_part
from cbgen.data.openai_output import OpenAIBatchOutput
from cbgen.data.outputs import Output, open_output
from cbgen.data.published import PublishedResults
from cbgen.data.readers import open_input
from cbgen.data.rows import PART_SCHEMA, part_table
from cbgen.errors import UsageError
from cbgen.finished_rows import finished_layout, is_openai_batch
from cbgen.jobspec import is_folder

RUNNING, STOPPED, COMPLETE, NOT_STARTED, DAMAGED = "running", "stopped", "complete", "not started", "damaged"
PREVIEW_COLUMNS = ["finish_reason", "prompt_tokens", "completion_tokens", "completion", "error", "finish_time"]
PREVIEW_CHARS = 200
KEY_CHARS = 8


class PartsReader(PartsFolder):
    """The parts of a job as another process may read them at any time.

    told: what each part that was read says of itself; unreadable: the torn ones. FileNotFoundError from any of its
    methods means that the job has deleted its parts since they were listed.
    """

    def __init__(self, output: Path):
        super().__init__(output)
        self.told: list[dict[str, Any]] = []
        self.unreadable: list[Path] = []

    def parts(self, columns: list[str] = PART_SCHEMA.names) -> Iterator[tuple[Path, pa.Table]]:
        """As of PartsFolder, but a torn part stays where it is."""
        self.told, self.unreadable = [], []
        schema = pa.schema([PART_SCHEMA.field(name) for name in columns])
        for path in self.part_paths():
            try:
                table = pq.read_table(path, columns=columns, page_checksum_verification=True)
                table = table.cast(schema.with_metadata(table.schema.metadata))
                told = told_by_part(table.schema.metadata)
            except FileNotFoundError:
                if not path.is_symlink():
                    raise
                self.unreadable.append(path)  # it leads nowhere, now and later
            except (pa.ArrowException, OSError, ValueError, LookupError, TypeError):
                self.unreadable.append(path)
            else:
                self.told.append(told)
                yield path, table


@dataclass(frozen=True)
class Situation:
    """What lies at an output: the manifest of a job that is not finished, the footer of one that is."""

    state: str
    output: Output
    folder: PartsReader
    manifest: Manifest | None
    footer: dict[str, Any] | None


def look(out: str) -> Situation:
    """Raises UsageError where no job ever was."""
    path = Path(out).expanduser()
    output, folder = open_output(path, is_folder(out), rows_per_shard=1), PartsReader(path)
    running = _is_running(folder)
    manifest = folder.read_manifest()
    footer = output.read_footer() if output.exists else None
    if footer is not None and (manifest is None or _is_leftover(manifest, footer)):
        state, manifest = COMPLETE, None
    elif running:
        state = RUNNING
    elif manifest is not None or folder.part_paths():
        state = STOPPED
    elif output.exists:
        state = DAMAGED
    elif folder.path.exists():
        state = NOT_STARTED
    else:
        raise UsageError(f"{path}: there is no such output, and no job has begun one; give the --out of a job")
    return Situation(state, output, folder, manifest, footer)


@dataclass(frozen=True)
class JobStatus:
    """Figures of a job, in output rows. rows_total and pending of one that is not finished may be estimates.

    done counts failed rows too, unless they are to be tried again. published, in seconds since 1970, and
    rows_per_second are of the run at work or the last one; unreadable_parts will run again.
    """

    output: str
    state: str
    model: str | None = None
    rows_total: int | None = None
    is_estimate: bool = False
    done: int = 0
    failed: int = 0
    pending: int | None = None
    rows_per_second: float | None = None
    eta_s: float | None = None
    retry: dict[str, Any] | None = None
    published: float | None = None
    unreadable_parts: int = 0

    def as_json(self) -> dict[str, Any]:
        published = None if self.published is None else _moment(self.published).isoformat()
        return {**asdict(self), "published": published}

    def lines(self) -> dict[str, str]:
        """What there is to tell, by its name."""
        about = "about " if self.is_estimate else ""
        lines = {"state": self.state}
        if self.rows_total is not None:
            done = f"{self.done} done, {self.failed} of them failed"
            lines["rows"] = f"{about}{self.rows_total}: {done}; {about}{self.pending} pending"
        if self.rows_per_second is not None:
            left = "" if self.eta_s is None else f", about {_duration(self.eta_s)} left"
            lines["rate"] = f"{self.rows_per_second:.2f} rows/s{left}"
        if self.retry is not None:
            lines["retry"] = f"{self.retry['generation']}, of {' and '.join(self.retry['kinds'])} rows"
        if self.model is not None:
            lines["model"] = self.model
        if self.published is not None:
            age_s = max(0.0, time.time() - self.published)
            lines["published"] = f"{_moment(self.published):%Y-%m-%d %H:%M:%S} UTC, {_duration(age_s)} ago"
        if self.unreadable_parts:
            lines["unreadable"] = f"{self.unreadable_parts} parts, whose rows will run again"
        return lines


def read_status(out: str, num_preview: int = 0) -> tuple[JobStatus, list[dict[str, Any]]]:
    """How far a job is, and so many of its newest finished rows. Raises UsageError where no job ever was."""
    while True:
        try:
            situation = look(out)
            return _status_of(situation), newest_rows(situation, num_preview) if num_preview else []
        except FileNotFoundError:
            continue  # the job has deleted its parts meanwhile: it is done, or begun anew


def _status_of(situation: Situation) -> JobStatus:
    out, state, manifest, footer = situation.output.path, situation.state, situation.manifest, situation.footer
    if state == DAMAGED:
        raise UsageError(f"{out}: is no output that cbgen finished; `cbgen verify` tells what is wrong with it")
    if manifest is not None:
        return _status_of_parts(situation, manifest)
    if state == COMPLETE and footer is not None:
        return JobStatus(
            str(out),
            state,
            model=footer["fingerprint"]["model"],
            rows_total=footer["rows_total"],
            done=footer["rows_total"],
            failed=footer["rows_failed"],
            pending=0,
            published=max(path.stat().st_mtime for path in situation.output.files),
        )
    return JobStatus(str(out), state)


def _status_of_parts(situation: Situation, manifest: Manifest) -> JobStatus:
    folder = situation.folder
    done, failed = PublishedResults(folder, manifest.rows_total, manifest.retry).count()
    pending = max(0, manifest.rows_total - done)
    rate = _rows_per_second(folder.told, manifest.retry.generation)
    moments = [told["published"] for told in folder.told if "published" in told]
    return JobStatus(
        str(situation.output.path),
        situation.state,
        model=manifest.fingerprint["model"],
        rows_total=manifest.rows_total,
        is_estimate=manifest.is_estimate,
        done=done,
        failed=failed,
        pending=pending,
        rows_per_second=rate,
        eta_s=pending / rate if rate and situation.state == RUNNING else None,
        retry={"generation": manifest.retry.generation, "kinds": list(manifest.retry.kinds)}
        if manifest.retry.kinds
        else None,
        published=max(moments, default=None),
        unreadable_parts=len(folder.unreadable),
    )


def _rows_per_second(told: Iterable[dict[str, Any]], generation: int) -> float | None:
    """Of the newest run, from its start to what it published last. Parts of an earlier generation are taken over."""
    own = [part for part in told if part["generation"] == generation and "run_started" in part]
    started = max((part["run_started"] for part in own), default=0.0)
    newest = [part for part in own if part["run_started"] == started]
    elapsed_s = max((part["published"] for part in newest), default=started) - started
    return sum(part["rows"] for part in newest) / elapsed_s if elapsed_s > 0 else None


def newest_rows(situation: Situation, count: int) -> list[dict[str, Any]]:
    """The rows that finished last, newest first; those that never became a request have no time and come last."""
    kept: list[pa.Table] = []
    for table in _preview_tables(situation, count):
        joined = pa.concat_tables([*kept, table.replace_schema_metadata(None)])
        kept = [joined.sort_by([("finish_time", "descending")]).slice(0, count)]
    rows = [row for table in kept for row in table.to_pylist()]
    for row in rows:
        del row["finish_time"]
        row["completion"] = row["completion"] and row["completion"][:PREVIEW_CHARS]
    return rows


def _preview_tables(situation: Situation, count: int) -> Iterator[pa.Table]:
    """Of the newest parts as many as are needed, or all of a finished output; `key` comes first."""
    if situation.manifest is None:
        if situation.footer is not None and is_openai_batch(situation.footer):
            yield from _batch_preview(situation.output, situation.footer)
        elif situation.footer is not None:
            yield from _finished_preview(situation.output, situation.footer)
        return
    for path in reversed(situation.folder.part_paths()):
        if path in situation.folder.unreadable:
            continue
        table = pq.read_table(path, columns=["key", *PREVIEW_COLUMNS])
        keys = [key.hex()[:KEY_CHARS] for key in table["key"].to_pylist()]
        yield table.set_column(0, "key", pa.array(keys))
        count -= table.num_rows
        if count <= 0:
            return


def _finished_preview(output: Output, footer: dict[str, Any]) -> Iterator[pa.Table]:
    """A shard's rows have keys; others are told by their place, counted from 0."""
    layout = finished_layout(footer)
    names = [layout.prefix + name for name in PREVIEW_COLUMNS]
    first = 0
    with open_input([str(path) for path in output.files]) as source:
        for table in source.tables():
            keys = [f"row {number}" for number in range(first, first + table.num_rows)]
            if layout.is_shard:
                keys = [key[:KEY_CHARS] for key in table[layout.prefix + "row_key"].to_pylist()]
            first += table.num_rows
            yield table.select(names).rename_columns(PREVIEW_COLUMNS).add_column(0, "key", pa.array(keys))


def _batch_preview(output: Output, footer: dict[str, Any]) -> Iterator[pa.Table]:
    answers, errors = (output.path.parent / name for name in footer["files"])
    rows = OpenAIBatchOutput(answers, errors).finished_rows()
    while batch := list(islice(rows, BATCH_ROWS)):
        table = part_table(batch).select(["key", *PREVIEW_COLUMNS])
        yield table.set_column(0, "key", pa.array([key.hex()[:KEY_CHARS] for key in table["key"].to_pylist()]))


def _is_running(folder: PartsReader) -> bool:
    try:
        return folder.is_locked
    except FileNotFoundError:
        return False  # deleted by the job that has just finished
    except OSError as error:
        raise UsageError(f"{folder.path}: cannot be looked into: {error.strerror or error}") from error


def _is_leftover(manifest: Manifest, footer: dict[str, Any]) -> bool:
    """Whether parts are those that the finished output was made of, which are deleted, or were to be."""
    return manifest.job_id == footer["job_id"]


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    minutes, left = divmod(rest, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {left} s" if minutes else f"{left} s"


def preview_line(row: dict[str, Any]) -> str:
    """A row of `newest_rows` for the screen."""
    text = f"error: {row['error']}" if row["completion"] is None else repr(row["completion"])
    tokens = f"{row['prompt_tokens']} + {row['completion_tokens']} tokens"
    return f"{row['key']:<12}{row['finish_reason']:<8}{tokens:<22}{text}"
