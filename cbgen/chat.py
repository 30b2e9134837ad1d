"""Messages made text by a chat template: the model's, or one that the user gives."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase

from cbgen.errors import RowError, UsageError
from cbgen.row_checks import checked_text

ASSISTANT = "assistant"
STRFTIME_DIRECTIVES = [*"aAbBcdeDFHIjmMpSTUwWxXyYZ", "-d", "-e", "-m", "-H", "-I", "-j", "-M", "-S", "%"]
RESERVED_TEMPLATE_KWARGS = {
    "messages",
    "conversation",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tools",
    "cbgen_date",
}
STRFTIME_MACRO = (
    "{%- macro strftime_now(format) -%}{%- set built = namespace(text=format) -%}"
    "{%- for directive, value in cbgen_date.items() -%}"
    "{%- set built.text = built.text | replace(directive, value) -%}"
    "{%- endfor -%}{{ built.text }}{%- endmacro +%}"
)


class ChatRenderer:
    """Renders conversations for one job.

    kwargs: variables for the template. today: the job's date, given to templates that ask for it. given: the user's
    template, instead of the model's. continue_final_message: whether a conversation that ends with the assistant's
    message is left open there.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        kwargs: dict[str, Any],
        today: datetime.date,
        given: str | None = None,
        continue_final_message: bool = False,
    ):
        self._tokenizer = tokenizer
        self._kwargs = kwargs
        self._continue_final_message = continue_final_message
        self._templates: dict[bool, _Template] = {}
        for has_tools in (False, True):
            text = chat_template_of(tokenizer, given, has_tools)
            if text:
                self._templates[has_tools] = _Template(text, today)

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
        """The text that the model answers, or goes on from. Raises RowError with what the template says."""
        template = self._templates.get(tools is not None)
        if template is None:
            raise RowError("this model has no chat template, which messages need")
        if tools is not None and not template.reads_tools:
            raise RowError("tools are given, and the chat template has no place for them: it never reads `tools`")
        continues = self._continue_final_message and messages[-1]["role"] == ASSISTANT
        if continues:
            _check_can_be_continued(messages[-1])
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=not continues,
                continue_final_message=continues,
                **(self._kwargs | template.arguments),
            )
        except Exception as error:
            if continues and isinstance(error, ValueError):  # its message holds the whole conversation
                reason = "the chat template changes it, or leaves it out"
                raise RowError(f"the assistant's last message cannot be continued: {reason}") from error
            raise RowError(f"chat template: {error or type(error).__name__}") from error
        return checked_text(text, "chat template")


@dataclass
class _Template:
    """One template as written, and how it is rendered on the job's date."""

    text: str
    today: datetime.date

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Of apply_chat_template."""
        return {"chat_template": self.text} | _frozen_date(self.text, self.today)

    @cached_property
    def reads_tools(self) -> bool:
        """Also from within a macro. Raises RowError for a template that cannot be read."""
        try:
            return "tools" in jinja2.meta.find_undeclared_variables(_environment().parse(self.text))
        except jinja2.TemplateSyntaxError as error:
            raise RowError(f"chat template: {error}") from error


class _GenerationTag(jinja2.ext.Extension):
    """The tag that transformers adds to Jinja, around what the assistant says: it prints what is in it."""

    tags = {"generation"}  # noqa: RUF012 (so jinja2 declares it)

    def parse(self, parser: Any) -> list[Any]:
        next(parser.stream)
        body: list[Any] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def chat_template_of(tokenizer: PreTrainedTokenizerBase, given: str | None, has_tools: bool = False) -> str | None:
    """The template for a conversation: the user's, or the model's own, of which it may have one for tools."""
    own = tokenizer.chat_template if given is None else given
    if isinstance(own, dict):
        return own.get("tool_use" if has_tools else "default", own.get("default"))
    return own


def read_chat_template(path: str) -> str:
    """The text of --chat-template FILE. Raises UsageError for what is no template."""
    option = f"--chat-template {path}"
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        _environment().from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(f"{option}, line {error.lineno}: {error.message}") from error
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{option}: cannot be read: {reason}") from error
    if not text.strip():
        raise UsageError(f"{option}: is empty")
    return text


def refuse_reserved(chat_template_kwargs: dict[str, Any]) -> None:
    for name in RESERVED_TEMPLATE_KWARGS & chat_template_kwargs.keys():
        raise UsageError(f"--chat-template-kwargs: {name} is set by cbgen")


def prints_the_date(chat_template: str) -> bool:
    return "strftime_now" in chat_template


def _check_can_be_continued(message: dict[str, Any]) -> None:
    """An empty one would lose the line breaks that open its turn, where a template trims what is said."""
    if not message.get("content", "").strip():
        raise RowError("the assistant's last message has no text that could be continued")


def _environment() -> jinja2.Environment:
    """Parses what transformers does."""
    extensions: Sequence[Any] = [_GenerationTag, jinja2.ext.loopcontrols]
    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)


def _frozen_date(chat_template: str, today: datetime.date) -> dict[str, Any]:
    """Arguments that give a chat template the job's date, so that a job that runs past midnight keeps its prompts.

    Templates ask for the date by calling strftime_now. Functions cannot be handed to one, so a macro of that name, over
    a table of what each directive gives, goes ahead of the template.
    """
    if not prints_the_date(chat_template):
        return {}
    moment = datetime.datetime.combine(today, datetime.time())
    table = {f"%{code}": moment.strftime(f"%{code}") for code in STRFTIME_DIRECTIVES}
    return {"chat_template": STRFTIME_MACRO + chat_template, "cbgen_date": table}
