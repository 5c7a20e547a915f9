"""What the rows of hybrid.py share: real gloo processes, sides timed in turn, one JSON row."""

import datetime
import multiprocessing
import os
import queue
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchrec_ext.distributed.runtime import Runtime

Row = dict[str, object]


class Options(NamedTuple):
    """What the command line asks for: rounds of each side, and whether sizes are those of a trial run."""

    repeats: int
    quick: bool


def on_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Runs a module's ``function(runtime, *args)`` on ``world_size`` gloo ranks with one thread each; results by rank.

    Raises:
        RuntimeError: what a rank raised.
    """
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        places = [(function, rank, world_size, f"{folder}/store", results, args) for rank in range(world_size)]
        processes = [context.Process(target=_rank, args=place, daemon=True) for place in places]
        for process in processes:
            process.start()
        found: dict[int, Any] = {}
        while len(found) < world_size:
            try:
                rank, error, value = results.get(timeout=5)
            except queue.Empty:
                dead = [number for number, process in enumerate(processes) if process.exitcode and number not in found]
                if dead:
                    raise RuntimeError(f"rank {dead[0]} ended with exit code {processes[dead[0]].exitcode}") from None
                continue
            if error:
                raise RuntimeError(f"rank {rank}:\n{error}")
            found[rank] = value
        for process in processes:
            process.join()
    return [found[rank] for rank in range(world_size)]


def _rank(
    function: Callable[..., Any], rank: int, world_size: int, store: str, results: Any, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    timeout = datetime.timedelta(minutes=10)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=timeout
    )
    try:
        runtime = Runtime(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
        results.put((rank, None, function(runtime, *args)))
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
    finally:
        results.close()
        results.join_thread()
        dist.destroy_process_group()


def in_turn(sides: Mapping[str, Callable[[], object]], repeats: int, inner: int) -> dict[str, float]:
    """Returns the median seconds of a call of each side on this rank; ranks run sides in turn, ``inner`` calls each.

    A side that does nothing on some rank leaves the others the machine: its ranks wait in a barrier, without a core.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, call in sides.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(inner):
                call()
            if repeat:  # the first round warms up
                times[name].append((time.perf_counter() - start) / inner)
    return {name: statistics.median(found) for name, found in times.items()}


def row(
    name: str,
    baseline: float | None,
    ours: float | None,
    unit: str,
    ratio: float | None,
    required: float | None = None,
    ceiling: float | None = None,
    **more: object,
) -> Row:
    """Returns one row of the JSON; ``ceiling`` is the ratio of two processes that never communicate at that moment."""
    numbers = {"baseline": baseline, "ours": ours, "ratio": ratio, "required": required, "ceiling": ceiling}
    rounded = {key: None if value is None else float(f"{value:.4g}") for key, value in numbers.items()}
    print(
        f"{name}: " + ", ".join(f"{key} {value:,}" for key, value in rounded.items() if value is not None),
        file=sys.stderr,
    )
    return {"name": name, "unit": unit, **rounded, **more}
