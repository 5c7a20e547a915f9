"""Categorify: values -> ids by frequency; one vocabulary for as many columns as share it.

HashBucket and Cross: ids without a vocabulary, by a hash that numpy, DuckDB and Spark compute alike: the first 60 bits
of MD5 over a text, integers written in decimal. MD5 is no safeguard here: it is the one well mixed hash that every
engine has, with the same result.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchrec_ext.data.columns import Int64
from torchrec_ext.data.preprocess.columns import (
    ID_LISTS,
    IDS,
    Cells,
    Mask,
    Types,
    element,
    id_type,
    is_list_column,
    map_texts,
)
from torchrec_ext.data.preprocess.step import (
    ColumnStep,
    Step,
    StepContext,
    StepState,
    Table,
)
from torchrec_ext.schema import DataError
from torchrec_ext.schema.validation import check_least

if TYPE_CHECKING:
    from torchrec_ext.data.preprocess.engines import Engine


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """V values in the order of their ids, from 1 on; id 0 is for unknown values.

    Args:
        values: (V,) int64 or string, the most frequent first.
        counts: (V,) int64, the number of rows of each value in fitting.
    """

    values: pa.Array
    counts: pa.Array

    def __len__(self) -> int:
        """Number of rows of an embedding table, V + 1."""
        return len(self.values) + 1

    def ids(self, values: np.ndarray, valid: Mask) -> Int64:
        """Returns the ids of values; 0 for an unknown value and for null."""
        ordered, ids = self._index
        if not len(ordered):
            return np.zeros(len(values), dtype=np.int64)
        if not self._texts:
            places = ordered.searchsorted(values)
            # Beyond the last value: any place does, since the value there is another.
            places[places == len(ordered)] = 0
            return np.where(valid & (ordered[places] == values), ids[places], 0)
        # Texts are found by their hashes, which take 8 bytes each and no object.
        keys = _hashes(values.tolist())
        result = np.zeros(len(values), dtype=np.int64)
        places = ordered.searchsorted(keys)
        ends = ordered.searchsorted(keys, side="right")
        # Once, unless two texts have one hash.
        for _ in range(int((ends - places).max(initial=0))):
            rows = np.flatnonzero((places < ends) & (result == 0))
            candidates = ids[places[rows]]
            # Equal hashes do not make equal texts.
            candidate_texts = self.values.take(pa.array(candidates - 1)).to_numpy(
                zero_copy_only=False
            )
            same = candidate_texts == values[rows]
            result[rows[same]] = candidates[same]
            places += 1
        return np.where(valid, result, 0)

    def table(self, value: str, id_: str) -> pa.Table:
        """Returns the vocabulary as a table of two columns, for a join."""
        return pa.table({value: self.values, id_: np.arange(1, len(self))})

    @property
    def _texts(self) -> bool:
        return not pa.types.is_integer(self.values.type)

    @cached_property
    def _index(self) -> tuple[Int64, Int64]:
        """The values, or texts' hashes, in ascending order, and their ids: 16 bytes a value, and no object for each."""
        keys = _hashes_of(self.values) if self._texts else self.values.to_numpy()
        ids = np.argsort(keys)
        ordered = keys[ids]
        ids += 1
        return ordered, ids


# As many texts as a block of rows has, so that a vocabulary of any size needs no more
# objects than a block.
_TEXTS_AT_ONCE = 65_536


def _hashes_of(texts: pa.Array) -> Int64:
    """Returns Python's hash of each text, from as many objects at a time as a block has."""
    hashes = np.empty(len(texts), dtype=np.int64)
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        hashes[start : start + _TEXTS_AT_ONCE] = _hashes(
            texts.slice(start, _TEXTS_AT_ONCE).to_pylist()
        )
    return hashes


def _hashes(values: Sequence[object]) -> Int64:
    return np.fromiter(map(hash, values), dtype=np.int64, count=len(values))


@dataclass(frozen=True, kw_only=True)
class Categorify(Step):
    """Maps values to ids: 1 for the most frequent, and so on; 0 for null and for values absent in fitting.

    Values with equally many rows are ordered by value (numbers by size, texts by their UTF-8 bytes), so that the ids do
    not depend on engine, threads or files. In a list column the elements are counted and replaced.

    Args:
        column: name of a column of integers, strings or lists of them.
        output: name of the result; ``column`` by default.
        also: further columns that share the vocabulary and are replaced in place, such as a history of the same items;
            only ``column`` is counted.
        min_count: least number of rows of a value; rarer values are unknown.
        max_size: greatest number of values, the most frequent ones.
    """

    column: str
    output: str | None = None
    also: tuple[str, ...] = ()
    min_count: int = 1
    max_size: int | None = None

    def __post_init__(self) -> None:
        check_least(f"Categorify('{self.column}'): min_count", self.min_count)
        check_least(f"Categorify('{self.column}'): max_size", self.max_size)

    @property
    def reads(self) -> tuple[str, ...]:
        """``column``, and those of ``also``."""
        return (self.column, *self.also)

    @property
    def writes(self) -> tuple[str, ...]:
        """``output``, and the columns of ``also``."""
        return (self.output or self.column, *self.also)

    @property
    def fit_reads(self) -> tuple[str, ...]:
        """``column``; its values are counted."""
        return (self.column,)

    def meaning(self, state: Vocabulary) -> Mapping[str, Any]:
        """Returns nothing: the values of a vocabulary are compared one by one, and more may follow them."""
        return {}

    def types(self, types: Types) -> Mapping[str, str]:
        """Returns integers, as many per row as there were values."""
        remedy = (
            "bucket a number with Bucketize, or cast the column where it is written"
        )
        results = {}
        for name, output in zip(self.reads, self.writes, strict=True):
            kind = types.need(self, name, IDS | ID_LISTS, remedy)
            if element(kind) != element(types[self.column]):
                raise DataError(
                    f"{types.where}: column '{name}' is {kind}, but shares a vocabulary with '{self.column}', which "
                    f"is {types[self.column]}; give both one type, or each its own Categorify"
                )
            results[output] = id_type(kind)
        return results

    def fit(self, table: Table, types: Types, run: StepContext) -> Vocabulary:
        """Counts the values."""
        column = table[self.column]
        if is_list_column(types[self.column]):
            column = column.unnest()
        values = table.select(value=column)
        values = values.filter(values.value.notnull())
        counts = values.group_by("value").aggregate(count=lambda t: t.count())
        if self.min_count > 1:
            counts = counts.filter(counts["count"] >= self.min_count)
        # Ties by value: ids must not depend on the engine, its threads or the order of
        # the files.
        counts = counts.order_by(counts["count"].desc(), counts.value.asc())
        if self.max_size:
            counts = counts.limit(self.max_size)
        counted = run.engine.collect(counts)
        kind = pa.int64() if element(types[self.column]) == "int64" else pa.string()
        return Vocabulary(
            _as_one_array(counted["value"], kind),
            _as_one_array(counted["count"], pa.int64()),
        )

    def transform(
        self, table: Table, types: Types, state: Vocabulary, run: StepContext
    ) -> Table:
        """Joins with the vocabulary."""
        vocabulary = run.engine.register(state.table("__value__", "__id__"))
        for name, output in zip(self.reads, self.writes, strict=True):
            if is_list_column(types[name]):
                table = _replace_elements(
                    table, name, output, vocabulary, run.column(name)
                )
            else:
                table = _replace(table, name, output, vocabulary)
        return table

    def online(
        self, cells: Mapping[str, Cells], types: Types, state: Vocabulary
    ) -> Mapping[str, Cells]:
        """Looks the values up."""
        results = {}
        for name, output in zip(self.reads, self.writes, strict=True):
            column = cells[name]
            results[output] = column.with_values(state.ids(column.values, column.valid))
        return results

    def vocab(self, state: Vocabulary) -> Mapping[str, int]:
        """Returns the size of the vocabulary for each column."""
        return dict.fromkeys(self.writes, len(state))


# Bytes of all texts in an array with offsets of 32 bits.
_MOST = 2**31 - 1


def _as_one_array(data: pa.ChunkedArray, dtype: pa.DataType) -> pa.Array:
    if pa.types.is_string(dtype):
        # Null without a value.
        size = pc.sum(pc.binary_length(data)).as_py() or 0
        if size > _MOST:
            dtype = pa.large_string()
    pieces = [chunk.cast(dtype) for chunk in data.chunks]
    # Arrow concatenates no empty list.
    return pa.concat_arrays(pieces or [pa.array([], dtype)])


def _replace(table: Table, name: str, output: str, vocabulary: Table) -> Table:
    joined = table.left_join(vocabulary, table[name] == vocabulary["__value__"])
    return joined.mutate({output: joined["__id__"].fill_null(0)}).drop(
        "__value__", "__id__"
    )


def _replace_elements(
    table: Table, name: str, output: str, vocabulary: Table, lists: Table
) -> Table:
    """Looks up the elements of each distinct list in ``lists`` once, since no engine can look up inside a list."""
    import ibis

    elements = (
        lists.select(__list__=lists[name])
        .distinct()
        .mutate(__element__=lambda t: t["__list__"])
    )
    elements = elements.unnest("__element__", offset="__place__")
    looked_up = elements.left_join(
        vocabulary, elements["__element__"] == vocabulary["__value__"]
    )
    looked_up = looked_up.select(
        "__list__",
        __pair__=ibis.struct(
            {"place": looked_up["__place__"], "id": looked_up["__id__"].fill_null(0)}
        ),
    )
    # Pairs to be sorted, since Spark cannot collect in an order.
    ids = looked_up.group_by("__list__").aggregate(
        __pairs__=looked_up["__pair__"].collect()
    )
    ids = ids.select(
        "__list__", __ids__=ids["__pairs__"].sort().map(lambda pair: pair["id"])
    )
    joined = table.left_join(ids, table[name] == ids["__list__"])
    # An empty list has no elements to unnest, and so no row in `ids`.
    empty = ibis.literal([], type="array<int64>")
    return joined.mutate({output: ibis.coalesce(joined["__ids__"], empty)}).drop(
        "__list__", "__ids__"
    )


# Hexadecimal ones: 60 bits are never negative as int64.
_DIGITS = 15


def hashed_id(text: str, buckets: int, salt: str) -> int:
    """Hashes a text to an id from 1 to ``buckets``.

    Example:
        >>> hashed_id("sushi", 1000, ""), hashed_id("-7", 1000, "")
        (387, 748)
    """
    return int(md5(salt + text)[:_DIGITS], 16) % buckets + 1


def md5(text: str) -> str:
    """Returns the hexadecimal MD5 digest of a text's UTF-8 bytes."""
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def hashed_id_expression(text: Any, buckets: int, salt: str, engine: Engine) -> Any:
    """Returns :func:`hashed_id` as an Ibis expression over a string column; null stays null."""
    if salt:
        import ibis

        text = ibis.literal(salt) + text
    return (
        engine.hex_to_int(text.hexdigest("md5").substr(0, _DIGITS)) % buckets + 1
    ).cast("int64")


@dataclass(frozen=True, kw_only=True)
class HashBucket(ColumnStep):
    """Maps values to ids from 1 to ``buckets`` by a hash, null to 0: for columns of too many or ever new values.

    Args:
        column: name of a column of integers, strings or lists of them; 7 and "7" have one id.
        buckets: number of ids.
        output: name of the result; ``column`` by default.
        salt: text mixed into the hash; another text gives other collisions.
    """

    column: str
    buckets: int
    output: str | None = None
    salt: str = ""

    def __post_init__(self) -> None:
        check_least(f"HashBucket('{self.column}'): buckets", self.buckets)

    def types(self, types: Types) -> Mapping[str, str]:
        """Returns integers, as many per row as there were values."""
        remedy = "bucket a number with Bucketize, or cast it where it is written"
        return {
            self.writes[0]: id_type(
                types.need(self, self.column, IDS | ID_LISTS, remedy)
            )
        }

    def transform(
        self, table: Table, types: Types, state: StepState, run: StepContext
    ) -> Table:
        """Hashes each value, or each element."""

        def hashed(value: Table) -> Table:
            return hashed_id_expression(
                value.cast("string"), self.buckets, self.salt, run.engine
            ).fill_null(0)

        column = table[self.column]
        # A null element keeps its place in a list, as id 0.
        ids = (
            column.map(hashed) if is_list_column(types[self.column]) else hashed(column)
        )
        return table.mutate({self.writes[0]: ids})

    def online(
        self, cells: Mapping[str, Cells], types: Types, state: StepState
    ) -> Mapping[str, Cells]:
        """Computes the same hash."""
        values = cells[self.column]
        ids = map_texts(values, lambda text: hashed_id(text, self.buckets, self.salt))
        return {self.writes[0]: values.with_values(ids)}

    def vocab(self, state: StepState) -> Mapping[str, int]:
        """Returns ``buckets`` + 1 rows, row 0 included."""
        return {self.writes[0]: self.buckets + 1}


@dataclass(frozen=True, kw_only=True)
class Cross(Step):
    """Maps the combination of several columns to one id from 1 to ``buckets``; 0 if one of them is null.

    Args:
        columns: names of two or more columns of integers or strings.
        buckets: number of ids.
        output: name of the result; the columns' names with ``_x_`` between them by default.
        salt: text mixed into the hash; another text gives other collisions.
    """

    columns: tuple[str, ...]
    buckets: int
    output: str | None = None
    salt: str = ""

    def __post_init__(self) -> None:
        check_least(f"Cross{self.columns}: buckets", self.buckets)
        if len(self.columns) < 2:
            raise ValueError(
                f"Cross: columns={self.columns}: a cross combines two columns or more; use HashBucket for one"
            )

    @property
    def reads(self) -> tuple[str, ...]:
        """``columns``."""
        return tuple(self.columns)

    @property
    def writes(self) -> tuple[str, ...]:
        """``output``."""
        return (self.output or "_x_".join(self.columns),)

    def types(self, types: Types) -> Mapping[str, str]:
        """Returns integers."""
        for name in self.columns:
            types.need(
                self, name, IDS, "bucket a number first; a list cannot be crossed"
            )
        return {self.writes[0]: "int64"}

    def transform(
        self, table: Table, types: Types, state: StepState, run: StepContext
    ) -> Table:
        """Hashes the columns' digests: of one length, they keep ("ab", "c") and ("a", "bc") apart."""
        digests = [table[name].cast("string").hexdigest("md5") for name in self.columns]
        # Null if a column is null, as a concatenation with null is null.
        ids = hashed_id_expression(
            functools.reduce(operator.add, digests), self.buckets, self.salt, run.engine
        )
        return table.mutate({self.writes[0]: ids.fill_null(0)})

    def online(
        self, cells: Mapping[str, Cells], types: Types, state: StepState
    ) -> Mapping[str, Cells]:
        """Computes the same hash."""
        columns = [cells[name] for name in self.columns]
        valid = np.logical_and.reduce([column.valid for column in columns])
        rows = zip(*(column.values.tolist() for column in columns), strict=True)
        ids = []
        for row, is_valid in zip(rows, valid.tolist(), strict=True):
            digests = "".join(md5(str(value)) for value in row)
            ids.append(hashed_id(digests, self.buckets, self.salt) if is_valid else 0)
        return {self.writes[0]: columns[0].with_values(np.array(ids, dtype=np.int64))}

    def vocab(self, state: StepState) -> Mapping[str, int]:
        """Returns ``buckets`` + 1 rows, row 0 included."""
        return {self.writes[0]: self.buckets + 1}
