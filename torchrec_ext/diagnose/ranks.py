"""RankExperiments: the experiments on a training step that several ranks make together.

A round begins with the user's own loop, with its exchange, and with some steps of it that are traced: each collective
is completed where it is called, so that what a rank waits for others is told from what the exchange takes. Whatever
changes the step runs without exchange, on what the collectives returned before: no rank waits for another one there, so
none hangs where a change fails on one of them. DDP sums no gradients meanwhile, as under its ``no_sync``. A rank that
holds a share of the tables looks up the same ids there, and moves its rows at a learning rate of 0, since the gradients
that were kept would drive them astray.

All ranks gather what each measured, and make the same facts of it.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torchrec_ext.needs_torch  # noqa: F401

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchrec_ext.diagnose.collectives import Call, Collectives, Ranks, RanksFailedError, calls_by_group
from torchrec_ext.diagnose.experiments import FEWEST_ROUNDS, Experiments, Variant
from torchrec_ext.diagnose.facts import Between, CollectiveFacts, Facts, RankFacts, Round
from torchrec_ext.observe.counting import Counted
from torchrec_ext.observe.counts import TableFacts
from torchrec_ext.observe.state_copy import every_module
from torchrec_ext.observe.user_lines import described

LINK_BYTES = 2**18  # that a rank sends to each other one
_LINK_S = 2.0  # at most, for all of these
_LEAST_ALONE_S = 0.2
# Steps of a round, at least and at most: a rank that is slow in every second step is not always, or never, seen to be.
_TRACED = 4, 16
_KEPT = 2  # batches on which steps run without exchange
_PARTS = ("forward", "backward", "optimizer")


class Moment(NamedTuple):
    """A moment: of the wall clock, which all processes of a host share, and of this thread's own clock."""

    wall: float
    own_s: float


class Span(NamedTuple):
    """A stretch of a step, such as its backward."""

    name: str
    begin: Moment
    end: Moment

    @property
    def seconds(self) -> float:
        """Seconds of the thread's own clock."""
        return self.end.own_s - self.begin.own_s


class Traced(NamedTuple):
    """A traced iteration on one rank.

    Args:
        data: span in which the batch was made.
        step: span of the step.
        parts: backwards and optimizers' steps inside of it.
        calls: collectives.
        ids: ids in the batch's lists.
    """

    data: Span
    step: Span
    parts: Sequence[Span]
    calls: Sequence[Call]
    ids: int


class Measured(NamedTuple):
    """A rank's measures: its own facts and rounds, its traced steps, and by how much its clock is ahead."""

    facts: Facts
    rounds: Sequence[Round]
    traced: Sequence[Traced]
    rank: RankFacts
    offset: float


class RankExperiments(Experiments):
    """The experiments on a step function that all ranks call.

    Args:
        ranks: ranks of the diagnosis.
        args: what :class:`Experiments` takes.
    """

    def __init__(self, ranks: Ranks, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._ranks = ranks
        self._thread = threading.get_ident()
        self._collectives = Collectives(ranks.failures, self._begin)
        self._marks: list[Span] = []
        self._traces: list[Traced] = []
        self._tracing = self._replaying = False
        self._recorded: dict[int, list[Any]] = {}
        self._kept: list[Any] = []
        self._lookups: Sequence[TableFacts] = ()
        self._inner_call, self._call = self._call, self._called
        every = [each for root in self._modules for each in every_module(root)]
        self._copies = [each for each in every if isinstance(each, DistributedDataParallel)]
        self._fused: list[Any] = [
            each.fused_optimizer for each in every if hasattr(each, "emb_module") and hasattr(each, "fused_optimizer")
        ]

    # ------------------------------------------------------------------------------------------------ how the step runs

    def _called(self, batch: Any) -> object:
        if self._replaying:
            recorded = self._recorded.get(id(batch))
            self._collectives.rewind(self._recorded[id(self._kept[0])] if recorded is None else recorded)
        return self._inner_call(batch)

    def _begin(self) -> Any:
        seconds = self._clock() if threading.get_ident() == self._thread else time.perf_counter()
        return Moment(time.perf_counter(), seconds)

    def _ended(self, name: str, start: Any) -> float:
        end = self._begin()
        self._marks.append(Span(name, start, end))
        seconds: float = end.own_s - start.own_s
        self._spans[name] += seconds  # type: ignore[assignment]
        return seconds

    def _iterate(self) -> dict[str, float]:
        begin = self._begin()
        self._marks.clear()
        self._collectives.calls.clear()
        made = super()._iterate()
        if self._tracing:
            step = next(each for each in self._marks if each.name == "step")
            parts = [each for each in self._marks if each.name != "step"]
            ids = _id_count(self._pool[-1])
            self._traces.append(
                Traced(Span("data", begin, step.begin), step, parts, list(self._collectives.calls), ids)
            )
        return made

    def _several(self, count: int) -> list[Any]:
        return [self._kept[index % len(self._kept)] for index in range(count)]

    @contextmanager
    def _without_exchange(self) -> Iterator[None]:
        with ExitStack() as stack:
            for each in self._copies:
                stack.callback(setattr, each, "require_backward_grad_sync", each.require_backward_grad_sync)
                each.require_backward_grad_sync = False
            self._hold_tables(stack)
            stack.callback(setattr, self, "_replaying", False)
            self._replaying = True
            stack.enter_context(self._collectives.watching("replay"))
            yield

    def _hold_tables(self, stack: ExitStack) -> None:
        """Has the kernels of sharded tables update rows at a learning rate of 0, which takes them as long."""
        for fused in self._fused:
            stack.callback(fused.zero_grad)  # hands the rate to the kernel
            for group in fused.param_groups:
                stack.callback(group.__setitem__, "lr", group["lr"])
                group["lr"] = 0.0
            fused.zero_grad()

    def _attempt(self, variant: Variant) -> Round:
        self._ranks.meet()
        with self._without_exchange():
            return super()._attempt(variant)

    # -------------------------------------------------------------------------------------------------- the experiments

    def facts(self, between: Mapping[str, tuple[Callable[[], object], int]]) -> Facts:
        """Makes all experiments; every rank returns the same facts."""
        facts = super().facts(between)
        measured = Measured(facts, self._own_rounds, self._traces, self._rank_facts(), self._offset())
        by_rank: list[Measured] = self._ranks.gather(measured)
        return facts_of_ranks(by_rank, self._latency, LINK_BYTES)

    def _warm_up(self) -> bool:
        """Runs the first steps; False on all ranks where the step cannot be run on one of them."""
        self._busy = None
        self._own_rounds: Sequence[Round] = []
        self._latency, self._sent = 0.0, 0.0
        self._alone: tuple[float, float] = 0.0, 0.0
        self._note_unreached()
        try:
            for _ in range(3):
                error = None
                try:
                    self.source.peek()
                except StopIteration:
                    self._pool_ended()
                except Exception as caught:
                    error = RanksFailedError(f"the loader raised {described(caught)}")
                self._ranks.agree(error)
                self._real("trace", self._iterate)
            self._record()
            return True
        except RanksFailedError as error:
            text = str(error)
        self.not_measured["step"] = f"the step raised on {text}" if text.startswith("rank ") else text
        return False

    def _real(self, mode: Any, call: Callable[[], Any], recorded: list[Any] | None = None) -> Any:
        """Runs what exchanges.

        Raises:
            RanksFailedError: it raised on a rank.
        """

        def watched() -> Any:
            with self._collectives.watching(mode, recorded):
                return call()

        result, error = self._ranks.together(self._collectives, watched)
        if error:
            raise RanksFailedError(f"all ranks: {error}")
        return result

    def _record(self) -> None:
        """Keeps what the collectives return on the batches on which steps run without exchange."""
        self._kept = self._pool[-_KEPT:]
        for batch in self._kept:
            recorded: list[Any] = []
            with _look_ups(self._modules) as tables:
                self._real("record", lambda batch=batch: self._inner_call(batch), recorded)  # type: ignore[misc]
            self._recorded[id(batch)] = recorded
            self._lookups = list(tables.values())

    def _count_ops(self) -> Counted:
        counted = Counted()

        def count() -> None:
            nonlocal counted
            counted = super(RankExperiments, self)._count_ops()

        self._ranks.meet()
        with self._without_exchange():
            count()
        return counted

    def _rounds(self, busy: Callable[[], float | None]) -> Sequence[Round]:
        try:
            return self._agreed_rounds(busy)
        except RanksFailedError as error:
            self.not_measured["step"] = f"the step raised on {error}"
            return []

    def _agreed_rounds(self, busy: Callable[[], float | None]) -> Sequence[Round]:
        start, before = time.perf_counter(), _process_seconds()
        with self._spanning():
            first = self._real("watch", self._loop)
            self._choose_iterations(first, start)
            self._iterations, self._steps_of_turn = self._ranks.gather((self._iterations, self._steps_of_turn))[0]
            rate = (_process_seconds() - before) / max(time.perf_counter() - start, 1e-9)
            others = sum(self._ranks.gather(rate)) - rate
            seen = busy()
            self._busy = self._ranks.gather(None if seen is None else max(0.0, seen - others))[0]
            self._probe()
            variants = self._shared(list(self._variants(first["step"])))
            for variant in self._tried_together(variants, start):
                self.not_measured[variant] = (
                    f"a round takes longer than budget_s={self._budget:g} holds {FEWEST_ROUNDS} times; give more"
                )
            rounds: list[Round] = []
            while True:
                enough, spent = self._ranks.gather((self._enough(rounds), time.perf_counter() - start))[0]
                too_long = spent > (self._budget if len(rounds) >= FEWEST_ROUNDS else 3 * self._budget)
                if enough or (too_long and rounds):
                    break
                made = dict(self._real("watch", self._loop))
                made |= self._trace()
                for variant_ in variants if len(rounds) % 2 == 0 else variants[::-1]:
                    if variant_.name not in self.not_measured:
                        made |= self._attempt(variant_)
                rounds.append(made)
                self._share_missing()
        self._own_rounds = rounds
        return common_rounds(self._ranks.gather(rounds))

    def _trace(self) -> Round:
        before = len(self._traces)

        def traced() -> None:
            self._tracing = True
            try:
                for _ in range(max(_TRACED[0], min(_TRACED[1], self._iterations))):
                    self._iterate()
            finally:
                self._tracing = False

        self._real("trace", traced)
        matched = parted(self._ranks.gather(self._traces[before:]))[self._ranks.rank]
        names = (*_PARTS, "wait", "exchange")
        return {f"traced_{name}": statistics.fmean([each[name] for each in matched]) for name in names}

    def _shared(self, variants: list[Variant]) -> list[Variant]:
        """Returns the experiments that all ranks can make, in rank 0's order."""
        names = self._ranks.gather([each.name for each in variants])
        by_name = {each.name: each for each in variants}
        self._share_missing()
        return [by_name[name] for name in names[0] if all(name in each for each in names)]

    def _share_missing(self) -> None:
        """Leaves out on all ranks what one of them could not measure."""
        for rank, missing in enumerate(self._ranks.gather(dict(self.not_measured))):
            for name, why in missing.items():
                self.not_measured.setdefault(name, why if rank == 0 else f"rank {rank}: {why}")

    def _tried_together(self, variants: list[Variant], start: float) -> list[str]:
        """Runs each experiment once; returns the names of those that a round has no time for."""
        spent, left_out = 0.0, []
        for variant in variants:
            before = time.perf_counter()
            given_up = spent and (before - start > self._budget / 2 or spent * FEWEST_ROUNDS > self._budget)
            if self._ranks.gather(bool(given_up))[0]:
                left_out.append(variant.name)
                continue
            self._attempt(variant)
            spent += time.perf_counter() - before
        self._share_missing()
        return left_out

    def _threads(self, step: float) -> Iterator[Variant]:
        threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
        if threads > 1:
            yield Variant("one_thread", lambda: {"one_thread": self._on(1)})
        self.not_measured["all_threads"] = (
            f"the {self._ranks.size} ranks share the cores: {threads} thread(s) each on {cores} core(s)"
        )

    def _towers(self, rounds: Sequence[Round]) -> Sequence[tuple[str, float]]:
        return ()  # the ranks have the cores that towers would run on

    def _on_device(self, rounds: Sequence[Round]) -> tuple[int, float | None]:
        with self._without_exchange():
            return super()._on_device(rounds)

    def _worker(self, rounds: Sequence[Round]) -> Sequence[tuple[float, float]]:
        reasons = self._ranks.gather(self._no_worker(rounds))
        if any(reasons):
            self.not_measured["worker"] = next(filter(None, reasons))
            return ()
        with self._without_exchange():
            turns = super()._worker(rounds)
        self._share_missing()
        if "worker" in self.not_measured:
            return ()
        exposed = statistics.median([each["wait"] + each["exchange"] for each in rounds])
        return [(old + exposed, new + exposed) for old, new in turns]

    def _between(self, between: Mapping[str, tuple[Callable[[], object], int]]) -> Sequence[Between]:
        made: Sequence[Between] = ()
        if "step" in self.not_measured:
            return made
        try:
            made = self._real("watch", lambda: super(RankExperiments, self)._between(between))
        except RanksFailedError as error:
            self.not_measured.update(dict.fromkeys(between, str(error)))
        return made

    # ---------------------------------------------------------------------------------- what is probed without the step

    def _probe(self) -> None:
        """Times a rank without exchange alone and beside the others, a tiny collective, and each rank's link."""
        steps = self._several(len(self._kept))

        def wall() -> float:
            start, count = time.perf_counter(), 0
            while count == 0 or time.perf_counter() - start < _LEAST_ALONE_S:
                for batch in steps:
                    self._call(batch)
                count += len(steps)
            return (time.perf_counter() - start) / count

        alone, together = [], []
        error: Exception | None = None
        with self._without_exchange():
            for _ in range(2):
                for rank in range(self._ranks.size):
                    self._ranks_meet()
                    if rank == self._ranks.rank and error is None:
                        try:
                            alone.append(wall())
                        except Exception as caught:
                            error = caught
                self._ranks_meet()
                if error is None:
                    together.append(wall())
        if error is not None:
            self.not_measured["one rank alone"] = described(error)
        else:
            self._alone = min(alone), min(together)
        self._probe_links()

    def _ranks_meet(self) -> None:
        """Meets where collectives are replayed: these of the diagnosis are not."""
        with self._collectives.real():
            self._ranks.meet()

    def _probe_links(self) -> None:
        device = next((each.device for root in self._modules for each in root.parameters()), torch.device("cpu"))
        few, many = torch.zeros(2, device=device), torch.zeros(LINK_BYTES // 4 * (self._ranks.size - 1), device=device)
        latencies = list[float]()
        for _ in range(12):
            self._ranks.meet()
            start = time.perf_counter()
            dist.all_reduce(few)
            self._settle()
            latencies.append(time.perf_counter() - start)
        self._latency = min(self._ranks.gather(statistics.median(latencies[2:])))
        begin, turns = time.perf_counter(), list[list[float]]()
        while self._ranks.gather(len(turns) < 2 or (len(turns) < 6 and time.perf_counter() - begin < _LINK_S))[0]:
            turns.append([self._send(rank, many) for rank in range(self._ranks.size)])
        by_rank = self._ranks.gather([min(turn[rank] for turn in turns) for rank in range(self._ranks.size)])
        self._sent = max(each[self._ranks.rank] for each in by_rank)  # the last of those that receive

    def _send(self, sender: int, many: Tensor) -> float:
        """Returns the seconds after which what one rank sends has come to this one."""
        share, mine = LINK_BYTES // 4, self._ranks.rank
        sizes = [share * (sender == mine and rank != mine) for rank in range(self._ranks.size)]
        counts = [share * (rank == sender != mine) for rank in range(self._ranks.size)]
        self._ranks.meet()
        start = time.perf_counter()
        dist.all_to_all_single(many.new_empty(sum(counts)), many[: sum(sizes)], counts, sizes)
        self._settle()
        return time.perf_counter() - start

    def _settle(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def _offset(self) -> float:
        """Returns how far this host's wall clock is ahead of rank 0's; 0 on the same host."""
        hosts = self._ranks.gather(socket.gethostname())
        if len(set(hosts)) == 1:
            return 0.0
        ahead = []
        for _ in range(9):
            self._ranks.meet()
            moments: list[float] = self._ranks.gather(time.perf_counter())
            ahead.append(moments[self._ranks.rank] - moments[0])
        return statistics.median(ahead)

    def _rank_facts(self) -> RankFacts:
        return RankFacts(
            rank=self._ranks.rank,
            host=socket.gethostname(),
            cores=sorted(os.sched_getaffinity(0)),
            threads=torch.get_num_threads(),
            tables=self._lookups,
            send_s=self._sent,
            alone_s=self._alone[0],
            together_s=self._alone[1],
        )


def _process_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _id_count(batch: Any) -> int:
    """Returns the ids of a batch: values of its jagged tensors, and entries of its tensors of whole numbers."""
    if isinstance(batch, Tensor):
        return 0 if batch.is_floating_point() or batch.is_complex() else batch.numel()
    if hasattr(batch, "lengths") and hasattr(batch, "values") and not isinstance(batch, Mapping):
        return int(batch.values().numel())
    if isinstance(batch, Mapping):
        return sum(map(_id_count, batch.values()))
    if isinstance(batch, list | tuple):
        return sum(map(_id_count, batch))
    return sum(map(_id_count, vars(batch).values())) if dataclasses.is_dataclass(batch) else 0


@contextmanager
def _look_ups(modules: Sequence[nn.Module]) -> Iterator[dict[Any, TableFacts]]:
    """Counts meanwhile the ids that each table of this rank is read by: torch's tables, and TorchRec's sharded ones."""
    tables: dict[Any, TableFacts] = {}
    every = [module for root in modules for module in every_module(root)]
    plans = [getattr(module, "module_sharding_plan", None) or {} for module in every]
    shardings = {name: each.sharding_type for plan in plans for name, each in plan.items()}

    def add(key: Any, name: str, rows: int, dim: int, read: int) -> None:
        before = tables.get(key)
        tables[key] = TableFacts(
            name=name,
            rows=rows,
            dim=dim,
            read=read + (before.read if before else 0),
            sharding=shardings.get(name, "") if isinstance(key, tuple) else "",
        )

    def plain(path: str) -> Callable[[Any, Any], None]:
        return lambda module, args: add(id(module), path, len(module.weight), module.weight.shape[1], args[0].numel())

    def sharded(module: Any, args: Any) -> None:
        counts = iter(args[0].length_per_key())
        for index, table in enumerate(module.config.embedding_tables):
            read = sum(next(counts, 0) for _ in table.feature_names)
            add((id(module), index), table.name, table.local_rows, table.local_cols, read)

    with ExitStack() as stack:
        paths = {id(module): path for root in modules for path, module in root.named_modules()}
        for module in every:
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                path = paths.get(id(module), type(module).__name__)
                stack.callback(module.register_forward_pre_hook(plain(path)).remove)
            elif hasattr(getattr(module, "config", None), "embedding_tables"):
                stack.callback(module.register_forward_pre_hook(sharded).remove)
        yield tables


# --------------------------------------------------------------------------------------- pure: from measures to facts


def _matched(steps: Sequence[Traced], offsets: Sequence[float]) -> list[tuple[Call, list[tuple[int, Call]], float]]:
    """Returns the collectives of one step of all ranks: a call, that of each rank of its group, the last arrival."""
    groups: dict[tuple[int, ...], list[list[tuple[int, Call]]]] = {}
    for rank, step in enumerate(steps):
        for ranks, calls in calls_by_group(step.calls).items():
            entries = groups.setdefault(ranks, [[] for _ in calls])
            for index, call in enumerate(calls[: len(entries)]):
                entries[index].append((rank, call))
    matched: list[tuple[Call, list[tuple[int, Call]], float]] = []
    for ranks, entries in groups.items():
        for same in entries:
            if len(same) == len(ranks):
                last = max(call.begin.wall - offsets[rank] for rank, call in same)
                matched.append((same[0][1], same, last))
    return sorted(matched, key=lambda each: each[2])


def _inside(step: Traced, call: Call) -> str:
    return next((each.name for each in step.parts if each.begin.wall <= call.begin.wall <= each.end.wall), "forward")


def parted(traced: Sequence[Sequence[Traced]], offsets: Sequence[float] = ()) -> list[list[Round]]:
    """Returns the seconds of each traced step of each rank by part: see :class:`RankFacts`.

    Args:
        traced: traced iterations of each rank, the same on all of them.
        offsets: seconds by which each rank's wall clock is ahead.
    """
    offsets = offsets or [0.0] * len(traced)
    by_rank: list[list[Round]] = [[] for _ in traced]
    for steps in zip(*traced, strict=True):
        waits = [0.0] * len(steps)
        for _, calls, last in _matched(steps, offsets):
            for rank, call in calls:
                waits[rank] += max(0.0, last + offsets[rank] - call.begin.wall)
        for rank, step in enumerate(steps):
            parts = {name: sum(each.seconds for each in step.parts if each.name == name) for name in _PARTS}
            parts["forward"] = step.step.seconds - sum(parts.values())
            inside = 0.0
            for call in step.calls:
                seconds = call.end.own_s - call.begin.own_s
                parts[_inside(step, call)] -= seconds
                inside += seconds
            wait = min(waits[rank], inside)
            wall = step.step.end.wall - step.data.begin.wall
            running = step.step.end.own_s - step.data.begin.own_s
            by_rank[rank].append(
                {
                    "data": step.data.seconds,
                    **parts,
                    "wait": wait,
                    "exchange": inside - wait,
                    "queue": max(0.0, wall - running),
                }
            )
    return by_rank


def collectives_of(traced: Sequence[Sequence[Traced]], offsets: Sequence[float]) -> list[CollectiveFacts]:
    """Returns the collectives of a step, each by its medians over the traced steps."""
    by_step = [(_matched(steps, offsets), steps) for steps in zip(*traced, strict=True)]
    kinds = [tuple((first.name, first.ranks) for first, _, _ in matched) for matched, _ in by_step]
    if not kinds:
        return []
    usual = max(kinds, key=kinds.count)  # a check every hundredth step is none of a step's collectives
    by_step = [each for each, kind in zip(by_step, kinds, strict=True) if kind == usual]
    made = []
    for index in range(len(usual)):
        seen = [(matched[index], steps) for matched, steps in by_step]
        (first, calls, _), steps = seen[0]
        ranks = [rank for rank, _ in calls]
        exchange, waits, given = [], [], []
        for (_, same, last), _ in seen:
            exchange.append(max(call.end.wall - offsets[rank] for rank, call in same) - last)
            waits.append([max(0.0, last + offsets[rank] - call.begin.wall) for rank, call in same])
            given.append([float(call.bytes) for _, call in same])
        made.append(
            CollectiveFacts(
                name=first.name,
                line=first.line,
                span=_inside(steps[ranks[0]], calls[0][1]),
                ranks=ranks,
                bytes=[statistics.fmean(each) for each in zip(*given, strict=True)],
                exchange_s=max(0.0, statistics.median(exchange)),
                waits_s=[statistics.median(each) for each in zip(*waits, strict=True)],
            )
        )
    return made


def _low(values: Sequence[float]) -> float:
    """Returns the lower median."""
    return sorted(values)[(len(values) - 1) // 2]


def common_rounds(by_rank: Sequence[Sequence[Round]]) -> list[Round]:
    """Returns the rounds of a typical rank, see :class:`Facts`, from those of each rank.

    The step is what an iteration takes beyond a typical batch; ranks that wait for each other take the same. A changed
    step was measured without exchange, and gets what the step takes beyond its own such time: its exchange stays.
    """
    made: list[Round] = []
    for rounds in zip(*by_rank, strict=True):
        names = [name for name in rounds[0] if all(name in each for each in rounds)]
        low = {name: _low([each[name] for each in rounds]) for name in names}
        each = {name: low[name] for name in ("data", "sleep", "op", "bare", "sync", "gc") if name in low}
        # The least: a rank that stood in the run queue does not see that itself, and the others waited for it.
        each["step"] = max(min(other["data"] + other["step"] for other in rounds) - low["data"], 0.0)
        parts = {name: low[f"traced_{name}"] for name in _PARTS}
        scale = min(1.0, each["step"] / max(sum(parts.values()), 1e-12))
        each |= {name: seconds * scale for name, seconds in parts.items()}
        exposed = max(0.0, each["step"] - sum(each[name] for name in _PARTS))
        each["exchange"] = min(exposed, low["traced_exchange"])
        each["wait"] = exposed - each["exchange"]
        beyond = max(0.0, each["step"] - low.get("ready", each["step"]))
        for name in names:
            if name not in each and not name.startswith("traced_"):
                each[name] = low[name] + beyond
        made.append(each)
    return made


def facts_of_ranks(by_rank: Sequence[Measured], latency: float, link_bytes: int) -> Facts:
    """Returns the facts of all ranks, of what each measured."""
    offsets = [each.offset for each in by_rank]
    traced = [each.traced for each in by_rank]
    steps = parted(traced, offsets)
    lanes = _lanes([each[-1] for each in traced], offsets) if all(traced) else [()] * len(by_rank)
    ranks = [
        dataclasses.replace(
            each.rank,
            steps=steps[number],
            spans=lanes[number],
            ids=statistics.fmean([step.ids for step in each.traced]) if each.traced else 0.0,
        )
        for number, each in enumerate(by_rank)
    ]
    first = by_rank[0].facts
    notes = [*first.notes]
    for each in by_rank[1:]:
        notes += [f"rank {each.rank.rank}: {note}" for note in each.facts.notes if note not in notes]
    return dataclasses.replace(
        first,
        ranks=ranks,
        collectives=collectives_of(traced, offsets),
        latency_s=latency,
        link_bytes=link_bytes,
        notes=notes,
    )


def _lanes(steps: Sequence[Traced], offsets: Sequence[float]) -> list[list[tuple[str, float, float]]]:
    """Returns the spans of each rank's step, for a chart."""
    zero = min(step.data.begin.wall - offset for step, offset in zip(steps, offsets, strict=True))
    matched = _matched(steps, offsets)
    lanes = []
    for rank, (step, offset) in enumerate(zip(steps, offsets, strict=True)):
        parts = sorted(step.parts, key=lambda each: each.begin.wall)
        spans = [("data", step.data.begin.wall, step.data.end.wall)]
        before = step.step.begin.wall
        for each in parts:
            spans += [("forward", before, each.begin.wall), (each.name, each.begin.wall, each.end.wall)]
            before = max(before, each.end.wall)
        spans.append(("forward", before, step.step.end.wall))
        for _, calls, last in matched:
            for other, call in calls:
                if other == rank:
                    arrived = min(max(call.begin.wall, last + offset), call.end.wall)
                    spans += [("wait", call.begin.wall, arrived), ("exchange", arrived, call.end.wall)]
        lanes.append([(name, a - offset - zero, b - offset - zero) for name, a, b in spans if b - a > 1e-6])
    return lanes
