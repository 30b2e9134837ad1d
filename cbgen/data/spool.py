"""A folder of temporary files for inputs that can be read only once: a job reads its input several times."""

import hashlib
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from cbgen.data.compressed import GZIP_MAGIC, ZSTD_MAGIC
from cbgen.data.origins import Origin
from cbgen.errors import UsageError

CHUNK_BYTES = 1 << 20
_FORMATS = {b"PAR1": ".parquet", GZIP_MAGIC: ".jsonl.gz", ZSTD_MAGIC: ".jsonl.zst"}


class Spool:
    """Made when the first file comes, and deleted by close(), or when the process ends."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._count = 0
        self._delete: Callable[[], object] | None = None

    def add_stream(self, stream: BinaryIO, name: str, identity_name: str) -> Origin:
        """Copies a stream to its end; its format is told by its first bytes. Raises UsageError for a full disk."""
        path = self.new_path()
        try:
            with open(path, "wb") as file:
                shutil.copyfileobj(stream, file, CHUNK_BYTES)
            with open(path, "rb") as file:
                start = file.read(4)
            suffix = next((suffix for magic, suffix in _FORMATS.items() if start.startswith(magic)), ".jsonl")
            named = path.with_suffix(suffix)
            path.rename(named)
        except OSError as error:
            raise UsageError(f"{name}: {copy_failure(path, error)}") from error
        return self.origin(named, name, identity_name)

    def new_path(self, suffix: str = "") -> Path:
        """Where the next file can be written."""
        if self._folder is None:
            try:
                self._folder = Path(tempfile.mkdtemp(prefix="cbgen-input-"))
            except OSError as error:
                raise UsageError(f"no folder for temporary files: {error.strerror}; set TMPDIR") from error
            self._delete = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._count += 1
        return self._folder / f"{self._count}{suffix}"

    @staticmethod
    def origin(path: Path, name: str, identity_name: str) -> Origin:
        """The origin of a file that was copied here: what it holds is its identity."""
        digest = hashlib.blake2b(digest_size=16)
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
        size_bytes = path.stat().st_size
        identity = (identity_name, size_bytes, digest.hexdigest())
        return Origin(name, name, path, size_bytes, identity, is_copy=True)

    def close(self) -> None:
        """Deletes the files."""
        if self._delete is not None:
            self._delete()


def copy_failure(path: Path, error: OSError) -> str:
    """Why a copy to `path` failed."""
    return f"cannot be copied to {path.parent}: {error.strerror or error}; set TMPDIR to a folder with more room"
