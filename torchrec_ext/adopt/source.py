"""GivenBatch, DrawnBatch: a batch that the user's loop made, and one that is made of :class:`Rows` inside the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchrec_ext.adopt.rows.rows import Rows


class TensorKind(NamedTuple):
    """Shape and dtype of a tensor of a batch."""

    shape: torch.Size
    dtype: torch.dtype


Shapes = tuple[TensorKind, ...]  # of the tensors of a batch


def _shapes(leaves: Sequence[Any]) -> Shapes:
    return tuple(
        TensorKind(leaf.shape, leaf.dtype)
        for leaf in leaves
        if isinstance(leaf, Tensor)
    )


class GivenBatch(NamedTuple):
    """A batch that the user's loop made."""

    values: tuple[Any, ...]

    @property
    def resident(self) -> None:
        """There are no rows on the device that it is made of."""
        return

    def parts(self) -> tuple[Any, ...]:
        """Returns the arguments of the step."""
        return self.values

    def args(self) -> tuple[Any, ...]:
        """Returns the arguments of the user's function."""
        return self.values

    def shapes(self) -> Shapes:
        """Returns the shapes of its tensors."""
        return _shapes(pytree.tree_leaves(self.values))


class RowsOnDevice:
    """The tensors of :class:`Rows` on a device."""

    def __init__(self, rows: Rows, device: torch.device) -> None:
        self.rows = rows
        self.names = list(rows.tensors)
        self.tensors = [tensor.to(device) for tensor in rows.tensors.values()]

    def assemble(
        self, tensors: Sequence[Tensor], parts: Sequence[Tensor]
    ) -> tuple[Any, ...]:
        """Makes a batch of the tensors, and of the indices and draws of a step."""
        draws = parts[1] if len(parts) > 1 else None
        return self.rows.assemble(
            parts[0], draws, dict(zip(self.names, tensors, strict=True))
        )


class DrawnBatch(NamedTuple):
    """A batch that is not made yet: indices (B,) of its rows, and what was drawn for them, (B, n) or None."""

    resident: RowsOnDevice
    indices: Tensor
    draws: Tensor | None

    def parts(self) -> tuple[Tensor, ...]:
        """Returns the tensors of which the batch is made, on the device."""
        device = self.resident.tensors[0].device
        indices = self.indices.to(device)
        return (indices,) if self.draws is None else (indices, self.draws.to(device))

    def repeats(self, args: Any) -> dict[int, int]:
        """Returns how often tensors of its arguments repeat each value, by their ids."""
        leaves = pytree.tree_leaves(args)
        found = repeats_of(self.resident.rows, leaves, len(self.indices))
        return {id(leaf): count for leaf, count in found}

    def shapes(self) -> Shapes:
        """Returns the shapes of the tensors of which it is made."""
        return _shapes(self.parts())

    def args(self) -> tuple[Any, ...]:
        """Returns the arguments of the user's function."""
        batch = self.resident.assemble(self.resident.tensors, self.parts())
        # In memory as a DataLoader's batch: repeated rows are views until here.
        return pytree.tree_map_only(Tensor, Tensor.contiguous, batch)  # type: ignore[no-any-return]


AnyBatch = GivenBatch | DrawnBatch


def repeats_of(
    rows: Rows, leaves: Sequence[Any], size: int
) -> list[tuple[Tensor, int]]:
    """Returns the leaves of a batch of ``size`` rows that repeat each value, with how often."""
    repeats = []
    for name, leaf in zip(rows.names, leaves, strict=False):
        count = rows.repeats.get(name)
        # Concatenated, a row's values repeat along the first dimension; stacked, they
        # have one of their own.
        if count is not None and leaf.dim() and leaf.shape[0] == size * count:
            repeats.append((leaf, count))
    return repeats
