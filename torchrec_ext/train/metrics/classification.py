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


def classification_names(*, calibrated: bool) -> list[str]:
    """Returns the names of the figures of labelled rows: the AUC alone for scores without calibration."""
    names = ["auc"]
    if calibrated:
        names += ["log_loss", "ne", "calibration"]
    return names


class ClassificationMetrics:
    """Exact ``auc``, ``log_loss``, ``ne`` and ``calibration`` over any number of updates; keeps three numbers a row.

    ``auc``: the share of pairs of a positive and a negative in the right order; a tie counts half. ``log_loss``: in
    nats. ``ne``: the log loss divided by that of always predicting the mean label (He et al. 2014). ``calibration``:
    the mean prediction divided by the mean label. A figure that the rows do not define is NaN.
    """

    def __init__(self) -> None:
        self._rows = [torch.zeros(0, 3, dtype=torch.float64)]

    def update(self, logits: Tensor, labels: Tensor, weights: Tensor) -> None:
        """Adds rows.

        Args:
            logits: logits, (B,).
            labels: labels, (B,), 0 to 1; a label in between counts in part for either class.
            weights: weights, (B,), 0 or more.

        Raises:
            ValueError: shapes differ, a logit is not finite, a label is outside 0 to 1, or a weight is below 0.
        """
        if logits.dim() != 1 or not logits.shape == labels.shape == weights.shape:
            raise ValueError(
                f"logits {tuple(logits.shape)}, labels {tuple(labels.shape)}, weights {tuple(weights.shape)}: must all "
                "be (B,), one for each row"
            )
        rows = torch.stack([logits, labels, weights], dim=1).detach()
        rows = rows[weights != 0].double()
        most = torch.finfo(torch.float64).max
        for column, (name, least, greatest, rule) in enumerate(
            (
                ("logits", -most, most, "finite: has training diverged?"),
                ("labels", 0, 1, "0 to 1: turn ratings into 0 and 1 first"),
                ("weights", 0, most, "0 or more, and finite; 0 marks padding"),
            )
        ):
            values = rows[:, column]
            bad = values[~((values >= least) & (values <= greatest))]
            if len(bad):
                raise ValueError(
                    f"{name}: {float(bad[0])} in {len(bad)} of {len(values)} rows; must be {rule}"
                )
        self._rows.append(rows.cpu())

    def compute(self, runtime: Runtime) -> dict[str, float]:
        """Returns the figures of all ranks' rows.

        Every rank must call it, and holds some 150 bytes for each row of all ranks while it sorts.
        """
        own_rows = torch.cat(self._rows).to(runtime.device)
        logits, labels, weights = gather_uneven_rows(own_rows, runtime).unbind(1)
        classes = torch.stack([weights * labels, weights * (1 - labels)])
        positive, negative = classes.sum(1).tolist()
        loss = binary_cross_entropy_with_logits(
            logits, labels, weight=weights, reduction="sum"
        )
        log_loss = _ratio(float(loss), positive + negative)
        share = torch.tensor(_ratio(positive, positive + negative), dtype=torch.float64)
        entropy = torch.special.entr(torch.stack([share, 1 - share])).sum()
        return {
            "auc": _ratio(_pairs_in_order(logits, classes), positive * negative),
            "log_loss": log_loss,
            "ne": _ratio(log_loss, float(entropy)),
            "calibration": _ratio(float(weights @ logits.sigmoid()), positive),
        }


def _ratio(value: float, total: float) -> float:
    return value / total if total else math.nan


def _pairs_in_order(logits: Tensor, classes: Tensor) -> float:
    """Returns the pairs in order, ties half, given each row's weight as a positive and a negative, (2, B)."""
    values, places = torch.unique(logits, return_inverse=True)
    by_value = classes.new_zeros(2, len(values)).index_add_(1, places, classes)
    positive, negative = by_value
    # A pair is in order if its negative row is below; pairs within one value tie.
    negatives_below = negative.cumsum(0) - negative
    return float(positive @ (negatives_below + negative / 2))
