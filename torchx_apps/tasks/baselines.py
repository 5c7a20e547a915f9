"""ClosedForms: EASE and ALS of a run's training rows, as baselines beside a model, or as tables to begin with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrec_ext.data.columns import Column, Int64
from torchrec_ext.distributed.runtime import available_memory
from torchrec_ext.models import closed_form
from torchrec_ext.schema.validation import listed
from torchrec_ext.train import metrics
from torchrec_ext.train.config import ClosedFormConfig, Record

FORMS = ("ease", "als")
# Seconds that a baseline may take if none is named.
_SECONDS = 10.0
# Multiply-adds per second of one core.
_RATE = 2e10
# Scores of a block of queries in memory: 8 MiB.
_SCORES = 2**21
# Bytes that ALS takes for a number of a vector (float32, before and after a half step),
# and for the counts of a row. Its pairs take some 64 bytes each, but nobody knows their
# number before the rows are read.
_VECTORS = 12
_COUNTS = 64

Role = Literal["user", "item", "history"]


class Beside(NamedTuple):
    """Figures of each baseline by its name, and why others were left out, by theirs.

    ``repeats`` is the number of held-out items that count as missed, for model and baselines alike, because their user
    has taken them before.
    """

    figures: Mapping[str, Record]
    left_out: Mapping[str, str]
    repeats: int = 0


@dataclass(frozen=True, kw_only=True)
class ClosedForms:
    """EASE and ALS of the pairs of one set, each fitted when it is first asked for.

    Args:
        pairs: function that reads the users (P,) and the items (P,) of the training rows, a pair perhaps several times.
        num_pairs: number of pairs, P, or more.
        num_users: rows of the users' table, U.
        num_items: rows of the items' table, I.
        roles: role of each feature's ids: a ``user``, an ``item``, or the items of a user's ``history``.
        names: baselines to rank; where empty, those that take less than ``_SECONDS``.
        config: penalties and sizes.

    Raises:
        ValueError: EASE or ALS is named, and needs more memory than this host can give.
    """

    pairs: Callable[[], tuple[Int64, Int64]]
    num_pairs: int
    num_users: int
    num_items: int
    roles: Mapping[str, Role]
    names: Sequence[str] = ()
    config: ClosedFormConfig = field(default_factory=ClosedFormConfig)
    _factors: dict[tuple[int, int], closed_form.Factors] = field(
        default_factory=dict, repr=False
    )

    def __post_init__(self) -> None:
        if "ease" in self.names:
            self._check_matrices("evaluation.baselines=ease: leave it out", 4)
        if "als" in self.names:
            size = (self.num_users + self.num_items) * (
                _VECTORS * self.config.als_dim + _COUNTS
            )
            about = f"ALS of {self.num_users:,} users and {self.num_items:,} items"
            _check_memory(f"evaluation.baselines=als: leave it out: {about}", size)

    def _check_matrices(self, what: str, count: int) -> None:
        """Refuses EASE if ``count`` matrices (I, I) do not fit: Gram matrix, factor, inverse and LAPACK's copies."""
        _check_memory(
            f"{what}: EASE of {self.num_items:,} items", 4 * count * self.num_items**2
        )

    def seconds(self, name: str) -> float:
        """Returns about how long a baseline takes on one core: its fit, and its scores for all users."""
        # EASE inverts a matrix (I, I) and multiplies each user's row by it; ALS solves
        # for each row in each half step.
        if name == "ease":
            work = (
                self.num_items**3
                + self.num_users * self.num_items**2
                + self.num_pairs * self.num_items
            )
        else:
            dim = self.config.als_dim
            rows = self.num_users + self.num_items
            work = (
                2
                * self.config.als_epochs
                * (2 * self.num_pairs * dim**2 + rows * dim**3)
            )
            work += self.num_users * self.num_items * dim
        return work / _RATE

    def left_out(self) -> dict[str, str]:
        """Returns the reason against ranking a baseline, by its name; only for baselines chosen by default."""
        if self.names:
            return {}
        reasons = {}
        for name in FORMS:
            seconds = self.seconds(name)
            if seconds > _SECONDS:
                reasons[name] = (
                    f"about {seconds:,.0f} s for {self.num_users:,} users and {self.num_items:,} items; "
                    f"evaluation.baselines=popularity,{name} ranks it"
                )
        return reasons

    def beside(
        self,
        known: Column,
        rank: Callable[[Tensor, int], metrics.TargetRanks],
        figures: Callable[[metrics.TargetRanks], Record],
    ) -> Beside:
        """Returns the figures of each baseline.

        Args:
            known: Q rows of the items that each query's user has taken, by which EASE and ALS know a user.
            rank: returns the ranks of the targets of B queries, from that of its second argument on, by their scores
                (B, I), which it may change.
            figures: returns the figures of the ranks of all queries.
        """
        left_out = self.left_out()
        by_name = {}
        rows = max(1, _SCORES // self.num_items)
        for name in FORMS:
            if name in left_out or (self.names and name not in self.names):
                continue
            blocks = []
            for start in range(0, len(known), rows):
                block = known.slice(start, min(start + rows, len(known)))
                blocks.append(rank(self.scores(name, block), start))
            by_name[name] = figures(metrics.joined_ranks(blocks))
        return Beside(by_name, left_out)

    def scores(self, name: str, known: Column) -> Tensor:
        """Returns the scores (Q, I) of all items for users with these items, by ``ease`` or ``als``."""
        rows, items = _unique(known.owners, known.values)
        if name == "ease":
            scores = torch.zeros(len(known), self.num_items)
            return scores.index_add_(0, rows, self._ease[items])
        vectors = self._als_items
        # These users may be others than those of training: a half step gives each a
        # vector by the items.
        users = closed_form.als_half_step(
            rows,
            items,
            len(known),
            vectors,
            l2=self.config.als_l2,
            unobserved=self.config.als_unobserved,
        )
        return users @ vectors.T

    def feature(self, name: str, table: str, features: Sequence[str]) -> str:
        """Returns the first feature of a table for which EASE or ALS has vectors.

        Raises:
            ValueError: the table is read for no users, items or history; or ``als`` is asked for a history; or EASE
                needs more memory than this host can give.
        """
        has = [
            feature
            for feature, role in self.roles.items()
            if name == "ease" or role != "history"
        ]
        matches = [feature for feature in has if feature in features]
        if not matches:
            raise ValueError(
                f"pretrained: {table}={name}: the table is read for {listed(features)}, and {name} has vectors for "
                f"{listed(has)}"
            )
        if name == "ease":
            self._check_matrices(f"pretrained: {table}=ease: give als or a file", 5)
        return matches[0]

    def rows(self, feature: str) -> int:
        """Returns the number of vectors of a feature."""
        return self.num_users if self.roles[feature] == "user" else self.num_items

    def vectors(self, name: str, feature: str, dim: int, *, seed: int = 0) -> Tensor:
        """Returns the first vectors of a feature's table, a row for each id, (rows, dim).

        ``als`` has vectors for users and items. ``ease`` has those of the items of a ``history``, of a user, which is
        the sum of these, and of items.

        Args:
            name: ``ease`` or ``als``.
            feature: what :meth:`feature` returned.
            dim: columns of the table.
            seed: seed of the vectors that ALS begins with.
        """
        role = self.roles[feature]
        if name == "als":
            # The tables of users and of items ask for halves of one solution.
            if (dim, seed) not in self._factors:
                self._factors[dim, seed] = self._als(dim, seed)
            factors = self._factors[dim, seed]
            return factors.users if role == "user" else factors.items
        users, items = self._taken()
        history, candidates = closed_form.ease_vectors(
            users, items, self.num_items, dim=dim, l2=self.config.ease_l2
        )
        if role == "user":
            return torch.zeros(self.num_users, dim).index_add_(0, users, history[items])
        return candidates if role == "item" else history

    @cached_property
    def _ease(self) -> Tensor:
        return closed_form.ease(*self._taken(), self.num_items, l2=self.config.ease_l2)

    @cached_property
    def _als_items(self) -> Tensor:
        return self._als(self.config.als_dim, seed=0).items

    def _als(self, dim: int, seed: int) -> closed_form.Factors:
        config = self.config
        return closed_form.als(
            *self._taken(),
            self.num_users,
            self.num_items,
            dim=dim,
            l2=config.als_l2,
            unobserved=config.als_unobserved,
            epochs=config.als_epochs,
            seed=seed,
        )

    def _taken(self) -> tuple[Tensor, Tensor]:
        return _unique(*self.pairs())


def _check_memory(what: str, size: int) -> None:
    free = available_memory()
    if size > free:
        raise ValueError(
            f"{what} takes {size / 2**30:,.1f} GiB, and {free / 2**30:,.1f} are free"
        )


def _unique(users: Int64, items: Int64) -> tuple[Tensor, Tensor]:
    """Returns each pair once, by user; without the unknown item, 0."""
    valid = items > 0
    count = int(items.max(initial=0)) + 1
    # One number for a pair sorts in a fraction of the time of two.
    rows, columns = np.divmod(np.unique(users[valid] * count + items[valid]), count)
    return torch.from_numpy(rows), torch.from_numpy(columns)
