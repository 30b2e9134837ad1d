"""What changes logits before a token is chosen: biases, penalties, and tokens that may not come.

All of it is done to the rows that ask for it alone, and for all of them at once: the places that change are listed row
by row, and read and written together.

    request  penalties  bias   bad words        rows   [ 0 0 0 2 2 5 ... ]
    0        x x x                       ──►    tokens [ 7 9 4 7 1 3 ... ]    logits[rows, tokens] = f(logits[...])
    2                   x      x
    5        x

The order is that of transformers: bias, repetition, presence and frequency, bad words, min_tokens, form of the output.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from cbgen.engine.generated_text import TextCodec
from cbgen.engine.grammars import GrammarMatcher, Grammars
from cbgen.engine.requests import RequestState
from cbgen.engine.sampling_params import SamplingParams
from cbgen.engine.token_history import TokenHistory
from cbgen.errors import RowError

BANNED = -torch.inf


class LogitsProcessors:
    """eos_token_ids: what ends a generation. codec, grammars: for bad words, and the form of an output."""

    def __init__(self, eos_token_ids: Iterable[int], codec: TextCodec | None, grammars: Grammars | None):
        self._eos_token_ids = sorted(eos_token_ids)
        self._codec = codec
        self._grammars = grammars

    def apply(self, logits: torch.Tensor, requests: Sequence[tuple[int, RequestState]]) -> None:
        """Changes rows of float32 logits [S, vocab] in place; with each request comes the number of its row.

        Those with a form of the output have been asked for its problem before.
        """
        _bias(logits, requests)
        _penalize(logits, requests)
        _set(logits, ((row, self._banned_words(request)) for row, request in requests if request.params.bad_words))
        _set(logits, ((row, self._banned_ends(request)) for row, request in requests if request.params.min_tokens))
        structured = [(row, request) for row, request in requests if request.params.structure]
        if structured:
            self._keep_to_form(logits, structured)

    def _banned_words(self, request: RequestState) -> list[int]:
        """The last token of every bad word whose other tokens the request ends with."""
        assert self._codec is not None, "bad words need a tokenizer"
        return [
            word[-1]
            for word in self._codec.words_as_ids(request.params.bad_words)
            if len(word) == 1 or tuple(request.token_ids[1 - len(word) :]) == word[:-1]
        ]

    def _banned_ends(self, request: RequestState) -> Sequence[int]:
        """The tokens that would end it before it has min_tokens."""
        params = request.params
        if request.num_generated_tokens >= params.min_tokens or params.structure is not None:  # see _keep_to_form
            return ()
        return params.stop_token_ids if params.ignore_eos else [*self._eos_token_ids, *params.stop_token_ids]

    def problem(self, request: RequestState) -> str | None:
        """Why the form of a request's output cannot be followed, at its beginning; None: it can."""
        if request.params.structure is None or request.matcher is not None:
            return None
        assert self._grammars is not None, "a form needs a tokenizer"
        try:
            request.matcher = self._grammars.matcher(request.params.structure)
        except RowError as error:
            return str(error)
        return None

    def is_complete(self, request: RequestState) -> bool:
        """Whether the form of a request's output leaves nothing to be generated."""
        return request.params.structure is not None and _caught_up(request).is_complete

    def _keep_to_form(self, logits: torch.Tensor, structured: list[tuple[int, RequestState]]) -> None:
        assert self._grammars is not None, "a form needs a tokenizer"
        rows = [row for row, _ in structured]
        allowed = self._grammars.allowed([_caught_up(request) for _, request in structured])
        for mask, (_, request) in zip(allowed, structured, strict=True):
            if request.num_generated_tokens < request.params.min_tokens:
                self._put_off_the_end(mask)
        allowed = allowed.to(logits.device)
        logits[rows] = logits[rows].masked_fill(~allowed, BANNED)

    def _put_off_the_end(self, allowed: torch.Tensor) -> None:
        """Of the tokens of a row [vocab], none that ends it, unless nothing else is left."""
        ends = [token for token in self._eos_token_ids if token < len(allowed) and allowed[token]]
        allowed[ends] = False
        if not allowed.any():
            allowed[ends] = True


def _caught_up(request: RequestState) -> GrammarMatcher:
    """The form of a request's output, as far as it has come."""
    assert request.matcher is not None, "see LogitsProcessors.problem"
    request.matcher.catch_up(request.generated_ids)
    return request.matcher


def _bias(logits: torch.Tensor, requests: Sequence[tuple[int, RequestState]]) -> None:
    biased = [(row, request.params.logit_bias) for row, request in requests if request.params.logit_bias]
    if biased:
        rows, tokens = _places(((row, [token for token, _ in bias]) for row, bias in biased), logits.device)
        added = [number for _, bias in biased for _, number in bias]
        logits[rows, tokens] += torch.tensor(added, dtype=logits.dtype, device=logits.device)


def _penalize(logits: torch.Tensor, requests: Sequence[tuple[int, RequestState]]) -> None:
    penalized = [(row, request) for row, request in requests if request.params.needs_history]
    if not penalized:
        return
    histories = [_history(request) for _, request in penalized]
    lengths = [len(history.token_ids) for history in histories]
    rows, tokens = _places(
        ((row, history.token_ids) for (row, _), history in zip(penalized, histories, strict=True)), logits.device
    )

    def of_each(value: Callable[[SamplingParams], float]) -> torch.Tensor:
        values = np.array([value(request.params) for _, request in penalized], np.float32)
        return torch.from_numpy(np.repeat(values, lengths)).to(logits.device)

    counts = torch.from_numpy(np.concatenate([history.counts for history in histories])).to(logits.device)
    repetition = of_each(lambda params: params.repetition_penalty)
    found = logits[rows, tokens]
    found = torch.where(found < 0, found * repetition, found / repetition)
    found -= of_each(lambda params: params.frequency_penalty) * counts
    found -= of_each(lambda params: params.presence_penalty) * (counts > 0)
    logits[rows, tokens] = found


def _history(request: RequestState) -> TokenHistory:
    if request.history is None:
        request.history = TokenHistory(request.token_ids[: request.num_prompt_tokens])
    request.history.catch_up(request.generated_ids)
    return request.history


def _set(logits: torch.Tensor, banned: Iterator[tuple[int, Sequence[int]]]) -> None:
    width = logits.shape[-1]  # which tokenizers, and configs, may go beyond
    listed = [(row, [token for token in tokens if token < width]) for row, tokens in banned]
    listed = [(row, tokens) for row, tokens in listed if tokens]
    if listed:
        logits[_places(listed, logits.device)] = BANNED


def _places(
    listed: Iterable[tuple[int, Sequence[int] | np.ndarray]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and tokens, one pair for each token listed."""
    rows, tokens = zip(*listed, strict=True)
    lengths = [len(own) for own in tokens]
    flat = np.concatenate([np.asarray(own, dtype=np.int64) for own in tokens])
    return torch.from_numpy(np.repeat(np.array(rows), lengths)).to(device), torch.from_numpy(flat).to(device)
