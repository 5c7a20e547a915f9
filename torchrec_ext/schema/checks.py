"""Checks of a batch's columns: finite numbers; types and lengths of bags; ids that name a row of their table."""

from __future__ import annotations

import math

import torchrec_ext.needs_torch  # noqa: F401

import torch
from torch import Tensor

from torchrec_ext.batch import Jagged
from torchrec_ext.schema.features import SparseFeature
from torchrec_ext.schema.validation import DataError


def of_shape(name: str, column: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns the column as float32; raises a DataError if it has another shape."""
    if column.shape != shape:
        raise DataError(
            f"column '{name}': shape {tuple(column.shape)}, must be {shape}"
        )
    return column.float()


def numbers_of(
    name: str, column: Tensor, size: int, bounds: tuple[float, float] | None = None
) -> Tensor:
    """Returns (size,) float32; raises a DataError if a value is not finite or outside ``bounds``."""
    column = of_shape(name, column, (size,))
    low, high = bounds or (-math.inf, math.inf)
    bad = ~((column >= low) & (column <= high) & torch.isfinite(column))
    if not bad.any():
        return column
    row = int(bad.nonzero()[0])
    raise DataError(
        f"column '{name}': value {float(column[row]):g} in row {row} of the batch must be finite, from {low:g} to "
        f"{high:g}; mend it where it is read (a schema with label_range=None has labels of any size)"
    )


def total_of(weights: Tensor, given: float | None) -> Tensor:
    """Returns the total weight, () float32: ``given``, else the sum of the weights."""
    total = float(weights.sum()) if given is None else float(given)
    if len(weights) and not total > 0:
        raise DataError(
            f"total_weight={total}: must be greater than 0, since the loss divides by it; give some row a weight"
        )
    return torch.tensor(total)


def checked_bags(
    feature: SparseFeature, column: Jagged, size: int, *, replace: bool
) -> Jagged:
    """Returns the column's bags with int64 ids: one type on every rank, since two types abort the process group.

    Args:
        feature: the feature.
        column: its bags.
        size: number of bags.
        replace: replace invalid ids by the feature's ``oov_id``.

    Raises:
        DataError: the types are wrong, the lengths do not fit the rows and ids, or, without ``replace``, an id names no
            row of its table.
    """
    name = feature.name
    if not isinstance(column, Jagged):
        raise DataError(
            f"feature '{name}': a {type(column).__name__}, must be Jagged(values, lengths) of tensors"
        )
    values, lengths = column
    for what, tensor in (("ids", values), ("lengths", lengths)):
        if tensor is not None:
            _check_integers(f"feature '{name}': {what}", tensor)
    rows = len(values if lengths is None else lengths)
    if rows != size:
        raise DataError(
            f"feature '{name}': {rows} rows, must be ({size},); give one entry for each row"
        )
    if lengths is not None and (
        bool((lengths < 0).any()) or int(lengths.sum()) != len(values)
    ):
        raise DataError(
            f"feature '{name}': lengths that add up to {int(lengths.sum())}, the least {int(lengths.min())}, for "
            f"{len(values)} ids; must be 0 or more and add up to them"
        )
    values = values.long()
    bad = (values < 0) | (values >= feature.num_embeddings)
    # Any 64-bit number is an id of a dynamic feature: rows come later.
    if feature.dynamic or not bad.any():
        return Jagged(values, lengths)
    if not replace:
        row = int(bad.nonzero()[0])
        if lengths is not None:
            row = int(torch.searchsorted(lengths.long().cumsum(0), row, right=True))
        raise DataError(feature.outside(f"row {row} of the batch", values[bad]))
    return Jagged(values.masked_fill(bad, feature.oov_id), lengths)


def _check_integers(what: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise DataError(
            f"{what} are {str(tensor.dtype).removeprefix('torch.')}, must be integers; convert them where they are "
            "read (a float id would silently become row 0)"
        )
    if tensor.dim() != 1:
        raise DataError(
            f"{what} have shape {tuple(tensor.shape)}, must have one dimension; flatten them"
        )
