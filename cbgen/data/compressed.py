"""JSONL files as streams of bytes, compressed or not, in bounded memory."""

import gzip
import io
import zlib
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from cbgen.data.origins import GZIP_SUFFIXES, ZSTD_SUFFIXES
from cbgen.errors import first_line

BUFFER_BYTES = 1 << 18
GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
# What reading a cut or damaged file raises, beside OSError for a file that is not there.
READ_FAILURES = (OSError, EOFError, zlib.error)


def open_lines(path: Path) -> BinaryIO:
    """The content, decompressed while it is read; a file of several gzip members or zstd frames is one stream.

    Raises READ_FAILURES, here or while it is read.
    """
    name = path.name.lower()
    if not name.endswith(GZIP_SUFFIXES + ZSTD_SUFFIXES):
        return open(path, "rb")
    if path.stat().st_size == 0:  # both libraries take it for a stream that ended well
        raise EOFError("it is empty, which no complete compressed file is")
    # BufferedReader finds the lines: it is faster at it than either library.
    if name.endswith(ZSTD_SUFFIXES):
        return io.BufferedReader(pa.input_stream(path, compression="zstd"), BUFFER_BYTES)
    return io.BufferedReader(gzip.GzipFile(path), BUFFER_BYTES)


def reason(error: BaseException) -> str:
    """One of READ_FAILURES in words."""
    return (error.strerror if isinstance(error, OSError) else None) or first_line(error)
