"""Which results the published parts hold: of each sample the best outcome, and when it was last tried."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cbgen.data.key_table import KeyTable, key_array, sample_keys
from cbgen.data.manifest import PartsFolder, Retry, told_by_part

FAILED, TRUNCATED, STOPPED = 0, 1, 2
_STATUS_BITS = 2
_STATUS_OF_KIND = {"failed": FAILED, "truncated": TRUNCATED}


def statuses(table: pa.Table) -> np.ndarray:
    """int64 [N]: FAILED, TRUNCATED or STOPPED, from finish_reason and error."""
    status = np.where(pc.equal(table["finish_reason"], "length").to_numpy(), TRUNCATED, STOPPED)
    return np.where(table["error"].is_valid().to_numpy(), FAILED, status)


class PublishedResults:
    """What of a job is done, some 24 bytes for each result.

    A later success replaces what was there, a later failure only a failure: what was once generated stays.
    """

    def __init__(self, folder: PartsFolder, num_expected: int, retry: Retry):
        """num_expected: output rows of the whole job, about. retry: see there; all else that has a result is done."""
        self._retry = retry
        self._table = KeyTable(num_expected if folder.part_paths() else 0)
        for keys, generation, status in _recorded(folder):
            known = self._table.find(keys)
            earlier = np.where(known < 0, FAILED, known & (1 << _STATUS_BITS) - 1)
            best = np.where(status == FAILED, earlier, status)
            self._table.put(keys, generation << _STATUS_BITS | best)

    def are_pending(self, keys: np.ndarray) -> np.ndarray:
        """bool [N]: which of these samples (see sample_keys) are to be generated."""
        return self._pending(self._table.find(keys))

    @property
    def num_to_retry(self) -> int:
        """Results that there are, and that are generated again."""
        return len(self._table) - self.count()[0]

    def count(self) -> tuple[int, int]:
        """Results that are done, and how many of them are failures that nobody retries."""
        values = self._table.values()
        done = values[~self._pending(values)]
        return len(done), int(np.count_nonzero(done & (1 << _STATUS_BITS) - 1 == FAILED))

    def _pending(self, values: np.ndarray) -> np.ndarray:
        status, generation = values & (1 << _STATUS_BITS) - 1, values >> _STATUS_BITS
        wanted = np.isin(status, [_STATUS_OF_KIND[kind] for kind in self._retry.kinds])
        return (values < 0) | (wanted & (generation < self._retry.generation))


def _recorded(folder: PartsFolder) -> Iterator[tuple[np.ndarray, int, np.ndarray]]:
    """Sample keys, generation and statuses of each part, oldest first."""
    for _, table in folder.parts(["key", "sample_index", "finish_reason", "error"]):
        keys = sample_keys(key_array(table["key"].to_pylist()), table["sample_index"].to_numpy())
        yield keys, told_by_part(table.schema.metadata)["generation"], statuses(table)
