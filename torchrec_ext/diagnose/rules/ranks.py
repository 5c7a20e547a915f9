"""Rules about ranks that the others wait for, and about what ranks look up. Each is a pure function of :class:`Facts`.

Which rank is slow is told by the seconds in which it computes, by its own clock: not by waits, which a full machine
makes as well.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from torchrec_ext.diagnose.facts import Facts, Gain, RankFacts, Round, paired_gain
from torchrec_ext.diagnose.findings import (
    Change,
    Finding,
    Remedy,
    finding_of_cost,
    in_ms,
)
from torchrec_ext.observe.counts import TableFacts

_UNEVEN = 1.3  # times the mean of all ranks
_ONE_SPAN = 0.7  # share of a rank's excess that lies in one span of its step where that one is named
_CONSTANT = (
    0.75  # share of steps in which one rank is the slowest where it is always the same
)
SPANS = {
    "data": "input",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
}


def _computed(each: Round) -> float:
    return sum(each[name] for name in SPANS)


def _iterations(facts: Facts) -> list[float]:
    """Returns the seconds of each traced iteration: the least of the ranks, which wait for each other."""
    iterations = []
    for step in zip(*(each.steps for each in facts.ranks), strict=True):
        # The least, because a rank that stood in the run queue took longer without
        # knowing it.
        iterations.append(
            min(_computed(each) + each["wait"] + each["exchange"] for each in step)
        )
    return iterations


class Excess(NamedTuple):
    """The longer computing of one rank in one span, beside a typical other rank."""

    rank: int
    span: str
    seconds: float
    others: float


def _excess(facts: Facts, span: str) -> Excess:
    """Returns the slowest rank of a span, and by how much."""
    medians = {each.rank: each.median(span) for each in facts.ranks}
    slowest = max(medians, key=lambda rank: medians[rank])
    others = statistics.median(
        [seconds for rank, seconds in medians.items() if rank != slowest]
    )
    return Excess(slowest, span, max(0.0, medians[slowest] - others), others)


def _without(facts: Facts, seconds: float) -> Gain:
    """Returns the speed-up if ranks waited `seconds` less for the slow one."""
    # Something of an iteration always stays.
    return paired_gain(
        [
            total / max(total - min(seconds, 0.97 * total), 1e-9)
            for total in _iterations(facts)
        ]
    )


def _of_iteration(facts: Facts, seconds: float) -> float:
    return min(1.0, seconds / max(statistics.median(_iterations(facts)), 1e-12))


def rank_name(facts: Facts, rank: int) -> str:
    """Returns the name of a rank in sentences, with its host if there are several."""
    hosts = [each.host for each in facts.ranks]
    if len(set(hosts)) == 1:
        return f"rank {rank}"
    return f"rank {rank} (on {hosts[rank]})"


def _waits(facts: Facts, rank: int) -> str:
    others = [each.median("wait") for each in facts.ranks if each.rank != rank]
    return f"the other ranks wait {in_ms(statistics.median(others))} of a step"


def _always(facts: Facts, excess: Excess) -> bool:
    """Whether one rank is the slowest in a span in nearly all steps."""
    seconds = [[each[excess.span] for each in rank.steps] for rank in facts.ranks]
    slowest = [step.index(max(step)) for step in zip(*seconds, strict=True)]
    return slowest.count(excess.rank) > _CONSTANT * len(slowest)


def _straggler(
    facts: Facts,
    excess: Excess,
    cause: str,
    title: str,
    advice: str,
    evidence: str = "",
) -> Finding | None:
    """Makes a finding of a rank with one slow span; by default the evidence is the span's time."""
    if excess.seconds < 0.3 * excess.others or not _always(facts, excess):
        return None
    name = rank_name(facts, excess.rank)
    evidence = evidence or (
        f"{name} takes {in_ms(excess.others + excess.seconds)} for its {SPANS[excess.span]}, the others "
        f"{in_ms(excess.others)}"
    )
    remedy = Remedy(
        name=f"{name} as fast as the others",
        lines=(advice,),
        gain=_without(facts, excess.seconds),
        changes=Change.EXACT,
        basis="measured: the same steps without what this rank takes longer",
        is_measured=True,
    )
    return finding_of_cost(
        cause,
        f"{name} {title}, and the others wait for it",
        [f"{evidence}; {_waits(facts, excess.rank)}"],
        [remedy],
        _of_iteration(facts, excess.seconds),
        ranks=[excess.rank],
    )


def straggler_input(facts: Facts) -> Finding | None:
    """One rank's batches take longer."""
    advice = "look at what this rank's loader reads: its shard of the files, its disk, its share of long rows"
    return _straggler(
        facts, _excess(facts, "data"), "straggler_input", "is slow in its input", advice
    )


def _in_step(facts: Facts) -> tuple[Excess, float]:
    """Returns the largest excess of a rank in a span of the step, and that in its whole step."""
    spans = [_excess(facts, span) for span in ("forward", "backward", "optimizer")]
    most = max(spans, key=lambda each: each.seconds)
    return most, sum(each.seconds for each in spans if each.rank == most.rank)


def _explained(facts: Facts, rank: int) -> bool:
    """Whether a rank's look-ups explain its slow step."""
    finding = imbalanced_table(facts) or uneven_lists(facts)
    return finding is not None and finding.ranks == (rank,)


def _straggler_in(facts: Facts, span: str) -> Finding | None:
    most, whole = _in_step(facts)
    if (
        most.span != span
        or most.seconds < _ONE_SPAN * whole
        or _explained(facts, most.rank)
    ):
        return None
    advice = (
        f"look at what this rank alone does in its {span}: hooks, logging, a debug "
        "branch, other rows than the rest"
    )
    return _straggler(
        facts, most, f"straggler_{span}", f"is slow in its {span} only", advice
    )


def straggler_forward(facts: Facts) -> Finding | None:
    """One rank's forward takes longer, and no other span of its step."""
    return _straggler_in(facts, "forward")


def straggler_backward(facts: Facts) -> Finding | None:
    """One rank's backward takes longer, and no other span of its step."""
    return _straggler_in(facts, "backward")


def straggler_optimizer(facts: Facts) -> Finding | None:
    """One rank's optimizer takes longer, and no other span of its step."""
    return _straggler_in(facts, "optimizer")


def slow_rank(facts: Facts) -> Finding | None:
    """One rank computes longer in all of its step."""
    most, whole = _in_step(facts)
    if most.seconds >= _ONE_SPAN * whole or _explained(facts, most.rank):
        return None
    others = statistics.median(
        [_step_of(each) for each in facts.ranks if each.rank != most.rank]
    )
    advice = "look at this rank's host: other programs on its cores, its clock rate, its memory; or leave the host out"
    evidence = (
        f"{rank_name(facts, most.rank)} computes {in_ms(_step_of(facts.ranks[most.rank]))} of a step, in forward, "
        f"backward and optimizer alike, the others {in_ms(others)}"
    )
    excess = Excess(most.rank, most.span, whole, others)
    return _straggler(facts, excess, "slow_rank", "computes slowly", advice, evidence)


def _step_of(rank: RankFacts) -> float:
    return sum(rank.median(name) for name in ("forward", "backward", "optimizer"))


def rotating_straggler(facts: Facts) -> Finding | None:
    """The slow rank is another one in each step."""
    steps = list(zip(*(each.steps for each in facts.ranks), strict=True))
    computed = [list(map(_computed, step)) for step in steps]
    slowest = [step.index(max(step)) for step in computed]
    counts = [slowest.count(rank) for rank in range(len(facts.ranks))]
    # Fewer steps do not tell whether the slowest rank is always the same.
    if len(steps) < 8 or max(counts) > _CONSTANT * len(steps):
        return None
    # By the median, so that a step in which the machine had a hiccup makes no
    # straggler.
    seconds = statistics.median(
        [max(step) - statistics.median_low(step) for step in computed]
    )
    if seconds < 0.5 * statistics.median(map(statistics.median_low, computed)):
        return None
    by_span = {}
    for name in SPANS:
        of_span = [[each[name] for each in step] for step in steps]
        by_span[name] = statistics.fmean(
            [max(step) - statistics.median_low(step) for step in of_span]
        )
    span = SPANS[max(by_span, key=by_span.__getitem__)]
    shares = []
    for rank, count in enumerate(counts):
        if count:
            shares.append(f"rank {rank} in {count / len(steps):.0%}")
    remedy = Remedy(
        name="even work in every step",
        lines=(
            f"look at what a rank does in its {span} in some steps and not in others: long rows, a flush, a log, "
            "garbage collection (gc.freeze(); gc.disable())",
        ),
        gain=_without(facts, seconds),
        changes=Change.EXACT,
        basis="measured: the same steps without what the slowest rank takes longer",
        is_measured=True,
    )
    evidence = (
        f"the slowest rank of a step computes {in_ms(seconds)} longer than a typical one, mostly in its {span}, and is "
        f"not the same one: {', '.join(shares)} of {len(steps)} steps"
    )
    title = "in each step another rank is slow, and the others wait for it"
    cost = _of_iteration(facts, seconds)
    return finding_of_cost(
        "rotating_straggler",
        title,
        [evidence],
        [remedy],
        cost,
        ranks=range(len(counts)),
    )


# ----------------------------------------------------------- what ranks have to look up


class Excessive(NamedTuple):
    """The rank with far more work than the mean: its seconds beyond it, and a sentence about its step."""

    rank: int
    seconds: float
    text: str


def _top(values: Sequence[float]) -> tuple[int, float]:
    """Returns the greatest of the ranks' values, and how many times the mean it is."""
    mean = statistics.fmean(values)
    most = max(values)
    return values.index(most), most / mean if mean else 1.0


def _excessive(facts: Facts, values: Sequence[float]) -> Excessive | None:
    """Returns the rank with most, if it has far more than the mean and computes longer than it."""
    rank, times = _top(values)
    steps = list(map(_step_of, facts.ranks))
    seconds = steps[rank] - statistics.fmean(steps)
    if times < _UNEVEN or seconds <= 0:
        return None
    typical = in_ms(statistics.median_low(steps))
    text = f"its step computes {in_ms(steps[rank])}, a typical one {typical}; {_waits(facts, rank)}"
    return Excessive(rank, seconds, text)


def _uneven(
    facts: Facts, most: Excessive, cause: str, title: str, evidence: Sequence[str], remedy: tuple[str, Sequence[str]],
    changes: Change,
) -> Finding:  # fmt: skip
    """Makes a finding of a rank with more work than the others; ``remedy`` is a name and lines."""
    name, lines = remedy
    even = Remedy(
        name=name,
        lines=tuple(lines),
        gain=_without(facts, most.seconds),
        changes=changes,
        basis="measured: every rank computes as long as their mean",
        is_measured=True,
    )
    return finding_of_cost(
        cause,
        title,
        evidence,
        [even],
        _of_iteration(facts, most.seconds),
        ranks=[most.rank],
    )


def imbalanced_table(facts: Facts) -> Finding | None:
    """The tables of one rank are read far more than those of the others."""
    values = [
        float(sum(table.numbers_read for table in each.tables)) for each in facts.ranks
    ]
    most = _excessive(facts, values)
    # Uneven lists explain uneven look-ups without the tables.
    if most is None or _top([each.ids for each in facts.ranks])[1] >= _UNEVEN:
        return None
    name = rank_name(facts, most.rank)
    table = most_read(facts.ranks[most.rank])
    evidence = (
        f"{name} looks up {values[most.rank] / sum(values):.0%} of all values: of {shard_text(table)} alone "
        f"{table.read:,} rows a step",
        most.text,
    )
    lines: tuple[str, ...] = (
        f"spread {table.name} over the ranks: by columns or rows (TorchRec: ShardingType.COLUMN_WISE, ROW_WISE), or "
        "change it for tables of the others",
    )
    if facts.recipe:
        lines = (f"--set plan.tables={table.name}=column_wise  # or row_wise",)
    remedy = "tables over the ranks by what is read of them", lines
    title = f"{name} holds the tables that are read most"
    return _uneven(
        facts, most, "imbalanced_table", title, evidence, remedy, Change.ROUNDING
    )


def uneven_lists(facts: Facts) -> Finding | None:
    """The batches of one rank hold far more ids than those of the others."""
    values = [each.ids for each in facts.ranks]
    most = _excessive(facts, values)
    if most is None:
        return None
    name = rank_name(facts, most.rank)
    typical = statistics.median_low(values)
    evidence = [
        f"a batch of {name} holds {values[most.rank]:,.0f} ids, that of a typical rank {typical:,.0f}; {most.text}"
    ]
    line = "deal rows out by the lengths of their lists: sorted, then rank 0, 1, ..., 1, 0; or cap the lists"
    remedy = "batches of as many ids on each rank", [line]
    title = f"the lists of {name} are longer"
    return _uneven(facts, most, "uneven_lists", title, evidence, remedy, Change.DRAWS)


def most_read(rank: RankFacts) -> TableFacts:
    """Returns the table of a rank with the most values read."""
    return max(rank.tables, key=lambda table: table.numbers_read)


def shard_text(table: TableFacts) -> str:
    """Returns a table's name, size and sharding type, such as ``item, 500 x 16 (row_wise)``."""
    text = f"{table.name}, {table.rows:,} x {table.dim}"
    return f"{text} ({table.sharding})" if table.sharding else text
