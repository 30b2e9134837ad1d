"""What a job reads and writes: its shard, its output and its input, opened by format."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cbgen.data.hf_dataset import DatasetSource
from cbgen.data.openai_batch import ID_COLUMN, open_batch
from cbgen.data.openai_output import RESULT_PREFIX, open_batch_output
from cbgen.data.outputs import Output, open_output
from cbgen.data.readers import Input, open_input
from cbgen.data.rows import parts_path
from cbgen.errors import UsageError
from cbgen.jobspec import JobSpec, is_folder, option_name

OPENAI_BATCH = "openai-batch"
NOT_WITH_OPENAI_BATCH = (
    "dataset",
    "id_column",
    "prompt_column",
    "messages_column",
    "template",
    "system_prompt",
    "n",
    "output_token_ids",
    "output_prefix",
    "row_options",
)


@dataclass(frozen=True)
class JobFiles:
    """shard: (index, count), None without shards. spec: the job's, with the shard's number in its paths, and what the
    format decides."""

    spec: JobSpec
    shard: tuple[int, int] | None
    output: Output
    source: Input


def open_job_files(spec: JobSpec) -> JobFiles:
    """Raises UsageError for what is missing, or does not go together. `source` is to be closed."""
    shard = resolve_shard(spec.shard_index, spec.shard_count, os.environ)
    number = "00000-of-00001" if shard is None else f"{shard[0]:05d}-of-{shard[1]:05d}"
    paths = {name: getattr(spec, name) for name in ("out", "summary", "report", "error_file")}
    named = {name: path and path.replace("{shard}", number) for name, path in paths.items()}
    spec = spec.model_copy(update=named)
    for name, path in (("summary", spec.summary_path), ("report", spec.report_path)):
        if path is not None and path.is_dir():
            raise UsageError(f"{option_name(name)} {path}: is a folder, a file is expected")
    files = _open_openai_batch(spec, shard) if spec.format == OPENAI_BATCH else _open_rows(spec, shard)
    try:
        _refuse_overwriting(files)
    except UsageError:
        files.source.close()
        raise
    return files


def _refuse_overwriting(files: JobFiles) -> None:
    """Raises UsageError where the figures or the page of a run would take the place of rows, or of each other."""
    taken = {path.resolve(): "--out" for path in (files.output.path, *files.output.new_files)}
    taken |= {Path(str(known[0])).resolve(): "the input" for known in files.source.identity if known[0] != "limit"}
    within = [parts_path(files.output.path), *([files.output.path] if is_folder(files.spec.out) else [])]
    for option, path in (("--summary", files.spec.summary_path), ("--report", files.spec.report_path)):
        if path is None:
            continue
        there = path.resolve()
        if there in taken or any(folder.resolve() in there.parents for folder in within):
            raise UsageError(f"{option} {path}: would overwrite {taken.get(there, '--out')}; give another file")
        taken[there] = option


def _open_rows(spec: JobSpec, shard: tuple[int, int] | None) -> JobFiles:
    output = open_output(spec.output, is_folder(spec.out), spec.rows_per_shard)
    dataset = None if spec.dataset is None else DatasetSource(spec.dataset, spec.dataset_config, spec.split or "train")
    return JobFiles(spec, shard, output, open_input(spec.input, spec.limit, output.path, dataset))


def _open_openai_batch(spec: JobSpec, shard: tuple[int, int] | None) -> JobFiles:
    """The rows are named by their custom_id. Raises UsageError for options that such lines leave no place for."""
    for name in NOT_WITH_OPENAI_BATCH:
        if getattr(spec, name) != JobSpec.model_fields[name].default:
            raise UsageError(f"{option_name(name)}: not with --format {OPENAI_BATCH}, whose lines say what is wanted")
    if shard is not None:
        raise UsageError(f"--format {OPENAI_BATCH} cannot be dealt to shards yet: run it as one job")
    output = open_batch_output(spec.output, is_folder(spec.out), spec.error_file)
    source = open_batch(spec.input, spec.limit, output.path, output.error_file)
    decided = {"id_column": ID_COLUMN, "output_prefix": RESULT_PREFIX}
    return JobFiles(spec.model_copy(update=decided), shard, output, source)


def resolve_shard(index: int | None, count: int | None, environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Which shard of how many: as given, or as the tasks of a Slurm job array are numbered; None for a job of one.

    Raises UsageError for a shard that there is not.
    """
    if index is None and count is None:
        task, count_there, least, step = (
            int(value) if (value := environment.get(f"SLURM_ARRAY_TASK_{name}", "")).isdigit() else None
            for name in ("ID", "COUNT", "MIN", "STEP")
        )
        if task is None or count_there is None:
            return None
        index, count, told_by = (task - (least or 0)) // (step or 1), count_there, f"SLURM_ARRAY_TASK_ID {task}"
    elif index is None and count == 1:
        return None
    elif index is None or count is None:
        raise UsageError("--shard-index and --shard-count go together: which shard, and of how many")
    else:
        told_by = f"--shard-index {index}"
    if not 0 <= index < count:
        raise UsageError(f"{told_by}: is shard {index}, and {count} shards are 0 to {count - 1}; give --shard-index")
    return None if count == 1 else (index, count)


def free_disk_bytes(folder: Path) -> int:
    """Where the folder is, or will be."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    return shutil.disk_usage(there).free
