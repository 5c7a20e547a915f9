"""Blocks of rows in memory: their columns, the checks of their values, and their memory.

Ids and numbers are checked here, a column of a row group at a time, which costs a tenth of checking them in each batch
and knows file and row group.

Assembler: slices of blocks -> one TowerBatch. Every value is copied once, into the KeyedJaggedTensor.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrec_ext.batch import (
    Jagged,
    KeyedIds,
    Keys,
    TowerBatch,
    concatenated,
    pack,
)
from torchrec_ext.data.columns import Array, Chunk, Column, Float32, Int64
from torchrec_ext.data.files.arrow import Kind, RowGroup, Source, as_int64
from torchrec_ext.data.loader.batch_builder import padded
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.schema import BatchSchema, DataError, RowNumbers, SparseFeature

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
        features: dict[str, SparseFeature | None] = dict.fromkeys(
            [*ids, *schema.identities]
        )
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
        kinds = source.require(
            {
                name: ID_KINDS if feature else SCALAR
                for name, feature in self.features.items()
            }
        )
        return frozenset(name for name, kind in kinds.items() if kind == "ints")

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
        ids = {
            name: self._ids(group, name, chunk[name], feature)
            for name, feature in self.features.items()
        }
        return ids, {
            name: self._numbers(group, name, chunk[name]) for name in self.floats
        }

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

    def _ids(
        self, group: RowGroup, name: str, column: Column, feature: SparseFeature | None
    ) -> Column:
        if feature and self.out_of_range == "oov":
            # A value beyond int64 becomes negative, and so out of vocabulary as well.
            values = column.values.astype(np.int64, copy=False)
        else:
            values = as_int64(group.name, name, column, group.first)
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
        raise DataError(
            f"{group.name}, column '{name}', row {group.first + column.row_of(index)}: value {floats[index]} is not "
            "finite; fill or drop it where it is written"
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
        self.offsets: dict[str, Int64] = {}
        # Once a block: a column sums up its offsets anew each time they are read.
        for name, column in ragged.items():
            offsets = column.offsets
            assert offsets is not None
            self.offsets[name] = offsets


class Slice(NamedTuple):
    """Rows ``start`` to ``stop`` of a block."""

    rows: BlockRows
    start: int
    stop: int

    def bags(self, name: str) -> tuple[Array, Int64]:
        """Returns the ids of a ragged column and its rows' offsets among those of the block."""
        offsets = self.rows.offsets[name][self.start : self.stop + 1]
        return self.rows.ragged[name].values[offsets[0] : offsets[-1]], offsets


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
        self,
        schema: BatchSchema,
        layout: BlockLayout,
        ragged: frozenset[str],
        label: str | None,
        weight: str | None,
    ) -> None:
        self.schema = schema
        self._layout = layout
        scalar = [name for name in layout.features if name not in ragged]
        self._scalar = {name: index for index, name in enumerate(scalar)}
        self._float = {name: index for index, name in enumerate(layout.floats)}
        self._label = label
        self._weight = weight

    def batch(
        self, slices: Sequence[Slice], size: int, total_weight: float
    ) -> TowerBatch:
        """Builds a batch of the rows of ``slices``, padded to ``size`` rows with rows of weight 0 and empty bags.

        Args:
            slices: rows, in the order of the batch.
            size: B.
            total_weight: see :class:`TowerBatch`.
        """
        targets = shared_dense = index = None
        if self.schema.tasks:
            targets = self._matrix(slices, size, self.schema.tasks)
        if self.schema.shared:
            shared_dense = self._matrix(slices, size, self.schema.shared_dense)
            # Rows from files come as they are, so that each has a shared row of its
            # own.
            index = torch.arange(size)
        return pack(
            self.schema.layout,
            self._fill_of(slices, size),
            dense=self._matrix(slices, size, self.schema.row_dense),
            labels=self._vector(slices, size, self._label),
            weights=self._vector(slices, size, self._weight),
            total_weight=torch.tensor(total_weight),
            targets=targets,
            users=self._identities(slices, size, self.schema.query),
            items=self._identities(slices, size, self.schema.candidate),
            queries=size if self.schema.candidate else None,
            shared_dense=shared_dense,
            index=index,
        )

    def _fill_of(
        self, slices: Sequence[Slice], size: int
    ) -> Callable[[Keys, Sequence[int]], KeyedIds]:
        """Returns the function that lays out the ids; replaced ones come column by column."""
        if self.schema.replaces is None:
            return lambda keys, sizes: self._keyed(slices, size, keys)
        bags = {name: self._bags(slices, name) for name in self.schema.keys}
        numbers = torch.from_numpy(
            joined(
                [piece.rows.numbers[piece.start : piece.stop] for piece in slices],
                np.int64,
            )
        )
        bags.update(self.schema.replaces(bags, RowNumbers(numbers, numbers)))
        return lambda keys, sizes: concatenated(keys, sizes, bags)

    def _bags(self, slices: Sequence[Slice], name: str) -> Jagged:
        if name in self._scalar:
            return Jagged(torch.from_numpy(_joined_ids(slices, self._scalar[name])))
        bags = [piece.bags(name) for piece in slices]
        lengths = joined([np.diff(offsets) for _, offsets in bags], np.int64)
        return Jagged(
            torch.from_numpy(joined([ids for ids, _ in bags], np.int64)),
            torch.from_numpy(lengths.astype(np.int32)),
        )

    def _identities(
        self, slices: Sequence[Slice], size: int, name: str | None
    ) -> Tensor | None:
        """Returns (size,) the ids of a column with one for each row, and zeros after them."""
        if name not in self._scalar:
            return None
        return padded(torch.from_numpy(_joined_ids(slices, self._scalar[name])), size)

    def chunk(self, slices: Sequence[Slice]) -> Chunk:
        """Returns all columns of the rows of ``slices``, for batches with items from elsewhere."""
        columns = {}
        for name, index in self._float.items():
            vectors = [
                piece.rows.floats[index][piece.start : piece.stop] for piece in slices
            ]
            columns[name] = Column(joined(vectors, np.float32))
        # After the floats: a column that is both an id and a label is read as an id,
        # exactly.
        for name, index in self._scalar.items():
            columns[name] = Column(_joined_ids(slices, index))
        for name in self._layout.ids:
            if name not in self._scalar:
                bags = [piece.bags(name) for piece in slices]
                values = joined([ids for ids, _ in bags], np.int64)
                lengths = joined([np.diff(offsets) for _, offsets in bags], np.int64)
                columns[name] = Column.from_lengths(values, lengths)
        return Chunk(columns)

    def _keyed(self, slices: Sequence[Slice], size: int, keys: Keys) -> KeyedIds:
        count = _count(slices)
        totals = []
        for name in keys.features:
            if name is None:
                totals.append(0)
            elif name in self._scalar:
                totals.append(count)
            else:
                totals.append(sum(piece.bags(name)[0].size for piece in slices))
        values = torch.empty(sum(totals), dtype=torch.int64)
        lengths = torch.ones(len(keys.features), size, dtype=torch.int32)
        lengths[:, count:] = 0
        self._fill(slices, keys.features, values.numpy(), lengths.numpy(), count)
        return KeyedIds(values, lengths.view(-1))

    def _fill(
        self,
        slices: Sequence[Slice],
        names: Sequence[str | None],
        values: Int64,
        lengths: Array,
        count: int,
    ) -> None:
        """Writes the ids of ``names`` into ``values``, and the lengths of ragged columns into ``lengths``."""
        start = 0
        for run in _runs(names, self._scalar):
            name = run.names[0]
            # Columns that follow one another in the blocks' matrix take one copy
            # together.
            if run.first is not None:
                width = len(run.names)
                out = values[start : start + width * count].reshape(width, count)
                for place, piece in _places(slices):
                    _copy(piece.rows.scalars, run.first, piece, out[:, place])
                start += width * count
            elif name is None:
                lengths[run.start] = 0
            else:
                for place, piece in _places(slices):
                    ids, offsets = piece.bags(name)
                    values[start : start + ids.size] = ids
                    start += ids.size
                    lengths[run.start, place] = np.diff(offsets)

    def _matrix(
        self, slices: Sequence[Slice], size: int, names: Sequence[str]
    ) -> Tensor:
        dense = torch.zeros(size, len(names))
        count = _count(slices)
        for run in _runs(names, self._float):
            vectors = np.empty((len(run.names), count), np.float32)
            for place, piece in _places(slices):
                _copy(piece.rows.floats, run.first or 0, piece, vectors[:, place])
            # Column by column is twice as fast as numpy's copy of a transposed matrix.
            for index, vector in enumerate(vectors, start=run.start):
                dense.numpy()[:count, index] = vector
        return dense

    def _vector(self, slices: Sequence[Slice], size: int, name: str | None) -> Tensor:
        vector = torch.zeros(size)
        if name is None:
            vector[: _count(slices)] = 1
        else:
            for place, piece in _places(slices):
                vector.numpy()[place] = piece.rows.floats[self._float[name]][
                    piece.start : piece.stop
                ]
        return vector


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


class _Run(NamedTuple):
    """Names from index ``start`` on, in the order of a block's matrix from row ``first`` on; or one other name."""

    start: int
    first: int | None
    names: list[str | None]


def _runs(names: Sequence[str | None], positions: Mapping[str, int]) -> Iterator[_Run]:
    """Splits ``names`` into the longest runs with consecutive ``positions``."""
    run: _Run | None = None
    for index, name in enumerate(names):
        first = positions.get(name or "")
        if (
            run is not None
            and run.first is not None
            and first == run.first + len(run.names)
        ):
            run.names.append(name)
            continue
        if run is not None:
            yield run
        run = _Run(index, first, [name])
    if run is not None:
        yield run


def _places(slices: Sequence[Slice]) -> Iterator[tuple[slice, Slice]]:
    """Yields each of ``slices`` with the place of its rows in the batch."""
    row = 0
    for piece in slices:
        stop = row + piece.stop - piece.start
        yield slice(row, stop), piece
        row = stop


def _count(slices: Sequence[Slice]) -> int:
    return sum(piece.stop - piece.start for piece in slices)


def _copy(vectors: Vectors, first: int, piece: Slice, out: Array) -> None:
    """Copies the rows of ``piece`` in the vectors from ``first`` on to ``out`` (vectors, rows)."""
    if isinstance(vectors, np.ndarray):
        out[:] = vectors[first : first + len(out), piece.start : piece.stop]
    else:
        for row, vector in zip(out, vectors[first : first + len(out)], strict=True):
            row[:] = vector[piece.start : piece.stop]


def joined(arrays: Sequence[Array], dtype: type[np.generic]) -> Array:
    """Concatenates arrays; a rank without rows in a step gets an empty one of type ``dtype``."""
    return np.concatenate(arrays or [np.zeros(0, dtype)])


def _joined_ids(slices: Sequence[Slice], index: int) -> Array:
    return joined(
        [piece.rows.scalars[index][piece.start : piece.stop] for piece in slices],
        np.int64,
    )
