"""MixedNegatives: uniform candidates beside those of the batch, so that items without interactions are pushed down too."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from torchrec_ext.data.columns import Int64
from torchrec_ext.data.negatives import SHARED
from torchrec_ext.data.random_numbers import stream, uniform


class MixedNegatives:
    """N uniform candidates for each step, shared by all queries of all ranks (Yang et al. 2020).

    They are appended to the positives of a rank as rows without a query (``in_batch_negatives(..., queries=B)``), which also
    excludes a user's known items among them, and corrected together with them by the mixture that :meth:`log_q` states.

    Args:
        num_items: items have the ids 1 to ``num_items``.
        extra: N over all ranks.
        batch_size: positives per step over all ranks.
        seed: of the draws.
    """

    def __init__(self, num_items: int, extra: int, batch_size: int, seed: int = 0) -> None:
        for name, value in (("num_items", num_items), ("extra", extra), ("batch_size", batch_size)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be 1 or more")
        self.num_items, self.extra, self.batch_size, self.seed = num_items, extra, batch_size, seed

    def draw(self, epoch: int, step: int, *, rank: int = 0, world_size: int = 1) -> Int64:
        """(ceil(N / R),) items: this rank's part of the N of (seed, epoch, step), filled up with 0, which is no candidate."""
        share = -(-self.extra // world_size)
        places = np.arange(rank * share, (rank + 1) * share)
        numbers = uniform(stream(self.seed, epoch, SHARED), np.array([step]), places)
        return np.where(places < self.extra, (numbers * self.num_items).astype(np.int64) + 1, 0)

    def log_q(self, in_batch: Tensor) -> Tensor:
        """(C,) log-probability that a place among the batch's and the extra candidates holds each item.

        Args:
            in_batch: (C,) log-probability that a place of the batch holds the item: its share of the training rows, or
                ``StreamingFrequency.log_q(ids) - log(batch_size)``.
        """
        from_batch = in_batch + math.log(self.batch_size)
        from_all = torch.full_like(in_batch, math.log(self.extra / self.num_items))
        return torch.logaddexp(from_batch, from_all) - math.log(self.batch_size + self.extra)
