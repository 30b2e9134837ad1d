"""A JSONL shard: lines that are read one by one, and the Arrow types that its values have together."""

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pyarrow as pa

from cbgen.data.batches import BATCH_BYTES, BATCH_ROWS
from cbgen.data.compressed import READ_FAILURES, open_lines, reason
from cbgen.data.origins import Origin
from cbgen.errors import InputError, UsageError

MAX_NESTING = 24
# A line that nests deeper is an error row, in every thread alike: how much recursion there is room for depends on the
# stack of the one that reads.
MAX_LINE_DEPTH = 200
TOO_DEEP = f"JSON nested more than {MAX_LINE_DEPTH} deep"
_ARROW_REFUSALS = (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError)

# Columns whose objects are no records of one kind: in tables they are the JSON that they were, keys in their order.
KEPT_AS_JSON = ("json_schema", "logit_bias", "tools")


class JsonlFile:
    """One object a line. Blank lines and a byte-order mark are read as if they were not there.

    The types are found by one pass over the whole file before work starts: numbers widen, a missing key is null, and a
    column whose values have no common type, or nest too deeply, becomes a string column that holds JSON text.
    """

    def __init__(self, origin: Origin):
        self.origin = origin
        self.num_rows = 0
        self._json_columns: set[str] = set()
        try:
            self.schema = self._infer_schema()
        except InputError as error:
            raise UsageError(str(error)) from error

    def records(self, columns: list[str] | None) -> Iterator[tuple[dict[str, Any], str | None]]:
        """See InputFile.records. With None, a row has the keys of its own line only."""
        for values, error, _ in self._parsed():
            yield values if columns is None else {name: values.get(name) for name in columns}, error

    def tables(self, schema: pa.Schema) -> Iterator[pa.Table]:
        for batch in self._batches():
            yield pa.table([self._array(batch, field) for field in schema], schema=schema)

    def place_of(self, index: int) -> str:
        number, _ = next(islice(self._lines(), index, None))
        return f"{self.origin.label}, line {number}"

    def _parsed(self) -> Iterator[tuple[dict[str, Any], str | None, int]]:
        """Each line's values, what is wrong with it, and its size in bytes."""
        for number, line in self._lines():
            values, error = parse_line(line)
            yield values, None if error is None else f"{self.origin.label}, line {number}: {error}", len(line)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Lines that are not blank, with their numbers."""
        try:
            with open_lines(self.origin.path) as file:
                for number, raw in enumerate(file, start=1):
                    line = raw.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else raw.strip()
                    if line:
                        yield number, line
        except READ_FAILURES as error:
            raise InputError(f"{self.origin.name}: cannot be read to its end: {reason(error)}") from error

    def _batches(self) -> Iterator[list[dict[str, Any]]]:
        batch: list[dict[str, Any]] = []
        batch_bytes = 0
        for values, _, size_bytes in self._parsed():
            batch.append(values)
            batch_bytes += size_bytes
            if len(batch) == BATCH_ROWS or batch_bytes >= BATCH_BYTES:
                yield batch
                batch, batch_bytes = [], 0
        if batch:
            yield batch

    def _infer_schema(self) -> pa.Schema:
        types: dict[str, pa.DataType] = {}
        for batch in self._batches():
            self.num_rows += len(batch)
            for name in dict.fromkeys(name for row in batch for name in row):
                if name not in self._json_columns:
                    found = _common_type([row.get(name) for row in batch], types.get(name))
                    if found is None:
                        self._json_columns.add(name)
                    types[name] = pa.string() if found is None else found
        for name, type_ in types.items():
            if not _fits_parquet(type_) or _needs_its_order(name, type_):
                self._json_columns.add(name)
                types[name] = pa.string()
        return pa.schema(list(types.items()))

    def _array(self, batch: list[dict[str, Any]], field: pa.Field) -> pa.Array:
        values = [row.get(field.name) for row in batch]
        if field.name in self._json_columns:
            values = [value if value is None or isinstance(value, str) else _dump(value) for value in values]
        try:
            return pa.array(values, type=field.type)
        except _ARROW_REFUSALS:  # an integer that a float column takes only rounded
            return pa.array([_with_floats(value) for value in values], type=field.type)


def _needs_its_order(name: str, type_: pa.DataType) -> bool:
    """Whether objects would say something else with the keys of all rows, in one order: see KEPT_AS_JSON."""
    return name in KEPT_AS_JSON and pa.types.is_nested(type_)


def _common_type(values: list[Any], earlier: pa.DataType | None) -> pa.DataType | None:
    """The Arrow type of these values and the earlier ones together; None when there is none."""
    try:
        own = _array_type(values)
        if earlier is None:
            return own
        pair = [pa.schema([("c", earlier)]), pa.schema([("c", own)])]
        return pa.unify_schemas(pair, promote_options="permissive").field("c").type
    except _ARROW_REFUSALS:
        return None


def _array_type(values: list[Any]) -> pa.DataType:
    """The type of the values; integers that are too large to stand beside floats count as floats."""
    try:
        return pa.array(values).type
    except _ARROW_REFUSALS:
        if not any(_has_float(value) for value in values):
            raise
        return pa.array([_with_floats(value) for value in values]).type


def _fits_parquet(type_: pa.DataType, depth: int = 0) -> bool:
    """Parquet has no place for an object without any key, and its readers none for very deep nesting."""
    if depth > MAX_NESTING or (pa.types.is_struct(type_) and type_.num_fields == 0):
        return False
    return all(_fits_parquet(type_.field(place).type, depth + 1) for place in range(type_.num_fields))


def parse_line(line: bytes) -> tuple[dict[str, Any], str | None]:
    """The object on a line, or an empty one and what is wrong with the line."""
    try:
        value = json.loads(line.decode("utf-8"))
        if not isinstance(value, dict):
            return {}, f"a JSON object is expected, this is a {type(value).__name__}"
        if line.count(b"[") + line.count(b"{") > MAX_LINE_DEPTH and _is_deep(value):
            return {}, TOO_DEEP
        return (_escape_surrogates(value) if b"\\ud" in line or b"\\uD" in line else value), None
    except UnicodeDecodeError as error:
        return {}, f"not UTF-8 (byte {error.start + 1} of the line)"
    except RecursionError:
        return {}, TOO_DEEP
    except ValueError as error:
        return {}, f"not valid JSON: {error}"


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_LINE_DEPTH):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [item for items in inner for item in items if isinstance(item, list | dict)]
        if not level:
            return False
    return True


def _escape_surrogates(value: Any) -> Any:
    """Half a surrogate pair is no character: it stays readable as its escape."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, list):
        return [_escape_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_escape_surrogates(name): _escape_surrogates(item) for name, item in value.items()}
    return value


def _has_float(value: Any) -> bool:
    if isinstance(value, list | dict):
        return any(_has_float(item) for item in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, float)


def _with_floats(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, list):
        return [_with_floats(item) for item in value]
    if isinstance(value, dict):
        return {name: _with_floats(item) for name, item in value.items()}
    return value


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
