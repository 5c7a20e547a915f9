"""Experiments: what a training step takes, of which ops and lines it is made, and what changes to it gain."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torchrec_ext.needs_torch  # noqa: F401

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from torchrec_ext.diagnose.experiments.batches import row_count, worker_turns
from torchrec_ext.diagnose.experiments.collectives import Ranks, RanksFailedError
from torchrec_ext.diagnose.experiments.loop import TrainingLoop
from torchrec_ext.diagnose.experiments.ranks import RankRounds
from torchrec_ext.diagnose.experiments.rounds import (
    FEWEST_ROUNDS,
    MOST_ROUNDS,
    Rounds,
    attempt,
)
from torchrec_ext.diagnose.experiments.variants import SmallTables, Variant, Variants
from torchrec_ext.diagnose.facts import Between, Facts, LineFacts, LoaderFacts, Round
from torchrec_ext.diagnose.findings import in_ms
from torchrec_ext.observe.clock import busy_elsewhere
from torchrec_ext.observe.forwards import Forwards
from torchrec_ext.observe.machine import (
    compiled_graphs,
    device_spans,
    device_use,
    roofline,
)
from torchrec_ext.observe.ops import (
    Counted,
    OpsOfLine,
    Products,
    count_ops,
    sum_products,
)
from torchrec_ext.observe.samples import Samples
from torchrec_ext.observe.user_lines import described

_TOWER_STEPS = 4
_SMALL_TABLE = 5  # a table is small with so many rows for each id that a step reads, and is made so for the experiment
_DATA_S = 5.0  # at most, for a loader whose step cannot be run
# Seconds of the loop in which it is sampled at which lines it is: 500 samples.
SAMPLE_S = 1.5
# times the usual batch, and seconds, from which on the longest one is named
_BURST, _BURST_S = (10, 0.05)
_LINES = 20  # that are kept of these


class Experiments:
    """The experiments on a training loop.

    Args:
        loop: the user's loop.
        budget_s: seconds of the wall clock for the rounds; the first four may take three times as long.
        ranks: ranks that train and diagnose together; None for a process alone.

    Attributes:
        saved_files: files that the step was seen to save.
    """

    def __init__(
        self, loop: TrainingLoop, budget_s: float, ranks: Ranks | None = None
    ) -> None:
        self.saved_files: set[str] = set()
        self._start = time.perf_counter()
        self._loop = loop
        self._budget_s = budget_s
        self._variants = Variants(loop, 1 if ranks is None else ranks.size)
        if ranks is None:
            self._rounds: Rounds | RankRounds = Rounds(loop, self._variants, budget_s)
        else:
            self._rounds = RankRounds(loop, self._variants, budget_s, ranks)
        self._still = 0  # numbers in rows of tables with sparse gradients that a step does not read

    def facts(self, between: Mapping[str, tuple[Callable[[], object], int]]) -> Facts:
        """Makes all experiments; every rank returns the same facts."""
        loop = self._loop
        cuda = loop.cuda
        busy = busy_elsewhere()
        machine = (0.0, 0.0) if cuda else roofline()
        if not loop.state.optimizers and not loop.recipe:
            loop.notes.append(
                "no optimizer can be reached from the step, so what it changes is not put back; pass model= and "
                "optimizer="
            )
        counted = Counted()
        graphs = 0
        lines: Sequence[LineFacts] = ()
        sampled_s = 0.0
        rounds: Sequence[Round]
        if self._rounds.warm_up():
            counted = self._count_ops()
            before = compiled_graphs()
            rounds = self._rounds.measure(busy)
            graphs = compiled_graphs() - before
            # Ops were counted and timed in another moment than the rounds.
            if rounds and not cuda:
                counted.scale_to(statistics.median([each["step"] for each in rounds]))
            lines, sampled_s = self._sample_lines(counted)
        else:
            rounds = _time_data(loop, self._budget_s)
        loop.notes += _burst_notes(loop.source.seconds, rounds)
        worker = self._time_worker(rounds)
        runs = self._time_between(between)
        products = Products()
        if cuda:
            loop.not_measured["products"] = "timed on a CPU alone"
        else:
            products = sum_products(counted.products)
        kernels, device_busy = self._watch_device(rounds)
        flops, traffic = machine
        if not cuda:
            # Before and after the rounds, because others may have the machine at one of
            # both moments.
            flops, traffic = map(max, machine, roofline())
        towers: Sequence[tuple[str, float]] = ()
        # Several ranks have the cores already that towers would run on.
        if self._rounds.size == 1:
            towers = _time_towers(loop, rounds)
        facts = Facts(
            rounds=rounds,
            worker=worker,
            rows=row_count(loop.pool[0]) if loop.pool else 0,
            ops=counted.ops,
            bare_ops=counted.bare,
            op_lines=counted.lines.most_common(5),
            syncs=sum(counted.syncs.values()),
            sync_lines=counted.syncs.most_common(5),
            loss_sync_lines=counted.syncs_of_loss.most_common(5),
            sync_ops=sum(ops.feeding for ops in counted.by_line.values()),
            op_kinds=sorted(counted.kinds.items(), key=lambda each: -each[1])[:5],
            lines=lines,
            sampled_s=sampled_s,
            modes=self._variants.modes,
            product_s=products.seconds,
            product_flops=products.flops,
            layers=products.layers,
            tables=[each for each, _ in counted.tables.values()],
            towers=towers,
            parameters=sum(map(_size, _parameters_of(loop.state.optimizers).values()))
            - self._still,
            optimizers=[type(each).__name__ for each in loop.state.optimizers],
            loader=_loader_facts(loop),
            kernels=kernels,
            device_busy=device_busy,
            threads=torch.get_num_threads(),
            cores=len(os.sched_getaffinity(0)),
            busy=self._rounds.busy,
            flops_per_s=max(flops, products.rate),
            bytes_per_s=traffic,
            between=runs,
            recompiles=graphs,
            recipe=loop.recipe,
            seconds=time.perf_counter() - self._start,
            not_measured=loop.not_measured,
            notes=loop.notes,
        )
        if not cuda:
            # On a GPU an op returns before its kernel runs, so its seconds say nothing.
            sizes = counted.sizes
            rows_of_tables = {
                p.shape[0]
                for module in loop.modules
                for p in module.parameters()
                if p.dim() > 1
            }
            facts = dataclasses.replace(
                facts,
                op_s=counted.seconds,
                work_s=counted.work,
                whole_tables=list(sizes.whole_tables(rows_of_tables)),
                all_items=list(sizes.all_items()),
                double_s=sum(sizes.double.values()),
                double_line=max(sizes.double, key=sizes.double.__getitem__, default=""),
            )
        return self._rounds.facts(facts)

    def _count_ops(self) -> Counted:
        """Counts the ops of a step, and finds large tables with a dense optimizer."""
        loop = self._loop
        counted = Counted()

        def count() -> Round:
            nonlocal counted
            counted = count_ops(
                lambda: loop.call(loop.several(1)[0]), loop.state.modules
            )
            return {}

        with self._rounds.local():
            attempt(loop, Variant("ops", count))
        self._variants.modes = sorted(counted.modes)
        trained = _parameters_of(loop.state.optimizers)
        tables = {}
        reads = []
        for facts, module in counted.tables.values():
            # TorchRec's kernels move only the rows that they read.
            if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
                continue
            if module.sparse:
                # Neither the optimizer nor its traffic touches the other rows.
                self._still += max(0, facts.rows - facts.read) * facts.dim
            elif (
                facts.rows > _SMALL_TABLE * facts.read and id(module.weight) in trained
            ):
                tables[id(module)] = facts, module
                reads.append((module, facts.read))
        counted.tables = tables
        # A step with small tables moves few rows: what it takes less is the price of
        # the sweep over all rows.
        if reads:
            self._variants.small = SmallTables(loop.state, reads, _SMALL_TABLE)
        return counted

    def _sample_lines(self, counted: Counted) -> tuple[Sequence[LineFacts], float]:
        """Returns the user's lines with the most time, and the seconds of an iteration."""
        loop = self._loop
        missing = loop.not_measured
        if loop.cuda or loop.compiled:
            missing["lines"] = (
                "sampled only for eager steps on a CPU, whose ops are timed"
            )
            return (), 0.0
        if not SAMPLE_S or "step" in missing or "loop" in missing:
            return (), 0.0
        samples = Samples()
        iterations = 0

        def sample() -> Round:
            nonlocal iterations
            end = time.perf_counter() + SAMPLE_S
            with samples:
                while time.perf_counter() < end or not iterations:
                    if loop.source.kind == "iterator":
                        # All that is taken of it is kept in memory.
                        loop.call(loop.pool[0])
                    else:
                        loop.iterate()
                    iterations += 1
            return {}

        with self._rounds.local():
            attempt(loop, Variant("lines", sample))
        if "lines" in missing:
            return (), 0.0
        self.saved_files = samples.saved
        seconds = sum(samples.seconds.values()) / iterations
        return _line_facts(samples, counted, iterations), seconds

    def _watch_device(self, rounds: Sequence[Round]) -> tuple[int, float | None]:
        """Returns the number of kernels of a step on a CUDA device, and their share of its time."""
        loop = self._loop
        if not loop.cuda or not rounds or "step" in loop.not_measured:
            return 0, None
        batches = loop.steps(least=4)
        try:
            with self._rounds.local():
                spans = device_spans(lambda: [loop.call(batch) for batch in batches])
        except Exception as error:
            loop.not_measured["device"] = described(error)
            return 0, None
        if not spans:
            loop.not_measured["device"] = (
                "torch.profiler saw no kernel; it needs permission for the GPU's counters"
            )
            return 0, None
        return round(len(spans) / len(batches)), device_use(spans)

    def _time_worker(self, rounds: Sequence[Round]) -> Sequence[tuple[float, float]]:
        """Times a real worker by turns with the loader as it is; none if a rank cannot."""
        loop = self._loop
        loader = loop.source.batches
        # None where one rank cannot: the others would wait for it.
        reasons = [why for why in self._rounds.gather(_no_worker(loop, rounds)) if why]
        turns: list[tuple[float, float]] = []
        if reasons:
            loop.not_measured["worker"] = reasons[0]
        else:

            def measure() -> Round:
                turns.extend(worker_turns(loader, loop.call))  # type: ignore[arg-type]
                return {}

            with self._rounds.local():
                attempt(loop, Variant("worker", measure))
            self._rounds.share_missing()
        if "worker" in loop.not_measured:
            return ()
        # A worker is tried without exchange, which both sides have in the loop.
        exposed = statistics.median(
            [each.get("wait", 0.0) + each.get("exchange", 0.0) for each in rounds]
        )
        return [(old + exposed, new + exposed) for old, new in turns]

    def _time_between(
        self, between: Mapping[str, tuple[Callable[[], object], int]]
    ) -> Sequence[Between]:
        """Times the calls between steps once."""
        loop = self._loop
        runs: list[Between] = []

        def run() -> None:
            for name, (function, steps) in between.items():
                start = loop.clock()
                try:
                    function()
                except Exception as error:
                    loop.not_measured[name] = described(error)
                    continue
                runs.append(
                    Between(name=name, seconds=loop.clock() - start, steps=steps)
                )

        if self._rounds.size > 1 and "step" in loop.not_measured:
            # The ranks may not be in step any more.
            return ()
        try:
            self._rounds.real(run)
        except RanksFailedError as error:
            loop.not_measured.update(dict.fromkeys(between, str(error)))
            return ()
        return runs


def _time_towers(
    loop: TrainingLoop, rounds: Sequence[Round]
) -> Sequence[tuple[str, float]]:
    """Returns independent sub-networks, with their shares of the forward."""
    if loop.cuda or loop.compiled or not rounds or "forward" not in rounds[0]:
        return ()
    forwards: list[dict[str, float]] = []
    try:
        for batch in loop.several(_TOWER_STEPS):
            watched = Forwards(loop.modules, loop.clock)
            with watched.watching():
                loop.call(batch)
            forwards.append(watched.independent())
    except Exception as error:
        loop.not_measured["towers"] = described(error)
        return ()
    # The forward of steps in a row, as these are: with no loader between them.
    whole = statistics.median(
        [
            each.get("ready", each["step"]) * each["forward"] / each["step"]
            for each in rounds
        ]
    )
    if not whole:
        return ()
    shares = []
    for name in forwards[0]:
        seconds = [each[name] for each in forwards if name in each]
        if len(seconds) == len(forwards):
            shares.append((name, min(1.0, min(seconds) / whole)))
    return shares


def _loader_facts(loop: TrainingLoop) -> LoaderFacts:
    try:
        return loop.source.facts(loop.clock.host)
    except Exception as error:
        loop.not_measured["rows"] = described(error)
        return LoaderFacts(kind=loop.source.kind)


def _time_data(loop: TrainingLoop, budget_s: float) -> Sequence[Round]:
    """Times the loader alone, after a failed step."""
    rounds: list[Round] = []
    end = time.perf_counter() + min(_DATA_S, budget_s)
    while len(rounds) < FEWEST_ROUNDS or (
        len(rounds) < MOST_ROUNDS and time.perf_counter() < end
    ):
        ahead = loop.source.is_ahead
        try:
            batch, data, sleep = loop.source.take(loop.clock)
        except StopIteration:
            loop.note_end()
            break
        except Exception as error:
            loop.not_measured["data"] = f"the loader raised {described(error)}"
            break
        loop.pool = [batch]
        if not ahead:
            rounds.append({"data": data, "sleep": sleep})
    return rounds


def _no_worker(loop: TrainingLoop, rounds: Sequence[Round]) -> str:
    """Returns why no worker is tried; empty if one is."""
    loader = loop.source.batches
    if loop.recipe:
        return "this package's loader has no worker processes: a thread builds batches ahead"
    if not isinstance(loader, DataLoader):
        return "batches come from no DataLoader"
    if (
        loader.num_workers
        or isinstance(loader.dataset, IterableDataset)
        or loader.batch_sampler is None
    ):
        return "only for a Dataset with rows and no workers yet"
    if "step" in loop.not_measured or not rounds:
        return "the step does not run"
    if (
        statistics.median(
            [each["data"] / (each["data"] + each["step"]) for each in rounds]
        )
        < 0.1
    ):
        return "the loader takes under a tenth of the time"
    return ""


def _line_facts(
    samples: Samples, counted: Counted, iterations: int
) -> Sequence[LineFacts]:
    """Returns the user's lines of most seconds, with their ops."""
    lines = []
    for (phase, line), seconds in samples.seconds.items():
        # A line without a text is none of the user's, such as that of garbage
        # collections.
        if line.text:
            ops = counted.by_line.get(line, OpsOfLine())
            of_line = LineFacts(
                name=line.name,
                text=line.text,
                phase=phase,
                seconds=seconds / iterations,
                ops=ops.ops,
                op_s=ops.seconds,
                sync_ops=ops.feeding,
            )
            lines.append(of_line)
    return sorted(lines, key=lambda each: -each.seconds)[:_LINES]


def _parameters_of(optimizers: Sequence[Optimizer]) -> dict[int, Any]:
    """Returns the parameters of all optimizers by id."""
    parameters: dict[int, Any] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameters |= {id(parameter): parameter for parameter in group["params"]}
    return parameters


def _size(parameter: Any) -> int:
    # ShardedTensor has no numel().
    return int(parameter.size().numel())


def _burst_notes(seconds: Sequence[float], rounds: Sequence[Round]) -> list[str]:
    """Notes a batch that took many times the usual one: a loader that reads ahead also fills up between rounds."""
    usual = statistics.median([each.get("data", 0.0) for each in rounds] or [0.0])
    longest = max(seconds, default=0.0)
    if longest <= max(_BURST * usual, _BURST_S):
        return []
    return [
        f"the longest of {len(seconds):,} batches took {in_ms(longest)}, their mean is "
        f"{in_ms(statistics.fmean(seconds))}: the loader works in bursts, of which rounds see a part; "
        "time a whole epoch too"
    ]
