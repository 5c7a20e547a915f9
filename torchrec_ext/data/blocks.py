"""Blocks of rows in memory: which columns they hold, how values are checked, and the memory that they are written to.

Ids and numbers are checked here, a column of a row group at a time, which costs a tenth of checking them in each batch and knows
file and row group.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from torchrec_ext.data.arrow import Kind, as_int64
from torchrec_ext.data.columns import Array, Chunk, Column, Int64
from torchrec_ext.data.row_groups import RowGroup, Source
from torchrec_ext.schema import BatchSchema, DataError, SparseFeature

Float32 = NDArray[np.float32]
Vectors = Array | list[Array]
SCALAR: tuple[Kind, ...] = ("int",)
IDS: tuple[Kind, ...] = ("int", "ints")
LISTS: tuple[Kind, ...] = ("ints",)
WEIGHTS: tuple[Kind, ...] = ("floats",)
_SPARE = 8  # buffers kept for the next blocks
NUMBERS: tuple[Kind, ...] = ("float", "int", "bool")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a block holds of each column.

    Args:
        features: the sparse columns by name; None for an id that no table reads (a user's, for the negatives).
        floats: the dense columns, the labels and the weight.
        out_of_range: see :class:`BatchSchema`.
        weights: the list columns with a weight for each id, by the feature whose ids they are.
        bounds: least and greatest value of the labels and the weight.
    """

    features: Mapping[str, SparseFeature | None]
    floats: tuple[str, ...]
    out_of_range: str
    weights: Mapping[str, str] = field(default_factory=dict)
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, schema: BatchSchema, ids: Sequence[str], floats: tuple[str | None, str | None], without: Sequence[str]) -> Layout:
        """The layout for the schema's columns but ``without``, further ids, and ``floats``: the label and the weight."""
        labels = [name for name in (floats[0], *schema.tasks) if name]
        bounds = dict.fromkeys(labels, schema.label_range) if schema.label_range else {}
        bounds |= {floats[1]: (0.0, math.inf)} if floats[1] else {}
        features: dict[str, SparseFeature | None] = dict.fromkeys([*ids, *schema.identities])
        features |= {feature.name: feature for feature in schema.sparse}
        dense = dict.fromkeys([*schema.dense, *schema.tasks, *(name for name in floats if name)])
        return cls(
            features={name: feature for name, feature in features.items() if name not in without},
            floats=tuple(name for name in dense if name not in without),
            out_of_range=schema.out_of_range,
            weights={feature.name: feature.weights for feature in schema.sparse if feature.weights and feature.name not in without},
            bounds=bounds,
        )

    @property
    def names(self) -> list[str]:
        """Columns to read; one may be both an id and a label."""
        return list(dict.fromkeys([*self.features, *self.floats, *self.weights.values()]))

    @property
    def ids(self) -> list[str]:
        """What a block holds beside its floats: ids, and weights of ids."""
        return [*self.features, *self.weights.values()]

    def require(self, source: Source) -> frozenset[str]:
        """Refuses a source that lacks a column or has it with another kind; the sparse columns with several ids per row."""
        source.require(dict.fromkeys(self.floats, NUMBERS))
        source.require(dict.fromkeys(self.weights, LISTS) | dict.fromkeys(self.weights.values(), WEIGHTS))
        kinds = source.require({name: IDS if feature else SCALAR for name, feature in self.features.items()})
        return frozenset(name for name, kind in kinds.items() if kind == "ints")

    def only(self, name: str) -> Layout:
        """The layout for one float column alone."""
        return Layout(features={}, floats=(name,), out_of_range=self.out_of_range, bounds=self.bounds)

    def checked(self, group: RowGroup, chunk: Chunk) -> tuple[dict[str, Column], dict[str, Array]]:
        """(ids as int64 by name, floats as float32 by name) of the rows of a group or of a part of one, every value valid."""
        ids = {name: self._ids(group, name, chunk[name], feature) for name, feature in self.features.items()}
        ids |= {column: _weights(group, name, column, chunk) for name, column in self.weights.items()}
        return ids, {name: self._numbers(group, name, chunk[name].values) for name in self.floats}

    def _numbers(self, group: RowGroup, name: str, values: Array) -> Float32:
        floats = _finite(group, name, values)
        if name not in self.bounds or not len(floats):
            return floats
        low, high = self.bounds[name]
        if not low <= float(floats.min()) <= float(floats.max()) <= high:
            row = int(((floats < low) | (floats > high)).argmax())
            limits = f"from {low:g} to {high:g}; for other labels make the schema with label_range=None"
            limits = f"{low:g} or more" if math.isinf(high) else limits
            raise DataError(f"{group.name}, column '{name}', row {group.first + row}: value {floats[row]:g} must be {limits}")
        return floats

    def _ids(self, group: RowGroup, name: str, column: Column, feature: SparseFeature | None) -> Column:
        if feature and self.out_of_range == "oov":
            values = column.values.astype(np.int64, copy=False)  # beyond int64 is negative, so the unknown row as well
        else:
            values = as_int64(group.name, name, column, group.first)
        # As unsigned numbers negative ids are the largest: one pass over the column finds both kinds.
        if feature and len(values) and int(values.view(np.uint64).max()) >= feature.num_embeddings:
            bad = (values < 0) | (values >= feature.num_embeddings)
            if self.out_of_range != "oov":
                raise _out_of_range(group, feature, column, values, bad)
            values = np.where(bad, feature.oov_id, values)
        if values is column.values:
            return column
        return Column.from_lengths(values, column.lengths) if column.ragged else Column(values)


def _out_of_range(group: RowGroup, feature: SparseFeature, column: Column, values: Int64, bad: Array) -> DataError:
    first = int(bad.argmax())
    row = int(np.searchsorted(np.cumsum(column.lengths), first, side="right"))
    tables = ", ".join(f"'{table}'" for table in feature.tables)
    return DataError(
        f"{group.name}, column '{feature.name}', row {group.first + row}: id {values[first]} is outside table {tables} (valid ids: "
        f"0 to {feature.num_embeddings - 1}; {int(bad.sum())} such ids in the {group.rows} rows read); "
        f"{feature.remedy(int(values.max()))}"
    )


def _finite(group: RowGroup, name: str, values: Array) -> Float32:
    floats: Float32 = values.astype(np.float32, copy=False)
    finite = np.isfinite(floats)
    if not finite.all():
        row = int((~finite).argmax())
        raise DataError(
            f"{group.name}, column '{name}', row {group.first + row}: value {floats[row]} is not finite; "
            "fill or drop it where it is written"
        )
    return floats


def _weights(group: RowGroup, name: str, column: str, chunk: Chunk) -> Column:
    """The weights of the ids of feature ``name``, finite and as many."""
    lengths, ids = chunk[column].lengths, chunk[name].lengths
    if not np.array_equal(lengths, ids):
        row = int((lengths != ids).argmax())
        raise DataError(
            f"{group.name}, column '{column}', row {group.first + row}: {lengths[row]} weights for the {ids[row]} ids of '{name}'; "
            "give one for each id"
        )
    values = chunk[column].values.astype(np.float32, copy=False)
    if not np.isfinite(values).all():
        at = int((~np.isfinite(values)).argmax())
        row = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
        raise DataError(
            f"{group.name}, column '{column}', row {group.first + row}: value {values[at]} is not finite; "
            "fill or drop it where it is written"
        )
    return Column.from_lengths(values, lengths)


class Memory:
    """The matrices of blocks, used again.

    Fresh pages cost as much as the shuffle, and in malloc's heap, between many short-lived arrays, blocks leave holes by which a
    process grew by some 400 MB.
    """

    def __init__(self) -> None:
        self._free: list[Array] = []
        self._lock = threading.Lock()  # the reading thread takes, the one that builds batches gives

    def take(self, columns: int, rows: int, dtype: np.dtype[np.generic]) -> tuple[Array, Array]:
        """A (columns, rows) matrix with any content, and what to :meth:`give` back for it."""
        size = columns * rows * dtype.itemsize
        with self._lock:
            place = next((at for at, buffer in enumerate(self._free) if size <= buffer.size <= 2 * size), None)
            buffer = None if place is None else self._free.pop(place)
        if buffer is None:
            buffer = np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)
        return buffer[:size].view(dtype).reshape(columns, rows), buffer

    def give(self, rows: Rows) -> None:
        """Takes a block's memory back; nobody may read the block any more."""
        with self._lock:
            self._free = [*self._free, *rows.buffers][-_SPARE:]


class Rows:
    """The rows of a block, in the order in which they are handed out.

    Args:
        scalars: (F1, n) ids of the columns with one id per row; without a shuffle F1 views of Arrow's memory.
        ragged: by name, the columns with several.
        floats: (Ff, n) float32; without a shuffle Ff views.
        float_names: of ``floats``.
        numbers: (n,) the place of each row in the whole source.
    """

    def __init__(
        self, scalars: Vectors, ragged: Mapping[str, Column], floats: Vectors, float_names: Sequence[str], numbers: Int64
    ) -> None:
        self.scalars = scalars
        self.floats = floats
        self.float_names = float_names
        self.buffers: list[Array] = []
        self.numbers = numbers
        self.ragged = ragged
        self.offsets = {name: offsets for name, column in ragged.items() if (offsets := column.offsets) is not None}
