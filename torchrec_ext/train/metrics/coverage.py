"""Catalogue coverage: the share of all items that are recommended to anyone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_ext.distributed.runtime import Runtime


class Coverage:
    """Which items stand in at least one query's list of the k best; exact over any number of updates, in a byte per item.

    Where candidates tie about the last place of a list, torch.topk chooses.

    Args:
        num_items: I, rows of the catalogue.
        k: length of a list.
        not_items: rows that cannot be recommended and so need not be.

    Example:
        >>> shown = Coverage(5, k=2)
        >>> shown.update(torch.tensor([[-torch.inf, 3.0, 2.0, 1.0, 0.0], [-torch.inf, 1.0, 9.0, 0.0, 8.0]]))
        >>> shown.compute(Runtime())
        {'coverage@2': 0.75}
    """

    def __init__(self, num_items: int, *, k: int = 10, not_items: Sequence[int] = (0,)) -> None:
        if k < 1 or num_items < 1:
            raise ValueError(f"num_items={num_items}, k={k}: both must be 1 or more")
        self._k = k
        self._shown = torch.zeros(num_items, dtype=torch.uint8)
        self._not_items = list(not_items)

    def update(self, scores: Tensor) -> None:
        """Adds the best of each row of ``scores`` (B, I), in which -inf is never shown."""
        if scores.shape[1] != len(self._shown):
            raise ValueError(f"scores: {scores.shape[1]} columns, must be num_items={len(self._shown)}")
        best = scores.topk(min(self._k, scores.shape[1]), sorted=False)
        self._shown[best.indices[best.values > -torch.inf].cpu()] = 1

    def compute(self, runtime: Runtime) -> dict[str, float]:
        """``coverage@k`` over the queries of all ranks; every rank must call it."""
        shown = self._shown.to(runtime.device, copy=True)
        if runtime.world_size > 1:
            dist.all_reduce(shown, dist.ReduceOp.MAX)
        shown[self._not_items] = 0
        return {f"coverage@{self._k}": int(shown.sum()) / (len(shown) - len(set(self._not_items)))}
