"""A finished output made parts again, so that a job can go on from it: with more rows, or with some tried again.

Rows are recognised by what they ask for. A finished output holds every input column, so that its rows can be rendered
once more; that of one shard tells the keys.
"""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from itertools import islice
from typing import Any

from cbgen.data.manifest import PartsFolder
from cbgen.data.readers import open_input
from cbgen.data.rows import RESULT_SCHEMA, OutputRow, PromptRow
from cbgen.data.writers import PartWriter
from cbgen.errors import ResumeRefusedError
from cbgen.prompting import FailedPrompt, Prompter, RenderedPrompt
from cbgen.resolution import ResolvedJob
from cbgen.row_keys import RowKeys

BATCH_ROWS = 1024


def reopen(job: ResolvedJob, folder: PartsFolder, prompter: Prompter, writer: PartWriter) -> int:
    """Publishes the results of the finished output as parts of generation 0; returns how many.

    Begins with an empty folder: of an import that was killed, or of a finished job's deletion, nothing is left.
    """
    if not job.output.exists:
        raise ResumeRefusedError(
            f"{job.output.path}: is gone, and its results were to be taken over; --resume never generates all anew"
        )
    folder.discard_parts()
    count, rows = 0, job.output.finished_rows() or _named_rows(job, prompter)
    while batch := list(islice(rows, BATCH_ROWS)):
        writer.add(batch)
        count += len(batch)
    writer.flush()
    return count


def _named_rows(job: ResolvedJob, prompter: Prompter) -> Iterator[OutputRow]:
    """The output's rows with the keys of the input's rows that they were made for."""
    samples = job.spec.n
    with open_input([str(path) for path in job.output.files]) as source:
        rows = source.rows([*job.columns, *job.layout.names])
        row_keys = RowKeys(source.num_rows // samples)
        while batch := list(islice(rows, BATCH_ROWS * samples)):
            firsts = batch[::samples]
            if job.layout.is_shard:
                keys = [bytes.fromhex(row.values[job.layout.prefix + "row_key"]) for row in firsts]
            else:
                keys = row_keys.of([_rendered(job, prompter, row) for row in firsts])
            yield from _results(job, batch, keys)


def _rendered(job: ResolvedJob, prompter: Prompter, row: PromptRow) -> RenderedPrompt | FailedPrompt:
    """As the input's row was. Of one that could not be read, only the error tells what it was."""
    was = PromptRow(row.index, {name: row.values.get(name) for name in job.columns})
    prompt = prompter.render(was)
    if isinstance(prompt, FailedPrompt):
        return prompter.render(replace(was, error=row.values.get(job.layout.prefix + "error")))
    return prompt


def _results(job: ResolvedJob, rows: list[PromptRow], keys: list[bytes]) -> Iterator[OutputRow]:
    for place, row in enumerate(rows):
        given: dict[str, Any] = {name: row.values.get(job.layout.prefix + name) for name in RESULT_SCHEMA.names}
        given["sample_index"] = place % job.spec.n
        given["completion_ids"] = given["completion_ids"] or []
        for name in ("arrival_time", "finish_time"):  # texts in JSONL
            given[name] = datetime.fromisoformat(given[name]) if isinstance(given[name], str) else given[name]
        yield OutputRow(key=keys[place // job.spec.n], index=row.index // job.spec.n, **given)
