"""Guard: ends a run on all ranks alike, at a loss that is not finite or if a rank is asked to stop.

Watchdog: writes the stacks of a rank that makes no step. It ends nothing: the collectives' own time limit does, whose
error names the collective.
"""

from __future__ import annotations

import faulthandler
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from torchrec_ext.capture.policy import TrainingDivergedError
from torchrec_ext.distributed.runtime import Runtime, gather_objects

# Seconds between two meetings of the ranks. A scheduler waits 30 s for a job that it has
# asked to stop.
_MEETING_S = 2.0
# Losses that are read at once; fewer reads wait for the device less often.
_LOSSES = 1024
# A timer costs a thread, so one is started once in so many seconds, not in each step.
_TIMER_S = 1.0


class RunStoppedError(ValueError):
    """A signal has ended the run; the message says what is saved. Raised on every rank after the same step."""

    @classmethod
    def at(cls, place: str, *, saved: bool) -> Self:
        """Returns the error of a run that ended at ``place``, such as ``after step 3 of epoch 1``."""
        outcome = "; nothing was saved, since the run has no checkpoints"
        if saved:
            outcome = ", which is saved; go on with the same --run_dir"
        return cls(f"stopped by a signal {place}{outcome}")


class _Report(NamedTuple):
    """What a rank says when ranks meet: its first bad loss and step, a request to stop, and its seconds per step."""

    bad_step: float
    bad_loss: float
    stop: bool
    seconds: float


class Guard:
    """Looks at the losses of a run, where the ranks meet: at each record, before each save, and every two seconds.

    A loss stays on its device until then, so no step waits for it. Steps after a bad one train on bad weights, but none
    of them is ever saved.

    Args:
        runtime: rank and device of this process.
        steps_per_epoch: number of steps in an epoch, for messages.
        step: number of steps that the run has made already.
        stop: returns whether this rank was asked to stop.

    Attributes:
        step: number of steps of the run so far.
        stop_asked: whether some rank was asked to stop, known on all ranks after the same step.
    """

    def __init__(
        self,
        runtime: Runtime,
        steps_per_epoch: int,
        step: int = 0,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        self._runtime = runtime
        self._steps_per_epoch = steps_per_epoch
        self._stop = stop or (lambda: False)
        self._losses: list[Tensor] = []
        self._bad = (math.inf, 0.0)
        self._start = time.perf_counter()
        self._met = self._due = self.step = step
        self.stop_asked = False

    def see(self, loss: Tensor) -> None:
        """Takes the loss of a step, (), and meets the other ranks if it is time.

        Raises:
            TrainingDivergedError: see :meth:`meet`.
        """
        self.step += 1
        self._losses.append(loss.detach())
        if len(self._losses) == _LOSSES:
            self._read()
        if self._runtime.world_size == 1:
            self.stop_asked = self._stop()
        elif self.step >= self._due:
            self.meet()

    def meet(self) -> None:
        """Checks all losses so far, and learns whether a rank was asked to stop; all ranks call it.

        Raises:
            TrainingDivergedError: a loss is not finite, on every rank alike.
        """
        self._read()
        seconds = time.perf_counter() - self._start
        own = _Report(*self._bad, self._stop(), seconds / max(self.step - self._met, 1))
        reports = gather_objects(own, self._runtime.world_size)
        self.stop_asked = any(report.stop for report in reports)
        # All ranks count alike, so that they meet again after the same step.
        slowest = max(report.seconds for report in reports)
        self._due = self.step + max(int(_MEETING_S / max(slowest, 1e-6)), 1)
        self._met = self.step
        self._start = time.perf_counter()
        step = min(report.bad_step for report in reports)
        if math.isfinite(step):
            raise self._diverged(int(step), reports)

    def _read(self) -> None:
        if not self._losses:
            return
        losses = torch.stack(self._losses).float().cpu()
        first = self.step - len(self._losses) + 1
        self._losses.clear()
        bad = (~torch.isfinite(losses)).nonzero()
        if len(bad) and math.isinf(self._bad[0]):
            index = int(bad[0])
            self._bad = (float(first + index), float(losses[index]))

    def _diverged(self, step: int, reports: list[_Report]) -> TrainingDivergedError:
        ranks = [rank for rank, report in enumerate(reports) if report.bad_step == step]
        return TrainingDivergedError(
            f"the loss is {reports[ranks[0]].bad_loss} on rank(s) {ranks} at {self.where(step)}; lower "
            "optimizer.tables_lr or optimizer.dense_lr, or set optimizer.clip_norm",
            step,
        )

    def where(self, step: int) -> str:
        """Returns the name of a step for messages."""
        return f"step {step} of epoch {self.epoch(step)}"

    def epoch(self, step: int) -> int:
        """Returns the epoch of a step, counted from 1."""
        return 1 + (step - 1) // self._steps_per_epoch


class Watchdog:
    """Writes this rank's stacks to ``folder / stacks-rankR.txt`` if a step takes ``after_s`` seconds.

    Python's fault handler writes them from a thread of its own, also if a thread holds the interpreter.

    Args:
        rank: rank of this process.
        after_s: seconds, more than the slowest step takes and less than the collectives' timeout.
        folder: folder of the file, which is removed if nothing was written.
    """

    def __init__(self, rank: int, after_s: float, folder: Path) -> None:
        self._after_s = after_s
        self._path = folder / f"stacks-rank{rank}.txt"
        self._file: IO[str] | None = None
        self._armed: float | None = None

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("w")
        return self

    def __exit__(self, *error: object) -> None:
        self.pause()
        if self._file is not None:
            self._file.close()
        if not self._path.stat().st_size:
            self._path.unlink()

    def beat(self) -> None:
        """Records a finished step: the next one has its time from now."""
        now = time.monotonic()
        if self._armed is None or now - self._armed > min(_TIMER_S, self._after_s / 8):
            assert self._file is not None, "it is entered"
            faulthandler.dump_traceback_later(self._after_s, file=self._file)
            self._armed = now

    def pause(self) -> None:
        """Begins a pause without a limit, such as an evaluation; the next beat ends it."""
        faulthandler.cancel_dump_traceback_later()
        self._armed = None
