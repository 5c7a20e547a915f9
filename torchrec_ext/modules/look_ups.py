"""LookUps: the tables of a model, looked up once a step for all towers that read them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torchrec_ext.batch import TowerBatch
from torchrec_ext.modules.tower import keys_of
from torchrec_ext.schema.features import merge_tables
from torchrec_ext.schema.validation import listed


class LookUps(nn.Module):
    """Holds the tables of a model and looks them up, for one gradient and one update per row.

    Tables whose bags are in the same rows of the batch form one collection, with one input dist and one output dist,
    whichever towers read them. A table is read in the batch's rows or in its shared rows: looking up one sharded
    collection twice would update its rows twice.

    A table that one tower reads as a sequence and another pools is looked up id by id, and pooled by the tower.

    Args:
        towers: modules with ``tables``, by name; configs of one name are one table.
        shared: features of shared towers.
        device: device of the tables; ``meta`` declares them without memory.

    Raises:
        ValueError: tables of one name that differ, or that a shared tower and another read.
    """

    def __init__(
        self, towers: Mapping[str, Any], shared: Collection[str], device: torch.device
    ) -> None:
        super().__init__()
        tables = merge_tables(
            chain.from_iterable(tower.tables for tower in towers.values())
        )
        self._shared = frozenset(shared)
        self._tables: dict[str, list[BaseEmbeddingConfig]] = {}
        self._rows: dict[str, str] = {}
        self._readers: dict[str, set[str]] = {}
        for table in tables:
            rows = self._rows_of(table)
            name = rows
            # A collection of sequences has one width.
            if isinstance(table, EmbeddingConfig):
                name = f"{rows}_sequences_{table.embedding_dim}"
            self._rows[name] = rows
            self._tables.setdefault(name, []).append(table)
            readers = self._readers.setdefault(name, set())
            for tower_name, tower in towers.items():
                if any(each.name == table.name for each in tower.tables):
                    readers.add(tower_name)
        self.collections = nn.ModuleDict(
            {
                name: _collection(members, device)
                for name, members in self._tables.items()
            }
        )
        # Computed once: at a small network's step, the Python work of each look-up is
        # measurable.
        self._names = {name: _names(members) for name, members in self._tables.items()}

    def _rows_of(self, table: BaseEmbeddingConfig) -> str:
        """Returns the rows of a batch with the table's bags: ``rows`` or ``shared``."""
        kinds = {name in self._shared for name in table.feature_names}
        if len(kinds) > 1:
            raise ValueError(
                f"table '{table.name}': a shared tower and another read it, {listed(table.feature_names)}; share no "
                "tower, or give each a table of its own name"
            )
        return "shared" if kinds == {True} else "rows"

    def forward(
        self, batch: TowerBatch, towers: Collection[str]
    ) -> dict[str, Tensor | JaggedTensor]:
        """Returns the embeddings of each feature of ``towers`` by ``feature@table``: Q bags of a shared tower, or B."""
        names = [
            name
            for name, readers in self._readers.items()
            if not readers.isdisjoint(towers)
        ]
        # All look-ups are under way before the first is waited for.
        embedded = {
            name: self.collections[name](_bags_of(batch, self._rows[name]))
            for name in names
        }
        vectors: dict[str, Tensor | JaggedTensor] = {}
        for name in names:
            values = embedded[name]
            if not isinstance(self._tables[name][0], EmbeddingConfig):
                values = values.to_dict()
            # A sharded collection groups its output by sharding type, so entries are
            # picked by name.
            vectors |= {key: values[other] for key, other in self._names[name].items()}
        return vectors


def _collection(
    tables: list[Any], device: torch.device
) -> EmbeddingBagCollection | EmbeddingCollection:
    if isinstance(tables[0], EmbeddingConfig):
        return EmbeddingCollection(tables=tables, device=device)
    return EmbeddingBagCollection(tables=tables, device=device)


def _bags_of(batch: TowerBatch, rows: str) -> KeyedJaggedTensor:
    """Returns an attribute of the batch, in a form that TorchRec's pipeline can follow."""
    if rows == "shared":
        return batch.shared.sparse  # type: ignore[union-attr]
    return batch.sparse


def _names(tables: Sequence[BaseEmbeddingConfig]) -> dict[str, str]:
    """Returns the name in a collection's output of each ``feature@table``.

    TorchRec appends the table's name only to features of several tables.
    """
    names = chain.from_iterable(get_embedding_names_by_table(list(tables)))
    return dict(zip(keys_of(tables), names, strict=True))
