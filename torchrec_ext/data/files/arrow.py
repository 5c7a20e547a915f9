"""Arrow arrays -> Columns and back, without a copy if the layout allows it; an invalid value is named by its row.

RowGroup: a row group of a file, or a part of one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchrec_ext.data.columns import Array, Column
from torchrec_ext.schema import DataError

Kind = Literal["int", "float", "bool", "string", "ints", "floats"]


def kind_of(dtype: pa.DataType) -> Kind | None:
    """Returns the kind of values in a column of this type; None if it cannot become a feature."""
    if is_list_type(dtype):
        inner = kind_of(dtype.value_type)
        if inner == "int":
            return "ints"
        return "floats" if inner == "float" else None
    # Half of the values of uint64 do not fit int64.
    if pa.types.is_integer(dtype) and not pa.types.is_uint64(dtype):
        return "int"
    if pa.types.is_floating(dtype):
        return "float"
    if pa.types.is_boolean(dtype):
        return "bool"
    return (
        "string"
        if pa.types.is_string(dtype) or pa.types.is_large_string(dtype)
        else None
    )


def is_list_type(dtype: pa.DataType) -> bool:
    """Says whether a row of this type has several values."""
    return bool(
        pa.types.is_list(dtype)
        or pa.types.is_large_list(dtype)
        or pa.types.is_fixed_size_list(dtype)
    )


def value_type(dtype: pa.DataType) -> pa.DataType:
    """Returns the type of one value of a column."""
    return dtype.value_type if is_list_type(dtype) else dtype


def as_column(
    group: RowGroup,
    name: str,
    data: pa.Array | pa.ChunkedArray,
) -> Column:
    """Checks a column of a row group and returns it as numpy arrays.

    Args:
        group: the row group, for messages.
        name: name of the column.
        data: values of the column.

    Raises:
        DataError: there is a null.
    """
    array = one_piece(data)
    # Unlike array.values, flatten leaves out the values outside a slice.
    values = array.flatten() if is_list_type(array.type) else array
    lengths = None
    if values is not array:
        lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False)
    for each in (array, values):
        if each.null_count:
            row = int(pc.index(each.is_null(), True).as_py())
            if each is not array and lengths is not None:
                row = int(np.searchsorted(np.cumsum(lengths), row, side="right"))
            raise DataError(
                f"{group.name}, column '{name}', row {group.first + row}: value is null ({each.null_count} nulls in "
                "the rows read), nulls are not allowed here; fill them where the file is written"
            )
    found = _numpy(values)
    return Column(found) if lengths is None else Column.from_lengths(found, lengths)


def as_arrow(column: Column) -> pa.Array:
    """Returns a column as an Arrow array, a ragged one as lists; objects are text.

    Example:
        >>> as_arrow(Column.from_lengths(np.array([3, 7, 5]), np.array([2, 0, 1]))).to_pylist()
        [[3, 7], [], [5]]
    """
    # Arrow would make its null type of texts that are all missing.
    dtype = pa.string() if column.values.dtype == object else None
    values = pa.array(column.values, dtype)
    if not column.ragged:
        return values
    return pa.ListArray.from_arrays(pa.array(column.offsets, pa.int32()), values)


def not_utf8(array: pa.Array) -> int:
    r"""Returns the first row with text that is no UTF-8; -1 if there is none. Arrow itself does not look.

    Example:
        >>> texts = pa.array([b"a", b"b", b"\xfc"]).view(pa.string())
        >>> not_utf8(pa.array(["a", "ü"])), not_utf8(texts), not_utf8(pa.ListArray.from_arrays([0, 2, 3], texts))
        (-1, 2, 1)
    """
    if is_list_type(array.type):
        value = not_utf8(array.flatten())
        return value if value < 0 else pc.list_parent_indices(array)[value].as_py()
    try:
        array.validate(full=True)
    except pa.ArrowInvalid as error:
        place = re.search(r"index (\d+)", str(error))
        return int(place[1]) if place else 0
    return -1


def one_piece(data: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Returns a column as one array."""
    if not isinstance(data, pa.ChunkedArray):
        return data
    if data.num_chunks == 1:
        # Without the copy that combine_chunks makes.
        return data.chunk(0)
    return data.combine_chunks()


def _numpy(array: pa.Array) -> Array:
    # Arrow's bools and strings are laid out otherwise than numpy's, so they are copied.
    plain = pa.types.is_integer(array.type) or pa.types.is_floating(array.type)
    values: Array = array.to_numpy(zero_copy_only=plain)
    return values


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """A row group of parquet, or a part of one.

    Args:
        name: file and number, for messages.
        file: index of the file in the source.
        number: index of the group in its file.
        rows: number of rows.
        first: number of rows of the group before a part of it; 0 for a whole group.
    """

    name: str
    file: int
    number: int
    rows: int
    first: int = 0
