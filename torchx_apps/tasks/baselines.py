"""ClosedForms: EASE of a run's training rows, as a baseline beside a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_ext.data.columns import Column, Int64
from torchrec_ext.distributed.runtime import available_memory
from torchrec_ext.models import closed_form
from torchrec_ext.train import metrics
from torchrec_ext.train.config import Figure, Record

EASE = "ease"
# Seconds that a baseline may take if none is named.
_SECONDS = 10.0
# Multiply-adds per second of one core.
_RATE = 2e10


class Beside(NamedTuple):
    """Figures of each baseline by its name, and why others were left out, by theirs.

    ``repeats`` is the number of held-out items that count as missed, for model and baselines alike, because their user
    has taken them before; ``rule`` says what is ranked.
    """

    figures: Mapping[str, Record]
    left_out: Mapping[str, str]
    repeats: int = 0
    rule: str = ""


@dataclass(frozen=True, kw_only=True)
class ClosedForms:
    """EASE of the pairs of one set, fitted when it is first asked for.

    Args:
        pairs: function that reads the users (P,) and the items (P,) of the training rows, each pair once.
        num_pairs: number of pairs, P, or more.
        num_users: rows of the users' table, U.
        num_items: rows of the items' table, I.
        names: baselines to rank; where empty, those that take less than ``_SECONDS``.
        l2: penalty.

    Raises:
        ValueError: EASE is named, and needs more memory than this host can give.
    """

    pairs: Callable[[], tuple[Int64, Int64]]
    num_pairs: int
    num_users: int
    num_items: int
    names: Sequence[str] = ()
    l2: float = 500.0

    def __post_init__(self) -> None:
        if EASE not in self.names:
            return
        # Four matrices (I, I): Gram matrix, factor, inverse and LAPACK's copies. A host
        # without room for them kills the run, which then says nothing.
        size = 16 * self.num_items**2
        free = available_memory()
        if size > free:
            raise ValueError(
                f"evaluation.baselines=ease: leave it out: EASE of {self.num_items:,} items takes "
                f"{size / 2**30:,.1f} GiB, and {free / 2**30:,.1f} are free"
            )

    def left_out(self) -> dict[str, str]:
        """Returns the reason against ranking a baseline, by its name; only for baselines chosen by default."""
        # EASE inverts a matrix (I, I) and multiplies each user's row by it.
        work = (
            self.num_items**3
            + self.num_users * self.num_items**2
            + self.num_pairs * self.num_items
        )
        seconds = work / _RATE
        if self.names or seconds <= _SECONDS:
            return {}
        return {
            EASE: f"about {seconds:,.0f} s for {self.num_users:,} users and {self.num_items:,} items; "
            f"evaluation.baselines=popularity,{EASE} ranks it"
        }

    def beside(
        self,
        known: Column,
        question: metrics.Question,
        figures: Sequence[tuple[Figure, int]],
    ) -> Beside:
        """Returns the figures of each baseline.

        Args:
            known: Q rows of the items that each query's user has taken, each once, by which EASE knows a user.
            question: the question that the model answers.
            figures: names of the figures with their numbers of items shown.
        """
        left_out = self.left_out()
        if left_out or (self.names and EASE not in self.names):
            return Beside({}, left_out)
        hits = metrics.hits_by(
            lambda block: self.scores(known.slice(block.start, block.stop)),
            question,
            self.num_items,
            k=max(k for _, k in figures),
        )
        return Beside({EASE: metrics.ranking_metrics(hits, figures)}, left_out)

    def scores(self, known: Column) -> Tensor:
        """Returns EASE's scores (Q, I) of all items for users with these items."""
        rows = torch.from_numpy(known.owners)
        items = torch.from_numpy(known.values)
        scores = torch.zeros(len(known), self.num_items)
        return scores.index_add_(0, rows, self._weights[items])

    @cached_property
    def _weights(self) -> Tensor:
        users, items = map(torch.from_numpy, self.pairs())
        return closed_form.ease(users, items, self.num_items, l2=self.l2)
