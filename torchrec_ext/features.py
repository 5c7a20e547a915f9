"""What the towers' tables say about a batch: its sparse features, and which rows their ids may name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torchrec_ext.needs_torch  # noqa: F401

from torchrec.modules.embedding_configs import BaseEmbeddingConfig


@dataclass(frozen=True, kw_only=True)
class SparseFeature:
    """A feature whose bags of ids stand in one of the batch's KeyedJaggedTensors, and the rows that its ids may name.

    Args:
        name: the column.
        tables: every table that looks this feature up.
        num_embeddings: rows of the smallest of these tables; valid ids are ``0 <= id < num_embeddings``.
        oov_id: the row that ``out_of_range="oov"`` sends invalid ids to.
    """

    name: str
    tables: tuple[str, ...]
    num_embeddings: int
    oov_id: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.oov_id < self.num_embeddings:
            raise ValueError(
                f"feature '{self.name}': oov_id={self.oov_id} is not a row of table {self.readers}; "
                f"choose a row from 0 to {self.num_embeddings - 1}"
            )

    @property
    def readers(self) -> str:
        """Its tables as a message names them."""
        return ", ".join(f"'{table}'" for table in self.tables)


class Keys(NamedTuple):
    """The ``keys`` of one KeyedJaggedTensor and the ``features`` whose bags follow one another in it: one for each key."""

    keys: tuple[str, ...]
    features: tuple[SparseFeature, ...]


def features_of(tables: Iterable[BaseEmbeddingConfig], oov_ids: Mapping[str, int]) -> tuple[SparseFeature, ...]:
    """The features that the tables read, in order of first appearance."""
    readers: dict[str, list[BaseEmbeddingConfig]] = {}
    for table in tables:
        for feature in table.feature_names:
            readers.setdefault(feature, []).append(table)
    unknown = sorted(set(oov_ids) - set(readers))
    if unknown:
        raise ValueError(f"oov_ids names {unknown}, which no table reads; the features are {sorted(readers)}")
    return tuple(
        SparseFeature(
            name=name,
            tables=tuple(table.name for table in found),
            num_embeddings=min(table.num_embeddings for table in found),
            oov_id=oov_ids.get(name, 0),
        )
        for name, found in readers.items()
    )
