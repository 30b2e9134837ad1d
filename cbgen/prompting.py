"""From an input row to the text or token ids of a request, and from token ids back to text."""

import datetime
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase

from cbgen.data.rows import KEY_BYTES, PromptRow
from cbgen.engine.requests import SamplingParams
from cbgen.errors import RowError, UsageError
from cbgen.row_checks import checked_id, checked_ids, checked_messages, checked_params, checked_text, whole_number

OPTION_COLUMNS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "ignore_eos")
STRFTIME_DIRECTIVES = [*"aAbBcdeDFHIjmMpSTUwWxXyYZ", "-d", "-e", "-m", "-H", "-I", "-j", "-M", "-S", "%"]
RESERVED_TEMPLATE_KWARGS = {
    "messages",
    "conversation",
    "tokenize",
    "add_generation_prompt",
    "chat_template",
    "cbgen_date",
}
STRFTIME_MACRO = (
    "{%- macro strftime_now(format) -%}{%- set built = namespace(text=format) -%}"
    "{%- for directive, value in cbgen_date.items() -%}"
    "{%- set built.text = built.text | replace(directive, value) -%}"
    "{%- endfor -%}{{ built.text }}{%- endmacro +%}"
)
# Where prompts come from when the user names no column: the most exact form that the input has.
DEFAULT_SOURCES = ("prompt_ids", "messages", "prompt")


@dataclass(frozen=True)
class PromptSource:
    """Where the prompt of a row comes from, resolved: one column, or a template over several.

    kind: "prompt", "messages", "prompt_ids" or "template", whose column is "template" too; "openai" for lines of an
    OpenAI batch, each with one of the first three.
    columns: those of the input that the prompt is made of.
    chat: a text prompt becomes a user message.
    """

    kind: str
    column: str
    columns: list[str]
    template: str | None = None
    system_prompt: str | None = None
    chat: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def uses_chat_template(self) -> bool:
        """In some rows, for OpenAI batches; else in all or none."""
        return self.kind in ("messages", "openai") or self.chat


@dataclass(frozen=True)
class RenderedPrompt:
    """A row's prompt as text, or as ids where the input gives those, with its options; `digest` names both.

    seed: the row's own, if it has one. Draws of rows without come from the job's seed and the row's key. is_chat:
    whether a chat template wrote the text.
    """

    index: int
    text: str | None
    ids: list[int] | None
    params: SamplingParams
    seed: int | None
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
    _refuse_reserved(chat_template_kwargs or {})
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
    return PromptSource(
        kind=kind,
        column=column,
        columns=columns,
        template=template,
        system_prompt=system_prompt,
        chat=kind != "messages" and (chat or system_prompt is not None),
        chat_template_kwargs=chat_template_kwargs or {},
    )


def openai_source(chat_template_kwargs: dict[str, Any]) -> PromptSource:
    """Of an OpenAI batch: each row has the one of the columns that its url asks for."""
    _refuse_reserved(chat_template_kwargs)
    return PromptSource("openai", "body", [*DEFAULT_SOURCES], chat_template_kwargs=chat_template_kwargs)


def _refuse_reserved(chat_template_kwargs: dict[str, Any]) -> None:
    for name in RESERVED_TEMPLATE_KWARGS & chat_template_kwargs.keys():
        raise UsageError(f"--chat-template-kwargs: {name} is set by cbgen")


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
    vocab_size: of the model, for prompts given as ids; the tokenizer's unless given. id_column: its value belongs to
    what names a row.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        source: PromptSource,
        defaults: SamplingParams,
        today: datetime.date,
        vocab_size: int | None = None,
        id_column: str | None = None,
    ):
        if source.uses_chat_template and source.kind != "openai" and not tokenizer.chat_template:
            raise UsageError(
                "this model has no chat template: use a plain prompt column, without --chat and --system-prompt"
            )
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size or len(tokenizer)
        self._source = source
        self._id_column = id_column
        self._defaults = defaults
        self._template = _environment().from_string(source.template) if source.template is not None else None
        self._chat_kwargs = dict(source.chat_template_kwargs)
        if source.uses_chat_template and tokenizer.chat_template:
            self._chat_kwargs |= _frozen_date(tokenizer.get_chat_template(), today)

    def render(self, row: PromptRow) -> RenderedPrompt | FailedPrompt:
        """Template or chat messages to text. A row that cannot be rendered comes back with its reason."""
        try:
            if row.error is not None:
                raise RowError(row.error)
            own_id = [] if self._id_column is None else [checked_id(row.values[self._id_column], self._id_column)]
            params, seed = self._row_params(row.values)
            text, ids, is_chat = self._prompt(row.values)
        except RowError as error:
            return FailedPrompt(row.index, str(error), row_digest("failed", str(error), _jsonable(row.values)))
        # The job's max_tokens may grow and leave finished rows as they are; a row whose own one changes is another row.
        own_max_tokens = row.values.get("max_tokens")
        options = [params.temperature, params.top_p, params.top_k, params.ignore_eos, seed, own_max_tokens, *own_id]
        if self._source.kind == "openai":
            options.append(is_chat)  # the same text is other tokens, see tokenize
        return RenderedPrompt(row.index, text, ids, params, seed, row_digest("prompt", text, ids, options), is_chat)

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

    def decode(self, generated: list[list[int]]) -> list[str]:
        """Texts of generated token ids, special tokens left out."""
        return self._tokenizer.batch_decode(generated, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def preview(self, prompt: RenderedPrompt) -> str:
        """The prompt as the model will read it."""
        return prompt.text if prompt.text is not None else str(self._tokenizer.decode(prompt.ids or []))

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
            return self._chat_text(checked_messages(values[column], column)), None, True
        text = self._templated(values) if self._template else checked_text(values[column], column)
        if self._source.chat:
            return self._chat_text([{"role": "user", "content": text}]), None, True
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

    def _chat_text(self, messages: list[dict[str, Any]]) -> str:
        if self._source.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._source.system_prompt}, *messages]
        if not self._tokenizer.chat_template:
            raise RowError("this model has no chat template, which messages need")
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self._chat_kwargs
            )
        except Exception as error:
            raise RowError(f"chat template: {error or type(error).__name__}") from error
        return checked_text(text, "chat template")

    def _row_params(self, values: dict[str, Any]) -> tuple[SamplingParams, int | None]:
        """The row's own options over the job's."""
        own = {name: values[name] for name in OPTION_COLUMNS if values.get(name) is not None}
        seed = own.pop("seed", None)
        if seed is not None:
            seed = whole_number("seed", seed)
        merged = {name: own.get(name, getattr(self._defaults, name)) for name in OPTION_COLUMNS if name != "seed"}
        return checked_params(**merged), seed


def row_key(digest: bytes, occurrence: int) -> bytes:
    """The row's name: what it asks for, and which of its equals it is."""
    return hashlib.blake2b(digest + occurrence.to_bytes(8, "little"), digest_size=KEY_BYTES).digest()


def draw_seed(job_seed: int, row_seed: int | None, key: bytes, sample_index: int) -> int:
    """64 bits for the stream of draws of one sample: from the row's seed if it has one, else from job seed and key."""
    origin = ["row", row_seed] if row_seed is not None else ["job", job_seed, key.hex()]
    material = json.dumps([*origin, sample_index]).encode()
    return int.from_bytes(hashlib.blake2b(material, digest_size=8).digest(), "little")


def prints_the_date(chat_template: str) -> bool:
    return "strftime_now" in chat_template


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
    return json.dumps(values, sort_keys=True, default=str)
