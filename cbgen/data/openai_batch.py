"""Lines of an OpenAI batch as rows: what each request asks for, in the columns that the rest of cbgen knows.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 9}}
    {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": "text, or token ids", "n": 2}}

A row has one of messages, prompt and prompt_ids, as its url says, and may have every parameter that rows have (see
openai_body for what OpenAI and vLLM call them) and tools. What a body leaves out, or gives as null, is as for every
job: the command line's value, or else the model's generation config, or else greedy. OpenAI's own defaults
(temperature 1, 16 tokens for /v1/completions) are not taken over. A line that cannot be followed to the letter is an
error row: nothing that would change the result is passed over.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from cbgen.data.jsonl import JsonlFile, parse_line
from cbgen.data.openai_body import OPTIONS, PROMPT_FIELDS, body_columns, shown
from cbgen.data.origins import PARQUET_SUFFIXES, Origin, checked_suffix
from cbgen.data.readers import Input, open_input
from cbgen.errors import RowError, UsageError

ID_COLUMN = "custom_id"
COLUMNS = (ID_COLUMN, "model", "messages", "prompt", "prompt_ids", "tools", *OPTIONS)


class BatchFile(JsonlFile):
    """A shard of batch lines; its rows have COLUMNS. Where one has an error, only the custom_id is sure to be there."""

    def _infer_schema(self) -> pa.Schema:
        """Fixed, whatever the bodies hold: in tables, what is no text stands as JSON."""
        self.num_rows = sum(1 for _ in self._lines())
        self._json_columns = set(COLUMNS)
        return pa.schema([(name, pa.string()) for name in COLUMNS])

    def _parsed(self) -> Iterator[tuple[dict[str, Any], str | None, int]]:
        for number, line in self._lines():
            values, error = parse_line(line)
            own_id = values.get(ID_COLUMN)
            if isinstance(own_id, str):
                yield *_row(own_id, values), len(line)
            else:  # nothing else tells which request it is
                error = error or f"custom_id is {shown(own_id)}, a text that names the request is expected"
                yield {}, f"{self.origin.label}, line {number}: {error}", len(line)


def open_batch(sources: Sequence[str], limit: int | None, output: Path, error_file: Path) -> Input:
    """Opens what open_input does, but for Parquet, as batch lines. Neither output nor error_file is input, should a
    folder or glob hold them. Raises UsageError.
    """
    for source in sources:
        if Path(source).expanduser().resolve() == error_file.resolve():
            raise UsageError(f"{source}: is an input and the error file as well; name another with --error-file")
    return open_input(sources, limit, output, error_file=error_file, open_file=_open_file)


def _open_file(origin: Origin) -> BatchFile:
    if checked_suffix(str(origin.path)) in PARQUET_SUFFIXES:
        raise UsageError(f"{origin.name}: is Parquet, and --format openai-batch reads JSONL")
    return BatchFile(origin)


def _row(own_id: str, line: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    try:
        return {ID_COLUMN: own_id, **request_columns(line)}, None
    except RowError as error:
        return {ID_COLUMN: own_id}, str(error)


def request_columns(line: dict[str, Any]) -> dict[str, Any]:
    """What a line asks for, by name of column. Raises RowError with all that cannot be done."""
    url, body = line.get("url"), line.get("body")
    if line.get("method") != "POST":
        raise RowError(f"method is {shown(line.get('method'))}, POST is expected")
    if not isinstance(url, str) or url not in PROMPT_FIELDS:
        raise RowError(f"url is {shown(url)}, {' or '.join(PROMPT_FIELDS)} is expected")
    if not isinstance(body, dict):
        raise RowError(f"body is {shown(body)}, an object is expected")
    given = {name: value for name, value in body.items() if value is not None}
    field, columns = PROMPT_FIELDS[url], body_columns(given, url)
    if field not in given:
        raise RowError(f"body has no {field}, which {url} needs")
    own_model = {"model": given["model"]} if "model" in given else {}
    return {**own_model, **columns, **_prompt_column(field, given[field])}


def _prompt_column(field: str, value: Any) -> dict[str, Any]:
    if field == "messages" or not isinstance(value, list):
        return {field: value}
    if len(value) == 1 and isinstance(value[0], str | list):
        return _prompt_column(field, value[0])
    if any(isinstance(item, str | list) for item in value):
        raise RowError(f"prompt is a list of {len(value)} prompts; give each a line of its own")
    return {"prompt_ids": value}
