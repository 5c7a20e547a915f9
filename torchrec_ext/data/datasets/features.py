"""RowContext: how context of rows (hour, device, price) and features of users and items become ids and numbers.

side_features(): a table of users or items -> feature columns by id; their kinds are inferred from the values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchrec_ext.data.columns import Array, Chunk, Column, Int64
from torchrec_ext.data.files.arrow import as_int64
from torchrec_ext.data.files.parquet import read_parquet
from torchrec_ext.data.preprocess.categorical import Vocabulary
from torchrec_ext.schema import DataError

UNKNOWN = "unknown"  # stands in a list for a value that is in no vocabulary


@dataclass(frozen=True, kw_only=True)
class RowContext:
    """The mapping of raw columns to ids and numbers; context is fitted on training rows, users and items on all rows.

    Args:
        vocabularies: maps a column of text or whole numbers to its values, from row 1 on; any other value is row 0.
        scales: maps a column of fractions to its mean and standard deviation.
        separators: maps a column of texts that hold lists to what stands between two values.
        types: maps a column to its raw type where that is not the type of the values; see
            ``data.preprocess.column_types``.

    Example:
        >>> device, price = np.array(["tv", "phone"], dtype=object), np.array([1.0, 3.0])
        >>> rows = Chunk({"device": Column(device), "price": Column(price)})
        >>> context = RowContext.fit(rows)
        >>> {name: column.values.tolist() for name, column in context.transform(rows).items()}
        {'device': [2, 1], 'price': [-1.0, 1.0]}
    """

    vocabularies: Mapping[str, Vocabulary] = field(default_factory=dict)
    scales: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    separators: Mapping[str, str] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def fit(cls, rows: Chunk) -> RowContext:
        """Fits vocabularies and scales to the columns of ``rows``, as :func:`read_context` returns them."""
        dense = {name: column.values for name, column in rows.items() if column.values.dtype.kind == "f"}
        vocabularies = {
            name: np.unique(column.values, return_counts=True) for name, column in rows.items() if name not in dense
        }
        return cls(
            vocabularies={
                name: Vocabulary(pa.array(values), pa.array(counts)) for name, (values, counts) in vocabularies.items()
            },
            scales={name: (float(values.mean()), float(values.std()) or 1.0) for name, values in dense.items()},
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all columns."""
        return (*self.vocabularies, *self.scales)

    @property
    def vocab(self) -> dict[str, int]:
        """Number of rows that the table of each column of ids needs."""
        return {name: len(values) for name, values in self.vocabularies.items()}

    def transform(self, rows: Chunk) -> dict[str, Column]:
        """Maps raw columns to ids (B,) int64 from 1 on, and numbers (B,) float32 of mean 0 and deviation 1."""
        known = np.ones(rows.num_rows, dtype=bool)
        ids = {name: Column(values.ids(rows[name].values, known)) for name, values in self.vocabularies.items()}
        return ids | {name: Column(self._scaled(name, rows[name].values)) for name in self.scales}

    def _scaled(self, name: str, values: Any) -> Any:
        mean, deviation = self.scales[name]
        return ((values.astype(np.float64) - mean) / deviation).astype(np.float32)

    def raw(self, rows: Chunk) -> dict[str, pa.Array]:
        """Maps ids and numbers back to the values that a file or a request would hold; null for the unknown."""
        values = {name: self._words(name, rows[name]) for name in self.vocabularies if name in rows}
        for name, (mean, deviation) in self.scales.items():
            if name in rows:
                values[name] = pa.array(rows[name].values.astype(np.float64) * deviation + mean)
        return values

    def raw_type(self, name: str) -> str:
        """Returns the type that a column has in a file or a request."""
        if name in self.scales:
            return "float64"
        return self.types.get(name) or (
            "string" if name in self.separators else str(self.vocabularies[name].values.type)
        )

    def joined(self, other: RowContext) -> RowContext:
        """Returns one mapping of the columns of both, which must differ."""
        return RowContext(
            **{field_name: {**mapping, **getattr(other, field_name)} for field_name, mapping in vars(self).items()}
        )

    def _words(self, name: str, column: Column) -> pa.Array:
        ids = column.values
        words = self.vocabularies[name].values.take(pa.array(ids - 1, mask=ids == 0))
        if name not in self.separators:
            return words.cast(pa.bool_()) if self.types.get(name) == "bool" else words
        ends = np.cumsum(column.lengths)
        lists = pa.ListArray.from_arrays(
            pa.array(np.concatenate([[0], ends]).astype(np.int32)), words.fill_null(UNKNOWN)
        )
        return pc.binary_join(lists, self.separators[name])


def read_context(path: Path, names: Sequence[str], ids: Sequence[str]) -> Chunk:
    """Reads columns of one value per row: text, whole numbers, or fractions.

    Args:
        path: parquet file.
        names: names of the columns.
        ids: names that mean something else.

    Raises:
        DataError: a column is missing, is one of ``ids``, or holds lists, nulls or a value that is not finite.
    """
    if reserved := [name for name in names if name in ids]:
        raise DataError(
            f"data.context names {reserved}: {', '.join(ids)} have a meaning of their own; name other columns of "
            f"{path.name}"
        )
    chunk = read_parquet(path, list(names))
    made = {}
    for name, column in chunk.items():
        values = column.values
        if column.ragged:
            raise DataError(
                f"{path}: column '{name}' holds lists; context is one value per row: name another in data.context"
            )
        check_finite(path, name, values)
        made[name] = Column(as_int64(str(path), name, column)) if values.dtype.kind in "iub" else column
    return Chunk(made)


def check_finite(path: Path, name: str, values: Array) -> None:
    """Refuses NaN and infinity in a column of fractions, and values that are infinite as float32.

    Raises:
        DataError: a value is not finite; the message names file, column, row and value.
    """
    if values.dtype.kind != "f":
        return
    with np.errstate(over="ignore"):
        bad = ~np.isfinite(values.astype(np.float32, copy=False))
    if bad.any():
        row = int(bad.argmax())
        raise DataError(
            f"{path}: column '{name}', row {row}: {values[row]}; must be a finite number of 32 bits "
            f"({int(bad.sum()):,} rows are not): fill it, drop the row, or leave the column out"
        )


SEPARATOR = "|"
MOST_DISTINCT = (
    0.5  # share of distinct values from which on a column names its row, as a title does, and says nothing of another
)


class SideFeatures(NamedTuple):
    """Features of users or items: ``columns`` with a row per id, row 0 the unknown; ``words`` maps raw values."""

    columns: Chunk
    words: RowContext

    @property
    def vocab(self) -> dict[str, int]:
        """Number of table rows of each sparse column."""
        return self.words.vocab

    @property
    def dense(self) -> tuple[str, ...]:
        """Names of the dense columns."""
        return tuple(self.words.scales)


def side_features(ids: Int64, table: Chunk, size: int, columns: Sequence[str] | None = None) -> SideFeatures:
    """Turns a table of users or items into feature columns by id.

    Text and whole numbers become ids from 1, in sorted order, and text with ``|`` in it a list of ids; fractions become
    dense columns of mean 0 and standard deviation 1. Columns whose values are nearly all distinct, such as titles and
    postal codes, are left out: they name a row and do not describe it.

    Args:
        ids: (B,) from 1 to ``size - 1``, the row of the result that each row of ``table`` describes; a row that none
            describes is all 0.
        table: B rows of raw values.
        size: number of rows of the result.
        columns: columns of ``table`` to use; where not given, all that are not left out.

    Example:
        >>> genres, year = np.array(["b|a", "a"], dtype=object), np.array([1995, 1995])
        >>> table = Chunk({"genres": Column(genres), "year": Column(year)})
        >>> made = side_features(np.array([1, 3]), table, 4, ["genres", "year"])
        >>> [made.columns["genres"].row(item).tolist() for item in range(4)], made.columns["year"].values.tolist()
        ([[], [2, 1], [], [1]], [0, 1, 0, 1])
        >>> made.vocab
        {'genres': 3, 'year': 2}
    """
    made: dict[str, Column] = {}
    vocabularies: dict[str, Vocabulary] = {}
    scales: dict[str, tuple[float, float]] = {}
    separators: dict[str, str] = {}
    types: dict[str, str] = {}
    for name in columns if columns is not None else [name for name in table if _describes(table[name])]:
        values = table[name].values
        if values.dtype.kind == "f":
            made[name], scales[name] = _scaled(ids, values.astype(np.float64), size)
        elif values.dtype.kind in "OU" and any(SEPARATOR in str(text) for text in values):
            made[name], vocabularies[name] = _lists(ids, values, size)
            separators[name] = SEPARATOR
        else:
            distinct, codes = np.unique(values.astype(str) if values.dtype.kind == "O" else values, return_inverse=True)
            made[name], vocabularies[name] = _by_id(ids, codes + 1, size), vocabulary_of(distinct)
            if values.dtype.kind == "b":
                types[name] = "bool"
    words = RowContext(vocabularies=vocabularies, scales=scales, separators=separators, types=types)
    return SideFeatures(Chunk(made), words)


def check_described(path: Path, key: str, ids: Int64, table: Chunk) -> None:
    """Refuses a file of users or items from which a part would silently be lost.

    Args:
        path: file of users or items.
        key: name of the column with the ids.
        ids: (B,) ids in that column.
        table: B rows of the other columns.

    Raises:
        DataError: an id has two rows, one of which would be lost, or a column of fractions holds NaN or infinity.
    """
    order = np.argsort(ids, kind="stable")
    twice = np.flatnonzero(ids[order[1:]] == ids[order[:-1]])
    if len(twice):
        first, second = order[twice[0]], order[twice[0] + 1]
        raise DataError(
            f"{path}: column '{key}', rows {first} and {second}: both describe id {ids[first]} ({len(twice):,} rows "
            "more than there are ids); keep one row for each id"
        )
    for name, column in table.items():
        check_finite(path, name, column.values)


def vocabulary_of(values: Array | Sequence[str]) -> Vocabulary:
    """Returns the distinct values of a column of text or whole numbers, in sorted order."""
    named = np.asarray(values)
    words = pa.array(named.astype(np.int64) if named.dtype.kind in "iub" else named)
    return Vocabulary(words, pa.array(np.zeros(len(words), np.int64)))


def _describes(column: Column) -> bool:
    if column.ragged:
        return False
    if column.values.dtype.kind == "f":
        return True
    values = column.values.astype(str) if column.values.dtype.kind == "O" else column.values
    return len(np.unique(values)) <= MOST_DISTINCT * len(values)


def _lists(ids: Int64, texts: Array, size: int) -> tuple[Column, Vocabulary]:
    words: list[list[str]] = [[]] * size
    for row, text in zip(ids.tolist(), texts, strict=True):
        words[row] = [word for word in str(text).split(SEPARATOR) if word]
    flat = np.array([word for row in words for word in row])
    distinct, codes = np.unique(flat, return_inverse=True)
    return Column.from_lengths(codes.astype(np.int64) + 1, np.array([len(row) for row in words])), vocabulary_of(
        distinct
    )


def _scaled(ids: Int64, values: Array, size: int) -> tuple[Column, tuple[float, float]]:
    mean, deviation = float(values.mean()), float(values.std()) or 1.0
    return _by_id(ids, ((values - mean) / deviation).astype(np.float32), size), (mean, deviation)


def _by_id(ids: Int64, values: Array, size: int) -> Column:
    table = np.zeros(size, dtype=values.dtype)
    table[ids] = values
    return Column(table)
