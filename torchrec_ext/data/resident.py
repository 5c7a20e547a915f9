"""ResidentRows: a set that fits in memory as tensors on one device, from which a batch is gathered there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.batch import SharedRows, TowerBatch
from torchrec_ext.data.blocks import Layout
from torchrec_ext.data.columns import Array, Chunk, Column, concatenate
from torchrec_ext.data.row_groups import RowGroup, Source
from torchrec_ext.schema import BatchSchema, DataError


class _Bags(NamedTuple):
    """(V,) ids of a ragged column, (N,) first place of each row, and (N,) lengths."""

    values: Tensor
    starts: Tensor
    lengths: Tensor


class ResidentRows:
    """N rows as tensors; nothing crosses from the host for a batch but the numbers of its rows.

    Ids with one value per row are one (N, F1) matrix and numbers one (N, Ff) matrix, so that a row is gathered as one piece.

    Args:
        rows: all rows; checked here, once.
        schema: the columns of a batch.
        label: a column; all labels are 1 where not given.
        weight: a column; all weights are 1 where not given.
        device: where the tensors are.
    """

    def __init__(self, rows: Chunk, schema: BatchSchema, label: str | None, weight: str | None, device: torch.device) -> None:
        layout = Layout.of(schema, (), (label, weight), ())
        missing = [name for name in layout.names if name not in rows]
        if missing:
            raise DataError(f"column '{missing[0]}' is missing; the rows have {sorted(rows)}")
        ids, floats = layout.checked(RowGroup(name="the rows in memory", file=0, number=0, rows=rows.num_rows), rows)
        self.schema, self.num_rows, self._device = schema, rows.num_rows, device
        self._scalar = {name: at for at, name in enumerate(name for name in ids if not ids[name].ragged)}
        self._float = {name: at for at, name in enumerate(layout.floats)}
        self._ids = self._matrix([ids[name].values for name in self._scalar], torch.int64)
        self._numbers = self._matrix(list(floats.values()), torch.float32)
        self._bags = {name: self._bag(column) for name, column in ids.items() if column.ragged}
        self._label, self._weight = label, weight

    def _matrix(self, columns: list[Array], dtype: torch.dtype) -> Tensor:
        stacked = torch.from_numpy(np.stack(columns, axis=1)) if columns else torch.empty(self.num_rows, 0)
        return stacked.to(self._device, dtype)

    def _bag(self, column: Column) -> _Bags:
        values, offsets = column.values, column.offsets
        assert offsets is not None
        own = values if values.flags.writeable else values.copy()
        places = torch.from_numpy(offsets).to(self._device)
        return _Bags(torch.from_numpy(own).to(self._device), places[:-1], places.diff().int())

    def batch(self, rows: Tensor, size: int, total_weight: Tensor) -> TowerBatch:
        """The rows with the numbers ``rows`` (on the device), then rows of weight 0 with empty bags up to ``size`` = B."""
        ids, numbers = self._ids.index_select(0, rows), self._numbers.index_select(0, rows)
        if size > len(rows):
            numbers = torch.cat([numbers, numbers.new_zeros(size - len(rows), numbers.shape[1])])
        ones = numbers.new_zeros(size)
        ones[: len(rows)] = 1
        shared = None
        if self.schema.shared:
            shared = SharedRows(
                sparse=self._keyed(ids, rows, size, shared=True),
                dense=self._dense(numbers, shared=True),
                index=torch.arange(size, device=self._device),
            )
        return TowerBatch(
            sparse=self._keyed(ids, rows, size, shared=False),
            dense=self._dense(numbers, shared=False),
            labels=numbers[:, self._float[self._label]].clone() if self._label else ones,
            weights=numbers[:, self._float[self._weight]].clone() if self._weight else ones.clone(),
            total_weight=total_weight,
            shared=shared,
        )

    def total_weight(self, rows: Tensor) -> Tensor:
        """() the sum of their weights, on the device."""
        if self._weight is None:
            return torch.tensor(float(len(rows)), device=self._device)
        return self._numbers[:, self._float[self._weight]].index_select(0, rows).double().sum().float()

    def _keyed(self, ids: Tensor, rows: Tensor, size: int, *, shared: bool) -> KeyedJaggedTensor:
        keys = [name for name in self.schema.keys if (name in self.schema.shared) == shared]
        lengths = torch.zeros(len(keys), size, dtype=torch.int32, device=self._device)
        columns, values = ids.t().contiguous(), []
        for at, name in enumerate(keys):
            if name in self._scalar:
                values.append(columns[self._scalar[name]])
                lengths[at, : len(rows)] = 1
            else:
                bag = self._bags[name]
                lengths[at, : len(rows)] = bag.lengths.index_select(0, rows)
                values.append(_gathered(bag, rows))
        joined = torch.cat(values) if values else torch.empty(0, dtype=torch.int64, device=self._device)
        return KeyedJaggedTensor(keys=keys, values=joined, lengths=lengths.view(-1), stride=size)

    def _dense(self, numbers: Tensor, *, shared: bool) -> Tensor:
        places = [self._float[name] for name in self.schema.dense if (name in self.schema.shared) == shared]
        if places == list(range(len(places))):
            return numbers[:, : len(places)].contiguous()
        return numbers[:, places]


def _gathered(bag: _Bags, rows: Tensor) -> Tensor:
    lengths = bag.lengths.index_select(0, rows).long()
    ends = lengths.cumsum(0)
    shift = (bag.starts.index_select(0, rows) - ends + lengths).repeat_interleave(lengths)
    return bag.values.index_select(0, shift + torch.arange(len(shift), device=shift.device))


def read_all(source: Source, schema: BatchSchema, label: str | None, weight: str | None) -> Chunk:
    """All rows of a source that fits in memory."""
    layout = Layout.of(schema, (), (label, weight), ())
    layout.require(source)
    chunks = []
    for group in source.groups:
        ids, floats = layout.checked(group, source.read(group, layout.names))
        chunks.append(ids | {name: Column(values) for name, values in floats.items() if name not in ids})
    return Chunk({name: concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]})
