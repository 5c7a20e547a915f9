"""Rules about cores and about what runs beside steps, and offers: batch and precision. Each is a pure function."""

from __future__ import annotations

from torchrec_ext.diagnose.facts import Facts, Gain, Round
from torchrec_ext.diagnose.findings import (
    LARGE,
    UNDER,
    Action,
    Change,
    Finding,
    Remedy,
    expected,
    finding_of,
    finding_of_cost,
    in_ms,
)
from torchrec_ext.diagnose.rules.costs import (
    busy_text,
    changed_in_loop,
    changed_seconds,
)
from torchrec_ext.diagnose.rules.loader import IDLE


def gain_of_variant(facts: Facts, name: str) -> Gain:
    """Returns the speed-up of an iteration with a changed step."""
    return facts.gain(lambda each: each["data"] + changed_seconds(each, name))


def _other_threads(
    facts: Facts,
    cause: str,
    title: str,
    evidence: str,
    variant: str,
    name: str,
    lines: tuple[str, ...],
    threads: int,
) -> Finding | None:
    """Makes a finding of another number of threads, if it is faster; ``name`` and ``lines`` are the remedy's."""
    gain = gain_of_variant(facts, variant)
    if gain.low < UNDER:
        return None
    remedy = Remedy(
        name=name,
        lines=lines,
        gain=gain,
        changes=Change.ROUNDING,
        basis="measured",
        is_measured=True,
        action=Action.THREADS,
        count=threads,
    )
    return finding_of(
        facts,
        cause,
        title,
        [evidence],
        [remedy],
        lambda each: each["step"] - changed_seconds(each, variant),
    )


def too_many_threads(facts: Facts) -> Finding | None:
    """One thread is faster than the current number."""
    if not facts.has("step", "one_thread"):
        return None
    evidence = (
        f"a step takes {in_ms(facts.median('step'))} on {facts.threads} threads and "
        f"{changed_in_loop(facts, 'one_thread')} on one; this process may use {facts.cores} core(s){busy_text(facts)}"
    )
    lines = (
        "torch.set_num_threads(1)",
        "OMP_NUM_THREADS=1 python ...",
        "--threads 1  # with torchx run",
    )
    title = "more threads than the step can use"
    return _other_threads(
        facts, "too_many_threads", title, evidence, "one_thread", "one thread", lines, 1
    )


def too_few_threads(facts: Facts) -> Finding | None:
    """All cores are faster than the current number of threads."""
    if not facts.has("step", "all_threads"):
        return None
    evidence = (
        f"a step takes {in_ms(facts.median('step'))} on {facts.threads} thread(s) and "
        f"{changed_in_loop(facts, 'all_threads')} on {facts.cores}"
    )
    cores = facts.cores
    lines = (f"torch.set_num_threads({cores})", f"--threads {cores}  # with torchx run")
    title = "cores stay idle"
    return _other_threads(
        facts,
        "too_few_threads",
        title,
        evidence,
        "all_threads",
        "all cores",
        lines,
        cores,
    )


def sequential_towers(facts: Facts) -> Finding | None:
    """Independent sub-networks run one after the other, while cores stay idle."""
    idle = facts.cores - facts.threads - (facts.busy or 0.0)
    if (
        len(facts.towers) < 2
        or facts.towers_apart
        or idle < 1 - IDLE
        or not facts.has("step", "forward", "backward")
    ):
        return None
    at_once = min(len(facts.towers), 1 + round(idle))
    shares = sorted((share for _, share in facts.towers), reverse=True)
    saved = sum(shares) - max(shares[0], sum(shares) / at_once)

    def hidden(each: Round) -> float:
        return saved * (each["forward"] + each["backward"])

    def beyond_threads(each: Round) -> float:
        # More threads take the same idle cores, and need no exchange.
        if "all_threads" not in each:
            return max(0.0, hidden(each))
        return max(
            0.0,
            hidden(each)
            - max(0.0, each["step"] - changed_seconds(each, "all_threads")),
        )

    lines: tuple[str, ...] = (
        f"rec.train.hybrid -j 1x{at_once}  # and --set plan.towers=auto",
    )
    if not facts.recipe:
        entries = []
        for index, (name, _) in enumerate(facts.towers):
            # The first part is the model's own name, which its paths do not have.
            entries.append(f'"{name.partition(".")[2] or name}": {index % at_once}')
        ranks = ", ".join(entries)
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
    towers = ", ".join(
        f"{name} ({share:.0%} of the forward)" for name, share in facts.towers
    )
    evidence = [
        f"none reads what another one returns: {towers}",
        f"{facts.threads} thread(s) on {facts.cores} core(s){busy_text(facts)}",
    ]
    title = "sub-networks that do not read each other run one after the other, and cores stay idle"
    return finding_of(
        facts, "sequential_towers", title, evidence, [remedy], beyond_threads
    )


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
    evidence = [
        f"torch.compile made {facts.recompiles} graphs during steps whose batches have one shape"
    ]
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
    line = f"every {4 * each.steps:,} steps in place of {each.steps:,}"
    if facts.recipe:
        line = "--set train.eval_every=...  # four times today's"
    remedy = Remedy(
        name=f"{each.name} a quarter as often",
        lines=(line,),
        gain=expected(
            facts, lambda round_: round_["data"] + round_["step"] - 0.75 * seconds
        ),
        changes=Change.LESS_OFTEN,
        basis="measured once",
        is_measured=True,
    )
    title = f"{each.name} stands in the way of training"
    return finding_of(
        facts, "between_steps", title, evidence, [remedy], lambda _: seconds
    )


def small_batch(facts: Facts) -> Finding | None:
    """A row costs much less in a larger batch: an offer, since it changes what is learned."""
    remedies = larger_batches(facts)
    if not remedies or not (gain := remedies[-1].gain) or gain.low < 1.15:
        return None
    evidence = f"a step of {facts.rows:,} rows takes {in_ms(facts.median('step'))}"
    if facts.has("quadruple"):
        evidence += f", of four times as many {changed_in_loop(facts, 'quadruple')}"
    title = "a row costs less in a larger batch"
    return finding_of_cost(
        "small_batch", title, [evidence], remedies, 1 - 1 / gain.middle, size="offer"
    )


def larger_batches(facts: Facts) -> list[Remedy]:
    """Returns larger batches: speed-ups for each row, with the loader as fast for each row as now."""
    remedies = []
    for name, times in (("double", 2), ("quadruple", 4)):
        if facts.has("step", name):

            def seconds(each: Round, name: str = name, times: int = times) -> float:
                return each["data"] + changed_seconds(each, name) / times

            size = f"{times * facts.rows:,}" if facts.rows else f"{times} x today's"
            remedy = Remedy(
                name=f"{times} times the batch",
                lines=(f"batch_size={size}",),
                gain=expected(facts, seconds),
                changes=Change.BATCH,
                basis="measured",
                is_measured=True,
            )
            remedies.append(remedy)
    return remedies


def precision(facts: Facts) -> Finding | None:
    """Products of 16 bits are faster: an offer, since they round."""
    if not facts.has("step", "bf16"):
        return None
    gain = gain_of_variant(facts, "bf16")
    if gain.low < 1.1:
        return None
    evidence = [
        f"a step takes {in_ms(facts.median('step'))}, under bf16 autocast {changed_in_loop(facts, 'bf16')}"
    ]
    lines = (
        'with torch.autocast("cpu", torch.bfloat16): loss = ...',
        "--set train.amp=bf16  # with torchx run",
    )
    remedy = Remedy(
        name="bf16 autocast",
        lines=lines,
        gain=gain,
        changes=Change.BF16_PRODUCTS,
        basis="measured",
        is_measured=True,
    )
    # Its cost is the share of an iteration that would go with it.
    title = "products of 16 bits are faster here"
    return finding_of_cost(
        "precision", title, evidence, [remedy], 1 - 1 / gain.middle, size="offer"
    )
