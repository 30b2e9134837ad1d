"""A job with every choice made before any weight is loaded, and what can be told and refused by then."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from cbgen.cache.sizing import mib
from cbgen.data.outputs import Output
from cbgen.data.readers import Input
from cbgen.data.rows import OutputLayout
from cbgen.device import pick_device
from cbgen.engine.requests import SamplingParams
from cbgen.errors import RowError, UsageError
from cbgen.job_files import OPENAI_BATCH, JobFiles, free_disk_bytes, open_job_files
from cbgen.jobspec import JobSpec, is_folder
from cbgen.kernels.cpu.library import load_library
from cbgen.models.loading import ModelDescription, describe
from cbgen.models.quantization import Quantization, kernels_for, resolve_quantization
from cbgen.prompting import OPTION_COLUMNS, PromptSource, openai_source, prints_the_date, resolve_source
from cbgen.row_checks import checked_params
from cbgen.row_keys import refuse_repeated_ids

# Recorded with the job, and shown where another job is refused.
SETTINGS = (
    "order",
    "deduplicate",
    "page_size",
    "num_blocks",
    "max_batch_tokens",
    "max_requests_per_batch",
    "max_memory_percent",
    "gpu_memory_utilization",
    "scheduler_type",
    "allow_block_sharing",
)
# A token of text is about so long, and what else a result holds; each is there in a part and in the output.
BYTES_PER_TOKEN, BYTES_PER_RESULT, COPIES = 5, 150, 2


@dataclass(frozen=True)
class ResolvedJob:
    """A spec with every choice made, before any weight is loaded.

    fingerprint: what changes the results; settings: what does not. shard: (index, count), None without shards.
    """

    spec: JobSpec
    device: torch.device
    source: Input
    output: Output
    shard: tuple[int, int] | None
    prompts: PromptSource
    model: ModelDescription
    defaults: SamplingParams
    layout: OutputLayout
    quantization: Quantization | None
    fingerprint: dict[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        return {name: getattr(self.spec, name) for name in SETTINGS}

    @property
    def columns(self) -> list[str]:
        """Those of the input that a request is made of."""
        own_id = [] if self.spec.id_column is None else [self.spec.id_column]
        return list(dict.fromkeys([*self.prompts.columns, *OPTION_COLUMNS, *own_id]))

    @property
    def rows_total(self) -> int:
        """Output rows; of a shard about, until all rows have been dealt."""
        num_rows = self.source.num_rows if self.shard is None else -(-self.source.num_rows // self.shard[1])
        return num_rows * self.spec.n

    def refuse_repeated_ids(self) -> None:
        """Raises UsageError, with both places, when the id column names two rows alike."""
        if self.spec.id_column is not None:
            rows = self.source.rows([self.spec.id_column])
            refuse_repeated_ids(rows, self.source.num_rows, self.spec.id_column, self.source.place_of)


def resolve_job(spec: JobSpec, notify: Callable[[str], None]) -> ResolvedJob:
    """Makes every choice that needs no weights. Raises UsageError or ModelError. notify: told what takes a while."""
    device = pick_device(spec.device)
    spec.engine_config().resolve(device.type)  # wrong options are told before anything is read
    files = open_job_files(spec)
    try:
        return _resolve_with(files, device, notify)
    except BaseException:
        files.source.close()
        raise


def _resolve_with(files: JobFiles, device: torch.device, notify: Callable[[str], None]) -> ResolvedJob:
    spec, source, shard = files.spec, files.source, files.shard
    prompts = _prompt_source(spec, source)
    if spec.id_column is not None and spec.id_column not in source.schema.names:
        known = ", ".join(source.schema.names)
        raise UsageError(f"--id-column {spec.id_column}: the input has no such column; it has: {known}")
    layout = OutputLayout(spec.n, spec.output_token_ids, spec.output_prefix, is_shard=shard is not None)
    for name in set(layout.names) & set(source.schema.names):
        raise UsageError(
            f"the input already has a column {name!r}, which is an output column: give --output-prefix to name the "
            "output columns otherwise"
        )
    model = describe(spec.model, spec.revision, spec.dtype, device, spec.max_model_len, notify)
    defaults = _sampling_defaults(spec, model)
    quantization = resolve_quantization(spec.quantization, spec.calibration, kernels_for(device, model.dtype))
    fingerprint = _fingerprint(spec, prompts, model, defaults, quantization)
    if shard is not None and spec.date is None and fingerprint["prints_the_date"]:
        raise UsageError("--date: the chat template prints the date, and all shards must agree on one; give YYYY-MM-DD")
    fingerprint["shard"] = None if shard is None else f"{shard[0]} of {shard[1]}"
    return ResolvedJob(
        spec, device, source, files.output, shard, prompts, model, defaults, layout, quantization, fingerprint
    )


def _prompt_source(spec: JobSpec, source: Input) -> PromptSource:
    if spec.format == OPENAI_BATCH:
        return openai_source(spec.chat_template_kwargs)
    if not source.schema.names:
        rows = "none that could be read" if source.num_rows else "none"
        raise UsageError(f"the input has no columns: of its {source.num_rows} rows there is {rows}")
    if (
        {"custom_id", "url", "body"} <= set(source.schema.names)
        and spec.template is None
        and spec.prompt_column is None
    ):
        raise UsageError("the input has the columns of an OpenAI batch: give --format openai-batch")
    return resolve_source(
        source.schema.names,
        prompt_column=spec.prompt_column,
        messages_column=spec.messages_column,
        template=spec.template,
        system_prompt=spec.system_prompt,
        chat=spec.chat,
        chat_template_kwargs=spec.chat_template_kwargs,
    )


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
    yield from _warnings_about_results(job)
    yield from _warnings_about_input_and_output(job)
    yield from _warnings_about_the_engine(job)


def _warnings_about_results(job: ResolvedJob) -> Iterator[str]:
    spec, columns = job.spec, job.source.schema.names
    if job.defaults.temperature == 0 and "temperature" not in columns:
        if spec.top_p is not None or spec.top_k is not None:
            yield "--top-p and --top-k have no effect at temperature 0"
        if spec.n > 1:
            yield f"--n {spec.n} at temperature 0 gives the same completion {spec.n} times; give --temperature"
    if spec.calibration is not None and (job.quantization is None or job.quantization.text is None):
        yield "--calibration has no effect: only activations of 8 bits (w8a8) are calibrated"
    if spec.revision is not None and job.model.is_local:
        yield "--revision has no effect: the model is not on a hub"
    if spec.chat and job.prompts.kind in ("messages", "openai"):
        yield "--chat has no effect: the rows say themselves what are messages"
    if spec.chat_template_kwargs and not job.prompts.uses_chat_template:
        yield "--chat-template-kwargs has no effect without a chat template; give --chat"


def _warnings_about_input_and_output(job: ResolvedJob) -> Iterator[str]:
    spec, folder = job.spec, job.output.path.parent
    if spec.rows_per_shard != JobSpec.model_fields["rows_per_shard"].default and not is_folder(spec.out):
        yield "--rows-per-shard has no effect: --out is one file"
    if job.shard is not None and spec.shard_index is None:
        yield (
            f"this is shard {job.shard[0]} of {job.shard[1]}, by SLURM_ARRAY_TASK_ID: only its share of the rows is "
            "generated; --shard-count 1 takes all of them"
        )
    if spec.dataset is None and (spec.dataset_config is not None or spec.split is not None):
        yield "--dataset-config and --split have no effect without --dataset"
    if spec.error_file is not None and spec.format != OPENAI_BATCH:
        yield "--error-file has no effect: failed rows are in the output, in their place"
    needed_bytes, free_bytes = space_needed_bytes(job), free_disk_bytes(folder)
    if needed_bytes > free_bytes:
        yield (
            f"the output may need up to {mib(needed_bytes)}, if every row gets as long as it may, and "
            f"{mib(free_bytes)} are free in {folder}"
        )


def _warnings_about_the_engine(job: ResolvedJob) -> Iterator[str]:
    spec = job.spec
    if job.device.type == "cpu" and load_library() is None:
        yield "cbgen's kernels for CPUs are not in this installation, so everything runs on torch, several times slower"
    if spec.order == "prefix" and not spec.allow_block_sharing:
        yield "--order prefix has nothing to gain where every prompt is computed by itself"
    if spec.gpu_memory_utilization is not None and spec.max_memory_percent is not None:
        yield "--max-memory-percent has no effect beside --gpu-memory-utilization"
    if spec.cpu_offload_space > 0 and job.device.type != "cuda":
        yield "--cpu-offload-space: swap pool and cache are the same memory here; it takes what the cache could have"


def space_needed_bytes(job: ResolvedJob) -> int:
    """Of the output and of the parts before it, at most: every row as long as it may be, nothing compressed."""
    results = job.rows_total * (job.defaults.max_tokens * BYTES_PER_TOKEN + BYTES_PER_RESULT)
    return COPIES * results + job.source.size_bytes * job.spec.n


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
        "id_column": spec.id_column,
        "format": spec.format,
        "template": prompts.template,
        "system_prompt": prompts.system_prompt,
        "chat": prompts.chat,
        "chat_template_sha256": None if chat_template is None else _sha256(str(chat_template)),
        "chat_template_kwargs": prompts.chat_template_kwargs,
        "prints_the_date": chat_template is not None and prints_the_date(str(chat_template)),
        "date": None if spec.date is None else spec.date.isoformat(),
        "max_tokens": defaults.max_tokens,
        "temperature": defaults.temperature,
        "top_p": defaults.top_p,
        "top_k": defaults.top_k,
        "ignore_eos": defaults.ignore_eos,
        "seed": spec.seed,
        "n": spec.n,
    }


def resolved_lines(job: ResolvedJob) -> dict[str, str]:
    model, defaults, source = job.model, job.defaults, job.source
    sampling = "greedy" if defaults.temperature == 0 else f"temperature {defaults.temperature:g}"
    revision = f", revision {model.revision}" if model.revision else ""
    prompts = "--template" if job.prompts.kind == "template" else f"column {job.prompts.column}"
    if job.prompts.kind == "openai":
        prompts += ", as each line's url says"
    elif job.prompts.uses_chat_template:
        prompts += " through the chat template"
    return {
        "input": f"{job.spec.dataset or ', '.join(job.spec.input)}: {source.num_rows} rows, prompts from {prompts}"
        + ("" if job.shard is None else f"; shard {job.shard[0]} of {job.shard[1]} (from 0), dealt by content"),
        "output": f"{job.output.path}, a part every {job.spec.part_rows} rows or {job.spec.part_interval:g} s",
        "space": f"up to {mib(space_needed_bytes(job))} for output and parts, if every row gets as long as it may; "
        f"{mib(free_disk_bytes(job.output.path.parent))} free",
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
