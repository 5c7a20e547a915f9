"""The sparse features of a batch, derived from the towers' tables: their valid ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torchrec_ext.needs_torch import loaded_class

# For names of columns alone, TorchRec is not needed.
if TYPE_CHECKING:
    from torch import Tensor
    from torchrec.modules.embedding_configs import BaseEmbeddingConfig


@dataclass(frozen=True, kw_only=True)
class SparseFeature:
    """A sparse feature: its tables and its valid ids.

    Args:
        name: the column.
        tables: every table that looks this feature up.
        num_embeddings: rows of the smallest of these tables; valid ids are ``0 <= id < num_embeddings``.
        oov_id: the row that ``out_of_range="oov"`` sends invalid ids to.
        dynamic: whether its ids are any 64-bit numbers, which :class:`torchrec_ext.ids.DynamicIds` maps to rows later.
    """

    name: str
    tables: tuple[str, ...]
    num_embeddings: int
    oov_id: int = 0
    dynamic: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.oov_id < self.num_embeddings:
            raise ValueError(
                f"feature '{self.name}': oov_id={self.oov_id} is not a row of table {self.readers}; choose a row from "
                f"0 to {self.num_embeddings - 1}"
            )

    @property
    def readers(self) -> str:
        """Names the feature's tables, for a message."""
        return ", ".join(f"'{table}'" for table in self.tables)

    def outside(self, where: str, ids: Tensor) -> str:
        """Describes ids outside the tables in one message, with the place of the first.

        Args:
            where: file, if it is known, and row of the first id.
            ids: all such ids of a batch or a part of a file, (n,).
        """
        rows = int(ids.max()) + 1
        remedy = "fix the data"
        # Ids with gaps, such as hashes, and not a few that came later.
        if rows > 2 * self.num_embeddings:
            remedy = "map ids to rows by rec.data.preprocess"
        elif rows > self.num_embeddings:
            remedy = f"set num_embeddings={rows}"
        return (
            f"{where}, column '{self.name}': id {int(ids[0])} is outside table {self.readers} (0 to "
            f"{self.num_embeddings - 1}; {len(ids)} such ids); {remedy}, or set out_of_range='oov'"
        )


def merge_tables(tables: Iterable[BaseEmbeddingConfig]) -> list[BaseEmbeddingConfig]:
    """Returns each table once: configs of one name are one table, which reads the features of all of them.

    A table that is read both pooled and id by id becomes an EmbeddingConfig.

    Raises:
        ValueError: two tables of one name differ in more than their features.
    """
    by_name: dict[str, BaseEmbeddingConfig] = {}
    for table in tables:
        first = by_name.setdefault(table.name, table)
        if first is not table:
            _check_same(first, table)
            names = list(dict.fromkeys([*first.feature_names, *table.feature_names]))
            # Rows that are looked up one by one can be pooled afterwards, but pooled
            # rows cannot be taken apart.
            by_id = loaded_class("torchrec.modules.embedding_configs:EmbeddingConfig")
            base = first if isinstance(first, by_id) else table
            by_name[table.name] = dataclasses.replace(base, feature_names=names)
    return list(by_name.values())


def _check_same(first: BaseEmbeddingConfig, second: BaseEmbeddingConfig) -> None:
    one = _facts(first)
    two = _facts(second)
    # Only an EmbeddingBagConfig has a pooling.
    different = [name for name in one if name in two and one[name] != two[name]]
    if different:
        ours = ", ".join(f"{name}={one[name]}" for name in different)
        theirs = ", ".join(f"{name}={two[name]}" for name in different)
        raise ValueError(
            f"two tables are called '{first.name}', with {ours} and {theirs}: tables of one name share weights "
            "and must agree in all but their features; make them equal, or give one another name"
        )


def _facts(table: BaseEmbeddingConfig) -> dict[str, Any]:
    """Returns the facts to compare between tables of one name."""
    facts = {
        field.name: getattr(table, field.name) for field in dataclasses.fields(table)
    }
    init = facts.pop("init_fn")
    del facts["feature_names"]
    # TorchRec fills in a partial of its own for each config.
    if isinstance(init, partial):
        init = (init.func, init.args, tuple(init.keywords.items()))
    return {**facts, "init_fn": init}


def features_of(
    tables: Sequence[BaseEmbeddingConfig],
    oov_ids: Mapping[str, int],
) -> tuple[SparseFeature, ...]:
    """Returns the features of the tables, in order of first appearance."""
    readers: dict[str, list[BaseEmbeddingConfig]] = {}
    for table in tables:
        for feature_name in table.feature_names:
            readers.setdefault(feature_name, []).append(table)
    unknown = sorted(set(oov_ids) - set(readers))
    if unknown:
        raise ValueError(
            f"oov_ids names {unknown}, which no table reads; the features are {sorted(readers)}"
        )
    features = []
    for name, feature_tables in readers.items():
        names_of_tables = [table.name for table in feature_tables]
        feature = SparseFeature(
            name=name,
            tables=tuple(names_of_tables),
            # An id must be a row of every table that reads it.
            num_embeddings=min(table.num_embeddings for table in feature_tables),
            oov_id=oov_ids.get(name, 0),
        )
        features.append(feature)
    return tuple(features)
