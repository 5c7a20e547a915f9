"""Codistillation: models that train beside each other also learn from each other's slightly old predictions."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

from torchrec_ext.batch import TowerBatch
from torchrec_ext.modules.losses import check_rows

Measure = Literal["cross_entropy", "mse"]


def codistillation(logits: Tensor, batch: TowerBatch, peers: Tensor, *, measure: Measure = "cross_entropy") -> Tensor:
    """How far the predictions are from the mean of the peers', () from logits (B,) (Anil et al. 2018, algorithm 1).

    A term beside the loss of the labels, after some steps without it, in which the peers become worth learning from:
    ``bce(logits, batch) + codistillation(logits, batch, peers)``. Peers may be many steps old. Their predictions get no gradient.
    The mean over the rows of all ranks, like every loss.

    Args:
        logits: (B,) of the model that is trained.
        batch: the rows; those of weight 0 count nothing.
        peers: (P, B) logits of P stale peers for the same rows.
        measure: ``cross_entropy`` to the mean of the peers' probabilities, which is least, though not 0, where they agree; or
            ``mse`` to the mean of their logits.

    Raises:
        ValueError: shapes that do not fit together, no peer, another measure.

    Example:
        >>> import torch
        >>> rows = TowerBatch(None, None, labels=torch.ones(2), weights=torch.ones(2), total_weight=torch.tensor(2.0))
        >>> codistillation(torch.tensor([1.0, 3.0]), rows, torch.tensor([[1.0, 1.0], [1.0, 3.0]]), measure="mse")
        tensor(0.5000)
    """
    check_rows(logits, batch)
    if peers.dim() != 2 or peers.shape[1:] != logits.shape or not len(peers):
        raise ValueError(
            f"peers: shape {tuple(peers.shape)}, must be (P, B) = (1 or more, {len(logits)}), a row of logits for each peer; "
            "one peer's alone goes through [None]"
        )
    if measure not in get_args(Measure):
        raise ValueError(f"measure={measure!r}: must be one of {', '.join(get_args(Measure))}")
    peers = peers.detach()
    if measure == "mse":
        losses = mse_loss(logits, peers.mean(dim=0), reduction="none")
    else:
        losses = binary_cross_entropy_with_logits(logits, peers.sigmoid().mean(dim=0), reduction="none")
    return (losses * batch.weights).sum() / batch.total_weight
