"""IdIndex: a hash index from the 64-bit ids of several tables to 32-bit values, in plain tensor operations.

An id may stand in either of two buckets. A bucket is one cache line of 64 bytes: five ids and then their five values.
A look-up reads two lines and compares. Removing an id leaves no mark. All tables share one arena: a look-up takes as
many operations for 20 tables as for one.

Every loop below is over rounds, never over ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

# The id of an empty place; no table can hold it.
EMPTY = torch.iinfo(torch.int64).min
_WAYS = 5  # ids in a bucket
_WORDS = 8  # 64-bit words in a bucket: five ids, five 32-bit values, and 4 bytes that are not used
_FIRST_VALUE = 2 * _WAYS  # 32-bit word of the first value
# Two choices fill buckets of five to .53, so nearly no table has to be rebuilt.
_MOST_FULL = 0.5
_GROWTH = 1.25


def mixed(ids: Tensor) -> Tensor:
    """Returns int64 ids hashed by the finaliser of splitmix64, which maps no two to one."""
    ids = (ids ^ shifted(ids, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    ids = (ids ^ shifted(ids, 27)) * (0x94D049BB133111EB - 2**64)
    return ids ^ shifted(ids, 31)


def shifted(ids: Tensor, bits: int) -> Tensor:
    """Shifts int64 to the right and fills with zeros, where torch's own shift repeats the sign."""
    return (ids >> bits) & ((1 << (64 - bits)) - 1)


class Layout(NamedTuple):
    """The buckets of each look-up's table.

    Args:
        table: table of each look-up, (N,) int64.
        first: that table's first bucket.
        size: its number of buckets.
        counts: number of look-ups of each table, if they are in the order of tables.
    """

    table: Tensor
    first: Tensor
    size: Tensor
    counts: tuple[int, ...] = ()


class IdIndex:
    """Maps ids of tables 0 to T - 1 to values other than 0; tables may hold the same ids.

    Args:
        sizes: number of ids that each table will hold; a table that outgrows it is rebuilt with more buckets.
        device: where the index is; ids to look up must be there.

    Attributes:
        lines: the buckets, (N, 8) int64.
    """

    def __init__(
        self, sizes: Sequence[int], device: torch.device | None = None
    ) -> None:
        self._device = device
        self._buckets = [
            max(2, math.ceil(size / (_WAYS * _MOST_FULL))) for size in sizes
        ]
        self.clear()

    def clear(self) -> None:
        """Removes all ids."""
        starts = [0, *accumulate(self._buckets[:-1])]
        self._first = torch.tensor(starts, device=self._device)
        self._size = self._first.new_tensor(self._buckets)
        self.lines = self._first.new_zeros(sum(self._buckets), _WORDS)
        self.lines[:, :_WAYS] = EMPTY
        # The same memory as single words: ids by 64 bits, values by 32.
        self._words = self.lines.view(-1)
        self._halves = self.lines.view(torch.int32).view(-1)
        self._layout = self.of(self._first[:0])

    def layout(self, counts: tuple[int, ...]) -> Layout:
        """Returns the layout of look-ups of ``counts[t]`` ids of table t, one table after the other."""
        # Most batches have that of the one before, and making it waits for a device.
        if self._layout.counts != counts:
            table = torch.repeat_interleave(torch.tensor(counts))
            of_ids = self.of(table.to(self._first.device))
            self._layout = of_ids._replace(counts=counts)
        return self._layout

    def of(self, table: Tensor) -> Layout:
        """Returns the layout of look-ups of ids of ``table``, (N,) int64."""
        return Layout(table, self._first[table], self._size[table])

    def find(self, ids: Tensor, layout: Layout) -> Tensor:
        """Returns the value of each id, (N,) int64; 0 for an id that is not there."""
        one, two = buckets_of(ids, layout)
        values = self._values_in(one, ids)
        # Of an id that is there, the line that has just been read.
        return values + self._values_in(two.where(values == 0, one), ids) * (
            values == 0
        )

    def _values_in(self, buckets: Tensor, ids: Tensor) -> Tensor:
        """Returns the value of each id in its bucket, (N,) int64; 0 for an id that is not there."""
        lines = self.lines.index_select(0, buckets)
        values = lines.view(torch.int32)[:, _FIRST_VALUE : _FIRST_VALUE + _WAYS]
        return ((lines[:, :_WAYS] == ids[:, None]) * values).sum(1)

    def _ids_in(self, buckets: Tensor) -> Tensor:
        """Returns the ids in each of the buckets, (N, 5); whole lines are copied much faster than parts of them."""
        return self.lines.index_select(0, buckets)[:, :_WAYS]

    def remove(self, ids: Tensor, layout: Layout) -> None:
        """Removes ids that are there."""
        one, two = buckets_of(ids, layout)
        hits = torch.cat([self._ids_in(one), self._ids_in(two)], dim=1) == ids[:, None]
        way = hits.int().argmax(1)
        bucket = torch.where(way >= _WAYS, two, one)
        slots = bucket * _WAYS + way % _WAYS
        self._words[_id_word(slots)] = EMPTY
        self._halves[_value_word(slots)] = 0

    def insert(self, ids: Tensor, table: Tensor, values: Tensor) -> None:
        """Adds ids that are not there, each once.

        Each goes to the emptier of its buckets. In a round at most one goes to a bucket: if all chose at once, some
        buckets would overflow beside empty ones.
        """
        while len(ids):
            one, two = buckets_of(ids, self.of(table))
            empty_one = self._ids_in(one) == EMPTY
            empty_two = self._ids_in(two) == EMPTY
            room_one = empty_one.sum(1)
            room_two = empty_two.sum(1)
            first_is_emptier = room_one >= room_two
            bucket = torch.where(first_is_emptier, one, two)
            room = torch.maximum(room_one, room_two)
            order, leads = _one_each(bucket)
            leads &= room[order] > 0
            chosen = order[leads]
            rest = order[~leads]
            empty = torch.where(
                first_is_emptier[chosen, None], empty_one[chosen], empty_two[chosen]
            )
            self._put(
                bucket[chosen] * _WAYS + empty.int().argmax(1),
                ids[chosen],
                values[chosen],
            )
            stuck = rest[room[rest] == 0]
            if len(stuck):
                self._rebuild(int(table[stuck[0]]))
            ids = ids[rest]
            table = table[rest]
            values = values[rest]

    def _put(self, slots: Tensor, ids: Tensor, values: Tensor) -> None:
        self._words[_id_word(slots)] = ids
        self._halves[_value_word(slots)] = values.int()

    def _rebuild(self, table: int) -> None:
        """Gives a table more buckets, and inserts all ids anew."""
        lines = self.lines.view(torch.int32)[:, _FIRST_VALUE : _FIRST_VALUE + _WAYS]
        slots = (lines != 0).reshape(-1).nonzero().squeeze(1)
        tables = torch.bucketize(slots // _WAYS, self._first, right=True) - 1
        ids = self._words[_id_word(slots)]
        values = self._halves[_value_word(slots)].long()
        self._buckets[table] = math.ceil(self._buckets[table] * _GROWTH)
        self.clear()
        self.insert(ids, tables, values)


def found(lines: Tensor, ids: Tensor, first: Tensor, size: Tensor) -> Tensor:
    """Returns the values of :meth:`IdIndex.find` by ops without loops over shapes, of which a compiler makes one loop.

    Args:
        lines: the buckets, (N, 8) int64.
        ids: ids to look up, (n,) int64.
        first: see :class:`Layout`.
        size: see :class:`Layout`.
    """
    halves = lines.view(torch.int32)
    one, two = buckets_of(ids, Layout(first, first, size))
    values = torch.zeros_like(ids)
    for bucket in (one, two):
        # Of an id that is there, the line that has just been read.
        buckets = torch.where(values != 0, one, bucket)
        for way in range(_WAYS):
            value = halves[buckets, _FIRST_VALUE + way].long()
            values = torch.where(lines[buckets, way] == ids, value, values)
    return values


def buckets_of(ids: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Returns the two buckets of each id, never the same."""
    hashes = mixed(ids)
    one = layout.first + (((hashes & 0xFFFFFFFF) * layout.size) >> 32)
    two = one + 1 + ((shifted(hashes, 32) * (layout.size - 1)) >> 32)
    return one, torch.where(two >= layout.first + layout.size, two - layout.size, two)


def _id_word(slots: Tensor) -> Tensor:
    """Returns the 64-bit word of each slot's id; slot b * 5 + w is way w of bucket b."""
    return slots // _WAYS * _WORDS + slots % _WAYS


def _value_word(slots: Tensor) -> Tensor:
    """Returns the 32-bit word of each slot's value."""
    return slots // _WAYS * (2 * _WORDS) + _FIRST_VALUE + slots % _WAYS


def _one_each(buckets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns an order that puts equal buckets beside each other, and whether each is the first of its bucket there."""
    order = torch.argsort(buckets, stable=True)
    in_order = buckets[order]
    leads = torch.ones_like(buckets, dtype=torch.bool)
    leads[1:] = in_order[1:] != in_order[:-1]
    return order, leads
