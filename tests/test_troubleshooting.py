"""docs/troubleshooting.md quotes messages that cbgen has, and many of them are provoked here as a user would."""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from job_harness import REPOSITORY, SAMPLES, cbgen, read_rows, run_tiny, write_jsonl

from cbgen import LLM, SamplingParams
from cbgen.data.manifest import PartsFolder
from cbgen.errors import UsageError

PAGE = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = [quoted.strip() for _, quoted in re.findall(r"^- (``?)(.+?)\1$", PAGE, re.MULTILINE)]
VARIES = "…"
# Of the letters of a message, so many must be its own.
LEAST_FIXED = 7
QUESTIONS = SAMPLES / "questions.jsonl"
MODULES = sorted((REPOSITORY / "cbgen").rglob("*.py"))


def constants_of(trees: list[ast.Module]) -> dict[str, str]:
    """Texts that modules give a name."""
    assigned = [node for tree in trees for node in tree.body if isinstance(node, ast.Assign)]
    return {
        target.id: node.value.value
        for node in assigned
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }


def template_of(text: ast.JoinedStr, constants: dict[str, str]) -> str:
    """An f-string, with the texts of constants in it, and a sign for all else."""

    def piece(value: ast.expr) -> str:
        if isinstance(value, ast.Constant):
            return str(value.value)
        name = value.value.id if isinstance(value, ast.FormattedValue) and isinstance(value.value, ast.Name) else ""
        return constants.get(name, VARIES)

    return "".join(map(piece, text.values))


def templates() -> Iterator[str]:
    """Every text in the source, and every f-string whole."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in MODULES]
    constants = constants_of(trees)
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.JoinedStr):
            yield template_of(node, constants)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


TEMPLATES = "\n".join(text.removeprefix("warning: ") for text in templates() if "\n" not in text)


def pattern(message: str) -> str:
    return ".*".join(map(re.escape, message.split(VARIES)))


def test_links_within_the_page() -> None:
    headings = {re.sub(r"[^\w -]", "", name).lower().replace(" ", "-") for name in re.findall(r"^## (.+)$", PAGE, re.M)}
    links = set(re.findall(r"\]\(#([^)]+)\)", PAGE))
    assert links <= headings
    assert len(links) > 5


def test_there_are_many_messages_and_each_says_what_to_do() -> None:
    """No message stands alone: a line that explains it follows."""
    assert len(MESSAGES) > 150
    lines = PAGE.splitlines()
    assert [line for line, after in pairwise(lines) if line[:3] == "- `" and after[:2] != "  "] == []


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_page_is_one_of_cbgen_s(message: str) -> None:
    """Its fixed parts are those of one text in the source, from its beginning to its end."""
    assert sum(map(str.isalpha, message)) >= LEAST_FIXED
    assert re.search(f"^{pattern(message)}$", TEMPLATES, re.MULTILINE)


def told(message: str, output: str) -> None:
    """One of the lines ends as the message of the page does."""
    assert message in MESSAGES
    assert re.search(f"{pattern(message)}$", output, re.MULTILINE), output


USAGE: list[tuple[str, list[Any]]] = [
    ("… is missing", ["run", QUESTIONS, "--out", "o.parquet"]),
    ("…: the format is told by the extension, one of …; a folder ends with /", ["run", QUESTIONS, "--out", "o.csv"]),
    ("a job spec stands alone: give its input in the spec, or the files without it", ["run", "a.yaml", QUESTIONS]),
    ("…: no such job spec", ["run", "a.yaml"]),
    ("…: a JSON object is expected, such as '{\"name\": 1}'", ["run", QUESTIONS, "--logit-bias", "[1]"]),
    ("…: a day such as 2026-05-31 is expected", ["run", QUESTIONS, "--date", "today"]),
    ("… …: a duration such as 7h30m, 90s or 07:30:00 is expected", ["run", QUESTIONS, "--time-limit", "soon"]),
    ("… is none of …; several are parted by a comma", ["run", QUESTIONS, "--retry", "all"]),
    ("scheduler_type: … is not one of: …", ["run", QUESTIONS, "--scheduler-type", "lifo"]),
    ("…: … is too small, at least … is needed", ["run", QUESTIONS, "--page-size", "0"]),
    ("…: … is not a share between 0 (excluded) and 1", ["run", QUESTIONS, "--max-memory-percent", "80"]),
    ("safety_margin: … is not a share between 0 and 1 (excluded)", ["run", QUESTIONS, "--safety-margin", "1"]),
    ("--chat-template …", ["run", QUESTIONS, "--chat-template", "none.jinja"]),
    ("--row-options: … is none of …; or give auto, or none", ["run", QUESTIONS, "--row-options", "colour"]),
    ("--row-options: the input has no column …", ["run", QUESTIONS, "--row-options", "top_p"]),
    ("…: give one of them, an output has one form", ["run", QUESTIONS, "--choice", "a", "--regex", "a"]),
    ("kv_cache_dtype: … is not one of: …", ["run", QUESTIONS, "--kv-cache-dtype", "int4"]),
    ("cpu_offload_space: … is not a number of GiB, 0 or more", ["run", QUESTIONS, "--cpu-offload-space", "-1"]),
    (
        "use_cuda_graph: only CUDA devices record graphs, and this is …; leave it out",
        ["run", QUESTIONS, "--device", "cpu", "--use-cuda-graph"],
    ),
    (
        "use_async_batching: batches overlap on the streams of CUDA devices, and this is …; leave it out",
        ["run", QUESTIONS, "--device", "cpu", "--use-async-batching"],
    ),
    ("--dtype …: not one of auto, …", ["run", QUESTIONS, "--dtype", "int8"]),
    ("--quantization …: not one of int8, …", ["run", QUESTIONS, "--quantization", "int4"]),
    ("--max-errors …: a share of the rows is 100% at most", ["run", QUESTIONS, "--max-errors", "101%"]),
    ("--model …: no such file", ["run", QUESTIONS, "--model", "none.gguf"]),
    ("no input: give at least one file, folder or glob", ["run"]),
    ("no such file, folder or glob match", ["run", "none.jsonl"]),
    ("has no file of …", ["run", REPOSITORY / "cbgen"]),
    ("… …: cannot be read: …", ["run", QUESTIONS, "--json-schema", "none.json"]),
    ("--template, line …: …", ["run", QUESTIONS, "--template", "{{ prompt"]),
    ("… is the standard input, which can be read only once: give it once", ["run", "-", "-"]),
    ("--template: the input has no column …; it has: …", ["run", QUESTIONS, "--template", "{{ colour }}"]),
    ("--id-column …: the input has no such column; it has: …", ["run", QUESTIONS, "--id-column", "number"]),
    (
        "the input has the columns of an OpenAI batch: give --format openai-batch",
        ["run", SAMPLES / "openai_batch.jsonl"],
    ),
    ("--model …: no such model folder or .gguf file", ["run", QUESTIONS, "--model", "./none"]),
    ("--max-model-len …: the context of this model is …", ["run", QUESTIONS, "--max-model-len", "99999"]),
    ("--device …: not a device name; use auto, cpu, cuda, cuda:N or mps", ["run", QUESTIONS, "--device", "tpu"]),
    (
        "--device …: this machine or this torch build has none; use --device cpu",
        ["run", QUESTIONS, "--device", "cuda:99"],
    ),
    (
        "--shard-index and --shard-count go together: which shard, and of how many",
        ["run", QUESTIONS, "--shard-index", 1],
    ),
    ("--out …: --format openai-batch writes one .jsonl file", ["run", QUESTIONS, "--format", "openai-batch"]),
    ("…: there is no such output, and no job has begun one; give the --out of a job", ["status", "none.parquet"]),
    ("no such output: …", ["merge", "none.parquet", "--out", "o.parquet"]),
    ("--memory …: a size is expected, such as 24GiB or 512MiB", ["size", "--model", "tiny-random", "--memory", "much"]),
    ("--tokens …: not between 1 and the context of …", ["size", "--model", "tiny-random", "--tokens", "0"]),
    ("--backend …: not one of …", ["bench", "--model", "tiny-random", "--backend", "tgi"]),
    ("--runs …: at least 1 is expected", ["bench", "--model", "tiny-random", "--runs", "0"]),
    (
        "give --quantization, --kv-cache-dtype or both: there is nothing to compare with float32",
        ["quality", QUESTIONS, "--model", "tiny-random"],
    ),
]


@pytest.mark.parametrize(("message", "arguments"), USAGE, ids=[message for message, _ in USAGE])
def test_usage(message: str, arguments: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 2, one line of cbgen's, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    needed = {"--model": "tiny-random", "--out": "o.parquet"} if arguments[0] == "run" else {}
    if message == "… is missing":
        del needed["--model"]
    missing = [word for name, value in needed.items() if name not in arguments for word in (name, value)]
    result = cbgen(*arguments, *missing)
    assert result.exit_code == 2, result.output
    told(message, result.output)
    assert result.output.splitlines()[-1].startswith("cbgen: ")
    assert list(tmp_path.iterdir()) == []


ROWS: dict[str, dict[str, Any]] = {
    "… is null, a text is expected": {"prompt": None},
    "… is empty": {"prompt": ""},
    "… is …, a text is expected": {"prompt": 42},
    "… is …, … is expected": {"prompt": "a", "temperature": -1},
    "min_tokens is …, more than max_tokens (…)": {"prompt": "a", "min_tokens": 9},
    "… is …, a whole number is expected": {"prompt": "a", "max_tokens": 1.5},
    "… names token …, those of this model are 0 to …": {"prompt": "a", "stop_token_ids": [99999]},
    "… is not valid JSON: …": {"prompt": "a", "json_schema": "{"},
    '… is empty; {"type": "object"} asks for any object': {"prompt": "a", "json_schema": "{}"},
    "… holds an empty text": {"prompt": "a", "bad_words": [""]},
    "… cannot be followed: …": {"prompt": "a", "regex": "("},
    "… and …: give one of them, an output that is cut short has no form": {"prompt": "a", "regex": "a", "stop": "b"},
    "the prompt has … tokens and leaves no room for output in the context of …": {"prompt": "a " * 2000},
    "the prompt (… tokens) and max_tokens (…) need more than the whole cache, which holds … tokens": {
        "prompt": "a",
        "max_tokens": 1000,
    },
    "bad_words, logit_bias, min_tokens and the form of the output together leave no token to choose": {
        "prompt": "a",
        "choice": ["a"],
        "bad_words": ["a"],
    },
}


def test_rows(tmp_path: Path) -> None:
    """Each is the error of its row, and the good one between them is generated."""
    rows = run_tiny(
        write_jsonl(tmp_path / "in.jsonl", [*ROWS.values(), {"prompt": "a"}]),
        tmp_path / "out.jsonl",
        *("--max-tokens", 4, "--num-blocks", 8, "--page-size", 32, "--safety-margin", 0),
        code=3,
    )
    for message, row in zip(ROWS, rows, strict=False):
        told(message, row["error"] or "no error")
    assert rows[-1]["error"] is None


MESSAGE_ROWS: dict[str, Any] = {
    "… is …, a list of messages is expected": "Hello",
    "…: every message needs a role and a content": [{"content": "Hello"}],
    "…: only parts of type text can be used in a message's content": [
        {"role": "user", "content": [{"image": "a.png"}]}
    ],
    "…: the last message is the assistant's, so there is nothing to answer; --continue-final-message goes on with it": [
        {"role": "assistant", "content": "Hello"}
    ],
}


def test_messages(tmp_path: Path) -> None:
    """Found by validate, which loads no weights."""
    for message, value in MESSAGE_ROWS.items():
        source = write_jsonl(tmp_path / "in.jsonl", [{"messages": value}])
        result = cbgen("validate", source, "--model", "tiny-random", "--out", tmp_path / "out.jsonl")
        assert result.exit_code == 5
        told(message, result.output)


def test_lines(tmp_path: Path) -> None:
    """What is no line of JSON is that row's error."""
    lines = {
        "…: not valid JSON: …": b'{"prompt": "a',
        "not UTF-8 (byte … of the line)": b'{"prompt": "\xff"}',
        "a JSON object is expected, this is a …": b"[1]",
    }
    (tmp_path / "in.jsonl").write_bytes(b"\n".join([b'{"prompt": "a"}', *lines.values()]))
    rows = run_tiny(tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--max-tokens", 2, code=3)
    for message, row in zip(lines, rows[1:], strict=True):
        told(message, row["error"])


def test_memory(tmp_path: Path) -> None:
    job = ("run", QUESTIONS, "--model", "tiny-random", "--out", tmp_path / "o.parquet")
    result = cbgen(*job, "--num-blocks", 10**9)
    assert result.exit_code == 1
    (message,) = [message for message in MESSAGES if message.startswith("a cache of … blocks")]
    told(message, result.output)
    result = cbgen("size", "--model", "tiny-random", "--memory", "1KiB")
    assert result.exit_code == 1
    told("the weights of … alone take … of …", result.output)


def test_going_on(tmp_path: Path) -> None:
    """Of a finished job, of a file that is nobody's, and of nothing."""
    out = tmp_path / "out.parquet"
    job = ("run", QUESTIONS, "--model", "tiny-random", "--limit", 2, "--out", out)
    result = cbgen(*job, "--resume", "always")
    assert result.exit_code == 4
    told("…: there is nothing to resume; --resume if-possible starts anew", result.output)
    assert cbgen(*job, "--max-tokens", 2).exit_code == 0
    result = cbgen(*job, "--max-tokens", 2, "--seed", 1)
    assert result.exit_code == 4
    told(
        "…: is the finished output of another job: …; choose another --out, or --resume never to replace it",
        result.output,
    )
    result = cbgen("merge", out, "--out", tmp_path / "merged.parquet")
    assert result.exit_code == 2
    told("…: is the output of a whole job, not of a shard", result.output)
    out.write_bytes(b"something else")
    result = cbgen(*job, "--max-tokens", 2)
    assert result.exit_code == 4
    told("…: is not a finished output of cbgen; move it or choose another --out", result.output)


def test_one_run_at_a_time(tmp_path: Path) -> None:
    """While somebody holds the lock."""
    out = tmp_path / "out.parquet"
    folder = PartsFolder(out)
    folder.lock()
    try:
        result = cbgen("run", QUESTIONS, "--model", "tiny-random", "--out", out)
    finally:
        folder.close()
    assert result.exit_code == 4
    told("…: another run is writing this output", result.output)


def test_shards(tmp_path: Path) -> None:
    """One of two is missing; then the other one is there twice."""
    out = tmp_path / "0.parquet"
    run_tiny(QUESTIONS, out, "--max-tokens", 2, "--limit", 4, "--shard-index", 0, "--shard-count", 2)
    for message, shards in (
        ("of … shards (from 0) these are missing: …", [out]),
        ("shard … is there twice: …", [out] * 2),
    ):
        result = cbgen("merge", *shards, "--out", tmp_path / "merged.parquet")
        assert result.exit_code == 2
        assert re.search(pattern(message), result.output) and message in MESSAGES


def test_openai_batches(tmp_path: Path) -> None:
    """Bad requests are told by validate; they would be in the error file."""
    job = ("--format", "openai-batch", "--model", "tiny-random", "--out", tmp_path / "out.jsonl")
    result = cbgen("validate", SAMPLES / "openai_batch.jsonl", *job)
    assert result.exit_code == 3
    told("url is …, … is expected", result.output)
    told("a batch is not streamed; leave it out", result.output)


def test_the_disk(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    result = cbgen("run", QUESTIONS, "--model", "tiny-random", "--out", tmp_path / "file" / "out.parquet")
    assert result.exit_code == 1
    (message,) = [message for message in MESSAGES if message.startswith("…: cannot be written: …; make room")]
    told(message, result.output)


def test_verify(tmp_path: Path) -> None:
    """Of an input that was edited, and of an output that was."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}])
    out = tmp_path / "out.jsonl"
    run_tiny(source, out, "--max-tokens", 2)
    write_jsonl(source, [{"prompt": "b"}, {"prompt": "c"}])
    result = cbgen("verify", out)
    assert result.exit_code == 0
    told("the input cannot be compared: …", result.output)
    told("… was changed since", result.output)
    out.write_bytes(out.read_bytes().replace(b"length", b"lentgh"))
    result = cbgen("verify", out)
    assert result.exit_code == 1
    told("… is not what was written: its hash is another", result.output)


def test_warnings_and_ends(tmp_path: Path) -> None:
    """The job runs, and says at its end what failed."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a", "max_new_tokens": 3}, {"prompt": ""}])
    options = ("--top-p", 0.5, "--n", 2, "--calibration", QUESTIONS, "--order", "prefix", "--no-allow-block-sharing")
    job = ("run", source, "--model", "tiny-random", "--out", tmp_path / "o.jsonl", "--max-tokens", 2)
    result = cbgen(*job, *options, "--cpu-offload-space", 0.01, "--max-cached-graphs", 4, "--retry", "failed")
    assert result.exit_code == 3, result.output
    for message in (
        "… no effect at temperature 0",
        "--n … at temperature 0 gives the same completion … times; give --temperature",
        "the column … is not read: the parameter's name is …",
        "--calibration has no effect: only activations of 8 bits (w8a8) are calibrated",
        "--order prefix has nothing to gain where every prompt is computed by itself",
        "--cpu-offload-space: swap pool and cache are the same memory here; it takes what the cache could have",
        "… no effect on …: only CUDA devices record graphs",
        "--retry has no effect: nothing was generated yet",
        "… of … rows failed: see …",
    ):
        told(message, result.output)
    assert len(read_rows(tmp_path / "o.jsonl")) == 4


def test_too_many_failed(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": ""}] * 3 + [{"prompt": "a"}] * 3)
    job = ("run", source, "--model", "tiny-random", "--out", tmp_path / "o.jsonl", "--max-tokens", 64)
    result = cbgen(*job, "--max-errors", 1, "--no-deduplicate")
    assert result.exit_code == 5, result.output
    assert re.search(pattern("… of … rows failed, --max-errors is …"), result.output)
    assert re.search(pattern("what finished is published, and the same command continues the job"), result.output)


def test_from_python() -> None:
    with pytest.raises(UsageError) as refused:
        LLM("tiny-random", colour=1)
    told("LLM has no option …; those of the engine are …", str(refused.value))
    with pytest.raises(UsageError) as refused:
        LLM("tiny-random", enforce_eager="no")
    told("…: true or false is expected, not …", str(refused.value))
    with LLM("tiny-random", num_blocks=64) as llm:
        with pytest.raises(UsageError) as refused:
            llm.generate(["a"], [SamplingParams()])  # type: ignore[arg-type]
        (message,) = [message for message in MESSAGES if message.startswith("sampling_params is a …")]
        told(message, str(refused.value))
        (output,) = llm.generate(["\ud83d"])
        told("… holds half a surrogate pair, which is no character", output.error or "no error")
    with pytest.raises(UsageError) as refused:
        llm.generate(["a"])
    told("this LLM was closed; make another one", str(refused.value))
