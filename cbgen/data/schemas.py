"""One schema for all shards, by a stated rule, and the shards' rows in it."""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import pyarrow as pa

from cbgen.data.origins import Origin
from cbgen.errors import UsageError, first_line


class HasSchema(Protocol):
    origin: Origin
    schema: pa.Schema


def unify(files: Sequence[HasSchema]) -> pa.Schema:
    """Columns by name in order of first appearance; numbers widen, a missing or all-null column is null there."""
    for file in files:
        for name, count in Counter(file.schema.names).items():
            if count > 1:
                raise UsageError(f"{file.origin.name}: {count} columns are called {name!r}; rename all but one")
    schema = files[0].schema
    for file in files[1:]:
        try:
            schema = pa.unify_schemas([schema, file.schema], promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise UsageError(_conflict(files, file) or f"{file.origin.name}: {first_line(error)}") from error
    for place, field in enumerate(schema):
        present = [file.schema.get_field_index(field.name) for file in files]
        for file, own in zip(files, present, strict=True):
            if own >= 0 and not _widens(file.schema.field(own).type, field.type):
                raise UsageError(
                    _conflict(files, file) or f"{file.origin.name}: column {field.name!r} does not become {field.type}"
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
                types = f"{theirs} in {other.origin.name} and {field.type} in {culprit.origin.name}"
                return f"column {field.name!r} is {types}; give it one type"
    return None


def storable(schema: pa.Schema) -> pa.Schema:
    """The schema with plain texts for the views inside of nested columns, which pyarrow reads but cannot write."""
    for place, field in enumerate(schema):
        if pa.types.is_nested(field.type):
            schema = schema.set(place, field.with_type(_without_views(field.type)))
    return schema


def _without_views(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_string_view(type_) or pa.types.is_binary_view(type_):
        return pa.string() if pa.types.is_string_view(type_) else pa.binary()
    if not pa.types.is_nested(type_):
        return type_
    inner = [type_.field(place).with_type(_without_views(type_.field(place).type)) for place in range(type_.num_fields)]
    if pa.types.is_struct(type_):
        return pa.struct(inner)
    if pa.types.is_map(type_):
        return pa.map_(*inner[0].type, keys_sorted=type_.keys_sorted)
    if pa.types.is_fixed_size_list(type_):
        return pa.list_(inner[0], type_.list_size)
    return pa.large_list(inner[0]) if pa.types.is_large_list(type_) else pa.list_(inner[0])


def cast(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with the columns and types of a schema that it widens to; large integers become floats rounded."""
    if table.schema.equals(schema, check_metadata=False):
        return table
    present = set(table.schema.names)
    columns = [
        _cast_column(table[field.name], field.type) if field.name in present else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _cast_column(column: pa.ChunkedArray, type_: pa.DataType) -> pa.ChunkedArray:
    return column if column.type == type_ else column.cast(type_, safe=False)
