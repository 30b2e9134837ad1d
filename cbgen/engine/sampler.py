"""From logits to token ids: greedy, or drawn by temperature, top-k, top-p and min-p; a row's draw is its own."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from cbgen.engine.failures import named_failures
from cbgen.engine.generated_text import TextCodec
from cbgen.engine.grammars import Grammars
from cbgen.engine.logits_processors import LogitsProcessors, changes_logits
from cbgen.engine.logprobs import TokenLogprobs, token_logprobs
from cbgen.engine.requests import RequestState
from cbgen.kernels.cpu.library import load_library
from cbgen.kernels.cpu.sampling import RowDraws, draw_rows

# Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014): SplitMix64.
_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
# A temperature below this would overflow the division; at this one the best token has all the probability already.
_LEAST_TEMPERATURE = 1e-20
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

NOT_FINITE = "the model's logits are not finite (NaN or infinity)"
NOTHING_LEFT = "bad_words, logit_bias, min_tokens and the form of the output together leave no token to choose"


def uniform_draws(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 in [0, 1), one per row, from uint64 seeds and positions: number `position` of the stream `seed`."""
    state = seeds + (positions + np.uint64(1)) * _GOLDEN_GAMMA
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return ((state ^ (state >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


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
        changing = [(row, request) for row, request in living if changes_logits(request.params)]
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
    draws = RowDraws(
        temperatures=np.array([max(r.params.temperature, _LEAST_TEMPERATURE) for r in requests], np.float32),
        top_ks=np.array([r.params.top_k for r in requests], np.int64),
        top_ps=np.array([r.params.top_p for r in requests], np.float64),
        min_ps=np.array([r.params.min_p for r in requests], np.float32),
        uniform=uniform_draws(
            np.array([(r.params.seed or 0) % 2**64 for r in requests], np.uint64),
            np.array([r.num_generated_tokens for r in requests], np.uint64),
        ),
    )
    library = load_library() if logits.device.type == "cpu" else None
    if library is not None:
        return draw_rows(library, logits, draws)
    return _draw_in_torch(logits, draws)


def _draw_in_torch(logits: torch.Tensor, draws: RowDraws) -> list[int]:
    """Rows are grouped by what they ask for, since those without filters need not be sorted."""
    filtered = (draws.top_ks > 0) | (draws.top_ps < 1)
    token_ids = np.empty(len(logits), np.int64)
    for rows, keep in ((np.flatnonzero(~filtered), _probabilities), (np.flatnonzero(filtered), _filtered)):
        if len(rows):
            weights = keep(logits[rows], draws.of(rows))
            token_ids[rows] = _invert(weights, draws.uniform[rows]).cpu().numpy()
    return token_ids.tolist()


def _probabilities(logits: torch.Tensor, draws: RowDraws) -> torch.Tensor:
    """[S, vocab], those below min_p of the largest 0."""
    probabilities = (logits / _column(draws.temperatures, logits.device)).softmax(-1)
    least = _column(draws.min_ps, logits.device) * probabilities.amax(-1, keepdim=True)
    return probabilities.masked_fill(probabilities < least, 0.0)


def _filtered(logits: torch.Tensor, draws: RowDraws) -> torch.Tensor:
    """The same, with those outside top_k and top_p 0 as well."""
    device, vocabulary = logits.device, logits.shape[-1]
    scaled, order = (logits / _column(draws.temperatures, device)).sort(dim=-1, descending=True, stable=True)
    top_ks = _column(np.where(draws.top_ks > 0, draws.top_ks, vocabulary), device)
    scaled = scaled.masked_fill(torch.arange(vocabulary, device=device) >= top_ks, -torch.inf)
    probabilities = scaled.softmax(-1)
    mass_before = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
    top_ps = _column(draws.top_ps, device)
    cut = (mass_before >= top_ps) & (top_ps < 1.0)
    cut |= probabilities < _column(draws.min_ps, device) * probabilities[:, :1]
    cut[:, 0] = False
    return torch.zeros_like(probabilities).scatter_(-1, order, probabilities.masked_fill(cut, 0.0))


def _column(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """[S, 1]"""
    return torch.from_numpy(values)[:, None].to(device)


def _invert(weights: torch.Tensor, uniform: np.ndarray) -> torch.Tensor:
    """Indices [S]: where the cumulated weights [S, N] pass the row's uniform draw times their sum."""
    cumulated = weights.double().cumsum(-1)
    total = cumulated[:, -1:]
    targets = torch.from_numpy(uniform).to(weights.device)[:, None] * total
    targets = torch.minimum(targets, torch.nextafter(total, torch.zeros_like(total)))  # the product may round up
    return torch.searchsorted(cumulated, targets, right=True)[:, 0]
