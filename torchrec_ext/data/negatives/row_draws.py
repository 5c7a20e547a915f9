"""RowDraws: the negatives of rows, by numpy for many steps at once or by torch ops inside of a step, id by id alike."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrec_ext.data.columns import Array, Int64
from torchrec_ext.data.negatives.random import device_uniform, signed, stream
from torchrec_ext.data.negatives.samplers import (
    FROM_REST,
    PROPOSED,
    Negatives,
    NegativeSample,
    UniformNegatives,
)


class DrawTensors(NamedTuple):
    """What draws are made of, on one device.

    Args:
        owners: (N,) each row's row of the known pairs.
        bitmap: (bits / 8,) uint8, a bit for each pair of an owner and an item.
        starts: (U + 1,) number of the known pairs before each owner's.
        free: (U + 1,) number of the items that each owner has not taken.
        below: (P,) see :class:`KnownPairs`.
        ids: (I,) id of each item.
    """

    owners: Tensor
    bitmap: Tensor
    starts: Tensor
    free: Tensor
    below: Tensor
    ids: Tensor


class RowDraws:
    """Draws with replacement for the rows of one set: functions of (seed, epoch, row), on any rank and after a resume.

    Args:
        sampler: the distribution over the items 1 to I.
        users: (N,) user of each row, as the sampler knows them.
        count: n, the number of draws of a row.
        ids: (I,) id of each item, ascending; 1 to I by default.
    """

    def __init__(
        self, sampler: Negatives, users: Int64, count: int, ids: Int64 | None = None
    ) -> None:
        self.sampler = sampler
        self.users = users
        self.count = count
        self.ids = ids
        # Python's integers, because a captured step is traced with them.
        self._items = 0
        self._halvings = 0

    def sample(self, rows: Int64, epoch: int) -> NegativeSample:
        """Draws n ids for each of ``rows`` (B,), with their log-probabilities.

        Raises:
            DataError: the user of a row has taken every item.
        """
        sample = self.sampler.draw(self.users[rows], rows, epoch, self.count)
        if self.ids is None:
            return sample
        return sample._replace(ids=self.ids[sample.ids - 1])

    def draw(self, rows: Int64, epoch: int) -> tuple[Array, ...]:
        """Returns the (B, n) ids of :meth:`sample` alone; see :class:`~torchrec_ext.data.resident.Draws`."""
        return (self.sample(rows, epoch).ids,)

    @cached_property
    def tensors(self) -> DrawTensors | None:
        """What a step draws by; None if numpy must: for other than uniform draws, and those without a bitmap."""
        if not isinstance(self.sampler, UniformNegatives):
            return None
        known = self.sampler.known
        owners = known.row_of(self.users)
        # Inside of a step nobody could tell that a user has taken every item.
        if known.bitmap is None or not known.num_free[owners].all():
            return None
        self._items = known.num_items
        self._halvings = int(known.num_items - known.num_free.min()).bit_length()
        ids = np.arange(1, known.num_items + 1) if self.ids is None else self.ids
        # Of an owner without pairs nothing is read, but the tensor must hold something.
        below = known.below if len(known.below) else np.zeros(1, np.int64)
        arrays = (owners, known.bitmap, known.starts, known.num_free, below, ids)
        return DrawTensors(*map(torch.from_numpy, arrays))

    def keys(self, epoch: int) -> Tensor:
        """Returns the (2,) keys of an epoch's numbers, which a step draws by."""
        assert isinstance(self.sampler, UniformNegatives)
        seed = self.sampler.seed
        streams = [stream(seed, epoch, kind) for kind in (PROPOSED, FROM_REST)]
        return torch.tensor([signed(key) for key in streams])

    def draw_in_step(
        self, rows: Tensor, keys: Tensor, tensors: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Returns what :meth:`draw` does by torch ops, on the device of :attr:`tensors`.

        A number proposes an item; where the row's owner has taken it, a second number takes one of those that are free:
        the r-th free item comes after the taken ones with at most r free items below them, which a bisection finds.
        """
        of = DrawTensors(*tensors)
        items = self._items
        draws = torch.arange(self.count, device=rows.device)
        places = rows[:, None]
        proposed = (device_uniform(keys[0], places, draws) * items).long() + 1
        owners = of.owners.index_select(0, rows)[:, None]
        bits = owners * (items + 1) + proposed
        bytes_ = of.bitmap[bits >> 3].long()
        is_taken = (bytes_ >> (bits & 7)) & 1
        free = of.free[owners]
        # Rounding can make a number below 1, times the count, the count itself.
        rank = (device_uniform(keys[1], places, draws) * free).long()
        rank = torch.minimum(rank, free - 1)
        first = of.starts[owners].expand_as(rank)
        low, high = first, first + (items - free)
        target = rank + owners * (items + 1)
        # A loop of its own: a compiler makes one kernel of it and of what surrounds it.
        for _ in range(self._halvings):
            middle = (low + high) >> 1
            is_below = of.below[middle.clamp(max=len(of.below) - 1)] <= target
            is_open = low < high
            low = torch.where(is_open & is_below, middle + 1, low)
            high = torch.where(is_open & ~is_below, middle, high)
        rest = rank + 1 + low - first
        return (of.ids[torch.where(is_taken == 1, rest, proposed) - 1],)
