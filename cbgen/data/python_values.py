"""Arrow values as Python values, whatever of them Python cannot hold."""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc


def python_rows(batch: pa.RecordBatch) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Rows as Python values. What Python cannot hold becomes text: nanoseconds, dates beyond the year 9999.

    Text that is not UTF-8 is escaped, and is its row's error.
    """
    for place, field in enumerate(batch.schema):
        if pa.types.is_timestamp(field.type) and field.type.unit == "ns":
            batch = batch.set_column(place, field.name, _as_text(batch.column(place)))
    if not any(_holds_nanoseconds(field.type) for field in batch.schema):
        with contextlib.suppress(ValueError, OverflowError):
            rows = batch.to_pylist()
            yield from ((row, None) for row in rows)
            return
    for number in range(batch.num_rows):
        yield _careful_row(batch, number)


def _holds_nanoseconds(type_: pa.DataType) -> bool:
    """Pyarrow rounds them, or gives them as a class of pandas where that is installed."""
    if isinstance(type_, pa.BaseExtensionType):
        return _holds_nanoseconds(type_.storage_type)
    if pa.types.is_dictionary(type_):
        return _holds_nanoseconds(type_.value_type)
    if pa.types.is_nested(type_):
        return any(_holds_nanoseconds(type_.field(place).type) for place in range(type_.num_fields))
    return pa.types.is_temporal(type_) and getattr(type_, "unit", None) == "ns"


def _careful_row(batch: pa.RecordBatch, number: int) -> tuple[dict[str, Any], str | None]:
    values: dict[str, Any] = {}
    error = None
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        escaped: list[str] = []
        values[name] = _value(column[number], escaped)
        if escaped:
            error = f"column {name!r} is not UTF-8"
    return values, error


def _value(scalar: pa.Scalar, escaped: list[str]) -> Any:
    """escaped: takes the texts inside that are not UTF-8."""
    if not _holds_nanoseconds(scalar.type):
        with contextlib.suppress(ValueError, OverflowError):
            return scalar.as_py()
    if not scalar.is_valid:
        return None
    if isinstance(scalar, pa.ExtensionScalar | pa.DictionaryScalar):
        return _value(scalar.value, escaped)
    if pa.types.is_nested(scalar.type):
        return _nested_value(scalar, escaped)
    if pa.types.is_temporal(scalar.type):
        return _time_value(scalar)
    text = scalar.as_buffer().to_pybytes().decode("utf-8", "backslashreplace")
    escaped.append(text)
    return text


def _nested_value(scalar: pa.Scalar, escaped: list[str]) -> Any:
    if pa.types.is_map(scalar.type):
        return [(_value(entry[0], escaped), _value(entry[1], escaped)) for entry in scalar.values]
    if pa.types.is_struct(scalar.type):
        return {field.name: _value(scalar[place], escaped) for place, field in enumerate(scalar.type)}
    return [_value(item, escaped) for item in scalar.values]


def _time_value(scalar: pa.Scalar) -> timedelta | str:
    if pa.types.is_duration(scalar.type) and scalar.type.unit == "ns" and scalar.value % 1000 == 0:
        return timedelta(microseconds=scalar.value // 1000)
    text: str = _as_text(pa.repeat(scalar, 1))[0].as_py()
    return str(scalar.value) if text.startswith("<") else text  # "<value out of range" for what no calendar has


def _as_text(column: pa.Array) -> pa.Array:
    """Dates and times in ISO form."""
    return pc.replace_substring(column.cast(pa.string()), " ", "T")


def without_nulls(value: Any) -> Any:
    """A value of JSON's kind without the keys that are null, in any depth: Arrow pads objects with those they lack."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
