"""SharedTables: tables that are looked up outside the towers that read them, once for all of these towers."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torchrec_ext.batch import TowerBatch
from torchrec_ext.modules.tower import LookedUp, by_table
from torchrec_ext.schema.features import Joint as Joint
from torchrec_ext.schema.features import joints, merged


class SharedTables(nn.Module):
    """Looks up tables of several towers once a step, for one gradient and one update per row.

    Tables whose bags are in the same rows of the batch form one collection, with one input dist and one output dist,
    whichever towers read them. Towers over the same rows have their features in one table. Where a shared tower has Q
    rows and another has B, a table of both reads ``batch.joint``, whose keys hold the Q bags of the one and the B bags
    of the other; its output is split at Q, so that nothing is padded. TorchRec's way, a KeyedJaggedTensor with a stride
    for each key, pads to the largest, crashes under data_parallel (torchrec #1916, #2268), and on the CPU where a
    collection pools by sum and by mean; looking up one sharded collection twice would update its rows twice.

    A table that one tower reads as a sequence and another pools is looked up id by id, and pooled by the tower that
    asks for it. A table that pools by weights is looked up from ``batch.weighted``, however many towers read it.

    Args:
        tables: configs, each once with the features of all towers.
        shared: features of shared towers.
        readers: names of the towers that read each table, by table.
        weights: features whose ids have weights.
        device: device of the tables.
    """

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        shared: Collection[str],
        readers: Mapping[str, Collection[str]],
        weights: Collection[str],
        device: torch.device,
    ) -> None:
        super().__init__()
        self.readers = frozenset(chain.from_iterable(readers.values()))
        self._shared = frozenset(shared)
        pairs = joints(tables, shared, weights)
        self._pairs = {**pairs.plain, **pairs.weighted}
        self._joint = list(pairs.plain)
        self._tables: dict[str, list[BaseEmbeddingConfig]] = {}
        self._rows: dict[str, str] = {}
        self._readers: dict[str, set[str]] = {}
        for table in tables:
            rows = self._rows_of(table, pairs.weighted)
            if table.name in self._pairs:
                table = dataclasses.replace(
                    table, feature_names=[pair.key for pair in self._pairs[table.name]]
                )
            name = rows
            # A collection of sequences has one width.
            if isinstance(table, EmbeddingConfig):
                name = f"{rows}_sequences_{table.embedding_dim}"
            self._rows[name] = rows
            self._readers.setdefault(name, set()).update(readers[table.name])
            self._tables.setdefault(name, []).append(table)
        self.collections = nn.ModuleDict(
            {
                name: _collection(members, name, device)
                for name, members in self._tables.items()
            }
        )
        self.halves = _Halves()

    @property
    def joint(self) -> tuple[Joint, ...]:
        """Keys of ``batch.joint`` to look up."""
        pairs: dict[Joint, None] = {}
        for table in self._joint:
            pairs |= dict.fromkeys(self._pairs[table])
        return tuple(pairs)

    def _rows_of(self, table: BaseEmbeddingConfig, weighted: Collection[str]) -> str:
        """Returns the rows of a batch with the table's bags: ``rows``, ``shared``, ``joint`` or ``weighted``."""
        if table.name in weighted:
            return "weighted"
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
        looked_up: dict[str, Tensor | JaggedTensor] = {}
        for name in names:
            tables = self._tables[name]
            values = embedded[name]
            if not isinstance(tables[0], EmbeddingConfig):
                values = values.to_dict()
            outputs: LookedUp = by_table(tables, values)
            if self._rows[name] in ("joint", "weighted"):
                outputs = self._split(batch, tables, outputs)
            looked_up |= outputs
        return looked_up

    def _split(
        self,
        batch: TowerBatch,
        tables: Sequence[BaseEmbeddingConfig],
        outputs: LookedUp,
    ) -> LookedUp:
        queries = batch.shared.dense.shape[0] if self._shared else 0  # type: ignore[union-attr]
        looked_up: dict[str, Tensor | JaggedTensor] = {}
        for table in tables:
            for pair in self._pairs[table.name]:
                halves = self.halves(outputs[f"{pair.key}@{table.name}"], queries)
                # By index, because TorchRec's pipeline traces this method with
                # stand-ins that cannot be iterated.
                looked_up |= {
                    f"{feature}@{table.name}": halves[i]
                    for i, feature in enumerate(pair)
                    if feature
                }
        return looked_up


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
    tables: list[Any], name: str, device: torch.device
) -> EmbeddingBagCollection | EmbeddingCollection:
    if isinstance(tables[0], EmbeddingConfig):
        return EmbeddingCollection(tables=tables, device=device)
    return EmbeddingBagCollection(
        tables=tables, is_weighted=name == "weighted", device=device
    )


def _bags_of(batch: TowerBatch, rows: str) -> KeyedJaggedTensor:
    """Returns an attribute of the batch, in a form that TorchRec's pipeline can follow."""
    if rows == "shared":
        return batch.shared.sparse  # type: ignore[union-attr]
    if rows == "joint":
        return batch.joint
    if rows == "weighted":
        return batch.weighted
    return batch.sparse


def shared_tables(
    towers: Mapping[str, Any],
    shared: Collection[str],
    weights: Collection[str] = (),
    *,
    every: bool = False,
) -> SharedTables | None:
    """Moves tables out of the towers if several name them, or if they pool by weights.

    Args:
        towers: modules by name.
        shared: features of shared towers.
        weights: features whose ids have weights.
        every: whether to take the tables of one tower too.

    Returns:
        The look-ups of these tables; None if there are none.

    Raises:
        ValueError: tables of one name that differ, of a tower that cannot release them, or read id by id and pooled by
            weights.
    """
    read_by = readers(towers)
    tables = []
    for table in merged(chain.from_iterable(tower.tables for tower in towers.values())):
        has_weights = not set(weights).isdisjoint(table.feature_names)
        # A tower keeps a table that it alone reads, without weights.
        if every or len(read_by[table.name]) > 1 or has_weights:
            tables.append(table)
    if not tables:
        return None
    read_by = {table.name: read_by[table.name] for table in tables}
    for table in tables:
        _check_releases(
            table, {name: towers[name] for name in read_by[table.name]}, weights
        )
    involved = list(dict.fromkeys(chain.from_iterable(read_by.values())))
    device = towers[involved[0]].device
    for name in involved:
        towers[name].release_tables(
            [table.name for table in towers[name].tables if table.name in read_by]
        )
    return SharedTables(tables, shared, read_by, weights, device)


def readers(towers: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns the names of the towers that read each table."""
    read_by: dict[str, list[str]] = {}
    for name, tower in towers.items():
        for table in tower.tables:
            read_by.setdefault(table.name, []).append(name)
    return {table: list(dict.fromkeys(names)) for table, names in read_by.items()}


def _check_releases(
    table: BaseEmbeddingConfig, readers: Mapping[str, Any], weights: Collection[str]
) -> None:
    other = next(
        (
            name
            for name, tower in readers.items()
            if not hasattr(tower, "release_tables")
        ),
        None,
    )
    if other is not None:
        raise ValueError(
            f"table '{table.name}' is named by the towers {list(readers)}, and '{other}' is a "
            f"{type(readers[other]).__name__}, which cannot do without tables of its own: give each of these towers a "
            "table of its own name"
        )
    # An EmbeddingCollection, which looks up id by id, takes no weights.
    weighted = [name for name in table.feature_names if name in weights]
    if weighted and isinstance(table, EmbeddingConfig):
        raise ValueError(
            f"table '{table.name}' pools '{weighted[0]}' by weights, and another of the towers {list(readers)} reads "
            "it id by id; give the weighted feature a table of its own name"
        )


def values_by_table(module: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Yields (table, its module, its weights) of the unsharded collections of ``module``."""
    for collection in module.modules():
        if isinstance(collection, EmbeddingBagCollection):
            holders = collection.embedding_bags
        elif isinstance(collection, EmbeddingCollection):
            holders = collection.embeddings
        else:
            continue
        for name, holder in holders.items():
            yield name, holder, holder.weight
