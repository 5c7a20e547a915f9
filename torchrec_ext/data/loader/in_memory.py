"""MemoryRows: rows in memory, shuffled as a whole -> this rank's batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.columns import Chunk, Int64, PackedRows
from torchrec_ext.data.loader.candidates import Candidates, Pairing, StepRows
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.data.loader.epochs import Share
from torchrec_ext.schema import BatchSchema

# Rows of a rank to gather and draw for together: the cost of a numpy call is then
# small.
ROWS_AT_ONCE = 4096


def order_of(config: LoaderConfig, num_rows: int, epoch: int) -> Int64:
    """Returns (num_rows,) the row numbers of a set in memory, in the order of ``epoch``."""
    if not config.shuffle:
        return np.arange(num_rows)
    return np.random.Generator(np.random.PCG64([config.seed, epoch])).permutation(
        num_rows
    )


class MemoryRows:
    """Builds batches from rows in memory, shuffled as a whole; see :class:`Batches`.

    Args:
        chunk: all rows, the same on every rank.
        schema: the columns that the model reads.
        config: see :class:`LoaderConfig`.
        pairing: maker of the batches.
        share: this rank's share of each global batch.
    """

    ahead = True

    def __init__(
        self,
        chunk: Chunk,
        schema: BatchSchema,
        config: LoaderConfig,
        pairing: Pairing,
        share: Share,
    ) -> None:
        used_columns = {
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
        config.check_columns(
            filter(None, (config.label, config.weight, *schema.tasks, schema.query)),
            chunk,
        )
        self.num_rows = chunk.num_rows
        # Dense columns come first and in the schema's order: a batch reads them as one
        # matrix each.
        dense = [
            name for name in (*schema.row_dense, *schema.shared_dense) if name in chunk
        ]
        others = [name for name in chunk if name in used_columns]
        self._rows = PackedRows(chunk.select(list(dict.fromkeys([*dense, *others]))))
        self._weights = chunk[config.weight].values if config.weight else None
        self._config = config
        self._pairing = pairing
        self._share = share

    def fingerprint(self) -> dict[str, Any]:
        """See :meth:`Batches.fingerprint`."""
        return {"rows": self.num_rows}

    def batches(self, epoch: int, start: int) -> Iterator[TowerBatch]:
        """See :meth:`Batches.batches`."""
        order = order_of(self._config, self.num_rows, epoch)
        size = self._config.batch_size
        steps = [
            order[step * size : (step + 1) * size]
            for step in range(self._config.num_steps(self.num_rows))
        ]
        for step, rows in enumerate(self._gather_steps(steps[start:], epoch), start):
            yield self._pairing.batch(rows, epoch, step)

    def _gather_steps(self, steps: Sequence[Int64], epoch: int) -> Iterator[StepRows]:
        """Yields this rank's rows of each step; those of several small steps are gathered and drawn for at once."""
        at_once = max(1, ROWS_AT_ONCE // self._share.rows(self._config.batch_size))
        for first in range(0, len(steps), at_once):
            global_steps = steps[first : first + at_once]
            local_steps = [rows[self._share.part(len(rows))] for rows in global_steps]
            numbers = np.concatenate(local_steps)
            # One gather for all of these steps, which are then slices of it.
            chunk = self._rows.take(numbers)
            candidates_ahead = self._pairing.draw_ahead(chunk, numbers, epoch)
            start = 0
            for global_rows, rows in zip(global_steps, local_steps, strict=True):
                stop = start + len(rows)
                weights = None
                total = float(len(global_rows))
                if self._weights is not None:
                    weights = self._weights[rows]
                    # Of all ranks' rows: every rank divides its loss by the weight of
                    # the global batch.
                    total = float(self._weights[global_rows].sum(dtype=np.float64))
                candidates = None
                if candidates_ahead is not None:
                    ids = candidates_ahead.ids[start:stop]
                    log_q = candidates_ahead.log_q[start:stop]
                    # Copies, so that a batch owns its memory.
                    candidates = Candidates(ids.copy(), log_q.copy())
                yield StepRows(
                    chunk.slice(start, stop), rows, weights, total, candidates
                )
                start = stop
