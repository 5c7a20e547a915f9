"""How many compute threads a process should have: measured on the run's own first steps, not taken from the number of cores."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import islice
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from torchrec_ext.distributed.runtime import Runtime

Threads = Literal["given", "auto"]
SECONDS = 2.0  # of measurement, over all numbers
_FEWEST, _MOST = 4, 200  # steps for each number
Item = TypeVar("Item")


def numbers(cores: int) -> list[int]:
    """What is tried on ``cores``: 1, 2, 4 ... and all of them.

    Example:
        >>> numbers(1), numbers(6)
        ([1], [1, 2, 4, 6])
    """
    return sorted({min(1 << power, cores) for power in range(cores.bit_length() + 1)})


def with_best_threads(
    items: Iterator[Item], run: Callable[[Iterable[Item]], Iterator[Any]], runtime: Runtime, say: Callable[[str], None]
) -> Iterator[Any]:
    """Runs the first of ``items`` with several numbers of threads and leaves the fastest set; they count as any other step.

    Where the items end before any number was measured, the number stays what it was. All ranks call it, try the same numbers on as
    many steps, and choose the one with which the slowest of them is fastest. Each process is pinned to its own share of the host's
    cores first. More threads than a small network can use make it slower, and many times slower where other processes want the
    cores.

    Args:
        items: batches; what is not needed stays there.
        run: trains on some of them.
        runtime: this process's place in the job.
        say: is told what came out.
    """
    given, own = torch.get_num_threads(), pin(runtime)
    tried = numbers(len(own))
    yield from run(islice(items, 3))  # what is slow once is over then
    step = _slowest((yield from _clocked(run(islice(items, _FEWEST)))), runtime)
    count = min(max(int(SECONDS / len(tried) / step), _FEWEST), _MOST) if math.isfinite(step) else _FEWEST
    times = {}
    for number in tried:
        torch.set_num_threads(number)
        times[number] = _slowest((yield from _clocked(run(islice(items, count)))), runtime)
    times = {number: seconds for number, seconds in times.items() if math.isfinite(seconds)}
    best = min(times, key=lambda number: times[number], default=given)
    torch.set_num_threads(best)
    measured = ", ".join(f"{number}: {seconds * 1e3:.2f} ms" for number, seconds in times.items())
    why = f"a step with {measured}" if measured else "as before: the epoch was over before a step could be measured"
    say(f"threads: {best} ({why}); each process is pinned to {len(own)} core(s)")


def _clocked(outputs: Iterator[Any]) -> Generator[Any, None, float]:
    """Seconds per step; infinity where the epoch was over."""
    start, count = time.perf_counter(), 0
    for output in outputs:
        count += 1
        yield output
    return (time.perf_counter() - start) / count if count else math.inf


def pin(runtime: Runtime) -> list[int]:
    """Binds all threads of this process to its share of the host's cores, and returns these."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // runtime.local_world_size
    if share == 0 or runtime.local_world_size == 1:
        return cores[: max(share, 1)]
    own = cores[runtime.local_rank * share : (runtime.local_rank + 1) * share]
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), own)
    return own


def _slowest(seconds: float, runtime: Runtime) -> float:
    if runtime.world_size == 1:
        return seconds
    worst = torch.tensor(seconds, dtype=torch.float64, device=runtime.device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)
