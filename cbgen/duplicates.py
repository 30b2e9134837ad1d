"""Rows that ask for the same greedy generation share one request, and each gets its result."""

import threading
from dataclasses import dataclass

from cbgen.engine.sampling_params import SamplingParams

# Rows that wait for the result of another row's request, at most: some 15 MB. Then no more rows are read until some of
# them are written, so that an input of nothing but equal rows needs no more memory than another.
MAX_DUPLICATES = 65_536

# Packed prompt and parameters: all that a greedy result hangs on within a job.
GenerationKey = tuple[bytes, SamplingParams]


@dataclass(frozen=True, slots=True)
class RowTag:
    """One sample of one row: an output row to be.

    clamped_max_tokens: what the context left of the row's max_tokens, None: all. truncated_prompt_tokens: how many its
    prompt had more. Rows of unlike lengths may come to share a request, so that these are the row's own.
    """

    key: bytes
    index: int
    sample_index: int
    clamped_max_tokens: int | None = None
    truncated_prompt_tokens: int = 0


@dataclass
class Recipients:
    """The output rows that get a request's result; the tag of a RequestState. key: under which rows may still join."""

    rows: list[RowTag]
    key: GenerationKey | None = None


def generation_key(packed_ids: bytes, params: SamplingParams) -> GenerationKey | None:
    """Names the result; None for a sampled one, which is drawn for its row alone."""
    return (packed_ids, params.without_draws()) if params.is_greedy else None


class Duplicates:
    """Who shares the requests that wait or are at work. Rows join from the feeder, and are settled by the collector."""

    def __init__(self, max_rows: int = MAX_DUPLICATES):
        self._max_rows = max_rows
        self._open: dict[GenerationKey, Recipients] = {}
        self._num_rows = 0
        self._closed = False
        self._condition = threading.Condition()

    @property
    def num_rows(self) -> int:
        """Rows that wait for a result beside the first one of each request."""
        return self._num_rows

    def join(self, key: GenerationKey, rows: list[RowTag]) -> Recipients | None:
        """Adds the rows to the unfinished request of that key, and returns None; else the recipients of a new one."""
        with self._condition:
            known = self._open.get(key)
            if known is not None:
                known.rows += rows
                self._num_rows += len(rows)
                return None
            self._open[key] = Recipients(rows, key)
            self._num_rows += len(rows) - 1
            return self._open[key]

    def settle(self, recipients: Recipients) -> list[RowTag]:
        """The request has finished: nobody joins it any more. Returns all who get its result."""
        if recipients.key is not None:
            with self._condition:
                del self._open[recipients.key]
                self._num_rows -= len(recipients.rows) - 1
                self._condition.notify_all()
        return recipients.rows

    def wait_for_room(self) -> bool:
        """Blocks while too many rows wait; False once closed."""
        with self._condition:
            self._condition.wait_for(lambda: self._num_rows < self._max_rows or self._closed)
            return not self._closed

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()
