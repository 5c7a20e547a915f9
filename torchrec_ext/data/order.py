"""RowOrder: which rows of a set in memory each step of an epoch takes, on each rank.

Share: a rank's rows of each global batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchrec_ext.data.columns import Int64


@dataclass(frozen=True, kw_only=True)
class Share:
    """The contiguous part of rank r of R in each global batch; sizes differ by one row at most.

    Args:
        rank: r.
        world_size: R.
    """

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank={self.rank} of world_size={self.world_size}: rank must be 0 to {self.world_size - 1}"
            )

    def part(self, count: int) -> slice:
        """Returns the rank's rows in a global batch of ``count`` rows."""
        return slice(
            self.rank * count // self.world_size,
            (self.rank + 1) * count // self.world_size,
        )

    def rows(self, batch_size: int) -> int:
        """Returns the number of rows of the rank's batch, padding included: the same on every rank."""
        return -(-batch_size // self.world_size)


@dataclass(frozen=True, kw_only=True)
class RowOrder:
    """The rows of each step: a permutation of all rows, cut into global batches, each of which is shared out.

    Args:
        num_rows: N.
        batch_size: rows of a step over all ranks.
        num_steps: steps of an epoch; if the last one begins, it has all rows that are left.
        drop_last: whether each step has ``batch_size`` rows, and the rows that are left have none.
        share: this rank's share of each global batch.
        seed: seed of the order; None keeps that of the set.
    """

    num_rows: int
    batch_size: int
    num_steps: int
    drop_last: bool
    share: Share
    seed: int | None

    def rows(self, epoch: int) -> Int64:
        """Returns (N,) the rows in the order of an epoch."""
        if self.seed is None:
            return np.arange(self.num_rows)
        bits = np.random.PCG64([self.seed, epoch])
        return np.random.Generator(bits).permutation(self.num_rows)

    def places(self, step: int) -> tuple[slice, slice]:
        """Returns the places in the order of an epoch of a step on all ranks, and of those on this one."""
        start = step * self.batch_size
        stop = start + self.batch_size
        if step + 1 == self.num_steps and not self.drop_last:
            stop = self.num_rows
        part = self.share.part(stop - start)
        return slice(start, stop), slice(start + part.start, start + part.stop)
