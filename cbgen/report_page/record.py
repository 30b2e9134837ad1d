"""What a finished output records of its job, taken with care: anybody may have edited it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cbgen.data.outputs import JsonlOutput
from cbgen.errors import InputError, first_line
from cbgen.finished_rows import is_openai_batch
from cbgen.status import Situation

# What rows cannot be read without, and what is only shown: left out where it is no such thing.
_NEEDED = ("format", "n", "shard")
_SHOWN = ("config", "versions")
# A line of results takes more: the names of its columns alone do.
LEAST_LINE_BYTES = 100


def checked(situation: Situation) -> Situation:
    """The same with a footer in which everything that a page is made of is of its kind.

    Of a job that is not finished it has none: what lies there is the record of an earlier job. Raises InputError for a
    footer by which no row can be read.
    """
    footer = situation.footer
    if footer is None or situation.manifest is not None:
        return replace(situation, footer=None)
    fingerprint, columns = footer["fingerprint"], footer["columns"]
    if not isinstance(fingerprint, dict) or any(name not in fingerprint for name in _NEEDED):
        raise _edited(situation, "fingerprint")
    if not isinstance(columns, list) or not columns or not all(isinstance(name, str) for name in columns):
        raise _edited(situation, "columns")
    if is_openai_batch(footer) and not (isinstance(footer.get("files"), dict) and len(footer["files"]) == 2):
        raise _edited(situation, "files")
    shown = {name: _options(footer.get(name)) for name in _SHOWN}
    shown["config"]["engine"] = _options(shown["config"].get("engine"))
    source = fingerprint.get("prompt_source")
    known = {**fingerprint, "prompt_source": source if isinstance(source, str) else None}
    return replace(situation, footer={**footer, **shown, "fingerprint": known})


def most_rows(situation: Situation) -> int:
    """Of a finished output by what its files say, and not what is recorded; of JSONL there are fewer, if it records
    nothing sensible. Raises InputError."""
    footer, files = situation.footer or {}, situation.output.files
    if isinstance(situation.output, JsonlOutput):
        most, told = sum(map(_size, files)) // LEAST_LINE_BYTES, footer.get("rows_total")
        return min(told, most) if isinstance(told, int) and told > 0 else most
    return sum(map(_num_rows, files))


def _num_rows(path: Path) -> int:
    try:
        return pq.read_metadata(path).num_rows
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{path}: not a readable Parquet file: {first_line(error)}") from error


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error


def _options(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}


def _edited(situation: Situation, name: str) -> InputError:
    return InputError(f"{situation.output.path}: its record was changed: `{name}` is not what cbgen writes")
