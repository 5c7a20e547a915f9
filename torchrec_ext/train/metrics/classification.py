"""AUC, log loss, normalised entropy and calibration of logits, exact over the rows of all ranks.

A row counts by its weight, as in the losses; rows of weight 0 are padding. These figures replace two libraries:

- torchmetrics 1.0.3 puts logits through a float32 sigmoid, after which all logits above 17 tie, and adds areas in
  float32.
- torchrec's AUC ignores ties and forgets rows outside of its window. Its log loss is in bits, of probabilities clamped
  at 1e-12.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.metrics.shares import gather_uneven_rows


def auc(logits: Tensor, labels: Tensor, weights: Tensor, runtime: Runtime) -> float:
    """Returns the exact area under the ROC curve, see :func:`classification_metrics`."""
    return classification_metrics(logits, labels, weights, runtime)["auc"]


def classification_metrics(
    logits: Tensor, labels: Tensor, weights: Tensor, runtime: Runtime
) -> dict[str, float]:
    """Returns the exact ``auc``, ``log_loss``, ``ne`` and ``calibration`` of all ranks' rows.

    Every rank must call it, with as many rows as it has, and holds some 150 bytes for each row of all ranks while it
    sorts. ``auc``: the share of pairs of a positive and a negative in the right order; a tie counts half.
    ``log_loss``: in nats. ``ne``: the log loss divided by that of always predicting the mean label (He et al. 2014).
    ``calibration``: the mean prediction divided by the mean label. A figure that the rows do not define is NaN.

    Args:
        logits: logits, (B,).
        labels: labels, (B,), 0 to 1; a label in between counts in part for either class.
        weights: weights, (B,), 0 or more.
        runtime: rank and device of this process.

    Raises:
        ValueError: shapes differ, a logit is not finite, a label is outside 0 to 1, or a weight is below 0.
    """
    metrics = ClassificationMetrics()
    metrics.update(logits, labels, weights)
    return metrics.compute(runtime)


def classification_names(*, calibrated: bool) -> list[str]:
    """Returns the names of the figures of labelled rows: the AUC alone for scores without calibration."""
    names = ["auc"]
    if calibrated:
        names += ["log_loss", "ne", "calibration"]
    return names


class ClassificationMetrics:
    """Classification figures over any number of updates; keeps three numbers for each row."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []

    def update(self, logits: Tensor, labels: Tensor, weights: Tensor) -> None:
        """Adds rows, each argument (B,), as for :func:`classification_metrics`."""
        self._rows.append(torch.stack(_counted_rows(logits, labels, weights), dim=1))

    def compute(self, runtime: Runtime) -> dict[str, float]:
        """Returns the figures of all ranks' rows; every rank must call it."""
        no_rows = torch.zeros(0, 3, dtype=torch.float64)
        own_rows = torch.cat([rows.double().cpu() for rows in (no_rows, *self._rows)])
        rows = gather_uneven_rows(own_rows.to(runtime.device), runtime)
        logits, labels, weights = rows.unbind(1)
        classes = torch.stack([weights * labels, weights * (1 - labels)])
        positive, negative = classes.sum(1).tolist()
        names = classification_names(calibrated=True)
        figures = dict.fromkeys(names, math.nan)
        if not len(rows):
            return figures
        loss = binary_cross_entropy_with_logits(
            logits, labels, weight=weights, reduction="sum"
        )
        figures["log_loss"] = float(loss) / (positive + negative)
        if positive:
            figures["calibration"] = float(weights @ logits.sigmoid()) / positive
        if positive and negative:
            figures["auc"] = _area(logits, classes)
            share = positive / (positive + negative)
            entropy = -(share * math.log(share) + (1 - share) * math.log(1 - share))
            figures["ne"] = figures["log_loss"] / entropy
        return figures


def _area(logits: Tensor, classes: Tensor) -> float:
    """Returns the share of pairs in order, ties half, given each row's weight as a positive and a negative, (2, B)."""
    values, places = torch.unique(logits, return_inverse=True)
    by_value = classes.new_zeros(2, len(values)).index_add_(1, places, classes)
    positive, negative = by_value
    # A pair is in order if its negative row is below; pairs within one value tie.
    negatives_below = negative.cumsum(0) - negative
    ordered = positive @ (negatives_below + negative / 2)
    return float(ordered / (positive.sum() * negative.sum()))


def _counted_rows(logits: Tensor, labels: Tensor, weights: Tensor) -> list[Tensor]:
    """Checks the rows, and returns those of weight above 0."""
    if logits.dim() != 1 or not logits.shape == labels.shape == weights.shape:
        raise ValueError(
            f"logits {tuple(logits.shape)}, labels {tuple(labels.shape)}, weights {tuple(weights.shape)}: must all be "
            "(B,), one for each row"
        )
    has_weight = weights != 0
    logits = logits.detach()[has_weight]
    labels = labels.detach()[has_weight]
    weights = weights.detach()[has_weight]
    rules = (
        ("logits", logits, ~torch.isfinite(logits), "finite: has training diverged?"),
        (
            "labels",
            labels,
            ~((labels >= 0) & (labels <= 1)),
            "0 to 1: turn ratings into 0 and 1 first",
        ),
        (
            "weights",
            weights,
            ~((weights > 0) & (weights < torch.inf)),
            "0 or more, and finite; 0 marks padding",
        ),
    )
    for name, tensor, bad, rule in rules:
        if bad.any():
            raise ValueError(
                f"{name}: {float(tensor[bad][0])} in {int(bad.sum())} of {len(tensor)} rows; must be {rule}"
            )
    return [logits, labels, weights]
