"""When eager steps are replaced by captured ones: how many are timed, and after how long a capture pays."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

Compile = Literal["auto", "off", "require"]
WATCHED = 12  # eager steps to time before "auto" decides
PAYS_S = {"cpu": 60.0, "cuda": 10.0}  # a capture pays off if the rest of a run takes at least these seconds
PATIENCE = 20  # eager steps of a rare shape, such as the last batch of an epoch, before it is captured too


class TrainingDivergedError(ValueError):
    """A loss or gradient is not finite; the message names step, epoch, ranks and cause. Raised on every rank.

    Args:
        message: text of the error.
        step: number of the step, counted from 1 over the whole run.
    """

    def __init__(self, message: str, step: int = 0) -> None:
        super().__init__(message)
        self.step = step


def median_step(seconds: Sequence[float]) -> float:
    """Returns the median of the later half of ``seconds``, because first steps are slower."""
    return statistics.median(seconds[len(seconds) // 2 :])


def two_digits(steps: float) -> int:
    """Rounds ``steps`` to two digits, the precision of a step's time."""
    return int(float(f"{steps:.2g}"))
