"""Segments of row groups -> blocks of rows in memory, checked and shuffled column by column.

A block has the size of the cache: taking 65,536 int64 of one column in random order stays in the second level, where taking whole
rows from a buffer of several row groups would go to main memory for each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from torchrec_ext.data.blocks import Float32, Layout, Memory, Rows, Vectors
from torchrec_ext.data.columns import Array, Chunk, Column, Int64, concatenate
from torchrec_ext.data.plan import Block, Segment
from torchrec_ext.data.row_groups import RowGroup, Source


class LaneReader:
    """Reads the segments of a lane one after the other; in a row group of several parts it goes on where it stands.

    Args:
        source: of the row groups.
        layout: what to read.
        part_rows: the most rows to read at once.
    """

    def __init__(self, source: Source, layout: Layout, part_rows: int) -> None:
        self.layout = layout
        self._source, self._part_rows = source, part_rows
        self._parts: Iterator[Chunk] = iter(())
        self._next: tuple[int, int] | None = None  # row group and row that the next part begins with

    def read(self, segment: Segment) -> tuple[dict[str, Column], dict[str, Float32]]:
        """The ids and the floats of a segment, see :meth:`Layout.checked`."""
        group, first = self._source.groups[segment.group], 0
        if group.rows <= self._part_rows:
            chunk = self._source.read(group, self.layout.names)
        else:
            chunk, first = self._part(group, segment), segment.start
        ids, floats = self.layout.checked(dataclasses.replace(group, first=first, rows=chunk.num_rows), chunk)
        if segment.stop - segment.start == chunk.num_rows:
            return ids, floats
        mine = slice(segment.start - first, segment.stop - first)
        return (
            {name: column.slice(mine.start, mine.stop) for name, column in ids.items()},
            {name: values[mine] for name, values in floats.items()},
        )

    def _part(self, group: RowGroup, segment: Segment) -> Chunk:
        if (segment.group, segment.start) != self._next:
            self._parts = self._source.parts(group, self.layout.names, segment.start, self._part_rows)
        chunk = next(self._parts)
        self._next = segment.group, segment.start + chunk.num_rows
        return chunk


def load_block(lane: LaneReader, block: Block, order: Int64 | None, firsts: Int64, memory: Memory) -> Rows:
    """Reads, checks and shuffles a block.

    Args:
        lane: reads its segments.
        block: which rows.
        order: of the block's rows; None keeps theirs.
        firsts: number of each row group's first row in the whole source.
        memory: for what is shuffled.
    """
    parts = [lane.read(segment) for segment in block.segments]
    numbers = np.concatenate([np.arange(start, stop) + firsts[group] for group, start, stop in block.segments])
    ids = {name: [part[0][name] for part in parts] for name in lane.layout.ids}
    scalars = [[column.values for column in columns] for columns in ids.values() if not columns[0].ragged]
    buffers: list[Array] = []
    rows = Rows(
        _ordered(scalars, np.int64, order, memory, buffers),
        {name: _reordered(concatenate(columns), order) for name, columns in ids.items() if columns[0].ragged},
        _ordered([[part[1][name] for part in parts] for name in lane.layout.floats], np.float32, order, memory, buffers),
        lane.layout.floats,
        numbers if order is None else numbers.take(order),
    )
    rows.buffers = buffers
    return rows


def _ordered(
    columns: Sequence[Sequence[Array]], dtype: type[np.generic], order: Int64 | None, memory: Memory, buffers: list[Array]
) -> Vectors:
    whole = [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in columns]
    if order is None:
        return whole
    matrix, buffer = memory.take(len(whole), len(order), np.dtype(dtype))
    buffers.append(buffer)
    for column, out in zip(whole, matrix, strict=True):
        # A mode other than "raise" lets numpy write to `out` without a copy in between; the order has no place to clip.
        np.take(column, order, out=out, mode="clip")
    return matrix


def _reordered(column: Column, order: Int64 | None) -> Column:
    """FBGEMM copies a ragged row at a time, several times faster than a gather through an index for every value."""
    if order is None:
        return column
    lengths, values, _ = torch.ops.fbgemm.permute_1D_sparse_data(
        torch.from_numpy(order.astype(np.int32)),
        torch.from_numpy(column.lengths),
        torch.from_numpy(column.values if column.values.flags.writeable else column.values.copy()),
        None,
        len(column.values),
    )
    return Column.from_lengths(values.numpy(), lengths.numpy())
