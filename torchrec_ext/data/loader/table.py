"""DeviceTable: rows as tensors on a device, gathered there.

item_table(): the features of the items.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrec_ext.batch import Jagged
from torchrec_ext.data.columns import Array, Chunk, Column, Int64
from torchrec_ext.data.files.arrow import RowGroup
from torchrec_ext.data.loader.batch import RowColumns, as_tensor
from torchrec_ext.data.loader.blocks import BlockLayout
from torchrec_ext.schema import BatchSchema, DataError
from torchrec_ext.schema.validation import listed


class _Ragged(NamedTuple):
    """A ragged column: (V,) ids, (N,) the index of each row's first id, and (N,) lengths."""

    values: Tensor
    starts: Tensor
    lengths: Tensor


class DeviceTable:
    """N rows on a device: ids with one value per row as one (N, F1) matrix, numbers as one (N, Ff) matrix.

    Args:
        ids: int64 columns by name.
        floats: (N,) float32 columns by name.
        num_rows: N.
        device: device of the tensors.
    """

    def __init__(
        self,
        ids: Mapping[str, Column],
        floats: Mapping[str, Array],
        num_rows: int,
        device: torch.device,
    ) -> None:
        self.num_rows = num_rows
        self._device = device
        self._scalar: dict[str, int] = {}
        self._float = {name: index for index, name in enumerate(floats)}
        self._ragged: dict[str, _Ragged] = {}
        # By ragged column, the number of ids that are gathered whatever the rows have.
        self._room: Mapping[str, int] = {}
        # (N,) lengths of each ragged column.
        self.host_lengths: dict[str, Int64] = {}
        vectors: list[Array] = []
        for name, column in ids.items():
            offsets = column.offsets
            if offsets is None:
                self._scalar[name] = len(vectors)
                vectors.append(column.values)
            else:
                self.host_lengths[name] = np.diff(offsets)
                bounds = torch.from_numpy(offsets).to(device)
                values = as_tensor(column.values).to(device)
                # A gather in a room reads an id even if there is none.
                values = values if len(values) else values.new_zeros(1)
                self._ragged[name] = _Ragged(values, bounds[:-1], bounds.diff().int())
        self._ids = self._matrix(vectors, torch.int64)
        self._numbers = self._matrix(list(floats.values()), torch.float32)
        self.ragged = tuple(self._ragged)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """(N, F1) int64 ids, (N, Ff) float32 numbers, and three for each ragged column."""
        return self._ids, self._numbers, *chain.from_iterable(self._ragged.values())

    def over(
        self, tensors: Sequence[Tensor], room: Mapping[str, int] | None = None
    ) -> DeviceTable:
        """Returns this table with other :attr:`tensors`, such as their stand-ins while a step is captured.

        Args:
            tensors: in their order.
            room: by ragged column, a number of ids that no step's bags exceed: so many are gathered, zeros after the
                bags' own, and shapes do not depend on the rows.
        """
        table = copy.copy(self)
        table._ids, table._numbers, *ragged = tensors
        table._ragged = {
            name: _Ragged(*ragged[3 * place : 3 * place + 3])
            for place, name in enumerate(self._ragged)
        }
        table._room = room or {}
        return table

    def most(self, name: str, rows: int, *, distinct: bool) -> int:
        """Returns the greatest number of ids in the bags of a ragged column in ``rows`` rows."""
        lengths = self.host_lengths[name]
        if not distinct:
            return rows * int(lengths.max(initial=0))
        return int(np.sort(lengths)[::-1][:rows].sum())

    def columns(
        self,
        rows: Tensor,
        totals: Mapping[str, int] | None = None,
        names: Iterable[str] | None = None,
    ) -> RowColumns:
        """Gathers ``rows`` (B,): the bags of the columns ``names``, without columns of other tables, and all numbers.

        Args:
            rows: (B,) rows to gather.
            totals: number of ids that the bags of each ragged column hold together; without it they are counted, for
                which a GPU is waited for.
            names: names of columns; all by default.
        """
        totals = totals or {}
        bags = {}
        wanted = list(names if names is not None else (*self._scalar, *self._ragged))
        if not self._scalar.keys().isdisjoint(wanted):
            # A row's ids lie side by side, so that it is one read; a feature's ids have
            # to follow one another.
            matrix = self._ids.index_select(0, rows).t().contiguous()
        for name in wanted:
            if name in self._scalar:
                bags[name] = Jagged(matrix[self._scalar[name]], None)
            elif name in self._ragged:
                column = self._ragged[name]
                room = self._room.get(name)
                bags[name] = (
                    _gather_bags(column, rows, totals.get(name))
                    if room is None
                    else _gather_in_room(column, rows, room)
                )
        numbers = {}
        if self._float:
            of_rows = self._numbers.index_select(0, rows)
            numbers = {name: of_rows[:, place] for name, place in self._float.items()}
        return RowColumns(bags, numbers)

    def number(self, name: str, rows: Tensor) -> Tensor:
        """Returns (B,) float32 one column of numbers in ``rows`` (B,)."""
        return self._numbers.index_select(0, rows)[:, self._float[name]]

    def _matrix(self, columns: list[Array], dtype: torch.dtype) -> Tensor:
        # numpy stacks no empty list.
        if not columns:
            return torch.empty(self.num_rows, 0, dtype=dtype, device=self._device)
        return torch.from_numpy(np.stack(columns, axis=1)).to(self._device, dtype)


def _gather_bags(column: _Ragged, rows: Tensor, total: int | None) -> Jagged:
    lengths = column.lengths.index_select(0, rows)
    ends = lengths.long().cumsum(0)
    if total is None:
        total = int(ends[-1]) if len(ends) else 0
    # The index of each id: its place in the result, moved by its row's distance from
    # there.
    shift = (column.starts.index_select(0, rows) - ends + lengths).repeat_interleave(
        lengths, output_size=total
    )
    return Jagged(
        column.values.index_select(0, shift + torch.arange(total, device=rows.device)),
        lengths,
    )


def _gather_in_room(column: _Ragged, rows: Tensor, room: int) -> Jagged:
    """Gathers bags as :func:`_gather_bags` does, and zeros after them, ``room`` ids together."""
    lengths = column.lengths.index_select(0, rows)
    ends = lengths.long().cumsum(0)
    places = torch.arange(room, device=rows.device)
    bag = torch.searchsorted(ends, places, right=True).clamp(max=len(rows) - 1)
    shift = (column.starts.index_select(0, rows) - ends + lengths).index_select(0, bag)
    is_id = places < ends[-1]
    index = torch.where(is_id, places + shift, 0)
    return Jagged(torch.where(is_id, column.values.index_select(0, index), 0), lengths)


def table_of(
    layout: BlockLayout, rows: Chunk, where: str, device: torch.device
) -> DeviceTable:
    """Returns the columns of a layout as a table, checked; ``where`` names the rows in messages.

    Raises:
        DataError: a column is missing, or a value is none that it may have.
    """
    for name in layout.names:
        if name not in rows:
            raise DataError(
                f"{where}: column '{name}' is missing; there are {listed(sorted(rows))}"
            )
    group = RowGroup(name=where, file=0, number=0, rows=rows.num_rows)
    return DeviceTable(*layout.checked(group, rows), rows.num_rows, device)


def item_table(schema: BatchSchema, items: Chunk, device: torch.device) -> DeviceTable:
    """Returns the schema's columns of the items, row i those of item i.

    Raises:
        DataError: a feature is out of range.
    """
    layout = BlockLayout(
        features={
            feature.name: feature for feature in schema.sparse if feature.name in items
        },
        floats=tuple(name for name in schema.dense if name in items),
        out_of_range=schema.out_of_range,
    )
    return table_of(layout, items, "the features of the items", device)
