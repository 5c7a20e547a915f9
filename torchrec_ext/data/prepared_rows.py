"""PreparedRows: the rows of a prepared folder by split, in memory or in files, and what was counted of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from torchrec_ext.data.columns import Chunk, concatenate_rows
from torchrec_ext.data.files.sources import ParquetSource
from torchrec_ext.data.prepared_columns import PreparedColumns
from torchrec_ext.schema import DataError

# Values of a split that is held in memory: 512 MiB.
WHOLE_VALUES = 2**26
# What a row of a list column counts for: nobody knows its length before it is read.
_LIST_VALUES = 32


class PreparedRows(PreparedColumns):
    """The rows of a prepared folder; for the arguments see :class:`PreparedColumns`."""

    def chunks(self, split: str, names: Sequence[str]) -> Iterator[Chunk]:
        """Yields the columns ``names`` of a split in the files' order: parts of row groups, or all of few rows."""
        rows = self.stored(split)
        if isinstance(rows, Chunk) and rows and {*names} <= {*rows}:
            yield rows.select(list(names))
            return
        source = self.splits[split]
        for group in source.groups:
            # In parts, because a row group may be larger than the memory.
            yield from source.parts(group, list(names), 0, 1 << 16)

    def stored(
        self, split: str, more: Sequence[str | None] = ()
    ) -> Chunk | ParquetSource:
        """Returns a split's columns in memory where they are few enough, to be shuffled as a whole; else its files.

        Args:
            split: name of the split.
            more: further columns to hold, such as a weight that a setting names; those that the files lack are left
                to whoever reads them.
        """
        source = self.splits[split]
        roles = self.roles
        others = (roles.label, *roles.tasks, roles.weight, self.evaluation.candidates)
        outputs = self.preprocessor.outputs
        others += tuple(name for name in more if name in outputs)
        names = list(
            dict.fromkeys(filter(None, (*self.features, *self.dense, *others)))
        )
        lists = sum(outputs[name].startswith("list") for name in names)
        values = len(names) + (_LIST_VALUES - 1) * lists
        # Negatives are drawn for rows in memory alone.
        if self.form == "labels" and source.num_rows * values > WHOLE_VALUES:
            return source
        key = (split, *names)
        if key not in self._held:
            chunks = [source.read(group, names) for group in source.groups]
            self._held[key] = concatenate_rows(chunks, names)
        return self._held[key]

    @cached_property
    def _held(self) -> dict[tuple[str, ...], Chunk]:
        """What is held in memory, by split and columns, each read once."""
        return {}

    def training_rows(self, more: Sequence[str | None] = ()) -> Chunk | ParquetSource:
        """Returns the training rows as a loader takes them: pairs and sessions in memory; see :meth:`stored`."""
        if self.form == "labels":
            return self.stored("train", more)
        return self.rows("train")

    def rows(self, split: str) -> Chunk:
        """Returns a split's rows in memory; no rows if the folder has no such split.

        Of pairs these are the positives; those for training have a known user and item.

        Raises:
            DataError: no training row is a positive.
        """
        if split not in self.splits:
            # No rows, with the columns that rows have.
            return self.rows("train").slice(0, 0)
        rows = self.stored(split)
        if not isinstance(rows, Chunk):
            chunks = [rows.read(group, list(rows.columns)) for group in rows.groups]
            return concatenate_rows(chunks, rows.columns)
        if self.form != "pairs":
            return rows
        key = (split, "positives")
        if key not in self._held:
            self._held[key] = self._positives(split, rows)
        return self._held[key]

    def _positives(self, split: str, rows: Chunk) -> Chunk:
        positive = np.ones(rows.num_rows, dtype=bool)
        if self.roles.label:
            positive = rows[self.roles.label].values > 0
        known = positive.copy()
        if split == "train":
            for role in (self.roles.user, self.roles.item):
                known &= rows[str(role)].values > 0
        count = int(known.sum())
        every = int(positive.sum())
        if split == "train" and not count:
            raise DataError(
                f"{self.folder}: no training row is a positive: with label 1, and a known user and item"
            )
        if count < every:
            warnings.warn(
                f"{self.folder}: {every - count:,} of {every:,} positives for training have an unknown user or "
                "item, and are left out; a lower min_count of the preprocessing knows more of them",
                stacklevel=2,
            )
        return rows if count == rows.num_rows else rows.take(np.flatnonzero(known))

    def clicked(self, split: str, *names: str) -> Iterator[Chunk]:
        """Yields columns of a split's rows with a label above 0, or of all of them if the rows have no labels."""
        label = self.roles.label
        if not label:
            yield from self.chunks(split, names)
            return
        for chunk in self.chunks(split, [*names, label]):
            yield chunk.take(np.flatnonzero(chunk[label].values > 0))

    @property
    def positives(self) -> dict[str, tuple[float, float]]:
        """The weight of each split's rows as positives, and of all of them, by split; see :attr:`task_positives`.

        Raises:
            DataError: all rows of a split have weight 0.
        """
        label = self.roles.label
        sums = {}
        for split, source in self.splits.items():
            total = float(self.labels[split]["total"])
            every = total
            if label:
                every = float(self.labels[split]["positives"][label]["of_all"])
            if not total > 0:
                raise DataError(
                    f"{source.files[0].name}: column '{self.roles.weight}' is 0 in all {source.num_rows:,} rows of "
                    f"split '{split}'; give each row that counts a weight above 0"
                )
            sums[split] = every, total
        return sums

    @property
    def task_positives(self) -> dict[str, dict[str, tuple[float, float]]]:
        """The weight of the positives of each task, among all rows and among the rows with label 1.

        By split and by task, the label being the first.
        """
        return {
            split: {
                name: (float(sums["of_all"]), float(sums["of_positive"]))
                for name, sums in self.labels[split]["positives"].items()
            }
            for split in self.splits
        }

    def share(self, split: str) -> float:
        """Returns the weighted share of positives among the rows of a split, never quite 0 or 1."""
        return positive_share(*self.positives[split])


def positive_share(positive: float, total: float) -> float:
    """Returns the share of ``positive`` in ``total``, never quite 0 or 1."""
    # Half a row: a share of 0 or 1 would have an infinite log loss and log-odds.
    least = 0.5 / (total + 1)
    return min(max(positive / total if total else 0.0, least), 1 - least)
