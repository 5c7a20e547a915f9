"""Rules about the step itself: rows, ops, values for Python, lines, modes and bits. Each is a pure function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, median, stdev

from torchrec_ext.diagnose.facts import Facts, Round
from torchrec_ext.diagnose.findings import (
    LARGE,
    Change,
    Finding,
    Remedy,
    expected,
    finding_of,
    finding_of_cost,
    in_ms,
    share_of,
)
from torchrec_ext.diagnose.rules.costs import (
    beyond_ops,
    capture_remedy,
    changed_in_loop,
    changed_seconds,
    gain_without,
    held_lines,
    launch_seconds,
    op_price,
    swept_seconds,
    sync_line_seconds,
    sync_seconds,
    unexplained_seconds,
    whole_table_seconds,
)

_LEAST_LINES = 0.1  # share of an iteration that such lines take together; what samples say of less is not sure
# Optimizers of torch that read sparse gradients as they are.
_TAKE_SPARSE = frozenset({"SGD", "Adagrad"})
_LOOP_OPS = 50  # ops of a line from which on it is a loop
_SAMPLED_ITEMS = 1_024  # items to which a softmax over all of them is compared


def untouched_rows(facts: Facts) -> Finding | None:
    """A dense optimizer moves rows of tables outside of the batch."""
    if not facts.has("step", "small_tables") or not facts.tables:
        return None
    table = max(facts.tables, key=lambda each: each.numbers)
    mover = " and ".join(facts.optimizers) or "the optimizer"
    rows = sum(each.rows for each in facts.tables)
    ids = sum(each.read for each in facts.tables)
    evidence = [
        f"{mover} moves all {facts.parameters:,} parameters in every step: the tables have "
        f"{rows:,} rows, of which a step reads at most {ids:,} (largest: {table.name}, {table.rows:,} x {table.dim})",
        f"with tables that hold only the rows of a few batches the step takes {changed_in_loop(facts, 'small_tables')} "
        f"instead of {in_ms(facts.median('step'))}",
    ]
    name = "SparseAdam on tables with sparse=True"
    changes = Change.OPTIMIZER
    lines: tuple[str, ...] = (
        "nn.Embedding(..., sparse=True)",
        "torch.optim.SparseAdam(tables)  # and Adam for the layers",
    )
    if facts.optimizers and _TAKE_SPARSE.issuperset(facts.optimizers):
        # SGD and Adagrad make the same step of sparse gradients as of dense ones.
        name = "tables with sparse=True"
        changes = Change.ROUNDING
        lines = (
            f"nn.Embedding(..., sparse=True)  # as {mover} reads it; weight_decay must be 0",
        )
    lazily = Remedy(
        name=name,
        lines=lines,
        gain=expected(
            facts,
            lambda each: (
                each["data"]
                + min(each["step"], 3.0 * changed_seconds(each, "small_tables"))
            ),
            lambda each: each["data"] + changed_seconds(each, "small_tables"),
        ),
        changes=changes,
        basis="predicted from the step with small tables",
    )
    title = "the optimizer sweeps rows that the step never read"
    remedies = [capture_remedy(facts), lazily]
    return finding_of(
        facts,
        "untouched_rows",
        title,
        evidence,
        remedies,
        lambda each: swept_seconds(facts, each),
    )


def launches(facts: Facts) -> Finding | None:
    """The step consists of many tiny ops, and their price is Python and dispatch, not work."""
    if not facts.has("step", "op") or not facts.ops:
        return None
    price = median([op_price(facts, each) for each in facts.rounds])
    evidence = [
        f"a step runs {facts.ops:,} ops, {price * 1e6:.1f} us each on this machine before any work: "
        f"{in_ms(facts.ops * price)} of {in_ms(facts.median('step'))}; matrix products take {in_ms(facts.product_s)}"
    ]
    if facts.device_busy is not None:
        evidence.append(
            f"the device runs {facts.kernels:,} kernels and copies a step, for {facts.device_busy:.0%} of the time; it "
            "waits in the gaps between them"
        )
    if facts.op_lines:
        evidence.append(f"most ops: {_first_lines(facts.op_lines)}")
    remedies = [*_vectorised(facts), capture_remedy(facts)]
    title = (
        "the step is many small ops: Python and dispatch take the time, not the work"
    )
    return finding_of(
        facts,
        "launches",
        title,
        evidence,
        remedies,
        lambda each: launch_seconds(facts, each),
    )


def _first_lines(counts: Sequence[tuple[str, int]]) -> str:
    return "; ".join(f"{line}, {count:,}" for line, count in counts[:3])


def _vectorised(facts: Facts) -> list[Remedy]:
    """Returns whole-tensor ops as a remedy for a user's loop with a third of a step's ops."""
    counts = dict(facts.op_lines)
    backward_ops = counts.pop("backward", 0)
    # None of these two is the user's to vectorise.
    counts.pop("optimizer", 0)
    counts.pop("step", 0)
    line = max(counts, key=counts.__getitem__, default="")
    if not line or counts[line] < max(_LOOP_OPS, LARGE * facts.ops):
        return []
    # A loop may have several lines: all those of its function go.
    function = line.rpartition(" in ")[2]
    of_loop = sum(
        ops for name, ops in counts.items() if name.rpartition(" in ")[2] == function
    )
    # Ops that feed values to Python are another cause's.
    without = of_loop - facts.sync_ops
    if without < _LOOP_OPS:
        return []
    # The backward of a loop goes with it, by its share of the forward's ops.
    backward = backward_ops * of_loop / sum(counts.values())

    def price(each: Round, ops: float) -> float:
        return launch_seconds(facts, each) * min(1.0, ops / facts.ops)

    return [
        Remedy(
            name="one op on all tensors in place of a loop",
            lines=(
                f"{line} makes {counts[line]:,} ops: stack what it loops over, or take torch._foreach_*",
                "torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)  # to clip all gradients at once",
            ),
            gain=expected(
                facts,
                lambda each: each["data"] + each["step"] - 0.7 * price(each, without),
                lambda each: (
                    each["data"]
                    + max(
                        0.02 * each["step"],
                        each["step"] - price(each, without + backward),
                    )
                ),
            ),
            changes=Change.ROUNDING,
            basis="predicted from the price of its ops",
        )
    ]


def python_lines(facts: Facts) -> Finding | None:
    """Lines of the step hold it without ops: sleeps, files, copies, JSON, lists."""
    lines = held_lines(facts)
    if sum(share for _, share in lines) < _LEAST_LINES:
        return None
    remedy = Remedy(
        name="take these lines out of the step, or run them every hundredth step",
        lines=tuple(f"{line.name}: {line.text[:80]}" for line, _ in lines[:3]),
        gain=gain_without(
            facts, lambda each: unexplained_seconds(facts, each), 0.85, 1.1
        ),
        changes=Change.LESS_OFTEN,
        basis="predicted from samples of the line that the loop is at",
    )
    evidence = [
        f"no tensor op explains the time at {line.name}, {share:.0%}: {line.text}"
        for line, share in lines[:3]
    ]
    title = f"{lines[0][0].name} holds the step, and not with tensor ops"
    return finding_of(
        facts,
        "python_lines",
        title,
        evidence,
        [remedy],
        lambda each: unexplained_seconds(facts, each),
    )


def debug_modes(facts: Facts) -> Finding | None:
    """Anomaly mode or a profiler was left on."""
    if not facts.modes or not facts.has("step"):
        return None
    modes = " and ".join(facts.modes)

    def seconds(each: Round) -> float:
        unexplained = unexplained_seconds(facts, each)
        if "quiet" not in each:
            return max(0.0, unexplained)
        return max(each["step"] - changed_seconds(each, "quiet"), unexplained)

    evidence = [f"{len(facts.modes)} debugging mode is on while the step runs: {modes}"]
    basis = "predicted"
    if facts.has("quiet"):
        basis = "measured: steps without it"
        evidence.append(
            f"without it a step takes {changed_in_loop(facts, 'quiet')} instead of {in_ms(facts.median('step'))}"
        )
    remedy = Remedy(
        name=f"train without {modes}",
        lines=(
            "torch.autograd.set_detect_anomaly(False)",
            "leave `with torch.profiler.profile()` after some steps",
        ),
        # Both modes look up the stack at each op, and the frames of an experiment are
        # on top of the user's own.
        gain=gain_without(facts, seconds, 0.85, 1.0),
        changes=Change.EXACT,
        basis=basis,
        is_measured=facts.has("quiet"),
    )
    return finding_of(
        facts, "debug_modes", f"{modes} was left on", evidence, [remedy], seconds
    )


def whole_tables(facts: Facts) -> Finding | None:
    """A line works on all rows of a table, and a step reads few of them."""
    if not facts.whole_tables or not facts.has("data", "step"):
        return None
    table = max(facts.whole_tables, key=lambda each: each.seconds)
    seconds = partial(whole_table_seconds, facts)
    remedy = Remedy(
        name="the same on the rows that the batch reads",
        lines=(
            f"{table.line}: look the rows up first, as in F.normalize(table(ids)); copy a table seldom",
        ),
        gain=gain_without(facts, seconds, 0.8, 1.3),
        changes=Change.ROUNDING,
        basis="predicted from the time of these ops",
    )
    evidence = [
        f"{table.line} works on {table.rows:,} rows for {in_ms(table.seconds)}, and {in_ms(table.backward_s)} in "
        f"backward; a step looks up {table.read:,} of them"
    ]
    title = "the step works on whole tables, and reads few of their rows"
    return finding_of(facts, "whole_tables", title, evidence, [remedy], seconds)


def double_precision(facts: Facts) -> Finding | None:
    """Ops run in 64 bits."""
    if not facts.double_s or not facts.has("data", "step"):
        return None

    def saved(each: Round) -> float:
        return 0.5 * min(each["step"], facts.double_s)

    remedy = Remedy(
        name="32-bit floats",
        lines=(
            "model.float(); x = x.float()  # numpy's arrays are 64-bit unless you say otherwise",
        ),
        gain=gain_without(facts, saved, 0.5, 1.3),
        changes=Change.FLOAT32,
        basis="predicted: half of the bits take about half of the time",
    )
    evidence = [
        f"{in_ms(facts.double_s)} of a step are in ops of 64-bit floats, most of them at {facts.double_line}"
    ]
    return finding_of(
        facts,
        "double_precision",
        "the step computes in 64-bit floats",
        evidence,
        [remedy],
        saved,
    )


def garbage(facts: Facts) -> Finding | None:
    """Python's garbage collector walks over many objects."""
    if not facts.has("data", "step", "gc") or not any(
        each["gc"] for each in facts.rounds
    ):
        return None
    seconds = [each["gc"] for each in facts.rounds]
    # The mean, not the median: a long collection comes in few of the rounds.
    mean = fmean(seconds)
    error = mean
    if len(seconds) > 1:
        error = stdev(seconds) / len(seconds) ** 0.5
    # Each round gets the mean in place of its own, or rounds without a collection would
    # say that none is needed.
    rounds = [
        {**each, "step": max(0.0, each["step"] - each["gc"]) + mean, "gc": mean}
        for each in facts.rounds
    ]
    facts = replace(facts, rounds=rounds)
    remedy = Remedy(
        name="fewer objects for the garbage collector to walk over",
        lines=("import gc; gc.collect(); gc.freeze()  # before the training loop",),
        # A collection also leaves the step with cold caches. Its mean is not known
        # better than its error says.
        gain=gain_without(
            facts,
            lambda _: mean,
            max(0.0, 0.5 * (1 - error / mean)),
            1.3 * (1 + error / mean),
        ),
        changes=Change.EXACT,
        basis="measured: the seconds of its collections",
        is_measured=True,
    )
    evidence = [
        f"collections take {in_ms(mean)} of an iteration, by the mean of {len(rounds)} rounds"
    ]
    return finding_of(
        facts,
        "garbage",
        "Python's garbage collector runs during training",
        evidence,
        [remedy],
        lambda each: each["gc"],
    )


def all_items(facts: Facts) -> Finding | None:
    """A softmax over all items: an offer, since sampling some of them is another loss."""
    if not facts.all_items or not facts.has("data", "step"):
        return None
    most = max(facts.all_items, key=lambda each: each.seconds)

    def seconds(each: Round) -> float:
        spent = most.seconds * beyond_ops(facts, each)
        return (1 - _SAMPLED_ITEMS / most.items) * min(each["step"], spent)

    cost = share_of(facts, seconds)
    if cost < LARGE:
        return None
    remedy = Remedy(
        name=f"a sampled softmax over {_SAMPLED_ITEMS:,} items",
        lines=(
            f"{most.line}: score the positive and {_SAMPLED_ITEMS:,} sampled items, with the logQ correction",
        ),
        gain=gain_without(facts, seconds, 0.8, 1.1),
        changes=Change.LOSS,
        basis="predicted from the time of ops over all items",
    )
    evidence = [
        f"{most.line}: ops over {most.items:,} items take {in_ms(most.seconds)} of a step"
    ]
    title = f"a softmax over {most.items:,} items is most of the step"
    return finding_of_cost("all_items", title, evidence, [remedy], cost, size="offer")


def host_syncs(facts: Facts) -> Finding | None:
    """The step brings values to Python, one by one."""
    if not facts.has("step", "sync") or not facts.syncs:
        return None
    lines = _first_lines(facts.sync_lines)
    cause = "the step waits for values that Python wants to see"
    what = f"a step brings {facts.syncs:,} values to Python (.item(), .tolist(), if on a tensor, boolean masks)"
    changes = [
        "total += loss.detach()  # in place of loss.item(); total.item() where it is printed"
    ]
    if facts.device_busy is not None:
        # A GPU idles after each wait, until the host has launched the next kernel.
        cause = "the host waits for the device, and the device for the host next"
        what = f"the host waits for the device {facts.syncs:,} times a step (.item(), .cpu(), nonzero, boolean masks)"
        changes.append(
            "x.to('cpu', non_blocking=True)  # in place of x.cpu(), and an event; torch.where in place of x[mask]"
        )
    evidence = [
        f"{what}: {lines}",
        f"with the ops that feed them: {facts.sync_ops:,} of {facts.ops:,} ops",
    ]
    # Seconds at the lines themselves leave a far narrower interval than the price of
    # their ops.
    least, most = 0.6, 1.3
    basis = "predicted from the price of an op and of .item() on this machine"
    if facts.lines:
        least, most = 0.93, 1.25
        basis = "predicted from the seconds at these lines"
        seconds = (
            share_of(facts, lambda each: sync_line_seconds(facts, each))
            * facts.sampled_s
        )
        evidence.append(
            f"these lines take {in_ms(seconds)} of {in_ms(facts.sampled_s)}"
        )
    remedy = Remedy(
        name="keep values as tensors, and read one of them every hundred steps",
        lines=tuple(changes),
        gain=gain_without(facts, lambda each: sync_seconds(facts, each), least, most),
        changes=Change.EXACT,
        basis=basis,
    )
    return finding_of(
        facts,
        "host_syncs",
        cause,
        evidence,
        [remedy],
        lambda each: sync_seconds(facts, each),
    )
