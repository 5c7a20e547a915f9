"""What the measurements before training run on: a copy of the model with smaller tables, and a batch whose ids fit into them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.batch import SharedRows, TowerBatch
from torchrec_ext.distributed.tables import collections, table_configs

BYTES = 64 * 2**20  # of all tables of a sample together: twice a large cache, and quick to fill


@dataclass(frozen=True)
class Sample:
    """What takes about the time of the model, and little memory.

    Args:
        model: unsharded, its tables on the meta device.
        batch: of this rank.
    """

    model: nn.Module
    batch: TowerBatch

    @classmethod
    def of(cls, model: nn.Module, batch: TowerBatch) -> Sample:
        """The sample of an unsharded ``model``, which stays as it is."""
        rows = _rows_of(model)
        made = copy.deepcopy(model)
        for path, collection in list(collections(model)):
            parent, _, name = path.rpartition(".")
            setattr(made.get_submodule(parent), name, _smaller(collection, rows))
        for module in made.modules():  # what towers say of their tables, too
            for name, value in vars(module).items():
                if isinstance(value, list) and value and all(isinstance(one, BaseEmbeddingConfig) for one in value):
                    setattr(module, name, [_fewer(table, rows) for table in value])
        return cls(made, _below_in(batch, rows))


def _rows_of(model: nn.Module) -> int:
    """How many rows of each table are kept, at most, so that all take :data:`BYTES` or less."""
    tables = [table for _, collection in collections(model) for table in table_configs(collection)]
    low, high = 1, max((table.num_embeddings for table in tables), default=1)
    while low < high:
        middle = (low + high + 1) // 2
        size = sum(min(table.num_embeddings, middle) * table.embedding_dim * 4 for table in tables)
        low, high = (middle, high) if size <= BYTES else (low, middle - 1)
    return low


def _fewer(table: BaseEmbeddingConfig, rows: int) -> BaseEmbeddingConfig:
    return dataclasses.replace(table, num_embeddings=min(table.num_embeddings, rows))


def _smaller(collection: nn.Module, rows: int) -> nn.Module:
    tables: list[Any] = [_fewer(table, rows) for table in table_configs(collection)]
    device = torch.device("meta")
    if isinstance(collection, EmbeddingBagCollection):
        bags: nn.Module = EmbeddingBagCollection(tables=tables, is_weighted=collection.is_weighted(), device=device)
        return bags
    assert isinstance(collection, EmbeddingCollection)
    lists: nn.Module = EmbeddingCollection(tables=tables, need_indices=collection.need_indices(), device=device)
    return lists


def _below_in(batch: TowerBatch, rows: int) -> TowerBatch:
    """``batch`` with every id below ``rows``; those that were stay as they are."""
    shared = batch.shared
    return dataclasses.replace(
        batch,
        sparse=_below(batch.sparse, rows),
        shared=None if shared is None else SharedRows(_below(shared.sparse, rows), shared.dense, shared.index),
        joint=None if batch.joint is None else _below(batch.joint, rows),
        weighted=None if batch.weighted is None else _below(batch.weighted, rows),
    )


def _below(bags: KeyedJaggedTensor, rows: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=bags.keys(),
        values=bags.values() % rows,
        lengths=bags.lengths(),
        weights=bags.weights_or_none(),
        stride=bags.stride(),
    )


def bags_for(features: Sequence[str], batch: TowerBatch) -> KeyedJaggedTensor | None:
    """The KeyedJaggedTensor of ``batch`` that has these ``features``; None where none has all of them."""
    parts = [batch.sparse, batch.shared.sparse if batch.shared is not None else None, batch.joint, batch.weighted]
    return next((part for part in parts if part is not None and set(features) <= set(part.keys())), None)


def resized(batch: TowerBatch, features: Sequence[str], rows: int) -> KeyedJaggedTensor:
    """``rows`` rows of the ``features`` alone: those of ``batch``, again from the first where there are too few."""
    values, lengths = [], []
    for name in features:
        own = batch.bags(name)
        place = torch.arange(rows) % max(own.lengths().numel(), 1)
        ends = torch.cat([own.lengths().new_zeros(1), own.lengths().cumsum(0)])
        picked = own.lengths()[place]
        starts = ends[:-1][place].repeat_interleave(picked)
        within = torch.arange(int(picked.sum())) - (picked.cumsum(0) - picked).repeat_interleave(picked)
        values.append(own.values()[starts + within])
        lengths.append(picked)
    return KeyedJaggedTensor(keys=list(features), values=torch.cat(values), lengths=torch.cat(lengths), stride=rows)


def resized_dense(dense: Tensor, columns: slice, rows: int) -> Tensor:
    """``rows`` rows of some columns likewise."""
    return dense[:, columns][torch.arange(rows) % max(len(dense), 1)]


def values_of(embedded: Any) -> Tensor:
    """All that a collection, sharded or not, returns: of an EmbeddingBagCollection or an EmbeddingCollection."""
    waited = embedded.wait() if hasattr(embedded, "wait") else embedded
    if isinstance(waited, dict):
        return torch.cat([part.values().flatten() for part in waited.values()])
    return waited.values()  # type: ignore[no-any-return]


def back(outputs: list[Tensor]) -> None:
    """Runs the backward of them all, from gradients of one."""
    for output in outputs:
        output.backward(torch.ones_like(output))  # type: ignore[no-untyped-call]
