"""The commands that measure: what fits, how fast it is, what precision costs, where it runs."""

import os

import typer
from rich.console import Console

from cbgen import options
from cbgen.bench.ending import EndingSignals
from cbgen.cli_app import app, guarded
from cbgen.cli_options import ENGINE_OPTIONS, SIZE_OPTIONS, with_options
from cbgen.errors import UsageError
from cbgen.report import print_line


@app.command()
@with_options(SIZE_OPTIONS)
def size(
    context: typer.Context,
    model: options.Model = None,
    memory: options.Memory = None,
    tokens: options.Tokens = None,
    revision: options.Revision = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    max_model_len: options.MaxModelLen = None,
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
        engine = {name: context.params[name] for name in SIZE_OPTIONS}
        gpu_memory_utilization = engine.pop("gpu_memory_utilization")
        memory_of = free_memory_bytes if gpu_memory_utilization is None else total_memory_bytes
        config = ContinuousBatchingConfig(**engine).resolve(target.type)
        lines = {"device": str(target)} | size_lines(
            describe(model, revision, dtype, target, max_model_len, lambda text: print_line(console, text)),
            config,
            memory_of(target) if memory_bytes is None else memory_bytes,
            gpu_memory_utilization,
            tokens or [],
            device_type=target.type,
        )
        for name, value in lines.items():
            typer.echo(f"{name:<10} {value}")
        return 0

    guarded(console, show)


@app.command()
@with_options(ENGINE_OPTIONS)
def bench(
    context: typer.Context,
    model: options.Model = None,
    backend: options.Backend = None,
    compare: options.Compare = None,
    runs: options.Runs = 2,
    profile: options.Profile = True,
    python: options.Python = None,
    peer_model: options.PeerModel = None,
    revision: options.Revision = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = None,
    calibration: options.Calibration = None,
    max_model_len: options.MaxModelLen = None,
    dataset_name: options.DatasetName = "random",
    dataset_path: options.DatasetPath = None,
    num_prompts: options.NumPrompts = None,
    input_len: options.InputLen = None,
    output_len: options.OutputLen = None,
    random_range_ratio: options.RandomRangeRatio = None,
    prefix_len: options.PrefixLen = None,
    num_prefixes: options.NumPrefixes = None,
    n: options.BenchN = 1,
    seed: options.BenchSeed = 0,
    slo: options.Slo = None,
    markdown: options.Markdown = False,
    output_json: options.OutputJson = None,
    baseline: options.Baseline = None,
    max_regression: options.MaxRegression = None,
    order: options.Order = "auto",
) -> None:
    """Time the same requests on one or several backends, taking turns, and show where cbgen's time goes.

    Greedy, and every request generates exactly its tokens, so that all backends do the same work. Loading and one small
    warm-up are not timed. Exit code 1: a backend could not run, or --baseline was faster by more than --max-regression.
    """
    console = Console(stderr=True)

    def measure() -> int:
        if model is None:
            raise UsageError("--model is missing")
        from cbgen.bench.command import run_bench
        from cbgen.bench.spec import bench_spec

        return run_bench(bench_spec(context.params), console, Console(), signals)

    with EndingSignals() as signals:
        guarded(console, measure, "nothing was written")


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

    guarded(console, measure, "nothing was written")


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

    guarded(Console(stderr=True), show)
