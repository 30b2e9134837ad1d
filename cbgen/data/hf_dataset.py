"""A dataset of the Hugging Face hub, or a local folder in any form that `datasets` reads, as an input file."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from cbgen.data.batches import rows_per_batch, rows_without_columns
from cbgen.data.origins import Origin
from cbgen.data.python_values import python_rows
from cbgen.data.schemas import cast
from cbgen.errors import UsageError, first_line


@dataclass(frozen=True)
class DatasetSource:
    """A hub name or a local folder, the configuration if it has several, and the split, slices included."""

    name: str
    config: str | None = None
    split: str = "train"

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(part for part in (self.config, self.split) if part)})"


class DatasetFile:
    """See InputFile. Downloaded and converted to Arrow files on first use; memory-mapped from there."""

    def __init__(self, source: DatasetSource):
        """Raises UsageError for a dataset, configuration or split that is not there."""
        self._dataset = _load(source)
        size_bytes = sum(Path(file["filename"]).stat().st_size for file in self._dataset.cache_files)
        # The fingerprint covers the files that the dataset was made from, with their revision or time of change.
        identity = ("dataset", source.name, source.config, source.split, self._dataset._fingerprint)
        name = f"dataset {source}"
        self.origin = Origin(name, str(source), Path(source.name), size_bytes, identity, is_copy=True)
        self.schema = self._dataset.features.arrow_schema
        self.num_rows = self._dataset.num_rows

    def records(self, columns: list[str] | None) -> Iterator[tuple[dict[str, Any], str | None]]:
        wanted = self.schema.names if columns is None else [name for name in columns if name in self.schema.names]
        batches = (batch for table in self._batches() for batch in table.select(wanted).to_batches())
        number = 0
        for batch in batches if wanted else rows_without_columns(self.num_rows):
            for values, error in python_rows(batch):
                number += 1
                where = None if error is None else f"{self.place_of(number - 1)}: {error}"
                yield {name: values.get(name) for name in columns or wanted}, where

    def tables(self, schema: pa.Schema) -> Iterator[pa.Table]:
        for table in self._batches():
            yield cast(table, schema)

    def place_of(self, index: int) -> str:
        return f"{self.origin.label}, row {index + 1}"

    def _batches(self) -> Iterator[pa.Table]:
        data = self._dataset.data
        size = rows_per_batch(data.nbytes / max(1, self.num_rows), data.nbytes)
        yield from self._dataset.with_format("arrow").iter(batch_size=size)


def _load(source: DatasetSource) -> Any:
    import datasets  # noqa: PLC0415 (slow to import, and few jobs need it)

    datasets.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(source.name, source.config, split=source.split)
    except Exception as error:  # the failures are those of all that fetches or reads a dataset
        raise UsageError(f"dataset {source}: {first_line(error.__cause__ or error)}") from error
