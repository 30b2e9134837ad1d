"""The job as the user writes it: options of `cbgen run`, or a YAML file of the same names."""

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
SPEC_SUFFIXES = (".yaml", ".yml")


class JobSpec(pydantic.BaseModel):
    """Every option of a run. The names are those of the command line with underscores."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    input: Annotated[list[str], pydantic.Field(min_length=1)]
    model: str
    out: str
    revision: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    calibration: str | None = None
    max_model_len: int | None = None

    prompt_column: str | None = None
    messages_column: str | None = None
    template: str | None = None
    system_prompt: str | None = None
    chat: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    limit: pydantic.NonNegativeInt | None = None

    max_tokens: int = 512
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0
    n: pydantic.PositiveInt = 1
    ignore_eos: bool = False

    order: Literal["auto", "prefix", "longest-first", "arrival"] = "auto"
    deduplicate: bool = True

    output_token_ids: bool = False
    output_prefix: str = ""
    summary: str | None = None
    resume: Literal["if-possible", "always", "never"] = "if-possible"
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

    @pydantic.field_validator("input", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @pydantic.field_validator("out")
    @classmethod
    def _known_suffix(cls, value: str) -> str:
        if Path(value).suffix not in OUTPUT_SUFFIXES:
            raise ValueError(f"{value}: the format is told by the extension, one of {', '.join(OUTPUT_SUFFIXES)}")
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
    def summary_path(self) -> Path | None:
        return None if self.summary is None else Path(self.summary).expanduser()

    def engine_config(self) -> ContinuousBatchingConfig:
        return ContinuousBatchingConfig(
            **{field.name: getattr(self, field.name) for field in fields(ContinuousBatchingConfig)}
        )


def build_spec(values: dict[str, Any]) -> JobSpec:
    """Validates options; raises UsageError with the option, what is wrong, and the nearest name for an unknown one."""
    try:
        return JobSpec(**values)
    except pydantic.ValidationError as error:
        first = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        name = str(first["loc"][0]) if first["loc"] else "job"
        if first["type"] == "extra_forbidden":
            near = difflib.get_close_matches(name, JobSpec.model_fields, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"unknown option {name!r}{hint}") from error
        if first["type"] == "missing":
            raise UsageError(f"{option_name(name)} is missing") from error
        raise UsageError(f"{option_name(name)}: {first['msg'].removeprefix('Value error, ')}") from error


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
