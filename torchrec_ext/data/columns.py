"""Column and Chunk: rows in memory as flat numpy arrays, gathered and sliced without a Python loop over rows.

with_elements(): array columns become the columns of one number that a batch is made of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchrec_ext.schema import DataError
from torchrec_ext.schema.array_columns import widths_of

Array = NDArray[Any]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
_START = np.zeros(1, np.int64)  # of a column of one row


class Windows(NamedTuple):
    """Windows of B rows into a pool of values: ``starts`` (B,) first indices, ``stops`` (B,) indices after the last."""

    starts: Int64
    stops: Int64


class Column:
    """One feature of B rows, immutable.

    A scalar column is its ``values``. A ragged column holds the values of all rows one after the other::

        row 0: [3, 7]   row 1: []   row 2: [5]      values = [3, 7, 5]   offsets = [0, 2, 2, 3]

    After take, slice or repeat, a ragged column is a list of windows into the values of its source. It is gathered when
    its ``values`` are first read. Histories overlap, so 100,000 windows fit into a cache that is too small for copies.

    Args:
        values: (B,), or (sum of lengths,) with ``offsets``, or (B, W) for a ragged column with W values in each row.
        offsets: (B + 1,) int64, rising from 0 to the number of values, or None.

    Raises:
        ValueError: the offsets are others, such as lengths, whose rows would be other rows.
    """

    __slots__ = ("_pool", "_values", "_windows")

    def __init__(self, values: Array, offsets: Int64 | None = None) -> None:
        if values.ndim == 2 and offsets is None:
            # A matrix is a ragged column with equally long rows.
            offsets = np.arange(len(values) + 1, dtype=np.int64) * values.shape[1]
            values = values.reshape(-1)
        if offsets is not None and (
            offsets.dtype != np.int64
            or [*offsets[:1], *offsets[-1:]] != [0, len(values)]
            or (np.diff(offsets) < 0).any()
        ):
            raise ValueError(
                f"offsets must be int64 and rise from 0 to the {len(values)} values, got {offsets.dtype} {offsets}; "
                "from_lengths() takes lengths"
            )
        self._pool = values
        self._values: Array | None = values
        self._windows = None if offsets is None else Windows(offsets[:-1], offsets[1:])

    @classmethod
    def from_lengths(cls, values: Array, lengths: Array) -> Column:
        """Builds a ragged column from its values and the lengths of its rows (B,)."""
        return cls(values, offsets_of(lengths))

    @classmethod
    def grouped(cls, values: Array, owners: Int64, count: int) -> Column:
        """Builds a ragged column with the values of each owner, in their order.

        Args:
            values: (V,).
            owners: (V,) the owner of each value, which is its row.
            count: number of rows.

        Example:
            >>> Column.grouped(np.array([5, 6, 7]), np.array([2, 0, 2]), 3).row(2)
            array([5, 7])
        """
        # Stable, so that an owner's values keep their order.
        order = np.argsort(owners, kind="stable")
        return cls.from_lengths(values[order], np.bincount(owners, minlength=count))

    @classmethod
    def from_windows(cls, pool: Array, windows: Windows) -> Column:
        """Builds a ragged column with row b = ``pool[starts[b]:stops[b]]``; windows may overlap.

        Args:
            pool: (V,) values.
            windows: one window for each of B rows.
        """
        # Without __init__: windows may overlap, and so have no offsets.
        column = cls.__new__(cls)
        column._pool = pool
        column._windows = windows
        column._values = None
        return column

    @classmethod
    def of_row(cls, values: Array) -> Column:
        """Builds a ragged column of one row; unchecked, because most requests come this way."""
        column = cls.from_windows(values, Windows(_START, np.array([len(values)])))
        column._values = values
        return column

    def __len__(self) -> int:
        return len(self._pool if self._windows is None else self._windows.starts)

    @property
    def ragged(self) -> bool:
        """Whether a row may have any number of values."""
        return self._windows is not None

    @property
    def pool(self) -> Array:
        """The values behind a ragged column's windows; a scalar column's values."""
        return self._pool

    @property
    def windows(self) -> Windows:
        """The windows of a ragged column's rows in ``pool``; a scalar column has none."""
        assert self._windows is not None
        return self._windows

    def windowed(self, starts: Int64, stops: Int64) -> Column:
        """Returns a ragged column with other windows into the same ``pool``."""
        return Column.from_windows(self._pool, Windows(starts, stops))

    @property
    def values(self) -> Array:
        """The values of all rows, one row after the other: (B,), or (sum of lengths,) for a ragged column."""
        if self._values is None and self._windows is not None:
            lengths = self.lengths
            # The index of each value in the pool: its place in the result, moved by its
            # row's distance from there.
            indices = (self._windows.starts - offsets_of(lengths)[:-1]).repeat(lengths)
            indices += np.arange(len(indices))
            self._values = self._pool.take(indices)
        return self._pool if self._values is None else self._values

    @property
    def offsets(self) -> Int64 | None:
        """The first index of each row in ``values``, and the end, (B + 1,); None for a scalar column."""
        return offsets_of(self.lengths) if self.ragged else None

    @property
    def lengths(self) -> Int64:
        """The number of values of each row, (B,); ones for a scalar column."""
        if self._windows is None:
            return np.ones(len(self), dtype=np.int64)
        return self._windows.stops - self._windows.starts

    @property
    def owners(self) -> Int64:
        """The row of each of ``values``, ascending."""
        return np.arange(len(self)).repeat(self.lengths)

    def row_of(self, index: int) -> int:
        """Returns the row of one of ``values``."""
        return int(np.cumsum(self.lengths).searchsorted(index, side="right"))

    def row(self, index: int) -> Array:
        """Returns the values of one row, as a view."""
        if self._windows is None:
            return self._pool[[index]]
        return self._pool[self._windows.starts[index] : self._windows.stops[index]]

    def last(self, most: int) -> Column:
        """Returns the ``most`` last values of each row, or fewer where it has fewer."""
        starts, stops = self.windows
        if not (stops - starts > most).any():
            return self
        return self.windowed(np.maximum(starts, stops - most), stops)

    def slice(self, start: int, stop: int) -> Column:
        """Returns rows ``start`` to ``stop``, as views."""
        return self._rows(lambda rows: rows[start:stop])

    def take(self, indices: Int64) -> Column:
        """Returns the rows ``indices`` (B',), in their order; a row may be taken twice."""
        return self._rows(lambda rows: rows.take(indices))

    def _rows(self, choose: Callable[[Array], Array]) -> Column:
        """Returns the rows that are chosen from an array with an entry for each row."""
        if self._windows is None:
            return Column(choose(self._pool))
        return self.windowed(*map(choose, self._windows))


def offsets_of(lengths: Array | Sequence[int]) -> Int64:
    """Returns the offsets (B + 1,) of rows of ``lengths`` (B,) values each, one after the other."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def concatenate(columns: Sequence[Column]) -> Column:
    """Returns the rows of all columns, one column after the other; the columns must be all scalar or all ragged."""
    if len(columns) == 1:
        # Without a copy of a set that is one row group.
        return columns[0]
    values = np.concatenate([column.values for column in columns])
    if not columns[0].ragged:
        return Column(values)
    return Column.from_lengths(
        values, np.concatenate([column.lengths for column in columns])
    )


class Chunk(dict[str, Column]):
    """Columns of B rows each by name; nobody changes one.

    Example:
        >>> chunk = Chunk({"user": Column(np.array([7, 8, 9])), "label": Column(np.array([1.0, 0.0, 1.0]))})
        >>> chunk.take(np.array([2, 0]))["user"].values
        array([9, 7])
    """

    def __init__(self, columns: Mapping[str, Column]) -> None:
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"the columns of a chunk must have equally many rows, got {lengths}"
            )
        super().__init__(columns)
        self.num_rows = next(iter(lengths.values()), 0)

    @classmethod
    def _of_equal(cls, columns: dict[str, Column], num_rows: int) -> Chunk:
        """Builds a Chunk unchecked: comparing the lengths would cost as much as assembling a small batch."""
        chunk = cls.__new__(cls)
        chunk.update(columns)
        chunk.num_rows = num_rows
        return chunk

    def take(self, indices: Int64) -> Chunk:
        """Returns the rows ``indices`` (B',) of every column."""
        # Each batch comes this way, so the lengths are not compared.
        return Chunk._of_equal(
            {name: column.take(indices) for name, column in self.items()}, len(indices)
        )

    def slice(self, start: int, stop: int) -> Chunk:
        """Returns rows ``start`` to ``stop`` of every column, as views."""
        return Chunk({name: column.slice(start, stop) for name, column in self.items()})

    def with_columns(self, columns: Mapping[str, Column]) -> Chunk:
        """Returns this chunk with ``columns`` added; they replace columns of the same name."""
        return Chunk({**self, **columns})

    def select(self, names: Sequence[str]) -> Chunk:
        """Returns a chunk of the columns ``names`` alone."""
        return Chunk({name: self[name] for name in names})


def concatenate_rows(
    chunks: Sequence[Mapping[str, Column]], names: Iterable[str]
) -> Chunk:
    """Returns the columns ``names`` of all chunks, the rows of one chunk after those of the other."""
    columns = {}
    for name in names:
        columns[name] = concatenate([chunk[name] for chunk in chunks])
    return Chunk(columns)


# Rows that a digest is made of: it need not read all of a large set.
_SAMPLE = 65_536


def sample_digest(rows: Chunk) -> str:
    """Returns a digest of sample rows from all over a chunk; other rows most likely have another."""
    digest = hashlib.sha256()
    count = min(_SAMPLE, rows.num_rows)
    sample = rows.take(np.linspace(0, rows.num_rows - 1, count).astype(np.int64))
    # Sorted, because the order of the columns says nothing about the rows.
    for name, column in sorted(sample.items()):
        # Objects have addresses instead of bytes, which differ from run to run.
        if column.pool.dtype != object:
            digest.update(f"{name} {column.pool.dtype} {rows.num_rows};".encode())
            digest.update(column.lengths.tobytes())
            digest.update(column.values.tobytes())
    return digest.hexdigest()[:16]


def with_elements(
    chunk: Chunk, names: Iterable[str], where: str = "", first: int = 0
) -> Chunk:
    """Splits each array column with elements among ``names`` into one column per element.

    Args:
        chunk: rows.
        names: names of dense columns, elements such as ``profile[3]`` among them.
        where: file and row group, for the message.
        first: number of the first row, for the message.

    Raises:
        DataError: a row of an array column has too few or too many numbers.
    """
    widths = {
        column: width
        for column, width in widths_of(names, chunk).items()
        if column in chunk
    }
    if not widths:
        return chunk
    columns = dict(chunk)
    for name, width in widths.items():
        column = columns.pop(name)
        wrong = column.lengths != width
        if wrong.any():
            row = int(wrong.argmax())
            prefix = f"{where}, " if where else ""
            raise DataError(
                f"{prefix}column '{name}', row {first + row}: {column.lengths[row]} numbers, must be {width} in each "
                f"row, as the model's dense={{'{name}': {width}}} says"
            )
        matrix = column.values.reshape(len(column), width)
        for index in range(width):
            columns[f"{name}[{index}]"] = Column(matrix[:, index])
    return Chunk(columns)
