"""MemoryRows: rows in memory, shuffled as a whole -> this rank's batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.columns import Chunk, Int64, PackedRows
from torchrec_ext.data.loader.candidates import Pairing, StepRows
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.data.loader.epochs import Share
from torchrec_ext.data.negatives.mixed import MixedCandidates
from torchrec_ext.schema import BatchSchema, DataError


def order_of(config: LoaderConfig, num_rows: int, epoch: int) -> Int64:
    """Returns (num_rows,) the numbers of the rows of a set in memory, in the order of ``epoch``."""
    if not config.shuffle:
        return np.arange(num_rows)
    return np.random.Generator(np.random.PCG64([config.seed, epoch])).permutation(num_rows)


class MemoryRows:
    """Builds batches from rows in memory, shuffled as a whole; see :class:`Batches`.

    Args:
        chunk: all rows, the same on every rank.
        schema: the columns that the model reads.
        config: see :class:`LoaderConfig`.
        pairing: maker of the batches.
        share: this rank's share of each global batch.
        observer: sampler that is shown the items of every global batch, where it estimates how frequent they are.
    """

    ahead = True

    def __init__(
        self,
        chunk: Chunk,
        schema: BatchSchema,
        config: LoaderConfig,
        pairing: Pairing,
        share: Share,
        observer: MixedCandidates | None = None,
    ) -> None:
        needed = {
            *schema.keys,
            *schema.dense,
            *schema.weight_columns,
            *schema.tasks,
            *schema.identities,
            "user_id",
            *pairing.ids,
            config.label,
            config.weight,
        }
        for name in filter(None, (config.label, config.weight, *schema.tasks, schema.query)):
            if name not in chunk:
                raise DataError(f"column '{name}' is missing; the rows have {sorted(chunk)}")
        self.num_rows = chunk.num_rows
        self._rows = PackedRows(chunk.select([name for name in chunk if name in needed]))
        self._weights = chunk[config.weight].values if config.weight else None
        self._config, self._pairing, self._share, self._observer = config, pairing, share, observer
        self._items = chunk["item_id"].values if observer else None

    def fingerprint(self) -> dict[str, Any]:
        """See :meth:`Batches.fingerprint`."""
        return {"rows": self.num_rows}

    def batches(self, epoch: int, start: int) -> Iterator[TowerBatch]:
        """See :meth:`Batches.batches`."""
        order, size = order_of(self._config, self.num_rows, epoch), self._config.batch_size
        steps = [order[start_row : start_row + size] for start_row in range(0, self.num_rows, size)]
        steps = steps[:-1] if self._config.drop_last and len(steps[-1]) < size else steps
        if self._observer:
            self._observer.begin(epoch)
        for step, global_rows in enumerate(steps):
            if self._observer and self._items is not None:
                self._observer.observe(self._items[global_rows])
            if step >= start:
                yield self._pairing.batch(self._mine(global_rows), epoch, step)
        if self._observer:
            self._observer.end()

    def _mine(self, global_rows: Int64) -> StepRows:
        rows = global_rows[self._share.part(len(global_rows))]
        weights, total = None, float(len(global_rows))
        if self._weights is not None:
            weights = self._weights[rows]
            total = float(self._weights[global_rows].sum(dtype=np.float64))
        return StepRows(self._rows.take(rows), rows, weights, total)
