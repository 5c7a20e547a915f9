"""PaddedTower: a tower with its tables over padded columns, which is what ONNX has operators for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from torchrec import EmbeddingBagConfig, PoolingType

from torchrec_ext.models.ncf import NCFTower
from torchrec_ext.modules.shared_tables import values_by_table
from torchrec_ext.modules.tower import AttentionPooling, Tower
from torchrec_ext.retrieval.bundle.encoder import RowEncoder
from torchrec_ext.retrieval.bundle.request_columns import Read
from torchrec_ext.schema import Jagged, SparseFeature

PAD = -1
# Whose computation is known here; those of sequence encoders and of classes of your own are not.
EXPORTABLE = (Tower.__name__, NCFTower.__name__)


@dataclass(frozen=True)
class Input:
    """One input of a tower.

    Args:
        name: of the column.
        shape: axis letters; B rows, and L with the feature's name for the length of a padded list.
        dtype: ``int64`` or ``float32``.
        meaning: in words.
    """

    name: str
    shape: tuple[str, ...]
    dtype: str
    meaning: str


class PaddedTower(nn.Module):
    """What a :class:`Tower` of a side computes in evaluation, from one tensor for each column instead of a KeyedJaggedTensor.

    A feature of one id is (B,); a list is (B, L), with -1 after its ids. Any other id that is no row of the table takes
    the feature's row for the unknown, as a bundle's requests do. Tables that several towers read are in each of them.

    Args:
        side: that the tower belongs to, with its weights.
        name: of the tower, of a class in ``EXPORTABLE``.
    """

    def __init__(self, side: RowEncoder, name: str) -> None:
        super().__init__()
        tower: Any = side.model.towers[name]
        self._tables: list[EmbeddingBagConfig] = [*tower.bags, *tower.lists]
        own = {table.name for table in self._tables}
        held = {table: weight for table, _, weight in values_by_table(side.model) if table in own}
        rows = [_as_served(weight.detach(), table, side) for table, weight in held.items()]
        self.weights = nn.ParameterList(nn.Parameter(weight, requires_grad=False) for weight in rows)
        self._places = {table: place for place, table in enumerate(held)}
        self._weighted: dict[str, str] = tower.weights
        self._dense: list[str] = list(tower.dense)
        self.attention = tower.attention
        self.compress, self.mlp = tower.compress, tower.mlp
        self.out_features = int(tower.out_features)
        known = {feature.name: feature for feature in side.columns.schema.sparse}
        self._features = {feature: known[feature] for table in self._tables for feature in table.feature_names}
        self._listed = {feature: side.listed(found) for feature, found in self._features.items()}
        self.inputs = [*self._ids(), *(Input(column, ("B",), "float32", "a number") for column in self._dense)]
        self.eval()

    def _ids(self) -> list[Input]:
        found = []
        for number, (name, feature) in enumerate(self._features.items()):
            rows = f"0 to {feature.num_embeddings - 1}; any other is unknown and takes row {feature.oov_id}"
            length = f"L_{name}" if name.isidentifier() else f"L_{number}"
            if not self._listed[name]:
                found.append(Input(name, ("B",), "int64", f"row of its table, {rows}"))
                continue
            found.append(
                Input(name, ("B", length), "int64", f"rows of its table, {rows}; {PAD} after the last of a list")
            )
            if name in self._weighted:
                found.append(
                    Input(self._weighted[name], ("B", length), "float32", f"weight of each {name}; any number at {PAD}")
                )
        return found

    def forward(self, *columns: Tensor) -> Tensor:
        """(B, D) from the columns, in the order of ``inputs``."""
        given = dict(zip((each.name for each in self.inputs), columns, strict=True))
        pools = iter(() if self.attention is None else self.attention.pools)
        parts = []
        for table in self._tables:
            for name in table.feature_names:
                rows = embedding(
                    _known(given[name], self._features[name]), self.weights[self._places[table.name]]
                ).float()
                if isinstance(table, EmbeddingBagConfig):
                    parts.append(self._pooled(name, table.pooling, rows, given))
                else:
                    parts.append(_attended(next(pools), *self._bags(name, rows, given[name])))
        row = torch.cat([*parts, *(given[name][:, None] for name in self._dense)], dim=1)
        return self.mlp(row if self.compress is None else self.compress(row))  # type: ignore[no-any-return]

    def _bags(self, name: str, rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(B, L, D) rows, and (B, L) where there is one."""
        return (
            (rows, ids != PAD)
            if self._listed[name]
            else (rows[:, None], torch.ones_like(ids, dtype=torch.bool)[:, None])
        )

    def _pooled(self, name: str, pooling: PoolingType, rows: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        if not self._listed[name]:  # a bag of one is its row
            return rows
        there = given[name] != PAD
        weights = given[self._weighted[name]] if name in self._weighted else torch.ones_like(rows[..., 0])
        pooled = (rows * torch.where(there, weights, 0.0)[..., None]).sum(dim=1)
        return pooled / there.sum(dim=1).clamp(min=1)[:, None] if pooling == PoolingType.MEAN else pooled

    def columns(self, read: Read) -> dict[str, Tensor]:
        """What the inputs are for rows that were read, lists padded to the longest."""
        found: dict[str, Tensor] = {}
        for name, listed in self._listed.items():
            bags = read.sparse[name]
            if not listed:
                found[name] = bags.values
                continue
            found[name] = _padded(bags.values, bags, PAD)
            if name in self._weighted:
                assert bags.weights is not None, "a feature with weights was read with them"
                found[self._weighted[name]] = _padded(bags.weights, bags, 0)
        return {each.name: found.get(each.name, read.dense.get(each.name)) for each in self.inputs}  # type: ignore[misc]


def shapes_of(inputs: list[Input]) -> tuple[Any, ...]:
    """``dynamic_shapes`` of a :class:`PaddedTower`, one letter for each axis."""
    letters = {letter: torch.export.Dim(letter, min=2) for each in inputs for letter in each.shape}
    return (tuple({place: letters[letter] for place, letter in enumerate(each.shape)} for each in inputs),)


def example_of(inputs: list[Input]) -> dict[str, Tensor]:
    """Inputs to trace with: 3 rows, lists of 2."""
    sizes: Mapping[str, int] = {"B": 3}
    return {
        each.name: torch.zeros([sizes.get(letter, 2) for letter in each.shape], dtype=getattr(torch, each.dtype))
        for each in inputs
    }


def _as_served(weight: Tensor, table: str, side: RowEncoder) -> Tensor:
    """The rows of a table, those of ids that training never saw in the place of which the unknown one's is read.

    Raises:
        ValueError: several features read the table, and not all of them have seen the same ids.
    """
    columns = side.columns
    features = [feature for feature in columns.schema.sparse if table in feature.tables]
    unseen = [columns.unseen.get(feature.name, np.zeros(0, np.int64)) for feature in features]
    if not any(map(len, unseen)):
        return weight
    if any(not np.array_equal(rows, unseen[0]) for rows in unseen):
        raise ValueError(
            f"table '{table}': {len(features)} features read it and have seen different ids; leave the tower out"
        )
    served = weight.clone()
    served[torch.from_numpy(unseen[0])] = weight[features[0].oov_id]
    return served


def _known(ids: Tensor, feature: SparseFeature) -> Tensor:
    return torch.where((ids < 0) | (ids >= feature.num_embeddings), feature.oov_id, ids)


def _attended(pool: AttentionPooling, rows: Tensor, there: Tensor) -> Tensor:
    """As :class:`AttentionPooling`, of (B, L, D) padded."""
    scores = pool.score(rows).squeeze(-1).masked_fill(~there, -torch.inf)
    weights = torch.where(there, torch.exp(scores - scores.amax(dim=1, keepdim=True)), 0.0)
    return (weights[..., None] * rows).sum(dim=1) / weights.sum(dim=1).clamp(min=1)[:, None]


def _padded(values: Tensor, bags: Jagged, filler: float) -> Tensor:
    """(B, L) of the values of bags, L the longest and at least 1."""
    assert bags.lengths is not None, "a list was read with its lengths"
    lengths = bags.lengths.long()
    places = torch.arange(max(int(lengths.max()) if len(lengths) else 0, 1))[None] < lengths[:, None]
    return torch.full(places.shape, filler, dtype=values.dtype).masked_scatter(places, values)
