"""The command line. Heavy imports wait inside the commands, so that `--help` is instant."""

import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from cbgen import cli_measure, cli_outputs, options
from cbgen.cli_app import app, guarded
from cbgen.errors import EXIT_FATAL, UsageError
from cbgen.jobspec import SPEC_SUFFIXES, JobSpec, build_spec, option_name, read_spec_file
from cbgen.report import print_line

CONTINUE = "what finished is published, and the same command continues the job"

__all__ = ["app", "cli_measure", "cli_outputs", "main"]


def job_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command, which has the context first and its own options last, every option of a job between them.

    They are the fields of JobSpec, each spelt as in `options`, so that a spec file and the command line cannot differ.
    """
    context, *own = inspect.signature(command).parameters.values()
    fields = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if field.is_required() or isinstance(field.default, list | dict) else field.default,
            annotation=getattr(options, "".join(word.capitalize() for word in name.split("_"))),
        )
        for name, field in JobSpec.model_fields.items()
    ]
    own = [parameter for parameter in own if parameter.kind is inspect.Parameter.KEYWORD_ONLY]

    def with_options(**values: Any) -> None:
        asked = values["context"]
        given = {
            name: value
            for name, value in asked.params.items()
            if name in JobSpec.model_fields
            and (source := asked.get_parameter_source(name)) is not None
            and source.name == "COMMANDLINE"
        }
        command(given, **{parameter.name: values[parameter.name] for parameter in own})

    context = context.replace(annotation=typer.Context, kind=inspect.Parameter.KEYWORD_ONLY, name="context")
    parameters = [context, *fields, *own]
    with_options.__name__, with_options.__doc__ = command.__name__, command.__doc__
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return with_options


@app.command()
@job_options
def run(given: dict[str, Any]) -> None:
    """Generate a completion for every row of INPUT and write them, in order, to --out.

    The same command run again continues where a stopped run was. Exit codes: 0 done, 1 fatal, 2 usage, 3 done with
    failed rows, 4 resume refused, 5 all rows failed or --max-errors exceeded, 75 stopped and resumable.
    """
    console = Console(stderr=True)
    guarded(console, lambda: _run(_spec(given), console), CONTINUE)


@app.command()
@job_options
def validate(given: dict[str, Any], *, rows: options.CheckRows = 1000) -> None:
    """Check a job spec, or the options of a run, without loading weights: columns, template, tokenizer, tokens.

    Exit codes are those of the run: 2 for what is wrong with the job, 3 when some of the rows would fail, 5 when all.
    """
    console = Console(stderr=True)

    def check() -> int:
        from cbgen.validation import validate_job

        lines, code = validate_job(_spec(given), rows, lambda text: print_line(console, text))
        for name, value in lines.items():
            typer.echo(f"{name:<10}{value}")
        return code

    guarded(console, check)


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


def _spec(given: dict[str, Any]) -> JobSpec:
    """The options given, over those of the job spec that may be among them."""
    inputs = given.get("input") or []
    if any(Path(path).suffix in SPEC_SUFFIXES for path in inputs):
        if len(inputs) > 1:
            raise UsageError("a job spec stands alone: give its input in the spec, or the files without it")
        given = {**read_spec_file(Path(inputs[0])), **{name: v for name, v in given.items() if name != "input"}}
    for name in ("chat_template_kwargs", "logit_bias"):
        if isinstance(given.get(name), str):
            given = {**given, name: _json_object(option_name(name), given[name])}
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
