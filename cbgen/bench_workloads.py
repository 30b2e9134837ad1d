"""The requests of a benchmark: random ones, random ones behind a common prefix, or those of a JSONL file."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from cbgen.engine.param_checks import whole_number
from cbgen.errors import RowError, UsageError
from cbgen.models.loading import ModelDescription
from cbgen.row_checks import checked_ids, checked_text

RANDOM, SHARED_PREFIX = "random", "shared-prefix"
DEFAULT_NUM_PROMPTS, DEFAULT_INPUT_LEN, DEFAULT_OUTPUT_LEN = 64, 128, 64
DEFAULT_PREFIX_LEN = {RANDOM: 0, SHARED_PREFIX: 512}
SEED = 0
# The warm-up is the beginning of the workload, cut down: so many requests, tokens of prompt and tokens of output.
WARM_UP_REQUESTS, WARM_UP_PROMPT, WARM_UP_OUTPUT = 4, 32, 16


@dataclass(frozen=True)
class BenchRequest:
    """A prompt, and how many tokens are generated for it: exactly so many, whatever they are."""

    prompt_ids: list[int]
    max_tokens: int


@dataclass(frozen=True)
class WorkloadSizes:
    """Numbers of requests and of tokens as the user gave them; None where nothing was said."""

    num_prompts: int | None = None
    input_len: int | None = None
    output_len: int | None = None
    prefix_len: int | None = None

    def check(self) -> None:
        """Raises UsageError for a number below its least."""
        for name, least in (("num_prompts", 1), ("input_len", 1), ("output_len", 1), ("prefix_len", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"--{name.replace('_', '-')} {value}: at least {least} is expected")


@dataclass(frozen=True)
class Workload:
    """Requests in order. `warnings`: what their file asks for and a benchmark does not do."""

    name: str
    requests: list[BenchRequest]
    warnings: tuple[str, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt_ids) for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.max_tokens for request in self.requests)

    @property
    def warm_up(self) -> list[BenchRequest]:
        return [
            BenchRequest(request.prompt_ids[:WARM_UP_PROMPT], min(request.max_tokens, WARM_UP_OUTPUT))
            for request in self.requests[:WARM_UP_REQUESTS]
        ]


def make_workload(name: str, sizes: WorkloadSizes, model: ModelDescription) -> Workload:
    """The workload called `random` or `shared-prefix`, or that of a file. Raises UsageError for one that cannot be."""
    if name in DEFAULT_PREFIX_LEN:
        workload = _generated(name, sizes, model)
    elif Path(name).is_file():
        workload = _from_file(Path(name), sizes, model)
    else:
        raise UsageError(f"--workload {name}: not {RANDOM}, {SHARED_PREFIX} or a JSONL file")
    for number, request in enumerate(workload.requests, start=1):
        prompt, output = len(request.prompt_ids), request.max_tokens
        if prompt + output > model.max_model_len:
            raise UsageError(
                f"--workload {name}: request {number} has a prompt of {prompt} tokens and asks for {output}, which "
                f"together exceed the context of {model.max_model_len}"
            )
    return workload


def _generated(name: str, sizes: WorkloadSizes, model: ModelDescription) -> Workload:
    """Prompts of input_len random tokens, each behind the same prefix_len random tokens; the same ones every time."""
    num_prompts = DEFAULT_NUM_PROMPTS if sizes.num_prompts is None else sizes.num_prompts
    input_len = DEFAULT_INPUT_LEN if sizes.input_len is None else sizes.input_len
    output_len = DEFAULT_OUTPUT_LEN if sizes.output_len is None else sizes.output_len
    prefix_len = DEFAULT_PREFIX_LEN[name] if sizes.prefix_len is None else sizes.prefix_len
    special = set(model.tokenizer.all_special_ids)
    plain = [token_id for token_id in range(model.vocab_size) if token_id not in special]
    rng = random.Random(SEED)
    prefix = rng.choices(plain, k=prefix_len)
    prompts = [prefix + rng.choices(plain, k=input_len) for _ in range(num_prompts)]
    return Workload(name, [BenchRequest(prompt, output_len) for prompt in prompts])


def _from_file(path: Path, sizes: WorkloadSizes, model: ModelDescription) -> Workload:
    """A request for each line, up to num_prompts of them."""
    lines = [(number, row) for number, row in islice(_rows(path), sizes.num_prompts)]
    if not lines:
        raise UsageError(f"--workload {path}: holds no requests")
    requests = []
    for number, row in lines:
        try:
            requests.append(_request(row, model))
        except RowError as error:
            raise UsageError(f"{path}, line {number}: {error}") from error
    return Workload(str(path), requests, tuple(_file_warnings(sizes, [row for _, row in lines])))


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line that is not blank."""
    with path.open(encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, _object(line, f"{path}, line {number}")
        except UnicodeDecodeError as error:
            raise UsageError(f"--workload {path}: not a JSONL file: it is not UTF-8 text") from error


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise UsageError(f"{where}: a JSON object is expected")
    return row


def _request(row: dict[str, Any], model: ModelDescription) -> BenchRequest:
    """Raises RowError for a row without a prompt or with a value of the wrong kind."""
    max_tokens = whole_number("max_tokens", row.get("max_tokens"))
    if max_tokens < 1:
        raise RowError(f"max_tokens is {max_tokens}, at least 1 is expected")
    return BenchRequest(_prompt_ids(row, model), max_tokens)


def _prompt_ids(row: dict[str, Any], model: ModelDescription) -> list[int]:
    if "prompt_ids" not in row and "prompt" not in row:
        raise RowError("neither prompt_ids nor prompt is there")
    if "prompt_ids" in row:
        return checked_ids(row["prompt_ids"], model.vocab_size)
    return checked_ids(model.tokenizer(checked_text(row["prompt"], "prompt"))["input_ids"], model.vocab_size)


def read_prompts(name: str, model: ModelDescription) -> Iterator[list[int]]:
    """Token ids of each line of a JSONL file with prompt_ids or prompt. Raises UsageError for what is not one."""
    path = Path(name).expanduser()
    if not path.is_file():
        raise UsageError(f"{name}: no such file")
    for number, row in _rows(path):
        try:
            yield _prompt_ids(row, model)
        except RowError as error:
            raise UsageError(f"{path}, line {number}: {error}") from error


def _file_warnings(sizes: WorkloadSizes, rows: list[dict[str, Any]]) -> Iterator[str]:
    for name in ("input_len", "output_len", "prefix_len"):
        if getattr(sizes, name) is not None:
            yield f"--{name.replace('_', '-')} has no effect on a workload from a file"
    stopping = sum(row.get("ignore_eos") is False for row in rows)
    if stopping:
        yield f"{stopping} requests have ignore_eos false and generate all of their max_tokens nevertheless"
    sampled = sum(bool(row.get("temperature")) for row in rows)
    if sampled:
        yield f"{sampled} requests have a temperature and are generated greedily nevertheless"
