"""What a job is, and what of it is done: the manifest, and the folder of parts beside the output."""

import glob
import json
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any

import filelock
import pyarrow as pa
import pyarrow.parquet as pq

from cbgen.data.files import ADVICE, check_writable, delete, publish_text
from cbgen.data.rows import PART_SCHEMA, parts_path
from cbgen.data.runs import run_paths
from cbgen.errors import OutputError, ResumeRefusedError

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 3
# `cbgen status` holds the lock for a moment to see whether a run does; one that starts just then waits for it.
LOCK_TIMEOUT_S = 1.0
PART_METADATA_KEY = b"cbgen"
OF_THE_MODEL = {"model_identity", "chat_template_sha256", "eos_token_ids", "max_model_len", "prints_the_date"}


@dataclass(frozen=True)
class Retry:
    """Which results are generated again: those of these kinds that are older than this generation.

    kinds: "failed", "truncated". Generation 0 is the job's first run, with all that continue it.
    """

    generation: int = 0
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """What is recorded of a job while it runs. Each field beside its meaning:

    fingerprint   options that change results         rows_total   output rows of the whole job
    settings      options that do not                 is_estimate  whether rows_total is about so many
    date          given to templates that ask for it  retry        see Retry
    job_id        by which a finished output knows    base         "imported", or "pending" while the results of a
                  what is left of its own job                      finished output are still being made parts
    """

    fingerprint: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    rows_total: int = 0
    date: date = field(default_factory=lambda: datetime.now(timezone.utc).date())
    retry: Retry = Retry()
    base: str = "imported"
    job_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    is_estimate: bool = False

    def as_json(self) -> dict[str, Any]:
        retry = {"generation": self.retry.generation, "kinds": list(self.retry.kinds)}
        names = ("job_id", "fingerprint", "settings", "rows_total", "is_estimate", "base")
        own = {name: getattr(self, name) for name in names}
        return {"version": MANIFEST_VERSION, **own, "date": self.date.isoformat(), "retry": retry}

    @classmethod
    def from_json(cls, known: dict[str, Any]) -> "Manifest":
        """Raises ValueError, LookupError or TypeError for what is none."""
        if known["version"] != MANIFEST_VERSION:
            raise ValueError(f"manifest version {known['version']}, this is cbgen of {MANIFEST_VERSION}")
        retry = Retry(int(known["retry"]["generation"]), tuple(known["retry"]["kinds"]))
        return cls(
            fingerprint=dict(known["fingerprint"]),
            settings=dict(known["settings"]),
            rows_total=int(known["rows_total"]),
            date=date.fromisoformat(known["date"]),
            retry=retry,
            base=str(known["base"]),
            job_id=str(known["job_id"]),
            is_estimate=bool(known["is_estimate"]),
        )


def differences(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Every option that differs, with both values; of another model not also what comes with it."""
    differing = [name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]
    if "model" in differing:
        differing = ["model", *(name for name in differing if name != "model" and name not in OF_THE_MODEL)]
    return [f"{name} is {mine.get(name)!r} now and was {theirs.get(name)!r}" for name in differing]


def fingerprint_conflict(mine: Manifest, theirs: Manifest, retrying: bool) -> str | None:
    """What changes results and differs, or None; a retry may come with other max_tokens."""
    free = {"max_tokens"} if retrying else set()
    conflict = differences(*({k: v for k, v in m.fingerprint.items() if k not in free} for m in (mine, theirs)))
    return "; ".join(conflict) or None


class PartsFolder:
    """The folder beside the output in which a job's results are published while it runs.

    out.parquet.parts/manifest.json          see Manifest
                      part-00000000.parquet  results, immutable; only what is here under this name is done
                      run-000000.json        how a run went, for `cbgen report` (see runs.py)
                      lock                   held by the run at work
    """

    def __init__(self, output: Path):
        self.path = parts_path(output)
        self.output = output
        self._lock = filelock.FileLock(self.path / "lock", timeout=LOCK_TIMEOUT_S)

    @property
    def is_begun(self) -> bool:
        """Whether a job has published here that it is at work, or was."""
        return (self.path / MANIFEST_NAME).exists()

    @property
    def has_parts(self) -> bool:
        return bool(self._part_paths())

    @property
    def is_locked(self) -> bool:
        """Whether a run is at work here."""
        if not (self.path / "lock").exists():
            return False
        try:
            with filelock.FileLock(self.path / "lock", blocking=False):
                return False
        except filelock.Timeout:
            return True

    def open(self, mine: Manifest, resume: str, retry_kinds: tuple[str, ...] = ()) -> Manifest:
        """Locks the folder and makes it this job's. Returns its manifest: with the date and generation it has there.

        resume: "if-possible" continues a matching job or starts one; "always" wants one to continue; "never" discards
        what is there. retry_kinds: see Retry; those of the retry at work continue it, others or other max_tokens begin
        a new one.
        Raises ResumeRefusedError for another job's parts and for a folder that a running job holds.
        """
        self.lock()
        self._delete_leftovers()
        if resume == "never":
            self.discard()
        known = self.read_manifest()
        if known is None:
            self._refuse_unless_new(resume, has_base=mine.base == "pending")
            opened = mine  # a job that begins has nothing to try again
        elif fingerprint_conflict(mine, known, bool(retry_kinds)) is None:
            retry, same_tokens = known.retry, fingerprint_conflict(mine, known, retrying=False) is None
            if retry_kinds and not (retry_kinds == retry.kinds and same_tokens):
                retry = Retry(retry.generation + 1, retry_kinds)
            opened = replace(mine, date=known.date, retry=retry, base=known.base, job_id=known.job_id)
        else:
            self.refuse_other(mine, known, retry_kinds)
            opened = mine  # the other job has published nothing, so that nothing of it can be mixed in
        self.write_manifest(opened)
        return opened

    def refuse_other(self, mine: Manifest, known: Manifest, retry_kinds: tuple[str, ...]) -> None:
        """Raises ResumeRefusedError when there are results here of a job that differs, with all that differs."""
        conflict = fingerprint_conflict(mine, known, bool(retry_kinds))
        if conflict is not None and self.has_parts:
            raise ResumeRefusedError(
                f"{self.path}: holds the results of another job: {conflict}{_harmless(mine, known)}; "
                "choose another --out, or --resume never to discard them"
            )

    def lock(self) -> None:
        """Keeps other runs out, until close(). Raises ResumeRefusedError when one is at work."""
        while not self._lock.is_locked:
            try:
                check_writable(self.path)
                self._lock.acquire()
            except filelock.Timeout as error:
                raise ResumeRefusedError(f"{self.path}: another run is writing this output") from error
            except (OSError, OutputError) as error:
                cause = error if isinstance(error, OSError) else error.__cause__
                if isinstance(cause, FileNotFoundError) and self.path.parent.is_dir():
                    continue  # the run that had the lock has finished just now, and deleted the folder
                if isinstance(error, OutputError):
                    raise
                raise OutputError(f"{self.path / 'lock'}: cannot be locked: {error.strerror}; {ADVICE}") from error

    def close(self) -> None:
        """Lets another run have the folder. One in which nothing was begun does not stay."""
        if self._lock.is_locked and not self.is_begun and not any(self.path.glob("part-*")):
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()

    def remove(self) -> None:
        """Deletes the parts once the final output holds them, the manifest last, and the lock with them.

        The lock is held until then: who waits for it finds the output finished.
        """
        self.discard()
        shutil.rmtree(self.path, ignore_errors=True)  # an empty folder that stays behind does no harm
        self.close()

    def parts(self, columns: list[str] = PART_SCHEMA.names) -> Iterator[tuple[Path, pa.Table]]:
        """All or some columns of every published part, oldest first. A torn one is set aside: its rows run again."""
        for path in self.part_paths():
            table = self.read_part(path, columns)
            if table is not None:
                yield path, table

    def read_part(self, path: Path, columns: list[str]) -> pa.Table | None:
        """Columns of one part, checksums looked at. None: it was torn or damaged, and is set aside."""
        try:
            table = pq.read_table(path, columns=columns, page_checksum_verification=True)
            table = table.cast(_part_schema(columns).with_metadata(table.schema.metadata))
            told_by_part(table.schema.metadata)
        except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # the disk's fault, not the file's
                raise OutputError(f"{path}: cannot be read: {error.strerror}; run the same command again") from error
            self._set_aside(path)
            return None
        return table

    def _set_aside(self, path: Path) -> None:
        try:
            path.rename(path.with_name(path.name + ".unreadable"))
        except OSError as error:
            raise OutputError(f"{path}: is damaged and cannot be set aside: {error.strerror}; {ADVICE}") from error

    def part_paths(self) -> list[Path]:
        """Of the published parts, oldest first."""
        return sorted(self._part_paths())

    def next_part_number(self) -> int:
        numbers = [int(path.stem.removeprefix("part-")) for path in self._part_paths()]
        return max(numbers, default=-1) + 1

    def part_path(self, number: int) -> Path:
        return self.path / f"part-{number:08d}.parquet"

    def read_manifest(self) -> Manifest | None:
        """None when there is none. Raises ResumeRefusedError for a file that is no manifest of this version."""
        path = self.path / MANIFEST_NAME
        if not path.exists():
            return None
        try:
            return Manifest.from_json(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise OutputError(f"{path}: cannot be read: {error.strerror}; {ADVICE}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ResumeRefusedError(
                f"{path}: is no manifest of this cbgen ({error}); --resume never discards it"
            ) from error

    def write_manifest(self, manifest: Manifest) -> None:
        publish_text(self.path / MANIFEST_NAME, json.dumps(manifest.as_json(), indent=2, ensure_ascii=False))

    def discard(self) -> None:
        """Deletes what jobs have published here, and nothing else."""
        self.discard_parts()
        self.discard_runs()
        delete(self.path / MANIFEST_NAME)

    def discard_parts(self) -> None:
        """Deletes every part, published or set aside, and leaves the manifest."""
        for path in self.path.glob("part-*.parquet*"):
            delete(path)

    def discard_runs(self) -> None:
        """Deletes what earlier runs told of themselves."""
        for path in run_paths(self.path):
            delete(path)

    def _refuse_unless_new(self, resume: str, has_base: bool) -> None:
        if self._part_paths():
            raise ResumeRefusedError(f"{self.path}: holds parts but no {MANIFEST_NAME}; --resume never discards them")
        if resume == "always" and not has_base:
            raise ResumeRefusedError(f"{self.path}: there is nothing to resume; --resume if-possible starts anew")

    def _part_paths(self) -> list[Path]:
        return list(self.path.glob(f"part-{'[0-9]' * 8}.parquet"))

    def _delete_leftovers(self) -> None:
        """Deletes the unfinished files of a run that was killed while it wrote them."""
        name, beside = glob.escape(self.output.name), self.output.parent
        for pattern in (f".{name}.tmp-*", f".{name}.job.json.tmp-*"):
            for path in beside.glob(pattern):
                delete(path)
        for path in self.path.glob(".*.tmp-*"):
            delete(path)


def part_metadata(generation: int, table: pa.Table, run_started: float) -> dict[bytes, bytes]:
    """What a part says of itself, read without its rows. Moments are seconds since 1970; bytes those of Arrow."""
    told = {
        "generation": generation,
        "rows": table.num_rows,
        "failed": table.num_rows - table["error"].null_count,
        "bytes": table.nbytes,
        "published": time.time(),
        "run_started": run_started,
    }
    return {PART_METADATA_KEY: json.dumps(told).encode()}


def told_by_part(metadata: dict[bytes, bytes] | None) -> dict[str, Any]:
    """See part_metadata. Raises ValueError or LookupError for a file that is no part."""
    told = json.loads((metadata or {})[PART_METADATA_KEY])
    return {name: told[name] for name in ("generation", "rows", "failed", "bytes", "published", "run_started")}


def _harmless(mine: Manifest, known: Manifest) -> str:
    other = differences(mine.settings, known.settings)
    return f" (also, without effect on results: {'; '.join(other)})" if other else ""


def _part_schema(columns: list[str]) -> pa.Schema:
    return pa.schema([PART_SCHEMA.field(name) for name in columns])
