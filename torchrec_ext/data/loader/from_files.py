"""StreamedRows: a source of any size -> this rank's batches, read while the epoch runs.

The rows of each step come from blocks that threads read ahead: segments of row groups -> a block of rows in memory,
checked and shuffled column by column.

A block fits the cache: to take 65,536 int64 of one column in random order stays within the second level. To take whole
rows from a buffer of several row groups would go to main memory for each row.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import chain, tee
from typing import Any

import numpy as np
import torch

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.columns import Array, Chunk, Column, Int64, concatenate
from torchrec_ext.data.files.sources import ParquetSource
from torchrec_ext.data.loader.batch import Answers, as_tensor, assemble
from torchrec_ext.data.loader.blocks import (
    BlockLayout,
    BlockRows,
    Memory,
    Slice,
    gathered,
    places_in_source,
    summed_weights,
)
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.data.loader.epoch_order import (
    Block,
    Piece,
    Segment,
    StreamPlan,
    places_of,
)
from torchrec_ext.data.loader.shared import SharedCandidates, StepRows
from torchrec_ext.data.order import Share
from torchrec_ext.schema import BatchSchema, RowNumbers


class LaneReader:
    """Reads the segments of a lane in order; goes on within a row group of several parts.

    Args:
        source: files with the row groups.
        layout: columns to read.
        part_rows: greatest number of rows to read at once.
    """

    def __init__(
        self, source: ParquetSource, layout: BlockLayout, part_rows: int
    ) -> None:
        self.layout = layout
        self._source = source
        self._part_rows = part_rows
        self._parts: Iterator[Chunk] = iter(())
        # Row group and row that the next of these parts begins with; at first there is
        # none.
        self._next = (-1, 0)

    def read(self, segment: Segment) -> Iterator[tuple[str, bool, Column]]:
        """Yields the columns of a segment as they are decoded, see :meth:`BlockLayout.each`."""
        group = self._source.groups[segment.group]
        names = self.layout.names
        first = 0
        rows = group.rows
        columns: Iterable[tuple[str, Column]]
        if rows <= self._part_rows:
            columns = self._source.columns_of(group, names)
        else:
            open_group, row = self._next
            if open_group != segment.group or row > segment.start:
                self._parts = self._source.parts(
                    group, names, segment.start, self._part_rows
                )
                row = segment.start
            # Skips other ranks' parts: to begin anew would decode all that lies before
            # them.
            while row < segment.start:
                row += next(self._parts).num_rows
            chunk = next(self._parts)
            columns = chunk.items()
            first = segment.start
            rows = chunk.num_rows
            self._next = (segment.group, first + rows)
        part = dataclasses.replace(group, first=first, rows=rows)
        for name, is_ids, column in self.layout.each(part, columns):
            # A lane may begin or end inside of what was read.
            if segment.stop - segment.start < rows:
                column = column.slice(segment.start - first, segment.stop - first)
            yield name, is_ids, column


def _shuffled(values: Array, order: Int64 | None, out: Array) -> Array:
    if order is None:
        return values
    # A mode other than "raise" lets numpy write to `out` without a copy in between; the
    # order has no place to clip.
    return np.take(values, order, out=out, mode="clip")


def _shuffled_column(column: Column, order: Int64 | None) -> Column:
    """Shuffles a ragged column by FBGEMM, a row at a time: several times faster than a gather by an index per value."""
    if order is None:
        return column
    lengths, values, _ = torch.ops.fbgemm.permute_1D_sparse_data(
        torch.from_numpy(order.astype(np.int32)),
        torch.from_numpy(column.lengths),
        as_tensor(column.values),
        None,
        len(column.values),
    )
    return Column.from_lengths(values.numpy(), lengths.numpy())


def _after(
    before: Future[BlockRows] | None, load: Callable[[], BlockRows]
) -> BlockRows:
    """Loads the next block of a lane: its reader goes forward only. The one before was begun before."""
    if before is not None:
        wait([before])
    return load()


class StreamedRows:
    """Builds batches from a source of any size, read while the epoch runs.

    Args:
        source: files with all rows.
        schema: the columns that the model reads.
        config: see :class:`LoaderConfig`.
        without: columns of the schema that the source need not have.
        shared: maker of batches with shared candidates; None for rows that come as they are.
        share: this rank's share of each global batch.
        in_order: keep the order of the files if there is no shuffle, see :class:`ChunkLoader`.

    Attributes:
        num_rows: number of rows of all ranks.
    """

    # A thread may build batches, which are then pinned.
    ahead = True

    def __init__(
        self,
        source: ParquetSource,
        schema: BatchSchema,
        config: LoaderConfig,
        without: Sequence[str],
        shared: SharedCandidates | None,
        share: Share,
        in_order: bool = True,
    ) -> None:
        layout = BlockLayout.of(schema, config, shared.ids if shared else (), without)
        group_rows = tuple(group.rows for group in source.groups)
        lanes = config.lanes
        buffer_rows = config.buffer_rows
        # A buffer that the user has chosen is kept.
        if config.shuffle and buffer_rows == LoaderConfig.buffer_rows:
            lanes, buffer_rows = places_of(
                group_rows,
                lanes,
                buffer_rows,
                batch_size=config.batch_size,
                columns=len(layout.names),
            )
        part = -(-buffer_rows // lanes)
        if config.shuffle and max(group_rows) > part and share.rank == 0:
            warnings.warn(
                f"row groups of up to {max(group_rows):,} rows are shuffled in parts of {part:,} rows, from {lanes} "
                f"places at a time: if rows are sorted, write them with row_group_size={part}",
                stacklevel=2,
            )
        # A rank decodes its lanes as a whole: with a lane of its own it decodes no rows
        # of others. Of one block every rank decodes all rows anyway.
        whole = config.buffer_rows != buffer_rows == sum(group_rows)
        own_lane = share.world_size > lanes and not whole
        if not config.shuffle:
            own_lane = not in_order
        self._plan = StreamPlan(
            group_rows=group_rows,
            batch_size=config.batch_size,
            lanes=lanes,
            buffer_rows=buffer_rows,
            shuffle=config.shuffle,
            drop_last=config.drop_last,
            seed=config.seed,
            places=share.world_size if own_lane else None,
        )
        layout.require(source)
        self.num_rows = self._plan.num_rows
        self._source = source
        self._schema = schema
        self._layout = layout
        self._config = config
        self._shared = shared
        self._share = share
        self._places = self._plan.places
        self._memory = Memory()
        counts = np.array(group_rows, dtype=np.int64)
        self._firsts = np.cumsum(counts) - counts

    def follow(self, stream: Mapping[str, Any] | None) -> None:
        """Sets the epoch's order to that of a saved fingerprint; None restores the one for this number of ranks."""
        places = self._places if stream is None else stream.get("places")
        self._plan = dataclasses.replace(self._plan, places=places)

    def fingerprint(self) -> dict[str, Any]:
        """Returns the sizes of the source behind the order of rows; the loader's settings come on top."""
        plan = self._plan
        sizes: dict[str, Any] = {"rows": plan.num_rows}
        # Without a shuffle the rows have one order, whatever the buffer.
        if plan.shuffle:
            sizes |= {"lanes": plan.usual_lanes, "buffer_rows": plan.buffer_rows}
        if plan.num_lanes != plan.usual_lanes:
            sizes["places"] = plan.num_lanes
        return sizes

    def batches(self, epoch: int, start: int) -> Iterator[TowerBatch]:
        """Yields the batches of an epoch from step ``start`` on, equally many on every rank."""
        config = self._config
        size = self._share.rows(config.batch_size)
        for step, (mine, everyone) in enumerate(self._steps(epoch, start), start=start):
            if config.weight:
                total = summed_weights(everyone, config.weight)
            else:
                total = float(
                    min(config.batch_size, self.num_rows - step * config.batch_size)
                )
            rows = StepRows(
                gathered(mine, self._layout),
                places_in_source(mine),
                torch.tensor(total / self._share.world_size),
            )
            if self._shared is not None:
                yield self._shared.batch(rows, epoch, step)
                continue
            answers = Answers.of(
                self._schema, config, rows.columns.numbers, len(rows.numbers), size
            )
            # Each row has a shared row of its own.
            yield assemble(
                self._schema,
                rows.columns,
                answers,
                total_weight=rows.total,
                numbers=RowNumbers(rows.numbers, rows.numbers),
            )

    def _steps(
        self, epoch: int, start: int
    ) -> Iterator[tuple[list[Slice], list[Slice]]]:
        """Yields the rows of each step, this rank's and those of all ranks, of whom others' may hold weights alone."""
        memory = self._memory
        # What is read ahead is some steps before what is handed out.
        ahead, steps = tee(self._pieces(epoch, start))
        blocks = self._load(_blocks_of(ahead), epoch, memory)
        loaded_blocks: dict[tuple[int, int], BlockRows] = {}
        for pieces in steps:
            keys = dict.fromkeys(
                (piece.block.lane, piece.block.number) for piece in pieces
            )
            # A lane goes forward only, so a block that this step does not need is not
            # needed again.
            for key in loaded_blocks.keys() - keys:
                memory.give(loaded_blocks.pop(key))
            # In the order of the pieces, in which the blocks come.
            for key in keys:
                if key not in loaded_blocks:
                    loaded_blocks[key] = next(blocks)
            local = []
            slices = []
            for piece in pieces:
                rows = loaded_blocks[piece.block.lane, piece.block.number]
                slices.append(Slice(rows, piece.start, piece.stop))
                if piece.mine:
                    local.append(slices[-1])
            yield local, slices
        # Fresh pages would cost the next epoch a tenth of its time.
        for rows in loaded_blocks.values():
            memory.give(rows)

    def _pieces(self, epoch: int, start: int) -> Iterator[list[Piece]]:
        """Yields the pieces of blocks that each step from ``start`` on takes."""
        lanes = self._plan.blocks(epoch)
        for step in range(start, self._plan.steps):
            pieces = self._plan.pieces(
                lanes,
                step,
                self._share.rank,
                self._share.world_size,
                everyone=self._config.weight is not None,
            )
            yield list(pieces)

    def _load(
        self, blocks: Iterator[Block], epoch: int, memory: Memory
    ) -> Iterator[BlockRows]:
        """Yields each block once, in the order of its first use, while ``read_ahead`` of the next are read.

        By as many threads: Arrow decodes two row groups on two cores twice as fast as one, and the columns of one only
        1.3 times. Not by one for each lane: of a log of 40 columns each takes 110 MB.
        """
        read_ahead = self._config.read_ahead
        weight = self._config.weight
        readers: dict[tuple[int, bool], LaneReader] = {}
        last: dict[tuple[int, bool], Future[BlockRows]] = {}
        threads = ThreadPoolExecutor(max(read_ahead, 1), "torchrec_ext-read")
        ahead: deque[Future[BlockRows]] = deque()
        try:
            for block in blocks:
                # Blocks of other ranks are read for their weights alone, by readers of
                # their own.
                mine = self._plan.reads(block, self._share.rank, self._share.world_size)
                key = block.lane, mine
                if key not in readers:
                    layout = self._layout
                    if weight is not None and not mine:
                        layout = layout.only(weight)
                    readers[key] = LaneReader(
                        self._source, layout, self._plan.part_rows
                    )
                load = functools.partial(
                    self._load_block, readers[key], block, epoch, memory
                )
                if not read_ahead:
                    yield load()
                    continue
                last[key] = threads.submit(_after, last.get(key), load)
                ahead.append(last[key])
                if len(ahead) > read_ahead:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            threads.shutdown(cancel_futures=True)

    def _load_block(
        self, lane: LaneReader, block: Block, epoch: int, memory: Memory
    ) -> BlockRows:
        """Reads, checks and shuffles a block, column by column; shuffled ones are written to matrices of ``memory``."""
        order = self._plan.permutation(epoch, block)
        layout = lane.layout
        firsts = self._firsts
        numbers = np.concatenate(
            [
                np.arange(start, stop) + firsts[group]
                for group, start, stop in block.segments
            ]
        )
        # Without a shuffle the columns are views of Arrow's memory.
        rows = 0
        if order is not None:
            numbers = numbers.take(order)
            rows = len(order)
        ids_out, of_ids = memory.take(len(layout.features), rows, np.dtype(np.int64))
        out, of_floats = memory.take(len(layout.floats), rows, np.dtype(np.float32))
        scalars: list[Array] = []
        ragged = {}
        floats = {}
        places = {name: place for place, name in enumerate(layout.floats)}
        readers = [lane.read(segment) for segment in block.segments]
        for pieces in zip(*readers, strict=True):
            name, is_ids, _ = pieces[0]
            column = concatenate([piece for _, _, piece in pieces])
            if not is_ids:
                floats[name] = _shuffled(column.values, order, out[places[name]])
            elif column.ragged:
                ragged[name] = _shuffled_column(column, order)
            else:
                row = ids_out[len(scalars)]
                scalars.append(_shuffled(column.values, order, row))
        vectors = [floats[name] for name in layout.floats]
        return BlockRows(
            scalars if order is None else ids_out[: len(scalars)],
            ragged,
            vectors if order is None else out,
            layout.floats,
            numbers,
            [of_ids, of_floats],
        )


def _blocks_of(steps: Iterator[list[Piece]]) -> Iterator[Block]:
    """Yields the blocks of some steps in the order of their first use."""
    last: dict[int, int] = {}
    for piece in chain.from_iterable(steps):
        block = piece.block
        # Not one that was loaded for an earlier step or piece.
        if last.get(block.lane, -1) < block.number:
            last[block.lane] = block.number
            yield block
