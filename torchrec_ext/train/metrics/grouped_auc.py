"""Grouped AUC: how well the rows of each user, or of each session, are ordered among themselves."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.metrics.classification import by_class, counted_rows
from torchrec_ext.train.metrics.shares import gather_rows


class GroupedAuc(NamedTuple):
    """``value``, over ``groups`` groups with rows of both classes; ``skipped`` groups have rows of one class only."""

    value: float
    groups: int
    skipped: int


def grouped_auc(logits: Tensor, labels: Tensor, weights: Tensor, groups: Tensor, runtime: Runtime) -> GroupedAuc:
    """Exact mean over groups of the AUC within each, weighted by the group's weight (Zhu et al. 2017, "GAUC").

    Ours because torchrec's GAUC weighs all groups alike, orders ties by their place, and needs each group whole in one batch. A
    group may lie on several ranks. Every rank must call it, and holds some 200 bytes for each row of all ranks while it sorts.

    Args:
        logits: (B,), as for :func:`auc`.
        labels: (B,) likewise.
        weights: (B,) likewise.
        groups: (B,) int64 the group of each row, such as its user.
        runtime: this process's place in the job.

    Returns:
        The value, NaN where every group is of one class; how many groups counted, and how many were skipped.
    """
    if groups.shape != logits.shape or groups.is_floating_point():
        raise ValueError(
            f"groups: {groups.dtype} of shape {tuple(groups.shape)}; must be integers, one for each of {len(logits)} rows"
        )
    rows = gather_rows(torch.stack(counted_rows(logits, labels, weights), dim=1), runtime)
    names, group = torch.unique(gather_rows(groups[weights != 0].long(), runtime), return_inverse=True)
    values, place = torch.unique(rows[:, 0], return_inverse=True)
    cells, cell = torch.unique(group * len(values) + place, return_inverse=True)  # by group, then by ascending logit
    positive, negative = torch.zeros(2, len(cells), dtype=torch.float64, device=rows.device).index_add_(
        1, cell, by_class(rows[:, 1], rows[:, 2])
    )
    owner = cells // max(1, len(values))
    zeros = torch.zeros(len(names), dtype=torch.float64, device=rows.device)
    positives, negatives = zeros.index_add(0, owner, positive), zeros.index_add(0, owner, negative)
    below = negative.cumsum(0) - negative - (negatives.cumsum(0) - negatives)[owner]
    ordered = zeros.index_add(0, owner, positive * (below + negative / 2))
    both = (positives > 0) & (negatives > 0)
    size = (positives + negatives)[both]
    mean = float((size * ordered[both] / (positives * negatives)[both]).sum() / size.sum()) if len(size) else math.nan
    return GroupedAuc(mean, len(size), len(names) - len(size))
