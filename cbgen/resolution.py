"""A job with every choice made before any weight is loaded, and what can be told and refused by then."""

import datetime
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from cbgen.cache.sizing import mib
from cbgen.chat import prints_the_date, read_chat_template
from cbgen.data.openai_output import RESULT_COLUMNS
from cbgen.data.outputs import Output
from cbgen.data.readers import Input
from cbgen.data.rows import OutputLayout
from cbgen.device import pick_device
from cbgen.engine.grammars import Grammars
from cbgen.engine.sampling_params import SamplingParams
from cbgen.errors import UsageError
from cbgen.job_files import OPENAI_BATCH, JobFiles, free_disk_bytes, open_job_files
from cbgen.job_sampling import (
    ALL_COLUMNS,
    heeded_columns,
    resolve_sampling,
    sampling_line,
    unread_columns,
    without_effect,
)
from cbgen.jobspec import JobSpec, is_folder, option_name
from cbgen.kernels.cpu.library import load_library
from cbgen.models.loading import ModelDescription, describe
from cbgen.models.quantization import Quantization, kernels_for, resolve_quantization
from cbgen.prompting import Prompter, PromptSource, openai_source, resolve_source
from cbgen.reasoning import DEFAULT_TAGS, ReasoningSplitter, parse_tags
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
BYTES_PER_TOKEN, BYTES_PER_LOGPROB, BYTES_PER_RESULT, COPIES = 5, 20, 150, 2


@dataclass(frozen=True)
class ResolvedJob:
    """A spec with every choice made, before any weight is loaded.

    fingerprint: what changes the results; settings: what does not. shard: (index, count), None without shards. heeded:
    columns of the input that are a row's own sampling parameters.
    """

    spec: JobSpec
    device: torch.device
    source: Input
    output: Output
    shard: tuple[int, int] | None
    prompts: PromptSource
    model: ModelDescription
    grammars: Grammars
    defaults: SamplingParams
    heeded: tuple[str, ...]
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
        return list(dict.fromkeys([*self.prompts.columns, *self.heeded, *own_id]))

    def prompter(self, today: datetime.date) -> Prompter:
        """What makes rows into prompts on the day that the job began."""
        return Prompter(
            self.model.tokenizer,
            self.prompts,
            self.defaults,
            today,
            vocab_size=self.model.vocab_size,
            id_column=self.spec.id_column,
            row_options=self.heeded,
            grammars=self.grammars,
        )

    @property
    def reasoning(self) -> ReasoningSplitter | None:
        """What parts thoughts from answers, if the user wants that."""
        if not self.spec.strip_reasoning:
            return None
        return ReasoningSplitter(self.spec.reasoning_tags, self.model.tokenizer)

    @property
    def num_rows(self) -> int:
        """Of the input; of a shard about, until all rows have been dealt."""
        return self.source.num_rows if self.shard is None else -(-self.source.num_rows // self.shard[1])

    @property
    def rows_total(self) -> int:
        """Output rows; about, where `num_rows` is, and where each row has its own number of samples."""
        return self.num_rows * self.spec.n

    @property
    def is_estimate(self) -> bool:
        """Whether rows_total is about so many."""
        return self.shard is not None or self.layout.num_samples is None

    def refuse_repeated_ids(self) -> None:
        """Raises UsageError, with both places, when the id column names two rows alike."""
        if self.spec.id_column is not None:
            rows = self.source.rows([self.spec.id_column])
            refuse_repeated_ids(rows, self.source.num_rows, self.spec.id_column, self.source.place_of)


def resolve_job(spec: JobSpec, notify: Callable[[str], None]) -> ResolvedJob:
    """Makes every choice that needs no weights. Raises UsageError or ModelError. notify: told what takes a while."""
    device = pick_device(spec.device)
    spec.engine_config().resolve(device.type)  # wrong options are told before anything is read
    parse_tags(spec.reasoning_tags)
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
    heeded = heeded_columns(spec, source.schema.names)
    num_samples = None if "n" in heeded or spec.format == OPENAI_BATCH else spec.n
    layout = OutputLayout(num_samples, _optional_columns(spec, heeded), spec.output_prefix, is_shard=shard is not None)
    for name in set(layout.names) & set(source.schema.names):
        raise UsageError(
            f"the input already has a column {name!r}, which is an output column: give --output-prefix to name the "
            "output columns otherwise"
        )
    model = describe(spec.model, spec.revision, spec.dtype, device, spec.max_model_len, notify)
    defaults = resolve_sampling(spec, model)
    grammars = Grammars(model.tokenizer, model.vocab_size, model.eos_token_ids)
    if defaults.structure is not None and (problem := grammars.problem(defaults.structure)) is not None:
        kind = defaults.structure[0]
        raise UsageError(f"{option_name(kind)}: {problem.removeprefix(f'{kind} ')}")
    quantization = resolve_quantization(spec.quantization, spec.calibration, kernels_for(device, model.dtype))
    fingerprint = _fingerprint(spec, prompts, model, defaults, quantization)
    if shard is not None and spec.date is None and fingerprint["prints_the_date"]:
        raise UsageError("--date: the chat template prints the date, and all shards must agree on one; give YYYY-MM-DD")
    fingerprint["shard"] = None if shard is None else f"{shard[0]} of {shard[1]}"
    return ResolvedJob(
        spec,
        device,
        source,
        files.output,
        shard,
        prompts,
        model,
        grammars,
        defaults,
        heeded,
        layout,
        quantization,
        fingerprint,
    )


def _prompt_source(spec: JobSpec, source: Input) -> PromptSource:
    chat_template = None if spec.chat_template is None else read_chat_template(spec.chat_template)
    if spec.format == OPENAI_BATCH:
        return openai_source(spec.chat_template_kwargs, chat_template, spec.continue_final_message)
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
        chat_template=chat_template,
        continue_final_message=spec.continue_final_message,
    )


def _optional_columns(spec: JobSpec, heeded: Sequence[str]) -> frozenset[str]:
    """The columns of results that rows of this job may fill."""
    there = {
        "completion_ids": spec.output_token_ids,
        "stop_reason": bool(spec.stop or spec.stop_token_ids or {"stop", "stop_token_ids"} & set(heeded)),
        "reasoning": spec.strip_reasoning,
        "truncated_prompt_tokens": spec.truncate_prompt != "none",
        "completion_logprobs": spec.logprobs is not None or "logprobs" in heeded,
        "prompt_token_logprobs": spec.prompt_logprobs is not None or "prompt_logprobs" in heeded,
    }
    if spec.format == OPENAI_BATCH:
        there |= dict.fromkeys(RESULT_COLUMNS, True)
    return frozenset(name for name, may_fill in there.items() if may_fill)


def warnings_about(job: ResolvedJob) -> Iterator[str]:
    """What the user asked for and will not see, or not as expected; each as a line that says why."""
    yield from _warnings_about_results(job)
    yield from warnings_about_the_model(job.spec, job.model, job.device, job.quantization)
    yield from _warnings_about_input_and_output(job)
    yield from _warnings_about_the_engine(job)


def _warnings_about_results(job: ResolvedJob) -> Iterator[str]:
    spec = job.spec
    yield from without_effect(spec, job.defaults, job.heeded)
    if spec.row_options == ALL_COLUMNS:
        yield from unread_columns(job.source.schema.names, job.heeded)
    if spec.chat and job.prompts.kind in ("messages", "openai"):
        yield "--chat has no effect: the rows say themselves what are messages"
    if not job.prompts.uses_chat_template:
        for name in ("chat_template", "chat_template_kwargs"):
            if getattr(spec, name):
                yield f"{option_name(name)} has no effect: no prompt goes through a chat template; give --chat"
    if spec.continue_final_message and job.prompts.kind not in ("messages", "openai"):
        yield "--continue-final-message has no effect: only messages can end with the assistant's"


def warnings_about_the_model(
    spec: JobSpec, model: ModelDescription, device: torch.device, quantization: Quantization | None
) -> Iterator[str]:
    """About what holds for a model wherever its prompts come from."""
    if model.not_followed and spec.generation_config == "auto":
        yield f"of the model's generation config, {', '.join(model.not_followed)} is not followed"
    if spec.calibration is not None and (quantization is None or quantization.text is None):
        yield "--calibration has no effect: only activations of 8 bits (w8a8) are calibrated"
    if spec.revision is not None and model.is_local:
        yield "--revision has no effect: the model is not on a hub"
    if spec.reasoning_tags != DEFAULT_TAGS and not spec.strip_reasoning:
        yield "--reasoning-tags has no effect without --strip-reasoning"
    if device.type == "cpu" and load_library() is None:
        yield "cbgen's kernels for CPUs are not in this installation, so everything runs on torch, several times slower"
    if spec.cpu_offload_space > 0 and device.type != "cuda":
        yield "--cpu-offload-space: swap pool and cache are the same memory here; it takes what the cache could have"
    yield from spec.engine_config().warnings_about_graphs(device.type)


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
    if spec.order == "prefix" and not spec.allow_block_sharing:
        yield "--order prefix has nothing to gain where every prompt is computed by itself"
    if spec.gpu_memory_utilization is not None and spec.max_memory_percent is not None:
        yield "--max-memory-percent has no effect beside --gpu-memory-utilization"


def space_needed_bytes(job: ResolvedJob) -> int:
    """Of the output and of the parts before it, at most: every row as long as it may be, nothing compressed."""
    return space_bytes(job, job.rows_total, job.rows_total * job.defaults.max_tokens)


def space_bytes(job: ResolvedJob, num_results: int, num_tokens: int) -> int:
    """The same of so many results with so many tokens in all."""
    num_scored = 0 if job.defaults.logprobs is None else 1 + job.defaults.logprobs
    token_bytes = BYTES_PER_TOKEN + num_scored * BYTES_PER_LOGPROB
    return COPIES * (num_tokens * token_bytes + num_results * BYTES_PER_RESULT) + job.source.size_bytes * job.spec.n


def _fingerprint(
    spec: JobSpec,
    prompts: PromptSource,
    model: ModelDescription,
    defaults: SamplingParams,
    quantization: Quantization | None,
) -> dict[str, Any]:
    chat_template = (prompts.chat_template or model.tokenizer.chat_template) if prompts.uses_chat_template else None
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
        **json.loads(json.dumps(asdict(defaults))),
        "seed": spec.seed,
        "row_options": spec.row_options,
        "strip_reasoning": spec.reasoning_tags if spec.strip_reasoning else None,
        "continue_final_message": spec.continue_final_message,
        "truncate_prompt": spec.truncate_prompt,
    }


def resolved_lines(job: ResolvedJob) -> dict[str, str]:
    model, defaults, source = job.model, job.defaults, job.source
    revision = f", revision {model.revision}" if model.revision else ""
    prompts = "--template" if job.prompts.kind == "template" else f"column {job.prompts.column}"
    if job.prompts.kind == "openai":
        prompts += ", as each line's url says"
    elif job.prompts.uses_chat_template:
        prompts += " through the chat template"
        prompts += "" if job.spec.chat_template is None else f" in {job.spec.chat_template}"
    return {
        "input": f"{job.spec.dataset or ', '.join(job.spec.input)}: {source.num_rows} rows, prompts from {prompts}"
        + ("" if job.shard is None else f"; shard {job.shard[0]} of {job.shard[1]} (from 0), dealt by content"),
        "output": f"{job.output.path}, a part every {job.spec.part_rows} rows or {job.spec.part_interval:g} s",
        "space": f"up to {mib(space_needed_bytes(job))} for output and parts, if every row gets as long as it may"
        + (f", and {job.spec.n} samples" if job.layout.num_samples is None else "")
        + f"; {mib(free_disk_bytes(job.output.path.parent))} free",
        "model": f"{model.name}{revision}, {str(model.dtype).removeprefix('torch.')}"
        + (f", weights {job.quantization.scheme}" if job.quantization else "")
        + f" on {job.device}, "
        f"context {model.max_model_len}",
        "sampling": sampling_line(job.spec, model, defaults, job.heeded),
        "order": f"{job.spec.order}; identical greedy prompts are generated "
        + ("once" if job.spec.deduplicate else "each by itself"),
        "stops at": "token ids " + (", ".join(map(str, sorted(model.eos_token_ids))) or "none"),
    }


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
