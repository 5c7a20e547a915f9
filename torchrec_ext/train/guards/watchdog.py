"""Watchdog: writes the stacks of all threads of a rank that has made no step for too long."""

from __future__ import annotations

import faulthandler
import time
from pathlib import Path
from types import TracebackType
from typing import IO

from typing_extensions import Self

# A timer costs a thread, so one is started once in so many seconds, not in each step.
_EVERY_S = 1.0


class Watchdog:
    """Writes this rank's stacks to ``folder / stacks-rankR.txt`` if a step takes ``after_s`` seconds.

    Python's fault handler writes them from a thread of its own, also if a thread holds the interpreter. It ends
    nothing: a rank that waits for another one ends by the collectives' own timeout, whose error names the collective.

    Args:
        rank: rank of this process.
        after_s: seconds, more than the slowest step takes and less than the collectives' timeout.
        folder: folder of the file, which is removed if nothing was written.

    Raises:
        ValueError: ``after_s`` is not positive.
    """

    def __init__(self, rank: int, after_s: float, folder: Path) -> None:
        if not after_s > 0:
            raise ValueError(f"after_s={after_s}: must be positive")
        self._after_s = after_s
        self._path = folder / f"stacks-rank{rank}.txt"
        self._file: IO[str] | None = None
        self._armed: float | None = None

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("w")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.pause()
        if self._file is not None:
            self._file.close()
        if not self._path.stat().st_size:
            self._path.unlink()

    def beat(self) -> None:
        """Records a finished step: the next one has its time from now."""
        now = time.monotonic()
        if self._armed is None or now - self._armed > min(_EVERY_S, self._after_s / 8):
            assert self._file is not None, "it is entered"
            faulthandler.dump_traceback_later(self._after_s, file=self._file)
            self._armed = now

    def pause(self) -> None:
        """Begins a pause without a limit, such as an evaluation; the next beat ends it."""
        faulthandler.cancel_dump_traceback_later()
        self._armed = None
