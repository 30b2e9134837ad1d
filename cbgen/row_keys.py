"""The name of each row: what it asks for, and which of its equals it is."""

from collections.abc import Callable, Iterable

import numpy as np

from cbgen.data.key_table import MISSING, KeyTable, key_array
from cbgen.data.rows import PromptRow
from cbgen.errors import RowError, UsageError
from cbgen.prompting import FailedPrompt, RenderedPrompt, row_digest, row_key
from cbgen.row_checks import checked_id

BATCH_IDS = 1024


class RowKeys:
    """Numbers the rows that ask for the same, over the whole input: 24 bytes for each row.

    Draws and results go by the key, so that rows keep theirs when others are put before or between them.
    """

    def __init__(self, num_rows: int):
        self._occurrences = KeyTable(num_rows)

    def of(self, prompts: list[RenderedPrompt | FailedPrompt]) -> list[bytes]:
        """The keys of the next rows."""
        if not prompts:
            return []
        numbers = self._occurrences.count(key_array([prompt.digest for prompt in prompts])).tolist()
        return [row_key(prompt.digest, number) for prompt, number in zip(prompts, numbers, strict=True)]


def belongs_to_shard(keys: list[bytes], index: int, count: int) -> np.ndarray:
    """bool [N]: the rows of one shard. Dealt by key: a row stays in its shard whatever comes and goes around it."""
    return key_array(keys)[:, 0] % np.uint64(count) == index


def refuse_repeated_ids(rows: Iterable[PromptRow], num_rows: int, column: str, place_of: Callable[[int], str]) -> None:
    """Raises UsageError with the first row whose id another one had, and that one. Rows without an id fail later."""
    first_row = KeyTable(num_rows)
    batch: list[tuple[bytes, int, str | int]] = []

    def check() -> None:
        digests = [digest for digest, _, _ in batch]
        known = first_row.find(key_array(digests)).tolist()
        fresh: dict[bytes, int] = {}
        for (digest, index, own_id), other in zip(batch, known, strict=True):
            earlier = fresh.setdefault(digest, index) if other == MISSING else other
            if earlier != index:
                raise UsageError(
                    f"--id-column {column}: {own_id!r} is there twice, at {place_of(earlier)} and {place_of(index)}; "
                    "ids must differ"
                )
        if fresh:
            first_row.put(key_array(list(fresh)), np.array(list(fresh.values())))
        batch.clear()

    for row in rows:
        try:
            own_id = checked_id(row.values.get(column), column)
        except RowError:
            continue
        batch.append((row_digest("id", own_id), row.index, own_id))
        if len(batch) == BATCH_IDS:
            check()
    if batch:
        check()
