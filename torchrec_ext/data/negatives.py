"""Negatives: items that a user is not known to have taken, drawn by formula, so that any rank can draw any row's.

A draw is a pure function of (seed, epoch, position, number of the draw): ranks that hold different slices of an epoch draw exactly
what one rank would, and a resumed run draws what the uninterrupted one would.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from torchrec_ext.data.columns import Int64
from torchrec_ext.data.known_pairs import KnownPairs

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
UInt64 = NDArray[np.uint64]

MOST_CELLS = 1 << 20  # users x items of one block, when a popular item is drawn from what is left
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class NegativeSample(NamedTuple):
    """``ids`` (B, N) int64 and ``log_q`` (B, N) float32, the log-probability of each draw."""

    ids: Int64
    log_q: Float32


class Negatives(Protocol):
    """What the loader asks of a sampler."""

    def draw(self, users: Int64, positions: Int64, epoch: int, n: int) -> NegativeSample:
        """N = ``n`` items for each of B rows, with replacement, never item 0 and never a known item of the row's user.

        Args:
            users: (B,) ids.
            positions: (B,) number of each row in the whole set.
            epoch: of the training.
            n: draws per row.

        Raises:
            DataError: a user has taken every item.
        """

    def log_q(self, users: Int64, items: Int64) -> Float32:
        """(B,) log-probabilities that the sampler would give the pairs if ``items`` (B,) were not known: for positives."""


class RejectionNegatives(ABC):
    """Draws from a distribution p over all items, and again while the item is known to the user.

    With P_u the sum of p over the user's known items, the draws follow q = p / (1 - P_u) exactly: what is still known after
    ``attempts`` is drawn from the remaining items themselves.

    Args:
        num_items: items have the ids 1 to ``num_items``.
        users: (P,) users of the known pairs.
        items: (P,) their items.
        seed: of the draws.
    """

    attempts = 16

    def __init__(self, num_items: int, users: Int64, items: Int64, seed: int = 0) -> None:
        self.known = KnownPairs(num_items, users, items)
        self._seed = seed

    @abstractmethod
    def log_q(self, users: Int64, items: Int64) -> Float32:
        """See :meth:`Negatives.log_q`; ``users`` and ``items`` broadcast."""

    @abstractmethod
    def _propose(self, numbers: Float64) -> Int64:
        """Items from p, by a number in [0, 1) for each."""

    @abstractmethod
    def _from_rest(self, users: Int64, numbers: Float64) -> Int64:
        """An item from q for each of ``users`` (B,), by a number in [0, 1) for each."""

    def draw(self, users: Int64, positions: Int64, epoch: int, n: int) -> NegativeSample:
        """See :meth:`Negatives.draw`."""
        self.known.free(users)
        ids = self._propose(uniform(stream(self._seed, epoch, 0), positions[:, None], np.arange(n)))
        rows, draws = np.nonzero(self.known.contains(users[:, None], ids))
        for attempt in range(1, self.attempts):
            if not len(rows):
                break
            new = self._propose(uniform(stream(self._seed, epoch, attempt), positions[rows], draws))
            ids[rows, draws] = new
            again = self.known.contains(users[rows], new)
            rows, draws = rows[again], draws[again]
        if len(rows):
            ids[rows, draws] = self._from_rest(
                users[rows], uniform(stream(self._seed, epoch, self.attempts), positions[rows], draws)
            )
        return NegativeSample(ids, self.log_q(users[:, None], ids))


class UniformNegatives(RejectionNegatives):
    """Every item that the user is not known to have taken is equally likely: q = 1 / (num_items - taken)."""

    attempts = 1  # what is left is found by one search

    def log_q(self, users: Int64, items: Int64) -> Float32:
        """See :meth:`Negatives.log_q`; ``users`` and ``items`` broadcast."""
        return (-self.known.log_free(users) + np.zeros(items.shape)).astype(np.float32)

    def _propose(self, numbers: Float64) -> Int64:
        return (numbers * self.known.num_items).astype(np.int64) + 1

    def _from_rest(self, users: Int64, numbers: Float64) -> Int64:
        free = self.known.free(users)
        return self.known.nth_free(users, np.minimum((numbers * free).astype(np.int64), free - 1))


class PopularityNegatives(RejectionNegatives):
    """Items in proportion to (count + smoothing) ** exponent among those that the user is not known to have taken.

    Proposed by the alias method.

    Args:
        num_items: items have the ids 1 to ``num_items``.
        users: (P,) users of the known pairs.
        items: (P,) their items; their counts are the popularity.
        seed: of the draws.
        exponent: 1 is popularity itself, 0 uniform, 0.75 word2vec's choice.
        smoothing: added to each count, so that every item can be drawn: one that is never drawn is never pushed down.
    """

    def __init__(
        self, num_items: int, users: Int64, items: Int64, seed: int = 0, *, exponent: float = 0.75, smoothing: float = 1.0
    ) -> None:
        if not smoothing > 0:
            raise ValueError(f"smoothing={smoothing}: must be greater than 0, or items without a rating could never be drawn")
        super().__init__(num_items, users, items, seed)
        weights = (np.bincount(items, minlength=num_items + 1)[1:] + smoothing) ** exponent
        self._p = np.concatenate([[0.0], weights / weights.sum()])
        self._log_p = np.log(self._p, where=self._p > 0, out=np.full(num_items + 1, -np.inf))
        self._accept, self._alias = alias_table(self._p[1:])
        owners, taken = self.known.pairs
        mass = np.bincount(owners, weights=self._p[taken], minlength=self.known.num_users + 1)
        self._log_left = np.log(np.maximum(1 - mass, np.finfo(float).tiny))

    def log_q(self, users: Int64, items: Int64) -> Float32:
        """See :meth:`Negatives.log_q`; ``users`` and ``items`` broadcast."""
        log_q: Float32 = (self._log_p[items] - self._log_left[self.known.place(users)]).astype(np.float32)
        return log_q

    def _propose(self, numbers: Float64) -> Int64:
        scaled = numbers * self.known.num_items
        slot = scaled.astype(np.int64)
        return np.where(scaled - slot < self._accept[slot], slot, self._alias[slot]) + 1

    def _from_rest(self, users: Int64, numbers: Float64) -> Int64:
        """In blocks, since one holds a number for each user and item."""
        rows = max(1, MOST_CELLS // self.known.num_items)
        starts = range(0, len(users), rows)
        return np.concatenate([self._by_sums(users[at : at + rows], numbers[at : at + rows]) for at in starts])

    def _by_sums(self, users: Int64, numbers: Float64) -> Int64:
        every = np.arange(1, self.known.num_items + 1)
        sums = np.cumsum(np.where(self.known.contains(users[:, None], every), 0.0, self._p[1:]), axis=1)
        chosen = (sums <= numbers[:, None] * sums[:, -1:]).sum(axis=1)
        # Rounding may point past the last item that is left, which is the first place where the sum is whole.
        return np.asarray(np.minimum(chosen, (sums < sums[:, -1:]).sum(axis=1)) + 1)


def alias_table(probabilities: Float64) -> tuple[Float64, Int64]:
    """(accept, alias), each (I,): take slot i of I equally likely ones with probability accept[i], else alias[i] (Walker 1977).

    Built without a loop: the slots below 1/I are filled in order from those above, so running sums say who fills whom, and a slot
    above that gave too much is filled by the next (Huebschle-Schneider and Sanders 2019, sweeping).
    """
    scaled = probabilities * len(probabilities)
    light, heavy = np.flatnonzero(scaled < 1), np.flatnonzero(scaled >= 1)
    accept, alias = scaled.copy(), np.arange(len(scaled))
    lack, spare = np.cumsum(1 - scaled[light]), np.cumsum(scaled[heavy] - 1)
    last = len(heavy) - 1
    alias[light] = heavy[np.minimum(spare.searchsorted(np.concatenate([[0.0], lack[:-1]])[: len(light)], side="right"), last)]
    emptied = lack.searchsorted(spare)  # the light slot at which each heavy one has given all that it had to spare
    inner = emptied < len(light)
    accept[heavy] = 1.0
    accept[heavy[inner]] = 1 + spare[inner] - lack[emptied[inner]]
    alias[heavy] = heavy[np.minimum(np.arange(len(heavy)) + 1, last)]
    return accept, alias


def stream(seed: int, *numbers: int) -> int:
    """A 64-bit key for one stream of random numbers."""
    key = seed & _MASK
    for number in numbers:
        key = int(_mixed(np.array([(key * _GOLDEN + number + 1) & _MASK], dtype=np.uint64))[0])
    return key


def uniform(key: int, positions: Int64, draws: Int64) -> Float64:
    """Numbers in [0, 1) with 53 random bits, one for each (position, draw); the arguments broadcast."""
    rows = _mixed(positions.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(key))
    hashed = _mixed(rows + (draws.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN))
    return np.asarray((hashed >> np.uint64(11)) * 2.0**-53)


def _mixed(x: UInt64) -> UInt64:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))
