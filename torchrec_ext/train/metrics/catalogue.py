"""catalogue_hits(): ranks the whole catalogue for each query, a block of queries at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.metrics.hits import (
    SCORES_PER_BLOCK,
    Hits,
    best_grades,
    first_gains,
)
from torchrec_ext.train.metrics.shares import (
    Kept,
    Recommender,
    embed_all,
    embed_own,
    gather_uneven_rows,
    own_start,
)


@dataclass(frozen=True, kw_only=True)
class Question:
    """Held-out interactions of U queries, to be ranked in the catalogue; the same on every rank.

    A target that no list can show counts as missed: one among its query's seen items, because a server that leaves out
    seen items never returns it, one among ``not_items``, and -1, an item without a row.

    Args:
        targets: relevant items, (T,): one for each query in order, T = U, unless ``target_rows`` is given.
        seen_rows: query of each pair to leave out of the ranking, (P,).
        seen_items: item of each such pair, (P,).
        not_items: ids that are never ranked, such as the out-of-vocabulary row.
        target_rows: query of each target, (T,) int64, ascending, if queries have several targets. Each of 0 to U - 1
            occurs at least once.
        grades: relevance of each target, (T,), above 0; by default all 1.

    Raises:
        ValueError: lengths differ, a number is out of range, target_rows has a gap or is out of order, or a target is
            given twice.
    """

    targets: Tensor
    seen_rows: Tensor
    seen_items: Tensor
    not_items: Sequence[int] = (0,)
    target_rows: Tensor | None = None
    grades: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.seen_rows) != len(self.seen_items):
            raise ValueError(
                f"seen_rows: {len(self.seen_rows)}, seen_items: {len(self.seen_items)}; must be pairs, equally many"
            )
        for name, least in (("targets", -1), ("seen_rows", 0), ("seen_items", 0)):
            values = getattr(self, name)
            if len(values) and int(values.min()) < least:
                raise ValueError(
                    f"{name}: {int(values.min())}; must be {least} or more: leave padding out"
                )
        if self.grades is not None and not bool((self.grades > 0).all()):
            raise ValueError(
                f"grades: {float(self.grades.min())}; must be above 0: leave irrelevant items out of targets"
            )
        _check_targets(self.rows, self.targets)

    @cached_property
    def rows(self) -> Tensor:
        """The query of each target, (T,) int64."""
        if self.target_rows is None:
            return torch.arange(len(self.targets))
        return self.target_rows

    @cached_property
    def queries(self) -> int:
        """The number of queries, U."""
        return int(self.rows[-1]) + 1 if len(self.rows) else 0

    @cached_property
    def repeats(self) -> Tensor:
        """Whether each target is among the seen items of its query, (T,) bool."""
        # One number for a pair sorts in a fraction of the time of two.
        items = torch.cat([self.targets, self.seen_items])
        size = int(items.max()) + 1 if len(items) else 1
        seen = self.seen_rows * size + self.seen_items
        pairs = torch.isin(self.rows * size + self.targets, seen)
        return pairs & (self.targets >= 0)

    @cached_property
    def new(self) -> Tensor:
        """Whether each target is not in the ranking, for any query, (T,) bool."""
        return torch.isin(self.targets, torch.tensor([-1, *self.not_items]))

    @cached_property
    def _seen(self) -> tuple[Tensor, Tensor]:
        """The seen pairs in the order of queries, so that the pairs of a block are one slice."""
        rows, order = self.seen_rows.sort(stable=True)
        return rows, self.seen_items[order]

    def gains(self, scores: Tensor, start: int, k: int) -> Tensor:
        """Returns the grades of the k best items of queries ``start`` to ``start + B``, (B, k).

        Args:
            scores: score of each item for each query, (B, I); overwritten.
            start: number of the first query.
            k: number of first places.

        Raises:
            ValueError: a score is NaN, a target's score is infinite, or a target is not an item.
        """
        block = torch.tensor([start, start + len(scores)])
        first, last = torch.searchsorted(self.rows, block).tolist()
        is_shown = ~(self.repeats | self.new)[first:last]
        targets = self.targets[first:last][is_shown]
        rows = (self.rows[first:last][is_shown] - start).to(scores.device)
        if len(targets) and int(targets.max()) >= scores.shape[1]:
            raise ValueError(
                f"targets: item {int(targets.max())}, but the catalogue has {scores.shape[1]} items, from 0; give its "
                "row"
            )
        targets = targets.to(scores.device)
        check_scores(scores, rows, targets, start)
        seen_rows, seen_items = self._seen
        first_seen, last_seen = torch.searchsorted(seen_rows, block).tolist()
        scores[
            (seen_rows[first_seen:last_seen] - start).to(scores.device),
            seen_items[first_seen:last_seen].to(scores.device),
        ] = -torch.inf
        scores[:, list(self.not_items)] = -torch.inf
        grades = torch.zeros_like(scores, dtype=torch.float32)
        if self.grades is None:
            grades[rows, targets] = 1.0
        else:
            grades[rows, targets] = self.grades[first:last][is_shown].to(grades)
        return first_gains(scores, grades, k, start)

    def hits(self, gains: Tensor) -> Hits:
        """Returns the hits of all queries, given their gains (U, k)."""
        grades = self.grades
        if grades is None:
            grades = torch.ones(len(self.targets))
        ideal = best_grades(self.rows, grades.float(), self.queries, gains.shape[1])
        return Hits(gains, ideal, self.rows.bincount(minlength=self.queries))


@torch.no_grad()
def catalogue_hits(
    model: Recommender,
    runtime: Runtime,
    queries: Iterable[Kept],
    candidates: Iterable[Kept],
    question: Question,
    *,
    k: int = 10,
    towers: Sequence[str] = ("user", "item"),
) -> Hits:
    """Ranks all items for each query; every rank must call it and gets the hits of all queries.

    Both towers run once per row, spread over the ranks. Then each rank scores its own queries against the whole
    catalogue, a block of queries at a time, never a whole U x I matrix.

    Args:
        model: the model; under DistributedModelParallel its ``module``.
        runtime: rank and device of this process.
        queries: the batch and ``keep`` of each :class:`PaddedRows` of the queries in :func:`own_share`.
        candidates: the batch and ``keep`` of each :class:`PaddedRows` of the items 0 to I - 1.
        question: targets, and items to leave out.
        k: number of first places, the greatest of the figures to compute.
        towers: names of the query's towers, in the model's order, and last of the candidates' tower.

    Raises:
        ValueError: a score is NaN, or the batches have another number of queries than the question.
    """
    items = embed_all(model, towers[-1], candidates, runtime)
    embedded = torch.cat(embed_own(model, towers[:-1], queries, runtime), dim=1)
    start = own_start(len(embedded), question.queries, runtime)
    gains = [torch.zeros(0, k, device=runtime.device)]
    for block in torch.split(embedded, max(1, SCORES_PER_BLOCK // max(1, len(items)))):
        gains.append(
            question.gains(model.interaction.score_all(block, items), start, k)
        )
        start += len(block)
    return question.hits(gather_uneven_rows(torch.cat(gains), runtime).cpu())


def check_scores(scores: Tensor, rows: Tensor, targets: Tensor, start: int) -> None:
    """Refuses a NaN, which no order knows, and an infinite score of a target.

    Args:
        scores: scores, (B, N).
        rows: row of each target.
        targets: column of each target.
        start: number of the first row, for the message.
    """
    bad = torch.isnan(scores)
    bad[rows, targets] |= torch.isinf(scores[rows, targets])
    if bad.any():
        row, column = bad.nonzero()[0].tolist()
        raise ValueError(
            f"scores: {float(scores[row, column])} of query {start + row} for item {column}; a ranking needs numbers: "
            "has training diverged?"
        )


def _check_targets(rows: Tensor, items: Tensor) -> None:
    if len(rows) != len(items):
        raise ValueError(
            f"target_rows: {len(rows)}, targets: {len(items)}; must be pairs, equally many"
        )
    steps = torch.diff(rows, prepend=rows.new_tensor([-1]))
    wrong = ((steps < 0) | (steps > 1)).nonzero()
    if len(wrong) or (len(rows) and int(rows[0])):
        index = int(wrong[0]) if len(wrong) else 0
        before = int(rows[index - 1]) if index else "the start"
        raise ValueError(
            f"target_rows: {int(rows[index])} after {before}; must ascend from 0 without a gap: sort "
            "the targets by query, and number the queries that have one"
        )
    pairs = torch.stack([rows, items], dim=1)[items >= 0]
    repeated = len(pairs) - len(torch.unique(pairs, dim=0))
    if repeated:
        raise ValueError(
            f"targets: {repeated} of {len(rows)} pairs (query, item) repeat; give each once"
        )
