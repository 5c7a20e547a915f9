"""Losses as functions of (logits, batch): each divides by the batch's total weight, so ranks' losses average to the global mean."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from torchrec_ext.batch import TowerBatch


def bce(logits: Tensor, batch: TowerBatch) -> Tensor:
    """Weighted binary cross entropy, () from logits (B,).

    The mean of this value over ranks is ``sum(weight * loss) / sum(weight)`` over the rows of all ranks.
    """
    loss = binary_cross_entropy_with_logits(logits, batch.labels, weight=batch.weights, reduction="sum")
    return loss / batch.total_weight
