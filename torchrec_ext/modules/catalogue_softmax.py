"""Softmax over a catalogue, whole or estimated from a sample that all positions share, a block of scores at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import softplus

from torchrec_ext.modules.losses import widened

SCORES_PER_BLOCK = 2**20  # 4 MiB: they stay in the cache between the passes over them, and P x C never is in memory


def catalogue_softmax(
    states: Tensor, positives: Tensor, targets: Tensor, candidates: Tensor, candidate_ids: Tensor, *, num_items: int
) -> Tensor:
    """(P,) cross entropy of each target among all items, the score of an item being its dot product with the state.

    The sum over all items but the target is estimated by num_items / C times the sum over the C candidates but those that are the
    target. With each item once among the candidates that is the exact softmax; with candidates drawn uniformly, with or without
    replacement, the sum is estimated without bias (Jean et al. 2015; Bengio and Senecal 2003). Scores are computed in float32 at
    least, under autocast too.

    Args:
        states: (P, D).
        positives: (P, D) the embeddings of the targets.
        targets: (P,) int64 ids.
        candidates: (C, D) embeddings.
        candidate_ids: (C,) int64 ids; 0 is padding.
        num_items: items of the catalogue, ids 1 to num_items.
    """
    states, positives, candidates = widened(states), widened(positives), widened(candidates)
    padding = candidate_ids == 0
    own = (states * positives).sum(dim=1)
    others: Tensor = _LogSumExp.apply(states, candidates, padding, *_hits(targets, candidate_ids))  # type: ignore[no-untyped-call]
    scale = (num_items / (~padding).sum().to(states)).log()
    return softplus(others + scale - own)


class _LogSumExp(torch.autograd.Function):
    """(P,) log of the sum of exp(state x candidate) over the candidates but padding and the (rows, columns) left out.

    The scores are made again in the backward, which costs a product and saves the memory and most passes over it: on one core 390
    ms in place of 710 for 1,400 x 12,101 scores, 45 in place of 62 for 1,400 x 2,048.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, candidates: Tensor, padding: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        sums = states.new_empty(len(states))
        with torch.autocast(states.device.type, enabled=False):
            for block, scores in _scores(states, candidates, padding, rows, columns):
                greatest = scores.amax(dim=1, keepdim=True)
                sums[block] = scores.sub_(greatest).exp_().sum(dim=1).log_().add_(greatest[:, 0])
        ctx.save_for_backward(states, candidates, padding, rows, columns, sums)
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        states, candidates, padding, rows, columns, sums = ctx.saved_tensors
        of_states, of_candidates = torch.empty_like(states), torch.zeros_like(candidates)
        with torch.autocast(states.device.type, enabled=False):
            for block, scores in _scores(states, candidates, padding, rows, columns):
                shares = scores.sub_(sums[block, None]).exp_().mul_(gradient[block, None])
                of_states[block] = shares @ candidates
                of_candidates.addmm_(shares.T, states[block])
        return of_states, of_candidates, None, None, None


def _scores(states: Tensor, candidates: Tensor, padding: Tensor, rows: Tensor, columns: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of states and their scores. What is left out is not -inf: where nothing is left to sum, the gradient would be NaN."""
    nothing = torch.finfo(states.dtype).min
    bias = torch.zeros_like(candidates[:, 0]).masked_fill(padding, nothing)
    size = max(1, SCORES_PER_BLOCK // max(len(candidates), 1))
    starts = range(0, len(states), size)
    bounds = torch.searchsorted(rows, torch.tensor([*starts, len(states)], device=rows.device)).tolist()
    for at, start in enumerate(starts):
        block, left_out = slice(start, min(start + size, len(states))), slice(bounds[at], bounds[at + 1])
        scores = torch.addmm(bias, states[block], candidates.T)
        scores[rows[left_out] - start, columns[left_out]] = nothing
        yield block, scores


def _hits(targets: Tensor, candidate_ids: Tensor) -> tuple[Tensor, Tensor]:
    """All pairs (row, column) at which a candidate is the row's target, by row."""
    ordered, places = candidate_ids.sort()
    first = torch.searchsorted(ordered, targets)
    counts = torch.searchsorted(ordered, targets, right=True) - first
    rows = torch.repeat_interleave(counts)
    nth = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    return rows, places[first[rows] + nth]
