"""Several ranks: how often they meet, through which medium, and what saving their shards costs.

    python benchmarks/sharding.py [--only ROW ...] [--turns 3] [--quick]

`sync ...`: NeuMF of the recipe `ncf` on MovieLens 100K (TORCHREC_EXT_DATA; without it the rows are left out), 256
positives with 4 negatives each for each process and step. One process runs a plain PyTorch loop over the unsharded
network with fused Adam; two ranks run train() and meet in every step, or average their weights every 8, 32 or 128
steps, or by DiLoCo every 32 (outer rate 0.7, Nesterov momentum 0.9). The ceiling is the loop in two processes that
never talk.
`shared memory, ...`: collectives over memory that two ranks share, against the same over gloo, in one pair of
processes: TorchRec's DMP alone (8 tables of 10,000 x 32, table-wise, 512 rows a rank), and NeuMF as above.
`save`: two towers with a table of items of 1 GiB, row_wise over 2 ranks. Seconds of a hundred steps of train() that end
with a checkpoint, against the same without one; `save_costs_ms` is what it adds.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import tempfile
import time
from itertools import cycle

import numpy as np
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
from torch.distributed.optim import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan

from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.distributed import share_memory
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import calm_gloo
from torchrec_ext.distributed.shared_memory.library import LibraryError, load
from torchrec_ext.distributed.sync import SyncConfig
from torchrec_ext.models.tower_model import two_tower
from torchrec_ext.train.checkpoint.checkpointer import Checkpointer
from torchrec_ext.train.checkpoint.run import CheckpointConfig, RunCheckpoints
from torchrec_ext.train.guards import RunStoppedError
from torchrec_ext.train.loop import TrainConfig, train
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


CPU = torch.device("cpu")
MEDIA = {"shared": True, "gloo": False}
COLUMNS, TABLES, TABLE_ROWS, BAGS_BATCH = 32, 8, 10_000, 512


class Switch:
    """Puts the collectives of all ranks over gloo or over shared memory; every rank switches between the same two."""

    def __init__(self):
        assert dist.group.WORLD is not None
        self._group = dist.group.WORLD
        self._gloo = self._group._get_backend(CPU)
        assert share_memory()
        self._shared = self._group._get_backend(CPU)

    def to(self, *, shared):
        """Takes shared memory, or gloo."""
        kinds = dist.ProcessGroup.BackendType
        kind, backend = (
            (kinds.CUSTOM, self._shared) if shared else (kinds.GLOO, self._gloo)
        )
        self._group._register_backend(CPU, kind, backend)

    def over(self, side, *, shared):
        """Returns ``side``, whose turns are over shared memory or over gloo."""

        def switched(stop):
            self.to(shared=shared)

            def after_step():
                stopped = stop()
                # Another side may have had its turn meanwhile.
                self.to(shared=shared)
                return stopped

            return side(after_step)

        return switched


def bags_in_dmp(rank):
    torch.manual_seed(0)
    names = [f"table_{at}" for at in range(TABLES)]
    sizes = {"num_embeddings": TABLE_ROWS, "embedding_dim": COLUMNS}
    tables = [
        EmbeddingBagConfig(name=name, feature_names=[name], **sizes) for name in names
    ]
    bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.Adagrad, bags.parameters(), {"lr": 0.01})
    sharder = EmbeddingBagCollectionSharder()
    wise = {name: table_wise(rank=at % 2) for at, name in enumerate(names)}
    where = {"local_size": 2, "world_size": 2, "device_type": "cpu", "sharder": sharder}
    plan = construct_module_sharding_plan(bags, per_param_sharding=wise, **where)
    options = {"plan": ShardingPlan({"": plan}), "sharders": [sharder]}
    model = DistributedModelParallel(bags, device=CPU, **options)
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.ones(TABLES * BAGS_BATCH, dtype=torch.long)
    batches = []
    for _ in range(8):
        ids = torch.randint(TABLE_ROWS, lengths.shape, generator=generator)
        batches.append(KeyedJaggedTensor(names, ids, lengths=lengths))
    feed = cycle(batches)
    return looping(lambda: model(next(feed)).values().square().mean().backward())


def over_media(runtime, options):
    """Seconds of a step of each program over gloo and over shared memory, by turn."""
    quieten_libraries()
    task = None
    if options.quick or has_data("shared-memory", "ml-100k"):
        task = load_task(job_of(SyncConfig(), 2, options.quick), runtime)
    sides = {}
    for medium, shared in MEDIA.items():
        sides[f"TorchRec's DMP, {medium}"] = bags_in_dmp(runtime.rank), shared
        if task is not None:
            side, _ = trained(runtime, SyncConfig(), options.quick, task)
            sides[f"NeuMF every step, {medium}"] = side, shared
    switch = Switch()
    calm_gloo()
    switched = {
        name: switch.over(side, shared=shared) for name, (side, shared) in sides.items()
    }
    trainings = Trainings(switched, before=dist.barrier)
    steps = 5 if options.quick else 200
    times = trainings.seconds_per_step(steps, options.turns, warm_up=20)
    trainings.close()
    return times


def shared_memory(options):
    """One row for each program: milliseconds of the slower rank."""
    try:
        load()
    except LibraryError as error:
        print(f"shared-memory: left out: {error}", file=sys.stderr)
        return
    seconds = slowest(on_ranks(over_media, 2, options, collectives="gloo"))
    for name in [name for name in seconds if name.endswith(", gloo")]:
        program = name.removesuffix(", gloo")
        ours, gloo = (milliseconds(seconds[f"{program}, {medium}"]) for medium in MEDIA)
        name = f"shared memory, {program}, against gloo"
        yield row(name, ours, "ms a step", baseline=gloo)


DIM, ROWS_A_RANK, PEOPLE = 64, 4096, 10_000
EVERY = 100  # steps between two saves


class Built:
    """Two towers over ``rows`` items, sharded over the ranks, and their optimizer."""

    def __init__(self, runtime, rows):
        tables = [
            EmbeddingBagConfig(
                name=name, feature_names=[name], num_embeddings=count, embedding_dim=DIM
            )
            for name, count in (("user_id", PEOPLE), ("item_id", rows))
        ]
        widths = {"tower_widths": (64, 32), "top_widths": (32,)}
        meta = torch.device("meta")
        model = two_tower(tables[:1], tables[1:], device=meta, **widths)
        self.schema = model.schema()
        sgd = OptimizerConfig(tables="sgd", tables_lr=0.01)
        row_wise = PlanConfig(sharding="row_wise")
        plan = plan_sharding(model, runtime, row_wise, optimizer=sgd)
        self.model, self.optimizer = hybrid_parallel(
            model, runtime, plan=plan, optimizer=sgd
        )

    def loader(self, runtime, rows, steps):
        """Returns a loader of so many steps."""
        rng = np.random.default_rng(0)
        count = 2 * ROWS_A_RANK * steps
        columns = {
            "user_id": Column(rng.integers(0, PEOPLE, count)),
            "item_id": Column(rng.integers(0, rows, count)),
            "label": Column((rng.random(count) < 0.3).astype(np.float32)),
        }
        config = LoaderConfig(batch_size=2 * ROWS_A_RANK, negatives=0, label="label")
        place = {"rank": runtime.rank, "world_size": runtime.world_size}
        return ChunkLoader(
            Chunk(columns), self.schema, config=config, device="cpu", **place
        )


def run_of(built, runtime, folder, rows, saves):
    """Seconds of EVERY steps of train(), the last of which saves, if asked for."""
    config = CheckpointConfig(epochs=0, steps=EVERY if saves else 0, keep=1)
    checkpoints = RunCheckpoints(Checkpointer(folder, runtime, keep=1), config)
    batches = built.loader(runtime, rows, EVERY)
    settings = TrainConfig(epochs=1)
    os.sync()  # what was deleted or written before is not this side's
    dist.barrier()
    start = time.perf_counter()
    train(
        built.model,
        built.optimizer,
        batches,
        runtime,
        settings,
        checkpoints=checkpoints,
    )
    return time.perf_counter() - start


def saving(runtime, rows, folder, turns):
    """Seconds of EVERY steps without a save and with one, by turn."""
    built = Built(runtime, rows)
    figures = {"plain": [], "saved": []}
    run_of(built, runtime, f"{folder}/warm-up", rows, saves=False)
    for turn in range(turns):
        for name, each in figures.items():
            run = f"{folder}/{turn}-{name}"
            each.append(run_of(built, runtime, run, rows, saves=name == "saved"))
    return figures


def saves(options):
    rows = (2**26 if options.quick else 2**30) // (4 * DIM)
    with tempfile.TemporaryDirectory() as folder:
        slow = slowest(on_ranks(saving, 2, rows, folder, options.turns))
    plain, saved = (statistics.median(slow[side]) for side in ("plain", "saved"))
    costs = {"save_costs_ms": round(1e3 * (saved - plain), 1)}
    yield row("save", slow["saved"], "s", baseline=slow["plain"], **costs)


ROWS = {"sync": sync, "shared-memory": shared_memory, "saves": saves}


if __name__ == "__main__":
    command_line(__doc__, ROWS)
