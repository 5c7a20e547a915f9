"""HardNegatives: items that the current model ranks high for a user who has not taken them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from typing_extensions import Self

from torchrec_ext.data.columns import Float32, Int64
from torchrec_ext.data.negatives.known_pairs import KnownPairs
from torchrec_ext.data.negatives.random import stream, uniform
from torchrec_ext.data.negatives.samplers import (
    KIND,
    PLACE,
    NegativeSample,
    SampledData,
    SamplingSettings,
    TrainingSampler,
    UniformNegatives,
)
from torchrec_ext.schema import DataError
from torchrec_ext.schema.validation import check_least

# Users (B,) -> items (B, K), best first; below 1 if there are fewer.
Index = Callable[[Int64], Int64]


class HardNegatives(TrainingSampler):
    """Draws one of the user's K best items of the last :meth:`refresh` with probability ``share``, else a uniform one.

    T_u are the K best items not taken by the user. The probability of item i is q(i) = share / K if i is in T_u, plus
    (1 - share) / (number not taken). Before the first refresh, and for users it did not cover, all draws are uniform.

    Draws are functions of (seed, epoch, position) and of the last refresh. To keep ranks and restarts alike, refresh
    between epochs (a loader that prefetches has drawn ahead), on every rank from the same embeddings, and save
    :meth:`state_dict`. The loader does both: see ``refresh`` of :class:`ChunkLoader`.

    Args:
        easy: sampler of the uniform draws, with the items taken by each user; its seed is used here too.
        k: K, the number of items among which a hard draw is uniform. A small K draws false negatives more often.
        share: share of hard draws, above 0 and below 1: the correction needs a q for every positive.
    """

    refreshed = True
    host_only = "the model ranks items"

    def __init__(
        self, easy: UniformNegatives, *, k: int = 100, share: float = 0.5
    ) -> None:
        check_least("k", k)
        if not 0 < share < 1:
            raise ValueError(
                f"share={share}: must be above 0 and below 1, so that every item can be drawn and has a log_q"
            )
        self.easy = easy
        self.k = k
        self.share = share
        nothing = np.zeros(0, dtype=np.int64)
        self._hard = KnownPairs(easy.known.num_items, nothing, nothing)
        self.refreshes = 0

    @classmethod
    def configured(cls, config: SamplingSettings, data: SampledData) -> Self:
        """See :meth:`TrainingSampler.configured`."""
        return cls(
            UniformNegatives.configured(config, data),
            k=config.hard_k,
            share=config.hard_share,
        )

    def refresh(
        self, index: Index, users: Int64 | None = None, *, block: int = 1024
    ) -> None:
        """Asks an index for each user's best items.

        Args:
            index: function from users (B,) to their items (B, K'), best first, such as a search in a FAISS
                index. Ids below 1 stand for no item. Known items are dropped, so an index that does not know
                them should return more.
            users: (U,) users to ask for; all known users by default.
            block: B, the number of users asked for at once.

        Raises:
            DataError: the index returned an item that does not exist.
        """
        users = np.arange(self.easy.known.num_users) if users is None else users
        # Empty first pieces keep the type if there are no blocks.
        owners = [users[:0]]
        items = [users[:0]]
        for start in range(0, len(users), block):
            block_owners, block_items = self._best(users[start : start + block], index)
            owners.append(block_owners)
            items.append(block_items)
        # Replaced as a whole, because a thread that prefetches may be drawing.
        self._hard = KnownPairs(
            self.easy.known.num_items, np.concatenate(owners), np.concatenate(items)
        )
        self.refreshes += 1

    def draw(
        self, users: Int64, positions: Int64, epoch: int, n: int
    ) -> NegativeSample:
        """See :meth:`Negatives.draw`."""
        # One object for the whole draw, whatever another thread refreshes.
        hard = self._hard
        ids = self.easy.draw(users, positions, epoch, n).ids
        counts = hard.known(users)
        kinds = uniform(
            stream(self.easy.seed, epoch, KIND), positions[:, None], np.arange(n)
        )
        rows, draws = np.nonzero((kinds < self.share) & (counts > 0)[:, None])
        ranks = (
            uniform(stream(self.easy.seed, epoch, PLACE), positions[rows], draws)
            * counts[rows]
        )
        # Rounding can make a number below 1, times the count, the count itself.
        ranks_below = np.minimum(ranks.astype(np.int64), counts[rows] - 1)
        ids[rows, draws] = hard.nth_known(users[rows], ranks_below)
        return NegativeSample(ids, self._log_q(hard, users[:, None], ids))

    def log_q(self, users: Int64, items: Int64) -> Float32:
        """See :meth:`Negatives.log_q`; ``users`` and ``items`` broadcast."""
        return self._log_q(self._hard, users, items)

    def state_dict(self, epoch: int | None = None) -> dict[str, Any]:
        """Returns the K best items of the last refresh, as pairs of a user and an item, and the number of refreshes."""
        users, items = self._hard.pairs
        return {
            "users": torch.from_numpy(users),
            "items": torch.from_numpy(items),
            "refreshes": self.refreshes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the hard items of ``state``, and with them its draws."""
        self._hard = KnownPairs(
            self.easy.known.num_items, state["users"].numpy(), state["items"].numpy()
        )
        self.refreshes = int(state["refreshes"])

    def _log_q(self, hard: KnownPairs, users: Int64, items: Int64) -> Float32:
        counts = hard.known(users)
        share = np.where(counts > 0, self.share, 0.0)
        easy = (1 - share) * np.exp(self.easy.log_q(users, items).astype(np.float64))
        # A user without hard items has share 0, so any number above 0 may divide it.
        of_hard = hard.contains(users, items) * share / np.maximum(counts, 1)
        log_q: Float32 = np.log(easy + of_hard).astype(np.float32)
        return log_q

    def _best(self, users: Int64, index: Index) -> tuple[Int64, Int64]:
        """Returns (owners, items) of up to K pairs per user."""
        best = np.asarray(index(users), dtype=np.int64)
        num_items = self.easy.known.num_items
        if best.ndim != 2 or len(best) != len(users):
            raise DataError(
                f"the index returned shape {best.shape} for {len(users)} users; it must return (B, K) items"
            )
        if (best > num_items).any():
            row, rank = np.argwhere(best > num_items)[0]
            raise DataError(
                f"the index returned item {best[row, rank]} for user {users[row]}; items are 1 to {num_items}: return "
                "the ids of the data, not places in the index, and 0 where there is none"
            )
        # Items below 1 stand for none. They are clipped, because contains() takes no
        # negative ids.
        good = (best > 0) & ~self.easy.known.contains(
            users[:, None], np.maximum(best, 0)
        )
        rows, ranks = np.nonzero(good & (np.cumsum(good, axis=1) <= self.k))
        return users[rows], best[rows, ranks]
