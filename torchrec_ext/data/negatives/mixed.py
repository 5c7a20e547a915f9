"""MixedNegatives: uniform candidates beside those of the batch, so that items without interactions are pushed down too.

CatalogueCandidates: all items at every step, for a softmax over the catalogue.
"""

from __future__ import annotations

import numpy as np

from torchrec_ext.data.columns import Float32, Int64
from torchrec_ext.data.negatives.random import stream, uniform
from torchrec_ext.schema.validation import check_least

# The stream of an epoch that RejectionNegatives leave to these draws.
_SHARED = 4


class MixedNegatives:
    """Draws N uniform candidates for each step, shared by all queries of all ranks (Yang et al. 2020).

    They are appended to the positives of a rank as rows without a query (``in_batch_negatives(..., queries=B)``), which
    also excludes a user's known items among them. :meth:`log_q` corrects both together, by their mixture.

    Args:
        num_items: items have the ids 1 to ``num_items``.
        extra: N, over all ranks.
        batch_size: positives per step over all ranks.
        counts: (num_items + 1,) training rows by item.
        seed: seed of the draws.
    """

    def __init__(
        self, num_items: int, extra: int, batch_size: int, counts: Int64, seed: int = 0
    ) -> None:
        check_least("num_items", num_items)
        check_least("extra", extra)
        check_least("batch_size", batch_size)
        if counts.shape != (num_items + 1,) or not counts[1:].sum() > 0:
            raise ValueError(
                f"counts: shape {counts.shape} with sum {counts.sum()}, must be (num_items + 1,) = ({num_items + 1},) "
                "with a count above 0: row i counts the training rows of item i"
            )
        self.num_items = num_items
        self.extra = extra
        self.batch_size = batch_size
        self.seed = seed
        # Of B + N candidates, B are drawn like the rows and N uniformly: (B p + N / I) /
        # (B + N).
        of_batch = batch_size * np.maximum(counts, 0) / counts[1:].sum()
        q = (of_batch + extra / num_items) / (batch_size + extra)
        self._log_q = np.log(q).astype(np.float32)
        self._counts = counts

    def of_batch(self, size: int, extra: int) -> MixedNegatives:
        """Returns ``extra`` draws beside ``size`` positives per step, as a loader makes them."""
        return MixedNegatives(self.num_items, extra, size, self._counts, self.seed)

    def draw(
        self, epoch: int, step: int, *, rank: int = 0, world_size: int = 1
    ) -> Int64:
        """Returns (ceil(N / R),) items: this rank's part of the step's N, filled up with 0, which is no item."""
        share = -(-self.extra // world_size)
        places = np.arange(rank * share, (rank + 1) * share)
        numbers = uniform(stream(self.seed, epoch, _SHARED), np.array([step]), places)
        return np.where(
            places < self.extra, (numbers * self.num_items).astype(np.int64) + 1, 0
        )

    def log_q(self, ids: Int64) -> Float32:
        """Returns (C,) the log-probability of each item as one of a step's candidates; item 0 is the unknown one."""
        log_q: Float32 = self._log_q[ids]
        return log_q


class CatalogueCandidates:
    """Gives every step all items as shared candidates of its queries, a part on each rank.

    Args:
        items: (I,) ids of the items, from 1 on.
    """

    def __init__(self, items: Int64) -> None:
        self.items = items

    def draw(
        self, epoch: int, step: int, *, rank: int = 0, world_size: int = 1
    ) -> Int64:
        """Returns (ceil(I / R),) items: this rank's part of all, filled up with 0, which is no item."""
        del epoch, step
        share = -(-len(self.items) // world_size)
        items = self.items[rank * share : (rank + 1) * share]
        return np.concatenate([items, np.zeros(share - len(items), np.int64)])

    def log_q(self, ids: Int64) -> Float32:
        """Returns (C,) zeros: each item is there with probability 1."""
        return np.zeros(len(ids), np.float32)
