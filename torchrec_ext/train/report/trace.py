"""Spans: what one rank did when, read from torch.profiler's trace, and how much of it was at the same time."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Interval = tuple[float, float]
Event = dict[str, Any]
TOWER = "tower "  # before a tower's name, in the trace
_BACKWARD = "autograd::engine::evaluate_function: "
# What computes. An autograd function of TorchRec's that waits for an exchange is an operator too, but calls these when it computes.
_COMPUTING = ("aten::", "fbgemm::")


@dataclass(frozen=True, kw_only=True)
class RankSpans:
    """What one rank did, in microseconds of one clock.

    Args:
        forward: by tower, its forward passes, waits included.
        backward: by tower, its backward passes.
        busy: while an operator computed; on a GPU while a kernel ran.
        exchange: while a collective was under way, waits for other ranks included.
    """

    forward: Mapping[str, Sequence[Interval]]
    backward: Mapping[str, Sequence[Interval]]
    busy: Sequence[Interval]
    exchange: Sequence[Interval]

    def towers(self) -> dict[str, list[Interval]]:
        """By tower, while it computed."""
        names = dict.fromkeys([*self.forward, *self.backward])
        return {name: both(self.busy, union([*self.forward.get(name, ()), *self.backward.get(name, ())])) for name in names}


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time in intervals that are apart, in order.

    Example:
        >>> union([(3, 5), (0, 2), (1, 3)]), union([(0, 1), (4, 4)])
        ([(0, 5)], [(0, 1)])
    """
    found: list[Interval] = []
    for start, stop in sorted(intervals):
        if stop <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def at_least(count: int, sets: Sequence[Sequence[Interval]]) -> list[Interval]:
    """While ``count`` or more of the sets are in an interval of theirs; the intervals of each set are apart.

    Example:
        >>> at_least(2, [[(0, 4)], [(1, 2), (3, 6)], [(5, 7)]])
        [(1, 2), (3, 4), (5, 6)]
    """
    changes = sorted((moment, step) for own in sets for start, stop in own for moment, step in ((start, 1), (stop, -1)))
    found, level, since = [], 0, 0.0
    for moment, step in changes:
        if level < count <= level + step:
            since = moment
        elif level + step < count <= level:
            found.append((since, moment))
        level += step
    return union(found)


def both(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """While both are in an interval."""
    return at_least(2, [one, other])


def length(intervals: Iterable[Interval]) -> float:
    """Together, of intervals that are apart."""
    return sum(stop - start for start, stop in intervals)


def overlap(ranks: Sequence[RankSpans]) -> dict[str, float]:
    """What ran at the same time, as shares of 0 to 1.

    Returns:
        ``ranks_in_towers``: of the time in which some rank computed in a tower, that in which two ranks or more did.
        ``towers_at_once``: of that time, that in which two different towers or more were computed, on whatever ranks.
        ``exchange_hidden``: of the time in which an exchange of a rank was under way, that in which the rank computed.
        Each only where there was something to divide by.
    """
    towers = [rank.towers() for rank in ranks]
    by_rank = [union(interval for own in rank.values() for interval in own) for rank in towers]
    names = dict.fromkeys(name for rank in towers for name in rank)
    by_tower = [union(interval for rank in towers for interval in rank.get(name, ())) for name in names]
    exchanges = [(length(rank.exchange), length(both(rank.exchange, rank.busy))) for rank in ranks]
    parts = {
        "ranks_in_towers": (length(at_least(2, by_rank)), length(at_least(1, by_rank))),
        "towers_at_once": (length(at_least(2, by_tower)), length(at_least(1, by_tower))),
        "exchange_hidden": (sum(hidden for _, hidden in exchanges), sum(whole for whole, _ in exchanges)),
    }
    return {name: part / whole for name, (part, whole) in parts.items() if whole}


def read_spans(events: Iterable[Event], shift: float = 0.0) -> RankSpans:
    """The spans in one rank's trace events, ``shift`` microseconds later.

    A tower's backward is found by autograd's sequence numbers: a backward node has the number of the operator that made it. On a
    GPU the spans of a tower are those of the kernels that were launched in them.
    """
    done = [event for event in events if event.get("ph") == "X"]
    calls = [event for event in done if event["name"].startswith(TOWER) and event.get("cat") == "user_annotation"]
    forward: dict[str, list[Interval]] = {}
    for event in calls:
        forward.setdefault(event["name"].removeprefix(TOWER), []).append(_interval(event))
    backward = _backward(done, calls)
    kernels = [event for event in done if event.get("cat") == "kernel"]
    collectives = [event for event in done if event["name"].startswith(("gloo:", "nccl"))]
    computing = [event for event in done if event.get("cat") == "cpu_op" and event["name"].startswith(_COMPUTING)]
    if kernels:
        computing = [event for event in kernels if not event["name"].startswith("nccl")]
        launched = {e["args"]["correlation"]: float(e["ts"]) for e in done if e.get("cat") in ("cuda_runtime", "cuda_driver")}
        forward, backward = (
            {name: _launched_in(own, computing, launched) for name, own in found.items()} for found in (forward, backward)
        )
    return RankSpans(
        forward={name: _later(own, shift) for name, own in forward.items()},
        backward={name: _later(own, shift) for name, own in backward.items()},
        busy=_later(union(map(_interval, computing)), shift),
        exchange=_later(union(map(_interval, collectives)), shift),
    )


def _interval(event: Event) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _later(intervals: Iterable[Interval], shift: float) -> list[Interval]:
    return [(start + shift, stop + shift) for start, stop in intervals]


def _launched_in(intervals: Iterable[Interval], kernels: Iterable[Event], launched: Mapping[int, float]) -> list[Interval]:
    """While the kernels ran whose launch lies in the intervals."""
    spans = union(intervals)
    starts = [start for start, _ in spans]
    found = []
    for kernel in kernels:
        time = launched.get(kernel["args"]["correlation"])
        place = -1 if time is None else bisect.bisect_right(starts, time) - 1
        if time is not None and place >= 0 and time <= spans[place][1]:
            found.append(_interval(kernel))
    return union(found)


def _backward(done: Sequence[Event], calls: Sequence[Event]) -> dict[str, list[Interval]]:
    """By tower, from its first backward node to its last of those that no other tower's interrupt."""
    made = _makers(done, calls)
    nodes = sorted((e for e in done if e["name"].startswith(_BACKWARD)), key=lambda event: float(event["ts"]))
    found: dict[str, list[Interval]] = {}
    before = None
    for event in nodes:
        tower = made.get(event.get("args", {}).get("Sequence number"), "")
        start, stop = _interval(event)
        if tower and tower == before:
            found[tower][-1] = (found[tower][-1][0], stop)
        elif tower:
            found.setdefault(tower, []).append((start, stop))
        # A node without an operator of the forward, such as one that adds up a parameter's gradient, belongs to its neighbours.
        before = before if event.get("args", {}).get("Sequence number") not in made else tower
    return found


def _makers(done: Sequence[Event], calls: Sequence[Event]) -> dict[int, str]:
    """By sequence number the tower in whose forward its operator ran, '' for none.

    Operators before it that make no node, and those around it, carry the number too: it is the last that begins.
    """
    order = sorted(calls, key=lambda event: float(event["ts"]))
    starts = [event["ts"] for event in order]
    last: dict[int, Event] = {}
    for event in done:
        arguments = event.get("args", {})
        if arguments.get("Fwd thread id") == 0 and not event["name"].startswith(_BACKWARD):
            known = last.get(arguments["Sequence number"])
            if known is None or known["ts"] <= event["ts"]:
                last[arguments["Sequence number"]] = event
    made = {}
    for number, event in last.items():
        place = bisect.bisect_right(starts, event["ts"]) - 1
        inside = place >= 0 and event["ts"] <= order[place]["ts"] + order[place]["dur"] and event["tid"] == order[place]["tid"]
        made[number] = order[place]["name"].removeprefix(TOWER) if inside else ""
    return made
