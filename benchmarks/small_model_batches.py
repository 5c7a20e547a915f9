"""Row `larger-batches` of benchmarks/small_model.py: speed against HR@10 as the batch grows, on MovieLens 100K.

The network is the recipe `ncf`'s with its loader, negatives and evaluation over the whole catalogue; one process, eager
steps, equal epochs. Learning rates are those of 256 positives, times the square root of how many times larger the batch
is, or times that; both rise over the first epoch. 943 users are asked, so an HR@10 of .1 has a standard error of .01.
MovieLens is read from TORCHREC_EXT_DATA; without it the rows are left out.
"""

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Iterator

import torch
from harness import Options, Row, has_data, row

from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.config import Schedule
from torchrec_ext.train.loop import train
from torchx_apps.config import with_settings
from torchx_apps.jobs.setup import load_task, quieten_libraries
from torchx_apps.recipes import ncf
from torchx_apps.tasks.job import Job

SMALLEST, SIZES, EPOCHS = 256, (256, 1024, 4096, 16384), 10
SCALINGS = {"sqrt": math.sqrt, "linear": float}


def job_of(size: int, factor: float, warmup: int, *, quick: bool) -> Job:
    job = with_settings(
        ncf(),
        [
            f"data.name={'planted' if quick else 'ml-100k'}",
            f"loader.batch_size={size}",
            f"train.epochs={1 if quick else EPOCHS}",
            "train.compile=off",
            "train.log_every=100000",
        ],
    )
    rates = {
        name: getattr(job.optimizer, name) * factor
        for name in ("tables_lr", "dense_lr")
    }
    schedules = {
        name: Schedule(warmup=warmup) for name in ("tables_schedule", "dense_schedule")
    }
    return dataclasses.replace(
        job,
        optimizer=dataclasses.replace(job.optimizer, **rates),
        train=dataclasses.replace(job.train, **schedules),
    )


def trained(
    runtime: Runtime, size: int, factor: float, *, quick: bool
) -> tuple[float, float]:
    """Instances per second, its loader's work included, and HR@10 on the test items."""
    job = job_of(size, factor, 0, quick=quick)
    task = load_task(job, runtime)
    torch.manual_seed(job.train.seed)
    model = job.build(job.model, task.data)
    schema = model.schema()
    loader = task.loader(schema, job.loader, rank=0, world_size=1)
    if size > SMALLEST:
        job = job_of(
            size,
            factor,
            min(len(loader), len(loader) * job.train.epochs - 1),
            quick=quick,
        )
    plan = plan_sharding(model, runtime, job.plan, optimizer=job.optimizer)
    parallel, optimizer = hybrid_parallel(
        model, runtime, plan=plan, optimizer=job.optimizer, seed=job.train.seed
    )
    evaluator = task.evaluator(schema, parallel, runtime)
    start = time.perf_counter()
    history = train(parallel, optimizer, loader, runtime, job.train)
    seconds = time.perf_counter() - start
    return sum(
        record["rows"] for record in history if record["kind"] == "train"
    ) / seconds, evaluator.test()["hr@10"]


def rows(options: Options) -> Iterator[Row]:
    """Yields one row for each size and scaling, the speed against that of the smallest."""
    if not (options.quick or has_data("larger-batches", "ml-100k")):
        return
    first: tuple[float, float] | None = None
    with (
        Runtime.start("cpu", threads=1) as runtime,
        contextlib.redirect_stdout(sys.stderr),
    ):
        quieten_libraries()
        for size in SIZES[:2] if options.quick else SIZES:
            for name, scaling in (
                SCALINGS.items() if size > SMALLEST else [("as it is", float)]
            ):
                rate, hit = trained(
                    runtime, size, scaling(size / SMALLEST), quick=options.quick
                )
                first = first or (rate, hit)
                figures = {"hr@10": round(hit, 4), "hr@10 at 256": round(first[1], 4)}
                title = f"larger-batches, {size} positives, {name}"
                yield row(
                    title,
                    rate,
                    "instances/s",
                    baseline=first[0],
                    better="more",
                    **figures,
                )
