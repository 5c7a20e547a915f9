"""ResidentRows: rows as tensors on one device, and the steps of an epoch over them, drawn ahead or inside of a step.

It is the one class of rows that fit memory: :class:`torchrec_ext.adopt.Rows` makes a user's batches of them, and
:class:`torchrec_ext.data.loader.on_device.TowerRows` makes TowerBatches. It needs torch alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import repeat
from typing import Any, NamedTuple, Protocol

import torchrec_ext.needs_torch  # noqa: F401

import numpy as np
import torch
from torch import Tensor

from torchrec_ext.data.columns import Array, Int64
from torchrec_ext.data.order import RowOrder
from torchrec_ext.drawn import DrawnStep

# Integers that are drawn at a time: one call of numpy for many small steps.
_DRAWN = 1 << 18


class Draws(Protocol):
    """Draws for rows: arrays (B, ...) as functions of the epoch and the row, or the same by torch ops."""

    count: int
    """Integers that are drawn for a row."""

    def draw(self, rows: Int64, epoch: int) -> tuple[Array, ...]:
        """Draws for ``rows`` (B,), in numpy.

        Raises:
            DataError: nothing can be drawn for a row.
        """

    @property
    def tensors(self) -> Sequence[Tensor] | None:
        """What :meth:`draw_in_step` reads; None if numpy must draw."""

    def keys(self, epoch: int) -> Tensor:
        """Returns the keys of an epoch for :meth:`draw_in_step`."""

    def draw_in_step(
        self, rows: Tensor, keys: Tensor, tensors: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Draws as :meth:`draw` does, by torch ops."""


class RowStep(NamedTuple):
    """A step of an epoch, and what the host knows of it.

    Args:
        epoch: number of the epoch.
        number: number of the step in it.
        on_host: (B,) numbers of this rank's rows.
        rows: the same on the device.
        further: see :meth:`ResidentRows.further`.
        drawn_on_host: arrays that were drawn for them; empty without draws, and where the step draws.
        drawn: the same on the device.
    """

    epoch: int
    number: int
    on_host: Int64
    rows: Tensor
    further: tuple[Tensor, ...]
    drawn_on_host: tuple[Array, ...] = ()
    drawn: tuple[Tensor, ...] = ()


class ResidentRows(ABC):
    """Rows as tensors on one device, in an order and with draws that are functions of seed, epoch and row.

    From the host come an epoch's order and what is drawn: for many steps at once in numpy, since torch takes several
    times as long op by op, on a GPU too. A captured step may draw for itself, id by id the same.

    Args:
        order: the rows of each step.
        draws: what is drawn for them; None if nothing is.
        device: device of the tensors.

    Attributes:
        tensors: the tensors of the rows; see :class:`~torchrec_ext.drawn.Resident`.
    """

    tensors: Sequence[Tensor]

    def __init__(
        self, order: RowOrder, draws: Draws | None, device: torch.device
    ) -> None:
        self.order = order
        self.draws = draws
        self.device = device

    @abstractmethod
    def assemble(self, tensors: Sequence[Tensor], drawn: Sequence[Tensor]) -> Any:
        """Makes a batch inside of a step; ``drawn`` are the rows, :meth:`further` tensors and what was drawn."""

    @abstractmethod
    def made(self, step: RowStep) -> Any:
        """Makes the same batch outside of a captured step, by what the host knows."""

    def repeats(self, batch: Any, size: int) -> list[tuple[Tensor, int]]:
        """See :class:`~torchrec_ext.drawn.Resident`; by default none is known."""
        del batch, size
        return []

    def further(self, everyone: Tensor) -> tuple[Tensor, ...]:
        """Returns what a step takes besides its rows, computed of the rows of all ranks, ``everyone``."""
        del everyone
        return ()

    @cached_property
    def in_step(self) -> DrawsInside | None:
        """These rows for steps that draw for themselves; None if nothing is drawn, or the host must draw."""
        if self.draws is None or self.draws.tensors is None:
            return None
        return DrawsInside(self, self.draws, self.draws.tensors)

    def steps(
        self, epoch: int, start: int = 0, *, inside: bool = False
    ) -> Iterator[DrawnStep]:
        """Yields the steps of an epoch from ``start`` on, before their batches are made.

        Args:
            epoch: number of the epoch.
            start: number of the first step.
            inside: whether steps draw for themselves where they can; otherwise many steps are drawn for at a time.
        """
        source = self.in_step if inside else None
        keys = () if source is None else (source.keys(epoch),)
        for step in self.row_steps(epoch, start, draws=source is None):
            tensors = (step.rows, *step.further, *(keys or step.drawn))
            yield DrawnStep(tensors, source or self, partial(self._made, step))

    def row_steps(
        self, epoch: int, start: int, *, draws: bool = True
    ) -> Iterator[RowStep]:
        """Yields the steps of an epoch from ``start`` on; without ``draws`` nothing is drawn for them."""
        order = self.order
        rows = order.rows(epoch)
        # One copy an epoch: one in each step would wait for the device.
        on_device = moved(rows, self.device)
        numbers = range(start, order.num_steps)
        places = [order.places(number) for number in numbers]
        drawn: Iterator[tuple[tuple[Array, ...], tuple[Tensor, ...]]]
        drawn = repeat(((), ()))
        if draws and self.draws is not None:
            drawn = self._ahead(self.draws, [rows[mine] for _, mine in places], epoch)
        for number, (everyone, mine) in zip(numbers, places, strict=True):
            further = self.further(on_device[everyone])
            of_rank = rows[mine], on_device[mine]
            yield RowStep(epoch, number, *of_rank, further, *next(drawn))

    def _ahead(
        self, draws: Draws, steps: list[Int64], epoch: int
    ) -> Iterator[tuple[tuple[Array, ...], tuple[Tensor, ...]]]:
        """Yields what is drawn for each step's rows, on the host and on the device; several steps' at once."""
        share = self.order.share.rows(self.order.batch_size)
        at_once = max(1, _DRAWN // (share * draws.count))
        for first in range(0, len(steps), at_once):
            some = steps[first : first + at_once]
            drawn, there = self._drawn(draws, np.concatenate(some), epoch)
            stop = 0
            for rows in some:
                part = slice(stop, stop + len(rows))
                stop = part.stop
                yield (
                    tuple(each[part] for each in drawn),
                    tuple(each[part] for each in there),
                )

    def _drawn(
        self, draws: Draws, rows: Int64, epoch: int
    ) -> tuple[tuple[Array, ...], tuple[Tensor, ...]]:
        drawn = draws.draw(rows, epoch)
        return drawn, tuple(moved(each, self.device) for each in drawn)

    def _made(self, step: RowStep) -> Any:
        """Makes a step's batch, with what a captured step would have drawn for itself."""
        if self.draws is not None and not step.drawn:
            arrays, tensors = self._drawn(self.draws, step.on_host, step.epoch)
            step = step._replace(drawn_on_host=arrays, drawn=tensors)
        return self.made(step)


class DrawsInside:
    """Rows on a device for steps that draw for themselves; see :class:`~torchrec_ext.drawn.Resident`.

    Args:
        rows: the rows.
        draws: the draws.
        tensors: what they read.
    """

    def __init__(
        self, rows: ResidentRows, draws: Draws, tensors: Sequence[Tensor]
    ) -> None:
        self._rows = rows
        self._draws = draws
        self._own = len(rows.tensors)
        moved_tensors = [each.to(rows.device) for each in tensors]
        self.tensors: Sequence[Tensor] = [*rows.tensors, *moved_tensors]
        self.repeats = rows.repeats

    def keys(self, epoch: int) -> Tensor:
        """Returns the keys of an epoch's draws, on the device."""
        return self._draws.keys(epoch).to(self._rows.device)

    def assemble(self, tensors: Sequence[Tensor], drawn: Sequence[Tensor]) -> Any:
        """Makes the batch of a step's tensors, of which the last are the keys of the epoch."""
        *parts, keys = drawn
        own = self._own
        parts += self._draws.draw_in_step(parts[0], keys, tensors[own:])
        return self._rows.assemble(tensors[:own], parts)


def moved(array: Array, device: torch.device) -> Tensor:
    """Copies an array to a device; to a GPU by page-locked memory, so that nobody waits."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
