"""Negatives: items that a user is not known to have taken, drawn by formula, so that any rank can draw any row's.

A draw is a pure function of (seed, epoch, position, number of the draw). So the draws do not depend on the number of
ranks, and a resumed run draws the same as an uninterrupted one.

FreeMass: the items that each user has not taken, with a weight for each item.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from torchrec_ext.data.columns import Float32, Int64
from torchrec_ext.data.negatives.known_pairs import KnownPairs
from torchrec_ext.data.negatives.random import Float64, alias_table, stream, uniform


class FreeMass:
    """The total weight of the items not taken by each user, and a draw from it, exact in whole numbers.

    Args:
        known: pairs that are taken.
        weights: (num_items,) weights of the items 1 to ``num_items``, above 0. They become whole numbers, at least 1
            each, with a sum as great as int64 allows (2 ** 52, or 2 ** 62 / users). ``share`` (num_items + 1,) are
            these numbers divided by their sum.
    """

    def __init__(self, known: KnownPairs, weights: NDArray[np.float64]) -> None:
        rows = known.num_users + 1
        # Whole numbers up to 2 ** 52 are exact in float64; 2 ** 62 / rows keeps the sum
        # over all users in int64.
        largest_sum = min(1 << 52, (1 << 62) // rows)
        units = np.maximum(np.rint(weights * (largest_sum / weights.sum())), 1).astype(
            np.int64
        )
        self.known = known
        # By item: its weight and those of the items before.
        self.sums = np.concatenate([[0], np.cumsum(units)])
        self.total = int(self.sums[-1])
        self.share = np.concatenate([[0.0], units / self.total])
        owners, taken_items = known.pairs
        self.starts = known.starts
        # By pair: the weight of the pairs before, over all users.
        self.before = np.concatenate([[0], np.cumsum(units[taken_items - 1])])
        own_before = self.before[:-1] - self.before[self.starts[owners]]
        ends = np.append(self.starts[1:], len(taken_items))
        self.mass = self.total - (self.before[ends] - self.before[self.starts])
        # For each pair the free weight below it: ascending within a user, so a search
        # finds the item at any place.
        self.below = self.sums[taken_items - 1] - own_before + owners * (self.total + 1)

    def item_at(self, users: Int64, places: Int64) -> Int64:
        """Returns (B,) the free item of each of ``users`` (B,) at ``places`` (B,), 0 to the user's mass - 1."""
        rows = self.known.row_of(users)
        below = self.below.searchsorted(places + rows * (self.total + 1), side="right")
        items: Int64 = self.sums.searchsorted(
            places + self.before[below] - self.before[self.starts[rows]], side="right"
        )
        return items


# The number of a stream within an epoch, so that hard and mixed negatives can share a
# seed with these.
PROPOSED, FROM_REST, KIND, PLACE, SHARED = range(5)


class NegativeSample(NamedTuple):
    """``ids`` (B, N) int64 and ``log_q`` (B, N) float32, the log-probability of each draw."""

    ids: Int64
    log_q: Float32


class Negatives(Protocol):
    """A sampler of negatives for each positive, as a loader needs it."""

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

    def log_q(self, users: Int64, items: Int64) -> Float32:
        """Returns (B,) the log-probability of drawing ``items`` (B,) if the users had not taken them: for positives."""


class SamplingSettings(Protocol):
    """The settings of a LoaderConfig for samplers; see there."""

    @property
    def batch_size(self) -> int:
        """Positives of a step over all ranks."""

    @property
    def shared_negatives(self) -> int:
        """Candidates shared by all queries of a step."""

    @property
    def popularity_exponent(self) -> float:
        """Power of an item's count in its probability."""

    @property
    def hard_k(self) -> int:
        """Number of a user's best items to draw hard negatives from."""

    @property
    def hard_share(self) -> float:
        """Share of hard draws."""

    @property
    def frequency(self) -> str:
        """``counted`` or ``estimated``."""

    @property
    def seed(self) -> int:
        """Seed of the draws."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SampledData:
    """The facts about a training set for samplers.

    Args:
        num_items: items have the ids 1 to ``num_items``.
        users: (P,) users of the pairs that must not be drawn.
        items: (P,) their items.
        counts: (num_items + 1,) training rows by item.
    """

    num_items: int
    users: Int64
    items: Int64
    counts: Int64


class TrainingSampler(ABC):
    """A sampler for ``loader.sampling``: add a line to :data:`NEGATIVES`, and nothing else.

    Attributes:
        shared: all queries of a step share the samples (``loader.shared_negatives``, a subclass of
            :class:`MixedCandidates`); else each positive has its own (``loader.negatives``, see :class:`Negatives`).
        refreshed: ``refresh(index)`` asks the model for hard items at the start of each epoch but the first.
        host_only: the work on the host, for a message, if nothing can be drawn on a device; None if
            :func:`sampler_on_device` has a form of it.
    """

    shared: ClassVar[bool] = False
    refreshed: ClassVar[bool] = False
    host_only: ClassVar[str | None] = None

    @classmethod
    @abstractmethod
    def configured(cls, config: SamplingSettings, data: SampledData) -> Self:
        """Builds the sampler from ``config`` and the facts in ``data``."""


class RejectionNegatives(TrainingSampler):
    """Draws from a distribution p over all items; a known item is replaced by a draw from those the user has not taken.

    P_u is the sum of p over the user's known items. The draws follow q = p / (1 - P_u) exactly, because rejected draws,
    a share of P_u, are drawn again from q itself. Two steps for every draw, however much a user has taken, so a device
    needs no loop.

    Args:
        num_items: items have the ids 1 to ``num_items``.
        users: (P,) users of the known pairs.
        items: (P,) items of the known pairs.
        seed: seed of the draws.
    """

    def __init__(
        self, num_items: int, users: Int64, items: Int64, seed: int = 0
    ) -> None:
        self.known = KnownPairs(num_items, users, items)
        self.seed = seed

    @abstractmethod
    def log_q(self, users: Int64, items: Int64) -> Float32:
        """See :meth:`Negatives.log_q`; ``users`` and ``items`` broadcast."""

    @abstractmethod
    def propose(self, numbers: Float64) -> Int64:
        """Draws items from p, by a number in [0, 1) for each."""

    @abstractmethod
    def draw_untaken(self, users: Int64, numbers: Float64) -> Int64:
        """Draws an item from q for each of ``users`` (B,), by a number in [0, 1) for each."""

    def draw(
        self, users: Int64, positions: Int64, epoch: int, n: int
    ) -> NegativeSample:
        """See :meth:`Negatives.draw`."""
        # Raises if a user has taken every item.
        self.known.free(users)
        ids = self.propose(
            uniform(
                stream(self.seed, epoch, PROPOSED), positions[:, None], np.arange(n)
            )
        )
        rows, draws = np.nonzero(self.known.contains(users[:, None], ids))
        if len(rows):
            ids[rows, draws] = self.draw_untaken(
                users[rows],
                uniform(stream(self.seed, epoch, FROM_REST), positions[rows], draws),
            )
        return NegativeSample(ids, self.log_q(users[:, None], ids))


class UniformNegatives(RejectionNegatives):
    """Draws uniformly among the items not taken by the user: q = 1 / (num_items - taken).

    Args:
        num_items: items have the ids 1 to ``num_items``.
        users: (P,) users of the known pairs.
        items: (P,) items of the known pairs.
        seed: seed of the draws.
    """

    def __init__(
        self, num_items: int, users: Int64, items: Int64, seed: int = 0
    ) -> None:
        super().__init__(num_items, users, items, seed)
        self.log_q_of = (
            -self.known.log_free(np.arange(self.known.num_users + 1))
        ).astype(np.float32)

    @classmethod
    def configured(cls, config: SamplingSettings, data: SampledData) -> Self:
        """See :meth:`TrainingSampler.configured`."""
        return cls(data.num_items, data.users, data.items, config.seed)

    def log_q(self, users: Int64, items: Int64) -> Float32:
        """See :meth:`Negatives.log_q`; ``users`` and ``items`` broadcast."""
        # Memory of its own, unlike that of np.broadcast_to: a batch owns its numbers.
        log_q = np.empty(np.broadcast(users, items).shape, np.float32)
        log_q[...] = self.log_q_of[self.known.row_of(users)]
        return log_q

    def propose(self, numbers: Float64) -> Int64:
        """See :meth:`RejectionNegatives.propose`."""
        return (numbers * self.known.num_items).astype(np.int64) + 1

    def draw_untaken(self, users: Int64, numbers: Float64) -> Int64:
        """See :meth:`RejectionNegatives.draw_untaken`."""
        free = self.known.free(users)
        # Rounding can make a number below 1, times the count, the count itself.
        return self.known.nth_free(
            users, np.minimum((numbers * free).astype(np.int64), free - 1)
        )


class PopularityNegatives(RejectionNegatives):
    """Draws items in proportion to (count + smoothing) ** exponent, among those not taken by the user.

    Items are proposed by the alias method. Probabilities are whole numbers over their sum (:class:`FreeMass`), so that
    rejection is exact.

    Args:
        num_items: items have the ids 1 to ``num_items``.
        users: (P,) users of the known pairs.
        items: (P,) items of the known pairs; their counts are the popularity unless ``counts`` is given.
        seed: seed of the draws.
        exponent: power of the counts: 1 is popularity itself, 0 uniform, 0.75 word2vec's choice.
        smoothing: added to each count, so that every item can be drawn: one that is never drawn is never pushed down.
        counts: (num_items + 1,) count of each item, if it is not the number of its known pairs.
    """

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
        if not smoothing > 0:
            raise ValueError(
                f"smoothing={smoothing}: must be greater than 0, or items without a rating could never be drawn"
            )
        super().__init__(num_items, users, items, seed)
        counts = (
            np.bincount(items, minlength=num_items + 1) if counts is None else counts
        )
        weights = np.power(counts[1:] + smoothing, exponent, dtype=np.float64)
        self.free_mass = FreeMass(self.known, weights)
        p = self.free_mass.share
        self.log_p = np.log(p, where=p > 0, out=np.full(num_items + 1, -np.inf))
        # A user who has taken all items has mass 0, and no draws.
        self.log_left = np.log(
            np.maximum(self.free_mass.mass, 1) / self.free_mass.total
        )
        self.accept, self.alias = alias_table(p[1:])

    @classmethod
    def configured(cls, config: SamplingSettings, data: SampledData) -> Self:
        """See :meth:`TrainingSampler.configured`."""
        return cls(
            data.num_items,
            data.users,
            data.items,
            config.seed,
            exponent=config.popularity_exponent,
        )

    def log_q(self, users: Int64, items: Int64) -> Float32:
        """See :meth:`Negatives.log_q`; ``users`` and ``items`` broadcast."""
        log_q: Float32 = (
            self.log_p[items] - self.log_left[self.known.row_of(users)]
        ).astype(np.float32)
        return log_q

    def propose(self, numbers: Float64) -> Int64:
        """See :meth:`RejectionNegatives.propose`."""
        scaled = numbers * self.known.num_items
        slot = scaled.astype(np.int64)
        return np.where(scaled - slot < self.accept[slot], slot, self.alias[slot]) + 1

    def draw_untaken(self, users: Int64, numbers: Float64) -> Int64:
        """See :meth:`RejectionNegatives.draw_untaken`."""
        mass = self.free_mass.mass[self.known.row_of(users)]
        return self.free_mass.item_at(
            users, np.minimum((numbers * mass).astype(np.int64), mass - 1)
        )
