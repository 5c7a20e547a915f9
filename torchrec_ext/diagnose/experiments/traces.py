"""From what ranks measured to facts: traced steps of all ranks matched call by call. Pure functions."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torchrec_ext.needs_torch  # noqa: F401

from torchrec_ext.diagnose.experiments.collectives import Call
from torchrec_ext.diagnose.experiments.loop import Span
from torchrec_ext.diagnose.facts import CollectiveFacts, Facts, RankFacts, Round

STEP_PARTS = ("forward", "backward", "optimizer")


class Traced(NamedTuple):
    """A traced iteration on one rank.

    Args:
        data: span in which the batch was made.
        step: span of the step.
        parts: backwards and optimizers' steps inside of it.
        calls: collectives.
        ids: ids in the batch's lists.
    """

    data: Span
    step: Span
    parts: Sequence[Span]
    calls: Sequence[Call]
    ids: int


class Measured(NamedTuple):
    """A rank's measures: its own facts and rounds, its traced steps, and by how much its clock is ahead."""

    facts: Facts
    rounds: Sequence[Round]
    traced: Sequence[Traced]
    rank: RankFacts
    offset: float


class Meeting(NamedTuple):
    """A collective of a step.

    Args:
        calls: the call of each rank of its group.
        last: moment of the last of these, by rank 0's wall clock.
    """

    calls: dict[int, Call]
    last: float

    @property
    def first_call(self) -> Call:
        """The call of the group's first rank."""
        return next(iter(self.calls.values()))

    def wait_s(self, rank: int, offset: float) -> float:
        """Returns the seconds for which a rank waits for the last one; its clock is ahead by ``offset``."""
        arrival: float = self.calls[rank].begin.wall
        return max(0.0, self.last + offset - arrival)


def _matched(steps: Sequence[Traced], offsets: Sequence[float]) -> list[Meeting]:
    """Matches the calls of all ranks in one step: the n-th call of a group is the same collective on each rank."""
    calls: dict[tuple[tuple[int, ...], int], dict[int, Call]] = {}
    for rank, step in enumerate(steps):
        numbers: Counter[tuple[int, ...]] = Counter()
        for call in step.calls:
            calls.setdefault((call.ranks, numbers[call.ranks]), {})[rank] = call
            numbers[call.ranks] += 1
    matched = []
    for (ranks, _), by_rank in calls.items():
        # A rank that called fewer has left the loop: what it did not call cannot be
        # matched.
        if len(by_rank) == len(ranks):
            last = max(
                call.begin.wall - offsets[rank] for rank, call in by_rank.items()
            )
            matched.append(Meeting(by_rank, last))
    return sorted(matched, key=lambda each: each.last)


def _inside(step: Traced, call: Call) -> str:
    for part in step.parts:
        if part.begin.wall <= call.begin.wall <= part.end.wall:
            return part.name
    # What is neither backward nor an optimizer counts as forward, as in a round of one
    # process.
    return "forward"


def parted(
    traced: Sequence[Sequence[Traced]], offsets: Sequence[float] = ()
) -> list[list[Round]]:
    """Returns the seconds of each traced step of each rank by part: see :class:`RankFacts`.

    Args:
        traced: traced iterations of each rank, the same on all of them.
        offsets: seconds by which each rank's wall clock is ahead.
    """
    offsets = offsets or [0.0] * len(traced)
    by_rank: list[list[Round]] = [[] for _ in traced]
    for steps in zip(*traced, strict=True):
        waits = [0.0] * len(steps)
        for meeting in _matched(steps, offsets):
            for rank in meeting.calls:
                waits[rank] += meeting.wait_s(rank, offsets[rank])
        for rank, step in enumerate(steps):
            parts = dict.fromkeys(STEP_PARTS, 0.0)
            for part in step.parts:
                parts[part.name] += part.seconds
            # All that is neither backward nor an optimizer.
            parts["forward"] = step.step.seconds - sum(parts.values())
            inside = 0.0
            # Collectives count by themselves, and not for the part that calls them.
            for call in step.calls:
                seconds = call.end.own_s - call.begin.own_s
                parts[_inside(step, call)] -= seconds
                inside += seconds
            wait = min(waits[rank], inside)
            wall = step.step.end.wall - step.data.begin.wall
            running = step.step.end.own_s - step.data.begin.own_s
            by_rank[rank].append(
                {
                    "data": step.data.seconds,
                    **parts,
                    "wait": wait,
                    "exchange": inside - wait,
                    "queue": max(0.0, wall - running),
                }
            )
    return by_rank


def collectives_of(
    traced: Sequence[Sequence[Traced]], offsets: Sequence[float]
) -> list[CollectiveFacts]:
    """Returns the collectives of a step, each by its medians over the traced steps."""
    all_steps = list(zip(*traced, strict=True))
    by_kind: dict[tuple[Any, ...], list[list[Meeting]]] = {}
    first_steps: dict[tuple[Any, ...], Sequence[Traced]] = {}
    for steps in all_steps:
        meetings_of_step = _matched(steps, offsets)
        kind = tuple(
            (meeting.first_call.name, meeting.first_call.ranks)
            for meeting in meetings_of_step
        )
        by_kind.setdefault(kind, []).append(meetings_of_step)
        first_steps.setdefault(kind, steps)
    if not by_kind:
        return []
    # A check in every hundredth step is none of a step's collectives.
    usual = max(by_kind, key=lambda kind: len(by_kind[kind]))
    first = first_steps[usual]
    collectives = []
    for meetings in zip(*by_kind[usual], strict=True):
        call = meetings[0].first_call
        ranks = list(meetings[0].calls)
        exchange = []
        sizes = []
        waits = []
        for meeting in meetings:
            end = max(
                each.end.wall - offsets[rank] for rank, each in meeting.calls.items()
            )
            exchange.append(end - meeting.last)
            sizes.append([float(meeting.calls[rank].bytes) for rank in ranks])
            waits.append([meeting.wait_s(rank, offsets[rank]) for rank in ranks])
        collectives.append(
            CollectiveFacts(
                name=call.name,
                line=call.line,
                span=_inside(first[ranks[0]], call),
                ranks=ranks,
                bytes=list(map(statistics.fmean, zip(*sizes, strict=True))),
                exchange_s=max(0.0, statistics.median(exchange)),
                waits_s=list(map(statistics.median, zip(*waits, strict=True))),
            )
        )
    return collectives


# Entries of a round to which the exchange of ranks is not added.
_AS_MEASURED = ("data", "sleep", "op", "bare", "sync", "gc")


def common_rounds(by_rank: Sequence[Sequence[Round]]) -> list[Round]:
    """Returns the rounds of a typical rank, see :class:`Facts`, from those of each rank.

    The step is what an iteration takes beyond a typical batch; ranks that wait for each other take the same. A changed
    step was measured without exchange, and gets what the step takes beyond its own such time: its exchange stays.
    """
    typical: list[Round] = []
    for rounds in zip(*by_rank, strict=True):
        low = {}
        for name in rounds[0]:
            if all(name in each for each in rounds):
                low[name] = statistics.median_low([each[name] for each in rounds])
        each = {name: low[name] for name in _AS_MEASURED if name in low}
        # The least: a rank that stood in the run queue does not see that itself, and
        # the others waited for it.
        each["step"] = max(
            min(other["data"] + other["step"] for other in rounds) - low["data"], 0.0
        )
        # Traced steps complete each collective where it is called, so they are longer
        # than those of the loop.
        traced_s = sum(low[f"traced_{name}"] for name in STEP_PARTS)
        scale = min(1.0, each["step"] / max(traced_s, 1e-12))
        for name in STEP_PARTS:
            each[name] = low[f"traced_{name}"] * scale
        exposed = max(0.0, each["step"] - sum(each[name] for name in STEP_PARTS))
        each["exchange"] = min(exposed, low["traced_exchange"])
        each["wait"] = exposed - each["exchange"]
        beyond = max(0.0, each["step"] - low.get("ready", each["step"]))
        for name, seconds in low.items():
            if name not in each and not name.startswith("traced_"):
                each[name] = seconds + beyond
        typical.append(each)
    return typical


def facts_of_ranks(
    by_rank: Sequence[Measured], latency: float, link_bytes: int
) -> Facts:
    """Merges the measures of all ranks into facts."""
    offsets = [each.offset for each in by_rank]
    traced = [each.traced for each in by_rank]
    ranks = []
    for each, steps in zip(by_rank, parted(traced, offsets), strict=True):
        ranks.append(dataclasses.replace(each.rank, steps=steps))
    if all(traced):
        lanes = _lanes([steps[-1] for steps in traced], offsets)
        for number, (spans, steps_of_rank) in enumerate(
            zip(lanes, traced, strict=True)
        ):
            ids = statistics.fmean([step.ids for step in steps_of_rank])
            ranks[number] = dataclasses.replace(ranks[number], spans=spans, ids=ids)
    first = by_rank[0].facts
    notes = [*first.notes]
    for each in by_rank[1:]:
        notes += [
            f"rank {each.rank.rank}: {note}"
            for note in each.facts.notes
            if note not in notes
        ]
    return dataclasses.replace(
        first,
        ranks=ranks,
        collectives=collectives_of(traced, offsets),
        latency_s=latency,
        link_bytes=link_bytes,
        notes=notes,
    )


def _lanes(
    steps: Sequence[Traced], offsets: Sequence[float]
) -> list[list[tuple[str, float, float]]]:
    """Returns the spans of each rank's step, for a chart."""
    zero = min(
        step.data.begin.wall - offset
        for step, offset in zip(steps, offsets, strict=True)
    )
    matched = _matched(steps, offsets)
    lanes = []
    for rank, (step, offset) in enumerate(zip(steps, offsets, strict=True)):
        parts = sorted(step.parts, key=lambda each: each.begin.wall)
        spans = [("data", step.data.begin.wall, step.data.end.wall)]
        before = step.step.begin.wall
        for each in parts:
            spans += [
                ("forward", before, each.begin.wall),
                (each.name, each.begin.wall, each.end.wall),
            ]
            before = max(before, each.end.wall)
        spans.append(("forward", before, step.step.end.wall))
        for meeting in matched:
            if rank in meeting.calls:
                call = meeting.calls[rank]
                arrival = min(
                    max(call.begin.wall, meeting.last + offset), call.end.wall
                )
                spans += [
                    ("wait", call.begin.wall, arrival),
                    ("exchange", arrival, call.end.wall),
                ]
        lane = []
        for name, start, end in spans:
            # Shorter than a microsecond there is nothing to see.
            if end - start > 1e-6:
                lane.append((name, start - offset - zero, end - offset - zero))
        lanes.append(lane)
    return lanes
