"""One job from spec to final file: resolve, resume, feed, generate, publish, assemble."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from cbgen.collector import Collector
from cbgen.data.assembly import Results
from cbgen.data.files import DiskPatience, check_writable
from cbgen.data.manifest import Manifest, PartsFolder
from cbgen.data.published import PublishedResults
from cbgen.data.runs import read_runs
from cbgen.data.selection import Selection
from cbgen.data.writers import PartWriter
from cbgen.duplicates import Duplicates
from cbgen.errors import EXIT_DONE, EXIT_FAILED_ROWS, EXIT_TOO_MANY_FAILED, CbgenError, OutputError, first_line
from cbgen.finished import look_at_output, manifest_of
from cbgen.generation import EngineRun, generate
from cbgen.jobspec import JobSpec
from cbgen.output_rows import OutputRows
from cbgen.pipeline import Feeder
from cbgen.reopening import reopen
from cbgen.report import Summary, print_first_prompt, print_line, print_resolved, versions
from cbgen.report_page.page import write_report
from cbgen.resolution import ResolvedJob, resolve_job, resolved_lines, warnings_about
from cbgen.row_window import WindowLimits
from cbgen.run_log import RunLog
from cbgen.stopping import ErrorLimit, StopSwitch, parse_duration
from cbgen.summary import summarize


@dataclass(frozen=True)
class Outcome:
    """How a job ended: the exit code, and the figures unless an earlier run had done everything.

    output: where the rows are; errors_in: where the user finds why rows failed.
    """

    exit_code: int
    summary: Summary | None
    output: Path
    errors_in: str


def run_job(spec: JobSpec, console: Console, limits: WindowLimits | None = None) -> Outcome:
    """Runs a job to its final file, or continues one. What was published until it raises is kept.

    limits: how many rows are put in order at a time, and how many wait for the result of another. Raises CbgenError,
    and Stopped when a signal or --time-limit ends it early.
    """
    limit_s = None if spec.time_limit is None else parse_duration("--time-limit", spec.time_limit)
    ErrorLimit(spec.max_errors)  # what is wrong with it is told before anything is read
    stop = StopSwitch(spec.drain_timeout, limit_s)
    with stop.listening():
        job = resolve_job(spec, lambda text: print_line(console, text))
        with job.source:
            return JobRun(job, stop, console, limits or WindowLimits()).run()


class JobRun:
    """One run of a resolved job: from what is there already to the final file."""

    def __init__(self, job: ResolvedJob, stop: StopSwitch, console: Console, limits: WindowLimits):
        self._job = job
        self._stop = stop
        self._console = console
        self._limits = limits
        self._folder = PartsFolder(job.output.path)
        self._patience = DiskPatience(job.spec.publish_timeout, self._print)
        self._is_ours = False  # what is at the output

    def run(self) -> Outcome:
        """However the run ends, a page about the job is written, if there is one and the user wants that."""
        try:
            return self._run()
        finally:
            if self._is_ours:
                self._report()

    def _run(self) -> Outcome:
        job, spec = self._job, self._job.spec
        for warning in warnings_about(job):
            self._print(f"warning: {warning}")
        if not self._folder.path.exists():  # then no run is at work that could change the output meanwhile
            found = look_at_output(job, self._folder)
            if found.complete is not None:
                return self._already_complete(found.complete)
        job.refuse_repeated_ids()
        for path in (*job.output.new_files, spec.summary_path, spec.report_path):
            if path is not None:
                check_writable(path.parent)
        try:
            self._folder.lock()
            found = look_at_output(job, self._folder)
            if found.complete is not None:
                return self._already_complete(found.complete)
            if found.reopened is not None and found.has_leftovers:
                self._folder.discard()
            manifest = self._folder.open(manifest_of(job, found), spec.resume, spec.retry_kinds)
            self._is_ours = True
            print_resolved(self._console, resolved_lines(job))
            feeder, collector, num_failed = self._start_pipeline(manifest)
            log = RunLog(self._folder.path, job.device, collector, spec.part_interval, self._print)
            run = generate(job, feeder, collector, self._stop, num_failed, self._console, log)
            summary, config = self._finish(manifest, feeder, collector, run)
        finally:
            self._folder.close()
        if spec.summary_path is not None:
            text = json.dumps(summary.as_json(config), indent=2, ensure_ascii=False) + "\n"
            summary_path = spec.summary_path
            self._patience.publish(summary_path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
        return self._outcome(summary.rows_ok, summary.rows_failed, summary)

    def _already_complete(self, finished: dict[str, Any]) -> Outcome:
        """Nothing is left to do, but perhaps to delete parts that a run was killed over."""
        self._is_ours = True
        if self._folder.path.exists():
            self._remove_parts()
        ok, failed = finished["rows_ok"], finished["rows_failed"]
        advice = "; --retry failed generates those again" if failed else ""
        self._print(f"{self._folder.output} is complete: {ok} rows ok, {failed} failed{advice}")
        return self._outcome(ok, failed, None)

    def _outcome(self, num_ok: int, num_failed: int, summary: Summary | None) -> Outcome:
        """All rows failed is no success, and more than some rows that did."""
        too_many = ErrorLimit(self._job.spec.max_errors).exceeded(num_failed, num_ok + num_failed, at_end=True)
        if num_failed and (too_many or not num_ok):
            code = EXIT_TOO_MANY_FAILED
        else:
            code = EXIT_FAILED_ROWS if num_failed else EXIT_DONE
        return Outcome(code, summary, self._job.output.path, self._job.output.errors_in(self._job.layout))

    def _start_pipeline(self, manifest: Manifest) -> tuple[Feeder, Collector, int]:
        """Starts the threads beside the engine: rows begin to be read, rendered and tokenized while weights are loaded.

        Returns with them how many rows failed in earlier runs and are not tried again.
        """
        job, spec = self._job, self._job.spec
        prompter = job.prompter(manifest.date)
        if manifest.base == "pending":
            count = reopen(job, self._folder, prompter, self._writer(generation=0), self._print)
            manifest = replace(manifest, base="imported")
            self._folder.write_manifest(manifest)
            self._print(f"reopened  {job.output.path}: its {count} results are taken over")
        published = PublishedResults(self._folder, job.rows_total, manifest.retry)
        num_done, num_failed = published.count()
        if num_done:
            total = f"{'about ' if job.is_estimate else ''}{max(num_done, job.rows_total)}"
            self._print(f"resuming  {num_done} of {total} results are there already")
        if manifest.retry.kinds:
            self._print(f"retrying  {published.num_to_retry} results: {', '.join(manifest.retry.kinds)}")
        elif spec.retry_kinds:
            self._print("warning: --retry has no effect: nothing was generated yet")
        duplicates = Duplicates(self._limits.max_duplicates)
        writer = self._writer(manifest.retry.generation)
        output_rows = OutputRows(prompter, job.model.tokenizer, job.reasoning)
        collector = Collector(output_rows, writer, duplicates, give_up=lambda: self._stop.is_overdue)
        feeder = Feeder(
            job.source,
            job.columns,
            prompter,
            published=published,
            shard=job.shard,
            num_samples=job.layout.num_samples,
            job_seed=spec.seed,
            max_model_len=job.model.max_model_len,
            collector=collector,
            duplicates=duplicates,
            deduplicate=spec.deduplicate,
            limits=self._limits,
            on_first_prompt=lambda text: print_first_prompt(self._console, text),
            truncate_prompt=spec.truncate_prompt,
        )
        return feeder, collector, num_failed

    def _finish(
        self, manifest: Manifest, feeder: Feeder, collector: Collector, run: EngineRun
    ) -> tuple[Summary, dict[str, Any]]:
        """Assembles the final file and deletes the parts. Returns the figures, and the configuration as recorded."""
        job = self._job
        feeder.forget()
        selection = Selection(job.source, feeder.is_mine)
        results = Results(self._folder, feeder.keys, feeder.num_samples)
        if results.num_missing:
            raise OutputError(
                f"{results.num_missing} results are not in {self._folder.path}: run the same command again"
            )
        if results.num_foreign:
            self._print(
                f"{results.num_foreign} results are of rows or samples that the input no longer asks for: left out"
            )
        rows_total = results.samples.total
        summary = summarize(job, run, feeder, collector, rows_total, results.num_failed)
        chosen = {"order": job.spec.order, "deduplicate": job.spec.deduplicate, "device": str(job.device)}
        config = {**job.fingerprint, **chosen, "engine": asdict(run.engine.config) if run.engine else None}
        footer = {
            "job_id": manifest.job_id,
            "fingerprint": job.fingerprint,
            "input": job.source.identity,
            "input_rows": job.source.num_rows,
            "columns": job.layout.names,
            "num_samples": job.layout.num_samples,
            "generation": manifest.retry.generation,
            "revision": job.model.revision,
            "date": manifest.date.isoformat(),
            "rows_total": rows_total,
            "rows_ok": summary.rows_ok,
            "rows_failed": summary.rows_failed,
            "config": config,
            "versions": versions(),
            "runs": read_runs(self._folder.path),
        }
        job.output.write(selection, results, job.layout, footer, self._patience)
        self._remove_parts()
        return summary, config

    def _remove_parts(self) -> None:
        """The output is whole by now, so that what cannot be deleted is no failure of the job."""
        try:
            self._folder.remove()
        except OutputError as error:
            self._print(f"warning: {error}")

    def _report(self) -> None:
        """No result is lost with a page, so that one that cannot be made, whatever the reason, ends nothing."""
        report = self._job.spec.report_path
        if report is None:
            return
        try:
            write_report(self._job.output.path, report, self._print)
            self._print(f"report    {report}")
        except Exception as error:  # noqa: BLE001
            told = str(error) if isinstance(error, CbgenError) else f"{type(error).__name__}: {first_line(error)}"
            self._print(f"warning: --report {report}: {told}")

    def _writer(self, generation: int) -> PartWriter:
        spec = self._job.spec
        return PartWriter(self._folder, spec.part_rows, spec.part_interval, self._patience, generation)

    @property
    def _print(self) -> Callable[[str], None]:
        return lambda text: print_line(self._console, text)
