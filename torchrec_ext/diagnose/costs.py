"""Costs: the seconds of a round that a cause takes of a step; pure functions of :class:`Facts`.

Changed steps ran in a row, without the loader that cools caches in the loop, so their seconds are scaled by the step in
the loop over the step in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

from torchrec_ext.diagnose.findings import (
    Facts,
    Finding,
    Gain,
    LineFacts,
    Remedy,
    Round,
    gain_of,
    in_ms,
    size_of,
)

# A line may take this many times what its ops cost in price and in work: it was sampled
# in other moments of the machine than they were timed in.
_PRICE_AT_MOST = 1.5
_WORK_AT_MOST = 1.3
_LEAST_LINE = 0.03  # share of an iteration from which on a line is named
_MOST_OPS = (
    0.5  # share of a line's seconds inside of ops from which on it holds nothing
)


def alone_seconds(each: Round) -> float:
    """Returns the seconds of a round's step in a row, with warm caches: no loader runs in between."""
    return min(each["step"], each.get("ready") or each["step"])


def changed_seconds(each: Round, name: str) -> float:
    """Returns the seconds of a round's step, changed, between batches of its loader."""
    if each.get("ready"):
        return each[name] * (each["step"] / each["ready"])
    return each[name]


def changed_text(facts: Facts, name: str) -> str:
    """Returns the median time of a changed step between batches of its loader, as text."""
    return in_ms(median([changed_seconds(each, name) for each in facts.rounds]))


def swept_seconds(each: Round) -> float:
    """Returns the seconds in which the optimizer moves large tables in a round's step."""
    if "still_tables" not in each:
        return 0.0
    return max(0.0, each["step"] - changed_seconds(each, "still_tables"))


def launched_seconds(facts: Facts, each: Round) -> float:
    """Returns the price of the ops in a round's step, without their work."""
    threads = 0.0
    if "one_thread" in each:
        # Threads raise the price of an op too.
        threads = max(0.0, each["step"] - changed_seconds(each, "one_thread"))
    others = swept_seconds(each) + facts.product_s + threads
    # Sweeps, products and threads are inside of ops too.
    rest = each["step"] - synced_seconds(facts, each) - others
    price = (facts.ops - facts.sync_ops) * each.get("op", 0.0)
    return max(0.0, min(rest, price))


def synced_seconds(facts: Facts, each: Round) -> float:
    """Returns the cost of values brought to Python in a round's step, with the ops behind them."""
    feeding = max(0, facts.sync_ops - facts.syncs)
    price = facts.syncs * each.get("sync", 0.0) + feeding * each.get("op", 0.0)
    if facts.lines:  # beyond the price of their ops these lines do work that stays
        at_lines = sum(
            _at_line(facts, each, line.seconds) * line.sync_ops / line.ops
            for line in facts.lines
            if line.sync_ops
        )
        price = min(at_lines, _PRICE_AT_MOST * price)
    return min(price, each["step"])


def _at_line(facts: Facts, each: Round, seconds: float) -> float:
    """Returns sampled seconds as they are of a round's iteration."""
    return seconds / facts.sampled_s * (each.get("data", 0.0) + each["step"])


def seconds_without_ops(facts: Facts, each: Round, line: LineFacts) -> float:
    """Returns the seconds of a round at a line beyond the work and the price of its ops."""
    ops_s = _WORK_AT_MOST * line.op_s + _PRICE_AT_MOST * line.ops * each["op"]
    return max(0.0, _at_line(facts, each, line.seconds) - ops_s)


def held_lines(facts: Facts) -> list[tuple[LineFacts, float]]:
    """Returns the lines of a step with much time outside of ops, and their shares, the largest first."""
    # Without counted ops every line would seem to hold the step.
    if "ops" in facts.not_measured or not facts.has("data", "step", "op"):
        return []
    lines = []
    for line in facts.lines:
        # On a busy machine much of an ordinary layer's line is a wait for a core.
        is_ops = line.op_s >= _MOST_OPS * line.seconds
        if line.phase == "step" and not is_ops:
            share = facts.share(partial(seconds_without_ops, facts, line=line))
            if share >= _LEAST_LINE:
                lines.append((line, share))
    return sorted(lines, key=lambda each: -each[1])


def variant_gain(facts: Facts, name: str, batches: int = 1) -> Gain:
    """Returns the speed-up of an iteration with a changed step, which trains on so many batches at once."""
    return facts.gain(lambda each: each["data"] + changed_seconds(each, name) / batches)


def ratios_of(turns: Sequence[tuple[float, float]]) -> list[float]:
    """Returns the speed-up of each turn, from its seconds before and after."""
    return [before / after for before, after in turns]


def finding_of(
    facts: Facts,
    cause: str,
    title: str,
    evidence: Sequence[str],
    remedies: Sequence[Remedy],
    seconds: Callable[[Round], float],
) -> Finding:
    """Makes a finding; its cost is the median over rounds of its share of an iteration."""
    cost = facts.share(seconds)
    return Finding(
        cause=cause,
        title=title,
        evidence=tuple(evidence),
        remedies=tuple(remedies),
        cost=cost,
        size=size_of(cost),
        least=gain_of(facts.shares(seconds)).low if facts.rounds else 0.0,
    )
