"""Publishing a file so that no reader, and no crash, ever sees half of it."""

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from cbgen.errors import OutputError

ADVICE = "make room or fix the permissions, then run the same command again: parts already published are kept"


def publish(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write` with a temporary name beside `path`, then makes the result durable and renames it into place.

    The order is: write, fsync the file, rename, fsync the folder. Raises OutputError, with nothing left behind, when
    the disk is full or the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        write(temporary)
        _fsync(temporary)
        os.replace(temporary, path)
        _fsync(path.parent)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}; {ADVICE}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def publish_text(path: Path, text: str) -> None:
    """Publishes a small UTF-8 text."""
    publish(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def check_writable(folder: Path) -> None:
    """Raises OutputError, before any work, when a file cannot be made in the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written: {error.strerror}; {ADVICE}") from error


def _fsync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # Windows has no handle for a folder, and makes a rename durable by itself
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
