"""What is known of each user or item -> columns by id, with a vocabulary for each, without being told what the columns are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from torchrec_ext.data.columns import Array, Chunk, Column, Int64
from torchrec_ext.data.preprocess.vocabulary import Vocabulary
from torchrec_ext.data.row_context import RowContext, check_finite
from torchrec_ext.schema import DataError

SEPARATOR = "|"
MOST_DISTINCT = 0.5  # share of distinct values from which on a column names its row, as a title does, and says nothing of another


class SideFeatures(NamedTuple):
    """``columns``: a row by id, row 0 the unknown one; ``words``: how they were made."""

    columns: Chunk
    words: RowContext

    @property
    def vocab(self) -> dict[str, int]:
        """Table rows of each sparse column."""
        return self.words.vocab

    @property
    def dense(self) -> tuple[str, ...]:
        """The others."""
        return tuple(self.words.scales)


def side_features(ids: Int64, table: Chunk, size: int, columns: Sequence[str] | None = None) -> SideFeatures:
    """Text and whole numbers become ids from 1, in sorted order, text with ``|`` in it a list of ids; fractions become dense.

    A dense column is scaled to mean 0 and standard deviation 1. Left out are columns whose values are nearly all distinct, such as
    titles and postal codes, which name a row and do not describe it.

    Args:
        ids: (B,) from 1 to ``size - 1``: which row of the result each row of ``table`` describes; one that none describes is 0.
        table: B rows.
        size: rows of the result.
        columns: which columns of ``table``, instead of all that are not left out.

    Example:
        >>> table = Chunk({"genres": Column(np.array(["b|a", "a"], dtype=object)), "year": Column(np.array([1995, 1995]))})
        >>> made = side_features(np.array([1, 3]), table, 4, ["genres", "year"])
        >>> [made.columns["genres"].row(item).tolist() for item in range(4)], made.columns["year"].values.tolist(), made.vocab
        ([[], [2, 1], [], [1]], [0, 1, 0, 1], {'genres': 3, 'year': 2})
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
            distinct, places = np.unique(values.astype(str) if values.dtype.kind == "O" else values, return_inverse=True)
            made[name], vocabularies[name] = _by_id(ids, places + 1, size), vocabulary_of(distinct)
            if values.dtype.kind == "b":
                types[name] = "bool"
    words = RowContext(vocabularies=vocabularies, scales=scales, separators=separators, types=types)
    return SideFeatures(Chunk(made), words)


def check_described(path: Path, key: str, ids: Int64, table: Chunk) -> None:
    """Refuses a file of users or items of which a part would be lost without a word.

    Args:
        path: the file.
        key: its column with the ids.
        ids: (B,) of that column.
        table: B rows of its other columns.

    Raises:
        DataError: an id has two rows, of which one would be taken, or a column of fractions holds NaN or infinity.
    """
    order = np.argsort(ids, kind="stable")
    twice = np.flatnonzero(ids[order[1:]] == ids[order[:-1]])
    if len(twice):
        first, second = order[twice[0]], order[twice[0] + 1]
        raise DataError(
            f"{path}: column '{key}', rows {first} and {second}: both describe id {ids[first]} ({len(twice):,} rows more than "
            "there are ids); keep one row for each id"
        )
    for name, column in table.items():
        check_finite(path, name, column.values)


def vocabulary_of(values: Array | Sequence[str]) -> Vocabulary:
    """Of text or whole numbers, each once."""
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
    distinct, places = np.unique(flat, return_inverse=True)
    return Column.from_lengths(places.astype(np.int64) + 1, np.array([len(row) for row in words])), vocabulary_of(distinct)


def _scaled(ids: Int64, values: Array, size: int) -> tuple[Column, tuple[float, float]]:
    mean, deviation = float(values.mean()), float(values.std()) or 1.0
    return _by_id(ids, ((values - mean) / deviation).astype(np.float32), size), (mean, deviation)


def _by_id(ids: Int64, values: Array, size: int) -> Column:
    table = np.zeros(size, dtype=values.dtype)
    table[ids] = values
    return Column(table)
