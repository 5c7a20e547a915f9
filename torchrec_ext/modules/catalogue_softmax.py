"""Softmax over a catalogue, whole or estimated from a sample that all positions share."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus


def catalogue_softmax(
    states: Tensor, positives: Tensor, targets: Tensor, candidates: Tensor, candidate_ids: Tensor, *, num_items: int
) -> Tensor:
    """(P,) cross entropy of each target among all items, the score of an item being its dot product with the state.

    The sum over all items but the target is estimated by num_items / C times the sum over the C candidates but those that are the
    target. With each item once among the candidates that is the exact softmax; with candidates drawn uniformly, with or without
    replacement, the sum is estimated without bias (Jean et al. 2015; Bengio and Senecal 2003).

    Args:
        states: (P, D).
        positives: (P, D) the embeddings of the targets.
        targets: (P,) int64 ids.
        candidates: (C, D) embeddings.
        candidate_ids: (C,) int64 ids; 0 is padding.
        num_items: items of the catalogue, ids 1 to num_items.
    """
    logits = states @ candidates.T
    rows, columns = _hits(targets, candidate_ids)
    # In place: the product's backward needs its inputs only, and P x C is the largest tensor of a step. Not -inf: where nothing is
    # left to sum, its gradient would be NaN.
    nothing = torch.finfo(logits.dtype).min
    logits[rows, columns] = nothing
    logits[:, candidate_ids == 0] = nothing
    own = (states * positives).sum(dim=1)
    scale = (num_items / (candidate_ids > 0).sum().to(logits)).log()
    return softplus(torch.logsumexp(logits, dim=1) + scale - own)


def _hits(targets: Tensor, candidate_ids: Tensor) -> tuple[Tensor, Tensor]:
    """All pairs (row, column) at which a candidate is the row's target."""
    ordered, places = candidate_ids.sort()
    first = torch.searchsorted(ordered, targets)
    counts = torch.searchsorted(ordered, targets, right=True) - first
    rows = torch.repeat_interleave(counts)
    nth = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    return rows, places[first[rows] + nth]
