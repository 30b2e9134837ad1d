"""The command line. Heavy imports wait inside the commands, so that `--help` is instant."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from cbgen import cli_measure, cli_outputs, options
from cbgen.cli_app import app, echo_json, guarded
from cbgen.cli_options import JOB_OPTIONS, given_options, with_options
from cbgen.errors import EXIT_DONE, EXIT_FATAL, UsageError
from cbgen.jobspec import SPEC_SUFFIXES, JobSpec, build_spec, option_name, read_spec_file
from cbgen.report import print_line

# Where `plan` is not told where the output will be.
NO_OUTPUT = "cbgen-plan"
CONTINUE = "what finished is published, and the same command continues the job"

__all__ = ["app", "cli_measure", "cli_outputs", "main"]


@app.command()
@with_options(JOB_OPTIONS)
def run(context: typer.Context) -> None:
    """Generate a completion for every row of INPUT and write them, in order, to --out.

    The same command run again continues where a stopped run was. Exit codes: 0 done, 1 fatal, 2 usage, 3 done with
    failed rows, 4 resume refused, 5 all rows failed or --max-errors exceeded, 75 stopped and resumable.
    """
    console = Console(stderr=True)
    guarded(console, lambda: _run(_spec(context), console), CONTINUE)


@app.command()
@with_options(JOB_OPTIONS)
def validate(context: typer.Context, *, rows: options.CheckRows = 1000) -> None:
    """Check a job spec, or the options of a run, without loading weights: columns, template, tokenizer, tokens.

    Exit codes are those of the run: 2 for what is wrong with the job, 3 when some of the rows would fail, 5 when all.
    """
    console = Console(stderr=True)

    def check() -> int:
        from cbgen.validation import validate_job

        lines, code = validate_job(_spec(context), rows, lambda text: print_line(console, text))
        for name, value in lines.items():
            typer.echo(f"{name:<10}{value}")
        return code

    guarded(console, check)


@app.command()
@with_options(JOB_OPTIONS)
def plan(
    context: typer.Context,
    *,
    rows: options.PlanRows = 20_000,
    calibrate: options.Calibrate = True,
    expected_tokens: options.ExpectedTokens = None,
    json: options.Json = False,
) -> None:
    """Tell what a job comes to before it is run: tokens, limits, shared prefixes, cache, disk, and the time it takes.

    For the time the model is loaded, some forward passes over rows of the input are timed, and the run is simulated
    with the engine's own scheduler and cache. --out may be left out; nothing is written.
    """
    console = Console(stderr=True)

    def show() -> int:
        from cbgen.plan.command import make_plan, plan_json, plan_lines

        made = make_plan(
            _spec(context, needs_out=False), rows, calibrate, expected_tokens, lambda text: print_line(console, text)
        )
        if json:
            echo_json(plan_json(made))
            return EXIT_DONE
        for name, value in plan_lines(made):
            typer.echo(f"{name:<10}{value}")
        return EXIT_DONE

    guarded(console, show)


def _run(spec: JobSpec, console: Console) -> int:
    from cbgen.job import run_job

    outcome = run_job(spec, console)
    if outcome.summary is not None:
        failed, total = outcome.summary.rows_failed, outcome.summary.rows_total
        print_line(console, f"wrote     {outcome.output}: {outcome.summary.rows_ok} rows ok, {failed} failed")
        if outcome.summary.deduplicated:
            print_line(console, f"{outcome.summary.deduplicated} rows took the result of an equal one")
        if failed:
            print_line(console, f"{failed} of {total} rows failed: see {outcome.errors_in}")
        sys.stderr.flush()
        typer.echo(outcome.summary.throughput_line())
    return outcome.exit_code


def _spec(context: typer.Context, needs_out: bool = True) -> JobSpec:
    """The options given, over those of the job spec that may be among them. needs_out: where not, --out may be left
    out, and is a name that says so."""
    given = given_options(context, JOB_OPTIONS)
    inputs = given.get("input") or []
    if any(Path(path).suffix in SPEC_SUFFIXES for path in inputs):
        if len(inputs) > 1:
            raise UsageError("a job spec stands alone: give its input in the spec, or the files without it")
        given = {**read_spec_file(Path(inputs[0])), **{name: v for name, v in given.items() if name != "input"}}
    for name in ("chat_template_kwargs", "logit_bias"):
        if isinstance(given.get(name), str):
            given = {**given, name: _json_object(option_name(name), given[name])}
    if not needs_out:
        suffix = ".jsonl" if given.get("format") == "openai-batch" else ".parquet"
        given = {"out": NO_OUTPUT + suffix} | given
    return build_spec(given)


def _json_object(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{option}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{option}: a JSON object is expected, such as '{{\"name\": 1}}'")
    return value


def main() -> None:
    """The entry point. A reader that closes the pipe early is no failure worth a traceback."""
    try:
        app()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FATAL)
