"""Blocks of rows in memory: their columns, the checks of their values, and their memory.

Ids and numbers are checked here, a column of a row group at a time, which costs a tenth of checking them in each batch
and knows file and row group.

Assembler: slices of blocks -> one TowerBatch. Every value is copied once, into the KeyedJaggedTensor.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrec_ext.batch import KeyedIds, Keys, TowerBatch, pack
from torchrec_ext.data.columns import Array, Chunk, Column, Float32, Int64
from torchrec_ext.data.files.arrow import Kind, RowGroup, Source, as_int64
from torchrec_ext.data.loader.batch_builder import padded
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.schema import BatchSchema, DataError, SparseFeature
from torchrec_ext.schema.validation import listed

Vectors = Array | list[Array]
SCALAR: tuple[Kind, ...] = ("int",)
ID_KINDS: tuple[Kind, ...] = ("int", "ints")
LISTS: tuple[Kind, ...] = ("ints",)
WEIGHTS: tuple[Kind, ...] = ("floats",)
_SPARE_BUFFERS = 8  # buffers to reuse for the next blocks
NUMBER_KINDS: tuple[Kind, ...] = ("float", "int", "bool")


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """The columns of a block and their allowed values.

    Args:
        features: the sparse columns by name; None for an id that no table reads (a user's, for the negatives).
        floats: names of the dense columns, the labels and the weight.
        out_of_range: see :class:`BatchSchema`.
        weights: maps a feature to the list column with a weight for each of its ids.
        bounds: least and greatest value of each column of labels and of the weight.
    """

    features: Mapping[str, SparseFeature | None]
    floats: tuple[str, ...]
    out_of_range: str
    weights: Mapping[str, str] = field(default_factory=dict)
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, schema: BatchSchema, ids: Sequence[str], floats: tuple[str | None, str | None], without: Sequence[str]
    ) -> BlockLayout:
        """Builds the layout of the schema's columns without ``without``, of further ids, and of label and weight.

        Args:
            schema: columns of the batches.
            ids: further columns with one id per row.
            floats: names of the label and of the weight, or None.
            without: columns of the schema that the rows need not have.
        """
        label, weight = floats
        bounds: dict[str, tuple[float, float]] = {}
        if schema.label_range:
            bounds = dict.fromkeys((name for name in (label, *schema.tasks) if name), schema.label_range)
        if weight:
            bounds[weight] = (0.0, math.inf)
        features: dict[str, SparseFeature | None] = dict.fromkeys([*ids, *schema.identities])
        features |= {feature.name: feature for feature in schema.sparse}
        dense = dict.fromkeys([*schema.dense, *schema.tasks, *(name for name in floats if name)])
        return cls(
            features={name: feature for name, feature in features.items() if name not in without},
            floats=tuple(name for name in dense if name not in without),
            out_of_range=schema.out_of_range,
            weights={
                feature.name: feature.weights
                for feature in schema.sparse
                if feature.weights and feature.name not in without
            },
            bounds=bounds,
        )

    @property
    def names(self) -> list[str]:
        """Names of the columns to read; a column may be both an id and a label."""
        return list(dict.fromkeys([*self.features, *self.floats, *self.weights.values()]))

    @property
    def ids(self) -> list[str]:
        """Names of the columns of ids and of the ids' weights."""
        return [*self.features, *self.weights.values()]

    def require(self, source: Source, config: LoaderConfig) -> frozenset[str]:
        """Refuses a source with a missing column or a column of another kind.

        Returns:
            The sparse columns with several ids per row.
        """
        for name in self.floats:
            try:
                source.require({name: NUMBER_KINDS})
            except DataError as error:
                raise DataError(f"{config.setting_of(name)}{error}") from None
        source.require(dict.fromkeys(self.weights, LISTS) | dict.fromkeys(self.weights.values(), WEIGHTS))
        kinds = source.require({name: ID_KINDS if feature else SCALAR for name, feature in self.features.items()})
        return frozenset(name for name, kind in kinds.items() if kind == "ints")

    def only(self, name: str) -> BlockLayout:
        """Returns the layout of one float column alone."""
        return BlockLayout(features={}, floats=(name,), out_of_range=self.out_of_range, bounds=self.bounds)

    def checked(self, group: RowGroup, chunk: Chunk) -> tuple[dict[str, Column], dict[str, Array]]:
        """Checks the rows of a group or of a part of one; returns ids (int64) by name and floats (float32) by name."""
        ids = {name: self._ids(group, name, chunk[name], feature) for name, feature in self.features.items()}
        ids |= {column: _weights(group, name, column, chunk) for name, column in self.weights.items()}
        return ids, {name: self._numbers(group, name, chunk[name]) for name in self.floats}

    def _numbers(self, group: RowGroup, name: str, column: Column) -> Float32:
        floats = _finite(group, name, column)
        if name not in self.bounds or not len(floats):
            return floats
        low, high = self.bounds[name]
        if not low <= float(floats.min()) <= float(floats.max()) <= high:
            row = int(((floats < low) | (floats > high)).argmax())
            if math.isinf(high):
                limits = f"{low:g} or more"
            else:
                limits = f"from {low:g} to {high:g}; for other labels make the schema with label_range=None"
            raise DataError(
                f"{group.name}, column '{name}', row {group.first + row}: value {floats[row]:g} must be {limits}"
            )
        return floats

    def _ids(self, group: RowGroup, name: str, column: Column, feature: SparseFeature | None) -> Column:
        if feature and self.out_of_range == "oov":
            # A value beyond int64 becomes negative, and so out of vocabulary as well.
            values = column.values.astype(np.int64, copy=False)
        else:
            values = as_int64(group.name, name, column, group.first)
        if feature is None or feature.dynamic or not len(values):
            is_inside = True
        else:
            # As unsigned numbers negative ids are the largest: one pass over the column finds both kinds.
            is_inside = int(values.view(np.uint64).max()) < feature.num_embeddings
        if feature is not None and not is_inside:
            is_outside = (values < 0) | (values >= feature.num_embeddings)
            if self.out_of_range != "oov":
                raise _out_of_range(group, feature, column, values, is_outside)
            values = np.where(is_outside, feature.oov_id, values)
        if values is column.values:
            return column
        return Column.from_lengths(values, column.lengths) if column.ragged else Column(values)


def _out_of_range(group: RowGroup, feature: SparseFeature, column: Column, values: Int64, bad: Array) -> DataError:
    first = int(bad.argmax())
    row = column.row_of(first)
    tables = listed(f"'{table}'" for table in feature.tables)
    return DataError(
        f"{group.name}, column '{feature.name}', row {group.first + row}: id {values[first]} is outside table "
        f"{tables} (valid ids: 0 to {feature.num_embeddings - 1}; {int(bad.sum())} such ids in the {group.rows} rows "
        f"read); {feature.remedy(int(values.max()))}"
    )


def _finite(group: RowGroup, name: str, column: Column) -> Float32:
    floats: Float32 = column.values.astype(np.float32, copy=False)
    finite = np.isfinite(floats)
    if not finite.all():
        index = int((~finite).argmax())
        raise DataError(
            f"{group.name}, column '{name}', row {group.first + column.row_of(index)}: value {floats[index]} is not "
            "finite; fill or drop it where it is written"
        )
    return floats


def _weights(group: RowGroup, name: str, column: str, chunk: Chunk) -> Column:
    """Returns the weights of the ids of feature ``name``; raises a DataError if one is missing or not finite."""
    lengths = chunk[column].lengths
    ids = chunk[name].lengths
    if not np.array_equal(lengths, ids):
        row = int((lengths != ids).argmax())
        raise DataError(
            f"{group.name}, column '{column}', row {group.first + row}: {lengths[row]} weights for the {ids[row]} ids "
            f"of '{name}'; give one for each id"
        )
    return Column.from_lengths(_finite(group, column, chunk[column]), lengths)


class Memory:
    """Reuses the memory of blocks' matrices.

    Fresh pages cost as much as the shuffle; and in malloc's heap, between many short-lived arrays, blocks leave holes,
    by which a process grew by some 400 MB.
    """

    def __init__(self) -> None:
        self._free: list[Array] = []
        self._lock = threading.Lock()  # the reading thread takes, the one that builds batches gives

    def take(self, columns: int, rows: int, dtype: np.dtype[np.generic]) -> tuple[Array, Array]:
        """Returns an uninitialised (columns, rows) matrix, and the buffer to :meth:`give` back for it."""
        size = columns * rows * dtype.itemsize
        with self._lock:
            # At most twice the size, so that a small block does not hold the memory of a large one.
            index = next((number for number, buffer in enumerate(self._free) if size <= buffer.size <= 2 * size), None)
            buffer = None if index is None else self._free.pop(index)
        if buffer is None:
            buffer = np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)
        return buffer[:size].view(dtype).reshape(columns, rows), buffer

    def give(self, rows: BlockRows) -> None:
        """Takes back the memory of a block; nobody may read the block any more."""
        with self._lock:
            self._free = [*self._free, *rows.buffers][-_SPARE_BUFFERS:]


class BlockRows:
    """The rows of a block, in the order of the batches.

    Args:
        scalars: (F1, n) ids of the columns with one id per row; without a shuffle F1 views of Arrow's memory.
        ragged: the columns with several ids per row, by name.
        floats: (Ff, n) float32; without a shuffle Ff views.
        float_names: names of the columns in ``floats``.
        numbers: (n,) the index of each row in the whole source.
    """

    def __init__(
        self,
        scalars: Vectors,
        ragged: Mapping[str, Column],
        floats: Vectors,
        float_names: Sequence[str],
        numbers: Int64,
    ) -> None:
        self.scalars = scalars
        self.floats = floats
        self.float_names = float_names
        self.buffers: list[Array] = []
        self.numbers = numbers
        self.ragged = ragged
        self.offsets = {name: offsets for name, column in ragged.items() if (offsets := column.offsets) is not None}


class Slice(NamedTuple):
    """Rows ``start`` to ``stop`` of a block."""

    rows: BlockRows
    start: int
    stop: int


class Assembler:
    """Builds batches of the schema from checked rows.

    Args:
        schema: the columns of the batch.
        layout: the columns of the blocks.
        ragged: names of the sparse columns with several ids per row.
        label: float column with the labels; all labels are 1 by default.
        weight: float column with the weights; all weights are 1 by default.
    """

    def __init__(
        self, schema: BatchSchema, layout: BlockLayout, ragged: frozenset[str], label: str | None, weight: str | None
    ) -> None:
        self.schema = schema
        self._layout = layout
        scalar = [name for name in layout.features if name not in ragged]
        self._scalar = {name: index for index, name in enumerate(scalar)}
        self._float = {name: index for index, name in enumerate(layout.floats)}
        self._label = label
        self._weight = weight

    def batch(self, slices: Sequence[Slice], size: int, total_weight: float) -> TowerBatch:
        """Builds a batch of the rows of ``slices``, padded to ``size`` rows with rows of weight 0 and empty bags.

        Args:
            slices: rows, in the order of the batch.
            size: B.
            total_weight: see :class:`TowerBatch`.
        """
        users, items = (self._identities(slices, size, name) for name in (self.schema.query, self.schema.candidate))
        return pack(
            self.schema.layout,
            lambda keys, sizes: self._keyed(slices, size, keys),
            dense=self._matrix(slices, size, self.schema.row_dense),
            labels=self._vector(slices, size, self._label),
            weights=self._vector(slices, size, self._weight),
            total_weight=torch.tensor(total_weight),
            targets=self._matrix(slices, size, self.schema.tasks) if self.schema.tasks else None,
            users=users,
            items=items,
            queries=size if self.schema.candidate else None,
            shared_dense=self._matrix(slices, size, self.schema.shared_dense) if self.schema.shared else None,
            index=torch.arange(size) if self.schema.shared else None,
        )

    def _identities(self, slices: Sequence[Slice], size: int, name: str | None) -> Tensor | None:
        """Returns (size,) the ids of a column with one for each row, and zeros after them."""
        if name not in self._scalar:
            return None
        return padded(torch.from_numpy(_joined_ids(slices, self._scalar[name])), size)

    def chunk(self, slices: Sequence[Slice]) -> Chunk:
        """Returns all columns of the rows of ``slices``, for batches with items from elsewhere."""
        columns = {name: Column(_joined(slices, index)) for name, index in self._float.items()}
        columns |= {name: Column(_joined_ids(slices, index)) for name, index in self._scalar.items()}
        ragged = [name for name in self._layout.ids if name not in self._scalar]
        return Chunk(columns | {name: _joined_ragged(slices, name) for name in ragged})

    def weights(self, slices: Sequence[Slice]) -> float:
        """Returns the sum of the weights of the rows of ``slices``."""
        if self._weight is None:
            return float(_count(slices))
        name = self._weight
        vectors = [(piece.rows.floats[piece.rows.float_names.index(name)], piece) for piece in slices]
        return float(sum(vector[piece.start : piece.stop].sum(dtype=np.float64) for vector, piece in vectors))

    def _keyed(self, slices: Sequence[Slice], size: int, keys: Keys) -> KeyedIds:
        count = _count(slices)
        totals = [self._total(slices, name, count) for name in keys.features]
        values = torch.empty(sum(totals), dtype=torch.int64)
        lengths = torch.ones(len(keys.features), size, dtype=torch.int32)
        lengths[:, count:] = 0
        self._fill(slices, keys.features, values.numpy(), lengths.numpy(), count)
        weights = torch.from_numpy(self._weights(slices, keys, totals)) if keys.weighted else None
        return KeyedIds(values, lengths.view(-1), weights)

    def _weights(self, slices: Sequence[Slice], keys: Keys, totals: Sequence[int]) -> Array:
        """Returns (sum of lengths,) the weight of each id of the keys' features; 1 for features without weights."""
        arrays = [np.zeros(0, np.float32)]
        for name, total in zip(keys.features, totals, strict=True):
            feature = self.schema.feature(name or "")
            column = feature.weights if feature else None
            if column:
                arrays += [_values(piece, column) for piece in slices]
            else:
                arrays.append(np.ones(total, np.float32))
        return np.concatenate(arrays)

    def _total(self, slices: Sequence[Slice], name: str | None, count: int) -> int:
        """Counts the ids of a feature with ``count`` rows; without a name there are none."""
        if name is None or name in self._scalar:
            return count if name else 0
        return sum(_values(piece, name).size for piece in slices)

    def _fill(
        self, slices: Sequence[Slice], names: Sequence[str | None], values: Int64, lengths: Array, count: int
    ) -> None:
        start = 0
        for run in _runs(names, self._scalar):
            if run.first is not None:
                width = len(run.names)
                out = values[start : start + width * count].reshape(width, count)
                for row, piece in _places(slices):
                    _copy(piece.rows.scalars, run.first, piece, out[:, row : row + piece.stop - piece.start])
                start += width * count
            elif run.names[0] is None:
                lengths[run.start] = 0
            else:
                start = _fill_ragged(slices, run.names[0], values, start, lengths[run.start])

    def _matrix(self, slices: Sequence[Slice], size: int, names: Sequence[str]) -> Tensor:
        dense = torch.zeros(size, len(names))
        count = _count(slices)
        for run in _runs(names, self._float):
            vectors = np.empty((len(run.names), count), np.float32)
            for row, piece in _places(slices):
                out = vectors[:, row : row + piece.stop - piece.start]
                _copy(piece.rows.floats, run.first or 0, piece, out)
            # Column by column is twice as fast as numpy's copy of a transposed matrix.
            for index, vector in enumerate(vectors, start=run.start):
                dense.numpy()[:count, index] = vector
        return dense

    def _vector(self, slices: Sequence[Slice], size: int, name: str | None) -> Tensor:
        vector = torch.zeros(size)
        if name is None:
            vector[: _count(slices)] = 1
        else:
            column = self._float[name]
            for row, piece in _places(slices):
                values = piece.rows.floats[column][piece.start : piece.stop]
                vector.numpy()[row : row + len(values)] = values
        return vector


class _Run(NamedTuple):
    """Names from index ``start`` on, in the order of a block's matrix from row ``first`` on; or one other name."""

    start: int
    first: int | None
    names: list[str | None]


def _runs(names: Sequence[str | None], positions: Mapping[str, int]) -> Iterator[_Run]:
    """Splits ``names`` into the longest runs with consecutive ``positions``."""
    numbered = []
    for index, name in enumerate(names):
        # Constant along a run, as both numbers grow by one; a name without a position gets a number of its own.
        key = positions[name] - index if name and name in positions else -1 - index - len(positions)
        numbered.append((key, index))
    for _, run in groupby(numbered, key=lambda pair: pair[0]):
        indices = [index for _, index in run]
        yield _Run(indices[0], positions.get(names[indices[0]] or ""), [names[index] for index in indices])


def _places(slices: Sequence[Slice]) -> Iterator[tuple[int, Slice]]:
    row = 0
    for piece in slices:
        yield row, piece
        row += piece.stop - piece.start


def _count(slices: Sequence[Slice]) -> int:
    return sum(piece.stop - piece.start for piece in slices)


def _copy(vectors: Vectors, first: int, piece: Slice, out: Array) -> None:
    """Copies the rows of ``piece`` in the vectors from ``first`` on to ``out`` (vectors, rows)."""
    if isinstance(vectors, np.ndarray):
        out[:] = vectors[first : first + len(out), piece.start : piece.stop]
    else:
        for row, vector in zip(out, vectors[first : first + len(out)], strict=True):
            row[:] = vector[piece.start : piece.stop]


def _values(piece: Slice, name: str) -> Array:
    offsets = piece.rows.offsets[name]
    return piece.rows.ragged[name].values[offsets[piece.start] : offsets[piece.stop]]


def _fill_ragged(slices: Sequence[Slice], name: str, values: Int64, start: int, lengths: Array) -> int:
    for row, piece in _places(slices):
        ids = _values(piece, name)
        values[start : start + ids.size] = ids
        start += ids.size
        offsets = piece.rows.offsets[name][piece.start : piece.stop + 1]
        lengths[row : row + piece.stop - piece.start] = np.diff(offsets)
    return start


def _joined(slices: Sequence[Slice], index: int) -> Array:
    return np.concatenate(
        [piece.rows.floats[index][piece.start : piece.stop] for piece in slices] or [np.zeros(0, np.float32)]
    )


def _joined_ids(slices: Sequence[Slice], index: int) -> Array:
    return np.concatenate(
        [piece.rows.scalars[index][piece.start : piece.stop] for piece in slices] or [np.zeros(0, np.int64)]
    )


def _joined_ragged(slices: Sequence[Slice], name: str) -> Column:
    values = np.concatenate([_values(piece, name) for piece in slices] or [np.zeros(0, np.int64)])
    lengths = [np.diff(piece.rows.offsets[name][piece.start : piece.stop + 1]) for piece in slices]
    return Column.from_lengths(values, np.concatenate(lengths or [np.zeros(0, np.int64)]))
