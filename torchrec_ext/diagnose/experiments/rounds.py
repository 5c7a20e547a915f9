"""Rounds: a training loop as it is and changed, in turn, every variant in every round.

The order is reversed every other round. An experiment that cannot be made is left out, and it is noted why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torchrec_ext.needs_torch  # noqa: F401

from torchrec_ext.diagnose.experiments.loop import TrainingLoop
from torchrec_ext.diagnose.experiments.variants import Variant, Variants
from torchrec_ext.diagnose.facts import Facts, Round, spread
from torchrec_ext.observe.user_lines import described

MOST_ROUNDS, FEWEST_ROUNDS = 15, 4
_LONGER = 3  # times so many rounds where they are spread too far for a verdict, and there is time
_STEADY = 0.25  # spread of iterations at which no further rounds are made
# With fewer rounds there is no verdict, so the first four may take longer than the
# budget.
_OVERTIME = 3


def enough(rounds: Sequence[Round]) -> bool:
    """Whether enough rounds were run: 15, and up to 45 while they vary."""
    if len(rounds) < MOST_ROUNDS:
        return False
    return (
        len(rounds) >= _LONGER * MOST_ROUNDS
        or spread([each["data"] + each["step"] for each in rounds]) < _STEADY
    )


def is_late(count: int, elapsed_s: float, budget_s: float) -> bool:
    """Whether so many rounds took longer than the budget; the first four may take three times as long."""
    if count < FEWEST_ROUNDS:
        budget_s = _OVERTIME * budget_s
    return count > 0 and elapsed_s > budget_s


def is_too_slow(round_s: float, elapsed_s: float, budget_s: float) -> bool:
    """Whether a round of so many seconds has no time for a further variant."""
    return round_s > 0 and (
        elapsed_s > budget_s / 2 or round_s * FEWEST_ROUNDS > budget_s
    )


def in_order(variants: Sequence[Variant], number: int) -> Sequence[Variant]:
    """Returns the variants of a round, in reversed order in every other one.

    A machine that becomes slower or faster during a round would favour the same variants otherwise.
    """
    return variants if number % 2 == 0 else variants[::-1]


def attempt(loop: TrainingLoop, variant: Variant) -> Round:
    """Runs a variant, and puts the state back for the next one."""
    try:
        return variant.run()
    except Exception as error:
        loop.not_measured[variant.name] = described(error)
        return {}
    finally:
        loop.state.restore_step()


class Rounds:
    """The rounds of one process.

    Args:
        loop: the user's loop.
        variants: changes to its step.
        budget_s: seconds of the wall clock for the rounds; the first four may take three times as long.

    Attributes:
        size: number of ranks.
        busy: cores that others keep busy; None if unknown.
    """

    size = 1

    def __init__(self, loop: TrainingLoop, variants: Variants, budget_s: float) -> None:
        self.busy: float | None = None
        self._loop = loop
        self._variants = variants
        self._budget_s = budget_s

    def warm_up(self) -> bool:
        """Runs the first steps; False if the step cannot be run."""
        try:
            for _ in range(3):
                self._loop.iterate()
        except StopIteration:
            self._loop.note_end()
        except Exception as error:
            self._loop.not_measured["step"] = f"the step raised {described(error)}"
            return False
        return True

    def measure(self, busy: Callable[[], float | None]) -> Sequence[Round]:
        """Makes the rounds; ``busy`` returns how many cores others kept busy."""
        start = time.perf_counter()
        missing = self._loop.not_measured
        with self._loop.watching():
            # The loop is a variant too: it stands in each round beside the changes that
            # it is compared with.
            as_it_is = Variant("loop", self._loop.run)
            first = attempt(self._loop, as_it_is)
            if not first:
                return []
            self._loop.choose_iterations(first, time.perf_counter() - start)
            self.busy = busy()
            variants = [as_it_is, *self._variants.of_step(first["step"], self.busy)]
            if not self._try_each(variants, start):
                return [first]
            rounds: list[Round] = []
            while not enough(rounds) and "loop" not in missing:
                if is_late(len(rounds), time.perf_counter() - start, self._budget_s):
                    break
                seconds: dict[str, float] = {}
                for variant in in_order(variants, len(rounds)):
                    if variant.name not in missing:
                        seconds |= attempt(self._loop, variant)
                if "loop" not in missing:
                    rounds.append(seconds)
        if self.busy is None:
            self.busy = busy()
        return rounds or [first]

    def _try_each(self, variants: Sequence[Variant], start: float) -> float:
        """Runs each variant once, gives up those beyond the budget, and returns the seconds of a round."""
        missing = self._loop.not_measured
        budget_s = self._budget_s
        round_s = 0.0
        num_tried = 0
        for variant in variants:
            before = time.perf_counter()
            if is_too_slow(round_s, before - start, budget_s):
                # The variants that were tried stand for the others.
                needed_s = FEWEST_ROUNDS * round_s * len(variants) / max(1, num_tried)
                missing[variant.name] = (
                    f"a round takes {round_s:.1f} s already, and budget_s={budget_s:g} holds {FEWEST_ROUNDS}; "
                    f"give about budget_s={max(needed_s, 2 * budget_s):.0f}"
                )
                continue
            attempt(self._loop, variant)
            if variant.name not in missing:
                round_s += time.perf_counter() - before
                num_tried += 1
        return round_s

    # What several ranks exchange or agree on, see RankRounds, is this process's own
    # here.

    def facts(self, facts: Facts) -> Facts:
        """Returns the facts of all ranks from those of this one."""
        return facts

    def local(self) -> AbstractContextManager[None]:
        """Returns a context for steps without exchange."""
        return nullcontext()

    def gather(self, value: Any) -> list[Any]:
        """Returns the value of each rank."""
        return [value]

    def share_missing(self) -> None:
        """Leaves out on all ranks each experiment without a result on one."""

    def real(self, call: Callable[[], Any]) -> Any:
        """Runs a call with its exchange."""
        return call()
