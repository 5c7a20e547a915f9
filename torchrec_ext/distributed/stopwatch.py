"""Stopwatch: how long something takes on all ranks at the same time, and the exchanges between them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from torchrec_ext.distributed.measurements import Line
from torchrec_ext.distributed.runtime import Runtime

_IN_A_ROW = 0.1  # seconds of one call before it is the next one's turn
_ROUNDS = (5, 15)


class Stopwatch:
    """Times calls; every rank makes the same ones, and gets the time of the slowest.

    Args:
        runtime: this process's place in the job.
        seconds: to spend on each figure.
    """

    def __init__(self, runtime: Runtime, seconds: float = 0.05) -> None:
        self._runtime, self._seconds = runtime, seconds

    def ms(self, call: Callable[[], object]) -> float:
        """The lower quartile of the ms of a call, after one that does not count: other work on the machine only ever adds."""
        self._once(call)
        first = self._slowest(self._once(call))
        repeats = min(max(int(self._seconds / max(first, 1e-6)), 3), 20)  # the same on every rank
        times = []
        for _ in range(repeats):
            dist.barrier()
            times.append(self._once(call))
        return 1e3 * self._slowest(sorted(times)[len(times) // 4])

    def in_turn(self, calls: Sequence[Callable[[], object]], seconds: float) -> list[float]:
        """The median of the ms of each call, a few of each in a row, round by round.

        A machine's speed moves by a fifth within seconds, which so hits all of them alike, and the median is what training sees.

        Args:
            calls: what to time.
            seconds: to spend on each, about.
        """
        firsts = [self._slowest(self._once(call)) for call in calls]
        inner = [min(max(int(_IN_A_ROW / max(first, 1e-6)), 1), 8) for first in firsts]
        spent = sum(first * count for first, count in zip(firsts, inner, strict=True))
        rounds = min(max(int(seconds * len(calls) / max(spent, 1e-6)), _ROUNDS[0]), _ROUNDS[1])  # the same on every rank
        times: list[list[float]] = [[] for _ in calls]
        for _ in range(rounds):
            for call, count, found in zip(calls, inner, times, strict=True):
                dist.barrier()
                found.append(self._once(call, count))
        return [1e3 * statistics.median(map(self._slowest, found)) for found in times]

    def all_to_all(self, size: int) -> Line:
        """By the bytes that a rank sends to all others together, from none to ``size``."""
        return self._line(size, self._to_others)

    def all_reduce(self, size: int) -> Line:
        """By bytes, from none to ``size``."""
        return self._line(size, dist.all_reduce)

    def _line(self, size: int, exchange: Callable[[torch.Tensor], object]) -> Line:
        if self._runtime.world_size == 1:
            return Line(fixed=0.0, each=0.0)
        points = []
        for count in (64, max(size // 4, 128)):
            sent = torch.zeros(count, device=self._runtime.device)
            points.append((4.0 * count, self.ms(lambda sent=sent: exchange(sent))))  # type: ignore[misc]
        return Line.through(*points)

    def _to_others(self, sent: torch.Tensor) -> None:
        """Each other rank gets an equal share, this one nothing."""
        others = self._runtime.world_size - 1
        share = len(sent) // others
        counts = [0 if rank == self._runtime.rank else share for rank in range(self._runtime.world_size)]
        dist.all_to_all_single(torch.empty_like(sent[: share * others]), sent[: share * others], counts, counts)

    def _once(self, call: Callable[[], object], count: int = 1) -> float:
        """Seconds of a call, the mean of ``count``."""
        self._settle()
        start = time.perf_counter()
        for _ in range(count):
            call()
        self._settle()
        return (time.perf_counter() - start) / count

    def _settle(self) -> None:
        if self._runtime.device.type == "cuda":
            torch.cuda.synchronize(self._runtime.device)

    def _slowest(self, seconds: float) -> float:
        if self._runtime.world_size == 1:
            return seconds
        found = torch.tensor(seconds, dtype=torch.float64, device=self._runtime.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)
