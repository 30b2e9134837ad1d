"""`--format openai-batch`: answers and failures of a batch, each in its file and in input order."""

import gzip
import json
import shutil
import signal
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from job_harness import REPOSITORY, SAMPLES, cbgen, read_rows, run_tiny, start_process, wait_for_parts, write_jsonl

from cbgen.data.openai_output import OpenAIBatchOutput
from cbgen.models.tiny_random import build_model, build_tokenizer

JOB = ("--model", "tiny-random", "--format", "openai-batch")
CHAT_URL, COMPLETIONS_URL = "/v1/chat/completions", "/v1/completions"


def chat(custom_id: Any, text: str = "hello", **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    body = {"model": "any", "messages": messages, "max_tokens": 8, **body}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT_URL, "body": body}


def completion(custom_id: str, prompt: Any = "hello", **body: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 8, **body}
    return {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS_URL, "body": body}


def run_batch(source: Path, out: Path, *options: object, code: int = 0) -> tuple[list[Any], list[Any]]:
    """The lines of both files."""
    answers = run_tiny(source, out, "--format", "openai-batch", *options, code=code)
    return answers, read_rows(out.with_suffix(".errors.jsonl"))


def text_of(line: dict[str, Any]) -> str:
    choice = line["response"]["body"]["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def without_time(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for line in lines:
        line["response"]["body"].pop("created")
    return lines


def refusal(source: object, out: object, *options: object, code: int = 2) -> str:
    result = cbgen("run", source, *JOB, "--out", out, *options)
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def test_answers_have_the_shape_of_openai(tmp_path: Path) -> None:
    """A chat.completion and a text_completion, whole, with the model as each request names it."""
    source = write_jsonl(tmp_path / "in.jsonl", [chat("a"), completion("b", [72, 105], temperature=0)])
    started = int(datetime.now(timezone.utc).timestamp())
    answers, errors = run_batch(source, tmp_path / "out.jsonl")
    assert errors == []
    for line, kind, prefix, model in zip(
        answers, ("chat.completion", "text_completion"), ("chatcmpl", "cmpl"), ("any", "tiny-random"), strict=True
    ):
        key = line["id"].removeprefix("batch_req_")
        assert len(bytes.fromhex(key)) == 16
        assert line["error"] is None
        assert (line["response"]["status_code"], line["response"]["request_id"]) == (200, key)
        body = line["response"]["body"]
        assert (body["id"], body["object"], body["model"]) == (f"{prefix}-{key}", kind, model)
        assert started <= body["created"] <= datetime.now(timezone.utc).timestamp()
        usage = body["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        (choice,) = body["choices"]
        assert (choice["index"], choice["logprobs"], choice["finish_reason"]) == (0, None, "length")
    assert [line["custom_id"] for line in answers] == ["a", "b"]
    first, second = (line["response"]["body"] for line in answers)
    assert first["choices"][0]["message"]["role"] == "assistant"
    assert isinstance(second["choices"][0]["text"], str)
    assert second["usage"] == {"prompt_tokens": 2, "completion_tokens": 8, "total_tokens": 10}


def test_answers_equal_those_of_plain_rows(tmp_path: Path) -> None:
    """In one batch, a chat goes through the template and a completion does not, as in jobs of one kind."""
    texts = [row["prompt"] for row in read_rows(SAMPLES / "questions.jsonl")[:6]]
    lines = [line for n, text in enumerate(texts) for line in (chat(f"c{n}", text), completion(f"p{n}", text))]
    answers, _ = run_batch(write_jsonl(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": text, "max_tokens": 8} for text in texts])
    chats = run_tiny(rows, tmp_path / "chat.jsonl", "--chat")
    plain = run_tiny(rows, tmp_path / "plain.jsonl")
    for got, expected in ((answers[::2], chats), (answers[1::2], plain)):
        assert [text_of(line) for line in got] == [row["completion"] for row in expected]
        usage = [line["response"]["body"]["usage"]["prompt_tokens"] for line in got]
        assert usage == [row["prompt_tokens"] for row in expected]
    assert [text_of(line) for line in answers[::2]] != [text_of(line) for line in answers[1::2]]


def test_bodies_override_the_command_line(tmp_path: Path) -> None:
    """max_tokens, temperature, seed and ignore_eos of a body are its own; a sampled row is drawn by its seed."""
    lines = [
        completion("short", max_tokens=3),
        completion("default", max_tokens=None),
        completion("greedy", temperature=0),
        completion("drawn", temperature=1, seed=5),
        completion("drawn again", temperature=1, seed=5),
        completion("drawn otherwise", temperature=1, seed=6),
        chat("newer name", max_completion_tokens=2),
    ]
    options = ("--max-tokens", 11, "--temperature", 0.5, "--ignore-eos")
    answers, _ = run_batch(write_jsonl(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", *options)
    lengths = [line["response"]["body"]["usage"]["completion_tokens"] for line in answers]
    assert lengths == [3, 11, 8, 8, 8, 8, 2]
    texts = [text_of(line) for line in answers]
    assert texts[3] == texts[4] != texts[5]
    greedy, _ = run_batch(write_jsonl(tmp_path / "g.jsonl", [completion("g")]), tmp_path / "greedy.jsonl")
    assert texts[2] == text_of(greedy[0])


def test_bad_lines_go_to_the_error_file(tmp_path: Path) -> None:
    """Both files are in input order, together they have every line, and each failure says why; exit code 3."""
    bad: list[tuple[Any, str]] = [
        (chat("b0", stream=True), "stream is"),
        (completion("b1", ["a", "b"]), "list of 2 prompts"),
        (completion("b2", [72, 999]), "999"),
        (completion("b3", ""), "prompt is empty"),
        (completion("b4", 7), "a text is expected"),
        (chat("b5", temperature=-1), "temperature is -1"),
        (chat("b6", max_tokens=0), "max_tokens is 0"),
        (chat("b7", seed="x"), "seed is 'x'"),
        (chat("b8", messages="hello"), "a list of messages"),
        (chat("b9", messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "parts of type text"),
        (chat("b10", text="x" * 3000), "no room for output in the context of 2048"),
        ("{cut", "line 24: not valid JSON"),
        (chat(None), "line 26: custom_id is missing"),
    ]
    lines = []
    for number, (line, _) in enumerate(bad):
        lines += [chat(f"g{number}", str(number)), line]
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(text, encoding="utf-8")
    answers, errors = run_batch(source, out, code=3)
    assert [line["custom_id"] for line in answers] == [f"g{number}" for number in range(len(bad))]
    assert [line["custom_id"] for line in errors] == [f"b{number}" for number in range(11)] + [None, None]
    for line, (_, words) in zip(errors, bad, strict=True):
        assert line.keys() == {"id", "custom_id", "response", "error"}
        assert line["response"] is None
        assert line["error"]["code"] == "request_failed"
        assert words in line["error"]["message"]
    assert len({line["id"] for line in answers + errors}) == len(lines)
    footer = json.loads((tmp_path / "out.jsonl.job.json").read_text())
    assert footer["files"].keys() == {"out.jsonl", "out.errors.jsonl"}
    assert (footer["rows_ok"], footer["rows_failed"]) == (len(bad), len(bad))


def test_the_sample_batch(tmp_path: Path) -> None:
    """Its 12 lines give 10 answers and the 2 failures that the README of the samples names."""
    answers, errors = run_batch(SAMPLES / "openai_batch.jsonl", tmp_path / "out.jsonl", code=3)
    assert len(answers) == 10
    assert [line["custom_id"] for line in errors] == ["request-06", "request-09"]


def test_repeated_ids_are_refused(tmp_path: Path) -> None:
    """Answers are told apart by custom_id: both lines of one that is there twice are named."""
    lines = [chat("a"), chat("b"), completion("a")]
    told = refusal(write_jsonl(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    assert "'a' is there twice, at in.jsonl, line 1 and in.jsonl, line 3" in told
    assert not (tmp_path / "out.jsonl").exists()


def test_a_model_without_chat_template(tmp_path: Path) -> None:
    """Its chats are error rows, its completions are answered."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    for part in (tokenizer, build_model(torch.float32)):
        part.save_pretrained(tmp_path / "model")
    source = write_jsonl(tmp_path / "in.jsonl", [chat("a"), completion("b", [5, 6])])
    result = cbgen("run", source, *JOB[2:], "--model", tmp_path / "model", "--out", tmp_path / "out.jsonl")
    assert result.exit_code == 3, result.output
    assert [line["custom_id"] for line in read_rows(tmp_path / "out.jsonl")] == ["b"]
    (error,) = read_rows(tmp_path / "out.errors.jsonl")
    assert "no chat template" in error["error"]["message"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--n", 2), "--n:"),
        (("--id-column", "x"), "--id-column:"),
        (("--prompt-column", "x"), "--prompt-column:"),
        (("--messages-column", "x"), "--messages-column:"),
        (("--template", "x"), "--template:"),
        (("--system-prompt", "x"), "--system-prompt:"),
        (("--output-prefix", "x"), "--output-prefix:"),
        (("--output-token-ids",), "--output-token-ids:"),
        (("--row-options", "none"), "--row-options:"),
        (("--dataset", "x"), "--dataset:"),
        (("--shard-index", 0, "--shard-count", 2), "shards"),
        (("--out", "out.parquet"), "one .jsonl file"),
        (("--out", "folder/"), "one .jsonl file"),
        (("--error-file", "out.jsonl"), "a file of its own"),
        (("--chat-template-kwargs", '{"messages": []}'), "messages is set by cbgen"),
    ],
)
def test_options_that_a_batch_leaves_no_place_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[object, ...], words: str
) -> None:
    """Each is refused by its name before anything is done."""
    source = write_jsonl(tmp_path / "in.jsonl", [chat("a")])
    monkeypatch.chdir(tmp_path)
    assert words in refusal(source, "out.jsonl", *options)
    assert list(tmp_path.iterdir()) == [source]


def test_chat_has_no_effect(tmp_path: Path) -> None:
    """--chat warns, since each line says itself whether it is a chat."""
    source = write_jsonl(tmp_path / "in.jsonl", [completion("a")])
    assert "warning: --chat has no effect" in refusal(source, tmp_path / "out.jsonl", "--chat", code=0)


def test_an_error_file_of_ones_own(tmp_path: Path) -> None:
    """--error-file may lie elsewhere, is written empty too, is part of the output, and is never overwritten unasked."""
    source = write_jsonl(tmp_path / "in.jsonl", [chat("a")])
    out, errors = tmp_path / "out.jsonl", tmp_path / "failed" / "e.jsonl"
    errors.parent.mkdir()
    errors.write_text("somebody's")
    job = (source, out, "--error-file", errors)
    assert "is not a finished output" in refusal(*job, code=4)
    errors.unlink()
    refusal(*job, code=0)
    assert errors.read_text() == ""
    assert not (tmp_path / "out.errors.jsonl").exists()
    assert "out.jsonl is complete: 1 rows ok" in refusal(*job, code=0)
    assert "was finished with the error file failed/e.jsonl" in refusal(source, out, code=4)
    errors.unlink()
    assert "is not a finished output" in refusal(*job, code=4)


def test_an_empty_error_file_replaces_an_old_one(tmp_path: Path) -> None:
    """What failed in an earlier run of the same name is not taken for this one's."""
    source, out = write_jsonl(tmp_path / "in.jsonl", [chat("a", stream=True), chat("b")]), tmp_path / "out.jsonl"
    assert len(run_batch(source, out, code=3)[1]) == 1
    write_jsonl(source, [chat("a"), chat("b")])
    answers, errors = run_batch(source, out, "--resume", "never")
    assert (len(answers), errors) == (2, [])


def batch_of(count: int) -> list[dict[str, Any]]:
    """Chats and completions in turn, every seventh line bad."""
    lines = []
    for number in range(count):
        extra = {"stream": True} if number % 7 == 3 else {"temperature": 0.8}
        make = chat if number % 2 else completion
        lines.append(make(f"r{number}", f"Question {number}?", max_tokens=24, **extra))
    return lines


def test_killed_and_continued(tmp_path: Path) -> None:
    """kill -9 in the middle, then the same command: both files equal those of an uninterrupted run."""
    source, out = tmp_path / "in.jsonl.gz", tmp_path / "out.jsonl"
    text = "".join(json.dumps(line) + "\n" for line in batch_of(120))
    source.write_bytes(gzip.compress(text.encode()))
    slowly = ("--max-requests-per-batch", 4, "--part-rows", 5, "--part-interval", 0.2)
    process = start_process("run", source, *JOB, "--out", out, *slowly)
    wait_for_parts(process, tmp_path / "out.jsonl.parts", 3)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.communicate()
    assert not out.exists()
    continued = cbgen("run", source, *JOB, "--out", out)
    assert continued.exit_code == 3, continued.output
    assert "results are there already" in continued.output
    answers, errors = read_rows(out), read_rows(tmp_path / "out.errors.jsonl")
    assert len(answers) + len(errors) == 120
    assert [line["custom_id"] for line in errors] == [f"r{number}" for number in range(120) if number % 7 == 3]
    whole, whole_errors = run_batch(source, tmp_path / "whole.jsonl", code=3)
    assert without_time(answers) == without_time(whole)
    assert errors == whole_errors


def test_stopped_between_its_two_files(tmp_path: Path) -> None:
    """A job that was killed after the answers were published, and before what failed was, publishes both again."""
    source, out = write_jsonl(tmp_path / "in.jsonl", batch_of(40)), tmp_path / "out.jsonl"
    process = start_process("run", source, *JOB, "--out", out, "--max-requests-per-batch", 4, "--part-rows", 5)
    wait_for_parts(process, tmp_path / "out.jsonl.parts", 2)
    process.kill()
    process.communicate()
    shutil.copytree(tmp_path / "out.jsonl.parts", tmp_path / "kept")
    answers, errors = run_batch(source, out, code=3)
    shutil.move(tmp_path / "kept", tmp_path / "out.jsonl.parts")
    (tmp_path / "out.errors.jsonl").unlink()
    (tmp_path / ".out.errors.jsonl.tmp-1").touch()
    again, errors_again = run_batch(source, out, code=3)
    assert (without_time(again), errors_again) == (without_time(answers), errors)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.jsonl",
        "out.errors.jsonl",
        "out.jsonl",
        "out.jsonl.job.json",
    ]


def test_a_finished_batch_goes_on(tmp_path: Path) -> None:
    """More lines after the end: the first answers stay as they were, the new one is answered; failures are retried."""
    source, out = write_jsonl(tmp_path / "in.jsonl", batch_of(5)), tmp_path / "out.jsonl"
    answers, errors = run_batch(source, out, code=3)
    assert "is complete: 4 rows ok, 1 failed" in refusal(source, out, code=3)
    before = out.read_bytes()
    write_jsonl(source, batch_of(6))
    more, same_errors = run_batch(source, out, code=3)
    assert out.read_bytes().startswith(before)
    assert more[: len(answers)] == answers
    assert len(more) == len(answers) + 1
    assert same_errors == errors
    assert run_batch(source, out, "--retry", "failed", code=3) == (more, errors)


def test_finished_rows_are_those_of_the_job(tmp_path: Path) -> None:
    """What the two files hold, read back: keys, texts, reasons and counts of every row."""
    source, out = write_jsonl(tmp_path / "in.jsonl", batch_of(9)), tmp_path / "out.jsonl"
    answers, errors = run_batch(source, out, code=3)
    rows = list(OpenAIBatchOutput(out, tmp_path / "out.errors.jsonl").finished_rows())
    assert ["batch_req_" + row.key.hex() for row in rows] == [line["id"] for line in answers + errors]
    good, bad = rows[: len(answers)], rows[len(answers) :]
    assert [row.completion for row in good] == [text_of(line) for line in answers]
    assert all((row.finish_reason, row.error, row.completion_tokens) == ("length", None, 24) for row in good)
    assert [(row.completion, row.error) for row in bad] == [(None, line["error"]["message"]) for line in errors]
    assert all(row.finish_reason == "error" for row in bad)


def test_standard_input(tmp_path: Path) -> None:
    """A batch that is piped in gives the same answers as its file."""
    out = tmp_path / "out.jsonl"
    process = start_process("run", "-", *JOB, "--out", out, under=["sh", "-c", 'exec "$@" < "$0"', SAMPLES_FILE])
    process.communicate()
    assert process.returncode == 3
    whole, _ = run_batch(SAMPLES / "openai_batch.jsonl", tmp_path / "whole.jsonl", code=3)
    assert without_time(read_rows(out)) == without_time(whole)


SAMPLES_FILE = str((SAMPLES / "openai_batch.jsonl").relative_to(REPOSITORY))
