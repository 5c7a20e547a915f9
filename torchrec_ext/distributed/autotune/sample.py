"""Sample: a copy of the model with smaller tables and a batch whose ids fit them, for trials before training."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.tables import collections, table_configs, tables_of

# Size of all tables of a sample together: twice a large cache, and quick to fill.
BYTES = 64 * 2**20


@dataclass(frozen=True)
class Sample:
    """A small model and batch that take about the time of the large ones, and little memory.

    Args:
        model: unsharded model with its tables on the meta device.
        batch: batch of this rank.
        more: further batches of this rank, of equal or other rows, so that a trial does not read the same rows, which
            are in a cache by then, in every step.
    """

    model: nn.Module
    batch: TowerBatch
    more: tuple[TowerBatch, ...] = ()

    @property
    def batches(self) -> list[TowerBatch]:
        """All batches."""
        return [self.batch, *self.more]

    @classmethod
    def of(
        cls, model: nn.Module, batch: TowerBatch, more: Sequence[TowerBatch] = ()
    ) -> Sample:
        """Makes the sample of an unsharded ``model``, which is not changed."""
        # How many rows of each table may be kept so that all together take BYTES or
        # less, by bisection: large tables are cut to one number of rows, and small ones
        # stay.
        tables = tables_of(model)
        rows = 1
        high = max((table.num_embeddings for table in tables), default=1)
        while rows < high:
            middle = (rows + high + 1) // 2
            size = sum(
                min(table.num_embeddings, middle) * table.embedding_dim * 4
                for table in tables
            )
            if size <= BYTES:
                rows = middle
            else:
                high = middle - 1
        small = copy.deepcopy(model)
        for path, collection in list(collections(model)):
            parent, _, name = path.rpartition(".")
            setattr(small.get_submodule(parent), name, _smaller(collection, rows))
        # Towers keep lists of their tables, which must agree with the collections.
        for module in small.modules():
            for name, value in vars(module).items():
                if (
                    isinstance(value, list)
                    and value
                    and all(isinstance(item, BaseEmbeddingConfig) for item in value)
                ):
                    setattr(module, name, [_fewer(table, rows) for table in value])
        first, *others = [_wrap_batch(each, rows) for each in (batch, *more)]
        return cls(small, first, tuple(others))


def _fewer(table: BaseEmbeddingConfig, rows: int) -> BaseEmbeddingConfig:
    return dataclasses.replace(table, num_embeddings=min(table.num_embeddings, rows))


def _smaller(collection: nn.Module, rows: int) -> nn.Module:
    tables: list[Any] = [_fewer(table, rows) for table in table_configs(collection)]
    # Sharding allocates each rank's rows alone.
    device = torch.device("meta")
    if isinstance(collection, EmbeddingBagCollection):
        bags: nn.Module = EmbeddingBagCollection(
            tables=tables, is_weighted=collection.is_weighted(), device=device
        )
        return bags
    assert isinstance(collection, EmbeddingCollection)
    lists: nn.Module = EmbeddingCollection(
        tables=tables, need_indices=collection.need_indices(), device=device
    )
    return lists


def _wrap_batch(batch: TowerBatch, rows: int) -> TowerBatch:
    """Returns ``batch`` with ids modulo ``rows``; smaller ids stay as they are."""
    changes: dict[str, Any] = {"sparse": _wrap(batch.sparse, rows)}
    if batch.shared is not None:
        changes["shared"] = dataclasses.replace(
            batch.shared, sparse=_wrap(batch.shared.sparse, rows)
        )
    if batch.joint is not None:
        changes["joint"] = _wrap(batch.joint, rows)
    if batch.weighted is not None:
        changes["weighted"] = _wrap(batch.weighted, rows)
    return dataclasses.replace(batch, **changes)


def _wrap(bags: KeyedJaggedTensor, rows: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=bags.keys(),
        values=bags.values() % rows,
        lengths=bags.lengths(),
        weights=bags.weights_or_none(),
        stride=bags.stride(),
    )
