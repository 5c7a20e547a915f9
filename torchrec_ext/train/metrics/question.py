"""Question: held-out items to find in the catalogue, or among candidates; model_hits() and hits_by() answer it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.metrics.hits import Hits, first_gains
from torchrec_ext.train.metrics.shares import (
    Kept,
    Recommender,
    embed_all,
    embed_own,
    gather_uneven_rows,
    own_start,
)

# Scores of a block: with their keys they are 3 MiB and stay in the cache.
_SCORES_PER_BLOCK = 2**18
# Each pair holds all towers' outputs: 4 MiB at width 64.
_PAIRS_PER_BLOCK = 2**13
# With fewer queries a block, a large catalogue would be read from memory for each of
# them.
_LEAST_QUERIES = 8


def _no_pairs() -> Tensor:
    return torch.zeros(0, dtype=torch.int64)


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
        candidates: other items to rank each target among, (U, N) int64, below 0 for padding, instead of the catalogue;
            the arguments between ``targets`` and this one are then left out. An id counts once, at its first place: a
            target among its own negatives, as for 156 of the 6,040 users of He et al. 2017, is no rival of itself.

    Raises:
        ValueError: lengths differ, a number is out of range, target_rows has a gap or is out of order, or a target is
            given twice.
    """

    targets: Tensor
    seen_rows: Tensor = field(default_factory=_no_pairs)
    seen_items: Tensor = field(default_factory=_no_pairs)
    not_items: Sequence[int] = (0,)
    target_rows: Tensor | None = None
    grades: Tensor | None = None
    candidates: Tensor | None = None

    def __post_init__(self) -> None:
        least = -1 if self.candidates is None else 0
        for name, other, lowest in (
            ("targets", self.rows, least),
            ("seen_rows", self.seen_items, 0),
            ("seen_items", self.seen_rows, 0),
            ("candidates", self.targets, None),
            ("grades", self.targets, None),
        ):
            values = getattr(self, name)
            if values is None:
                continue
            if len(values) != len(other):
                raise ValueError(
                    f"{name}: {len(values)} for {len(other)} rows; must be equally many"
                )
            if lowest is not None and bool((values < lowest).any()):
                raise ValueError(
                    f"{name}: {int(values.min())}; must be {lowest} or more: leave padding out"
                )
        if self.grades is not None and not bool((self.grades > 0).all()):
            raise ValueError(
                f"grades: {float(self.grades.min())}; must be above 0: leave irrelevant items out of targets"
            )
        steps = torch.diff(self.rows, prepend=self.rows.new_tensor([-1]))
        wrong = ((steps < 0) | (steps > 1) | (self.rows < 0)).nonzero()
        if len(wrong):
            raise ValueError(
                f"target_rows: {int(self.rows[wrong[0]])} at {int(wrong[0])}; must ascend from 0 without a gap: sort "
                "the targets by query, and number the queries that have one"
            )
        known = self.targets >= 0
        pairs = torch.stack([self.rows[known], self.targets[known]], dim=1)
        repeated = len(pairs) - len(torch.unique(pairs, dim=0))
        if repeated:
            raise ValueError(
                f"targets: {repeated} of {len(known)} pairs (query, item) repeat; give each once"
            )

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
        # Of 32 bits the numbers of pairs would overflow.
        seen = self.seen_rows.long() * size + self.seen_items
        pairs = torch.isin(self.rows * size + self.targets, seen)
        return pairs & (self.targets >= 0)

    @cached_property
    def new(self) -> Tensor:
        """Whether each target is not in the ranking, for any query, (T,) bool."""
        return torch.isin(self.targets, torch.tensor([-1, *self.not_items]))

    @cached_property
    def _grades(self) -> Tensor:
        """The relevance of each target, (T,)."""
        if self.grades is None:
            return torch.ones(len(self.targets))
        return self.grades

    @cached_property
    def _seen(self) -> tuple[Tensor, Tensor]:
        """The seen pairs in the order of queries, so that the pairs of a block are one slice."""
        rows, order = self.seen_rows.sort(stable=True)
        return rows, self.seen_items[order]

    def ids(self, block: slice) -> Tensor | None:
        """Returns the items to rank for queries, (B, 1 + N), the target first; None for the whole catalogue."""
        if self.candidates is None:
            return None
        return torch.cat([self.targets[block, None], self.candidates[block]], dim=1)

    def gains(self, scores: Tensor, start: int, k: int) -> Tensor:
        """Returns the grades of the k best items of queries ``start`` to ``start + B``, (B, k).

        Args:
            scores: score of each item for each query, (B, I), or of :meth:`ids`, (B, 1 + N).
            start: number of the first query.
            k: number of first places.

        Raises:
            ValueError: a score is NaN, a target's score is infinite, or a target is not an item.
        """
        ids = self.ids(slice(start, start + len(scores)))
        grades = torch.zeros_like(scores, dtype=torch.float32)
        if ids is None:
            rows, items, values, left_out = self._of_catalogue(scores, start)
            grades[rows, items] = values.to(grades)
        else:
            left_out = _repeated(ids).to(scores.device)
            grades[:, 0] = 1.0
        bad = torch.isnan(scores) | (torch.isinf(scores) & (grades > 0))
        if bad.any():
            row, column = bad.nonzero()[0].tolist()
            raise ValueError(
                f"scores: {float(scores[row, column])} of query {start + row} for item {column}; a ranking needs "
                "numbers: has training diverged?"
            )
        return first_gains(scores.masked_fill(left_out, -torch.inf), grades, k, start)

    def _of_catalogue(
        self, scores: Tensor, start: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns row, item and grade of each target that can be shown, (t,), and the items left out, (B, I)."""
        block = torch.tensor([start, start + len(scores)])
        first, last = torch.searchsorted(self.rows, block).tolist()
        is_shown = ~(self.repeats | self.new)[first:last]
        items = self.targets[first:last][is_shown]
        if len(items) and int(items.max()) >= scores.shape[1]:
            raise ValueError(
                f"targets: item {int(items.max())}, but the catalogue has {scores.shape[1]} items, from 0; give its row"
            )
        values = self._grades[first:last][is_shown]
        left_out = torch.zeros_like(scores, dtype=torch.bool)
        left_out[:, list(self.not_items)] = True
        seen_rows, seen_items = self._seen
        first_seen, last_seen = torch.searchsorted(seen_rows, block).tolist()
        seen = slice(first_seen, last_seen)
        left_out[seen_rows[seen] - start, seen_items[seen]] = True
        return self.rows[first:last][is_shown] - start, items, values, left_out

    def hits(self, gains: Tensor) -> Hits:
        """Returns the hits of all queries, given their gains (U, k)."""
        relevant = self.rows.bincount(minlength=self.queries)
        ideal = torch.zeros_like(gains)
        if self.queries:
            by_query = list(torch.split(self._grades.float(), relevant.tolist()))
            best = pad_sequence(by_query, batch_first=True).sort(descending=True).values
            width = min(best.shape[1], gains.shape[1])
            ideal[:, :width] = best[:, :width]
        return Hits(gains, ideal, relevant)


def _repeated(ids: Tensor) -> Tensor:
    """Returns whether an id is padding, or occurs before in its row, (B, N) bool."""
    ordered, order = ids.sort(dim=1, stable=True)
    is_repeated = pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
    return torch.zeros_like(is_repeated).scatter_(1, order, is_repeated) | (ids < 0)


def hits_by(
    score: Callable[[slice], Tensor], question: Question, num_items: int, *, k: int
) -> Hits:
    """Ranks by any scores, a block of queries at a time.

    Args:
        score: function from a slice of B queries to scores of all items, (B, I).
        question: the question.
        num_items: I.
        k: number of first places.

    Example:
        >>> users, items = torch.eye(2, 3), torch.eye(3)
        >>> question = Question(targets=torch.tensor([1, 2]), not_items=())
        >>> hits_by(lambda block: users[block] @ items.T, question, 3, k=1).gains
        tensor([[0.],
                [0.]])
    """
    gains = [torch.zeros(0, k)]
    for block in _blocks(question.queries, num_items, _SCORES_PER_BLOCK):
        scores = score(block)
        ids = question.ids(block)
        if ids is not None:
            # Padding has ids below 0: it is scored as item 0, and left out.
            scores = scores.gather(1, ids.clamp(min=0).to(scores.device))
        gains.append(question.gains(scores, block.start, k).cpu())
    return question.hits(torch.cat(gains))


def _blocks(count: int, width: int, most: int) -> list[slice]:
    """Cuts queries into blocks of about ``most`` scores."""
    rows = max(_LEAST_QUERIES, most // max(1, width))
    return [slice(first, min(first + rows, count)) for first in range(0, count, rows)]


def popularity_hits(popularity: Tensor, question: Question, *, k: int) -> Hits:
    """Ranks by ``popularity`` (I,), the same for every query: the baseline of a model."""
    # Levels, because a float32 cannot tell counts above 2**24 apart.
    levels = torch.unique(popularity, return_inverse=True)[1].float()
    return hits_by(
        lambda block: levels.repeat(block.stop - block.start, 1),
        question,
        len(levels),
        k=k,
    )


@torch.no_grad()
def model_hits(
    model: Recommender,
    runtime: Runtime,
    queries: Iterable[Kept],
    items: Iterable[Kept],
    question: Question,
    *,
    k: int = 10,
    towers: Sequence[str] = ("user", "item"),
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> Hits:
    """Ranks by a model; every rank must call it and gets the hits of all queries.

    The towers run once per row, spread over the ranks. Then each rank scores its own queries, a block at a time, never
    a whole U x I matrix: all items by ``interaction.score_all``, the candidates of a question by pairs.

    Args:
        model: the model; under DistributedModelParallel its ``module``.
        runtime: rank and device of this process.
        queries: the batch and ``keep`` of each :class:`PaddedRows` of the queries in :func:`own_share`.
        items: the batch and ``keep`` of each :class:`PaddedRows` of the items 0 to I - 1.
        question: targets, and items to leave out or to rank.
        k: number of first places, the greatest of the figures to compute.
        towers: names of the query's towers, in the model's order, and last of the items' tower.
        progress: called with the stage, this rank's queries so far, and all of them.

    Raises:
        ValueError: a score is NaN, or the batches have another number of queries than the question.
    """
    catalogue = embed_all(model, towers[-1], items, runtime)
    own = embed_own(model, towers[:-1], queries, runtime)
    start = own_start(len(own[0]), question.queries, runtime)
    width, most = len(catalogue), _SCORES_PER_BLOCK
    if question.candidates is not None:
        width, most = 1 + question.candidates.shape[1], _PAIRS_PER_BLOCK
    gains = [torch.zeros(0, k, device=runtime.device)]
    for block in _blocks(len(own[0]), width, most):
        progress("queries ranked", block.start, len(own[0]))
        outputs = [output[block] for output in own]
        ids = question.ids(slice(start + block.start, start + block.stop))
        if ids is None:
            scores = model.interaction.score_all(torch.cat(outputs, dim=1), catalogue)
        else:
            outputs = [output.repeat_interleave(width, dim=0) for output in outputs]
            outputs.append(catalogue[ids.clamp(min=0).flatten().to(catalogue.device)])
            scores = model.interaction(outputs).view(ids.shape)
        gains.append(question.gains(scores, start + block.start, k))
    return question.hits(gather_uneven_rows(torch.cat(gains), runtime).cpu())
