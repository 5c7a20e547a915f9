"""Pairing: the rows of a step -> this rank's TowerBatch, with candidates if the loader draws some.

SharedCandidates: a step's positives, and after them extra candidates that all queries of the batch share.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.columns import Array, Chunk, Column, Int64
from torchrec_ext.data.loader.batch_builder import BatchBuilder, known_items, padded
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.data.loader.epochs import Share
from torchrec_ext.data.negatives.mixed import CatalogueCandidates, MixedNegatives
from torchrec_ext.data.negatives.samplers import Negatives, RejectionNegatives
from torchrec_ext.schema import BatchSchema, DataError, Jagged


class Candidates(NamedTuple):
    """The item ids of each row's candidates ``ids`` (B, 1 + N), the positive first, and their ``log_q`` (B, 1 + N)."""

    ids: Int64
    log_q: Array


class StepRows(NamedTuple):
    """A rank's rows of one step: ``chunk`` of B rows, and their ``numbers`` (B,) in the whole set.

    ``weights`` (B,) holds the rows' weights, or is None; ``total`` is the weight of the global batch; ``candidates``
    are those of :meth:`Pairing.draw_ahead`.
    """

    chunk: Chunk
    numbers: Int64
    weights: Array | None
    total: float
    candidates: Candidates | None = None


class Pairing(Protocol):
    """Makes a batch of a rank's rows of one step."""

    @property
    def ids(self) -> tuple[str, ...]:
        """Names of the required columns of the rows, in addition to the schema's."""

    def draw_ahead(self, rows: Chunk, numbers: Int64, epoch: int) -> Candidates | None:
        """Draws the candidates of several steps at once; None if each step has to draw its own."""

    def batch(self, rows: StepRows, epoch: int, step: int) -> TowerBatch:
        """Builds the batch of ``rows``, padded to the same size on every rank."""


def identified(
    batch: TowerBatch,
    schema: BatchSchema,
    rows: StepRows,
    width: int = 1,
    candidates: Int64 | None = None,
) -> TowerBatch:
    """Adds the user and the item of each row to ``batch``, if ``schema`` names their columns.

    Args:
        batch: ``width`` rows for each of ``rows``, then padding.
        schema: the columns of the batch.
        rows: rows of one step.
        width: number of rows in the batch for each of ``rows``.
        candidates: item ids in the order of the batch; the items of ``rows`` by default.
    """
    if not schema.identities:
        return batch
    columns: dict[str, Tensor] = {}
    for name in schema.identities:
        if name == schema.candidate and candidates is not None:
            ids = candidates.reshape(-1)
        elif name in rows.chunk:
            ids = rows.chunk[name].values.repeat(width)
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


class OwnCandidates:
    """Each positive is followed by its own N negatives; N may be 0.

    Args:
        schema: the columns of the batch.
        config: see :class:`LoaderConfig`.
        items: row i holds the features of item i.
        negatives: sampler of the negatives; None for N = 0.
        share: this rank's share of each global batch.
    """

    def __init__(
        self,
        schema: BatchSchema,
        config: LoaderConfig,
        items: Chunk | None,
        negatives: Negatives | None,
        share: Share,
    ) -> None:
        self.ids: tuple[str, ...] = ()
        if items is not None:
            self.ids = ("item_id",)
        if config.negatives:
            # Negatives are drawn for a user, to avoid the user's own items.
            self.ids = ("user_id", "item_id")
        self._builder = BatchBuilder(schema, items)
        self._schema = schema
        self._config = config
        self._negatives = negatives
        self._share = share

    def draw_ahead(self, rows: Chunk, numbers: Int64, epoch: int) -> Candidates | None:
        """See :meth:`Pairing.draw_ahead`: a draw depends on the row's number and not on the step."""
        if not isinstance(self._negatives, RejectionNegatives):
            return None
        try:
            return self._candidates(rows, numbers, epoch)
        except DataError:
            # A user of a later step has no negative; that step says so when its turn
            # comes.
            return None

    def batch(self, rows: StepRows, epoch: int, step: int) -> TowerBatch:
        """See :meth:`Pairing.batch`; a draw depends on the row's number and not on the step."""
        del step
        width = 1 + self._config.negatives
        labels = np.zeros((len(rows.numbers), width), dtype=np.float32)
        labels[:, 0] = (
            rows.chunk[self._config.label].values if self._config.label else 1.0
        )
        # The labels of further tasks, 0 for negatives as well.
        targets = np.zeros((*labels.shape, len(self._schema.tasks)), dtype=np.float32)
        for index, name in enumerate(self._schema.tasks):
            targets[:, 0, index] = rows.chunk[name].values
        candidates = rows.candidates or self._candidates(
            rows.chunk, rows.numbers, epoch
        )
        ids = log_q = None
        if candidates is not None:
            ids, log_q = candidates
        batch = self._builder.pairs(
            rows.chunk,
            ids,
            labels=labels,
            weights=None if rows.weights is None else rows.weights.repeat(width),
            log_q=log_q,
            targets=targets,
            total_weight=rows.total * width / self._share.world_size,
            row_numbers=rows.numbers,
            padded_rows=self._share.rows(self._config.batch_size),
        )
        return identified(batch, self._schema, rows, width, ids)

    def _candidates(self, rows: Chunk, numbers: Int64, epoch: int) -> Candidates | None:
        if self._negatives is None or not self._config.negatives:
            return None
        users = rows["user_id"].values
        positives = rows["item_id"].values
        ids, log_q = self._negatives.draw(users, numbers, epoch, self._config.negatives)
        # Samplers know the items from 1 on; an out-of-vocabulary positive (0) takes the
        # log q of item 1.
        valid_positives = np.maximum(positives, 1)
        positive_log_q = self._negatives.log_q(users, valid_positives)
        return Candidates(
            np.concatenate([positives[:, None], ids], axis=1),
            np.concatenate([positive_log_q[:, None], log_q], axis=1),
        )


# Columns below one another, each in so many rows; None is empty.
Sections = list[tuple[Column | None, int]]


class SharedCandidates:
    """See :class:`Pairing`.

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

    def draw_ahead(self, rows: Chunk, numbers: Int64, epoch: int) -> Candidates | None:
        """See :meth:`Pairing.draw_ahead`; shared candidates depend on the step."""
        del rows, numbers, epoch
        return None

    def batch(self, rows: StepRows, epoch: int, step: int) -> TowerBatch:
        """See :meth:`Pairing.batch`."""
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
        batch = identified(batch, self._schema, rows, candidates=items)
        return dataclasses.replace(batch, queries=queries)


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
