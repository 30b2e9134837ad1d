"""Whether an output, or what a job has published so far, is sound: counts, order, schema, checksums."""

from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from cbgen.data.key_table import KeyTable, key_array, sample_keys
from cbgen.data.manifest import Manifest
from cbgen.data.openai_batch import ID_COLUMN, open_batch
from cbgen.data.outputs import JsonlOutput, Output, file_hash
from cbgen.data.published import FAILED, PublishedResults, statuses
from cbgen.data.readers import Input, open_input
from cbgen.data.rows import PART_SCHEMA, OutputLayout
from cbgen.errors import EXIT_DONE, EXIT_FATAL, EXIT_RESUMABLE, InputError, UsageError
from cbgen.finished_rows import (
    checked_tables,
    finished_layout,
    is_openai_batch,
    json_records,
    recorded_footer,
    sidecar_of,
)
from cbgen.status import COMPLETE, DAMAGED, NOT_STARTED, PartsReader, Situation, look
from cbgen.verify_batch import read_batch
from cbgen.verify_rows import RowChecks, difference_from_input, schema_problems, unchanged_paths


@dataclass
class Verdict:
    """What was found: a line for each check, and what is wrong. counts: output rows, `in` and what it is made of."""

    output: str
    state: str
    counts: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def check(self, name: str, problems: list[str], told: str) -> None:
        """told: what was looked at, for a check without problems."""
        self.lines += [f"PROBLEM: {name}: {problem}" for problem in problems] or [f"ok: {name}: {told}"]
        self.problems += [f"{name}: {problem}" for problem in problems]

    def note(self, name: str, told: str) -> None:
        self.lines.append(f"not checked: {name}: {told}")

    def as_json(self) -> dict[str, Any]:
        return {"output": self.output, "state": self.state, **self.counts, "problems": self.problems}

    @property
    def exit_code(self) -> int:
        if self.problems:
            return EXIT_FATAL
        return EXIT_DONE if self.state == COMPLETE else EXIT_RESUMABLE


def verify(out: str) -> Verdict:
    """Reads everything that a job has written. Raises UsageError where no job ever was."""
    while True:
        situation = look(out)
        if situation.state == NOT_STARTED:
            raise UsageError(f"{situation.output.path}: the job has published nothing yet")
        if situation.state in (COMPLETE, DAMAGED):
            return verify_finished(situation)
        try:
            return verify_parts(situation)
        except FileNotFoundError:
            continue  # the job has deleted its parts meanwhile: it is done, or begun anew


def verify_finished(situation: Situation) -> Verdict:
    output = situation.output
    verdict = Verdict(str(output.path), COMPLETE)
    try:
        footer = recorded_footer(output)
    except InputError as error:
        verdict.check("record of the job", [str(error)], "")
        return verdict
    if is_openai_batch(footer):
        _verify_batch(verdict, output, footer)
    else:
        _verify_table(verdict, output, footer)
    return verdict


def _verify_table(verdict: Verdict, output: Output, footer: dict[str, Any]) -> None:
    layout = finished_layout(footer)
    try:
        source, reason = open_input(unchanged_paths(footer["input"])), ""
    except UsageError as error:
        source, reason = None, str(error)
    rows = RowChecks(layout, footer["input_rows"])
    readable = _check_files(verdict, output, footer) & _check_rows(verdict, output, layout, source, rows)
    _count(verdict, footer, layout, source, rows)
    if source is None:
        verdict.note("order", f"the input cannot be compared: {reason}")
    elif not readable or not rows.are_placed:
        verdict.note("order", "the input cannot be compared with rows that cannot be read or placed")
    else:
        _compare(verdict, output, source, layout, rows, footer["input_rows"])


def _verify_batch(verdict: Verdict, output: Output, footer: dict[str, Any]) -> None:
    """The answers and the failed requests of an OpenAI batch, each in a file of its own."""
    answers, errors = (output.path.parent / name for name in footer["files"])
    if not _check_files(verdict, output, footer):
        return
    try:
        source, reason = open_batch(unchanged_paths(footer["input"]), None, answers, errors), ""
    except UsageError as error:
        source, reason = None, str(error)
    try:
        requests = [] if source is None else source.rows([ID_COLUMN, "n"])
        found = read_batch(answers, errors, requests, footer["input_rows"])
    except InputError as error:
        verdict.check("content", [str(error)], "")
        return
    verdict.check("content", found.problems, f"{found.num_ok} answers, {found.num_failed} failed requests")
    rows = RowChecks(OutputLayout(), 0)
    rows.num_rows, rows.num_failed = found.num_ok + found.num_failed, found.num_failed
    # A request is one line, however many samples it has; where it has several, those are not counted.
    rows.has_unknown = footer["rows_total"] != footer["input_rows"]
    _count(verdict, {**footer, "rows_total": footer["input_rows"]}, OutputLayout(), source, rows)
    if source is None:
        verdict.note("order", f"the input cannot be compared: {reason}")
    else:
        told = f"{footer['input_rows']} of the input's {source.num_rows} requests are there, in order and once"
        verdict.check("order", found.out_of_order, told)


def _check_files(verdict: Verdict, output: Output, footer: dict[str, Any]) -> bool:
    """Against the sidecar, where there is one. Returns whether all files are there."""
    sidecar = sidecar_of(output)
    if sidecar is None:
        return True
    problems, complete = [], True
    for name, (size_bytes, digest) in footer["files"].items():
        path = sidecar.parent / name
        if not path.is_file():
            problems.append(f"{path} is missing")
            complete = False
        elif path.stat().st_size != size_bytes:
            problems.append(f"{path} has {path.stat().st_size} bytes, {size_bytes} are recorded")
        elif file_hash(path) != digest:
            problems.append(f"{path} is not what was written: its hash is another")
    strangers = [path for path in output.files if path.name not in footer["files"]]
    problems += [f"{path} is none of the job's" for path in strangers]
    verdict.check("files", problems, f"{len(footer['files'])}, with the sizes and hashes recorded")
    return complete and not strangers


def _check_rows(verdict: Verdict, output: Output, layout: OutputLayout, source: Input | None, rows: RowChecks) -> bool:
    """Reads all files whole. Returns whether that was possible, and their columns are those expected."""
    unreadable: list[str] = []
    schema: list[str] = []
    paths = [path for path in output.files if path.is_file()]
    for path in paths:
        try:
            if isinstance(output, JsonlOutput):
                _read_records(path, rows)
            else:
                schema = schema or schema_problems([paths[0], path], layout, source)
                _read_tables(path, rows, is_known=not schema)
        except InputError as error:
            unreadable.append(str(error))
    schema += [rows.problems.pop("columns")] if "columns" in rows.problems else []
    told = "JSON objects" if isinstance(output, JsonlOutput) else "each page with its checksum"
    verdict.check("content", unreadable, f"{rows.num_rows} rows read, {told}")
    verdict.check("schema", schema, "the input's columns, then the output's, with their types")
    kinds = "row_index ascends, " if layout.is_shard else ""
    verdict.check("rows", list(rows.problems.values()), f"{kinds}each has its samples, and a reason to have finished")
    return not unreadable and not schema


def _read_records(path: Path, rows: RowChecks) -> None:
    records = json_records(path)
    while batch := list(islice(records, rows.records_at_once)):
        rows.add_records(batch)


def _read_tables(path: Path, rows: RowChecks, is_known: bool) -> None:
    """is_known: whether the columns are those that rows have."""
    for table in checked_tables(path):
        if is_known:
            rows.add(table)
        else:
            rows.add_unknown(table.num_rows)


def _count(
    verdict: Verdict, footer: dict[str, Any], layout: OutputLayout, source: Input | None, rows: RowChecks
) -> None:
    """Rows in are rows ok, failed, skipped and pending; and as many are recorded. Where samples vary, an input row that
    was skipped counts 1."""
    num_ok, source_rows = rows.num_rows - rows.num_failed, footer["input_rows"] if source is None else source.num_rows
    if layout.num_samples is None:
        covered = footer["rows_total"]
        skipped = source_rows - (rows.samples(0).num_rows if layout.is_shard else footer["input_rows"])
    else:
        covered = footer["rows_total"] if layout.is_shard else footer["input_rows"] * layout.num_samples
        skipped = source_rows * layout.num_samples - covered
    num_in = covered + skipped
    parts = {"ok": num_ok, "failed": rows.num_failed, "skipped": skipped, "pending": 0}
    verdict.counts = {"in": num_in, **parts}
    told = f"{num_in} in = " + " + ".join(f"{number} {name}" for name, number in parts.items())
    found = {"rows_total": rows.num_rows}
    if not rows.has_unknown:
        found |= {"rows_ok": num_ok, "rows_failed": rows.num_failed}
    problems = [
        f"{name} is {number}, {footer[name]} is recorded" for name, number in found.items() if number != footer[name]
    ]
    if num_in != sum(parts.values()):
        problems.append(f"the sum is wrong: {told}")
    verdict.check("counts", problems, told)


def _compare(
    verdict: Verdict, output: Output, source: Input, layout: OutputLayout, rows: RowChecks, num_input_rows: int
) -> None:
    """Against the input, read again: that proves order, and that no row is missing or doubled."""
    is_mine = np.zeros(source.num_rows, dtype=bool)
    is_mine[:num_input_rows] = True if rows.is_mine is None else rows.is_mine[: source.num_rows]
    covered = int(np.count_nonzero(is_mine))
    try:
        difference = difference_from_input(output, source, layout, is_mine, rows.samples(covered))
    except InputError as error:
        verdict.note("order", f"the input cannot be compared: {error}")
        return
    told = f"{covered} of the input's {source.num_rows} rows are there, each at its place and once"
    verdict.check("order", [] if difference is None else [difference], told)


def verify_parts(situation: Situation) -> Verdict:
    """Of a job that is not finished. Raises FileNotFoundError when it finishes meanwhile."""
    folder, manifest = situation.folder, situation.manifest
    verdict = Verdict(str(situation.output.path), situation.state)
    if manifest is None:
        faults = ["parts without a manifest"] if folder.part_paths() else []
        verdict.check("record of the job", faults, "none yet")
        return verdict
    verdict.check("parts", _part_problems(folder, manifest), f"{len(folder.told)}, each page with its checksum")
    done, num_failed = PublishedResults(folder, manifest.rows_total, manifest.retry).count()
    pending = max(0, manifest.rows_total - done)
    parts = {"ok": done - num_failed, "failed": num_failed, "skipped": 0, "pending": pending}
    verdict.counts = {"in": sum(parts.values()), **parts}
    about = ", about, before all rows are read" if manifest.is_estimate else ""
    told = " + ".join(f"{number} {name}" for name, number in parts.items())
    verdict.check("counts", [], f"{sum(parts.values())} in = {told}{about}")
    verdict.note("order", "the job is not finished; rows are put in order at its end")
    return verdict


def _part_problems(folder: PartsReader, manifest: Manifest) -> list[str]:
    problems = []
    generations = KeyTable(manifest.rows_total)  # in which one each sample was tried last
    for path, part in folder.parts():
        told = folder.told[-1]
        if not pq.read_schema(path).equals(PART_SCHEMA):
            problems.append(f"{path}: has not the columns of a part")
        num_failed = int(np.count_nonzero(statuses(part) == FAILED))
        if (told.get("rows"), told.get("failed")) != (part.num_rows, num_failed):
            problems.append(f"{path}: holds {part.num_rows} rows, {num_failed} failed, and says otherwise: {told}")
        keys = sample_keys(key_array(part["key"].to_pylist()), part["sample_index"].to_numpy())
        unique = np.unique(keys, axis=0)
        num_doubled = len(keys) - len(unique) + int(np.count_nonzero(generations.find(unique) == told["generation"]))
        if num_doubled:
            problems.append(f"{path}: {num_doubled} results are there twice")
        generations.put(unique, np.full(len(unique), told["generation"]))
    return problems + [f"{path}: is torn; its rows will run again" for path in folder.unreadable]
