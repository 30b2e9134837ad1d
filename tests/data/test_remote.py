"""URLs: files, folders and globs of real filesystems of fsspec, copied once; every refusal is one line."""

import functools
import gzip
import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cbgen.data.readers import open_input
from cbgen.data.remote import without_secrets
from cbgen.errors import UsageError


@pytest.fixture
def bucket() -> Iterator[str]:
    """A folder in memory with shards of all formats, a note, and a sub-folder; `x` tells which is which."""
    filesystem = fsspec.filesystem("memory")
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"x": [2]}), sink)
    filesystem.pipe("/bucket/part-2.parquet", sink.getvalue().to_pybytes())
    filesystem.pipe("/bucket/part-10.jsonl.gz", gzip.compress(b'{"x": 10}\n'))
    filesystem.pipe("/bucket/part-1.jsonl", b'{"x": 1}\n\n{bad\n')
    filesystem.pipe("/bucket/notes.txt", b"not a shard")
    filesystem.pipe("/bucket/sub/part-3.jsonl", b'{"x": 3}\n')
    yield "memory://bucket"
    filesystem.rm("/bucket", recursive=True)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["part-2.parquet"], [2]),
        ([""], [1, None, 2, 10]),
        (["part-*.*"], [1, None, 2, 10]),
        (["**/part-*"], [1, None, 2, 10, 3]),
        (["sub", "part-2.parquet"], [3, 2]),
    ],
)
def test_files_folders_and_globs(bucket: str, names: list[str], expected: list[int | None]) -> None:
    """In the order given, and in natural order within; what has no known suffix is no shard."""
    with open_input([f"{bucket}/{name}" for name in names]) as source:
        assert [row.values["x"] for row in source.rows(["x"])] == expected
        assert len(list(source.records())) == sum(table.num_rows for table in source.tables()) == len(expected)


def test_messages_and_identity_hold_the_url(bucket: str) -> None:
    """Not the temporary file; a file that changed at its place has another identity, and the copy stays as it was."""
    url = f"{bucket}/part-1.jsonl"
    with open_input([url]) as source, open_input([url]) as again:
        rows = list(source.rows(["x"]))
        assert source.place_of(1) == "memory:///bucket/part-1.jsonl, line 3"
        assert str(rows[1].error).startswith("memory:///bucket/part-1.jsonl, line 3: ")
        assert json.loads(json.dumps(source.identity)) == source.identity == again.identity
        fsspec.filesystem("memory").pipe("/bucket/part-1.jsonl", b'{"x": 7}\n\n{bad\n')
        with open_input([url]) as changed:
            assert changed.identity != source.identity
        assert next(source.records()) == {"x": 1}


def test_local_and_remote_sources_stand_side_by_side(bucket: str, tmp_path: Path) -> None:
    """Also a local file that is given as a URL."""
    (tmp_path / "a.jsonl").write_text('{"x": 0}')
    sources = [str(tmp_path / "a.jsonl"), f"{bucket}/part-2.parquet", (tmp_path / "a.jsonl").as_uri()]
    with open_input(sources) as source:
        assert [record["x"] for record in source.records()] == [0, 2, 0]


def test_copies_are_deleted(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By close(), and when opening fails."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    source = open_input([bucket])
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 3
    source.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError):
        open_input([bucket, f"{bucket}/absent.jsonl"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://bucket/absent.jsonl", "no such file"),
        ("memory://bucket/absent-*.jsonl", "no such file"),
        ("memory://bucket/absent/", "no such file"),
        ("memory://bucket/notes.txt", "the format is told by the extension"),
        ("memory://bucket/torn.parquet", "not a readable Parquet file"),
        ("memory://bucket/torn.jsonl.gz", "cannot be read to its end"),
        ("nonsense://bucket/a.jsonl", "nonsense"),
        ("file:///absent-folder/a.jsonl", "no such file"),
    ],
)
def test_what_cannot_be_read_is_one_line(bucket: str, url: str, message: str) -> None:
    """It names the URL."""
    for name in ("torn.parquet", "torn.jsonl.gz"):
        fsspec.filesystem("memory").pipe(f"/bucket/{name}", b"PAR1 cut")
    with pytest.raises(UsageError) as caught:
        open_input([url])
    assert url.rsplit("/", maxsplit=1)[-1] in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [("s3://b/a.jsonl", "s3fs", "s3"), ("gs://b/a.jsonl", "gcsfs", "gcs"), ("https://h/a.jsonl", "aiohttp", "http")],
)
def test_a_missing_driver_names_the_extra(url: str, module: str, extra: str) -> None:
    """In a process in which the driver cannot be imported, installed or not."""
    code = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from cbgen.data.readers import open_input\nfrom cbgen.errors import UsageError\n"
        f"try: open_input([{url!r}])\nexcept UsageError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{url}: the driver is not installed: pip install 'cbgen-llm[{extra}]'\n"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://u:secret@host/a.jsonl?signature=secret#x", "https://host/a.jsonl"),
        ("sftp://user:secret@host/a.jsonl", "sftp://host/a.jsonl"),
        ("hf://datasets/a/b@main/c.jsonl", "hf://datasets/a/b@main/c.jsonl"),
        ("s3://b/part-?.jsonl", "s3://b/part-?.jsonl"),
    ],
)
def test_no_secret_is_shown(url: str, shown: str) -> None:
    """Messages and the footer of the output hold no password and no signature."""
    assert without_secrets(url) == shown


def test_http(tmp_path: Path) -> None:
    """From a real server: a signed address is read; one that is not there is refused without its signature."""
    pytest.importorskip("aiohttp", reason="the extra http is not installed")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"x": 1}\n' * 1000))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        with open_input([f"{address}/a.jsonl.gz?signature=secret"]) as source:
            assert source.num_rows == 1000
            assert source.identity[0][0] == f"{address}/a.jsonl.gz"
        with pytest.raises(UsageError, match="no such file") as caught:
            open_input([f"{address}/b.jsonl?signature=secret"])
        assert "secret" not in str(caught.value)
        server.shutdown()
