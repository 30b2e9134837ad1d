"""The texts of a few chosen rows, cut, read in a second pass over the output."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cbgen.data.outputs import JsonlOutput
from cbgen.data.parquet import READING, batch_sizes
from cbgen.errors import InputError, first_line
from cbgen.finished_rows import finished_layout, json_records
from cbgen.report_page.sources import PART_COLUMNS, batch_answers, openai_output
from cbgen.status import KEY_CHARS, Situation

PREVIEW_CHARS, ERROR_CHARS = 240, 1200
CUT = " […]"
Record = dict[str, Any]


@dataclass(frozen=True)
class RowText:
    """label: how a user finds the row. None for what it has not, or what the output does not tell."""

    label: str
    prompt: str | None
    completion: str | None
    error: str | None


def read_texts(situation: Situation, places: Sequence[int]) -> dict[int, RowText]:
    """By place, see ROW. Raises as `row_tables` does."""
    wanted = sorted(set(places))
    if not wanted:
        return {}
    if situation.footer is None:
        return dict(_of_parts(situation, wanted))
    batch = openai_output(situation)
    if batch is not None:
        rows = _at(batch_answers(batch), wanted)
        return {place: _row_text(row.key.hex()[:KEY_CHARS], None, row.completion, row.error) for place, row in rows}
    return dict(_of_finished(situation, situation.footer, wanted))


def _of_parts(situation: Situation, wanted: list[int]) -> Iterator[tuple[int, RowText]]:
    first = 0
    # The same columns as of all rows, so that a part that could not be read then is left out again.
    for path, table in situation.folder.parts(PART_COLUMNS):
        here = [place - first for place in wanted if first <= place < first + table.num_rows]
        chosen = pa.array(here, pa.int64())
        names = table.select(["key", "sample_index", "error"]).take(chosen).to_pylist()
        for place, name, completion in zip(here, names, _completions(path, chosen), strict=True):
            sample = f", sample {name['sample_index']}" if name["sample_index"] else ""
            label = name["key"].hex()[:KEY_CHARS] + sample
            yield first + place, _row_text(label, None, completion, name["error"])
        first += table.num_rows


def _completions(path: Path, rows: pa.Array) -> list[str | None]:
    """Of some rows of a part; none where its texts alone are damaged."""
    if not len(rows):
        return []
    try:
        table = pq.read_table(path, columns=["completion"], page_checksum_verification=True)
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError):
        return [None] * len(rows)
    return table["completion"].take(rows).to_pylist()


def _of_finished(situation: Situation, footer: Record, wanted: list[int]) -> Iterator[tuple[int, RowText]]:
    layout, source = finished_layout(footer), footer["fingerprint"].get("prompt_source")
    own = set(footer["columns"])
    is_jsonl = isinstance(situation.output, JsonlOutput)
    first = 0
    for path in situation.output.files:
        there = [place - first for place in wanted if place >= first]
        if is_jsonl:
            records, num_rows = _at(json_records(path), there), 0
        else:
            num_rows = pq.read_metadata(path).num_rows
            records = _parquet_records(path, [place for place in there if place < num_rows])
        for place, record in records:
            prompt = record.get(source)
            if source not in record:  # made by a template
                prompt = {name: value for name, value in record.items() if name not in own}
            completion, error = (record.get(layout.prefix + name) for name in ("completion", "error"))
            yield first + place, _row_text(f"row {first + place:,}", prompt, completion, error)
        first += num_rows


def _parquet_records(path: Path, places: list[int]) -> Iterator[tuple[int, Record]]:
    """Row groups without any of the rows are not read. Raises InputError."""
    try:
        with pq.ParquetFile(path, **READING) as file:
            names = file.schema_arrow.names
            sizes, first = batch_sizes(path, file.metadata, set(names)), 0
            for group in range(file.num_row_groups):
                end = first + file.metadata.row_group(group).num_rows
                left = [place for place in places if first <= place < end]
                for batch in file.iter_batches(batch_size=sizes[group], row_groups=[group]) if left else ():
                    here = [place for place in left if first <= place < first + batch.num_rows]
                    rows = batch.take([place - first for place in here]).to_pylist() if here else []
                    yield from zip(here, rows, strict=True)
                    first += batch.num_rows
                first = end
    except (OSError, ValueError) as error:  # those of Arrow are either
        raise InputError(f"{path}: cannot be read to its end: {first_line(error)}") from error


def _at(rows: Iterator[Any], places: list[int]) -> Iterator[tuple[int, Any]]:
    first = 0
    for place in places:
        for row in islice(rows, place - first, place - first + 1):
            yield place, row
        first = place + 1


def _row_text(label: str, prompt: Any, completion: Any, error: Any) -> RowText:
    return RowText(label, _cut(_text(prompt)), _cut(_text(completion)), _cut(_text(error), ERROR_CHARS))


def _text(prompt: Any) -> str | None:
    """A text as it is, the last message of a chat, all else as JSON."""
    if prompt is None or isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        content = prompt[-1].get("content")
        return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)
    return json.dumps(prompt, ensure_ascii=False, default=str)


def _cut(text: str | None, limit: int = PREVIEW_CHARS) -> str | None:
    return text if text is None or len(text) <= limit else text[:limit] + CUT
