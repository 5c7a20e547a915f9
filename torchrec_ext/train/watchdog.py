"""Watchdog: a rank that makes no step for too long says where it stands, and the job ends instead of waiting for ever."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO

from typing_extensions import Self

_POLL_S = 1.0
_PATIENCE_S = 5.0  # what a rank that only waits leaves to the one it waits for, whose report is to be the first


class Watchdog:
    """Watches one rank from a thread of its own.

    The rank calls :meth:`beat` at each step and :meth:`pause` before whatever may take long. Where no beat comes for ``after_s``,
    the stacks of all threads go to ``folder / stacks-rankR.txt`` and ``end`` is called with one line: since when, and in which
    collective the rank waits, or where else it is. A rank that waits in a collective says so some seconds later than one that does
    not: that one is the cause. In a pause a rank may compute as long as it likes, but not wait longer in one collective. Where a
    thread holds the interpreter, Python's own fault handler still writes the stacks.

    Args:
        rank: for the line and the file.
        after_s: seconds; more than the slowest step takes, and less than the collectives' own timeout.
        folder: of the file.
        end: called with the line, from the thread; it ends the process.

    Raises:
        ValueError: ``after_s`` is not positive.
    """

    def __init__(self, rank: int, after_s: float, folder: Path, end: Callable[[str], None]) -> None:
        if not after_s > 0:
            raise ValueError(f"after_s={after_s}: must be positive")
        self._rank, self._after_s, self._end = rank, after_s, end
        self._path = folder / f"stacks-rank{rank}.txt"
        self._main = threading.get_ident()
        self._last: float | None = None
        self._where = ""
        self._call: FrameType | None = None  # the collective that the rank was last seen in, and
        self._since = 0.0  # since when
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("w")
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        if self._file is not None:
            self._file.close()
        if not self._path.stat().st_size:
            self._path.unlink()

    def beat(self, where: str) -> None:
        """A step was made: ``where`` names it."""
        self._where, self._last = where, time.monotonic()

    def pause(self) -> None:
        """What follows may take its time; the next beat ends the pause."""
        self._last = None

    def _watch(self) -> None:
        assert self._file is not None
        while not self._over.wait(min(_POLL_S, self._after_s / 4)):
            now, last, call = time.monotonic(), self._last, _collective(sys._current_frames().get(self._main))
            if call is None or call is not self._call:
                self._call, self._since = call, now
            if last is None:
                faulthandler.cancel_dump_traceback_later()
                last = now if call is None else self._since
            else:
                # Armed anew each time: it fires by itself where this thread cannot run.
                faulthandler.dump_traceback_later(self._after_s + _PATIENCE_S, file=self._file)
            if now - last > self._after_s + (0 if call is None else _PATIENCE_S):
                self._tell(self._file, now - last, _name(call))
                return

    def _tell(self, file: IO[str], silent: float, collective: str) -> None:
        place = f"it waits for other ranks in {collective}" if collective else "it waits for no other rank"
        frame = sys._current_frames().get(self._main)
        if frame is not None:
            last = traceback.extract_stack(frame)[-1]
            place += f"; its last line is {Path(last.filename).name}:{last.lineno}, in {last.name}"
        faulthandler.dump_traceback(file, all_threads=True)
        file.flush()
        what = "made no step" if self._last is not None else "stood still"
        self._end(
            f"rank {self._rank} has {what} for {silent:.0f} s since {self._where or 'its start'}: {place}; the stacks of its "
            f"threads are in {self._path}; go on with --resume auto, and raise train.hang_s if a step may take as long"
        )


def waits_in(frame: FrameType | None) -> str:
    """The public function of torch.distributed that a stack stands in, such as ``all_reduce``; empty where it is in none."""
    return _name(_collective(frame))


def _collective(frame: FrameType | None) -> FrameType | None:
    while frame is not None and not _name(frame):
        frame = frame.f_back
    return frame


def _name(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    module, name = str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
    if module == "torch.distributed.distributed_c10d" and not name.startswith("_"):
        return name
    if module.startswith(("torch.distributed", "torchrec.distributed")) and name in ("wait", "_wait_impl"):
        return f"{module.rpartition('.')[2]}.{name}"
    return ""
