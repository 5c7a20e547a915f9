"""DrawnStep: a training step before its batch is made, so that a captured step makes it inside; needs torch alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torchrec_ext.needs_torch  # noqa: F401

from torch import Tensor


class Resident(Protocol):
    """Rows in memory or on a device; torch ops alone make a batch of them."""

    tensors: Sequence[Tensor]
    """The tensors of the rows."""

    def assemble(self, tensors: Sequence[Tensor], drawn: Sequence[Tensor]) -> Any:
        """Makes the batch of a step; all shapes follow from those of the arguments.

        Args:
            tensors: the rows, or tensors that stand for them while a step is captured.
            drawn: tensors of a :class:`DrawnStep`.
        """

    def repeats(self, batch: Any, size: int) -> list[tuple[Tensor, int]]:
        """Returns the tensors of a batch of ``size`` rows that are known to repeat each value, with how often."""


@dataclass
class DrawnStep:
    """A step before its batch is made: a captured step makes it inside, so that nothing is copied twice.

    Args:
        tensors: indices of the step's rows and what was drawn for them, of the same shapes in all steps.
        source: rows that make the batch; None if ``tensors`` are the batch, as a user's own loop made it.
        batch: makes the same batch outside of a captured step.
    """

    tensors: tuple[Any, ...]
    source: Resident | None
    batch: Callable[[], Any]
