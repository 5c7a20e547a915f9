"""Checks of a batch's columns: finite numbers; types and lengths of bags; ids that name a row of their table.

Ids of features with one id per row are checked in one pass; feature, row and value are looked for once one is invalid.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torchrec_ext.needs_torch  # noqa: F401

import numpy as np
import torch
from torch import Tensor

from torchrec_ext.batch import Jagged
from torchrec_ext.schema.features import SparseFeature
from torchrec_ext.schema.validation import DataError


class ExpectedRows(NamedTuple):
    """The ``size`` rows expected of a column, and their ``numbers`` for messages.

    ``places`` holds the index of each row in ``numbers``, or how many rows each number has, one after the other.
    """

    size: int
    axis: str
    numbers: Tensor | None = None
    places: Tensor | int = 1

    def name(self, row: int) -> str:
        """Names a row for a message."""
        if self.numbers is None:
            return f"row {row} of the batch"
        place = (
            row // self.places
            if isinstance(self.places, int)
            else int(self.places[row])
        )
        return f"row {int(self.numbers[place])}"

    @property
    def shape(self) -> str:
        """The expected shape of a column, for a message."""
        return f"({self.axis},) = ({self.size},)"


def row_numbers(rows: ExpectedRows) -> Tensor:
    """Returns (size,) int64 numbers of the rows, of which no two are equal if those for messages are not."""
    places = rows.places
    if rows.numbers is None:
        return torch.arange(rows.size)
    if not isinstance(places, int):
        return rows.numbers[places]
    if places == 1:
        return rows.numbers
    return (rows.numbers[:, None] * places + torch.arange(places)).view(-1)


def side_by_side(
    names: Sequence[str], columns: Sequence[Tensor], rows: ExpectedRows
) -> Tensor:
    """Stacks columns of one number per row to (B, columns) float32."""
    if not columns:
        return torch.empty(rows.size, 0)
    return torch.stack(
        [
            _of_shape(name, column, rows)
            for name, column in zip(names, columns, strict=True)
        ],
        dim=1,
    )


def array_of(name: str, array: Tensor, width: int, rows: ExpectedRows) -> Tensor:
    """Returns the array column if its shape is (B, W); else raises a DataError."""
    if array.shape != (rows.size, width):
        raise DataError(
            f"column '{name}': shape {tuple(array.shape)}, must be ({rows.axis}, W) = ({rows.size}, {width})"
        )
    return array


def finite_matrix(names: Sequence[str], matrix: Tensor, rows: ExpectedRows) -> Tensor:
    """Returns the matrix if all values are finite: one NaN poisons all weights of all ranks in one step."""
    if matrix.shape != (rows.size, len(names)):
        raise DataError(
            f"dense columns {list(names)}: shape {tuple(matrix.shape)}, must be {(rows.size, len(names))}"
        )
    if matrix.numel() and not finite_range(matrix):
        for name, column in zip(names, matrix.unbind(dim=1), strict=True):
            finite(name, column, rows)
    return matrix


def finite(name: str, column: Tensor, rows: ExpectedRows) -> Tensor:
    """Returns the column as float32; raises a DataError if a value is not finite."""
    return between(name, column, rows, None)


def between(
    name: str, column: Tensor, rows: ExpectedRows, bounds: tuple[float, float] | None
) -> Tensor:
    """Returns the column as float32; raises a DataError if a value is not finite or outside ``bounds``."""
    column = _of_shape(name, column, rows)
    # torch.aminmax refuses an empty tensor.
    if not column.numel():
        return column
    extremes = finite_range(column)
    if extremes is None:
        row = int((~torch.isfinite(column)).nonzero()[0])
        raise DataError(
            f"column '{name}': value {float(column[row])} in {rows.name(row)} is not finite; fill or drop it where it "
            "is read"
        )
    if bounds is not None and not bounds[0] <= extremes[0] <= extremes[1] <= bounds[1]:
        row = int(((column < bounds[0]) | (column > bounds[1])).nonzero()[0])
        limits = f"from {bounds[0]:g} to {bounds[1]:g}"
        if math.isinf(bounds[1]):
            limits = f"{bounds[0]:g} or more"
        remedy = (
            "; for other labels make the schema with label_range=None"
            if name == "label"
            else ""
        )
        raise DataError(
            f"column '{name}': value {float(column[row]):g} in {rows.name(row)} must be {limits}{remedy}"
        )
    return column


def _of_shape(name: str, column: Tensor, rows: ExpectedRows) -> Tensor:
    if column.dim() != 1 or column.numel() != rows.size:
        raise DataError(
            f"column '{name}': shape {tuple(column.shape)}, must be {rows.shape}"
        )
    return column.float()


def finite_range(values: Tensor) -> tuple[float, float] | None:
    """Returns the least and the greatest value; None if a value is not finite (a NaN makes both NaN)."""
    # One pass finds both bounds, and isfinite need not make a mask as large as the
    # values.
    low, high = (bound.item() for bound in torch.aminmax(values))
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def check_index(index: Tensor, rows: ExpectedRows, queries: ExpectedRows) -> None:
    """Refuses an index without a shared row for each row."""
    fits = index.shape == (rows.size,)
    if fits and rows.size:
        low, high = torch.aminmax(index)
        fits = int(low) >= 0 and int(high) < queries.size
    if not fits:
        raise DataError(
            f"index of shape {tuple(index.shape)}: must be (B,) = ({rows.size},), places from 0 to {queries.size - 1}"
        )


def check_repeats(repeats: int, rows: ExpectedRows, queries: ExpectedRows) -> None:
    """Refuses ``repeats`` unless the shared rows, each so often, make all rows."""
    if queries.size * repeats != rows.size:
        raise DataError(
            f"index={repeats} rows for each of {queries.size} shared rows: must be {rows.shape} rows together"
        )


def total_of(weights: Tensor | None, given: float | None, size: int) -> Tensor:
    """Returns the total weight, () float32: ``given``, else the sum of the weights, else ``size``."""
    if given is not None:
        total = float(given)
    elif weights is not None:
        total = float(weights.sum())
    else:
        total = float(size)
    if size and not total > 0:
        raise DataError(
            f"total_weight={total}: must be greater than 0, since the loss divides by it; give some row a weight"
        )
    # Takes half the time of torch.tensor.
    return torch.from_numpy(np.array(total, np.float32))


class CheckedBags(NamedTuple):
    """The bags of a feature, of the right type and number; their ids are not checked yet."""

    feature: SparseFeature
    bags: Jagged
    rows: ExpectedRows


def bags_of(feature: SparseFeature, column: Jagged, rows: ExpectedRows) -> CheckedBags:
    """Returns the column's bags with int64 ids: one type on every rank, since two types abort the process group.

    Raises:
        DataError: the types are wrong, or the lengths do not fit the rows and ids.
    """
    _check_types(feature.name, column)
    # Without lengths each row has one id.
    values, lengths = column
    if lengths is not None:
        _check_lengths(feature.name, values, lengths, rows)
    elif values.numel() != rows.size:
        raise _wrong_size(feature.name, values.numel(), rows)
    return CheckedBags(feature, Jagged(values.long(), lengths), rows)


def check_ids(values: Tensor, columns: Sequence[CheckedBags], *, replace: bool) -> None:
    """Checks ``values``, the ids of ``columns`` one after the other; features with one id per row take one pass.

    Args:
        values: (sum of all lengths,) ids; ``replace`` writes into it.
        columns: features and lengths of the bags in ``values``.
        replace: replace invalid ids by the feature's ``oov_id``.

    Raises:
        DataError: an id names no row of its table, without ``replace``.
    """
    start = 0
    for run in _runs(columns):
        stop = start + sum(column.bags.values.numel() for column in run)
        # torch.aminmax refuses an empty tensor.
        if stop > start:
            _check_run(values[start:stop], run, replace)
        start = stop


def _runs(columns: Sequence[CheckedBags]) -> Iterator[list[CheckedBags]]:
    """Groups neighbours with one id for each of equally many rows into a matrix; others stay alone."""
    run: list[CheckedBags] = []
    for column in columns:
        if run:
            jagged = column.bags.lengths is not None or run[0].bags.lengths is not None
            if jagged or column.rows.size != run[0].rows.size:
                yield run
                run = []
        run.append(column)
    if run:
        yield run


def _check_run(ids: Tensor, columns: list[CheckedBags], replace: bool) -> None:
    # For one column, a reduction over all dimensions takes half the time of one over a
    # dimension.
    if len(columns) == 1:
        low, high = ([bound.item()] for bound in torch.aminmax(ids))
    else:
        low, high = (
            bound.tolist() for bound in torch.aminmax(ids.view(len(columns), -1), dim=1)
        )
    for number, column in enumerate(columns):
        feature = column.feature
        # Any 64-bit number is an id of such a feature: rows come later.
        if feature.dynamic:
            continue
        if low[number] < 0 or high[number] >= feature.num_embeddings:
            values = ids.view(len(columns), -1)[number]
            bad = (values < 0) | (values >= feature.num_embeddings)
            if not replace:
                raise _out_of_range(column, values, bad)
            # ``values`` is a view, so this writes into the batch.
            values[bad] = feature.oov_id


def _out_of_range(column: CheckedBags, ids: Tensor, bad: Tensor) -> DataError:
    feature = column.feature
    lengths = column.bags.lengths
    first = int(bad.nonzero()[0])
    row = first
    if lengths is not None:
        row = int(torch.searchsorted(lengths.long().cumsum(0), first, right=True))
    return DataError(feature.outside(column.rows.name(row), ids[bad]))


def _check_types(name: str, column: Jagged) -> None:
    if not isinstance(column, Jagged):
        raise DataError(
            f"feature '{name}': a {type(column).__name__}, must be Jagged(values, lengths) of tensors"
        )
    for what, tensor in (("ids", column.values), ("lengths", column.lengths)):
        if tensor is None and what == "lengths":
            continue
        if not isinstance(tensor, Tensor):
            raise DataError(
                f"feature '{name}': {what} are a {type(tensor).__name__}, must be a tensor"
            )
        if (
            tensor.is_floating_point()
            or tensor.is_complex()
            or tensor.dtype == torch.bool
        ):
            raise DataError(
                f"feature '{name}': {what} are {str(tensor.dtype).removeprefix('torch.')}, must be integers; convert "
                "them where they are read (a float id would silently become row 0)"
            )
        if tensor.dim() != 1:
            raise DataError(
                f"feature '{name}': {what} have shape {tuple(tensor.shape)}, must have one dimension; flatten them"
            )


def _check_lengths(
    name: str, values: Tensor, lengths: Tensor, rows: ExpectedRows
) -> None:
    if lengths.numel() != rows.size:
        raise _wrong_size(name, lengths.numel(), rows)
    if lengths.numel() and int(lengths.min()) < 0:
        row = int((lengths < 0).nonzero()[0])
        raise DataError(
            f"feature '{name}': length {int(lengths[row])} in {rows.name(row)}; lengths must be 0 or more"
        )
    total = int(lengths.sum())
    if total != values.numel():
        raise DataError(
            f"feature '{name}': the lengths add up to {total}, but there are {values.numel()} ids; they must agree"
        )


def _wrong_size(name: str, size: int, rows: ExpectedRows) -> DataError:
    return DataError(
        f"feature '{name}': {size} rows, must be {rows.shape}; give one entry for each row"
    )
