"""Slices of blocks -> one TowerBatch: every value is copied once, into its place in the KeyedJaggedTensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.batch import SharedRows, TowerBatch
from torchrec_ext.data.blocks import Layout, Rows, Vectors
from torchrec_ext.data.columns import Array, Chunk, Column, Int64
from torchrec_ext.schema import BatchSchema
from torchrec_ext.schema.features import Keys


class Slice(NamedTuple):
    """Rows ``start`` to ``stop`` of a block."""

    rows: Rows
    start: int
    stop: int


class Assembler:
    """Builds batches of the schema from rows that were checked when they were read.

    Args:
        schema: the columns of the batch.
        layout: what the blocks hold.
        ragged: the sparse columns with several ids per row.
        label: a float column; all labels are 1 where not given.
        weight: a float column; all weights are 1 where not given.
    """

    def __init__(self, schema: BatchSchema, layout: Layout, ragged: frozenset[str], label: str | None, weight: str | None) -> None:
        self.schema = schema
        self._layout = layout
        self._scalar = {name: at for at, name in enumerate(name for name in layout.features if name not in ragged)}
        self._float = {name: at for at, name in enumerate(layout.floats)}
        self._label, self._weight = label, weight

    def batch(self, slices: Sequence[Slice], size: int, total_weight: float) -> TowerBatch:
        """The rows of ``slices``, then rows of weight 0 with empty bags up to ``size`` = B.

        Args:
            slices: in this order.
            size: B.
            total_weight: see :class:`TowerBatch`.
        """
        shared = None
        if self.schema.shared:
            shared = SharedRows(
                sparse=self._keyed(slices, size, self.schema.shared_keys),
                dense=self._matrix(slices, size, self.schema.shared_dense),
                index=torch.arange(size),
            )
        users, items = (self._identities(slices, size, name) for name in (self.schema.query, self.schema.candidate))
        return TowerBatch(
            sparse=self._keyed(slices, size, self.schema.row_keys),
            dense=self._matrix(slices, size, self.schema.row_dense),
            labels=self._vector(slices, size, self._label),
            weights=self._vector(slices, size, self._weight),
            total_weight=torch.tensor(total_weight),
            targets=self._matrix(slices, size, self.schema.tasks) if self.schema.tasks else None,
            shared=shared,
            joint=self._keyed(slices, size, self.schema.joint_keys) if self.schema.joint else None,
            weighted=self._keyed(slices, size, self.schema.weighted_keys, weighted=True) if self.schema.weighted else None,
            users=users,
            items=items,
            queries=size if self.schema.candidate else None,
        )

    def _identities(self, slices: Sequence[Slice], size: int, name: str | None) -> Tensor | None:
        """(size,) the ids of a column with one for each row, and zeros."""
        if name not in self._scalar:
            return None
        ids = torch.zeros(size, dtype=torch.int64)
        found = _joined_ids(slices, self._scalar[name])
        ids.numpy()[: len(found)] = found
        return ids

    def chunk(self, slices: Sequence[Slice]) -> Chunk:
        """All columns of the rows of ``slices``, for batches that add items to them."""
        columns = {name: Column(_joined(slices, at)) for name, at in self._float.items()}
        columns |= {name: Column(_joined_ids(slices, at)) for name, at in self._scalar.items()}
        ragged = [name for name in self._layout.ids if name not in self._scalar]
        return Chunk(columns | {name: _joined_ragged(slices, name) for name in ragged})

    def weights(self, slices: Sequence[Slice]) -> float:
        """Their sum."""
        if self._weight is None:
            return float(_count(slices))
        name = self._weight
        vectors = [(piece.rows.floats[piece.rows.float_names.index(name)], piece) for piece in slices]
        return float(sum(vector[piece.start : piece.stop].sum(dtype=np.float64) for vector, piece in vectors))

    def _keyed(self, slices: Sequence[Slice], size: int, keys: Keys, *, weighted: bool = False) -> KeyedJaggedTensor:
        names = [feature.name if feature else None for feature in keys.features]
        count = _count(slices)
        totals = [self._total(slices, name, count) for name in names]
        values = torch.empty(sum(totals), dtype=torch.int64)
        lengths = torch.ones(len(names), size, dtype=torch.int32)
        lengths[:, count:] = 0
        self._fill(slices, names, values.numpy(), lengths.numpy(), count)
        stride = size * len(names) // len(keys.keys) if names else size
        weights = torch.from_numpy(self._weights(slices, keys, totals)) if weighted else None
        return KeyedJaggedTensor(keys=list(keys.keys), values=values, weights=weights, lengths=lengths.view(-1), stride=stride)

    def _weights(self, slices: Sequence[Slice], keys: Keys, totals: Sequence[int]) -> Array:
        """(sum of lengths,) those of the ids of each bag; 1 where a feature has none."""
        parts = [np.zeros(0, np.float32)]
        for feature, total in zip(keys.features, totals, strict=True):
            column = feature.weights if feature else None
            parts += [_values(piece, column) for piece in slices] if column else [np.ones(total, np.float32)]
        return np.concatenate(parts)

    def _total(self, slices: Sequence[Slice], name: str | None, count: int) -> int:
        """Ids of a feature with ``count`` rows; None has none."""
        if name is None or name in self._scalar:
            return count if name else 0
        return sum(_values(piece, name).size for piece in slices)

    def _fill(self, slices: Sequence[Slice], names: Sequence[str | None], values: Int64, lengths: Array, count: int) -> None:
        place = 0
        for run in _runs(names, self._scalar):
            if run.first is not None:
                width = len(run.names)
                out = values[place : place + width * count].reshape(width, count)
                for at, piece in _places(slices):
                    _copy(piece.rows.scalars, run.first, piece, out[:, at : at + piece.stop - piece.start])
                place += width * count
            elif run.names[0] is None:
                lengths[run.at] = 0
            else:
                place = _fill_ragged(slices, run.names[0], values, place, lengths[run.at])

    def _matrix(self, slices: Sequence[Slice], size: int, names: Sequence[str]) -> Tensor:
        dense = torch.zeros(size, len(names))
        count = _count(slices)
        for run in _runs(names, self._float):
            vectors = np.empty((len(run.names), count), np.float32)
            for at, piece in _places(slices):
                _copy(piece.rows.floats, run.first or 0, piece, vectors[:, at : at + piece.stop - piece.start])
            # Column by column is twice as fast as numpy's copy of a transposed matrix.
            for at, vector in enumerate(vectors, start=run.at):
                dense.numpy()[:count, at] = vector
        return dense

    def _vector(self, slices: Sequence[Slice], size: int, name: str | None) -> Tensor:
        vector = torch.zeros(size)
        if name is None:
            vector[: _count(slices)] = 1
        else:
            for at, piece in _places(slices):
                vector.numpy()[at : at + piece.stop - piece.start] = piece.rows.floats[self._float[name]][piece.start : piece.stop]
        return vector


class _Run(NamedTuple):
    """``names`` from place ``at`` on, which lie one after the other in a block's matrix too, from ``first`` on; else one name."""

    at: int
    first: int | None
    names: list[str | None]


def _runs(names: Sequence[str | None], places: Mapping[str, int]) -> Iterator[_Run]:
    """The longest runs."""
    numbered = [(places[name] - at if name and name in places else -1 - at - len(places), at) for at, name in enumerate(names)]
    for _, run in groupby(numbered, key=lambda pair: pair[0]):
        found = [at for _, at in run]
        yield _Run(found[0], places.get(names[found[0]] or ""), [names[at] for at in found])


def _places(slices: Sequence[Slice]) -> Iterator[tuple[int, Slice]]:
    at = 0
    for piece in slices:
        yield at, piece
        at += piece.stop - piece.start


def _count(slices: Sequence[Slice]) -> int:
    return sum(piece.stop - piece.start for piece in slices)


def _copy(vectors: Vectors, first: int, piece: Slice, out: Array) -> None:
    """Rows of the vectors from ``first`` on to ``out`` (vectors, rows)."""
    if isinstance(vectors, np.ndarray):
        out[:] = vectors[first : first + len(out), piece.start : piece.stop]
    else:
        for row, vector in zip(out, vectors[first : first + len(out)], strict=True):
            row[:] = vector[piece.start : piece.stop]


def _values(piece: Slice, name: str) -> Array:
    offsets = piece.rows.offsets[name]
    return piece.rows.ragged[name].values[offsets[piece.start] : offsets[piece.stop]]


def _fill_ragged(slices: Sequence[Slice], name: str, values: Int64, place: int, lengths: Array) -> int:
    for at, piece in _places(slices):
        mine = _values(piece, name)
        values[place : place + mine.size] = mine
        place += mine.size
        lengths[at : at + piece.stop - piece.start] = np.diff(piece.rows.offsets[name][piece.start : piece.stop + 1])
    return place


def _joined(slices: Sequence[Slice], at: int) -> Array:
    return np.concatenate([piece.rows.floats[at][piece.start : piece.stop] for piece in slices] or [np.zeros(0, np.float32)])


def _joined_ids(slices: Sequence[Slice], at: int) -> Array:
    return np.concatenate([piece.rows.scalars[at][piece.start : piece.stop] for piece in slices] or [np.zeros(0, np.int64)])


def _joined_ragged(slices: Sequence[Slice], name: str) -> Column:
    values = np.concatenate([_values(piece, name) for piece in slices] or [np.zeros(0, np.int64)])
    lengths = [np.diff(piece.rows.offsets[name][piece.start : piece.stop + 1]) for piece in slices]
    return Column.from_lengths(values, np.concatenate(lengths or [np.zeros(0, np.int64)]))
