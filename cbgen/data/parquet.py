"""A Parquet shard, read by row batches of bounded size, whatever its row groups are."""

from collections.abc import Iterator
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cbgen.data.batches import BATCH_BYTES, rows_per_batch, rows_without_columns
from cbgen.data.origins import Origin
from cbgen.data.python_values import python_rows
from cbgen.data.schemas import cast, storable
from cbgen.errors import InputError, UsageError, first_line

# Columns are read through a buffer, and not a row group at a time.
READING: dict[str, Any] = {"buffer_size": 1 << 18, "pre_buffer": False, "page_checksum_verification": True}
# What a value takes in memory beside its own bytes.
VALUE_BYTES = 8
_FAILURES = (pa.ArrowException, OSError, UnicodeDecodeError)  # the last for names of columns


class ParquetFile:
    """See InputFile."""

    def __init__(self, origin: Origin):
        self.origin = origin
        try:
            with pq.ParquetFile(origin.path) as file:
                self.schema = storable(file.schema_arrow)
                self.num_rows = file.metadata.num_rows
        except _FAILURES as error:
            raise UsageError(f"{origin.name}: not a readable Parquet file: {first_line(error)}") from error

    def records(self, columns: list[str] | None) -> Iterator[tuple[dict[str, Any], str | None]]:
        wanted = self.schema.names if columns is None else [name for name in columns if name in self.schema.names]
        number = 0
        for batch in self._batches(wanted):
            for values, error in python_rows(batch):
                number += 1
                where = None if error is None else f"{self.place_of(number - 1)}: {error}"
                yield {name: values.get(name) for name in columns or wanted}, where

    def tables(self, schema: pa.Schema) -> Iterator[pa.Table]:
        for batch in self._batches(self.schema.names):
            yield cast(pa.Table.from_batches([batch]), schema)

    def place_of(self, index: int) -> str:
        return f"{self.origin.label}, row {index + 1}"

    def _batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        if not columns:
            yield from rows_without_columns(self.num_rows)
            return
        try:
            yield from self._read(columns)
        except _FAILURES as error:
            raise InputError(f"{self.origin.name}: cannot be read to its end: {first_line(error)}") from error

    def _read(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        path = self.origin.path
        with pq.ParquetFile(path, **READING) as file:
            sizes = batch_sizes(path, file.metadata, set(columns))
            # Pyarrow cannot join dictionaries of several row groups inside of a nested column.
            alone = any(_holds_dictionary(self.schema.field(name).type) for name in columns)
            for _, same in groupby(range(file.num_row_groups), key=lambda group: (sizes[group], alone and group)):
                groups = list(same)
                yield from file.iter_batches(batch_size=sizes[groups[0]], row_groups=groups, columns=columns)


def _holds_dictionary(type_: pa.DataType) -> bool:
    """Inside, that is: at any depth but the first."""
    inner = [type_.field(place).type for place in range(type_.num_fields)]
    return any(pa.types.is_dictionary(item) or _holds_dictionary(item) for item in inner)


def batch_sizes(path: Path, metadata: pq.FileMetaData, columns: set[str]) -> list[int]:
    """For each row group, how many of its rows may be in memory together.

    The footer gives the size of a column as it is encoded, in which a text that repeats counts once.
    """
    leaves = [
        place
        for place in range(metadata.num_columns)
        if not columns.isdisjoint(accumulate(metadata.schema.column(place).path.split("."), "{}.{}".format))
    ]
    texts = [metadata.schema.column(place).path for place in leaves]
    with pq.ParquetFile(path, metadata=metadata, read_dictionary=texts, **READING) as dictionaries:
        return [
            _batch_rows(metadata.row_group(group), group, leaves, dictionaries)
            for group in range(metadata.num_row_groups)
        ]


def _batch_rows(rows: pq.RowGroupMetaData, group: int, leaves: list[int], dictionaries: pq.ParquetFile) -> int:
    size_bytes = 0
    for leaf in map(rows.column, leaves):
        size_bytes += leaf.total_uncompressed_size + leaf.num_values * VALUE_BYTES
        # Looked at only where every value being as large as all of them together would do harm.
        repeats = leaf.has_dictionary_page and leaf.num_values * leaf.total_uncompressed_size > BATCH_BYTES
        if repeats and leaf.physical_type == "BYTE_ARRAY":
            size_bytes += leaf.num_values * _longest_entry(leaf.path_in_schema, group, dictionaries)
    return rows_per_batch(size_bytes / max(1, rows.num_rows), size_bytes)


def _longest_entry(path: str, group: int, dictionaries: pq.ParquetFile) -> int:
    """Bytes of the longest text in a column's dictionary, which is there from the first row on."""
    batches = dictionaries.iter_batches(batch_size=1, row_groups=[group], columns=[path])
    first = next(batches, None)
    return 0 if first is None else max((_longest_text(column) for column in first.columns), default=0)


def _longest_text(array: pa.Array) -> int:
    """Of all dictionaries inside."""
    if pa.types.is_dictionary(array.type):
        return pc.max(pc.binary_length(array.dictionary)).as_py() or 0
    if isinstance(array, pa.ExtensionArray):
        return _longest_text(array.storage)
    if pa.types.is_struct(array.type):
        return max((_longest_text(array.field(place)) for place in range(array.type.num_fields)), default=0)
    return _longest_text(array.values) if pa.types.is_nested(array.type) else 0
