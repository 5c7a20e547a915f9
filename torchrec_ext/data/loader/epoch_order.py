"""StreamPlan: assigns rows of row groups to steps; every rank computes it from the groups' row counts.

Shuffled as a whole, a stream would make every rank decode everything. Here an epoch is S *lanes*, and a global
batch of B rows has B / S slots for each lane::

    row groups, in the epoch's order   | 7  . . . | 2  . . | 5 . . . . . | 0 . .   (a lane may end inside a group)
    lanes                              | lane 0       | lane 1         | lane 2 ...
    global batch                       [ slots of lane 0 | slots of lane 1 | ... ]
    rank r of R takes the slots        r B / R  to  (r + 1) B / R

A lane is read block by block: row groups of at least ``part_rows`` rows together, shuffled as one. So a batch is mixed
from S places, and a rank reads only the lanes that its slots touch: 1 / R of the data if R divides S. Nothing but
the last line knows R, so the rows of each step are the same on any number of ranks with the same S. With more ranks
than lanes every rank gets a lane of its own (``places``), because a block is shuffled as a whole: a rank that shares
its lane with others decodes their rows too. The order of such an epoch depends on the number of ranks.

A row group that is larger than a block is read in parts, in their order, so that a block stays small. Lanes begin at
different places of it. A lane that begins inside one decodes what lies before it for nothing: half a row group for a
lane on average, little beside many row groups. Of a few large row groups all rows are one block if they are few enough,
else there are many lanes of small parts: see :func:`places_of`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from torchrec_ext.data.columns import Int64

# Values of all rows that a rank shuffles as one block: half a GiB of int64.
WHOLE_VALUES = 2**26
# Rows of a part of a few larger row groups: so many parts from all over them mix rows that are sorted.
PART_ROWS = 8_192


class Segment(NamedTuple):
    """Rows ``start`` to ``stop`` of row group ``group``."""

    group: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Block:
    """Rows ``start`` to ``stop`` of a lane, read and shuffled together."""

    lane: int
    number: int
    start: int
    stop: int
    segments: tuple[Segment, ...]


class Piece(NamedTuple):
    """Rows ``start`` to ``stop`` of a block, after its shuffle. ``mine`` says whether they are this rank's."""

    block: Block
    start: int
    stop: int
    mine: bool


@dataclass(frozen=True, kw_only=True)
class StreamPlan:
    """Assigns the rows of an epoch to its steps, alike on any number of ranks.

    Args:
        group_rows: number of rows of each row group, all above 0.
        batch_size: B, over all ranks.
        lanes: upper bound of S, the greatest divisor of B up to this and up to the number of row groups, or of parts
            of those that are larger than a block; S is 1 without shuffle.
        buffer_rows: rows held for shuffling, over all lanes; with ``places`` over as many as there would be without.
        shuffle: shuffle the rows; False keeps the order of the files.
        drop_last: leave out the last step if it is not full.
        seed: seed of the order.
        places: S, if it does not follow from ``lanes``.
    """

    group_rows: tuple[int, ...]
    batch_size: int
    lanes: int
    buffer_rows: int
    shuffle: bool
    drop_last: bool
    seed: int
    places: int | None = None

    @cached_property
    def num_rows(self) -> int:
        """Number of rows of all groups."""
        return sum(self.group_rows)

    @cached_property
    def steps(self) -> int:
        """Number of steps in an epoch, the same on every rank."""
        whole, rest = divmod(self.num_rows, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    @cached_property
    def num_lanes(self) -> int:
        """S, the number of lanes."""
        return min(self.places, self.batch_size) if self.places else self.usual_lanes

    @cached_property
    def usual_lanes(self) -> int:
        """S, if ``places`` does not say otherwise: the same on any number of ranks."""
        if not self.shuffle:
            return 1
        part = -(-self.buffer_rows // self.lanes)
        parts = sum(-(-rows // part) for rows in self.group_rows)
        lanes = min(self.lanes, parts, self.buffer_rows)
        # A divisor of the batch size: each lane has equally many slots in every batch.
        while self.batch_size % lanes:
            lanes -= 1
        return lanes

    @property
    def part_rows(self) -> int:
        """The greatest number of rows to read at once."""
        # Not of `num_lanes`, which may depend on the number of ranks.
        lanes = self.usual_lanes if self.shuffle else self.lanes
        return -(-self.buffer_rows // lanes)

    @cached_property
    def lane_slots(self) -> list[int]:
        """The S + 1 boundaries of the lanes' slots in a batch."""
        return [
            lane * self.batch_size // self.num_lanes
            for lane in range(self.num_lanes + 1)
        ]

    @cached_property
    def lane_ends(self) -> list[int]:
        """The S + 1 boundaries of the lanes in the sequence of all rows, in proportion to their slots."""
        whole = self.num_rows // self.batch_size
        rest = [0] * len(self.lane_slots) if self.drop_last else self._last_slots
        return [
            whole * slot + more
            for slot, more in zip(self.lane_slots, rest, strict=True)
        ]

    @cached_property
    def _last_slots(self) -> list[int]:
        """The boundaries of the lanes' slots in a step of the rows that are left: each lane has its share of them."""
        rest = self.num_rows % self.batch_size
        return [slot * rest // self.batch_size for slot in self.lane_slots]

    def slots_of(self, step: int) -> list[int]:
        """The boundaries of the lanes' slots in a step: fewer in the last one if it is not full."""
        is_full = (step + 1) * self.batch_size <= self.num_rows
        return self.lane_slots if is_full else self._last_slots

    def permutation(self, epoch: int, block: Block) -> Int64 | None:
        """Returns the order of a block's rows; None without shuffle."""
        if not self.shuffle:
            return None
        # Keys (epoch, 0, 0) order the row groups; those of a lane begin with 1.
        return self._random(epoch, 1 + block.lane, block.number).permutation(
            block.stop - block.start
        )

    def blocks(self, epoch: int) -> list[list[Block]]:
        """Returns the blocks of each lane in an epoch."""
        order = np.arange(len(self.group_rows))
        least = 1
        # Small row groups are shuffled together in one block; without a shuffle each
        # segment is a block.
        if self.shuffle:
            order = self._random(epoch, 0, 0).permutation(len(order))
            least = self.part_rows
        starts = np.concatenate([[0], np.cumsum(np.array(self.group_rows)[order])])
        lanes = []
        for lane, (begin, end) in enumerate(pairwise(self.lane_ends)):
            lanes.append(_lane(lane, begin, end, order, starts, least, self.part_rows))
        return lanes

    def pieces(
        self,
        lanes: Sequence[Sequence[Block]],
        step: int,
        rank: int,
        world_size: int,
        *,
        everyone: bool = False,
    ) -> Iterator[Piece]:
        """Yields the rows of one step in the order of the slots: this rank's, or those of all ranks.

        Args:
            lanes: the epoch's :meth:`blocks`.
            step: number of the step in the epoch, from 0.
            rank: r.
            world_size: R.
            everyone: yield the rows of all ranks.
        """
        slots = self.slots_of(step)
        # A rank that needs its own rows alone does not look at the other lanes, of
        # which there may be hundreds.
        lane_numbers = (
            range(self.num_lanes) if everyone else self.lanes_of(rank, world_size, step)
        )
        for lane in lane_numbers:
            low, high = self._part(lane, step, rank, world_size)
            # This rank's slots in the lane, and the others' before and after them.
            cuts = sorted({0, low, high, slots[lane + 1] - slots[lane]})
            for start, stop in pairwise(cuts):
                mine = low <= start < high
                if mine or everyone:
                    first = self._first_row(lane, step)
                    yield from _cut(lanes[lane], first + start, first + stop, mine)

    def lanes_of(self, rank: int, world_size: int, step: int = 0) -> range:
        """Returns the lanes with slots of a rank in a step."""
        low, high = self.slots(rank, world_size, step)
        # A rank without a slot, as there are with more ranks than rows in a batch.
        if low == high:
            return range(0)
        slots = self.slots_of(step)
        return range(bisect_right(slots, low) - 1, bisect_left(slots, high))

    def reads(self, block: Block, rank: int, world_size: int) -> bool:
        """Says whether a rank has rows of a block in some step of the epoch."""
        last = self.steps - 1
        _, high = self._part(block.lane, 0, rank, world_size)
        width = self._first_row(block.lane, 1)
        # The first step whose rows end behind the block's start; the last one may have other slots.
        step = max(0, (block.start - high) // width + 1)
        for each in (min(step, last), last):
            first = self._first_row(block.lane, each)
            low, high = self._part(block.lane, each, rank, world_size)
            if low < high and block.start < first + high and first + low < block.stop:
                return True
        return False

    def slots(self, rank: int, world_size: int, step: int = 0) -> tuple[int, int]:
        """Returns the first slot of a rank in a step, and the slot after its last: as many as for rows in memory."""
        slots = self.slots_of(step)
        # A rank with a lane of its own stays in it.
        if self.num_lanes == world_size:
            return slots[rank], slots[rank + 1]
        rows = slots[-1]
        return rank * rows // world_size, (rank + 1) * rows // world_size

    def _part(
        self, lane: int, step: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Returns a rank's slots in a step among those of a lane."""
        first, last = self.slots_of(step)[lane : lane + 2]
        low, high = self.slots(rank, world_size, step)
        return min(max(low, first), last) - first, min(max(high, first), last) - first

    def _first_row(self, lane: int, step: int) -> int:
        """Returns the row of a lane that a step begins with."""
        return step * (self.lane_slots[lane + 1] - self.lane_slots[lane])

    def _random(self, *key: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64([self.seed, *key]))


def places_of(
    group_rows: Sequence[int],
    lanes: int,
    buffer_rows: int,
    *,
    batch_size: int,
    columns: int,
) -> tuple[int, int]:
    """Returns the lanes and the buffer for some row groups: a few large ones are one block, or many small parts.

    By the groups' sizes alone: the order must not depend on free memory.

    Args:
        group_rows: number of rows of each row group.
        lanes: number of lanes that is asked for.
        buffer_rows: rows held for shuffling, over all lanes.
        batch_size: B, over all ranks.
        columns: number of columns that are read.
    """
    large = max(group_rows) > -(-buffer_rows // lanes)
    if not large or len(group_rows) >= 4 * lanes:
        return lanes, buffer_rows
    if sum(group_rows) * columns <= WHOLE_VALUES:
        return 1, sum(group_rows)
    # Each lane has equally many slots in a batch.
    places = buffer_rows // PART_ROWS
    places = max(lane for lane in range(1, places + 1) if batch_size % lane == 0)
    return places, places * PART_ROWS


def _lane(
    lane: int, begin: int, end: int, order: Int64, starts: Int64, least: int, most: int
) -> list[Block]:
    """Builds a lane's blocks of at least ``least`` rows; segments end at multiples of ``most`` rows in a row group."""
    blocks: list[Block] = []
    segments: list[Segment] = []
    start = position = begin
    # The row group in which the lane begins.
    index = int(np.searchsorted(starts, begin, side="right")) - 1
    while position < end:
        first = int(starts[index])
        past_last = int(starts[index + 1])
        # The next multiple of `most` rows in the row group: a segment is a part that is
        # read at once.
        part_end = first + ((position - first) // most + 1) * most
        stop = min(end, past_last, part_end)
        segments.append(Segment(int(order[index]), position - first, stop - first))
        position = stop
        index += stop == past_last
        if position - start >= least or position == end:
            block = Block(
                lane=lane,
                number=len(blocks),
                start=start - begin,
                stop=position - begin,
                segments=tuple(segments),
            )
            blocks.append(block)
            segments = []
            start = position
    return blocks


def _cut(blocks: Sequence[Block], start: int, stop: int, mine: bool) -> Iterator[Piece]:
    # The last block that begins at or before the first row.
    index = max(bisect_right(blocks, start, key=lambda block: block.start) - 1, 0)
    while index < len(blocks) and blocks[index].start < stop:
        block = blocks[index]
        low = max(start, block.start)
        high = min(stop, block.stop)
        if low < high:
            yield Piece(block, low - block.start, high - block.start, mine)
        index += 1
