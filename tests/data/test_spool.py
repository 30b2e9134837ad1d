"""The standard input: copied to a temporary file, read as any file of its format, and deleted."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cbgen.data.readers import Input, open_input
from cbgen.errors import UsageError

LINES = b'{"x": "a"}\n\n{"x": "b"}\n'


def parquet() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"x": ["a", "b"]}), sink)
    return sink.getvalue().to_pybytes()


def zstd() -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(LINES)
    return sink.getvalue().to_pybytes()


FORMATS = {
    "JSONL": (lambda: LINES, "stdin, line 3"),
    "gzip": (lambda: gzip.compress(LINES), "stdin, line 3"),
    "zstd": (zstd, "stdin, line 3"),
    "Parquet": (parquet, "stdin, row 2"),
}
READ = """
import json, sys, tempfile
from pathlib import Path
from cbgen.data.readers import open_input
from cbgen.errors import CbgenError

tempfile.tempdir = sys.argv[1]
try:
    with open_input(json.loads(sys.argv[2])) as source:
        seen = {
            "rows": [[row.values.get("x"), row.error] for row in source.rows(["x"])],
            "records": list(source.records()),
            "tables": [row for table in source.tables() for row in table.to_pylist()],
            "identity": source.identity,
            "size_bytes": source.size_bytes,
            "last": source.place_of(source.num_rows - 1) if source.num_rows else None,
            "copies": len(list(Path(sys.argv[1]).rglob("*.*"))),
        }
    seen["left"] = [str(path) for path in Path(sys.argv[1]).iterdir()]
    print(json.dumps(seen))
except CbgenError as error:
    print(json.dumps({"error": str(error), "left": [str(path) for path in Path(sys.argv[1]).iterdir()]}))
"""


def read_stdin(folder: Path, content: bytes, *sources: str) -> dict:
    """What a process sees of the content that it is given through a pipe."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-c", READ, str(folder), json.dumps(sources or ("-",))]
    done = subprocess.run(command, input=content, capture_output=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(("make", "last"), FORMATS.values(), ids=FORMATS)
def test_the_format_is_told_by_the_first_bytes(tmp_path: Path, make: Callable[[], bytes], last: str) -> None:
    """It can be read several times, is called stdin, and its copy is gone after close()."""
    seen = read_stdin(tmp_path / "temporary", make())
    assert seen["rows"] == [["a", None], ["b", None]]
    assert seen["records"] == seen["tables"] == [{"x": "a"}, {"x": "b"}]
    assert seen["last"] == last
    assert seen["size_bytes"] == len(make())
    assert seen["copies"] == 1
    assert seen["left"] == []


def test_identity_is_that_of_the_content(tmp_path: Path) -> None:
    """The same bytes give the same identity in another process and another folder; one other byte another."""
    first = read_stdin(tmp_path / "a", LINES)["identity"]
    assert first == read_stdin(tmp_path / "b", LINES)["identity"]
    assert first[0][:2] == ["-", len(LINES)]
    assert first != read_stdin(tmp_path / "c", LINES.replace(b"b", b"c"))["identity"]


def test_stdin_stands_among_other_sources(tmp_path: Path) -> None:
    """In the place it was given."""
    for name in "pq":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"x": name}))
    seen = read_stdin(tmp_path / "t", LINES, str(tmp_path / "p.jsonl"), "-", str(tmp_path / "q.jsonl"))
    assert [x for x, _ in seen["rows"]] == ["p", "a", "b", "q"]


def test_an_error_names_stdin_and_the_line(tmp_path: Path) -> None:
    """Not the temporary file."""
    seen = read_stdin(tmp_path / "t", LINES + b"{torn")
    assert seen["rows"][2][1].startswith("stdin, line 4: not valid JSON")


def test_nothing_on_stdin_is_no_row(tmp_path: Path) -> None:
    """As an empty JSONL file is."""
    assert read_stdin(tmp_path / "t", b"")["rows"] == []


@pytest.mark.parametrize("content", [b"PAR1 cut", gzip.compress(LINES)[:-3], zstd()[:-3]], ids=["PAR1", "gzip", "zstd"])
def test_a_broken_stdin_is_refused_and_its_copy_deleted(tmp_path: Path, content: bytes) -> None:
    """In one line that says stdin."""
    seen = read_stdin(tmp_path / "t", content)
    assert seen["error"].startswith("stdin: ")
    assert seen["left"] == []


def test_a_later_source_that_is_missing_leaves_no_copy(tmp_path: Path) -> None:
    """The copy is deleted when opening fails for another reason."""
    seen = read_stdin(tmp_path / "t", LINES, "-", str(tmp_path / "absent.jsonl"))
    assert "absent.jsonl" in seen["error"]
    assert seen["left"] == []


def test_stdin_twice_is_refused() -> None:
    """It can be read once only."""
    with pytest.raises(UsageError, match="give it once"):
        open_input(["-", "-"])


def test_a_folder_for_the_copy_that_is_not_there_is_named(tmp_path: Path) -> None:
    """The line says what to set."""
    command = [sys.executable, "-c", READ, str(tmp_path / "absent"), '["-"]']
    done = subprocess.run(command, input=LINES, capture_output=True, check=False)
    assert b"set TMPDIR" in done.stdout + done.stderr


def test_place_of_counts_over_all_files(tmp_path: Path) -> None:
    """Lines as the file has them, blank ones counted; rows from 1; whatever shard they are in."""
    (tmp_path / "a.jsonl").write_bytes(b'\n{"x": 1}\n\n\n{bad\n')
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "b.parquet")
    with open_input([str(tmp_path / "a.jsonl"), str(tmp_path / "b.parquet")]) as source:
        assert isinstance(source, Input)
        places = [source.place_of(index) for index in range(4)]
    assert places == ["a.jsonl, line 2", "a.jsonl, line 5", "b.parquet, row 1", "b.parquet, row 2"]


def test_a_named_pipe_is_read_once_and_copied(tmp_path: Path) -> None:
    """What a shell's <(command) stands for is read as the standard input is, and named as it was given."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["sh", "-c", f"cat > {pipe}"], stdin=subprocess.PIPE) as writer:
        assert writer.stdin is not None
        writer.stdin.write(gzip.compress(LINES))
        writer.stdin.close()
        with open_input([str(pipe)]) as source:
            assert [row.values["x"] for row in source.rows(["x"])] == ["a", "b"]
            assert source.place_of(1) == f"{pipe}, line 3"
            assert source.identity[0][0] == str(pipe)
