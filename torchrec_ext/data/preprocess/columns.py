"""Columns of a preprocessor: Arrow arrays, one for each column of some rows of a file or of a request.

A *raw* type is one of ``bool``, ``int64``, ``float32``, ``float64``, ``string``, ``timestamp[UNIT]`` or ``list<...>``
of one: the word for a column in a saved preprocessor and in a bundle. Steps see fewer Arrow types: ``bool`` becomes
``int64`` and ``float32`` becomes ``float64``, both exactly.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from torchrec_ext.data.columns import Array, Column, Int64
from torchrec_ext.schema import DataError
from torchrec_ext.schema.validation import did_you_mean, listed

# Columns of some rows by name. No list is null, and the values of a list column begin
# at offset 0.
Arrays = Mapping[str, pa.Array]
# Arrow type of every column at one point of a preprocessor.
Types = Mapping[str, pa.DataType]
Mask = NDArray[np.bool_]
INT64, FLOAT64, STRING = pa.int64(), pa.float64(), pa.string()
IDS = frozenset({INT64, STRING})
ID_LISTS = frozenset(map(pa.list_, IDS))
NUMBERS = frozenset({INT64, FLOAT64})
TIMES = frozenset(pa.timestamp(unit, "UTC") for unit in ("s", "ms", "us", "ns"))
# In this order: a float64 is a floating number too.
_TYPE_TESTS = (
    ("bool", pa.types.is_boolean),
    ("int64", pa.types.is_integer),
    ("float64", pa.types.is_float64),
    ("float32", pa.types.is_floating),
    ("string", pa.types.is_string),
    ("string", pa.types.is_large_string),
)


def raw_type(dtype: pa.DataType) -> str | None:
    """Returns the raw type of an Arrow type; None if no step and no batch can use it.

    Example:
        >>> raw_type(pa.int8()), raw_type(pa.large_list(pa.float32())), raw_type(pa.decimal128(9))
        ('int64', 'list<float32>', None)
    """
    types = pa.types
    if types.is_dictionary(dtype):
        return raw_type(dtype.value_type)
    if (
        types.is_list(dtype)
        or types.is_large_list(dtype)
        or types.is_fixed_size_list(dtype)
    ):
        inner = raw_type(dtype.value_type)
        # No step and no batch reads lists of lists.
        if inner is None or is_list_column(inner):
            return None
        return f"list<{inner}>"
    if types.is_timestamp(dtype):
        return f"timestamp[{dtype.unit}]"
    # Half of its values do not fit int64.
    if types.is_uint64(dtype):
        return None
    return next((name for name, test in _TYPE_TESTS if test(dtype)), None)


@lru_cache
def arrow_type(raw: str) -> pa.DataType:
    """Returns the Arrow type for values of a raw type."""
    if is_list_column(raw):
        return pa.list_(arrow_type(element(raw)))
    if raw.startswith("timestamp["):
        return pa.timestamp(raw[len("timestamp[") : -1], "UTC")
    return pa.type_for_alias(raw)


@lru_cache
def working_type(dtype: pa.DataType) -> pa.DataType:
    """Returns the Arrow type in which steps see a column.

    Example:
        >>> working_type(pa.list_(pa.float32())), working_type(pa.bool_()), working_type(pa.string())
        (ListType(list<item: double>), DataType(int64), DataType(string))
    """
    if pa.types.is_list(dtype):
        return pa.list_(working_type(dtype.value_type))
    if pa.types.is_boolean(dtype):
        return INT64
    return FLOAT64 if dtype == pa.float32() else dtype


def is_list_column(raw: str) -> bool:
    """Says whether a row of a raw type holds any number of values."""
    return raw.startswith("list<")


def element(raw: str) -> str:
    """Returns the raw type of one value of a list column, or the type of a scalar column itself."""
    return raw[len("list<") : -1] if is_list_column(raw) else raw


def widens(kind: str, wider: str) -> bool:
    """Says whether a column of a raw type can be read as another one, value for value.

    An integer that float64 cannot hold is refused where it is read.

    Example:
        >>> widens("float32", "float64"), widens("list<int64>", "list<float64>"), widens("float64", "float32")
        (True, True, False)
    """
    if kind == wider:
        return True
    is_same_shape = is_list_column(kind) == is_list_column(wider)
    narrower = element(kind) in ("float32", "int64")
    return is_same_shape and narrower and element(wider) == "float64"


def id_type(dtype: pa.DataType) -> pa.DataType:
    """Returns the type of the ids of a column's values: a list of as many if it is a list column."""
    return pa.list_(INT64) if pa.types.is_list(dtype) else INT64


def need(
    types: Types, step: Any, name: str, allowed: Collection[pa.DataType], remedy: str
) -> pa.DataType:
    """Returns the type of a column; it must be one of ``allowed``.

    Raises:
        DataError: the column is missing or has another type.
    """
    if name not in types:
        raise DataError(_missing(name, types))
    dtype = types[name]
    if dtype not in allowed:
        takes = ", ".join(sorted(str(raw_type(each)) for each in allowed))
        raise DataError(
            f"column '{name}' is {raw_type(dtype)}, {step} takes {takes}; {remedy}"
        )
    return dtype


def check_case(names: Collection[str]) -> None:
    """Refuses names that are equal but for upper and lower case.

    Raises:
        ValueError: two names differ in case alone; the message names them.
    """
    by_lower_case: dict[str, str] = {}
    for name in sorted(set(names)):
        other = by_lower_case.setdefault(name.lower(), name)
        if other != name:
            raise ValueError(
                f"columns '{other}' and '{name}' differ in case alone, which DuckDB does not tell apart; rename one"
            )


def missing_column(where: str, name: str, names: Collection[str]) -> DataError:
    """Returns the error for a missing column, with the nearest name."""
    return DataError(f"{where}: {_missing(name, names)}")


def _missing(name: str, names: Collection[str]) -> str:
    hint = did_you_mean(name, names, "rename the column, or write it")
    there = listed(sorted(names)) or "no column"
    return f"column '{name}' is missing, it has {there}; {hint}"


def flat(array: pa.Array) -> pa.Array:
    """Returns the values of all rows, those of a list column one row after the other."""
    return array.values if pa.types.is_list(array.type) else array


def with_flat(array: pa.Array, values: Any) -> pa.Array:
    """Returns the rows of ``array`` with other values in the order of :func:`flat`."""
    values = pa.array(values)
    if not pa.types.is_list(array.type):
        return values
    return pa.ListArray.from_arrays(array.offsets, values)


def list_array(values: pa.Array, lengths: Array) -> pa.Array:
    """Returns lists of ``lengths`` (B,) values each."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), values)


def lengths_of(array: pa.Array) -> Int64:
    """Returns the number of values of each list, (B,)."""
    lengths: Int64 = np.diff(array.offsets.to_numpy()).astype(np.int64)
    return lengths


def valid_of(array: pa.Array) -> Mask:
    """Returns which values are not null."""
    valid: Mask = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


def integers(array: pa.Array) -> Int64:
    """Returns integers, or times in their own unit; 0 for null."""
    if array.type != INT64:
        array = array.cast(INT64)
    # With a null Arrow would make floats, and large integers would lose digits.
    if array.null_count:
        array = array.fill_null(0)
    values: Int64 = array.to_numpy()
    return values


def numbers(array: pa.Array) -> NDArray[np.float64]:
    """Returns integers or floats as float64; NaN for null, NaN and the infinities, which count as missing."""
    if array.type != FLOAT64:
        # Integers beyond 2**53 are rounded.
        array = array.cast(FLOAT64, safe=False)
    values: NDArray[np.float64] = array.to_numpy(zero_copy_only=False)
    is_number = np.isfinite(values)
    return values if is_number.all() else np.where(is_number, values, np.nan)


def column_of(array: pa.Array) -> Column:
    """Returns the rows as a column of a chunk; none of the values may be null."""
    values = flat(array).to_numpy(zero_copy_only=False)
    if not pa.types.is_list(array.type):
        return Column(values)
    return Column(values, array.offsets.to_numpy().astype(np.int64))


class CellError(DataError):
    """A refused value of some rows.

    Args:
        column: name of its column.
        row: number of its row.
        rule: value, rule and remedy.
        where: file and row group.
    """

    def __init__(self, column: str, row: int, rule: str, where: str = "") -> None:
        place = f"{where}, " if where else ""
        super().__init__(f"{place}column '{column}', row {row}: {rule}")
        self.column = column
        self.row = row
        self.rule = rule


_REFUSALS = (pa.ArrowException, TypeError, ValueError, OverflowError)
_NUMBER_WORDS = {"int64", "float64", "float32"}
# What may be sent for a column; for a time its own kinds, or an integer in the column's
# unit.
_TAKES = {
    "bool": {"bool"},
    "int64": _NUMBER_WORDS,  # 3.0, not 3.5
    "float32": _NUMBER_WORDS,
    "float64": _NUMBER_WORDS,
    "string": {"string"},
}
_TIME_TAKES = {"int64", *map(str, map(raw_type, TIMES))}


def read_array(name: str, data: Sequence[Any], raw: str) -> pa.Array:
    """Reads values of a request or a file in the type that steps see; a null list becomes an empty one.

    Args:
        name: name of the column.
        data: (B,) values, None for null, or an Arrow array of them; lists of values for a list column.
        raw: raw type that the column had in fitting.

    Raises:
        DataError: a value has another type; the message names its row.
    """
    if isinstance(data, str | bytes | Mapping) or not hasattr(data, "__iter__"):
        raise DataError(
            f"column '{name}': {short_text(data)} is one value; give a list with one entry per row"
        )
    # A set or a generator has no rows to name in a message.
    if not hasattr(data, "__getitem__"):
        data = list(data)
    try:
        array = _typed(data, raw)
    except _REFUSALS:
        raise _type_error(name, data, raw) from None
    dtype = working_type(array.type)
    if array.type != dtype:
        array = array.cast(dtype)
    if not pa.types.is_list(dtype):
        return array
    # Unlike array.values, flatten() leaves out null lists and values outside a slice.
    values = array.flatten()
    if not array.null_count and not array.offset and len(values) == len(array.values):
        return array
    lengths = pc.fill_null(pc.list_value_length(array), 0)
    return list_array(values, lengths.to_numpy())


def _typed(data: Sequence[Any], raw: str) -> pa.Array:
    """Converts values to the column's type, more strictly than Arrow: that would cut 1.5 to 1 and read "7" as 7."""
    array = data if isinstance(data, pa.Array) else pa.array(data)
    target_type = arrow_type(raw)
    if array.type == target_type:
        return array
    is_list = pa.types.is_list(target_type) and pa.types.is_list(array.type)
    inner = array.type.value_type if is_list else array.type
    is_time = element(raw).startswith("timestamp[")
    if (
        is_time
        and not is_list
        and (pa.types.is_string(inner) or pa.types.is_date(inner))
    ):
        return as_times(array).cast(target_type, safe=False)
    if is_time and is_list and pa.types.is_string(inner):
        times = as_times(array.values).cast(target_type.value_type, safe=False)
        nulls = array.is_null() if array.null_count else None
        return pa.ListArray.from_arrays(array.offsets, times, mask=nulls)
    if not _stands_for(array.type, raw):
        raise TypeError(f"it is {array.type}")
    # A time of a finer unit loses what the column's unit cannot hold.
    return array.cast(target_type, safe=not is_time)


_ISO_8601 = r"^\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}(\.\d{1,6})?)?(Z|[+-]\d{2}(:?\d{2})?)?)?$"
_ISO_RULE = "must be a date in ISO 8601, such as 2024-02-29, 2024-02-29 18:30 or 2024-02-29T18:30:00+01:00"


def is_iso(text: str) -> bool:
    """Says whether a text has the form of a date in ISO 8601, with or without a time and a zone."""
    return re.match(_ISO_8601, text) is not None


def as_times(array: pa.Array) -> pa.Array:
    """Returns dates, times or texts in ISO 8601 as ``timestamp[us, UTC]``; without a zone they are in UTC.

    Raises:
        ValueError: a text is not such a date; ``row`` of the error is its row.

    Example:
        >>> as_times(pa.array(["2024-02-29", None, "2024-02-29T18:30:00+01:00"])).cast(pa.string()).to_pylist()
        ['2024-02-29 00:00:00.000000Z', None, '2024-02-29 17:30:00.000000Z']
    """
    target_type = pa.timestamp("us", "UTC")
    if not pa.types.is_string(array.type):
        # A date or a time without a zone counts as one in UTC.
        if pa.types.is_date(array.type) or array.type.tz is None:
            array = array.cast(pa.timestamp("us"), safe=False)
        return array.cast(target_type, safe=False)
    wrong = pc.fill_null(
        pc.invert(pc.match_substring_regex(array, _ISO_8601)), fill_value=False
    )
    row = pc.index(wrong, True).as_py()
    if row < 0:
        try:
            return _from_iso(array)
        # There is no such day, and Arrow does not say in which row.
        except pa.ArrowInvalid:
            row = 0
            while _is_time(array.slice(row, 1)):
                row += 1
    error = ValueError(_ISO_RULE)
    error.row = row  # type: ignore[attr-defined]
    raise error


def _from_iso(array: pa.Array) -> pa.Array:
    # Arrow reads a time with a zone only: a date becomes its midnight, and both are in
    # UTC unless a zone is written.
    zone = pc.if_else(
        pc.equal(pc.utf8_length(array), len("2024-02-29")), "T00:00Z", "Z"
    )
    zone = pc.if_else(
        pc.match_substring_regex(array, r"[T ].*(Z|[+-]\d{2}(:?\d{2})?)$"), "", zone
    )
    return pc.binary_join_element_wise(array, zone, "").cast(pa.timestamp("us", "UTC"))


def _is_time(array: pa.Array) -> bool:
    try:
        _from_iso(array)
    except pa.ArrowInvalid:
        return False
    return True


@lru_cache
def _stands_for(dtype: pa.DataType, raw: str) -> bool:
    values = dtype.value_type if pa.types.is_list(dtype) else dtype
    # Nulls alone are of any type.
    if pa.types.is_null(values):
        return True
    kind = raw_type(dtype)
    if kind is None or is_list_column(kind) != is_list_column(raw):
        return False
    return element(kind) in _TAKES.get(element(raw), _TIME_TAKES)


def _type_error(name: str, data: Sequence[Any], raw: str) -> DataError:
    # Values that Arrow takes one by one can still be refused together.
    row = 0
    why = "types are mixed"
    for index, value in enumerate(data):
        complaint = _complaint(value, raw)
        if complaint:
            row = index
            why = complaint
            break
    rule = (
        f"value {short_text(data[row])} is not {raw} ({why}); send values of that type"
    )
    return CellError(name, row, rule)


def _complaint(value: Any, raw: str) -> str:
    try:
        _typed([value], raw)
    except _REFUSALS as error:
        return str(error).splitlines()[0]
    return ""


def short_text(value: Any) -> str:
    """Returns at most 80 characters of a value for a message, all of them ASCII."""
    text = ascii(value.as_py() if isinstance(value, pa.Scalar) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."
