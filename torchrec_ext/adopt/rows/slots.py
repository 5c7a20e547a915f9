"""Slot: one value of a row: a constant, a column, a repeat of it, several columns beside each other, or drawn integers.

Reading: the columns, constants and draws that the rows of a Dataset are made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchrec_ext.adopt.rows.rereads import differs


@dataclass(frozen=True, kw_only=True, eq=False)
class Slot:
    """One value of a row, and what it is made of.

    Args:
        name: name of the slot, unique among those of a row.
        dtype: dtype of the values.
        shape: S, the shape of a row's value.
        pieces: names of columns and constants: one for the whole value, or one for each of its numbers, in order; None
            stands for a number that is drawn.
        repeat: k where the value is k times the same piece beside each other, else 0.
    """

    name: str
    dtype: torch.dtype
    shape: torch.Size
    pieces: tuple[str | None, ...]
    repeat: int = 0

    @property
    def drawn(self) -> int:
        """The number of integers that are drawn."""
        return self.pieces.count(None)

    def build(
        self, pieces: Mapping[str, Tensor], draws: Tensor | None, size: int
    ) -> Tensor:
        """Returns the values of a batch of B = ``size`` rows, (B, *S).

        Args:
            pieces: (B, ...) rows of columns, and constants, (1, ...), by name.
            draws: (B, n) drawn integers.
            size: B.
        """
        if len(self.pieces) == 1 and self.pieces[0] is not None:
            piece = pieces[self.pieces[0]].to(self.dtype)
            shape = torch.Size((1, *self.shape[1:])) if self.repeat else self.shape
            return piece.reshape(len(piece), *shape).expand(size, *self.shape)
        numbers = []
        index = 0
        for run in self._runs():
            if isinstance(run, int):
                assert draws is not None
                number = draws[:, index : index + run]
                index += run
            else:
                number = pieces[run].reshape(-1, 1).expand(size, 1)
            numbers.append(number.to(self.dtype))
        return torch.cat(numbers, dim=1).view(size, *self.shape)

    def _runs(self) -> list[str | int]:
        """Returns the names of the pieces in order, with the length of each run of draws between them."""
        runs: list[str | int] = []
        for name in self.pieces:
            if name is not None:
                runs.append(name)
            elif runs and isinstance(runs[-1], int):
                runs[-1] += 1
            else:
                runs.append(1)
        return runs

    def describe(self, constants: Mapping[str, Tensor]) -> str:
        """Returns what the slot is made of in words."""
        if len(self.pieces) > 1:
            texts = []
            for run in self._runs():
                texts.append(f"{run} drawn" if isinstance(run, int) else f"`{run}`")
            return ", ".join(texts)
        (name,) = self.pieces
        if name is None:
            return "drawn"
        if name in constants:
            values = constants[name].reshape(-1).tolist()
            if len(values) > 8:
                return f"constant {values[:4]} and so on"
            return f"constant {values}"
        times = f" {self.repeat} times" if self.repeat else ""
        return f"column `{name}`{times}"


@dataclass(frozen=True)
class SlotPiece:
    """The numbers of a slot that one column holds: all, the first of equal ones (``"repeat"``), or that at an index."""

    slot: int
    index: int | str = "all"

    def of(self, values: Sequence[Tensor]) -> Tensor:
        """Returns the numbers (C, *P) in the slots' values (C, *S)."""
        slot_values = values[self.slot]
        if isinstance(self.index, int):
            return slot_values.flatten(1)[:, self.index]
        return slot_values if self.index == "all" else slot_values[:, 0]


@dataclass(kw_only=True)
class Reading:
    """The columns, constants and draws that the rows of a Dataset are made of.

    Args:
        slots: the values of a row in order.
        columns: (N, ...) values of all rows by name.
        constants: (1, ...) values that all rows share, by name.
        compared: number of rows that were compared with the Dataset.
        notes: lines to show the user.
    """

    slots: list[Slot] = field(default_factory=list)
    columns: dict[str, Tensor] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    compared: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def drawn(self) -> Slot | None:
        """The slot that holds drawn integers."""
        return next((slot for slot in self.slots if slot.drawn), None)

    def wrong(self, rows: Tensor, slot_values: Sequence[Tensor]) -> SlotPiece | None:
        """Compares ``slot_values`` of ``rows`` (B,) with columns and constants; returns a differing piece, or None."""
        pieces = {name: column[rows] for name, column in self.columns.items()}
        pieces |= self.constants
        for index, (slot, values) in enumerate(
            zip(self.slots, slot_values, strict=True)
        ):
            if len(slot.pieces) == 1 and not slot.drawn:
                if not equal(slot.build(pieces, None, len(rows)), values):
                    return SlotPiece(index, "repeat" if slot.repeat else "all")
                continue
            for number, name in enumerate(slot.pieces):
                if name is not None and not equal(
                    pieces[name].reshape(-1), values.flatten(1)[:, number]
                ):
                    return SlotPiece(index, number)
        return None

    def describe(self, rows: int) -> list[str]:
        """Describes in lines the source of each slot, and how many of ``rows`` rows were compared."""
        lines = [f"{slot.name}: {slot.describe(self.constants)}" for slot in self.slots]
        if self.compared >= rows:
            return [*lines, "all rows were compared with the Dataset's"]
        return [*lines, self.not_compared(rows)]

    def not_compared(self, rows: int) -> str:
        """Says in a line how many of ``rows`` rows were not compared."""
        return (
            f"{rows - self.compared:,} of {rows:,} rows were NOT compared with the Dataset's, and may differ; "
            "compared=len(dataset) compares all"
        )


def equal(first: Tensor, second: Tensor) -> bool:
    """Says whether values are equal; what is no number equals itself."""
    return not differs(first, second).any()
