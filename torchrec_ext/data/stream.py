"""Stream: the rows of each step of an epoch, from blocks that a thread reads ahead."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from torchrec_ext.data.assemble import Slice
from torchrec_ext.data.blocks import Layout, Memory, Rows
from torchrec_ext.data.lanes import LaneReader, load_block
from torchrec_ext.data.plan import Block, Piece, StreamPlan
from torchrec_ext.data.prefetch import prefetched
from torchrec_ext.data.row_groups import Source


class Step(NamedTuple):
    """``mine``: this rank's rows. ``everyone``: those of all ranks, with their weights alone where they are not read here."""

    mine: list[Slice]
    everyone: list[Slice]
    num_rows: int


class Stream:
    """What one rank reads of a plan.

    Args:
        source: of the row groups.
        layout: the columns.
        plan: the rows of each step.
        weight: the column of weights; a rank reads it for all rows, since every rank divides by the weight of the global batch.
        read_ahead: blocks read ahead.
        rank: r.
        world_size: R.
    """

    def __init__(
        self, source: Source, layout: Layout, plan: StreamPlan, *, weight: str | None, read_ahead: int, rank: int, world_size: int
    ) -> None:
        self.plan = plan
        self._source, self._layout, self._weight = source, layout, weight
        self._read_ahead, self._rank, self._world_size = read_ahead, rank, world_size
        counts = np.array(plan.group_rows, dtype=np.int64)
        self._firsts = np.cumsum(counts) - counts

    def fingerprint(self) -> dict[str, Any]:
        """What the order depends on beside the loader's settings."""
        plan = self.plan
        counts = hashlib.sha256(np.array(plan.group_rows, dtype="<i8").tobytes()).hexdigest()[:16]
        buffered = {"lanes": plan.num_lanes, "buffer_rows": plan.buffer_rows} if plan.shuffle else {}
        return {"rows": plan.num_rows, "row_groups": counts} | buffered

    def steps(self, epoch: int, start: int) -> Iterator[Step]:
        """The steps of an epoch from ``start`` on."""
        lanes = self.plan.blocks(epoch)
        memory = Memory()
        blocks = prefetched(self._load(epoch, start, memory), self._read_ahead)
        held: dict[tuple[int, int], Rows] = {}
        for step in range(start, self.plan.steps):
            pieces = self._pieces(lanes, step)
            keys = dict.fromkeys((piece.block.lane, piece.block.number) for piece in pieces)
            for key in [key for key in held if key not in keys]:
                memory.give(held.pop(key))
            for key in keys:
                if key not in held:
                    held[key] = next(blocks)
            slices = [Slice(held[piece.block.lane, piece.block.number], piece.start, piece.stop) for piece in pieces]
            mine = [part for part, piece in zip(slices, pieces, strict=True) if piece.mine]
            yield Step(mine, slices, min(self.plan.batch_size, self.plan.num_rows - step * self.plan.batch_size))

    def _pieces(self, lanes: list[list[Block]], step: int) -> list[Piece]:
        return list(self.plan.pieces(lanes, step, self._rank, self._world_size, everyone=self._weight is not None))

    def _load(self, epoch: int, start: int, memory: Memory) -> Iterator[Rows]:
        """The blocks in the order in which the steps first need them, each once."""
        lanes = self.plan.blocks(epoch)
        last: dict[int, int] = {}
        readers = {lane: self._reader(lane) for lane in range(len(lanes))}
        for step in range(start, self.plan.steps):
            for block in dict.fromkeys(piece.block for piece in self._pieces(lanes, step)):
                if last.get(block.lane, -1) < block.number:
                    last[block.lane] = block.number
                    yield load_block(readers[block.lane], block, self.plan.permutation(epoch, block), self._firsts, memory)

    def _reader(self, lane: int) -> LaneReader:
        mine = self._weight is None or self._reads(lane)
        layout = self._layout if mine else self._layout.only(str(self._weight))
        return LaneReader(self._source, layout, self.plan.part_rows)

    def _reads(self, lane: int) -> bool:
        low, high = self.plan.slots(self._rank, self._world_size)
        return low < (lane + 1) * self.plan.width and lane * self.plan.width < high
