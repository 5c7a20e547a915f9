"""StepBatch: a batch that the user's loop made, or one that is made of :class:`Rows` inside the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
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


class StepBatch(NamedTuple):
    """A batch, as the user's loop made it or not made yet.

    Args:
        parts: arguments of the step: those of the user's function, or the tensors of which ``resident`` makes them.
        resident: rows that make the batch inside the step; None for a batch of the user's loop.
        make: makes the arguments of the user's function of such parts.
    """

    parts: tuple[Any, ...]
    resident: RowsOnDevice | None = None
    make: Callable[[], tuple[Any, ...]] | None = None

    def args(self) -> tuple[Any, ...]:
        """Returns the arguments of the user's function."""
        return self.parts if self.make is None else self.make()

    def shapes(self) -> Shapes:
        """Returns the shapes of the tensors of its parts."""
        return tuple(
            TensorKind(leaf.shape, leaf.dtype)
            for leaf in pytree.tree_leaves(self.parts)
            if isinstance(leaf, Tensor)
        )


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

    def batches(self) -> Iterator[StepBatch]:
        """Returns the batches of an epoch: the next, or the rest of the one whose state was loaded."""
        steps = self.rows.steps(self.device, draws=self.draws is None)
        epoch = self.rows.epoch
        keys = None
        if self.draws is not None:
            keys = self.draws.keys(epoch).to(self.device)
        for step in steps:
            draws = step.draws if keys is None else keys
            parts = (step.on_device,) if draws is None else (step.on_device, draws)
            yield StepBatch(parts, self, partial(self._args, step, epoch))

    def _args(self, step: RowStep, epoch: int) -> tuple[Any, ...]:
        """Makes the batch of a step outside of it."""
        draws = step.draws
        # By numpy: op by op it takes several times as long on a device.
        if self.draws is not None:
            drawn = self.rows.draw(step.indices, epoch)
            assert drawn is not None
            draws = drawn.to(self.device)
        columns = dict(zip(self._names, self.tensors, strict=False))
        batch = self.rows.assemble(step.on_device, draws, columns)
        # In memory as a DataLoader's batch: repeated rows are views until here.
        return pytree.tree_map_only(Tensor, Tensor.contiguous, batch)  # type: ignore[no-any-return]

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

    def repeats(self, batch: Any, size: int) -> list[tuple[Tensor, int]]:
        """Returns the tensors of a batch of ``size`` rows that repeat each value, with how often."""
        repeats = []
        for name, leaf in zip(self.rows.names, pytree.tree_leaves(batch), strict=False):
            count = self.rows.repeats.get(name)
            # Concatenated, a row's values repeat along the first dimension; stacked, they
            # have one of their own.
            if count is not None and leaf.dim() and leaf.shape[0] == size * count:
                repeats.append((leaf, count))
        return repeats
