"""Rules: from facts about a training step to its causes, ranked by their cost, and to what will help and what not.

Each rule is a pure function of :class:`Facts`. Those about batches have a file of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import fmean, median, stdev

from torchrec_ext.diagnose import rank_rules
from torchrec_ext.diagnose.costs import (
    alone_seconds,
    bare_step,
    beyond_ops,
    busy_text,
    capture_remedy,
    capture_seconds,
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
from torchrec_ext.diagnose.facts import DRIFT, Facts, Gain, Round
from torchrec_ext.diagnose.findings import (
    LARGE,
    LEAST,
    MEDIUM,
    UNDER,
    Action,
    Answer,
    Change,
    Finding,
    Helps,
    Remedy,
    expected,
    finding_of,
    finding_of_cost,
    in_ms,
    share_of,
)
from torchrec_ext.diagnose.loader_rules import IDLE, loader_computes, loader_sleeps, row_python, worker_gain

NOISY = 0.6  # spread of iterations above which there is no verdict
_LEAST_LINES = 0.1  # share of an iteration that such lines take together; what samples say of less is not sure
_LOOP_OPS = 50  # ops of a line from which on it is a loop
_SAMPLED_ITEMS = 1_024  # items to which a softmax over all of them is compared


def findings(facts: Facts) -> tuple[Finding, ...]:
    """Returns the findings of at least a twentieth of an iteration, the largest first, offers last."""
    every = [finding for rule in RULES.values() if (finding := rule(facts)) is not None]
    every += rank_rules.rank_findings(facts)
    costly = [finding for finding in every if finding.cost >= LEAST]
    return tuple(sorted(costly, key=lambda finding: (finding.size == "offer", -finding.cost)))


def too_noisy(facts: Facts) -> str:
    """Returns why these facts carry no verdict; empty if they do.

    Where rounds are spread far, a cause stands if the ratios within rounds still say that a remedy gains, or that it
    takes a share in each of them: threads that want more cores than there are make noise themselves.
    """
    faults = [finding for finding in findings(facts) if finding.size in ("large", "medium")]
    large = [finding for finding in faults if finding.size == "large"]
    if facts.tables and not facts.has("small_tables") and not large:
        why = facts.not_measured.get("small_tables", "not measured")
        return f"no verdict: whether rows that are not read cost time is not known ({why}); give more time (budget_s)"
    gains = [remedy.gain for finding in faults for remedy in finding.remedies if remedy.is_measured]
    is_certain = any(gain is not None and gain.low >= UNDER for gain in gains)
    is_certain = is_certain or any(finding.least >= MEDIUM for finding in large)
    if facts.spread <= NOISY or (is_certain and len(facts.rounds) >= 4):
        return ""
    times = sorted(facts.iteration(each) for each in facts.rounds)
    if len(times) < 4:
        return f"too few rounds for a verdict: {len(times)} of 4; give more time (budget_s)"
    return (
        f"too noisy for a verdict: the middle half of {len(times)} rounds is spread over {facts.spread:.0%} of the "
        f"median iteration, {in_ms(times[0])} to {in_ms(times[-1])}; measure again on a machine that does less else"
    )


# the step itself


def untouched_rows(facts: Facts) -> Finding | None:
    """A dense optimizer moves rows of tables outside of the batch."""
    if not facts.has("step", "small_tables") or not facts.tables:
        return None
    table = max(facts.tables, key=lambda each: each.rows * each.dim)
    mover = " and ".join(facts.optimizers) or "the optimizer"
    rows, ids = sum(each.rows for each in facts.tables), sum(each.read for each in facts.tables)
    evidence = [
        f"{mover} moves all {facts.parameters:,} parameters in every step: the tables have "
        f"{rows:,} rows, of which a step reads at most {ids:,} (largest: {table.name}, {table.rows:,} x {table.dim})",
        f"with tables that hold only the rows of a few batches the step takes {in_ms(facts.median('small_tables'))} "
        f"instead of {bare_step(facts)}",
    ]
    lazily = Remedy(
        name="SparseAdam on tables with sparse=True",
        lines=("nn.Embedding(..., sparse=True)", "torch.optim.SparseAdam(tables)  # and Adam for the layers"),
        gain=expected(
            facts,
            lambda each: each["data"] + min(each["step"], 3.0 * changed_seconds(each, "small_tables")),
            lambda each: each["data"] + changed_seconds(each, "small_tables"),
        ),
        changes=Change.OPTIMIZER,
        basis="predicted from the step with small tables",
    )
    return finding_of(
        facts, "untouched_rows", "the optimizer sweeps rows that the step never read", evidence,
        [capture_remedy(facts), lazily], lambda each: swept_seconds(facts, each),
    )  # fmt: skip


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
        evidence.append("most ops: " + "; ".join(f"{line}, {count:,}" for line, count in facts.op_lines[:3]))
    remedies = [*_vectorised(facts), capture_remedy(facts)]
    return finding_of(
        facts, "launches", "the step is many small ops: Python and dispatch take the time, not the work", evidence,
        remedies, lambda each: launch_seconds(facts, each),
    )  # fmt: skip


def _vectorised(facts: Facts) -> list[Remedy]:
    """Returns whole-tensor ops as a remedy for a user's loop with a third of a step's ops."""
    lines = [each for each in facts.op_lines if each[0] not in ("backward", "optimizer", "step")]
    if not lines or lines[0][1] < max(_LOOP_OPS, LARGE * facts.ops):
        return []
    line, count = lines[0]
    function = line.rpartition(" in ")[2]
    of_loop = sum(ops for name, ops in lines if name.rpartition(" in ")[2] == function)
    without = of_loop - facts.sync_ops  # those that feed values to Python are another cause's
    if without < _LOOP_OPS:
        return []
    backward = dict(facts.op_lines).get("backward", 0) * of_loop / sum(ops for _, ops in lines)

    def price(each: Round, ops: float) -> float:
        return launch_seconds(facts, each) * min(1.0, ops / facts.ops)

    return [
        Remedy(
            name="one op on all tensors in place of a loop",
            lines=(
                f"{line} makes {count:,} ops: stack what it loops over, or take torch._foreach_*",
                "torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)  # to clip all gradients at once",
            ),
            gain=expected(
                facts,
                lambda each: each["data"] + each["step"] - 0.7 * price(each, without),
                lambda each: each["data"] + max(0.02 * each["step"], each["step"] - price(each, without + backward)),
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
        gain=gain_without(facts, lambda each: unexplained_seconds(facts, each), 0.85, 1.1),
        changes=Change.LESS_OFTEN,
        basis="predicted from samples of the line that the loop is at",
    )
    evidence = [f"no tensor op explains the time at {line.name}, {share:.0%}: {line.text}" for line, share in lines[:3]]
    title = f"{lines[0][0].name} holds the step, and not with tensor ops"
    return finding_of(facts, "python_lines", title, evidence, [remedy], lambda each: unexplained_seconds(facts, each))


def debug_modes(facts: Facts) -> Finding | None:
    """Anomaly mode or a profiler was left on."""
    if not facts.modes or not facts.has("step"):
        return None
    modes = " and ".join(facts.modes)

    def seconds(each: Round) -> float:
        quiet = each["step"] - changed_seconds(each, "quiet") if "quiet" in each else 0.0
        return max(quiet, unexplained_seconds(facts, each))

    evidence = [f"{len(facts.modes)} debugging mode is on while the step runs: {modes}"]
    if facts.has("quiet"):
        evidence.append(f"without it a step takes {in_ms(facts.median('quiet'))} instead of {bare_step(facts)}")
    remedy = Remedy(
        name=f"train without {modes}",
        lines=("torch.autograd.set_detect_anomaly(False)", "leave `with torch.profiler.profile()` after some steps"),
        # Both modes look up the stack at each op, and the frames of an experiment are on top of the user's own.
        gain=gain_without(facts, seconds, 0.85, 1.0),
        changes=Change.EXACT,
        basis="measured: steps without it" if facts.has("quiet") else "predicted",
        is_measured=facts.has("quiet"),
    )
    return finding_of(facts, "debug_modes", f"{modes} was left on", evidence, [remedy], seconds)


def whole_tables(facts: Facts) -> Finding | None:
    """A line works on all rows of a table, and a step reads few of them."""
    if not facts.whole_tables or not facts.has("data", "step"):
        return None
    table = max(facts.whole_tables, key=lambda each: each.seconds)
    seconds = partial(whole_table_seconds, facts)
    remedy = Remedy(
        name="the same on the rows that the batch reads",
        lines=(f"{table.line}: look the rows up first, as in F.normalize(table(ids)); copy a table seldom",),
        gain=gain_without(facts, seconds, 0.8, 1.3),
        changes=Change.ROUNDING,
        basis="predicted from the time of these ops",
    )
    evidence = [
        f"{table.line} works on {table.rows:,} rows for {in_ms(table.seconds)}, and {in_ms(table.backward_s)} in "
        f"backward; a step looks up {table.read:,} of them"
    ]
    return finding_of(
        facts,
        "whole_tables",
        "the step works on whole tables, and reads few of their rows",
        evidence,
        [remedy],
        seconds,
    )


def double_precision(facts: Facts) -> Finding | None:
    """Ops run in 64 bits."""
    if not facts.double_s or not facts.has("data", "step"):
        return None

    def saved(each: Round) -> float:
        return 0.5 * min(each["step"], facts.double_s)

    remedy = Remedy(
        name="32-bit floats",
        lines=("model.float(); x = x.float()  # numpy's arrays are 64-bit unless you say otherwise",),
        gain=gain_without(facts, saved, 0.5, 1.3),
        changes=Change.FLOAT32,
        basis="predicted: half of the bits take about half of the time",
    )
    evidence = [f"{in_ms(facts.double_s)} of a step are in ops of 64-bit floats, most of them at {facts.double_line}"]
    return finding_of(facts, "double_precision", "the step computes in 64-bit floats", evidence, [remedy], saved)


def garbage(facts: Facts) -> Finding | None:
    """Python's garbage collector walks over many objects."""
    if not facts.has("data", "step", "gc") or not any(each["gc"] for each in facts.rounds):
        return None
    mean = fmean([each["gc"] for each in facts.rounds])  # a long one comes in few of the rounds
    error = stdev([each["gc"] for each in facts.rounds]) / len(facts.rounds) ** 0.5 if len(facts.rounds) > 1 else mean
    rounds = [{**each, "step": max(0.0, each["step"] - each["gc"]) + mean, "gc": mean} for each in facts.rounds]
    facts = replace(facts, rounds=rounds)
    remedy = Remedy(
        name="fewer objects for the garbage collector to walk over",
        lines=("import gc; gc.collect(); gc.freeze()  # before the training loop",),
        # A collection also leaves the step with cold caches. Its mean is not known better than its error says.
        gain=gain_without(facts, lambda _: mean, max(0.0, 0.5 * (1 - error / mean)), 1.3 * (1 + error / mean)),
        changes=Change.EXACT,
        basis="measured: the seconds of its collections",
        is_measured=True,
    )
    evidence = [f"collections take {in_ms(mean)} of an iteration, by the mean of {len(rounds)} rounds"]
    return finding_of(
        facts, "garbage", "Python's garbage collector runs during training", evidence, [remedy], lambda each: each["gc"]
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
        lines=(f"{most.line}: score the positive and {_SAMPLED_ITEMS:,} sampled items, with the logQ correction",),
        gain=gain_without(facts, seconds, 0.8, 1.1),
        changes=Change.LOSS,
        basis="predicted from the time of ops over all items",
    )
    evidence = [f"{most.line}: ops over {most.items:,} items take {in_ms(most.seconds)} of a step"]
    title = f"a softmax over {most.items:,} items is most of the step"
    return finding_of_cost("all_items", title, evidence, [remedy], cost, size="offer")


def host_syncs(facts: Facts) -> Finding | None:
    """The step brings values to Python, one by one."""
    if not facts.has("step", "sync") or not facts.syncs:
        return None
    lines = "; ".join(f"{line}, {count:,}" for line, count in facts.sync_lines[:3])
    evidence = [
        f"a step brings {facts.syncs:,} values to Python (.item(), .tolist(), if on a tensor, boolean masks): {lines}",
        f"with the ops that feed them: {facts.sync_ops:,} of {facts.ops:,} ops",
    ]
    timed = bool(facts.lines)
    if timed:
        seconds = share_of(facts, lambda each: sync_line_seconds(facts, each)) * facts.sampled_s
        evidence.append(f"these lines take {in_ms(seconds)} of {in_ms(facts.sampled_s)}")
    least, most = (0.93, 1.25) if timed else (0.6, 1.3)
    remedy = Remedy(
        name="keep values as tensors, and read one of them every hundred steps",
        lines=("total += loss.detach()  # in place of loss.item(); total.item() where it is printed",),
        gain=gain_without(facts, lambda each: sync_seconds(facts, each), least, most),
        changes=Change.EXACT,
        basis="predicted from the seconds at these lines"
        if timed
        else "predicted from the price of an op and of .item() on this machine",
    )
    return finding_of(
        facts, "host_syncs", "the step waits for values that Python wants to see", evidence, [remedy],
        lambda each: sync_seconds(facts, each),
    )  # fmt: skip


# cores, what runs beside steps, and offers


def _gain_of_variant(facts: Facts, name: str) -> Gain:
    """Returns the speed-up of an iteration with a changed step."""
    return facts.gain(lambda each: each["data"] + changed_seconds(each, name))


def _other_threads(facts: Facts, cause: str, title: str, evidence: str, variant: str, remedy: Remedy) -> Finding | None:
    """Makes a finding of another number of threads, if it is faster."""
    if (gain := _gain_of_variant(facts, variant)).low < UNDER:
        return None
    remedy = replace(remedy, gain=gain, is_measured=True, action=Action.THREADS)
    return finding_of(
        facts, cause, title, [evidence], [remedy], lambda each: each["step"] - changed_seconds(each, variant)
    )


def too_many_threads(facts: Facts) -> Finding | None:
    """One thread is faster than the current number."""
    if not facts.has("step", "one_thread"):
        return None
    evidence = (
        f"a step takes {bare_step(facts)} on {facts.threads} threads and {in_ms(facts.median('one_thread'))} on "
        f"one; this process may use {facts.cores} core(s){busy_text(facts)}"
    )
    lines = ("torch.set_num_threads(1)", "OMP_NUM_THREADS=1 python ...", "--threads 1  # with torchx run")
    remedy = Remedy(name="one thread", lines=lines, gain=None, changes=Change.ROUNDING, basis="measured", count=1)
    title = "more threads than the step can use"
    return _other_threads(facts, "too_many_threads", title, evidence, "one_thread", remedy)


def too_few_threads(facts: Facts) -> Finding | None:
    """All cores are faster than the current number of threads."""
    if not facts.has("step", "all_threads"):
        return None
    evidence = (
        f"a step takes {bare_step(facts)} on {facts.threads} thread(s) and {in_ms(facts.median('all_threads'))} "
        f"on {facts.cores}"
    )
    cores = facts.cores
    lines = (f"torch.set_num_threads({cores})", f"--threads {cores}  # with torchx run")
    remedy = Remedy(name="all cores", lines=lines, gain=None, changes=Change.ROUNDING, basis="measured", count=cores)
    return _other_threads(facts, "too_few_threads", "cores stay idle", evidence, "all_threads", remedy)


def sequential_towers(facts: Facts) -> Finding | None:
    """Independent sub-networks run one after the other, while cores stay idle."""
    idle = facts.cores - facts.threads - (facts.busy or 0.0)
    if len(facts.towers) < 2 or facts.towers_apart or idle < 1 - IDLE or not facts.has("step", "forward", "backward"):
        return None
    at_once = min(len(facts.towers), 1 + round(idle))
    names = [name for name, _ in facts.towers]
    shares = sorted((share for _, share in facts.towers), reverse=True)
    saved = sum(shares) - max(shares[0], sum(shares) / at_once)

    def hidden(each: Round) -> float:
        return saved * (each["forward"] + each["backward"])

    def beyond_threads(each: Round) -> float:  # which take the same cores, and need no exchange
        by_threads = each["step"] - changed_seconds(each, "all_threads") if "all_threads" in each else 0.0
        return max(0.0, hidden(each) - max(0.0, by_threads))

    lines: tuple[str, ...] = (f"rec.train.hybrid -j 1x{at_once}  # and --set plan.towers=auto",)
    if not facts.recipe:
        ranks = ", ".join(f'"{name.partition(".")[2] or name}": {index % at_once}' for index, name in enumerate(names))
        lines = (
            "from torchrec_ext.adopt import adopt_towers",
            f"step = adopt_towers(model, optimizer, loss, runtime, {{{ranks}}}, batch)",
            f"# under torchrun --nproc-per-node {at_once}; a tower that reads tables outside of it holds these then",
        )
    remedy = Remedy(
        name=f"towers at the same time, on {at_once} ranks",
        lines=lines,
        gain=expected(
            facts,
            lambda each: each["data"] + each["step"] - 0.4 * hidden(each),
            lambda each: each["data"] + each["step"] - hidden(each),
        ),
        changes=Change.ROUNDING,
        basis="predicted: from less than half to all of what the shorter towers take; the exchange takes the rest",
    )
    evidence = [
        "none reads what another one returns: "
        + ", ".join(f"{name} ({share:.0%} of the forward)" for name, share in facts.towers),
        f"{facts.threads} thread(s) on {facts.cores} core(s){busy_text(facts)}",
    ]
    title = "sub-networks that do not read each other run one after the other, and cores stay idle"
    return finding_of(facts, "sequential_towers", title, evidence, [remedy], beyond_threads)


def recompilation(facts: Facts) -> Finding | None:
    """torch.compile makes graphs anew during training."""
    if not facts.recompiles:
        return None
    remedy = Remedy(
        name="one shape",
        lines=("DataLoader(..., drop_last=True)", "torch.compile(..., dynamic=True)"),
        gain=None,
        changes=Change.EXACT,
        basis="not predicted",
    )
    evidence = [f"torch.compile made {facts.recompiles} graphs during steps whose batches have one shape"]
    title = "torch.compile compiles again during training"
    return finding_of_cost("recompilation", title, evidence, [remedy], LARGE)


def between_steps(facts: Facts) -> Finding | None:
    """An evaluation or a checkpoint takes a share of the training."""
    if not facts.between or not facts.rounds:
        return None
    each = max(facts.between, key=lambda one_of: one_of.seconds / one_of.steps)
    seconds = each.seconds / each.steps
    iteration = sum(map(facts.iteration, facts.rounds)) / len(facts.rounds)
    evidence = [
        f"{each.name} takes {in_ms(each.seconds)} every {each.steps:,} steps, which take "
        f"{in_ms((iteration - facts.mean_between()) * each.steps)} themselves"
    ]
    remedy = Remedy(
        name=f"{each.name} a quarter as often",
        lines=(
            "--set train.eval_every=...  # four times today's"
            if facts.recipe
            else f"every {4 * each.steps:,} steps in place of {each.steps:,}",
        ),
        gain=expected(facts, lambda round_: round_["data"] + round_["step"] - 0.75 * seconds),
        changes=Change.LESS_OFTEN,
        basis="measured once",
        is_measured=True,
    )
    title = f"{each.name} stands in the way of training"
    return finding_of(facts, "between_steps", title, evidence, [remedy], lambda _: seconds)


def small_batch(facts: Facts) -> Finding | None:
    """A row costs much less in a larger batch: an offer, since it changes what is learned."""
    remedies = larger_batches(facts)
    if not remedies or not (gain := remedies[-1].gain) or gain.low < 1.15:
        return None
    larger = in_ms(facts.median("quadruple"))
    evidence = [f"a step of {facts.rows:,} rows takes {bare_step(facts)}, of four times as many {larger}"]
    cost = 1 - 1 / gain.middle
    return finding_of_cost("small_batch", "a row costs less in a larger batch", evidence, remedies, cost, size="offer")


def larger_batches(facts: Facts) -> list[Remedy]:
    """Returns larger batches: speed-ups for each row, with the loader as fast for each row as now."""
    remedies = []
    for name, times in (("double", 2), ("quadruple", 4)):
        if facts.has("step", name):

            def seconds(each: Round, name: str = name, times: int = times) -> float:
                return each["data"] + changed_seconds(each, name) / times

            size = f"{times * facts.rows:,}" if facts.rows else f"{times} x today's"
            remedies.append(
                Remedy(
                    name=f"{times} times the batch",
                    lines=(f"batch_size={size}",),
                    gain=expected(facts, seconds),
                    changes=Change.BATCH,
                    basis="measured",
                    is_measured=True,
                )
            )
    return remedies


def precision(facts: Facts) -> Finding | None:
    """Products of 16 bits are faster: an offer, since they round."""
    if not facts.has("step", "bf16"):
        return None
    gain = _gain_of_variant(facts, "bf16")
    if gain.low < 1.1:
        return None
    evidence = [f"a step takes {bare_step(facts)}, under bf16 autocast {in_ms(facts.median('bf16'))}"]
    lines = ('with torch.autocast("cpu", torch.bfloat16): loss = ...', "--set train.amp=bf16  # with torchx run")
    remedy = Remedy(
        name="bf16 autocast", lines=lines, gain=gain, changes=Change.BF16_PRODUCTS, basis="measured", is_measured=True
    )
    title = "products of 16 bits are faster here"
    return finding_of_cost("precision", title, evidence, [remedy], 1 - 1 / gain.middle, size="offer")


RULES: dict[str, Callable[[Facts], Finding | None]] = {
    rule.__name__: rule
    for rule in (
        *(loader_sleeps, row_python, loader_computes, untouched_rows, launches, host_syncs),
        *(debug_modes, python_lines, whole_tables, double_precision, garbage),
        *(too_many_threads, too_few_threads, sequential_towers, recompilation, between_steps),
        *(all_items, small_batch, precision),
    )
}


# what will help and what will not


def answers(facts: Facts) -> tuple[Answer, ...]:
    """Returns the gains of usual attempts: workers, threads, DDP, batch, precision, compile."""
    return tuple(make(facts) for make in (_workers, _threads, _ddp, _larger_batch, _mixed_precision, _compile))


def _answer(name: str, gain: Gain | None, why: str) -> Answer:
    helps: Helps = "not known"
    if gain is not None:
        # What the machine drifts between two moments widens an interval, and says nothing about the remedy.
        helps = "no" if gain.high / DRIFT < UNDER else "yes" if gain.low >= UNDER else "perhaps"
    return Answer(name=name, gain=gain, helps=helps, why=why)


def _workers(facts: Facts) -> Answer:
    if facts.has("data", "step") and share_of(facts, lambda each: each["data"]) < 0.02:
        hidden = Gain(1.0, facts.gain(alone_seconds).high / DRIFT)
        return _answer(
            "loader workers", hidden, f"a batch takes {in_ms(facts.median('data'))}: there is nothing to hide"
        )
    gain, basis = worker_gain(facts)
    return _answer("loader workers", gain, basis + (
        "; the rows are in memory, so a worker runs the same Python elsewhere and sends what it made"
        if facts.loader.row_calls and facts.loader.bytes_read == 0 else ""
    ))  # fmt: skip


def _threads(facts: Facts) -> Answer:
    gains = {name: _gain_of_variant(facts, name) for name in ("one_thread", "all_threads") if facts.has("step", name)}
    if not gains:
        why = facts.not_measured.get("all_threads", "not measured")
        return _answer("other thread numbers", None, f"not tried: {why}")
    numbers = {"one_thread": 1, "all_threads": facts.cores}
    best = max(gains, key=lambda name: gains[name].middle)
    return _answer(
        "other thread numbers", gains[best],
        f"measured: {numbers[best]} thread(s) in place of {facts.threads}{busy_text(facts)}",
    )  # fmt: skip


def _ddp(facts: Facts) -> Answer:
    name = "DDP on this machine"
    if facts.ranks:
        return _one_rank(facts)
    if facts.cores < 2:
        return _answer(name, Gain(0.5, 1.0), "this process has one core: two processes would share it")
    if facts.recipe:
        return _answer(
            name, None, "not predicted for recipes: rec.train.hybrid -j 1x2 prints rows a second of two ranks"
        )
    if not facts.has("data", "step", "quarter", "op"):
        return _answer(name, None, facts.not_measured.get("quarter", "not measured"))
    dense = 4 * facts.parameters
    # Half the batch in each of two processes; gradients of all parameters cross memory four to twelve times.
    exchange = dense / max(facts.bytes_per_s, 1e9)

    def slow(each: Round) -> float:
        step = (2 * each["step"] + changed_seconds(each, "quarter")) / 3
        return 0.5 * each["data"] + step + exchange * 12 + 100 * each["op"] * 6

    def fast(each: Round) -> float:
        quarter = changed_seconds(each, "quarter")
        return 0.5 * each["data"] + (quarter + (each["step"] - quarter) / 3) + exchange * 4 + 100 * each["op"]

    gain = facts.gain(lambda each: 1.25 * slow(each), fast)
    why = f"predicted for 2 processes at the same batch in all, which exchange {dense / 2**20:,.1f} MiB a step"
    if facts.busy is not None and facts.cores - facts.busy < 1.7:
        gain, why = Gain(gain.low / 2, gain.high), f"{why}{busy_text(facts)}"
    return _answer(name, gain, why)


def _one_rank(facts: Facts) -> Answer:
    """Answers the other way round if there are several ranks already."""
    size = len(facts.ranks)
    seconds = [each.alone_s for each in facts.ranks if each.alone_s]
    if not seconds:
        why = facts.not_measured.get("one rank alone", "not measured")
        return _answer(f"one rank, not {size}", None, why)
    why = (
        f"measured: a rank takes {in_ms(sum(seconds) / len(seconds))} for its step without exchange while the others "
        f"sleep; one rank would make {size} of these. What DDP over {size} ranks gains is the inverse"
    )
    return _answer(f"one rank, not {size}", rank_rules.one_rank(facts), why)


def _larger_batch(facts: Facts) -> Answer:
    remedies = larger_batches(facts)
    if not remedies:
        return _answer("a larger batch", None, facts.not_measured.get("quadruple", "not measured"))
    return _answer("a larger batch", remedies[-1].gain, f"measured: {remedies[-1].name}, by row; {Change.BATCH.value}")


def _mixed_precision(facts: Facts) -> Answer:
    if not facts.has("step", "bf16"):
        return _answer("mixed precision", None, facts.not_measured.get("bf16", "not measured"))
    gain = _gain_of_variant(facts, "bf16")
    return _answer("mixed precision", gain, f"measured: bf16 autocast; {Change.BF16_PRODUCTS.value}")


def _compile(facts: Facts) -> Answer:
    if not facts.has("data", "step", "op") or not facts.ops:
        return _answer("torch.compile", None, facts.not_measured.get("ops", "not measured"))

    if facts.recipe:
        remedy = capture_remedy(facts)
        return _answer("torch.compile", remedy.gain, f"{remedy.lines[0]}: {remedy.basis}")
    if facts.syncs:
        why = f"a graph ends at each of the {facts.syncs:,} values that the step brings to Python; take these out first"
        return _answer("torch.compile", None, why)

    # The optimizer and rows that are not read stay as they are where model and loss alone are compiled.
    def seconds(each: Round, *, launches: float, rest: float, most: float) -> float:
        optimizer = each.get("optimizer", 0.0)
        inside = max(0.0, each["step"] - optimizer)
        products = min(facts.product_s, inside)
        share = inside / each["step"] if each["step"] else 0.0
        price = launches * share * facts.ops * op_price(facts, each)
        compiled = products + rest * max(0.0, inside - products - price)
        return each["data"] + optimizer + min(inside * most, compiled)

    gain = facts.gain(
        partial(seconds, launches=0.5, rest=1.0, most=1.1), partial(seconds, launches=1.0, rest=0.4, most=1.0)
    )
    low, high = capture_seconds(facts)
    why = f"predicted, not tried: model and loss compiled, about {low:.0f} to {high:.0f} s of compiling"
    return _answer("torch.compile", gain, why)
