"""Ranking among given candidates, such as the target and 99 negatives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.metrics.evaluation_watch import watched
from torchrec_ext.train.metrics.ranking import Ranks
from torchrec_ext.train.metrics.shares import Kept, Recommender, embed_all, embed_own, gather_rows, own_start

PAIRS_PER_BLOCK = 2**13  # each holds both towers' outputs: 4 MiB at width 64


def ranks_among(scores: Tensor, ids: Tensor) -> Ranks:
    """Where each row's first candidate stands among the row's others.

    An id counts once in a row, where it stands first: a target that is also among its own negatives, as for 156 of the 6,040 users
    in the test file of He et al. 2017, does not tie with itself.

    Args:
        scores: (U, 1 + N), of the target and its N candidates.
        ids: (U, 1 + N) int64 items; below 0 where a row has fewer candidates.

    Raises:
        ValueError: shapes that differ, a row without target, a score that is NaN, a target's that is infinite.

    Example:
        >>> better, ties, _ = ranks_among(torch.tensor([[0.5, 0.9, 0.5, 0.5]]), torch.tensor([[7, 3, 7, 4]]))
        >>> int(better), int(ties)
        (1, 1)
    """
    _check(scores, ids)
    wanted = scores[:, :1]
    others = ~_repeated(ids) & (ids >= 0)
    others[:, 0] = False
    return Ranks(((scores > wanted) & others).sum(1), ((scores == wanted) & others).sum(1))


@torch.no_grad()
def candidate_ranks(
    model: Recommender,
    runtime: Runtime,
    queries: Iterable[Kept],
    candidates: Iterable[Kept],
    ids: Tensor,
    *,
    towers: Sequence[str] = ("user", "item"),
) -> Ranks:
    """Ranks each query's target among its own candidates; every rank must call it and gets the ranks of all queries.

    Both towers run once per row, as in :func:`catalogue_ranks`; the interaction runs over the pairs, 2**13 at a time.

    Args:
        model: the model, under DistributedModelParallel its ``module``.
        runtime: this process's place in the job.
        queries: for each :class:`Share` of the U queries in :func:`own_share` the batch of its rows, and its ``keep``.
        candidates: batches of the items 0 to I - 1, likewise.
        ids: (U, 1 + N) as in :func:`ranks_among`, the same on every rank.
        towers: as in :func:`catalogue_ranks`.

    Raises:
        ValueError: a score that is no number, a row without target; batches of more or fewer queries than ``ids`` has rows.
    """
    items = embed_all(model, towers[-1], candidates, runtime)
    own = embed_own(model, towers[:-1], queries, runtime)
    start = own_start(len(own[0]), len(ids), runtime)
    asked = ids[start : start + len(own[0])].to(items.device)
    width, scores = ids.shape[1], []
    rows = max(1, PAIRS_PER_BLOCK // width)
    most = max(1, -(-len(ids) // (runtime.world_size * rows)))
    for *some, wanted in watched(zip(*(torch.split(part, rows) for part in (*own, asked)), strict=True), most):
        outputs = [part.repeat_interleave(width, dim=0) for part in some]
        scores.append(model.interaction([*outputs, items[wanted.clamp(min=0).flatten()]]).view(wanted.shape))
    return gather_ranks(ranks_among(torch.cat(scores), asked), runtime)


def gather_ranks(ranks: Ranks, runtime: Runtime) -> Ranks:
    """The ranks of all ranks' queries, one relevant item each, in rank order; for scores that were made otherwise."""
    better, ties = gather_rows(torch.stack([ranks.better, ranks.ties], dim=1).to(runtime.device), runtime).cpu().unbind(1)
    return Ranks(better, ties)


def _repeated(ids: Tensor) -> Tensor:
    """(U, 1 + N) whether the id stands further left in its row."""
    ordered, order = ids.sort(dim=1, stable=True)
    again = torch.zeros_like(ids, dtype=torch.bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.zeros_like(again).scatter_(1, order, again)


def _check(scores: Tensor, ids: Tensor) -> None:
    if scores.dim() != 2 or scores.shape != ids.shape or not scores.shape[1]:
        raise ValueError(
            f"scores: shape {tuple(scores.shape)}, ids: {tuple(ids.shape)}; both must be (U, 1 + N), the target first; "
            "turn the logits of flat rows with .view(-1, 1 + N)"
        )
    if ids.dtype != torch.int64:
        raise ValueError(f"ids: {ids.dtype}, must be int64; convert them with .long()")
    bad = (ids[:, 0] < 0) | ~torch.isfinite(scores[:, 0])
    if bad.any():
        row = int(bad.nonzero()[0])
        raise ValueError(
            f"row {row}: target {int(ids[row, 0])} with score {float(scores[row, 0])}; the first id of a row must be an item, 0 or "
            "more, and its score a number: leave padding rows out, or has training diverged?"
        )
    nan = torch.isnan(scores) & (ids >= 0)  # would count as worse than the target, and flatter the model
    if nan.any():
        row, place = nan.nonzero()[0].tolist()
        raise ValueError(f"row {row}: item {int(ids[row, place])} with score nan; a rank needs numbers: has training diverged?")
