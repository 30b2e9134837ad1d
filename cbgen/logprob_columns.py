"""Log-probabilities as the nested column that they are written to."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from cbgen.data.rows import TOKEN_LOGPROB
from cbgen.engine.logprobs import TokenLogprobs

_TOP = TOKEN_LOGPROB.field("top").type


class LogprobColumns:
    """decode: the text of one token, which is kept."""

    def __init__(self, decode: Callable[[int], str]):
        self._decode = decode
        self._texts: dict[int, str] = {}

    def of_output(self, scores: TokenLogprobs) -> pa.Array:
        """TOKEN_LOGPROB [T] of generated tokens."""
        return self._array(scores.token_ids, scores.logprobs, scores.ranks, self._top(scores, 0), num_unknown=0)

    def of_prompt(self, first_id: int, scores: TokenLogprobs) -> pa.Array:
        """TOKEN_LOGPROB [1 + T] of a prompt: nothing goes before its first token, which has no log-probability."""
        ids = np.concatenate([np.array([first_id], np.int32), scores.token_ids])
        logprobs, ranks = (np.concatenate([np.zeros(1, a.dtype), a]) for a in (scores.logprobs, scores.ranks))
        return self._array(ids, logprobs, ranks, self._top(scores, 1), num_unknown=1)

    def _array(
        self, token_ids: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray, top: pa.Array, num_unknown: int
    ) -> pa.Array:
        unknown = np.arange(len(token_ids)) < num_unknown
        columns = [
            pa.array(token_ids),
            self._tokens(token_ids),
            pa.array(logprobs, mask=unknown),
            pa.array(ranks, mask=unknown),
            top,
        ]
        return pa.StructArray.from_arrays(columns, fields=list(TOKEN_LOGPROB))

    def _top(self, scores: TokenLogprobs, num_empty: int) -> pa.Array:
        """The alternatives of each token, after so many that have none."""
        num_tokens, num_top = scores.top_ids.shape
        ids = scores.top_ids.ravel()
        values = pa.StructArray.from_arrays(
            [pa.array(ids), self._tokens(ids), pa.array(scores.top_logprobs.ravel())], fields=list(_TOP.value_type)
        )
        offsets = np.concatenate([np.zeros(num_empty, np.int32), np.arange(num_tokens + 1, dtype=np.int32) * num_top])
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, type=_TOP)

    def _tokens(self, token_ids: np.ndarray) -> pa.Array:
        """The text of each."""
        distinct, places = np.unique(token_ids, return_inverse=True)
        texts = pa.array([self._text(token_id) for token_id in distinct.tolist()], pa.string())
        return texts.take(pa.array(places))

    def _text(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._decode(token_id)
        return text
