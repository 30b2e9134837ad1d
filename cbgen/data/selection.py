"""The rows of an input that one run is about: all of them, or those of its shard."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from cbgen.data.readers import Input


class Selection:
    """An input read once more, for its columns; in input order, without the rows of other shards.

    is_mine: bool for each row of the input; None: all are.
    """

    def __init__(self, source: Input, is_mine: np.ndarray | None = None):
        self._source = source
        self._is_mine = is_mine
        self.schema: pa.Schema = source.schema
        self.num_rows = source.num_rows if is_mine is None else int(np.count_nonzero(is_mine))

    @cached_property
    def row_indices(self) -> np.ndarray:
        """int64 [num_rows]: places in the whole input."""
        return np.arange(self.num_rows) if self._is_mine is None else np.flatnonzero(self._is_mine)

    def tables(self) -> Iterator[pa.Table]:
        """The rows with every column, as tables of `schema` without its metadata."""
        first = 0
        for table in self._source.tables():
            if self._is_mine is not None:
                mine = np.flatnonzero(self._is_mine[first : first + table.num_rows])
                first += table.num_rows
                rows = table if len(mine) == table.num_rows else taken(table, mine)
            else:
                rows = table
            if rows.num_rows:
                yield rows.replace_schema_metadata(None)

    def records(self) -> Iterator[dict[str, Any]]:
        """The rows with all their values as the files have them; a malformed row is empty."""
        records = self._source.records()
        if self._is_mine is None:
            yield from records
        else:
            yield from (record for record, mine in zip(records, self._is_mine, strict=True) if mine)


def taken(table: pa.Table, places: np.ndarray) -> pa.Table:
    """The rows at these places, in this order, of any types."""
    try:
        return table.take(places)
    except pa.ArrowNotImplementedError:  # some types cannot be taken, but any can be sliced and joined
        return pa.concat_tables([table.slice(int(place), 1) for place in places] or [table.slice(0, 0)])
