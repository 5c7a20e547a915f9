"""CapturePolicy: when eager steps are replaced by captured ones, and when a run goes back to eager ones."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Sequence
from typing import Literal

Compile = Literal["auto", "off", "require"]
WATCHED = 12  # eager steps to time before "auto" decides
# In Triton inductor writes kernels of a GPU.
HAS_TRITON = importlib.util.find_spec("triton") is not None
# A capture pays off if the rest of a run takes at least these seconds. On a GPU inductor
# compiles the step too where Triton is; how long it takes there is not measured.
PAYS_S = {"cpu": 60.0, "cuda": 60.0 if HAS_TRITON else 10.0}
MOST_GRAPHS = 4  # sizes of batches to capture; each costs a compilation
PATIENCE = 20  # eager steps of a rare shape, such as the last batch of an epoch, before it is captured too


class TrainingDivergedError(ValueError):
    """A loss is not finite; the message names step, epoch and ranks. Raised on every rank.

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


def milliseconds(seconds: float) -> str:
    """Returns the time of a step as text, with three digits.

    Example:
        >>> milliseconds(0.0012345), milliseconds(2.4712)
        ('1.23 ms', '2,471 ms')
    """
    number = 1e3 * seconds
    return f"{number:.3g} ms" if number < 999.5 else f"{number:,.0f} ms"


def two_digits(steps: float) -> int:
    """Rounds ``steps`` to two digits, the precision of a step's time."""
    return int(float(f"{steps:.2g}"))


class CapturePolicy:
    """Times the eager and the captured steps of a run, and keeps the choice between them.

    Args:
        compile: ``auto`` captures if it pays, ``require`` captures after two eager steps, ``off`` never.
        note: receives each note for the user once.

    Attributes:
        compile: see above.
        patience: eager steps of a rare shape of batch before it is captured too; 0 unless ``compile`` is ``auto``.
        reason: why steps stay eager; empty while that is open.
        since: number of the first captured step.
        is_decided: whether the choice is made, so that no more eager steps are watched.
        is_reported: whether the user knows the choice and its figures.
        eager_seconds: seconds of each timed eager step.
        captured_seconds: seconds of each timed captured step.
    """

    def __init__(
        self,
        compile: Compile,  # noqa: A002 -- the setting's name
        note: Callable[[str], None],
    ) -> None:
        self.compile: Compile = compile
        self.patience = PATIENCE if compile == "auto" else 0
        self.reason = ""
        self._note = note
        self._notes: set[str] = set()
        self.restart()

    def restart(self) -> None:
        """Begins to watch eager steps, before the first step and after a change of the model."""
        self.since = 0
        self.is_decided = self.compile == "off"
        self.is_reported = False
        self.eager_seconds: list[float] = []
        self.captured_seconds: list[float] = []

    @property
    def eager_s(self) -> float:
        """Median seconds of an eager step."""
        return median_step(self.eager_seconds)

    @property
    def captured_s(self) -> float:
        """Median seconds of a captured step."""
        return median_step(self.captured_seconds)

    @property
    def steps_to_watch(self) -> int:
        """Number of eager steps before the choice."""
        # With "require" there is nothing to weigh up: eager steps only let the
        # optimizer make its state.
        return WATCHED if self.compile == "auto" else 2

    @property
    def can_compare(self) -> bool:
        """Whether enough captured steps are timed: one more, because the first includes the capture."""
        return len(self.captured_seconds) > WATCHED

    @property
    def is_slower(self) -> bool:
        """Whether captured steps turned out to be no faster, and eager ones are allowed."""
        return self.compile == "auto" and self.captured_s >= self.eager_s

    def too_few_left(self, steps: int, device: str) -> str:
        """Returns why ``steps`` on a ``cpu`` or ``cuda`` are too few for a capture to pay; empty if they are enough."""
        pays = PAYS_S[device]
        if self.compile != "auto" or steps * self.eager_s >= pays:
            return ""
        return f"pays from {two_digits(pays / self.eager_s):,} steps on, and {steps:,} are left"

    def describe_eager(self) -> str:
        """Describes eager steps: the reason and their time."""
        return f"eager: {self.reason}; {milliseconds(self.eager_s)} a step"

    def describe_captured(self) -> str:
        """Describes captured steps: the first one's number and their time."""
        return f"since step {self.since:,}: {milliseconds(self.captured_s)} a step"

    def note(self, text: str) -> None:
        """Says a line, unless it was said before."""
        # A note may come up in every step.
        if text not in self._notes:
            self._notes.add(text)
            self._note(text)
