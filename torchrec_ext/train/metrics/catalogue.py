"""catalogue_ranks(): ranks the whole catalogue, a block of queries at a time, by comparing scores, without sorting.

Coverage: the share of all items that are recommended to anyone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.metrics.evaluation_watch import watched
from torchrec_ext.train.metrics.ranking import TargetRanks, gather_ranks, joined_ranks
from torchrec_ext.train.metrics.shares import (
    Kept,
    Recommender,
    embed_all,
    embed_own,
    own_start,
)


class Coverage:
    """Counts the share of items in at least one query's k best; exact over all updates, in a byte per item.

    If candidates tie for the last place of a list, torch.topk chooses.

    Args:
        num_items: number of rows of the catalogue, I.
        k: length of a list.
        not_items: rows without an item, left out of the numerator and of the denominator.

    Example:
        >>> shown = Coverage(5, k=2)
        >>> shown.update(torch.tensor([[-torch.inf, 3.0, 2.0, 1.0, 0.0], [-torch.inf, 1.0, 9.0, 0.0, 8.0]]))
        >>> shown.compute(Runtime())
        {'coverage@2': 0.75}
    """

    def __init__(
        self, num_items: int, *, k: int = 10, not_items: Sequence[int] = (0,)
    ) -> None:
        if k < 1 or num_items < 1:
            raise ValueError(f"num_items={num_items}, k={k}: both must be 1 or more")
        self._k = k
        self._is_recommended = torch.zeros(num_items, dtype=torch.uint8)
        self._not_items = list(not_items)

    def update(self, scores: Tensor) -> None:
        """Adds the k best items of each row of ``scores`` (B, I); an item with score -inf is never recommended."""
        if scores.shape[1] != len(self._is_recommended):
            raise ValueError(
                f"scores: {scores.shape[1]} columns, must be num_items={len(self._is_recommended)}"
            )
        best = scores.topk(min(self._k, scores.shape[1]), sorted=False)
        self._is_recommended[best.indices[best.values > -torch.inf].cpu()] = 1

    def compute(self, runtime: Runtime) -> dict[str, float]:
        """Returns ``coverage@k`` over the queries of all ranks; every rank must call it."""
        is_recommended = self._is_recommended.to(runtime.device, copy=True)
        if runtime.world_size > 1:
            dist.all_reduce(is_recommended, dist.ReduceOp.MAX)
        is_recommended[self._not_items] = 0
        num_items = len(is_recommended) - len(set(self._not_items))
        return {f"coverage@{self._k}": int(is_recommended.sum()) / num_items}


# The rank of a target that no list can show, beyond every number of items shown.
BEHIND = 1 << 31
# Scores of half a MiB stay in the cache between the passes over them.
_PAIRS_PER_BLOCK = 2**17
_ADVICE = (
    "cheaper: evaluate less often with train.eval_every, or score by a product (model.interaction=dot or cosine), "
    "where a network over both sides runs for every pair"
)


@dataclass(frozen=True, kw_only=True)
class Question:
    """Held-out interactions of U queries, to be ranked in the catalogue; the same on every rank.

    A target among its query's seen items counts as missed, because a server that leaves out seen items never returns
    it. Were it ranked without its rivals among the seen items, their absence would give it away.

    Args:
        targets: relevant items, (T,): one for each query in order, T = U, unless ``target_rows`` is given.
        seen_rows: query of each pair to leave out of the ranking, (P,).
        seen_items: item of each such pair, (P,).
        not_items: ids that are never ranked, such as the out-of-vocabulary row.
        target_rows: query of each target, (T,) int64, ascending, if queries have several targets. Each of 0 to U - 1
            occurs at least once.

    Raises:
        ValueError: lengths differ, a number is below 0, target_rows has a gap or is out of order, or a target is given
            twice.
    """

    targets: Tensor
    seen_rows: Tensor
    seen_items: Tensor
    not_items: Sequence[int] = (0,)
    target_rows: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.seen_rows) != len(self.seen_items):
            raise ValueError(
                f"seen_rows: {len(self.seen_rows)}, seen_items: {len(self.seen_items)}; must be pairs, equally many"
            )
        for name in ("targets", "seen_rows", "seen_items"):
            values = getattr(self, name)
            if len(values) and int(values.min()) < 0:
                raise ValueError(
                    f"{name}: {int(values.min())}; must be 0 or more: leave padding out"
                )
        if self.target_rows is not None:
            _check_targets(self.target_rows, self.targets)

    @cached_property
    def queries(self) -> int:
        """The number of queries, U."""
        if self.target_rows is None or not len(self.targets):
            return len(self.targets)
        return int(self.target_rows[-1]) + 1

    @cached_property
    def repeats(self) -> Tensor:
        """Whether each target is among the seen items of its query, (T,) bool."""
        rows = self.target_rows
        if rows is None:
            rows = torch.arange(len(self.targets))
        repeats = torch.zeros(len(self.targets), dtype=torch.bool)
        if not len(self.targets) or not len(self.seen_items):
            return repeats
        # One number for a pair sorts in a fraction of the time of two.
        size = 1 + max(int(self.targets.max()), int(self.seen_items.max()))
        keys, order = (rows.cpu() * size + self.targets.cpu()).sort()
        seen = self.seen_rows.cpu() * size + self.seen_items.cpu()
        places = torch.searchsorted(keys, seen).clamp(max=len(keys) - 1)
        repeats[order[places[keys[places] == seen]]] = True
        return repeats

    def targets_of(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rows, counted from ``start``, items and repeats of the targets of queries ``start`` to ``stop``."""
        if self.target_rows is None:
            items = self.targets[start:stop]
            return torch.arange(len(items)), items, self.repeats[start:stop]
        first, last = torch.searchsorted(
            self.target_rows, torch.tensor([start, stop])
        ).tolist()
        rows = self.target_rows[first:last] - start
        return rows, self.targets[first:last], self.repeats[first:last]

    def seen_by(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Returns rows, counted from ``start``, and items of the pairs left out by queries ``start`` to ``stop``."""
        rows, items = self._seen
        first, last = torch.searchsorted(rows, torch.tensor([start, stop])).tolist()
        return rows[first:last] - start, items[first:last]

    @cached_property
    def _seen(self) -> tuple[Tensor, Tensor]:
        """The pairs sorted by query, so that the pairs of a block are one slice."""
        if bool((self.seen_rows[1:] >= self.seen_rows[:-1]).all()):
            return self.seen_rows.contiguous(), self.seen_items
        rows, order = self.seen_rows.sort(stable=True)
        return rows, self.seen_items[order]


def ranks_of(
    scores: Tensor, question: Question, start: int = 0, *, depth: int | None = None
) -> TargetRanks:
    """Ranks the targets of queries ``start`` to ``start + B`` by ``scores`` (B, I); overwrites ``scores``.

    Args:
        scores: score of each item for each query.
        question: targets, and items to leave out.
        start: number of the first query.
        depth: greatest k of the figures to be computed. If queries have several targets, a target beyond the first
            ``depth`` gets the rank ``depth``, which is cheaper than its exact rank. None for exact ranks.

    Raises:
        ValueError: a score is NaN, a target's score is infinite, or a target is not an item.
    """
    stop = start + len(scores)
    rows, items, repeats = question.targets_of(start, stop)
    rows = rows.to(scores.device)
    repeats = repeats.to(scores.device)
    items = items.to(scores.device)
    if len(items) and int(items.max()) >= scores.shape[1]:
        raise ValueError(
            f"targets: item {int(items.max())}, but the catalogue has {scores.shape[1]} items, from 0; give its row"
        )
    target_scores = scores[rows, items]
    # Refuse NaN: it compares as neither better nor equal, and so would count as worse
    # than the target. The sum is one pass over the scores; only if it is NaN are they
    # looked at one by one.
    if not torch.isfinite(target_scores).all() or torch.isnan(scores.sum()):
        bad = torch.isnan(scores).nonzero()
        problem = "a target's is infinite"
        if len(bad):
            problem = f"the score of query {start + int(bad[0, 0])} for item {int(bad[0, 1])} is NaN"
        # The sum may be NaN by inf - inf, but other items may have such scores.
        if len(bad) or torch.isinf(target_scores).any():
            raise ValueError(
                f"scores: {problem}; a rank needs numbers: has training diverged?"
            )
    # Left-out items get -inf, and then the targets their score back, which may be among
    # ``not_items``. Repeats stay left out.
    seen_rows, seen_items = question.seen_by(start, stop)
    scores[seen_rows.to(scores.device), seen_items.to(scores.device)] = -torch.inf
    scores[:, list(question.not_items)] = -torch.inf
    scores[rows[~repeats], items[~repeats]] = target_scores[~repeats]
    if question.target_rows is None:
        ranks = TargetRanks(*_compare(scores, rows, target_scores, alone=True), None)
        return _missed(ranks, repeats, BEHIND)
    if depth is None or depth >= scores.shape[1]:
        ranks = TargetRanks(
            *_compare(scores, rows, target_scores, alone=False), rows + start
        )
        return _missed(ranks, repeats, BEHIND)
    # A target below the bound is certainly beyond depth, so its scores need not be
    # compared one by one.
    within_depth = (target_scores >= _bounds(scores, depth)[rows]).nonzero()[:, 0]
    better = torch.full_like(rows, depth)
    ties = torch.zeros_like(rows)
    greater, equal = _compare(
        scores, rows[within_depth], target_scores[within_depth], alone=False
    )
    better[within_depth] = greater.clamp(max=depth)
    ties[within_depth] = torch.where(greater < depth, equal, 0)
    return _missed(TargetRanks(better, ties, rows + start), repeats, depth)


def _missed(ranks: TargetRanks, repeats: Tensor, rank: int) -> TargetRanks:
    """Gives the targets that are repeats a rank at which they count as missed."""
    better = ranks.better.masked_fill(repeats, rank)
    return ranks._replace(better=better, ties=ranks.ties.masked_fill(repeats, 0))


def _bounds(scores: Tensor, depth: int) -> Tensor:
    """Returns a close lower bound of each row's ``depth``-th greatest score, (B,), from ``scores`` (B, I).

    The row is split into parts, and only the greatest score of each part is compared. These are scores of the row, so
    the ``depth``-th greatest of them is at most the row's own. It takes a fraction of the time of a full selection.
    """
    # There are many parts per place, so that few of the best share one and the bound is
    # close.
    parts = 16 * depth
    folds = scores.shape[1] // parts
    if folds > 1:
        folded = scores[:, : folds * parts].reshape(-1, folds, parts).amax(1)
        scores = torch.cat([folded, scores[:, folds * parts :]], dim=1)
    return scores.topk(depth, sorted=False).values.amin(1)


def _compare(
    scores: Tensor, rows: Tensor, target_scores: Tensor, *, alone: bool
) -> tuple[Tensor, Tensor]:
    """Counts, for each target, the greater scores of its row, and the other scores equal to its own."""
    if alone:
        column = target_scores[:, None]
        # One is subtracted, because a target equals itself.
        return _count(torch.gt, scores, column), _count(torch.eq, scores, column) - 1
    # A row of scores is copied for each of its targets: in blocks, so that the copies
    # are never larger than the scores.
    size = max(1, len(scores))
    better = []
    ties = []
    for block_rows, block_scores in zip(
        torch.split(rows, size), torch.split(target_scores, size), strict=True
    ):
        block_better, block_ties = _compare(
            scores[block_rows], block_rows, block_scores, alone=True
        )
        better.append(block_better)
        ties.append(block_ties)
    return torch.cat(better), torch.cat(ties)


def _count(
    compare: Callable[..., Tensor], scores: Tensor, target_scores: Tensor
) -> Tensor:
    """Counts the scores of each row for which ``compare`` holds, (B,), as floats: six times faster than as bools."""
    # From there on a float32 cannot count.
    if scores.shape[1] >= 2**24:
        return compare(scores, target_scores).sum(1)
    return (
        compare(
            scores, target_scores, out=torch.empty_like(scores, dtype=torch.float32)
        )
        .sum(1)
        .long()
    )


@torch.no_grad()
def catalogue_ranks(
    model: Recommender,
    runtime: Runtime,
    queries: Iterable[Kept],
    candidates: Iterable[Kept],
    question: Question,
    *,
    towers: Sequence[str] = ("user", "item"),
    coverage: Coverage | None = None,
) -> TargetRanks:
    """Ranks each query's targets among all items; every rank must call it and gets the ranks of all queries.

    Both towers run once per row, spread over the ranks; then each rank scores its own queries against the whole
    catalogue, a block of pairs at a time, never a whole U x I matrix: beside the outputs of the item tower (I x D) it
    holds 2**17 scores, or one query's if the catalogue is larger. Scores are compared unrounded: items with equal
    vectors tie, or differ in the last bit by their index in the matrix product, whichever of them is the target.

    Args:
        model: the model; under DistributedModelParallel its ``module``.
        runtime: rank and device of this process.
        queries: the batch and ``keep`` of each :class:`PaddedRows` of the queries in :func:`own_share`.
        candidates: the batch and ``keep`` of each :class:`PaddedRows` of the items 0 to I - 1.
        question: targets, and items to leave out.
        towers: names of the query's towers, in the model's order, and last of the candidates' tower.
        coverage: updated with each list of best items, if given.

    Raises:
        ValueError: a score is NaN, or the batches have another number of queries than the question.
    """
    items = embed_all(model, towers[-1], candidates, runtime)
    embedded = torch.cat(embed_own(model, towers[:-1], queries, runtime), dim=1)
    start = own_start(len(embedded), question.queries, runtime)
    parts = []
    rows = max(1, _PAIRS_PER_BLOCK // max(len(items), 1))
    # Ranks look for a stop after the same block, so all count as many as the busiest
    # has.
    most_blocks = max(1, -(-question.queries // (runtime.world_size * rows)))
    for block in watched(
        torch.split(embedded, rows),
        most_blocks,
        cheaper=f"{question.queries:,} queries x {len(items):,} items; {_ADVICE}",
    ):
        scores = model.interaction.score_all(block, items)
        parts.append(ranks_of(scores, question, start))
        # After the ranks, which have set the scores of items that are left out to -inf.
        if coverage is not None:
            coverage.update(scores)
        start += len(block)
    return gather_ranks(joined_ranks(parts), runtime)._replace(
        queries=question.target_rows
    )


def popularity_ranks(popularity: Tensor, question: Question) -> TargetRanks:
    """Ranks the targets by ``popularity`` (I,), among the same candidates as the model: its baseline.

    An item has the same rank for all queries, except for the items that a query leaves out. Only these are counted per
    query.
    """
    count = len(popularity)
    if len(question.targets) and int(question.targets.max()) >= count:
        raise ValueError(
            f"targets: item {int(question.targets.max())}, but the catalogue has {count} items, from 0; give its row"
        )
    # Items are compared by the level of their popularity, as an integer fits into a key
    # with a query.
    levels, places = torch.unique(popularity, return_inverse=True)
    level = places.cpu().numpy()
    rows = np.arange(question.queries)
    if question.target_rows is not None:
        rows = question.target_rows.cpu().numpy()
    targets = question.targets.cpu().numpy()
    is_candidate = np.ones(count, bool)
    is_candidate[list(question.not_items)] = False
    items_at_level = np.bincount(level[is_candidate], minlength=len(levels))
    items_above_level = items_at_level[::-1].cumsum()[::-1] - items_at_level

    def count_within_query(
        pairs: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Counts for each target its query's more popular, and equally popular, items in ``pairs``: row * I + item."""
        keys = _sorted(pairs // count * len(levels) + level[pairs % count])
        key = rows * len(levels) + level[targets]
        first = keys.searchsorted(key)
        last = keys.searchsorted(key, side="right")
        ends = keys.searchsorted(np.arange(1, question.queries + 1) * len(levels))
        return ends[rows] - last, last - first

    target_keys = rows * count + targets
    # Targets without a candidate's place in the totals; repeats stay left out.
    repeats = question.repeats.numpy()
    added_keys = _sorted(target_keys[~is_candidate[targets] & ~repeats])
    excluded_keys = _sorted(
        question.seen_rows.cpu().numpy() * count + question.seen_items.cpu().numpy()
    )
    # Each pair counts once, and only if its item is a candidate: others do not count in
    # the totals either.
    excluded_keys = excluded_keys[
        (np.diff(excluded_keys, prepend=-1) > 0) & is_candidate[excluded_keys % count]
    ]
    fewer_better, fewer_equal = count_within_query(excluded_keys)
    more_better, more_equal = count_within_query(added_keys)
    better = items_above_level[level[targets]] + more_better - fewer_better
    ties = items_at_level[level[targets]] + more_equal - 1 - fewer_equal
    ranks = TargetRanks(
        torch.from_numpy(better), torch.from_numpy(ties), question.target_rows
    )
    return _missed(ranks, question.repeats, BEHIND)


def _sorted(keys: NDArray[np.int64]) -> NDArray[Any]:
    """Sorts keys of 0 or more: unchanged if in order, as int32 if they fit, which is twice as fast."""
    if not len(keys) or bool((keys[1:] >= keys[:-1]).all()):
        return keys
    if keys.max() < 2**31:
        return np.sort(keys.astype(np.int32))
    return np.sort(keys)


def _check_targets(rows: Tensor, items: Tensor) -> None:
    if len(rows) != len(items):
        raise ValueError(
            f"target_rows: {len(rows)}, targets: {len(items)}; must be pairs, equally many"
        )
    steps = torch.diff(rows, prepend=rows.new_tensor([-1]))
    wrong = ((steps < 0) | (steps > 1)).nonzero()
    if len(wrong) or (len(rows) and int(rows[0])):
        index = 0
        if len(wrong):
            index = int(wrong[0])
        before = "the start"
        if index:
            before = str(int(rows[index - 1]))
        raise ValueError(
            f"target_rows: {int(rows[index])} after {before}; must ascend from 0 without a gap: sort "
            "the targets by query, and number the queries that have one"
        )
    # One number for each pair, so that equal pairs are neighbours after one sort.
    pairs = rows.long()
    if len(items):
        pairs = pairs * (1 + int(items.max())) + items
    pairs = pairs.sort().values
    repeated = int((pairs[1:] == pairs[:-1]).sum())
    if repeated:
        raise ValueError(
            f"targets: {repeated} of {len(rows)} pairs (query, item) repeat; give each once"
        )
