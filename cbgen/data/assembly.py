"""Parts to the final file, in input order, with every input column, once all rows have a result."""

import json
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cbgen.data.files import publish, publish_text
from cbgen.data.manifest import PartsFolder
from cbgen.data.readers import Input
from cbgen.data.rows import KEY_BYTES, RESULT_SCHEMA, OutputLayout
from cbgen.errors import OutputError

FOOTER_KEY = b"cbgen"
FOOTER_KEYS = {"fingerprint", "input", "columns", "rows_ok", "rows_failed"}
# Input rows per pass over the parts.
ASSEMBLY_ROWS = 16_384
# A row group of the final file holds no more than this, so that no column of it outgrows 32-bit offsets.
ROW_GROUP_BYTES = 256 << 20
# Results on their way from parts to the final file: texts with 64-bit offsets, since parts add up.
GATHER_SCHEMA = pa.schema(
    [field.with_type(pa.large_string()) if field.type == pa.string() else field for field in RESULT_SCHEMA]
)


class Results:
    """Where the result of each (row, sample) of this input lies in the parts; 9 bytes of memory for each.

    keys: the rows' keys in input order, KEY_BYTES each. Of several results for one sample, the newest success counts,
    or else the newest failure. Parts may hold rows that the input no longer has.
    """

    def __init__(self, folder: PartsFolder, keys: bytes, num_samples: int):
        self._paths: list[Path] = []
        self._num_samples = num_samples
        self._part = np.full((len(keys) // KEY_BYTES, num_samples), -1, dtype=np.int32)
        self._row = np.zeros_like(self._part)
        self._failed = np.zeros(self._part.shape, dtype=bool)
        by_key = np.frombuffer(keys, dtype=[("high", ">u8"), ("low", ">u8")])
        order = np.argsort(by_key, order=("high", "low"))
        ordered = by_key[order]
        for path, table in folder.parts(["key", "sample_index", "error"]):
            if table.num_rows and len(ordered):
                self._index_part(path, table, ordered, order)

    def _index_part(self, path: Path, table: pa.Table, ordered: np.ndarray, order: np.ndarray) -> None:
        """ordered: the input's keys, sorted; order: where each stands in the input."""
        part_keys = np.frombuffer(b"".join(table["key"].to_pylist()), dtype=ordered.dtype)
        places = np.searchsorted(ordered, part_keys).clip(max=len(ordered) - 1)
        samples = table["sample_index"].to_numpy()
        failed = table["error"].is_valid().to_numpy()
        known = np.flatnonzero((ordered[places] == part_keys) & (samples < self._num_samples))
        rows, columns = order[places[known]], samples[known]
        success_stays = failed[known] & (self._part[rows, columns] >= 0) & ~self._failed[rows, columns]
        known, rows, columns = known[~success_stays], rows[~success_stays], columns[~success_stays]
        self._part[rows, columns] = len(self._paths)
        self._row[rows, columns] = known
        self._failed[rows, columns] = failed[known]
        self._paths.append(path)

    @property
    def num_missing(self) -> int:
        return int((self._part < 0).sum())

    @property
    def num_failed(self) -> int:
        return int(self._failed.sum())

    def tables(self, rows_per_table: int) -> Iterator[pa.Table]:
        """The results in input order, `num_samples` for each row, as tables of GATHER_SCHEMA for so many input rows."""
        for first in range(0, len(self._part), rows_per_table):
            piece = slice(first, first + rows_per_table)
            yield self._gather(self._part[piece].ravel(), self._row[piece].ravel())

    def _gather(self, parts: np.ndarray, rows: np.ndarray) -> pa.Table:
        """The given rows of the given parts, in this order; reads each part it needs once."""
        pieces, positions = [], []
        for part in np.unique(parts):
            wanted = np.flatnonzero(parts == part)
            table = pq.read_table(self._paths[part], columns=GATHER_SCHEMA.names).cast(GATHER_SCHEMA)
            pieces.append(table.take(rows[wanted]))
            positions.append(wanted)
        order = np.argsort(np.concatenate(positions), kind="stable")
        return pa.concat_tables(pieces).take(order)


def assemble(output: Path, source: Input, results: Results, layout: OutputLayout, footer: dict[str, Any]) -> None:
    """Writes the final file, every input row in order with its results, by one rename, after checking it is whole.

    footer: what the file records about the job; a JSONL file, which has no footer, has it in a file beside it.
    """

    def write(path: Path) -> None:
        if output.suffix == ".jsonl":
            num_rows = _write_jsonl(path, source, results, layout)
        else:
            num_rows = _write_parquet(path, source, results, layout, footer)
        expected = source.num_rows * layout.num_samples
        if num_rows != expected:
            raise OutputError(f"{output}: {num_rows} rows were written of {expected}; the parts are kept, run it again")

    publish(output, write)
    if output.suffix == ".jsonl":
        sidecar = {"size_bytes": output.stat().st_size, **footer}
        publish_text(sidecar_path(output), json.dumps(sidecar, indent=2, ensure_ascii=False))


def sidecar_path(output: Path) -> Path:
    """Where a JSONL output records its job."""
    return output.with_name(output.name + ".job.json")


def read_footer(output: Path) -> dict[str, Any] | None:
    """What a finished output records about its job; None for a file that cbgen did not finish."""
    try:
        if output.suffix == ".jsonl":
            footer = json.loads(sidecar_path(output).read_text(encoding="utf-8"))
            whole = footer.pop("size_bytes") == output.stat().st_size
        else:
            footer = json.loads((pq.read_schema(output).metadata or {})[FOOTER_KEY])
            whole = True  # a Parquet file that was cut has no footer
        return footer if whole and footer.keys() >= FOOTER_KEYS else None
    except (pa.ArrowInvalid, OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _write_parquet(path: Path, source: Input, results: Results, layout: OutputLayout, footer: dict[str, Any]) -> int:
    """Returns the number of rows that the written file says it holds."""
    fields = [RESULT_SCHEMA.field(column).with_name(layout.prefix + column) for column in layout.columns]
    metadata = {**(source.schema.metadata or {}), FOOTER_KEY: json.dumps(footer, ensure_ascii=False).encode()}
    schema = pa.schema([*source.schema, *fields]).with_metadata(metadata)
    inputs = _rechunked(source, ASSEMBLY_ROWS)
    with pq.ParquetWriter(path, schema) as writer:
        for result in results.tables(ASSEMBLY_ROWS):
            for rows, outputs in _bounded(next(inputs), result.select(layout.columns), layout.num_samples):
                columns = [column.cast(field.type) for column, field in zip(outputs.columns, fields, strict=True)]
                writer.write_table(pa.table([*rows.columns, *columns], schema=schema))
    return pq.read_metadata(path).num_rows


def _bounded(rows: pa.Table, results: pa.Table, num_samples: int) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Both tables in pieces of at most some ROW_GROUP_BYTES, each input row repeated for its samples."""
    bytes_per_row = (rows.nbytes * num_samples + results.nbytes) / rows.num_rows
    size = max(1, int(ROW_GROUP_BYTES / max(1.0, bytes_per_row)))
    for first in range(0, rows.num_rows, size):
        piece = rows.slice(first, size)
        yield _repeated(piece, num_samples), results.slice(first * num_samples, piece.num_rows * num_samples)


def _repeated(rows: pa.Table, times: int) -> pa.Table:
    if times == 1:
        return rows
    try:
        return rows.take(np.repeat(np.arange(rows.num_rows), times))
    except pa.ArrowNotImplementedError:  # some types cannot be taken, but any can be sliced and joined
        return pa.concat_tables([rows.slice(place, 1) for place in range(rows.num_rows) for _ in range(times)])


def _rechunked(source: Input, num_rows: int) -> Iterator[pa.Table]:
    """The input's tables again, cut to `num_rows` rows each; the last may be shorter."""
    pending: list[pa.Table] = []
    for table in source.tables():
        pending.append(table.replace_schema_metadata(None))
        while sum(piece.num_rows for piece in pending) >= num_rows:
            joined = pa.concat_tables(pending)
            yield joined.slice(0, num_rows)
            pending = [joined.slice(num_rows)]
    yield pa.concat_tables(pending)


def _write_jsonl(path: Path, source: Input, results: Results, layout: OutputLayout) -> int:
    """Returns the number of lines written."""
    records = source.records()
    count = 0
    with open(path, "w", encoding="utf-8") as file:
        for result in results.tables(ASSEMBLY_ROWS):
            samples = iter(result.select(layout.columns).rename_columns(layout.names).to_pylist())
            for record in islice(records, result.num_rows // layout.num_samples):
                for sample in islice(samples, layout.num_samples):
                    file.write(json.dumps({**record, **sample}, ensure_ascii=False, default=_json_value) + "\n")
                    count += 1
    return count


def _json_value(value: Any) -> Any:
    """Values of Parquet that JSON does not know, as text."""
    return value.isoformat() if isinstance(value, datetime) else str(value)
