"""RankRounds: the rounds of a training step that several ranks make together.

A round begins with the user's own loop, with its exchange, and with some steps of it that are traced: each collective
is completed where it is called, so that what a rank waits for others is told from what the exchange takes. Whatever
changes the step runs without exchange, on what the collectives returned before: no rank waits for another one there, so
none hangs if a change fails on one of them. DDP sums no gradients meanwhile, as under its ``no_sync``. A rank that
holds a share of the tables looks up the same ids there, and moves its rows at a learning rate of 0, since the gradients
that were kept would drive them astray.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torchrec_ext.needs_torch  # noqa: F401

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torchrec_ext.diagnose.experiments.collectives import (
    Collectives,
    Mode,
    Ranks,
    RanksFailedError,
)
from torchrec_ext.diagnose.experiments.loop import Span, TrainingLoop
from torchrec_ext.diagnose.experiments.rounds import (
    FEWEST_ROUNDS,
    attempt,
    enough,
    in_order,
    is_late,
    is_too_slow,
)
from torchrec_ext.diagnose.experiments.traces import (
    STEP_PARTS,
    Measured,
    Traced,
    common_rounds,
    facts_of_ranks,
    parted,
)
from torchrec_ext.diagnose.experiments.variants import Variant, Variants
from torchrec_ext.diagnose.facts import Facts, RankFacts, Round
from torchrec_ext.observe.clock import process_seconds
from torchrec_ext.observe.counts import TableFacts
from torchrec_ext.observe.lookups import count_lookups
from torchrec_ext.observe.reached import every_module
from torchrec_ext.observe.user_lines import described

LINK_BYTES = 2**18  # that a rank sends to each other one
_LINK_S = 2.0  # at most, for all of these
_LEAST_ALONE_S = 0.2  # of steps of a rank by itself, of which one wait for a core must not be the half
# Steps of a round, at least and at most: a rank that is slow in every second step is
# not always, or never, seen to be.
_TRACED = 4, 16
_RECORDED = 2  # batches on which steps run without exchange


class LocalSteps:
    """Steps of a loop with their exchange, or without it on recorded results of the collectives.

    Args:
        loop: the user's loop.
        ranks: ranks of the diagnosis.

    Attributes:
        loop: the loop.
        collectives: the collectives of this process.
        lookups: tables that this rank looks up.
        fused: optimizers inside of the kernels of sharded tables.
    """

    def __init__(self, loop: TrainingLoop, ranks: Ranks) -> None:
        self.collectives = Collectives(ranks.failures, loop.clock.moment)
        self.lookups: Sequence[TableFacts] = ()
        self.loop = loop
        self._ranks = ranks
        self._recorded: dict[int, list[Any]] = {}
        self._replaying = False
        loop.before_step = self._rewind
        self._copies: list[DistributedDataParallel] = []
        self.fused: list[Any] = []
        for module in chain.from_iterable(map(every_module, loop.modules)):
            if isinstance(module, DistributedDataParallel):
                self._copies.append(module)
            # Kernels alone: a sharded collection has a `fused_optimizer` too, of all
            # its kernels.
            if hasattr(module, "emb_module") and hasattr(module, "fused_optimizer"):
                self.fused.append(module.fused_optimizer)

    def _rewind(self, batch: Any) -> None:
        if self._replaying:
            first = self._recorded[id(self.loop.fixed[0])]
            self.collectives.rewind(self._recorded.get(id(batch), first))

    def exchange(
        self, mode: Mode, call: Callable[[], Any], recorded: list[Any] | None = None
    ) -> Any:
        """Runs a call with its exchange.

        Raises:
            RanksFailedError: it raised on a rank.
        """

        def watched() -> Any:
            with self.collectives.watching(mode, recorded):
                return call()

        result, error = self._ranks.together(self.collectives, watched)
        if error:
            raise RanksFailedError(f"all ranks: {error}")
        return result

    def record(self) -> None:
        """Records the collectives' results on the last batches, the batches of steps without exchange."""
        self.loop.fixed = self.loop.pool[-_RECORDED:]
        for batch in self.loop.fixed:
            recorded: list[Any] = []
            with count_lookups(self.loop.modules) as tables:
                self.exchange(
                    "record",
                    lambda batch=batch: self.loop.call(batch),  # type: ignore[misc]
                    recorded,
                )
            self._recorded[id(batch)] = recorded
            self.lookups = [facts for facts, _ in tables.values()]

    @contextmanager
    def without_exchange(self) -> Iterator[None]:
        """Has steps run without exchange meanwhile."""
        with ExitStack() as stack:
            for each in self._copies:
                stack.callback(
                    setattr,
                    each,
                    "require_backward_grad_sync",
                    each.require_backward_grad_sync,
                )
                each.require_backward_grad_sync = False
            # Set the learning rate of sharded tables to 0: an update takes as long and
            # moves nothing.
            for fused in self.fused:
                # zero_grad hands the rate to the kernel.
                stack.callback(fused.zero_grad)
                for group in fused.param_groups:
                    stack.callback(group.__setitem__, "lr", group["lr"])
                    group["lr"] = 0.0
                fused.zero_grad()
            stack.callback(setattr, self, "_replaying", False)
            self._replaying = True
            stack.enter_context(self.collectives.watching("replay"))
            yield


class RankRounds:
    """The rounds of several ranks, with the methods of :class:`Rounds`.

    Args:
        loop: the user's loop.
        variants: changes to its step.
        budget_s: seconds of the wall clock for the rounds; the first four may take three times as long.
        ranks: ranks of the diagnosis.

    Attributes:
        size: number of ranks.
        busy: cores that others than these ranks keep busy; None if unknown.
    """

    def __init__(
        self, loop: TrainingLoop, variants: Variants, budget_s: float, ranks: Ranks
    ) -> None:
        self.size = ranks.size
        self.busy: float | None = None
        self._loop = loop
        self._variants = variants
        self._budget_s = budget_s
        self._ranks = ranks
        self._steps = LocalSteps(loop, ranks)
        self._traces: list[Traced] = []
        self._rounds: list[Round] = []  # of this rank
        self._facts = RankFacts(
            rank=ranks.rank,
            host=socket.gethostname(),
            cores=sorted(os.sched_getaffinity(0)),
        )
        self._latency_s = 0.0

    def facts(self, facts: Facts) -> Facts:
        """Returns the facts of all ranks, the same on each of them, from this rank's own."""
        threads = torch.get_num_threads()
        rank = dataclasses.replace(
            self._facts, threads=threads, tables=self._steps.lookups
        )
        measured = Measured(
            facts, self._rounds, self._traces, rank, _clock_offset(self._ranks)
        )
        return facts_of_ranks(self.gather(measured), self._latency_s, LINK_BYTES)

    def gather(self, value: Any) -> list[Any]:
        """Returns the value of each rank."""
        return self._ranks.gather(value)

    @contextmanager
    def local(self) -> Iterator[None]:
        """Waits for all ranks, and has steps run without exchange meanwhile."""
        self._ranks.meet()
        with self._steps.without_exchange():
            yield

    def real(self, call: Callable[[], Any]) -> Any:
        """Runs a call with its exchange.

        Raises:
            RanksFailedError: it raised on a rank.
        """
        return self._steps.exchange("watch", call)

    def share_missing(self) -> None:
        """Leaves out on all ranks each experiment without a result on one."""
        for rank, missing in enumerate(self.gather(dict(self._loop.not_measured))):
            for name, why in missing.items():
                self._loop.not_measured.setdefault(
                    name, why if rank == 0 else f"rank {rank}: {why}"
                )

    def warm_up(self) -> bool:
        """Runs the first steps; False on all ranks if the step cannot be run on one of them."""
        try:
            for _ in range(3):
                failure = None
                # The batch by itself first: a loader that raises must not leave the
                # other ranks in the step.
                try:
                    self._loop.source.peek()
                except StopIteration:
                    self._loop.note_end()
                except Exception as caught:
                    failure = RanksFailedError(f"the loader raised {described(caught)}")
                self._ranks.agree(failure)
                self._steps.exchange("trace", self._iterate)
            self._steps.record()
            return True
        except RanksFailedError as error:
            self._loop.not_measured["step"] = (
                f"the step raised on {error}" if error.names_rank else str(error)
            )
            return False

    def _iterate(self) -> None:
        self._steps.collectives.calls.clear()
        self._loop.iterate()

    def measure(self, busy: Callable[[], float | None]) -> Sequence[Round]:
        """Makes the rounds; ``busy`` returns how many cores others kept busy. Returns those of a typical rank."""
        try:
            with self._loop.watching():
                self._rounds = self._measure(busy)
                return common_rounds(self.gather(self._rounds))
        except RanksFailedError as error:
            self._loop.not_measured["step"] = f"the step raised on {error}"
            return []

    def _measure(self, busy: Callable[[], float | None]) -> list[Round]:
        start = time.perf_counter()
        before = process_seconds()
        loop = self._loop
        missing = loop.not_measured
        first = self.real(loop.run)
        loop.choose_iterations(first, time.perf_counter() - start)
        # As many as on rank 0: ranks that ran other numbers of steps would wait for
        # each other for ever.
        loop.iterations, loop.turn_steps = self.gather(
            (loop.iterations, loop.turn_steps)
        )[0]
        # The other ranks of a host are no neighbours: what they use is not counted as
        # busy.
        rate = (process_seconds() - before) / max(time.perf_counter() - start, 1e-9)
        others = sum(self.gather(rate)) - rate
        cores = busy()
        if cores is not None:
            cores = max(0.0, cores - others)
        self.busy = self.gather(cores)[0]
        self._probe()
        variants = self._shared(list(self._variants.of_step(first["step"], self.busy)))
        self._try_each(variants, start)
        rounds: list[Round] = []
        while True:
            late = is_late(len(rounds), time.perf_counter() - start, self._budget_s)
            if self.gather(enough(rounds) or late)[0]:
                return rounds
            seconds = {**self.real(loop.run), **self._trace()}
            for variant in in_order(variants, len(rounds)):
                if variant.name not in missing:
                    with self.local():
                        seconds |= attempt(loop, variant)
            rounds.append(seconds)
            self.share_missing()

    def _trace(self) -> Round:
        traces: list[Traced] = []

        def traced() -> None:
            for _ in range(max(_TRACED[0], min(_TRACED[1], self._loop.iterations))):
                begin = self._loop.clock.moment()
                self._iterate()
                *parts, step = self._loop.spans
                data = Span("data", begin, step.begin)
                calls = list(self._steps.collectives.calls)
                traces.append(
                    Traced(data, step, parts, calls, _id_count(self._loop.pool[-1]))
                )

        self._steps.exchange("trace", traced)
        self._traces += traces
        matched = parted(self.gather(traces))[self._ranks.rank]
        names = (*STEP_PARTS, "wait", "exchange")
        return {
            f"traced_{name}": statistics.fmean([each[name] for each in matched])
            for name in names
        }

    def _shared(self, variants: list[Variant]) -> list[Variant]:
        """Returns the experiments of all ranks, in rank 0's order."""
        first, *others = self.gather([each.name for each in variants])
        by_name = {each.name: each for each in variants}
        self.share_missing()
        return [
            by_name[name] for name in first if all(name in names for names in others)
        ]

    def _try_each(self, variants: list[Variant], start: float) -> None:
        """Runs each experiment once, and gives up those beyond the budget."""
        round_s = 0.0
        late = list[str]()
        for variant in variants:
            before = time.perf_counter()
            if self.gather(is_too_slow(round_s, before - start, self._budget_s))[0]:
                late.append(variant.name)
                continue
            with self.local():
                attempt(self._loop, variant)
            round_s += time.perf_counter() - before
        self.share_missing()
        why = f"a round takes longer than budget_s={self._budget_s:g} holds {FEWEST_ROUNDS} times; give more"
        self._loop.not_measured.update(dict.fromkeys(late, why))

    # -------------------------------------------------- what is probed without the step

    def _probe(self) -> None:
        """Times a rank without exchange alone and beside the others, a tiny collective, and each rank's link."""
        alone = []
        together = []
        error: Exception | None = None
        with self._steps.without_exchange():
            # Twice, and the shorter counts: other processes can only make a step
            # longer.
            for _ in range(2):
                for rank in range(self.size):
                    self._meet()
                    if rank == self._ranks.rank and error is None:
                        try:
                            alone.append(self._wall_s())
                        except Exception as caught:
                            error = caught
                self._meet()
                if error is None:
                    together.append(self._wall_s())
        if error is not None:
            self._loop.not_measured["one rank alone"] = described(error)
        else:
            self._facts = dataclasses.replace(
                self._facts, alone_s=min(alone), together_s=min(together)
            )
        parameters = chain.from_iterable(
            root.parameters() for root in self._loop.modules
        )
        device = next((each.device for each in parameters), torch.device("cpu"))
        self._latency_s, send_s = _probe_links(self._ranks, device)
        self._facts = dataclasses.replace(self._facts, send_s=send_s)

    def _wall_s(self) -> float:
        """Returns the mean seconds of a step by the wall clock."""
        steps = self._loop.fixed
        start = time.perf_counter()
        count = 0
        while count == 0 or time.perf_counter() - start < _LEAST_ALONE_S:
            for batch in steps:
                self._loop.call(batch)
            count += len(steps)
        return (time.perf_counter() - start) / count

    def _meet(self) -> None:
        """Meets where collectives are replayed: these of the diagnosis are not."""
        with self._steps.collectives.real():
            self._ranks.meet()


def _probe_links(ranks: Ranks, device: torch.device) -> tuple[float, float]:
    """Returns the seconds of a tiny collective, and of a message of this rank to all others."""
    few = torch.zeros(2, device=device)
    many = torch.zeros(LINK_BYTES // 4 * (ranks.size - 1), device=device)
    latencies = list[float]()
    for _ in range(12):
        ranks.meet()
        start = time.perf_counter()
        dist.all_reduce(few)
        _settle(device)
        latencies.append(time.perf_counter() - start)
    # The first two warm up. The least of the ranks: the one that came last has waited
    # for nobody.
    latency_s = min(ranks.gather(statistics.median(latencies[2:])))
    begin = time.perf_counter()
    turns = list[list[float]]()
    while ranks.gather(
        len(turns) < 2 or (len(turns) < 6 and time.perf_counter() - begin < _LINK_S)
    )[0]:
        turns.append([_arrival_s(ranks, sender, many) for sender in range(ranks.size)])
    by_rank = ranks.gather([min(seconds) for seconds in zip(*turns, strict=True)])
    # A message has been sent when the last rank has received it.
    return latency_s, max(each[ranks.rank] for each in by_rank)


def _arrival_s(ranks: Ranks, sender: int, many: Tensor) -> float:
    """Returns the seconds until this rank has received a message of one sender."""
    share = LINK_BYTES // 4
    # How many numbers this rank sends to each rank, and receives from each.
    sizes = [0] * ranks.size
    counts = [0] * ranks.size
    if sender == ranks.rank:
        sizes = [share] * ranks.size
        sizes[sender] = 0
    else:
        counts[sender] = share
    ranks.meet()
    start = time.perf_counter()
    dist.all_to_all_single(
        many.new_empty(sum(counts)), many[: sum(sizes)], counts, sizes
    )
    _settle(many.device)
    return time.perf_counter() - start


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _clock_offset(ranks: Ranks) -> float:
    """Returns how far this host's wall clock is ahead of rank 0's; 0 on the same host."""
    hosts = ranks.gather(socket.gethostname())
    if len(set(hosts)) == 1:
        return 0.0
    ahead = []
    for _ in range(9):
        ranks.meet()
        moments: list[float] = ranks.gather(time.perf_counter())
        ahead.append(moments[ranks.rank] - moments[0])
    return statistics.median(ahead)


def _id_count(batch: Any) -> int:
    """Returns the ids of a batch: values of its jagged tensors, and entries of its tensors of whole numbers."""
    if isinstance(batch, Tensor):
        is_id = not batch.is_floating_point() and not batch.is_complex()
        return batch.numel() if is_id else 0
    if isinstance(batch, Mapping):
        return sum(map(_id_count, batch.values()))
    if hasattr(batch, "lengths") and hasattr(batch, "values"):
        return int(batch.values().numel())
    if isinstance(batch, list | tuple):
        return sum(map(_id_count, batch))
    if dataclasses.is_dataclass(batch):
        return sum(map(_id_count, vars(batch).values()))
    return 0
