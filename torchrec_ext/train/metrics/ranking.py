"""HR, recall, precision, NDCG, MRR and MAP from the ranks of the relevant items, ties broken without favour.

These figures replace torchmetrics and torchrec. Both sort the scores, so a tie goes to the first candidate, and keep
every score; torchmetrics loops over the queries in Python. Figures computed from ranks are running sums.

candidate_ranks(): ranks among given candidates, such as the target and 99 negatives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.config import Figure
from torchrec_ext.train.metrics.evaluation_watch import watched
from torchrec_ext.train.metrics.shares import (
    Kept,
    Recommender,
    embed_all,
    embed_own,
    gather_uneven_rows,
    own_start,
)

_DEFAULT_FIGURES: tuple[Figure, ...] = ("hr", "ndcg")


class TargetRanks(NamedTuple):
    """Ranks of T relevant items: ``better`` (T,) candidates score higher, ``ties`` (T,) others score the same.

    ``queries`` (T,) is the query of each, ascending; None if each query has one relevant item. A query's other relevant
    items are candidates like all others.
    """

    better: Tensor
    ties: Tensor
    queries: Tensor | None = None


def joined_ranks(blocks: Sequence[TargetRanks]) -> TargetRanks:
    """Concatenates the ranks of one or more blocks of queries, in order."""
    better, ties, queries = zip(*blocks, strict=True)
    all_queries = None
    # The blocks of one question have numbers of queries all or none.
    if queries[0] is not None:
        all_queries = torch.cat(queries)
    return TargetRanks(torch.cat(better), torch.cat(ties), all_queries)


def ranking_metrics(
    ranks: TargetRanks,
    k: int | Sequence[int] = 10,
    names: Sequence[Figure] = _DEFAULT_FIGURES,
) -> dict[str, float]:
    """Returns the mean over the queries of each figure at each k; see :func:`query_figures`.

    Example:
        >>> ranking_metrics(TargetRanks(torch.tensor([0, 9, 10]), torch.tensor([0, 1, 0])))["hr@10"]
        0.5
    """
    return {
        name: float(values.mean())
        for name, values in query_figures(ranks, k, names).items()
    }


def named_figures(
    ranks: TargetRanks, figures: Sequence[tuple[Figure, int]]
) -> dict[str, float]:
    """Returns the mean over the queries of each figure at its own k.

    Example:
        >>> named_figures(TargetRanks(torch.tensor([0, 9]), torch.tensor([0, 0])), [("hr", 5), ("mrr", 10)])
        {'hr@5': 0.5, 'mrr@10': 0.55}
    """
    ks = sorted({k for _, k in figures})
    names = sorted({name for name, _ in figures})
    values = ranking_metrics(ranks, ks, names)
    return {f"{name}@{k}": values[f"{name}@{k}"] for name, k in figures}


class RankingMetrics:
    """Means of ranking figures over any number of updates and all ranks, in memory for two numbers per figure.

    Args:
        k: number of first places, or several such numbers.
        names: names of the figures.
    """

    def __init__(
        self, k: int | Sequence[int] = 10, names: Sequence[Figure] = _DEFAULT_FIGURES
    ) -> None:
        self._k = k
        self._names = names
        self._keys = list(query_figures(_NO_RANKS, k, names))
        self._sums = torch.zeros(1 + len(self._keys), dtype=torch.float64)

    def update(self, ranks: TargetRanks) -> None:
        """Adds queries: each in one update of one rank only, with all its relevant items."""
        figures = query_figures(ranks, self._k, self._names)
        count = len(next(iter(figures.values())))
        sums = [torch.tensor(float(count)).double()]
        for values in figures.values():
            sums.append(values.sum().cpu())
        self._sums += torch.stack(sums)

    def compute(self, runtime: Runtime) -> dict[str, float]:
        """Returns the means over the queries of all ranks, NaN without queries; every rank must call it."""
        sums = self._sums.to(runtime.device, copy=True)
        if runtime.world_size > 1:
            dist.all_reduce(sums)
        return dict(zip(self._keys, (sums[1:] / sums[0]).tolist(), strict=True))


def query_figures(
    ranks: TargetRanks,
    k: int | Sequence[int] = 10,
    names: Sequence[Figure] = _DEFAULT_FIGURES,
) -> dict[str, Tensor]:
    """Returns the figures of each query, (U,) float64, by ``name@k``.

    ``hr``: whether a relevant item is among the first k. ``recall``: the share of the relevant items among the first k.
    ``precision``: the share of relevant items in the first k. ``ndcg``: the sum of 1 / log2(1 + place) over these,
    divided by its greatest possible value (Järvelin and Kekäläinen 2002). ``mrr``: 1 / place of the first relevant
    item, 0 beyond k. With several relevant items these are RecBole's figures; with one, ``recall`` equals ``hr``.

    Ties are broken without favour: a candidate that ties with t others is at each of the t + 1 places with equal
    probability, and the expected figure counts.

    Args:
        ranks: ranks of the relevant items.
        k: one or several numbers of first places, each 1 or more.
        names: names of the figures; ``map`` divides by the number of relevant items, k at most, as RecBole does.

    Raises:
        ValueError: a k is below 1, or a name is none of these.
    """
    ks = [k] if isinstance(k, int) else list(k)
    if not ks or min(ks) < 1:
        raise ValueError(f"k={ks}: must be 1 or more, one number or several")
    unknown = sorted(set(names) - set(get_args(Figure)))
    if unknown or not names:
        raise ValueError(
            f"names={list(names)}: must be some of {', '.join(get_args(Figure))}"
        )
    better = ranks.better.long()
    ties = ranks.ties.long()
    if ranks.queries is None:
        queries = torch.arange(len(better), device=better.device)
    else:
        queries = ranks.queries.to(better.device)
    # Numbers without gaps, as index_add needs them: an update may begin at any query.
    numbers, queries = torch.unique_consecutive(queries, return_inverse=True)
    places = _Places(better, ties, queries, len(numbers))
    figures: dict[str, Tensor] = {}
    for size in ks:
        hits, gain = places.expected(size)
        hit, first = places.first(size)
        ideal = _discounts(size, better.device)[places.relevant.clamp(max=size)]
        at_k = {
            "hr": hit,
            "recall": hits / places.relevant,
            "precision": hits / size,
            "ndcg": gain / ideal,
            "mrr": first,
        }
        # It costs a sort, so it is computed only on request.
        if "map" in names:
            at_k["map"] = places.precision_sum(size) / places.relevant.clamp(max=size)
        figures |= {f"{name}@{size}": at_k[name] for name in names}
    return figures


class _Places:
    """Computes sums over the ranks of T relevant items, for each of U queries."""

    def __init__(
        self, better: Tensor, ties: Tensor, queries: Tensor, count: int
    ) -> None:
        self._better = better
        self._ties = ties
        self._queries = queries
        self._zeros = torch.zeros(count, dtype=torch.float64, device=better.device)
        self.relevant = self._zeros.long().index_add_(
            0, queries, torch.ones_like(queries)
        )

    def expected(self, k: int) -> tuple[Tensor, Tensor]:
        """Returns the number of relevant items among the first k, (U,), and the sum of their discounts, (U,)."""
        first = self._better.clamp(max=k)
        last = (self._better + self._ties + 1).clamp(max=k)
        size = (self._ties + 1).double()
        discounts = _discounts(k, first.device)
        hits = self._zeros.index_add(0, self._queries, (last - first) / size)
        return hits, self._zeros.index_add(
            0, self._queries, (discounts[last] - discounts[first]) / size
        )

    def precision_sum(self, k: int) -> Tensor:
        """Returns the expected sum of the precisions at the places of the relevant items among the first k, (U,).

        A group of n candidates of one score, r of them relevant, is behind b candidates, R of them relevant. Its
        j-th place has a relevant item with probability r/n, and (j - 1) (r - 1) / (n - 1) relevant ones before it in
        the group (McSherry and Najork 2008, "Computing information retrieval performance measures efficiently in the
        presence of tied scores").
        """
        near = self._better < k
        # One number for a pair sorts in a fraction of the time of two.
        keys = self._queries[near] * k + self._better[near]
        cells, cell, relevant = torch.unique(
            keys, return_inverse=True, return_counts=True
        )
        cells = torch.stack([cells // k, cells % k], dim=1)
        size = (
            torch.zeros_like(relevant)
            .index_copy_(0, cell, self._ties[near] + 1)
            .double()
        )
        # Cells are ordered by query, then by the number of better candidates.
        before = relevant.cumsum(0) - relevant
        first = torch.ones_like(relevant, dtype=torch.bool)
        first[1:] = cells[1:, 0] != cells[:-1, 0]
        starts = torch.where(first, before, torch.zeros_like(before)).cummax(0).values
        ahead = (before - starts).double()[:, None]
        j = torch.arange(1, k + 1, device=cells.device)[None]
        position = cells[:, 1:] + j
        n = size[:, None]
        r = relevant.double()[:, None]
        precision = (ahead + 1 + (j - 1) * (r - 1) / (n - 1).clamp(min=1)) / position
        counted = (j <= n) & (position <= k)
        return self._zeros.index_add(
            0, cells[:, 0], (counted * precision * r / n).sum(1)
        )

    def first(self, k: int) -> tuple[Tensor, Tensor]:
        """Returns the probability that a relevant item is among the first k, and the expectation of 1 / its place.

        The first relevant item is in the query's best group of equal scores with a relevant item: n candidates, m of
        them relevant, after b better ones. The group's first j are irrelevant with probability
        (n - m)/n x (n - m - 1)/(n - 1) x ...
        """
        start = torch.full_like(self.relevant, torch.iinfo(torch.int64).max)
        start = start.scatter_reduce(0, self._queries, self._better, "amin")
        # Relevant items of one score have equal numbers of better candidates, so these
        # identify the group.
        in_group = self._better == start[self._queries]
        relevant = self._zeros.index_add(0, self._queries, in_group.double())
        size = self._zeros.scatter_reduce(
            0, self._queries, (self._ties + 1).double() * in_group, "amax"
        )
        hit = self._zeros.clone()
        reciprocal = self._zeros.clone()
        none_yet = torch.ones_like(self._zeros)
        for offset in range(k):
            remaining = (size - offset).clamp(min=1)
            here = torch.where(
                (offset < size) & (start + offset < k),
                none_yet * relevant / remaining,
                0.0,
            )
            hit += here
            reciprocal += here / (start + offset + 1)
            # Clamped, because past the end of a group fewer places are left than there
            # are relevant items.
            none_yet = none_yet * ((remaining - relevant) / remaining).clamp(min=0)
        return hit, reciprocal


def _discounts(k: int, device: torch.device) -> Tensor:
    """Returns the sums of 1 / log2(1 + place) over the first 0, 1, ... k places, (k + 1,)."""
    discounts = 1 / torch.log2(torch.arange(k, dtype=torch.float64, device=device) + 2)
    return torch.cat([discounts.new_zeros(1), discounts.cumsum(0)])


_NO_RANKS = TargetRanks(
    torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
)


# Each pair holds both towers' outputs: 4 MiB at width 64.
_PAIRS_PER_BLOCK = 2**13


def ranks_among(scores: Tensor, ids: Tensor) -> TargetRanks:
    """Ranks each row's first candidate among the row's others.

    An id counts once in a row, at its first index: a target that is also among its own negatives, as for 156 of the
    6,040 users in the test file of He et al. 2017, does not tie with itself.

    Args:
        scores: scores of the target and its N candidates, (U, 1 + N).
        ids: items, (U, 1 + N) int64; below 0 for padding, if a row has fewer candidates.

    Raises:
        ValueError: shapes differ, a row has no target, a score is NaN, or a target's score is infinite.

    Example:
        >>> better, ties, _ = ranks_among(torch.tensor([[0.5, 0.9, 0.5, 0.5]]), torch.tensor([[7, 3, 7, 4]]))
        >>> int(better), int(ties)
        (1, 1)
    """
    _check_candidates(scores, ids)
    target_scores = scores[:, :1]
    is_other = ~_find_repeated(ids) & (ids >= 0)
    is_other[:, 0] = False
    return TargetRanks(
        ((scores > target_scores) & is_other).sum(1),
        ((scores == target_scores) & is_other).sum(1),
    )


@torch.no_grad()
def candidate_ranks(
    model: Recommender,
    runtime: Runtime,
    queries: Iterable[Kept],
    candidates: Iterable[Kept],
    ids: Tensor,
    *,
    towers: Sequence[str] = ("user", "item"),
) -> TargetRanks:
    """Ranks each query's target among its own candidates; every rank must call it and gets the ranks of all queries.

    Both towers run once per row, as in :func:`catalogue_ranks`; the interaction runs over the pairs, 2**13 at a time.

    Args:
        model: the model; under DistributedModelParallel its ``module``.
        runtime: rank and device of this process.
        queries: the batch and ``keep`` of each :class:`PaddedRows` of the U queries in :func:`own_share`.
        candidates: the batch and ``keep`` of each :class:`PaddedRows` of the items 0 to I - 1.
        ids: items, (U, 1 + N), see :func:`ranks_among`, the same on every rank.
        towers: names of the towers, see :func:`catalogue_ranks`.

    Raises:
        ValueError: a score is NaN, a row has no target, or the batches have another number of queries than ``ids``.
    """
    items = embed_all(model, towers[-1], candidates, runtime)
    embedded = embed_own(model, towers[:-1], queries, runtime)
    start = own_start(len(embedded[0]), len(ids), runtime)
    own_ids = ids[start : start + len(embedded[0])].to(items.device)
    width = ids.shape[1]
    scores = []
    rows = max(1, _PAIRS_PER_BLOCK // width)
    most_blocks = max(1, -(-len(ids) // (runtime.world_size * rows)))
    parts = [torch.split(tensor, rows) for tensor in (*embedded, own_ids)]
    for *block_towers, block_ids in watched(zip(*parts, strict=True), most_blocks):
        outputs = [tensor.repeat_interleave(width, dim=0) for tensor in block_towers]
        # Padding has ids below 0: it is scored as item 0, and ranks_among() leaves it
        # out.
        candidates_of_block = items[block_ids.clamp(min=0).flatten()]
        scores.append(
            model.interaction([*outputs, candidates_of_block]).view(block_ids.shape)
        )
    return gather_ranks(ranks_among(torch.cat(scores), own_ids), runtime)


def gather_ranks(ranks: TargetRanks, runtime: Runtime) -> TargetRanks:
    """Gathers the ranks of all processes' queries, one relevant item each, in rank order."""
    better, ties = (
        gather_uneven_rows(
            torch.stack([ranks.better, ranks.ties], dim=1).to(runtime.device), runtime
        )
        .cpu()
        .unbind(1)
    )
    return TargetRanks(better, ties)


def _find_repeated(ids: Tensor) -> Tensor:
    """Marks each id that also occurs further left in its row, (U, 1 + N)."""
    ordered, order = ids.sort(dim=1, stable=True)
    is_repeated = torch.zeros_like(ids, dtype=torch.bool)
    is_repeated[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.zeros_like(is_repeated).scatter_(1, order, is_repeated)


def _check_candidates(scores: Tensor, ids: Tensor) -> None:
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
            f"row {row}: target {int(ids[row, 0])} with score {float(scores[row, 0])}; the first id of a row must be "
            "an item, 0 or more, and its score a number: leave padding rows out, or has training diverged?"
        )
    # NaN would count as worse than the target and flatter the model.
    nan = torch.isnan(scores) & (ids >= 0)
    if nan.any():
        row, column = nan.nonzero()[0].tolist()
        raise ValueError(
            f"row {row}: item {int(ids[row, column])} with score nan; a rank needs numbers: has training diverged?"
        )
