"""StreamedRows: a source -> the rows of each step for one rank, as a whole batch or as columns that items are added to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.assemble import Assembler
from torchrec_ext.data.blocks import Layout
from torchrec_ext.data.columns import Array, Chunk, Int64
from torchrec_ext.data.loader_config import LoaderConfig
from torchrec_ext.data.plan import StreamPlan
from torchrec_ext.data.row_groups import Source
from torchrec_ext.data.stream import Step, Stream
from torchrec_ext.schema import BatchSchema


class StepRows(NamedTuple):
    """The batch; or else, where items are added to them, the rows, their numbers in the source and their weights.

    ``total`` is the weight of the global batch.
    """

    batch: TowerBatch | None
    chunk: Chunk
    numbers: Int64
    weights: Array | None
    total: float


class StreamedRows:
    """What one rank gets of a source.

    Args:
        source: of all rows.
        schema: the columns that the model reads.
        config: see :class:`LoaderConfig`.
        items: row i holds the features of item i, which the source then need not have.
        rank: r.
        world_size: R.
    """

    def __init__(
        self, source: Source, schema: BatchSchema, config: LoaderConfig, items: Chunk | None, rank: int, world_size: int
    ) -> None:
        self._paired = items is not None or config.negatives > 0
        ids = ["user_id"] if config.negatives else []
        without = [name for name in items or () if name != "item_id"]
        layout = Layout.of(schema, [*ids, "item_id"] if self._paired else ids, (config.label, config.weight), without)
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
            source, layout, plan, weight=config.weight, read_ahead=config.read_ahead, rank=rank, world_size=world_size
        )
        self.num_rows = plan.num_rows
        self._weight, self._world_size = config.weight, world_size
        self._size = -(-config.batch_size // world_size)

    def fingerprint(self) -> dict[str, object]:
        """What the order depends on beside the loader's settings."""
        return self._stream.fingerprint()

    def rows(self, epoch: int, start: int) -> Iterator[StepRows]:
        """Those of the steps of an epoch from ``start`` on."""
        for step in self._stream.steps(epoch, start):
            total = self._assembler.weights(step.everyone) if self._weight else float(step.num_rows)
            if self._paired:
                yield self._columns(step, total)
            else:
                batch = self._assembler.batch(step.mine, self._size, total / self._world_size)
                yield StepRows(batch, Chunk({}), np.zeros(0, np.int64), None, total)

    def _columns(self, step: Step, total: float) -> StepRows:
        chunk = self._assembler.chunk(step.mine)
        numbers = np.concatenate([np.zeros(0, np.int64), *(piece.rows.numbers[piece.start : piece.stop] for piece in step.mine)])
        return StepRows(None, chunk, numbers, chunk[self._weight].values if self._weight else None, total)
