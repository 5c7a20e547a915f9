"""StackedTables: the tables of K networks as one EmbeddingBagCollection with K times the rows, looked up together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class _Bags(NamedTuple):
    """The bags of one feature of all members, K x S of them, their ids moved to the rows of the stacked table.

    ``lengths`` is None where every bag has one id.
    """

    ids: Tensor
    lengths: Tensor | None = None
    weights: Tensor | None = None

    def pooled(self, table: Tensor, pooling: PoolingType) -> Tensor:
        """(K x S, D)."""
        if self.lengths is None:
            return table.index_select(0, self.ids)
        ends = torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])
        mode = "mean" if pooling == PoolingType.MEAN else "sum"
        return embedding_bag(self.ids, table, ends, mode=mode, per_sample_weights=self.weights, include_last_offset=True)

    def gradient(self, pooled: Tensor, pooling: PoolingType) -> Tensor:
        """(n, D) of the row of each id, from that of the pooled bags (K x S, D)."""
        if self.lengths is None:
            return pooled
        if pooling == PoolingType.MEAN:
            pooled = pooled / self.lengths.clamp(min=1)[:, None]
        rows = pooled.repeat_interleave(self.lengths, dim=0)
        return rows if self.weights is None else rows * self.weights[:, None]


class StackedTables(nn.Module):
    """The collections that K networks have at one place, as one whose tables hold K times the rows, member after member.

    The members' own collections go on holding the same weights: their parameters become views of the stacked ones.

    Args:
        collections: one of each member, all of one shape.

    Raises:
        ValueError: a table that is not fp32.
    """

    def __init__(self, collections: Sequence[EmbeddingBagCollection]) -> None:
        super().__init__()
        self.members = len(collections)
        self.tables: list[EmbeddingBagConfig] = list(collections[0].embedding_bag_configs())
        self.names = [name for names in get_embedding_names_by_table(self.tables) for name in names]
        stacked = [
            dataclasses.replace(table, num_embeddings=self.members * table.num_embeddings, init_fn=None) for table in self.tables
        ]
        weighted = collections[0].is_weighted()
        self.collection = EmbeddingBagCollection(tables=stacked, is_weighted=weighted, device=torch.device("meta"))
        for table in self.tables:
            bags = [collection.embedding_bags[table.name] for collection in collections]
            if bags[0].weight.dtype != torch.float32:
                raise ValueError(f"table '{table.name}' is {bags[0].weight.dtype}: only tables of fp32 are stacked")
            weight = nn.Parameter(torch.cat([bag.weight.detach() for bag in bags]))
            weight.grad = torch.zeros_like(weight)
            self.collection.embedding_bags[table.name].weight = weight
            for bag, own in zip(bags, weight.detach().view(self.members, *bags[0].weight.shape).unbind(), strict=True):
                bag.weight.data = own
        self._looked: list[_Bags] = []

    def weight(self, table: EmbeddingBagConfig) -> nn.Parameter:
        """(K x rows, D)."""
        return self.collection.embedding_bags[table.name].weight  # type: ignore[no-any-return]

    def forward(self, parts: Sequence[KeyedJaggedTensor]) -> list[Tensor]:
        """(K, S, D) the pooled bags of each of ``names``, of K members' batches with S bags each."""
        self.read(parts)
        return self._pooled(self._looked, [self.weight(table) for table in self.tables])

    def read(self, parts: Sequence[KeyedJaggedTensor]) -> None:
        """Finds the rows that :meth:`forward` looks up, and no more."""
        self._looked = self._read(parts)

    def look_up(self, parts: Sequence[KeyedJaggedTensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """The same had the tables other ``weights``, without a gradient."""
        return self._pooled(self._read(parts), weights)

    def _read(self, parts: Sequence[KeyedJaggedTensor]) -> list[_Bags]:
        read = _read_one_each(parts, self.members) or _Jagged(parts)
        return [read(feature, table.num_embeddings) for table in self.tables for feature in table.feature_names]

    @torch.no_grad()
    def _pooled(self, looked: Sequence[_Bags], weights: Sequence[Tensor]) -> list[Tensor]:
        owners = [(table, weight) for table, weight in zip(self.tables, weights, strict=True) for _ in table.feature_names]
        return [
            bags.pooled(weight, table.pooling).view(self.members, -1, table.embedding_dim)
            for bags, (table, weight) in zip(looked, owners, strict=True)
        ]

    def ids(self) -> list[Tensor] | None:
        """(K x S,) the rows of each look-up that :meth:`forward` made last; None where a bag has another number of ids than one."""
        return [bags.ids for bags in self._looked] if all(bags.lengths is None for bags in self._looked) else None

    @torch.no_grad()
    def accumulate(self, gradients: Sequence[Tensor]) -> None:
        """Sets the gradient of the tables from that of what :meth:`forward` returned last."""
        found = iter(zip(self._looked, gradients, strict=True))
        for table in self.tables:
            gradient = self.weight(table).grad
            gradient.zero_()  # type: ignore[union-attr]
            for _ in table.feature_names:
                bags, pooled = next(found)
                gradient.index_add_(0, bags.ids, bags.gradient(pooled.reshape(-1, table.embedding_dim), table.pooling))  # type: ignore[union-attr]


class _OneEach:
    """Bags of one id each, (F, S) of each member: no offsets, and no look at what each feature has."""

    def __init__(self, keys: list[str], values: Tensor, members: int) -> None:
        self._place = {key: at for at, key in enumerate(keys)}
        self._values = values
        self._member = torch.arange(members, device=values.device)[:, None]
        self._moved: dict[tuple[str, int], Tensor] = {}

    def __call__(self, feature: str, rows: int) -> _Bags:
        if (feature, rows) not in self._moved:  # one feature of two tables with as many rows
            self._moved[feature, rows] = (self._values[:, self._place[feature]] + rows * self._member).view(-1)
        return _Bags(self._moved[feature, rows])


def _read_one_each(parts: Sequence[KeyedJaggedTensor], members: int) -> _OneEach | None:
    """None where a bag has another number of ids than one, or ids have weights."""
    first = parts[0]
    same = all(part is first for part in parts)
    own = parts[:1] if same else parts
    if any(part.values().numel() != part.lengths().numel() or part.weights_or_none() is not None for part in own):
        return None
    if max(int(part.lengths().max()) if part.lengths().numel() else 1 for part in own) != 1:
        return None
    values = torch.stack([part.values() for part in own]).view(len(own), len(first.keys()), first.stride())
    return _OneEach(first.keys(), values.expand(members, -1, -1) if same else values, members)


class _Jagged:
    def __init__(self, parts: Sequence[KeyedJaggedTensor]) -> None:
        self._bags = [part.to_dict() for part in parts]

    def __call__(self, feature: str, rows: int) -> _Bags:
        own = [bags[feature] for bags in self._bags]
        weights = [bags.weights_or_none() for bags in own]
        return _Bags(
            torch.cat([bags.values() + rows * member for member, bags in enumerate(own)]),
            torch.cat([bags.lengths() for bags in own]).long(),
            None if weights[0] is None else torch.cat(weights),
        )
