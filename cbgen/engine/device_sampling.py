"""Tokens chosen on the device, without the host knowing them: greedy rows, drawn rows, forks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cbgen.engine.draws import TorchDraws, draw_filtered, draw_plain, draws_of, is_filtered
from cbgen.engine.failures import named_failures
from cbgen.engine.requests import RequestState
from cbgen.kernels.cpu.sampling import RowDraws
from cbgen.streams import Streams

ARRAYS = 8  # of as many words as there are rows, at most


@dataclass(frozen=True)
class Choices:
    """From which row of the logits each of N rows gets its token, and how those are drawn that are not greedy.

    plain, filtered: places among the N that are drawn, without and with filters, with `draws` for each: of the first,
    then of the second.
    """

    rows: np.ndarray
    plain: np.ndarray
    filtered: np.ndarray
    draws: RowDraws | None

    @classmethod
    def of(cls, rows: list[int], requests: Sequence[RequestState]) -> "Choices":
        """For requests whose tokens before are known or awaited."""
        own_rows, none = np.array(rows, dtype=np.int64), np.empty(0, dtype=np.int64)
        drawing = [place for place, request in enumerate(requests) if not request.params.is_greedy]
        if not drawing:
            return cls(own_rows, none, none, None)
        drawn = [requests[place] for place in drawing]
        draws = draws_of(drawn, [one.num_expected_tokens - one.num_prompt_tokens for one in drawn])
        filtered = is_filtered(draws)
        order = np.argsort(filtered, kind="stable")
        places = np.array(drawing, dtype=np.int64)
        return cls(own_rows, places[~filtered], places[filtered], draws.of(order))

    def is_likeliest_of_each(self, num_logits: int) -> bool:
        """Whether every row of the logits gives its likeliest token, in order, and nothing else is wanted."""
        return self.draws is None and np.array_equal(self.rows, np.arange(num_logits))


@dataclass(frozen=True)
class SentChoices:
    """Where choices lie on the device. rows: [N]; plain, filtered: [P] and [F]; draws: of those."""

    rows: torch.Tensor
    plain: torch.Tensor
    filtered: torch.Tensor
    plain_draws: TorchDraws
    filtered_draws: TorchDraws
    num_words: int


class ChoiceBuffers:
    """Static memory for the choices of one pass.

    words   [ rows | plain, filtered | top_ks | temperatures | top_ps | min_ps | uniform ]     fractions as float64
    """

    def __init__(self, most_rows: int, streams: Streams):
        self._host, self._device = streams.allocate(ARRAYS * most_rows)

    @property
    def num_bytes(self) -> int:
        """Of the device."""
        return self._device.nbytes

    def lay_out(self, choices: Choices) -> SentChoices:
        """Fills the host's memory; returns views of the device's."""
        num_rows, num_plain = len(choices.rows), len(choices.plain)
        num_drawn = num_plain + len(choices.filtered)
        columns: list[np.ndarray] = [choices.rows, choices.plain, choices.filtered]
        if choices.draws is not None:
            draws = choices.draws
            floats = (draws.temperatures, draws.top_ps, draws.min_ps, draws.uniform)
            columns += [draws.top_ks, *(column.astype(np.float64).view(np.int64) for column in floats)]
        words = np.concatenate(columns)
        self._host.numpy()[: len(words)] = words
        rows, places = self._device[:num_rows], self._device[num_rows : num_rows + num_drawn]
        first = num_rows + num_drawn
        own = self._device[first : first + 5 * num_drawn].view(5, num_drawn, 1)
        top_ks, floats_there = own[0], own[1:].view(torch.float64)
        found = TorchDraws(
            temperatures=floats_there[0],
            top_ks=top_ks,
            top_ps=floats_there[1],
            min_ps=floats_there[2],
            uniform=floats_there[3],
        )
        plain, filtered = _slice(found, slice(0, num_plain)), _slice(found, slice(num_plain, num_drawn))
        return SentChoices(rows, places[:num_plain], places[num_plain:], plain, filtered, len(words))

    def send(self, sent: SentChoices) -> None:
        """Copies what was laid out to the device; to be called there in the order of its work."""
        if self._device is not self._host:
            own = slice(sent.num_words)
            self._device[own].copy_(self._host[own], non_blocking=True)

    @staticmethod
    @named_failures()
    @torch.inference_mode()
    def choose(sent: SentChoices, logits: torch.Tensor, token_ids: torch.Tensor, is_finite: torch.Tensor) -> None:
        """Replaces the likeliest token of each row of logits [S, vocab], and whether it is finite, by those of the N
        rows."""
        num_rows = len(sent.rows)
        best_ids, finite = token_ids[sent.rows], is_finite[sent.rows]
        for places, draws, draw in (
            (sent.plain, sent.plain_draws, draw_plain),
            (sent.filtered, sent.filtered_draws, draw_filtered),
        ):
            if len(places):
                best_ids[places] = draw(logits[sent.rows[places]].float(), _as_drawn(draws))
        token_ids[:num_rows].copy_(best_ids)
        is_finite[:num_rows].copy_(finite)


def _slice(draws: TorchDraws, rows: slice) -> TorchDraws:
    return TorchDraws(
        draws.temperatures[rows], draws.top_ks[rows], draws.top_ps[rows], draws.min_ps[rows], draws.uniform[rows]
    )


def _as_drawn(draws: TorchDraws) -> TorchDraws:
    """Numbers of the kind that the host draws with: its results are to be the same."""
    return TorchDraws(draws.temperatures.float(), draws.top_ks, draws.top_ps, draws.min_ps.float(), draws.uniform)
