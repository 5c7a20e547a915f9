"""Findings: causes of lost time and their remedies, which rules make of facts.

A finding has a cause, its evidence in numbers, remedies as lines to paste, the speed-up that is expected of each as an
interval, and what it changes in the mathematics. ``cost`` is the share of an iteration that would go if the cause did.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from torchrec_ext.diagnose.facts import Facts, Gain, Round

Size = Literal["large", "medium", "small", "offer"]
Helps = Literal["yes", "no", "perhaps", "not known"]
LARGE, MEDIUM, LEAST = 0.33, 0.15, 0.05  # shares of an iteration
# A gain below it is none: nobody should spend an afternoon on 5 %.
UNDER = 1.05


class Change(str, Enum):
    """A change in the mathematics of a step."""

    EXACT = "bit-equal"
    ROUNDING = "the same but for rounding"
    DRAWS = "the same law, other random draws"
    ROUNDING_AND_DRAWS = (
        "the same but for rounding, and the same law, other random draws"
    )
    DRAWS_OF_WORKERS = "the same law, other random draws where the Dataset draws: each worker has a seed of its own"
    LESS_OFTEN = "nothing but how often it runs"
    AVERAGED = "the same but for rounding; weights are averaged in place of gradients: quality must be measured"
    AVERAGED_AND_DRAWS = (
        "the same but for rounding, and the same law, other random draws; weights are averaged in place of gradients: "
        "quality must be measured"
    )
    BATCH = "another batch size: the learning rate must follow, and quality must be measured"
    EXCHANGED_LESS = "the same sums in another schedule: quality must be measured"
    BF16_PRODUCTS = "products rounded to 8 bits: quality must be measured"
    BF16_SUMS = "sums rounded to 8 bits: quality must be measured"
    FLOAT32 = "32-bit products in place of 64-bit ones: quality must be measured"
    LOSS = "another loss: quality must be measured"
    OPTIMIZER = "another optimizer: rows that are seldom read end elsewhere, and quality must be measured"


_KEEPING = (
    Change.EXACT,
    Change.ROUNDING,
    Change.DRAWS,
    Change.ROUNDING_AND_DRAWS,
    Change.DRAWS_OF_WORKERS,
)


class Action(Enum):
    """A remedy that a program can apply."""

    THREADS = "other compute threads"
    WORKERS = "worker processes of a DataLoader"
    CAPTURE = "a captured step"
    CAPTURE_WITH_ROWS = "a captured step that makes its batches"


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A way to remove a cause.

    Args:
        name: what it is, in a few words.
        lines: exact lines or flags.
        gain: speed-up of an iteration that is expected; None if nothing is known.
        changes: what it changes in the mathematics.
        basis: how the gain is known.
        is_measured: whether the gain was measured, not predicted.
        action: what a program does to apply it; None if a person must write it.
        count: number of threads or workers of the action.
    """

    name: str
    lines: tuple[str, ...]
    gain: Gain | None
    changes: Change
    basis: str
    is_measured: bool = False
    action: Action | None = None
    count: int = 0

    @property
    def keeps_mathematics(self) -> bool:
        """Whether the step learns the same by the same law: bit-equal, but for rounding, or with other random draws."""
        return self.changes in _KEEPING

    @property
    def is_captured(self) -> bool:
        """Whether the step is captured then; experiments need eager steps."""
        return self.action in (Action.CAPTURE, Action.CAPTURE_WITH_ROWS)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A cause of lost time.

    Args:
        cause: name of the rule.
        title: the cause in a sentence.
        evidence: what was measured, a sentence each.
        remedies: what to do about it, the best first.
        cost: share of an iteration that would go with the cause.
        size: ``large`` from a third of an iteration on, ``medium`` from .15, else ``small``; ``offer`` for what is no
            fault but changes the mathematics.
        ranks: ranks that it is about; empty if it is about all of them.
        least: the least such share of a round; 0 if rounds do not measure it.
    """

    cause: str
    title: str
    evidence: tuple[str, ...]
    remedies: tuple[Remedy, ...]
    cost: float
    size: Size
    ranks: tuple[int, ...] = ()
    least: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to whether a usual attempt will help.

    Args:
        name: what they try.
        gain: speed-up of an iteration that is expected; None if it is not known.
        helps: ``no`` if the whole interval is under 5 %, ``yes`` if all of it is above, else ``perhaps``.
        why: a sentence.
    """

    name: str
    gain: Gain | None
    helps: Helps
    why: str


def in_ms(seconds: float) -> str:
    """Returns seconds as text, in milliseconds below one.

    Example:
        >>> in_ms(0.01234), in_ms(2.5)
        ('12.3 ms', '2.5 s')
    """
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def shares_of(facts: Facts, seconds: Callable[[Round], float]) -> list[float]:
    """Returns the share of an iteration in each round."""
    return [seconds(each) / max(facts.iteration(each), 1e-12) for each in facts.rounds]


def share_of(facts: Facts, seconds: Callable[[Round], float]) -> float:
    """Returns the median over rounds of the share of an iteration."""
    # A share that a round has, and not the mean of two rounds.
    shares = shares_of(facts, seconds)
    return statistics.median_high(shares) if shares else 0.0


def expected(
    facts: Facts,
    slow: Callable[[Round], float],
    fast: Callable[[Round], float] | None = None,
) -> Gain | None:
    """Returns the speed-up of a remedy; None if an experiment is missing."""
    try:
        return facts.gain(slow, fast)
    except KeyError:  # a round has no entry for an experiment that could not be made
        return None


def size_of(cost: float) -> Size:
    """Returns the size of a fault by its share of an iteration."""
    if cost >= LARGE:
        return "large"
    return "medium" if cost >= MEDIUM else "small"


def finding_of_cost(
    cause: str,
    title: str,
    evidence: Sequence[str],
    remedies: Sequence[Remedy],
    cost: float,
    *,
    size: Size | None = None,
    ranks: Sequence[int] = (),
    least: float = 0.0,
) -> Finding:
    """Makes a finding; its size follows from its cost unless it is given."""
    return Finding(
        cause=cause,
        title=title,
        evidence=tuple(evidence),
        remedies=tuple(remedies),
        cost=cost,
        size=size or size_of(cost),
        ranks=tuple(ranks),
        least=least,
    )


def finding_of(
    facts: Facts,
    cause: str,
    title: str,
    evidence: Sequence[str],
    remedies: Sequence[Remedy],
    seconds: Callable[[Round], float],
) -> Finding:
    """Makes a finding; cost = median over rounds of seconds / iteration."""
    least = min(shares_of(facts, seconds), default=0.0)
    return finding_of_cost(
        cause, title, evidence, remedies, share_of(facts, seconds), least=least
    )
