"""The results of an OpenAI batch: answers in one file, failed requests in another, each in input order.

    results.jsonl           {"id": "batch_req_KEY", "custom_id": "a", "response": {"status_code": 200, ...},
                             "error": null}
    results.errors.jsonl    {"id": "batch_req_KEY", "custom_id": "b", "response": null,
                             "error": {"code": "request_failed", "message": ...}}
    results.jsonl.job.json  records the job, and both files

KEY is the row's key in hex. An error line is as OpenAI documents it for what failed by itself and not by HTTP, of which
there is none here: no response, and the reason in `error`. A request is answered with all its samples or not at all, so
that the job's record counts requests.

Beside what OpenAI has, and named as in vLLM: `stop_reason` and the message's `reasoning_content` in a choice,
`prompt_logprobs` in the body. A body has `clamped_max_tokens` and `truncated_prompt_tokens` where they say something.
"""

import glob
import json
import os
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa

from cbgen.data.assembly import Results, json_line, output_records
from cbgen.data.files import DiskPatience, check_writable, delete, publish
from cbgen.data.openai_batch import ID_COLUMN
from cbgen.data.openai_choices import choice_of, prompt_logprobs_of, sample_of, tokens_of_prompt
from cbgen.data.outputs import JsonlOutput, publish_sidecar
from cbgen.data.rows import TOKEN_LOGPROB, OutputLayout, OutputRow
from cbgen.data.selection import Selection
from cbgen.errors import OutputError, ResumeRefusedError, UsageError

ID_PREFIX = "batch_req_"
ERROR_CODE = "request_failed"
# What answers are made of, of the columns that not every output has; and what keeps all of them apart from the columns
# of the requests, of which some have the same names.
RESULT_COLUMNS = ("stop_reason", "reasoning", "completion_logprobs", "prompt_token_logprobs")
RESULT_PREFIX = "result_"


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
                num_ok, num_failed = 0, 0
                for line in _lines(source, results, layout, model):
                    is_ok = line["error"] is None
                    (ok if is_ok else failed).write(json_line(line))
                    num_ok, num_failed = num_ok + is_ok, num_failed + (not is_ok)
            count = num_ok + num_failed
            if count != source.num_rows:
                raise OutputError(
                    f"{self.path}: {count} rows were written of {source.num_rows}; the parts are kept, run it again"
                )
            counts = {"rows_total": count, "rows_ok": num_ok, "rows_failed": num_failed}
            publish_sidecar(self.sidecar, {**footer, **counts}, {self.path: answers, self.error_file: errors})

        patience.run(
            lambda: publish(self.error_file, lambda errors: publish(self.path, lambda answers: write(answers, errors)))
        )

    def finished_rows(self) -> Iterator[OutputRow]:
        """The results as they were before they became lines: those of a job that goes on from them.

        Times are not in the lines, but for the second in which an answer was finished; all tokens of an answer count as
        those of its first sample, which also has all that is said of the prompt. Of a failed request there is the first
        sample alone. Indices count from 0 in each file: they order the rows, and name none.
        """
        for path in self.files:
            with open(path, encoding="utf-8") as lines:
                for index, line in enumerate(lines):
                    yield from _output_rows(index, json.loads(line))

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
    for place, records in enumerate(output_records(source, results, layout)):
        (key,) = results.hex_keys(place, 1)
        request = records[0]
        samples = [{name: record[layout.prefix + name] for name in layout.columns} for record in records]
        line = {"id": ID_PREFIX + key, "custom_id": request.get(ID_COLUMN)}
        reason = next((sample["error"] for sample in samples if sample["error"] is not None), None)
        if reason is not None:
            yield {**line, "response": None, "error": {"code": ERROR_CODE, "message": reason}}
        else:
            body = _body(key, request.get("model", model), request.get("messages") is not None, samples)
            yield {**line, "response": {"status_code": 200, "request_id": key, "body": body}, "error": None}


def _body(key: str, model: str, is_chat: bool, samples: list[dict[str, Any]]) -> dict[str, Any]:
    first = samples[0]
    num_generated = sum(sample["completion_tokens"] for sample in samples)
    told = {name: first[name] for name in ("clamped_max_tokens", "truncated_prompt_tokens") if first.get(name)}
    if first["prompt_token_logprobs"] is not None:
        told["prompt_logprobs"] = prompt_logprobs_of(first["prompt_token_logprobs"])
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{key}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(max(sample["finish_time"] for sample in samples).timestamp()),
        "model": model,
        "choices": [choice_of(index, sample, is_chat) for index, sample in enumerate(samples)],
        "usage": {
            "prompt_tokens": first["prompt_tokens"],
            "completion_tokens": num_generated,
            "total_tokens": first["prompt_tokens"] + num_generated,
        },
        **told,
    }


def _output_rows(index: int, line: dict[str, Any]) -> Iterator[OutputRow]:
    key = bytes.fromhex(line["id"].removeprefix(ID_PREFIX))
    if line["error"] is not None:
        yield OutputRow(key, index, 0, None, "error", line["error"]["message"])
        return
    body = line["response"]["body"]
    finished = datetime.fromtimestamp(body["created"], timezone.utc)
    of_the_prompt = {name: body[name] for name in ("clamped_max_tokens", "truncated_prompt_tokens") if name in body}
    if "prompt_logprobs" in body:
        of_the_prompt["prompt_token_logprobs"] = pa.array(tokens_of_prompt(body["prompt_logprobs"]), TOKEN_LOGPROB)
    for number, choice in enumerate(body["choices"]):
        sample = sample_of(choice)
        if sample["completion_logprobs"] is not None:
            sample["completion_logprobs"] = pa.array(sample["completion_logprobs"], TOKEN_LOGPROB)
        if number == 0:
            sample |= of_the_prompt | {"completion_tokens": body["usage"]["completion_tokens"]}
        yield OutputRow(
            key=key,
            index=index,
            sample_index=choice["index"],
            error=None,
            prompt_tokens=body["usage"]["prompt_tokens"],
            finish_time=finished,
            **sample,
        )
