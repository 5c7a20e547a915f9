"""History: a user's items before a row, never at the row's own time or later; their columns and gaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchrec_ext.data.preprocess.columns import IDS, NUMBERS, TIMES, Cells, Types
from torchrec_ext.data.preprocess.engines import exact, number, step_function
from torchrec_ext.data.preprocess.step import Step, StepContext, StepState, Table
from torchrec_ext.data.preprocess.times import per_second, whole_seconds
from torchrec_ext.schema import DataError
from torchrec_ext.schema.validation import check_least

# Starts of buckets of gaps in seconds, for History.gaps: 1, 2, 4 and so on to two
# years.
GAPS = tuple(2**power for power in range(27))
# of an integer time from 1970, so that no difference of two is beyond 64 bits
_FARTHEST = 2**61


@dataclass(frozen=True, kw_only=True)
class History(Step):
    """Lists the user's most recent ``length`` items with a *strictly* earlier time, oldest first, ties by item.

    Events with a null user, item, time or column of ``also`` are in no history; a row with a null user or time has an
    empty one. The step reads columns as the files have them, so put it before steps that replace them, and
    ``Categorify(column=item, also=(output,))`` after it.

    A request brings the user's events along: a list of items ``<output>_items``, one of times
    ``<output>_times`` and one ``<output>_<column>`` for each column of ``also`` per row (only those that ``where`` lets
    pass), in any order; the row's own ``time`` decides which of them count.

    Args:
        user: name of the column of user ids.
        item: name of the column of item ids, integers or strings.
        time: name of the column of timestamps or integers.
        length: greatest number of items.
        output: name of the result.
        where: name of a number column; only events in which it is at least ``at_least`` are kept, such as clicks.
        at_least: see ``where``.
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
    where: str | None = None
    at_least: float = 1.0
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
        where = (self.where,) if self.where else ()
        return (self.user, self.item, self.time, *where, *self.also)

    @property
    def event_reads(self) -> tuple[str, ...]:
        """Names of the columns of an event."""
        return self.reads

    @property
    def writes(self) -> tuple[str, ...]:
        """``output``, the lists of ``also``, and the gaps."""
        return (*self.ids, f"{self.output}_gap") if self.gaps else self.ids

    def meaning(self, state: StepState) -> Mapping[str, Any]:
        """Returns all fields but ``length``: in a longer list an id stands for the same item."""
        fields = dict(super().meaning(state)["fields"])
        del fields["length"]
        return {"fields": fields}

    def types(self, types: Types) -> Mapping[str, str]:
        """Returns lists of ids."""
        types.need(self, self.user, IDS, "give the column of user ids")
        items = types.need(self, self.item, IDS, "give the column of item ids")
        types.need(
            self,
            self.time,
            TIMES | {"int64"},
            "convert it to a timestamp, or to seconds since 1970",
        )
        if self.where:
            types.need(self, self.where, NUMBERS, "give a column of numbers")
        kinds = [
            items,
            *(
                types.need(self, name, IDS, "give a column of ids")
                for name in self.also
            ),
            "int64",
        ]
        # `writes` is in the order of the events' columns: item, those of `also`, and
        # the gap if there is one.
        return {
            name: f"list<{kind}>"
            for name, kind in zip(self.writes, kinds, strict=False)
        }

    def vocab(self, state: StepState) -> Mapping[str, int]:
        """Returns the number of buckets of the gaps + 1, row 0 included."""
        return {f"{self.output}_gap": len(self.gaps) + 2} if self.gaps else {}

    def transform(
        self, table: Table, types: Types, state: StepState, run: StepContext
    ) -> Table:
        """Numbers each user's events, counts for each (user, time) how many came before, and joins the two."""
        import ibis

        events = self._events(run, types)
        input_columns = table.columns
        moments = table.select(user=table[self.user], time=table[self.time]).distinct()
        moments = moments.filter(moments.user.notnull() & moments.time.notnull())
        tails = [name for name in events.columns if name not in ("user", "time")]
        histories = _histories(moments, events, self.length, tails)
        same_moment = [
            table[self.user] == histories["__user__"],
            table[self.time] == histories["__time__"],
        ]
        joined = table.left_join(histories, same_moment)
        # `writes` is in the order of the events' columns: item, those of `also`, and
        # the second of a gap.
        lists = {
            name: joined[f"__{tail}__"]
            for name, tail in zip(self.writes, tails, strict=True)
        }
        if self.gaps:
            now = _seconds(joined[self.time], types[self.time])
            values = range(1, len(self.gaps) + 2)
            gap = self.writes[-1]
            lists[gap] = lists[gap].map(
                lambda second: step_function(now - second, self.gaps, values)
            )
        # Rows without a history have empty lists; Ibis calls a list an array.
        for name, kind in self.types(types).items():
            empty = ibis.literal([], type=kind.replace("list", "array"))
            lists[name] = ibis.coalesce(lists[name], empty)
        return joined.mutate(lists).select(
            *dict.fromkeys([*input_columns, *self.writes])
        )

    def _events(self, run: StepContext, types: Types) -> Table:
        rows = run.events
        if self.where:
            rows = rows.filter(
                number(rows[self.where], types[self.where], run.engine)
                >= exact(self.at_least)
            )
        columns = {
            "user": rows[self.user],
            "time": rows[self.time],
            "item": rows[self.item],
        }
        columns |= {f"also_{index}": rows[name] for index, name in enumerate(self.also)}
        if self.gaps:
            columns["second"] = _seconds(rows[self.time], types[self.time])
        return rows.select(**columns).drop_null()

    def request_types(self, raw: Mapping[str, str]) -> Mapping[str, str]:
        """Returns the types of the row's time and of the user's events."""
        kinds = {self.time: raw[self.time]}
        for name, column in zip(self.sent, self.columns, strict=True):
            kinds[name] = f"list<{raw[column]}>"
        return kinds

    def online(
        self, cells: Mapping[str, Cells], types: Types, state: StepState
    ) -> Mapping[str, Cells]:
        """Computes the same from the events in the request."""
        now = cells[self.time]
        lists = [cells[name] for name in self.sent]
        _check_lengths(self.sent, lists)
        # An event counts if none of its values is null.
        is_event = np.logical_and.reduce([each.valid for each in lists])
        event_masks = lists[0].with_values(is_event).rows()
        rows = zip(
            now.values.tolist(),
            now.valid.tolist(),
            event_masks,
            *(each.rows() for each in lists),
            strict=True,
        )
        events: list[Any] = []
        lengths = np.zeros(len(now.values), dtype=np.int64)
        for index, fields in enumerate(rows):
            tail = self._tail(*fields)
            events += tail
            lengths[index] = len(tail)
        # The columns of the events in the order in which a tail is sorted; of no events
        # there are none to transpose.
        times, items, *also = list(zip(*events, strict=True)) or [()] * len(lists)
        results = {}
        for name, values, each in zip(
            self.ids, [items, *also], [lists[0], *lists[2:]], strict=True
        ):
            results[name] = Cells.full(
                np.array(values, dtype=each.values.dtype), lengths
            )
        if self.gaps:
            size = per_second(types[self.time])
            row_times = now.values.repeat(lengths) // size
            event_times = np.array(times, dtype=np.int64) // size
            # Clipped as `transform` does, so that no difference is beyond 64 bits.
            gaps = np.clip(row_times, -_FARTHEST, _FARTHEST) - np.clip(
                event_times, -_FARTHEST, _FARTHEST
            )
            buckets = np.searchsorted(np.array(self.gaps), gaps, side="right") + 1
            results[self.writes[-1]] = Cells.full(
                buckets.astype(np.int64, copy=False), lengths
            )
        return results

    def _tail(
        self, now: int, valid: bool, event_mask: Any, items: Any, times: Any, *also: Any
    ) -> list[Any]:
        """Returns the latest events of a row, oldest first, each as (time, item, columns of ``also``)."""
        if not valid:
            return []
        before = event_mask & (times < now)
        events = zip(
            *(values[before].tolist() for values in (times, items, *also)), strict=True
        )
        return sorted(events)[-self.length :]


def _seconds(column: Any, kind: str) -> Any:
    """Returns times in whole seconds, integers in their own unit."""
    return (
        whole_seconds(column) if kind in TIMES else column.clip(-_FARTHEST, _FARTHEST)
    )


def _check_lengths(names: Sequence[str], lists: Sequence[Cells]) -> None:
    """Refuses lists without exactly one value per item."""
    expected: Any = lists[0].lengths
    for name, cells in zip(names, lists, strict=True):
        lengths: Any = cells.lengths
        if not np.array_equal(expected, lengths):
            row = int((expected != lengths).argmax())
            what = "time" if name == names[1] else "value"
            raise DataError(
                f"column '{names[0]}', row {row}: {expected[row]} items, but '{name}' has {lengths[row]}; send one "
                f"{what} for each item"
            )


def _histories(
    moments: Table, events: Table, length: int, columns: Sequence[str]
) -> Table:
    """Returns (__user__, __time__, __COLUMN__ ...) of each moment with earlier events, one list per column."""
    import ibis

    # By time and then by the ids, so that the order does not depend on the engine or on
    # the files.
    order = [events[name] for name in events.columns if name not in ("user", "second")]
    # The list at an event's number is the history of a moment with so many events
    # before it.
    latest = ibis.window(
        group_by=events.user, order_by=order, preceding=length - 1, following=0
    )
    tails = events.select(
        "user",
        number=ibis.row_number().over(ibis.window(group_by=events.user, order_by=order))
        + 1,
        **{f"__{name}__": events[name].collect().over(latest) for name in columns},
    )
    # A moment is sorted before the events of its own time (0 before 1), so these are
    # not counted.
    both = ibis.union(
        moments.mutate(event=ibis.literal(0, type="int64")),
        events.select("user", "time", event=ibis.literal(1, type="int64")),
    )
    upto = ibis.window(
        group_by=both.user,
        order_by=[both.time, both.event],
        preceding=None,
        following=0,
    )
    counted = both.mutate(before=both.event.sum().over(upto))
    counted = counted.filter((counted.event == 0) & (counted.before > 0))
    joined = counted.inner_join(
        tails, [counted.user == tails.user, counted.before == tails.number]
    )
    lists = [tails[f"__{name}__"] for name in columns]
    return joined.select(*lists, __user__=counted.user, __time__=counted.time)
