"""One schema for all shards, by a stated rule, and the shards' rows in it: as Arrow tables and as Python values."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from cbgen.errors import UsageError, first_line


class HasSchema(Protocol):
    path: Path
    schema: pa.Schema


def unify(files: Sequence[HasSchema]) -> pa.Schema:
    """Columns by name in order of first appearance; numbers widen, a missing or all-null column is null there."""
    schema = files[0].schema
    for file in files[1:]:
        try:
            schema = pa.unify_schemas([schema, file.schema], promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise UsageError(_conflict(files, file) or f"{file.path}: {first_line(error)}") from error
    for place, field in enumerate(schema):
        present = [file.schema.get_field_index(field.name) for file in files]
        for file, own in zip(files, present, strict=True):
            if own >= 0 and not _widens(file.schema.field(own).type, field.type):
                raise UsageError(
                    _conflict(files, file) or f"{file.path}: column {field.name!r} does not become {field.type}"
                )
        if min(present) < 0:
            schema = schema.set(place, field.with_nullable(True))
    return schema


def _widens(narrow: pa.DataType, wide: pa.DataType) -> bool:
    """Whether every value of one type can be written as the other; integers may be rounded to floats."""
    if narrow == wide or pa.types.is_null(narrow):
        return True
    if pa.types.is_integer(narrow) and pa.types.is_integer(wide):
        return _integer_widens(narrow, wide)
    if pa.types.is_dictionary(narrow) and pa.types.is_dictionary(wide):
        return _widens(narrow.index_type, wide.index_type) and _widens(narrow.value_type, wide.value_type)
    if pa.types.is_struct(narrow) and pa.types.is_struct(wide):
        return all(_widens(field.type, wide.field(field.name).type) for field in narrow)
    if pa.types.is_nested(narrow) and narrow.num_fields == 1 == wide.num_fields:
        return _widens(narrow.field(0).type, wide.field(0).type)
    kinds = ((_is_number, pa.types.is_floating), (is_text, is_text), (_is_bytes, _is_bytes))
    return any(of_narrow(narrow) and of_wide(wide) for of_narrow, of_wide in kinds)


def _integer_widens(narrow: pa.DataType, wide: pa.DataType) -> bool:
    if pa.types.is_signed_integer(narrow) and pa.types.is_unsigned_integer(wide):
        return False
    sign_bit = pa.types.is_unsigned_integer(narrow) and pa.types.is_signed_integer(wide)
    return narrow.bit_width + sign_bit <= wide.bit_width


def _is_number(type_: pa.DataType) -> bool:
    return pa.types.is_integer(type_) or pa.types.is_floating(type_)


def is_text(type_: pa.DataType) -> bool:
    return pa.types.is_string(type_) or pa.types.is_large_string(type_)


def _is_bytes(type_: pa.DataType) -> bool:
    return pa.types.is_binary(type_) or pa.types.is_large_binary(type_)


def _conflict(files: Sequence[HasSchema], culprit: HasSchema) -> str | None:
    """Names the column and the two files that disagree on it, if it is two."""
    for other in files:
        for field in culprit.schema:
            place = other.schema.get_field_index(field.name)
            theirs = other.schema.field(place).type if place >= 0 else field.type
            if not _widens(theirs, field.type) and not _widens(field.type, theirs):
                types = f"{theirs} in {other.path} and {field.type} in {culprit.path}"
                return f"column {field.name!r} is {types}; give it one type"
    return None


def cast(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with the columns and types of a schema that it widens to; large integers become floats rounded."""
    if table.schema.equals(schema, check_metadata=False):
        return table
    present = set(table.schema.names)
    columns = [
        table[field.name].cast(field.type, safe=False)
        if field.name in present
        else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def python_rows(batch: pa.RecordBatch, path: Path) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Rows as Python values. What Python cannot hold becomes text: nanoseconds, dates beyond the year 9999.

    Text that is not UTF-8 is escaped, and is its row's error.
    """
    for place, field in enumerate(batch.schema):
        if pa.types.is_timestamp(field.type) and field.type.unit == "ns":
            batch = batch.set_column(place, field.name, _as_text(batch.column(place)))
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError):
        yield from (_escaped_row(batch.slice(number, 1), path) for number in range(batch.num_rows))
    else:
        yield from ((row, None) for row in rows)


def _escaped_row(row: pa.RecordBatch, path: Path) -> tuple[dict[str, Any], str | None]:
    values, broken = {}, None
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            values[name] = column[0].as_py()
        except UnicodeDecodeError:
            broken = f"{path.name}: column {name!r} of this row is not UTF-8"
            flat = is_text(column.type)
            values[name] = (
                column.cast(pa.large_binary())[0].as_py().decode("utf-8", "backslashreplace") if flat else None
            )
        except (ValueError, OverflowError):
            values[name] = _as_text(column)[0].as_py() if pa.types.is_temporal(column.type) else str(column[0])
    return values, broken


def _as_text(column: pa.Array) -> pa.Array:
    """Dates and times in ISO form."""
    return pc.replace_substring(column.cast(pa.string()), " ", "T")
