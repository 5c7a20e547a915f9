"""Causes at a line of the user's: it holds the step, or works on too much, or a mode is on. Each is ``your_line``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean

from torchrec_ext.diagnose.costs import (
    finding_of,
    held_lines,
    seconds_without_ops,
    whole_table_seconds,
)
from torchrec_ext.diagnose.findings import (
    Change,
    Facts,
    Finding,
    Remedy,
    Round,
    in_ms,
)

# Share of an iteration that such lines take together; what samples say of less is not
# sure.
_LEAST_LINES = 0.1


def held(facts: Facts) -> Finding | None:
    """Lines of the step hold it without ops: sleeps, files, copies, JSON, lists."""
    lines = held_lines(facts)
    if sum(share for _, share in lines) < _LEAST_LINES:
        return None
    evidence = [
        f"no tensor op explains the time at {line.name}, {share:.0%}: {line.text}"
        for line, share in lines[:3]
    ]
    return _your_line(
        facts,
        f"{lines[0][0].name} holds the step, and not with tensor ops",
        evidence,
        Remedy(
            name="take these lines out of the step, or run them every hundredth step",
            changes=Change.EXACT,
        ),
        lambda each: sum(seconds_without_ops(facts, each, line) for line, _ in lines),
    )


def _your_line(
    facts: Facts,
    title: str,
    evidence: Sequence[str],
    remedy: Remedy,
    seconds: Callable[[Round], float],
) -> Finding:
    return finding_of(facts, "your_line", title, evidence, [remedy], seconds)


def debug_mode(facts: Facts) -> Finding | None:
    """Anomaly mode or a profiler was left on: all else is measured under it, so nothing else is said."""
    if not facts.modes or not facts.has("step"):
        return None
    modes = " and ".join(facts.modes)
    pasted: tuple[str, ...] = ()
    if "anomaly mode" in facts.modes:
        pasted = ("torch.autograd.set_detect_anomaly(False)",)
    return Finding(
        cause="your_line",
        title=f"{modes} was left on",
        evidence=(
            "each op takes several times as long under it, and everything was measured so",
        ),
        remedies=(
            Remedy(
                name=f"train without {modes}, and ask again",
                changes=Change.EXACT,
                lines=pasted,
            ),
        ),
        cost=1.0,
        size="large",
        least=1.0,
    )


def whole_table(facts: Facts) -> Finding | None:
    """A line works on all rows of a table, and a step reads few of them."""
    if not facts.whole_tables or not facts.has("data", "step"):
        return None
    table = max(facts.whole_tables, key=lambda each: each.seconds)
    evidence = (
        f"{table.line} works on {table.rows:,} rows for {in_ms(table.seconds)}, and {in_ms(table.backward_s)} in "
        f"backward; a step looks up {table.read:,} of them"
    )
    remedy = Remedy(
        name="do the same on the rows that the batch reads; copy a table seldom",
        changes=Change.ROUNDING,
    )
    title = f"{table.line} works on a whole table, and the step reads few of its rows"
    return _your_line(
        facts, title, [evidence], remedy, partial(whole_table_seconds, facts)
    )


def double_floats(facts: Facts) -> Finding | None:
    """Ops run in 64 bits."""
    if not facts.double_s or not facts.has("data", "step"):
        return None
    evidence = f"{in_ms(facts.double_s)} of a step are in ops of 64-bit floats, most of them at {facts.double_line}"
    remedy = Remedy(
        name="32-bit floats; numpy's arrays are 64-bit unless you say otherwise",
        changes=Change.OTHER,
        lines=("model.float()",),
    )
    title = f"{facts.double_line} computes in 64-bit floats"
    # Half of the bits take about half of the time.
    return _your_line(
        facts,
        title,
        [evidence],
        remedy,
        lambda each: 0.5 * min(each["step"], facts.double_s),
    )


def garbage(facts: Facts) -> Finding | None:
    """Python's garbage collector walks over many objects."""
    if not facts.has("data", "step", "gc"):
        return None
    # The mean, not the median: a long collection comes in few of the rounds.
    mean = fmean(each["gc"] for each in facts.rounds)
    if not mean:
        return None
    # Each round gets the mean in place of its own.
    rounds = [
        {**each, "step": max(0.0, each["step"] - each["gc"]) + mean}
        for each in facts.rounds
    ]
    evidence = f"collections take {in_ms(mean)} of an iteration, by the mean of {len(rounds)} rounds"
    remedy = Remedy(
        name="fewer objects for the garbage collector to walk over, before the loop",
        changes=Change.EXACT,
        lines=("import gc", "gc.collect()", "gc.freeze()"),
    )
    return _your_line(
        dataclasses.replace(facts, rounds=rounds),
        "Python's garbage collector runs during training",
        [evidence],
        remedy,
        lambda _: mean,
    )
