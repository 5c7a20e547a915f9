"""SharedCandidates: a step's positives, and after them extra candidates that all queries of the batch share.

RowsWithCandidates: rows in memory, shuffled as a whole, each step with such candidates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.columns import Array, Chunk, Column, Int64
from torchrec_ext.data.loader.batch_builder import known_items, padded
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.data.loader.epochs import Share, order_of
from torchrec_ext.data.negatives.mixed import CatalogueCandidates, MixedNegatives
from torchrec_ext.schema import BatchSchema, Jagged


class StepRows(NamedTuple):
    """A rank's rows of one step: ``chunk`` of B rows, and their ``numbers`` (B,) in the whole set.

    ``weights`` (B,) holds the rows' weights, or is None; ``total`` is the weight of the global batch.
    """

    chunk: Chunk
    numbers: Int64
    weights: Array | None
    total: float


def identified(
    batch: TowerBatch, schema: BatchSchema, rows: StepRows, candidates: Int64
) -> TowerBatch:
    """Adds the user and the item of each row to ``batch``, if ``schema`` names their columns.

    Args:
        batch: a row for each of ``rows``, then those of candidates and padding.
        schema: the columns of the batch.
        rows: rows of one step.
        candidates: item ids in the order of the batch.
    """
    if not schema.identities:
        return batch
    columns: dict[str, Tensor] = {}
    for name in schema.identities:
        if name == schema.candidate:
            ids = candidates
        elif name in rows.chunk:
            ids = rows.chunk[name].values
        else:
            continue
        feature = schema.feature(name)
        # As in the batch's bags: an id outside its table is the unknown one, and
        # dynamic ids are any numbers.
        if feature is not None and not feature.dynamic:
            ids = np.where(
                (ids < 0) | (ids >= feature.num_embeddings), feature.oov_id, ids
            )
        columns[name] = padded(torch.from_numpy(ids), len(batch))
    return dataclasses.replace(
        batch,
        users=columns.get(schema.query or ""),
        items=columns.get(schema.candidate or ""),
        queries=len(batch) if schema.candidate else None,
    )


# Columns below one another, each in so many rows; None is empty.
Sections = list[tuple[Column | None, int]]


class SharedCandidates:
    """Makes a batch of a rank's rows of one step, and of candidates that all queries share.

    A rank's batch has ceil(batch_size / R) + ceil(shared_negatives / R) rows, or as many as all items need::

        positives, padding up to ceil(batch_size / R) | extra candidates, padding

    Extra candidates have item features only, label and weight 0, and the log q of the mixture, as the positives have:
    ``in_batch_negatives(..., queries=ceil(batch_size / R))``. If the user's features are shared, they are stored once
    for each positive. The extra candidates then point at the first user, but are no queries.

    Args:
        schema: the columns of the batch.
        config: see :class:`LoaderConfig`.
        items: row i holds the features of item i.
        candidates: sampler of the extra candidates, or all items.
        share: this rank's share of each global batch.
    """

    def __init__(
        self,
        schema: BatchSchema,
        config: LoaderConfig,
        items: Chunk,
        candidates: MixedNegatives | CatalogueCandidates,
        share: Share,
    ) -> None:
        self.ids = (schema.candidate or "item_id",)
        self._schema = schema
        self._config = config
        self._items = items
        self._candidates = candidates
        self._share = share
        # Features of items in the shared rows: each row of the batch then needs a
        # shared row of its own.
        self._own_shared_rows = any(name in schema.shared for name in items)

    def batch(self, rows: StepRows, epoch: int, step: int) -> TowerBatch:
        """Builds the batch of ``rows``, padded to the same size on every rank."""
        chunk = rows.chunk
        queries = self._share.rows(self._config.batch_size)
        (key,) = self.ids
        positives = known_items(
            self._schema, self._items.num_rows, chunk[key].values, rows.numbers, key
        )
        padded_extra = self._candidates.draw(
            epoch, step, rank=self._share.rank, world_size=self._share.world_size
        )
        size = queries + len(padded_extra)
        # Items count from 1: 0 fills a rank's share up.
        extra = padded_extra[padded_extra > 0]
        columns: dict[str, Sections] = {}
        for name in [*self._schema.keys, *self._schema.dense]:
            if name in self._items:
                column = self._items[name]
                columns[name] = [
                    (column.take(positives), queries),
                    (column.take(extra), len(padded_extra)),
                ]
            elif name in chunk:
                columns[name] = [(chunk[name], queries)]
                # Extra candidates have no user.
                if self._own_shared_rows or name not in self._schema.shared:
                    columns[name].append((None, len(padded_extra)))
        ids = np.concatenate([positives, extra])
        # The rows of the ids in the padded batch: positives from 0 on, extra candidates
        # behind the padded queries.
        indices = np.concatenate(
            [np.arange(len(positives)), queries + np.arange(len(extra))]
        )
        items = np.zeros(size, np.int64)
        items[indices] = ids
        numbers = np.zeros(size, np.int64)
        numbers[: len(positives)] = rows.numbers
        # Those of the candidates are below 0, by their places among those of all ranks.
        first = self._share.rank * len(padded_extra)
        numbers[queries:] = -1 - first - np.arange(len(padded_extra))
        labels = weights = np.ones(len(positives))
        if self._config.label:
            labels = chunk[self._config.label].values
        if rows.weights is not None:
            weights = rows.weights
        if self._own_shared_rows:
            shared_size = size
            index = torch.arange(size)
        else:
            # Extra candidates need some shared row and are no queries, so the first one
            # does for all.
            shared_size = queries
            index = torch.from_numpy(np.arange(size) * (np.arange(size) < queries))
        batch = self._schema.assemble(
            {
                name: _jagged(sections)
                for name, sections in columns.items()
                if name in self._schema.keys
            },
            {
                name: _vector(sections)
                for name, sections in columns.items()
                if name in self._schema.dense
            },
            labels=_spread(labels, size),
            weights=_spread(weights, size),
            log_q=_spread(self._candidates.log_q(ids), size, indices),
            total_weight=rows.total / self._share.world_size,
            rows=torch.from_numpy(numbers),
            index=index,
            shared_rows=torch.from_numpy(numbers[:shared_size]),
        )
        batch = identified(batch, self._schema, rows, items)
        return dataclasses.replace(batch, queries=queries)


class RowsWithCandidates:
    """Builds batches from rows in memory, shuffled as a whole, with shared candidates; see :class:`Batches`.

    Args:
        chunk: all rows, the same on every rank.
        schema: the columns that the model reads.
        config: see :class:`LoaderConfig`.
        candidates: maker of the batches.
        share: this rank's share of each global batch.
    """

    ahead = True

    def __init__(
        self,
        chunk: Chunk,
        schema: BatchSchema,
        config: LoaderConfig,
        candidates: SharedCandidates,
        share: Share,
    ) -> None:
        named = (config.label, config.weight, *schema.tasks, schema.query)
        config.check_columns(filter(None, named), chunk)
        self.num_rows = chunk.num_rows
        used = {*schema.keys, *schema.dense, *candidates.ids}
        used |= {*schema.identities, *filter(None, named)}
        self._rows = chunk.select([name for name in chunk if name in used])
        self._weights = chunk[config.weight].values if config.weight else None
        self._config = config
        self._candidates = candidates
        self._share = share

    def fingerprint(self) -> dict[str, Any]:
        """See :meth:`Batches.fingerprint`."""
        return {"rows": self.num_rows}

    def batches(self, epoch: int, start: int) -> Iterator[TowerBatch]:
        """See :meth:`Batches.batches`."""
        order = order_of(self._config, self.num_rows, epoch)
        size = self._config.batch_size
        for step in range(start, self._config.num_steps(self.num_rows)):
            everyone = order[step * size : (step + 1) * size]
            mine = everyone[self._share.part(len(everyone))]
            weights = None
            total = float(len(everyone))
            if self._weights is not None:
                weights = self._weights[mine]
                # Of all ranks' rows: every rank divides its loss by the weight of the
                # global batch.
                total = float(self._weights[everyone].sum(dtype=np.float64))
            rows = StepRows(self._rows.take(mine), mine, weights, total)
            yield self._candidates.batch(rows, epoch, step)


def _jagged(sections: Sections) -> Jagged:
    values = []
    lengths = []
    for column, size in sections:
        section = np.zeros(size, np.int32)
        if column is not None:
            section[: len(column)] = column.lengths
            values.append(column.values)
        lengths.append(section)
    return Jagged(
        torch.from_numpy(np.concatenate(values)),
        torch.from_numpy(np.concatenate(lengths)),
    )


def _vector(sections: Sections) -> Tensor:
    vectors = []
    for column, size in sections:
        vectors.append(
            torch.zeros(size) if column is None else _spread(column.values, size)
        )
    return torch.cat(vectors)


def _spread(values: Array, size: int, indices: Int64 | slice | None = None) -> Tensor:
    """Returns (size,) float32: the values at ``indices``, by default from 0 on, and zeros elsewhere."""
    vector = torch.zeros(size)
    vector.numpy()[slice(len(values)) if indices is None else indices] = values
    return vector
