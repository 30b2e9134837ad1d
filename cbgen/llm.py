"""The Python API: a model that is loaded once and generates for any iterable of prompts."""

import itertools
import os
from collections.abc import Generator, Iterable, Iterator
from dataclasses import fields
from typing import Any

from cbgen.config import ContinuousBatchingConfig
from cbgen.device import release_unused_memory
from cbgen.engine.sampling_params import SamplingParams
from cbgen.errors import UsageError
from cbgen.jobspec import ALIASES, OPPOSITES, build_spec
from cbgen.length_policy import LengthPolicy
from cbgen.llm_loading import LoadedModel, load_for
from cbgen.llm_outputs import RequestOutput
from cbgen.llm_requests import Call, CallOptions, Reader, is_pair
from cbgen.output_rows import OutputTexts
from cbgen.prompting import TOOLS_COLUMN, Prompter, resolve_source
from cbgen.reasoning import DEFAULT_TAGS

ENGINE_OPTIONS = tuple(field.name for field in fields(ContinuousBatchingConfig))
# Prompts that may wait, as a multiple of max_requests_per_batch: to begin, or, in order, for one before them as well.
WAITING, WAITING_IN_ORDER = 2, 8


class LLM:
    """A model that generates for any iterable of prompts, in the batches of cbgen's engine.

        from cbgen import LLM, SamplingParams

        with LLM("smollm2") as llm:
            for output in llm.generate(["Once upon a time", "The sea"], SamplingParams(max_tokens=32)):
                print(output.index, output.error or output.outputs[0].text)

    The same prompt with the same parameters and seed gets the same tokens as in a job of `cbgen run`. One call of
    generate or chat at a time, from one thread.

    Args:
        model: a model folder, hub id or .gguf file; "smollm2"; "tiny-random", a test model made in memory.
        revision: branch, tag or commit of a hub model.
        device: "auto", "cpu", "cuda", "cuda:N" or "mps".
        dtype: "float32", "bfloat16" or "float16"; "auto": float32 on CPUs, else 16 bits.
        quantization: of the weights on a CPU: "int8", "w8a8" or "w8a16"; None: none.
        calibration: a text file that int8 activations are calibrated on, instead of a text of cbgen's own.
        max_model_len: context in tokens, prompt and output together, if less than the model's.
        generation_config: "auto": where no parameters are given, the model's generation config counts; "none": it does
            not.
        chat_template: a file with the template to use instead of the model's.
        chat_template_kwargs: variables for the template.
        truncate_prompt: where a prompt that leaves max_tokens no room is cut: "left", "right" or "middle"; "none": it
            is an error.
        strip_reasoning: whether what the model thinks goes to CompletionOutput.reasoning instead of the text.
        reasoning_tags: the tags around it, parted by a space.
        seed: a whole number that the draws come from where SamplingParams.seed is None.
        engine_options: fields of cbgen.config.ContinuousBatchingConfig, such as max_requests_per_batch, or vLLM's
                names for them (max_num_seqs, max_num_batched_tokens, enable_prefix_caching, enforce_eager,
                async_scheduling).

    Raises:
        cbgen.errors.UsageError: an option is unknown or out of range; the message spells it as the command line does.
        cbgen.errors.ModelError: the model is missing or not supported.
        cbgen.errors.MemoryPlanError: its cache does not fit in memory.

    What has no effect, and what the engine does about a forward pass that failed, is told to the logger "cbgen".
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        revision: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        quantization: str | None = None,
        calibration: str | os.PathLike[str] | None = None,
        max_model_len: int | None = None,
        generation_config: str = "auto",
        chat_template: str | os.PathLike[str] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        truncate_prompt: str = "none",
        strip_reasoning: bool = False,
        reasoning_tags: str = DEFAULT_TAGS,
        seed: int = 0,
        **engine_options: Any,
    ):
        for name in engine_options:
            if name not in (*ENGINE_OPTIONS, *ALIASES, *OPPOSITES):
                raise UsageError(f"LLM has no option {name!r}; those of the engine are {', '.join(ENGINE_OPTIONS)}")
        self._spec = build_spec(
            {
                "model": os.fspath(model),
                "out": os.curdir,  # which every job has; nothing is written
                "revision": revision,
                "device": device,
                "dtype": dtype,
                "quantization": quantization,
                "calibration": None if calibration is None else os.fspath(calibration),
                "max_model_len": max_model_len,
                "generation_config": generation_config,
                "chat_template": None if chat_template is None else os.fspath(chat_template),
                "chat_template_kwargs": chat_template_kwargs or {},
                "truncate_prompt": truncate_prompt,
                "strip_reasoning": strip_reasoning,
                "reasoning_tags": reasoning_tags,
                "seed": seed,
                **engine_options,
            }
        )
        self._loaded: LoadedModel | None = load_for(self._spec)
        self._call: Call | None = None
        self._numbers = itertools.count()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def default_sampling_params(self) -> SamplingParams:
        """What is generated with where no parameters are given: the model's generation config, or greedy."""
        return self._open().defaults

    def generate(
        self,
        prompts: str | Iterable[Any],
        sampling_params: SamplingParams | None = None,
        *,
        ordered: bool = False,
        max_waiting: int | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Yields an output for each prompt, as they finish or, if `ordered`, in the order of the prompts.

        Nothing happens until the first output is asked for. Then prompts are pulled from the iterable, in this thread
        and between forward passes, while fewer than max_waiting + max_requests_per_batch samples were pulled and not
        yielded; so the iterable may be endless. What a slow one takes is bounded by what the passes take.

        A generator that is closed, or that nobody refers to any more, takes what is unfinished out of the engine.

        Args:
            prompts: texts, lists of token ids, or pairs of one of these and its own SamplingParams; or one text.
            sampling_params: of the prompts that bring none; None: see default_sampling_params.
            ordered: results that finish early wait for those before them.
            max_waiting: prompts, beside those of one batch, that may wait to begin, or in order for one before them; a
                prompt counts once for each of its samples. None: twice max_requests_per_batch, 8 times if ordered.

        A prompt that cannot be generated (empty, of another type, too long, with parameters that the model cannot
        follow) is an output with an `error`. What the iterable raises is raised here, and other calls may follow.
        Raises cbgen.errors.UsageError when another call is not finished, or the LLM was closed.

        Sampled prompts without a seed of their own are drawn by the LLM's seed, the prompt, the parameters and how
        often the call had the same before, for which some 40 bytes are kept for each different one until it ends. Two
        calls with the same prompts give the same.
        """
        loaded = self._open()
        text, ids = (loaded.prompter(resolve_source([column])) for column in ("prompt", "prompt_ids"))

        def read(prompt: Any) -> tuple[Prompter, dict[str, Any]]:
            return (ids, {"prompt_ids": prompt}) if isinstance(prompt, list) else (text, {"prompt": prompt})

        items = [prompts] if isinstance(prompts, str) or is_pair(prompts) else prompts
        return self._outputs(iter(items), self._options(loaded, read, sampling_params, max_waiting, ordered), ordered)

    def chat(
        self,
        conversations: Iterable[Any],
        sampling_params: SamplingParams | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        continue_final_message: bool = False,
        ordered: bool = False,
        max_waiting: int | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """The same for conversations, which the chat template makes into prompts.

        Args:
            conversations: lists of messages, {"role": ..., "content": ...}, or pairs of one of these and its own
                SamplingParams; or one list of messages.
            tools: descriptions of functions, for the template.
            continue_final_message: whether a conversation that ends with the assistant's message is gone on with; it is
                an error otherwise.

        A template that refuses a conversation, or that has no place for tools, is an error of the output. Templates
        that print the date have that of the day on which the LLM was made. Raises UsageError for a model without one.
        """
        loaded = self._open()
        source = resolve_source(
            ["messages", TOOLS_COLUMN],
            chat_template_kwargs=self._spec.chat_template_kwargs,
            chat_template=loaded.chat_template,
            continue_final_message=continue_final_message,
        )
        prompter = loaded.prompter(source)

        def read(messages: Any) -> tuple[Prompter, dict[str, Any]]:
            return prompter, {"messages": messages, TOOLS_COLUMN: tools}

        is_one = isinstance(conversations, list) and bool(conversations) and isinstance(conversations[0], dict)
        items = [conversations] if is_one or is_pair(conversations) else conversations
        return self._outputs(iter(items), self._options(loaded, read, sampling_params, max_waiting, ordered), ordered)

    def close(self) -> None:
        """Gives the memory of model and cache back. A call that is not finished raises UsageError when it goes on."""
        if self._loaded is None:
            return
        device, self._loaded = self._loaded.device, None
        if self._call is not None:
            self._call.end()
        release_unused_memory(device)

    def _open(self) -> LoadedModel:
        if self._loaded is None:
            raise UsageError("this LLM was closed; make another one")
        return self._loaded

    def _options(
        self,
        loaded: LoadedModel,
        read: Reader,
        params: SamplingParams | None,
        max_waiting: int | None,
        ordered: bool,
    ) -> CallOptions:
        if params is not None and not isinstance(params, SamplingParams):
            raise UsageError(
                f"sampling_params is a {type(params).__name__}, one SamplingParams is expected; give pairs (prompt, "
                "SamplingParams) where they differ"
            )
        at_once = loaded.engine.config.max_requests_per_batch
        waiting = (WAITING_IN_ORDER if ordered else WAITING) * at_once if max_waiting is None else max_waiting
        if waiting < 0:
            raise UsageError(f"max_waiting is {waiting}, 0 or more is expected")
        bos_token_id = loaded.model.tokenizer.bos_token_id
        return CallOptions(
            read=read,
            params=loaded.defaults if params is None else params,
            lengths=LengthPolicy(loaded.model.max_model_len, self._spec.truncate_prompt, bos_token_id),
            seed=self._spec.seed,
            max_pending=waiting + at_once,
            numbers=self._numbers,
        )

    def _outputs(
        self, items: Iterator[Any], options: CallOptions, ordered: bool
    ) -> Generator[RequestOutput, None, None]:
        loaded = self._open()
        if self._call is not None:
            raise UsageError("this LLM is at work on another call: take all its outputs, or close() its generator")
        texts = OutputTexts(loaded.prompter(resolve_source(["prompt"])), loaded.model.tokenizer, loaded.reasoning)
        call = self._call = Call(loaded.engine.manager, texts, items, options, ordered)
        del loaded  # so that closing frees it
        try:
            while not call.is_done:
                self._open()
                yield from call.advance()
        finally:
            call.end()
            self._call = None
