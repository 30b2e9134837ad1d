"""The command line. Heavy imports wait inside the commands, so that `--help` is instant."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import cbgen
from cbgen import options
from cbgen.errors import EXIT_FATAL, EXIT_INTERRUPTED, CbgenError, UsageError
from cbgen.report import print_line

JOB_INTERRUPTED = "interrupted; finished rows are published, the same command continues the job"

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


@app.command()
def run(
    context: typer.Context,
    input: options.Input,
    model: options.Model = None,
    out: options.Out = None,
    revision: options.Revision = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = None,
    calibration: options.Calibration = None,
    max_model_len: options.MaxModelLen = None,
    prompt_column: options.PromptColumn = None,
    messages_column: options.MessagesColumn = None,
    template: options.Template = None,
    system_prompt: options.SystemPrompt = None,
    chat: options.Chat = False,
    chat_template_kwargs: options.ChatTemplateKwargs = None,
    limit: options.Limit = None,
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    seed: options.Seed = 0,
    n: options.N = 1,
    ignore_eos: options.IgnoreEos = False,
    order: options.Order = "auto",
    deduplicate: options.Deduplicate = True,
    output_token_ids: options.OutputTokenIds = False,
    output_prefix: options.OutputPrefix = "",
    summary: options.Summary = None,
    resume: options.Resume = "if-possible",
    part_rows: options.PartRows = 10_000,
    part_interval: options.PartInterval = 60.0,
    page_size: options.PageSize = None,
    num_blocks: options.NumBlocks = None,
    max_batch_tokens: options.MaxBatchTokens = None,
    max_requests_per_batch: options.MaxRequestsPerBatch = None,
    max_memory_percent: options.MaxMemoryPercent = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = None,
    scheduler_type: options.SchedulerType = "fifo",
    safety_margin: options.SafetyMargin = None,
    allow_block_sharing: options.AllowBlockSharing = True,
    cpu_offload_space: options.CpuOffloadSpace = 0.0,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    balance_tail: options.BalanceTail = True,
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
        if outcome.summary.deduplicated:
            print_line(console, f"{outcome.summary.deduplicated} rows took the result of an equal one")
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


def _guarded(console: Console, command: Any, interrupted: str = JOB_INTERRUPTED) -> int:
    """Runs a command; a failure that cbgen names becomes one line and its exit code."""
    try:
        return command()
    except CbgenError as error:
        print_line(console, f"cbgen: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        print_line(console, f"cbgen: {interrupted}")
        return EXIT_INTERRUPTED


@app.command()
def size(
    model: options.Model = None,
    memory: options.Memory = None,
    tokens: options.Tokens = None,
    revision: options.Revision = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    max_model_len: options.MaxModelLen = None,
    page_size: options.PageSize = None,
    num_blocks: options.NumBlocks = None,
    max_batch_tokens: options.MaxBatchTokens = None,
    max_requests_per_batch: options.MaxRequestsPerBatch = None,
    max_memory_percent: options.MaxMemoryPercent = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = None,
    cpu_offload_space: options.CpuOffloadSpace = 0.0,
    kv_cache_dtype: options.KvCacheDtype = "auto",
) -> None:
    """Print what of a model fits in memory: the cache, and how many requests of a given length at once.

    No weights are loaded: the plan comes from the model's config (a GGUF file is converted first, once). With --memory
    it is made for the device named, whether or not this machine has one.
    """

    console = Console(stderr=True)

    def show() -> int:
        if model is None:
            raise UsageError("--model is missing")
        from cbgen.config import ContinuousBatchingConfig
        from cbgen.device import free_memory_bytes, pick_device, total_memory_bytes
        from cbgen.models.loading import describe
        from cbgen.size import parse_bytes, size_lines

        memory_bytes = None if memory is None else parse_bytes(memory)
        target = pick_device(device, must_exist=memory is None)
        memory_of = free_memory_bytes if gpu_memory_utilization is None else total_memory_bytes
        config = ContinuousBatchingConfig(
            page_size=page_size,
            num_blocks=num_blocks,
            max_batch_tokens=max_batch_tokens,
            max_requests_per_batch=max_requests_per_batch,
            max_memory_percent=max_memory_percent,
            cpu_offload_space=cpu_offload_space,
            kv_cache_dtype=kv_cache_dtype,
        ).resolve(target.type)
        lines = {"device": str(target)} | size_lines(
            describe(model, revision, dtype, target, max_model_len, lambda text: print_line(console, text)),
            config,
            memory_of(target) if memory_bytes is None else memory_bytes,
            gpu_memory_utilization,
            tokens or [],
            device_type=target.type,
        )
        for name, value in lines.items():
            typer.echo(f"{name:<10}{value}")
        return 0

    code = _guarded(console, show)
    if code:
        raise typer.Exit(code)


@app.command()
def bench(
    context: typer.Context,
    model: options.Model = None,
    workload: options.Workload = "random",
    backend: options.Backend = None,
    runs: options.Runs = 2,
    profile: options.Profile = True,
    num_prompts: options.NumPrompts = None,
    input_len: options.InputLen = None,
    output_len: options.OutputLen = None,
    prefix_len: options.PrefixLen = None,
    output_json: options.OutputJson = None,
    revision: options.Revision = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = None,
    calibration: options.Calibration = None,
    max_model_len: options.MaxModelLen = None,
    page_size: options.PageSize = None,
    num_blocks: options.NumBlocks = None,
    max_batch_tokens: options.MaxBatchTokens = None,
    max_requests_per_batch: options.MaxRequestsPerBatch = None,
    max_memory_percent: options.MaxMemoryPercent = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = None,
    order: options.Order = "auto",
    scheduler_type: options.SchedulerType = "fifo",
    safety_margin: options.SafetyMargin = None,
    allow_block_sharing: options.AllowBlockSharing = True,
    cpu_offload_space: options.CpuOffloadSpace = 0.0,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    balance_tail: options.BalanceTail = True,
) -> None:
    """Time the same requests on one or several backends, taking turns, and show where cbgen's time goes.

    Greedy, and every request generates exactly its tokens, so that all backends do the same work. Loading and one small
    warm-up are not timed. Exit code 1: a backend could not run.
    """
    console = Console(stderr=True)

    def measure() -> int:
        if model is None:
            raise UsageError("--model is missing")
        from cbgen.bench import bench_spec, run_bench

        return run_bench(bench_spec(context.params), console, Console())

    code = _guarded(console, measure, interrupted="interrupted; nothing was written")
    if code:
        raise typer.Exit(code)


@app.command()
def quality(
    text: options.Text,
    model: options.Model = None,
    quantization: options.Quantization = None,
    calibration: options.Calibration = None,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    rows: options.Rows = 6,
    row_tokens: options.RowTokens = 1024,
    prompt_tokens: options.PromptTokens = 64,
    output_len: options.QualityOutputLen = 64,
    revision: options.Revision = None,
    max_model_len: options.MaxModelLen = None,
    max_batch_tokens: options.MaxBatchTokens = None,
) -> None:
    """Measure what int8 weights or KV cost against float32 on TEXT, a JSONL file with prompt or prompt_ids.

    Perplexity; how often the likeliest next token is the same (top-1, the text being given); and how far greedy
    generation from the beginning of each row goes the same way.
    """
    console = Console(stderr=True)

    def measure() -> int:
        if model is None:
            raise UsageError("--model is missing")
        from cbgen.config import ContinuousBatchingConfig
        from cbgen.device import pick_device
        from cbgen.models.loading import describe
        from cbgen.models.quantization import kernels_for, resolve_quantization
        from cbgen.quality import REFERENCE, QualitySpec, run_quality, table_of

        def tell(line: str) -> None:
            print_line(console, line)

        device = pick_device("cpu")
        described = describe(model, revision, REFERENCE, device, max_model_len, tell)
        chosen = resolve_quantization(quantization, calibration, kernels_for(device, described.dtype))
        config = ContinuousBatchingConfig(kv_cache_dtype=kv_cache_dtype, max_batch_tokens=max_batch_tokens)
        spec = QualitySpec(text, rows, row_tokens, prompt_tokens, output_len)
        Console().print(table_of(run_quality(spec, described, device, config, chosen, tell)))
        return 0

    code = _guarded(console, measure, interrupted="interrupted")
    if code:
        raise typer.Exit(code)


@app.command()
def env() -> None:
    """Print the versions and the hardware that cbgen runs on."""

    def show() -> int:
        import torch

        from cbgen.cache.sizing import mib
        from cbgen.device import free_memory_bytes, pick_device
        from cbgen.kernels.cpu.library import kernels_here
        from cbgen.report import versions

        device = pick_device("auto")
        for name, value in versions().items():
            typer.echo(f"{name:<14}{value}")
        typer.echo(f"{'device':<14}{device}, {mib(free_memory_bytes(device))} free")
        typer.echo(f"{'threads':<14}{torch.get_num_threads()} of {os.cpu_count()} processors")
        typer.echo(f"{'kernels':<14}{kernels_here()}")
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
