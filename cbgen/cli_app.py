"""The command line's root: the application, and how a command ends."""

import json
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console

import cbgen
from cbgen.errors import EXIT_INTERRUPTED, CbgenError
from cbgen.report import print_line
from cbgen.stopping import Stopped

app = typer.Typer(
    name="cbgen",
    help="Offline batch text generation: prompts in, completions out, with continuous batching.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"cbgen {cbgen.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def guarded(console: Console, command: Callable[[], int], interrupted: str = "interrupted") -> None:
    """Runs a command and ends with its exit code; a failure that cbgen names becomes one line and its exit code."""
    try:
        code = command()
    except CbgenError as error:
        print_line(console, f"cbgen: {error}")
        code = error.exit_code
    except Stopped as stopped:
        print_line(console, f"cbgen: {stopped}; {interrupted}")
        code = stopped.exit_code
    except KeyboardInterrupt:
        print_line(console, f"cbgen: interrupted; {interrupted}")
        code = EXIT_INTERRUPTED
    if code:
        raise typer.Exit(code)


def echo_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
