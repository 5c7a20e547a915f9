"""RowOrder: the rows of each step of an epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class RowOrder:
    """Each row once in an epoch, on one of the ranks; arguments as those of :class:`Rows`.

    Raises:
        ValueError: an argument is out of range.
    """

    num_rows: int
    batch_size: int
    seed: int
    shuffle: bool
    drop_last: bool
    ranks: int
    rank: int

    def __post_init__(self) -> None:
        for name in ("batch_size", "ranks"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(
                    f"{name}={value!r}: must be a whole number of 1 or more"
                )
        if not 0 <= self.rank < self.ranks:
            raise ValueError(
                f"rank={self.rank}: must be 0 to ranks - 1 = {self.ranks - 1}"
            )
        if self.num_rows < self.ranks or (
            self.drop_last and self.num_rows < self.ranks * self.batch_size
        ):
            least = self.batch_size if self.drop_last else 1
            raise ValueError(
                f"{self.num_rows} rows are not a batch of {least} for each of "
                f"{self.ranks} ranks: take fewer ranks or a smaller batch_size"
            )

    def __len__(self) -> int:
        full, rest = divmod(self.num_rows, self.batch_size * self.ranks)
        if self.drop_last or (full and rest < self.ranks):
            return full
        return full + 1

    def batches(self, epoch: int) -> list[Tensor]:
        """Returns this rank's rows in each step of an epoch."""
        order = torch.arange(self.num_rows)
        if self.shuffle:
            generator = torch.Generator().manual_seed(_epoch_seed(self.seed, epoch))
            order = torch.randperm(self.num_rows, generator=generator)
        size = self.batch_size
        ranks = self.ranks
        full, rest = divmod(self.num_rows, size * ranks)
        mine = order[: full * size * ranks].view(full, ranks, size)[:, self.rank]
        batches = list(mine.unbind())
        if self.drop_last:
            return batches
        last = order[self.num_rows - rest :]
        if not full or rest >= ranks:
            batches.append(last.tensor_split(ranks)[self.rank])
        elif self.rank < rest:
            # Too few rows for one more step on every rank: some ranks have a row more
            # in the step before.
            batches[-1] = torch.cat([batches[-1], last[self.rank, None]])
        return batches

    def state(self) -> dict[str, Any]:
        """Returns what the order of all ranks depends on."""
        return {name: value for name, value in vars(self).items() if name != "rank"}


def _epoch_seed(seed: int, epoch: int) -> int:
    return int(
        np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0]
        >> np.uint64(1)
    )
