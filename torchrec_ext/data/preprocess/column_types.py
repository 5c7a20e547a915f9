"""What a column is, in one word that parquet, the engines and a request share.

A *raw* type is one of ``bool``, ``int64``, ``float32``, ``float64``, ``string``, ``timestamp[UNIT]`` or ``list<...>`` of one.
Steps see *working* types, which are fewer: ``bool`` becomes ``int64`` and ``float32`` becomes ``float64``, both exactly, so that
every engine and a request compute the same.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any

import pyarrow as pa

from torchrec_ext.schema import DataError

IDS = frozenset({"int64", "string"})
ID_LISTS = frozenset({"list<int64>", "list<string>"})
NUMBERS = frozenset({"int64", "float64"})
TIMES = frozenset({"timestamp[s]", "timestamp[ms]", "timestamp[us]", "timestamp[ns]"})
_WORKING = {"bool": "int64", "float32": "float64"}


def raw_type(dtype: pa.DataType) -> str | None:
    """The raw type of an Arrow type; None where no step and no batch can use it.

    Example:
        >>> raw_type(pa.int8()), raw_type(pa.large_list(pa.float32())), raw_type(pa.decimal128(9))
        ('int64', 'list<float32>', None)
    """
    types = pa.types
    if types.is_dictionary(dtype):
        return raw_type(dtype.value_type)
    if types.is_list(dtype) or types.is_large_list(dtype) or types.is_fixed_size_list(dtype):
        inner = raw_type(dtype.value_type)
        return None if inner is None or inner.startswith("list") else f"list<{inner}>"
    if types.is_timestamp(dtype):
        return f"timestamp[{dtype.unit}]"
    if types.is_uint64(dtype):
        return None  # half of its values do not fit
    for name, test in (("bool", types.is_boolean), ("int64", types.is_integer), ("float64", types.is_float64)):
        if test(dtype):
            return name
    if types.is_floating(dtype):
        return "float32"
    return "string" if types.is_string(dtype) or types.is_large_string(dtype) else None


@lru_cache
def arrow_type(raw: str) -> pa.DataType:
    """The Arrow type in which values of a raw type are told apart from others."""
    if is_list(raw):
        return pa.list_(arrow_type(element(raw)))
    if raw in TIMES:
        return pa.timestamp(raw[len("timestamp[") : -1], "UTC")
    return {"bool": pa.bool_(), "float32": pa.float32(), "float64": pa.float64(), "string": pa.string()}.get(raw, pa.int64())


def working_type(raw: str) -> str:
    """The type that steps see.

    Example:
        >>> working_type("list<float32>"), working_type("bool"), working_type("string")
        ('list<float64>', 'int64', 'string')
    """
    return f"list<{working_type(element(raw))}>" if is_list(raw) else _WORKING.get(raw, raw)


def is_list(name: str) -> bool:
    """Whether a row holds any number of values."""
    return name.startswith("list<")


def element(name: str) -> str:
    """The type of one value of a list, or of a scalar column itself."""
    return name[len("list<") : -1] if is_list(name) else name


def check_case(names: Collection[str]) -> None:
    """Refuses names that differ in upper and lower case alone.

    Raises:
        ValueError: naming the two.
    """
    seen: dict[str, str] = {}
    for name in sorted(set(names)):
        other = seen.setdefault(name.lower(), name)
        if other != name:
            raise ValueError(f"columns '{other}' and '{name}' differ in case alone, which no engine tells apart; rename one")


def missing_column(where: str, name: str, names: Collection[str]) -> DataError:
    """The error for a column that is not there, with the nearest name."""
    near = difflib.get_close_matches(name, list(names), n=1)
    hint = f"did you mean '{near[0]}'?" if near else "rename the column, or write it"
    return DataError(f"{where}: column '{name}' is missing, it has {sorted(names)}; {hint}")


class Types(Mapping[str, str]):
    """The working type of every column at one point of a preprocessor.

    Args:
        where: the files or the table, for messages.
        types: by column.
    """

    def __init__(self, where: str, types: Mapping[str, str]) -> None:
        self.where = where
        self._types = dict(types)

    def __getitem__(self, name: str) -> str:
        return self._types[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._types)

    def __len__(self) -> int:
        return len(self._types)

    def with_columns(self, types: Mapping[str, str]) -> Types:
        """With some columns added or changed."""
        return Types(self.where, {**self._types, **types})

    def need(self, step: Any, name: str, allowed: Collection[str], remedy: str) -> str:
        """The type of a column, which must be one of ``allowed``.

        Raises:
            DataError: the column is missing or has another type.
        """
        if name not in self._types:
            raise missing_column(self.where, name, self._types)
        found = self._types[name]
        if found not in allowed:
            raise DataError(f"{self.where}: column '{name}' is {found}, {step} takes {', '.join(sorted(allowed))}; {remedy}")
        return found
