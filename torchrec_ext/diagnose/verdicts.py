"""findings(): the causes of lost time by the facts, ranked by their cost; trials(): what each change that ran gains.

Each cause is a pure function of :class:`Facts`. Changed steps ran in a row, without the loader that cools caches in the
loop, so their seconds are scaled by the step in the loop over the step in a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from statistics import fmean, median

from torchrec_ext.diagnose.findings import (
    LARGE,
    LEAST,
    MEDIUM,
    UNDER,
    Change,
    Facts,
    Finding,
    Gain,
    LineFacts,
    Remedy,
    Round,
    Size,
    Trial,
    gain_of,
    in_ms,
    size_of,
)

NOISY = 0.6  # spread of iterations above which there is no verdict
_IDLE = 0.3  # cores that others may keep busy where threads of this process have theirs
_SWEEPS = 3.0  # times the optimizer's own seconds that rows which are not read cost, with their gradients
# A line may take this many times what its ops cost in price and in work: it was sampled
# in other moments of the machine than they were timed in.
_PRICE_AT_MOST = 1.5
_WORK_AT_MOST = 1.3
_LEAST_LINE = 0.03  # share of an iteration from which on a line is named
# Share of an iteration that such lines take together; what samples say of less is not
# sure.
_LEAST_LINES = 0.1
_SAMPLED_ITEMS = 1_024  # items to which a softmax over all of them is compared
_RANKS = "docs/parallel.md"  # the page about several ranks
_ADOPT = (
    "from torchrec_ext.adopt import adopt",
    "step = adopt(model, optimizer, loss)",
)
_WORKER = (
    "loader = torch.utils.data.DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, "
    "collate_fn=loader.collate_fn, num_workers=1, persistent_workers=True)",
)
_BF16 = (
    "with torch.autocast('cpu', torch.bfloat16): value = loss(*next(iter(loader)))",
)

# ------------------------------------------------------------------- seconds of a round


def alone_seconds(each: Round) -> float:
    """Returns the seconds of a round's step in a row, with warm caches: no loader runs in between."""
    return min(each["step"], each.get("ready") or each["step"])


def changed_seconds(each: Round, name: str) -> float:
    """Returns the seconds of a round's step, changed, between batches of its loader."""
    if each.get("ready"):
        return each[name] * (each["step"] / each["ready"])
    return each[name]


def _changed(facts: Facts, name: str) -> str:
    return in_ms(median([changed_seconds(each, name) for each in facts.rounds]))


def _swept(facts: Facts, each: Round) -> float:
    """Returns the seconds of the optimizer in a round's step for rows outside of the batch."""
    if "small_tables" not in each:
        return 0.0
    by_lines = _whole_tables(facts, each)  # of the user, not the optimizer
    swept = max(0.0, each["step"] - changed_seconds(each, "small_tables") - by_lines)
    # Small tables also save memory traffic outside of the optimizer.
    most = _SWEEPS * each["optimizer"] if each.get("optimizer") else swept
    return min(swept, most)


def _whole_tables(facts: Facts, each: Round) -> float:
    """Returns the seconds of a round's step at lines with ops on whole tables."""
    sampled = {line.name: line for line in facts.lines if line.phase == "step"}
    spent = 0.0
    for table in facts.whole_tables:
        seconds = table.seconds
        line = sampled.get(table.line)
        if line is not None:
            # Also what the line takes besides its ops, as for memory that it gives back.
            rest = line.op_s - table.seconds
            seconds = max(seconds, _at_line(facts, each, line.seconds) - rest)
        spent += seconds + table.backward_s * _beyond_ops(facts, each)
    return min(each["step"], spent)


def _beyond_ops(facts: Facts, each: Round) -> float:
    """Returns how many times as long as its ops a step takes: memory of large sizes is given back outside of them."""
    return max(1.0, each["step"] / facts.op_s) if facts.op_s else 1.0


def _op_price(facts: Facts, each: Round) -> float:
    """Returns the mean price of a step's ops: one that autograd does not record costs less."""
    price = each.get("op", 0.0)
    bare = facts.bare_ops / facts.ops if facts.ops else 0.0
    return (1 - bare) * price + bare * each.get("bare", price)


def _launched(facts: Facts, each: Round) -> float:
    """Returns the price of the ops in a round's step, without their work."""
    threads = 0.0
    if "one_thread" in each:
        # Threads raise the price of an op too.
        threads = max(0.0, each["step"] - changed_seconds(each, "one_thread"))
    others = _swept(facts, each) + facts.product_s + threads
    # Sweeps, products and threads are inside of ops too.
    rest = each["step"] - _synced(facts, each) - max(others, facts.work_s)
    price = (facts.ops - facts.sync_ops) * _op_price(facts, each)
    if facts.device_busy is not None:
        # What the device waits for is what the host takes beyond its kernels.
        price = (1 - facts.device_busy) * each["step"]
    return max(0.0, min(rest, price))


def _synced(facts: Facts, each: Round) -> float:
    """Returns the cost of values brought to Python in a round's step, with the ops behind them."""
    feeding = max(0, facts.sync_ops - facts.syncs)
    price = facts.syncs * each.get("sync", 0.0) + feeding * _op_price(facts, each)
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


def _without_ops(facts: Facts, each: Round, line: LineFacts) -> float:
    """Returns the seconds of a round at a line beyond the work and the price of its ops."""
    ops_s = _WORK_AT_MOST * line.op_s + _PRICE_AT_MOST * line.ops * each["op"]
    return max(0.0, _at_line(facts, each, line.seconds) - ops_s)


def held_lines(facts: Facts) -> list[tuple[LineFacts, float]]:
    """Returns the lines of a step with much time outside of ops, and their shares, the largest first."""
    # Without counted ops every line would seem to hold the step.
    if "ops" in facts.not_measured or not facts.has("data", "step", "op"):
        return []
    # Ops on whole tables are a cause of their own.
    tables = {table.line for table in facts.whole_tables}
    lines = []
    for line in facts.lines:
        if line.phase == "step" and line.name not in tables:
            share = facts.share(partial(_without_ops, facts, line=line))
            if share >= _LEAST_LINE:
                lines.append((line, share))
    return sorted(lines, key=lambda each: -each[1])


# ------------------------------------------------------------------------------- causes


def _finding(
    facts: Facts,
    cause: str,
    title: str,
    evidence: Sequence[str],
    remedies: Sequence[Remedy],
    seconds: Callable[[Round], float],
    size: Size | None = None,
) -> Finding:
    """Makes a finding; its cost is the median over rounds of its share of an iteration."""
    cost = facts.share(seconds)
    return Finding(
        cause=cause,
        title=title,
        evidence=tuple(evidence),
        remedies=tuple(remedies),
        cost=cost,
        size=size or size_of(cost),
        least=gain_of(facts.shares(seconds)).low if facts.rounds else 0.0,
    )


def loader_waits(facts: Facts) -> Finding | None:
    """The loader waits for files, a network or a sleep."""
    if not _waits(facts):
        return None
    loader = facts.loader
    evidence = [
        f"{in_ms(facts.median('sleep'))} of the {in_ms(facts.median('data'))} that a batch takes, this thread slept or "
        "waited, and did not compute"
    ]
    if loader.workers:
        evidence.append(
            f"{loader.workers} worker(s) make the batches, and are slower than the step"
        )
    elif loader.bytes_read:
        evidence.append(
            f"{loader.bytes_read:,.0f} bytes were read from files for a batch"
        )
    remedies = [
        Remedy(
            name="read the source once, before the first step, or a block ahead of the steps",
            changes=Change.EXACT,
        )
    ]
    if facts.worker:
        remedies.append(
            Remedy(
                name="a worker process waits in place of the step",
                changes=Change.DRAWS,
                lines=_WORKER,
            )
        )
    title = "the loader waits, and the step waits for the loader"
    return _finding(
        facts, "loader_waits", title, evidence, remedies, itemgetter("data")
    )


def _waits(facts: Facts) -> bool:
    has = facts.has("data", "sleep")
    return has and facts.median("sleep") >= 0.5 * facts.median("data") > 0


def loader_rows(facts: Facts) -> Finding | None:
    """The loader computes: Python for each row, or its collate_fn."""
    if not facts.has("data", "sleep") or _waits(facts):
        return None
    loader = facts.loader
    data = facts.median("data")
    rows = loader.row_calls * loader.row_s
    title = "the loader computes in the training thread, and the step waits for it"
    evidence = [
        f"a batch takes {in_ms(data)}, a step {in_ms(facts.median('step'))}; the loader computes and does not wait"
    ]
    advice = "make the epoch's batches ahead of the steps, by whole-array operations"
    # Rows and collating are compared with each other: both were timed in one moment.
    if loader.row_calls and loader.collate_s > max(rows, 0.25 * data):
        title = "collate_fn computes in the training thread, and the step waits for it"
        advice = "do once, before training, what collate_fn does with each batch"
        evidence.append(
            f"collate_fn takes {in_ms(loader.collate_s)}, reading {loader.row_calls} rows {in_ms(rows)}"
        )
    elif loader.row_calls and rows + loader.collate_s >= 0.5 * data:
        title = "the Dataset is read row by row in Python"
        if loader.bytes_read == 0:
            title += ", from memory"
        evidence.append(
            f"{loader.dataset}.__getitem__ is called {loader.row_calls} times a batch, {loader.row_s * 1e6:.0f} us each"
        )
        advice = (
            f"give {loader.dataset} a __getitems__(rows), which torch calls with all row numbers of a batch, and index "
            "whole arrays there; adopt's Rows.of makes batches inside of a captured step"
        )
    lines = [line for line in facts.lines if line.phase == "data"]
    sampled = sum(line.seconds for line in lines)
    # Lines were sampled in another moment than the rounds, in which the loader may have
    # taken a larger share.
    share_of_data = facts.share(itemgetter("data"))
    for line in lines[:3]:
        share = min(
            line.seconds / facts.sampled_s, share_of_data * line.seconds / sampled
        )
        if share >= 0.1:
            evidence.append(
                f"{share:.0%} of an iteration is at {line.name}: {line.text}"
            )
    remedies = [Remedy(name=advice, changes=Change.DRAWS)]
    if facts.worker and gain_of(_ratios(facts.worker)).low >= UNDER:
        remedies.append(
            Remedy(
                name="a worker process makes the batches",
                changes=Change.DRAWS,
                lines=_WORKER,
            )
        )
    return _finding(facts, "loader_rows", title, evidence, remedies, itemgetter("data"))


def untouched_rows(facts: Facts) -> Finding | None:
    """A dense optimizer moves rows of tables outside of the batch."""
    if not facts.has("step", "small_tables") or not facts.tables:
        return None
    table = max(facts.tables, key=lambda each: each.rows * each.dim)
    mover = " and ".join(facts.optimizers) or "the optimizer"
    rows = sum(each.rows for each in facts.tables)
    ids = sum(each.read for each in facts.tables)
    evidence = [
        f"{mover} moves all {facts.parameters:,} parameters in every step: the tables have "
        f"{rows:,} rows, of which a step reads at most {ids:,} (largest: {table.name}, {table.rows:,} x {table.dim})",
        f"with tables that hold only the rows of a few batches the step takes {_changed(facts, 'small_tables')} "
        f"instead of {in_ms(facts.median('step'))}",
    ]
    name = (
        "nn.Embedding(..., sparse=True), moved by SparseAdam, and Adam for the layers"
    )
    changes = Change.OTHER
    if facts.optimizers and {"SGD", "Adagrad"}.issuperset(facts.optimizers):
        # Both make the same step of sparse gradients as of dense ones.
        name = f"nn.Embedding(..., sparse=True), as {mover} reads it; weight_decay must be 0"
        changes = Change.ROUNDING
    remedies = [
        Remedy(
            name="adopt: the step captured, and rows moved when they are next read",
            changes=Change.ROUNDING,
            lines=_ADOPT,
        ),
        Remedy(name=name, changes=changes),
    ]
    title = "the optimizer sweeps rows that the step never read"
    return _finding(
        facts, "untouched_rows", title, evidence, remedies, partial(_swept, facts)
    )


def launches(facts: Facts) -> Finding | None:
    """The step consists of many tiny ops, and their price is Python and dispatch, not work."""
    if not facts.has("step", "op") or not facts.ops:
        return None
    price = median([_op_price(facts, each) for each in facts.rounds])
    evidence = [
        f"a step runs {facts.ops:,} ops, {price * 1e6:.1f} us each on this machine before any work: "
        f"{in_ms(facts.ops * price)} of {in_ms(facts.median('step'))}; matrix products take {in_ms(facts.product_s)}"
    ]
    if facts.device_busy is not None:
        evidence.append(
            f"the device runs {facts.kernels:,} kernels and copies a step, for {facts.device_busy:.0%} of the time"
        )
    if facts.op_lines:
        evidence.append(f"most ops: {_first_lines(facts.op_lines)}")
    remedies = [
        Remedy(
            name="adopt: the step captured, by turns beside yours with capture=True",
            changes=Change.ROUNDING,
            lines=_ADOPT,
        ),
        Remedy(
            name="one op on stacked tensors in place of a loop over them",
            changes=Change.ROUNDING,
        ),
    ]
    title = (
        "the step is many small ops: Python and dispatch take the time, not the work"
    )
    return _finding(
        facts, "launches", title, evidence, remedies, partial(_launched, facts)
    )


def _first_lines(counts: Sequence[tuple[str, int]]) -> str:
    return "; ".join(f"{line}, {count:,}" for line, count in counts[:3])


def host_syncs(facts: Facts) -> Finding | None:
    """The step brings values to Python, one by one."""
    if not facts.has("step", "sync") or not facts.syncs:
        return None
    evidence = [
        f"a step brings {facts.syncs:,} values to Python (.item(), .tolist(), if on a tensor, boolean masks): "
        f"{_first_lines(facts.sync_lines)}",
        f"with the ops that feed them: {facts.sync_ops:,} of {facts.ops:,} ops",
    ]
    remedy = Remedy(
        name="keep values as tensors (total += loss.detach()), and read one of them every hundred steps",
        changes=Change.EXACT,
    )
    title = "the step waits for values that Python wants to see"
    return _finding(
        facts, "host_syncs", title, evidence, [remedy], partial(_synced, facts)
    )


def threads(facts: Facts) -> Finding | None:
    """Another number of threads is faster."""
    for variant, count in (("one_thread", 1), ("all_threads", facts.cores)):
        if not facts.has("step", variant) or _variant_gain(facts, variant).low < UNDER:
            continue
        # Threads that wait for a core of somebody else's are no fault of the program.
        if facts.threads <= facts.cores and (facts.busy or 0.0) > _IDLE:
            continue
        title = "more threads than the step can use"
        if count > facts.threads:
            title = "cores stay idle"
        evidence = (
            f"a step takes {in_ms(facts.median('step'))} on {facts.threads} thread(s) and {_changed(facts, variant)} "
            f"on {count}; this process may use {facts.cores} core(s)"
        )
        remedy = Remedy(
            name=f"{count} thread(s)",
            changes=Change.ROUNDING,
            lines=(f"torch.set_num_threads({count})",),
        )
        return _finding(
            facts,
            "threads",
            title,
            [evidence],
            [remedy],
            lambda each, variant=variant: (  # type: ignore[misc]
                each["step"] - changed_seconds(each, variant)
            ),
        )
    return None


def between_steps(facts: Facts) -> Finding | None:
    """An evaluation or a checkpoint takes a share of the training."""
    if not facts.between or not facts.rounds:
        return None
    each = max(facts.between, key=lambda one_of: one_of.seconds / one_of.steps)
    seconds = each.seconds / each.steps
    iteration = fmean(map(facts.iteration, facts.rounds)) - facts.mean_between()
    evidence = (
        f"{each.name} takes {in_ms(each.seconds)} every {each.steps:,} steps, which take "
        f"{in_ms(iteration * each.steps)} themselves"
    )
    remedy = Remedy(
        name=f"{each.name} every {4 * each.steps:,} steps in place of {each.steps:,}",
        changes=Change.EXACT,
    )
    title = f"{each.name} stands in the way of training"
    return _finding(
        facts, "between_steps", title, [evidence], [remedy], lambda _: seconds
    )


def ranks(facts: Facts) -> Finding | None:
    """Ranks wait for one of them, or exchange for long."""
    if len(facts.ranks) < 2:
        return None
    own = [each.data_s + each.compute_s for each in facts.ranks]
    whole = fmean(each.data_s + each.blocked_s + each.compute_s for each in facts.ranks)
    slow = max(range(len(own)), key=own.__getitem__)
    others = [seconds for rank, seconds in enumerate(own) if rank != slow]
    more = own[slow] - median(others)
    blocked = median(
        [each.blocked_s for each in facts.ranks if each.rank != slow] or [0.0]
    )
    cost = min(more, blocked) / whole
    advice = f"give each rank the same rows and ids; {_RANKS} has the page about several ranks"
    if cost >= MEDIUM:
        rank = facts.ranks[slow]
        rest = [each for each in facts.ranks if each.rank != slow]
        late = rank.data_s - median([each.data_s for each in rest])
        where = "its batches" if late > 0.5 * more else "its step"
        title = f"the other ranks wait for rank {slow}: {where} take longer"
    else:
        cost = fmean(each.blocked_s for each in facts.ranks) / whole
        title = "the ranks exchange, and none of them is late"
        advice = f"exchange less often or fewer bytes; {_RANKS} has the page about several ranks"
    if cost < LEAST:
        return None
    evidence = [
        f"rank {each.rank}: {in_ms(each.data_s)} in its batch, {in_ms(each.compute_s)} computing, "
        f"{in_ms(each.blocked_s)} blocked in its step"
        for each in facts.ranks[:8]
    ]
    return Finding(
        cause="ranks",
        title=title,
        evidence=tuple(evidence),
        remedies=(Remedy(name=advice, changes=Change.OTHER),),
        cost=cost,
        size=size_of(cost),
        least=cost,
    )


# ---------------------------------------------------------------------------- your line


def _held(facts: Facts) -> Finding | None:
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
        lambda each: sum(_without_ops(facts, each, line) for line, _ in lines),
    )


def _your_line(
    facts: Facts,
    title: str,
    evidence: Sequence[str],
    remedy: Remedy,
    seconds: Callable[[Round], float],
    size: Size | None = None,
) -> Finding:
    return _finding(facts, "your_line", title, evidence, [remedy], seconds, size)


def _mode(facts: Facts) -> Finding | None:
    """Anomaly mode or a profiler was left on."""
    if not facts.modes or not facts.has("step"):
        return None
    modes = " and ".join(facts.modes)
    lines = held_lines(facts)

    def seconds(each: Round) -> float:
        unexplained = sum(_without_ops(facts, each, line) for line, _ in lines)
        if "quiet" not in each:
            return unexplained
        # Both modes look up the stack at each op, and the frames of an experiment are
        # on top of the user's own.
        return max(each["step"] - changed_seconds(each, "quiet"), unexplained)

    evidence = []
    if facts.has("quiet"):
        evidence.append(
            f"without it a step takes {_changed(facts, 'quiet')} instead of {in_ms(facts.median('step'))}"
        )
    pasted: tuple[str, ...] = ()
    if "anomaly mode" in facts.modes:
        pasted = ("torch.autograd.set_detect_anomaly(False)",)
    remedy = Remedy(name=f"train without {modes}", changes=Change.EXACT, lines=pasted)
    return _your_line(facts, f"{modes} was left on", evidence, remedy, seconds)


def _whole(facts: Facts) -> Finding | None:
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
    return _your_line(facts, title, [evidence], remedy, partial(_whole_tables, facts))


def _doubles(facts: Facts) -> Finding | None:
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


def _garbage(facts: Facts) -> Finding | None:
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


def _autocast(facts: Facts) -> Finding | None:
    """The step is faster without its own autocast."""
    if not facts.has("step", "no_autocast"):
        return None
    if _variant_gain(facts, "no_autocast").low < UNDER:
        return None
    evidence = (
        f"a step takes {in_ms(facts.median('step'))}, without autocast {_changed(facts, 'no_autocast')}; each small op "
        "casts, and its products are too small to gain"
    )
    remedy = Remedy(
        name="leave autocast out (enabled=False): 32-bit products", changes=Change.OTHER
    )
    return _your_line(
        facts,
        f"{facts.autocast_line} runs under autocast, and the step is faster without",
        [evidence],
        remedy,
        lambda each: each["step"] - changed_seconds(each, "no_autocast"),
    )


def _all_items(facts: Facts) -> Finding | None:
    """A softmax over all items: an offer, since sampling some of them is another loss."""
    if not facts.all_items or not facts.has("data", "step"):
        return None
    most = max(facts.all_items, key=lambda each: each.seconds)

    def seconds(each: Round) -> float:
        spent = most.seconds * _beyond_ops(facts, each)
        return (1 - _SAMPLED_ITEMS / most.rows) * min(each["step"], spent)

    if facts.share(seconds) < LARGE:
        return None
    evidence = f"ops over {most.rows:,} items take {in_ms(most.seconds)} of a step"
    remedy = Remedy(
        name=f"score the positive and {_SAMPLED_ITEMS:,} sampled items, with the logQ correction",
        changes=Change.OTHER,
    )
    title = f"{most.line}: a softmax over {most.rows:,} items is most of the step"
    return _your_line(facts, title, [evidence], remedy, seconds, "offer")


CAUSES: tuple[Callable[[Facts], Finding | None], ...] = (
    _mode,
    loader_waits,
    loader_rows,
    untouched_rows,
    launches,
    host_syncs,
    threads,
    _held,
    _whole,
    _doubles,
    _garbage,
    _autocast,
    between_steps,
    ranks,
    _all_items,
)


def findings(facts: Facts) -> tuple[Finding, ...]:
    """Returns the findings of at least a twentieth of an iteration, the largest first, offers last."""
    found: list[tuple[tuple[bool, bool, float], Finding]] = []
    for rule in CAUSES:
        finding = rule(facts)
        if finding is not None and finding.cost >= LEAST:
            # A debugging mode comes first: it lengthens what the other causes are
            # measured by. Offers come last: they change what is learned.
            order = finding.size == "offer", rule is not _mode, -finding.cost
            found.append((order, finding))
    return tuple(finding for _, finding in sorted(found, key=lambda each: each[0]))


def faults(facts: Facts) -> list[Finding]:
    """Returns the findings of .15 of an iteration and more, without offers."""
    return [each for each in findings(facts) if each.size in ("large", "medium")]


def too_noisy(facts: Facts) -> str:
    """Returns why these facts carry no verdict; empty if they do.

    Where rounds are spread far, a cause stands if it takes a share in three of four of them. Threads that want more
    cores than there are make noise themselves.
    """
    found = faults(facts)
    if (
        facts.tables
        and not facts.has("small_tables")
        and not any(finding.size == "large" for finding in found)
    ):
        why = facts.not_measured.get("small_tables", "not measured")
        return f"no verdict: whether rows that are not read cost time is not known ({why}); give more time (budget_s)"
    if facts.spread <= NOISY:
        return ""
    times = sorted(map(facts.iteration, facts.rounds))
    if len(times) < 4:
        return f"too few rounds for a verdict: {len(times)} of 4; give more time (budget_s)"
    for finding in found:
        # A share is a ratio within a round, and what slows the machine slows both sides
        # of it.
        is_large = finding.size == "large" and finding.least >= MEDIUM
        if is_large or finding.cause == "threads":
            return ""
    return (
        f"too noisy for a verdict: the middle half of {len(times)} rounds is spread over {facts.spread:.0%} of the "
        f"median iteration, {in_ms(times[0])} to {in_ms(times[-1])}; measure again on a machine that does less else"
    )


# ------------------------------------------------------------------------------- trials


def _variant_gain(facts: Facts, name: str) -> Gain:
    """Returns the speed-up of an iteration with a changed step."""
    return facts.gain(lambda each: each["data"] + changed_seconds(each, name))


def _ratios(turns: Sequence[tuple[float, float]]) -> list[float]:
    return [before / after for before, after in turns]


def trials(facts: Facts) -> tuple[Trial, ...]:
    """Returns a row for each change that was run; what was not run has none."""
    made: list[Trial] = []
    share_of_data = 0.0
    if facts.has("data", "step"):
        share_of_data = facts.share(itemgetter("data"))
    if facts.has("ready") and share_of_data >= LEAST:
        made.append(
            Trial(
                name="batches ready in time",
                gain=facts.gain(alone_seconds),
                changes=Change.EXACT,
                why="the step without its loader: no loader gains more",
            )
        )
    if facts.worker:
        why = "a real worker, by the wall clock"
        if facts.loader.bytes_read == 0:
            why += "; the rows are in memory, so it runs the same Python and sends them"
        made.append(
            Trial(
                name="a loader worker",
                gain=gain_of(_ratios(facts.worker)),
                changes=Change.DRAWS,
                why=why,
                lines=_WORKER,
            )
        )
    busy = ""
    if facts.busy is not None and facts.busy >= 0.1:
        busy = f"while others keep {facts.busy:.1f} cores busy"
    for name, count in (("one_thread", 1), ("all_threads", facts.cores)):
        if facts.has("step", name):
            made.append(
                Trial(
                    name=f"{count} thread(s), not {facts.threads}",
                    gain=_variant_gain(facts, name),
                    changes=Change.ROUNDING,
                    why=busy,
                    lines=(f"torch.set_num_threads({count})",),
                )
            )
    if facts.has("step", "quadruple"):
        made.append(
            Trial(
                name="4 times the batch",
                gain=facts.gain(
                    lambda each: each["data"] + changed_seconds(each, "quadruple") / 4
                ),
                changes=Change.OTHER,
                why="by row; the learning rate must follow",
            )
        )
    if facts.has("step", "bf16"):
        made.append(
            Trial(
                name="bf16 autocast",
                gain=_variant_gain(facts, "bf16"),
                changes=Change.OTHER,
                lines=_BF16,
            )
        )
    if facts.has("step", "no_autocast"):
        made.append(
            Trial(
                name="without autocast",
                gain=_variant_gain(facts, "no_autocast"),
                changes=Change.OTHER,
                why=f"autocast is on at {facts.autocast_line}",
            )
        )
    if facts.has("step", "quiet"):
        made.append(
            Trial(
                name=f"without {' and '.join(facts.modes)}",
                gain=_variant_gain(facts, "quiet"),
                changes=Change.EXACT,
            )
        )
    if facts.has("step", "small_tables"):
        made.append(
            Trial(
                name="small tables",
                gain=_variant_gain(facts, "small_tables"),
                changes=Change.OTHER,
                why="an experiment: as if rows that a step does not read cost nothing",
            )
        )
    if facts.captured:
        made.append(
            Trial(
                name="the step captured by adopt",
                gain=gain_of(_ratios(facts.captured)),
                changes=Change.ROUNDING,
                why="by turns beside the step as it is",
                lines=_ADOPT,
            )
        )
    return tuple(made)
