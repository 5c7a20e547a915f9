"""History: the items that a user took before a row, never at the row's own time or later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchrec_ext.data.preprocess.columns import IDS, NUMBERS, TIMES, Cells, Types
from torchrec_ext.data.preprocess.engines import exact, number
from torchrec_ext.data.preprocess.lists import list_of
from torchrec_ext.data.preprocess.step import State, Step, StepContext, Table, positive
from torchrec_ext.schema import DataError


@dataclass(frozen=True, kw_only=True)
class History(Step):
    """Lists the user's most recent ``length`` items with a *strictly* earlier time, oldest first, ties by item.

    Events with a null user, item or time are in no history; a row with a null user or time has an empty one. The step
    reads columns as the files have them, so put it before steps that replace them, and ``Categorify(column=item,
    also=(output,))`` after it.

    In a request, whoever keeps the user's events sends them: a list of items ``<output>_items`` and one of times
    ``<output>_times`` per row (only those that ``where`` lets pass), in any order; the row's own ``time`` decides which
    of them count.

    Args:
        user: name of the column of user ids.
        item: name of the column of item ids, integers or strings.
        time: name of the column of timestamps or integers.
        length: greatest number of items.
        output: name of the result.
        where: name of a number column; only events in which it is at least ``at_least`` are kept, such as clicks.
        at_least: see ``where``.
    """

    user: str
    item: str
    time: str
    length: int
    output: str = "history"
    where: str | None = None
    at_least: float = 1.0

    def __post_init__(self) -> None:
        positive(f"History('{self.output}')", "length", self.length)

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the columns of an event."""
        return (self.user, self.item, self.time, *([self.where] if self.where else []))

    @property
    def event_reads(self) -> tuple[str, ...]:
        """Names of the columns of an event."""
        return self.reads

    @property
    def writes(self) -> tuple[str, ...]:
        """``output``."""
        return (self.output,)

    def types(self, types: Types) -> Mapping[str, str]:
        """Returns a list of items."""
        types.need(self, self.user, IDS, "give the column of user ids")
        item = types.need(self, self.item, IDS, "give the column of item ids")
        types.need(self, self.time, TIMES | {"int64"}, "convert it to a timestamp, or to seconds since 1970")
        if self.where:
            types.need(self, self.where, NUMBERS, "give a column of numbers")
        return {self.output: list_of(item)}

    def transform(self, table: Table, types: Types, state: State, run: StepContext) -> Table:
        """Numbers each user's events, counts for each (user, time) how many came before, and joins the two."""
        import ibis

        events = self._events(run, types)
        moments = table.select(user=table[self.user], time=table[self.time]).distinct()
        moments = moments.filter(moments.user.notnull() & moments.time.notnull())
        histories = _histories(moments, events, self.length)
        joined = table.left_join(
            histories, [table[self.user] == histories["__user__"], table[self.time] == histories["__time__"]]
        )
        empty = ibis.literal([], type=f"array<{types[self.item]}>")
        filled = joined.mutate({self.output: ibis.coalesce(joined["__tail__"], empty)})
        return filled.drop("__user__", "__time__", "__tail__")

    def _events(self, run: StepContext, types: Types) -> Table:
        rows = run.events
        if self.where:
            rows = rows.filter(number(rows[self.where], types[self.where], run.engine) >= exact(self.at_least))
        events = rows.select(user=rows[self.user], time=rows[self.time], item=rows[self.item])
        return events.filter(events.user.notnull() & events.time.notnull() & events.item.notnull())

    def request_types(self, raw: Mapping[str, str]) -> Mapping[str, str]:
        """Returns the types of the row's time and of the user's events."""
        return {
            self.time: raw[self.time],
            f"{self.output}_items": f"list<{raw[self.item]}>",
            f"{self.output}_times": f"list<{raw[self.time]}>",
        }

    def online(self, cells: Mapping[str, Cells], types: Types, state: State) -> Mapping[str, Cells]:
        """Computes the same from the events in the request."""
        now, items, times = (cells[name] for name in (self.time, f"{self.output}_items", f"{self.output}_times"))
        _check_pairs(self.output, items, times)
        rows = zip(
            now.values.tolist(), now.valid.tolist(), items.rows(), times.rows(), _known(items, times), strict=True
        )
        tails = [self._tail(*fields) for fields in rows]
        values = [value for tail in tails for value in tail]
        return {
            self.output: Cells(
                values=np.array(values, dtype=items.values.dtype),
                valid=np.ones(len(values), dtype=bool),
                lengths=np.array([len(tail) for tail in tails], dtype=np.int64),
            )
        }

    def _tail(self, now: int, valid: bool, items: Any, times: Any, known: Any) -> list[Any]:
        if not valid:
            return []
        before = known & (times < now)
        pairs = sorted(zip(times[before].tolist(), items[before].tolist(), strict=True))
        return [item for _, item in pairs[-self.length :]]


def _known(items: Cells, times: Cells) -> list[Any]:
    return items.with_values(items.valid & times.valid).rows()


def _check_pairs(output: str, items: Cells, times: Cells) -> None:
    assert items.lengths is not None
    assert times.lengths is not None
    if np.array_equal(items.lengths, times.lengths):
        return
    row = int((items.lengths != times.lengths).argmax())
    raise DataError(
        f"column '{output}_items', row {row}: {items.lengths[row]} items, but '{output}_times' has "
        f"{times.lengths[row]}; send one time for each item"
    )


def _histories(moments: Table, events: Table, length: int) -> Table:
    """Returns (__user__, __time__, __tail__) of each moment that has events before it."""
    import ibis

    ordered = ibis.window(group_by=events.user, order_by=[events.time, events.item])
    tails = events.select(
        "user",
        number=ibis.row_number().over(ordered) + 1,
        tail=events.item.collect().over(
            ibis.window(group_by=events.user, order_by=[events.time, events.item], preceding=length - 1, following=0)
        ),
    )
    # A moment stands before the events of its own time (0 before 1), so that these are not counted.
    both = ibis.union(
        moments.mutate(event=ibis.literal(0, type="int64")),
        events.select("user", "time", event=ibis.literal(1, type="int64")),
    )
    upto = ibis.window(group_by=both.user, order_by=[both.time, both.event], preceding=None, following=0)
    counted = both.mutate(before=both.event.sum().over(upto))
    counted = counted.filter((counted.event == 0) & (counted.before > 0))
    joined = counted.inner_join(tails, [counted.user == tails.user, counted.before == tails.number])
    return joined.select(__user__=counted.user, __time__=counted.time, __tail__=tails.tail)
