"""Rules: from facts about a training step to its causes, ranked by their cost.

Each rule is a pure function of :class:`Facts`. Those about batches and about the step itself have files of their own;
here are those about cores, about what runs beside steps, and offers.
"""

from __future__ import annotations

from collections.abc import Callable

from torchrec_ext.diagnose import rank_rules
from torchrec_ext.diagnose.costs import (
    bare_step,
    busy_text,
    changed_seconds,
)
from torchrec_ext.diagnose.facts import Facts, Round
from torchrec_ext.diagnose.findings import (
    LARGE,
    LEAST,
    MATH,
    UNDER,
    Finding,
    Remedy,
    expected,
    finding_of,
    in_ms,
)
from torchrec_ext.diagnose.loader_rules import IDLE, loader_computes, loader_sleeps, row_python
from torchrec_ext.diagnose.step_rules import (
    all_items,
    debug_modes,
    double_precision,
    garbage,
    host_syncs,
    launches,
    python_lines,
    untouched_rows,
    whole_tables,
)

NOISY = 0.6  # spread of iterations above which there is no verdict


def findings(facts: Facts) -> tuple[Finding, ...]:
    """Returns what wastes at least a twentieth of an iteration, the most first, offers last."""
    made = [finding for rule in RULES.values() if (finding := rule(facts)) is not None]
    made += rank_rules.rank_findings(facts)
    made = [finding for finding in made if finding.cost >= LEAST]
    return tuple(sorted(made, key=lambda finding: (finding.size == "offer", -finding.cost)))


def too_noisy(facts: Facts) -> str:
    """Returns why these facts carry no verdict; empty where they do.

    Where rounds are spread far, a cause stands if the ratios within rounds still say that a remedy gains: threads that
    want more cores than there are make noise themselves.
    """
    if facts.tables and not facts.has("small_tables") and not any(each.size == "large" for each in findings(facts)):
        why = facts.not_measured.get("small_tables", "not measured")
        return f"no verdict: whether rows that are not read cost time is not known ({why}); give more time (budget_s)"
    gains = [
        remedy.gain
        for finding in findings(facts)
        if finding.size in ("large", "medium")
        for remedy in finding.remedies
        if remedy.basis.startswith("measured")
    ]
    certain = any(gain is not None and gain.low >= UNDER for gain in gains)
    if facts.spread <= NOISY or (certain and len(facts.rounds) >= 4):
        return ""
    times = sorted(facts.iteration(each) for each in facts.rounds)
    if len(times) < 4:
        return f"too few rounds for a verdict: {len(times)} of 4; give more time (budget_s)"
    return (
        f"too noisy for a verdict: the middle half of {len(times)} rounds is spread over {facts.spread:.0%} of the "
        f"median iteration, {in_ms(times[0])} to {in_ms(times[-1])}; measure again on a machine that does less else"
    )


def too_many_threads(facts: Facts) -> Finding | None:
    """One thread is faster than those that are set."""
    if not facts.has("step", "one_thread"):
        return None
    gain = facts.gain(lambda each: each["data"] + changed_seconds(each, "one_thread"))
    if gain.low < UNDER:
        return None
    evidence = [
        f"a step takes {bare_step(facts)} on {facts.threads} threads and {in_ms(facts.median('one_thread'))} on "
        f"one; this process may use {facts.cores} core(s){busy_text(facts)}"
    ]
    remedy = Remedy(
        name="one thread",
        lines=("torch.set_num_threads(1)", "OMP_NUM_THREADS=1 python ...", "--threads 1  # with torchx run"),
        gain=gain,
        changes=MATH["rounding"],
        basis="measured",
    )
    return finding_of(
        facts, "too_many_threads", "more threads than the step can use", evidence, [remedy],
        lambda each: each["step"] - changed_seconds(each, "one_thread"),
    )  # fmt: skip


def too_few_threads(facts: Facts) -> Finding | None:
    """All cores are faster than the threads that are set."""
    if not facts.has("step", "all_threads"):
        return None
    gain = facts.gain(lambda each: each["data"] + changed_seconds(each, "all_threads"))
    if gain.low < UNDER:
        return None
    evidence = [
        f"a step takes {bare_step(facts)} on {facts.threads} thread(s) and {in_ms(facts.median('all_threads'))} "
        f"on {facts.cores}"
    ]
    lines = (f"torch.set_num_threads({facts.cores})", f"--threads {facts.cores}  # with torchx run")
    remedy = Remedy(name="all cores", lines=lines, gain=gain, changes=MATH["rounding"], basis="measured")
    return finding_of(
        facts,
        "too_few_threads",
        "cores stay idle",
        evidence,
        [remedy],
        lambda each: each["step"] - changed_seconds(each, "all_threads"),
    )


def sequential_towers(facts: Facts) -> Finding | None:
    """Sub-networks that do not read each other run one after the other, while cores stay idle."""
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
        changes=MATH["rounding"],
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
        changes=MATH["exact"],
        basis="not predicted",
    )
    evidence = [f"torch.compile made {facts.recompiles} graphs during steps whose batches have one shape"]
    title = "torch.compile compiles again during training"
    return Finding(
        cause="recompilation", title=title, evidence=tuple(evidence), remedies=(remedy,), cost=LARGE, size="large"
    )


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
        changes=MATH["less"],
        basis="measured once",
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
    return Finding(
        cause="small_batch", title="a row costs less in a larger batch", evidence=tuple(evidence),
        remedies=tuple(remedies), cost=1 - 1 / gain.middle, size="offer",
    )  # fmt: skip


def larger_batches(facts: Facts) -> list[Remedy]:
    """Returns larger batches: speed-ups for each row, with the loader as fast for each row as now."""
    made = []
    for name, times in (("double", 2), ("quadruple", 4)):
        if facts.has("step", name):

            def seconds(each: Round, name: str = name, times: int = times) -> float:
                return each["data"] + changed_seconds(each, name) / times

            made.append(
                Remedy(
                    name=f"{times} times the batch",
                    lines=(f"batch_size={times * facts.rows:,}" if facts.rows else f"batch_size={times} x today's",),
                    gain=expected(facts, seconds),
                    changes=MATH["batch"],
                    basis="measured",
                )
            )
    return made


def precision(facts: Facts) -> Finding | None:
    """Products of 16 bits are faster: an offer, since they round."""
    if not facts.has("step", "bf16"):
        return None
    gain = facts.gain(lambda each: each["data"] + changed_seconds(each, "bf16"))
    if gain.low < 1.1:
        return None
    evidence = [f"a step takes {bare_step(facts)}, under bf16 autocast {in_ms(facts.median('bf16'))}"]
    lines = ('with torch.autocast("cpu", torch.bfloat16): loss = ...', "--set train.amp=bf16  # with torchx run")
    remedy = Remedy(name="bf16 autocast", lines=lines, gain=gain, changes=MATH["precision"], basis="measured")
    return Finding(
        cause="precision", title="products of 16 bits are faster here", evidence=tuple(evidence), remedies=(remedy,),
        cost=1 - 1 / gain.middle, size="offer",
    )  # fmt: skip


RULES: dict[str, Callable[[Facts], Finding | None]] = {
    rule.__name__: rule
    for rule in (
        *(loader_sleeps, row_python, loader_computes, untouched_rows, launches, host_syncs),
        *(debug_modes, python_lines, whole_tables, double_precision, garbage),
        *(too_many_threads, too_few_threads, sequential_towers, recompilation, between_steps),
        *(all_items, small_batch, precision),
    )
}
