"""Column and Chunk: rows in memory as flat numpy arrays, gathered and sliced without a Python loop over rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Column:
    """One feature of B rows.

    A scalar column is its ``values``. A ragged column holds the values of all rows one after the other::

        row 0: [3, 7]   row 1: []   row 2: [5]      values = [3, 7, 5]   offsets = [0, 2, 2, 3]

    Args:
        values: (B,), or (sum of lengths,) with ``offsets``.
        offsets: (B + 1,) int64 from 0 to the number of values, or None.

    Raises:
        ValueError: the offsets do not fit the values.
    """

    values: Array
    offsets: Int64 | None = None

    def __post_init__(self) -> None:
        if self.values.ndim != 1:
            raise ValueError(f"values have shape {self.values.shape}, must be one-dimensional; give a ragged column its offsets")
        if self.offsets is None:
            return
        offsets = self.offsets
        if offsets.dtype != np.int64 or offsets.ndim != 1 or not len(offsets):
            raise ValueError(f"offsets are {offsets.dtype} of shape {offsets.shape}, must be int64 of shape (B + 1,)")
        if offsets[0] != 0 or offsets[-1] != len(self.values):
            raise ValueError(f"offsets run from {offsets[0]} to {offsets[-1]}, must run from 0 to the {len(self.values)} values")

    @classmethod
    def from_lengths(cls, values: Array, lengths: Array) -> Column:
        """A ragged column from its row lengths (B,)."""
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return cls(values, offsets)

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    @property
    def lengths(self) -> Int64:
        """(B,) values per row; ones for a scalar column."""
        return np.ones(len(self), dtype=np.int64) if self.offsets is None else np.diff(self.offsets)

    def row(self, index: int) -> Array:
        """The values of one row, as a view."""
        return self.slice(index, index + 1).values

    def slice(self, start: int, stop: int) -> Column:
        """Rows ``start`` to ``stop``; the values are a view."""
        if self.offsets is None:
            return Column(self.values[start:stop])
        offsets = self.offsets[start : stop + 1]
        return Column(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])

    def take(self, indices: Int64) -> Column:
        """The rows ``indices`` (B',), in that order; a row may be taken twice."""
        if self.offsets is None:
            return Column(self.values.take(indices))
        starts = self.offsets.take(indices)
        return gather_windows(self.values, starts, self.offsets.take(indices + 1))

    def repeat(self, times: int) -> Column:
        """Each row ``times`` times in a row: B * times rows."""
        if times == 1:
            return self
        if self.offsets is None:
            return Column(self.values.repeat(times))
        return self.take(np.arange(len(self)).repeat(times))


def gather_windows(values: Array, starts: Int64, stops: Int64) -> Column:
    """The ragged column whose row b is ``values[starts[b]:stops[b]]``; windows may overlap.

    Args:
        values: (V,).
        starts: (B,) first place of each window.
        stops: (B,) place after the last; ``stops >= starts``.
    """
    offsets = np.zeros(len(starts) + 1, dtype=np.int64)
    np.cumsum(stops - starts, out=offsets[1:])
    places = (starts - offsets[:-1]).repeat(stops - starts)
    places += np.arange(len(places))
    return Column(values.take(places), offsets)


def concatenate(columns: Sequence[Column]) -> Column:
    """The rows of all columns, one column after the other; all scalar or all ragged."""
    if len(columns) == 1:
        return columns[0]
    values = np.concatenate([column.values for column in columns])
    if columns[0].offsets is None:
        return Column(values)
    return Column.from_lengths(values, np.concatenate([column.lengths for column in columns]))


class Chunk(Mapping[str, Column]):
    """An immutable mapping from names to columns of B rows each.

    Example:
        >>> chunk = Chunk({"user": Column(np.array([7, 8, 9])), "label": Column(np.array([1.0, 0.0, 1.0]))})
        >>> chunk.take(np.array([2, 0]))["user"].values
        array([9, 7])
    """

    def __init__(self, columns: Mapping[str, Column]) -> None:
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the columns of a chunk must have equally many rows, got {lengths}")
        self._columns = dict(columns)
        self.num_rows = next(iter(lengths.values()), 0)

    def __getitem__(self, name: str) -> Column:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        """The number of columns; the number of rows is ``num_rows``."""
        return len(self._columns)

    def __repr__(self) -> str:
        return f"Chunk({self.num_rows} rows: {', '.join(self)})"

    def take(self, indices: Int64) -> Chunk:
        """The rows ``indices`` (B',) of every column."""
        return Chunk({name: column.take(indices) for name, column in self.items()})

    def slice(self, start: int, stop: int) -> Chunk:
        """Rows ``start`` to ``stop`` of every column, as views."""
        return Chunk({name: column.slice(start, stop) for name, column in self.items()})

    def with_columns(self, columns: Mapping[str, Column]) -> Chunk:
        """This chunk with ``columns`` added, or put in place of those of the same name."""
        return Chunk({**self._columns, **columns})

    def select(self, names: Sequence[str]) -> Chunk:
        """Only the columns ``names``."""
        return Chunk({name: self[name] for name in names})
