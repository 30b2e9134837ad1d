"""The results of an OpenAI batch: answers in one file, failed requests in another, each in input order.

    results.jsonl           {"id": "batch_req_KEY", "custom_id": "a", "response": {"status_code": 200, ...},
                             "error": null}
    results.errors.jsonl    {"id": "batch_req_KEY", "custom_id": "b", "response": null,
                             "error": {"code": "request_failed", "message": ...}}
    results.jsonl.job.json  records the job, and both files

KEY is the row's key in hex. An error line is as OpenAI documents it for what failed by itself and not by HTTP, of which
there is none here: no response, and the reason in `error`.
"""

import glob
import json
import os
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from cbgen.data.assembly import Results, json_line, output_records
from cbgen.data.files import DiskPatience, check_writable, delete, publish
from cbgen.data.openai_batch import ID_COLUMN
from cbgen.data.outputs import JsonlOutput, publish_sidecar
from cbgen.data.rows import OutputLayout, OutputRow
from cbgen.data.selection import Selection
from cbgen.errors import OutputError, ResumeRefusedError, UsageError

ID_PREFIX = "batch_req_"
ERROR_CODE = "request_failed"


class OpenAIBatchOutput(JsonlOutput):
    """Two files that belong together, and beside the first another that records the job.

    The error file is there without a failure too, empty, so that none of an earlier run is taken for this one's.
    """

    def __init__(self, path: Path, error_file: Path):
        super().__init__(path)
        self.error_file = error_file

    @property
    def files(self) -> list[Path]:
        return [self.path, self.error_file]

    @property
    def new_files(self) -> list[Path]:
        return self.files

    def errors_in(self, layout: OutputLayout) -> str:
        return str(self.error_file)

    def refuse_foreign(self) -> None:
        super().refuse_foreign()
        mine = {os.path.relpath(path, self.sidecar.parent) for path in self.files}
        for name in sorted((self.read_footer() or {"files": {}})["files"].keys() - mine):
            raise ResumeRefusedError(
                f"{self.path}: was finished with the error file {name}, now it is {self.error_file}; give the same "
                "--error-file, or choose another --out"
            )

    def write(
        self, source: Selection, results: Results, layout: OutputLayout, footer: dict[str, Any], patience: DiskPatience
    ) -> None:
        check_writable(self.error_file.parent)
        self._delete_leftovers()
        model = footer["fingerprint"]["model"]

        def write(answers: Path, errors: Path) -> None:
            with open(answers, "w", encoding="utf-8") as ok, open(errors, "w", encoding="utf-8") as failed:
                count = 0
                for line in _lines(source, results, layout, model):
                    (ok if line["error"] is None else failed).write(json_line(line))
                    count += 1
            if count != source.num_rows:
                raise OutputError(
                    f"{self.path}: {count} rows were written of {source.num_rows}; the parts are kept, run it again"
                )
            publish_sidecar(self.sidecar, footer, {self.path: answers, self.error_file: errors})

        patience.run(
            lambda: publish(self.error_file, lambda errors: publish(self.path, lambda answers: write(answers, errors)))
        )

    def finished_rows(self) -> Iterator[OutputRow]:
        """The results as they were before they became lines: those of a job that goes on from them.

        Times are not in the lines, but for the second in which an answer was finished. Indices count from 0 in each
        file: they order the rows, and name none.
        """
        for path in self.files:
            with open(path, encoding="utf-8") as lines:
                for index, line in enumerate(lines):
                    yield _output_row(index, json.loads(line))

    def _delete_leftovers(self) -> None:
        """Of a run that was killed while it wrote the error file."""
        for path in self.error_file.parent.glob(f".{glob.escape(self.error_file.name)}.tmp-*"):
            delete(path)


def open_batch_output(path: Path, is_folder: bool, error_file: str | None) -> OpenAIBatchOutput:
    """Raises UsageError for names that the two files cannot have."""
    if is_folder or path.suffix != ".jsonl":
        raise UsageError(f"--out {path}: --format openai-batch writes one .jsonl file")
    errors = path.with_suffix(".errors.jsonl") if error_file is None else Path(error_file).expanduser()
    output = OpenAIBatchOutput(path, errors)
    if errors.resolve() in (path.resolve(), output.sidecar.resolve()) or errors.is_dir():
        raise UsageError(f"--error-file {errors}: give a file of its own for the failed requests")
    return output


def _lines(source: Selection, results: Results, layout: OutputLayout, model: str) -> Iterator[dict[str, Any]]:
    """One for each row, in input order. model: for requests that name none."""
    for place, (row,) in enumerate(output_records(source, results, layout)):
        (key,) = results.hex_keys(place, 1)
        line = {"id": ID_PREFIX + key, "custom_id": row.get(ID_COLUMN)}
        if row["error"] is not None:
            yield {**line, "response": None, "error": {"code": ERROR_CODE, "message": row["error"]}}
        else:
            response = {"status_code": 200, "request_id": key, "body": _body(key, row, model)}
            yield {**line, "response": response, "error": None}


def _body(key: str, row: dict[str, Any], model: str) -> dict[str, Any]:
    is_chat = row.get("messages") is not None
    text = row["completion"]
    content = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{key}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(row["finish_time"].timestamp()),
        "model": row.get("model", model),
        "choices": [{"index": 0, **content, "logprobs": None, "finish_reason": row["finish_reason"]}],
        "usage": {
            "prompt_tokens": row["prompt_tokens"],
            "completion_tokens": row["completion_tokens"],
            "total_tokens": row["prompt_tokens"] + row["completion_tokens"],
        },
    }


def _output_row(index: int, line: dict[str, Any]) -> OutputRow:
    body = {} if line["response"] is None else line["response"]["body"]
    choice: dict[str, Any] = body["choices"][0] if body else {"finish_reason": "error", "text": None}
    usage = body.get("usage", {})
    return OutputRow(
        key=bytes.fromhex(line["id"].removeprefix(ID_PREFIX)),
        index=index,
        sample_index=0,
        completion=choice["message"]["content"] if "message" in choice else choice["text"],
        finish_reason=choice["finish_reason"],
        error=None if line["error"] is None else line["error"]["message"],
        prompt_tokens=usage.get("prompt_tokens", 0),
        completion_tokens=usage.get("completion_tokens", 0),
        finish_time=datetime.fromtimestamp(body["created"], timezone.utc) if body else None,
    )
