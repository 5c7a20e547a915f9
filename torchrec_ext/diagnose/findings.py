"""Facts that experiments measured on a training step, and what follows of them: findings, remedies and trials.

A gain is a ratio within a round, since a machine drifts between two moments and both sides of such a ratio with it.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

Round = Mapping[str, float]
Size = Literal["large", "medium", "small"]
LARGE, MEDIUM, LEAST = 0.33, 0.15, 0.05  # shares of an iteration
# A gain below it is none: nobody should spend an afternoon on 5 %.
UNDER = 1.05


class Gain(NamedTuple):
    """A measured speed-up, the quartiles of paired turns: 1 is as fast as now, 2 is twice as fast."""

    low: float
    middle: float
    high: float

    @property
    def helps(self) -> Literal["yes", "no", "perhaps"]:
        """Whether three of four turns gained 5 % or more, or less than that."""
        if self.low >= UNDER:
            return "yes"
        return "no" if self.high < UNDER else "perhaps"

    def __str__(self) -> str:
        return f"{_factor(self.middle)}x ({_factor(self.low)} to {_factor(self.high)})"


def _factor(value: float) -> str:
    if value < 2:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 20 else f"{value:,.0f}"


def gain_of(ratios: Sequence[float]) -> Gain:
    """Returns the quartiles of the ratios of paired turns.

    Example:
        >>> print(gain_of([1.0, 2.0, 3.0]))
        2.0x (1.50 to 2.5)
    """
    if len(ratios) < 2:
        return Gain(ratios[0], ratios[0], ratios[0])
    return Gain(*statistics.quantiles(ratios, n=4, method="inclusive"))


def in_ms(seconds: float) -> str:
    """Returns seconds as text, in milliseconds below one.

    Example:
        >>> in_ms(0.01234), in_ms(2.5)
        ('12.3 ms', '2.5 s')
    """
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


# --------------------------------------------------------------------------- measured


@dataclass(frozen=True, kw_only=True)
class LineFacts:
    """A line of the user's own code.

    Args:
        name: file, number and function, such as ``train.py:31 in step``.
        text: the line itself.
        phase: ``data`` for a line that makes batches, ``step`` for one of the step.
        seconds: sampled seconds of an iteration at this line, and in what it calls that is not the user's.
        ops: aten ops that it makes.
        op_s: seconds inside of these.
        sync_ops: ops of these that bring values to Python, and up to ten others for each.
    """

    name: str
    text: str = ""
    phase: str = "step"
    seconds: float = 0.0
    ops: int = 0
    op_s: float = 0.0
    sync_ops: int = 0


@dataclass(frozen=True, kw_only=True)
class TableFacts:
    """A table of embeddings: path of its module, rows, width of a row, and ids that a step looks up."""

    name: str
    rows: int
    dim: int
    read: int


@dataclass(frozen=True, kw_only=True)
class LoaderFacts:
    """A loader as it was measured.

    Args:
        dataset: name of the Dataset's class, if there is one.
        workers: worker processes.
        row_calls: calls of ``__getitem__`` for a batch, if it is called row by row.
        row_s: seconds of such a call.
        collate_s: seconds in which the rows of a batch are put together.
        worker_s: mean seconds in which one worker makes a batch, measured in this process; 0 without workers.
        worker_sleep_s: mean seconds of these without computing.
        worker_lines: the user's lines at which most of these go, as sampled.
    """

    dataset: str = ""
    workers: int = 0
    row_calls: int = 0
    row_s: float = 0.0
    collate_s: float = 0.0
    worker_s: float = 0.0
    worker_sleep_s: float = 0.0
    worker_lines: Sequence[LineFacts] = ()


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Results of the experiments on a step.

    Args:
        rounds: seconds by experiment, for each round. ``data``: a batch, and of it ``sleep``, asleep or waiting for
            files. ``step``: a step, and of it ``optimizer`` and ``model``, which is the rest. Steps in a row on batches
            that are there: ``ready``; and of these changed: ``quadruple`` of the batch, ``still_tables``,
            ``one_thread``, ``all_threads`` and ``bf16``. Yardsticks: ``op``, a tiny op that autograd records, or one of
            backward; and ``sync``, one ``.item()``.
        captured: seconds of an iteration as it is, and with the adopted step, by turn.
        ops: aten ops of a step.
        op_lines: the user's lines that make most ops, with their number.
        syncs: ops of a step that bring a value to Python, on a GPU all that wait for it.
        sync_lines: the user's lines that do so, with their number.
        sync_ops: these, and up to ten other ops of the same lines for each.
        lines: the user's lines at which most of an iteration goes, as sampled.
        sampled_s: seconds of an iteration while lines were sampled.
        product_s: seconds of a step inside matrix products.
        tables: large tables that a dense optimizer moves.
        optimizers: names of the optimizers' classes.
        loader: source of the batches.
        threads: compute threads of the measurement.
        own_threads: those of the program: more, if others kept the cores that they need.
        cores: cores that this process may use.
        busy: cores that others kept busy; None if unknown.
        seconds: seconds of the wall clock that the experiments took.
        not_measured: reasons by experiment that is missing.
        notes: what else a reader must know, one sentence each.
    """

    rounds: Sequence[Round] = ()
    captured: Sequence[tuple[float, float]] = ()
    ops: int = 0
    op_lines: Sequence[tuple[str, int]] = ()
    syncs: int = 0
    sync_lines: Sequence[tuple[str, int]] = ()
    sync_ops: int = 0
    lines: Sequence[LineFacts] = ()
    sampled_s: float = 0.0
    product_s: float = 0.0
    tables: Sequence[TableFacts] = ()
    optimizers: Sequence[str] = ()
    loader: LoaderFacts = LoaderFacts()
    threads: int = 1
    own_threads: int = 0
    cores: int = 1
    busy: float | None = None
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
        if not self.has(name):
            return 0.0
        return statistics.median([each[name] for each in self.rounds])

    def iteration(self, each: Round) -> float:
        """Returns the seconds of a round's iteration: batch and step."""
        return each.get("data", 0.0) + each.get("step", 0.0)

    def gain(self, seconds: Callable[[Round], float]) -> Gain:
        """Returns the speed-up for other seconds of a round's batch and step."""
        return gain_of(
            [self.iteration(each) / max(seconds(each), 1e-9) for each in self.rounds]
        )

    def shares(self, seconds: Callable[[Round], float]) -> list[float]:
        """Returns the share of an iteration in each round."""
        return [
            seconds(each) / max(self.iteration(each), 1e-12) for each in self.rounds
        ]

    def share(self, seconds: Callable[[Round], float]) -> float:
        """Returns the median over rounds of the share of an iteration."""
        # A share that a round has, and not the mean of two rounds.
        shares = self.shares(seconds)
        return statistics.median_high(shares) if shares else 0.0

    @property
    def spread(self) -> float:
        """The difference of the quartiles of an iteration over rounds, as a share of its median."""
        return spread(list(map(self.iteration, self.rounds)))


def spread(values: Sequence[float]) -> float:
    """Returns the difference of the quartiles as a share of the median; infinite for fewer than four values."""
    if len(values) < 4:
        return math.inf
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / middle if middle else math.inf


# ---------------------------------------------------------------------- what follows


class Change(str, Enum):
    """What a remedy changes in the mathematics of a step."""

    EXACT = "the same numbers"
    ROUNDING = "the same but for rounding"
    DRAWS = "the same law, other random draws"
    OTHER = "other mathematics: measure the quality"


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A way to remove a cause.

    Args:
        name: what to do, in a sentence.
        changes: what it changes in the mathematics.
        lines: lines that run as pasted beside ``model``, ``optimizer``, ``loss`` and ``loader``; empty if a person
            must write them.
    """

    name: str
    changes: Change
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A cause of lost time.

    Args:
        cause: name of the verdict.
        title: the cause in a sentence.
        evidence: what was measured, a sentence each.
        remedies: what to do about it, the best first.
        cost: share of an iteration that would go with the cause.
        size: ``large`` from a third of an iteration on, ``medium`` from .15, else ``small``.
        least: the share that three of four rounds reach; 0 if rounds do not measure it.
    """

    cause: str
    title: str
    evidence: tuple[str, ...]
    remedies: tuple[Remedy, ...]
    cost: float
    size: Size
    least: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A change with its measured gain.

    Args:
        name: what was changed.
        gain: quartiles of the speed-up of an iteration, over paired turns.
        changes: what it changes in the mathematics.
        why: what a reader must know of it.
        lines: lines that run as pasted beside ``model``, ``optimizer``, ``loss`` and ``loader``.
    """

    name: str
    gain: Gain
    changes: Change
    why: str = ""
    lines: tuple[str, ...] = ()


def size_of(cost: float) -> Size:
    """Returns the size of a fault by its share of an iteration."""
    if cost >= LARGE:
        return "large"
    return "medium" if cost >= MEDIUM else "small"
