"""What a job is, and what of it is done: the fingerprint, the folder of parts, and the keys that the parts hold."""

import glob
import json
import shutil
from collections.abc import Iterator
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any

import filelock
import pyarrow as pa
import pyarrow.parquet as pq

from cbgen.data.files import check_writable, publish_text
from cbgen.data.rows import PART_SCHEMA, parts_path
from cbgen.errors import OutputError, ResumeRefusedError

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 1


def fingerprint_conflict(mine: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """The first option that changes results and differs, with both values; None when none does."""
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            return f"{name} is {mine.get(name)!r} now and was {theirs.get(name)!r}"
    return None


class PartsFolder:
    """The folder beside the output in which a job's results are published while it runs.

    out.parquet.parts/manifest.json          the job's fingerprint, and the date given to templates
                      part-00000000.parquet  results, immutable; only what is here under this name is done
                      lock                   held by the run at work
    """

    def __init__(self, output: Path):
        self.path = parts_path(output)
        self.output = output
        self._lock = filelock.FileLock(self.path / "lock", blocking=False)

    @property
    def is_begun(self) -> bool:
        """Whether a job has published here that it is at work, or was."""
        return (self.path / MANIFEST_NAME).exists()

    def open(self, fingerprint: dict[str, Any], resume: str) -> date:
        """Locks the folder and makes it this job's. Returns the job's date, that of its first start.

        resume: "if-possible" continues a matching job or starts one; "always" wants one to continue; "never" discards
        what is there. Raises ResumeRefusedError for another job's parts and for a folder that a running job holds.
        """
        check_writable(self.path)
        try:
            self._lock.acquire()
        except filelock.Timeout as error:
            raise ResumeRefusedError(f"{self.path}: another run is writing this output") from error
        self._delete_leftovers()
        if resume == "never":
            self._clear()
        known = self._read_manifest()
        if known is None:
            if any(self._part_paths()):
                raise ResumeRefusedError(
                    f"{self.path}: holds parts but no {MANIFEST_NAME}; --resume never discards them"
                )
            if resume == "always":
                raise ResumeRefusedError(f"{self.path}: there is nothing to resume; --resume if-possible starts anew")
            today = datetime.now(timezone.utc).date()
            self._write_manifest(fingerprint, today)
            return today
        conflict = fingerprint_conflict(fingerprint, known["fingerprint"])
        if conflict is not None and not self._part_paths():  # nothing was published, so nothing can be mixed
            self._write_manifest(fingerprint, known["date"])
        elif conflict is not None:
            raise ResumeRefusedError(
                f"{self.path}: holds the results of another job: {conflict}; "
                "choose another --out, or --resume never to discard them"
            )
        return known["date"]

    def close(self) -> None:
        """Lets another run have the folder."""
        self._lock.release()

    def remove(self) -> None:
        """Deletes the parts once the final output holds them, the manifest last, and the lock with them."""
        self._clear()
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)  # an empty folder that stays behind does no harm

    def parts(self, columns: list[str] = PART_SCHEMA.names) -> Iterator[tuple[Path, pa.Table]]:
        """All or some columns of every published part, oldest first. A torn one is set aside: its rows run again."""
        for path in sorted(self._part_paths()):
            try:
                yield path, pq.read_table(path, columns=columns).cast(_part_schema(columns))
            except (pa.ArrowInvalid, OSError) as error:
                if isinstance(error, OSError) and error.errno is not None:  # the disk's fault, not the file's
                    raise OutputError(
                        f"{path}: cannot be read: {error.strerror}; run the same command again"
                    ) from error
                path.rename(path.with_name(path.name + ".unreadable"))

    def next_part_number(self) -> int:
        numbers = [int(path.stem.removeprefix("part-")) for path in self._part_paths()]
        return max(numbers, default=-1) + 1

    def part_path(self, number: int) -> Path:
        return self.path / f"part-{number:08d}.parquet"

    def _part_paths(self) -> list[Path]:
        return list(self.path.glob(f"part-{'[0-9]' * 8}.parquet"))

    def _clear(self) -> None:
        """Deletes what jobs have published here, and nothing else."""
        for path in [*self.path.glob("part-*.parquet*"), self.path / MANIFEST_NAME]:
            path.unlink(missing_ok=True)

    def _delete_leftovers(self) -> None:
        """Deletes the unfinished files of a run that was killed while it wrote them."""
        for path in [*self.path.glob(".*.tmp-*"), *self.output.parent.glob(f".{glob.escape(self.output.name)}.tmp-*")]:
            path.unlink(missing_ok=True)

    def _read_manifest(self) -> dict[str, Any] | None:
        path = self.path / MANIFEST_NAME
        if not path.exists():
            return None
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            if known["version"] == MANIFEST_VERSION:
                return {"fingerprint": dict(known["fingerprint"]), "date": date.fromisoformat(known["date"])}
            reason = f"is of another version of cbgen (manifest {known['version']})"
        except (ValueError, LookupError, TypeError) as error:
            reason = f"is no manifest of cbgen ({error})"
        raise ResumeRefusedError(f"{path}: {reason}; --resume never discards it")

    def _write_manifest(self, fingerprint: dict[str, Any], today: date) -> None:
        content = {"version": MANIFEST_VERSION, "date": today.isoformat(), "fingerprint": fingerprint}
        text = json.dumps(content, indent=2, ensure_ascii=False)
        publish_text(self.path / MANIFEST_NAME, text)


def _part_schema(columns: list[str]) -> pa.Schema:
    return pa.schema([PART_SCHEMA.field(name) for name in columns])
