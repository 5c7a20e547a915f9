"""Averager: makes what every rank holds whole the mean over the ranks, in one or two collectives whatever the number of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

WHOLE_WEIGHTS = 2**16  # smaller tables are sent whole: 256 KiB travel in the time that a second message takes


class Averager:
    """The mean over ranks of tensors that were equal when they were last marked.

    Of a large table only the rows that some rank has moved since are sent; the others are still equal. For that it keeps a copy of
    each large table. torch's own `model_averaging` replaces ``parameter.data`` with a view of its buffer instead of writing into
    it, which FBGEMM's kernels, whose tables are slices of one tensor, would not see.

    Args:
        tables: (rows, D) each, of which most rows may not move.
        others: tensors that move in every step.
    """

    def __init__(self, tables: Iterable[Tensor], others: Iterable[Tensor]) -> None:
        tables = list(tables)
        self._large = [table for table in tables if table.numel() > WHOLE_WEIGHTS]
        self._whole = [*(table for table in tables if table.numel() <= WHOLE_WEIGHTS), *others]
        self._marked = [table.detach().clone() for table in self._large]
        self.sent = 0

    @torch.no_grad()
    def mark(self) -> None:
        """From here on rows count as moved; every rank's tensors are equal now."""
        for table, marked in zip(self._large, self._marked, strict=True):
            marked.copy_(table)

    @torch.no_grad()
    def average(self, more: Sequence[Tensor] = ()) -> None:
        """Writes the mean into every tensor, and into those of ``more``, and marks; all ranks call it with as many.

        :attr:`sent` is then the number of weights that this rank has sent.
        """
        rows = self._moved_rows()
        pieces = [table[own] for table, own in zip(self._large, rows, strict=True)]
        means = _means([*pieces, *self._whole, *more])
        for table, marked, own in zip(self._large, self._marked, rows, strict=True):
            mean = next(means).to(table.dtype)
            table.index_copy_(0, own, mean)
            marked.index_copy_(0, own, mean)
        for tensor, mean in zip([*self._whole, *more], means, strict=True):
            tensor.copy_(mean)
        self.sent = sum(tensor.numel() for tensor in (*pieces, *self._whole, *more))

    def _moved_rows(self) -> list[Tensor]:
        """The rows of each large table that any rank has moved; the same on every rank."""
        if not self._large:
            return []
        own = [(table != marked).any(dim=1) for table, marked in zip(self._large, self._marked, strict=True)]
        moved = torch.cat(own).to(torch.uint8)
        dist.all_reduce(moved, dist.ReduceOp.MAX)
        return [part.nonzero().squeeze(1) for part in torch.split(moved, [len(table) for table in self._large])]


def _means(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The mean of each tensor over the ranks, in float32, all in one exchange."""
    if not tensors:
        return iter(())
    flat = torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return (part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True))
