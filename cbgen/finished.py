"""What is at the output already: nothing, this very job finished, or a finished one that goes on with more rows."""

from dataclasses import dataclass, replace
from datetime import date, datetime, timezone
from typing import Any

from cbgen.data.manifest import Manifest, PartsFolder, Retry, fingerprint_conflict
from cbgen.errors import ResumeRefusedError
from cbgen.resolution import ResolvedJob


@dataclass(frozen=True)
class Found:
    """complete: the footer of a finished output that nothing is left to do for. reopened: the one of a finished output
    whose results are taken over, because the input has changed or some are to be generated again. has_leftovers:
    whether there are still parts of the job that finished it, some of them deleted perhaps."""

    complete: dict[str, Any] | None = None
    reopened: dict[str, Any] | None = None
    has_leftovers: bool = False


def look_at_output(job: ResolvedJob, folder: PartsFolder) -> Found:
    """Raises ResumeRefusedError for a file that is not cbgen's, or another job's."""
    job.output.refuse_foreign()
    footer = job.output.read_footer() if job.output.exists else None
    if footer is None and job.output.exists and not folder.is_begun:
        raise ResumeRefusedError(f"{job.output.path}: was not finished, and its parts are gone; choose another --out")
    if footer is None or job.spec.resume == "never":
        return Found()
    conflict, same_input = _conflict(job, footer), footer["input"] == job.source.identity
    begun = folder.read_manifest()
    if begun is not None and not _is_of(job, begun):
        if folder.has_parts:
            return Found()  # those of another job are refused where they are opened
    elif begun is not None and (begun.job_id != footer["job_id"] or job.output.damage(footer)):
        # A job that began after this output was finished, and will replace it; or this one's, killed between recording
        # the output and renaming it.
        return Found()
    if conflict is None and same_input and not job.spec.retry_kinds:
        return Found(complete=footer)
    if conflict is None and not same_input and not _shares_files(job, footer) and job.spec.resume != "always":
        conflict = "the input files are others; --resume always takes over the results of rows that they share"
    if conflict is None and job.source.num_rows < footer["input_rows"] and job.spec.resume != "always":
        conflict = (
            f"it has the results of {footer['input_rows']} input rows, now there are {job.source.num_rows}; "
            "--resume always leaves out the results of the others"
        )
    if conflict is not None:
        raise ResumeRefusedError(
            f"{job.output.path}: is the finished output of another job: {conflict}; choose another --out, or --resume "
            "never to replace it"
        )
    damage = job.output.damage(footer)
    if damage is not None:
        raise ResumeRefusedError(
            f"{damage}, so no job can go on from it; `cbgen verify` tells more, --resume never generates all anew"
        )
    return Found(reopened=footer, has_leftovers=begun is not None)


def manifest_of(job: ResolvedJob, found: Found) -> Manifest:
    """The manifest that this job begins with, if it has none yet."""
    today = datetime.now(timezone.utc).date() if job.spec.date is None else job.spec.date
    mine = Manifest(job.fingerprint, job.settings, job.rows_total, today, is_estimate=job.is_estimate)
    if found.reopened is None:
        return mine
    began = date.fromisoformat(found.reopened["date"])  # prompts stay what they were
    retry = Retry(found.reopened["generation"] + 1, job.spec.retry_kinds)
    return replace(mine, date=began, retry=retry, base="pending")


def _is_of(job: ResolvedJob, begun: Manifest) -> bool:
    return fingerprint_conflict(Manifest(job.fingerprint), begun, retrying=bool(job.spec.retry_kinds)) is None


def _conflict(job: ResolvedJob, footer: dict[str, Any]) -> str | None:
    theirs = Manifest(footer["fingerprint"])
    conflict = fingerprint_conflict(Manifest(job.fingerprint), theirs, retrying=bool(job.spec.retry_kinds))
    if conflict is None and footer["columns"] != job.layout.names:
        conflict = "the output columns asked for are not the same"
    return conflict


def _shares_files(job: ResolvedJob, footer: dict[str, Any]) -> bool:
    """Whether one of the input's files, as it is or was, is the same as before."""
    mine, theirs = (
        {str(entry[0]) for entry in identity} - {"limit"} for identity in (job.source.identity, footer["input"])
    )
    return bool(mine & theirs)
