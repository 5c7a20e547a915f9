"""Rules about several ranks: their exchange, ranks that the others wait for, and cores that they share.

Each rule is a pure function of :class:`Facts`. Which rank is slow is told by the seconds in which it computes, by its
own clock: not by waits, which a full machine makes as well.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torchrec_ext.diagnose.facts import CollectiveFacts, Facts, Gain, RankFacts, Round, paired_gain
from torchrec_ext.diagnose.findings import MEDIUM, Change, Finding, Remedy, expected, finding_of_cost, in_ms, share_of
from torchrec_ext.observe.counts import TableFacts

MANY = 8  # collectives of one kind in a step that are merged
_SLOW_LINK = 3.0  # times the seconds of the other ranks
_UNEVEN = 1.3  # times the mean of all ranks
_ONE_SPAN = 0.7  # share of a rank's excess that lies in one span of its step where that one is named
_CONSTANT = 0.75  # share of steps in which one rank is the slowest where it is always the same
_SPANS = {"data": "input", "forward": "forward", "backward": "backward", "optimizer": "optimizer"}
_FEW = 0.05  # share of the exchange below which a remedy for it is left out
_SMALL_MIB = 64.0  # of tables that are as well whole on every rank


def rank_findings(facts: Facts) -> list[Finding]:
    """Returns the findings about several ranks; none for one process."""
    if not facts.ranks or not facts.rounds or not all(each.steps for each in facts.ranks):
        return []
    findings = {cause: finding for cause, rule in RULES.items() if (finding := rule(facts)) is not None}
    shared = findings.get(oversubscribed.__name__)
    if shared is not None and shared.cost >= MEDIUM:
        # An exchange between processes that wait for a core is slow by that.
        for rule in (latency, unmerged_exchange):
            findings.pop(rule.__name__, None)
    return list(findings.values())


# ------------------------------------------------------------------------------------------------------- ranks compared


def _computed(each: Round) -> float:
    return sum(each[name] for name in _SPANS)


def _iterations(facts: Facts) -> list[float]:
    """Returns the seconds of each traced iteration: the least of the ranks, which wait for each other."""
    steps = zip(*(each.steps for each in facts.ranks), strict=True)
    return [min(_computed(each) + each["wait"] + each["exchange"] for each in step) for step in steps]


def _low(values: Sequence[float]) -> float:
    """Returns the lower median."""
    return sorted(values)[(len(values) - 1) // 2]


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
    others = statistics.median([seconds for rank, seconds in medians.items() if rank != slowest])
    return Excess(slowest, span, max(0.0, medians[slowest] - others), others)


def _without(facts: Facts, seconds: float) -> Gain:
    """Returns the speed-up if ranks waited `seconds` less for the slow one."""
    return paired_gain([total / max(total - min(seconds, 0.97 * total), 1e-9) for total in _iterations(facts)])


def _of_iteration(facts: Facts, seconds: float) -> float:
    return min(1.0, seconds / max(statistics.median(_iterations(facts)), 1e-12))


def _called(facts: Facts, rank: int) -> str:
    """Returns the name of a rank in sentences, with its host if there are several."""
    host = facts.ranks[rank].host
    return f"rank {rank}" + (f" (on {host})" if len({each.host for each in facts.ranks}) > 1 else "")


def _waits(facts: Facts, rank: int) -> str:
    others = [each.median("wait") for each in facts.ranks if each.rank != rank]
    return f"the other ranks wait {in_ms(statistics.median(others))} of a step"


def _always(facts: Facts, excess: Excess) -> bool:
    """Whether one rank is the slowest in a span in nearly all steps."""
    steps = list(zip(*([each[excess.span] for each in rank.steps] for rank in facts.ranks), strict=True))
    slowest = [max(range(len(step)), key=lambda rank: step[rank]) for step in steps]
    return slowest.count(excess.rank) > _CONSTANT * len(steps)


def _straggler(facts: Facts, excess: Excess, cause: str, title: str, advice: str, evidence: str = "") -> Finding | None:
    """Makes a finding of a rank with one slow span; by default the evidence is the span's time."""
    if excess.seconds < 0.3 * excess.others or not _always(facts, excess):
        return None
    name = _called(facts, excess.rank)
    evidence = evidence or (
        f"{name} takes {in_ms(excess.others + excess.seconds)} for its {_SPANS[excess.span]}, the others "
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
    return _straggler(facts, _excess(facts, "data"), "straggler_input", "is slow in its input", advice)


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
    if most.span != span or most.seconds < _ONE_SPAN * whole or _explained(facts, most.rank):
        return None
    advice = (
        f"look at what this rank alone does in its {span}: hooks, logging, a debug branch, other rows than the rest"
    )
    return _straggler(facts, most, f"straggler_{span}", f"is slow in its {span} only", advice)


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
    others = statistics.median([_step_of(each) for each in facts.ranks if each.rank != most.rank])
    advice = "look at this rank's host: other programs on its cores, its clock rate, its memory; or leave the host out"
    evidence = (
        f"{_called(facts, most.rank)} computes {in_ms(_step_of(facts.ranks[most.rank]))} of a step, in forward, "
        f"backward and optimizer alike, the others {in_ms(others)}"
    )
    excess = Excess(most.rank, most.span, whole, others)
    return _straggler(facts, excess, "slow_rank", "computes slowly", advice, evidence)


def _step_of(rank: RankFacts) -> float:
    return sum(rank.median(name) for name in ("forward", "backward", "optimizer"))


def rotating_straggler(facts: Facts) -> Finding | None:
    """The slow rank is another one in each step."""
    steps = list(zip(*(each.steps for each in facts.ranks), strict=True))
    computed = [[_computed(each) for each in step] for step in steps]
    slowest = [max(range(len(step)), key=step.__getitem__) for step in computed]
    counts = [slowest.count(rank) for rank in range(len(facts.ranks))]
    if len(steps) < 8 or max(counts) > _CONSTANT * len(steps):
        return None
    # By the median, so that a step in which the machine had a hiccup makes no straggler.
    seconds = statistics.median([max(step) - _low(step) for step in computed])
    if seconds < 0.5 * statistics.median(map(_low, computed)):
        return None
    by_span = {}
    for name in _SPANS:
        of_span = [[each[name] for each in step] for step in steps]
        by_span[name] = statistics.fmean([max(step) - _low(step) for step in of_span])
    span = _SPANS[max(by_span, key=by_span.__getitem__)]
    shares = ", ".join(f"rank {rank} in {count / len(steps):.0%}" for rank, count in enumerate(counts) if count)
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
        f"not the same one: {shares} of {len(steps)} steps"
    )
    title = "in each step another rank is slow, and the others wait for it"
    cost = _of_iteration(facts, seconds)
    return finding_of_cost("rotating_straggler", title, [evidence], [remedy], cost, ranks=range(len(counts)))


# ------------------------------------------------------------------------------------------- what ranks have to look up


class Excessive(NamedTuple):
    """The rank with far more work than the mean: its seconds beyond it, and a sentence about its step."""

    rank: int
    seconds: float
    text: str


def _top(values: Sequence[float]) -> tuple[int, float]:
    """Returns the greatest of the ranks' values, and how many times the mean it is."""
    mean = statistics.fmean(values)
    rank = max(range(len(values)), key=values.__getitem__)
    return rank, values[rank] / mean if mean else 1.0


def _excessive(facts: Facts, values: Sequence[float]) -> Excessive | None:
    """Returns the rank with most, if it has far more than the mean and computes longer than it."""
    rank, times = _top(values)
    steps = [_step_of(each) for each in facts.ranks]
    seconds = steps[rank] - statistics.fmean(steps)
    if times < _UNEVEN or seconds <= 0:
        return None
    text = f"its step computes {in_ms(steps[rank])}, a typical one {in_ms(_low(steps))}; {_waits(facts, rank)}"
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
    return finding_of_cost(cause, title, evidence, [even], _of_iteration(facts, most.seconds), ranks=[most.rank])


def imbalanced_table(facts: Facts) -> Finding | None:
    """The tables of one rank are read far more than those of the others."""
    values = [float(sum(table.read * table.dim for table in each.tables)) for each in facts.ranks]
    most = _excessive(facts, values)
    if most is None or _top([each.ids for each in facts.ranks])[1] >= _UNEVEN:
        return None
    name = _called(facts, most.rank)
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
        lines = (
            f"--set plan.tables={table.name}=column_wise  # or row_wise",
            "rec.train.plan shows what each rank holds",
        )
    remedy = "tables over the ranks by what is read of them", lines
    title = f"{name} holds the tables that are read most"
    return _uneven(facts, most, "imbalanced_table", title, evidence, remedy, Change.ROUNDING)


def uneven_lists(facts: Facts) -> Finding | None:
    """The batches of one rank hold far more ids than those of the others."""
    values = [each.ids for each in facts.ranks]
    most = _excessive(facts, values)
    if most is None:
        return None
    name = _called(facts, most.rank)
    evidence = [
        f"a batch of {name} holds {values[most.rank]:,.0f} ids, that of a typical rank {_low(values):,.0f}; {most.text}"
    ]
    line = "deal rows out by the lengths of their lists: sorted, then rank 0, 1, ..., 1, 0; or cap the lists"
    remedy = "batches of as many ids on each rank", [line]
    title = f"the lists of {name} are longer"
    return _uneven(facts, most, "uneven_lists", title, evidence, remedy, Change.DRAWS)


# ------------------------------------------------------------------------------------------------------------- exchange


def _kinds(facts: Facts) -> dict[str, list[CollectiveFacts]]:
    kinds: dict[str, list[CollectiveFacts]] = {}
    for each in facts.collectives:
        kinds.setdefault(each.name, []).append(each)
    return kinds


def _sent(facts: Facts) -> float:
    """Returns the bytes of a step on a rank's link."""
    size = len(facts.ranks)
    return sum(
        max(each.bytes) * (2 if each.name == "all_reduce" else 1) * (size - 1) / size for each in facts.collectives
    )


def _gain_of_exchange(facts: Facts, least: float, most: float) -> Gain | None:
    """Returns the speed-up of an iteration without shares of its exchange, at least and at most."""
    return expected(
        facts,
        lambda each: each["data"] + each["step"] - least * each["exchange"],
        lambda each: each["data"] + each["step"] - most * each["exchange"],
    )


def _exchange_share(facts: Facts) -> float:
    """Returns the exchange's share of an iteration."""
    return share_of(facts, lambda each: each["exchange"])


def _slow_links(facts: Facts) -> Iterator[tuple[int, float, float]]:
    """Yields ranks with slow links, their seconds and those of the others."""
    for each in facts.ranks:
        others = statistics.median([other.send_s for other in facts.ranks if other.rank != each.rank])
        if each.send_s > _SLOW_LINK * others > 0:
            yield each.rank, each.send_s, others


def slow_link(facts: Facts) -> Finding | None:
    """One rank's link is slower than the others'."""
    slow = list(_slow_links(facts))
    if not slow:
        return None
    rank, seconds, others = max(slow, key=lambda each: each[1])
    name = _called(facts, rank)
    evidence = (
        f"{name} sends {facts.link_bytes / 1024:.0f} KiB to each other rank in {in_ms(seconds)}, the others "
        f"in {in_ms(others)}",
        _exchange_text(facts),
    )
    remedy = Remedy(
        name=f"the link of {name} as fast as the others'",
        lines=("look at its cable, its switch port, its interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), its MTU",),
        gain=_gain_of_exchange(facts, 0.5, 1 - others / seconds),
        changes=Change.EXACT,
        basis="predicted from what the others' links take",
    )
    title = f"the link of {name} is slow, and every exchange goes at its pace"
    return finding_of_cost("slow_link", title, evidence, [remedy], _exchange_share(facts), ranks=[rank])


def _exchange_text(facts: Facts) -> str:
    kinds = ", ".join(
        f"{len(calls)} {name} ({sum(max(each.bytes) for each in calls) / 1024:,.1f} KiB)"
        for name, calls in _kinds(facts).items()
    )
    return f"the collectives of a step: {kinds}; they take {in_ms(facts.median('exchange'))}"


def _by_bytes(facts: Facts) -> float:
    """Returns the share of the exchange's time for its bytes, at the rate of the links."""
    rates = [each.send_s - facts.latency_s for each in facts.ranks if each.send_s > facts.latency_s]
    if not rates or not facts.link_bytes:
        return 0.0
    seconds = _sent(facts) * statistics.median(rates) / (facts.link_bytes * (len(facts.ranks) - 1))
    return min(1.0, seconds / max(facts.median("exchange"), 1e-12))


def _alone_remedy(facts: Facts) -> Iterator[Remedy]:
    """Yields a single rank as a remedy, if it is faster than all together."""
    gain = one_rank(facts)
    if gain is not None and gain.low > 1:
        yield Remedy(
            name="a single rank, which has nothing to exchange",
            lines=("-j 1x1" if facts.recipe else "python train.py  # in place of torchrun",),
            gain=gain,
            changes=Change.BATCH,
            basis="measured: one rank without exchange while the others slept",
            is_measured=True,
        )


def _share_of_sums(facts: Facts) -> float:
    """Returns the share of gradient sums in the exchange; the rest is rows of sharded tables."""
    seconds = [(each.name == "all_reduce", each.exchange_s) for each in facts.collectives]
    return sum(each for sums, each in seconds if sums) / max(sum(each for _, each in seconds), 1e-12)


def _sharded(facts: Facts) -> list[TableFacts]:
    """Returns the shards of sharded tables."""
    return [table for each in facts.ranks for table in each.tables if table.sharding not in ("", "data_parallel")]


def _less_often(facts: Facts) -> list[Remedy]:
    """Returns ways to exchange less: sums of gradients seldomer, no rows of tables, or nothing at all."""
    sums, remedies = _share_of_sums(facts), list[Remedy]()
    sharded = _sharded(facts)
    mib = sum(table.rows * table.dim for table in sharded) * 4 / 2**20
    if facts.recipe and sharded and mib < _SMALL_MIB:
        remedies.append(
            Remedy(
                name="tables whole on every rank",
                lines=("--set plan.sharding=data_parallel",),
                gain=_gain_of_exchange(facts, -0.1, 1 - sums),
                changes=Change.ROUNDING,
                basis=f"predicted: the tables take {mib:.3g} MiB, and their gradients are summed in place of rows",
            )
        )
    if sums > _FEW and not facts.towers_apart:
        remedies.append(
            Remedy(
                name="one exchange for four batches",
                lines=(
                    ("--set sync.mode=local_sgd --set sync.every=4",)
                    if facts.recipe
                    else (
                        "with model.no_sync(): ...  # DDP: backward of three batches of four; then one with the "
                        "exchange",
                    )
                ),
                gain=_gain_of_exchange(facts, 0.75 * sums, 0.75 * sums),
                changes=Change.SCHEDULE if facts.recipe else Change.BATCH,
                basis="predicted from the share of the exchange that sums gradients",
            )
        )
    return [*remedies, *_alone_remedy(facts)]


def unmerged_exchange(facts: Facts) -> Finding | None:
    """A step makes many small collectives of one kind in place of one."""
    kinds = _kinds(facts)
    if not kinds or next(_slow_links(facts), None) or _by_bytes(facts) > 0.5:
        return None
    name, calls = max(kinds.items(), key=lambda each: len(each[1]))
    if len(calls) < MANY:
        return None
    count = len(calls)
    lines = ", ".join(dict.fromkeys(each.line for each in calls))
    evidence = (
        f"{count} {name} of {statistics.median([max(each.bytes) for each in calls]) / 1024:,.2f} KiB in a step, called "
        f"from {lines}",
        f"{_exchange_text(facts)}; a collective of a few bytes takes {in_ms(facts.latency_s)}",
    )
    pasted: tuple[str, ...] = (
        f"flat = torch.cat([each.flatten() for each in tensors]); dist.{name}(flat, ...); flat.split(sizes)",
        "DistributedDataParallel(model, bucket_cap_mb=25)  # for gradients",
    )
    if facts.recipe:
        pasted = ("--set plan.towers=tower_parallel  # towers' exchanges are merged",)
    remedy = Remedy(
        name=f"one {name} of all {count}",
        lines=pasted,
        gain=expected(
            facts,
            lambda each: each["data"] + each["step"] - (1 - 4 / count) * each["exchange"],
            lambda each: each["data"] + each["step"] - (1 - 1 / count) * (each["exchange"] + 0.5 * each["wait"]),
        ),
        changes=Change.EXACT,
        basis=f"predicted: the time of {count} goes but for one to four",
    )
    remedies = _less_often(facts)
    if not facts.recipe or (_sharded(facts) and not facts.towers_apart):  # what tower_parallel can merge
        remedies.insert(0, remedy)
    title = "many small exchanges take the time of their number, not of their bytes"
    cost = _exchange_share(facts) * (1 - 2 / len(facts.collectives))
    return finding_of_cost("unmerged_exchange", title, evidence, remedies, cost)


def latency(facts: Facts) -> Finding | None:
    """The exchange takes the time of its messages' way, whatever their size."""
    if not facts.collectives or next(_slow_links(facts), None) or unmerged_exchange(facts) or _by_bytes(facts) > 0.5:
        return None
    evidence = (
        _exchange_text(facts),
        f"a collective of a few bytes takes {in_ms(facts.latency_s)} here, and their bytes need "
        f"{_by_bytes(facts):.0%} of the time",
    )
    title = "the exchange is bound by latency, not by its bytes"
    return finding_of_cost("latency", title, evidence, _less_often(facts), _exchange_share(facts))


def bandwidth(facts: Facts) -> Finding | None:
    """The exchange takes the time of its bytes."""
    if not facts.collectives or next(_slow_links(facts), None) or _by_bytes(facts) <= 0.5:
        return None
    evidence = (_exchange_text(facts), f"their bytes need {_by_bytes(facts):.0%} of that at the links' rate")
    rows = 1 - _share_of_sums(facts) if facts.recipe else 1.0  # of a recipe those of sharded tables alone
    half = Remedy(
        name="half the bytes: 16 bits on the way",
        lines=(
            ("--set plan.forward_precision=bf16 --set plan.backward_precision=bf16",)
            if facts.recipe
            else (
                "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook",
                "model.register_comm_hook(None, bf16_compress_hook)  # DDP",
            )
        ),
        gain=_gain_of_exchange(facts, 0.25 * rows, 0.5 * rows),
        changes=Change.BF16_SUMS,
        basis="predicted from the bytes",
    )
    remedies = _less_often(facts)
    if rows > _FEW:
        remedies.insert(0, half)
    title = "the exchange is bound by bandwidth"
    return finding_of_cost("bandwidth", title, evidence, remedies, _exchange_share(facts))


# ------------------------------------------------------------------------------------------------------ cores together


def oversubscribed(facts: Facts) -> Finding | None:
    """Processes of one host want more cores than they may use."""
    by_host: dict[str, list[RankFacts]] = {}
    for each in facts.ranks:
        by_host.setdefault(each.host, []).append(each)
    crowded = [ranks for ranks in by_host.values() if sum(each.threads for each in ranks) > _core_count(ranks)]
    if not crowded:
        return None
    cost, ranks = max(((statistics.median(map(_queued, ranks)), ranks) for ranks in crowded), key=lambda each: each[0])
    host, cores, threads = ranks[0].host, _core_count(ranks), sum(each.threads for each in ranks)
    slower = statistics.median([each.together_s / each.alone_s for each in ranks if each.alone_s] or [1.0])
    evidence = (
        f"{len(ranks)} ranks with {threads} thread(s) share {cores} core(s) of {host or 'this host'}: for {cost:.0%} "
        "of an iteration a rank is ready to run and has no core",
        f"its step without exchange takes {slower:.2f} times as long beside the others as alone",
    )
    lines = (
        f"-j 1x{cores} --threads 1" if facts.recipe else f"torchrun --nproc-per-node {cores} ...",
        "OMP_NUM_THREADS=1; and no taskset, cgroup or container limit of fewer cores than processes",
    )
    remedy = Remedy(
        name="as many processes as cores, with one thread each",
        lines=lines,
        gain=Gain(max(1.0, 1 / (1 - 0.5 * min(cost, 0.9))), 1.3 / (1 - min(cost, 0.9))),
        changes=Change.BATCH,
        basis="predicted from the time without a core",
    )
    sharing = [each.rank for each in ranks]
    return finding_of_cost("oversubscribed", "processes share a core", evidence, [remedy], cost, ranks=sharing)


def _core_count(ranks: Sequence[RankFacts]) -> int:
    return len({core for each in ranks for core in each.cores})


def _queued(rank: RankFacts) -> float:
    """Returns the share of the wall clock without a core."""
    names = (*_SPANS, "wait", "exchange")
    return statistics.median(
        [each["queue"] / max(each["queue"] + sum(each[name] for name in names), 1e-12) for each in rank.steps]
    )


def one_rank(facts: Facts) -> Gain | None:
    """Returns the speed-up of one rank with the work of all over all ranks."""
    alone = [each.alone_s for each in facts.ranks if each.alone_s]
    if not alone or not facts.rounds:
        return None
    seconds = len(facts.ranks) * statistics.median(alone)
    between = facts.mean_between()
    ratios = [facts.iteration(each) / (seconds + len(facts.ranks) * each["data"] + between) for each in facts.rounds]
    return paired_gain(ratios)


def table_of(facts: Facts) -> list[str]:
    """Returns the ranks and their collectives as lines of a page; none for one process."""
    if not facts.ranks or not all(each.steps for each in facts.ranks):
        return []
    names = ("data", "forward", "backward", "optimizer", "wait", "exchange", "queue")
    lines = ["rank" + "".join(f"{name:>11}" for name in names) + "   ms a step, by the median"]
    for each in facts.ranks:
        lines.append(f"{each.rank:>4}" + "".join(f"{each.median(name) * 1e3:>11.3g}" for name in names))
    lines += _held_by_rank(facts)
    for name, calls in _kinds(facts).items():
        kib = sum(max(each.bytes) for each in calls) / 1024
        waits = max(sum(each.waits_s) / len(each.waits_s) for each in calls)
        lines.append(
            f"{len(calls)} {name} in a step: {kib:,.1f} KiB, {in_ms(sum(each.exchange_s for each in calls))} "
            f"themselves; ranks wait up to {in_ms(waits)} for the last one"
        )
    return lines


def _held_by_rank(facts: Facts) -> list[str]:
    """Returns a line for each rank about its tables and its look-ups; none without tables."""
    if not any(each.tables for each in facts.ranks):
        return []
    lines = [
        "rank" + "".join(f"{name:>12}" for name in ("MiB held", "rows read", "KiB read", "ids given")) + "   most of"
    ]
    for each in facts.ranks:
        mib = sum(table.rows * table.dim for table in each.tables) * 4 / 2**20
        rows = sum(table.read for table in each.tables)
        values = sum(table.read * table.dim for table in each.tables)
        text = f"{mib:>12,.1f}{rows:>12,}{values * 4 / 1024:>12,.1f}{each.ids:>12,.0f}"
        lines.append(f"{each.rank:>4}{text}   {shard_text(most_read(each)) if each.tables else '-'}")
    return lines


def most_read(rank: RankFacts) -> TableFacts:
    """Returns the table of a rank with the most values read."""
    return max(rank.tables, key=lambda table: table.read * table.dim)


def shard_text(table: TableFacts) -> str:
    """Returns a table's name, size and sharding type, such as ``item, 500 x 16 (row_wise)``."""
    return f"{table.name}, {table.rows:,} x {table.dim}" + (f" ({table.sharding})" if table.sharding else "")


RULES: dict[str, Callable[[Facts], Finding | None]] = {
    rule.__name__: rule
    for rule in (
        *(straggler_input, straggler_forward, straggler_backward, straggler_optimizer, slow_rank, rotating_straggler),
        *(imbalanced_table, uneven_lists, slow_link, unmerged_exchange, latency, bandwidth, oversubscribed),
    )
}
