"""`--format openai-batch`: what a request's parameters do to its answer, and answers that a later run takes over."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from job_harness import cbgen, read_rows, run_tiny, write_jsonl

from cbgen.data.outputs import file_hash
from cbgen.models.tiny_random import build_model, build_tokenizer

CHAT_URL, COMPLETIONS_URL = "/v1/chat/completions", "/v1/completions"
JOB = ("--format", "openai-batch")


def chat(custom_id: str, text: str = "hello", **body: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, **body}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT_URL, "body": body}


def completion(custom_id: str, prompt: Any = "hello", **body: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 8, **body}
    return {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS_URL, "body": body}


def answered(folder: Path, *lines: dict[str, Any]) -> list[dict[str, Any]]:
    """The bodies of the answers to these requests, none of which fails; the output is sound."""
    out = folder / "out.jsonl"
    answers = run_tiny(write_jsonl(folder / "in.jsonl", list(lines)), out, *JOB, "--resume", "never")
    verified = cbgen("verify", out)
    assert verified.exit_code == 0, verified.output
    return [line["response"]["body"] for line in answers]


def record_again(out: Path) -> None:
    """Makes the record tell of the answers as they are now."""
    record = out.with_name(out.name + ".job.json")
    footer = json.loads(record.read_text())
    footer["files"][out.name] = [out.stat().st_size, file_hash(out)]
    record.write_text(json.dumps(footer))


def text_of(choice: dict[str, Any]) -> str:
    return choice["message"]["content"] if "message" in choice else choice["text"]


def test_several_choices(tmp_path: Path) -> None:
    """As many as n says, drawn as the samples of a plain row with the same seed; beside requests of one choice."""
    options = {"temperature": 1, "seed": 5}
    lines = [completion("a", n=3, **options), chat("b"), chat("c", n=2, best_of=2), completion("d", n=1)]
    bodies = answered(tmp_path, *lines)
    assert [[choice["index"] for choice in body["choices"]] for body in bodies] == [[0, 1, 2], [0], [0, 1], [0]]
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "hello", "max_tokens": 8, **options}])
    plain = run_tiny(rows, tmp_path / "plain.jsonl", "--n", 3)
    assert [text_of(choice) for choice in bodies[0]["choices"]] == [row["completion"] for row in plain]
    assert bodies[0]["usage"]["completion_tokens"] == sum(row["completion_tokens"] for row in plain)
    assert bodies[0]["usage"]["prompt_tokens"] == plain[0]["prompt_tokens"]


def test_stop_texts(tmp_path: Path) -> None:
    """The text ends before the one that is found, or with it, and the answer says which it was."""
    (body,) = answered(tmp_path, completion("whole"))
    whole = text_of(body["choices"][0])
    end = next(text for text in whole[2:] if text not in whole[:2] and text != "\ufffd")
    kept_line = completion("kept", stop=end, include_stop_str_in_output=True)
    bodies = answered(tmp_path, completion("cut", stop=["never", end]), kept_line)
    cut, kept = (body["choices"][0] for body in bodies)
    assert (cut["finish_reason"], cut["stop_reason"]) == (kept["finish_reason"], kept["stop_reason"]) == ("stop", end)
    assert text_of(cut) == whole[: whole.index(end)]
    assert text_of(kept) == text_of(cut) + end


def test_forms(tmp_path: Path) -> None:
    """A response_format and each of vLLM's names: the text is what it may be."""
    words = ["yes", "no"]
    described = {"name": "answer", "schema": {"enum": words}}
    bodies = answered(
        tmp_path,
        chat("schema", response_format={"type": "json_schema", "json_schema": described}, max_tokens=20),
        completion("guided", guided_json={"enum": words}, max_tokens=20),
        chat("choice", guided_choice=words, max_tokens=20),
        completion("regex", structured_outputs={"regex": "yes|no"}, max_tokens=20),
    )
    texts = [text_of(body["choices"][0]) for body in bodies]
    assert all(json.loads(text) in words for text in texts[:2])
    assert all(text in words for text in texts[2:])


def test_logprobs(tmp_path: Path) -> None:
    """One entry for each token, with as many alternatives as the request asks for; of the prompt as well."""
    lines = [
        chat("chat", logprobs=True, top_logprobs=2),
        chat("none"),
        completion("completion", logprobs=1),
        completion("prompt", prompt_logprobs=1),
    ]
    first, none, second, prompt = answered(tmp_path, *lines)
    content = first["choices"][0]["logprobs"]["content"]
    assert len(content) == first["usage"]["completion_tokens"]
    assert all(len(token["top_logprobs"]) == 2 for token in content)
    assert none["choices"][0]["logprobs"] is None
    told = second["choices"][0]["logprobs"]
    assert {len(values) for values in told.values()} == {second["usage"]["completion_tokens"]}
    assert len(prompt["prompt_logprobs"]) == prompt["usage"]["prompt_tokens"]
    assert prompt["prompt_logprobs"][0] is None


def test_tools_reach_the_chat_template(tmp_path: Path) -> None:
    """A template that prints tools is given those of the request, unless tool_choice is none."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% for tool in tools or [] %}{{ tool['name'] }}{% endfor %}"
    for part in (tokenizer, build_model(torch.float32)):
        part.save_pretrained(tmp_path / "model")
    tools = [{"name": "measure"}]
    lines = [chat("given", tools=tools), chat("none", tools=tools, tool_choice="none"), chat("silent")]
    source, out = write_jsonl(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    result = cbgen("run", source, *JOB, "--model", tmp_path / "model", "--out", out)
    assert result.exit_code == 0, result.output
    lengths = [line["response"]["body"]["usage"]["prompt_tokens"] for line in read_rows(out)]
    assert [length - len("hello") for length in lengths] == [len("measure"), 0, 0]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (chat("a", n=0), "n is 0"),
        (chat("a", logprobs=True, top_logprobs=21), "logprobs is 21"),
        (completion("a", logprobs=True), "logprobs is True"),
        (completion("a", stop=""), "stop holds an empty text"),
        (completion("a", logit_bias={"999": 1}), "logit_bias names token 999"),
        (chat("a", response_format={"type": "json_schema"}), "response_format is"),
        (chat("a", guided_json={}), "json_schema is empty"),
        (chat("a", guided_regex="a", stop="b"), "an output that is cut short has no form"),
        (chat("a", tool_choice="required"), "tool calls are not parsed"),
        (chat("a", min_tokens=9), "min_tokens is 9"),
    ],
)
def test_what_is_refused_is_an_error_line(tmp_path: Path, line: dict[str, Any], words: str) -> None:
    """Parameters that do not fit, and values out of range, are that request's error."""
    source, out = write_jsonl(tmp_path / "in.jsonl", [line, completion("good", max_tokens=1)]), tmp_path / "out.jsonl"
    answers = run_tiny(source, out, *JOB, code=3)
    assert [answer["custom_id"] for answer in answers] == ["good"]
    (error,) = read_rows(tmp_path / "out.errors.jsonl")
    assert words in error["error"]["message"]


def test_a_finished_batch_keeps_all_that_its_answers_tell(tmp_path: Path) -> None:
    """With lines appended, the old answers are the same to the byte, whatever is in their choices."""
    lines = [chat("a"), completion("b"), chat("c", tool_choice="required")]
    source, out = write_jsonl(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    answers = run_tiny(source, out, *JOB, code=3)
    token = {"token": "é", "logprob": -0.25, "bytes": [195, 169]}
    told = [
        {"content": [{**token, "top_logprobs": [token, {"token": "x", "logprob": -2.5, "bytes": [120]}]}]},
        {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5, "b": -1.5}], "text_offset": [0]},
    ]
    of_prompt = [None, {"5": {"logprob": -0.5, "rank": 2, "decoded_token": "b"}}]
    for line, logprobs in zip(answers, told, strict=True):
        (choice,) = line["response"]["body"]["choices"]
        choice |= {"logprobs": logprobs, "finish_reason": "stop", "stop_reason": "END"}
        line["response"]["body"]["prompt_logprobs"] = of_prompt
    answers[0]["response"]["body"]["choices"][0]["message"]["reasoning_content"] = "why"
    out.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in answers), encoding="utf-8")
    record_again(out)
    before, errors = out.read_bytes(), (tmp_path / "out.errors.jsonl").read_bytes()
    write_jsonl(source, [*lines, chat("d"), completion("e")])
    more = run_tiny(source, out, *JOB, code=3)
    assert [line["custom_id"] for line in more] == ["a", "b", "d", "e"]
    assert out.read_bytes().startswith(before)
    assert (tmp_path / "out.errors.jsonl").read_bytes() == errors
    assert cbgen("verify", out).exit_code == 0


def test_verify_counts_choices(tmp_path: Path) -> None:
    """An answer with more choices than its request asks for, or with others, is found."""
    answered(tmp_path, completion("a"))
    out = tmp_path / "out.jsonl"
    (line,) = read_rows(out)
    (choice,) = line["response"]["body"]["choices"]
    for choices in ([choice, {**choice, "index": 1}], [{**choice, "index": 1}], [], None):
        line["response"]["body"]["choices"] = choices
        write_jsonl(out, [line])
        record_again(out)
        verified = cbgen("verify", out)
        assert verified.exit_code == 1, verified.output
        assert "PROBLEM: content" in verified.output
        assert "in order 1 are expected" in " ".join(verified.output.split())
