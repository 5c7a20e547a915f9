"""Candidates that all rows of a step share: the catalogue after the positives, or candidates beside sessions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrec_ext.batch import Jagged, TowerBatch
from torchrec_ext.data.columns import Int64
from torchrec_ext.data.loader.batch import (
    Answers,
    RowColumns,
    assemble,
    known_items,
    padded,
    placed,
)
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.data.loader.table import DeviceTable
from torchrec_ext.data.order import Share
from torchrec_ext.schema import BatchSchema, RowNumbers

SESSION, ITEM = "session", "item_id"


@dataclass(frozen=True)
class CatalogueCandidates:
    """Gives every step all items as shared candidates of its queries, a part on each rank.

    Args:
        items: (I,) ids of the items, from 1 on.
    """

    items: Int64


def _part_of(items: Int64, share: Share) -> Int64:
    """Returns (ceil(I / R),) items: a rank's part of all, filled up with 0, which is no item."""
    size = share.rows(len(items))
    part = items[share.rank * size :][:size]
    return np.concatenate([part, np.zeros(size - len(part), np.int64)])


class StepRows(NamedTuple):
    """A rank's rows of one step: their ``columns``, their ``numbers`` (n,) in the whole set, and ``total`` ().

    ``total`` is the weight of the global batch divided by the number of ranks.
    """

    columns: RowColumns
    numbers: Tensor
    total: Tensor


@dataclass(frozen=True)
class SharedCandidates:
    """Puts the catalogue after the positives, for a softmax over it.

    A rank's batch of I items has ceil(batch_size / R) + ceil(I / R) rows::

        positives, padding up to ceil(batch_size / R) | extra candidates, padding

    Extra candidates have item features only, label and weight 0.

    Args:
        schema: the columns of the batch.
        config: see :class:`LoaderConfig`.
        items: row i holds the features of item i.
        catalogue: (I,) ids of all items.
        share: this rank's share of each global batch.
    """

    schema: BatchSchema
    config: LoaderConfig
    items: DeviceTable
    catalogue: Int64
    share: Share

    @property
    def ids(self) -> tuple[str, ...]:
        """Further columns that it reads."""
        return (self.schema.candidate or ITEM,)

    def batch(self, rows: StepRows, epoch: int, step: int) -> TowerBatch:
        """Builds the batch of a rank's rows, of the same size on every rank."""
        schema = self.schema
        (key,) = self.ids
        queries = self.share.rows(self.config.batch_size)
        count = len(rows.numbers)
        positives = known_items(
            schema,
            self.items.num_rows,
            rows.columns.bags[key].values.numpy(),
            rows.numbers.numpy(),
            key,
        )
        del epoch, step
        drawn = _part_of(self.catalogue, self.share)
        size = queries + len(drawn)
        # Items count from 1: 0 fills a rank's share up.
        extra = drawn[drawn > 0]
        ids = np.concatenate([positives, extra])
        # Positives from 0 on, extra candidates behind the padded queries.
        places = torch.cat(
            [torch.arange(count), queries + torch.arange(len(extra), dtype=torch.int64)]
        )
        features = placed(self.items.columns(torch.from_numpy(ids)), places, size)
        numbers = padded(rows.numbers, size).clone()
        # Those of the candidates are below 0, by their places among those of all ranks.
        first = self.share.rank * len(drawn)
        numbers[queries:] = -1 - first - torch.arange(len(drawn))
        answers = Answers.of(schema, self.config, rows.columns.numbers, count, size)
        mine = placed(rows.columns, torch.arange(count), size)
        return assemble(
            schema,
            RowColumns(mine.bags | features.bags, mine.numbers | features.numbers),
            answers,
            total_weight=rows.total,
            numbers=RowNumbers(numbers, numbers),
            items=torch.zeros(size, dtype=torch.int64).index_copy_(
                0, places, torch.from_numpy(ids)
            ),
            queries=queries,
        )


@dataclass(frozen=True)
class SessionCandidates:
    """Puts a step's candidates beside sessions, of which each item but the first is a target.

    TorchRec wants them as bags of the batch's rows, here of equal lengths: ``batch_size`` x N uniform draws for N
    ``negatives``, or the whole catalogue for 0; 0 fills a rank's share up.

    Args:
        schema: columns of the batch, of the features ``session`` and ``item_id``.
        config: see :class:`LoaderConfig`.
        num_items: number of items in the catalogue, ids 1 to num_items.
        share: this rank's share of each global batch.
    """

    schema: BatchSchema
    config: LoaderConfig
    num_items: int
    share: Share

    ids = ()

    def batch(self, rows: StepRows, epoch: int, step: int) -> TowerBatch:
        """Builds the batch of a rank's rows, of the same size on every rank."""
        device = rows.numbers.device
        size = self.share.rows(self.config.batch_size)
        candidates = _part_of(self._drawn(epoch, step), self.share)
        ends = torch.arange(size + 1, device=device) * len(candidates) // size
        ids = torch.from_numpy(candidates).to(device)
        bags = rows.columns.bags | {ITEM: Jagged(ids, ends.diff().int())}
        is_row = torch.arange(size, device=device) < len(rows.numbers)
        numbers = padded(rows.numbers, size)
        return assemble(
            self.schema,
            RowColumns(bags, {}),
            Answers(torch.ones(size, device=device), is_row.float()),
            total_weight=rows.total,
            numbers=RowNumbers(numbers, numbers),
        )

    def _drawn(self, epoch: int, step: int) -> Int64:
        """Returns the candidates of all ranks, of which each takes its part."""
        if not self.config.negatives:
            return np.arange(1, self.num_items + 1)
        generator = np.random.default_rng([self.config.seed, epoch, step, 1])
        count = self.config.batch_size * self.config.negatives
        return generator.integers(1, self.num_items + 1, size=count)
