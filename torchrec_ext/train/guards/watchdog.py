"""Watchdog: a rank without a step for too long says where it stands, and the job ends instead of waiting for ever."""

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

_POLL_S = 1.0
_PATIENCE_S = 5.0  # what a rank that only waits leaves to the one it waits for, whose report is to be the first
# Without a limit of the user's: so many times the slowest of the last steps, within these seconds. At the least a job
# of fast steps ends within a minute, half of which torchrun waits for a stopped rank; at the most before the
# collectives' own five minutes.
_SLOWEST_STEPS, _LEAST_S, _MOST_S = 100.0, 25.0, 240.0
_FORGETS = 0.98
_SIGN_AFTER_S = 5.0  # of silence, from when on a rank shows the others that its process runs, and looks for theirs


class Watchdog:
    """Watches one rank from a thread of its own.

    The rank calls :meth:`beat` at each step and :meth:`pause` before whatever may take long. Where no beat comes for
    ``after_s``, the stacks of all threads go to ``folder / stacks-rankR.txt`` and ``end`` is called with one line:
    since when, and in which collective the rank waits, or where else it is. A rank that waits in a collective says so
    some seconds later than one that does not: that one is the cause. A stopped process cannot say anything: ranks
    without a step for five seconds count on in ``folder / alive-rankR``, and the one whose count stands still is named
    by the others. In a pause a rank may compute as long as it likes, but not wait longer in one collective. Where a
    thread holds the interpreter, Python's own fault handler still writes the stacks.

    Args:
        rank: rank of this process, named in the line and the file.
        after_s: seconds, more than the slowest step takes and less than the collectives' own timeout; None for 100
            times the slowest of the last steps, from 25 to 240 seconds, and 240 in a pause.
        folder: folder of the files, which all ranks see; a rank whose file is not there is not looked for.
        end: called with the line, from the thread; it ends the process.
        world_size: number of ranks.

    Raises:
        ValueError: ``after_s`` is not positive.
    """

    def __init__(
        self, rank: int, after_s: float | None, folder: Path, end: Callable[[str], None], *, world_size: int = 1
    ) -> None:
        if after_s is not None and not after_s > 0:
            raise ValueError(f"after_s={after_s}: must be positive")
        self._rank, self._given_s, self._end = rank, after_s, end
        self._path = folder / f"stacks-rank{rank}.txt"
        self._sign = folder / f"alive-rank{rank}"
        self._others = {other: folder / f"alive-rank{other}" for other in range(world_size) if other != rank}
        self._seen: dict[int, tuple[str, float]] = {}  # by rank its count, and when it was first seen at it
        self._count = 0
        self._slowest_s: float | None = None
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
        self._show()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        if self._file is not None:
            self._file.close()
        if not self._path.stat().st_size:
            self._path.unlink()
        self._sign.unlink(missing_ok=True)

    @property
    def after_s(self) -> float:
        """The seconds without a step, or in one collective during a pause, after which the job ends."""
        if self._given_s is not None:
            return self._given_s
        if self._slowest_s is None or self._last is None:
            return _MOST_S
        return min(max(_SLOWEST_STEPS * self._slowest_s, _LEAST_S), _MOST_S)

    def beat(self, where: str) -> None:
        """Notes that a step was made, which ``where`` names."""
        now = time.monotonic()
        if self._last is not None:
            # A first step that warmed up, or one that compiled, is forgotten after some hundred others.
            self._slowest_s = max(now - self._last, _FORGETS * (self._slowest_s or 0.0))
        self._where, self._last = where, now

    def pause(self) -> None:
        """Begins a pause, in which anything may take its time; the next beat ends it."""
        self._last = None

    def _watch(self) -> None:
        assert self._file is not None
        while not self._over.wait(min(_POLL_S, self.after_s / 8)):
            now, last, call, after_s = time.monotonic(), self._last, self._waiting(), self.after_s
            if call is None or call is not self._call:
                self._call, self._since = call, now
            if last is None:
                faulthandler.cancel_dump_traceback_later()
                last = now if call is None else self._since
            else:
                # Armed anew each time: it fires by itself where this thread cannot run.
                faulthandler.dump_traceback_later(after_s + _PATIENCE_S, file=self._file)
            if self._last is None or now - last > min(_SIGN_AFTER_S, after_s / 4):
                self._show()
                self._look(now)
            else:
                self._seen.clear()
            still = self._standing_still(now, after_s) if now - last > after_s else []
            if still or now - last > after_s + (0 if call is None else _PATIENCE_S):
                self._tell(self._file, now - last, _name(call), still)
                break
        while not self._over.wait(min(_POLL_S, self.after_s / 8)):
            self._show()  # until ``end`` has ended the process

    def _waiting(self) -> FrameType | None:
        return _collective(sys._current_frames().get(self._main)) if self._others else None

    def _show(self) -> None:
        self._count += 1
        with suppress(OSError):  # a full disk ends a run elsewhere, in words
            self._sign.write_text(str(self._count))

    def _look(self, now: float) -> None:
        for rank, sign in self._others.items():
            try:
                count = sign.read_text()
            except OSError:
                continue
            if count and count != self._seen.get(rank, ("", now))[0]:
                self._seen[rank] = count, now

    def _standing_still(self, now: float, after_s: float) -> list[int]:
        return [rank for rank, (_, since) in self._seen.items() if now - since > min(_SIGN_AFTER_S, after_s / 2)]

    def _tell(self, file: IO[str], silent: float, collective: str, still: Sequence[int]) -> None:
        waits = f"it waits for other ranks in {collective}" if collective else "it waits for no other rank"
        frame = sys._current_frames().get(self._main)
        if frame is not None:
            last = traceback.extract_stack(frame)[-1]
            waits += f"; its last line is {Path(last.filename).name}:{last.lineno}, in {last.name}"
        faulthandler.dump_traceback(file, all_threads=True)
        file.flush()
        what = "made no step" if self._last is not None else "stood still"
        line = f"rank {self._rank} has {what} for {silent:.0f} s since {self._where or 'its start'}: "
        if still:
            names = ", ".join(f"rank {rank}" for rank in still)
            gone = f"{names} gives no sign of life: its process is stopped or starved, or its host is gone."
            line = f"{gone} {line}it waits for {names}"
        else:
            line += waits
        self._end(
            f"{line}; the stacks of its threads are in {self._path}; go on with --resume auto, and raise train.hang_s "
            "if a step may take as long"
        )


def _collective(frame: FrameType | None) -> FrameType | None:
    if frame is not None and frame.f_code.co_name == "_engine_run_backward":
        return frame  # DistributedDataParallel waits in there for its gradients, in C++
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
    if name == "_engine_run_backward":
        return "backward"
    return ""
