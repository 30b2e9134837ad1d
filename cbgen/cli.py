"""The command line. Heavy imports wait inside the commands, so that `--help` is instant."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import cbgen
from cbgen.errors import EXIT_FATAL, EXIT_INTERRUPTED, CbgenError, UsageError
from cbgen.report import print_line

app = typer.Typer(
    name="cbgen",
    help="Offline batch text generation: prompts in, completions out, with continuous batching.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
INPUT, SAMPLING, ENGINE, OUTPUT = "Input", "Sampling", "Engine", "Output"


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


@app.command()
def run(
    context: typer.Context,
    input: Annotated[
        list[str],
        typer.Argument(help="Parquet or JSONL files, globs or folders; or one job spec (.yaml).", show_default=False),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="A model folder, hub id or .gguf file; smollm2; or tiny-random, a test model made in memory."
        ),
    ] = None,
    out: Annotated[str | None, typer.Option(help="The output file, .parquet or .jsonl.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(help="Context in tokens, if less than the model's.", show_default="the model's")
    ] = None,
    prompt_column: Annotated[
        str | None, typer.Option(help="Column of prompt texts.", rich_help_panel=INPUT, show_default="prompt")
    ] = None,
    messages_column: Annotated[
        str | None,
        typer.Option(help="Column of chat messages (role, content).", rich_help_panel=INPUT, show_default="messages"),
    ] = None,
    template: Annotated[
        str | None, typer.Option(help="Jinja2 template over the columns that makes the prompt.", rich_help_panel=INPUT)
    ] = None,
    system_prompt: Annotated[
        str | None,
        typer.Option(help="System message for rows without one; implies --chat.", rich_help_panel=INPUT),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Send each prompt as a user message through the chat template.", rich_help_panel=INPUT
        ),
    ] = False,
    chat_template_kwargs: Annotated[
        str | None, typer.Option(help="JSON object of variables for the chat template.", rich_help_panel=INPUT)
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first N rows.", rich_help_panel=INPUT)] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.", rich_help_panel=SAMPLING)] = 512,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING, show_default="the model's generation config, or 0"),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Smallest set of tokens with this probability.",
            rich_help_panel=SAMPLING,
            show_default="the model's generation config, or 1",
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            help="The k most probable tokens; 0 is off.",
            rich_help_panel=SAMPLING,
            show_default="the model's generation config, or 0",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the job's draws.", rich_help_panel=SAMPLING)] = 0,
    n: Annotated[int, typer.Option("--n", "-n", help="Samples per row.", rich_help_panel=SAMPLING)] = 1,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Generate on past end-of-sequence tokens.", rich_help_panel=SAMPLING)
    ] = False,
    output_token_ids: Annotated[
        bool, typer.Option("--output-token-ids", help="Add a column completion_ids.", rich_help_panel=OUTPUT)
    ] = False,
    output_prefix: Annotated[
        str, typer.Option(help="Prefix of the output columns' names.", rich_help_panel=OUTPUT)
    ] = "",
    summary: Annotated[
        str | None, typer.Option(help="Write the run's figures to this JSON file.", rich_help_panel=OUTPUT)
    ] = None,
    resume: Annotated[
        str,
        typer.Option(
            help="if-possible: continue a matching job or start; always: only continue; never: start anew.",
            rich_help_panel=OUTPUT,
        ),
    ] = "if-possible",
    part_rows: Annotated[
        int, typer.Option(help="Publish finished rows at the latest after so many.", rich_help_panel=OUTPUT)
    ] = 10_000,
    part_interval: Annotated[
        float, typer.Option(help="Publish finished rows at the latest after so many seconds.", rich_help_panel=OUTPUT)
    ] = 60.0,
    page_size: Annotated[
        int | None, typer.Option(help="Tokens of KV in a page.", rich_help_panel=ENGINE, show_default="by hardware")
    ] = None,
    num_blocks: Annotated[
        int | None,
        typer.Option(
            help="Cache capacity in blocks of page_size tokens.",
            rich_help_panel=ENGINE,
            show_default="from free memory",
        ),
    ] = None,
    max_batch_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-batch-tokens",
            "--max-num-batched-tokens",
            help="Query tokens in a forward pass.",
            rich_help_panel=ENGINE,
            show_default="by hardware",
        ),
    ] = None,
    max_requests_per_batch: Annotated[
        int | None,
        typer.Option(
            "--max-requests-per-batch",
            "--max-num-seqs",
            help="Requests in a forward pass.",
            rich_help_panel=ENGINE,
            show_default="by hardware",
        ),
    ] = None,
    max_memory_percent: Annotated[
        float | None,
        typer.Option(help="Share of free memory to use, 0 to 1.", rich_help_panel=ENGINE, show_default="by hardware"),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(help="Instead: share of all device memory, 0 to 1, weights included.", rich_help_panel=ENGINE),
    ] = None,
    scheduler_type: Annotated[str, typer.Option(help="fifo.", rich_help_panel=ENGINE)] = "fifo",
    safety_margin: Annotated[
        float | None,
        typer.Option(
            help="Free share of the cache below which only decodes go on; 0 is off.",
            rich_help_panel=ENGINE,
            show_default="0.15",
        ),
    ] = None,
) -> None:
    """Generate a completion for every row of INPUT and write them, in order, to --out.

    The same command run again continues where a stopped run was. Exit codes: 0 done, 1 fatal, 2 usage, 3 done with
    failed rows, 4 resume refused, 130 interrupted.
    """
    console = Console(stderr=True)
    given = {
        name: value
        for name, value in context.params.items()
        if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
    }
    code = _guarded(console, lambda: _run(given, console))
    if code:
        raise typer.Exit(code)


def _run(given: dict[str, Any], console: Console) -> int:
    from cbgen.jobspec import SPEC_SUFFIXES, build_spec, read_spec_file

    inputs = given["input"]
    if any(Path(path).suffix in SPEC_SUFFIXES for path in inputs):
        if len(inputs) > 1:
            raise UsageError("a job spec stands alone: give its input in the spec, or the files without it")
        given = {**read_spec_file(Path(inputs[0])), **{name: v for name, v in given.items() if name != "input"}}
    if isinstance(given.get("chat_template_kwargs"), str):
        given["chat_template_kwargs"] = _json_object("--chat-template-kwargs", given["chat_template_kwargs"])
    spec = build_spec(given)
    from cbgen.job import run_job

    outcome = run_job(spec, console)
    if outcome.summary is not None:
        failed, total = outcome.summary.rows_failed, outcome.summary.rows_total
        if failed:
            print_line(console, f"{failed} of {total} rows failed: see column {spec.output_prefix}error")
        sys.stderr.flush()
        typer.echo(outcome.summary.throughput_line())
    return outcome.exit_code


def _json_object(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{option}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{option}: a JSON object is expected, such as '{{\"enable_thinking\": false}}'")
    return value


def _guarded(console: Console, command: Any) -> int:
    """Runs a command; a failure that cbgen names becomes one line and its exit code."""
    try:
        return command()
    except CbgenError as error:
        print_line(console, f"cbgen: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        print_line(console, "cbgen: interrupted; finished rows are published, the same command continues the job")
        return EXIT_INTERRUPTED


@app.command()
def env() -> None:
    """Print the versions and the hardware that cbgen runs on."""

    def show() -> int:
        import torch

        from cbgen.cache.sizing import mib
        from cbgen.device import free_memory_bytes, pick_device
        from cbgen.report import versions

        device = pick_device("auto")
        for name, value in versions().items():
            typer.echo(f"{name:<14}{value}")
        typer.echo(f"{'device':<14}{device}, {mib(free_memory_bytes(device))} free")
        typer.echo(f"{'threads':<14}{torch.get_num_threads()} of {os.cpu_count()} processors")
        typer.echo(f"{'attention':<14}sdpa")
        return 0

    code = _guarded(Console(stderr=True), show)
    if code:
        raise typer.Exit(code)


def main() -> None:
    """The entry point. A reader that closes the pipe early is no failure worth a traceback."""
    try:
        app()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FATAL)
