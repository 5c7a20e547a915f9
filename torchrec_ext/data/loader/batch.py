"""assemble(): the one place where columns become a TowerBatch, whether of a block, of rows on a device, or of events.

padded(), placed(): columns of fewer rows than a batch has.

known_items(): checks the item ids of rows and of draws against the table of item features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrec_ext.batch import Jagged, TowerBatch, pack
from torchrec_ext.data.columns import Array, Int64
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.schema import BatchSchema, DataError, RowNumbers


class RowColumns(NamedTuple):
    """Checked columns of n rows by name: ``bags`` of ids and ``numbers``, (n,) float32."""

    bags: dict[str, Jagged]
    numbers: dict[str, Tensor]


class Answers(NamedTuple):
    """What B rows of a batch are trained on: ``labels`` and ``weights`` (B,), and ``targets`` (B, T - 1) or None."""

    labels: Tensor
    weights: Tensor
    targets: Tensor | None = None

    @classmethod
    def of(
        cls,
        schema: BatchSchema,
        config: LoaderConfig,
        numbers: Mapping[str, Tensor],
        count: int,
        size: int,
        width: int = 1,
        device: torch.device | None = None,
    ) -> Answers:
        """Returns the answers of ``count`` rows, of which each is the first of ``width`` candidates.

        Other candidates have label 0, and the rows that pad them up to ``size`` have weight 0 too.
        """
        labels = torch.zeros(size, width, device=device)
        weights = torch.zeros(size, width, device=device)
        labels[:count, 0] = numbers[config.label] if config.label else 1.0
        weights[:count] = numbers[config.weight][:, None] if config.weight else 1.0
        if not schema.tasks:
            return cls(labels.view(-1), weights.view(-1))
        targets = torch.zeros(size, width, len(schema.tasks), device=device)
        targets[:, 0] = _dense(numbers, size, schema.tasks, device)
        return cls(labels.view(-1), weights.view(-1), targets.flatten(0, 1))


def assemble(
    schema: BatchSchema,
    rows: RowColumns,
    answers: Answers,
    *,
    total_weight: Tensor,
    numbers: RowNumbers,
    shared: RowColumns | None = None,
    index: Tensor | None = None,
    shared_size: int | None = None,
    items: Tensor | None = None,
    log_q: Tensor | None = None,
    queries: int | None = None,
    lists: tuple[str, ...] | None = None,
) -> TowerBatch:
    """Lays out a batch of B rows and Q shared rows; rows that the columns lack have empty bags and zeros.

    Args:
        schema: the columns of the batch.
        rows: columns of at most B rows; those of the schema that are missing are empty.
        answers: labels, weights and targets, whose length is B.
        total_weight: see :class:`TowerBatch`.
        numbers: numbers of the rows and of the shared rows, for whoever replaces ids.
        shared: columns of at most Q shared rows; ``rows`` by default.
        index: (B,) the shared row of each row; by default row i has shared row i.
        shared_size: Q; B by default.
        items: item of each row, B or fewer; by default the ids of the schema's column, if it has one for each row.
        log_q: see :class:`TowerBatch`.
        queries: number of first rows that have a query; B by default.
        lists: see :class:`TowerBatch`.
    """
    size = len(answers.labels)
    device = answers.labels.device
    shared = rows if shared is None else shared
    shared_size = size if shared_size is None else shared_size
    # As sampled: whatever is looked up for a dropped id, it is this item.
    items = _identities(schema.candidate, rows, items, size)
    bags: dict[str, Jagged] = {}
    for name in schema.keys:
        part = shared if name in schema.shared else rows
        if name in part.bags:
            bags[name] = part.bags[name]
    if schema.replaces is not None:
        for name in schema.keys:
            of_part = numbers.shared if name in schema.shared else numbers.rows
            bags.setdefault(name, _empty(of_part))
        bags |= schema.replaces({name: bags[name] for name in schema.keys}, numbers)
    if schema.shared and index is None:
        index = torch.arange(size, device=device)
    return pack(
        schema.layout,
        bags,
        dense=_dense(rows.numbers, size, schema.row_dense, device),
        labels=answers.labels,
        weights=answers.weights,
        # Never quite 0, by which the loss of rows without a weight would be NaN.
        total_weight=total_weight.clamp(min=1e-30),
        log_q=None if log_q is None else padded(log_q, size),
        targets=answers.targets,
        items=items,
        queries=(queries or size) if schema.candidate else queries,
        lists=lists,
        shared_dense=_dense(shared.numbers, shared_size, schema.shared_dense, device)
        if schema.shared
        else None,
        index=index,
    )


def _identities(
    name: str | None, rows: RowColumns, ids: Tensor | None, size: int
) -> Tensor | None:
    if name is None:
        return None
    bags = rows.bags.get(name)
    if ids is None and bags is not None and bags.lengths is None:
        ids = bags.values
    return None if ids is None else padded(ids, size)


def _empty(numbers: Tensor) -> Jagged:
    ids = numbers.new_empty(0)
    return Jagged(ids, torch.zeros_like(numbers, dtype=torch.int32))


def _dense(
    numbers: Mapping[str, Tensor],
    size: int,
    names: Sequence[str],
    device: torch.device | None,
) -> Tensor:
    """Returns (size, F) the columns ``names`` side by side, zeros below their rows and in columns that are missing."""
    columns = [numbers.get(name) for name in names]
    present = next((column for column in columns if column is not None), None)
    if present is None:
        return torch.zeros(size, len(names), device=device)
    missing = torch.zeros_like(present)
    every = [missing if column is None else column for column in columns]
    return padded(torch.stack(every, dim=1), size)


def padded(rows: Tensor, size: int) -> Tensor:
    """Returns (size, ...) the rows, and zeros after them."""
    if len(rows) == size:
        return rows
    return torch.cat([rows, rows.new_zeros(size - len(rows), *rows.shape[1:])])


def placed(columns: RowColumns, places: Tensor, size: int) -> RowColumns:
    """Returns columns of ``size`` rows, of which those at ``places`` (n,), ascending, are these; others are empty."""
    bags = {}
    for name, each in columns.bags.items():
        lengths = torch.zeros(size, dtype=torch.int32, device=places.device)
        lengths[places] = (
            torch.ones_like(places) if each.lengths is None else each.lengths
        ).int()
        bags[name] = each._replace(lengths=lengths)
    return RowColumns(
        bags,
        {name: _spread(each, places, size) for name, each in columns.numbers.items()},
    )


def _spread(values: Tensor, places: Tensor, size: int) -> Tensor:
    """Returns (size,) the values at ``places`` (n,), and zeros elsewhere."""
    return values.new_zeros(size).index_copy_(0, places, values)


def as_tensor(array: Array) -> Tensor:
    """Converts an array, with a copy if needed: Arrow's memory is read-only, and torch takes no negative strides."""
    return torch.from_numpy(
        array if array.flags.writeable and array.flags.c_contiguous else array.copy()
    )


def known_items(
    schema: BatchSchema,
    num_rows: int,
    ids: Int64,
    row_numbers: Int64,
    name: str = "item_id",
) -> Int64:
    """Checks item ids and returns them; ``out_of_range="oov"`` replaces ids without features by the ``oov_id``.

    Args:
        schema: decides what happens to an id without features.
        num_rows: number of rows of the table of item features.
        ids: (B,) item ids.
        row_numbers: (B,) numbers by which a message names the rows.
        name: column of the ids.

    Raises:
        DataError: an id has no features.
    """
    bad = (ids < 0) | (ids >= num_rows)
    if not bad.any():
        return ids
    feature = schema.feature(name)
    oov_id = 0 if feature is None else feature.oov_id
    if schema.out_of_range == "oov":
        return np.where(bad, oov_id, ids)
    index = int(bad.argmax())
    raise DataError(
        f"row {row_numbers[index]}, column '{name}': id {ids[index]} has no features (known: 0 to {num_rows - 1}; "
        f"{int(bad.sum())} such ids); fix the data, or set out_of_range='oov' for item {oov_id}"
    )
