"""Losses as functions of (logits, batch): each divides by the batch's total weight, so ranks' losses average to the global mean."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from torchrec_ext.batch import TowerBatch
from torchrec_ext.modules.in_batch import InBatch


def bce(logits: Tensor, batch: TowerBatch) -> Tensor:
    """Weighted binary cross entropy, () from logits (B,).

    The mean of this value over ranks is ``sum(weight * loss) / sum(weight)`` over the rows of all ranks.
    """
    loss = binary_cross_entropy_with_logits(logits, batch.labels, weight=batch.weights, reduction="sum")
    return loss / batch.total_weight


def sampled_softmax(logits: Tensor, batch: TowerBatch, *, negatives: int, temperature: float = 1.0, correct: bool = True) -> Tensor:
    """Softmax cross entropy of each positive against its own N sampled negatives, () from logits (B x (1 + N),).

    The mean over the positives of all ranks. With ``correct`` each logit is s / temperature - log q, which makes it an estimate of
    the softmax over all items, whatever they were sampled by (Jean et al. 2015; Yi et al. 2019).

    Args:
        logits: of rows as the loader makes them, a positive followed by its negatives.
        batch: the rows; the weight of a positive is that of its negatives.
        negatives: N.
        temperature: greater than 0.
        correct: subtract ``batch.log_q``.

    Raises:
        ValueError: rows that are no groups of 1 + N, a batch without log_q, a temperature that is not positive.
    """
    width = 1 + negatives
    if negatives < 1 or len(logits) % width:
        raise ValueError(f"negatives={negatives} with {len(logits)} logits: must be those of the loader, 1 or more per positive")
    if correct and batch.log_q is None:
        raise ValueError("the batch has no log_q to correct by; let the loader draw the negatives, or pass correct=False")
    rows = logits.view(-1, width)
    log_q = batch.log_q.view(-1, width) if correct and batch.log_q is not None else None
    losses = softmax_losses(rows, rows.new_zeros(len(rows), dtype=torch.int64), log_q=log_q, temperature=temperature)
    return (losses * batch.weights.view(-1, width)[:, 0]).sum() / (batch.total_weight / width)


def in_batch_softmax(
    queries: Tensor, negatives: InBatch, *, weights: Tensor, total_weight: Tensor, temperature: float = 1.0
) -> Tensor:
    """Softmax cross entropy of each query's own candidate against the others of the batch, of all ranks: ().

    The mean over the rows of all ranks; corrected by ``negatives.log_q`` where it is given (Yi et al. 2019, equation 3).

    Args:
        queries: (B, D).
        negatives: what :func:`in_batch_negatives` returned for the candidates.
        weights: (B,), 0 for padding.
        total_weight: () the sum of ``weights`` over all ranks divided by R, see :class:`TowerBatch`.
        temperature: greater than 0.
    """
    _check_temperature(temperature)
    scaled, candidates = queries / temperature, negatives.candidates.T  # B x D divisions in place of B x C
    logits = scaled @ candidates if negatives.log_q is None else torch.addmm(-negatives.log_q.to(scaled), scaled, candidates)
    return (softmax_losses(logits, negatives.targets, excluded=negatives.excluded) * weights).sum() / total_weight


def softmax_losses(
    logits: Tensor, targets: Tensor, *, log_q: Tensor | None = None, excluded: Tensor | None = None, temperature: float = 1.0
) -> Tensor:
    """(B,) -log softmax(logits / temperature - log_q) at the targets, over the candidates that are not excluded.

    Args:
        logits: (B, N) of B queries with N candidates.
        targets: (B,) int64 the place of the positive.
        log_q: (N,) or (B, N) log-probability of each candidate, up to one constant per row.
        excluded: (B, N) bool; must not hold a target.
        temperature: greater than 0.
    """
    _check_temperature(temperature)
    scores = logits / temperature
    if log_q is not None:
        scores = scores - log_q
    if excluded is not None:
        scores = scores.masked_fill(excluded, -torch.inf)
    return cross_entropy(scores, targets, reduction="none")


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: must be greater than 0; 0.05 to 0.2 suits embeddings of length 1")
