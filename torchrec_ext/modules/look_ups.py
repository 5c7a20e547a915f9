"""LookUps: the tables of a model, looked up once a step for all towers that read them."""

from __future__ import annotations

import dataclasses
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
from torchrec_ext.modules.tower import Vectors, keys_of
from torchrec_ext.schema.features import Joint as Joint
from torchrec_ext.schema.features import joints, merge_tables


class LookUps(nn.Module):
    """Holds the tables of a model and looks them up, for one gradient and one update per row.

    Tables whose bags are in the same rows of the batch form one collection, with one input dist and one output dist,
    whichever towers read them. Towers over the same rows have their features in one table. If a shared tower has Q
    rows and another has B, a table of both reads ``batch.joint``, whose keys hold the Q bags of the one and the B bags
    of the other; its output is split at Q, so that nothing is padded. TorchRec's way, a KeyedJaggedTensor with a stride
    for each key, pads to the largest, crashes under data_parallel (torchrec #1916, #2268), and on the CPU if a
    collection pools by sum and by mean; looking up one sharded collection twice would update its rows twice.

    A table that one tower reads as a sequence and another pools is looked up id by id, and pooled by the tower.

    Args:
        towers: modules with ``tables``, by name; configs of one name are one table.
        shared: features of shared towers.
        device: device of the tables; ``meta`` declares them without memory.

    Raises:
        ValueError: tables of one name that differ.
    """

    def __init__(
        self, towers: Mapping[str, Any], shared: Collection[str], device: torch.device
    ) -> None:
        super().__init__()
        tables = merge_tables(
            chain.from_iterable(tower.tables for tower in towers.values())
        )
        self._shared = frozenset(shared)
        self._pairs = joints(tables, shared)
        self._tables: dict[str, list[BaseEmbeddingConfig]] = {}
        self._rows: dict[str, str] = {}
        self._readers: dict[str, set[str]] = {}
        for table in tables:
            rows = self._rows_of(table)
            if table.name in self._pairs:
                table = dataclasses.replace(
                    table, feature_names=[pair.key for pair in self._pairs[table.name]]
                )
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
        self.halves = _Halves()

    def _rows_of(self, table: BaseEmbeddingConfig) -> str:
        """Returns the rows of a batch with the table's bags: ``rows``, ``shared`` or ``joint``."""
        if table.name in self._pairs:
            return "joint"
        # The features of any other table are of one kind, so the first tells it.
        return "shared" if table.feature_names[0] in self._shared else "rows"

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
            outputs = {key: values[other] for key, other in self._names[name].items()}
            if self._rows[name] == "joint":
                outputs = self._split(batch, self._tables[name], outputs)
            vectors |= outputs
        return vectors

    def _split(
        self,
        batch: TowerBatch,
        tables: Sequence[BaseEmbeddingConfig],
        outputs: Vectors,
    ) -> dict[str, Tensor | JaggedTensor]:
        queries = batch.shared.dense.shape[0]  # type: ignore[union-attr]
        vectors: dict[str, Tensor | JaggedTensor] = {}
        for table in tables:
            for pair in self._pairs[table.name]:
                halves = self.halves(outputs[f"{pair.key}@{table.name}"], queries)
                # By index, because TorchRec's pipeline traces this method with
                # stand-ins that cannot be iterated.
                vectors |= {
                    f"{feature}@{table.name}": halves[i]
                    for i, feature in enumerate(pair)
                    if feature
                }
        return vectors


class _Halves(nn.Module):
    """Splits Q + B bags at Q.

    It has no tables, so that TorchRec's pipelines do not trace into it and it may read lengths.
    """

    def forward(
        self, both: Tensor | JaggedTensor, queries: int
    ) -> tuple[Tensor | JaggedTensor, Tensor | JaggedTensor]:
        if isinstance(both, Tensor):
            return both[:queries], both[queries:]
        lengths = both.lengths()
        start = int(lengths[:queries].sum())
        return (
            JaggedTensor(both.values()[:start], lengths=lengths[:queries]),
            JaggedTensor(both.values()[start:], lengths=lengths[queries:]),
        )


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
    if rows == "joint":
        return batch.joint
    return batch.sparse


def _names(tables: Sequence[BaseEmbeddingConfig]) -> dict[str, str]:
    """Returns the name in a collection's output of each ``feature@table``.

    TorchRec appends the table's name only to features of several tables.
    """
    names = chain.from_iterable(get_embedding_names_by_table(list(tables)))
    return dict(zip(keys_of(tables), names, strict=True))
