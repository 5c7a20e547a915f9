"""Watchdog: a rank without a step for too long reports its position, and the job ends instead of waiting for ever."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO

from typing_extensions import Self

# Seconds between two looks at the rank, or fewer with a short limit.
_POLL_S = 1.0
# A rank that only waits reports this much later, so that the rank it waits for reports
# first.
_PATIENCE_S = 5.0
# Without a limit from the user: this many times the slowest of the last steps, within
# these bounds. The lower bound ends a job of fast steps within a minute, half of which
# torchrun waits for a stopped rank. The upper bound is below the collectives' own
# timeout of five minutes.
_SLOWEST_STEPS = 100.0
_LEAST_S = 25.0
_MOST_S = 240.0
# Factor of the slowest step's time with each step.
_DECAY = 0.98
# After so long without a step a rank signals that its process runs, and reads the signs
# of the others.
_SIGN_AFTER_S = 5.0


class Watchdog:
    """Watches one rank from a thread of its own.

    The rank calls :meth:`beat` at each step and :meth:`pause` before anything that may take long. Without a beat for
    ``after_s``, the stacks of all threads go to ``folder / stacks-rankR.txt``. ``end`` is then called with one line:
    the last beat, and the collective in which the rank waits, or its last line of code. A rank that waits in a
    collective reports some seconds later than one that does not, because the latter is the cause.

    A stopped process cannot report. Ranks without a step for five seconds therefore increment a count in
    ``folder / alive-rankR``, and a rank whose count stands still is named by the others. In a pause a rank may compute
    for any time, but not wait longer than ``after_s`` in one collective. If a thread holds the interpreter, Python's
    own fault handler still writes the stacks.

    Args:
        rank: rank of this process, named in the line and the file.
        after_s: seconds, more than the slowest step takes and less than the collectives' own timeout; None for 100
            times the slowest of the last steps, from 25 to 240 seconds, and 240 in a pause.
        folder: folder of the files, visible to all ranks; a rank without a file is not watched.
        end: called with the line, from the thread; it ends the process.
        world_size: number of ranks.

    Raises:
        ValueError: ``after_s`` is not positive.
    """

    def __init__(
        self,
        rank: int,
        after_s: float | None,
        folder: Path,
        end: Callable[[str], None],
        *,
        world_size: int = 1,
    ) -> None:
        if after_s is not None and not after_s > 0:
            raise ValueError(f"after_s={after_s}: must be positive")
        self._rank = rank
        self._fixed_after_s = after_s
        self._end = end
        self._path = folder / f"stacks-rank{rank}.txt"
        self._sign = folder / f"alive-rank{rank}"
        self._others = {
            other: folder / f"alive-rank{other}"
            for other in range(world_size)
            if other != rank
        }
        # Each other rank's count, and when this count was first read.
        self._last_counts: dict[int, tuple[str, float]] = {}
        self._count = 0
        self._slowest_s: float | None = None
        self._main_thread = threading.get_ident()
        self._last_beat: float | None = None
        self._where = ""
        # The collective in which the rank was last seen.
        self._collective: FrameType | None = None
        self._collective_since = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, daemon=True, name="watchdog"
        )
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("w")
        self._write_sign()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        if self._file is not None:
            self._file.close()
        if not self._path.stat().st_size:
            self._path.unlink()
        self._sign.unlink(missing_ok=True)

    @property
    def after_s(self) -> float:
        """The seconds without a step, or in one collective during a pause, before the job ends."""
        if self._fixed_after_s is not None:
            return self._fixed_after_s
        if self._slowest_s is None or self._last_beat is None:
            return _MOST_S
        return min(max(_SLOWEST_STEPS * self._slowest_s, _LEAST_S), _MOST_S)

    def beat(self, where: str) -> None:
        """Records a finished step; ``where`` names it in reports."""
        now = time.monotonic()
        if self._last_beat is not None:
            # The decay forgets a slow step, such as one that warmed up or compiled,
            # after some hundred others.
            self._slowest_s = max(
                now - self._last_beat, _DECAY * (self._slowest_s or 0.0)
            )
        self._where = where
        self._last_beat = now

    def pause(self) -> None:
        """Begins a pause without a time limit on computation; the next beat ends it."""
        self._last_beat = None

    def _watch(self) -> None:
        assert self._file is not None
        while not self._closed.wait(min(_POLL_S, self.after_s / 8)):
            now = time.monotonic()
            last = self._last_beat
            call = self._current_collective()
            after_s = self.after_s
            if call is None or call is not self._collective:
                self._collective = call
                self._collective_since = now
            if last is None:
                # In a pause only the time in one collective counts: computing may take
                # as long as it likes.
                faulthandler.cancel_dump_traceback_later()
                last = self._collective_since
            else:
                # Armed anew in each round, so it fires by itself if this thread cannot
                # run.
                faulthandler.dump_traceback_later(
                    after_s + _PATIENCE_S, file=self._file
                )
            # While steps are made, no files are touched: they may be on a slow network.
            if self._last_beat is None or now - last > min(_SIGN_AFTER_S, after_s / 4):
                self._write_sign()
                self._read_signs(now)
            else:
                self._last_counts.clear()
            silent_ranks: list[int] = []
            if now - last > after_s:
                silent_ranks = self._standing_still(now, after_s)
            # A rank that only waits leaves the first report to the rank it waits for,
            # unless that one is silent.
            limit_s = after_s
            if call is not None:
                limit_s += _PATIENCE_S
            if silent_ranks or now - last > limit_s:
                self._report(self._file, now - last, _name(call), silent_ranks)
                break
        while not self._closed.wait(min(_POLL_S, self.after_s / 8)):
            # The other ranks must see life here until ``end`` has ended the process.
            self._write_sign()

    def _current_collective(self) -> FrameType | None:
        # One rank waits for no other.
        if not self._others:
            return None
        return _collective(sys._current_frames().get(self._main_thread))

    def _write_sign(self) -> None:
        self._count += 1
        # A full disk ends the run elsewhere, with a clear message.
        with suppress(OSError):
            self._sign.write_text(str(self._count))

    def _read_signs(self, now: float) -> None:
        for rank, sign in self._others.items():
            try:
                count = sign.read_text()
            except OSError:
                continue
            if count and count != self._last_counts.get(rank, ("", now))[0]:
                self._last_counts[rank] = count, now

    def _standing_still(self, now: float, after_s: float) -> list[int]:
        # A rank without a step counts on in each round: if its count stands still, so
        # does its process.
        silence_s = min(_SIGN_AFTER_S, after_s / 2)
        return [
            rank
            for rank, (_, since) in self._last_counts.items()
            if now - since > silence_s
        ]

    def _report(
        self,
        file: IO[str],
        silent_s: float,
        collective: str,
        silent_ranks: Sequence[int],
    ) -> None:
        waits = "it waits for no other rank"
        if collective:
            waits = f"it waits for other ranks in {collective}"
        frame = sys._current_frames().get(self._main_thread)
        # The main thread may have ended.
        if frame is not None:
            last_line = traceback.extract_stack(frame)[-1]
            waits += f"; its last line is {Path(last_line.filename).name}:{last_line.lineno}, in {last_line.name}"
        faulthandler.dump_traceback(file, all_threads=True)
        file.flush()
        event = "made no step"
        if self._last_beat is None:
            event = "stood still"
        line = f"rank {self._rank} has {event} for {silent_s:.0f} s since {self._where or 'its start'}: "
        if silent_ranks:
            names = ", ".join(f"rank {rank}" for rank in silent_ranks)
            gone = f"{names} gives no sign of life: its process is stopped or starved, or its host is gone."
            line = f"{gone} {line}it waits for {names}"
        else:
            line += waits
        self._end(
            f"{line}; the stacks of its threads are in {self._path}; go on with the same --run_dir, and raise "
            "train.hang_s if a step may take as long"
        )


def _collective(frame: FrameType | None) -> FrameType | None:
    if frame is not None and frame.f_code.co_name == "_engine_run_backward":
        # DistributedDataParallel waits in there for its gradients, in C++.
        return frame
    while frame is not None and not _name(frame):
        frame = frame.f_back
    return frame


def _name(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    module = str(frame.f_globals.get("__name__", ""))
    name = frame.f_code.co_name
    if module == "torch.distributed.distributed_c10d" and not name.startswith("_"):
        return name
    if module.startswith(("torch.distributed", "torchrec.distributed")) and name in (
        "wait",
        "_wait_impl",
    ):
        return f"{module.rpartition('.')[2]}.{name}"
    if name == "_engine_run_backward":
        return "backward"
    return ""
