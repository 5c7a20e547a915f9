"""ThreadClock: a thread's wall clock without the seconds in which it was ready to run and others had its core.

Wall time on a shared host measures the neighbours; CPU time does not see sleeps and reads. A thread's wall time less
its time in the run queue sees both, and not the neighbours. Memory bandwidth and the other thread of a core stay
visible, and so do waits for other threads and processes that want a core.

busy_elsewhere(): how many cores others kept busy meanwhile.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

_READS = 5
_SCHEDSTAT = (
    "/proc/thread-self/schedstat"  # seconds on a core, seconds in its queue, turns
)


class ThreadClock:
    """Seconds of the thread in which it was made.

    Args:
        path: Linux' schedstat of the calling thread. Where it cannot be read, the clock is the wall clock, and ``note``
            says so.
    """

    def __init__(self, path: str = _SCHEDSTAT) -> None:
        self.note = ""
        self._thread = threading.get_ident()
        try:
            self._file = os.open(path, os.O_RDONLY)
            self._queued()
        except (OSError, ValueError, IndexError):
            self._file = -1
            self.note = (
                f"{path} cannot be read here, so times are those of the wall clock and hold the waits for other "
                "processes; stop these, or take Linux"
            )

    def __call__(self) -> float:
        """Returns seconds since some moment."""
        # The file is that of the thread that opened it.
        assert threading.get_ident() == self._thread, (
            "a ThreadClock belongs to the thread that made it"
        )
        if self._file < 0:
            return time.perf_counter()
        for _ in range(_READS):
            # Again where the thread lost its core between both clocks.
            queued = self._queued()
            now = time.perf_counter()
            if self._queued() == queued:
                break
        return now - queued

    def _queued(self) -> float:
        return int(os.pread(self._file, 96, 0).split()[1]) * 1e-9

    def close(self) -> None:
        """Closes the file that is read."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> ThreadClock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Busy(NamedTuple):
    seconds: float
    cores: float
    process: float


def busy_elsewhere(path: str = "/proc/stat") -> Callable[[], float | None]:
    """Starts measuring; the returned function gives the cores kept busy by other processes, None if unknown."""
    start = _busy(path)

    def cores() -> float | None:
        end = _busy(path)
        if start is None or end is None or end.seconds - start.seconds < 0.05:
            return None
        others = (end.cores - start.cores) - (end.process - start.process)
        return max(0.0, others / (end.seconds - start.seconds))

    return cores


def _busy(path: str) -> _Busy | None:
    try:
        with open(path) as stream:
            lines = [
                line.split()
                for line in stream
                if line.startswith("cpu") and line[3].isdigit()
            ]
    except OSError:
        return None
    # Only the cores that this process may use: what happens on others does not slow it.
    ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    for name, *values in lines:
        if name in ours:
            # user, nice, system, idle, iowait, irq, softirq, steal: all but the two
            # that wait
            ticks += sum(map(int, (*values[:3], *values[5:8])))
    # of this process and its children: user, system, children_user, children_system
    own = sum(os.times()[:4])
    return _Busy(time.perf_counter(), ticks / os.sysconf("SC_CLK_TCK"), own)
