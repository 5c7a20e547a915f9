"""A user's model of two tables and a layer over both, and its loss."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D = 4


class Pairs(nn.Module):
    """A user and an item, a network over both."""

    def __init__(
        self, users: int, items: int, sparse: bool = False, **item: Any
    ) -> None:
        super().__init__()
        self.user = nn.Embedding(users, D, sparse=sparse)
        self.item = nn.Embedding(items, D, sparse=sparse, **item)
        self.top = nn.Linear(2 * D, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.top(torch.cat([self.user(user), self.item(item)], 1)).squeeze(1)  # type: ignore[no-any-return]


def logistic(model: nn.Module) -> Callable[..., Tensor]:
    """Returns the loss of a batch whose last tensor is the label."""
    return lambda *batch: F.binary_cross_entropy_with_logits(
        model(*batch[:-1]), batch[-1]
    )
