"""From logits to token ids: greedy, or drawn by temperature, top-k, top-p and min-p; a row's draw is its own."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from cbgen.engine.draws import draw_in_torch, draws_of
from cbgen.engine.failures import named_failures
from cbgen.engine.generated_text import TextCodec
from cbgen.engine.grammars import Grammars
from cbgen.engine.logits_processors import LogitsProcessors
from cbgen.engine.logprobs import TokenLogprobs, token_logprobs
from cbgen.engine.requests import RequestState
from cbgen.kernels.cpu.library import load_library
from cbgen.kernels.cpu.sampling import draw_rows

NOT_FINITE = "the model's logits are not finite (NaN or infinity)"
NOTHING_LEFT = "bad_words, logit_bias, min_tokens and the form of the output together leave no token to choose"


@dataclass
class Sampled:
    """Of each row the next token id, None where there is none; why there is none, by row, unless the logits are not
    finite; the log-probabilities of the rows that want them."""

    token_ids: list[int | None]
    errors: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


class Sampler:
    """Chooses the next token of each request.

    eos_token_ids: what ends a generation. codec, grammars: needed for what is asked for in text.
    """

    def __init__(
        self, eos_token_ids: Iterable[int] = (), codec: TextCodec | None = None, grammars: Grammars | None = None
    ):
        self.processors = LogitsProcessors(eos_token_ids, codec, grammars)

    @named_failures()
    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, requests: Sequence[RequestState]) -> Sampled:
        """The next token of each request, from logits [S, vocab] in the same order, which may change.

        Rows that ask for nothing but the likeliest token cost no more than finding it. No row's result depends on who
        else is there.
        """
        if logits.device.type == "mps":  # it has no float64, which the draws need
            logits = logits.cpu()
        best_ids, finite = _greedy(logits)
        sampled = Sampled([token_id if ok else None for token_id, ok in zip(best_ids, finite, strict=True)])
        living = [(row, request) for row, request in enumerate(requests) if finite[row]]
        changing = [(row, request) for row, request in living if request.needs_host]
        drawing = [row for row, request in living if not request.params.is_greedy]
        watched = [row for row, request in living if request.params.logprobs is not None]
        raw = logits[watched]  # before processors
        if changing:
            logits = logits.float()
            self._change(logits, changing, sampled)
            drawing = [row for row in drawing if row not in sampled.errors]
        if drawing:
            own = logits if len(drawing) == len(logits) else logits[drawing]
            for row, token_id in zip(drawing, _draw(own.float(), [requests[r] for r in drawing]), strict=True):
                sampled.token_ids[row] = token_id
        if watched:
            self._watch(raw, watched, requests, sampled)
        return sampled

    @named_failures()
    @torch.inference_mode()
    def described(
        self,
        logits: torch.Tensor,
        rows: list[int],
        requests: Sequence[RequestState],
        token_ids: list[int],
        is_finite: list[bool],
    ) -> Sampled:
        """What was chosen on the device, from these rows of logits [S, vocab], with all else that was asked for."""
        sampled = Sampled([token_id if ok else None for token_id, ok in zip(token_ids, is_finite, strict=True)])
        watched = [place for place, request in enumerate(requests) if request.params.logprobs is not None]
        if watched:
            self._watch(logits[[rows[place] for place in watched]], watched, requests, sampled)
        return sampled

    def _change(self, logits: torch.Tensor, changing: list[tuple[int, RequestState]], sampled: Sampled) -> None:
        """Processes the rows that ask for it, and finds the best token of each again."""
        sampled.errors = {
            row: why for row, request in changing if (why := self.processors.problem(request)) is not None
        }
        following = [(row, request) for row, request in changing if row not in sampled.errors]
        self.processors.apply(logits, following)
        best_ids, possible = _greedy(logits[[row for row, _ in following]])
        for (row, request), token_id, ok in zip(following, best_ids, possible, strict=True):
            sampled.token_ids[row] = token_id
            broken = None if request.matcher is None else request.matcher.error
            if broken is not None or not ok:
                sampled.errors[row] = broken or NOTHING_LEFT
        for row in sampled.errors:
            sampled.token_ids[row] = None

    @staticmethod
    def _watch(raw: torch.Tensor, rows: list[int], requests: Sequence[RequestState], sampled: Sampled) -> None:
        """The log-probabilities of what was chosen in these rows."""
        chosen = [
            (place, row, token) for place, row in enumerate(rows) if (token := sampled.token_ids[row]) is not None
        ]
        if not chosen:
            return
        places, living, token_ids = (list(column) for column in zip(*chosen, strict=True))
        asked = [requests[row].params.logprobs or 0 for row in living]
        found = token_logprobs(raw[places], token_ids, max(asked))
        for place, (row, num_top) in enumerate(zip(living, asked, strict=True)):
            sampled.logprobs[row] = found.piece(place, place + 1, num_top)


def _greedy(logits: torch.Tensor) -> tuple[list[int], list[bool]]:
    """The most likely token of each row, and whether the row is finite: a NaN in it comes out as its maximum."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:  # ten times as fast as torch's
        rows = logits.numpy()
        ids = rows.argmax(axis=-1)
        return ids.tolist(), np.isfinite(rows[np.arange(len(ids)), ids]).tolist()
    best, best_ids = logits.max(dim=-1)
    return best_ids.tolist(), torch.isfinite(best).tolist()


def _draw(logits: torch.Tensor, requests: list[RequestState]) -> list[int]:
    """Token ids drawn from float32 logits [S, vocab] as transformers filters them: temperature, then top-k, then the
    smallest set that reaches top-p, then min-p."""
    draws = draws_of(requests, [request.num_generated_tokens for request in requests])
    library = load_library() if logits.device.type == "cpu" else None
    if library is not None:
        return draw_rows(library, logits, draws)
    return draw_in_torch(logits, draws)
