"""Negatives: items that a user is not known to have taken, drawn by formula, so that any rank can draw any row's.

A draw is a pure function of (seed, epoch, position, number of the draw). So the draws do not depend on the number of
ranks, and a resumed run draws the same as an uninterrupted one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np

from torchrec_ext.data.columns import Float32, Int64
from torchrec_ext.data.negatives.known_pairs import KnownPairs
from torchrec_ext.data.negatives.random import Float64, stream, uniform

# Numbers of the streams of an epoch: of the first proposals, and of the draws among the
# items not taken. Further proposals have those from 5 on.
PROPOSED, FROM_REST, _AGAIN = 0, 1, 5


class NegativeSample(NamedTuple):
    """``ids`` (B, N) int64 and ``log_q`` (B, N) float32, the log-probability of each draw."""

    ids: Int64
    log_q: Float32


class Negatives(ABC):
    """Draws from a distribution p over all items, again if the user has taken the item.

    P_u is the sum of p over the user's known items. Whatever is drawn after a rejection follows q = p / (1 - P_u), so
    all draws do. After ``proposals`` of them a draw is made among the items not taken, which ends the search.

    Attributes:
        proposals: number of draws from p before one among the items not taken.

    Args:
        num_items: items have the ids 1 to ``num_items``.
        users: (P,) users of the known pairs.
        items: (P,) items of the known pairs.
        seed: seed of the draws.
    """

    proposals: ClassVar[int] = 1

    def __init__(
        self, num_items: int, users: Int64, items: Int64, seed: int = 0
    ) -> None:
        self.known = KnownPairs(num_items, users, items)
        self.seed = seed

    @abstractmethod
    def log_q(self, users: Int64, items: Int64) -> Float32:
        """Returns the log-probability of drawing ``items`` if the ``users`` had not taken them; both broadcast."""

    @abstractmethod
    def propose(self, numbers: Float64) -> Int64:
        """Draws items from p, by a number in [0, 1) for each."""

    @abstractmethod
    def draw_untaken(self, users: Int64, numbers: Float64) -> Int64:
        """Draws an item from q for each of ``users`` (B,), by a number in [0, 1) for each."""

    def draw(
        self, users: Int64, positions: Int64, epoch: int, n: int
    ) -> NegativeSample:
        """Draws N = ``n`` items for each of B rows, with replacement, never item 0 nor a known item of the row's user.

        Args:
            users: (B,) ids.
            positions: (B,) number of each row in the whole set.
            epoch: epoch of the training, from 0.
            n: N, the number of draws per row.

        Raises:
            DataError: a user has taken every item.
        """
        # Raises if a user has taken every item.
        self.known.free(users)
        ids = self.propose(
            uniform(
                stream(self.seed, epoch, PROPOSED), positions[:, None], np.arange(n)
            )
        )
        rows, draws = np.nonzero(self.known.contains(users[:, None], ids))
        for number in range(1, self.proposals):
            key = stream(self.seed, epoch, _AGAIN + number)
            proposed = self.propose(uniform(key, positions[rows], draws))
            ids[rows, draws] = proposed
            taken = self.known.contains(users[rows], proposed)
            rows = rows[taken]
            draws = draws[taken]
            if not len(rows):
                break
        if len(rows):
            ids[rows, draws] = self.draw_untaken(
                users[rows],
                uniform(stream(self.seed, epoch, FROM_REST), positions[rows], draws),
            )
        return NegativeSample(ids, self.log_q(users[:, None], ids))


class UniformNegatives(Negatives):
    """Draws uniformly among the items not taken by the user: q = 1 / (num_items - taken).

    Args:
        num_items: items have the ids 1 to ``num_items``.
        users: (P,) users of the known pairs.
        items: (P,) items of the known pairs.
        seed: seed of the draws.
    """

    @cached_property
    def log_q_of(self) -> Float32:
        """The log-probability of each of a user's draws, by :meth:`KnownPairs.row_of`."""
        # Of a user who has taken all items it is infinite, and no draw is made.
        with np.errstate(divide="ignore"):
            return -np.log(self.known.num_free).astype(np.float32)

    def log_q(self, users: Int64, items: Int64) -> Float32:
        """See :meth:`Negatives.log_q`; ``users`` and ``items`` broadcast."""
        # Memory of its own, unlike that of np.broadcast_to: a batch owns its numbers.
        log_q = np.empty(np.broadcast(users, items).shape, np.float32)
        log_q[...] = self.log_q_of[self.known.row_of(users)]
        return log_q

    def propose(self, numbers: Float64) -> Int64:
        """See :meth:`Negatives.propose`."""
        return (numbers * self.known.num_items).astype(np.int64) + 1

    def draw_untaken(self, users: Int64, numbers: Float64) -> Int64:
        """See :meth:`Negatives.draw_untaken`."""
        free = self.known.free(users)
        # Rounding can make a number below 1, times the count, the count itself.
        return self.known.nth_free(
            users, np.minimum((numbers * free).astype(np.int64), free - 1)
        )


class PopularityNegatives(Negatives):
    """Draws items in proportion to (count + smoothing) ** exponent, among those not taken by the user.

    Probabilities are whole numbers over their sum, so that the sum over the items that a user has not taken is exact.

    Args:
        num_items: items have the ids 1 to ``num_items``.
        users: (P,) users of the known pairs.
        items: (P,) items of the known pairs; their counts are the popularity unless ``counts`` is given.
        seed: seed of the draws.
        exponent: power of the counts: 1 is popularity itself, 0 uniform, 0.75 word2vec's choice.
        smoothing: added to each count, so that every item can be drawn: one that is never drawn is never pushed down.
        counts: (num_items + 1,) count of each item, if it is not the number of its known pairs.

    Attributes:
        share: (num_items + 1,) probability of each item before any is rejected, 0 for item 0.
    """

    # A user whose items are half of all draws gets 1 in 65,536 the slow way.
    proposals = 16

    def __init__(
        self,
        num_items: int,
        users: Int64,
        items: Int64,
        seed: int = 0,
        *,
        exponent: float = 0.75,
        smoothing: float = 1.0,
        counts: Int64 | None = None,
    ) -> None:
        super().__init__(num_items, users, items, seed)
        counts = (
            np.bincount(items, minlength=num_items + 1) if counts is None else counts
        )
        weights = np.power(counts[1:] + smoothing, exponent, dtype=np.float64)
        # Whole numbers with a sum below 2 ** 53 are exact in float64.
        units = np.rint(weights * (2.0**52 / weights.sum()))
        self._units = np.concatenate([[0.0], np.maximum(units, 1.0)])
        # Once, because a sum over all items costs more than a batch's draws.
        self._sums = np.cumsum(self._units)
        total = self._sums[-1]
        self.share: Float64 = self._units / total
        self._log_p = np.log(
            self.share, where=self.share > 0, out=np.full(num_items + 1, -np.inf)
        )
        owners, taken = self.known.pairs
        free = total - np.bincount(owners, self._units[taken], self.known.num_users + 1)
        # A user who has taken all items has none of it, and no draws.
        self._log_left = np.log(np.maximum(free, 1.0) / total)

    def log_q(self, users: Int64, items: Int64) -> Float32:
        """See :meth:`Negatives.log_q`; ``users`` and ``items`` broadcast."""
        log_q: Float32 = (
            self._log_p[items] - self._log_left[self.known.row_of(users)]
        ).astype(np.float32)
        return log_q

    def propose(self, numbers: Float64) -> Int64:
        """See :meth:`Negatives.propose`."""
        return _by_sums(self._sums, numbers)

    def draw_untaken(self, users: Int64, numbers: Float64) -> Int64:
        """See :meth:`Negatives.draw_untaken`."""
        drawn = np.empty(len(users), np.int64)
        for user in np.unique(users):
            rows = users == user
            units = self._units.copy()
            units[self.known.of_user(user)] = 0.0
            drawn[rows] = _by_sums(np.cumsum(units), numbers[rows])
        return drawn


def _by_sums(sums: Float64, numbers: Float64) -> Int64:
    """Draws places in proportion to whole units, given their running sums, by a number in [0, 1) for each."""
    # Rounding can make a number below 1, times the sum, the sum itself.
    places = np.minimum(np.floor(numbers * sums[-1]), sums[-1] - 1)
    return np.asarray(sums.searchsorted(places, side="right"))
