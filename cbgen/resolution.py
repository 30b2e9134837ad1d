"""A job with every choice made before any weight is loaded, and what can be told and refused by then."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from cbgen.data.assembly import read_footer
from cbgen.data.manifest import fingerprint_conflict
from cbgen.data.readers import Input, open_input
from cbgen.data.rows import OutputLayout
from cbgen.device import pick_device
from cbgen.engine.requests import SamplingParams
from cbgen.errors import ResumeRefusedError, RowError, UsageError
from cbgen.jobspec import JobSpec
from cbgen.kernels.cpu.library import load_library
from cbgen.models.loading import ModelDescription, describe
from cbgen.models.quantization import Quantization, kernels_for, resolve_quantization
from cbgen.prompting import PromptSource, resolve_source
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
    quantization: Quantization | None
    fingerprint: dict[str, Any]


def resolve_job(spec: JobSpec, notify: Callable[[str], None]) -> ResolvedJob:
    """Makes every choice that needs no weights. Raises UsageError or ModelError. notify: told what takes a while."""
    device = pick_device(spec.device)
    spec.engine_config().resolve(device.type)  # wrong options are told before anything is read
    source = open_input(spec.input, spec.limit, spec.output)
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
    quantization = resolve_quantization(spec.quantization, spec.calibration, kernels_for(device, model.dtype))
    fingerprint = _fingerprint(spec, prompts, model, defaults, quantization)
    return ResolvedJob(spec, device, source, prompts, model, defaults, layout, quantization, fingerprint)


def _sampling_defaults(spec: JobSpec, model: ModelDescription) -> SamplingParams:
    """The user's options over the model's generation config over greedy."""
    own = {name: getattr(spec, name) for name in ("temperature", "top_p", "top_k") if getattr(spec, name) is not None}
    values = {"temperature": 0.0, "top_p": 1.0, "top_k": 0} | model.sampling_defaults | own
    try:
        return checked_params(max_tokens=spec.max_tokens, ignore_eos=spec.ignore_eos, **values)
    except RowError as error:
        raise UsageError(str(error)) from error


def warnings_about(job: ResolvedJob) -> Iterator[str]:
    """What the user asked for and will not see, or not as expected; each as a line that says why."""
    spec, columns = job.spec, job.source.schema.names
    if job.defaults.temperature == 0 and "temperature" not in columns:
        if spec.top_p is not None or spec.top_k is not None:
            yield "--top-p and --top-k have no effect at temperature 0"
        if spec.n > 1:
            yield f"--n {spec.n} at temperature 0 gives the same completion {spec.n} times; give --temperature"
    if job.device.type == "cpu" and load_library() is None:
        yield "cbgen's kernels for CPUs are not in this installation, so everything runs on torch, several times slower"
    if spec.calibration is not None and (job.quantization is None or job.quantization.text is None):
        yield "--calibration has no effect: only activations of 8 bits (w8a8) are calibrated"
    if spec.revision is not None and job.model.is_local:
        yield "--revision has no effect: the model is not on a hub"
    if spec.chat and job.prompts.kind == "messages":
        yield "--chat has no effect: the rows hold messages already"
    if spec.chat_template_kwargs and not job.prompts.uses_chat_template:
        yield "--chat-template-kwargs has no effect without a chat template; give --chat"
    if spec.order == "prefix" and not spec.allow_block_sharing:
        yield "--order prefix has nothing to gain where every prompt is computed by itself"
    if spec.gpu_memory_utilization is not None and spec.max_memory_percent is not None:
        yield "--max-memory-percent has no effect beside --gpu-memory-utilization"
    if spec.cpu_offload_space > 0 and job.device.type != "cuda":
        yield "--cpu-offload-space: swap pool and cache are the same memory here; it takes what the cache could have"


def _fingerprint(
    spec: JobSpec,
    prompts: PromptSource,
    model: ModelDescription,
    defaults: SamplingParams,
    quantization: Quantization | None,
) -> dict[str, Any]:
    chat_template = model.tokenizer.chat_template if prompts.uses_chat_template else None
    return {
        "model": model.name,
        "model_identity": model.identity,
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_cache_dtype": spec.engine_config().kv_dtype_name(str(model.dtype).removeprefix("torch.")),
        "quantization": None if quantization is None else quantization.identity,
        "max_model_len": model.max_model_len,
        "eos_token_ids": sorted(model.eos_token_ids),
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


def finished_footer(job: ResolvedJob, may_replace: bool) -> dict[str, Any] | None:
    """The footer of a final file that this very job finished; None where the job is to be run.

    may_replace: whether a file that another job finished may give way; one that is not cbgen's never does. Raises
    ResumeRefusedError for a file that stays.
    """
    output = job.spec.output
    if not output.exists():
        return None
    footer = read_footer(output)
    if footer is None:
        raise ResumeRefusedError(f"{output}: is not a finished output of cbgen; move it or choose another --out")
    conflict = fingerprint_conflict(job.fingerprint, footer["fingerprint"])
    if conflict is None and footer["input"] != job.source.identity:
        conflict = "the input files or --limit are not the same, or a file was changed since"
    if conflict is None and footer["columns"] != job.layout.names:
        conflict = "the output columns asked for are not the same"
    if conflict is None:
        return footer
    if may_replace:
        return None
    raise ResumeRefusedError(
        f"{output}: is the finished output of another job: {conflict}; choose another --out, or --resume never to "
        "replace it"
    )


def resolved_lines(job: ResolvedJob) -> dict[str, str]:
    model, defaults, source = job.model, job.defaults, job.source
    sampling = "greedy" if defaults.temperature == 0 else f"temperature {defaults.temperature:g}"
    revision = f", revision {model.revision}" if model.revision else ""
    prompts = "--template" if job.prompts.kind == "template" else f"column {job.prompts.column}"
    if job.prompts.uses_chat_template:
        prompts += " through the chat template"
    return {
        "input": f"{', '.join(job.spec.input)}: {source.num_rows} rows, prompts from {prompts}",
        "output": f"{job.spec.out}, a part every {job.spec.part_rows} rows or {job.spec.part_interval:g} s",
        "model": f"{model.name}{revision}, {str(model.dtype).removeprefix('torch.')}"
        + (f", weights {job.quantization.scheme}" if job.quantization else "")
        + f" on {job.device}, "
        f"context {model.max_model_len}",
        "sampling": f"max_tokens {defaults.max_tokens}, {sampling}, top_p {defaults.top_p:g}, top_k {defaults.top_k}, "
        f"seed {job.spec.seed}, n {job.spec.n}, ignore_eos {str(defaults.ignore_eos).lower()}; "
        "a row's own columns override",
        "order": f"{job.spec.order}; identical greedy prompts are generated "
        + ("once" if job.spec.deduplicate else "each by itself"),
        "stops at": "token ids " + (", ".join(map(str, sorted(model.eos_token_ids))) or "none"),
    }


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
