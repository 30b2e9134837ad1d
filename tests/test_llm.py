"""The Python API: what a job gives, as outputs of any iterable, with bounded look-ahead and an engine left clean."""

import gc
import itertools
import json
import logging
import re
import time
import weakref
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from job_harness import REPOSITORY, SAMPLES, run_tiny, write_jsonl

import cbgen
from cbgen import LLM, CompletionOutput, RequestOutput, SamplingParams
from cbgen.engine.scheduler import Scheduler
from cbgen.errors import CbgenError, RowError, UsageError
from cbgen.models.tiny_random import build_model, build_tokenizer

SMALL = 4  # requests in a forward pass of the shared model
SHORT = SamplingParams(max_tokens=6)
QUESTIONS = [json.loads(line)["prompt"] for line in (SAMPLES / "questions.jsonl").read_text().splitlines()[:20]]


@pytest.fixture(scope="module")
def shared() -> Iterator[LLM]:
    with LLM("tiny-random", device="cpu", max_requests_per_batch=SMALL) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """One model for all tests, each of which leaves nothing in its engine."""
    yield shared
    assert_is_clean(shared)


def assert_is_clean(llm: LLM) -> None:
    manager = llm._open().engine.manager
    manager.check_integrity()
    assert not manager.scheduler.has_work and not manager.cache.holders
    assert manager.scheduler._max_active is None, "what was worked out for the end of one call holds back the next"


def texts(outputs: Iterator[RequestOutput]) -> dict[int, list[str]]:
    return {output.index: [sample.text for sample in output.outputs] for output in outputs}


class Counted:
    """Prompts without an end, and how many were pulled. lengths: max_tokens, in turn."""

    def __init__(self, *lengths: int, samples: int = 1):
        self.num_pulled = 0
        self._params = itertools.cycle([SamplingParams(max_tokens=length, n=samples) for length in lengths])

    def __iter__(self) -> "Counted":
        return self

    def __next__(self) -> tuple[str, SamplingParams]:
        self.num_pulled += 1
        return f"prompt {self.num_pulled}", next(self._params)


@pytest.mark.parametrize(
    ("options", "params"),
    [
        ({}, {}),
        ({"temperature": 0.9, "seed": 3}, {"temperature": 0.9}),
        ({"temperature": 1.3, "top-k": 20, "n": 2, "seed": 3}, {"temperature": 1.3, "top_k": 20, "n": 2}),
    ],
)
@pytest.mark.parametrize("ordered", [False, True])
def test_equals_a_job(tmp_path: Path, options: dict[str, Any], params: dict[str, Any], ordered: bool) -> None:
    """Greedy and drawn, with equal prompts among them: the tokens, texts and ends of the rows of a job."""
    prompts = [*QUESTIONS[:7], *QUESTIONS[:3]]
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in prompts])
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
    rows = run_tiny(source, tmp_path / "out.parquet", "--max-tokens", 6, "--output-token-ids", *arguments)
    with LLM("tiny-random", seed=3, max_requests_per_batch=3, page_size=16) as llm:
        outputs = list(llm.generate(prompts, SamplingParams(max_tokens=6, **params), ordered=ordered))
    if not ordered:
        outputs.sort(key=lambda output: output.index)
    assert [output.prompt for output in outputs] == prompts
    samples = [sample for output in outputs for sample in output.outputs]
    assert [(s.text, s.token_ids, s.finish_reason) for s in samples] == [
        (row["completion"], row["completion_ids"], row["finish_reason"]) for row in rows
    ]


def test_chat_equals_a_job(tmp_path: Path, llm: LLM) -> None:
    """Messages through the template, one conversation alone, one with the assistant's message, one with parameters."""
    source = SAMPLES / "chat.jsonl"
    rows = run_tiny(source, tmp_path / "out.jsonl", "--max-tokens", 6, "--limit", 5)
    outputs = list(llm.chat([row["messages"] for row in rows], SHORT, ordered=True))
    assert [output.outputs[0].text for output in outputs] == [row["completion"] for row in rows]
    assert all(output.prompt.endswith("<|begin|>assistant\n") for output in outputs)
    (alone,) = llm.chat(rows[0]["messages"], SHORT)
    assert alone.outputs[0].token_ids == outputs[0].outputs[0].token_ids
    open_end = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "So"}]
    refused, continued = (list(llm.chat([open_end], SHORT, continue_final_message=going)) for going in (False, True))
    assert "there is nothing to answer" in refused[0].error
    assert continued[0].prompt.endswith("assistant\nSo")
    (paired,) = llm.chat([(open_end[:1], SamplingParams(max_tokens=2))])
    assert len(paired.outputs[0].token_ids) == 2


def test_tools_need_a_place(llm: LLM) -> None:
    """A template that never reads tools is an error of the output; so are messages that are none."""
    tools = [{"type": "function", "function": {"name": "add"}}]
    user = [{"role": "user", "content": "a"}]
    outputs = list(llm.chat([user, [], "text", [{"role": "user", 1: 2}]], SHORT, tools=tools, ordered=True))
    assert "no place for them" in outputs[0].error
    assert "messages is empty" in outputs[1].error and "a text (text)" in outputs[2].error
    assert "is not a text" in outputs[3].error


def test_each_as_it_finishes_or_in_order(llm: LLM) -> None:
    """A short prompt behind a long one overtakes it, unless order is asked for; the texts are the same."""
    prompts = [(f"prompt {number}", SamplingParams(max_tokens=40 if number == 0 else 3)) for number in range(12)]
    free, in_order = list(llm.generate(prompts)), list(llm.generate(prompts, ordered=True))
    assert free[0].index != 0 and sorted(output.index for output in free) == list(range(12))
    assert [output.index for output in in_order] == list(range(12))
    assert texts(iter(free)) == texts(iter(in_order))


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("max_waiting", [0, 5, None])
@pytest.mark.parametrize("ordered", [False, True])
def test_endless_iterator(llm: LLM, ordered: bool, max_waiting: int | None, samples: int) -> None:
    """No more than max_waiting and one batch are pulled and not yielded, however long one holds the others up."""
    prompts = Counted(200, *[2] * 30, samples=samples)
    waiting = (8 if ordered else 2) * SMALL if max_waiting is None else max_waiting
    most = -(-(waiting + SMALL) // samples)
    with closing(llm.generate(prompts, ordered=ordered, max_waiting=max_waiting)) as outputs:
        num_ahead = [prompts.num_pulled - number for number, _ in enumerate(itertools.islice(outputs, 70))]
    assert max(num_ahead) <= most, "the one that is just yielded counted"
    assert max(num_ahead) >= SMALL // samples, "the batch is kept full"


def test_endless_errors(llm: LLM) -> None:
    """Prompts that fail without an end come out as they are read."""
    with closing(llm.generate(itertools.repeat(""))) as endless:
        outputs = list(itertools.islice(endless, 100))
    assert [output.error for output in outputs] == ["prompt is empty"] * 100


def test_a_slow_iterator_holds_nobody_up(llm: LLM) -> None:
    """The first result is there long before a queue of prompts that come one by one is full."""
    prompts = Counted(3)

    def slowly() -> Iterator[Any]:
        for prompt in prompts:
            time.sleep(0.06)
            yield prompt

    with closing(llm.generate(slowly())) as outputs:
        assert next(outputs).index == 0
        assert prompts.num_pulled < SMALL


def test_errors_are_outputs(llm: LLM) -> None:
    """Each with its reason, an entry for each sample, and the prompts beside them are generated."""
    bad_schema = SamplingParams(max_tokens=4, json_schema={"type": "object", "x": 1, "minProperties": 3}, n=2)
    prompts = [
        "fine",
        "",
        None,
        7,
        [],
        [1, 258],
        ["a"],
        "x" * 2048,
        ("half \ud800", SHORT),
        ("schema", bad_schema),
        ("bias", SamplingParams(max_tokens=4, logit_bias={900: 1})),
        [1, 2, 3],
    ]
    outputs = list(llm.generate(prompts, SHORT, ordered=True))
    found = [output.error for output in outputs]
    words = [
        None,
        "prompt is empty",
        "prompt is null",
        "a number (7)",
        "prompt_ids is empty",
        "0 to 257",
        "prompt_ids holds 'a'",
        "no room for output in the context of 2048",
        "surrogate",
        "json_schema cannot be followed",
        "token 900",
        None,
    ]
    for error, word in zip(found, words, strict=True):
        assert (error is None) == (word is None) and (word is None or word in error), (error, word)
    failed = outputs[9].outputs
    assert [(sample.index, sample.text, sample.finish_reason) for sample in failed] == [
        (0, "", "error"),
        (1, "", "error"),
    ]
    assert outputs[7].prompt_token_ids and outputs[7].outputs[0].error == found[7]
    assert outputs[0].outputs[0].token_ids and outputs[11].prompt is None


def test_abandoned_generators(llm: LLM) -> None:
    """Closed, broken off, forgotten, or left by an exception: the next call is served as if nothing had been."""
    expected = texts(llm.generate(QUESTIONS, SHORT))
    params = SamplingParams(max_tokens=30, n=3, temperature=1.0)

    def fail_in_the_loop() -> None:
        for _ in llm.generate(QUESTIONS, params):
            raise ValueError

    outputs = llm.generate(QUESTIONS, params)
    next(outputs)
    outputs.close()
    assert_is_clean(llm)
    for _ in llm.generate(QUESTIONS, params):
        break
    gc.collect()
    assert_is_clean(llm)
    with pytest.raises(ValueError):
        fail_in_the_loop()
    gc.collect()
    assert_is_clean(llm)
    llm.generate(QUESTIONS, params)  # never begun
    assert texts(llm.generate(QUESTIONS, SHORT)) == expected


def test_one_call_at_a_time(llm: LLM) -> None:
    """A second generator that begins while one is at work raises; the first goes on."""
    first, second = llm.generate(QUESTIONS[:3], SHORT, ordered=True), llm.generate(["b"], SHORT)
    next(first)
    with pytest.raises(UsageError, match="at work on another call"):
        next(second)
    assert [output.index for output in first] == [1, 2]
    assert len(list(llm.generate(["b"], SHORT))) == 1


def test_an_iterator_that_raises(llm: LLM) -> None:
    """Its exception comes out as it is, and the engine is clean; also if it asks the model itself."""

    def prompts() -> Iterator[str]:
        yield from QUESTIONS
        raise KeyError("the database is gone")

    with pytest.raises(KeyError, match="the database is gone"):
        list(llm.generate(prompts(), SamplingParams(max_tokens=50)))
    assert_is_clean(llm)
    with pytest.raises(UsageError, match="at work on another call"):
        list(llm.generate((output.prompt for output in llm.generate(["a"])), SHORT))
    assert len(list(llm.generate(["a"], SHORT))) == 1


def test_interrupted_in_a_pass() -> None:
    """What the cache was promised and never got is not taken over by the next call."""
    prompt = "the same long beginning of every prompt " * 3
    with LLM("tiny-random", device="cpu", page_size=16) as llm, LLM("tiny-random", device="cpu", page_size=16) as other:

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        manager = llm._open().engine.manager
        handle = manager.passes.runner._model.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(llm.generate([prompt], SHORT))
        handle.remove()
        assert_is_clean(llm)
        assert texts(llm.generate([prompt], SHORT)) == texts(other.generate([prompt], SHORT))


@pytest.mark.parametrize("broken", ["remove", "activate"])
def test_interrupted_between_two_changes(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has finished and is still active, or holds blocks and is not: the next call finds nobody."""
    params = SamplingParams(4, n=2, temperature=1.0, ignore_eos=True)
    with LLM("tiny-random", device="cpu", page_size=16) as llm:
        scheduler, plain = llm._open().engine.manager.scheduler, getattr(Scheduler, broken)

        def interrupt(*_: object) -> None:
            monkeypatch.setattr(scheduler, broken, partial(plain, scheduler))
            raise KeyboardInterrupt

        monkeypatch.setattr(scheduler, broken, interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(llm.generate(["a prompt of more than a page of tokens"] * 2, params))
        assert_is_clean(llm)
        assert len(list(llm.generate(["a"], params))) == 1


def test_closed() -> None:
    """The model is freed, a call in between ends, and every use says what is wrong; closing twice is fine."""
    with LLM("tiny-random") as llm:
        model = weakref.ref(llm._open().engine.manager.passes.runner._model)
        outputs = llm.generate(QUESTIONS, SHORT)
        next(outputs)
    assert model() is None
    with pytest.raises(UsageError, match="this LLM was closed"):
        list(outputs)
    for use in (lambda: llm.generate("a"), lambda: llm.chat([]), lambda: llm.default_sampling_params):
        with pytest.raises(UsageError, match="this LLM was closed"):
            use()
    llm.close()


def test_stops(llm: LLM) -> None:
    """Stop texts cut the text and are the reason, as are token ids; an end at max_tokens is a length."""
    (plain,) = llm.generate("abc", SamplingParams(max_tokens=12))
    ids, whole = plain.outputs[0].token_ids, plain.outputs[0]
    assert (whole.finish_reason, whole.stop_reason, len(ids)) == ("length", None, 12)
    (cut,) = llm.generate("abc", SamplingParams(max_tokens=12, stop_token_ids=[ids[3]]))
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", ids[3])
    assert len(cut.outputs[0].token_ids) == ids.index(ids[3]) + 1
    mark = next(character for character in whole.text[1:] if character != "\N{REPLACEMENT CHARACTER}")
    (stopped,) = llm.generate("abc", SamplingParams(max_tokens=12, stop=[mark]))
    assert (stopped.outputs[0].stop_reason, stopped.outputs[0].text) == (mark, whole.text[: whole.text.index(mark)])


def test_logprobs(llm: LLM) -> None:
    """Arrays of the shapes that are documented, for every sample, and for the prompt from its second token on."""
    params = SamplingParams(max_tokens=5, n=2, temperature=1.0, logprobs=3, prompt_logprobs=2)
    (output,) = llm.generate([[1, 2, 3, 4]], params)
    for sample in output.outputs:
        scores = sample.logprobs
        assert scores.token_ids.tolist() == sample.token_ids
        assert scores.logprobs.shape == scores.ranks.shape == (5,)
        assert scores.top_ids.shape == scores.top_logprobs.shape == (5, 3)
        assert (scores.logprobs <= scores.top_logprobs[:, 0]).all() and (scores.ranks >= 1).all()
    assert output.prompt_logprobs.token_ids.tolist() == [2, 3, 4]
    assert output.prompt_logprobs.top_ids.shape == (3, 2)
    assert output.prompt_logprobs.logprobs.dtype == np.float32
    (silent,) = llm.generate([[1, 2, 3, 4]], SHORT)
    assert silent.prompt_logprobs is None and silent.outputs[0].logprobs is None


def test_structured_output(llm: LLM) -> None:
    """Each output has the form that its prompt asks for."""
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 22]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    prompts = [
        ("p", SamplingParams(max_tokens=40, json_schema=schema)),
        ("p", SamplingParams(max_tokens=40, choice=["yes", "no"])),
        ("p", SamplingParams(max_tokens=40, regex="[ab]{3}c")),
    ]
    by_schema, by_choice, by_regex = (output.outputs[0].text for output in llm.generate(prompts, ordered=True))
    assert json.loads(by_schema)["a"] in (1, 22)
    assert by_choice in ("yes", "no")
    assert re.fullmatch("[ab]{3}c", by_regex)


def test_many_parameters_at_once() -> None:
    """50 prompts, each with its own parameters, in one batch and one by one."""
    prompts = [
        (
            f"prompt {number % 10}",
            SamplingParams(
                max_tokens=1 + number % 7,
                temperature=(0.0, 0.7, 1.2)[number % 3],
                top_p=(1.0, 0.8)[number % 2],
                top_k=number % 4,
                repetition_penalty=(1.0, 1.3)[number % 2],
                n=1 + number % 3,
                seed=number if number % 5 == 0 else None,
                logprobs=1 if number % 4 == 0 else None,
            ),
        )
        for number in range(50)
    ]
    with LLM("tiny-random", device="cpu", deterministic=True) as llm:
        together, again = texts(llm.generate(prompts)), texts(llm.generate(prompts, ordered=True, max_waiting=1))
    with LLM("tiny-random", device="cpu", deterministic=True, max_requests_per_batch=1) as llm:
        one_by_one = texts(llm.generate(prompts))
    assert together == again == one_by_one
    assert [len(together[number]) for number in range(50)] == [1 + number % 3 for number in range(50)]


def test_lengths_are_recorded() -> None:
    """What the context leaves of max_tokens, and what is cut of a prompt."""
    with LLM("tiny-random", max_model_len=20, truncate_prompt="left") as llm:
        short, long = llm.generate(["ten tokens", "more tokens than there is room for"], ordered=True)
        assert (short.clamped_max_tokens, short.truncated_prompt_tokens) == (10, 0)
        assert long.truncated_prompt_tokens == 24 and len(long.prompt_token_ids) == 10
        assert long.prompt.startswith("more tokens")


def test_defaults_come_from_the_model(tmp_path: Path) -> None:
    """Its generation config where nothing is given, unless that is not wanted."""
    model = build_model(torch.float32)
    model.generation_config.update(do_sample=True, temperature=0.6, top_k=50, max_new_tokens=7)
    model.save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    with LLM(tmp_path) as llm:
        assert llm.default_sampling_params == SamplingParams(max_tokens=7, temperature=0.6, top_k=50)
        (output,) = llm.generate("a")
        assert len(output.outputs[0].token_ids) == 7
    with LLM(tmp_path, generation_config="none") as llm:
        assert llm.default_sampling_params == SamplingParams()


def test_times(llm: LLM) -> None:
    """Seconds of each sample, and none for what never reached the engine."""
    good, bad = llm.generate(["a", ""], SHORT, ordered=True)
    times = good.times
    assert times == good.outputs[0].times and bad.times is None
    assert times.ttft_s == pytest.approx(times.queue_s + times.prefill_s)
    assert times.tpot_s == pytest.approx(times.decode_s / 5)
    assert times.arrival_time.tzinfo is not None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"page_sze": 16}, "LLM has no option 'page_sze'"),
        ({"template": "x"}, "LLM has no option 'template'"),
        ({"page_size": 0}, "page_size: 0 is too small"),
        ({"page_size": "many"}, "--page-size"),
        ({"use_cuda_graph": True}, "use_cuda_graph: only CUDA devices record graphs, and this is cpu"),
        ({"async_scheduling": True}, "use_async_batching: batches overlap on the streams of CUDA devices"),
        ({"enforce_eager": "no"}, "--enforce-eager: true or false is expected, not 'no'"),
        ({"truncate_prompt": "up"}, "--truncate-prompt"),
        ({"generation_config": "vllm"}, "--generation-config"),
        ({"device": "tpu9"}, "--device tpu9"),
        ({"dtype": "int4"}, "--dtype int4"),
        ({"reasoning_tags": "<think>"}, "--reasoning-tags"),
        ({"chat_template": "nowhere.jinja"}, "--chat-template nowhere.jinja: cannot be read"),
        ({"chat_template_kwargs": {"tools": 1}}, "tools is set by cbgen"),
        ({"max_model_len": 100_000}, "the context of this model is 2048"),
    ],
)
def test_options_that_are_wrong(options: dict[str, Any], words: str) -> None:
    """One line that names the option, before any weight is loaded."""
    with pytest.raises(UsageError, match=re.escape(words)) as raised:
        LLM("tiny-random", **options)
    assert "\n" not in str(raised.value)


def test_arguments_that_are_wrong(llm: LLM) -> None:
    """Told by the call, before anything is pulled."""
    with pytest.raises(UsageError, match="sampling_params is a list"):
        llm.generate(["a"], [SHORT])
    with pytest.raises(UsageError, match="max_waiting is -1"):
        llm.generate(["a"], max_waiting=-1)
    with pytest.raises(RowError, match="temperature is -1"):
        SamplingParams(temperature=-1)
    with pytest.raises(UsageError, match="no such model folder"):
        LLM("./nowhere")
    assert issubclass(RowError, CbgenError)


def test_no_prompts(llm: LLM) -> None:
    """No output, and no error."""
    assert list(llm.generate([])) == list(llm.chat(iter([]))) == []


def test_what_has_no_effect_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """As a job prints it."""
    options = {"revision": "main", "enforce_eager": True, "q_padding_interval_size": 32}
    with caplog.at_level(logging.WARNING, "cbgen"), LLM("tiny-random", **options):
        assert "--revision has no effect: the model is not on a hub" in caplog.messages
        (line,) = [line for line in caplog.messages if line.startswith("--q-padding-interval-size")]
        assert line == "--q-padding-interval-size has no effect on cpu: only CUDA devices record graphs"


def test_reasoning_has_a_field(tmp_path: Path, llm: LLM) -> None:
    """As in a job, what was thought leaves the text."""
    template = tmp_path / "thinks.jinja"
    template.write_text("{{ messages[0].content }}<think>")
    with LLM("tiny-random", strip_reasoning=True, chat_template=template) as thinking:
        (output,) = thinking.chat([{"role": "user", "content": "a"}], SHORT)
    (plain,) = llm.generate("a<think>", SHORT)
    assert (output.outputs[0].reasoning, output.outputs[0].text) == (plain.outputs[0].text.strip("\n"), "")


def test_package_names() -> None:
    """The lazy names are there, the stub for type checkers has the same, and another one is no attribute."""
    assert {RequestOutput.__name__, CompletionOutput.__name__, "LLM", "SamplingParams"} == set(cbgen._HOMES)
    stub = (REPOSITORY / "cbgen" / "__init__.pyi").read_text()
    assert set(re.findall(r" as (\w+)$", stub, re.MULTILINE)) == set(cbgen._HOMES)
    assert set(cbgen._HOMES) <= set(dir(cbgen)) and (REPOSITORY / "cbgen" / "py.typed").exists()
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        cbgen.LLMs()


def test_documented_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of docs/python.md, in order, in a folder that has sample_data, in one namespace."""
    (tmp_path / "sample_data").symlink_to(SAMPLES)
    monkeypatch.chdir(tmp_path)
    page = (REPOSITORY / "docs" / "python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(block, namespace)


def test_arrays_are_no_prompts(llm: LLM) -> None:
    """Nor is anything else that looks like a list: an output with an error, and the prompt beside it is done."""
    outputs = list(llm.generate(["ok", np.array([1, 2, 3]), np.array([])], SamplingParams(max_tokens=2), ordered=True))
    assert [output.error is None for output in outputs] == [True, False, False]
