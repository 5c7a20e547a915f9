"""candidate_hits(): ranks each query's target among candidates of its own, such as the target and 99 negatives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.metrics.catalogue import check_scores
from torchrec_ext.train.metrics.hits import Hits, first_gains
from torchrec_ext.train.metrics.shares import (
    Kept,
    Recommender,
    embed_all,
    embed_own,
    gather_uneven_rows,
    own_start,
)

# Each pair holds both towers' outputs: 4 MiB at width 64.
_PAIRS_PER_BLOCK = 2**13


@dataclass(frozen=True)
class Candidates:
    """The candidates of U queries, the target first; the same on every rank.

    An id counts once in a row, at its first place: a target that is also among its own negatives, as for 156 of the
    6,040 users in the test file of He et al. 2017, has no rival in itself.

    Args:
        ids: items, (U, 1 + N) int64; below 0 for padding, if a row has fewer candidates.

    Raises:
        ValueError: another shape or type, or a row without a target.
    """

    ids: Tensor

    def __post_init__(self) -> None:
        ids = self.ids
        if ids.dim() != 2 or not ids.shape[1] or ids.dtype != torch.int64:
            raise ValueError(
                f"ids: {ids.dtype} of shape {tuple(ids.shape)}; must be int64 (U, 1 + N), the target first"
            )
        if len(ids) and int(ids[:, 0].min()) < 0:
            row = int(ids[:, 0].argmin())
            raise ValueError(
                f"ids: row {row} begins with {int(ids[row, 0])}; must begin with the target, an item of 0 or more"
            )

    @property
    def queries(self) -> int:
        """The number of queries, U."""
        return len(self.ids)

    def gains(self, scores: Tensor, start: int, k: int) -> Tensor:
        """Returns the gains of queries ``start`` to ``start + B``, (B, k), by scores (B, I) of all items."""
        ids = self.ids[start : start + len(scores)].to(scores.device)
        return gains_among(scores.gather(1, ids.clamp(min=0)), ids, k, start)

    def hits(self, gains: Tensor) -> Hits:
        """Returns the hits of all queries, given their gains (U, k)."""
        ones = torch.ones(len(gains), 1)
        return Hits(gains, pad(ones, (0, gains.shape[1] - 1)), ones[:, 0].long())


def gains_among(scores: Tensor, ids: Tensor, k: int, start: int = 0) -> Tensor:
    """Returns whether the target is at each of the first k places, (B, k), among candidates ``ids`` (B, 1 + N).

    Args:
        scores: scores of the candidates, (B, 1 + N), the target's first.
        ids: see :class:`Candidates`.
        k: number of first places.
        start: number of the first query.

    Raises:
        ValueError: shapes differ, a score is NaN, or a target's score is infinite.
    """
    if scores.shape != ids.shape:
        raise ValueError(
            f"scores: shape {tuple(scores.shape)}, ids: {tuple(ids.shape)}; both must be (B, 1 + N), the target first"
        )
    ordered, order = ids.sort(dim=1, stable=True)
    is_repeated = pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
    left_out = torch.zeros_like(is_repeated).scatter_(1, order, is_repeated) | (ids < 0)
    scores = scores.masked_fill(left_out, -torch.inf)
    rows = torch.arange(len(scores), device=scores.device)
    check_scores(scores, rows, torch.zeros_like(rows), start)
    grades = torch.zeros_like(scores, dtype=torch.float32)
    grades[:, 0] = 1.0
    return first_gains(scores, grades, k, start)


@torch.no_grad()
def candidate_hits(
    model: Recommender,
    runtime: Runtime,
    queries: Iterable[Kept],
    candidates: Iterable[Kept],
    question: Candidates,
    *,
    k: int = 10,
    towers: Sequence[str] = ("user", "item"),
) -> Hits:
    """Ranks each query's target among its own candidates; every rank must call it and gets the hits of all queries.

    Both towers run once per row, as in :func:`catalogue_hits`; the interaction runs over the pairs, 2**13 at a time.

    Args:
        model: the model; under DistributedModelParallel its ``module``.
        runtime: rank and device of this process.
        queries: the batch and ``keep`` of each :class:`PaddedRows` of the U queries in :func:`own_share`.
        candidates: the batch and ``keep`` of each :class:`PaddedRows` of the items 0 to I - 1.
        question: the candidates of each query.
        k: number of first places, the greatest of the figures to compute.
        towers: names of the towers, see :func:`catalogue_hits`.

    Raises:
        ValueError: a score is NaN, or the batches have another number of queries than the question.
    """
    items = embed_all(model, towers[-1], candidates, runtime)
    embedded = embed_own(model, towers[:-1], queries, runtime)
    start = own_start(len(embedded[0]), question.queries, runtime)
    own_ids = question.ids[start : start + len(embedded[0])].to(items.device)
    width = own_ids.shape[1]
    gains = [torch.zeros(0, k, device=runtime.device)]
    rows = max(1, _PAIRS_PER_BLOCK // width)
    parts = [torch.split(tensor, rows) for tensor in (*embedded, own_ids)]
    for *block_towers, ids in zip(*parts, strict=True):
        outputs = [tensor.repeat_interleave(width, dim=0) for tensor in block_towers]
        # Padding has ids below 0: it is scored as item 0, and left out of the ranking.
        outputs.append(items[ids.clamp(min=0).flatten()])
        scores = model.interaction(outputs).view(ids.shape)
        gains.append(gains_among(scores, ids, k, start))
        start += len(ids)
    return question.hits(gather_uneven_rows(torch.cat(gains), runtime).cpu())
