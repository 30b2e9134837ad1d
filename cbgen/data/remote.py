"""Input behind URLs: whatever fsspec has a driver for, copied here once."""

import errno
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import fsspec

from cbgen.data.origins import SUFFIXES, Origin, checked_suffix, natural_key, suffix_of
from cbgen.data.spool import Spool, copy_failure
from cbgen.errors import UsageError, first_line

# Which extra of cbgen-llm brings a protocol's driver.
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}


def is_url(source: str) -> bool:
    return "://" in source


def copy_from_url(url: str, spool: Spool) -> Iterator[Origin]:
    """The files of a URL that names a file, a folder or a glob, in natural order, each copied when it is its turn.

    A job reads its input two or three times, from begin to end; a copy is read as fast as the disk and cannot change
    in between. Raises UsageError for a URL that is not there, not allowed, or without a driver.
    """
    name = without_secrets(url)
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
        files = _found(filesystem, path)
    except ImportError as error:
        extra = _EXTRAS.get(urlsplit(url).scheme)
        advice = f"pip install 'cbgen-llm[{extra}]'" if extra else first_line(error)
        raise UsageError(f"{name}: the driver is not installed: {advice}") from error
    except Exception as error:  # every driver has failures of its own
        raise UsageError(f"{name}: cannot be read: {_reason(error)}") from error
    if not files:
        raise UsageError(f"{name}: no such file, folder or glob match of {', '.join(SUFFIXES)}")
    for file, size_bytes in files:
        yield _copy(filesystem, file, size_bytes, without_secrets(filesystem.unstrip_protocol(file)), spool)


def without_secrets(url: str) -> str:
    """The URL as messages and outputs may hold it: without a password, and without the signature of an HTTP URL."""
    shown = re.sub("://[^/@]*@", "://", url)
    return re.split("[?#]", shown)[0] if shown.startswith(("http://", "https://")) else shown


def _found(filesystem: Any, path: str) -> list[tuple[str, int | None]]:
    """Paths and sizes, where known. A name of any suffix is taken where it is the one that was asked for."""
    try:
        entry = filesystem.info(path)
    except FileNotFoundError:
        matches = list(filesystem.glob(path, detail=True).values()) if any(sign in path for sign in "*?[") else []
    else:
        if entry["type"] != "directory":
            return [(path, entry.get("size"))]
        matches = filesystem.ls(path, detail=True)
    files = [entry for entry in matches if entry["type"] == "file" and suffix_of(without_secrets(entry["name"]))]
    return sorted(((entry["name"], entry.get("size")) for entry in files), key=lambda file: natural_key(file[0]))


def _copy(filesystem: Any, path: str, size_bytes: int | None, name: str, spool: Spool) -> Origin:
    target = spool.new_path(checked_suffix(name))
    try:
        filesystem.get_file(path, str(target))
    except Exception as error:  # every driver has failures of its own
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise UsageError(f"{name}: {copy_failure(target, error)}") from error
        raise UsageError(f"{name}: cannot be read: {_reason(error)}") from error
    copied_bytes = target.stat().st_size
    if size_bytes is not None and copied_bytes != size_bytes:
        raise UsageError(f"{name}: {copied_bytes} bytes came of {size_bytes}; run the same command again")
    return spool.origin(target, name, name)


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file"
    return f"access refused: {first_line(error)}" if isinstance(error, PermissionError) else first_line(error)
