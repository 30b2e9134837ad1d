"""Conversations through chat templates in the manner of well-known models, and through one that the user gives."""

import json
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from job_harness import cbgen, read_rows, run_tiny, write_jsonl
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from cbgen.chat import read_chat_template
from cbgen.data.rows import PromptRow
from cbgen.engine.sampling_params import SamplingParams
from cbgen.errors import UsageError
from cbgen.models.tiny_random import BOS, build_model, build_tokenizer
from cbgen.prompting import FailedPrompt, Prompter, RenderedPrompt, openai_source, resolve_source

SYSTEM = {"role": "system", "content": "Be kind."}
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

# Turns between marks; a system turn of its own if none is given; tools in the system turn.
CHATML = """\
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nDefault.<|im_end|>\\n' }}{% endif %}
{%- if tools %}{{ 'TOOLS ' + tools | tojson + '\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Writes BOS, trims what is said, and gives `tools` a value where there is none.
LLAMA3 = """\
{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- for message in messages %}
{{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if tools is not none %}{{ tools | length }}{% endif %}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}"""

# No system role: refused.
GEMMA2 = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{ '<turn>' + role + '\\n' + message['content'] | trim + '</turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}"""

# No system role: folded into the first turn.
GEMMA3 = """\
{{ bos_token }}{% set ns = namespace(first='') %}
{%- if messages[0]['role'] == 'system' %}
{%- set ns.first = messages[0]['content'] + '\\n\\n' %}{% set messages = messages[1:] %}{% endif %}
{%- for message in messages %}{{ '<turn>' + message['role'] + '\\n' }}
{{- (ns.first if loop.first else '') + message['content'] | trim + '</turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}"""

# Turns must alternate; the system message stands in the last user turn; no generation prompt of its own.
MISTRAL = """\
{%- set system = messages[0].content if messages[0].role == 'system' else none %}
{%- set turns = messages[1:] if system is not none else messages %}{{ bos_token }}
{%- for message in turns %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Roles must alternate, beginning with the user') }}{% endif %}
{%- if message.role == 'user' %}
{{- '[INST] ' + (system + '\\n\\n' if loop.last and system is not none else '') + message.content + '[/INST]' }}
{%- else %}{{ ' ' + message.content + '</s>' }}{% endif %}{% endfor %}"""


def rendered(
    values: dict[str, Any], template: Any = CHATML, tokenizer: Any = None, **options: Any
) -> RenderedPrompt | FailedPrompt:
    tokenizer = tokenizer or build_tokenizer()
    tokenizer.chat_template = template
    source = resolve_source(list(values), **options)
    return Prompter(tokenizer, source, SamplingParams(), date(2001, 2, 3)).render(PromptRow(0, values))


def text(values: dict[str, Any], template: Any = CHATML, **options: Any) -> str | None:
    prompt = rendered(values, template, **options)
    assert isinstance(prompt, RenderedPrompt), prompt
    return prompt.text


def reason(values: dict[str, Any], template: Any = CHATML, **options: Any) -> str:
    prompt = rendered(values, template, **options)
    assert isinstance(prompt, FailedPrompt), prompt
    assert "\n" not in prompt.error
    return prompt.error


# System messages


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
        (
            LLAMA3,
            f"{BOS}<|head|>system<|/head|>\n\nBe kind.<|eot|><|head|>user<|/head|>\n\nhi<|eot|>"
            "<|head|>assistant<|/head|>\n\n",
        ),
        (GEMMA3, f"{BOS}<turn>user\nBe kind.\n\nhi</turn>\n<turn>model\n"),
        (MISTRAL, f"{BOS}[INST] Be kind.\n\nhi[/INST]"),
    ],
    ids=["chatml", "llama3", "gemma3", "mistral"],
)
def test_a_system_message_goes_where_the_template_puts_it(template: str, expected: str) -> None:
    """In a turn of its own, or folded into another; from the row or from --system-prompt alike."""
    assert text({"messages": [SYSTEM, USER]}, template) == expected
    assert text({"messages": [USER]}, template, system_prompt="Be kind.") == expected
    assert text({"prompt": "hi"}, template, system_prompt="Be kind.") == expected


def test_a_template_without_system_role_refuses_the_row() -> None:
    """With its own words; rows without a system message are rendered."""
    assert reason({"messages": [SYSTEM, USER]}, GEMMA2) == "chat template: System role not supported"
    assert reason({"messages": [USER]}, GEMMA2, system_prompt="x") == "chat template: System role not supported"
    assert text({"messages": [USER]}, GEMMA2) == f"{BOS}<turn>user\nhi</turn>\n<turn>model\n"
    assert "must alternate" in reason({"messages": [USER, USER]}, MISTRAL)


# Tools


@pytest.mark.parametrize("given", [[TOOL], json.dumps([TOOL]), [TOOL | {"strict": None}]], ids=["list", "text", "null"])
def test_tools_reach_the_template(given: Any) -> None:
    """As a list of objects or as its JSON; with messages and with --chat; keys that Arrow padded are dropped."""
    shown = f"TOOLS {json.dumps([TOOL])}\n"
    with_messages, with_chat = {"messages": [USER], "tools": given}, {"prompt": "hi", "tools": given}
    assert shown in str(text(with_messages))
    assert shown in str(text(with_chat, chat=True))
    plain = rendered({"messages": [USER]})
    assert rendered(with_messages).digest != plain.digest, "tools make another row"


@pytest.mark.parametrize("given", [None, [], "", "[]", "null", " [ ] "])
def test_no_tools(given: Any) -> None:
    """Null and empty are as if there were no column, for templates that know no tools too."""
    for template in (CHATML, GEMMA3):
        assert text({"messages": [USER], "tools": given}, template) == text({"messages": [USER]}, template)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("{", "tools is not valid JSON"),
        ("[" * 100_000, "tools is nested more than 200 deep"),
        ('"add"', "tools is a text"),
        (json.dumps(TOOL), "tools is an object"),
        (TOOL, "tools is an object"),
        (3, "tools is a number"),
        (["add"], "tools holds a text"),
        ([None], "tools holds null"),
        ([{}], "tools holds an object"),
        ([{"name": None}], "tools holds an object"),
        ([{"since": datetime(2001, 2, 3)}], "tools cannot be written as JSON"),
    ],
)
def test_malformed_tools_are_row_errors(given: Any, words: str) -> None:
    """The reason names the column and what it holds."""
    assert reason({"messages": [USER], "tools": given}).startswith(words)


@pytest.mark.parametrize(
    ("template", "reads"),
    [
        (LLAMA3, True),
        (
            "{% macro all(given) %}{{ (given or []) | length }}{% endmacro %}{{ messages[0].content }}{{ all(tools) }}",
            True,
        ),
        ("{% macro all() %}{{ (tools or []) | length }}{% endmacro %}{{ messages[0].content }}{{ all() }}", True),
        ("{% macro all(tools) %}{{ tools | length }}{% endmacro %}{{ messages[0].content }}{{ all([]) }}", False),
        ("{% generation %}{{ messages[0].content }}{{ (tools or []) | length }}{% endgeneration %}", True),
        ("{% for message in messages %}{{ message.tools }}{{ message.content }}{% continue %}{% endfor %}", False),
        (GEMMA3, False),
    ],
    ids=["llama3", "argument", "in macro", "own argument", "generation", "attribute", "gemma3"],
)
def test_a_template_that_reads_no_tools_refuses_them(template: str, reads: bool) -> None:
    """Tools are never dropped unsaid: the row fails, and those without tools do not."""
    values = {"messages": [USER], "tools": [TOOL]}
    if reads:
        assert "1" in str(text(values, template))
    else:
        assert "never reads `tools`" in reason(values, template)
    assert text({"messages": [USER], "tools": None}, template)


def test_a_model_may_have_a_template_for_tools() -> None:
    """It is used for rows with tools, and the default one for the others."""
    both = {"default": "plain", "tool_use": "with {{ tools | length }}"}
    assert text({"messages": [USER], "tools": [TOOL]}, both) == "with 1"
    assert text({"messages": [USER], "tools": None}, both) == "plain"
    assert "never reads `tools`" in reason({"messages": [USER], "tools": [TOOL]}, {"default": "plain"})
    assert text({"messages": [USER]}, both, chat_template="{{ 'mine' }}") == "mine"


@pytest.mark.parametrize(
    ("available", "options", "columns"),
    [
        (["messages", "tools"], {}, ["messages", "tools"]),
        (["prompt", "tools"], {"chat": True}, ["prompt", "tools"]),
        (["prompt", "tools"], {}, ["prompt"]),
        (["prompt_ids", "tools"], {}, ["prompt_ids"]),
        (["a", "tools"], {"template": "{{ a }}", "chat": True}, ["a", "tools"]),
        (["a", "tools"], {"template": "{{ tools }}", "chat": True}, ["tools"]),
        (["tools"], {"messages_column": "tools"}, ["tools"]),
    ],
)
def test_when_the_column_is_used(available: list[str], options: dict[str, Any], columns: list[str]) -> None:
    """With a chat template only, and not where the prompt itself is made of it."""
    source = resolve_source(available, **options)
    assert source.columns == columns
    assert source.has_tools == (len(columns) == 2)


def test_tools_of_an_openai_batch() -> None:
    """Their column is there for chats; a row of another kind has none of it."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHATML
    prompter = Prompter(tokenizer, openai_source({}), SamplingParams(), date(2001, 2, 3))
    row = dict.fromkeys(openai_source({}).columns)
    chat = prompter.render(PromptRow(0, row | {"messages": [USER], "tools": [TOOL]}))
    plain = prompter.render(PromptRow(0, row | {"prompt": "hi"}))
    assert isinstance(chat, RenderedPrompt) and "TOOLS" in str(chat.text)
    assert isinstance(plain, RenderedPrompt) and plain.text == "hi"


# Messages


def test_nulls_are_dropped_at_every_depth() -> None:
    """What Arrow pads objects with is seen by no template; a message may call tools and say nothing."""
    call = {"id": None, "function": {"name": "add", "arguments": {"a": 1, "b": None}, "extra": {"c": None}}}
    messages = [USER | {"tool_calls": None}, {"role": "assistant", "content": None, "tool_calls": [call]}, USER]
    seen = json.loads(str(text({"messages": messages}, "{{ messages | tojson }}")))
    clean = {"function": {"name": "add", "arguments": {"a": 1}, "extra": {}}}
    assert seen == [USER, {"role": "assistant", "tool_calls": [clean], "content": ""}, USER]


def test_messages_may_be_their_json() -> None:
    """As a column of texts, which is what a table has for messages without a common type."""
    messages = [USER, {"role": "assistant", "content": "yes", "name": None}, USER]
    assert text({"messages": json.dumps(messages)}) == text({"messages": messages})
    assert "not valid JSON" in reason({"messages": "[hi"})
    assert "messages is a text" in reason({"messages": '"hi"'})


def test_a_finished_job_goes_on_with_messages_of_any_form(tmp_path: Path) -> None:
    """Results are recognised by the rows of the output, whose messages and tools a table may hold as JSON."""
    tools = [{"name": "add", "parameters": {"type": "object", "default": None}}]
    rows = [{"messages": [USER]}, {"messages": [USER | {"content": [{"type": "text", "text": "ho"}]}], "tools": tools}]
    rows.append({"messages": [USER], "tools": [{"name": ["sub"]}]})
    template = tmp_path / "mine.jinja"
    template.write_text("{{ messages[0].content }}{{ tools | tojson }}")
    options = ("--max-tokens", 1, "--chat-template", template, "--summary", tmp_path / "s.json")
    run_tiny(write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.parquet", *options)
    more = write_jsonl(tmp_path / "in.jsonl", [*rows, {"messages": [USER], "tools": tools}])
    assert len(run_tiny(more, tmp_path / "out.parquet", *options)) == 4
    assert json.loads((tmp_path / "s.json").read_text())["rows_resumed"] == 3
    assert pq.read_schema(tmp_path / "out.parquet").field("tools").type == pa.string()


def test_an_empty_message_calls_something() -> None:
    """Null without tool calls is no content, also where Arrow made an empty list of them."""
    for calls in (None, []):
        silent = {"role": "assistant", "content": None, "tool_calls": calls}
        assert "assistant message is not a text" in reason({"messages": [USER, silent, USER]})


def test_what_json_does_not_know_is_a_row_error() -> None:
    """Instead of a template that prints the name of its type."""
    when = {"role": "tool", "content": "x", "at": [{"when": datetime(2001, 2, 3)}]}
    assert "cannot be written as JSON" in reason({"messages": [USER, when]})


# The assistant's last message


@pytest.mark.parametrize(
    ("template", "said", "end"),
    [
        (CHATML, "Sure: ", "<|im_start|>assistant\nSure: "),
        (CHATML, " \nSure", "<|im_start|>assistant\n \nSure"),
        (LLAMA3, " Sure:\n", "<|head|>assistant<|/head|>\n\nSure:"),
        (MISTRAL, "Sure", "[/INST] Sure"),
        (CHATML, [{"type": "text", "text": "Su"}, {"type": "text", "text": "re "}], "assistant\nSure "),
    ],
    ids=["kept space", "leading space", "trimmed", "mistral", "parts"],
)
def test_the_last_message_is_continued(template: str, said: Any, end: str) -> None:
    """It stays open where its text ends; white space is as the template has it with every message."""
    messages = [USER, {"role": "assistant", "content": said}]
    assert str(text({"messages": messages}, template, continue_final_message=True)).endswith(end)
    assert "--continue-final-message" in reason({"messages": messages}, template)


def test_other_conversations_get_a_new_turn() -> None:
    """The option says nothing about those that end with the user."""
    assert text({"messages": [USER]}, continue_final_message=True) == text({"messages": [USER]})


@pytest.mark.parametrize(
    ("template", "message", "words"),
    [
        (CHATML, {"content": ""}, "has no text"),
        (LLAMA3, {"content": " \n"}, "has no text"),
        (CHATML, {"content": None, "tool_calls": [{"function": {"name": "add"}}]}, "has no text"),
        ("{% for m in messages[:-1] %}{{ m.content }}{% endfor %}", {"content": "Sure"}, "leaves it out"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", {"content": "Sure"}, "changes it"),
        ("{{ messages[0].role }}", {"content": "Sure"}, "leaves it out"),
        ("{{ raise_exception('no: content') }}", {"content": "Sure"}, "chat template: no: content"),
    ],
)
def test_what_cannot_be_continued_is_a_row_error(template: str, message: dict[str, Any], words: str) -> None:
    """An empty message, or one that the template does not show as it is."""
    messages = [USER, {"role": "assistant", **message}]
    assert words in reason({"messages": messages}, template, continue_final_message=True)


# --chat-template


def test_one_bos_for_a_given_template() -> None:
    """The template writes it, and the tokenizer that adds it to plain prompts does not."""
    tokenizer = build_tokenizer()
    adds = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = adds
    source = resolve_source(["messages"], chat_template=LLAMA3)
    prompter = Prompter(tokenizer, source, SamplingParams(), date(2001, 2, 3))
    prompt = prompter.render(PromptRow(0, {"messages": [USER]}))
    assert isinstance(prompt, RenderedPrompt)
    assert prompter.tokenize([prompt])[0].count(tokenizer.bos_token_id) == 1


def test_a_given_template_gets_the_jobs_date() -> None:
    """As the model's own does."""
    assert text({"messages": [USER]}, None, chat_template="{{ strftime_now('%Y') }}") == "2001"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file"),
        (b"\xff", "cannot be read: "),
        (b" \n", "is empty"),
        (b"a\n{% for m in messages %}", "line 2: "),
        (b"{{ messages | no_such_filter }}", "line 1: "),
        (b"{% generation %}", "line 1: "),
    ],
)
def test_a_file_that_is_no_template(tmp_path: Path, content: bytes | None, words: str) -> None:
    """One line with the option and the file."""
    path = tmp_path / "mine.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_chat_template(str(path))
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"--chat-template {path}")
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, without a chat template."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer: PreTrainedTokenizerFast = build_tokenizer()
    tokenizer.chat_template = None
    for part in (tokenizer, build_model(torch.float32)):
        part.save_pretrained(folder)
    return folder


def test_a_job_with_a_template_of_its_own(tmp_path: Path, model_folder: Path) -> None:
    """It serves a model that has none, belongs to what the job is, and is told."""
    template = tmp_path / "mine.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}!{% endfor %}")
    source = write_jsonl(tmp_path / "in.jsonl", [{"messages": [USER]}, {"messages": [SYSTEM, USER]}])
    job = ("run", source, "--model", model_folder, "--out", tmp_path / "out.parquet", "--max-tokens", 1)
    refused = cbgen(*job)
    assert refused.exit_code == 2
    assert "--chat-template" in refused.output
    first = cbgen(*job, "--chat-template", template)
    assert first.exit_code == 0, first.output
    assert f"through the chat template in {template}" in first.output
    assert [row["prompt_tokens"] for row in read_rows(tmp_path / "out.parquet")] == [3, 12]
    template.write_text("other")
    changed = cbgen(*job, "--chat-template", template)
    assert changed.exit_code == 4
    assert "chat_template_sha256" in changed.output
    missing = cbgen(*job, "--chat-template", tmp_path / "none.jinja")
    assert missing.exit_code == 2


def test_chat_options_without_effect_warn(tmp_path: Path) -> None:
    """Where no prompt goes through a chat template."""
    template = tmp_path / "mine.jinja"
    template.write_text("{{ messages[0].content }}")
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "hi"}])
    options = ("--chat-template", template, "--continue-final-message", "--reasoning-tags", "<a> </a>")
    told = cbgen("validate", source, "--model", "tiny-random", "--out", tmp_path / "out.parquet", *options)
    assert told.exit_code == 0, told.output
    for option in ("--chat-template", "--continue-final-message", "--reasoning-tags"):
        assert any(line.startswith(f"warning: {option} has no effect") for line in told.output.splitlines()), option


def test_tools_in_a_job(tmp_path: Path) -> None:
    """From JSONL, where rows have tools, none or what is none; the column is written back as it was."""
    template = tmp_path / "mine.jinja"
    template.write_text("{{ messages[0].content }}{% if tools %}{{ tools[0].name }}{% endif %}")
    rows = [{"messages": [USER]}, {"messages": [USER], "tools": [{"name": "add"}]}, {"messages": [USER], "tools": []}]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    out = run_tiny(source, tmp_path / "out.jsonl", "--chat-template", template, "--max-tokens", 1)
    assert [row["prompt_tokens"] for row in out] == [2, 5, 2]
    assert [row.get("tools") for row in out] == [None, [{"name": "add"}], []]


@pytest.mark.parametrize("column", ["tools", "messages"])
def test_what_is_nested_too_deep_is_that_rows_error(column: str) -> None:
    """As JSON text, which no reader has looked into."""
    deep = "[" + '{"role": "user", "content": "x", "a":' + '{"a":' * 700 + "1" + "}" * 700 + "}]"
    values = {"messages": [USER], "tools": None} | {column: deep}
    failed = reason(values, "{{ messages | tojson }}{{ tools }}")
    assert "deep" in failed or "recursion" in failed
