"""From finished requests to output rows: text, thoughts, log-probabilities and times."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from cbgen.data.rows import OutputRow
from cbgen.duplicates import RowTag
from cbgen.engine.generated_text import TextCodec, stop_in_text
from cbgen.engine.metrics import request_times
from cbgen.engine.requests import FinishReason, RequestState
from cbgen.logprob_columns import LogprobColumns
from cbgen.prompting import Prompter
from cbgen.reasoning import ReasoningSplitter


@dataclass(frozen=True)
class OutputText:
    """What a finished request says, and how it ended. completion: None for an error."""

    completion: str | None
    reasoning: str | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class OutputTexts:
    """reasoning: parts what a model thinks from its answer; None: both are the completion."""

    def __init__(self, prompter: Prompter, tokenizer: PreTrainedTokenizerBase, reasoning: ReasoningSplitter | None):
        self.codec = TextCodec(tokenizer)
        self._prompter = prompter
        self._reasoning = reasoning

    def of(self, requests: list[RequestState]) -> Iterator[OutputText]:
        """One for each."""
        texts = self._prompter.decode(
            [request.text_ids for request in requests], [request.params.skip_special_tokens for request in requests]
        )
        for request, text in zip(requests, texts, strict=True):
            assert request.finish_reason is not None
            ended = OutputText(None, None, request.finish_reason, request.stop_reason)
            yield ended if request.error is not None else self._with_text(request, ended, text)

    def _with_text(self, request: RequestState, ended: OutputText, text: str) -> OutputText:
        """A stop text that the engine did not see in time cuts all the same."""
        stop = stop_in_text(self.codec, request.text_ids, request.params) if request.params.stop else None
        num_cut = 0
        if stop is not None:
            cut, stop_text = stop
            num_cut, text = len(text) - len(cut), cut
            ended = replace(ended, finish_reason=FinishReason.STOP, stop_reason=stop_text)
        reasoning, completion = self._parted(request, text, num_cut)
        return replace(ended, completion=completion, reasoning=reasoning)

    def _parted(self, request: RequestState, text: str, num_cut: int) -> tuple[str | None, str]:
        """Thoughts and answer. num_cut: characters at the end of the tokens' text that are no part of it."""
        if self._reasoning is None or request.params.structure is not None:  # a form leaves no place for thoughts
            return None, text
        prompt_ids, skip = request.token_ids[: request.num_prompt_tokens], [request.params.skip_special_tokens]
        return self._reasoning.split(
            prompt_ids, request.text_ids, lambda ids: self._prompter.decode([ids], skip)[0], num_cut
        )


class OutputRows:
    """See OutputTexts."""

    def __init__(self, prompter: Prompter, tokenizer: PreTrainedTokenizerBase, reasoning: ReasoningSplitter | None):
        self._texts = OutputTexts(prompter, tokenizer, reasoning)
        codec = self._texts.codec
        self._logprobs = LogprobColumns(lambda token_id: codec.decode([token_id], skip_special_tokens=False))

    def of(self, requests: list[RequestState]) -> Iterator[OutputRow]:
        """One for each, which names no row yet: see `for_row`."""
        for request, text in zip(requests, self._texts.of(requests), strict=True):
            row = _row(request, text)
            yield row if row.error is not None else self._with_output(request, row)

    def _with_output(self, request: RequestState, row: OutputRow) -> OutputRow:
        """What only a row without an error has."""
        logprobs, prompt_logprobs = request.logprobs, request.prompt_logprobs
        return replace(
            row,
            completion_tokens=request.num_generated_tokens,
            completion_ids=request.generated_ids,
            completion_logprobs=None if logprobs is None else self._logprobs.of_output(logprobs.value),
            prompt_token_logprobs=None
            if prompt_logprobs is None
            else self._logprobs.of_prompt(request.token_ids[0], prompt_logprobs.value),
        )


def for_row(row: OutputRow, tag: RowTag) -> OutputRow:
    """The output row of one of those that share a request."""
    return replace(
        row,
        key=tag.key,
        index=tag.index,
        sample_index=tag.sample_index,
        clamped_max_tokens=tag.clamped_max_tokens,
        truncated_prompt_tokens=tag.truncated_prompt_tokens,
    )


def failed_row(tag: RowTag, error: str) -> OutputRow:
    """The result of a row that never became a request: no tokens, no times."""
    return OutputRow(tag.key, tag.index, tag.sample_index, None, FinishReason.ERROR.value, error)


def _row(request: RequestState, text: OutputText) -> OutputRow:
    """What every row has that was a request."""
    times = request_times(request)
    return OutputRow(
        key=b"",
        index=-1,
        sample_index=0,
        completion=text.completion,
        finish_reason=text.finish_reason.value,
        error=request.error,
        prompt_tokens=request.num_prompt_tokens,
        stop_reason=None if text.stop_reason is None else str(text.stop_reason),
        reasoning=text.reasoning,
        queue_s=times.queue_s,
        prefill_s=times.prefill_s,
        decode_s=times.decode_s,
        ttft_s=times.ttft_s,
        tpot_s=times.tpot_s,
        arrival_time=times.arrival_time,
        finish_time=times.finish_time,
    )
