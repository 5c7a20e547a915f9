"""Losses as functions of (logits, batch): each divides by the batch's total weight, so ranks' losses average to the global mean.

Rows of weight 0 are padding and count nothing. A positive with its N negatives is a group of 1 + N rows, as the loader
makes them.

Codistillation: models that train beside each other also learn from each other's slightly old predictions.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, logsigmoid, mse_loss

from torchrec_ext.batch import TowerBatch
from torchrec_ext.modules.softmax import InBatch, widened


def bce(logits: Tensor, batch: TowerBatch) -> Tensor:
    """Weighted binary cross entropy, () from logits (B,).

    The mean of this value over ranks is ``sum(weight * loss) / sum(weight)`` over the rows of all ranks.
    """
    check_rows(logits, batch)
    loss = binary_cross_entropy_with_logits(logits, batch.labels, weight=batch.weights, reduction="sum")
    return loss / batch.total_weight


def bpr(logits: Tensor, batch: TowerBatch, *, negatives: int) -> Tensor:
    """-log sigmoid(positive - negative), () from logits (B x (1 + N),) (Rendle et al. 2009).

    The mean over the negatives of a positive, then over the positives of all ranks. Rows as for
    :func:`sampled_softmax`.
    """
    groups = _groups(logits, batch, negatives)
    return _mean(-logsigmoid(groups[:, :1] - groups[:, 1:]).mean(dim=1), batch)


def hinge(logits: Tensor, batch: TowerBatch, *, negatives: int, margin: float = 1.0, hardest: bool = False) -> Tensor:
    """By how much a negative is not ``margin`` below its positive, max(0, margin - positive + negative): () from (B x (1 + N),).

    The mean over the negatives of a positive, or its ``hardest`` alone, then over the positives of all ranks. Of logits
    that are negative distances it is the triplet loss (Schroff et al. 2015), with ``hardest`` as in metric learning
    (Hsieh et al. 2017).

    Args:
        logits: of rows as the loader makes them, a positive followed by its negatives.
        batch: the rows; the weight of a positive is that of its negatives.
        negatives: N.
        margin: greater than 0, in the unit of the logits.
        hardest: count only the negative with the greatest logit.

    Raises:
        ValueError: rows that are no groups of 1 + N, a margin that is not positive.
    """
    if not margin > 0:
        raise ValueError(
            f"margin={margin}: must be greater than 0; with 0, equal logits for all would be a perfect answer"
        )
    groups = _groups(logits, batch, negatives)
    short = (margin - groups[:, :1] + groups[:, 1:]).clamp(min=0)
    return _mean(short.amax(dim=1) if hardest else short.mean(dim=1), batch)


def sampled_softmax(
    logits: Tensor, batch: TowerBatch, *, negatives: int, temperature: float = 1.0, correct: bool = True
) -> Tensor:
    """Softmax cross entropy of each positive against its own N sampled negatives, () from logits (B x (1 + N),).

    The mean over the positives of all ranks. With ``correct`` each logit is s / temperature - log q, which makes it an
    estimate of the softmax over all items, whatever they were sampled by (Jean et al. 2015; Yi et al. 2019). The
    loader's samplers draw none of a user's known items, so there are no accidental hits; for other candidates see
    ``excluded`` of :func:`softmax_losses`.

    Args:
        logits: of rows as the loader makes them, a positive followed by its negatives.
        batch: the rows; the weight of a positive is that of its negatives.
        negatives: N.
        temperature: greater than 0.
        correct: subtract ``batch.log_q``.

    Raises:
        ValueError: rows that are no groups of 1 + N, a batch without log_q, a temperature that is not positive.
    """
    groups = _groups(logits, batch, negatives)
    if correct and batch.log_q is None:
        raise ValueError(
            "the batch has no log_q to correct by; let the loader draw the negatives, or pass correct=False"
        )
    log_q = batch.log_q.view(groups.shape) if correct and batch.log_q is not None else None
    targets = groups.new_zeros(len(groups), dtype=torch.int64)
    return _mean(softmax_losses(groups, targets, log_q=log_q, temperature=temperature), batch)


def in_batch_softmax(
    queries: Tensor, negatives: InBatch, *, weights: Tensor, total_weight: Tensor, temperature: float = 1.0
) -> Tensor:
    """Softmax cross entropy of each query's own candidate against the others of the batch, of all ranks: ().

    The mean over the rows of all ranks; corrected by ``negatives.log_q`` where it is given (Yi et al. 2019, equation
    3). Scores are computed in float32 at least, under autocast too: a log q of -20.37 would be -20.375 in bfloat16, and
    a score of 20.37 with it.

    Args:
        queries: (B, D).
        negatives: what :func:`in_batch_negatives` returned for the candidates.
        weights: (B,), 0 for padding.
        total_weight: () the sum of ``weights`` over all ranks divided by R, see :class:`TowerBatch`.
        temperature: greater than 0.

    Raises:
        ValueError: queries, candidates and weights that do not fit together, a temperature that is not positive.
    """
    _check_temperature(temperature)
    _check_in_batch(queries, negatives, weights)
    with torch.autocast(queries.device.type, enabled=False):
        scaled, candidates = (
            widened(queries) / temperature,
            widened(negatives.candidates).T,
        )  # B x D divisions in place of B x C
        logits = (
            scaled @ candidates
            if negatives.log_q is None
            else torch.addmm(-negatives.log_q.to(scaled), scaled, candidates)
        )
    return (softmax_losses(logits, negatives.targets, excluded=negatives.excluded) * weights).sum() / total_weight


def softmax_losses(
    logits: Tensor,
    targets: Tensor,
    *,
    log_q: Tensor | None = None,
    excluded: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """(B,) -log softmax(logits / temperature - log_q) at the targets, over the candidates that are not excluded, in float32.

    Args:
        logits: (B, N) of B queries with N candidates.
        targets: (B,) int64 the place of the positive.
        log_q: (N,) or (B, N) log-probability of each candidate, up to one constant per row.
        excluded: (B, N) bool; must not hold a target.
        temperature: greater than 0.

    Raises:
        ValueError: shapes that do not fit together, a temperature that is not positive.
    """
    _check_temperature(temperature)
    for name, part in (("log_q", log_q), ("excluded", excluded)):
        if part is not None and part.shape not in (logits.shape, logits.shape[1:] if name == "log_q" else logits.shape):
            raise ValueError(
                f"{name}: shape {tuple(part.shape)}, logits: {tuple(logits.shape)}; must be one for each candidate"
            )
    scores = widened(logits) / temperature
    if log_q is not None:
        scores = scores - log_q
    if excluded is not None:
        scores = scores.masked_fill(excluded, -torch.inf)
    return cross_entropy(scores, targets, reduction="none")


def check_rows(logits: Tensor, batch: TowerBatch) -> None:
    """Refuses logits that broadcasting would pair with the wrong rows.

    Raises:
        ValueError: not one logit for each row of ``batch``.
    """
    if logits.shape != batch.labels.shape:
        raise ValueError(
            f"logits: shape {tuple(logits.shape)} for a batch of {len(batch.labels)} rows; must be (B,) = "
            f"({len(batch.labels)},): "
            "squeeze the last axis of a layer with one output"
        )


def _groups(logits: Tensor, batch: TowerBatch, negatives: int) -> Tensor:
    """(B, 1 + N): each positive with its negatives."""
    width = 1 + negatives
    if negatives < 1 or len(logits) % width:
        raise ValueError(
            f"negatives={negatives} with {len(logits)} logits: must be those of the loader, 1 or more per positive"
        )
    check_rows(logits, batch)
    return logits.view(-1, width)


def _mean(losses: Tensor, batch: TowerBatch) -> Tensor:
    """() from a loss for each positive, (B,)."""
    width = len(batch.weights) // max(1, len(losses))
    return (losses * batch.weights.view(len(losses), width)[:, 0]).sum() / (batch.total_weight / width)


def _check_in_batch(queries: Tensor, negatives: InBatch, weights: Tensor) -> None:
    count, width = len(negatives.targets), negatives.candidates.shape[1]
    if queries.shape != (count, width) or weights.shape != (count,):
        raise ValueError(
            f"queries: shape {tuple(queries.shape)}, weights: {tuple(weights.shape)}; must be (B, D) = ({count}, "
            f"{width}) and "
            f"(B,) = ({count},), as in_batch_negatives was given {count} queries and candidates of width {width}"
        )


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: must be greater than 0; 0.05 to 0.2 suits embeddings of length 1")


Measure = Literal["cross_entropy", "mse"]


def codistillation(logits: Tensor, batch: TowerBatch, peers: Tensor, *, measure: Measure = "cross_entropy") -> Tensor:
    """How far the predictions are from the mean of the peers', () from logits (B,) (Anil et al. 2018, algorithm 1).

    A term beside the loss of the labels, after some steps without it, in which the peers become worth learning from:
    ``bce(logits, batch) + codistillation(logits, batch, peers)``. Peers may be many steps old. Their predictions get no
    gradient. The mean over the rows of all ranks, like every loss.

    Args:
        logits: (B,) of the model that is trained.
        batch: the rows; those of weight 0 count nothing.
        peers: (P, B) logits of P stale peers for the same rows.
        measure: ``cross_entropy`` to the mean of the peers' probabilities, which is least, though not 0, where they
            agree; or ``mse`` to the mean of their logits.

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
            f"peers: shape {tuple(peers.shape)}, must be (P, B) = (1 or more, {len(logits)}), a row of logits for each "
            "peer; "
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
