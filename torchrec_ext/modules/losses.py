"""Losses are functions of (logits, batch); LOSSES of config.py names those that a recipe can train with.

Each divides by the batch's total weight, so that the mean of the ranks' losses is the mean over the global batch. Rows
of weight 0 are padding and do not count. A positive with its N negatives is a group of 1 + N rows, as the loader makes
them.

A new pairwise loss is a function here, in PAIRWISE, and a line in LOSSES of config.py: recipes then know it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    logsigmoid,
)

from torchrec_ext.batch import TowerBatch
from torchrec_ext.modules.config import LOSSES, RowLossName
from torchrec_ext.modules.softmax import InBatch, to_float32
from torchrec_ext.schema.validation import check_choice, check_least


def bce(logits: Tensor, batch: TowerBatch) -> Tensor:
    """Returns the weighted binary cross entropy, (), of logits (B,).

    The mean of this value over ranks is ``sum(weight * loss) / sum(weight)`` over the rows of all ranks.

    Raises:
        ValueError: not one logit for each row.
    """
    check_rows(logits, batch)
    # Divided here, because the total weight is that of all ranks.
    loss = binary_cross_entropy_with_logits(
        logits, batch.labels, weight=batch.weights, reduction="sum"
    )
    return loss / batch.total_weight


def bpr(logits: Tensor, batch: TowerBatch, *, negatives: int) -> Tensor:
    """Returns the mean of -log sigmoid(positive - negative), (), Bayesian personalised ranking (Rendle et al. 2009).

    The mean is taken over the negatives of a positive, then over the positives of all ranks.

    Args:
        logits: (B x (1 + N),) logits of rows as the loader makes them, each positive followed by its N negatives.
        batch: the rows; the weight of a positive is that of its negatives.
        negatives: N.

    Raises:
        ValueError: rows that are not groups of 1 + N.
    """
    groups = _groups(logits, batch, negatives)
    return _mean(-logsigmoid(groups[:, :1] - groups[:, 1:]).mean(dim=1), batch)


def sampled_softmax(
    logits: Tensor,
    batch: TowerBatch,
    *,
    negatives: int,
    temperature: float = 1.0,
) -> Tensor:
    """Returns the softmax cross entropy, (), of each positive against its own N sampled negatives.

    The mean is taken over the positives of all ranks. Each logit is s / temperature - log q, which makes
    the loss an estimate of the softmax over all items, however they were sampled (Jean et al. 2015; Yi et al.
    2019). The loader's samplers draw none of a user's known items, so there are no accidental hits; for other
    candidates see ``excluded`` of :func:`softmax_losses`.

    Args:
        logits: (B x (1 + N),) logits of rows as the loader makes them, each positive followed by its N negatives.
        batch: the rows; the weight of a positive is that of its negatives.
        negatives: N.
        temperature: divisor of the logits, greater than 0.

    Raises:
        ValueError: rows that are not groups of 1 + N, a batch without log_q, a temperature that is not positive.
    """
    groups = _groups(logits, batch, negatives)
    if batch.log_q is None:
        raise ValueError(
            "the batch has no log_q to correct by; let the loader draw the negatives"
        )
    log_q = batch.log_q.view(groups.shape)
    # The positive is the first of its group.
    targets = groups.new_zeros(len(groups), dtype=torch.int64)
    return _mean(
        softmax_losses(groups, targets, log_q=log_q, temperature=temperature), batch
    )


def in_batch_softmax(
    queries: Tensor,
    negatives: InBatch,
    *,
    weights: Tensor,
    total_weight: Tensor,
    temperature: float = 1.0,
    hardest: int = 0,
) -> Tensor:
    """Returns the softmax cross entropy, (), of each query's own candidate against the other candidates of all ranks.

    The mean is taken over the rows of all ranks. Scores are corrected by ``negatives.log_q`` where it is given (Yi et
    al. 2019, equation 3), and computed in float32 at least, under autocast too: in bfloat16 a log q of -20.37 would be
    -20.375.

    Args:
        queries: (B, D) vectors.
        negatives: result of :func:`in_batch_negatives` for the candidates.
        weights: (B,) weight of each row, 0 for padding.
        total_weight: () the sum of ``weights`` over all ranks divided by R, see :class:`TowerBatch`.
        temperature: divisor of the scores, greater than 0.
        hardest: number of negatives of each query that count, see :func:`softmax_losses`; 0 for all.

    Raises:
        ValueError: queries, candidates and weights that do not fit together, a temperature that is not positive.
    """
    _check_temperature(temperature)
    count = len(negatives.targets)
    width = negatives.candidates.shape[1]
    if queries.shape != (count, width) or weights.shape != (count,):
        raise ValueError(
            f"queries: shape {tuple(queries.shape)}, weights: {tuple(weights.shape)}; must be {count, width} and "
            f"({count},), those of in_batch_negatives"
        )
    with torch.autocast(queries.device.type, enabled=False):
        # Scaling the queries costs B x D divisions, scaling the scores B x C.
        scaled = to_float32(queries) / temperature
        candidates = to_float32(negatives.candidates).T
        if negatives.log_q is None:
            logits = scaled @ candidates
        else:
            logits = torch.addmm(-negatives.log_q.to(scaled), scaled, candidates)
    losses = softmax_losses(
        logits, negatives.targets, excluded=negatives.excluded, hardest=hardest
    )
    return (losses * weights).sum() / total_weight


def softmax_losses(
    logits: Tensor,
    targets: Tensor,
    *,
    log_q: Tensor | None = None,
    excluded: Tensor | None = None,
    temperature: float = 1.0,
    hardest: int = 0,
) -> Tensor:
    """Returns (B,) float32 losses, -log softmax(logits / temperature - log_q) at the targets.

    Args:
        logits: (B, N) logits of B queries with N candidates.
        targets: (B,) int64, the column of each query's positive.
        log_q: (N,) or (B, N) log-probability of each candidate, up to one constant per row.
        excluded: (B, N) bool, candidates that the softmax leaves out; must not hold a target.
        temperature: divisor of the logits, greater than 0.
        hardest: number of negatives of each row that count, those with the greatest corrected logits, and all that
            equal the last of them; 0 for all.

    Raises:
        ValueError: a temperature that is not positive, a negative ``hardest``.
    """
    _check_temperature(temperature)
    check_least("hardest", hardest, 0)
    scores = to_float32(logits) / temperature
    if log_q is not None:
        scores = scores - log_q
    if excluded is not None:
        # Its share of the softmax is then exactly 0.
        scores = scores.masked_fill(excluded, -torch.inf)
    if 0 < hardest < scores.shape[1] - 1:
        others = scores.scatter(1, targets[:, None], -torch.inf)
        easy = others < others.topk(hardest).values[:, -1:]
        scores = scores.masked_fill(
            easy.scatter(1, targets[:, None], False), -torch.inf
        )
    return cross_entropy(scores, targets, reduction="none")


def check_rows(logits: Tensor, batch: TowerBatch) -> None:
    """Refuses logits of a shape that broadcasting would pair with the wrong rows.

    Raises:
        ValueError: not one logit for each row of ``batch``.
    """
    if logits.shape != batch.labels.shape:
        raise ValueError(
            f"logits: shape {tuple(logits.shape)} for a batch of {len(batch.labels)} rows; must be (B,) = "
            f"({len(batch.labels)},): squeeze the last axis of a layer with one output"
        )


def _groups(logits: Tensor, batch: TowerBatch, negatives: int) -> Tensor:
    """Returns (B, 1 + N) logits, in float32 at least: each positive with its negatives."""
    width = 1 + negatives
    if negatives < 1 or len(logits) % width:
        raise ValueError(
            f"negatives={negatives} with {len(logits)} logits: must be those of the loader, 1 or more per positive"
        )
    check_rows(logits, batch)
    return to_float32(logits).view(-1, width)


def _mean(losses: Tensor, batch: TowerBatch) -> Tensor:
    """Returns the weighted mean, (), of the losses of each positive, (B,)."""
    width = len(batch.weights) // max(1, len(losses))
    # The total weight counts all rows of a group, each with the weight of its positive.
    return (losses * batch.weights.view(len(losses), width)[:, 0]).sum() / (
        batch.total_weight / width
    )


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(
            f"temperature={temperature}: must be greater than 0; 0.05 to 0.2 suits embeddings of length 1"
        )


def check_fed(loss: str, *, negatives: int, label: str | None) -> None:
    """Refuses rows unsuitable for a pairwise loss, or for one over the batch or the catalogue.

    Args:
        loss: a name in LOSSES.
        negatives: N that the loader draws for each positive.
        label: column of the rows' own labels; None if every row is a positive.

    Raises:
        ValueError: such rows.
    """
    kind = LOSSES[loss]
    if kind.pairwise and (label or not negatives):
        setting = f"loader.label={label!r}" if label else "loader.negatives=0"
        raise ValueError(
            f"model.loss={loss} with {setting}: it compares each positive with its own drawn negatives; set "
            "loader.negatives to 1 or more and no loader.label, or take model.loss=bce"
        )
    if kind.shared and negatives:
        raise ValueError(
            f"model.loss={loss} with loader.negatives={negatives}: drawn negatives would count as positives; set "
            "loader.negatives=0"
        )


# Functions from (logits, batch, negatives=) of the losses that are pairwise.
PAIRWISE: Mapping[str, Callable[..., Tensor]] = {
    "bpr": bpr,
    "sampled_softmax": sampled_softmax,
}


class PairwiseLoss(nn.Module):
    """A pairwise loss of LOSSES over groups of a positive and its N negatives.

    In evaluation rows have labels of their own and no negatives: there it is :func:`bce`.

    Args:
        name: one of LOSSES that is pairwise.
        temperature: divisor of the logits of ``sampled_softmax``.

    Attributes:
        negatives: N, which :meth:`expect_rows` sets; 0 before.
    """

    def __init__(self, name: str, *, temperature: float = 1.0) -> None:
        super().__init__()
        self.name = name
        self.negatives = 0
        self.function = PAIRWISE[name]
        if name == "sampled_softmax":
            self.function = partial(self.function, temperature=temperature)

    def expect_rows(self, *, negatives: int, label: str | None) -> None:
        """Sets N, before the first step.

        Raises:
            ValueError: rows that :func:`check_fed` refuses.
        """
        check_fed(self.name, negatives=negatives, label=label)
        self.negatives = negatives

    def forward(self, logits: Tensor, batch: TowerBatch) -> Tensor:
        """Returns the loss, (), of logits (B x (1 + N),)."""
        # Rows of an evaluation have labels of their own and no groups.
        if not self.training:
            return bce(logits, batch)
        loss: Tensor = self.function(logits, batch, negatives=self.negatives)
        return loss


def row_loss(
    name: str, *, temperature: float = 1.0
) -> Callable[[Tensor, TowerBatch], Tensor]:
    """Makes a loss by name for a TowerModel; ``expect_rows`` then sets N of a :class:`PairwiseLoss`.

    Args:
        name: one of LOSSES that is neither over the batch nor over the catalogue.
        temperature: see :class:`PairwiseLoss`.

    Raises:
        ValueError: another name.
    """
    check_choice("model.loss", name, get_args(RowLossName))
    if LOSSES[name].pairwise:
        return PairwiseLoss(name, temperature=temperature)
    return bce
