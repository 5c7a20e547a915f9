"""Stopwatch: how long something takes on all ranks at the same time, and the exchanges between them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from torchrec_ext.distributed.measurements import Line
from torchrec_ext.distributed.runtime import Runtime


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

    def _once(self, call: Callable[[], object]) -> float:
        self._settle()
        start = time.perf_counter()
        call()
        self._settle()
        return time.perf_counter() - start

    def _settle(self) -> None:
        if self._runtime.device.type == "cuda":
            torch.cuda.synchronize(self._runtime.device)

    def _slowest(self, seconds: float) -> float:
        if self._runtime.world_size == 1:
            return seconds
        found = torch.tensor(seconds, dtype=torch.float64, device=self._runtime.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)
