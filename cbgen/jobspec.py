"""The job as the user writes it: options of `cbgen run`, or a YAML file of the same names."""

import datetime
import difflib
import json
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml

from cbgen.config import ContinuousBatchingConfig
from cbgen.errors import UsageError

OUTPUT_SUFFIXES = (".parquet", ".jsonl")
RETRY_KINDS = ("failed", "truncated")
SPEC_SUFFIXES = (".yaml", ".yml")
# vLLM's names, which the command line takes as well.
ALIASES = {
    "max_num_seqs": "max_requests_per_batch",
    "max_num_batched_tokens": "max_batch_tokens",
    "enable_prefix_caching": "allow_block_sharing",
    "async_scheduling": "use_async_batching",
}
# One that says the opposite of an option: true turns that off, false leaves it to cbgen, as vLLM does.
OPPOSITES = {"enforce_eager": "use_cuda_graph"}


class JobSpec(pydantic.BaseModel):
    """Every option of a run. The names are those of the command line with underscores."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    input: list[str] = []
    model: str
    out: str
    revision: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    calibration: str | None = None
    max_model_len: int | None = None

    dataset: str | None = None
    dataset_config: str | None = None
    split: str | None = None
    format: Literal["auto", "openai-batch"] = "auto"
    id_column: str | None = None
    prompt_column: str | None = None
    messages_column: str | None = None
    template: str | None = None
    system_prompt: str | None = None
    chat: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    continue_final_message: bool = False
    truncate_prompt: Literal["none", "left", "right", "middle"] = "none"
    date: datetime.date | None = None
    limit: pydantic.NonNegativeInt | None = None
    shard_index: pydantic.NonNegativeInt | None = None
    shard_count: pydantic.PositiveInt | None = None

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str | int, Any] = {}
    bad_words: list[str] = []
    stop: list[str] = []
    stop_token_ids: list[Any] = []
    include_stop: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    seed: int = 0
    n: pydantic.PositiveInt = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] = []
    grammar: str | None = None
    skip_special_tokens: bool = True
    generation_config: Literal["auto", "none"] = "auto"
    row_options: str = "auto"

    order: Literal["auto", "prefix", "longest-first", "arrival"] = "auto"
    deduplicate: bool = True
    deterministic: bool = False

    output_token_ids: bool = False
    strip_reasoning: bool = False
    reasoning_tags: str = "<think> </think>"
    output_prefix: str = ""
    summary: str | None = None
    report: str | None = None
    error_file: str | None = None
    rows_per_shard: pydantic.PositiveInt = 100_000
    resume: Literal["if-possible", "always", "never"] = "if-possible"
    retry: str | None = None
    max_errors: str | None = None
    time_limit: str | None = None
    drain_timeout: pydantic.NonNegativeFloat = 25.0
    publish_timeout: pydantic.NonNegativeFloat = 3600.0
    part_rows: pydantic.PositiveInt = 10_000
    part_interval: pydantic.PositiveFloat = 60.0

    page_size: int | None = None
    num_blocks: int | None = None
    max_batch_tokens: int | None = None
    max_requests_per_batch: int | None = None
    max_memory_percent: float | None = None
    gpu_memory_utilization: Annotated[float, pydantic.Field(gt=0, le=1)] | None = None
    scheduler_type: str = "fifo"
    safety_margin: float | None = None
    allow_block_sharing: bool = True
    cpu_offload_space: float = 0.0
    kv_cache_dtype: str = "auto"
    balance_tail: bool = True
    use_cuda_graph: bool | None = None
    use_async_batching: bool | None = None
    q_padding_interval_size: int | None = None
    kv_padding_interval_size: int | None = None
    max_cached_graphs: int | None = None

    @pydantic.field_validator("input", "stop", "stop_token_ids", "bad_words", "choice", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str | int) else value or []

    @pydantic.field_validator("max_errors", "time_limit", mode="before")
    @classmethod
    def _number_as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value

    @pydantic.field_validator("out")
    @classmethod
    def _known_suffix(cls, value: str) -> str:
        if not is_folder(value) and Path(value).suffix not in OUTPUT_SUFFIXES:
            known = ", ".join(OUTPUT_SUFFIXES)
            raise ValueError(f"{value}: the format is told by the extension, one of {known}; a folder ends with /")
        return value

    @pydantic.field_validator("date", mode="before")
    @classmethod
    def _a_day(cls, value: Any) -> Any:
        if value is None or isinstance(value, datetime.date):
            return value
        try:
            return datetime.date.fromisoformat(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{value}: a day such as 2026-05-31 is expected") from error

    @pydantic.field_validator("retry")
    @classmethod
    def _known_kinds(cls, value: str | None) -> str | None:
        unknown = [kind for kind in _kinds(value) if kind not in RETRY_KINDS]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is none of {', '.join(RETRY_KINDS)}; several are parted by a comma")
        return value

    @pydantic.field_validator("chat_template_kwargs")
    @classmethod
    def _as_json(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            return json.loads(json.dumps(value))
        except TypeError as error:
            raise ValueError(f"JSON values are expected: {error}") from error

    @property
    def output(self) -> Path:
        return Path(self.out).expanduser()

    @property
    def retry_kinds(self) -> tuple[str, ...]:
        """What --retry names, in one order."""
        return tuple(sorted(set(_kinds(self.retry))))

    @property
    def summary_path(self) -> Path | None:
        return None if self.summary is None else Path(self.summary).expanduser()

    @property
    def report_path(self) -> Path | None:
        return None if self.report is None else Path(self.report).expanduser()

    def engine_config(self) -> ContinuousBatchingConfig:
        return ContinuousBatchingConfig(
            **{field.name: getattr(self, field.name) for field in fields(ContinuousBatchingConfig)}
        )


def build_spec(values: dict[str, Any]) -> JobSpec:
    """Validates options; raises UsageError with the option, what is wrong, and the nearest name for an unknown one."""
    try:
        return JobSpec(**_by_own_names(values))
    except pydantic.ValidationError as error:
        first = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        name = str(first["loc"][0]) if first["loc"] else "job"
        if first["type"] == "extra_forbidden":
            near = difflib.get_close_matches(name, JobSpec.model_fields, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"unknown option {name!r}{hint}") from error
        if first["type"] == "missing":
            raise UsageError(f"{option_name(name)} is missing") from error
        told = first["msg"].removeprefix("Value error, ")
        if first["type"] != "value_error":  # pydantic's own words, which leave the value out
            told += f", not {first['input']!r:.60}"
            told += "; put it in quotes" if isinstance(first["input"], bool) and first["type"] == "string_type" else ""
        raise UsageError(f"{option_name(name)}: {told}") from error


def _by_own_names(values: dict[str, Any]) -> dict[str, Any]:
    """Of two names for one option the later one counts: the command line's, which stands behind a spec file's."""
    named: dict[str, Any] = {}
    for name, value in values.items():
        if name not in OPPOSITES:
            named[ALIASES.get(name, name)] = value
        elif not isinstance(value, bool):
            raise UsageError(f"{option_name(name)}: true or false is expected, not {value!r:.60}")
        elif value:
            named[OPPOSITES[name]] = False
    return named


def read_spec_file(path: Path) -> dict[str, Any]:
    """The options in a YAML job spec. Raises UsageError for a file that is not one."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such job spec") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: not a readable YAML file: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise UsageError(f"{path}: a job spec is a mapping of options, such as `model: smollm2`")
    return values


def option_name(field: str) -> str:
    """How the command line spells a field."""
    return "INPUT" if field == "input" else "--" + field.replace("_", "-")


def is_folder(out: str) -> bool:
    """Whether an output is a folder of shards: it is one already, ends like one, or has no extension."""
    return out.endswith("/") or Path(out).expanduser().is_dir() or not Path(out).suffix


def _kinds(retry: str | None) -> list[str]:
    return [] if retry is None else [kind.strip() for kind in retry.split(",")]
