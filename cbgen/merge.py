"""The outputs of all shards of a job as one output: what the job would have written without shards."""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cbgen.data.assembly import json_line
from cbgen.data.files import check_writable, publish
from cbgen.data.manifest import PartsFolder
from cbgen.data.outputs import (
    FOOTER_KEY,
    FolderOutput,
    JsonlOutput,
    Output,
    file_hash,
    open_output,
    publish_sidecar,
    write_parquet,
)
from cbgen.data.rows import OutputLayout, parts_path
from cbgen.data.runs import checked_runs, condensed
from cbgen.errors import (
    EXIT_DONE,
    EXIT_FAILED_ROWS,
    EXIT_TOO_MANY_FAILED,
    InputError,
    ResumeRefusedError,
    UsageError,
)
from cbgen.finished_rows import file_schema, finished_layout
from cbgen.jobspec import OUTPUT_SUFFIXES, is_folder
from cbgen.merge_rows import Shard, merged_records, merged_tables, samples_of, shard_names


@dataclass(frozen=True)
class Merged:
    """What came of it, in output rows."""

    path: Path
    num_shards: int
    rows_ok: int
    rows_failed: int

    @property
    def exit_code(self) -> int:
        """As of the run of a job."""
        if self.rows_failed and not self.rows_ok:
            return EXIT_TOO_MANY_FAILED
        return EXIT_FAILED_ROWS if self.rows_failed else EXIT_DONE

    def line(self) -> str:
        return f"{self.num_shards} shards are merged in {self.path}: {self.rows_ok} rows ok, {self.rows_failed} failed"


def merge_shards(paths: Sequence[str], out: str | None, rows_per_shard: int) -> Merged:
    """Writes `out`, a file or a folder with files of `rows_per_shard` rows, of all shards of one job.

    Raises UsageError for shards that do not make up a job, InputError for one whose rows are not what they were, and
    ResumeRefusedError for an output of another job. Memory holds a batch of each shard, and 12 bytes for each row if
    samples vary.
    """
    target = _open_target(out, rows_per_shard)
    shards = _open_shards(paths, target)
    footer = _merged_footer(shards)
    _refuse_other(target, footer)
    check_writable(target.path.parent)
    layout = finished_layout(shards[0].footer)
    if isinstance(target, JsonlOutput):
        _write_jsonl(target, shards, layout, footer)
    else:
        _write_parquet(target, shards, layout, footer)
    return Merged(target.path, len(shards), footer["rows_ok"], footer["rows_failed"])


def _open_target(out: str | None, rows_per_shard: int) -> Output:
    if out is None:
        raise UsageError("--out is missing")
    if not is_folder(out) and Path(out).suffix not in OUTPUT_SUFFIXES:
        known = ", ".join(OUTPUT_SUFFIXES)
        raise UsageError(f"--out: {out}: the format is told by the extension, one of {known}; a folder ends with /")
    if rows_per_shard < 1:
        raise UsageError("--rows-per-shard: must be 1 or more")
    return open_output(Path(out).expanduser(), is_folder(out), rows_per_shard)


def _open_shards(paths: Sequence[str], target: Output) -> list[Shard]:
    """In order of their index. Raises UsageError unless they are all shards of one finished job."""
    outputs = [open_output(Path(path).expanduser(), is_folder(path), rows_per_shard=1) for path in paths]
    footers = [None if PartsFolder(output.path).is_begun else output.read_footer() for output in outputs]
    unfinished = [str(output.path) for output, footer in zip(outputs, footers, strict=True) if footer is None]
    if unfinished:
        gone = [name for name in unfinished if not (Path(name).exists() or parts_path(Path(name)).exists())]
        if gone:
            raise UsageError(f"no such output: {', '.join(gone)}")
        raise UsageError(
            f"not the finished output of a job: {', '.join(unfinished)}; run the job of each to its end first"
        )
    shards = [_shard(output, footer) for output, footer in zip(outputs, footers, strict=True) if footer is not None]
    _refuse_foreign(shards)
    _refuse_incomplete(shards)
    for shard in shards:
        if isinstance(shard.output, JsonlOutput) != isinstance(target, JsonlOutput):
            raise UsageError(
                f"--out: {target.path}: {shard.output.path} is of another format; give --out its extension"
            )
    return sorted(shards, key=lambda shard: shard.index)


def _shard(output: Output, footer: dict[str, Any]) -> Shard:
    told = footer["fingerprint"]["shard"]
    if told is None:
        raise UsageError(f"{output.path}: is the output of a whole job, not of a shard")
    index, count = told.split(" of ")
    return Shard(output, footer, int(index), int(count))


def _refuse_foreign(shards: list[Shard]) -> None:
    first = shards[0]
    foreign = [
        f"{shard.output.path} ({', '.join(differing)})"
        for shard in shards[1:]
        if (differing := _differing(shard, first))
    ]
    if foreign:
        raise UsageError(f"not shards of the same job as {first.output.path}: {'; '.join(foreign)}")


def _differing(shard: Shard, other: Shard) -> list[str]:
    """What of the jobs that two shards are of is not the same, by name."""
    one, two = shard.footer["fingerprint"], other.footer["fingerprint"]
    names = [name for name in sorted(one.keys() | two.keys()) if name != "shard" and one.get(name) != two.get(name)]
    names += ["--shard-count"] if shard.count != other.count else []
    own = {"input": "the input files", "input_rows": "rows of the input", "columns": "output columns"}
    names += [told for key, told in own.items() if shard.footer[key] != other.footer[key]]
    if not names and not isinstance(shard.output, JsonlOutput) and not isinstance(other.output, JsonlOutput):
        schemas = [file_schema(path) for output in (other.output, shard.output) for path in output.files]
        names += [] if all(schema.equals(schemas[0]) for schema in schemas) else ["types of columns"]
    return names


def _refuse_incomplete(shards: list[Shard]) -> None:
    by_index: dict[int, list[str]] = {}
    for shard in shards:
        by_index.setdefault(shard.index, []).append(str(shard.output.path))
    count = shards[0].count
    missing = [str(index) for index in range(count) if index not in by_index]
    faults = [f"shard {index} is there twice: {', '.join(paths)}" for index, paths in by_index.items() if paths[1:]]
    faults += [f"of {count} shards (from 0) these are missing: {', '.join(missing)}"] if missing else []
    if faults:
        raise UsageError("; ".join(faults))


def _merged_footer(shards: list[Shard]) -> dict[str, Any]:
    """That of the job without shards; what may differ between shards is of the first."""
    footers = [shard.footer for shard in shards]
    layout, first = finished_layout(footers[0]), footers[0]
    num_rows = sum(footer["rows_total"] for footer in footers)
    expected = num_rows if layout.num_samples is None else first["input_rows"] * layout.num_samples
    if num_rows != expected:
        raise InputError(f"the shards record {num_rows} rows in all, and {expected} are those of the input")
    return {
        **{name: value for name, value in first.items() if name != "files"},
        "fingerprint": {**first["fingerprint"], "shard": None},
        "columns": [name for name in first["columns"] if name not in shard_names(layout)],
        "generation": max(footer["generation"] for footer in footers),
        **{name: sum(footer[name] for footer in footers) for name in ("rows_ok", "rows_failed")},
        "rows_total": num_rows,
        "config": {**first["config"], "shard": None},
        "runs": condensed(
            {**run, "shard": shard.index} for shard in shards for run in checked_runs(shard.footer.get("runs"))
        ),
    }


def _refuse_other(target: Output, footer: dict[str, Any]) -> None:
    """Raises ResumeRefusedError when something else than an earlier merge of these shards is in the way.

    One that was killed has left files that record it: a sidecar, or some files of a folder.
    """
    if PartsFolder(target.path).is_begun:
        raise ResumeRefusedError(f"{target.path}: a job that is not finished has begun it; choose another --out")
    recorded = _recorded_fingerprints(target) if target.exists else []
    if any(fingerprint != footer["fingerprint"] for fingerprint in recorded) or (target.exists and not recorded):
        raise ResumeRefusedError(f"{target.path}: is not a merge of these shards; move it or choose another --out")
    if isinstance(target, FolderOutput):
        target.refuse_foreign()


def _recorded_fingerprints(target: Output) -> list[dict[str, Any] | None]:
    """Of each file that is there, what it, or the sidecar, says of its job; None for one that says nothing."""
    files = [target.sidecar] if isinstance(target, JsonlOutput) else target.files
    return [_recorded_fingerprint(path) for path in files]


def _recorded_fingerprint(path: Path) -> dict[str, Any] | None:
    try:
        text = path.read_bytes() if path.suffix == ".json" else (pq.read_schema(path).metadata or {})[FOOTER_KEY]
        return json.loads(text)["fingerprint"]
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError):
        return None


def _write_parquet(target: Output, shards: list[Shard], layout: OutputLayout, footer: dict[str, Any]) -> None:
    dropped = shard_names(layout)
    schema = pq.read_schema(shards[0].output.files[0])
    told = {name: value for name, value in footer.items() if name != "runs" or not isinstance(target, FolderOutput)}
    metadata = {**schema.metadata, FOOTER_KEY: json.dumps(told, ensure_ascii=False).encode()}
    schema = pa.schema([field for field in schema if field.name not in dropped], metadata)
    samples = samples_of(shards, layout, footer)
    tables = (table.drop_columns(dropped) for table in merged_tables(shards, layout, samples))
    if isinstance(target, FolderOutput):
        paths = target.write_tables(schema, tables, samples)
        publish_sidecar(target.marker, footer, {path: path for path in paths})
    else:
        publish(target.path, functools.partial(write_parquet, schema=schema, tables=tables))


def _write_jsonl(target: JsonlOutput, shards: list[Shard], layout: OutputLayout, footer: dict[str, Any]) -> None:
    dropped = shard_names(layout)
    for shard in shards:
        for path in shard.output.files:
            if file_hash(path) != shard.footer["files"][path.name][1]:
                raise InputError(f"{path}: was changed after it was written; `cbgen verify` tells where")

    def write(path: Path) -> None:
        with open(path, "w", encoding="utf-8") as file:
            for record in merged_records(shards, layout, footer):
                file.write(json_line({name: value for name, value in record.items() if name not in dropped}))
        publish_sidecar(target.sidecar, footer, {target.path: path})

    publish(target.path, write)
