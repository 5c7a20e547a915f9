"""Rows `sync ...` of hybrid.py: how often two processes average, the speed of it against the HR@10 that it reaches.

The network is the second user's, NeuMF of the recipe `ncf`, on MovieLens 100K (TORCHREC_EXT_DATA): tables of 8 and 32
columns and an MLP 32-16-8, Adam for all of it, 256 positives with 4 negatives each for each process and step, without a
captured step. Sides:

    one process     on rank 0, the other idle
    two of them     which never talk, at the same time: the ceiling
    every step      gradients in every step
    local SGD       weights every 8, 32, 128 steps; tables are data_parallel, so that nothing is exchanged between
    DiLoCo          every 32 steps, outer rate 0.7, Nesterov momentum 0.9
    semi-sync       tables on one rank each, looked up a step ahead; dense gradients in every step

Speed: 128 steps of each side in turn in one pair of processes, medians. HR@10 and AUC over the whole catalogue, 10
epochs each: one process in batches of 256 positives, two in batches of 512, 256 each. 943 users are asked, so an HR@10
of .1 has a standard error of .01. A run that is not --quick draws results/sync.png beside this file.
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from hybrid_ranks import Options, Row, in_turn, on_ranks, row

from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sync import SyncConfig, synchronised
from torchrec_ext.train.loop import train
from torchrec_ext.train.step.pipeline import make_pipeline
from torchx_apps.cli.command_line import apply_overrides
from torchx_apps.jobs.training import load_task, quieten_libraries
from torchx_apps.recipes import ncf
from torchx_apps.tasks.job import Job

PICTURE = Path(__file__).parent / "results" / "sync.png"
POSITIVES, STEPS, EPOCHS = 256, 128, 10
NEVER = SyncConfig(mode="local_sgd", every=2**40)
MODES = {
    "every step": SyncConfig(),
    **{f"local SGD, {every}": SyncConfig(mode="local_sgd", every=every) for every in (8, 32, 128)},
    "DiLoCo, 32": SyncConfig(mode="diloco", every=32),
    "semi-sync": SyncConfig(mode="semi_sync"),
}
_IN_TURN = ("one process", "two of them")


def rows(options: Options) -> Iterator[Row]:
    """One row for each mode."""
    seconds = on_ranks(speeds, 2, options)[0]
    alone, together = (1 / seconds[name] for name in _IN_TURN)
    rate = POSITIVES * 5 * alone
    print(
        ", ".join(f"{name} {1e3 * took:.2f} ms a step" for name, took in seconds.items()), file=sys.stderr, flush=True
    )
    alone_reached = on_ranks(qualities, 1, {"one process": SyncConfig()}, options)[0]["one process"]
    reached = on_ranks(qualities, 2, MODES, options)[0]
    ceiling = 2 * together / alone
    found = [
        row(
            f"sync {name}",
            rate,
            2 * POSITIVES * 5 / seconds[name],
            "samples/s",
            2 / seconds[name] / alone,
            ceiling=ceiling,
            of_ceiling=round(1 / seconds[name] / together, 3),
            **{figure: round(reached[name][figure], 4) for figure in ("hr@10", "auc")},
            one_process={figure: round(alone_reached[figure], 4) for figure in ("hr@10", "auc")},
        )
        for name in MODES
    ]
    say(found, rate, alone_reached)
    if not options.quick:
        draw(found, alone_reached["hr@10"], ceiling)
    yield from found


def job_of(sync: SyncConfig, ranks: int, quick: bool) -> Job:
    overrides = [
        f"data.name={'planted' if quick else 'ml-100k'}",
        f"loader.batch_size={POSITIVES * ranks}",
        "train.compile=off",
    ]
    overrides += [f"train.epochs={1 if quick else EPOCHS}", "train.log_every=100000"]
    if sync.looks_ahead:
        overrides += ["plan.sharding=table_wise"]
    return dataclasses.replace(apply_overrides(ncf(), overrides), sync=sync)


def built(runtime: Runtime, job: Job, task: Any) -> tuple[Any, Any, Any]:
    """(schema, sharded model, its optimizer)."""
    torch.manual_seed(job.train.seed)
    model = job.build(job.model, task.data)
    schema = model.schema()
    plan = plan_sharding(model, runtime, job.plan, optimizer=job.optimizer)
    return schema, *hybrid_parallel(model, runtime, plan=plan, optimizer=job.optimizer, seed=job.train.seed)


def qualities(runtime: Runtime, modes: dict[str, SyncConfig], options: Options) -> dict[str, dict[str, float]]:
    """HR@10 and AUC on the test items after the last epoch, by mode."""
    quieten_libraries()
    task = load_task(job_of(SyncConfig(), runtime.world_size, options.quick), runtime)
    found = {}
    for name, sync in modes.items():
        job = job_of(sync, runtime.world_size, options.quick)
        schema, parallel, optimizer = built(runtime, job, task)
        loader = task.loader(schema, job.loader, rank=runtime.rank, world_size=runtime.world_size)
        evaluator = task.evaluator(schema, parallel, runtime)
        train(parallel, optimizer, loader, runtime, job.train, sync=sync)
        found[name] = evaluator.test()
        if runtime.is_main:
            print(
                f"{name}: hr@10 {found[name]['hr@10']:.4f}, auc {found[name]['auc']:.4f}", file=sys.stderr, flush=True
            )
    return found


def speeds(runtime: Runtime, options: Options) -> dict[str, float]:
    """Seconds of a step of each side, batches in memory."""
    quieten_libraries()
    task = load_task(job_of(NEVER, runtime.world_size, options.quick), runtime)
    sides = {name: side(runtime, NEVER, options, task) for name in _IN_TURN}
    sides |= {name: side(runtime, sync, options, task) for name, sync in MODES.items()}
    if runtime.rank:
        sides["one process"] = lambda: None
    return in_turn(sides, options.repeats, 4 if options.quick else STEPS)


def side(runtime: Runtime, sync: SyncConfig, options: Options, task: Any) -> Callable[[], object]:
    """A step of a mode; its context is entered here and never left, so that ranks that never meet need not."""
    job = job_of(sync, runtime.world_size, options.quick)
    schema, parallel, optimizer = built(runtime, job, task)
    loader = task.loader(schema, job.loader, rank=runtime.rank, world_size=runtime.world_size)
    kept = [batch for batch, _ in zip(loader, range(16), strict=False)]
    feed: Iterator[TowerBatch] = chain.from_iterable(repeat(kept))
    synchronised(parallel, optimizer, sync).__enter__()
    pipeline = make_pipeline(parallel, optimizer, runtime.device, sync=sync)
    for _ in range(3):  # the first steps are taken together, and DDP tells the ranks its buckets
        pipeline.progress(feed)
    return lambda: pipeline.progress(feed)


def say(found: list[Row], rate: float, alone: dict[str, float]) -> None:
    """The table as Markdown."""
    lines = [
        "| ranks average | samples/s | against one process | share of the ceiling | HR@10 | AUC |",
        "|---|---|---|---|---|---|",
    ]
    lines.append(f"| one process | {rate:,.0f} | 1.00x | | {alone['hr@10']:.4f} | {alone['auc']:.4f} |")
    for one in found:
        name = str(one["name"]).removeprefix("sync ")
        speed = f"{one['ours']:,.0f} | {one['ratio']:.2f}x | {one['of_ceiling']:.2f}"
        lines.append(f"| {name} | {speed} | {one['hr@10']:.4f} | {one['auc']:.4f} |")
    print("\n".join(lines), file=sys.stderr)


def draw(found: list[Row], alone: float, ceiling: float) -> None:
    """Speed against HR@10, with the standard error of one process's."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    error = math.sqrt(alone * (1 - alone) / 943)
    axes.axhspan(alone - error, alone + error, color="0.9", label="one process, one standard error")
    axes.axvline(ceiling, color="0.5", linestyle="--", label="two processes that never talk")
    points = [
        ("one process", 1.0, alone),
        *((str(one["name"]).removeprefix("sync "), one["ratio"], one["hr@10"]) for one in found),
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
