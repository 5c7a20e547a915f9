"""Pooling of list features by what is in them, and of rows that were looked up one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import JaggedTensor


class AttentionPooling(nn.Module):
    """A bag's weighted mean, whose weights depend on the embeddings: softmax over the bag of ``v . tanh(W e + b)``.

    The additive attention of Bahdanau et al. (2015) with a learned query, as news encoders pool words (Wu et al. 2019, NRMS).

    Args:
        width: D of the embeddings.
        hidden: width of the scoring layer; D where not given.
    """

    def __init__(self, width: int, hidden: int | None = None) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(width, hidden or width), nn.Tanh(), nn.Linear(hidden or width, 1, bias=False))

    def forward(self, bags: JaggedTensor) -> Tensor:
        """(B, D) from bags of embeddings, (sum of lengths, D) in all; an empty bag gives zeros."""
        values, lengths = bags.values().to(self.score[0].weight.dtype), bags.lengths().long()
        size = len(lengths)
        rows = torch.repeat_interleave(torch.arange(size, device=values.device), lengths, output_size=len(values))
        scores = self.score(values).squeeze(1)
        peaks = scores.new_full((size,), -torch.inf).scatter_reduce(0, rows, scores.detach(), "amax")
        weights = torch.exp(scores - peaks[rows])
        totals = scores.new_zeros(size).index_add(0, rows, weights).clamp(min=1)  # 1 or more but for empty bags
        pooled = values.new_zeros(size, values.shape[1]).index_add(0, rows, values * weights[:, None])
        return pooled / totals[:, None]  # type: ignore[no-any-return]


class BagAttention(nn.Module):
    """One :class:`AttentionPooling` for each feature of an EmbeddingCollection.

    A module of its own, because TorchRec's pipelines do not trace into modules without tables: this one may read lengths.

    Args:
        names: keys of the collection's output, in order.
        width: D of its tables.
    """

    def __init__(self, names: Sequence[str], width: int) -> None:
        super().__init__()
        self._names = list(names)
        self.pools = nn.ModuleList(AttentionPooling(width) for _ in names)

    def forward(self, sequences: Mapping[str, JaggedTensor]) -> Tensor:
        """(B, features x D)."""
        return torch.cat([pool(sequences[name]) for name, pool in zip(self._names, self.pools, strict=True)], dim=1)


class RowPooling(nn.Module):
    """Pools bags whose rows were looked up one by one, because another tower reads their table so.

    Without tables, for the same reason as :class:`BagAttention`.
    """

    def forward(self, found: Tensor | JaggedTensor, pooling: PoolingType) -> Tensor:
        """(B, D) from (sum of lengths, D), zeros for an empty bag; what is a Tensor is pooled already."""
        if isinstance(found, Tensor):
            return found
        values, lengths = found.values(), found.lengths().long()
        rows = torch.repeat_interleave(torch.arange(len(lengths), device=values.device), lengths, output_size=len(values))
        summed = values.new_zeros(len(lengths), values.shape[1]).index_add(0, rows, values)
        return summed / lengths.clamp(min=1)[:, None] if pooling == PoolingType.MEAN else summed  # type: ignore[no-any-return]
