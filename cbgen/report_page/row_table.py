"""Every row of a job as numbers, 39 bytes each: what all charts of rows are drawn from."""

import re
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cbgen.data.key_table import KeyTable, key_array, sample_keys
from cbgen.report_page.record import most_rows
from cbgen.report_page.sources import moments, numbers, parts_told, row_tables
from cbgen.status import Situation

# arrival: seconds since 1970; the other times in seconds, NaN where the row was no request. place: of the row in its
# output, or among the rows of all parts, from 0. reason, failure: see RowTable; failure 0 is none.
ROW = np.dtype(
    [
        ("arrival", "f8"),
        ("latency", "f4"),
        ("queue", "f4"),
        ("prefill", "f4"),
        ("decode", "f4"),
        ("prompt_tokens", "i4"),
        ("completion_tokens", "i4"),
        ("place", "u4"),
        ("reason", "u1"),
        ("failure", "u2"),
    ]
)
GROWTH = 1.25
CHUNK_ROWS = 65_536
# Kinds of failures that are told apart; what comes after them is counted together.
MAX_FAILURES, FAILURE_CHARS = 200, 300
OTHER_FAILURES, NO_REASON = "other reasons", "no reason given"
_VARYING = re.compile(r"\d+")


class RowTable:
    """rows: of ROW, in the order of the output or of the parts. reasons: names of `reason`; failures: of `failure`.

    first_finish, last_finish: seconds since 1970, of rows that tell no more than that too; None without any.
    """

    def __init__(self, num_expected: int):
        """num_expected: rows that there will be; more make the table grow, with a copy of it for that moment."""
        self._all = np.zeros(max(1, num_expected), ROW)
        self._num_rows = 0
        self.reasons: list[str] = []
        self.failures: list[str] = [""]
        self._failure_ids: dict[str, int] = {}
        self.first_finish: float | None = None
        self.last_finish: float | None = None

    @property
    def rows(self) -> np.ndarray:
        return self._all[: self._num_rows]

    @property
    def is_failed(self) -> np.ndarray:
        """bool [N]"""
        return self.rows["failure"] > 0

    def add(self, table: pa.Table, first_place: int) -> None:
        """Converts a table of COLUMNS and keeps it."""
        end = self._num_rows + table.num_rows
        if end > len(self._all):
            grown = np.zeros(max(end, int(GROWTH * len(self._all))), ROW)
            grown[: self._num_rows] = self.rows
            self._all = grown
        added = self._all[self._num_rows : end]
        self._num_rows = end
        self._convert(table, added)
        added["place"] = np.arange(first_place, first_place + table.num_rows)

    def take_back(self, count: int) -> np.ndarray:
        """Removes the last rows and returns them."""
        self._num_rows -= count
        return self._all[self._num_rows : self._num_rows + count].copy()

    def put_back(self, rows: np.ndarray) -> None:
        """As many as were taken back, or fewer."""
        self._all[self._num_rows : self._num_rows + len(rows)] = rows
        self._num_rows += len(rows)

    def by_arrival(self) -> np.ndarray:
        """uint32 [R]: the rows that were requests and tell their times, in order of arrival."""
        num_requests = int(np.count_nonzero(~np.isnan(self.rows["arrival"])))
        return np.argsort(self.rows["arrival"], kind="stable")[:num_requests].astype(np.uint32)

    def _convert(self, table: pa.Table, into: np.ndarray) -> None:
        arrival, finish = moments(table["arrival_time"]), moments(table["finish_time"])
        into["latency"] = finish - arrival
        into["arrival"] = np.where(np.isnan(finish), np.nan, arrival)
        for name in ("queue", "prefill", "decode"):
            into[name] = numbers(table[f"{name}_s"])
        for name in ("prompt_tokens", "completion_tokens"):
            into[name] = np.clip(np.nan_to_num(numbers(table[name])), 0, np.iinfo(np.int32).max)
        into["reason"] = self._reasons_of(table["finish_reason"])
        into["failure"] = 0
        failed = np.flatnonzero(table["error"].is_valid().to_numpy())
        into["failure"][failed] = [self._failure_of(text) for text in table["error"].take(failed).to_pylist()]
        known = finish[~np.isnan(finish)]
        if known.size:
            self.first_finish = min(float(known.min()), self.first_finish or np.inf)
            self.last_finish = max(float(known.max()), self.last_finish or -np.inf)

    def _reasons_of(self, column: pa.ChunkedArray) -> np.ndarray:
        for name in pc.unique(column).to_pylist():
            if name not in self.reasons:
                self.reasons.append(name)
        return pc.index_in(column, pa.array(self.reasons, pa.string())).combine_chunks().to_numpy()

    def _failure_of(self, text: str) -> int:
        """Texts that differ by numbers alone are of one kind, which is named by its first one."""
        named = text.strip().partition("\n")[0][:FAILURE_CHARS] or NO_REASON
        kind = _VARYING.sub("#", named)
        known = self._failure_ids.get(kind)
        if known is None:
            is_other = len(self._failure_ids) >= MAX_FAILURES
            kind, named = (OTHER_FAILURES, OTHER_FAILURES) if is_other else (kind, named)
            known = self._failure_ids.setdefault(kind, len(self.failures))
            if known == len(self.failures):
                self.failures.append(named)
        return known


def read_rows(situation: Situation) -> RowTable:
    """All rows, batch by batch. Of a sample that has several results, one counts: see _put_newest. Raises as
    row_tables does."""
    parts = parts_told(situation) if situation.footer is None else []
    expected = sum(num_rows for _, num_rows in parts) if situation.footer is None else most_rows(situation)
    table = RowTable(expected)
    slots = KeyTable(expected) if len({generation for generation, _ in parts}) > 1 else None
    place = 0
    for rows in row_tables(situation):
        table.add(rows, place)
        place += rows.num_rows
        if slots is not None:
            _put_newest(table, slots, rows)
    return table


def _put_newest(table: RowTable, slots: KeyTable, parts: pa.Table) -> None:
    """Keeps one result of each sample: a later success replaces what was there, a later failure only a failure.

    parts: what was added to the table last, with keys. slots: where the result of a sample stands in the table.
    """
    keys = sample_keys(key_array(parts["key"].to_pylist()), parts["sample_index"].to_numpy())
    added, known = table.take_back(parts.num_rows), slots.find(keys)
    again = known >= 0
    later, earlier = added[again], known[again]
    is_better = (later["failure"] == 0) | (table.rows["failure"][earlier] > 0)
    table.rows[earlier[is_better]] = later[is_better]
    fresh = np.flatnonzero(~again)
    slots.put(keys[fresh], np.arange(len(table.rows), len(table.rows) + len(fresh), dtype=np.int32))
    table.put_back(added[fresh])


def chunks(order: np.ndarray) -> Iterator[np.ndarray]:
    """Those of by_arrival, so few at a time that what is worked out of them needs little memory."""
    for first in range(0, len(order), CHUNK_ROWS):
        yield order[first : first + CHUNK_ROWS]
