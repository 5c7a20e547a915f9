"""Timeline: the traces of all ranks on one clock: a Chrome trace with a lane for each, a picture, and how much ran at once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torchrec_ext.train.spans import Event, Interval, RankSpans, both, overlap, read_spans, union

JSON_NAME, PICTURE_NAME = "timeline.json", "timeline.png"
_EXCHANGE, _BUSY = "#8a8a8a", "#b9c4cf"


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """What torch.profiler wrote on one rank.

    Args:
        host: where the rank ran.
        trace: the Chrome trace.
        ahead_us: microseconds by which this rank's clock is ahead of rank 0's.
        error_us: how far off that may be.
    """

    host: str
    trace: Mapping[str, Any]
    ahead_us: float = 0.0
    error_us: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """The ranks' traces, in rank order."""

    ranks: Sequence[RankTrace]

    @cached_property
    def shifts(self) -> list[float]:
        """By rank the microseconds to add to its trace's times: all then count on rank 0's clock from the earliest event on."""
        bases = [rank.trace["baseTimeNanoseconds"] for rank in self.ranks]
        own = [(base - bases[0]) / 1e3 - rank.ahead_us for base, rank in zip(bases, self.ranks, strict=True)]
        first = min(
            event["ts"] + shift
            for rank, shift in zip(self.ranks, own, strict=True)
            for event in rank.trace["traceEvents"]
            if _is_work(event)
        )
        return [shift - first for shift in own]

    @cached_property
    def spans(self) -> list[RankSpans]:
        """Of each rank."""
        return [
            read_spans((event for event in rank.trace["traceEvents"] if _is_work(event)), shift)
            for rank, shift in zip(self.ranks, self.shifts, strict=True)
        ]

    def figures(self) -> dict[str, float]:
        """What ran at the same time: see :func:`overlap`."""
        return overlap(self.spans)

    def merged(self) -> dict[str, Any]:
        """One Chrome trace: a process for each rank, with the towers' spans in a lane above its threads."""
        events: list[Event] = []
        for number, (rank, shift, spans) in enumerate(zip(self.ranks, self.shifts, self.spans, strict=True)):
            events += [
                _meta("process_name", number, 0, name=f"rank {number} on {rank.host}"),
                _meta("process_sort_index", number, 0, sort_index=number),
                _meta("thread_name", number, 0, name="towers"),
                _meta("thread_sort_index", number, 0, sort_index=-1),
            ]
            for way, by_tower in (("forward", spans.forward), ("backward", spans.backward)):
                for tower, intervals in by_tower.items():
                    events += [_span(f"{tower} {way}", number, interval) for interval in intervals]
            events += [
                _moved(event, number, shift) for event in rank.trace["traceEvents"] if _is_work(event) or _names_thread(event)
            ]
        clocks = [{"rank": n, "ahead_us": r.ahead_us, "error_us": r.error_us} for n, r in enumerate(self.ranks)]
        return {"traceEvents": events, "displayTimeUnit": "ms", "clocks": clocks, "overlap": self.figures()}

    def write(self, folder: Path) -> None:
        """``timeline.json`` for chrome://tracing or ui.perfetto.dev, and ``timeline.png``."""
        (folder / JSON_NAME).write_text(json.dumps(self.merged()))
        self.draw(folder / PICTURE_NAME)

    def draw(self, path: Path) -> None:
        """For each rank a band of the towers' forward, one of their backward and one of exchanges; light where they wait."""
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        names = list(dict.fromkeys(name for rank in self.spans for name in [*rank.forward, *rank.backward]))
        colours = {name: f"C{number}" for number, name in enumerate(names)}
        figure = Figure(figsize=(12, 1.6 + 1.0 * len(self.spans)), layout="constrained")
        axes = figure.subplots()
        for number, rank in enumerate(self.spans):
            for low, by_tower in ((number - 0.42, rank.forward), (number - 0.12, rank.backward)):
                for name, intervals in by_tower.items():
                    _band(axes, intervals, low, 0.27, colours[name], alpha=0.3)
                    _band(axes, both(rank.busy, union(intervals)), low, 0.27, colours[name])
            _band(axes, rank.exchange, number + 0.18, 0.1, _EXCHANGE)
            _band(axes, rank.busy, number + 0.3, 0.1, _BUSY)
        axes.set_yticks(range(len(self.ranks)), [f"rank {number}\n{rank.host}" for number, rank in enumerate(self.ranks)])
        axes.set_ylim(len(self.ranks) - 0.4, -0.5)
        told = ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in self.figures().items())
        axes.set(xlabel="ms", title=told)
        axes.spines[["top", "right", "left"]].set_visible(False)
        key = [Patch(color=colours[name], label=f"{name}: forward above backward, waits pale") for name in names]
        key += [Patch(color=_EXCHANGE, label="an exchange under way"), Patch(color=_BUSY, label="any operator")]
        figure.legend(handles=key, frameon=False, fontsize=8, ncols=4, loc="outside lower center")
        figure.savefig(path, dpi=120)


def _is_work(event: Event) -> bool:
    """Spans and arrows of threads and streams, without the profiler's own."""
    return event["ph"] in ("X", "s", "f") and event.get("cat") not in ("Trace", None)


def _names_thread(event: Event) -> bool:
    return event["ph"] == "M" and event["name"].startswith("thread_") and isinstance(event.get("tid"), int) and event["tid"] > 0


def _meta(kind: str, rank: int, thread: int, **arguments: object) -> Event:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": arguments}


def _span(name: str, rank: int, interval: Interval) -> Event:
    start, stop = interval
    return {"ph": "X", "cat": "tower", "name": name, "pid": rank, "tid": 0, "ts": start, "dur": stop - start}


def _moved(event: Event, rank: int, shift: float) -> Event:
    """Into the rank's process, its threads, on the one clock; arrows keep to their rank."""
    if event["ph"] == "M":
        return {**event, "pid": rank}
    moved = {**event, "pid": rank, "ts": event["ts"] + shift}
    return {**moved, "id": f"{rank}.{event['id']}"} if "id" in event else moved


def _band(axes: Any, intervals: Sequence[Interval], low: float, height: float, colour: str, alpha: float = 1.0) -> None:
    bars = [(start / 1e3, (stop - start) / 1e3) for start, stop in intervals]
    axes.broken_barh(bars, (low, height), color=colour, alpha=alpha, linewidth=0)
