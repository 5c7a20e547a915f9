"""From what ranks measured to facts: traced steps of all ranks matched call by call. Pure functions."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torchrec_ext.needs_torch  # noqa: F401

from torchrec_ext.diagnose.experiments.collectives import Call, calls_by_group
from torchrec_ext.diagnose.experiments.loop import Span
from torchrec_ext.diagnose.facts import CollectiveFacts, Facts, RankFacts, Round, lower_median

PARTS = ("forward", "backward", "optimizer")


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


def _matched(steps: Sequence[Traced], offsets: Sequence[float]) -> list[tuple[Call, list[tuple[int, Call]], float]]:
    """Returns the collectives of one step of all ranks: a call, that of each rank of its group, the last arrival."""
    groups: dict[tuple[int, ...], list[list[tuple[int, Call]]]] = {}
    for rank, step in enumerate(steps):
        for ranks, calls in calls_by_group(step.calls).items():
            entries = groups.setdefault(ranks, [[] for _ in calls])
            for index, call in enumerate(calls[: len(entries)]):
                entries[index].append((rank, call))
    matched: list[tuple[Call, list[tuple[int, Call]], float]] = []
    for ranks, entries in groups.items():
        for same in entries:
            if len(same) == len(ranks):
                last = max(call.begin.wall - offsets[rank] for rank, call in same)
                matched.append((same[0][1], same, last))
    return sorted(matched, key=lambda each: each[2])


def _inside(step: Traced, call: Call) -> str:
    return next((each.name for each in step.parts if each.begin.wall <= call.begin.wall <= each.end.wall), "forward")


def parted(traced: Sequence[Sequence[Traced]], offsets: Sequence[float] = ()) -> list[list[Round]]:
    """Returns the seconds of each traced step of each rank by part: see :class:`RankFacts`.

    Args:
        traced: traced iterations of each rank, the same on all of them.
        offsets: seconds by which each rank's wall clock is ahead.
    """
    offsets = offsets or [0.0] * len(traced)
    by_rank: list[list[Round]] = [[] for _ in traced]
    for steps in zip(*traced, strict=True):
        waits = [0.0] * len(steps)
        for _, calls, last in _matched(steps, offsets):
            for rank, call in calls:
                waits[rank] += max(0.0, last + offsets[rank] - call.begin.wall)
        for rank, step in enumerate(steps):
            parts = {name: sum(each.seconds for each in step.parts if each.name == name) for name in PARTS}
            parts["forward"] = step.step.seconds - sum(parts.values())
            inside = 0.0
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


def collectives_of(traced: Sequence[Sequence[Traced]], offsets: Sequence[float]) -> list[CollectiveFacts]:
    """Returns the collectives of a step, each by its medians over the traced steps."""
    by_step = [(_matched(steps, offsets), steps) for steps in zip(*traced, strict=True)]
    kinds = [tuple((first.name, first.ranks) for first, _, _ in matched) for matched, _ in by_step]
    if not kinds:
        return []
    usual = max(kinds, key=kinds.count)  # a check every hundredth step is none of a step's collectives
    by_step = [each for each, kind in zip(by_step, kinds, strict=True) if kind == usual]
    collectives = []
    for index in range(len(usual)):
        same_call = [(matched[index], steps) for matched, steps in by_step]
        (first, calls, _), steps = same_call[0]
        ranks = [rank for rank, _ in calls]
        exchange, waits, sizes = [], [], []
        for (_, same, last), _ in same_call:
            exchange.append(max(call.end.wall - offsets[rank] for rank, call in same) - last)
            waits.append([max(0.0, last + offsets[rank] - call.begin.wall) for rank, call in same])
            sizes.append([float(call.bytes) for _, call in same])
        collectives.append(
            CollectiveFacts(
                name=first.name,
                line=first.line,
                span=_inside(steps[ranks[0]], calls[0][1]),
                ranks=ranks,
                bytes=[statistics.fmean(each) for each in zip(*sizes, strict=True)],
                exchange_s=max(0.0, statistics.median(exchange)),
                waits_s=[statistics.median(each) for each in zip(*waits, strict=True)],
            )
        )
    return collectives


def common_rounds(by_rank: Sequence[Sequence[Round]]) -> list[Round]:
    """Returns the rounds of a typical rank, see :class:`Facts`, from those of each rank.

    The step is what an iteration takes beyond a typical batch; ranks that wait for each other take the same. A changed
    step was measured without exchange, and gets what the step takes beyond its own such time: its exchange stays.
    """
    typical: list[Round] = []
    for rounds in zip(*by_rank, strict=True):
        names = [name for name in rounds[0] if all(name in each for each in rounds)]
        low = {name: lower_median([each[name] for each in rounds]) for name in names}
        each = {name: low[name] for name in ("data", "sleep", "op", "bare", "sync", "gc") if name in low}
        # The least: a rank that stood in the run queue does not see that itself, and the others waited for it.
        each["step"] = max(min(other["data"] + other["step"] for other in rounds) - low["data"], 0.0)
        parts = {name: low[f"traced_{name}"] for name in PARTS}
        scale = min(1.0, each["step"] / max(sum(parts.values()), 1e-12))
        each |= {name: seconds * scale for name, seconds in parts.items()}
        exposed = max(0.0, each["step"] - sum(each[name] for name in PARTS))
        each["exchange"] = min(exposed, low["traced_exchange"])
        each["wait"] = exposed - each["exchange"]
        beyond = max(0.0, each["step"] - low.get("ready", each["step"]))
        for name in names:
            if name not in each and not name.startswith("traced_"):
                each[name] = low[name] + beyond
        typical.append(each)
    return typical


def facts_of_ranks(by_rank: Sequence[Measured], latency: float, link_bytes: int) -> Facts:
    """Merges the measures of all ranks into facts."""
    offsets = [each.offset for each in by_rank]
    traced = [each.traced for each in by_rank]
    steps = parted(traced, offsets)
    lanes = _lanes([each[-1] for each in traced], offsets) if all(traced) else [()] * len(by_rank)
    ranks = [
        dataclasses.replace(
            each.rank,
            steps=steps[number],
            spans=lanes[number],
            ids=statistics.fmean([step.ids for step in each.traced]) if each.traced else 0.0,
        )
        for number, each in enumerate(by_rank)
    ]
    first = by_rank[0].facts
    notes = [*first.notes]
    for each in by_rank[1:]:
        notes += [f"rank {each.rank.rank}: {note}" for note in each.facts.notes if note not in notes]
    return dataclasses.replace(
        first,
        ranks=ranks,
        collectives=collectives_of(traced, offsets),
        latency_s=latency,
        link_bytes=link_bytes,
        notes=notes,
    )


def _lanes(steps: Sequence[Traced], offsets: Sequence[float]) -> list[list[tuple[str, float, float]]]:
    """Returns the spans of each rank's step, for a chart."""
    zero = min(step.data.begin.wall - offset for step, offset in zip(steps, offsets, strict=True))
    matched = _matched(steps, offsets)
    lanes = []
    for rank, (step, offset) in enumerate(zip(steps, offsets, strict=True)):
        parts = sorted(step.parts, key=lambda each: each.begin.wall)
        spans = [("data", step.data.begin.wall, step.data.end.wall)]
        before = step.step.begin.wall
        for each in parts:
            spans += [("forward", before, each.begin.wall), (each.name, each.begin.wall, each.end.wall)]
            before = max(before, each.end.wall)
        spans.append(("forward", before, step.step.end.wall))
        for _, calls, last in matched:
            for other, call in calls:
                if other == rank:
                    arrived = min(max(call.begin.wall, last + offset), call.end.wall)
                    spans += [("wait", call.begin.wall, arrived), ("exchange", arrived, call.end.wall)]
        lanes.append([(name, a - offset - zero, b - offset - zero) for name, a, b in spans if b - a > 1e-6])
    return lanes
