"""What an input file is called, what tells that it was changed, and which format its name stands for."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbgen.errors import UsageError

PARQUET_SUFFIXES = (".parquet", ".pq")
GZIP_SUFFIXES = (".jsonl.gz", ".ndjson.gz")
ZSTD_SUFFIXES = (".jsonl.zst", ".ndjson.zst")
JSONL_SUFFIXES = (".jsonl", ".ndjson", *GZIP_SUFFIXES, *ZSTD_SUFFIXES)
SUFFIXES = PARQUET_SUFFIXES + JSONL_SUFFIXES


@dataclass(frozen=True)
class Origin:
    """Where an input file comes from, and what it was when it was opened.

    name: as the user knows it, in messages; label: a short form of it for a row's error. path: where it is read from;
    size_bytes: as it lies there. identity: what tells it from a changed one, as JSON holds it.
    """

    name: str
    label: str
    path: Path
    size_bytes: int
    identity: tuple[Any, ...]
    is_copy: bool = False

    @classmethod
    def local(cls, path: Path) -> "Origin":
        """A file of the user's, told by path, size and time of change. Raises UsageError where it is gone."""
        try:
            identity = _local_identity(path)
        except OSError as error:
            raise UsageError(f"{_printable(str(path))}: cannot be read: {error.strerror}") from error
        return cls(_printable(str(path)), _printable(path.name), path, identity[1], identity)

    def was_changed(self) -> bool:
        """Never for a copy, which nobody else knows of."""
        try:
            return not self.is_copy and _local_identity(self.path) != self.identity
        except OSError:
            return True


def _local_identity(path: Path) -> tuple[str, int, int]:
    stat = path.stat()
    return _printable(str(path.resolve())), stat.st_size, stat.st_mtime_ns


def _printable(text: str) -> str:
    """A file name need not be UTF-8; the bytes that are not stand as escapes."""
    return os.fsencode(text).decode("utf-8", "backslashreplace")


def natural_key(text: str) -> list[Any]:
    """A sorting key that puts part-2 before part-10."""
    return [int(piece) if piece.isdecimal() else piece for piece in re.split(r"(\d+)", text)]


def suffix_of(name: str) -> str:
    """The one of SUFFIXES that a name ends in; empty for a name of another kind."""
    return next((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), "")


def checked_suffix(name: str) -> str:
    """The same; raises UsageError for a name of another kind."""
    if not suffix_of(name):
        raise UsageError(f"{name}: the format is told by the extension, one of {', '.join(SUFFIXES)}")
    return suffix_of(name)
