"""DeviceTable: rows as tensors on a device, from which any of them are gathered there."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrec_ext.data.columns import Array, Column


class Bags(NamedTuple):
    """``values`` (sum of lengths,) of B rows and their ``lengths`` (B,) int32; ``lengths=None`` is one id for each row."""

    values: Tensor
    lengths: Tensor | None


class _Ragged(NamedTuple):
    """(V,) ids of a ragged column, (N,) first place of each row, and (N,) lengths."""

    values: Tensor
    starts: Tensor
    lengths: Tensor


class DeviceTable:
    """N rows. Ids with one value per row are one (N, F1) matrix and numbers one (N, Ff) matrix.

    Args:
        ids: by name, as int64.
        floats: by name, as float32.
        num_rows: N.
        device: where the tensors are.
    """

    def __init__(self, ids: Mapping[str, Column], floats: Mapping[str, Array], num_rows: int, device: torch.device) -> None:
        self.num_rows, self._device = num_rows, device
        self._scalar = {name: at for at, name in enumerate(name for name in ids if not ids[name].ragged)}
        self._float = {name: at for at, name in enumerate(floats)}
        self._ids = self._matrix([ids[name].values for name in self._scalar], torch.int64)
        self._numbers = self._matrix(list(floats.values()), torch.float32)
        self._ragged = {name: self._bag(column) for name, column in ids.items() if column.ragged}
        self.ragged = tuple(self._ragged)

    @property
    def matrices(self) -> tuple[Tensor, Tensor]:
        """(N, F1) int64 ids and (N, Ff) float32 numbers."""
        return self._ids, self._numbers

    def over(self, ids: Tensor, numbers: Tensor) -> DeviceTable:
        """This table with other :attr:`matrices`, such as those that stand for them while a step is captured."""
        made = copy.copy(self)
        made._ids, made._numbers = ids, numbers
        return made

    def bags(self, rows: Tensor, names: Iterable[str], totals: Mapping[str, int]) -> dict[str, Bags]:
        """Of the columns ``names`` that this table has; ``totals`` says how many ids those of a ragged column hold together.

        Who knows the number spares a device the wait for it.
        """
        found = {}
        matrix = self._ids.index_select(0, rows).t().contiguous()
        for name in names:
            if name in self._scalar:
                found[name] = Bags(matrix[self._scalar[name]], None)
            elif name in self.ragged:
                found[name] = _gathered(self._ragged[name], rows, totals[name])
        return found

    def lengths(self, name: str, rows: Tensor) -> Tensor:
        """(B,) int64, ids per row of a ragged column; ``rows`` (B,)."""
        return self._ragged[name].lengths.index_select(0, rows).long()

    def numbers(self, rows: Tensor) -> dict[str, Tensor]:
        """(B,) float32 of each column of numbers."""
        columns = self._numbers.index_select(0, rows)
        return {name: columns[:, at] for name, at in self._float.items()}

    def _matrix(self, columns: list[Array], dtype: torch.dtype) -> Tensor:
        stacked = torch.from_numpy(np.stack(columns, axis=1)) if columns else torch.empty(self.num_rows, 0)
        return stacked.to(self._device, dtype)

    def _bag(self, column: Column) -> _Ragged:
        values, offsets = column.values, column.offsets
        assert offsets is not None
        own = values if values.flags.writeable else values.copy()
        places = torch.from_numpy(offsets).to(self._device)
        return _Ragged(torch.from_numpy(own).to(self._device), places[:-1], places.diff().int())


def _gathered(column: _Ragged, rows: Tensor, total: int) -> Bags:
    lengths = column.lengths.index_select(0, rows)
    ends = lengths.long().cumsum(0)
    shift = (column.starts.index_select(0, rows) - ends + lengths).repeat_interleave(lengths, output_size=total)
    return Bags(column.values.index_select(0, shift + torch.arange(total, device=rows.device)), lengths)
