"""The commands that look at outputs: how far a job is, whether what it wrote is sound, one output made of shards."""

import typer
from rich.console import Console

from cbgen import options
from cbgen.cli_app import app, echo_json, guarded
from cbgen.report import print_line


@app.command()
def status(out: options.JobOutput, json: options.Json = False, preview: options.Preview = 0) -> None:
    """Show how far the job of OUT is, while it runs and after. The job is not disturbed."""

    def show() -> int:
        from cbgen.status import preview_line, read_status

        found, rows = read_status(out, preview)
        if json:
            echo_json(found.as_json() | ({"preview": rows} if preview else {}))
            return 0
        for name, value in found.lines().items():
            typer.echo(f"{name:<12}{value}")
        for row in rows:
            typer.echo(preview_line(row))
        return 0

    guarded(Console(stderr=True), show)


@app.command()
def verify(out: options.JobOutput, json: options.Json = False) -> None:
    """Check OUT: that every input row is there once and in order; counts, columns and checksums.

    Of a job that is not finished, what it has published is checked. Exit codes: 0 sound, 1 a problem was found, 75
    sound, but not finished.
    """

    def check() -> int:
        from cbgen.verify import verify as verify_output

        verdict = verify_output(out)
        if json:
            echo_json(verdict.as_json())
        else:
            for line in verdict.lines:
                typer.echo(line)
        return verdict.exit_code

    guarded(Console(stderr=True), check)


@app.command()
def merge(shards: options.Shards, out: options.Out = None, rows_per_shard: options.RowsPerShard = 100_000) -> None:
    """Make one output of the outputs of all shards of a job, as if it had run without shards.

    Exit codes: 0 done, 3 done with failed rows, 5 all rows failed.
    """
    console = Console(stderr=True)

    def join() -> int:
        from cbgen.merge import merge_shards

        merged = merge_shards(shards, out, rows_per_shard)
        print_line(console, merged.line())
        return merged.exit_code

    guarded(console, join, "nothing was written")


@app.command()
def report(out: options.JobOutput, report_file: options.ReportFile = None) -> None:
    """Make one HTML page of the job of OUT, finished or not: its rows, and how the engine spent the time."""
    console = Console(stderr=True)

    def make() -> int:
        from cbgen.report_page.page import write_report
        from cbgen.report_page.target import output_path, page_path

        path = output_path(out)
        page = page_path(path, report_file)
        write_report(path, page, lambda text: print_line(console, text))
        typer.echo(str(page))
        return 0

    guarded(console, make)
