"""Bags of ids of a batch, checked: types, lengths, weights, and that every id names a row of its table.

Ids of features with one id per row are checked in one pass; which feature, row and value it was is looked for when there is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_ext.schema.checks import DataError, Rows, finite_range
from torchrec_ext.schema.features import SparseFeature


class Jagged(NamedTuple):
    """One sparse feature of a batch: ``values`` (sum of lengths,) and ``lengths`` (B,); ``lengths=None`` is one id per row.

    ``weights`` (sum of lengths,): of each id, where the model pools by them.
    """

    values: Tensor
    lengths: Tensor | None = None
    weights: Tensor | None = None


class Bags(NamedTuple):
    """The bags of a feature, of the right type and number; their ids are not checked yet. Without a feature all are empty."""

    feature: SparseFeature | None
    values: Tensor
    lengths: Tensor | None
    rows: Rows
    weights: Tensor | None = None

    def weights_or_ones(self) -> Tensor:
        """(sum of lengths,) float32."""
        return torch.ones(self.values.numel()) if self.weights is None else self.weights

    def lengths_or_ones(self) -> Tensor:
        """(B,) int32."""
        return torch.ones(self.rows.size, dtype=torch.int32) if self.lengths is None else self.lengths.int()


def bags_of(feature: SparseFeature, column: Jagged, rows: Rows) -> Bags:
    """The column's bags with ids in int64: one type on every rank, since two types abort the process group.

    Raises:
        DataError: another type, or other lengths than there are rows and ids.
    """
    _check_types(feature.name, column)
    values, lengths, _ = column
    if lengths is not None:
        _check_lengths(feature.name, values, lengths, rows)
    elif values.numel() != rows.size:
        raise _wrong_size(feature.name, values.numel(), rows)
    return Bags(feature, values.long(), lengths, rows, _weights(feature, column, rows))


def _weights(feature: SparseFeature, column: Jagged, rows: Rows) -> Tensor | None:
    """The weights of the ids, float32 and finite, where the feature has such."""
    if feature.weights is None and column.weights is None:
        return None
    if feature.weights is None or column.weights is None:
        what = "no weights, but the model reads them from" if feature.weights else "weights, but no tower names"
        raise DataError(f"feature '{feature.name}' has {what} a column; give a weight for each id, and name it in Tower(weights=)")
    if column.weights.shape != column.values.shape:
        raise DataError(
            f"column '{feature.weights}': {column.weights.numel()} weights, must be {column.values.numel()}, "
            f"one for each id of '{feature.name}'"
        )
    weights = column.weights.float()
    if weights.numel() and finite_range(weights) is None:
        at = (~torch.isfinite(weights)).nonzero()[0]
        ones = column.lengths if column.lengths is not None else torch.ones(rows.size)
        row = int(torch.searchsorted(ones.long().cumsum(0), at, right=True))
        raise DataError(f"column '{feature.weights}': value {float(weights[at])} in {rows.name(row)} is not finite")
    return weights


def no_bags(rows: Rows) -> Bags:
    """An empty bag for each row."""
    return Bags(None, torch.empty(0, dtype=torch.int64), torch.zeros(rows.size, dtype=torch.int32), rows)


def check_ids(values: Tensor, bags: Sequence[Bags], *, replace: bool) -> None:
    """Checks ``values``, the ids of ``bags`` one after the other; those of features with one id per row in one pass.

    Args:
        values: (sum of all lengths,); ``replace`` writes into it.
        bags: whose ids these are.
        replace: put a feature's ``oov_id`` in the place of invalid ids.

    Raises:
        DataError: an id names no row of its table, without ``replace``.
    """
    start = 0
    for run in _runs(bags):
        stop = start + sum(bag.values.numel() for bag in run)
        if stop > start:
            _check_run(values[start:stop], run, replace)
        start = stop


def _runs(bags: Sequence[Bags]) -> Iterator[list[Bags]]:
    """Neighbours with one id for each of equally many rows, which are a matrix; each of the others by itself."""
    run: list[Bags] = []
    for bag in bags:
        if run and (bag.lengths is not None or run[0].lengths is not None or bag.rows.size != run[0].rows.size):
            yield run
            run = []
        run.append(bag)
    if run:
        yield run


def _check_run(ids: Tensor, bags: list[Bags], replace: bool) -> None:
    if len(bags) == 1:  # over all dimensions it takes half the time
        low, high = ([bound.item()] for bound in torch.aminmax(ids))
    else:
        low, high = (bound.tolist() for bound in torch.aminmax(ids.view(len(bags), -1), dim=1))
    for at, bag in enumerate(bags):
        feature = bag.feature
        if feature and (low[at] < 0 or high[at] >= feature.num_embeddings):
            own = ids.view(len(bags), -1)[at]
            bad = (own < 0) | (own >= feature.num_embeddings)
            if not replace:
                raise _out_of_range(feature, bag, own, bad)
            own[bad] = feature.oov_id


def _out_of_range(feature: SparseFeature, bag: Bags, ids: Tensor, bad: Tensor) -> DataError:
    first = int(bad.nonzero()[0])
    row = first if bag.lengths is None else int(torch.searchsorted(bag.lengths.long().cumsum(0), first, right=True))
    return DataError(
        f"feature '{feature.name}': id {int(ids[first])} in {bag.rows.name(row)} is outside table {feature.readers} "
        f"(valid ids: 0 to {feature.num_embeddings - 1}; {int(bad.sum())} such ids in this batch); "
        f"{feature.remedy(int(ids.max()))}"
    )


def _check_types(name: str, column: Jagged) -> None:
    if not isinstance(column, Jagged):
        raise DataError(f"feature '{name}': a {type(column).__name__}, must be Jagged(values, lengths) of tensors")
    for what, tensor in (("ids", column.values), ("lengths", column.lengths)):
        if tensor is None and what == "lengths":
            continue
        if not isinstance(tensor, Tensor):
            raise DataError(f"feature '{name}': {what} are a {type(tensor).__name__}, must be a tensor")
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            raise DataError(
                f"feature '{name}': {what} are {str(tensor.dtype).removeprefix('torch.')}, must be integers; "
                "convert them where they are read (a float id would silently become row 0)"
            )
        if tensor.dim() != 1:
            raise DataError(f"feature '{name}': {what} have shape {tuple(tensor.shape)}, must have one dimension; flatten them")


def _check_lengths(name: str, values: Tensor, lengths: Tensor, rows: Rows) -> None:
    if lengths.numel() != rows.size:
        raise _wrong_size(name, lengths.numel(), rows)
    if lengths.numel() and int(lengths.min()) < 0:
        row = int((lengths < 0).nonzero()[0])
        raise DataError(f"feature '{name}': length {int(lengths[row])} in {rows.name(row)}; lengths must be 0 or more")
    total = int(lengths.sum())
    if total != values.numel():
        raise DataError(f"feature '{name}': the lengths add up to {total}, but there are {values.numel()} ids; they must agree")


def _wrong_size(name: str, found: int, rows: Rows) -> DataError:
    return DataError(f"feature '{name}': {found} rows, must be {rows.shape}; give one entry for each row")
