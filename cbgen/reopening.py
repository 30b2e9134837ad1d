"""A finished output made parts again, so that a job can go on from it: with more rows, or with some tried again.

Rows are recognised by what they ask for. A finished output holds every input column, so that its rows can be rendered
once more; that of one shard tells the keys.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from itertools import islice
from typing import Any

import pyarrow as pa

from cbgen.data.manifest import PartsFolder
from cbgen.data.readers import open_input
from cbgen.data.rows import NESTED_COLUMNS, TOKEN_LOGPROB, OutputLayout, OutputRow, PromptRow, lots_of
from cbgen.data.runs import checked_runs, new_run_path, write_run
from cbgen.data.writers import PartWriter
from cbgen.errors import OutputError, ResumeRefusedError
from cbgen.prompting import FailedPrompt, Prompter, RenderedPrompt
from cbgen.resolution import ResolvedJob
from cbgen.row_keys import RowKeys


def reopen(
    job: ResolvedJob, folder: PartsFolder, prompter: Prompter, writer: PartWriter, notify: Callable[[str], None]
) -> int:
    """Publishes the results of the finished output as parts of generation 0, and what its runs told; returns how many.

    Begins with an empty folder: of an import that was killed, or of a finished job's deletion, nothing is left.
    """
    if not job.output.exists:
        raise ResumeRefusedError(
            f"{job.output.path}: is gone, and its results were to be taken over; --resume never generates all anew"
        )
    folder.discard_parts()
    _take_over_runs(job, folder, notify)
    count, rows = 0, job.output.finished_rows() or _named_rows(job, prompter)
    for lot in lots_of(rows):
        writer.add(lot)
        count += len(lot)
    writer.flush()
    return count


def _take_over_runs(job: ResolvedJob, folder: PartsFolder, notify: Callable[[str], None]) -> None:
    """What they told is no result: one that cannot be written is warned about, and the job goes on."""
    folder.discard_runs()
    try:
        for run in checked_runs((job.output.read_footer() or {}).get("runs")):
            write_run(new_run_path(folder.path), run)
    except OutputError as error:
        notify(f"warning: how earlier runs went is not kept: {error}")


def _named_rows(job: ResolvedJob, prompter: Prompter) -> Iterator[OutputRow]:
    """The output's rows with the keys of the input's rows that they were made for."""
    layout, key, index = job.layout, b"", -1
    with open_input([str(path) for path in job.output.files]) as source:
        rows = source.rows([*job.columns, *layout.names])
        row_keys = RowKeys(source.num_rows // (layout.num_samples or 1))
        while batch := list(islice(rows, layout.rows_at_once)):
            results = [_result(layout, row) for row in batch]
            firsts = [row for row, result in zip(batch, results, strict=True) if result["sample_index"] == 0]
            if layout.is_shard:
                keys = iter([bytes.fromhex(row.values[layout.prefix + "row_key"]) for row in firsts])
            else:
                keys = iter(row_keys.of([_rendered(job, prompter, row) for row in firsts]))
            for result in results:
                if result["sample_index"] == 0:  # the samples of another row begin
                    key, index = next(keys), index + 1
                yield OutputRow(key=key, index=index, **result)


def _rendered(job: ResolvedJob, prompter: Prompter, row: PromptRow) -> RenderedPrompt | FailedPrompt:
    """As the input's row was. Of one that could not be read, only the error tells what it was."""
    was = PromptRow(row.index, {name: row.values.get(name) for name in job.columns})
    prompt = prompter.render(was)
    if isinstance(prompt, FailedPrompt):
        return prompter.render(replace(was, error=row.values.get(job.layout.prefix + "error")))
    return prompt


def _result(layout: OutputLayout, row: PromptRow) -> dict[str, Any]:
    """The columns of the result, as they were before they were written."""
    given = {name: _as_it_was(name, row.values.get(layout.prefix + name)) for name in layout.columns}
    return {"sample_index": 0} | given


def _as_it_was(column: str, value: Any) -> Any:
    """A value of a result as it was before it was written."""
    if column == "completion_ids":
        return value or []
    if column in ("arrival_time", "finish_time") and isinstance(value, str):  # in JSONL
        return datetime.fromisoformat(value)
    if column in NESTED_COLUMNS and value is not None:
        return pa.array(value, TOKEN_LOGPROB)
    return value
