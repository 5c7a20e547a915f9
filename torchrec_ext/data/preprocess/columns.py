"""Types of columns, each one word that parquet, DuckDB and a request share; Cells: some rows of a column.

A *raw* type is one of ``bool``, ``int64``, ``float32``, ``float64``, ``string``, ``timestamp[UNIT]`` or ``list<...>``
of one. Steps see *working* types, which are fewer: ``bool`` becomes ``int64`` and ``float32`` becomes ``float64``, both
exactly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from torchrec_ext.data.columns import Array, Column, Int64
from torchrec_ext.schema import DataError
from torchrec_ext.schema.validation import did_you_mean

IDS = frozenset({"int64", "string"})
ID_LISTS = frozenset({"list<int64>", "list<string>"})
NUMBERS = frozenset({"int64", "float64"})
TIMES = frozenset({"timestamp[s]", "timestamp[ms]", "timestamp[us]", "timestamp[ns]"})
_WORKING = {"bool": "int64", "float32": "float64"}
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
    if raw in TIMES:
        return pa.timestamp(time_unit(raw), "UTC")
    return pa.type_for_alias(raw)


def working_type(raw: str) -> str:
    """Returns the working type of a raw type.

    Example:
        >>> working_type("list<float32>"), working_type("bool"), working_type("string")
        ('list<float64>', 'int64', 'string')
    """
    if is_list_column(raw):
        return f"list<{working_type(element(raw))}>"
    return _WORKING.get(raw, raw)


def is_list_column(name: str) -> bool:
    """Says whether a row holds any number of values."""
    return name.startswith("list<")


def element(name: str) -> str:
    """Returns the type of one value of a list column, or the type of a scalar column itself."""
    return name[len("list<") : -1] if is_list_column(name) else name


def id_type(name: str) -> str:
    """Returns the type of the ids of a column's values: a list of as many if it is a list column."""
    return "list<int64>" if is_list_column(name) else "int64"


def time_unit(name: str) -> str:
    """Returns the unit of a type of ``TIMES``: s, ms, us or ns."""
    return name[len("timestamp[") : -1]


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
    hint = did_you_mean(name, names, "rename the column, or write it")
    return DataError(
        f"{where}: column '{name}' is missing, it has {sorted(names)}; {hint}"
    )


class Types(dict[str, str]):
    """The working type of every column at one point of a preprocessor.

    Args:
        where: name of the files or of the table, for messages.
        types: working type of each column.
    """

    def __init__(self, where: str, types: Mapping[str, str]) -> None:
        super().__init__(types)
        self.where = where

    def with_columns(self, types: Mapping[str, str]) -> Types:
        """Returns these types with some columns added or changed."""
        return Types(self.where, {**self, **types})

    def need(self, step: Any, name: str, allowed: Collection[str], remedy: str) -> str:
        """Returns the type of a column; it must be one of ``allowed``.

        Raises:
            DataError: the column is missing or has another type.
        """
        if name not in self:
            raise missing_column(self.where, name, self)
        kind = self[name]
        if kind not in allowed:
            raise DataError(
                f"{self.where}: column '{name}' is {kind}, {step} takes {', '.join(sorted(allowed))}; {remedy}"
            )
        return kind


Mask = NDArray[np.bool_]
_REFUSALS = (pa.ArrowException, TypeError, ValueError, OverflowError)
# What may be sent for a column; for a time its own kinds, or an integer in the column's
# unit.
_TAKES = {
    "bool": {"bool"},
    "int64": {"int64", "float64", "float32"},  # 3.0, not 3.5
    "float32": {"int64", "float64", "float32"},
    "float64": {"int64", "float64", "float32"},
    "string": {"string"},
}
# The greatest integer up to which each has a number for every integer.
_EXACT = {"float32": 2**24, "float64": 2**53}


class _Plain(NamedTuple):
    """How Python's own numbers become cells: types that stand for the column's without a look at each value."""

    listed: bool
    takes: set[type]
    dtype: np.dtype[Any]
    working: np.dtype[Any]
    most: int | None


@lru_cache
def _plain_reading(raw: str) -> _Plain | None:
    kind = element(raw)
    if kind not in NUMBERS | {"float32"}:
        return None
    takes: set[type] = {int} if kind == "int64" else {int, float}
    return _Plain(
        is_list_column(raw),
        takes,
        np.dtype(kind),
        np.dtype(working_type(kind)),
        _EXACT.get(kind),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Cells:
    """B rows of one column, of a file or of a request, as numpy arrays.

    Args:
        values: (B,), or (sum of lengths,) for a list column: int64 or float64. Texts are int64 indices of ``words``,
            times are int64 in their own unit.
        valid: array of the shape of ``values``; False for null, whose entry in ``values`` means nothing.
        lengths: (B,) for a list column (a null list is empty), else None.
        words: (W,) the texts in Arrow; None for numbers.
    """

    values: Array
    valid: Mask
    lengths: Int64 | None = None
    words: pa.Array | None = None

    @classmethod
    def full(cls, values: Array, lengths: Int64 | None = None) -> Cells:
        """Builds cells without a null."""
        return cls(
            values=values, valid=np.ones(len(values), dtype=bool), lengths=lengths
        )

    def with_values(self, values: Array, valid: Mask | None = None) -> Cells:
        """Returns the same rows with other values, no texts; by default none of them is null."""
        if valid is None:
            return Cells.full(values, self.lengths)
        return Cells(values=values, valid=valid, lengths=self.lengths)

    def numbers(self) -> tuple[NDArray[np.float64], Mask]:
        """Returns the values as float64, and a mask of the numbers: null, NaN and the infinities count as missing."""
        values = self.values.astype(np.float64)
        return values, self.valid & np.isfinite(values)

    def each(self, function: Callable[[Any], Int64]) -> Int64:
        """Applies a function to the values, an array, or to the texts, an Arrow array; 0 stands for null."""
        if self.words is None:
            return np.where(self.valid, function(self.values), 0)
        return np.where(self.valid, function(self.words)[self.values], 0)

    def codes(self) -> Array:
        """Returns the values, or for texts numbers that are equal for equal texts."""
        if self.words is None:
            return self.values
        codes: Array = self.words.dictionary_encode().indices.to_numpy()
        return codes[self.values]

    def column(self) -> Column:
        """Returns the cells as a column of a chunk."""
        values = self.values
        if self.words is not None:
            values = self.words.to_numpy(zero_copy_only=False)[values]
        if self.lengths is None:
            return Column(values)
        return Column.from_lengths(values, self.lengths)

    def array(self) -> pa.Array:
        """Returns the cells as an Arrow array, with nulls."""
        missing = None if self.valid.all() else ~self.valid
        values = pa.array(self.values, mask=missing)
        if self.words is not None:
            values = pa.DictionaryArray.from_arrays(values, self.words)
            values = values.cast(pa.large_string())
        if self.lengths is None:
            return values
        offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values)


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


def read_cells(name: str, data: Sequence[Any], raw: str) -> Cells:
    """Reads a request's values into cells.

    Args:
        name: name of the column.
        data: (B,) values, None for null, or an Arrow array of them; lists of values for a list column.
        raw: raw type that the column had in fitting.

    Raises:
        DataError: a value has another type; the message names its row.
    """
    plain = _plain(data, raw) if type(data) is list else None
    if plain is not None:
        return plain
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
    lengths = None
    if is_list_column(raw):
        # A null list is empty; flatten() leaves its values out as well.
        lengths = (
            pc.fill_null(pc.list_value_length(array), 0)
            .to_numpy(zero_copy_only=False)
            .astype(np.int64)
        )
        array = array.flatten()
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    if element(raw) == "string":
        rows = np.arange(len(array))
        words = array.fill_null("") if array.null_count else array
        return Cells(values=rows, valid=valid, lengths=lengths, words=words)
    return Cells(values=_numpy(array, element(raw)), valid=valid, lengths=lengths)


def _plain(data: list[Any], raw: str) -> Cells | None:
    """Reads Python's own numbers, as in most requests, faster than through Arrow; None for anything else."""
    reading = _plain_reading(raw)
    lengths = None
    if reading is None:
        return None
    # Types as sets: exact ones, since a bool is an int to isinstance, and a look at
    # each value would be slower.
    if reading.listed:
        if set(map(type, data)) - {list}:
            return None
        lengths = np.array([len(row) for row in data], np.int64)
        data = data[0] if len(data) == 1 else list(chain.from_iterable(data))
    kinds = set(map(type, data))
    most = reading.most
    if not kinds <= reading.takes:
        return None
    if most is None:
        # An integer beyond int64 is Arrow's to refuse.
        try:
            values = np.array(data, reading.dtype)
        except OverflowError:
            return None
    # So is one without an exact float.
    elif int in kinds and not all(
        -most <= value <= most for value in data if type(value) is int
    ):
        return None
    else:
        # Beyond float32 is infinite, as to Arrow.
        with np.errstate(over="ignore"):
            values = np.array(data, reading.dtype).astype(reading.working, copy=False)
    return Cells.full(values, lengths)


def _numpy(array: pa.Array, raw: str) -> Array:
    kind: type[np.generic] = np.int64
    if raw in TIMES:
        array = array.cast(pa.int64())
    elif raw == "bool":
        array = array.cast(pa.int8())
    elif raw != "int64":
        kind = np.float64
    # With a null Arrow would make floats, and large integers would lose digits.
    if array.null_count:
        array = array.fill_null(0)
    values: Array = array.to_numpy(zero_copy_only=False).astype(kind, copy=False)
    return values


def _typed(data: Sequence[Any], raw: str) -> pa.Array:
    """Converts values to the column's type, more strictly than Arrow: that would cut 1.5 to 1 and read "7" as 7."""
    array = data if isinstance(data, pa.Array) else pa.array(data)
    target_type = arrow_type(raw)
    if array.type == target_type:
        return array
    if raw in TIMES and (
        pa.types.is_string(array.type) or pa.types.is_date(array.type)
    ):
        return as_times(array).cast(target_type, safe=False)
    if (
        element(raw) in TIMES
        and is_list_column(raw)
        and pa.types.is_list(array.type)
        and pa.types.is_string(array.type.value_type)
    ):
        times = as_times(array.values).cast(target_type.value_type, safe=False)
        nulls = array.is_null() if array.null_count else None
        return pa.ListArray.from_arrays(array.offsets, times, mask=nulls)
    if not _stands_for(array.type, raw):
        raise TypeError(f"it is {array.type}")
    # A time of a finer unit loses what the column's unit cannot hold.
    return array.cast(target_type, safe=element(raw) not in TIMES)


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
    return element(kind) in _TAKES.get(element(raw), TIMES | {"int64"})


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
