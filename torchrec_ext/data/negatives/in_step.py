"""TensorDraws: uniform negatives as torch ops, id by id those of numpy, so that a captured step draws them itself."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_ext.data.columns import Int64
from torchrec_ext.data.negatives.random import device_uniform, signed, stream
from torchrec_ext.data.negatives.samplers import FROM_REST, PROPOSED, UniformNegatives


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


class TensorDraws:
    """Uniform draws with replacement for the rows of one set of columns.

    A number proposes an item; where the row's owner has taken it, a second number takes one of those that are free: the
    r-th free item comes after the taken ones with at most r free items below them, which a bisection finds.

    Args:
        sampler: the distribution; its known pairs have a bitmap.
        keys: (N,) user of each row, as the sampler knows them.
        ids: (I,) id of each item, ascending.
        count: n, the number of draws of a row.
    """

    def __init__(
        self, sampler: UniformNegatives, keys: Int64, ids: Int64, count: int
    ) -> None:
        known = sampler.known
        assert known.bitmap is not None
        self._seed = sampler.seed
        self._items = known.num_items
        self._count = count
        # Of an owner without pairs nothing is read, but the tensor must hold something.
        below = (
            torch.from_numpy(known.below) if len(known.below) else torch.zeros(1).long()
        )
        self._last = len(below) - 1
        self._halvings = int(known.num_items - known.num_free.min()).bit_length()
        self.tensors = DrawTensors(
            torch.from_numpy(known.row_of(keys)),
            torch.from_numpy(known.bitmap),
            torch.from_numpy(known.starts),
            torch.from_numpy(known.num_free),
            below,
            torch.from_numpy(ids),
        )

    @staticmethod
    def fits(sampler: object) -> bool:
        """Whether a sampler's draws can be made so: uniform ones whose known pairs have a bitmap."""
        return (
            isinstance(sampler, UniformNegatives) and sampler.known.bitmap is not None
        )

    def keys(self, epoch: int) -> Tensor:
        """Returns the (2,) keys of an epoch's numbers."""
        streams = [stream(self._seed, epoch, kind) for kind in (PROPOSED, FROM_REST)]
        return torch.tensor([signed(key) for key in streams])

    def draw(self, rows: Tensor, keys: Tensor, tensors: DrawTensors) -> Tensor:
        """Returns (B, n) ids for ``rows`` (B,), with the keys of the epoch, on the device of ``tensors``."""
        items = self._items
        draws = torch.arange(self._count, device=rows.device)
        places = rows[:, None]
        proposed = (device_uniform(keys[0], places, draws) * items).long() + 1
        owners = tensors.owners.index_select(0, rows)[:, None]
        bits = owners * (items + 1) + proposed
        bytes_ = tensors.bitmap[bits >> 3].long()
        is_taken = (bytes_ >> (bits & 7)) & 1
        free = tensors.free[owners]
        # Rounding can make a number below 1, times the count, the count itself.
        rank = (device_uniform(keys[1], places, draws) * free).long()
        rank = torch.minimum(rank, free - 1)
        first = tensors.starts[owners].expand_as(rank)
        low, high = first, first + (items - free)
        target = rank + owners * (items + 1)
        # A loop of its own: a compiler makes one kernel of it and of what surrounds it.
        for _ in range(self._halvings):
            middle = (low + high) >> 1
            is_below = tensors.below[middle.clamp(max=self._last)] <= target
            is_open = low < high
            low = torch.where(is_open & is_below, middle + 1, low)
            high = torch.where(is_open & ~is_below, middle, high)
        rest = rank + 1 + low - first
        return tensors.ids[torch.where(is_taken == 1, rest, proposed) - 1]
