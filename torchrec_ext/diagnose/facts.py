"""Facts: what experiments on a training step have measured, as plain numbers that rules read and a file can hold.

Gain: an interval of speed-ups. It is made of ratios within a round, since a machine drifts between two moments and both
sides of such a ratio with it, and of a bootstrap over rounds.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchrec_ext.observe.counts import AllItems, TableFacts, WholeTableOp

Round = Mapping[str, float]
_RESAMPLES = 300
# Medians of fifteen turns move by so much from one ten seconds to the next, which a
# bootstrap over them cannot know.
DRIFT = 1.09


class Gain(NamedTuple):
    """An interval that holds a speed-up in four of five cases: 1 is as fast as now, 2 is twice as fast."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """The geometric mean of both ends."""
        return math.sqrt(self.low * self.high)

    def __str__(self) -> str:
        return f"{_factor(self.low)} to {_factor(self.high)}x"


def _factor(value: float) -> str:
    if value < 2:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 20 else f"{value:,.0f}"


def paired_gain(low: Sequence[float], high: Sequence[float] | None = None) -> Gain:
    """Returns the interval of the median over rounds.

    Args:
        low: a speed-up for each round, by the least that is expected of a remedy.
        high: speed-ups by the most that is expected; ``low`` if not given.

    Example:
        >>> print(paired_gain([2.0, 2.0, 2.0]))
        1.83 to 2.2x
    """
    # One seed, so that the same facts have the same page.
    generator = random.Random(0)
    if high is None:
        high = low
    lows = []
    highs = []
    for _ in range(_RESAMPLES):
        # Both ends of the same rounds: they drift together.
        indices = [generator.randrange(len(low)) for _ in low]
        lows.append(statistics.median([low[index] for index in indices]))
        highs.append(statistics.median([high[index] for index in indices]))
    # The middle four fifths of the medians.
    tenth = _RESAMPLES // 10
    return Gain(sorted(lows)[tenth] / DRIFT, sorted(highs)[-tenth - 1] * DRIFT)


def spread(values: Sequence[float]) -> float:
    """Returns the difference of the quartiles as a share of the median; infinite for fewer than four values."""
    # Quartiles of fewer say nothing.
    if len(values) < 4:
        return math.inf
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / middle if middle else math.inf


@dataclass(frozen=True, kw_only=True)
class LineFacts:
    """A line of the user's own code.

    Args:
        name: file, number and function, such as ``train.py:31 in step``.
        text: the line itself.
        phase: ``data`` for a line that makes batches, ``step`` for one of the step.
        seconds: seconds of an iteration at this line, and in what it calls that is not the user's, as sampled.
        ops: aten ops that it makes.
        op_s: seconds inside of these.
        sync_ops: ops of these that bring values to Python, or only feed ops that do.
    """

    name: str
    text: str = ""
    phase: str = "step"
    seconds: float = 0.0
    ops: int = 0
    op_s: float = 0.0
    sync_ops: int = 0


@dataclass(frozen=True, kw_only=True)
class LoaderFacts:
    """A loader as it was measured.

    Args:
        kind: ``list``, ``DataLoader``, ``iterable`` or ``iterator``.
        dataset: name of the Dataset's class, if there is one.
        workers: worker processes.
        row_calls: calls of ``__getitem__`` for a batch, if it is called row by row.
        row_s: seconds of such a call.
        collate_s: seconds in which the rows of a batch are put together.
        bytes_read: bytes read from files for a batch; None if unknown.
        is_stream: whether the Dataset is an IterableDataset.
    """

    kind: str
    dataset: str = ""
    workers: int = 0
    row_calls: int = 0
    row_s: float = 0.0
    collate_s: float = 0.0
    bytes_read: float | None = None
    is_stream: bool = False


@dataclass(frozen=True, kw_only=True)
class Between:
    """A call between steps, such as an evaluation.

    Args:
        name: what it is.
        seconds: seconds of a call.
        steps: steps from a call to the next.
    """

    name: str
    seconds: float
    steps: int


@dataclass(frozen=True, kw_only=True)
class CollectiveFacts:
    """A collective of a step: one call on every rank of its group.

    Args:
        name: ``all_reduce``, ``all_to_all``, ``broadcast`` and so on.
        line: the user's line that calls it; ``backward`` or ``optimizer`` for what these call.
        span: ``forward``, ``backward`` or ``optimizer``.
        ranks: ranks of its group.
        bytes: bytes that each of ``ranks`` gives to it.
        exchange_s: seconds from the moment at which the last rank has come to its end: its own time.
        waits_s: seconds for which each of ``ranks`` waits until the last one has come.
    """

    name: str
    line: str
    span: str
    ranks: Sequence[int]
    bytes: Sequence[float]
    exchange_s: float
    waits_s: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """A rank as it was measured.

    Args:
        rank: number of the rank.
        host: name of its host.
        cores: numbers of the cores that it may use.
        threads: compute threads of its process.
        steps: seconds of each traced step, the same steps on all ranks: ``data``; ``forward``, ``backward`` and
            ``optimizer``, each without its collectives; ``wait``, for ranks that come later; ``exchange``, the
            collectives' own time; ``queue``, ready to run without a core, which is in none of the others.
        spans: one traced step as a row of a chart: name, start and end, in seconds on one clock for all ranks that is 0
            where the first of them begins. Names are those of ``steps``; ``exchange`` and ``wait`` lie inside of the
            spans that call them.
        tables: tables that it looks up, with the ids that it reads of each in a step.
        ids: ids in the lists of a batch of its own; 0 if batches hold none.
        send_s: seconds in which it alone sends ``Facts.link_bytes`` to the other ranks.
        alone_s: seconds of the wall clock of its step without exchange, while the other ranks sleep.
        together_s: seconds of the wall clock of its step without exchange, while the others run theirs.
    """

    rank: int
    host: str = ""
    cores: Sequence[int] = ()
    threads: int = 1
    steps: Sequence[Round] = ()
    spans: Sequence[tuple[str, float, float]] = ()
    tables: Sequence[TableFacts] = ()
    ids: float = 0.0
    send_s: float = 0.0
    alone_s: float = 0.0
    together_s: float = 0.0

    def median(self, name: str) -> float:
        """Returns the median seconds of a part of its steps; 0 if none was traced."""
        return (
            statistics.median([each[name] for each in self.steps])
            if self.steps
            else 0.0
        )


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Results of the experiments on a step.

    On several ranks ``rounds`` are those of a typical rank, the lower median of each time over the ranks, on which
    ``forward``, ``backward`` and ``optimizer`` are without collectives, ``wait`` and ``exchange`` are parts of ``step``
    too, and what changes the step keeps both as they are.

    Args:
        rounds: seconds by experiment, for each round. ``data``: a batch, and of it ``sleep``, asleep or waiting for
            files. ``step``: a step, and of it ``forward`` (with all that is neither of the other two), ``backward``
            and ``optimizer``. Steps in a row on batches that are there: ``ready``; and of these changed: ``quarter``,
            ``double`` and ``quadruple`` of the batch, ``small_tables``, ``one_thread``, ``all_threads``, ``bf16``,
            ``quiet`` without anomaly mode and profiler. ``gc``: garbage collections of an iteration. Yardsticks:
            ``op``, a tiny op that autograd records, or one of backward; ``bare``, one that autograd does not record;
            and ``sync``, one ``.item()``.
        worker: seconds of the wall clock for a batch and its step as it is, and with a worker process, by turn.
        rows: rows of a batch; 0 if unknown.
        ops: aten ops of a step.
        bare_ops: ops that autograd does not record, as those of an optimizer; without those of backward.
        op_lines: the user's lines that make most ops, with their number.
        syncs: ops of a step that bring a value to Python, on a GPU all that wait for it.
        sync_lines: the user's lines that do so, with their number.
        loss_sync_lines: those that do so before the backward pass, so that the loss may need the value.
        sync_ops: these, and ops whose results nothing but these reads, at whatever line.
        op_s: seconds of a step inside of ops; 0 if unknown.
        work_s: seconds of these that ops on many numbers take beyond an op on few of them.
        op_kinds: ops that take most of these, with their seconds.
        lines: the user's lines at which most of an iteration goes, as sampled.
        sampled_s: seconds of an iteration while lines were sampled.
        whole_tables: lines that work on all rows of a table of which few are read.
        all_items: softmaxes over many items.
        double_s: seconds of a step inside of ops of 64-bit floats.
        double_line: the user's line that takes most of these.
        modes: debugging modes of autograd that are on.
        product_s: seconds of a step inside matrix products.
        product_flops: floating-point operations of these.
        layers: share of these operations by module.
        tables: tables that a step reads.
        parameters: number of parameters that are trained; of tables with sparse gradients, those that a step reads.
        optimizers: names of the optimizers' classes.
        loader: source of the batches.
        kernels: kernels and copies that a step runs on a CUDA device.
        device_busy: share of the time from the first of these to the last in which the device ran one; None on a CPU.
        threads: compute threads.
        cores: cores that this process may use.
        busy: cores that others kept busy; None if unknown.
        flops_per_s: floating-point operations of a large matrix product a second, on these threads.
        bytes_per_s: bytes that a large copy reads and writes a second.
        between: calls between steps.
        recompiles: graphs that torch.compile made during steps of one shape.
        ranks: every rank, in order; empty for one process alone.
        collectives: collectives of a step, in their order.
        latency_s: seconds of a collective of a few bytes that all ranks enter at once.
        link_bytes: bytes that a rank sent to the others for ``RankFacts.send_s``.
        recipe: whether the step is a recipe's of this package, so that remedies are its flags.
        towers: share of the forward's seconds by sub-network, of those that do not read each other.
        towers_apart: whether towers have ranks of their own, which are exchanged in every step.
        seconds: seconds of the wall clock that the experiments took.
        not_measured: reasons by experiment that is missing.
        notes: what else a reader must know, one sentence each.
    """

    rounds: Sequence[Round]
    worker: Sequence[tuple[float, float]] = ()
    rows: int = 0
    ops: int = 0
    bare_ops: int = 0
    op_lines: Sequence[tuple[str, int]] = ()
    syncs: int = 0
    sync_lines: Sequence[tuple[str, int]] = ()
    loss_sync_lines: Sequence[tuple[str, int]] = ()
    sync_ops: int = 0
    op_s: float = 0.0
    work_s: float = 0.0
    op_kinds: Sequence[tuple[str, float]] = ()
    lines: Sequence[LineFacts] = ()
    sampled_s: float = 0.0
    whole_tables: Sequence[WholeTableOp] = ()
    all_items: Sequence[AllItems] = ()
    double_s: float = 0.0
    double_line: str = ""
    modes: Sequence[str] = ()
    product_s: float = 0.0
    product_flops: float = 0.0
    layers: Sequence[tuple[str, float]] = ()
    tables: Sequence[TableFacts] = ()
    parameters: int = 0
    optimizers: Sequence[str] = ()
    loader: LoaderFacts = LoaderFacts(kind="list")
    kernels: int = 0
    device_busy: float | None = None
    threads: int = 1
    cores: int = 1
    busy: float | None = None
    flops_per_s: float = 0.0
    bytes_per_s: float = 0.0
    between: Sequence[Between] = ()
    recompiles: int = 0
    ranks: Sequence[RankFacts] = ()
    collectives: Sequence[CollectiveFacts] = ()
    latency_s: float = 0.0
    link_bytes: int = 0
    recipe: bool = False
    towers: Sequence[tuple[str, float]] = ()
    towers_apart: bool = False
    seconds: float = 0.0
    not_measured: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: Sequence[str] = ()

    def has(self, *names: str) -> bool:
        """Whether every round measured all of these."""
        return bool(self.rounds) and all(
            set(names) <= each.keys() for each in self.rounds
        )

    def median(self, name: str) -> float:
        """Returns the median seconds of an experiment; 0 if it is missing."""
        return (
            statistics.median([each[name] for each in self.rounds])
            if self.has(name)
            else 0.0
        )

    def mean_between(self) -> float:
        """Returns the amortised seconds per step of evaluations and checkpoints."""
        return sum(each.seconds / each.steps for each in self.between)

    @property
    def has_ranks(self) -> bool:
        """Whether steps of several ranks were traced."""
        return bool(self.ranks) and all(each.steps for each in self.ranks)

    def iteration(self, each: Round) -> float:
        """Returns the seconds of a round's iteration: batch, step, and the share of calls between steps."""
        # Where a step failed, the loader alone was timed.
        return each.get("data", 0.0) + each.get("step", 0.0) + self.mean_between()

    def gain(
        self,
        slow: Callable[[Round], float],
        fast: Callable[[Round], float] | None = None,
    ) -> Gain:
        """Returns the speed-up for other seconds of an iteration.

        Args:
            slow: returns the most seconds that are expected of a round's iteration, without what runs between steps.
            fast: returns the least; ``slow`` if not given.

        Raises:
            KeyError: an experiment that they need is missing.
        """
        between = self.mean_between()

        def ratios(seconds: Callable[[Round], float]) -> list[float]:
            return [
                self.iteration(each) / max(seconds(each) + between, 1e-9)
                for each in self.rounds
            ]

        return paired_gain(ratios(slow), ratios(fast or slow))

    @property
    def spread(self) -> float:
        """The difference of the quartiles of an iteration over rounds, as a share of its median."""
        return spread(list(map(self.iteration, self.rounds)))
