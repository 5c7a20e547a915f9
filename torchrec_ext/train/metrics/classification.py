"""AUC, log loss, normalised entropy and calibration of logits: exact, or streaming in memory of 4 MiB.

A row counts by its weight, as in the losses; rows of weight 0 are padding. These figures replace two libraries:

- torchmetrics 1.0.3 puts logits through a float32 sigmoid, after which all logits above 17 tie, and adds areas in
  float32.
- torchrec's AUC ignores ties and forgets rows outside of its window. Its log loss is in bits, of probabilities clamped
  at 1e-12.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.metrics.shares import gather_uneven_rows

# Sign, exponent and 9 bits after the point: a bin is at most a 512th of its logits
# wide.
BITS = 18


def auc(logits: Tensor, labels: Tensor, weights: Tensor, runtime: Runtime) -> float:
    """Returns the exact area under the ROC curve over the rows of all ranks; a tie counts half; NaN for one class.

    Every rank must call it, with as many rows as it has, and holds some 150 bytes for each row of all ranks while it
    sorts.

    Args:
        logits: logits or probabilities, (B,); only their order counts.
        labels: labels, (B,), 0 to 1; a label in between counts in part for either class.
        weights: weights, (B,), 0 or more.
        runtime: rank and device of this process.

    Raises:
        ValueError: shapes differ, a logit is not finite, a label is outside 0 to 1, or a weight is below 0.
    """
    rows = gather_uneven_rows(
        torch.stack(counted_rows(logits, labels, weights), dim=1), runtime
    )
    values, places = torch.unique(rows[:, 0], return_inverse=True)
    classes = torch.zeros(2, len(values), dtype=torch.float64, device=rows.device)
    classes.index_add_(1, places, by_class(rows[:, 1], rows[:, 2]))
    return _area(classes)[0]


def classification_metrics(
    logits: Tensor, labels: Tensor, weights: Tensor, runtime: Runtime
) -> dict[str, float]:
    """Returns exact ``auc``, ``log_loss``, ``ne``, ``calibration`` of all ranks' rows; arguments as for :func:`auc`."""
    other_figures = ClassificationMetrics(logits.device)
    other_figures.update(logits, labels, weights)
    return {"auc": auc(logits, labels, weights, runtime), **other_figures.sums(runtime)}


def classification_names(*, calibrated: bool) -> list[str]:
    """Returns the names of the figures of labelled rows: the AUC alone for scores without calibration."""
    names = ["auc"]
    if calibrated:
        names += ["log_loss", "ne", "calibration"]
    return names


class ClassificationMetrics:
    """Classification figures over any number of updates and all ranks, in 4 MiB; all but the AUC are exact.

    For the AUC, logits are cut to 10 significant bits, and logits with the same bits count as tied.
    ``auc_error`` bounds the difference.

    Args:
        device: device of the sums; the CPU by default.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)
        self._classes = torch.zeros(2, 2**BITS, dtype=torch.float64, device=device)

    def update(self, logits: Tensor, labels: Tensor, weights: Tensor) -> None:
        """Adds rows, each argument (B,), as for :func:`auc`."""
        device = self._sums.device
        logits, labels, weights = counted_rows(
            logits.to(device), labels.to(device), weights.to(device)
        )
        classes = by_class(labels, weights)
        loss = binary_cross_entropy_with_logits(
            logits, labels, weight=weights, reduction="sum"
        )
        self._sums += torch.stack(
            [loss, (weights * logits.sigmoid()).sum(), *classes.sum(1)]
        )
        # Bins 0 to 2**BITS - 1, (B,) int64, in the order of the logits: the first bits
        # of each float32. As integers, the bits of positive floats are in the order of
        # the floats. Those of negative floats are reversed, so all of their bits but
        # the sign are flipped. 0.0 is added, because -0.0 is the same number as 0.0 in
        # other bits.
        bits = (logits.float() + 0.0).view(torch.int32)
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        bins: Tensor = (ordered >> (32 - BITS)).long() + 2 ** (BITS - 1)
        self._classes.index_add_(1, bins, classes)

    def compute(self, runtime: Runtime) -> dict[str, float]:
        """Returns ``auc``, ``auc_error`` and the figures of :meth:`sums`; every rank must call it.

        The exact AUC of all rows is at most ``auc_error`` away: half the share of pairs that fell into one bin.
        """
        area, error = _area(_all_ranks(self._classes, runtime))
        return {"auc": area, "auc_error": error, **self.sums(runtime)}

    def sums(self, runtime: Runtime) -> dict[str, float]:
        """Returns ``log_loss`` in nats, ``ne`` and ``calibration``; every rank must call it.

        ``ne`` is the log loss divided by that of always predicting the mean label (He et al. 2014), ``calibration`` the
        mean prediction divided by the mean label. NaN if there are no rows, or all are of one class.
        """
        loss, predicted_positives, positive, negative = _all_ranks(
            self._sums, runtime
        ).tolist()
        total = positive + negative
        if not total:
            return dict.fromkeys(("log_loss", "ne", "calibration"), math.nan)
        figures = {"log_loss": loss / total, "ne": math.nan, "calibration": math.nan}
        if positive and negative:
            share = positive / total
            other = negative / total
            # The log loss of always predicting the mean label.
            entropy = -(share * math.log(share) + other * math.log(other))
            figures["ne"] = figures["log_loss"] / entropy
        if positive:
            figures["calibration"] = predicted_positives / positive
        return figures


def counted_rows(logits: Tensor, labels: Tensor, weights: Tensor) -> list[Tensor]:
    """Checks the rows, and returns the rows of weight above 0 in float64."""
    if logits.dim() != 1 or not logits.shape == labels.shape == weights.shape:
        raise ValueError(
            f"logits {tuple(logits.shape)}, labels {tuple(labels.shape)}, weights {tuple(weights.shape)}: must all be "
            "(B,), one for each row"
        )
    has_weight = weights != 0
    logits = logits.detach()[has_weight].double()
    labels = labels.detach()[has_weight].double()
    weights = weights.detach()[has_weight].double()
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


def by_class(labels: Tensor, weights: Tensor) -> Tensor:
    """Returns the weight of each row as a positive, and as a negative, (2, B)."""
    return torch.stack([weights * labels, weights * (1 - labels)])


def _area(classes: Tensor) -> tuple[float, float]:
    """Returns the share of pairs in order, ties half, and half the share of ties; ``classes`` (2, V) ascend."""
    positive, negative = classes
    pairs = float(positive.sum() * negative.sum())
    if not pairs:
        return math.nan, math.nan
    # A pair is in order if its negative row is below; pairs within one value tie and
    # count half.
    negatives_below = negative.cumsum(0) - negative
    ordered = float((positive * (negatives_below + negative / 2)).sum())
    tied = float((positive * negative).sum())
    return ordered / pairs, tied / 2 / pairs


def _all_ranks(sums: Tensor, runtime: Runtime) -> Tensor:
    """Returns the sum over ranks; ``sums`` itself is unchanged."""
    if runtime.world_size == 1:
        return sums
    # A copy, because later updates add to this rank's own sums.
    total = sums.to(runtime.device, copy=True)
    dist.all_reduce(total)
    return total
