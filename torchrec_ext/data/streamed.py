"""StreamedRows: a source of any size -> this rank's batches, read while the epoch runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.assemble import Assembler
from torchrec_ext.data.blocks import Layout
from torchrec_ext.data.columns import Chunk
from torchrec_ext.data.loader_config import LoaderConfig
from torchrec_ext.data.pairing import Pairing, StepRows
from torchrec_ext.data.plan import StreamPlan
from torchrec_ext.data.row_groups import Source
from torchrec_ext.data.share import Share
from torchrec_ext.data.stream import Step, Stream
from torchrec_ext.schema import BatchSchema


class StreamedRows:
    """See :class:`Batches`.

    Args:
        source: of all rows.
        schema: the columns that the model reads.
        config: see :class:`LoaderConfig`.
        items: row i holds the features of item i, which the source then need not have.
        pairing: makes the batches; None where rows come as they are, which are copied straight into their batch.
        share: of this rank.
    """

    ahead = True

    def __init__(
        self, source: Source, schema: BatchSchema, config: LoaderConfig, items: Chunk | None, pairing: Pairing | None, share: Share
    ) -> None:
        without = [name for name in items or () if name != "item_id"]
        layout = Layout.of(schema, pairing.ids if pairing else (), (config.label, config.weight), without)
        plan = StreamPlan(
            group_rows=tuple(group.rows for group in source.groups),
            batch_size=config.batch_size,
            lanes=config.lanes,
            buffer_rows=config.buffer_rows,
            shuffle=config.shuffle,
            drop_last=config.drop_last,
            seed=config.seed,
        )
        self._assembler = Assembler(schema, layout, layout.require(source), config.label, config.weight)
        self._stream = Stream(
            source,
            layout,
            plan,
            weight=config.weight,
            read_ahead=config.read_ahead,
            rank=share.rank,
            world_size=share.world_size,
        )
        self.num_rows = plan.num_rows
        self._config, self._pairing, self._share = config, pairing, share

    def fingerprint(self) -> dict[str, Any]:
        """See :meth:`Batches.fingerprint`."""
        return self._stream.fingerprint()

    def batches(self, epoch: int, start: int) -> Iterator[TowerBatch]:
        """See :meth:`Batches.batches`."""
        size = self._share.rows(self._config.batch_size)
        for number, step in enumerate(self._stream.steps(epoch, start), start=start):
            total = self._assembler.weights(step.everyone) if self._config.weight else float(step.num_rows)
            if self._pairing is None:
                yield self._assembler.batch(step.mine, size, total / self._share.world_size)
            else:
                yield self._pairing.batch(self._columns(step, total), epoch, number)

    def _columns(self, step: Step, total: float) -> StepRows:
        chunk, weight = self._assembler.chunk(step.mine), self._config.weight
        numbers = np.concatenate([np.zeros(0, np.int64), *(piece.rows.numbers[piece.start : piece.stop] for piece in step.mine)])
        return StepRows(chunk, numbers, chunk[weight].values if weight else None, total)
