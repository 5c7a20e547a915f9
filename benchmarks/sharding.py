"""Several ranks: how often they meet, and through which medium.

    python benchmarks/sharding.py [--only ROW ...] [--turns 3] [--quick]

`sync ...`: NeuMF of the recipe `ncf` on MovieLens 100K (TORCHREC_EXT_DATA; without it the rows are left out), 256
positives with 4 negatives each for each process and step. One process runs a plain PyTorch loop over the unsharded
network with fused Adam; two ranks run train() and meet in every step, or average their weights every 8, 32 or 128
steps, or by DiLoCo every 32 (outer rate 0.7, Nesterov momentum 0.9). The ceiling is the loop in two processes that
never talk.
`shared memory, ...`: the same with collectives over memory that two ranks share, against gloo, each a job of its own.
"""

from __future__ import annotations

import dataclasses
import sys

import torch
import torch.distributed as dist
from harness import (
    Counted,
    Trainings,
    command_line,
    has_data,
    looping,
    milliseconds,
    never_talk,
    on_ranks,
    rates,
    row,
    slowest,
)

from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.shared_memory.library import LibraryError, load
from torchrec_ext.distributed.sync import SyncConfig
from torchrec_ext.train.guards import RunStoppedError
from torchrec_ext.train.loop import train
from torchx_apps.config import changed
from torchx_apps.jobs.setup import load_task, quieten_libraries
from torchx_apps.recipes import ncf

POSITIVES, ENDLESS = 256, 100_000
MODES = {"every step": SyncConfig()}
for _every in (8, 32, 128):
    MODES[f"local SGD, {_every}"] = SyncConfig(mode="local_sgd", every=_every)
MODES["DiLoCo, 32"] = dataclasses.replace(
    MODES["local SGD, 32"], outer_lr=0.7, outer_momentum=0.9
)


def job_of(sync, ranks, quick):
    overrides = [
        f"--data.name={'planted' if quick else 'ml-100k'}",
        f"--loader.batch_size={POSITIVES * ranks}",
        "--train.compile=off",
        f"--train.epochs={ENDLESS}",
    ]
    return dataclasses.replace(changed(ncf(), overrides), sync=sync)


def plain(quick, task):
    """The unsharded network in a loop of one's own, with the batches of one process."""
    job = job_of(SyncConfig(), 1, quick)
    torch.manual_seed(job.train.seed)
    model = job.build(job.model, task.data)
    loader = task.loader(model.schema(), job.loader, rank=0, world_size=1)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.01)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

    def endless():
        for epoch in range(ENDLESS):
            loader.set_epoch(epoch)
            yield from loader

    feed = endless()

    def step():
        optimizer.zero_grad()
        model(next(feed))[0].backward()
        optimizer.step()

    return looping(step)


def trained(runtime, sync, quick, task):
    """`train()` in a mode, and its loader. It ends by an error: ranks that meet seldom would not hear of a stop."""
    job = job_of(sync, runtime.world_size, quick)
    torch.manual_seed(job.train.seed)
    model = job.build(job.model, task.data)
    schema = model.schema()
    plan = plan_sharding(model, runtime, job.plan, optimizer=job.optimizer)
    options = {"optimizer": job.optimizer, "seed": job.train.seed}
    parallel, optimizer = hybrid_parallel(model, runtime, plan=plan, **options)
    place = {"rank": runtime.rank, "world_size": runtime.world_size}
    loader = Counted(task.loader(schema, job.loader, **place))

    def side(stop):
        def stopping():
            if stop():
                raise RunStoppedError("the benchmark is over")
            return False

        train(parallel, optimizer, loader, runtime, job.train, sync=sync, stop=stopping)

    return side, loader


def speeds(runtime, options):
    """Seconds of a step of each side by turn."""
    quieten_libraries()
    task = load_task(job_of(SyncConfig(), 2, options.quick), runtime)
    one = plain(options.quick, task)
    sides = {
        "one process": one if runtime.is_main else looping(lambda: None),
        "two of them": plain(options.quick, task),
    }
    loaders = {}
    for name, sync in MODES.items():
        sides[name], loaders[name] = trained(runtime, sync, options.quick, task)
    trainings = Trainings(sides, before=dist.barrier, loaders=loaders)
    # A turn is about two epochs, whose end takes as long as ten steps.
    steps = 16 if options.quick else 384
    times = trainings.seconds_per_step(steps, options.turns, warm_up=16)
    trainings.close()
    return times


def sync(options):
    """One row for each mode: its speed."""
    if not (options.quick or has_data("sync", "ml-100k")):
        return
    seconds = slowest(on_ranks(speeds, 2, options))
    alone = seconds["one process"]
    ceiling = never_talk(alone, seconds["two of them"])
    baseline = rates(POSITIVES * 5, alone)
    for name in MODES:
        ours = rates(2 * POSITIVES * 5, seconds[name])
        more = {"better": "more", "ceiling": ceiling}
        yield row(f"sync {name}", ours, "samples/s", baseline=baseline, **more)


def every_step(runtime, options):
    """Seconds of a step of ranks that meet in every one, of one turn."""
    quieten_libraries()
    task = load_task(job_of(SyncConfig(), 2, options.quick), runtime)
    side, loader = trained(runtime, SyncConfig(), options.quick, task)
    loaders = {"every step": loader}
    trainings = Trainings({"every step": side}, before=dist.barrier, loaders=loaders)
    steps = 5 if options.quick else 200
    times = trainings.seconds_per_step(steps, 1, warm_up=20)
    trainings.close()
    return times


def shared_memory(options):
    """Milliseconds of the slower rank."""
    if not (options.quick or has_data("shared-memory", "ml-100k")):
        return
    try:
        load()
    except LibraryError as error:
        print(f"shared-memory: left out: {error}", file=sys.stderr)
        return
    times = {"shared_memory": [], "gloo": []}
    for _ in range(options.turns):
        for medium, turns in times.items():
            by_rank = on_ranks(every_step, 2, options, collectives=medium)
            turns += milliseconds(slowest(by_rank)["every step"])
    ours, gloo = times.values()
    name = "shared memory, NeuMF every step, against gloo"
    yield row(name, ours, "ms a step", baseline=gloo)


ROWS = {"sync": sync, "shared-memory": shared_memory}


if __name__ == "__main__":
    command_line(__doc__, ROWS)
