"""What the Python API gives back for a prompt."""

from dataclasses import dataclass, field

from cbgen.engine.logprobs import LogprobBuffer, TokenLogprobs
from cbgen.engine.metrics import RequestTimes, request_times
from cbgen.engine.requests import FinishReason, RequestState
from cbgen.output_rows import OutputText, OutputTexts


@dataclass(frozen=True)
class CompletionOutput:
    """One sample of a prompt.

    Args:
        index: which sample, from 0.
        text: the generated text; "" for an error. With strip_reasoning, the answer alone.
        token_ids: the generated tokens, also one that ended the output.
        finish_reason: "stop" (an end-of-sequence token, or what was to stop at), "length" or "error".
        stop_reason: the stop text, or the stop token's id, that ended it; None for an end of sequence.
        reasoning: with strip_reasoning, what the model thought before its answer; None without any.
        logprobs: of the T generated tokens, where asked for: arrays token_ids int32 [T], logprobs float32 [T] (natural,
            before temperature and penalties), ranks int32 [T] (1: none was likelier), and of the k likeliest tokens at
            each place, the likeliest first, top_ids int32 [T, k] and top_logprobs float32 [T, k].
        error: why there is no output, one line; None: there is.
        times: queue_s, prefill_s, decode_s, ttft_s and tpot_s in seconds, each None if the sample did not get there;
            arrival_time and finish_time in UTC. None for a prompt that never reached the engine.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None
    reasoning: str | None = None
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    times: RequestTimes | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and all its samples, or why it has none.

    Args:
        index: place of the prompt in the iterable, from 0.
        prompt: its text, of a chat what the template wrote; None if it was given as token ids, or has none.
        prompt_token_ids: what the model read; [] if it did not come to that.
        outputs: the samples in order, n of them; one with the error for a prompt that could not be read.
        prompt_logprobs: where asked for, as CompletionOutput.logprobs, of the P - 1 tokens of the prompt from the
            second on: nothing goes before the first.
        error: why the prompt, or the first sample that failed, has no output, one line; None: all is well.
        clamped_max_tokens: what the context left of max_tokens, where that was less; else None.
        truncated_prompt_tokens: with truncate_prompt, how many tokens of the prompt were cut.
    """

    index: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: TokenLogprobs | None = None
    error: str | None = None
    clamped_max_tokens: int | None = None
    truncated_prompt_tokens: int = 0

    @property
    def times(self) -> RequestTimes | None:
        """Those of the first sample."""
        return self.outputs[0].times


@dataclass
class Pending:
    """A prompt that was pulled and not yielded yet; the tag of its requests, one for each sample.

    num_unfinished: of the samples. requests: none for a prompt that cannot become any.
    """

    index: int
    prompt: str | None = None
    num_samples: int = 1
    num_unfinished: int = 1
    requests: list[RequestState] = field(default_factory=list)
    error: str | None = None
    clamped_max_tokens: int | None = None
    truncated_prompt_tokens: int = 0


def outputs_of(done: list[Pending], texts: OutputTexts) -> list[RequestOutput]:
    """One for each prompt; all are decoded together."""
    decoded = texts.of([request for pending in done for request in pending.requests])
    return [_output(pending, [next(decoded) for _ in pending.requests]) for pending in done]


def _output(pending: Pending, texts: list[OutputText]) -> RequestOutput:
    requests = pending.requests
    samples = [_sample(*own) for own in zip(range(len(requests)), requests, texts, strict=True)]
    if not samples:
        reason = FinishReason.ERROR.value
        samples = [CompletionOutput(k, "", [], reason, error=pending.error) for k in range(pending.num_samples)]
    error = next((sample.error for sample in samples if sample.error is not None), None)
    first = requests[0] if requests else None
    return RequestOutput(
        index=pending.index,
        prompt=pending.prompt,
        prompt_token_ids=[] if first is None else first.token_ids[: first.num_prompt_tokens],
        outputs=samples,
        prompt_logprobs=None if first is None or first.error else _value(first.prompt_logprobs),
        error=error,
        clamped_max_tokens=pending.clamped_max_tokens,
        truncated_prompt_tokens=pending.truncated_prompt_tokens,
    )


def _sample(index: int, request: RequestState, text: OutputText) -> CompletionOutput:
    failed = request.error is not None
    return CompletionOutput(
        index=index,
        text=text.completion or "",
        token_ids=[] if failed else request.generated_ids,
        finish_reason=text.finish_reason.value,
        stop_reason=text.stop_reason,
        reasoning=text.reasoning,
        logprobs=None if failed else _value(request.logprobs),
        error=request.error,
        times=request_times(request),
    )


def _value(buffer: LogprobBuffer | None) -> TokenLogprobs | None:
    return None if buffer is None else buffer.value
