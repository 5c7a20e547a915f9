"""StepTrace: torch.profiler over some steps of training, on every rank at once, gathered into a Timeline.

RankSpans: the intervals in which one rank computed or exchanged, read from torch.profiler's trace.

Timeline: the traces of all ranks on one clock, as a Chrome trace, a picture, and shares of simultaneous work.
"""

from __future__ import annotations

import bisect
import json
import socket
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torchrec.distributed.model_parallel import get_unwrapped_module

from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.observe.intervals import Interval, length, union

Event = dict[str, Any]
# Prefix of a tower's name in the trace.
TOWER = "tower "
_BACKWARD = "autograd::engine::evaluate_function: "
# Operators that compute. TorchRec's autograd functions that wait for an exchange are
# operators too, but these call the ones below to compute.
_COMPUTING = ("aten::", "fbgemm::")


@dataclass(frozen=True, kw_only=True)
class RankSpans:
    """The intervals in which one rank computed or exchanged, in microseconds of one clock.

    Args:
        forward: forward passes of each tower, waits included.
        backward: backward passes of each tower.
        busy: intervals with a computing operator; on a GPU, with a running kernel.
        exchange: intervals of collectives, including waits for other ranks.
    """

    forward: Mapping[str, Sequence[Interval]]
    backward: Mapping[str, Sequence[Interval]]
    busy: Sequence[Interval]
    exchange: Sequence[Interval]

    def towers(self) -> dict[str, list[Interval]]:
        """Returns each tower's intervals of computing."""
        spans = {}
        for name in dict.fromkeys([*self.forward, *self.backward]):
            passes = union([*self.forward.get(name, ()), *self.backward.get(name, ())])
            # A pass includes waits, in which the rank does not compute.
            spans[name] = both(self.busy, passes)
        return spans


def at_least(count: int, sets: Sequence[Sequence[Interval]]) -> list[Interval]:
    """Returns the times covered by ``count`` or more sets of intervals; intervals of one set must not overlap.

    Example:
        >>> at_least(2, [[(0, 4)], [(1, 2), (3, 6)], [(5, 7)]])
        [(1, 2), (3, 4), (5, 6)]
    """
    # At equal times ends sort before starts, so intervals that only touch do not count
    # as simultaneous.
    edges = []
    for intervals in sets:
        for start, stop in intervals:
            edges += [(start, 1), (stop, -1)]
    edges.sort()
    result = []
    level = 0
    level_start = 0.0
    for moment, change in edges:
        if level < count <= level + change:
            level_start = moment
        elif level + change < count <= level:
            result.append((level_start, moment))
        level += change
    return union(result)


def both(first: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Returns the times covered by both sets."""
    return at_least(2, [first, other])


def overlap(ranks: Sequence[RankSpans]) -> dict[str, float]:
    """Measures simultaneous work, as shares of 0 to 1.

    Returns:
        ``ranks_in_towers``: of the time with some rank computing in a tower, the share with two or more such ranks.
        ``towers_at_once``: of the same time, the share with two or more different towers, on any ranks.
        ``exchange_hidden``: of the time of a rank's exchanges, the share in which the rank computed. A share of no time
        is left out.
    """
    by_rank = []
    spans_by_tower: dict[str, list[Interval]] = {}
    hidden = 0.0
    exchange = 0.0
    for rank in ranks:
        towers_of_rank = rank.towers()
        by_rank.append(union(chain.from_iterable(towers_of_rank.values())))
        for name, spans in towers_of_rank.items():
            spans_by_tower.setdefault(name, []).extend(spans)
        hidden += length(both(rank.exchange, rank.busy))
        exchange += length(rank.exchange)
    by_tower = list(map(union, spans_by_tower.values()))
    parts = {
        "ranks_in_towers": (length(at_least(2, by_rank)), length(at_least(1, by_rank))),
        "towers_at_once": (
            length(at_least(2, by_tower)),
            length(at_least(1, by_tower)),
        ),
        "exchange_hidden": (hidden, exchange),
    }
    return {name: share / total for name, (share, total) in parts.items() if total}


def read_spans(events: Iterable[Event], shift: float = 0.0) -> RankSpans:
    """Reads the spans of one rank's trace events, and adds ``shift`` microseconds.

    A tower's backward is found by autograd's sequence numbers: a backward node has the number of the operator that made
    it. On a GPU a tower's spans are those of the kernels launched by it.
    """
    complete_events = [event for event in events if event.get("ph") == "X"]
    calls = []
    collectives = []
    computing = []
    kernels = []
    launch_times = {}
    forward: dict[str, list[Interval]] = {}
    for event in complete_events:
        name = event["name"]
        category = event.get("cat")
        if name.startswith(TOWER) and category == "user_annotation":
            calls.append(event)
            forward.setdefault(name.removeprefix(TOWER), []).append(_interval(event))
        if name.startswith(("gloo:", "shared_memory:", "nccl")):
            collectives.append(event)
        if category == "kernel":
            kernels.append(event)
        if category == "cpu_op" and name.startswith(_COMPUTING):
            computing.append(event)
        if category in ("cuda_runtime", "cuda_driver"):
            launch_times[event["args"]["correlation"]] = float(event["ts"])
    backward = _backward(complete_events, calls)
    # On a GPU operators only launch the kernels that compute. Those of NCCL exchange.
    if kernels:
        computing = [event for event in kernels if not event["name"].startswith("nccl")]
        for by_tower in (forward, backward):
            for name, spans in by_tower.items():
                by_tower[name] = _launched_in(spans, computing, launch_times)
    return RankSpans(
        forward={name: _shift(spans, shift) for name, spans in forward.items()},
        backward={name: _shift(spans, shift) for name, spans in backward.items()},
        busy=_shift(union(map(_interval, computing)), shift),
        exchange=_shift(union(map(_interval, collectives)), shift),
    )


def _interval(event: Event) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _shift(intervals: Iterable[Interval], shift: float) -> list[Interval]:
    return [(start + shift, stop + shift) for start, stop in intervals]


def _launched_in(
    intervals: Iterable[Interval],
    kernels: Iterable[Event],
    launch_times: Mapping[int, float],
) -> list[Interval]:
    """Returns the running times of the kernels launched in the intervals."""
    spans = union(intervals)
    starts = [start for start, _ in spans]
    result = []
    for kernel in kernels:
        launch_time = launch_times.get(kernel["args"]["correlation"])
        if launch_time is None:
            continue
        index = bisect.bisect_right(starts, launch_time) - 1
        if index >= 0 and launch_time <= spans[index][1]:
            result.append(_interval(kernel))
    return union(result)


def _backward(
    complete_events: Sequence[Event], calls: Sequence[Event]
) -> dict[str, list[Interval]]:
    """Returns each tower's intervals of consecutive backward nodes, unbroken by another tower's."""
    tower_of_node = _towers_of_nodes(complete_events, calls)
    nodes = [event for event in complete_events if event["name"].startswith(_BACKWARD)]
    nodes.sort(key=lambda event: float(event["ts"]))
    result: dict[str, list[Interval]] = {}
    tower_before = None
    for event in nodes:
        number = event.get("args", {}).get("Sequence number")
        tower = tower_of_node.get(number, "")
        start, stop = _interval(event)
        if tower and tower == tower_before:
            result[tower][-1] = (result[tower][-1][0], stop)
        elif tower:
            result.setdefault(tower, []).append((start, stop))
        # A node without an operator of the forward, such as one that adds up a
        # parameter's gradient, belongs to its neighbours.
        if number in tower_of_node:
            tower_before = tower
    return result


def _towers_of_nodes(
    complete_events: Sequence[Event], calls: Sequence[Event]
) -> dict[int, str]:
    """Maps the sequence number of each operator to its tower in the forward, '' for none.

    Earlier operators that make no node, and enclosing operators, have the same number: the last to begin counts.
    """
    order = sorted(calls, key=lambda event: float(event["ts"]))
    starts = [event["ts"] for event in order]
    last: dict[int, Event] = {}
    for event in complete_events:
        arguments = event.get("args", {})
        if arguments.get("Fwd thread id") == 0 and not event["name"].startswith(
            _BACKWARD
        ):
            latest = last.get(arguments["Sequence number"])
            if latest is None or latest["ts"] <= event["ts"]:
                last[arguments["Sequence number"]] = event
    tower_of_node = {}
    for number, event in last.items():
        index = bisect.bisect_right(starts, event["ts"]) - 1
        tower_of_node[number] = ""
        if index >= 0:
            call = order[index]
            if event["ts"] <= call["ts"] + call["dur"] and event["tid"] == call["tid"]:
                tower_of_node[number] = call["name"].removeprefix(TOWER)
    return tower_of_node


JSON_NAME = "timeline.json"
PICTURE_NAME = "timeline.png"
_EXCHANGE = "#8a8a8a"
_BUSY = "#b9c4cf"


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """The trace of torch.profiler on one rank.

    Args:
        host: name of the rank's host.
        trace: the Chrome trace.
        ahead_us: microseconds by which this rank's clock is ahead of rank 0's.
        error_us: greatest error of ``ahead_us``, microseconds.
    """

    host: str
    trace: Mapping[str, Any]
    ahead_us: float = 0.0
    error_us: float = 0.0

    @cached_property
    def work(self) -> list[Event]:
        """The spans and arrows of threads and streams, without the profiler's own."""
        events = self.trace["traceEvents"]
        return [
            event
            for event in events
            if event["ph"] in ("X", "s", "f")
            and event.get("cat") not in ("Trace", None)
        ]


@dataclass(frozen=True)
class Timeline:
    """The ranks' traces, in rank order."""

    ranks: Sequence[RankTrace]

    @cached_property
    def shifts(self) -> list[float]:
        """The microseconds to add to each rank's times, for rank 0's clock with the earliest event at 0."""
        first_base = self.ranks[0].trace["baseTimeNanoseconds"]
        shifts = []
        starts: list[float] = []
        for rank in self.ranks:
            # Times of events count from the base of their own trace.
            shift = (
                rank.trace["baseTimeNanoseconds"] - first_base
            ) / 1e3 - rank.ahead_us
            shifts.append(shift)
            starts += [event["ts"] + shift for event in rank.work]
        first = min(starts)
        return [shift - first for shift in shifts]

    @cached_property
    def spans(self) -> list[RankSpans]:
        """The spans of each rank."""
        return [
            read_spans(rank.work, shift)
            for rank, shift in zip(self.ranks, self.shifts, strict=True)
        ]

    def figures(self) -> dict[str, float]:
        """Returns the shares of simultaneous work, see :func:`overlap`."""
        return overlap(self.spans)

    def merged(self) -> dict[str, Any]:
        """Merges the ranks into one Chrome trace: a process per rank, with its towers' spans above its threads."""
        events: list[Event] = []
        clocks = []
        for number, (rank, shift, spans) in enumerate(
            zip(self.ranks, self.shifts, self.spans, strict=True)
        ):
            clocks.append(
                {"rank": number, "ahead_us": rank.ahead_us, "error_us": rank.error_us}
            )
            events += [
                _metadata_event(
                    "process_name", number, name=f"rank {number} on {rank.host}"
                ),
                _metadata_event("process_sort_index", number, sort_index=number),
                _metadata_event("thread_name", number, name="towers"),
                _metadata_event("thread_sort_index", number, sort_index=-1),
            ]
            for direction, by_tower in (
                ("forward", spans.forward),
                ("backward", spans.backward),
            ):
                for tower, intervals in by_tower.items():
                    event = {
                        "ph": "X",
                        "cat": "tower",
                        "name": f"{tower} {direction}",
                        "pid": number,
                        "tid": 0,
                    }
                    for start, stop in intervals:
                        events.append({**event, "ts": start, "dur": stop - start})
            for event in (
                *filter(_is_thread_name, rank.trace["traceEvents"]),
                *rank.work,
            ):
                events.append(_shift_event(event, number, shift))
        return {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "clocks": clocks,
            "overlap": self.figures(),
        }

    def write(self, folder: Path) -> None:
        """Writes ``timeline.json`` for chrome://tracing or ui.perfetto.dev, and ``timeline.png``."""
        (folder / JSON_NAME).write_text(json.dumps(self.merged()))
        self.draw(folder / PICTURE_NAME)

    def draw(self, path: Path) -> None:
        """Draws bands of forwards, backwards, exchanges and all operators for each rank; waits are pale."""
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        # A tower has matplotlib's next colour on all ranks, whichever rank runs it
        # first.
        colours: dict[str, str] = {}
        for rank in self.spans:
            for name in (*rank.forward, *rank.backward):
                colours.setdefault(name, f"C{len(colours)}")
        figure = Figure(figsize=(12, 1.6 + 1.0 * len(self.spans)), layout="constrained")
        axes = figure.subplots()
        for number, rank in enumerate(self.spans):
            for low, by_tower in (
                (number - 0.42, rank.forward),
                (number - 0.12, rank.backward),
            ):
                for name, intervals in by_tower.items():
                    _band(axes, intervals, low, 0.27, colours[name], alpha=0.3)
                    _band(
                        axes,
                        both(rank.busy, union(intervals)),
                        low,
                        0.27,
                        colours[name],
                    )
            _band(axes, rank.exchange, number + 0.18, 0.1, _EXCHANGE)
            _band(axes, rank.busy, number + 0.3, 0.1, _BUSY)
        labels = [
            f"rank {number}\n{trace.host}" for number, trace in enumerate(self.ranks)
        ]
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.4, -0.5)
        shares = [
            f"{name.replace('_', ' ')} {share:.0%}"
            for name, share in self.figures().items()
        ]
        axes.set(xlabel="ms", title=", ".join(shares))
        axes.spines[["top", "right", "left"]].set_visible(False)
        key = []
        for name, colour in colours.items():
            key.append(
                Patch(color=colour, label=f"{name}: forward above backward, waits pale")
            )
        key += [
            Patch(color=_EXCHANGE, label="an exchange under way"),
            Patch(color=_BUSY, label="any operator"),
        ]
        figure.legend(
            handles=key, frameon=False, fontsize=8, ncols=4, loc="outside lower center"
        )
        figure.savefig(path, dpi=120)


def _is_thread_name(event: Event) -> bool:
    thread = event.get("tid")
    is_name = event["ph"] == "M" and event["name"].startswith("thread_")
    return is_name and isinstance(thread, int) and thread > 0


def _metadata_event(kind: str, rank: int, **arguments: object) -> Event:
    return {"ph": "M", "name": kind, "pid": rank, "tid": 0, "args": arguments}


def _shift_event(event: Event, rank: int, shift: float) -> Event:
    """Moves an event to the rank's process and to the common clock; arrows stay within their rank."""
    if event["ph"] == "M":
        return {**event, "pid": rank}
    shifted = {**event, "pid": rank, "ts": event["ts"] + shift}
    if "id" in event:
        shifted["id"] = f"{rank}.{event['id']}"
    return shifted


def _band(
    axes: Any,
    intervals: Sequence[Interval],
    low: float,
    height: float,
    colour: str,
    alpha: float = 1.0,
) -> None:
    bars = [(start / 1e3, (stop - start) / 1e3) for start, stop in intervals]
    axes.broken_barh(bars, (low, height), color=colour, alpha=alpha, linewidth=0)


# Steps before the trace: the pipeline fills, buffers are allocated.
SKIP = 5
# Most steps to trace: rank 0 holds the traces of all ranks.
MOST = 100
# The fastest of these rounds is hardly disturbed by other processes.
_CLOCK_ROUNDS = 10


class StepTrace:
    """Profiles ``steps`` steps after the first few, on all ranks: profiling only some would deadlock their exchange.

    Args:
        model: model; its towers are the modules of its ``towers``, or its children without that attribute.
        runtime: rank and device of this process.
        steps: number of steps to profile.
        done: called on rank 0 with the timeline.
    """

    def __init__(
        self,
        model: nn.Module,
        runtime: Runtime,
        steps: int,
        done: Callable[[Timeline], None] | None = None,
    ) -> None:
        self._model = model
        self._runtime = runtime
        self._on_timeline = done
        self._first = SKIP
        self._last = SKIP + steps
        self._steps_seen = 0
        self._handles: list[Any] = []
        self._clock = (0.0, 0.0)
        self._profile: Any = None

    def step(self) -> dict[str, float] | None:
        """Counts a step; returns the overlap figures after the last traced step, the same on every rank."""
        self._steps_seen += 1
        if self._steps_seen == self._first:
            self._start()
        if self._steps_seen == self._last:
            return self._stop()
        return None

    def _start(self) -> None:
        self._clock = clock_ahead(self._runtime)
        for name, tower in towers(self._model):
            self._handles += _named_in_trace(name, tower)
        activities = [ProfilerActivity.CPU]
        if self._runtime.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        # All traces begin with the same step, and no rank waits in it for one that
        # starts its profiler.
        dist.barrier()
        self._profile.start()

    def _stop(self) -> dict[str, float]:
        if self._runtime.device.type == "cuda":
            torch.cuda.synchronize(self._runtime.device)
        self._profile.stop()
        for handle in self._handles:
            handle.remove()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            # Traces are text of many MB per rank: the fastest compression already
            # shrinks them to a fraction.
            local = (
                socket.gethostname(),
                *self._clock,
                zlib.compress(path.read_bytes(), 1),
            )
        self._profile = None
        ranks: list[Any] | None = None
        if self._runtime.is_main:
            ranks = [None] * self._runtime.world_size
        dist.gather_object(local, ranks)
        figures: list[Any] = [None]
        if ranks is not None:
            traces = []
            for host, ahead, error, packed in ranks:
                trace = json.loads(zlib.decompress(packed))
                traces.append(
                    RankTrace(host=host, ahead_us=ahead, error_us=error, trace=trace)
                )
            timeline = Timeline(traces)
            figures = [timeline.figures()]
            if self._on_timeline is not None:
                self._on_timeline(timeline)
        dist.broadcast_object_list(figures, device=self._runtime.device)
        return figures[0]  # type: ignore[no-any-return]


def check_fits(traced: int, steps: int) -> None:
    """Checks the number of steps to trace.

    Raises:
        ValueError: a run has fewer steps after the first few, or rank 0 cannot hold so many of all ranks.
    """
    if traced > MOST:
        raise ValueError(
            f"train.trace_steps={traced}: must be {MOST} or fewer; each takes about half a MB of the timeline per rank"
        )
    if traced and SKIP + traced > steps:
        remedy = "train for longer"
        if steps > SKIP:
            remedy = f"trace {steps - SKIP} or fewer"
        raise ValueError(
            f"train.trace_steps={traced}: the run has {steps} steps, of which the first {SKIP} are not traced; {remedy}"
        )


def towers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the modules with spans in a timeline, by name."""
    unwrapped = get_unwrapped_module(model)
    return list(getattr(unwrapped, "towers", unwrapped).named_children())


def _named_in_trace(name: str, tower: nn.Module) -> list[Any]:
    """Registers hooks to record each forward of the tower as a span; returns their handles."""
    open_spans: list[Any] = []

    def enter(*_: Any) -> None:
        open_spans.append(record_function(TOWER + name))
        open_spans[-1].__enter__()

    def leave(*_: Any) -> None:
        open_spans.pop().__exit__(None, None, None)

    return [
        tower.register_forward_pre_hook(enter),
        tower.register_forward_hook(leave, always_call=True),
    ]


def clock_ahead(runtime: Runtime) -> tuple[float, float]:
    """Returns the microseconds by which this rank's clock is ahead of rank 0's, and their greatest error.

    Each rank in turn answers rank 0 with its time. This time is assumed to be halfway between question and answer. The
    fastest of several rounds counts, and half its duration is the error. A difference within the error counts as 0,
    because the ranks of a host have one clock.
    """
    answers = [(0.0, 0.0)]
    for other in range(1, runtime.world_size):
        if runtime.is_main:
            rounds = [_ask_clock(other, runtime.device) for _ in range(_CLOCK_ROUNDS)]
            answers.append(min(rounds, key=lambda answer: answer[1]))
        elif runtime.rank == other:
            for _ in range(_CLOCK_ROUNDS):
                _answer_clock(runtime.device)
    clocks: list[Any] = [answers]
    dist.broadcast_object_list(clocks, device=runtime.device)
    ahead, error = clocks[0][runtime.rank]
    if abs(ahead) <= error:
        ahead = 0.0
    return ahead, error


def _ask_clock(other: int, device: torch.device) -> tuple[float, float]:
    stamp = torch.zeros(1, dtype=torch.int64, device=device)
    start = time.time_ns()
    dist.send(stamp, other)
    dist.recv(stamp, other)
    their_time = int(stamp)
    stop = time.time_ns()
    return (their_time - (start + stop) / 2) / 1e3, (stop - start) / 2e3


def _answer_clock(device: torch.device) -> None:
    stamp = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(stamp, 0)
    # On a GPU this waits for its arrival.
    int(stamp)
    stamp.fill_(time.time_ns())
    dist.send(stamp, 0)
