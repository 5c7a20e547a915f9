"""FreeMass: what a user has not taken, with a weight for each item."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from torchrec_ext.data.columns import Int64
from torchrec_ext.data.known_pairs import KnownPairs


class FreeMass:
    """The weight of what each user has not taken, and the item at any place in it: exact, in whole numbers.

    Args:
        known: what is taken.
        weights: (num_items,) of the items 1 to ``num_items``, greater than 0. They become whole numbers, at least 1 each, whose sum
            is as great as int64 allows (2 ** 52, or 2 ** 62 / users); ``share`` (num_items + 1,) are these over their sum.
    """

    def __init__(self, known: KnownPairs, weights: NDArray[np.float64]) -> None:
        rows = known.num_users + 1
        whole = np.maximum(np.rint(weights * (min(1 << 52, (1 << 62) // rows) / weights.sum())), 1).astype(np.int64)
        self.known = known
        self.sums = np.concatenate([[0], np.cumsum(whole)])  # by item: the weight of it and of those before
        self.total = int(self.sums[-1])
        self.share = np.concatenate([[0.0], whole / self.total])
        owners, taken = known.pairs
        self.starts = known.tables().starts
        self.before = np.concatenate([[0], np.cumsum(whole[taken - 1])])  # of the pairs before each, over all users
        own_before = self.before[:-1] - self.before[self.starts[owners]]
        ends = np.append(self.starts[1:], len(taken))
        self.mass = self.total - (self.before[ends] - self.before[self.starts])
        # For each pair the free weight below it: ascending within a user, so a search finds the item at any place.
        self.below = self.sums[taken - 1] - own_before + owners * (self.total + 1)

    def item_at(self, users: Int64, places: Int64) -> Int64:
        """(B,) the item not taken by each of ``users`` (B,) at the place, 0 to the user's ``mass`` - 1, in ``places`` (B,)."""
        rows = self.known.place(users)
        found = self.below.searchsorted(places + rows * (self.total + 1), side="right")
        items: Int64 = self.sums.searchsorted(places + self.before[found] - self.before[self.starts[rows]], side="right")
        return items
