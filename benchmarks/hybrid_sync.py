"""Rows `sync ...` of hybrid.py: how often two processes average, the speed of it, and the HR@10 that it reaches.

The network is the second user's, NeuMF of the recipe `ncf`, on MovieLens 100K (TORCHREC_EXT_DATA; without it the rows
are left out): tables of 8 and 32 columns and an MLP 32-16-8, Adam for all of it, 256
positives with 4 negatives each for each process and step. Sides, each with the recipe's loader:

    one process     a plain PyTorch loop over the unsharded network with fused Adam on rank 0, the other idle
    two of them     that loop on both ranks at the same time, which never talk: the ceiling
    every step      `train()`, gradients in every step
    local SGD       `train()`, weights every 8, 32, 128 steps; tables are data_parallel, so that nothing is exchanged
                    between, and steps are not captured
    DiLoCo          `train()`, every 32 steps, outer rate 0.7, Nesterov momentum 0.9

`sync` measures steps of all sides in turn in one pair of processes. `sync-quality` is a study: HR@10 and AUC over the
whole catalogue after 10 epochs of each mode, one process in batches of 256 positives, two in batches of 512, 256 each.
943 users are asked, so an HR@10 of .1 has a standard error of .01. It draws results/sync.png beside this file.
"""

import dataclasses
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import (
    Counted,
    Options,
    Row,
    Trainings,
    has_data,
    on_ranks,
    rates,
    row,
    slowest,
)
from hybrid_training import Side, Stop, looping

from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sync import SyncConfig
from torchrec_ext.train.guards.finite import RunStoppedError
from torchrec_ext.train.loop import train
from torchx_apps.config import with_settings
from torchx_apps.jobs.setup import load_task, quieten_libraries
from torchx_apps.recipes import ncf
from torchx_apps.tasks.job import Job

PICTURE = Path(__file__).parent / "results" / "sync.png"
# A turn is about two epochs of 192 steps, rounds of every mode among them: an epoch's
# end takes as long as ten steps.
POSITIVES, STEPS, EPOCHS, ENDLESS = 256, 384, 10, 100_000
ROWS_A_STEP = POSITIVES * 5
MODES = {
    "every step": SyncConfig(),
    **{
        f"local SGD, {every}": SyncConfig(mode="local_sgd", every=every)
        for every in (8, 32, 128)
    },
    "DiLoCo, 32": SyncConfig(
        mode="local_sgd", every=32, outer_lr=0.7, outer_momentum=0.9
    ),
}


def rows(options: Options) -> Iterator[Row]:
    """One row for each mode: its speed."""
    if not (options.quick or has_data("sync", "ml-100k")):
        return
    seconds = slowest(on_ranks(speeds, 2, options))
    alone, together = seconds["one process"], seconds["two of them"]
    ceiling = statistics.median(
        2 * one / two for one, two in zip(alone, together, strict=True)
    )
    for name in MODES:
        of_ceiling = [
            two / mode for two, mode in zip(together, seconds[name], strict=True)
        ]
        yield row(
            f"sync {name}",
            rates(2 * ROWS_A_STEP, seconds[name]),
            "samples/s",
            baseline=rates(ROWS_A_STEP, alone),
            better="more",
            ceiling=ceiling,
            machine="cores",
            of_ceiling=round(statistics.median(of_ceiling), 3),
        )


def quality(options: Options) -> Iterator[Row]:
    """One row for each mode: its speed, HR@10 and AUC; draws the picture."""
    if not (options.quick or has_data("sync-quality", "ml-100k")):
        return
    alone = on_ranks(qualities, 1, {"one process": SyncConfig()}, options)[0][
        "one process"
    ]
    reached = on_ranks(qualities, 2, MODES, options)[0]
    made = [
        {
            **one,
            "name": str(one["name"]).replace("sync ", "sync-quality "),
            **{figure: round(reached[name][figure], 4) for figure in ("hr@10", "auc")},
            "one_process": {
                figure: round(alone[figure], 4) for figure in ("hr@10", "auc")
            },
        }
        for name, one in zip(MODES, rows(options), strict=True)
    ]
    say(made, alone)
    if not options.quick:
        draw(made, alone["hr@10"])
    yield from made


def job_of(sync: SyncConfig, ranks: int, quick: bool, epochs: int) -> Job:
    overrides = [
        f"data.name={'planted' if quick else 'ml-100k'}",
        f"loader.batch_size={POSITIVES * ranks}",
        "train.compile=off",
        f"train.epochs={epochs}",
    ]
    return dataclasses.replace(with_settings(ncf(), overrides), sync=sync)


def built(runtime: Runtime, job: Job, task: Any) -> tuple[Any, Any, Any]:
    """(schema, sharded model, its optimizer)."""
    torch.manual_seed(job.train.seed)
    model = job.build(job.model, task.data)
    schema = model.schema()
    plan = plan_sharding(model, runtime, job.plan, optimizer=job.optimizer)
    return schema, *hybrid_parallel(
        model, runtime, plan=plan, optimizer=job.optimizer, seed=job.train.seed
    )


def qualities(
    runtime: Runtime, modes: dict[str, SyncConfig], options: Options
) -> dict[str, dict[str, float]]:
    """HR@10 and AUC on the test items after the last epoch, by mode."""
    quieten_libraries()
    epochs = 1 if options.quick else EPOCHS
    task = load_task(
        job_of(SyncConfig(), runtime.world_size, options.quick, epochs), runtime
    )
    reached = {}
    for name, sync in modes.items():
        job = job_of(sync, runtime.world_size, options.quick, epochs)
        schema, parallel, optimizer = built(runtime, job, task)
        loader = task.loader(
            schema, job.loader, rank=runtime.rank, world_size=runtime.world_size
        )
        evaluator = task.evaluator(schema, parallel, runtime)
        train(parallel, optimizer, loader, runtime, job.train, sync=sync)
        reached[name] = evaluator.test()
        if runtime.is_main:
            figures = ", ".join(
                f"{figure} {reached[name][figure]:.4f}" for figure in ("hr@10", "auc")
            )
            print(f"{name}: {figures}", file=sys.stderr, flush=True)
    return reached


def speeds(runtime: Runtime, options: Options) -> dict[str, list[float]]:
    """Seconds of a step of each side by turn."""
    quieten_libraries()
    task = load_task(
        job_of(SyncConfig(), runtime.world_size, options.quick, ENDLESS), runtime
    )
    one = plain(options, task)
    sides = {
        "one process": one if runtime.is_main else looping(lambda: None),
        "two of them": plain(options, task),
    }
    loaders = {}
    for name, sync in MODES.items():
        sides[name], loaders[name] = side(runtime, sync, options, task)
    trainings = Trainings(sides, before=dist.barrier, loaders=loaders)
    times = trainings.seconds_per_step(
        16 if options.quick else STEPS, options.turns, warm_up=16
    )
    trainings.close()
    return times


def plain(options: Options, task: Any) -> Side:
    """The unsharded network in a loop of one's own, with the batches of one process."""
    job = job_of(SyncConfig(), 1, options.quick, ENDLESS)
    torch.manual_seed(job.train.seed)
    model = job.build(job.model, task.data)
    loader = task.loader(model.schema(), job.loader, rank=0, world_size=1)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.01)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

    def endless() -> Iterator[TowerBatch]:
        for epoch in range(ENDLESS):
            loader.set_epoch(epoch)
            yield from loader

    feed = endless()

    def step() -> None:
        optimizer.zero_grad()
        model(next(feed))[0].backward()
        optimizer.step()

    return looping(step)


def side(
    runtime: Runtime, sync: SyncConfig, options: Options, task: Any
) -> tuple[Side, Counted]:
    """`train()` in a mode, and its loader. It ends by an error: ranks that meet seldom would not hear of a stop."""
    job = job_of(sync, runtime.world_size, options.quick, ENDLESS)
    schema, parallel, optimizer = built(runtime, job, task)
    loader = Counted(
        task.loader(
            schema, job.loader, rank=runtime.rank, world_size=runtime.world_size
        )
    )

    def trained(stop: Stop) -> None:
        def stopping() -> bool:
            if stop():
                raise RunStoppedError("the benchmark is over")
            return False

        train(parallel, optimizer, loader, runtime, job.train, sync=sync, stop=stopping)

    return trained, loader


def say(made: list[Row], alone: dict[str, float]) -> None:
    """The table as Markdown."""
    lines = [
        "| ranks average | samples/s | against one process | share of the ceiling | HR@10 | AUC |",
        "|---|---|---|---|---|---|",
    ]
    rate = made[0]["baseline"]
    lines.append(
        f"| one process | {rate:,.0f} | 1.00x | | {alone['hr@10']:.4f} | {alone['auc']:.4f} |"
    )
    for one in made:
        name = str(one["name"]).removeprefix("sync-quality ")
        speed = f"{one['ours']:,.0f} | {one['ratio']:.2f}x | {one['of_ceiling']:.2f}"
        lines.append(f"| {name} | {speed} | {one['hr@10']:.4f} | {one['auc']:.4f} |")
    print("\n".join(lines), file=sys.stderr)


def draw(made: list[Row], alone: float) -> None:
    """Speed against HR@10, with the standard error of one process's."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    error = math.sqrt(alone * (1 - alone) / 943)
    axes.axhspan(
        alone - error,
        alone + error,
        color="0.9",
        label="one process, one standard error",
    )
    axes.axvline(
        float(str(made[0]["ceiling"])),
        color="0.5",
        linestyle="--",
        label="two processes that never talk",
    )
    points = [
        ("one process", 1.0, alone),
        *(
            (str(one["name"]).removeprefix("sync-quality "), one["ratio"], one["hr@10"])
            for one in made
        ),
    ]
    for name, ratio, hit in points:
        axes.plot(ratio, hit, "o")
        axes.annotate(name, (ratio, hit), textcoords="offset points", xytext=(5, 5))
    axes.set(
        xlabel="samples/s over those of one process",
        ylabel="HR@10, whole catalogue",
        title="NeuMF, MovieLens 100K, 2 processes",
    )
    axes.margins(x=0.2, y=0.1)  # room for the names
    axes.legend(loc="best", fontsize="small")
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=120, bbox_inches="tight")
