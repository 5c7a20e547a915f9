"""TaskQuestion: the one ranking question that a model, popularity and EASE answer side by side.

batches_of(): the query rows, or the items, that this rank embeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.columns import Chunk, Column, Int64
from torchrec_ext.data.loader.sides import BatchBuilder
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train import metrics
from torchrec_ext.train.config import Figure, Record
from torchrec_ext.train.report.progress import stage_lines

# Items of a recommendation that is printed, and of what the user took before.
K = 10
SHOWN = 5
# Figures of a ranking, each with its number of items shown.
Figures = Sequence[tuple[Figure, int]]


@dataclass(frozen=True, kw_only=True)
class TaskQuestion:
    """Held-out items and their candidates, for Q queries; the same for a model and its baselines.

    Args:
        rows: Q query rows.
        question: the question about the whole catalogue, or about each query's own candidates.
        user_items: Q rows of the items that each query's user has taken, by which EASE knows a user.
        figures: names of the figures with their numbers of items shown.
    """

    rows: Chunk
    question: metrics.Question
    user_items: Column
    figures: Figures

    def of_model(
        self,
        model: metrics.Recommender,
        runtime: Runtime,
        builder: BatchBuilder,
        towers: Sequence[str],
    ) -> Record:
        """Returns the figures of a model on all of the builder's items. Collective."""
        queries = batches_of(
            lambda numbers: builder.user_batch(self.rows.take(numbers)),
            self.rows.num_rows,
            runtime,
        )
        items = batches_of(builder.item_batch, builder.items.num_rows, runtime)
        hits = metrics.model_hits(
            model,
            runtime,
            queries,
            items,
            self.question,
            k=self.k,
            towers=towers,
            progress=stage_lines(runtime, "evaluation"),
        )
        return metrics.ranking_metrics(hits, self.figures)

    def of_popularity(self, counts: Tensor) -> Record:
        """Returns the figures of the ranking by each item's count, (I,)."""
        hits = metrics.popularity_hits(counts, self.question, k=self.k)
        return metrics.ranking_metrics(hits, self.figures)

    @property
    def k(self) -> int:
        """The greatest number of items shown."""
        return max(k for _, k in self.figures)

    @property
    def repeats(self) -> int:
        """Number of held-out items that their user had taken before; they count as missed."""
        return int(self.question.repeats.sum())

    @property
    def rule(self) -> str:
        """The rule of the ranking as a line, with the numbers of held-out items that count as missed."""
        if self.question.candidates is not None:
            return "ranked: each held-out item among its own candidates"
        question = self.question
        taken = "with" if not len(question.seen_items) else "without"
        new = int(question.new.sum())
        return (
            f"ranked: the items of the training rows, {taken} those that a user has taken; of "
            f"{len(question.targets):,} held-out items {self.repeats:,} were taken before and {new:,} have no training "
            "row: these count as missed"
        )


def padded_lists(lists: Column) -> Int64:
    """Returns (B, N) the values of each row of a ragged column, filled up with -1."""
    lengths = lists.lengths
    table = np.full((len(lengths), int(lengths.max(initial=0))), -1)
    table[np.arange(table.shape[1]) < lengths[:, None]] = lists.values
    return table


def batches_of(
    make: Callable[[Int64], TowerBatch], count: int, runtime: Runtime
) -> Iterator[metrics.Kept]:
    """Yields the batches of this rank's share of ``count`` rows, each with the number of its rows that count."""
    for share, keep in metrics.own_share(count, runtime):
        yield make(np.arange(share.start, share.stop)), keep
