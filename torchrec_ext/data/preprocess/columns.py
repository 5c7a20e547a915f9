"""Columns of a preprocessor: their types, and Cells, the values of one column of some rows of a file or of a request.

A *raw* type is one of ``bool``, ``int64``, ``float32``, ``float64``, ``string``, ``timestamp[UNIT]`` or ``list<...>``
of one: the word for a column in a saved preprocessor and in a bundle. Steps see fewer Arrow types: ``bool`` becomes
``int64`` and ``float32`` becomes ``float64``, both exactly.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from torchrec_ext.data.columns import Array, Column, Int64, offsets_of
from torchrec_ext.data.files.arrow import is_list_type
from torchrec_ext.schema import DataError
from torchrec_ext.schema.validation import did_you_mean, listed

# Arrow type of every column at one point of a preprocessor.
Types = Mapping[str, pa.DataType]
Mask = NDArray[np.bool_]
INT64, FLOAT64, STRING = pa.int64(), pa.float64(), pa.string()
IDS = frozenset({INT64, STRING})
ID_LISTS = frozenset(map(pa.list_, IDS))
NUMBERS = frozenset({INT64, FLOAT64})
PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
TIME_TYPES = frozenset(pa.timestamp(unit, "UTC") for unit in PER_SECOND)
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
    if is_list_type(dtype):
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
    """Says whether a column of a raw type can be read as another one: pandas writes integers with a null as float64.

    Example:
        >>> widens("int64", "float64"), widens("float64", "int64")
        (True, False)
    """
    return kind == wider or (kind in ("int64", "float32") and wider == "float64")


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
        # Times of any unit.
        kinds = {str(raw_type(each)).partition("[")[0] for each in allowed}
        takes = ", ".join(sorted(kinds))
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
    there = listed(sorted(names)) or "no column"
    otherwise = f"it has {there}; rename the column, or write it"
    return f"column '{name}' is missing, {did_you_mean(name, names, otherwise)}"


class Cells(NamedTuple):
    """The values of one column of B rows: numpy arrays, which cost little for one value and for a million.

    Args:
        values: (V,) int64 or float64, for a list column the elements of one row after the other. A text is its place
            in ``texts``. A null is 0, NaN or, among texts, -1.
        valid: (V,) which values are not null; None if all are there.
        offsets: (B + 1,) int64 offsets of a list column's rows in ``values``, from 0 on; no list is null.
        texts: texts of a column of texts: an Arrow array of each text of many values, or the list of a few.
        unit: unit of a column of timestamps.
    """

    values: Array
    valid: Mask | None = None
    offsets: Int64 | None = None
    texts: pa.Array | list[str] | None = None
    unit: str | None = None

    @property
    def rows(self) -> int:
        """Number of rows, B."""
        if self.offsets is not None:
            return len(self.offsets) - 1
        return len(self.values)

    @property
    def is_valid(self) -> Mask:
        """Which values are not null, (V,)."""
        return np.ones(len(self.values), bool) if self.valid is None else self.valid

    @property
    def lengths(self) -> Int64:
        """Number of values of each row of a list column, (B,)."""
        assert self.offsets is not None
        lengths: Int64 = self.offsets[1:] - self.offsets[:-1]
        return lengths

    @property
    def numbers(self) -> NDArray[np.float64]:
        """The values as float64; NaN for null, NaN and the infinities, which count as missing."""
        # Integers beyond 2**53 are rounded.
        x: NDArray[np.float64] = self.values.astype(np.float64, copy=False)
        is_number = np.isfinite(x)
        if self.valid is not None:
            is_number &= self.valid
        return x if all_true(is_number) else np.where(is_number, x, np.nan)

    def with_ids(self, ids: Int64) -> Cells:
        """Returns the same rows with ids (V,) for the values."""
        return Cells(ids, offsets=self.offsets)

    def encoded(self) -> tuple[Int64, list[Any]]:
        """Returns integers or texts as places (V,) in a list of values, once or more each; -1 for null."""
        if self.texts is not None:
            return self.values, words(self.texts)
        if len(self.values) <= _FEW:
            places = np.where(self.is_valid, np.arange(len(self.values)), -1)
            return places, self.values.tolist()
        nulls = None if self.valid is None else ~self.valid
        encoded = pa.array(self.values, mask=nulls).dictionary_encode()
        places = encoded.indices.fill_null(-1).to_numpy().astype(np.int64)
        return places, encoded.dictionary.to_numpy().tolist()

    def column(self) -> Column:
        """Returns the rows as a column of a chunk; none of the values may be null."""
        values = self.values
        if self.texts is not None:
            values = np.array(words(self.texts), dtype=object)[values]
        return Column(values, self.offsets)

    def array(self, dtype: pa.DataType) -> pa.Array:
        """Returns the rows as an Arrow array."""
        if self.offsets is not None:
            values = self._replace(offsets=None).array(dtype.value_type)
            return pa.ListArray.from_arrays(self.offsets.astype(np.int32), values)
        nulls = None if self.valid is None else ~self.valid
        values = pa.array(self.values, mask=nulls)
        if self.texts is not None:
            return text_array(self.texts).take(values).cast(dtype)
        return values.cast(dtype)


# Values up to which a call of Arrow, of 5 to 260 us, takes longer than Python: to read
# them, and to find the different ones before they are hashed.
_FEW = 64

# Columns of some rows by name.
Columns = Mapping[str, Cells]


def all_true(mask: Mask) -> bool:
    """Says whether all of a mask is true; for one value in a tenth of the time that ``mask.all()`` takes."""
    return bool(np.count_nonzero(mask) == len(mask))


def words(texts: pa.Array | list[str]) -> list[str]:
    """Returns the texts of cells as a list."""
    return texts if isinstance(texts, list) else texts.to_pylist()


def text_array(texts: pa.Array | list[str]) -> pa.Array:
    """Returns the texts of cells as an Arrow array."""
    return pa.array(texts, STRING) if isinstance(texts, list) else texts


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
# What may be sent for a column; for a time its own kinds.
_TAKES = {
    "bool": {"bool"},
    "int64": _NUMBER_WORDS,  # 3.0, not 3.5
    "float32": _NUMBER_WORDS,
    "float64": _NUMBER_WORDS,
    "string": {"string"},
}
_TIME_TAKES = set(map(str, map(raw_type, TIME_TYPES)))


def read_cells(name: str, data: Sequence[Any], raw: str) -> Cells:
    """Reads values of a request or a file; a null list becomes an empty one.

    Args:
        name: name of the column.
        data: (B,) values, None for null, or an Arrow array of them; lists of values for a list column.
        raw: raw type that the column had in fitting.

    Raises:
        DataError: a value has another type.
    """
    if isinstance(data, list) and (cells := _plain_cells(data, raw)):
        return cells
    if isinstance(data, str | bytes | Mapping) or not hasattr(data, "__getitem__"):
        raise DataError(
            f"column '{name}': {short_text(data)} is one value; give a list with one entry per row"
        )
    try:
        array = data if isinstance(data, pa.Array) else pa.array(data)
        return _arrow_cells(array, raw)
    except _REFUSALS as error:
        why = str(error).splitlines()[0][:90]
        given = data.type if isinstance(data, pa.Array) else short_text(data)[:40]
        raise DataError(
            f"column '{name}': {given} is not {raw} ({why}); send values of that type"
        ) from None


# Python's type of a raw type's values.
_PLAIN = {"bool": bool, "int64": int, "float32": float, "float64": float, "string": str}
# Up to these, each integer is a float.
_WHOLE = {"float32": 2**24, "float64": 2**53}


def _plain_cells(data: list[Any], raw: str) -> Cells | None:
    """Reads a few values of Python's own types; None if Arrow has to read or to refuse them."""
    if len(data) > _FEW:
        return None
    kinds = set(map(type, data))
    valid = None
    if NoneType in kinds:
        kinds.discard(NoneType)
        valid = np.array([value is not None for value in data])
    if raw in _PLAIN:
        return _plain_values(data, raw, kinds, valid)
    if is_list_column(raw):
        if kinds - {list}:
            return None
        lists = [value or [] for value in data]
        cells = _plain_cells(list(itertools.chain.from_iterable(lists)), element(raw))
        return cells and cells._replace(offsets=offsets_of(list(map(len, lists))))
    unit = raw[len("timestamp[") : -1]
    if len(kinds) > 1 or not kinds <= {str, datetime}:
        return None
    try:
        ticks = [value if value is None else _ticks(value, unit) for value in data]
    # A zone may say that it has no offset.
    except (TypeError, ValueError):
        return None
    cells = _plain_values(ticks, "int64", {int}, valid)
    return cells and cells._replace(unit=unit)


def _plain_values(
    data: list[Any], raw: str, kinds: set[type], valid: Mask | None
) -> Cells | None:
    kind = _PLAIN[raw]
    try:
        if kind is float and kinds == {int}:
            most = _WHOLE[raw]
            if any(abs(value) > most for value in data if value is not None):
                return None
        elif kinds - {kind}:
            return None
        if kind is float:
            # None becomes NaN.
            values = np.array(data, np.float64)
            if raw == "float32":
                # What is beyond becomes infinite.
                with np.errstate(over="ignore"):
                    values = values.astype(np.float32).astype(np.float64)
            return Cells(values, valid)
        if valid is not None:
            missing = kind()
            data = [missing if value is None else value for value in data]
        if kind is not str:
            return Cells(np.array(data, np.int64), valid)
        # Text that is no UTF-8 is refused.
        "".join(data).encode()
    except (OverflowError, UnicodeEncodeError):
        return None
    places = np.arange(len(data))
    if valid is not None:
        places = np.where(valid, places, -1)
    return Cells(places, valid, texts=data)


_EPOCH = datetime(1970, 1, 1)
_EPOCH_UTC = _EPOCH.replace(tzinfo=timezone.utc)


def _ticks(time: str | datetime, unit: str) -> int:
    """Returns the units from 1970 to a time, which is in UTC unless it has a zone.

    Raises:
        ValueError: Arrow has to read or to refuse it.
    """
    if isinstance(time, str):
        if not is_iso(time):
            raise ValueError(_ISO_RULE)
        time = datetime.fromisoformat(time)
    since = time - (_EPOCH_UTC if time.tzinfo else _EPOCH)
    micro = since // timedelta(microseconds=1)
    ticks, rest = divmod(micro * PER_SECOND[unit], 10**6)
    if rest:
        raise ValueError("Arrow rounds it")
    return ticks


def _arrow_cells(array: pa.Array, raw: str) -> Cells:
    """Reads an Arrow array more strictly than Arrow casts it: that would cut 1.5 to 1 and read "7" as 7.

    Raises:
        TypeError, ArrowException: a value is of another type.
    """
    if is_list_column(raw):
        if pa.types.is_null(array.type):
            array = array.cast(pa.list_(array.type))
        if not is_list_type(array.type):
            raise TypeError(f"it is {array.type}")
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
        # Unlike array.values, flatten() leaves out null lists and values outside a
        # slice.
        try:
            cells = _arrow_cells(array.flatten(), element(raw))
        except TypeError:
            raise TypeError(f"it is {array.type}") from None
        return cells._replace(offsets=offsets_of(lengths))
    dtype = arrow_type(raw)
    is_time = dtype in TIME_TYPES
    if is_time and (pa.types.is_string(array.type) or pa.types.is_date(array.type)):
        array = as_times(array)
    elif not _stands_for(array.type, raw):
        raise TypeError(f"it is {array.type}")
    # First to the column's own type: a time of a finer unit loses what the column's unit
    # cannot hold, and a number what 32 bits cannot. Nanoseconds hold no year before 1678
    # or after 2261.
    for each in (dtype, INT64 if is_time else working_type(dtype)):
        if array.type != each:
            array = array.cast(each, safe=not is_time or dtype.unit == "ns")
    valid = None
    if array.null_count:
        valid = array.is_valid().to_numpy(zero_copy_only=False)
    if dtype == STRING:
        encoded = array.dictionary_encode()
        places = encoded.indices.fill_null(-1).to_numpy().astype(np.int64)
        return Cells(places, valid, texts=encoded.dictionary)
    # With a null Arrow would make floats of integers, and large ones would lose digits.
    if valid is not None and array.type == INT64:
        array = array.fill_null(0)
    values = array.to_numpy(zero_copy_only=False)
    return Cells(values, valid, unit=dtype.unit if is_time else None)


# Hours and minutes as clocks have them: Python's and Arrow's readers differ beyond that.
ISO_8601 = (
    r"^\d{4}-\d{2}-\d{2}([T ]([01]\d|2[0-3]):[0-5]\d(:[0-5]\d(\.\d{1,6})?)?"
    r"(Z|[+-]([01]\d|2[0-3])(:?[0-5]\d)?)?)?$"
)
_ISO_RULE = "must be a date in ISO 8601, such as 2024-02-29, 2024-02-29 18:30 or 2024-02-29T18:30:00+01:00"


def is_iso(text: str) -> bool:
    """Says whether a text has the form of a date in ISO 8601, with or without a time and a zone."""
    return re.match(ISO_8601, text) is not None


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
        pc.invert(pc.match_substring_regex(array, ISO_8601)), fill_value=False
    )
    row = pc.index(wrong, True).as_py()
    if row < 0:
        try:
            return _from_iso(array)
        # There is no such day, and Arrow does not say in which row.
        except pa.ArrowInvalid:
            row = bisect_left(
                range(len(array)),
                True,
                key=lambda last: not _are_times(array.slice(0, last + 1)),
            )
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


def _are_times(array: pa.Array) -> bool:
    try:
        _from_iso(array)
    except pa.ArrowInvalid:
        return False
    return True


@lru_cache
def _stands_for(dtype: pa.DataType, raw: str) -> bool:
    # Nulls alone are of any type.
    takes = _TAKES.get(raw, _TIME_TAKES)
    return pa.types.is_null(dtype) or raw_type(dtype) in takes


def short_text(value: Any) -> str:
    """Returns at most 80 characters of a value for a message, all of them ASCII."""
    text = ascii(value.as_py() if isinstance(value, pa.Scalar) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."
