"""Rereads: rows of a Dataset read several times, which shows what it draws; what has no law is refused by its cause."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.adopt.rows.reading import (
    GETITEMS,
    DatasetReader,
    Ids,
    seed_everything,
    words,
)

ROUNDS = 4
MOST_NUMBERS = 32  # of a vector that are looked at one by one
_MORE_ROUNDS = 16  # for rows that stayed the same: few draws repeat so often
_STEADY = 0.05  # share of rows without draws, although others draw, that is no chance
_REPEATED = 30  # equal ids with equal features that are no chance


class Rereads:
    """Rows that are read again with other seeds: numbers that change are drawn.

    Args:
        reader: reads rows; inside :meth:`DatasetReader.untouched`.
        rows: (C,) numbers of the rows.
        values: (C, *S) values of each slot in these rows, as read before.

    Attributes:
        masks: (*S) numbers of each slot that are drawn.
    """

    def __init__(
        self, reader: DatasetReader, rows: Ids, values: Sequence[Tensor]
    ) -> None:
        self._reader = reader
        self._rows = rows
        self._values = [values, *self._read(rows, range(1, ROUNDS))]
        self._changes = _changes(self._values)
        self.masks = [changes.any(dim=0) for changes in self._changes]
        self._slots = [slot for slot, mask in enumerate(self.masks) if mask.any()]
        self._ids = []
        for slot in self._slots:
            if (
                not values[slot].is_floating_point()
                and values[slot].dtype != torch.bool
            ):
                self._ids.append(slot)

    def _read(self, rows: Ids, seeds: Iterable[int]) -> list[list[Tensor]]:
        readings = []
        for seed in seeds:
            seed_everything(seed)
            readings.append(self._reader.rows(rows))
        return readings

    def check(self) -> None:
        """Refuses draws that no law of ours describes.

        Raises:
            CannotAdopt: the message says why.
        """
        # Causes with a remedy of their own come first: below, the same rows are noise
        # or several draws.
        self._check_each_row()
        self._check_features()
        where = self._reader.where
        for slot in self._slots:
            mask = self.masks[slot]
            if slot not in self._ids:
                raise CannotAdopt(
                    f"{where} returns rows that change from call to call: {self._described(slot)} is noise, "
                    f"dropout or augmentation, or features of what is drawn; make it in the model. {GETITEMS}"
                )
            if int((~mask).sum()) > MOST_NUMBERS:
                raise CannotAdopt(
                    f"{where} draws some integers of {self._reader.slot_name(slot)} among more than {MOST_NUMBERS} "
                    f"that stay. {GETITEMS}"
                )
        if len(self._slots) > 1:
            both = " and ".join(self._reader.slot_name(slot) for slot in self._slots)
            raise CannotAdopt(
                f"{where} draws more than one slot: {both} change from call to call, and how they depend on each other "
                f"cannot be seen. {GETITEMS}"
            )

    def _described(self, slot: int) -> str:
        mask = self.masks[slot]
        return f"{self._reader.slot_name(slot)} ({words(self._values[0][slot].dtype, mask.shape)})"

    def _check_each_row(self) -> None:
        """Refuses a Dataset in which some rows are drawn and others are not, as with a row for each instance."""
        if not self._ids:
            return
        stays = self._that_stay(self._changes)
        least = max(2.0, _STEADY * len(self._rows))
        if stays.sum() < least:
            return
        rows = self._rows[stays]
        first = [values[torch.from_numpy(stays)] for values in self._values[0]]
        more = self._read(rows, range(ROUNDS, ROUNDS + _MORE_ROUNDS))
        # Where a row's number decides between a positive and a negative, as `row % 5`,
        # no draw moves the positives.
        rows = rows[self._that_stay(_changes([first, *more]))]
        if len(rows) < least:
            return
        raise CannotAdopt(
            f"{self._reader.where} draws {self._reader.slot_name(self._ids[0])} in some rows and not in others, such "
            f"as row {rows[0]}: make one row of a positive and its negatives, which collate_fn concatenates. {GETITEMS}"
        )

    def _that_stay(self, changes: Sequence[Tensor]) -> NDArray[np.bool_]:
        """Returns which rows (C,) have drawn ids, and the same ones in each reading."""
        changed = torch.cat(
            [changes[slot].reshape(len(changes[slot]), -1) for slot in self._ids], dim=1
        )
        return ~changed.any(dim=1).numpy()

    def _check_features(self) -> None:
        """Refuses a slot that follows from a drawn id, such as features of the drawn item."""
        for ids in self._ids:
            for slot in self._slots:
                if slot != ids and self._follows(slot, ids):
                    name = self._reader.slot_name(ids)
                    raise CannotAdopt(
                        f"{self._reader.where}: {self._described(slot)} depends on the drawn item, {name}: leave it "
                        f"out of the rows, keep its table as a buffer of the model, and look it up by id. {GETITEMS}"
                    )

    def _follows(self, slot: int, ids: int) -> bool:
        """Says whether equal ids always came with equal values of a slot."""
        keys = torch.stack([values[ids] for values in self._values])
        values = torch.stack([values[slot] for values in self._values])
        shape = keys.shape[2:]
        if values.shape[2 : 2 + len(shape)] != shape:
            return False
        values = values.reshape(keys.numel(), -1)
        # Each value is compared with the one that its id came with first.
        _, first, groups = np.unique(
            keys.flatten().numpy(), return_index=True, return_inverse=True
        )
        same = not differs(values, values[torch.from_numpy(first[groups])]).any()
        return same and len(groups) - len(first) >= _REPEATED


def differs(first: Tensor, second: Tensor) -> Tensor:
    """Says of each value whether it differs; what is no number equals itself."""
    return (first != second) & ((first == first) | (second == second))


def _changes(readings: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Returns which numbers (C, *S) of each slot differ from the first reading in another one."""
    first, *others = readings
    changes = [torch.zeros_like(before, dtype=torch.bool) for before in first]
    for values in others:
        for slot, before in enumerate(first):
            changes[slot] |= differs(values[slot], before)
    return changes
