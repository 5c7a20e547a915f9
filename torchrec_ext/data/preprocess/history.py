"""History: a user's items before a row, never at the row's own time or later; their columns and gaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchrec_ext.data.columns import Int64, offsets_of
from torchrec_ext.data.preprocess.columns import (
    IDS,
    INT64,
    TIME_TYPES,
    Cells,
    Columns,
    Mask,
    Types,
    need,
    text_array,
)
from torchrec_ext.data.preprocess.step import Step, StepState, quoted
from torchrec_ext.data.preprocess.times import per_second
from torchrec_ext.schema.validation import DataError, check_least

# Starts of buckets of gaps in seconds, for History.gaps: 1, 2, 4 and so on to two
# years.
GAPS = tuple(2**power for power in range(27))
# of an integer time from 1970, so that no difference of two is beyond 64 bits
_FARTHEST = 2**61


@dataclass(frozen=True, kw_only=True)
class History(Step):
    """Lists the user's most recent ``length`` items with a *strictly* earlier time, oldest first, ties by item.

    Events with a null user, item or time are in no history; a row with a null user or time has an empty one. A null in
    a column of ``also`` stays in its list, and is the unknown value of the step that maps it. The step reads columns as
    the files have them, so put it before steps that replace them, and ``Categorify(column=item, also=(output,))`` after
    it.

    A request brings the user's events along: a list of items ``<output>_items``, one of times
    ``<output>_times`` and one ``<output>_<column>`` for each column of ``also`` per row, in any order; the row's own
    ``time`` decides which of them count.

    Args:
        user: name of the column of user ids.
        item: name of the column of item ids, integers or strings.
        time: name of the column of timestamps or integers.
        length: greatest number of items.
        output: name of the result.
        also: further columns of ids of an event, such as the item's category; each becomes a list
            ``<output>_<column>`` beside the items.
        gaps: rising starts of buckets, in seconds or in the unit of a ``time`` of integers, for a list
            ``<output>_gap`` of 1 + the number of starts at or below the time from each event to the row: the position
            of BST (Chen et al. 2019). No such list if empty; ``GAPS`` has the powers of two.
    """

    user: str
    item: str
    time: str
    length: int
    output: str = "history"
    also: tuple[str, ...] = ()
    gaps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_least(f"History('{self.output}'): length", self.length)
        if list(self.gaps) != sorted(set(self.gaps)) or min(self.gaps, default=1) < 1:
            raise ValueError(
                f"History('{self.output}'): gaps={self.gaps}: must rise, from 1 on"
            )
        names = [*self.sent, f"{self.output}_gap"]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"History('{self.output}'): also={self.also}: two lists would be called '{name}'; give each column "
                    "once, and rename one that is called items, times or gap"
                )

    @property
    def sent(self) -> tuple[str, ...]:
        """Names of a request's lists of the events' items, times and columns of ``also``."""
        return tuple(f"{self.output}_{name}" for name in ("items", "times", *self.also))

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of an event's columns in the order of ``sent``."""
        return (self.item, self.time, *self.also)

    @property
    def ids(self) -> tuple[str, ...]:
        """Names of the results with an event's own ids: ``output``, and those of ``also``."""
        return (self.output, *self.sent[2:])

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the columns of an event."""
        return (self.user, self.item, self.time, *self.also)

    @property
    def writes(self) -> tuple[str, ...]:
        """``output``, the lists of ``also``, and the gaps."""
        return (*self.ids, f"{self.output}_gap") if self.gaps else self.ids

    def meaning(self, state: StepState) -> Mapping[str, Any]:
        """Returns all fields but ``length``: in a longer list an id stands for the same item."""
        fields = dict(super().meaning(state)["fields"])
        del fields["length"]
        return {"fields": fields}

    def types(self, types: Types) -> Types:
        """Returns lists of ids."""
        need(types, self, self.user, IDS, "give the column of user ids")
        items = need(types, self, self.item, IDS, "give the column of item ids")
        remedy = "convert it to a timestamp, or to seconds since 1970"
        need(types, self, self.time, TIME_TYPES | {INT64}, remedy)
        also = [
            need(types, self, name, IDS, "give a column of ids") for name in self.also
        ]
        # `writes` is in the order of the events' columns: item, those of `also`, and
        # the gap if there is one.
        results = zip(self.writes, [items, *also, INT64], strict=False)
        return {name: pa.list_(dtype) for name, dtype in results}

    def vocab(self, state: StepState) -> Mapping[str, int]:
        """Returns the number of buckets of the gaps + 1, row 0 included."""
        return {f"{self.output}_gap": len(self.gaps) + 2} if self.gaps else {}

    def request_types(self, raw: Mapping[str, str]) -> Mapping[str, str]:
        """Returns the types of the row's time and of the user's events."""
        kinds = {self.time: raw[self.time]}
        for name, column in zip(self.sent, self.columns, strict=True):
            kinds[name] = f"list<{raw[column]}>"
        return kinds

    def apply(self, columns: Columns, state: StepState) -> Columns:
        """Sorts the events that came with each row, and keeps the last ones before it."""
        lists = [columns[name] for name in self.sent]
        _check_lengths(self.sent, lists)
        lengths = lists[0].lengths
        row = np.arange(len(lengths)).repeat(lengths)
        now = columns[self.time].values
        times = lists[1].values
        # An event counts if its item and time are not null, and it is strictly earlier.
        counts = columns[self.time].is_valid[row] & (times < now[row])
        for each in lists[:2]:
            counts &= each.is_valid
        order = np.flatnonzero(counts)
        items, _, *also = [_ranks(each)[order] for each in lists]
        order = order[_sorting([*also[::-1], items, times[order], row[order]])]
        kept, lengths = _last(row[order], len(lengths), self.length)
        order = order[kept]
        offsets = offsets_of(lengths)
        results = {}
        for name, each in zip(self.ids, [lists[0], *lists[2:]], strict=True):
            valid = None if each.valid is None else each.valid[order]
            results[name] = Cells(each.values[order], valid, offsets, each.texts)
        if self.gaps:
            size = per_second(lists[1].unit)
            seconds = np.clip(now[row[order]] // size, -_FARTHEST, _FARTHEST)
            gaps = seconds - np.clip(times[order] // size, -_FARTHEST, _FARTHEST)
            buckets = np.searchsorted(np.array(self.gaps), gaps, side="right") + 1
            results[self.writes[-1]] = Cells(buckets, offsets=offsets)
        return results

    def sql(self, rows: str, events: str) -> str:
        """Returns SQL that joins to ``rows`` the ``events`` before each row, in the form of a request's, ``sent``.

        The list of an event's last ones, itself included, is that of every row after it and before the user's next
        event, so an ASOF join finds it. Only the last event of a time has one.
        """
        user, time = quoted(self.user), quoted(self.time)
        return (
            f"SELECT r.*, {self._sent} FROM {rows} r ASOF LEFT JOIN ({self._tails(events, time)}) e "
            f"ON r.{user} = e.{user} AND r.{time} > e.{time}"
        )

    def latest_sql(self, users: str, events: str) -> str:
        """Returns SQL that adds ``sent`` to a table of users, from all of their ``events``."""
        user = quoted(self.user)
        return (
            f"SELECT r.*, {self._sent} FROM {users} r LEFT JOIN ({self._tails(events, user)}) e "
            f"ON r.{user} = e.{user}"
        )

    def end_time_sql(self, users: str, events: str, kind: str) -> str:
        """Returns SQL that adds ``time``, a ``kind``, to a table of users: a moment after all ``events``."""
        moment = "1" if kind == "int64" else "INTERVAL 1 SECOND"
        time = quoted(self.time)
        return f"SELECT r.*, (SELECT max({time}) + {moment} FROM {events}) AS {time} FROM {users} r"

    @property
    def _sent(self) -> str:
        return ", ".join(
            f"coalesce(e.{quoted(name)}, []) AS {quoted(name)}" for name in self.sent
        )

    def _tails(self, events: str, each: str) -> str:
        """Returns SQL for the lists of a user's events up to the last one of ``each`` time or user."""
        user, item, time = map(quoted, (self.user, self.item, self.time))
        also = [quoted(name) for name in self.also]
        known = [f"{name} IS NOT NULL" for name in (user, item, time)]
        lists = ", ".join(
            f"list({column}) OVER last AS {quoted(name)}"
            for name, column in zip(self.sent, (item, time, *also), strict=True)
        )
        order = f"PARTITION BY {user} ORDER BY {', '.join((time, item, *also))}"
        return (
            f"SELECT {user}, {time}, {lists} FROM {events} WHERE {' AND '.join(known)} "
            f"WINDOW last AS ({order} ROWS BETWEEN {self.length - 1} PRECEDING AND CURRENT ROW), every AS ({order}) "
            f"QUALIFY lead({each}) OVER every IS DISTINCT FROM {each}"
        )


def event_columns(steps: Sequence[Step]) -> list[str]:
    """Returns the names of the columns of the events behind the histories among ``steps``."""
    histories = [step for step in steps if isinstance(step, History)]
    return list(dict.fromkeys(name for step in histories for name in step.reads))


def _ranks(column: Cells) -> Int64:
    """Returns integers in the order of the values, as DuckDB sorts them: texts by their bytes, null at the end."""
    if column.texts is None:
        if column.valid is None:
            return column.values
        return np.where(column.valid, column.values, np.iinfo(np.int64).max)
    texts = pc.rank(text_array(column.texts), tiebreaker="dense").to_numpy()
    # Null, at -1, is the last.
    ranks: Int64 = np.append(texts, len(texts) + 1).astype(np.int64)[column.values]
    return ranks


def _sorting(keys: Sequence[Int64]) -> Any:
    """Returns the order by the last key, ties by the one before it; events of files come sorted."""
    is_equal: Mask = np.ones(max(len(keys[0]) - 1, 0), dtype=bool)
    for key in reversed(keys):
        if (is_equal & (key[1:] < key[:-1])).any():
            return np.lexsort(keys)
        is_equal &= key[1:] == key[:-1]
    return slice(None)


def _last(row: Int64, rows: int, length: int) -> tuple[Mask, Int64]:
    """Returns which of the sorted events are a row's last ones, and how many each row has of them."""
    lengths = np.bincount(row, minlength=rows).astype(np.int64)
    from_end = np.cumsum(lengths)[row] - np.arange(len(row))
    return from_end <= length, np.minimum(lengths, length)


def _check_lengths(names: Sequence[str], lists: Sequence[Cells]) -> None:
    """Refuses lists without exactly one value per item."""
    for name, column in zip(names, lists, strict=True):
        if not np.array_equal(lists[0].lengths, column.lengths):
            raise DataError(
                f"columns '{names[0]}' and '{name}' have lists of different lengths; send one value for each item"
            )
