"""From an input row to the text or token ids of a request, and from token ids back to text."""

import contextlib
import datetime
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase

from cbgen.chat import ChatRenderer, chat_template_of, refuse_reserved
from cbgen.data.rows import KEY_BYTES, PromptRow
from cbgen.engine.grammars import Grammars
from cbgen.engine.sampling_params import SamplingParams
from cbgen.errors import RowError, UsageError
from cbgen.row_checks import checked_id, checked_ids, checked_messages, checked_text, checked_tools
from cbgen.row_params import OPTION_COLUMNS, RowParams

# Where prompts come from when the user names no column: the most exact form that the input has.
DEFAULT_SOURCES = ("prompt_ids", "messages", "prompt")
TOOLS_COLUMN = "tools"
# Of the values of rows that cannot be generated.
MOST_DEPTH_TOLD = 50


@dataclass(frozen=True)
class PromptSource:
    """Where the prompt of a row comes from, resolved: one column, or a template over several.

    kind: "prompt", "messages", "prompt_ids" or "template", whose column is "template" too; "openai" for lines of an
    OpenAI batch, each with one of the first three.
    columns: those of the input that the prompt is made of.
    chat: a text prompt becomes a user message. chat_template: the user's, instead of the model's.
    continue_final_message: see ChatRenderer. has_tools: whether TOOLS_COLUMN is given to the chat template.
    """

    kind: str
    column: str
    columns: list[str]
    template: str | None = None
    system_prompt: str | None = None
    chat: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    continue_final_message: bool = False
    has_tools: bool = False

    @property
    def uses_chat_template(self) -> bool:
        """In some rows, for OpenAI batches; else in all or none."""
        return self.kind in ("messages", "openai") or self.chat


@dataclass(frozen=True)
class RenderedPrompt:
    """A row's prompt as text, or as ids where the input gives those, with its options; `digest` names both.

    is_chat: whether a chat template wrote the text.
    """

    index: int
    text: str | None
    ids: list[int] | None
    params: SamplingParams
    digest: bytes
    is_chat: bool = False


@dataclass(frozen=True)
class FailedPrompt:
    """A row that cannot become a request, and why."""

    index: int
    error: str
    digest: bytes


def resolve_source(
    available: Sequence[str],
    *,
    prompt_column: str | None = None,
    messages_column: str | None = None,
    template: str | None = None,
    system_prompt: str | None = None,
    chat: bool = False,
    chat_template_kwargs: dict[str, Any] | None = None,
    chat_template: str | None = None,
    continue_final_message: bool = False,
) -> PromptSource:
    """Chooses where prompts come from; raises UsageError when that is unclear or not in the input."""
    named = {"--template": template, "--messages-column": messages_column, "--prompt-column": prompt_column}
    given = [option for option, value in named.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)}: give one of them, a row has one prompt")
    if template is not None:
        kind = column = "template"
    elif messages_column is not None:
        kind, column = "messages", messages_column
    elif prompt_column is not None:
        kind, column = "prompt", prompt_column
    else:
        kind = next((name for name in DEFAULT_SOURCES if name in available), "prompt")
        column = kind
    refuse_reserved(chat_template_kwargs or {})
    if kind == "prompt_ids" and (chat or system_prompt is not None):
        raise UsageError("prompt_ids are complete prompts: name --prompt-column to use --system-prompt or --chat")
    columns = [column] if template is None else _template_columns(template, available)
    missing = [name for name in columns if name not in available]
    if missing and template is not None:
        raise UsageError(
            f"--template: the input has no column {missing[0]!r}; it has: {', '.join(available) or 'none'}"
        )
    if missing:
        raise UsageError(
            f"the input has no column {missing[0]!r}; it has: {', '.join(available) or 'none'}; "
            "name the one to use with --prompt-column or --messages-column"
        )
    becomes_chat = kind != "messages" and (chat or system_prompt is not None)
    has_tools = TOOLS_COLUMN in available and TOOLS_COLUMN not in columns and (becomes_chat or kind == "messages")
    return PromptSource(
        kind=kind,
        column=column,
        columns=[*columns, TOOLS_COLUMN] if has_tools else columns,
        template=template,
        system_prompt=system_prompt,
        chat=becomes_chat,
        chat_template_kwargs=chat_template_kwargs or {},
        chat_template=chat_template,
        continue_final_message=continue_final_message,
        has_tools=has_tools,
    )


def openai_source(
    chat_template_kwargs: dict[str, Any], chat_template: str | None = None, continue_final_message: bool = False
) -> PromptSource:
    """Of an OpenAI batch: each row has the one of the columns that its url asks for."""
    refuse_reserved(chat_template_kwargs)
    return PromptSource(
        "openai",
        "body",
        [*DEFAULT_SOURCES, TOOLS_COLUMN],
        chat_template_kwargs=chat_template_kwargs,
        chat_template=chat_template,
        continue_final_message=continue_final_message,
        has_tools=True,
    )


def _template_columns(template: str, available: Sequence[str]) -> list[str]:
    """The names that a template reads; a column wins over a function of Jinja2's that bears its name."""
    environment = _environment()
    for name in available:
        environment.globals.pop(name, None)
    try:
        return sorted(jinja2.meta.find_undeclared_variables(environment.parse(template)))
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(f"--template, line {error.lineno}: {error.message}") from error


class Prompter:
    """Renders, tokenizes and decodes for one job.

    defaults: the sampling parameters of rows that name none. today: the job's date, given to templates that ask for it.
    vocab_size: of the model, for what is given as ids; the tokenizer's unless given. id_column: its value belongs to
    what names a row. row_options: the columns that are a row's own sampling parameters.
    grammars: tell which forms of an output can be had.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        source: PromptSource,
        defaults: SamplingParams,
        today: datetime.date,
        vocab_size: int | None = None,
        id_column: str | None = None,
        row_options: Sequence[str] = OPTION_COLUMNS,
        grammars: Grammars | None = None,
    ):
        needs_chat_template = source.uses_chat_template and source.kind != "openai"
        if needs_chat_template and not chat_template_of(tokenizer, source.chat_template):
            raise UsageError(
                "this model has no chat template: give one with --chat-template, or use a plain prompt column, without "
                "--chat and --system-prompt"
            )
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size or len(tokenizer)
        self._source = source
        self._id_column = id_column
        self._params = RowParams(defaults, self._vocab_size, row_options, grammars)
        self._template = _environment().from_string(source.template) if source.template is not None else None
        self._chat = ChatRenderer(
            tokenizer, source.chat_template_kwargs, today, source.chat_template, source.continue_final_message
        )

    @property
    def bos_token_id(self) -> int | None:
        return self._tokenizer.bos_token_id

    def render(self, row: PromptRow) -> RenderedPrompt | FailedPrompt:
        """Template or chat messages to text. A row that cannot be rendered comes back with its reason."""
        try:
            return self._rendered(row, self._params.of)
        except RowError as error:
            return FailedPrompt(row.index, str(error), row_digest("failed", str(error), _jsonable(row.values)))

    def render_with(self, row: PromptRow, params: SamplingParams) -> RenderedPrompt:
        """The same for a row that brings its parameters, whatever its columns and the job's. Raises RowError."""
        return self._rendered(row, lambda _: self._params.whole(params))

    def _rendered(
        self, row: PromptRow, params_of: Callable[[dict[str, Any]], tuple[SamplingParams, list[Any]]]
    ) -> RenderedPrompt:
        if row.error is not None:
            raise RowError(row.error)
        own_id = [] if self._id_column is None else [checked_id(row.values[self._id_column], self._id_column)]
        params, named = params_of(row.values)
        text, ids, is_chat = self._prompt(row.values)
        options = [*named, *own_id]
        if self._source.kind == "openai":
            options.append(is_chat)  # the same text is other tokens, see tokenize
        return RenderedPrompt(row.index, text, ids, params, row_digest("prompt", text, ids, options), is_chat)

    def tokenize(self, prompts: list[RenderedPrompt]) -> list[list[int]]:
        """Token ids of each prompt. Special tokens are added to plain prompts only; chat templates write their own."""
        encoded = {is_chat: self._encoded(prompts, is_chat) for is_chat in (False, True)}
        return [
            prompt.ids if prompt.ids is not None else self._one_bos(next(encoded[prompt.is_chat])) for prompt in prompts
        ]

    def _encoded(self, prompts: list[RenderedPrompt], is_chat: bool) -> Iterator[list[int]]:
        """Token ids of those whose text a chat template wrote, or of those whose text it did not."""
        texts = [prompt.text for prompt in prompts if prompt.text is not None and prompt.is_chat == is_chat]
        return iter(self._tokenizer(texts, add_special_tokens=not is_chat)["input_ids"] if texts else [])

    def decode(self, generated: list[list[int]], skip_special_tokens: Sequence[bool] | None = None) -> list[str]:
        """Texts of generated token ids. skip_special_tokens: of each, whether they are left out; None: of all."""
        skips = [True] * len(generated) if skip_special_tokens is None else skip_special_tokens
        texts = {
            skip: self._decoded(list(compress(generated, (own is skip for own in skips))), skip)
            for skip in (True, False)
        }
        return [next(texts[skip]) for skip in skips]

    def _decoded(self, generated: list[list[int]], skip: bool) -> Iterator[str]:
        if not generated:
            return iter(())
        return iter(
            self._tokenizer.batch_decode(generated, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        )

    def preview(self, prompt: RenderedPrompt, cut_ids: list[int] | None = None) -> str:
        """The prompt as the model will read it. cut_ids: what is left of it, if it was cut."""
        if cut_ids is None and prompt.text is not None:
            return prompt.text
        return str(self._tokenizer.decode(cut_ids or prompt.ids or []))

    def _one_bos(self, ids: list[int]) -> list[int]:
        """Text that spells the BOS token out, as a template may, is not given a second one."""
        bos = self._tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def _prompt(self, values: dict[str, Any]) -> tuple[str | None, list[int] | None, bool]:
        """Text or token ids, and whether the chat template wrote the text."""
        kind, column = self._source.kind, self._source.column
        if kind == "openai":
            kind = column = next(name for name in DEFAULT_SOURCES if values[name] is not None)
        if kind == "prompt_ids":
            return None, checked_ids(values[column], self._vocab_size), False
        if kind == "messages":
            messages = checked_messages(values[column], column, self._source.continue_final_message)
            return self._chat_text(messages, values), None, True
        text = self._templated(values) if self._template else checked_text(values[column], column)
        if self._source.chat:
            return self._chat_text([{"role": "user", "content": text}], values), None, True
        return text, None, False

    def _templated(self, values: dict[str, Any]) -> str:
        assert self._template is not None
        try:
            text = self._template.render(values)
        except RowError:
            raise
        except Exception as error:
            raise RowError(f"--template: {error or type(error).__name__}") from error
        return checked_text(text, "template")

    def _chat_text(self, messages: list[dict[str, Any]], values: dict[str, Any]) -> str:
        tools = checked_tools(values[TOOLS_COLUMN], TOOLS_COLUMN) if self._source.has_tools else None
        if self._source.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._source.system_prompt}, *messages]
        return self._chat.render(messages, tools)


def row_key(digest: bytes, occurrence: int) -> bytes:
    """The row's name: what it asks for, and which of its equals it is."""
    return hashlib.blake2b(digest + occurrence.to_bytes(8, "little"), digest_size=KEY_BYTES).digest()


def draw_seed(job_seed: int, row_seed: int | None, key: bytes, sample_index: int) -> int:
    """64 bits for the stream of draws of one sample: from the row's seed if it has one, else from job seed and key."""
    origin = ["row", row_seed] if row_seed is not None else ["job", job_seed, key.hex()]
    material = json.dumps([*origin, sample_index]).encode()
    return int.from_bytes(hashlib.blake2b(material, digest_size=8).digest(), "little")


def _environment() -> jinja2.Environment:
    """Sandboxed; a name that is not a column, and a null that an expression prints, are errors."""
    return ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, finalize=_refuse_null
    )


def _refuse_null(value: Any) -> Any:
    if value is None:
        raise RowError("--template: a column that it prints is null in this row")
    return value


def row_digest(*parts: Any) -> bytes:
    text = json.dumps(parts, ensure_ascii=False, separators=(",", ":"))
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=KEY_BYTES).digest()


def _jsonable(values: dict[str, Any]) -> str:
    return json.dumps(_alike(values), sort_keys=True, default=str)


def _alike(value: Any, depth: int = 0) -> Any:
    """A value as it is in every format: tables widen numbers, pad objects with null, and hold as its JSON what has no
    type in common with other rows. As deep as rows are told apart by."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 2**53 else value
    if not isinstance(value, dict | list) or depth == MOST_DEPTH_TOLD:
        return value if not isinstance(value, dict | list) else type(value).__name__
    if isinstance(value, dict):
        return {key: _alike(item, depth + 1) for key, item in value.items() if item is not None}
    return [_alike(item, depth + 1) for item in value]
