"""SharedTables: the tables that several towers of a model read, each one table with one set of weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, get_embedding_names_by_table

from torchrec_ext.batch import TowerBatch
from torchrec_ext.features import joints, merged
from torchrec_ext.modules.tower import Tower


class SharedTables(nn.Module):
    """Looks up the tables that several towers read, each once a step, so that a row gets one gradient and one update.

    Towers with the same rows simply have their features in one table. A shared tower has Q rows where another has B: such a table
    reads ``batch.joint``, whose keys hold the Q bags of the one and the B bags of the other, and its output is split at Q.
    TorchRec's own way, a KeyedJaggedTensor with a stride for each key, pads to the largest and crashes for data_parallel (torchrec
    #1916, #2268); looking up one sharded collection twice would update its rows twice.

    Args:
        tables: EmbeddingBagConfigs, each once with the features of all towers.
        shared: the features of shared towers.
        readers: names of the towers that read them.
        device: of the tables.
    """

    def __init__(
        self, tables: Sequence[EmbeddingBagConfig], shared: Collection[str], readers: Collection[str], device: torch.device
    ) -> None:
        super().__init__()
        self.readers = frozenset(readers)
        self._joints = joints(tables, shared)
        single = [table for table in tables if table.name not in self._joints]
        # A table that no joint key names reads features of one kind.
        self._of_rows = [table for table in single if table.feature_names[0] not in shared]
        self._of_shared = [table for table in single if table.feature_names[0] in shared]
        self._of_both = [
            _reading(table, [joint.key for joint in self._joints[table.name]]) for table in tables if table.name in self._joints
        ]
        self.rows = _collection(self._of_rows, device)
        self.shared = _collection(self._of_shared, device)
        self.joint = _collection(self._of_both, device)

    def forward(self, batch: TowerBatch) -> dict[str, Tensor]:
        """By ``feature@table`` the pooled bags, (Q, width) of a shared tower's features and (B, width) of the others'."""
        pooled: dict[str, Tensor] = {}
        if self.rows is not None:
            pooled |= _named(self._of_rows, self.rows(batch.sparse).to_dict())
        if self.shared is not None:
            pooled |= _named(self._of_shared, self.shared(batch.shared.sparse).to_dict())  # type: ignore[union-attr]
        if self.joint is not None:
            queries = batch.shared.dense.shape[0]  # type: ignore[union-attr]
            found = _named(self._of_both, self.joint(batch.joint).to_dict())
            for table, keys in self._joints.items():
                for key in keys:
                    both = found[f"{key.key}@{table}"]
                    halves = {key.shared: both[:queries], key.row: both[queries:]}
                    pooled |= {f"{feature}@{table}": half for feature, half in halves.items() if feature}
        return pooled


def shared_tables(towers: Mapping[str, Any], shared: Collection[str]) -> SharedTables | None:
    """Takes the tables that several towers name out of them; None where there is none.

    Args:
        towers: by name.
        shared: the features of shared towers.

    Raises:
        ValueError: tables of one name that differ, or that are not EmbeddingBagConfigs of a :class:`Tower`.
    """
    readers: dict[str, list[str]] = {}
    for name, tower in towers.items():
        for table in tower.tables:
            readers.setdefault(table.name, []).append(name)
    readers = {table: names for table, names in readers.items() if len(names) > 1}
    tables = [table for table in merged(table for tower in towers.values() for table in tower.tables) if table.name in readers]
    if not tables:
        return None
    for table in tables:
        _check_lendable(table, {name: towers[name] for name in readers[table.name]})
    lenders = list(dict.fromkeys(name for names in readers.values() for name in names))
    device = towers[lenders[0]].embeddings.device
    for name in lenders:
        towers[name].lend([table.name for table in towers[name].tables if table.name in readers])
    return SharedTables(tables, shared, lenders, device)


def _check_lendable(table: EmbeddingBagConfig, readers: Mapping[str, Any]) -> None:
    what = [f"'{name}' is a {type(tower).__name__}" for name, tower in readers.items() if not isinstance(tower, Tower)]
    what += [] if isinstance(table, EmbeddingBagConfig) else ["they pool it by attention"]
    if what:
        raise ValueError(
            f"table '{table.name}' is named by the towers {list(readers)}, and {what[0]}; only an EmbeddingBagConfig of several "
            "Towers is shared: give each of these towers a table of its own name"
        )


def _reading(table: EmbeddingBagConfig, keys: list[str]) -> EmbeddingBagConfig:
    """The table with other features."""
    return dataclasses.replace(table, feature_names=keys)


def _collection(tables: list[EmbeddingBagConfig], device: torch.device) -> EmbeddingBagCollection | None:
    return EmbeddingBagCollection(tables=tables, device=device) if tables else None


def _named(tables: Sequence[EmbeddingBagConfig], embedded: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a collection returns, by ``feature@table``, which TorchRec does only for features of several tables."""
    pairs: Iterator[tuple[EmbeddingBagConfig, list[str]]] = zip(tables, get_embedding_names_by_table(list(tables)), strict=True)
    return {
        f"{feature}@{table.name}": embedded[name]
        for table, names in pairs
        for feature, name in zip(table.feature_names, names, strict=True)
    }
