"""Row `small-2-ranks` of benchmarks/small_model.py: two processes under local SGD against one, and two apart."""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from small_model_network import Captured, quiet

from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sync import SyncConfig

LIMIT_S = 900


def _process(rank: int, size: int, alone: bool, store: str, steps: int, repeats: int, results: Any) -> None:
    """Times steps between barriers; ``alone`` processes have their own rows and weights and only share the barriers."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    quiet()
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    runtime = Runtime(rank=rank, local_rank=rank, world_size=size, local_world_size=size)
    together = size > 1
    sync = SyncConfig(mode="local_sgd", every=1 << 30 if alone else 32) if together else None
    side = Captured("small", runtime, sync=sync)
    with side.ranks:
        for _ in range(5):
            side.step()
        for _ in range(repeats):
            dist.barrier()
            start = time.perf_counter()
            seen = torch.tensor(float(sum(side.step() for _ in range(steps))))
            dist.all_reduce(seen)
            if rank == 0:
                results.put(float(seen) / (time.perf_counter() - start))
        dist.barrier()
        os._exit(0)  # the last settle and the teardown are no part of it


def _rates(size: int, alone: bool, steps: int, repeats: int) -> list[float]:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        given = [(rank, size, alone, f"{folder}/store", steps, repeats, results) for rank in range(size)]
        processes = [context.Process(target=_process, args=arguments, daemon=True) for arguments in given]
        for process in processes:
            process.start()
        found = [results.get(timeout=LIMIT_S) for _ in range(repeats)]
        for process in processes:
            process.join(timeout=10)
            process.kill()
    return found


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Three kinds of process groups in turn, so that each meets the machine as the others do."""
    steps, found = 64 if options.quick else 1280, {"one": [], "two": [], "apart": []}  # type: ignore[var-annotated]
    for _ in range(1 if options.quick else 3):
        for name, (size, alone) in {"one": (1, False), "two": (2, False), "apart": (2, True)}.items():
            found[name] += _rates(size, alone, steps, options.repeats)
    one, two, apart = (statistics.median(rates) for rates in found.values())
    yield {
        "name": "small-2-ranks",
        "baseline": round(one),
        "ours": round(two),
        "unit": "instances/s",
        "ratio": round(two / one, 2),
        "required": 1.5,
        "ceiling": round(apart / one, 2),
    }
