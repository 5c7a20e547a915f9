"""SharedTables: the tables that several towers of a model read, each one table with one set of weights, and weighted ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.batch import TowerBatch
from torchrec_ext.modules.tower import Tower, by_table
from torchrec_ext.schema.features import joints, merged


class SharedTables(nn.Module):
    """Looks up the tables that several towers read, each once a step, so that a row gets one gradient and one update.

    Towers with the same rows simply have their features in one table. A shared tower has Q rows where another has B: such a table
    reads ``batch.joint``, whose keys hold the Q bags of the one and the B bags of the other, and its output is split at Q.
    TorchRec's own way, a KeyedJaggedTensor with a stride for each key, pads to the largest and crashes for data_parallel (torchrec
    #1916, #2268); looking up one sharded collection twice would update its rows twice.

    A table that pools by weights is looked up here too, from ``batch.weighted``, whether one tower reads it or several.

    Args:
        tables: EmbeddingBagConfigs, each once with the features of all towers.
        shared: the features of shared towers.
        readers: names of the towers that read them.
        weights: the features whose ids have weights.
        device: of the tables.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        shared: Collection[str],
        readers: Collection[str],
        weights: Collection[str],
        device: torch.device,
    ) -> None:
        super().__init__()
        self.readers = frozenset(readers)
        self._shared = frozenset(shared)
        found = joints(tables, shared, weights)
        self._pairs = {**found.plain, **found.weighted}
        self._tables: dict[str, list[EmbeddingBagConfig]] = {}
        for table in tables:
            if table.name in self._pairs:
                part = "weighted" if table.name in found.weighted else "joint"
                table = dataclasses.replace(table, feature_names=[pair.key for pair in self._pairs[table.name]])
            else:
                part = "shared" if table.feature_names[0] in shared else "rows"
            self._tables.setdefault(part, []).append(table)
        self.collections = nn.ModuleDict(
            {
                part: EmbeddingBagCollection(tables=own, is_weighted=part == "weighted", device=device)
                for part, own in self._tables.items()
            }
        )

    def forward(self, batch: TowerBatch) -> dict[str, Tensor]:
        """By ``feature@table`` the pooled bags, (Q, width) of a shared tower's features and (B, width) of the others'."""
        pooled: dict[str, Tensor] = {}
        for part, tables in self._tables.items():
            found = by_table(tables, self.collections[part](_bags_of(batch, part)).to_dict())
            pooled |= self._split(batch, tables, found) if part in ("joint", "weighted") else found
        return pooled

    def _split(self, batch: TowerBatch, tables: Sequence[EmbeddingBagConfig], embedded: Mapping[str, Tensor]) -> dict[str, Tensor]:
        queries = batch.shared.dense.shape[0] if self._shared else 0  # type: ignore[union-attr]
        pooled: dict[str, Tensor] = {}
        for table in tables:
            for pair in self._pairs[table.name]:
                both = embedded[f"{pair.key}@{table.name}"]
                halves = {pair.shared: both[:queries], pair.row: both[queries:]}
                pooled |= {f"{feature}@{table.name}": half for feature, half in halves.items() if feature}
        return pooled


def _bags_of(batch: TowerBatch, part: str) -> KeyedJaggedTensor:
    """An attribute of the batch, so that TorchRec's pipeline can follow it."""
    if part == "shared":
        return batch.shared.sparse  # type: ignore[union-attr]
    return batch.sparse if part == "rows" else batch.joint if part == "joint" else batch.weighted


def shared_tables(towers: Mapping[str, Any], shared: Collection[str], weights: Collection[str] = ()) -> SharedTables | None:
    """Takes the tables that several towers name, or that pool by weights, out of the towers; None where there is none.

    Args:
        towers: by name.
        shared: the features of shared towers.
        weights: the features whose ids have weights.

    Raises:
        ValueError: tables of one name that differ, or that are not EmbeddingBagConfigs of a :class:`Tower`.
    """
    readers: dict[str, list[str]] = {}
    for name, tower in towers.items():
        for table in tower.tables:
            readers.setdefault(table.name, []).append(name)
    tables = merged(table for tower in towers.values() for table in tower.tables)
    tables = [table for table in tables if len(readers[table.name]) > 1 or not set(weights).isdisjoint(table.feature_names)]
    if not tables:
        return None
    readers = {table.name: readers[table.name] for table in tables}
    for table in tables:
        _check_lendable(table, {name: towers[name] for name in readers[table.name]})
    lenders = list(dict.fromkeys(name for names in readers.values() for name in names))
    device = towers[lenders[0]].device
    for name in lenders:
        towers[name].lend([table.name for table in towers[name].tables if table.name in readers])
    return SharedTables(tables, shared, lenders, weights, device)


def _check_lendable(table: EmbeddingBagConfig, readers: Mapping[str, Any]) -> None:
    what = [f"'{name}' is a {type(tower).__name__}" for name, tower in readers.items() if not isinstance(tower, Tower)]
    what += [] if isinstance(table, EmbeddingBagConfig) else ["they pool it by attention"]
    if what:
        raise ValueError(
            f"table '{table.name}' is named by the towers {list(readers)}, and {what[0]}; only an EmbeddingBagConfig of several "
            "Towers is shared: give each of these towers a table of its own name"
        )
