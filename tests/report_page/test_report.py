"""`cbgen report`: of outputs of every kind, finished or not, one page that needs nothing else."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_harness import SAMPLES, cbgen, read_rows, start_process, wait_for_parts, write_jsonl
from parts_harness import failed, key, ok, publish_parts
from report_page.report_harness import (
    FINGERPRINT,
    busy,
    data_of,
    failure,
    life,
    many_lives,
    run,
    write_finished,
    write_folder,
)

from cbgen.data.manifest import Manifest, PartsFolder
from cbgen.errors import UsageError
from cbgen.report_page.page import write_report
from cbgen.report_page.row_table import read_rows as read_row_table
from cbgen.report_page.wording import count, duration, percent, rate
from cbgen.status import look


def report_of(out: object, *options: object) -> str:
    result = cbgen("report", out, *options)
    assert result.exit_code == 0, result.output
    return Path(result.stdout.strip()).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl", "out/"])
def test_every_kind_of_output(tmp_path: Path, name: str) -> None:
    """The same rows from Parquet, JSONL and a folder: the page tells of each, and of why some failed."""
    options = ("--rows-per-shard", 6) if name == "out/" else ()
    out = f"{tmp_path}/{name}"
    result = cbgen("run", SAMPLES / "mixed.jsonl", "--model", "tiny-random", "--max-tokens", 8, "--out", out, *options)
    assert result.exit_code == 3
    page = report_of(out)
    data = data_of(page)
    assert (tmp_path / name.rstrip("/")).with_name(name.rstrip("/") + ".report.html").is_file()
    assert data["histograms"]["completion_tokens"]["n"] == 14
    rows = [bar[0] for bar in data["lives"]["bars"]]
    assert len(rows) == len(set(rows)) == 14
    assert "14 ok, 6 failed" in page
    assert "max_tokens is 0, at least 1 is expected" in page
    assert "Write a one-line slogan for a shop that repairs umbrellas." in page
    assert len(page) < 100_000


def test_an_openai_batch(tmp_path: Path) -> None:
    """Its lines tell no times of requests: the page says so, and shows the rest."""
    out = tmp_path / "results.jsonl"
    result = cbgen(
        "run", SAMPLES / "openai_batch.jsonl", "--model", "tiny-random", "--format", "openai-batch", "--out", out
    )
    assert result.exit_code in (0, 3), result.output
    page = report_of(out, "--out", tmp_path / "page.html")
    assert "No row became a request, or the output tells no times." in page
    assert (
        data_of(page)["histograms"]["completion_tokens"]["n"]
        == json.loads(out.with_name("results.jsonl.job.json").read_text())["rows_ok"]
    )


def test_a_job_that_was_killed(tmp_path: Path) -> None:
    """How far it came, by the parts that it published; rows are told by their keys. Its folder stays what it was."""
    rows = read_rows(SAMPLES / "questions.jsonl")
    source, out = write_jsonl(tmp_path / "in.jsonl", [row | {"n": n} for n in range(3) for row in rows]), "out.parquet"
    slowly = ("--max-requests-per-batch", 4, "--part-rows", 5, "--part-interval", 0.2, "--temperature", 0.8)
    process = start_process(
        "run", source, "--model", "tiny-random", "--out", tmp_path / out, "--max-tokens", 24, *slowly
    )
    parts = tmp_path / "out.parquet.parts"
    wait_for_parts(process, parts, 3)
    process.kill()
    process.communicate()
    before = {path.name: path.read_bytes() for path in parts.iterdir()}
    page = report_of(tmp_path / out)
    assert {path.name: path.read_bytes() for path in parts.iterdir()} == before
    done = sum(pq.read_metadata(path).num_rows for path in parts.glob("part-*"))
    assert f"{done} of 120 rows done" in " ".join(page.split())
    assert "stopped" in page
    keys = {name.hex()[:8] for path in parts.glob("part-*") for name in pq.read_table(path)["key"].to_pylist()}
    labels = re.findall(r'<p class="head"><b>(\w+)</b>', page)
    assert labels
    assert set(labels) <= keys


def test_of_several_results_of_a_row_one_counts(tmp_path: Path) -> None:
    """As when a job goes on: a later success replaces anything, a later failure only a failure."""
    folder = PartsFolder(tmp_path / "out.parquet")
    folder.lock()
    folder.write_manifest(Manifest({"model": "tiny-random", "format": "auto"}, rows_total=4))
    publish_parts(folder, [ok(0, text="a"), failed(1)], [failed(2), ok(3)])
    publish_parts(folder, [failed(0), ok(1), failed(2)], generation=1)
    folder.close()
    table = read_row_table(look(str(tmp_path / "out.parquet")))
    assert len(table.rows) == 4
    assert np.count_nonzero(table.is_failed) == 1
    page = report_of(tmp_path / "out.parquet")
    assert "3 ok, 1 failed" in page
    assert page.count("too long") == 1


def test_texts_of_rows_in_many_parts(tmp_path: Path) -> None:
    """Each row with its own key and text, also where most parts hold none of those that are shown."""
    folder = PartsFolder(tmp_path / "out.parquet")
    folder.lock()
    folder.write_manifest(Manifest({"model": "tiny-random", "format": "auto"}, rows_total=30))
    publish_parts(folder, *([ok(number, text=f"answer {number}.")] for number in range(30)))
    folder.close()
    page = report_of(tmp_path / "out.parquet")
    shown = re.findall(r"<b>(\w+)</b>.*?answer (\d+)\.</p>", page, re.DOTALL)
    assert len(shown) == 10
    assert all(label == key(int(number)).hex()[:8] for label, number in shown)


def test_an_output_without_runs_says_so(tmp_path: Path) -> None:
    """Rates come from the times of rows, and each chart that needs more is a line of text."""
    page = report_of(write_finished(tmp_path / "old.parquet", many_lives(40)))
    assert page.count("Not recorded") == 2
    assert "first arrival to last finish" in page
    assert data_of(page)["course"] is None


def test_runs_and_their_charts(tmp_path: Path) -> None:
    """What runs told becomes cards, charts and a table; what happened in a pause is nothing."""
    rows = many_lives(30) + many_lives(30, seed=1, start_s=90_000.0)
    runs = [run(0.0, 40, **busy(offloads=1.0)), run(90_000.0, 40, **busy()) | {"how": "stopped: SIGTERM"}]
    page = report_of(write_finished(tmp_path / "out.parquet", rows, runs))
    data = data_of(page)
    assert len(data["time"]["starts"]) == 2
    assert sum(end - start for start, end in zip(data["time"]["starts"], data["time"]["ends"], strict=True)) < 60
    assert sorted(data["course"]["events"]) == ["offloads"]
    assert data["course"]["cache"]["blocks"] == 64
    assert "stopped: SIGTERM" in page
    assert "in 2 runs" in page
    assert "and 3.00\u202fs loading" in report_of(write_finished(tmp_path / "one.parquet", rows, runs[:1]))


def test_hostile_texts_are_text(tmp_path: Path) -> None:
    """Nothing of a row ends an element or begins one, wherever it is shown."""
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>{{ 7 * 7 }}\u2028<!--"
    rows = [life(0.0, prompt=evil, completion=evil, finish_reason=evil), failure(evil + "e" * 10_000, evil)]
    page = report_of(write_finished(tmp_path / "out.parquet", rows, [run(0.0, 8, **busy()) | {"how": evil}]))
    assert page.count("<script") == 2
    assert "<img" not in page
    assert "{{ 7 * 7 }}" in page
    assert len(page) < 100_000


def test_size_and_memory_do_not_grow_with_rows(tmp_path: Path) -> None:
    """Many rows make a page of about the size that few make."""
    few = report_of(write_finished(tmp_path / "few.parquet", many_lives(1_000)))
    many = report_of(write_finished(tmp_path / "many.parquet", many_lives(20_000, slots=64)))
    assert len(many) < min(1.5 * len(few), 400_000)


def test_what_cannot_be_shown_is_told_in_a_line(tmp_path: Path) -> None:
    """Nothing there, a file of somebody else, a folder that does not exist."""
    result = cbgen("report", tmp_path / "none.parquet")
    assert (result.exit_code, "there is no such output" in result.output) == (2, True)
    (tmp_path / "other.parquet").write_bytes(b"PAR1 of somebody else")
    assert cbgen("report", tmp_path / "other.parquet").exit_code == 2
    out = write_finished(tmp_path / "out.parquet", [life(0.0)])
    result = cbgen("report", out, "--out", tmp_path / "nowhere" / "page.html")
    assert (result.exit_code, "cannot be written" in result.output) == (1, True)
    assert "parts" not in result.output


def test_a_folder_is_told_by_a_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From within, or with a slash at its end: the page lies beside it, and nothing in it."""
    out = write_folder(tmp_path / "out", [life(0.0, prompt="the only one")])
    monkeypatch.chdir(out)
    before = sorted(out.iterdir())
    assert "the only one" in report_of(".")
    assert sorted(out.iterdir()) == before
    page = tmp_path / "out.report.html"
    assert f"<title>{out.name} " in page.read_text(encoding="utf-8")
    page.unlink()
    report_of("../out/../out/")
    assert page.is_file()


@pytest.mark.parametrize("options", [("",), ("/",), ("out.parquet", "--out", ""), ("out.parquet", "--out", "folder")])
def test_names_that_name_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]) -> None:
    """One line each."""
    monkeypatch.chdir(tmp_path)
    write_finished(Path("out.parquet"), [life(0.0)])
    Path("folder").mkdir()
    result = cbgen("report", *options)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1), result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "out.parquet"]


def test_the_page_replaces_nothing_but_a_page(tmp_path: Path) -> None:
    """No file of the job, also by another name for it, none of anybody else, and nothing where each file counts."""
    out = write_finished(tmp_path / "out.parquet", [life(0.0)])
    folder = write_folder(tmp_path / "folder", [life(0.0)])
    (tmp_path / "link.html").symlink_to(out)
    (tmp_path / "notes.txt").write_text("of somebody")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for job, page in [
        (out, out),
        (out, tmp_path / "folder" / ".." / "out.parquet"),
        (out, tmp_path / "link.html"),
        (out, tmp_path / "notes.txt"),
        (out, tmp_path / "out.parquet.parts" / "page.html"),
        (folder, folder / "page.html"),
        (folder, folder / "_job.json"),
    ]:
        result = cbgen("report", job, "--out", page)
        assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1), result.output
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    page = tmp_path / "page.html"
    page.touch()
    for _ in range(2):
        assert report_of(out, "--out", page).startswith("<!doctype html>")


def test_a_run_does_not_replace_its_own_files(tmp_path: Path) -> None:
    """Where `--report` says so, whatever the files are."""
    out = tmp_path / "results.jsonl"
    source = SAMPLES / "openai_batch.jsonl"
    result = cbgen("run", source, "--model", "tiny-random", "--format", "openai-batch", "--limit", 2, "--out", out)
    assert result.exit_code in (0, 3), result.output
    for name in ("results.jsonl", "results.errors.jsonl", "results.jsonl.job.json"):
        with pytest.raises(UsageError, match="is a file of the job itself"):
            write_report(out, tmp_path / name, print)


EDITED: dict[str, dict[str, Any]] = {
    "options that are a text": {"config": "none", "versions": ["1"]},
    "an engine that is a text": {"config": {"engine": "none"}},
    "rows beyond measure": {"rows_total": 10**12},
    "rows that are a text": {"rows_total": "many", "rows_ok": None},
    "a column that is a number": {"fingerprint": FINGERPRINT | {"prompt_source": ["prompt"], "model": {"a": 1}}},
    "half of a character": {"config": {"order": "\ud800"}},
    "runs that are a text": {"runs": "none"},
    "runs of all kinds": {
        "runs": [7, {}, run(0.0, 4) | {"summary": {"elapsed_s": float("nan")}}, run(0.0, 4) | {"started": "then"}]
    },
}


@pytest.mark.parametrize("name", EDITED)
def test_an_edited_record(tmp_path: Path, name: str) -> None:
    """What is not of its kind is left out; the rows are all there."""
    page = report_of(write_finished(tmp_path / "out.parquet", [life(0.0), failure("why")], **EDITED[name]))
    assert "1 ok, 1 failed" in page


@pytest.mark.parametrize(
    "edited",
    [
        {"fingerprint": "none"},
        {"fingerprint": {"model": "tiny-random"}},
        {"fingerprint": FINGERPRINT | {"format": "openai-batch"}},
        {"columns": 7},
        {"columns": []},
    ],
)
def test_a_record_by_which_no_row_is_found(tmp_path: Path, edited: dict[str, Any]) -> None:
    """One line that says what was changed."""
    result = cbgen("report", write_finished(tmp_path / "out.parquet", [life(0.0)], **edited))
    assert (result.exit_code, "its record was changed" in result.stderr) == (1, True), result.output


def test_columns_of_another_type(tmp_path: Path) -> None:
    """As of an output that was written anew by hand."""
    out = write_finished(tmp_path / "out.parquet", [life(0.0)])
    table = pq.read_table(out)
    place = table.schema.get_field_index("prompt_tokens")
    pq.write_table(table.set_column(place, "prompt_tokens", pa.array(["many"])), out)
    result = cbgen("report", out)
    assert (result.exit_code, "holds results that cbgen did not write" in result.stderr) == (1, True), result.output


def test_rows_are_counted_from_0(tmp_path: Path) -> None:
    """As row_index does, and `cbgen status` too."""
    out = write_finished(tmp_path / "out.parquet", [life(0.0), failure("the second one")])
    page = report_of(out)
    assert [bar[0] for bar in data_of(page)["lives"]["bars"]] == [0]
    assert re.findall(r"<b>(row \d+)</b>", page) == ["row 0", "row 1"]
    shown = json.loads(cbgen("status", out, "--preview", 2, "--json").stdout)["preview"]
    assert [row["key"] for row in shown] == ["row 0", "row 1"]


def test_a_changed_jsonl_is_told_in_a_line(tmp_path: Path) -> None:
    """Text of the same size where a time stood."""
    out = tmp_path / "out.jsonl"
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}])
    assert cbgen("run", source, "--model", "tiny-random", "--max-tokens", 2, "--out", out).exit_code == 0
    text = out.read_text()
    out.write_text(re.sub(r'("arrival_time": ")\d{4}', r"\1year", text))
    assert len(out.read_text()) == len(text)
    result = cbgen("report", out)
    assert (result.exit_code, "holds results that cbgen did not write" in result.output) == (1, True)


def test_a_torn_part_is_told(tmp_path: Path) -> None:
    """It is left alone and left out; the caller hears of it."""
    folder = PartsFolder(tmp_path / "out.parquet")
    folder.lock()
    folder.write_manifest(Manifest({"model": "tiny-random", "format": "auto"}, rows_total=4))
    publish_parts(folder, [ok(0)], [ok(1)])
    folder.close()
    torn = folder.part_paths()[1]
    torn.write_bytes(torn.read_bytes()[:50])
    told: list[str] = []
    write_report(tmp_path / "out.parquet", tmp_path / "page.html", told.append)
    assert told == ["1 part cannot be read: left out of the report, and to be run again"]
    assert torn.exists()


def test_parts_that_are_no_files(tmp_path: Path) -> None:
    """A folder and a link that leads nowhere count as torn parts, for whoever looks: nobody waits for them."""
    folder = PartsFolder(tmp_path / "out.parquet")
    folder.lock()
    folder.write_manifest(Manifest({"model": "tiny-random", "format": "auto"}, rows_total=4))
    publish_parts(folder, [ok(0)], [failed(1)])
    folder.close()
    folder.part_path(7).mkdir()
    folder.part_path(8).symlink_to("nowhere")
    assert "1 ok, 1 failed" in report_of(tmp_path / "out.parquet")
    status = json.loads(cbgen("status", tmp_path / "out.parquet", "--preview", 5, "--json").stdout)
    assert (status["done"], status["unreadable_parts"], len(status["preview"])) == (2, 2, 2)
    verdict = cbgen("verify", tmp_path / "out.parquet")
    assert (verdict.exit_code, verdict.stdout.count("is torn")) == (1, 2)


def test_figures_are_worded() -> None:
    """In units that people read, never more digits than they need."""
    thin = "\u202f"
    assert duration(0.0123) == f"12{thin}ms"
    assert duration(59.97) == f"1{thin}min"
    assert duration(3599.9) == f"1{thin}h"
    assert duration(4 * 3600 + 61) == f"4{thin}h 1{thin}min"
    assert duration(86_399.9) == f"1{thin}d"
    assert duration(200_000) == f"2{thin}d 8{thin}h"
    assert duration(float("nan")) == "–"
    assert (count(1234567.4), rate(9.999), rate(0.123), rate(1234.5)) == ("1,234,567", "10.0", "0.12", "1,234")
    assert (percent(0.00002), percent(0.0412), percent(1.0)) == (f"<{thin}0.1{thin}%", f"4.1{thin}%", f"100{thin}%")
