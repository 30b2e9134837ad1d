"""One job from spec to final file: resolve, resume, feed, generate, publish, assemble."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from cbgen.cache.sizing import mib, with_memory_utilization
from cbgen.data.assembly import Results, assemble, read_footer
from cbgen.data.files import check_writable, publish_text
from cbgen.data.manifest import PartsFolder, fingerprint_conflict
from cbgen.data.readers import Input, open_input
from cbgen.data.rows import OutputLayout
from cbgen.data.writers import PartWriter
from cbgen.device import free_memory_bytes, peak_memory_bytes, pick_device, total_memory_bytes
from cbgen.engine.build import Engine, build_engine
from cbgen.engine.metrics import EngineMetrics
from cbgen.engine.requests import SamplingParams
from cbgen.errors import EXIT_DONE, EXIT_FAILED_ROWS, OutputError, ResumeRefusedError, RowError, UsageError
from cbgen.jobspec import JobSpec
from cbgen.models.loading import ModelDescription, describe, load
from cbgen.pipeline import Collector, Feeder, sample_key
from cbgen.prompting import OPTION_COLUMNS, Prompter, PromptSource, resolve_source
from cbgen.report import ProgressReporter, Snapshot, Summary, print_first_prompt, print_line, print_resolved, versions
from cbgen.row_checks import checked_params


@dataclass(frozen=True)
class ResolvedJob:
    """A spec with every choice made, before any weight is loaded. `fingerprint`: what changes the results."""

    spec: JobSpec
    device: torch.device
    source: Input
    prompts: PromptSource
    model: ModelDescription
    defaults: SamplingParams
    layout: OutputLayout
    fingerprint: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """How a job ended: the exit code, and the figures unless an earlier run had done everything."""

    exit_code: int
    summary: Summary | None


def run_job(spec: JobSpec, console: Console) -> Outcome:
    """Runs a job to its final file, or continues one. Raises CbgenError; what was published until then is kept."""
    job = resolve_job(spec, lambda text: print_line(console, text))
    for warning in _options_without_effect(job):
        print_line(console, f"warning: {warning}")
    output = spec.output
    folder = PartsFolder(output)
    if spec.resume == "never" or not folder.is_begun:
        finished = _finished_footer(job)
        if finished is not None:
            print_line(
                console, f"{output} is complete: {finished['rows_ok']} rows ok, {finished['rows_failed']} failed"
            )
            return Outcome(_exit_code(finished["rows_failed"]), None)
    check_writable(output.parent)
    try:
        today = folder.open(job.fingerprint, spec.resume)
        summary, footer_config = _generate_and_assemble(job, folder, today, console)
    finally:
        folder.close()
    if spec.summary is not None:
        _write_summary(Path(spec.summary).expanduser(), summary.as_json(footer_config))
    return Outcome(_exit_code(summary.rows_failed), summary)


def resolve_job(spec: JobSpec, notify: Callable[[str], None]) -> ResolvedJob:
    """Makes every choice that needs no weights. Raises UsageError or ModelError. notify: told what takes a while."""
    device = pick_device(spec.device)
    spec.engine_config().resolve(device.type)  # wrong options are told before anything is read
    source = open_input(spec.input, spec.limit)
    prompts = resolve_source(
        source.schema.names,
        prompt_column=spec.prompt_column,
        messages_column=spec.messages_column,
        template=spec.template,
        system_prompt=spec.system_prompt,
        chat=spec.chat,
        chat_template_kwargs=spec.chat_template_kwargs,
    )
    layout = OutputLayout(spec.n, spec.output_token_ids, spec.output_prefix)
    for name in set(layout.names) & set(source.schema.names):
        raise UsageError(
            f"the input already has a column {name!r}, which is an output column: give --output-prefix to name the "
            "output columns otherwise"
        )
    model = describe(spec.model, spec.revision, spec.dtype, device, spec.max_model_len, notify)
    defaults = _sampling_defaults(spec, model)
    fingerprint = _fingerprint(spec, prompts, model, defaults)
    return ResolvedJob(spec, device, source, prompts, model, defaults, layout, fingerprint)


def _sampling_defaults(spec: JobSpec, model: ModelDescription) -> SamplingParams:
    """The user's options over the model's generation config over greedy."""
    own = {name: getattr(spec, name) for name in ("temperature", "top_p", "top_k") if getattr(spec, name) is not None}
    values = {"temperature": 0.0, "top_p": 1.0, "top_k": 0} | model.sampling_defaults | own
    try:
        return checked_params(max_tokens=spec.max_tokens, ignore_eos=spec.ignore_eos, **values)
    except RowError as error:
        raise UsageError(str(error)) from error


def _options_without_effect(job: ResolvedJob) -> Iterator[str]:
    """What the user asked for and will not see; each as a line that says why."""
    spec, columns = job.spec, job.source.schema.names
    if job.defaults.temperature == 0 and "temperature" not in columns:
        if spec.top_p is not None or spec.top_k is not None:
            yield "--top-p and --top-k have no effect at temperature 0"
        if spec.n > 1:
            yield f"--n {spec.n} at temperature 0 gives the same completion {spec.n} times; give --temperature"
    if spec.revision is not None and job.model.is_local:
        yield "--revision has no effect: the model is not on a hub"
    if spec.chat and job.prompts.kind == "messages":
        yield "--chat has no effect: the rows hold messages already"
    if spec.chat_template_kwargs and not job.prompts.uses_chat_template:
        yield "--chat-template-kwargs has no effect without a chat template; give --chat"
    if spec.gpu_memory_utilization is not None and spec.max_memory_percent is not None:
        yield "--max-memory-percent has no effect beside --gpu-memory-utilization"


def _fingerprint(
    spec: JobSpec, prompts: PromptSource, model: ModelDescription, defaults: SamplingParams
) -> dict[str, Any]:
    chat_template = model.tokenizer.chat_template if prompts.uses_chat_template else None
    return {
        "model": model.name,
        "model_identity": model.identity,
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": model.max_model_len,
        "prompt_source": prompts.column,
        "template": prompts.template,
        "system_prompt": prompts.system_prompt,
        "chat": prompts.chat,
        "chat_template_sha256": None if chat_template is None else _sha256(str(chat_template)),
        "chat_template_kwargs": prompts.chat_template_kwargs,
        "max_tokens": defaults.max_tokens,
        "temperature": defaults.temperature,
        "top_p": defaults.top_p,
        "top_k": defaults.top_k,
        "ignore_eos": defaults.ignore_eos,
        "seed": spec.seed,
        "n": spec.n,
    }


def _finished_footer(job: ResolvedJob) -> dict[str, Any] | None:
    """The footer of a final file that this very job finished; None where a job may write. Refuses any other file."""
    output = job.spec.output
    if not output.exists():
        return None
    footer = read_footer(output)
    if footer is None:
        raise ResumeRefusedError(f"{output}: is not a finished output of cbgen; move it or choose another --out")
    if job.spec.resume == "never":
        return None
    conflict = fingerprint_conflict(job.fingerprint, footer["fingerprint"])
    if conflict is None and footer["input"] != job.source.identity:
        conflict = "the input files are not the same or were changed since"
    if conflict is None and footer["columns"] != job.layout.names:
        conflict = "the output columns asked for are not the same"
    if conflict is not None:
        raise ResumeRefusedError(
            f"{output}: is the finished output of another job: {conflict}; choose another --out, or --resume never to "
            "replace it"
        )
    return footer


def _generate_and_assemble(
    job: ResolvedJob, folder: PartsFolder, today: date, console: Console
) -> tuple[Summary, dict[str, Any]]:
    spec = job.spec
    print_resolved(console, _resolved_lines(job))
    prompter = Prompter(job.model.tokenizer, job.prompts, job.defaults, today)
    collector = Collector(prompter, PartWriter(folder, spec.part_rows, spec.part_interval))
    feeder = Feeder(
        job.source,
        [*job.prompts.columns, *OPTION_COLUMNS],
        prompter,
        done=_done_samples(folder),
        num_samples=spec.n,
        job_seed=spec.seed,
        max_model_len=job.model.max_model_len,
        collector=collector,
        on_first_prompt=lambda text: print_first_prompt(console, text),
    )
    engine, load_s = None, 0.0
    try:
        if feeder.wait_for_first():
            started_s = time.perf_counter()
            engine = _load_engine(job)
            load_s = time.perf_counter() - started_s
            print_resolved(console, _engine_lines(engine, load_s))
            _generate(job, engine, feeder, collector, console)
    finally:
        feeder.close()
        collector.close()
    results = Results(folder, bytes(feeder.keys), spec.n)
    if results.num_missing:
        raise OutputError(f"{results.num_missing} results are not in {folder.path}: run the same command again")
    summary = _summarize(job, engine, feeder, results.num_failed, load_s)
    config = {**job.fingerprint, "engine": asdict(engine.config) if engine else None, "device": str(job.device)}
    footer = {
        "fingerprint": job.fingerprint,
        "input": job.source.identity,
        "columns": job.layout.names,
        "revision": job.model.revision,
        "date": today.isoformat(),
        "rows_ok": summary.rows_ok,
        "rows_failed": summary.rows_failed,
        "config": config,
        "versions": versions(),
    }
    assemble(spec.output, job.source, results, job.layout, footer)
    folder.remove()
    return summary, config


def _done_samples(folder: PartsFolder) -> set[bytes]:
    return {
        sample_key(key, sample)
        for _, table in folder.parts()
        for key, sample in zip(table["key"].to_pylist(), table["sample_index"].to_pylist(), strict=True)
    }


def _load_engine(job: ResolvedJob) -> Engine:
    model, shape = load(job.model, job.device)
    config = job.spec.engine_config().resolve(job.device.type)
    free_bytes = free_memory_bytes(job.device)
    if job.spec.gpu_memory_utilization is not None:
        config = with_memory_utilization(
            config, job.spec.gpu_memory_utilization, total_memory_bytes(job.device), free_bytes
        )
    return build_engine(model, shape, job.model.dtype, config, job.model.eos_token_ids, job.device, free_bytes)


def _generate(job: ResolvedJob, engine: Engine, feeder: Feeder, collector: Collector, console: Console) -> None:
    manager = engine.manager

    def snapshot() -> Snapshot:
        return Snapshot(
            rows_done=feeder.num_already_done + collector.num_ok + collector.num_failed,
            output_tokens=manager.metrics.output_tokens,
            active_requests=manager.scheduler.num_active,
            cache_used_share=manager.cache.used_share,
            elapsed_s=manager.metrics.elapsed_s,
        )

    total_rows = job.source.num_rows * job.spec.n
    with ProgressReporter(console, total_rows, feeder.num_already_done, snapshot):
        for request in manager.run(feeder):
            collector.put(request)


def _summarize(job: ResolvedJob, engine: Engine | None, feeder: Feeder, num_failed: int, load_s: float) -> Summary:
    metrics = engine.manager.metrics if engine else EngineMetrics()
    rows_total = job.source.num_rows * job.spec.n
    per_second = 1.0 / metrics.elapsed_s if metrics.elapsed_s > 0 else 0.0
    return Summary(
        rows_total=rows_total,
        rows_ok=rows_total - num_failed,
        rows_failed=num_failed,
        rows_resumed=feeder.num_already_done,
        prompt_tokens=metrics.prompt_tokens,
        computed_prompt_tokens=metrics.computed_prompt_tokens,
        output_tokens=metrics.output_tokens,
        elapsed_s=metrics.elapsed_s,
        load_s=load_s,
        requests_per_second=metrics.requests_ok * per_second,
        total_tokens_per_second=(metrics.prompt_tokens + metrics.output_tokens) * per_second,
        output_tokens_per_second=metrics.output_tokens * per_second,
        prefix_hit_tokens=metrics.prefix_hit_tokens,
        offloads=metrics.offloads,
        soft_resets=metrics.soft_resets,
        recomputed_tokens=metrics.recomputed_tokens,
        clamped_max_tokens=feeder.num_clamped,
        mean_batch_requests=metrics.mean_batch_requests,
        peak_memory_bytes=peak_memory_bytes(job.device),
    )


def _resolved_lines(job: ResolvedJob) -> dict[str, str]:
    model, defaults, source = job.model, job.defaults, job.source
    sampling = "greedy" if defaults.temperature == 0 else f"temperature {defaults.temperature:g}"
    revision = f", revision {model.revision}" if model.revision else ""
    prompts = "--template" if job.prompts.kind == "template" else f"column {job.prompts.column}"
    if job.prompts.uses_chat_template:
        prompts += " through the chat template"
    return {
        "input": f"{', '.join(job.spec.input)}: {source.num_rows} rows, prompts from {prompts}",
        "output": f"{job.spec.out}, a part every {job.spec.part_rows} rows or {job.spec.part_interval:g} s",
        "model": f"{model.name}{revision}, {str(model.dtype).removeprefix('torch.')} on {job.device}, "
        f"context {model.max_model_len}",
        "sampling": f"max_tokens {defaults.max_tokens}, {sampling}, top_p {defaults.top_p:g}, top_k {defaults.top_k}, "
        f"seed {job.spec.seed}, n {job.spec.n}, ignore_eos {str(defaults.ignore_eos).lower()}; "
        "a row's own columns override",
        "stops at": "token ids " + (", ".join(map(str, sorted(model.eos_token_ids))) or "none"),
    }


def _engine_lines(engine: Engine, load_s: float) -> dict[str, str]:
    config, plan = engine.config, engine.plan
    return {
        "engine": f"{config.scheduler_type}, max_batch_tokens {config.max_batch_tokens}, max_requests_per_batch "
        f"{config.max_requests_per_batch}, safety_margin {config.safety_margin:g}, attention {engine.kernel}",
        "cache": f"{plan.num_blocks} blocks of {config.page_size} tokens, {mib(plan.cache_bytes)}",
        "loaded in": f"{load_s:.1f} s",
    }


def _write_summary(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    publish_text(path, text)


def _exit_code(num_failed: int) -> int:
    return EXIT_FAILED_ROWS if num_failed else EXIT_DONE


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
