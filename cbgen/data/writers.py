"""Results to part files while the job runs: collected, sorted, published by one rename."""

import time

import pyarrow.parquet as pq

from cbgen.data.files import DiskPatience
from cbgen.data.manifest import PartsFolder, part_metadata
from cbgen.data.rows import OutputRow, part_table

# Log-probabilities may make rows of megabytes: a part is published when it holds so many bytes of them.
MOST_PART_BYTES = 64 << 20


class PartWriter:
    """Collects results and publishes them as immutable parts, every `max_rows` rows or `max_age_s` seconds.

    generation: of a retry, 0 for a job's first results (see Retry).
    """

    def __init__(
        self, folder: PartsFolder, max_rows: int, max_age_s: float, patience: DiskPatience, generation: int = 0
    ):
        self._folder = folder
        self._max_rows = max_rows
        self._max_age_s = max_age_s
        self.patience = patience
        self._generation = generation
        self._run_started = time.time()
        self._next_number = folder.next_part_number()
        self._rows: list[OutputRow] = []
        self._num_bytes = 0
        self._oldest_s = 0.0

    def add(self, rows: list[OutputRow]) -> None:
        if rows and not self._rows:
            self._oldest_s = time.monotonic()
        self._rows += rows
        self._num_bytes += sum(row.nested_bytes for row in rows)
        if len(self._rows) >= self._max_rows or self._num_bytes >= MOST_PART_BYTES:
            self.flush()

    def flush_if_due(self) -> None:
        if self._rows and time.monotonic() - self._oldest_s >= self._max_age_s:
            self.flush()

    def flush(self) -> None:
        """Publishes what was collected. The rename is the commit: before it nothing is done, after it all is."""
        if self._rows:
            table = part_table(self._rows)
            table = table.replace_schema_metadata(part_metadata(self._generation, table, self._run_started))
            path = self._folder.part_path(self._next_number)
            self.patience.publish(path, lambda temporary: pq.write_table(table, temporary, write_page_checksum=True))
            self._next_number += 1
            self._rows = []
            self._num_bytes = 0
