"""NamedData: what every task says of its data in the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torchrec_ext.data.loader_config import LoaderConfig


class NamedData:
    """A task over ``data``, which has a name, a licence and the best figures that can be reached where they are known."""

    data: Any

    @property
    def name(self) -> str:
        """Of the set."""
        return str(self.data.name)

    @property
    def licence(self) -> str | None:
        """What the publisher asks."""
        licence: str | None = self.data.licence
        return licence

    @property
    def best(self) -> Mapping[str, float]:
        """The best possible figures of generated data."""
        best: Mapping[str, float] = self.data.best
        return best

    def positives(self, config: LoaderConfig, tasks: Sequence[str] = ()) -> list[float]:
        """The share of positives among the training rows as the loader gives them, by weight; never quite 0 or 1.

        None where a column is missing, of which the loader tells.

        Args:
            config: names the columns of labels and weights, and the negatives drawn for each row.
            tasks: further columns of labels, each with a share of its own.
        """
        rows, names = self.data.train, [config.label, *tasks]
        if any(name and name not in rows for name in (*names, config.weight)):
            return []
        weights = rows[config.weight].values.astype(np.float64) if config.weight else None
        shares = [np.average(rows[name].values, weights=weights) if name else 1.0 for name in names]
        least = 0.5 / (rows.num_rows * (1 + config.negatives) + 1)
        return [float(np.clip(share / (1 + config.negatives), least, 1 - least)) for share in shares]
