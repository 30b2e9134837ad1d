"""From a row to the text, ids, options and names of its requests, and back to text; with real tokenizers."""

from datetime import date
from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from cbgen.data.rows import KEY_BYTES, PromptRow
from cbgen.engine.sampling_params import SamplingParams
from cbgen.errors import UsageError
from cbgen.models.tiny_random import BOS, EOS, build_tokenizer
from cbgen.prompting import FailedPrompt, Prompter, RenderedPrompt, draw_seed, resolve_source, row_key
from cbgen.row_checks import checked_messages

DEFAULTS = SamplingParams(max_tokens=16, temperature=0.5, top_p=0.9, top_k=40)
TODAY = date(2001, 2, 3)
USER = {"role": "user", "content": "hi"}


def prompter(columns: list[str], chat_template: str | None = None, **options: Any) -> Prompter:
    tokenizer = build_tokenizer()
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return Prompter(tokenizer, resolve_source(columns, **options), DEFAULTS, TODAY)


def render(values: dict[str, Any], **options: Any) -> RenderedPrompt | FailedPrompt:
    """The prompt of a row of an input with just these columns."""
    return prompter(list(values), **options).render(PromptRow(3, values))


def text(values: dict[str, Any], **options: Any) -> str | None:
    prompt = render(values, **options)
    assert isinstance(prompt, RenderedPrompt), prompt
    assert prompt.index == 3
    return prompt.text


def reason(values: dict[str, Any], **options: Any) -> str:
    prompt = render(values, **options)
    assert isinstance(prompt, FailedPrompt), prompt
    assert prompt.index == 3
    return prompt.error


# Where prompts come from


@pytest.mark.parametrize(
    ("options", "kind", "columns"),
    [
        ({}, "prompt_ids", ["prompt_ids"]),
        ({"prompt_column": "q"}, "prompt", ["q"]),
        ({"messages_column": "q"}, "messages", ["q"]),
        ({"template": "{{ q }}{% for m in messages %}{{ m }}{% endfor %}"}, "template", ["messages", "q"]),
        ({"template": "no column"}, "template", []),
        ({"template": ""}, "template", []),
    ],
)
def test_a_named_source_wins_over_the_usual_columns(options: dict[str, Any], kind: str, columns: list[str]) -> None:
    """What the user names is used; only the columns that it needs are asked for."""
    source = resolve_source(["prompt", "messages", "prompt_ids", "q"], **options)
    assert (source.kind, source.columns) == (kind, columns)


@pytest.mark.parametrize(
    ("available", "kind"),
    [
        (["prompt", "messages", "prompt_ids"], "prompt_ids"),
        (["prompt", "messages"], "messages"),
        (["prompt"], "prompt"),
    ],
)
def test_without_a_name_the_most_exact_form_is_used(available: list[str], kind: str) -> None:
    """Token ids before messages before text."""
    assert resolve_source(available).kind == kind


@pytest.mark.parametrize(
    ("available", "options", "parts"),
    [
        (["a", "b"], {}, ["'prompt'", "a, b", "--prompt-column"]),
        ([], {}, ["'prompt'", "none"]),
        (["a", "b"], {"prompt_column": "c"}, ["'c'", "a, b"]),
        (["a", "b"], {"messages_column": "c"}, ["'c'", "a, b"]),
        (["a", "b"], {"template": "{{ a }} {{ c }}"}, ["'c'", "a, b"]),
        (["a"], {"template": "\n{{ a "}, ["--template, line 2"]),
        (["a"], {"template": "{{ a|no_such_filter }}"}, ["--template, line 1", "no_such_filter"]),
        (["a"], {"template": "x", "prompt_column": "a"}, ["--template", "--prompt-column"]),
        (["a"], {"messages_column": "a", "prompt_column": "a"}, ["--messages-column", "--prompt-column"]),
        (["prompt_ids"], {"chat": True}, ["prompt_ids", "--prompt-column"]),
        (["prompt_ids"], {"system_prompt": "s"}, ["prompt_ids", "--prompt-column"]),
    ],
)
def test_an_unclear_source_is_refused(available: list[str], options: dict[str, Any], parts: list[str]) -> None:
    """The refusal is one line that names the column or option and what there is instead."""
    with pytest.raises(UsageError) as caught:
        resolve_source(available, **options)
    assert all(part in str(caught.value) for part in parts)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", [{"chat": True}, {"system_prompt": "s"}, {"messages_column": "prompt"}])
def test_chat_needs_a_chat_template(options: dict[str, Any]) -> None:
    """A model without one is refused for chat when the job starts, and serves plain prompts."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UsageError, match="no chat template"):
        Prompter(tokenizer, resolve_source(["prompt"], **options), DEFAULTS, TODAY)
    plain = Prompter(tokenizer, resolve_source(["prompt"]), DEFAULTS, TODAY)
    assert isinstance(plain.render(PromptRow(0, {"prompt": "hi"})), RenderedPrompt)


# Plain prompts and templates


@pytest.mark.parametrize("value", ["hi", " \n", "\x00\ue000", "é" * 10_000])
def test_a_plain_prompt_is_the_text_itself(value: str) -> None:
    """White space, NUL and private-use characters are a prompt, and survive tokens and back."""
    assert text({"prompt": value}) == value
    ready = prompter(["prompt"])
    (ids,) = ready.tokenize([ready.render(PromptRow(0, {"prompt": value}))])
    assert ready.decode([ids]) == [value]


@pytest.mark.parametrize(
    ("value", "what"), [(None, "null"), ("", "empty"), (3, "a number (3)"), (["a"], "a list"), ({"a": 1}, "an object")]
)
def test_what_is_no_text_is_a_row_error(value: Any, what: str) -> None:
    """The reason names the column and what it holds instead."""
    assert reason({"q": value}, prompt_column="q").startswith(f"q is {what}")


def test_a_row_that_could_not_be_read_keeps_its_reason() -> None:
    """The reader's error goes to the output unchanged; equal failures have equal names."""
    row = PromptRow(7, {"prompt": None}, "rows.jsonl, line 8: not UTF-8")
    first, again = (prompter(["prompt"]).render(row) for _ in range(2))
    assert isinstance(first, FailedPrompt)
    assert (first.index, first.error) == (7, row.error)
    assert first == again


@pytest.mark.parametrize(
    ("template", "values", "expected"),
    [
        ("{{ a }}-{{ b.c[0] }}\n", {"a": 1, "b": {"c": ["x"]}}, "1-x\n"),
        ("{{ a }}", {"a": "{{ b }} <&>"}, "{{ b }} <&>"),
        ("{% if a is none %}nothing{% else %}{{ a }}{% endif %}", {"a": None}, "nothing"),
        ("{{ a or 'default' }}", {"a": None}, "default"),
    ],
)
def test_a_template_renders_columns(template: str, values: dict[str, Any], expected: str) -> None:
    """Values are inserted as they are, never as templates or HTML; a null may be tested for."""
    assert text(values, template=template) == expected


@pytest.mark.parametrize(
    ("template", "value"),
    [
        ("{{ ''.__class__ }}", 1),
        ("{{ a.__class__.__mro__ }}", "x"),
        ("{{ a.append(1) }}", [1]),
        ("{{ a.format(1) }}", "{0.__class__}"),
        ("{{ a }}", None),
        ("{{ a.b }}", {"c": 1}),
        ("{{ a.b }}", {"b": None}),
        ("{{ 1 // a }}", 0),
        ("{{ a ** 999 }}", 1e300),
        ("{{ a + 1 }}", "x"),
        ("{{ '%d'|format(a) }}", "x"),
        ("{% for x in a %}{% endfor %}", 3),
        ("{% for i in range(a) %}{% endfor %}", 10**9),
        ("{% include 'a' %}", 1),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(a) }}", 1),
        ("{{ 'x' * a }}", 10**17),
        ("{{ cycler(*a).next() }}", []),
        ("{% if a %}{% endif %}", 1),
    ],
)
def test_a_template_that_fails_is_a_row_error(template: str, value: Any) -> None:
    """Unsafe access, nulls that would be printed, arithmetic, types, recursion and memory cost the row, not the job."""
    assert reason({"a": value}, template=template).startswith(("--template: ", "template is "))


@pytest.mark.parametrize("name", ["range", "dict", "namespace"])
def test_a_column_may_have_the_name_of_a_template_function(name: str) -> None:
    """The column is asked for, and printed, instead of the function."""
    assert resolve_source([name], template=f"{{{{ {name} }}}}").columns == [name]


@pytest.mark.parametrize(
    ("value", "options"),
    [("\ud83d", {}), ("x", {"template": r"{{ prompt }}{{ '\ud83d' }}"}), ("x", {"system_prompt": "caf\udce9"})],
    ids=["row", "template", "system prompt"],
)
def test_half_a_character_costs_no_other_row(value: str, options: dict[str, Any]) -> None:
    """A lone surrogate is generated or an error row: it does not stop the batch that it is tokenized in."""
    ready = prompter(["prompt"], **options)
    prompt = ready.render(PromptRow(0, {"prompt": value}))
    assert isinstance(prompt, FailedPrompt) or ready.tokenize([prompt])


# Chat


@pytest.mark.parametrize(
    ("messages", "options", "turns"),
    [
        ([USER], {}, [("user", "hi")]),
        ([USER], {"system_prompt": "be"}, [("system", "be"), ("user", "hi")]),
        ([{"role": "system", "content": "own"}, USER], {"system_prompt": "be"}, [("system", "own"), ("user", "hi")]),
        ([USER | {"name": None, "tool_calls": None}], {}, [("user", "hi")]),
        ([USER | {"content": [{"type": "text", "text": t, "url": None} for t in "ab"]}], {}, [("user", "ab")]),
        (
            [USER, {"role": "assistant", "content": "yes"}, USER],
            {},
            [("user", "hi"), ("assistant", "yes"), ("user", "hi")],
        ),
    ],
)
def test_messages_become_turns(messages: list[Any], options: dict[str, Any], turns: list[tuple[str, str]]) -> None:
    """A system prompt is added only where there is none; null-padded keys are dropped, text parts are joined."""
    expected = "".join(f"{BOS}{role}\n{content}{EOS}" for role, content in turns) + f"{BOS}assistant\n"
    assert text({"messages": messages}, **options) == expected


def test_null_padded_keys_never_reach_the_template() -> None:
    """A template that asks whether a key is there gets the answer of the row, not of its neighbours."""
    template = "{% for m in messages %}{{ m.keys()|list|join(',') }}{% endfor %}"
    assert text({"messages": [USER | {"name": None}]}, chat_template=template) == "role,content"
    assert checked_messages([USER | {"name": None}], "messages") == [USER]


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (None, "messages is null"),
        ([], "messages is empty"),
        ("hi", "messages is a text"),
        ([None], "needs a role"),
        ([{"content": "hi"}], "needs a role"),
        ([{"role": "user"}], "user message is not a text"),
        ([{"role": "user", "content": 3}], "user message is not a text"),
        ([{"role": "user", "content": [{"type": "image_url", "text": None}]}], "only parts of type text"),
        ([{"role": "user", "content": ["hi"]}], "only parts of type text"),
        ([USER, {"role": "assistant", "content": "yes"}], "nothing to answer"),
    ],
)
def test_messages_that_are_none_are_row_errors(value: Any, part: str) -> None:
    """The reason names the column and what is wrong with it."""
    assert part in reason({"messages": value})


@pytest.mark.parametrize("options", [{"chat": True}, {"template": "{{ prompt }}", "chat": True}])
def test_chat_makes_a_text_a_user_message(options: dict[str, Any]) -> None:
    """So do a prompt column and a template."""
    assert text({"prompt": "hi"}, **options) == f"{BOS}user\nhi{EOS}{BOS}assistant\n"


def test_a_chat_template_refuses_a_row_with_its_own_reason() -> None:
    """As one without a system role does."""
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}ok"
    assert "no system role" in reason({"messages": [USER]}, system_prompt="be", chat_template=template)
    assert text({"messages": [USER]}, chat_template=template) == "ok"


def test_a_chat_template_gets_the_jobs_date() -> None:
    """Today is the day of the job's first start, so that midnight changes no prompt."""
    template = (
        "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}, {{ strftime_now('%Y-%m-%d') }}{% endif %}"
    )
    assert text({"messages": [USER]}, chat_template=template) == "03 Feb 2001, 2001-02-03"
    assert text({"messages": [USER]}, chat_template="{{ strftime_now('%-d %B, 100%%') }}") == "3 February, 100%"


def test_a_chat_template_gets_the_jobs_arguments() -> None:
    """What the user gives for the template reaches it as it is."""
    given = {"enable_thinking": False, "depth": [1, {"a": "b"}]}
    template = "{{ enable_thinking }} {{ depth[1].a }}"
    assert text({"messages": [USER]}, chat_template=template, chat_template_kwargs=given) == "False b"


# Tokens


def adding_bos() -> PreTrainedTokenizerFast:
    """A tokenizer that puts BOS before every text, as Llama's does."""
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.bos_token_id)]
    )
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    return tokenizer


@pytest.mark.parametrize(
    ("value", "options", "num_bos"),
    [
        ("hi", {}, 1),
        (f"{BOS}hi", {}, 1),
        ("hi", {"template": BOS + "{{ prompt }}"}, 1),
        ("hi", {"chat": True}, 2),
        ([USER], {"messages_column": "prompt"}, 2),
    ],
)
def test_bos_is_never_doubled(value: Any, options: dict[str, Any], num_bos: int) -> None:
    """One BOS at the start, whoever writes it; the chat template here writes one more before the assistant's turn."""
    tokenizer = adding_bos()
    ready = Prompter(tokenizer, resolve_source(["prompt"], **options), DEFAULTS, TODAY)
    (ids,) = ready.tokenize([ready.render(PromptRow(0, {"prompt": value}))])
    assert ids[0] == tokenizer.bos_token_id != ids[1]
    assert ids.count(tokenizer.bos_token_id) == num_bos


def test_a_chat_template_without_bos_gets_none() -> None:
    """A chat template writes all that a model wants around a conversation: the tokenizer adds nothing to it."""
    tokenizer = adding_bos()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    ready = Prompter(tokenizer, resolve_source(["prompt"], chat=True), DEFAULTS, TODAY)
    assert ready.tokenize([ready.render(PromptRow(0, {"prompt": "hi"}))]) == [build_tokenizer()("hi")["input_ids"]]


def test_a_tokenizer_that_adds_no_bos_is_left_alone() -> None:
    """The ids of a plain prompt are the tokenizer's own, in the order of the rows."""
    ready = prompter(["prompt"])
    prompts = [ready.render(PromptRow(index, {"prompt": value})) for index, value in enumerate(("b", "a"))]
    assert ready.tokenize(prompts) == build_tokenizer()(["b", "a"])["input_ids"]
    assert ready.tokenize([]) == []


def test_prompt_ids_are_taken_as_they_are() -> None:
    """No token is added, and the preview shows what the model will read, special tokens too."""
    ready = prompter(["prompt_ids"])
    prompt = ready.render(PromptRow(0, {"prompt_ids": [257, 0, 1]}))
    assert ready.tokenize([prompt]) == [[257, 0, 1]]
    assert ready.preview(prompt) == EOS + build_tokenizer().decode([0, 1])


@pytest.mark.parametrize("value", [None, [], "1 2", 3, [1, None], [1.0], [True], ["1"], [-1], [258], [[1]]])
def test_prompt_ids_must_be_tokens_of_the_model(value: Any) -> None:
    """Anything else is an error row that names the column."""
    assert reason({"prompt_ids": value}).startswith("prompt_ids ")


def test_decode_leaves_special_tokens_out() -> None:
    """Texts come back row by row, also empty ones, with no space cleaned away."""
    tokenizer = build_tokenizer()
    generated = [[256, *tokenizer("a , b .")["input_ids"], 257], [], [257]]
    assert prompter(["prompt"]).decode(generated) == ["a , b .", "", ""]


# Options of a row


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_tokens", value) for value in (0, -1, 1.5, "8", True)),
        *(("temperature", value) for value in (-1, float("nan"), float("inf"), "0.5", False)),
        *(("top_p", value) for value in (0, -0.1, 1.5, float("nan"), "1")),
        *(("top_k", value) for value in (-2, 1.5, "5", [1])),
        *(("ignore_eos", value) for value in ("yes", 1, 0.0)),
        *(("seed", value) for value in (1.5, "7", True, float("nan"))),
        *(pytest.param(name, 10**400, id=f"{name}-huge") for name in ("max_tokens", "temperature", "top_k", "seed")),
    ],
)
def test_an_option_out_of_range_is_a_row_error(name: str, value: Any) -> None:
    """The reason begins with the column."""
    assert reason({"prompt": "hi", name: value}).startswith(f"{name} is ")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_tokens", 1, 1),
        ("max_tokens", 8.0, 8),
        ("temperature", 0, 0.0),
        ("temperature", 2.5, 2.5),
        ("top_p", 1, 1.0),
        ("top_k", 0, 0),
        ("top_k", -1, 0),
        ("top_k", 7, 7),
        ("ignore_eos", True, True),
    ],
)
def test_a_rows_own_option_wins(name: str, value: Any, expected: Any) -> None:
    """The others are the job's, and so is the option where it is null."""
    fields = ("max_tokens", "temperature", "top_p", "top_k", "ignore_eos")
    for given, wanted in ((value, expected), (None, getattr(DEFAULTS, name))):
        prompt = render({"prompt": "hi", name: given})
        assert isinstance(prompt, RenderedPrompt)
        assert {field: getattr(prompt.params, field) for field in fields} == {
            field: wanted if field == name else getattr(DEFAULTS, field) for field in fields
        }


def test_a_top_k_beyond_64_bits_never_reaches_the_engine() -> None:
    """It is an error row, or as good as off: tensors cannot hold it."""
    prompt = render({"prompt": "hi", "top_k": 2**70})
    assert isinstance(prompt, FailedPrompt) or 0 <= prompt.params.top_k < 2**63


@pytest.mark.parametrize(("given", "seed"), [(None, None), (0, 0), (7.0, 7), (-1, -1), (2**63, 2**63)])
def test_a_rows_own_seed_is_kept_apart(given: Any, seed: int | None) -> None:
    """No seed is not the same as seed 0."""
    prompt = render({"prompt": "hi", "seed": given})
    assert isinstance(prompt, RenderedPrompt)
    assert prompt.params.seed == seed


# Names and draws


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"max_tokens": 3}, False),  # the row's own: the job's may change
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 40, "ignore_eos": False}, True),
        ({"temperature": 0.6}, False),
        ({"top_p": 0.8}, False),
        ({"top_k": 41}, False),
        ({"ignore_eos": True}, False),
        ({"seed": 0}, False),
        ({"prompt": "hi "}, False),
        ({"prompt": "h\\u00ed"}, False),
    ],
)
def test_a_digest_names_prompt_and_options(change: dict[str, Any], same: bool) -> None:
    """Equal rows have equal digests wherever they stand; any option but max_tokens makes another row."""
    base = prompter(["prompt"]).render(PromptRow(0, {"prompt": "hi"}))
    assert len(base.digest) == KEY_BYTES
    assert (render({"prompt": "hi"} | change).digest == base.digest) == same


def test_text_and_ids_have_different_digests() -> None:
    """Ids that happen to spell a text are another prompt, and so are ids in another order."""
    ids = build_tokenizer()("hi")["input_ids"]
    rows = [{"prompt": "hi"}, {"prompt_ids": ids}, {"prompt_ids": ids[::-1]}, {"prompt": str(ids)}]
    assert len({render(row).digest for row in rows}) == 4


def test_failed_rows_have_digests_of_their_own() -> None:
    """A failure is named by what fails, so that a corrected row is a new one."""
    rows = [
        {"prompt": None},
        {"prompt": ""},
        {"prompt": "hi", "top_k": -2},
        {"prompt": "hi", "top_k": -3},
        {"prompt": "hi"},
    ]
    assert len({render(row).digest for row in rows}) == 5
    assert render(rows[2]).digest == render(dict(rows[2])).digest


def test_equal_rows_are_told_apart_by_occurrence() -> None:
    """The key is the digest's and the occurrence's, and always the same."""
    digests = [render({"prompt": value}).digest for value in "ab"]
    keys = [row_key(digest, occurrence) for digest in digests for occurrence in (0, 1, 2**40)]
    assert len(set(keys)) == 6
    assert {len(key) for key in keys} == {KEY_BYTES}
    assert row_key(digests[0], 1) == keys[1]


def test_draws_come_from_the_rows_seed_or_from_job_and_key() -> None:
    """64 bits that differ by sample; the row's seed makes job and key irrelevant, without one both matter."""
    keys = [row_key(bytes(KEY_BYTES), occurrence) for occurrence in (0, 1)]
    own = {draw_seed(job, 7, key, 0) for job in (0, 1) for key in keys}
    job = {draw_seed(job, None, key, sample) for job in (0, 1) for key in keys for sample in (0, 1)}
    assert len(own) == 1
    assert len(job) == 8
    seeds = own | job | {draw_seed(0, 7, keys[0], 1), draw_seed(7, None, keys[0], 0), draw_seed(0, 0, keys[0], 0)}
    assert len(seeds) == 12
    assert all(0 <= seed < 2**64 for seed in seeds)
