"""DeviceNegatives: the samplers of :mod:`negatives` as torch ops, for rows that already are on the device.

Ids and log_q are, in eager mode, bit for bit those of the numpy samplers, so a run may move between the two. A draw
launches a fixed number of kernels and never waits for the device: a replacement is computed for every draw, and a
mask says where to take it. On a CPU that is several times the work of the numpy samplers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torchrec_ext.data.columns import Array, Int64
from torchrec_ext.data.negatives.known_pairs import MOST_BITS, KnownPairs, bitmap
from torchrec_ext.data.negatives.random import device_uniform, stream
from torchrec_ext.data.negatives.samplers import (
    FROM_REST,
    PROPOSED,
    Negatives,
    PopularityNegatives,
    RejectionNegatives,
    UniformNegatives,
)


class DeviceSample(NamedTuple):
    """``ids`` (B, N) int64 and ``log_q`` (B, N) float32 on the device."""

    ids: Tensor
    log_q: Tensor


def _copy(table: Array, device: torch.device) -> Tensor:
    return torch.from_numpy(table).to(device)


class DeviceKnownPairs:
    """:class:`KnownPairs` on a device.

    Args:
        known: the pairs.
        device: device of the copy, which takes as much memory as ``known``.
    """

    def __init__(self, known: KnownPairs, device: torch.device) -> None:
        self.num_users = known.num_users
        self.num_items = known.num_items
        self._width = known.num_items + 1
        self.keys = _copy(known.keys, device)
        self.starts = _copy(known.starts, device)
        self.free = _copy(known.num_free, device)
        self.below = _copy(known.below, device)
        self.bitmap = None if known.bitmap is None else _copy(known.bitmap, device)

    def row_of(self, users: Tensor) -> Tensor:
        """See :meth:`KnownPairs.row_of`."""
        return torch.where(
            (users >= 0) & (users < self.num_users), users, self.num_users
        )

    def contains(self, users: Tensor, items: Tensor) -> Tensor:
        """Says whether each pair is known; ``users`` and ``items`` broadcast."""
        keys = self.row_of(users) * self._width + items
        if self.bitmap is not None:
            return (self.bitmap[keys >> 3] >> (keys & 7).to(torch.uint8) & 1).bool()
        if not len(self.keys):
            return torch.zeros_like(keys, dtype=torch.bool)
        # Without KnownPairs' filter: its search would need the number of candidates on
        # the host, and so a wait.
        index = torch.searchsorted(self.keys, keys).clamp_(max=len(self.keys) - 1)
        return self.keys[index] == keys

    def nth_free(self, users: Tensor, ranks: Tensor) -> Tensor:
        """See :meth:`KnownPairs.nth_free`; ``users`` and ``ranks`` broadcast."""
        rows = self.row_of(users)
        return (
            ranks
            + 1
            + torch.searchsorted(self.below, ranks + rows * self._width, right=True)
            - self.starts[rows]
        )


class KnownItems(nn.Module):
    """Looks up the items taken by users, for losses over the batch; a module, so it moves with its model.

    Up to ``MOST_BITS`` users x items it reads a bitmap, a row for each user, and a step with it can be captured. Above,
    it looks for each user's list among the items: that takes time in proportion to the items taken, and its shapes
    depend on the users.

    Args:
        known: the pairs.
    """

    bits: Tensor | None
    taken: Tensor
    starts: Tensor

    def __init__(self, known: KnownPairs) -> None:
        super().__init__()
        self.num_users = known.num_users
        self.num_items = known.num_items
        users, items = known.pairs
        # Each user's bits begin at a new byte, so that rows of bytes can be selected.
        row = known.num_items // 8 + 1
        size = (known.num_users + 1) * row * 8
        counts = np.bincount(users, minlength=known.num_users + 1)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        bits = None
        if size <= MOST_BITS:
            bits = torch.from_numpy(bitmap(users * row * 8 + items, size)).view(-1, row)
            # The bitmap answers, so the lists stay empty.
            items = items[:0]
            starts = starts[:0]
        # Not in a checkpoint: they are data.
        self.register_buffer("bits", bits, persistent=False)
        self.register_buffer("taken", torch.from_numpy(items), persistent=False)
        self.register_buffer("starts", torch.from_numpy(starts), persistent=False)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Returns (B, C) bool: whether user b has taken item c, for users (B,) and items (C,), int64."""
        rows = torch.where(
            (users >= 0) & (users < self.num_users), users, self.num_users
        )
        items = torch.where((items >= 0) & (items <= self.num_items), items, 0)
        if self.bits is None:
            counts = self.starts[rows + 1] - self.starts[rows]
            owners = torch.repeat_interleave(counts)
            # From an item's place among those of all users to its place in ``taken``.
            shifts = self.starts[rows] - counts.cumsum(0) + counts
            taken_items = self.taken[
                torch.arange(len(owners), device=rows.device) + shifts[owners]
            ]
            ordered = items.sort().values
            indices = torch.searchsorted(ordered, taken_items)
            is_match = ordered[indices.clamp(max=len(ordered) - 1)] == taken_items
            is_taken = torch.zeros(
                len(ordered), len(rows), dtype=torch.bool, device=rows.device
            )
            is_taken[indices[is_match], owners[is_match]] = True
            return is_taken.index_select(
                0, torch.searchsorted(ordered, items)
            ).T.contiguous()
        # By column, since rows of bytes are copied whole: 0.5 ms in place of 4.5 for
        # 1,024 x 1,024.
        columns = (
            self.bits.index_select(0, rows).T.contiguous().index_select(0, items >> 3)
        )
        return (
            (columns >> (items & 7).to(torch.uint8)[:, None] & 1).bool().T.contiguous()
        )


class DeviceNegatives(ABC):
    """A sampler on a device, made by :func:`sampler_on_device`."""

    def __init__(
        self, sampler: RejectionNegatives, device: torch.device, users: Int64 | None
    ) -> None:
        # Checked now: a draw on the device cannot raise without a wait.
        checked_users = np.arange(sampler.known.num_users) if users is None else users
        sampler.known.free(checked_users)
        self.seed = sampler.seed
        self.device = device
        self.known = DeviceKnownPairs(sampler.known, device)

    @abstractmethod
    def log_q(self, users: Tensor, items: Tensor) -> Tensor:
        """See :meth:`Negatives.log_q`; ``users`` and ``items`` broadcast."""

    @abstractmethod
    def propose(self, numbers: Tensor) -> Tensor:
        """See :meth:`RejectionNegatives.propose`."""

    @abstractmethod
    def draw_untaken(self, users: Tensor, numbers: Tensor) -> Tensor:
        """See :meth:`RejectionNegatives.draw_untaken`."""

    def draw(
        self, users: Tensor, positions: Tensor, epoch: int, n: int
    ) -> DeviceSample:
        """Draws N = ``n`` items for each of B rows: see :meth:`Negatives.draw`.

        A user who has taken every item, and was not among the ``users`` of :func:`sampler_on_device`, gets item 0,
        since raising an error would take a synchronisation.

        Args:
            users: (B,) int64 ids on the device.
            positions: (B,) int64, the number of each row in the whole set.
            epoch: epoch of the training, from 0.
            n: N, the number of draws per row.
        """
        users = users[:, None]
        positions = positions[:, None]
        draws = torch.arange(n, device=self.device)
        first = self.propose(
            device_uniform(stream(self.seed, epoch, PROPOSED), positions, draws)
        )
        second = self.draw_untaken(
            users, device_uniform(stream(self.seed, epoch, FROM_REST), positions, draws)
        )
        ids = torch.where(self.known.contains(users, first), second, first)
        ids = torch.where(self.known.free[self.known.row_of(users)] > 0, ids, 0)
        return DeviceSample(ids, self.log_q(users, ids))


class _Uniform(DeviceNegatives):
    def __init__(
        self, sampler: UniformNegatives, device: torch.device, users: Int64 | None
    ) -> None:
        super().__init__(sampler, device, users)
        self._log_q = _copy(sampler.log_q_of, device)

    def log_q(self, users: Tensor, items: Tensor) -> Tensor:
        log_q = self._log_q[self.known.row_of(users)]
        return torch.broadcast_tensors(log_q, items)[0]  # type: ignore[no-any-return, no-untyped-call]

    def propose(self, numbers: Tensor) -> Tensor:
        """See :meth:`RejectionNegatives.propose`."""
        return (numbers * self.known.num_items).long() + 1

    def draw_untaken(self, users: Tensor, numbers: Tensor) -> Tensor:
        """See :meth:`RejectionNegatives.draw_untaken`."""
        free = self.known.free[self.known.row_of(users)]
        return self.known.nth_free(
            users, torch.minimum((numbers * free).long(), free - 1)
        )


class _Popularity(DeviceNegatives):
    def __init__(
        self, sampler: PopularityNegatives, device: torch.device, users: Int64 | None
    ) -> None:
        super().__init__(sampler, device, users)
        mass = sampler.free_mass
        self._log_p = _copy(sampler.log_p, device)
        self._log_left = _copy(sampler.log_left, device)
        self._accept = _copy(sampler.accept, device)
        self._alias = _copy(sampler.alias, device)
        self._sums = _copy(mass.sums, device)
        self._before = _copy(mass.before, device)
        self._below = _copy(mass.below, device)
        self._mass = _copy(mass.mass, device)
        self._total = mass.total

    def log_q(self, users: Tensor, items: Tensor) -> Tensor:
        return (self._log_p[items] - self._log_left[self.known.row_of(users)]).float()

    def propose(self, numbers: Tensor) -> Tensor:
        """See :meth:`RejectionNegatives.propose`."""
        scaled = numbers * self.known.num_items
        slot = scaled.long()
        return (
            torch.where(scaled - slot < self._accept[slot], slot, self._alias[slot]) + 1
        )

    def draw_untaken(self, users: Tensor, numbers: Tensor) -> Tensor:
        """See :meth:`RejectionNegatives.draw_untaken`."""
        rows = self.known.row_of(users)
        mass = self._mass[rows]
        places = torch.minimum((numbers * mass).long(), mass - 1)
        below = torch.searchsorted(
            self._below, places + rows * (self._total + 1), right=True
        )
        return torch.searchsorted(
            self._sums,
            places + self._before[below] - self._before[self.known.starts[rows]],
            right=True,
        )


def sampler_on_device(
    sampler: Negatives, device: torch.device, *, users: Int64 | None = None
) -> DeviceNegatives:
    """Copies a sampler to a device: the same draws by torch ops.

    Args:
        sampler: sampler whose tables are copied.
        device: device of the users and positions that will be drawn for.
        users: (U,) users that will be drawn for, checked here; all users of the known pairs by default.

    Raises:
        DataError: one of ``users`` has taken every item.
        ValueError: the sampler has no form in torch.
    """
    kinds: dict[type, Callable[..., DeviceNegatives]] = {
        UniformNegatives: _Uniform,
        PopularityNegatives: _Popularity,
    }
    kind = kinds.get(type(sampler))
    if kind is None:
        names = " or ".join(sampler_class.__name__ for sampler_class in kinds)
        raise ValueError(
            f"sampler={type(sampler).__name__}: must be {names}; draw with it in the loader, or use one of these"
        )
    return kind(sampler, device, users)
