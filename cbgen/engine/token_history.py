"""Which tokens a request holds, and how often its output does: kept up with it, so that no step goes through it all."""

from collections.abc import Sequence

import numpy as np

_FIRST_CAPACITY = 64


class TokenHistory:
    """Distinct tokens, each with its count in the output; those of the prompt alone have 0.

    token_ids   [ prompt's, each once | output's that the prompt lacks, as they came | spare ]
    counts      [ 0 0 2 0 0           | 1 3 1                                        |       ]
    """

    def __init__(self, prompt_ids: Sequence[int]):
        distinct = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        self._size = len(distinct)
        self._token_ids = np.concatenate([distinct, np.zeros(_FIRST_CAPACITY, np.int64)])
        self._counts = np.zeros(len(self._token_ids), np.float32)
        self._place = {token_id: place for place, token_id in enumerate(distinct.tolist())}
        self._num_seen = 0

    @property
    def token_ids(self) -> np.ndarray:
        """int64 [N]"""
        return self._token_ids[: self._size]

    @property
    def counts(self) -> np.ndarray:
        """float32 [N]"""
        return self._counts[: self._size]

    def catch_up(self, generated_ids: Sequence[int]) -> None:
        """Takes in what was generated since the last time."""
        for token_id in generated_ids[self._num_seen :]:
            place = self._place.get(token_id)
            if place is None:
                place = self._add(token_id)
            self._counts[place] += 1
        self._num_seen = len(generated_ids)

    def _add(self, token_id: int) -> int:
        if self._size == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._token_ids[self._size] = token_id
        self._place[token_id] = self._size
        self._size += 1
        return self._size - 1
