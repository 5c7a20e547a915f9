"""What a column of numbers may hold, and what is said of one that holds something else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class DataError(ValueError):
    """Input that breaks a rule: the message names the feature, the table, the value, the row and the remedy."""


class Rows(NamedTuple):
    """The ``size`` rows that a column must have, and what a message calls them: by ``numbers``.

    ``places``: of each row in ``numbers``; or how many rows each number has, one after the other.
    """

    size: int
    axis: str
    numbers: Tensor | None = None
    places: Tensor | int = 1

    def name(self, row: int) -> str:
        """How a message names a row."""
        if self.numbers is None:
            return f"row {row} of the batch"
        return f"row {int(self.numbers[row // self.places if isinstance(self.places, int) else int(self.places[row])])}"

    @property
    def shape(self) -> str:
        """The shape that a column must have."""
        return f"({self.axis},) = ({self.size},)"


def side_by_side(names: Sequence[str], columns: Sequence[Tensor], rows: Rows) -> Tensor:
    """(B, columns) float32."""
    if not columns:
        return torch.empty(rows.size, 0)
    return torch.stack([_of_shape(name, column, rows) for name, column in zip(names, columns, strict=True)], dim=1)


def array_of(name: str, array: Tensor, width: int, rows: Rows) -> Tensor:
    """(B, W) an array column."""
    if array.shape != (rows.size, width):
        raise DataError(f"column '{name}': shape {tuple(array.shape)}, must be ({rows.axis}, W) = ({rows.size}, {width})")
    return array


def finite_matrix(names: Sequence[str], matrix: Tensor, rows: Rows) -> Tensor:
    """The matrix, every value finite: one NaN poisons the dense weights and all tables of all ranks in one step."""
    if matrix.shape != (rows.size, len(names)):
        raise DataError(f"dense columns {list(names)}: shape {tuple(matrix.shape)}, must be {(rows.size, len(names))}")
    if matrix.numel() and not finite_range(matrix):
        for name, column in zip(names, matrix.unbind(dim=1), strict=True):
            finite(name, column, rows)
    return matrix


def finite(name: str, column: Tensor, rows: Rows) -> Tensor:
    """The column as float32, every value finite."""
    return between(name, column, rows, None)


def between(name: str, column: Tensor, rows: Rows, bounds: tuple[float, float] | None) -> Tensor:
    """The column as float32, every value finite and within ``bounds``."""
    column = _of_shape(name, column, rows)
    if not column.numel():
        return column
    found = finite_range(column)
    if found is None:
        row = int((~torch.isfinite(column)).nonzero()[0])
        raise DataError(
            f"column '{name}': value {float(column[row])} in {rows.name(row)} is not finite; fill or drop it where it is read"
        )
    if bounds is not None and not bounds[0] <= found[0] <= found[1] <= bounds[1]:
        row = int(((column < bounds[0]) | (column > bounds[1])).nonzero()[0])
        limits = f"{bounds[0]:g} or more" if math.isinf(bounds[1]) else f"from {bounds[0]:g} to {bounds[1]:g}"
        remedy = "; for other labels make the schema with label_range=None" if name == "label" else ""
        raise DataError(f"column '{name}': value {float(column[row]):g} in {rows.name(row)} must be {limits}{remedy}")
    return column


def _of_shape(name: str, column: Tensor, rows: Rows) -> Tensor:
    if column.dim() != 1 or column.numel() != rows.size:
        raise DataError(f"column '{name}': shape {tuple(column.shape)}, must be {rows.shape}")
    return column.float()


def finite_range(values: Tensor) -> tuple[float, float] | None:
    """The least and the greatest value; None where a value is not finite: a NaN anywhere makes both NaN."""
    low, high = (bound.item() for bound in torch.aminmax(values))
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def check_index(index: Tensor, own: Rows, queries: Rows) -> None:
    """Refuses an index that does not name a shared row for each row."""
    fits = index.shape == (own.size,)
    if fits and own.size:
        low, high = torch.aminmax(index)
        fits = int(low) >= 0 and int(high) < queries.size
    if not fits:
        raise DataError(f"index of shape {tuple(index.shape)}: must be (B,) = ({own.size},), places from 0 to {queries.size - 1}")


def check_repeats(repeats: int, own: Rows, queries: Rows) -> None:
    """Refuses a number of rows for each shared row that does not make all rows."""
    if queries.size * repeats != own.size:
        raise DataError(f"index={repeats} rows for each of {queries.size} shared rows: must be {own.shape} rows together")


def total_of(weights: Tensor | None, given: float | None, size: int) -> Tensor:
    """() the total weight: as it was given, or the sum of the weights, or of as many ones."""
    total = float(given) if given is not None else float(size if weights is None else weights.sum())
    if size and not total > 0:
        raise DataError(f"total_weight={total}: must be greater than 0, since the loss divides by it; give some row a weight")
    return torch.from_numpy(np.array(total, np.float32))  # in half the time of torch.tensor
