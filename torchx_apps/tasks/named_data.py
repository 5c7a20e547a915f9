"""NamedData: what all tasks over a data set with a name, a licence and labelled or positive rows have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torchrec_ext.data.loader.config import LoaderConfig


class NamedData:
    """A task over ``data`` with a name, a licence and, if known, the best possible figures."""

    data: Any

    @property
    def name(self) -> str:
        """Name of the data set."""
        return str(self.data.name)

    @property
    def licence(self) -> str | None:
        """Terms of the data set's publisher, if known."""
        licence: str | None = self.data.licence
        return licence

    @property
    def best(self) -> Mapping[str, float]:
        """Best possible figures of generated data, by name."""
        best: Mapping[str, float] = self.data.best
        return best

    def positives(self, config: LoaderConfig, tasks: Sequence[str] = ()) -> list[float]:
        """Returns the weighted share of positives among the training rows as the loader gives them; never quite 0 or 1.

        The list has an entry for the loader's labels and one for each of ``tasks``. It is empty if a column is
        missing, which the loader refuses.

        Args:
            config: loader settings with the columns of labels and weights, and the negatives drawn for each row.
            tasks: names of further columns of labels.
        """
        rows = self.data.train
        names = [config.label, *tasks]
        if any(name and name not in rows for name in (*names, config.weight)):
            return []
        weights = rows[config.weight].values.astype(np.float64) if config.weight else None
        # Each row comes with its drawn negatives, which have label 0 in all tasks.
        loaded = 1 + config.negatives
        # Half a positive among all rows: log-odds of 0 or 1 would not be finite.
        least = 0.5 / (rows.num_rows * loaded + 1)
        shares = []
        for name in names:
            # Rows without a label are all positives.
            share = np.average(rows[name].values, weights=weights) if name else 1.0
            shares.append(float(np.clip(share / loaded, least, 1 - least)))
        return shares
