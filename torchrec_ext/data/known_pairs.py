"""KnownPairs: who has taken what, asked for millions of pairs at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from torchrec_ext.data.columns import Int64
from torchrec_ext.schema import DataError

MOST_BITS = 1 << 28  # a bitmap of users x items up to 32 MB; above it, a search in the sorted pairs


class KnownPairs:
    """The items that each user is known to have taken.

    Args:
        num_items: items have the ids 1 to ``num_items``.
        users: (P,) ids, 0 or more.
        items: (P,) ids.
    """

    def __init__(self, num_items: int, users: Int64, items: Int64) -> None:
        bad = (items < 1) | (items > num_items) | (users < 0)
        if bad.any():
            at = int(bad.argmax())
            raise DataError(
                f"known pair {at} is user {users[at]}, item {items[at]}; users must be 0 or more, items 1 to {num_items}; "
                "fix the pairs, or num_items"
            )
        self.num_items = num_items
        self.num_users = int(users.max(initial=-1)) + 1
        self._width = num_items + 1
        self._keys = np.unique(users * self._width + items)
        # One row more than there are users: a user without a known item reads that one.
        counts = np.bincount(self._keys // self._width, minlength=self.num_users + 1).astype(np.int64)
        self._starts = np.cumsum(counts) - counts
        self._free = num_items - counts
        self._log_free = np.log(self._free, where=self._free > 0, out=np.full(len(counts), -np.inf))
        owners, ids = self.pairs
        # For each pair the number of not taken items below it: ascending within a user, so a search finds the r-th one not taken.
        self._below = self._keys - 1 - (np.arange(len(self._keys)) - self._starts[owners])
        self._bitmap = self._make_bitmap(owners, ids) if (self.num_users + 1) * self._width <= MOST_BITS else None

    @property
    def pairs(self) -> tuple[Int64, Int64]:
        """(users, items) in ascending order, each pair once."""
        return self._keys // self._width, self._keys % self._width

    def place(self, users: Int64) -> Int64:
        """The row of each user in a table of ``num_users`` + 1 rows, the last of which is for unknown users."""
        return np.where((users >= 0) & (users < self.num_users), users, self.num_users)

    def free(self, users: Int64) -> Int64:
        """(B,) number of items not taken.

        Raises:
            DataError: a user has taken all of them.
        """
        free = self._free[self.place(users)]
        if not free.all():
            at = int((free == 0).argmax())
            raise DataError(
                f"user {users[at]} has taken all {self.num_items} items, so there is no negative for this user "
                f"({len(np.unique(users[free == 0]))} such users here); drop their rows, or set loader.negatives=0"
            )
        return free

    def log_free(self, users: Int64) -> NDArray[np.float64]:
        """(B,) log of the number of items not taken, -inf where it is 0."""
        return self._log_free[self.place(users)]

    def contains(self, users: Int64, items: Int64) -> NDArray[np.bool_]:
        """Whether each pair is known; ``users`` and ``items`` broadcast."""
        keys = self.place(users) * self._width + items
        if self._bitmap is not None:
            return np.asarray(self._bitmap[keys >> 3] >> (keys & 7).astype(np.uint8) & 1, dtype=np.bool_)
        at = np.minimum(self._keys.searchsorted(keys), len(self._keys) - 1)
        return np.asarray(self._keys[at] == keys)

    def nth_free(self, users: Int64, ranks: Int64) -> Int64:
        """(B,) the item not taken by each of ``users`` (B,) whose place among these, from 0, is in ``ranks`` (B,)."""
        rows = self.place(users)
        found = self._below.searchsorted(ranks + rows * self._width, side="right")
        items: Int64 = ranks + 1 + found - self._starts[rows]
        return items

    def _make_bitmap(self, users: Int64, items: Int64) -> NDArray[np.uint8]:
        bits = np.zeros((self.num_users + 1) * self._width, dtype=bool)
        bits[users * self._width + items] = True
        return np.packbits(bits, bitorder="little")
