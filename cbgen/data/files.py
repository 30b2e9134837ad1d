"""Publishing a file so that no reader, and no crash, ever sees half of it."""

import contextlib
import errno
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from cbgen.errors import OutputError

ADVICE = "make room or fix the permissions, then run the same command again: parts already published are kept"
# What an administrator can mend while a job waits.
WAITABLE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS}
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0


def publish(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write` with a temporary name beside `path`, then makes the result durable and renames it into place.

    The order is: write, fsync the file, rename, fsync the folder. Raises OutputError, with nothing left behind, when
    the disk is full or the folder cannot be written.
    """
    if os.path.exists(path) and not (path.is_file() or path.is_dir()):  # noqa: PTH110 (no error for a name that cannot be)
        return _write_into(path, write)
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


def _write_into(path: Path, write: Callable[[Path], object]) -> None:
    """What is no file, such as /dev/stdout, is written to, and not replaced."""
    try:
        write(path)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error


def publish_text(path: Path, text: str) -> None:
    """Publishes a small UTF-8 text."""
    publish(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def delete(path: Path) -> None:
    """Deletes a file that may be gone already. Raises OutputError when it stays."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{path}: cannot be deleted: {error.strerror or error}; {ADVICE}") from error


class DiskPatience:
    """Waits for a disk that is full or may not be written, instead of giving the job up.

    timeout_s: how long one publication is tried again. notify: told when waiting begins and ends. While it waits
    nothing more is taken from the engine, so that memory stays bounded.
    """

    def __init__(self, timeout_s: float, notify: Callable[[str], None]):
        self._timeout_s = timeout_s
        self._notify = notify
        self._abandoned = threading.Event()

    def abandon(self) -> None:
        """From another thread: whoever waits gives up at once."""
        self._abandoned.set()

    def publish(self, path: Path, write: Callable[[Path], object]) -> None:
        """See `publish`."""
        self.run(lambda: publish(path, write))

    def run(self, action: Callable[[], object]) -> None:
        """Repeats what may raise OutputError until it succeeds, time is up, or the failure is of another kind."""
        deadline_s, pause_s, waited = time.monotonic() + self._timeout_s, FIRST_PAUSE_S, False
        while True:
            try:
                action()
                break
            except OutputError as error:
                left_s = deadline_s - time.monotonic()
                if not _is_waitable(error) or left_s <= 0:
                    raise
                if not waited:
                    self._notify(f"paused: {_first_clause(error)}; waiting for room, {self._timeout_s:g} s at most")
                waited = True
                if self._abandoned.wait(min(pause_s, left_s)):
                    raise
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        if waited:
            self._notify("going on: what waited is written")


def check_writable(folder: Path) -> None:
    """Raises OutputError, before any work, when a file cannot be made in the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written: {error.strerror}; {ADVICE}") from error


def _is_waitable(error: OutputError) -> bool:
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in WAITABLE_ERRORS


def _first_clause(error: OutputError) -> str:
    return str(error).removesuffix(f"; {ADVICE}")


def _fsync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # Windows has no handle for a folder, and makes a rename durable by itself
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
