"""Blocks of rows in memory: their columns, the checks of their values, and their memory.

Ids and numbers are checked here, a column of a row group at a time, which costs a tenth of checking them in each batch
and knows file and row group.

gathered(): slices of blocks -> the columns of a step's rows.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrec_ext.batch import Jagged
from torchrec_ext.data.columns import (
    Array,
    Chunk,
    Column,
    Float32,
    Int64,
    offsets_of,
)
from torchrec_ext.data.files.arrow import Kind, RowGroup
from torchrec_ext.data.files.sources import ParquetSource
from torchrec_ext.data.loader.batch import RowColumns
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.schema import BatchSchema, DataError, SparseFeature

Vectors = Array | list[Array]
SCALAR: tuple[Kind, ...] = ("int",)
ID_KINDS: tuple[Kind, ...] = ("int", "ints")
# Buffers to reuse for the next blocks: a block has two, one of ids and one of floats.
_SPARE_BUFFERS = 8
NUMBER_KINDS: tuple[Kind, ...] = ("float", "int", "bool")


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """The columns of a block and their allowed values.

    Args:
        features: the sparse columns by name; None for an id that no table reads (a user's, for the negatives).
        floats: names of the dense columns, the labels and the weight.
        out_of_range: see :class:`BatchSchema`.
        bounds: least and greatest value of each column of labels and of the weight.
    """

    features: Mapping[str, SparseFeature | None]
    floats: tuple[str, ...]
    out_of_range: str
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        schema: BatchSchema,
        config: LoaderConfig,
        ids: Sequence[str],
        without: Sequence[str],
    ) -> BlockLayout:
        """Builds the layout of the schema's columns without ``without``, of further ids, and of label and weight.

        Args:
            schema: columns of the batches.
            config: settings that name the label and the weight.
            ids: further columns with one id per row.
            without: columns of the schema that the rows need not have.
        """
        names = list(schema.tasks)
        if config.label:
            names.append(config.label)
        bounds: dict[str, tuple[float, float]] = {}
        if schema.label_range:
            bounds = dict.fromkeys(names, schema.label_range)
        # After the labels: a column may be both, and a weight may not be negative.
        if config.weight:
            names.append(config.weight)
            bounds[config.weight] = (0.0, math.inf)
        # Features last, so that an id of the schema is checked against its table.
        features: dict[str, SparseFeature | None] = dict.fromkeys(ids)
        if schema.candidate:
            features[schema.candidate] = None
        features |= {feature.name: feature for feature in schema.sparse}
        for name in without:
            features.pop(name, None)
        return cls(
            features=features,
            floats=tuple(
                dict.fromkeys(
                    name for name in (*schema.dense, *names) if name not in without
                )
            ),
            out_of_range=schema.out_of_range,
            bounds=bounds,
        )

    @property
    def names(self) -> list[str]:
        """Names of the columns to read; a column may be both an id and a label."""
        return list(dict.fromkeys([*self.features, *self.floats]))

    @property
    def ids(self) -> list[str]:
        """Names of the columns of ids."""
        return list(self.features)

    def require(self, source: ParquetSource) -> None:
        """Refuses a source with a missing column or a column of another kind."""
        source.require(dict.fromkeys(self.floats, NUMBER_KINDS))
        source.require(
            {
                name: ID_KINDS if feature else SCALAR
                for name, feature in self.features.items()
            }
        )

    def only(self, name: str) -> BlockLayout:
        """Returns the layout of one float column alone."""
        return BlockLayout(
            features={},
            floats=(name,),
            out_of_range=self.out_of_range,
            bounds=self.bounds,
        )

    def checked(
        self, group: RowGroup, chunk: Chunk
    ) -> tuple[dict[str, Column], dict[str, Array]]:
        """Checks the rows of a group or of a part of one; returns ids (int64) by name and floats (float32) by name."""
        ids: dict[str, Column] = {}
        floats: dict[str, Array] = {}
        columns = ((name, chunk[name]) for name in self.names)
        for name, is_ids, column in self.each(group, columns):
            if is_ids:
                ids[name] = column
            else:
                floats[name] = column.values
        return ids, floats

    def each(
        self, group: RowGroup, columns: Iterable[tuple[str, Column]]
    ) -> Iterator[tuple[str, bool, Column]]:
        """Yields each column as ids (int64), if it is one, and as numbers (float32), checked; ``True`` tells ids."""
        for name, column in columns:
            if name in self.features:
                self._check_kind(group, name, column, "iu", "int64")
                yield name, True, self._ids(group, name, column, self.features[name])
            if name in self.floats:
                kinds = "" if column.ragged else "iufb"
                rule = "one number in each row"
                self._check_kind(group, name, column, kinds, rule)
                yield name, False, Column(self._numbers(group, name, column))

    def _check_kind(
        self, group: RowGroup, name: str, column: Column, kinds: str, rule: str
    ) -> None:
        """Refuses a column in memory of another kind, which files are asked for before they are read."""
        dtype = column.pool.dtype
        # Half of the values of uint64 do not fit int64.
        if dtype.kind not in kinds or (kinds == "iu" and dtype == np.uint64):
            kind = dtype if kinds else "lists"
            raise DataError(
                f"{group.name}, column '{name}': is {kind}, must be {rule}; convert it where it is written"
            )

    def _numbers(self, group: RowGroup, name: str, column: Column) -> Float32:
        floats = _finite(group, name, column)
        if name not in self.bounds or not len(floats):
            return floats
        low, high = self.bounds[name]
        if not low <= float(floats.min()) <= float(floats.max()) <= high:
            row = int(((floats < low) | (floats > high)).argmax())
            raise DataError(
                f"{group.name}, column '{name}', row {group.first + row}: value {floats[row]:g} must be from {low:g} "
                f"to {high:g}; for other labels make the schema with label_range=None"
            )
        return floats

    def _ids(
        self, group: RowGroup, name: str, column: Column, feature: SparseFeature | None
    ) -> Column:
        values = column.values.astype(np.int64, copy=False)
        # As unsigned numbers negative ids are the largest: one pass over the column
        # finds both kinds.
        if (
            feature is not None
            and not feature.dynamic
            and len(values)
            and int(values.view(np.uint64).max()) >= feature.num_embeddings
        ):
            is_outside = (values < 0) | (values >= feature.num_embeddings)
            if self.out_of_range != "oov":
                raise _out_of_range(group, feature, column, values, is_outside)
            values = np.where(is_outside, feature.oov_id, values)
        # Almost always: the values stay a view of Arrow's memory until a shuffle or a
        # batch copies them.
        if values is column.values:
            return column
        return Column(values, column.offsets)


def _out_of_range(
    group: RowGroup, feature: SparseFeature, column: Column, values: Int64, bad: Array
) -> DataError:
    first = int(bad.argmax())
    row = column.row_of(first)
    where = f"{group.name}, row {group.first + row}"
    return DataError(feature.outside(where, torch.from_numpy(values[bad])))


def _finite(group: RowGroup, name: str, column: Column) -> Float32:
    floats: Float32 = column.values.astype(np.float32, copy=False)
    finite = np.isfinite(floats)
    if not finite.all():
        index = int((~finite).argmax())
        row = group.first + column.row_of(index)
        raise DataError(
            f"{group.name}, column '{name}', row {row}: value {column.values[index]} is not finite in 32 bits; fill or "
            "drop it where it is written"
        )
    return floats


class Memory:
    """Reuses the memory of blocks' matrices.

    Fresh pages cost as much as the shuffle; and in malloc's heap, between many short-lived arrays, blocks leave holes,
    by which a process grew by some 400 MB.
    """

    def __init__(self) -> None:
        self._free: list[Array] = []
        # The reading thread takes, and the one that builds batches gives.
        self._lock = threading.Lock()

    def take(
        self, columns: int, rows: int, dtype: np.dtype[np.generic]
    ) -> tuple[Array, Array]:
        """Returns an uninitialised (columns, rows) matrix, and the buffer to :meth:`give` back for it."""
        size = columns * rows * dtype.itemsize
        buffer = None
        with self._lock:
            for index, spare in enumerate(self._free):
                # At most twice the size, so that a small block does not hold the memory
                # of a large one.
                if size <= spare.size <= 2 * size:
                    buffer = self._free.pop(index)
                    break
        if buffer is None:
            # Not np.empty, whose memory is malloc's; a map of no bytes is refused.
            buffer = np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)
        return buffer[:size].view(dtype).reshape(columns, rows), buffer

    def give(self, rows: BlockRows) -> None:
        """Takes back the memory of a block; nobody may read the block any more."""
        with self._lock:
            self._free = [*self._free, *rows.buffers][-_SPARE_BUFFERS:]


@dataclass(eq=False)
class BlockRows:
    """The rows of a block, in the order of the batches.

    Args:
        scalars: (F1, n) ids of the columns with one id per row; without a shuffle F1 views of Arrow's memory.
        ragged: the columns with several ids per row, by name.
        floats: (Ff, n) float32; without a shuffle Ff views.
        float_names: names of the columns in ``floats``.
        numbers: (n,) the index of each row in the whole source.
        buffers: memory of ``scalars`` and ``floats``, to be given back.
    """

    scalars: Vectors
    ragged: Mapping[str, Column]
    floats: Vectors
    float_names: Sequence[str]
    numbers: Int64
    buffers: Sequence[Array]

    @cached_property
    def offsets(self) -> dict[str, Int64]:
        """Offsets of the ragged columns, once a block: a column sums them up anew each time they are read."""
        return {name: offsets_of(each.lengths) for name, each in self.ragged.items()}


class Slice(NamedTuple):
    """Rows ``start`` to ``stop`` of a block."""

    rows: BlockRows
    start: int
    stop: int

    def bags(self, name: str) -> tuple[Array, Int64]:
        """Returns the ids of a ragged column and its rows' offsets among those of the block."""
        offsets = self.rows.offsets[name][self.start : self.stop + 1]
        return self.rows.ragged[name].values[offsets[0] : offsets[-1]], offsets


def gathered(slices: Sequence[Slice], layout: BlockLayout) -> RowColumns:
    """Returns the columns of the rows of ``slices``, in the order of the batch."""
    count = sum(piece.stop - piece.start for piece in slices)
    ragged = slices[0].rows.ragged if slices else {}
    scalars = [name for name in layout.ids if name not in ragged]
    of_lists = {name: [piece.bags(name) for piece in slices] for name in ragged}
    matrix = np.empty((len(scalars), count), np.int64)
    _copy([piece.rows.scalars for piece in slices], slices, matrix)
    bags = dict(zip(scalars, map(Jagged, torch.from_numpy(matrix)), strict=True))
    for name, parts in of_lists.items():
        ids = _joined([ids for ids, _ in parts], np.int64)
        lengths = np.concatenate([np.diff(offsets) for _, offsets in parts])
        bags[name] = Jagged(
            torch.from_numpy(ids), torch.from_numpy(lengths.astype(np.int32))
        )
    floats = np.empty((len(layout.floats), count), np.float32)
    _copy([piece.rows.floats for piece in slices], slices, floats)
    numbers = dict(zip(layout.floats, torch.from_numpy(floats).unbind(), strict=True))
    return RowColumns(bags, numbers)


def _copy(vectors: Sequence[Vectors], slices: Sequence[Slice], out: Array) -> None:
    """Copies the rows of ``slices``, whose blocks have these ``vectors``, to ``out`` (vectors, rows)."""
    if not slices:
        return
    pairs = list(zip(vectors, slices, strict=True))
    parts = [
        each[:, piece.start : piece.stop]
        for each, piece in pairs
        if isinstance(each, np.ndarray)
    ]
    # Shuffled blocks are matrices.
    if parts:
        np.concatenate(parts, axis=1, out=out)
        return
    start = 0
    for each, piece in pairs:
        stop = start + piece.stop - piece.start
        for row, vector in zip(out, each, strict=False):
            row[start:stop] = vector[piece.start : piece.stop]
        start = stop


def places_in_source(slices: Sequence[Slice]) -> Tensor:
    """Returns (n,) the number of each row of ``slices`` in the whole source."""
    parts = [piece.rows.numbers[piece.start : piece.stop] for piece in slices]
    return torch.from_numpy(_joined(parts, np.int64))


def summed_weights(slices: Sequence[Slice], name: str) -> float:
    """Returns the sum of the weights in column ``name`` of the rows of ``slices``."""
    total = 0.0
    for piece in slices:
        # Not at the column's usual place: of other ranks' rows a block may hold the
        # weights alone.
        column = piece.rows.float_names.index(name)
        # In float64, as for rows in memory and on a device: all three divide the loss
        # by one number.
        total += float(
            piece.rows.floats[column][piece.start : piece.stop].sum(dtype=np.float64)
        )
    return total


def _joined(arrays: Sequence[Array], dtype: type[np.generic]) -> Array:
    """Concatenates arrays; a rank without rows in a step gets an empty one of type ``dtype``."""
    return np.concatenate(arrays or [np.zeros(0, dtype)])
