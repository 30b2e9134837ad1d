"""Drawing tokens from logits in torch, on any device: temperature, then top-k, then top-p, then min-p."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cbgen.engine.requests import RequestState
from cbgen.kernels.cpu.sampling import RowDraws

# Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014): SplitMix64.
_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
# A temperature below this would overflow the division; at this one the best token has all the probability already.
_LEAST_TEMPERATURE = 1e-20


def uniform_draws(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 in [0, 1), one per row, from uint64 seeds and positions: number `position` of the stream `seed`."""
    state = seeds + (positions + np.uint64(1)) * _GOLDEN_GAMMA
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return ((state ^ (state >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


def draws_of(requests: Sequence[RequestState], positions: Sequence[int]) -> RowDraws:
    """How these requests draw their tokens number `positions`, counted from 0."""
    return RowDraws(
        temperatures=np.array([max(r.params.temperature, _LEAST_TEMPERATURE) for r in requests], np.float32),
        top_ks=np.array([r.params.top_k for r in requests], np.int64),
        top_ps=np.array([r.params.top_p for r in requests], np.float64),
        min_ps=np.array([r.params.min_p for r in requests], np.float32),
        uniform=uniform_draws(
            np.array([(r.params.seed or 0) % 2**64 for r in requests], np.uint64), np.array(positions, np.uint64)
        ),
    )


def is_filtered(draws: RowDraws) -> np.ndarray:
    """bool [S], the rows whose tokens must be sorted."""
    return (draws.top_ks > 0) | (draws.top_ps < 1)


@dataclass(frozen=True)
class TorchDraws:
    """RowDraws on the device of the logits, each [S, 1]."""

    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    uniform: torch.Tensor

    @classmethod
    def on(cls, device: torch.device, draws: RowDraws) -> "TorchDraws":
        """Copies them to a device."""
        columns = (draws.temperatures, draws.top_ks, draws.top_ps, draws.min_ps, draws.uniform)
        return cls(*(torch.from_numpy(column)[:, None].to(device) for column in columns))


def draw_in_torch(logits: torch.Tensor, draws: RowDraws) -> list[int]:
    """A token of each row of float32 logits [S, vocab]; rows without filters need not be sorted."""
    filtered = is_filtered(draws)
    token_ids = np.empty(len(logits), np.int64)
    for rows, draw in ((np.flatnonzero(~filtered), draw_plain), (np.flatnonzero(filtered), draw_filtered)):
        if len(rows):
            token_ids[rows] = draw(logits[rows], TorchDraws.on(logits.device, draws.of(rows))).cpu().numpy()
    return token_ids.tolist()


def draw_plain(logits: torch.Tensor, draws: TorchDraws) -> torch.Tensor:
    """Token ids int64 [S], from float32 logits [S, vocab] of rows without top_k and top_p."""
    return _invert(plain_weights(logits, draws), draws)


def draw_filtered(logits: torch.Tensor, draws: TorchDraws) -> torch.Tensor:
    """The same of rows with any filters."""
    return _invert(filtered_weights(logits, draws), draws)


def plain_weights(logits: torch.Tensor, draws: TorchDraws) -> torch.Tensor:
    """[S, vocab], the probabilities, those below min_p of the largest 0."""
    probabilities = (logits / draws.temperatures).softmax(-1)
    least = draws.min_ps * probabilities.amax(-1, keepdim=True)
    return probabilities.masked_fill(probabilities < least, 0.0)


def filtered_weights(logits: torch.Tensor, draws: TorchDraws) -> torch.Tensor:
    """The same, with those outside top_k and top_p 0 as well."""
    vocabulary = logits.shape[-1]
    scaled, order = (logits / draws.temperatures).sort(dim=-1, descending=True, stable=True)
    top_ks = torch.where(draws.top_ks > 0, draws.top_ks, vocabulary)
    scaled = scaled.masked_fill(torch.arange(vocabulary, device=logits.device) >= top_ks, -torch.inf)
    probabilities = scaled.softmax(-1)
    mass_before = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
    cut = (mass_before >= draws.top_ps) & (draws.top_ps < 1.0)
    cut |= probabilities < draws.min_ps * probabilities[:, :1]
    cut[:, 0] = False
    return torch.zeros_like(probabilities).scatter_(-1, order, probabilities.masked_fill(cut, 0.0))


def _invert(weights: torch.Tensor, draws: TorchDraws) -> torch.Tensor:
    """Indices [S]: where the cumulated weights [S, N] pass the row's uniform draw times their sum.

    Below N, too, where weights are NaN: nobody is told of the token then, but the device may compute with it.
    """
    cumulated = weights.double().cumsum(-1)
    total = cumulated[:, -1:]
    targets = draws.uniform * total
    targets = torch.minimum(targets, torch.nextafter(total, torch.zeros_like(total)))  # the product may round up
    return torch.searchsorted(cumulated, targets, right=True)[:, 0].clamp(max=weights.shape[-1] - 1)
