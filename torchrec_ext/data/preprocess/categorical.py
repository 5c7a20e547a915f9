"""Categorify: values -> ids by frequency; one vocabulary for as many columns as share it.

HashBucket and Cross: ids without a vocabulary, by a hash: the first 60 bits of MD5 over a text, integers written in
decimal. MD5 is no safeguard here. It takes 1.5 microseconds for each different text of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import md5
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchrec_ext.data.columns import Int64
from torchrec_ext.data.files.arrow import value_type
from torchrec_ext.data.preprocess.columns import (
    ID_LISTS,
    IDS,
    INT64,
    STRING,
    Cells,
    Columns,
    Types,
    id_type,
    need,
    raw_type,
    text_array,
    words,
)
from torchrec_ext.data.preprocess.lists import only
from torchrec_ext.data.preprocess.step import (
    ColumnStep,
    Query,
    Step,
    StepState,
    quoted,
)
from torchrec_ext.schema import DataError
from torchrec_ext.schema.validation import check_least, listed


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """V values in the order of their ids, from 1 on; id 0 is for unknown values.

    Args:
        values: (V,) int64 or string, the most frequent first.
    """

    values: pa.Array

    def __len__(self) -> int:
        """Number of rows of an embedding table, V + 1."""
        return len(self.values) + 1

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the index: another process, such as Spark's, hashes texts otherwise.
        return Vocabulary, (self.values,)

    def by_value(self) -> Vocabulary:
        """Returns the same values in sorted order."""
        return Vocabulary(self.values.take(pc.sort_indices(self.values)))

    def ids(self, column: Cells) -> Int64:
        """Returns the ids of the values of a column of int64 or of texts; 0 for null and for an unknown value."""
        if column.texts is None:
            ids = self._ids(column.values)
            return ids if column.valid is None else np.where(column.valid, ids, 0)
        # Each text once; the place of null is -1.
        ids = np.zeros(len(column.texts) + 1, dtype=np.int64)
        ids[:-1] = self._ids(column.texts)
        return ids.take(column.values)

    def _ids(self, values: Any) -> Int64:
        is_text = not isinstance(values, np.ndarray)
        # For many values Arrow's table of the vocabulary, which it makes anew each time, costs less than it saves.
        if len(self.values) + _FEW < 3 * len(values):
            array = text_array(values) if is_text else pa.array(values)
            places = pc.index_in(array.cast(self.values.type), self.values)
            # Null is -1 here, so it is 0.
            return places.fill_null(-1).to_numpy().astype(np.int64) + 1  # type: ignore[no-any-return]
        ordered, ids = self._index
        if not len(ordered):
            return np.zeros(len(values), dtype=np.int64)
        # Texts are found by their hashes, which take 8 bytes each and no object.
        texts = words(values) if is_text else []
        keys = _hashes(texts) if is_text else values
        # In ascending order a search finds the memory of the one before in the cache.
        ascending = keys.argsort()
        slots = np.empty_like(ascending)
        slots[ascending] = ordered.searchsorted(keys[ascending])
        # Beyond the last value: any place does, since the value there is another.
        slots = slots.clip(max=len(ordered) - 1)
        found: Int64 = ids[slots] * (ordered[slots] == keys)
        # Equal hashes do not make equal texts.
        rows = found.nonzero()[0][: len(texts)]
        if len(rows) > _FEW:
            theirs = self.values.take(pa.array(found[rows] - 1))
            same = pc.equal(theirs, text_array(values).take(pa.array(rows)))
            rows = rows[~same.to_numpy(zero_copy_only=False)]
        for row in rows:
            if self.values[int(found[row]) - 1].as_py() != texts[row]:
                found[row] = self.values.index(texts[row]).as_py() + 1
        return found

    @cached_property
    def _index(self) -> tuple[Int64, Int64]:
        """The values, or texts' hashes, in ascending order, and their ids: 16 bytes a value, and no object for each."""
        if pa.types.is_integer(self.values.type):
            keys = self.values.to_numpy()
        else:
            # As many objects at a time as a block of rows has: fast, and little memory.
            starts = range(0, len(self.values), _TEXTS_AT_ONCE)
            blocks = (self.values.slice(start, _TEXTS_AT_ONCE) for start in starts)
            hashes = [_hashes(block.to_pylist()) for block in blocks]
            keys = np.concatenate([*hashes, np.zeros(0, np.int64)])
        ids = np.argsort(keys)
        ordered = keys[ids]
        ids += 1
        return ordered, ids


# Values that are found one by one in less time than a call of Arrow's takes.
_FEW = 30
_TEXTS_AT_ONCE = 65_536


def _hashes(texts: list[str]) -> Int64:
    """Returns Python's hash of each text."""
    return np.fromiter(map(hash, texts), dtype=np.int64, count=len(texts))


@dataclass(frozen=True, kw_only=True)
class Categorify(Step):
    """Maps values to ids: 1 for the most frequent, and so on; 0 for null and for values absent in fitting.

    Values with equally many rows are ordered by value (numbers by size, texts by their UTF-8 bytes), so that the ids do
    not depend on threads or files. In a list column the elements are counted and replaced.

    Args:
        column: name of a column of integers, strings or lists of them.
        output: name of the result; ``column`` by default.
        also: further columns that share the vocabulary and are replaced in place, such as a history of the same items;
            only ``column`` is counted.
        skip: columns of lists of which unknown elements are left out, rather than read row 0: a session in which
            training never met one goes on with the items before it.
        min_count: least number of rows of a value; rarer values are unknown.
        max_size: greatest number of values, the most frequent ones.
    """

    column: str
    output: str | None = None
    also: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    min_count: int = 1
    max_size: int | None = None

    def __post_init__(self) -> None:
        check_least(f"Categorify('{self.column}'): min_count", self.min_count)
        check_least(f"Categorify('{self.column}'): max_size", self.max_size)
        for name in self.skip:
            if name not in self.reads:
                raise ValueError(
                    f"Categorify('{self.column}'): skip has '{name}', must be of {listed(self.reads)}; give it to "
                    "also=, too"
                )

    @property
    def reads(self) -> tuple[str, ...]:
        """``column``, and those of ``also``."""
        return (self.column, *self.also)

    @property
    def writes(self) -> tuple[str, ...]:
        """``output``, and the columns of ``also``."""
        return (self.output or self.column, *self.also)

    @property
    def fit_column(self) -> str:
        """``column``; its values are counted."""
        return self.column

    def meaning(self, state: Vocabulary) -> Mapping[str, Any]:
        """Returns nothing: the values of a vocabulary are compared one by one, and more may follow them."""
        return {}

    def types(self, types: Types) -> Types:
        """Returns integers, as many per row as there were values."""
        remedy = (
            "bucket a number with Bucketize, or cast the column where it is written"
        )
        results = {}
        for name, output in zip(self.reads, self.writes, strict=True):
            takes = ID_LISTS if name in self.skip else IDS | ID_LISTS
            dtype = need(types, self, name, takes, remedy)
            if value_type(dtype) != value_type(types[self.column]):
                raise DataError(
                    f"column '{name}' is {raw_type(dtype)}, but shares a vocabulary with '{self.column}', which is "
                    f"{raw_type(types[self.column])}; give both one type, or each its own Categorify"
                )
            results[output] = id_type(dtype)
        return results

    def fit(self, query: Query, types: Types, where: str) -> Vocabulary:
        """Counts the values."""
        value = quoted(self.column)
        if pa.types.is_list(types[self.column]):
            value = f"unnest({value})"
        # All texts of a vocabulary may be more than 2 GB.
        is_text = value_type(types[self.column]) == STRING
        dtype = pa.large_string() if is_text else INT64
        # Ties by value: ids must not depend on the threads or the order of the files.
        limit = f"LIMIT {self.max_size}" if self.max_size else ""
        counted = query(
            f"SELECT value FROM (SELECT {value} AS value FROM fit_rows) WHERE value IS NOT NULL "
            f"GROUP BY value HAVING count(*) >= {self.min_count} ORDER BY count(*) DESC, value {limit}"
        )
        return Vocabulary(counted["value"].cast(dtype).combine_chunks())

    def apply(self, columns: Columns, state: Vocabulary) -> Columns:
        """Looks the values up."""
        results = {}
        for name, output in zip(self.reads, self.writes, strict=True):
            ids = columns[name].with_ids(state.ids(columns[name]))
            results[output] = only(ids, ids.values > 0) if name in self.skip else ids
        return results

    def vocab(self, state: Vocabulary) -> Mapping[str, int]:
        """Returns the size of the vocabulary for each column."""
        return dict.fromkeys(self.writes, len(state))


def hashed_id(text: str, buckets: int) -> int:
    """Hashes a text to an id from 1 to ``buckets``.

    Example:
        >>> hashed_id("sushi", 1000), hashed_id("-7", 1000)
        (387, 748)
    """
    digest = md5(text.encode(), usedforsecurity=False).digest()
    return (int.from_bytes(digest[:8], "big") >> 4) % buckets + 1


def _hashed(column: Cells, buckets: int) -> Int64:
    """Returns the hashed id of each value, each different one of a file hashed once; 0 for null."""
    places, values = column.encoded()
    # The place of null is -1.
    ids = np.array([*(hashed_id(str(value), buckets) for value in values), 0])
    return ids[places]


@dataclass(frozen=True, kw_only=True)
class HashBucket(ColumnStep):
    """Maps values to ids from 1 to ``buckets`` by a hash, null to 0: for columns of too many or ever new values.

    Args:
        column: name of a column of integers, strings or lists of them; 7 and "7" have one id.
        buckets: number of ids.
        output: name of the result; ``column`` by default.
    """

    column: str
    buckets: int
    output: str | None = None

    def __post_init__(self) -> None:
        check_least(f"HashBucket('{self.column}'): buckets", self.buckets)

    def apply(self, columns: Columns, state: StepState) -> Columns:
        """Hashes each value, or each element; a null element keeps its place in a list, as id 0."""
        column = columns[self.column]
        return {self.writes[0]: column.with_ids(_hashed(column, self.buckets))}

    def vocab(self, state: StepState) -> Mapping[str, int]:
        """Returns ``buckets`` + 1 rows, row 0 included."""
        return {self.writes[0]: self.buckets + 1}


def _digests(column: Cells) -> tuple[Int64, list[str]]:
    """Returns the values as places in a list of their digests; null has the last place."""
    places, values = column.encoded()
    texts = (str(value).encode() for value in values)
    digests = [md5(text, usedforsecurity=False).hexdigest() for text in texts]
    digests.append("")
    return places % len(digests), digests


@dataclass(frozen=True, kw_only=True)
class Cross(Step):
    """Maps the combination of several columns to one id from 1 to ``buckets``; 0 if one of them is null.

    Args:
        columns: names of two or more columns of integers or strings.
        buckets: number of ids.
        output: name of the result; the columns' names with ``_x_`` between them by default.
    """

    columns: tuple[str, ...]
    buckets: int
    output: str | None = None

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

    def types(self, types: Types) -> Types:
        """Returns integers."""
        for name in self.columns:
            need(types, self, name, IDS, "bucket a number; a list cannot be crossed")
        return {self.writes[0]: INT64}

    def apply(self, columns: Columns, state: StepState) -> Columns:
        """Hashes the columns' digests: of one length, they keep ("ab", "c") and ("a", "bc") apart."""
        places, texts = _digests(columns[self.columns[0]])
        valid = columns[self.columns[0]].is_valid
        for name in self.columns[1:]:
            others, digests = _digests(columns[name])
            # Each combination is joined once.
            pairs = Cells(places * len(digests) + others)
            places, combinations = pairs.encoded()
            first, second = np.divmod(combinations, len(digests))
            texts = [
                texts[place] + digests[other]
                for place, other in zip(first.tolist(), second.tolist(), strict=True)
            ]
            valid = valid & columns[name].is_valid
        ids = _hashed(Cells(places, texts=texts), self.buckets)
        return {self.writes[0]: Cells(np.where(valid, ids, 0))}

    def vocab(self, state: StepState) -> Mapping[str, int]:
        """Returns ``buckets`` + 1 rows, row 0 included."""
        return {self.writes[0]: self.buckets + 1}
