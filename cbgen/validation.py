"""What a job would do, told without loading weights: every choice, and the first rows rendered and tokenized."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from cbgen.data.manifest import PartsFolder
from cbgen.errors import EXIT_DONE, EXIT_FAILED_ROWS, EXIT_TOO_MANY_FAILED
from cbgen.finished import look_at_output, manifest_of
from cbgen.first_rows import FirstRows
from cbgen.jobspec import JobSpec
from cbgen.resolution import ResolvedJob, resolve_job, resolved_lines, warnings_about

SHOWN_FAILURES = 5
PREVIEW_CHARS = 600


@dataclass
class Validated:
    """The first rows: prompt tokens of each that can be generated, and why the others cannot.

    most_tokens: that they may generate. num_clamped: rows that reach the context before their max_tokens. num_cut: rows
    whose prompts are cut.
    """

    lengths: list[int] = field(default_factory=list)
    most_tokens: int = 0
    num_clamped: int = 0
    num_cut: int = 0
    failures: list[tuple[int, str]] = field(default_factory=list)
    first_prompt: str | None = None

    @property
    def num_rows(self) -> int:
        return len(self.lengths) + len(self.failures)

    @property
    def exit_code(self) -> int:
        """That of the run, if all rows are like these."""
        if self.failures and not self.lengths:
            return EXIT_TOO_MANY_FAILED
        return EXIT_FAILED_ROWS if self.failures else EXIT_DONE


def validate_job(spec: JobSpec, num_rows: int, notify: Callable[[str], None]) -> tuple[dict[str, str], int]:
    """Lines to show and the exit code. Raises what a run would, before it begins."""
    job = resolve_job(spec, notify)
    with job.source:
        for warning in warnings_about(job):
            notify(f"warning: {warning}")
        job.refuse_repeated_ids()
        state = what_is_there(job)
        validated = _read_rows(job, num_rows)
        return resolved_lines(job) | {"resume": state} | _told(job, validated), validated.exit_code


def what_is_there(job: ResolvedJob) -> str:
    """At the output. Raises ResumeRefusedError where the run would."""
    folder = PartsFolder(job.output.path)
    found = look_at_output(job, folder)
    if found.complete is not None:
        return "a finished output of this very job, for which nothing is left to do"
    if found.reopened is not None:
        return f"a finished output of {found.reopened['rows_total']} rows, from which this job goes on"
    begun = folder.read_manifest() if job.spec.resume != "never" else None
    if begun is None or not folder.has_parts:
        return "there is nothing yet, the job begins"
    folder.refuse_other(manifest_of(job, found), begun, job.spec.retry_kinds)
    return "a part of this job, which goes on from there"


def _read_rows(job: ResolvedJob, num_rows: int) -> Validated:
    validated, first_rows = Validated(), FirstRows(job)
    for row in first_rows.take(num_rows):
        if row.prompt is not None and validated.first_prompt is None:
            validated.first_prompt = first_rows.preview(row)
        if row.error is not None:
            validated.failures.append((row.index, row.error))
        elif row.fitted is not None:
            validated.lengths.append(len(row.fitted.token_ids))
            validated.num_cut += row.fitted.num_cut > 0
            validated.num_clamped += row.fitted.clamped_max_tokens is not None
            validated.most_tokens += row.fitted.params.max_tokens * row.fitted.params.n
    validated.failures.sort()
    return validated


def _told(job: ResolvedJob, validated: Validated) -> dict[str, str]:
    lines = {"checked": f"the first {validated.num_rows} of {job.source.num_rows} rows"}
    if validated.lengths:
        lengths = np.array(validated.lengths)
        mean = float(lengths.mean())
        lines["tokens"] = (
            f"{lengths.sum()} in prompts: {lengths.min()} to {lengths.max()}, median {int(np.median(lengths))}, "
            f"mean {mean:.1f}; about {mean * job.source.num_rows:.0f} in the whole input"
        )
        lines["generates"] = f"up to {validated.most_tokens} tokens for these rows"
    if validated.first_prompt is not None:
        shown = validated.first_prompt[:PREVIEW_CHARS].replace("\n", "\n          ")
        lines["prompt"] = "the first one, as the model reads it:\n          " + shown
    if validated.num_cut:
        lines["truncated"] = f"{validated.num_cut} prompts are cut to leave room for what is generated"
    if validated.num_clamped:
        lines["clamped"] = f"{validated.num_clamped} rows reach the context before their max_tokens"
    if validated.failures:
        reasons = Counter(error for _, error in validated.failures)
        lines["failing"] = f"{len(validated.failures)} rows, for {len(reasons)} reasons"
        more = len(validated.failures) - SHOWN_FAILURES
        if more > 0:
            lines["failing"] += f"; the first {SHOWN_FAILURES}, {more} more"
        for index, error in validated.failures[:SHOWN_FAILURES]:
            place = job.source.place_of(index)
            lines[f"  row {index}"] = f" {error if error.startswith(place) else f'{place}: {error}'}"
    return lines
