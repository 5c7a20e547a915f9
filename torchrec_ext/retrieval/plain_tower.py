"""PlainTower: a tower from columns straight to its tables, without the KeyedJaggedTensor of a batch: what one request takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, embedding_bag
from torchrec import PoolingType

from torchrec_ext.modules.tower import Tower
from torchrec_ext.schema import Jagged

_BEGIN = torch.zeros(1, dtype=torch.int64)  # of one bag, which ends where the values do
_MODES = {PoolingType.SUM: "sum", PoolingType.MEAN: "mean"}


class PlainTower:
    """What a :class:`Tower` computes in evaluation, in a third of its time for one row.

    TorchRec's collections pack the ids of all features, look them up and take the result apart again, which pays for a batch; of a
    request the tables are read one by one. Columns must have been checked: every id a row of its table.

    Args:
        tower: of which :func:`is_plain`, with its weights.
    """

    def __init__(self, tower: Tower) -> None:
        bags: Any = {} if tower.embeddings is None else tower.embeddings.embedding_bags
        self._tables = [
            (name, bags[table.name].weight, _MODES[table.pooling]) for table in tower.bags for name in table.feature_names
        ]
        self._dense = tower.dense
        self._compress = tower.compress
        self._mlp = tower.mlp

    def __call__(self, sparse: Mapping[str, Jagged], dense: Mapping[str, Tensor]) -> Tensor:
        """(B, D) of the columns of B rows, as ``BatchSchema.assemble`` takes them."""
        parts = [_looked_up(weight, sparse[name], mode).float() for name, weight, mode in self._tables]
        parts += [dense[name][:, None] for name in self._dense]
        rows = torch.cat(parts, dim=1)
        return self._mlp(rows if self._compress is None else self._compress(rows))  # type: ignore[no-any-return]


def is_plain(tower: nn.Module) -> bool:
    """Whether it is a :class:`Tower` of its own bags alone: none under attention, with weights, or shared with another tower."""
    return type(tower) is Tower and not (tower.lists or tower.weights or tower.lent)


def _looked_up(weight: Tensor, bags: Jagged, mode: str) -> Tensor:
    """(B, D) pooled."""
    if bags.lengths is None:  # a bag of one is its row
        return embedding(bags.values, weight)
    if len(bags.lengths) == 1:
        return embedding_bag(bags.values, weight, _BEGIN, mode=mode)
    offsets = torch.cat([bags.lengths.new_zeros(1), bags.lengths.cumsum(0)]).long()
    return embedding_bag(bags.values, weight, offsets, mode=mode, include_last_offset=True)
