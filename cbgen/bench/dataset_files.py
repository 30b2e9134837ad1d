"""The requests of a benchmark that are read from a file: conversations, or lines of JSON."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from cbgen.bench.dataset_options import CUSTOM, DEFAULT_NUM_PROMPTS, BenchRequest, DatasetOptions
from cbgen.engine.param_checks import parsed_json, whole_number
from cbgen.errors import RowError, UsageError
from cbgen.models.loading import ModelDescription
from cbgen.row_checks import checked_ids, checked_text

# Conversations shorter or longer than this are left out, as vLLM does.
LEAST_TURN_TOKENS, MOST_PROMPT_TOKENS, MOST_TOKENS = 4, 1024, 2048
Made = tuple[list[BenchRequest], list[str]]  # requests, warnings


def sharegpt(options: DatasetOptions, model: ModelDescription) -> Made:
    """The first turn of conversations in random order is a prompt; the second says how long the output is."""
    turns = [_two_turns(entry) for entry in _conversations(options.path)]
    random.Random(options.seed).shuffle(turns)
    wanted = options.num_prompts or DEFAULT_NUM_PROMPTS
    requests: list[BenchRequest] = []
    left_out: Counter[str] = Counter()
    for pair in turns:
        if len(requests) == wanted:
            break
        request = "without two turns of text" if pair is None else _of_turns(*pair, options.output_len, model)
        if isinstance(request, str):
            left_out[request] += 1
        else:
            requests.append(request)
    counts = ", ".join(f"{count} {why}" for why, count in left_out.items())
    if not requests:
        raise UsageError(
            f"--dataset-path {options.dataset_path}: no conversation can be used ({counts or 'it is empty'})"
        )
    return requests, [f"conversations left out: {counts}"] if left_out else []


def _two_turns(entry: dict[str, Any]) -> tuple[str, str] | None:
    turns = entry.get("conversations")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns[:2]):
        return None
    try:
        prompt, answer = (checked_text(turn.get("value"), "value") for turn in turns[:2])
    except (RowError, ValueError):  # one that is no text; fewer than two
        return None
    return prompt, answer


def _of_turns(prompt: str, answer: str, output_len: int | None, model: ModelDescription) -> BenchRequest | str:
    """A request, or why there is none. An answer whose length is not asked of it may be short."""
    prompt_ids = model.tokenizer(prompt)["input_ids"]
    num_tokens = len(model.tokenizer(answer)["input_ids"]) if output_len is None else output_len
    shortest = len(prompt_ids) if output_len is not None else min(len(prompt_ids), num_tokens)
    if shortest < LEAST_TURN_TOKENS:
        return f"too short (under {LEAST_TURN_TOKENS} tokens)"
    together = len(prompt_ids) + num_tokens
    if len(prompt_ids) > MOST_PROMPT_TOKENS or together > MOST_TOKENS:
        return f"too long (over {MOST_PROMPT_TOKENS:,} tokens of prompt, or {MOST_TOKENS:,} in all)"
    if together > model.max_model_len:
        return f"longer than the context of {model.max_model_len:,}"
    return BenchRequest(prompt_ids, num_tokens)


def _conversations(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON list or of the lines of a JSONL file, which begins with a brace."""
    with path.open("rb") as file:
        is_list = file.read(4096).lstrip().startswith(b"[")
    if not is_list:
        yield from (row for _, row in _rows(path))
        return
    try:
        entries = parsed_json("it", path.read_text(encoding="utf-8"))
    except (RowError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from error
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, dict):
            raise UsageError(f"{path}, entry {number}: a JSON object is expected")
        yield entry


def custom(options: DatasetOptions, model: ModelDescription) -> Made:
    """A request for each line, up to num_prompts of them."""
    lines = list(islice(_rows(options.path), options.num_prompts))
    if not lines:
        raise UsageError(f"--dataset-path {options.dataset_path}: holds no requests")
    requests = []
    for number, row in lines:
        try:
            requests.append(_request(row, options.output_len, model))
        except RowError as error:
            raise UsageError(f"{options.path}, line {number}: {error}") from error
    return requests, list(_line_warnings(options, [row for _, row in lines]))


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line that is not blank."""
    with path.open(encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, _object(line, f"{path}, line {number}")
        except UnicodeDecodeError as error:
            raise UsageError(f"{path}: not a JSONL file: it is not UTF-8 text") from error


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise UsageError(f"{where}: a JSON object is expected")
    return row


def _request(row: dict[str, Any], output_len: int | None, model: ModelDescription) -> BenchRequest:
    """Raises RowError for a row without a prompt or with a value of the wrong kind."""
    own = row.get("max_tokens")
    if own is None and output_len is None:
        raise RowError("max_tokens is None, a number is expected, here or by --output-len")
    max_tokens = whole_number("max_tokens", output_len if own is None else own)
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


def _line_warnings(options: DatasetOptions, rows: list[dict[str, Any]]) -> Iterator[str]:
    if options.output_len is not None and all(row.get("max_tokens") is not None for row in rows):
        yield f"--output-len has no effect on --dataset-name {CUSTOM}: every line has max_tokens"
    stopping = sum(row.get("ignore_eos") is False for row in rows)
    if stopping:
        yield f"{stopping} requests have ignore_eos false and generate all of their max_tokens nevertheless"
    sampled = sum(bool(row.get("temperature")) for row in rows)
    if sampled:
        yield f"{sampled} requests have a temperature and are generated greedily nevertheless"
