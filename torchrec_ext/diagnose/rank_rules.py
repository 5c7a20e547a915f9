"""Rules about several ranks: their exchange, ranks that the others wait for, and cores that they share.

Each rule is a pure function of :class:`Facts`. Which rank is slow is told by the seconds in which it computes, by its
own clock: not by waits, which a full machine makes as well.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torchrec_ext.diagnose.facts import CollectiveFacts, Facts, Gain, RankFacts, Round, paired_gain
from torchrec_ext.diagnose.findings import MEDIUM, Change, Finding, Remedy, expected, in_ms, share_of, size_of
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
    """Returns what the ranks together waste; nothing for one process."""
    if not facts.ranks or not facts.rounds or not all(each.steps for each in facts.ranks):
        return []
    made = [finding for rule in RULES.values() if (finding := rule(facts)) is not None]
    shared = next((each for each in made if each.cause == "oversubscribed"), None)
    if shared is not None and shared.cost >= MEDIUM:
        # An exchange between processes that wait for a core is slow by that.
        made = [each for each in made if each.cause not in ("latency", "unmerged_exchange")]
    return made


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
    """Seconds by which a rank computes longer than a typical other one, in one span of a step."""

    rank: int
    span: str
    seconds: float
    others: float


def _excess(facts: Facts, span: str) -> Excess:
    """Returns the rank that is slowest in a span, and by how much."""
    medians = {each.rank: each.median(span) for each in facts.ranks}
    slowest = max(medians, key=lambda rank: medians[rank])
    others = statistics.median([seconds for rank, seconds in medians.items() if rank != slowest])
    return Excess(slowest, span, max(0.0, medians[slowest] - others), others)


def _without(facts: Facts, seconds: float) -> Gain:
    """Returns the speed-up of an iteration in which ranks wait so much less for one of them."""
    return paired_gain([total / max(total - min(seconds, 0.97 * total), 1e-9) for total in _iterations(facts)])


def _of_iteration(facts: Facts, seconds: float) -> float:
    return min(1.0, seconds / max(statistics.median(_iterations(facts)), 1e-12))


def _called(facts: Facts, rank: int) -> str:
    """Returns a rank as it is called in sentences, with its host where there are several."""
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


def _straggler(facts: Facts, excess: Excess, cause: str, title: str, advice: str) -> Finding | None:
    if excess.seconds < 0.3 * excess.others or not _always(facts, excess):
        return None
    cost = _of_iteration(facts, excess.seconds)
    name = _called(facts, excess.rank)
    evidence = (
        f"{name} takes {in_ms(excess.others + excess.seconds)} for its {_SPANS[excess.span]}, the others "
        f"{in_ms(excess.others)}; {_waits(facts, excess.rank)}",
    )
    remedy = Remedy(
        name=f"{name} as fast as the others",
        lines=(advice,),
        gain=_without(facts, excess.seconds),
        changes=Change.EXACT,
        basis="measured: the same steps without what this rank takes longer",
        is_measured=True,
    )
    return Finding(
        cause=cause, title=f"{name} {title}, and the others wait for it", evidence=evidence, remedies=(remedy,),
        cost=cost, size=size_of(cost), ranks=(excess.rank,),
    )  # fmt: skip


def straggler_input(facts: Facts) -> Finding | None:
    """One rank's batches take longer."""
    advice = "look at what this rank's loader reads: its shard of the files, its disk, its share of long rows"
    return _straggler(facts, _excess(facts, "data"), "straggler_input", "is slow in its input", advice)


def _in_step(facts: Facts) -> tuple[Excess, float]:
    """Returns the span of a step in which one rank is slowest, and its excess in the whole step."""
    spans = [_excess(facts, span) for span in ("forward", "backward", "optimizer")]
    most = max(spans, key=lambda each: each.seconds)
    return most, sum(each.seconds for each in spans if each.rank == most.rank)


def _explained(facts: Facts, rank: int) -> bool:
    """Whether the ids that a rank looks up explain that it is slow."""
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
    others = [_step_of(each) for each in facts.ranks if each.rank != most.rank]
    advice = "look at this rank's host: other programs on its cores, its clock rate, its memory; or leave the host out"
    made = _straggler(
        facts, Excess(most.rank, most.span, whole, statistics.median(others)), "slow_rank", "computes slowly", advice
    )
    return made and Finding(**{
        **vars(made),
        "evidence": (
            f"{_called(facts, most.rank)} computes {in_ms(_step_of(facts.ranks[most.rank]))} of a step, in forward, "
            f"backward and optimizer alike, the others {in_ms(statistics.median(others))}; {_waits(facts, most.rank)}",
        ),
    })  # fmt: skip


def _step_of(rank: RankFacts) -> float:
    return sum(rank.median(name) for name in ("forward", "backward", "optimizer"))


def rotating_straggler(facts: Facts) -> Finding | None:
    """The rank that is slow is another one in each step."""
    steps = list(zip(*(each.steps for each in facts.ranks), strict=True))
    slowest = [max(range(len(step)), key=lambda rank: _computed(step[rank])) for step in steps]
    counts = [slowest.count(rank) for rank in range(len(facts.ranks))]
    if len(steps) < 8 or max(counts) > _CONSTANT * len(steps):
        return None
    # By the median, so that a step in which the machine had a hiccup makes no straggler.
    excess = [max(map(_computed, step)) - _low([_computed(each) for each in step]) for step in steps]
    seconds = statistics.median(excess)
    if seconds < 0.5 * statistics.median([_low([_computed(each) for each in step]) for step in steps]):
        return None
    by_span = {
        span: statistics.fmean([max(each[span] for each in step) - _low([e[span] for e in step]) for step in steps])
        for span in _SPANS
    }
    span = max(by_span, key=lambda name: by_span[name])
    cost = _of_iteration(facts, seconds)
    shares = ", ".join(f"rank {rank} in {count / len(steps):.0%}" for rank, count in enumerate(counts) if count)
    remedy = Remedy(
        name="even work in every step",
        lines=(
            f"look at what a rank does in its {_SPANS[span]} in some steps and not in others: long rows, a flush, a "
            "log, garbage collection (gc.freeze(); gc.disable())",
        ),
        gain=_without(facts, seconds),
        changes=Change.EXACT,
        basis="measured: the same steps without what the slowest rank takes longer",
        is_measured=True,
    )
    evidence = (
        f"the slowest rank of a step computes {in_ms(seconds)} longer than a typical one, mostly in its "
        f"{_SPANS[span]}, and is not the same one: {shares} of {len(steps)} steps",
    )
    return Finding(
        cause="rotating_straggler", title="in each step another rank is slow, and the others wait for it",
        evidence=evidence, remedies=(remedy,), cost=cost, size=size_of(cost), ranks=tuple(range(len(counts))),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------- what ranks have to look up


def _top(values: Sequence[float]) -> tuple[int, float]:
    """Returns the greatest of the ranks' values, and how many times the mean it is."""
    mean = statistics.fmean(values)
    rank = max(range(len(values)), key=lambda index: values[index])
    return rank, values[rank] / mean if mean else 1.0


def _uneven(facts: Facts, values: Sequence[float]) -> tuple[int, float, float]:
    """Returns the rank with most, how many times the mean, and its seconds of computing beyond the ranks' mean."""
    rank, times = _top(values)
    whole = [_step_of(each) for each in facts.ranks]
    return rank, times, whole[rank] - statistics.fmean(whole)


def imbalanced_table(facts: Facts) -> Finding | None:
    """The tables of one rank are read far more than those of the others."""
    values = [float(sum(table.read * table.dim for table in each.tables)) for each in facts.ranks]
    rank, times, seconds = _uneven(facts, values)
    if times < _UNEVEN or seconds <= 0 or _top([each.ids for each in facts.ranks])[1] >= _UNEVEN:
        return None
    cost = _of_iteration(facts, seconds)
    share = values[rank] / sum(values)
    most = max(facts.ranks[rank].tables, key=lambda table: table.read * table.dim)
    evidence = (
        f"{_called(facts, rank)} looks up {share:.0%} of all values: of {_shard(most)} alone {most.read:,} rows a step",
        f"its step computes {in_ms(_step_of(facts.ranks[rank]))}, a typical one "
        f"{in_ms(_low([_step_of(each) for each in facts.ranks]))}; {_waits(facts, rank)}",
    )
    lines = (
        ("--set plan.tables=" + most.name + "=column_wise  # or row_wise", "rec.train.plan shows what each rank holds")
        if facts.recipe
        else (
            f"spread {most.name} over the ranks: by columns or rows (TorchRec: ShardingType.COLUMN_WISE, ROW_WISE), or "
            "change it for tables of the others",
        )
    )
    remedy = Remedy(
        name="tables over the ranks by what is read of them",
        lines=lines,
        gain=_without(facts, seconds),
        changes=Change.ROUNDING,
        basis="measured: every rank computes as long as their mean",
        is_measured=True,
    )
    return Finding(
        cause="imbalanced_table", title=f"{_called(facts, rank)} holds the tables that are read most",
        evidence=evidence, remedies=(remedy,), cost=cost, size=size_of(cost), ranks=(rank,),
    )  # fmt: skip


def uneven_lists(facts: Facts) -> Finding | None:
    """The batches of one rank hold far more ids than those of the others."""
    values = [each.ids for each in facts.ranks]
    rank, times, seconds = _uneven(facts, values)
    if times < _UNEVEN or seconds <= 0:
        return None
    cost = _of_iteration(facts, seconds)
    evidence = (
        f"a batch of {_called(facts, rank)} holds {values[rank]:,.0f} ids, that of a typical rank {_low(values):,.0f}; "
        f"its step computes {in_ms(_step_of(facts.ranks[rank]))}, a typical one "
        f"{in_ms(_low([_step_of(each) for each in facts.ranks]))}; {_waits(facts, rank)}",
    )
    remedy = Remedy(
        name="batches of as many ids on each rank",
        lines=("deal rows out by the lengths of their lists: sorted, then rank 0, 1, ..., 1, 0; or cap the lists",),
        gain=_without(facts, seconds),
        changes=Change.DRAWS,
        basis="measured: every rank computes as long as their mean",
        is_measured=True,
    )
    return Finding(
        cause="uneven_lists", title=f"the lists of {_called(facts, rank)} are longer", evidence=evidence,
        remedies=(remedy,), cost=cost, size=size_of(cost), ranks=(rank,),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- exchange


def _kinds(facts: Facts) -> dict[str, list[CollectiveFacts]]:
    kinds: dict[str, list[CollectiveFacts]] = {}
    for each in facts.collectives:
        kinds.setdefault(each.name, []).append(each)
    return kinds


def _sent(facts: Facts) -> float:
    """Returns the bytes that a rank's link carries in a step."""
    size = len(facts.ranks)
    return sum(
        max(each.bytes) * (2 if each.name == "all_reduce" else 1) * (size - 1) / size for each in facts.collectives
    )


def _slow_links(facts: Facts) -> Iterator[tuple[int, float, float]]:
    """Yields ranks that send slowly, with their seconds and those of the others."""
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
    cost = share_of(facts, lambda each: each["exchange"])
    name = _called(facts, rank)
    evidence = (
        f"{name} sends {facts.link_bytes / 1024:.0f} KiB to each other rank in {in_ms(seconds)}, the others "
        f"in {in_ms(others)}",
        _exchange_text(facts),
    )
    remedy = Remedy(
        name=f"the link of {name} as fast as the others'",
        lines=("look at its cable, its switch port, its interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), its MTU",),
        gain=expected(
            facts,
            lambda each: each["data"] + each["step"] - 0.5 * each["exchange"],
            lambda each: each["data"] + each["step"] - (1 - others / seconds) * each["exchange"],
        ),
        changes=Change.EXACT,
        basis="predicted from what the others' links take",
    )
    return Finding(
        cause="slow_link", title=f"the link of {name} is slow, and every exchange goes at its pace", evidence=evidence,
        remedies=(remedy,), cost=cost, size=size_of(cost), ranks=(rank,),
    )  # fmt: skip


def _exchange_text(facts: Facts) -> str:
    kinds = ", ".join(
        f"{len(calls)} {name} ({sum(max(each.bytes) for each in calls) / 1024:,.1f} KiB)"
        for name, calls in _kinds(facts).items()
    )
    return f"the collectives of a step: {kinds}; they take {in_ms(facts.median('exchange'))}"


def _by_bytes(facts: Facts) -> float:
    """Returns the share of the exchange that its bytes need at the rate of the links."""
    rates = [each.send_s - facts.latency_s for each in facts.ranks if each.send_s > facts.latency_s]
    if not rates or not facts.link_bytes:
        return 0.0
    seconds = _sent(facts) * statistics.median(rates) / (facts.link_bytes * (len(facts.ranks) - 1))
    return min(1.0, seconds / max(facts.median("exchange"), 1e-12))


def _alone_remedy(facts: Facts) -> Iterator[Remedy]:
    """Yields a single rank as a remedy, where it is faster than all together."""
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
    """Returns the share of the exchange that sums gradients, and not rows of tables that ranks share."""
    seconds = [(each.name == "all_reduce", each.exchange_s) for each in facts.collectives]
    return sum(each for sums, each in seconds if sums) / max(sum(each for _, each in seconds), 1e-12)


def _shards(facts: Facts) -> list[TableFacts]:
    """Returns the shards of tables that ranks share."""
    return [table for each in facts.ranks for table in each.tables if table.sharding not in ("", "data_parallel")]


def _less_often(facts: Facts) -> list[Remedy]:
    """Returns ways to exchange less: sums of gradients seldomer, no rows of tables, or nothing at all."""
    sums, remedies = _share_of_sums(facts), list[Remedy]()
    sharded = _shards(facts)
    mib = sum(table.rows * table.dim for table in sharded) * 4 / 2**20
    if facts.recipe and sharded and mib < _SMALL_MIB:
        remedies.append(
            Remedy(
                name="tables whole on every rank",
                lines=("--set plan.sharding=data_parallel",),
                gain=expected(
                    facts,
                    lambda each: each["data"] + each["step"] + each["exchange"] * 0.1,
                    lambda each: each["data"] + each["step"] - (1 - sums) * each["exchange"],
                ),
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
                gain=expected(facts, lambda each: each["data"] + each["step"] - 0.75 * sums * each["exchange"]),
                changes=Change.SCHEDULE if facts.recipe else Change.BATCH,
                basis="predicted from the share of the exchange that sums gradients",
            )
        )
    return [*remedies, *_alone_remedy(facts)]


def unmerged_exchange(facts: Facts) -> Finding | None:
    """A step makes many small collectives of one kind that could be one."""
    kinds = _kinds(facts)
    if not kinds or next(_slow_links(facts), None) or _by_bytes(facts) > 0.5:
        return None
    name, calls = max(kinds.items(), key=lambda each: len(each[1]))
    if len(calls) < MANY:
        return None
    cost = share_of(facts, lambda each: each["exchange"]) * (1 - 2 / len(facts.collectives))
    lines = ", ".join(dict.fromkeys(each.line for each in calls))
    evidence = (
        f"{len(calls)} {name} of {statistics.median([max(each.bytes) for each in calls]) / 1024:,.2f} KiB in a step, "
        f"called from {lines}",
        f"{_exchange_text(facts)}; a collective of a few bytes takes {in_ms(facts.latency_s)}",
    )
    count = len(calls)
    merges = not facts.recipe or (bool(_shards(facts)) and not facts.towers_apart)  # what tower_parallel can merge
    remedy = Remedy(
        name=f"one {name} of all {count}",
        lines=(
            "--set plan.towers=tower_parallel  # towers' exchanges are merged"
            if facts.recipe
            else "flat = torch.cat([each.flatten() for each in tensors]); dist."
            + name
            + "(flat, ...); flat.split(sizes)",
            *(() if facts.recipe else ("DistributedDataParallel(model, bucket_cap_mb=25)  # for gradients",)),
        ),
        gain=expected(
            facts,
            lambda each: each["data"] + each["step"] - (1 - 4 / count) * each["exchange"],
            lambda each: each["data"] + each["step"] - (1 - 1 / count) * (each["exchange"] + 0.5 * each["wait"]),
        ),
        changes=Change.EXACT,
        basis=f"predicted: the time of {count} goes but for one to four",
    )
    return Finding(
        cause="unmerged_exchange", title="many small exchanges take the time of their number, not of their bytes",
        evidence=evidence, remedies=(*((remedy,) if merges else ()), *_less_often(facts)), cost=cost,
        size=size_of(cost),
    )  # fmt: skip


def latency(facts: Facts) -> Finding | None:
    """The exchange takes the time of its messages' way, whatever their size."""
    if not facts.collectives or next(_slow_links(facts), None) or unmerged_exchange(facts) or _by_bytes(facts) > 0.5:
        return None
    cost = share_of(facts, lambda each: each["exchange"])
    evidence = (
        _exchange_text(facts),
        f"a collective of a few bytes takes {in_ms(facts.latency_s)} here, and their bytes need "
        f"{_by_bytes(facts):.0%} of the time",
    )
    return Finding(
        cause="latency", title="the exchange is bound by latency, not by its bytes",
        evidence=evidence, remedies=tuple(_less_often(facts)), cost=cost, size=size_of(cost),
    )  # fmt: skip


def bandwidth(facts: Facts) -> Finding | None:
    """The exchange takes the time of its bytes."""
    if not facts.collectives or next(_slow_links(facts), None) or _by_bytes(facts) <= 0.5:
        return None
    cost = share_of(facts, lambda each: each["exchange"])
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
        gain=expected(
            facts,
            lambda each: each["data"] + each["step"] - 0.25 * rows * each["exchange"],
            lambda each: each["data"] + each["step"] - 0.5 * rows * each["exchange"],
        ),
        changes=Change.BF16_SUMS,
        basis="predicted from the bytes",
    )
    return Finding(
        cause="bandwidth", title="the exchange is bound by bandwidth", evidence=evidence,
        remedies=(*((half,) if rows > _FEW else ()), *_less_often(facts)), cost=cost, size=size_of(cost),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------ cores together


def oversubscribed(facts: Facts) -> Finding | None:
    """Processes of one host want more cores than they may use."""
    by_host: dict[str, list[RankFacts]] = {}
    for each in facts.ranks:
        by_host.setdefault(each.host, []).append(each)
    full = {
        host: ranks
        for host, ranks in by_host.items()
        if sum(each.threads for each in ranks) > len({core for each in ranks for core in each.cores})
    }
    if not full:
        return None
    queued = {host: statistics.median([_queued(each) for each in ranks]) for host, ranks in full.items()}
    host = max(queued, key=lambda name: queued[name])
    ranks = full[host]
    cores, threads = len({core for each in ranks for core in each.cores}), sum(each.threads for each in ranks)
    slower = statistics.median([each.together_s / each.alone_s for each in ranks if each.alone_s] or [1.0])
    cost = queued[host]
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
    return Finding(
        cause="oversubscribed", title="processes share a core", evidence=evidence, remedies=(remedy,), cost=cost,
        size=size_of(cost), ranks=tuple(each.rank for each in ranks),
    )  # fmt: skip


def _queued(rank: RankFacts) -> float:
    """Returns the share of the wall clock in which a rank has no core."""
    names = (*_SPANS, "wait", "exchange")
    return statistics.median(
        [each["queue"] / max(each["queue"] + sum(each[name] for name in names), 1e-12) for each in rank.steps]
    )


def one_rank(facts: Facts) -> Gain | None:
    """Returns the speed-up of one rank that does the work of all, over all of them."""
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
    """Returns what each rank holds of the tables, and reads of them in a step, as lines; none without tables."""
    if not any(each.tables for each in facts.ranks):
        return []
    lines = [
        "rank" + "".join(f"{name:>12}" for name in ("MiB held", "rows read", "KiB read", "ids given")) + "   most of"
    ]
    for each in facts.ranks:
        mib = sum(table.rows * table.dim for table in each.tables) * 4 / 2**20
        read = sum(table.read for table in each.tables)
        values = sum(table.read * table.dim for table in each.tables)
        most = max(each.tables, key=lambda table: table.read * table.dim, default=None)
        text = f"{mib:>12,.1f}{read:>12,}{values * 4 / 1024:>12,.1f}{each.ids:>12,.0f}"
        lines.append(f"{each.rank:>4}{text}   {_shard(most) if most else '-'}")
    return lines


def _shard(table: TableFacts) -> str:
    return f"{table.name}, {table.rows:,} x {table.dim}" + (f" ({table.sharding})" if table.sharding else "")


RULES: dict[str, Callable[[Facts], Finding | None]] = {
    rule.__name__: rule
    for rule in (
        *(straggler_input, straggler_forward, straggler_backward, straggler_optimizer, slow_rank, rotating_straggler),
        *(imbalanced_table, uneven_lists, slow_link, unmerged_exchange, latency, bandwidth, oversubscribed),
    )
}
