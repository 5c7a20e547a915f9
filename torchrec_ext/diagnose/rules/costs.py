"""Costs: the seconds of a round that a cause takes of a step, and what a remedy leaves of it.

Shared by rules and answers; pure functions of :class:`Facts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import NamedTuple

from torchrec_ext.diagnose.facts import Facts, Gain, LineFacts, Round
from torchrec_ext.diagnose.findings import (
    Action,
    Change,
    Remedy,
    expected,
    in_ms,
    share_of,
)

_SWEEPS = 3.0  # times the optimizer's own seconds that rows which are not read cost, with their gradients
# A line may take this many times what its ops cost in price and in work: it was sampled
# in other moments of the machine than they were timed in.
_PRICE_AT_MOST = 1.5
_WORK_AT_MOST = 1.3
# A remedy leaves at least this share of what it does not touch, which may be the noise
# of another moment, and this share of the whole step.
_REST, _REST_LEAST = (0.6, 0.02)
_LEAST_LINE = 0.03  # share of an iteration from which on a line is named


class _Captured(NamedTuple):
    """What a captured step takes, as prototypes measured it.

    Args:
        lazy: its seconds over those of the step with small tables, for rows that are caught up when they are next read.
        launches: share of the ops' price that goes.
        products: share of the products' seconds that stays.
        rest: share of all other seconds that stays.
        fixed_s: seconds of a captured step that does nothing.
    """

    lazy: float
    launches: float
    products: float
    rest: float
    fixed_s: float


_FASTEST = _Captured(lazy=1.0, launches=1.0, products=0.9, rest=0.25, fixed_s=0.06e-3)
_SLOWEST = _Captured(lazy=1.10, launches=0.7, products=1.0, rest=0.8, fixed_s=0.25e-3)
# Of the loader's time this stays, at least and at most: where batches are ready, and
# where they are made from columns.
READY, FROM_COLUMNS = (0.0, 0.01), (0.01, 0.05)


def alone_seconds(each: Round) -> float:
    """Returns the seconds of a round's step in a row, with warm caches: no loader runs in between."""
    return min(each["step"], each.get("ready") or each["step"])


def warm_share(each: Round) -> float:
    """Returns the seconds of a step in a row as a share of its seconds in the loop."""
    return alone_seconds(each) / each["step"] if each["step"] else 1.0


def changed_seconds(each: Round, name: str) -> float:
    """Returns the seconds of a round's step, changed, between batches of its loader: variants run without these."""
    if each.get("ready"):
        return each[name] * (each["step"] / each["ready"])
    return each[name]


def changed_in_loop(facts: Facts, name: str) -> str:
    """Returns the time of a changed step between batches of its loader, beside that of the step as it is."""
    return in_ms(median([changed_seconds(each, name) for each in facts.rounds]))


def swept_seconds(facts: Facts, each: Round) -> float:
    """Returns the seconds of the optimizer in a round's step for rows outside of the batch."""
    if "small_tables" not in each:
        return 0.0
    by_lines = whole_table_seconds(facts, each)  # of the user, not the optimizer
    swept = max(0.0, each["step"] - changed_seconds(each, "small_tables") - by_lines)
    # Small tables also save memory traffic outside of the optimizer. So of what they
    # save, at most three times the optimizer's own seconds count as its sweep.
    most = _SWEEPS * each["optimizer"] if each.get("optimizer") else swept
    return min(swept, most)


def whole_table_seconds(facts: Facts, each: Round) -> float:
    """Returns the seconds of a round's step at lines with ops on whole tables.

    Those are the seconds inside of these ops; and if lines were sampled, also what the line takes besides its ops, as
    for memory that it gives back.
    """
    sampled = {line.name: line for line in facts.lines if line.phase == "step"}
    spent = 0.0
    for table in facts.whole_tables:
        seconds = table.seconds
        line = sampled.get(table.line)
        if line is not None:
            seconds = max(
                seconds,
                _at_line(facts, each, line.seconds) - (line.op_s - table.seconds),
            )
        spent += seconds + table.backward_s * beyond_ops(facts, each)
    return min(each["step"], spent)


def beyond_ops(facts: Facts, each: Round) -> float:
    """Returns how many times as long as its ops a step takes: memory of large sizes is given back outside of them."""
    return max(1.0, each["step"] / facts.op_s) if facts.op_s else 1.0


def op_price(facts: Facts, each: Round) -> float:
    """Returns the mean price of a step's ops: one that autograd does not record costs less."""
    price = each.get("op", 0.0)
    bare = 0.0
    if facts.ops:
        bare = facts.bare_ops / facts.ops
    return (1 - bare) * price + bare * each.get("bare", price)


def launch_seconds(facts: Facts, each: Round) -> float:
    """Returns the price of the ops in a round's step, without their work."""
    threads = 0.0
    if "one_thread" in each:
        # Threads raise the price of an op too.
        threads = max(0.0, each["step"] - changed_seconds(each, "one_thread"))
    others = swept_seconds(facts, each) + facts.product_s + threads
    # Sweeps, products and threads are inside of ops too.
    rest = each["step"] - sync_seconds(facts, each) - max(others, facts.work_s)
    price = (facts.ops - facts.sync_ops) * op_price(facts, each)
    if facts.device_busy is not None:
        # What the device waits for is what the host takes beyond its kernels.
        price = (1 - facts.device_busy) * each["step"]
    return max(0.0, min(rest, price))


def sync_seconds(facts: Facts, each: Round) -> float:
    """Returns the cost of values brought to Python in a round's step, with the ops behind them."""
    price = facts.syncs * each.get("sync", 0.0) + max(
        0, facts.sync_ops - facts.syncs
    ) * op_price(facts, each)
    if facts.lines:  # beyond the price of their ops these lines do work that stays
        price = min(sync_line_seconds(facts, each), _PRICE_AT_MOST * price)
    return min(price, each["step"])


def sync_line_seconds(facts: Facts, each: Round) -> float:
    """Returns the seconds of a round for values brought to Python, by the ops' share of each line."""
    lines = [line for line in facts.lines if line.sync_ops]
    return sum(
        _at_line(facts, each, line.seconds) * line.sync_ops / line.ops for line in lines
    )


def _at_line(facts: Facts, each: Round, seconds: float) -> float:
    """Returns sampled seconds as they are of a round's iteration, without its exchange."""
    iteration_s = (
        each.get("data", 0.0)
        + each["step"]
        - each.get("wait", 0.0)
        - each.get("exchange", 0.0)
    )
    return seconds / facts.sampled_s * iteration_s


def _without_ops(facts: Facts, each: Round, line: LineFacts) -> float:
    """Returns the seconds of a round at a line beyond the work and the price of its ops."""
    ops_s = _WORK_AT_MOST * line.op_s + _PRICE_AT_MOST * line.ops * each["op"]
    return max(0.0, _at_line(facts, each, line.seconds) - ops_s)


def held_lines(facts: Facts) -> list[tuple[LineFacts, float]]:
    """Returns the lines of a step with much time outside of ops, and their shares, the largest first."""
    # Without counted ops every line would seem to hold the step.
    if (
        facts.ranks
        or "ops" in facts.not_measured
        or not facts.has("data", "step", "op")
    ):
        return []
    # Ops on whole tables are a cause of their own.
    tables = {table.line for table in facts.whole_tables}
    lines = []
    for line in facts.lines:
        if line.phase == "step" and line.name not in tables:
            share = share_of(facts, partial(_without_ops, facts, line=line))
            if share >= _LEAST_LINE:
                lines.append((line, share))
    return sorted(lines, key=lambda each: -each[1])


def unexplained_seconds(facts: Facts, each: Round) -> float:
    """Returns the seconds of a round's step at the user's lines outside of ops."""
    return sum(_without_ops(facts, each, line) for line, _ in held_lines(facts))


def explained(facts: Facts) -> float:
    """Returns the explained share of an iteration: all but the time of the user's lines outside of ops.

    If lines were not sampled, or ops not counted, it is the share of the batch, the products, and the price of ops.
    """
    if facts.lines and "ops" not in facts.not_measured:
        return 1 - share_of(facts, lambda each: unexplained_seconds(facts, each))

    def by_parts(each: Round) -> float:
        ops_s = (
            max(facts.product_s, facts.op_s)
            + launch_seconds(facts, each)
            + sync_seconds(facts, each)
        )
        return (
            each.get("data", 0.0)
            + min(each["step"], ops_s + swept_seconds(facts, each))
            + facts.mean_between()
        )

    return share_of(facts, by_parts) if facts.has("step") else 0.0


def _captured_seconds(facts: Facts, each: Round, shares: _Captured) -> float:
    """Returns the seconds of a captured step with lazy row updates: one fused program, which launches no ops."""
    base = each["step"]
    if "small_tables" in each:
        base = min(base, (base - swept_seconds(facts, each)) * shares.lazy)
    products = min(facts.product_s, base)
    price = shares.launches * facts.ops * op_price(facts, each)
    rest = max(0.0, base - products - price)
    captured = products * shares.products + shares.rest * rest
    return min(base, max(captured, shares.fixed_s))


def capture_seconds(facts: Facts) -> tuple[float, float]:
    """Returns the least and most seconds of capturing a step: they grow with its ops."""
    return 3 + 0.015 * facts.ops, 8 + 0.06 * facts.ops


def gain_of_ready(facts: Facts, shares: tuple[float, float]) -> Gain | None:
    """Returns the speed-up if only these shares, least and most, remain of the loader's time."""
    least, most = shares
    return expected(
        facts,
        lambda each: alone_seconds(each) + most * each["data"],
        lambda each: alone_seconds(each) + least * each["data"],
    )


def gain_without(
    facts: Facts, seconds: Callable[[Round], float], least: float, most: float
) -> Gain | None:
    """Returns the speed-up if shares, least and most, of such seconds of the step go.

    The rest of the step is known too, so that little of it goes however much these seconds are.
    """

    def fastest(each: Round) -> float:
        rest = each["step"] - seconds(each)
        return max(
            each["step"] - most * seconds(each),
            _REST * rest,
            _REST_LEAST * each["step"],
        )

    return expected(
        facts,
        lambda each: each["data"] + each["step"] - least * seconds(each),
        lambda each: each["data"] + fastest(each),
    )


_ADOPT = (
    "from torchrec_ext.adopt import adopt",
    "step = adopt(model, optimizer, loss)  # loss(*batch) -> the mean loss",
    "loss, _ = step(*batch)  # in place of zero_grad, loss, backward, step",
)
_ROWS = (
    "from torchrec_ext.adopt import Rows, adopt",
    "rows = Rows.of(dataset, batch_size={batch}, negatives=...)  # sign the law of the draws that it proposes",
    "step = adopt(model, optimizer, loss, rows=rows)  # batches are made inside the step",
)


def _by_rank(facts: Facts, remedy: Remedy, changes: Change) -> Remedy:
    """Returns a remedy of adopt as it is on several ranks: adopt takes no DDP."""
    if not facts.ranks or facts.recipe:
        return remedy
    return replace(
        remedy,
        lines=(
            *remedy.lines,
            "# on each rank, with DDP's model.module; average the ranks' weights every few steps",
        ),
        changes=changes,
    )


def loss_syncs(facts: Facts) -> str:
    """Returns the lines that bring values to Python before the backward pass, as a part of a sentence."""
    if not facts.loss_sync_lines:
        return ""
    lines = ", ".join(line for line, _ in facts.loss_sync_lines[:3])
    return f"; if the loss needs the value that is brought to Python at {lines}, take it out first"


def capture_remedy(facts: Facts) -> Remedy:
    """Returns adopt as a remedy; of a recipe, its flag."""
    low, high = capture_seconds(facts)
    name = "adopt: the step captured"
    lines: tuple[str, ...] = _ADOPT
    if facts.has("small_tables"):
        name += ", rows moved when they are next read"
    if facts.recipe:
        name = "the step captured"
        lines = ("--set train.compile=require",)
    remedy = Remedy(
        name=name,
        lines=lines,
        gain=expected(
            facts,
            lambda each: each["data"] + _captured_seconds(facts, each, _SLOWEST),
            lambda each: each["data"] + _captured_seconds(facts, each, _FASTEST),
        ),
        changes=Change.ROUNDING,
        basis=f"predicted, not tried; capturing takes about {low:.0f} to {high:.0f} s once{loss_syncs(facts)}",
        action=Action.CAPTURE,
    )
    return _by_rank(facts, remedy, Change.AVERAGED)


def rows_remedy(facts: Facts) -> Remedy:
    """Returns adopt with batches from columns as a remedy."""
    remedy = Remedy(
        name="Rows.of and adopt: batches made from columns inside the captured step",
        lines=tuple(
            line.format(batch=facts.loader.row_calls or "...") for line in _ROWS
        ),
        gain=expected(
            facts,
            # Batches are made inside the step then, so that no loader runs between two
            # of them.
            lambda each: (
                FROM_COLUMNS[1] * each["data"]
                + warm_share(each) * _captured_seconds(facts, each, _SLOWEST)
            ),
            lambda each: warm_share(each) * _captured_seconds(facts, each, _FASTEST),
        ),
        changes=Change.ROUNDING_AND_DRAWS,
        basis="predicted, not tried",
        action=Action.CAPTURE_WITH_ROWS,
    )
    return _by_rank(facts, remedy, Change.AVERAGED_AND_DRAWS)


def limit_share(facts: Facts) -> float:
    """Returns how near iterations are to this machine's limit: necessary products and traffic over the time.

    Products at the rate of a large product measured here, and the parameters that a step reads, each read and written
    once with its gradient and two moments, at the rate of a large copy.
    """
    if not facts.has("step") or not facts.flops_per_s or not facts.bytes_per_s:
        return 0.0
    limit_s = (
        facts.product_flops / facts.flops_per_s + traffic(facts) / facts.bytes_per_s
    )
    return min(1.0, share_of(facts, lambda _: limit_s))


def traffic(facts: Facts) -> float:
    """Returns the least bytes of parameters, gradients and moments in a step."""
    tables = sum(each.numbers for each in facts.tables)
    rows = sum(min(each.rows, each.read) * each.dim for each in facts.tables)
    # Seven passes of four bytes: weight and two moments are read and written, the
    # gradient is passed once.
    return 4 * 7 * (max(0, facts.parameters - tables) + rows)


def busy_text(facts: Facts) -> str:
    """Returns how many cores others keep busy, as a part of a sentence; empty for none."""
    if facts.busy is None or facts.busy < 0.1:
        return ""
    return f", and others keep {facts.busy:.1f} cores busy"
