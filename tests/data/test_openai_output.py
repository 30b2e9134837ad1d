"""Answers of an OpenAI batch made of results, and results of answers: every field, and the same bytes once more."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from job_harness import write_jsonl
from parts_harness import FOOTER, NOON, at_once, key, keys, ok, publish_parts

from cbgen.data.assembly import Results
from cbgen.data.manifest import Manifest, PartsFolder
from cbgen.data.openai_batch import open_batch
from cbgen.data.openai_output import RESULT_COLUMNS, RESULT_PREFIX, OpenAIBatchOutput
from cbgen.data.rows import TOKEN_LOGPROB, OutputLayout, OutputRow
from cbgen.data.selection import Selection

OPTIONAL = frozenset([*RESULT_COLUMNS, "truncated_prompt_tokens"])
CHAT = {"url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "hello"}]}}
COMPLETION = {"url": "/v1/completions", "body": {"prompt": "hello", "model": "own"}}


def token(token_id: int, text: str, logprob: float | None, rank: int | None, *top: tuple[int, str, float]) -> Any:
    names = ("token_id", "token", "logprob")
    others = [dict(zip(names, other, strict=True)) for other in top]
    return {"token_id": token_id, "token": text, "logprob": logprob, "rank": rank, "top": others}


# Values that float32 holds as they are, so that they can be compared; one that it does not.
GENERATED = [
    token(5, "né", -0.25, 1, (5, "né", -0.25), (6, " o", -1.5)),
    token(7, "\ufffd", -2.5, 3, (8, "\ufffd", -0.1), (9, "x", float("-inf"))),
]
PROMPT = [
    token(1, "a", None, None),
    token(2, "b", -0.5, 1, (2, "b", -0.5), (3, "c", -1.0)),
    token(4, "d", -3.0, 9, (2, "b", -0.5), (3, "c", -1.0)),
    token(3, "c", -1.0, 2, (2, "b", -0.5), (3, "c", -1.0), (4, "d", -3.0)),
]


def logprobs(tokens: list[Any]) -> pa.Array:
    return pa.array(tokens, TOKEN_LOGPROB)


def sample(index: int, sample_index: int = 0, **columns: Any) -> OutputRow:
    """A row of 3 prompt tokens and 2 generated ones."""
    return replace(ok(index, sample_index), **columns)


@pytest.fixture
def batch(tmp_path: Path) -> Iterator["Batch"]:
    batch = Batch(tmp_path)
    yield batch
    batch.close()


class Batch:
    """A chat, a completion, and so on in turn, each with so many samples; their results are given by hand."""

    def __init__(self, path: Path):
        self._path = path
        self._folder = PartsFolder(path / "out.jsonl")
        self._folder.open(Manifest({}), "if-possible")
        self.output = OpenAIBatchOutput(path / "out.jsonl", path / "out.errors.jsonl")

    def close(self) -> None:
        self._folder.close()

    def write(self, count: int, num_samples: int, rows: list[OutputRow]) -> tuple[list[Any], list[Any]]:
        """The lines of both files, for these results of `count` requests."""
        requests = [{"custom_id": f"r{n}", "method": "POST", **(COMPLETION if n % 2 else CHAT)} for n in range(count)]
        source_path = write_jsonl(self._path / "in.jsonl", requests)
        self._folder.discard_parts()
        publish_parts(self._folder, rows)
        layout = OutputLayout(num_samples, OPTIONAL, RESULT_PREFIX)
        results = Results(self._folder, keys(count), num_samples)
        with open_batch([str(source_path)], None, self.output.path, self.output.error_file) as source:
            self.output.write(Selection(source), results, layout, FOOTER, at_once())
        answers, errors = ([json.loads(line) for line in path.read_text().splitlines()] for path in self.output.files)
        return answers, errors

    def bytes(self) -> list[bytes]:
        return [path.read_bytes() for path in self.output.files]


def bodies(answers: list[Any]) -> list[Any]:
    return [line["response"]["body"] for line in answers]


def test_samples_are_choices(batch: Batch) -> None:
    """Each with its index, text and reason; what was generated adds up, and the prompt counts once."""
    reasons = [{"finish_reason": "stop", "stop_reason": "END"}, {"finish_reason": "length"}, {}]
    rows = [sample(index, number, **reasons[number]) for index in range(2) for number in range(3)]
    answers, errors = batch.write(2, 3, rows)
    assert errors == []
    chat, completion = bodies(answers)
    for place, body in enumerate((chat, completion)):
        assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
        assert body.keys() == {"id", "object", "created", "model", "choices", "usage"}
        told = [(choice["index"], choice["finish_reason"], choice["stop_reason"]) for choice in body["choices"]]
        assert told == [(0, "stop", "END"), (1, "length", None), (2, "stop", None)]
        said = [choice.get("message", choice) for choice in body["choices"]]
        assert [text.get("content", text.get("text")) for text in said] == [f"{place}.{number}" for number in range(3)]
    assert all(choice["message"].keys() == {"role", "content"} for choice in chat["choices"])
    assert (chat["model"], completion["model"]) == ("smollm2", "own")


def test_the_last_sample_tells_when_an_answer_was_created(batch: Batch) -> None:
    """Samples finish at different times, and an answer is there with the last."""
    rows = [sample(0, number, finish_time=NOON.replace(minute=minute)) for number, minute in enumerate((5, 30, 7))]
    (body,) = bodies(batch.write(1, 3, rows)[0])
    assert body["created"] == int(NOON.replace(minute=30).timestamp())


def test_a_request_fails_as_a_whole(batch: Batch) -> None:
    """With the first reason that one of its samples gives; the record counts requests."""
    bad = [sample(1, n, completion=None, finish_reason="error", error=f"fault {n}") for n in (1, 2)]
    answers, errors = batch.write(2, 3, [*(sample(0, n) for n in range(3)), sample(1), *bad])
    assert [line["custom_id"] for line in answers] == ["r0"]
    assert errors == [
        {
            "id": f"batch_req_{key(1).hex()}",
            "custom_id": "r1",
            "response": None,
            "error": {"code": "request_failed", "message": "fault 1"},
        }
    ]
    footer = batch.output.read_footer()
    assert footer is not None
    assert [footer[name] for name in ("rows_total", "rows_ok", "rows_failed")] == [2, 1, 1]


def test_logprobs_of_a_chat(batch: Batch) -> None:
    """As OpenAI has them: bytes where they are known, alternatives, and a number in place of minus infinity."""
    (body,) = bodies(batch.write(1, 1, [sample(0, completion_logprobs=logprobs(GENERATED))])[0])
    first, second = body["choices"][0]["logprobs"]["content"]
    own = {"token": "né", "logprob": -0.25, "bytes": [110, 195, 169]}
    assert first == {**own, "top_logprobs": [own, {"token": " o", "logprob": -1.5, "bytes": [32, 111]}]}
    assert (second["token"], second["logprob"], second["bytes"]) == ("\ufffd", -2.5, None)
    assert second["top_logprobs"][1] == {"token": "x", "logprob": -9999.0, "bytes": [120]}


def test_logprobs_of_a_completion(batch: Batch) -> None:
    """Lists side by side; the token itself is among its alternatives, offsets count characters."""
    rows = [sample(0), sample(1, completion_logprobs=logprobs([*GENERATED, token(3, "c", -4.0, 5)]))]
    told = bodies(batch.write(2, 1, rows)[0])[1]["choices"][0]["logprobs"]
    assert told.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert told["tokens"] == ["né", "\ufffd", "c"]
    assert told["token_logprobs"] == [-0.25, -2.5, -4.0]
    assert told["top_logprobs"] == [{"né": -0.25, " o": -1.5}, {"\ufffd": -2.5, "x": -9999.0}, {"c": -4.0}]
    assert told["text_offset"] == [0, 2, 3]


def test_logprobs_of_the_prompt(batch: Batch) -> None:
    """As vLLM has them: by token id, the token itself first, with ranks; null for the first token."""
    (body,) = bodies(batch.write(1, 1, [sample(0, prompt_token_logprobs=logprobs(PROMPT))])[0])
    first, second, third, fourth = body["prompt_logprobs"]
    one = {"logprob": -0.5, "rank": 1, "decoded_token": "b"}
    two = {"logprob": -1.0, "rank": 2, "decoded_token": "c"}
    assert first is None
    assert list(second.items()) == [("2", one), ("3", two)]
    assert list(third.items()) == [("4", {"logprob": -3.0, "rank": 9, "decoded_token": "d"}), ("2", one), ("3", two)]
    assert list(fourth.items()) == [("3", two), ("2", one), ("4", {"logprob": -3.0, "rank": 3, "decoded_token": "d"})]


def test_what_else_is_told(batch: Batch) -> None:
    """Reasoning beside the text, and what the context took from prompt and output."""
    rows = [sample(index, reasoning="why", clamped_max_tokens=4, truncated_prompt_tokens=7) for index in range(2)]
    chat, completion = bodies(batch.write(2, 1, rows)[0])
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": "0.0", "reasoning_content": "why"}
    assert completion["choices"][0]["reasoning_content"] == "why"
    assert [(body["clamped_max_tokens"], body["truncated_prompt_tokens"]) for body in (chat, completion)] == [
        (4, 7)
    ] * 2


def test_answers_become_the_same_answers(batch: Batch) -> None:
    """Read back as results and written once more, both files are the same to the byte, whatever they tell."""
    everything: dict[str, Any] = {
        "stop_reason": "END",
        "reasoning": "why",
        "clamped_max_tokens": 4,
        "truncated_prompt_tokens": 7,
        "completion_logprobs": logprobs(GENERATED),
        "prompt_token_logprobs": logprobs(PROMPT),
    }
    rows = [sample(index, number, **everything) for index in range(2) for number in range(2)]
    rows += [sample(2, number, completion_logprobs=logprobs([])) for number in range(2)]
    rows += [sample(3, number, completion=None, finish_reason="error", error="fault") for number in range(2)]
    one = logprobs(PROMPT[:1])
    rows += [sample(index, number, prompt_token_logprobs=one) for index in (4, 5) for number in range(2)]
    batch.write(6, 2, rows)
    before = batch.bytes()
    again = list(batch.output.finished_rows())
    assert [(row.key, row.sample_index) for row in again] == [
        *((key(index), number) for index in (0, 1, 2, 4, 5) for number in range(2)),
        (key(3), 0),
    ]
    assert [row.prompt_tokens for row in again] == [3] * 10 + [0]
    assert sum(row.completion_tokens for row in again) == 20
    batch.write(6, 2, [*again, sample(3, 1)])
    assert batch.bytes() == before
