"""answers(): what usual attempts gain, such as workers, threads, a larger batch or compiling."""

from __future__ import annotations

from functools import partial

from torchrec_ext.diagnose.facts import DRIFT, Facts, Gain, Round
from torchrec_ext.diagnose.findings import UNDER, Answer, Change, Helps, in_ms, share_of
from torchrec_ext.diagnose.rules.cores import gain_of_variant, larger_batches
from torchrec_ext.diagnose.rules.costs import (
    alone_seconds,
    busy_text,
    capture_remedy,
    capture_seconds,
    changed_seconds,
    loss_syncs,
    op_price,
)
from torchrec_ext.diagnose.rules.exchange import one_rank
from torchrec_ext.diagnose.rules.loader import worker_gain

_FEW_SYNCS = 3  # values brought to Python that leave large graphs between them


def answers(facts: Facts) -> tuple[Answer, ...]:
    """Returns the gains of usual attempts: workers, threads, DDP, batch, precision, compile."""
    return tuple(
        make(facts)
        for make in (
            _workers,
            _threads,
            _ddp,
            _larger_batch,
            _mixed_precision,
            _compile,
        )
    )


def _answer(name: str, gain: Gain | None, why: str) -> Answer:
    helps: Helps = "perhaps"
    if gain is None:
        helps = "not known"
    # What the machine drifts between two moments widens an interval, and says nothing
    # about the remedy.
    elif gain.high / DRIFT < UNDER:
        helps = "no"
    elif gain.low >= UNDER:
        helps = "yes"
    return Answer(name=name, gain=gain, helps=helps, why=why)


def _workers(facts: Facts) -> Answer:
    gain, why = worker_gain(facts)
    if facts.has("data", "step") and share_of(facts, lambda each: each["data"]) < 0.02:
        gain = Gain(1.0, facts.gain(alone_seconds).high / DRIFT)
        why = f"a batch takes {in_ms(facts.median('data'))}: there is nothing to hide"
    elif facts.loader.row_calls and facts.loader.bytes_read == 0:
        why += "; the rows are in memory, so a worker runs the same Python elsewhere and sends what it made"
    return _answer("loader workers", gain, why)


def _threads(facts: Facts) -> Answer:
    gains = {
        name: gain_of_variant(facts, name)
        for name in ("one_thread", "all_threads")
        if facts.has("step", name)
    }
    if not gains:
        why = facts.not_measured.get("all_threads", "not measured")
        return _answer("other thread numbers", None, f"not tried: {why}")
    best = max(gains, key=lambda name: gains[name].middle)
    threads = 1 if best == "one_thread" else facts.cores
    why = f"measured: {threads} thread(s) in place of {facts.threads}{busy_text(facts)}"
    return _answer("other thread numbers", gains[best], why)


def _ddp(facts: Facts) -> Answer:
    name = "DDP on this machine"
    if facts.ranks:
        return _one_rank(facts)
    if facts.cores < 2:
        return _answer(
            name,
            Gain(0.5, 1.0),
            "this process has one core: two processes would share it",
        )
    if facts.recipe:
        return _answer(
            name,
            None,
            "not predicted for recipes: rec.train.hybrid -j 1x2 prints rows a second of two ranks",
        )
    if not facts.has("data", "step", "quarter", "op"):
        return _answer(name, None, facts.not_measured.get("quarter", "not measured"))
    dense = 4 * facts.parameters
    # Half the batch in each of two processes; gradients of all parameters cross memory
    # four to twelve times.
    exchange = dense / max(facts.bytes_per_s, 1e9)

    def slow(each: Round) -> float:
        step = (2 * each["step"] + changed_seconds(each, "quarter")) / 3
        return 0.5 * each["data"] + step + exchange * 12 + 100 * each["op"] * 6

    def fast(each: Round) -> float:
        quarter = changed_seconds(each, "quarter")
        return (
            0.5 * each["data"]
            + (quarter + (each["step"] - quarter) / 3)
            + exchange * 4
            + 100 * each["op"]
        )

    gain = facts.gain(lambda each: 1.25 * slow(each), fast)
    why = f"predicted for 2 processes at the same batch in all, which exchange {dense / 2**20:,.1f} MiB a step"
    # Two processes need two cores.
    if facts.busy is not None and facts.cores - facts.busy < 1.7:
        gain = Gain(gain.low / 2, gain.high)
        why = f"{why}{busy_text(facts)}"
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
    return _answer(f"one rank, not {size}", one_rank(facts), why)


def _larger_batch(facts: Facts) -> Answer:
    remedies = larger_batches(facts)
    if not remedies:
        return _answer(
            "a larger batch", None, facts.not_measured.get("quadruple", "not measured")
        )
    return _answer(
        "a larger batch",
        remedies[-1].gain,
        f"measured: {remedies[-1].name}, by row; {Change.BATCH.value}",
    )


def _mixed_precision(facts: Facts) -> Answer:
    if not facts.has("step", "bf16"):
        return _answer(
            "mixed precision", None, facts.not_measured.get("bf16", "not measured")
        )
    gain = gain_of_variant(facts, "bf16")
    return _answer(
        "mixed precision",
        gain,
        f"measured: bf16 autocast; {Change.BF16_PRODUCTS.value}",
    )


def _compile(facts: Facts) -> Answer:
    if not facts.has("data", "step", "op") or not facts.ops:
        return _answer(
            "torch.compile", None, facts.not_measured.get("ops", "not measured")
        )

    if facts.recipe:
        remedy = capture_remedy(facts)
        return _answer(
            "torch.compile", remedy.gain, f"{remedy.lines[0]}: {remedy.basis}"
        )

    # The optimizer and rows that are not read stay as they are where model and loss
    # alone are compiled.
    def seconds(each: Round, *, launches: float, rest: float, most: float) -> float:
        if not each["step"]:
            return each["data"]
        optimizer = each.get("optimizer", 0.0)
        inside = max(0.0, each["step"] - optimizer)
        products = min(facts.product_s, inside)
        price = launches * (inside / each["step"]) * facts.ops * op_price(facts, each)
        compiled = products + rest * max(0.0, inside - products - price)
        return each["data"] + optimizer + min(inside * most, compiled)

    if sum(count for _, count in facts.loss_sync_lines) > _FEW_SYNCS:
        return _answer(
            "torch.compile",
            None,
            f"a graph ends at each value for Python{loss_syncs(facts)}",
        )
    # a graph may end in the middle of the model
    least = 0.0 if facts.loss_sync_lines else 0.5
    gain = facts.gain(
        partial(seconds, launches=least, rest=1.0, most=1.1),
        partial(seconds, launches=1.0, rest=0.4, most=1.0),
    )
    low, high = capture_seconds(facts)
    why = f"predicted, not tried: model and loss compiled, about {low:.0f} to {high:.0f} s of compiling"
    why += loss_syncs(facts)
    return _answer("torch.compile", gain, why)
