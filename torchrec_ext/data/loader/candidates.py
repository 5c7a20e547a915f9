"""Pairing: the rows of a step -> this rank's TowerBatch, with candidates where the loader draws some."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.batches import BatchBuilder
from torchrec_ext.data.columns import Array, Chunk, Int64
from torchrec_ext.data.loader_config import LoaderConfig
from torchrec_ext.data.negatives import Negatives
from torchrec_ext.data.share import Share
from torchrec_ext.schema import BatchSchema


class StepRows(NamedTuple):
    """A rank's rows of one step: ``chunk`` of B rows, their ``numbers`` (B,) in the whole set and their ``weights`` (B,) or None.

    ``total`` is the weight of the global batch.
    """

    chunk: Chunk
    numbers: Int64
    weights: Array | None
    total: float


class Pairing(Protocol):
    """What a stream of rows asks for its batches."""

    @property
    def ids(self) -> tuple[str, ...]:
        """Columns that the rows must have beside the schema's."""

    def batch(self, rows: StepRows, epoch: int, step: int) -> TowerBatch:
        """The batch of ``rows``, padded to the same size on every rank."""


def identified(
    batch: TowerBatch, schema: BatchSchema, rows: StepRows, width: int = 1, candidates: Int64 | None = None
) -> TowerBatch:
    """``batch`` with the user and the item of each row, where ``schema`` names their columns.

    Args:
        batch: of ``rows``, ``width`` of the batch for each, and padding.
        schema: its columns.
        rows: of a step.
        width: rows of the batch for each of ``rows``.
        candidates: item ids in the order of the batch; those of ``rows`` where not given.
    """
    found: dict[str, Int64] = {name: rows.chunk[name].values.repeat(width) for name in schema.identities if name in rows.chunk}
    if candidates is not None:
        found["item_id"] = candidates.reshape(-1)
    users, items = (
        _padded_ids(schema, name, found[name], len(batch)) if name in found else None for name in (schema.query, schema.candidate)
    )
    return dataclasses.replace(batch, users=users, items=items, queries=len(batch) if schema.candidate else None)


def _padded_ids(schema: BatchSchema, name: str, ids: Int64, size: int) -> Tensor:
    """(size,) int64, zeros after the ids; one outside of its table, where that is allowed, is the out-of-vocabulary one."""
    padded = np.zeros(size, np.int64)
    padded[: len(ids)] = ids
    feature = schema.feature(name)
    if feature is not None:
        padded[(padded < 0) | (padded >= feature.num_embeddings)] = feature.oov_id
    return torch.from_numpy(padded)


class OwnCandidates:
    """Each positive is followed by its own N negatives; N may be 0.

    Args:
        schema: the columns of the batch.
        config: see :class:`LoaderConfig`.
        items: row i holds the features of item i.
        negatives: draws them; None for N = 0.
        share: of this rank.
    """

    def __init__(
        self, schema: BatchSchema, config: LoaderConfig, items: Chunk | None, negatives: Negatives | None, share: Share
    ) -> None:
        self.ids = ("user_id", "item_id") if config.negatives else ("item_id",)
        self._builder, self._tasks, self._schema = BatchBuilder(schema, items), schema.tasks, schema
        self._config, self._negatives, self._share = config, negatives, share

    def batch(self, rows: StepRows, epoch: int, step: int) -> TowerBatch:
        """See :meth:`Pairing.batch`; a draw depends on the row's number and not on the step."""
        del step
        width = 1 + self._config.negatives
        labels = np.zeros((len(rows.numbers), width), dtype=np.float32)
        labels[:, 0] = rows.chunk[self._config.label].values if self._config.label else 1.0
        candidates, log_q = self._candidates(rows, epoch)
        batch = self._builder.pairs(
            rows.chunk,
            candidates,
            labels=labels,
            weights=None if rows.weights is None else rows.weights.repeat(width),
            log_q=log_q,
            targets=self._targets(rows, width),
            total_weight=rows.total * width / self._share.world_size,
            row_numbers=rows.numbers,
            padded_rows=self._share.rows(self._config.batch_size),
        )
        return identified(batch, self._schema, rows, width, candidates)

    def _targets(self, rows: StepRows, width: int) -> Array | None:
        """(B, 1 + N, tasks) the labels of further tasks, 0 for negatives."""
        if not self._tasks:
            return None
        targets = np.zeros((len(rows.numbers), width, len(self._tasks)), dtype=np.float32)
        for at, name in enumerate(self._tasks):
            targets[:, 0, at] = rows.chunk[name].values
        return targets

    def _candidates(self, rows: StepRows, epoch: int) -> tuple[Int64 | None, Array | None]:
        """(B, 1 + N) item ids and their log q, the positive first; (None, None) without negatives."""
        if self._negatives is None or not self._config.negatives:
            return None, None
        users, positives = rows.chunk["user_id"].values, rows.chunk["item_id"].values
        ids, log_q = self._negatives.draw(users, rows.numbers, epoch, self._config.negatives)
        known = np.maximum(positives, 1)
        return (
            np.concatenate([positives[:, None], ids], axis=1),
            np.concatenate([self._negatives.log_q(users, known)[:, None], log_q], axis=1),
        )
