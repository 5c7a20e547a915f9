"""SharedTables: tables that are looked up for several towers at once, each one table with one set of weights, and weighted ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torchrec_ext.batch import TowerBatch
from torchrec_ext.modules.tower import LookedUp, Towers, by_table
from torchrec_ext.schema.features import Joint as Joint
from torchrec_ext.schema.features import joints, merged


class SharedTables(nn.Module):
    """Looks up tables outside the towers that read them, each once a step, so that a row gets one gradient and one update.

    Tables whose bags stand in the same rows are one collection, with one input dist and one output dist, whichever
    towers read them. Towers with the same rows simply have their features in one table. A shared tower has Q rows where
    another has B: a table of both reads ``batch.joint``, whose keys hold the Q bags of the one and the B bags of the
    other, and its output is split at Q, so that nothing is padded. TorchRec's own way, a KeyedJaggedTensor with a
    stride for each key, pads to the largest, crashes for data_parallel (torchrec #1916, #2268), and on the CPU where a
    collection pools by sum and by mean; looking up one sharded collection twice would update its rows twice.

    A table that one tower reads as a sequence and another pools is looked up id by id, and pooled by the tower that
    asks for it. A table that pools by weights is looked up from ``batch.weighted``, whether one tower reads it or
    several.

    Args:
        tables: each once with the features of all towers.
        shared: the features of shared towers.
        readers: by table the names of the towers that read it.
        weights: the features whose ids have weights.
        device: of the tables.
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
        self.readers = frozenset(name for names in readers.values() for name in names)
        self._shared = frozenset(shared)
        found = joints(tables, shared, weights)
        self._pairs = {**found.plain, **found.weighted}
        self._joint = list(found.plain)
        self._tables: dict[str, list[BaseEmbeddingConfig]] = {}
        self._rows: dict[str, str] = {}
        self._readers: dict[str, set[str]] = {}
        for table in tables:
            rows = self._rows_of(table, found.weighted)
            if table.name in self._pairs:
                table = dataclasses.replace(table, feature_names=[pair.key for pair in self._pairs[table.name]])
            # A collection of sequences has one width.
            part = f"{rows}_sequences_{table.embedding_dim}" if isinstance(table, EmbeddingConfig) else rows
            self._rows[part] = rows
            self._readers.setdefault(part, set()).update(readers[table.name])
            self._tables.setdefault(part, []).append(table)
        self.collections = nn.ModuleDict({part: _collection(own, part, device) for part, own in self._tables.items()})
        self.halves = _Halves()
        self.stood_at = ""  # of look-ups that a plan has moved to a tower: the path where they were

    @property
    def joint(self) -> tuple[Joint, ...]:
        """The keys of ``batch.joint`` that are looked up."""
        return tuple(dict.fromkeys(pair for table in self._joint for pair in self._pairs[table]))

    def _rows_of(self, table: BaseEmbeddingConfig, weighted: Collection[str]) -> str:
        """Which rows of a batch its bags stand in."""
        if table.name in self._pairs:
            return "weighted" if table.name in weighted else "joint"
        return "shared" if table.feature_names[0] in self._shared else "rows"

    def forward(self, batch: TowerBatch, towers: Collection[str]) -> dict[str, Tensor | JaggedTensor]:
        """By ``feature@table`` what each feature of ``towers`` found, in Q bags of a shared tower's and B bags of another's."""
        parts = [part for part, readers in self._readers.items() if not readers.isdisjoint(towers)]
        # All are under way before the first is waited for.
        embedded = {part: self.collections[part](_bags_of(batch, self._rows[part])) for part in parts}
        looked_up: dict[str, Tensor | JaggedTensor] = {}
        for part in parts:
            tables = self._tables[part]
            one_by_one = isinstance(tables[0], EmbeddingConfig)
            found: LookedUp = by_table(tables, embedded[part] if one_by_one else embedded[part].to_dict())
            looked_up |= self._split(batch, tables, found) if self._rows[part] in ("joint", "weighted") else found
        return looked_up

    def _split(self, batch: TowerBatch, tables: Sequence[BaseEmbeddingConfig], found: LookedUp) -> LookedUp:
        queries = batch.shared.dense.shape[0] if self._shared else 0  # type: ignore[union-attr]
        looked_up: dict[str, Tensor | JaggedTensor] = {}
        for table in tables:
            for pair in self._pairs[table.name]:
                both = self.halves(found[f"{pair.key}@{table.name}"], queries)
                looked_up |= {f"{feature}@{table.name}": both[at] for at, feature in enumerate(pair) if feature}
        return looked_up


class _Halves(nn.Module):
    """Splits Q + B bags at Q; without tables, so that TorchRec's pipelines do not trace into it and it may read lengths."""

    def forward(self, both: Tensor | JaggedTensor, queries: int) -> tuple[Tensor | JaggedTensor, Tensor | JaggedTensor]:
        if isinstance(both, Tensor):
            return both[:queries], both[queries:]
        lengths = both.lengths()
        place = int(lengths[:queries].sum())
        return (
            JaggedTensor(both.values()[:place], lengths=lengths[:queries]),
            JaggedTensor(both.values()[place:], lengths=lengths[queries:]),
        )


def _collection(tables: list[Any], part: str, device: torch.device) -> EmbeddingBagCollection | EmbeddingCollection:
    if isinstance(tables[0], EmbeddingConfig):
        return EmbeddingCollection(tables=tables, device=device)
    return EmbeddingBagCollection(tables=tables, is_weighted=part == "weighted", device=device)


def _bags_of(batch: TowerBatch, rows: str) -> KeyedJaggedTensor:
    """An attribute of the batch, so that TorchRec's pipeline can follow it."""
    if rows == "shared":
        return batch.shared.sparse  # type: ignore[union-attr]
    return batch.sparse if rows == "rows" else batch.joint if rows == "joint" else batch.weighted


def shared_tables(
    towers: Mapping[str, Any], shared: Collection[str], weights: Collection[str] = (), *, every: bool = False
) -> SharedTables | None:
    """Takes the tables that several towers name, or that pool by weights, out of the towers; None where there is none.

    Args:
        towers: by name.
        shared: the features of shared towers.
        weights: the features whose ids have weights.
        every: also the tables of one tower.

    Raises:
        ValueError: tables of one name that differ, of a tower that lends none, or read id by id and pooled by weights.
    """
    of_table = readers(towers)
    tables = merged(table for tower in towers.values() for table in tower.tables)
    alone = [
        table for table in tables if len(of_table[table.name]) == 1 and set(weights).isdisjoint(table.feature_names)
    ]
    tables = [table for table in tables if every or table not in alone]
    if not tables:
        return None
    of_table = {table.name: of_table[table.name] for table in tables}
    for table in tables:
        _check_releases(table, {name: towers[name] for name in of_table[table.name]}, weights)
    lenders = list(dict.fromkeys(name for names in of_table.values() for name in names))
    device = towers[lenders[0]].device
    for name in lenders:
        towers[name].release_tables([table.name for table in towers[name].tables if table.name in of_table])
    return SharedTables(tables, shared, of_table, weights, device)


def readers(towers: Mapping[str, Any]) -> dict[str, list[str]]:
    """By table the towers that read it."""
    found: dict[str, list[str]] = {}
    for name, tower in towers.items():
        for table in tower.tables:
            found.setdefault(table.name, []).append(name)
    return {table: list(dict.fromkeys(names)) for table, names in found.items()}


def look_ups(towers: Towers, names: Sequence[str]) -> SharedTables:
    """Of the tables that the towers ``names`` do not hold, on the meta device."""
    own: dict[str, Any] = {name: towers[name] for name in names}
    released = {table for tower in own.values() for table in tower.released_tables}
    tables = [
        table for table in merged(table for tower in own.values() for table in tower.tables) if table.name in released
    ]
    found = readers(own)
    of_table = {table.name: found[table.name] for table in tables}
    return SharedTables(tables, towers.columns(shared=True), of_table, (), torch.device("meta"))


def _check_releases(table: BaseEmbeddingConfig, readers: Mapping[str, Any], weights: Collection[str]) -> None:
    other = next((name for name, tower in readers.items() if not hasattr(tower, "release_tables")), None)
    if other is not None:
        raise ValueError(
            f"table '{table.name}' is named by the towers {list(readers)}, and '{other}' is a "
            f"{type(readers[other]).__name__}, "
            "which cannot do without tables of its own: give each of these towers a table of its own name"
        )
    weighted = [name for name in table.feature_names if name in weights]
    if weighted and isinstance(table, EmbeddingConfig):
        raise ValueError(
            f"table '{table.name}' pools '{weighted[0]}' by weights, and another of the towers {list(readers)} reads "
            "it id by id; "
            "give the weighted feature a table of its own name"
        )


def values_by_table(module: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """(table, what holds it, its weights) of the unsharded collections of ``module``."""
    for collection in module.modules():
        if isinstance(collection, EmbeddingBagCollection | EmbeddingCollection):
            held = (
                collection.embedding_bags if isinstance(collection, EmbeddingBagCollection) else collection.embeddings
            )
            for name, holder in held.items():
                yield name, holder, holder.weight
