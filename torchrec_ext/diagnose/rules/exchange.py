"""Rules about the exchange of ranks, and about the cores that they share; the ranks and their collectives as lines."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import chain

from torchrec_ext.diagnose.facts import (
    CollectiveFacts,
    Facts,
    Gain,
    RankFacts,
    paired_gain,
)
from torchrec_ext.diagnose.findings import (
    Change,
    Finding,
    Remedy,
    expected,
    finding_of_cost,
    in_ms,
    share_of,
)
from torchrec_ext.diagnose.rules.ranks import SPANS, most_read, rank_name, shard_text
from torchrec_ext.observe.counts import TableFacts

MANY = 8  # collectives of one kind in a step that are merged
_SLOW_LINK = 3.0  # times the seconds of the other ranks
_FEW = 0.05  # share of the exchange below which a remedy for it is left out
_SMALL_MIB = 64.0  # of tables that are as well whole on every rank


def _kinds(facts: Facts) -> dict[str, list[CollectiveFacts]]:
    kinds: dict[str, list[CollectiveFacts]] = {}
    for call in facts.collectives:
        kinds.setdefault(call.name, []).append(call)
    return kinds


def _sent(facts: Facts) -> float:
    """Returns the bytes of a step on a rank's link."""
    size = len(facts.ranks)
    message_bytes = 0.0
    for each in facts.collectives:
        # An all_reduce is a reduce_scatter and an all_gather of the same bytes.
        times = 2 if each.name == "all_reduce" else 1
        message_bytes += max(each.bytes) * times * (size - 1) / size
    return message_bytes


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
        others = statistics.median(
            [other.send_s for other in facts.ranks if other.rank != each.rank]
        )
        if each.send_s > _SLOW_LINK * others > 0:
            yield each.rank, each.send_s, others


def slow_link(facts: Facts) -> Finding | None:
    """One rank's link is slower than the others'."""
    slow = list(_slow_links(facts))
    if not slow:
        return None
    rank, seconds, others = max(slow, key=lambda each: each[1])
    name = rank_name(facts, rank)
    evidence = (
        f"{name} sends {facts.link_bytes / 1024:.0f} KiB to each other rank in {in_ms(seconds)}, the others "
        f"in {in_ms(others)}",
        _exchange_text(facts),
    )
    remedy = Remedy(
        name=f"the link of {name} as fast as the others'",
        lines=(
            "look at its cable, its switch port, its interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), its MTU",
        ),
        gain=_gain_of_exchange(facts, 0.5, 1 - others / seconds),
        changes=Change.EXACT,
        basis="predicted from what the others' links take",
    )
    title = f"the link of {name} is slow, and every exchange goes at its pace"
    return finding_of_cost(
        "slow_link", title, evidence, [remedy], _exchange_share(facts), ranks=[rank]
    )


def _exchange_text(facts: Facts) -> str:
    kinds = [
        f"{len(calls)} {name} ({_kib(calls):,.1f} KiB)"
        for name, calls in _kinds(facts).items()
    ]
    return f"the collectives of a step: {', '.join(kinds)}; they take {in_ms(facts.median('exchange'))}"


def _kib(calls: Sequence[CollectiveFacts]) -> float:
    return sum(max(each.bytes) for each in calls) / 1024


def _by_bytes(facts: Facts) -> float:
    """Returns the share of the exchange's time for its bytes, at the rate of the links."""
    # Beyond the latency the seconds of a message are those of its bytes.
    rates = [
        each.send_s - facts.latency_s
        for each in facts.ranks
        if each.send_s > facts.latency_s
    ]
    if not rates or not facts.link_bytes:
        return 0.0
    seconds = (
        _sent(facts)
        * statistics.median(rates)
        / (facts.link_bytes * (len(facts.ranks) - 1))
    )
    return min(1.0, seconds / max(facts.median("exchange"), 1e-12))


def _share_of_sums(facts: Facts) -> float:
    """Returns the share of gradient sums in the exchange; the rest is rows of sharded tables."""
    sums = sum(
        each.exchange_s for each in facts.collectives if each.name == "all_reduce"
    )
    return sums / max(sum(each.exchange_s for each in facts.collectives), 1e-12)


def _sharded(facts: Facts) -> list[TableFacts]:
    """Returns the shards of sharded tables."""
    tables = chain.from_iterable(each.tables for each in facts.ranks)
    return [table for table in tables if table.sharding not in ("", "data_parallel")]


def _mib(tables: Sequence[TableFacts]) -> float:
    return sum(table.numbers for table in tables) * 4 / 2**20


def _less_often(facts: Facts) -> list[Remedy]:
    """Returns ways to exchange less: sums of gradients seldomer, no rows of tables, or nothing at all."""
    sums = _share_of_sums(facts)
    remedies = list[Remedy]()
    sharded = _sharded(facts)
    mib = _mib(sharded)
    if facts.recipe and sharded and mib < _SMALL_MIB:
        whole = Remedy(
            name="tables whole on every rank",
            lines=("--set plan.sharding=data_parallel",),
            # Gradients of whole tables are summed too, so at worst the exchange takes a
            # tenth longer.
            gain=_gain_of_exchange(facts, -0.1, 1 - sums),
            changes=Change.ROUNDING,
            basis=f"predicted: the tables take {mib:.3g} MiB, and their gradients are summed in place of rows",
        )
        remedies.append(whole)
    if sums > _FEW and not facts.towers_apart:
        line = "with model.no_sync(): ...  # DDP: backward of three batches of four; then one with the exchange"
        changes = Change.BATCH
        if facts.recipe:
            line = "--set sync.mode=local_sgd --set sync.every=4"
            changes = Change.EXCHANGED_LESS
        seldomer = Remedy(
            name="one exchange for four batches",
            lines=(line,),
            gain=_gain_of_exchange(facts, 0.75 * sums, 0.75 * sums),
            changes=changes,
            basis="predicted from the share of the exchange that sums gradients",
        )
        remedies.append(seldomer)
    gain = one_rank(facts)
    if gain is not None and gain.low > 1:
        alone = Remedy(
            name="a single rank, which has nothing to exchange",
            lines=(
                "-j 1x1" if facts.recipe else "python train.py  # in place of torchrun",
            ),
            gain=gain,
            changes=Change.BATCH,
            basis="measured: one rank without exchange while the others slept",
            is_measured=True,
        )
        remedies.append(alone)
    return remedies


def unmerged_exchange(facts: Facts) -> Finding | None:
    """A step makes many small collectives of one kind in place of one."""
    kinds = _kinds(facts)
    if not kinds or next(_slow_links(facts), None) or _by_bytes(facts) > 0.5:
        return None
    # Calls of several kinds cannot be merged into one, so the most of one kind count.
    name, calls = max(kinds.items(), key=lambda each: len(each[1]))
    if len(calls) < MANY:
        return None
    count = len(calls)
    lines = ", ".join(dict.fromkeys(each.line for each in calls))
    kib = statistics.median([max(each.bytes) for each in calls]) / 1024
    evidence = (
        f"{count} {name} of {kib:,.2f} KiB in a step, called from {lines}",
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
            lambda each: (
                each["data"] + each["step"] - (1 - 4 / count) * each["exchange"]
            ),
            lambda each: (
                each["data"]
                + each["step"]
                - (1 - 1 / count) * (each["exchange"] + 0.5 * each["wait"])
            ),
        ),
        changes=Change.EXACT,
        basis=f"predicted: the time of {count} goes but for one to four",
    )
    remedies = _less_often(facts)
    if not facts.recipe or (_sharded(facts) and not facts.towers_apart):
        # what tower_parallel can merge
        remedies.insert(0, remedy)
    title = "many small exchanges take the time of their number, not of their bytes"
    cost = _exchange_share(facts) * (1 - 2 / len(facts.collectives))
    return finding_of_cost("unmerged_exchange", title, evidence, remedies, cost)


def latency(facts: Facts) -> Finding | None:
    """The exchange takes the time of its messages' way, whatever their size."""
    # A slow link and many small collectives are causes of their own.
    if (
        not facts.collectives
        or next(_slow_links(facts), None)
        or unmerged_exchange(facts)
        or _by_bytes(facts) > 0.5
    ):
        return None
    evidence = (
        _exchange_text(facts),
        f"a collective of a few bytes takes {in_ms(facts.latency_s)} here, and their bytes need "
        f"{_by_bytes(facts):.0%} of the time",
    )
    title = "the exchange is bound by latency, not by its bytes"
    return finding_of_cost(
        "latency", title, evidence, _less_often(facts), _exchange_share(facts)
    )


def bandwidth(facts: Facts) -> Finding | None:
    """The exchange takes the time of its bytes."""
    if (
        not facts.collectives
        or next(_slow_links(facts), None)
        or _by_bytes(facts) <= 0.5
    ):
        return None
    evidence = (
        _exchange_text(facts),
        f"their bytes need {_by_bytes(facts):.0%} of that at the links' rate",
    )
    rows = 1.0
    lines: tuple[str, ...] = (
        "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook",
        "model.register_comm_hook(None, bf16_compress_hook)  # DDP",
    )
    if facts.recipe:
        # A plan's precision is that of rows of sharded tables alone, not of gradient
        # sums.
        rows = 1 - _share_of_sums(facts)
        lines = (
            "--set plan.forward_precision=bf16 --set plan.backward_precision=bf16",
        )
    half = Remedy(
        name="half the bytes: 16 bits on the way",
        lines=lines,
        # Half the bytes save half of their time at most.
        gain=_gain_of_exchange(facts, 0.25 * rows, 0.5 * rows),
        changes=Change.BF16_SUMS,
        basis="predicted from the bytes",
    )
    remedies = _less_often(facts)
    if rows > _FEW:
        remedies.insert(0, half)
    title = "the exchange is bound by bandwidth"
    return finding_of_cost(
        "bandwidth", title, evidence, remedies, _exchange_share(facts)
    )


def oversubscribed(facts: Facts) -> Finding | None:
    """Processes of one host want more cores than they may use."""
    by_host: dict[str, list[RankFacts]] = {}
    for each in facts.ranks:
        by_host.setdefault(each.host, []).append(each)
    crowded = [
        ranks for ranks in by_host.values() if _thread_count(ranks) > _core_count(ranks)
    ]
    if not crowded:
        return None
    ranks = max(crowded, key=_queued_share)
    cost = _queued_share(ranks)
    host = ranks[0].host
    cores = _core_count(ranks)
    slower = statistics.median(
        [each.together_s / each.alone_s for each in ranks if each.alone_s] or [1.0]
    )
    evidence = (
        f"{len(ranks)} ranks with {_thread_count(ranks)} thread(s) share {cores} core(s) of {host or 'this host'}: for "
        f"{cost:.0%} of an iteration a rank is ready to run and has no core",
        f"its step without exchange takes {slower:.2f} times as long beside the others as alone",
    )
    lines = (
        f"-j 1x{cores} --threads 1"
        if facts.recipe
        else f"torchrun --nproc-per-node {cores} ...",
        "OMP_NUM_THREADS=1; and no taskset, cgroup or container limit of fewer cores than processes",
    )
    # Something of an iteration always stays.
    queue = min(cost, 0.9)
    remedy = Remedy(
        name="as many processes as cores, with one thread each",
        lines=lines,
        gain=Gain(max(1.0, 1 / (1 - 0.5 * queue)), 1.3 / (1 - queue)),
        changes=Change.BATCH,
        basis="predicted from the time without a core",
    )
    sharing = [each.rank for each in ranks]
    return finding_of_cost(
        "oversubscribed",
        "processes share a core",
        evidence,
        [remedy],
        cost,
        ranks=sharing,
    )


def _core_count(ranks: Sequence[RankFacts]) -> int:
    # Ranks of one host may use the same cores.
    return len(set[int]().union(*(each.cores for each in ranks)))


def _thread_count(ranks: Sequence[RankFacts]) -> int:
    return sum(each.threads for each in ranks)


def _queued_share(ranks: Sequence[RankFacts]) -> float:
    """Returns the share of the wall clock in which a typical rank has no core."""
    names = (*SPANS, "wait", "exchange")
    medians = []
    for rank in ranks:
        shares = []
        for each in rank.steps:
            queue = each["queue"]
            shares.append(queue / max(queue + sum(each[name] for name in names), 1e-12))
        medians.append(statistics.median(shares))
    return statistics.median(medians)


def one_rank(facts: Facts) -> Gain | None:
    """Returns the speed-up of one rank with the work of all over all ranks."""
    alone = [each.alone_s for each in facts.ranks if each.alone_s]
    if not alone or not facts.rounds:
        return None
    # One rank would load the batches of all, and make their steps.
    seconds = len(facts.ranks) * statistics.median(alone)
    between = facts.mean_between()
    ratios = [
        facts.iteration(each) / (seconds + len(facts.ranks) * each["data"] + between)
        for each in facts.rounds
    ]
    return paired_gain(ratios)


def rank_table(facts: Facts) -> list[str]:
    """Returns the ranks and their collectives as lines of a page; none for one process."""
    if not facts.has_ranks:
        return []
    names = ("data", "forward", "backward", "optimizer", "wait", "exchange", "queue")
    lines = [
        "rank"
        + "".join(f"{name:>11}" for name in names)
        + "   ms a step, by the median"
    ]
    for each in facts.ranks:
        lines.append(
            f"{each.rank:>4}"
            + "".join(f"{each.median(name) * 1e3:>11.3g}" for name in names)
        )
    lines += _held_by_rank(facts)
    for name, calls in _kinds(facts).items():
        exchange_s = sum(each.exchange_s for each in calls)
        waits_s = max(sum(each.waits_s) / len(each.waits_s) for each in calls)
        lines.append(
            f"{len(calls)} {name} in a step: {_kib(calls):,.1f} KiB, {in_ms(exchange_s)} themselves; ranks wait up to "
            f"{in_ms(waits_s)} for the last one"
        )
    return lines


def _held_by_rank(facts: Facts) -> list[str]:
    """Returns a line for each rank about its tables and its look-ups; none without tables."""
    if not any(each.tables for each in facts.ranks):
        return []
    names = ("MiB held", "rows read", "KiB read", "ids given")
    lines = ["rank" + "".join(f"{name:>12}" for name in names) + "   most of"]
    for each in facts.ranks:
        rows = sum(table.read for table in each.tables)
        kib_read = sum(table.numbers_read for table in each.tables) * 4 / 1024
        most = shard_text(most_read(each)) if each.tables else "-"
        text = f"{_mib(each.tables):>12,.1f}{rows:>12,}{kib_read:>12,.1f}{each.ids:>12,.0f}"
        lines.append(f"{each.rank:>4}{text}   {most}")
    return lines
