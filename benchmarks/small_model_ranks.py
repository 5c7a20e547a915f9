"""Row `small-2-ranks` of small_model.py: two ranks that average every 32 steps, against one, and two that never talk.

Five processes: one, two ranks of one job, and two jobs of one rank. Each is a call of train(), captured by
`train.compile=auto`; the one, the two ranks and the two apart have their turns while the others wait.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from harness import (
    LIMIT_S,
    Counted,
    Options,
    Row,
    Trainings,
    on_ranks,
    rates,
    row,
    slowest,
)
from small_model_baseline import BATCH, NEGATIVES, SHAPES
from small_model_training import Side, loader_of, network, training

from torchrec_ext.capture.policy import PATIENCE
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sync import SyncConfig

SIDES = ("one", "two", "apart")
EVERY = 32
# over the rows before the clock starts: then the step of a pass's last batch is
# captured too
PASSES = PATIENCE + 2


def _waiting(stop: Callable[[], bool]) -> None:
    """Does nothing while another process has its turn."""
    while not stop():
        pass


def process(
    runtime: Runtime, side: str, steps: int, turns: int, warm_up: int, barrier: Any
) -> dict[str, list[float]]:
    """Returns the seconds of a step of the process's own side, by turn."""
    model = network(SHAPES["small"])
    loader = Counted(
        loader_of(
            SHAPES["small"], model, rank=runtime.rank, world_size=runtime.world_size
        )
    )
    sync = SyncConfig(mode="local_sgd", every=EVERY) if side == "two" else None
    sides: dict[str, Side] = dict.fromkeys(SIDES, _waiting)
    sides[side] = training(model, loader, runtime, sync=sync)
    trainings = Trainings(
        sides, before=lambda: barrier.wait(LIMIT_S), loaders={side: loader}
    )
    seconds = trainings.seconds_per_step(steps, turns, warm_up=warm_up)[side]
    trainings.close()
    return {side: seconds}


def rows(options: Options) -> Iterator[Row]:
    """Yields the row: instances a second of all ranks of a side together."""
    steps = EVERY * (4 if options.quick else 60)
    warm_up = steps if options.quick else PASSES * -(-SHAPES["small"].rows // BATCH)
    barrier = multiprocessing.get_context("spawn").Barrier(5)
    jobs = [("one", 1), ("two", 2), ("apart", 1), ("apart", 1)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        started = [
            pool.submit(
                on_ranks, process, size, side, steps, options.turns, warm_up, barrier
            )
            for side, size in jobs
        ]
        one, two, *apart = [job.result(LIMIT_S) for job in started]
    count = BATCH * (1 + NEGATIVES)
    baseline = rates(count, slowest(one)["one"])
    together = rates(2 * count, slowest([*apart[0], *apart[1]])["apart"])
    ceiling = sorted(
        pair / single for pair, single in zip(together, baseline, strict=True)
    )[len(baseline) // 2]
    ours = rates(2 * count, slowest(two)["two"])
    yield row(
        "small-2-ranks",
        ours,
        "instances/s",
        baseline=baseline,
        better="more",
        required=1.5,
        ceiling=ceiling,
    )
