"""GivenBatch, DrawnBatch: a batch that the user's loop made, and one that is made of :class:`Rows` inside the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchrec_ext.adopt.rows.rows import Rows, RowStep
from torchrec_ext.capture import policy
from torchrec_ext.data.negatives.in_step import DrawTensors, TensorDraws


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
    """The tensors of :class:`Rows` on a device, and the steps of an epoch there.

    On a GPU uniform negatives are drawn inside the step, id by id those of numpy: nothing is copied for a step. That
    is 9 kernels where Triton fuses them, and 138 to 150 of an NCF's step without it. So numpy draws for many steps at
    once without Triton, and on a CPU, where it takes a third of the time.

    Args:
        rows: the rows.
        device: the device.
        draws_inside: whether a step draws its negatives itself, where it can; see above.
    """

    def __init__(
        self, rows: Rows, device: torch.device, *, draws_inside: bool | None = None
    ) -> None:
        self.rows = rows
        self.device = device
        self._names = list(rows.tensors)
        tensors = list(rows.tensors.values())
        self.draws: TensorDraws | None = None
        if draws_inside is None:
            draws_inside = device.type != "cpu" and policy.HAS_TRITON
        if draws_inside and rows.negatives is not None:
            self.draws = rows.negatives.in_step()
        if self.draws is not None:
            tensors += self.draws.tensors
        self.tensors = [tensor.to(device) for tensor in tensors]

    def columns(self) -> dict[str, Tensor]:
        """Returns the columns and constants of the rows on the device, by name."""
        return dict(zip(self._names, self.tensors, strict=False))

    def batches(self) -> Iterator[DrawnBatch]:
        """Returns the batches of an epoch: the next, or the rest of the one whose state was loaded."""
        steps = self.rows.steps(self.device, draws=self.draws is None)
        epoch = self.rows.epoch
        keys = None
        if self.draws is not None:
            keys = self.draws.keys(epoch).to(self.device)
        for step in steps:
            yield DrawnBatch(self, step, epoch, keys)

    def assemble(
        self, tensors: Sequence[Tensor], parts: Sequence[Tensor]
    ) -> tuple[Any, ...]:
        """Makes a batch of the tensors, and of the indices and draws of a step, or of the keys of its epoch."""
        indices = parts[0]
        draws = parts[1] if len(parts) > 1 else None
        if self.draws is not None and draws is not None:
            of_draws = DrawTensors(*tensors[len(self._names) :])
            draws = self.draws.draw(indices, draws, of_draws)
        named = dict(zip(self._names, tensors, strict=False))
        return self.rows.assemble(indices, draws, named)


class DrawnBatch(NamedTuple):
    """A batch that is not made yet: a step of rows on a device, and the keys (2,) from which it draws inside, if so."""

    resident: RowsOnDevice
    step: RowStep
    epoch: int
    keys: Tensor | None

    def parts(self) -> tuple[Tensor, ...]:
        """Returns the tensors of which the batch is made, on the device."""
        indices = self.step.on_device
        draws = self.step.draws if self.keys is None else self.keys
        return (indices,) if draws is None else (indices, draws)

    def repeats(self, args: Any) -> dict[int, int]:
        """Returns how often tensors of its arguments repeat each value, by their ids."""
        leaves = pytree.tree_leaves(args)
        found = repeats_of(self.resident.rows, leaves, len(self.step.indices))
        return {id(leaf): count for leaf, count in found}

    def shapes(self) -> Shapes:
        """Returns the shapes of the tensors of which it is made."""
        return _shapes(self.parts())

    def args(self) -> tuple[Any, ...]:
        """Returns the arguments of the user's function."""
        resident = self.resident
        draws = self.step.draws
        # By numpy: op by op it takes several times as long on a device.
        if self.keys is not None:
            drawn = resident.rows.draw(self.step.indices, self.epoch)
            assert drawn is not None
            draws = drawn.to(resident.device)
        batch = resident.rows.assemble(self.step.on_device, draws, resident.columns())
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
