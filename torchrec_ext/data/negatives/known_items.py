"""KnownItems: the items taken by users as tensors on a device, for losses over the batch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from torchrec_ext.data.negatives.known_pairs import MOST_BITS, KnownPairs, bitmap


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
