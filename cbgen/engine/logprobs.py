"""Log-probabilities of tokens and of the likeliest ones beside them, from logits as the model gives them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cbgen.engine.sampling_params import MAX_LOGPROBS

# Rows of logits that are worked on at a time hold so many numbers: a copy of all of them would double their memory.
PIECE_NUMBERS = 1 << 22


@dataclass(frozen=True)
class TokenLogprobs:
    """Of T tokens: token_ids int32 [T], logprobs float32 [T], ranks int32 [T] (1: none is likelier), and of the k
    likeliest tokens at each place, in order, top_ids int32 [T, k] and top_logprobs float32 [T, k]."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray

    def __len__(self) -> int:
        return len(self.token_ids)

    def piece(self, start: int, end: int, num_top: int) -> "TokenLogprobs":
        """Some of the tokens, with fewer alternatives."""
        return TokenLogprobs(
            self.token_ids[start:end],
            self.logprobs[start:end],
            self.ranks[start:end],
            self.top_ids[start:end, :num_top],
            self.top_logprobs[start:end, :num_top],
        )


class LogprobBuffer:
    """TokenLogprobs that grow, in arrays: a fifth of the memory of an object for each token."""

    def __init__(self, num_top: int):
        self.num_top = num_top
        self._size = 0
        self._arrays = _arrays(16, num_top)

    def __len__(self) -> int:
        return self._size

    @property
    def value(self) -> TokenLogprobs:
        return TokenLogprobs(*(array[: self._size] for array in self._arrays))

    def extend(self, more: TokenLogprobs) -> None:
        """more: with num_top alternatives."""
        size = self._size + len(more)
        while len(self._arrays[0]) < size:
            pairs = zip(self._arrays, _arrays(len(self._arrays[0]), self.num_top), strict=True)
            self._arrays = tuple(np.concatenate(pair) for pair in pairs)
        added = (more.token_ids, more.logprobs, more.ranks, more.top_ids, more.top_logprobs)
        for array, values in zip(self._arrays, added, strict=True):
            array[self._size : size] = values
        self._size = size


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> TokenLogprobs:
    """logits [T, vocab], those that each of the T tokens was, or could have been, chosen from."""
    num_top = min(num_top, logits.shape[-1])
    found_top = (
        min(MAX_LOGPROBS, logits.shape[-1]) if num_top else 0
    )  # always as many: which of equal ones come hangs on it
    ids = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    step = max(1, PIECE_NUMBERS // logits.shape[-1])
    pieces = [
        _of_piece(rows.float(), own[:, None], found_top)
        for rows, own in zip(logits.split(step), ids.split(step), strict=True)
    ]
    logprobs, ranks, top_ids, top_logprobs = (torch.cat(parts).cpu().numpy() for parts in zip(*pieces, strict=True))
    ids_told = np.array(token_ids, np.int32)
    return TokenLogprobs(ids_told, logprobs, ranks, top_ids[:, :num_top], top_logprobs[:, :num_top])


def _of_piece(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> tuple[torch.Tensor, ...]:
    chosen = logits.gather(-1, token_ids)
    normalizer = logits.logsumexp(-1, keepdim=True)
    ranks = (logits > chosen).sum(-1, dtype=torch.int32) + 1
    top, top_ids = logits.topk(num_top, dim=-1)
    return (chosen - normalizer)[:, 0], ranks, top_ids.to(torch.int32), top - normalizer


def _arrays(size: int, num_top: int) -> tuple[np.ndarray, ...]:
    """In the order of TokenLogprobs."""
    return (
        np.zeros(size, np.int32),
        np.zeros(size, np.float32),
        np.zeros(size, np.int32),
        np.zeros((size, num_top), np.int32),
        np.zeros((size, num_top), np.float32),
    )
