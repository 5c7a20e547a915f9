"""run(): data, model and ranks meet here: load, plan, shard, train, evaluate, report, export.

What ``plan.towers=auto`` becomes: measured on the ranks of the job, before anything is sharded.

Whether a job looks up the tables of all its towers together.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import resource
import statistics
import time
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan

from torchrec_ext.data.datasets.catalog import DatasetUnavailable
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.data.loader.epochs import Epochs
from torchrec_ext.data.loader.id_dropout import IdDropout
from torchrec_ext.distributed.autotune.choose import EVERYWHERE, Decision, auto_plan
from torchrec_ext.distributed.optim.hybrid import HybridOptimizer
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.explain import explain
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.streams import on_streams
from torchrec_ext.distributed.tables import collections, table_configs
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.schema import BatchSchema
from torchrec_ext.train.checkpoint.checkpointer import Checkpointer
from torchrec_ext.train.checkpoint.folder import Together
from torchrec_ext.train.checkpoint.run import RunCheckpoints, begin_with
from torchrec_ext.train.checkpoint.vectors import load_vectors
from torchrec_ext.train.config import Record
from torchrec_ext.train.guards.watchdog import Watchdog
from torchrec_ext.train.loop import train
from torchrec_ext.train.metrics import EvaluationWatch, watching
from torchrec_ext.train.report.progress import RunFolder
from torchrec_ext.train.step.pipeline import shard_free_tables
from torchx_apps.cli.errors import end_process
from torchx_apps.jobs import report
from torchx_apps.jobs.resuming import (
    CHECKPOINTS,
    LAUNCH,
    asked_to_stop,
    find_checkpoint,
    launch_id,
    newest_run,
    restarted,
    resume_from,
    telling_how_to_go_on,
    where_to_begin,
)
from torchx_apps.tasks.export_data import NamedData
from torchx_apps.tasks.job import Evaluator, Job, Task, schema_of


def merge_lookups(job: Job, model: nn.Module, world_size: int) -> None:
    """Merges the look-ups of ``model`` where ``job.lookups`` says so, before it is planned.

    ``auto`` does it where it saves exchanges and nothing stands against it: several ranks, towers on all of them, and
    no optimizer that is given to a table by the path of its tower.

    Raises:
        ValueError: ``merged`` for a model that is not made of towers.
    """
    merge = getattr(model, "merge_lookups", None)
    if merge is None:
        if job.lookups == "merged":
            raise ValueError(
                f"lookups=merged: {type(model).__name__} has no look-ups of several towers; leave it at auto"
            )
        return
    by_path = any("." in exception.partition("=")[0] for exception in job.optimizer.per_table)
    helps = world_size > 1 and job.plan.towers == "data_parallel" and not by_path
    if job.lookups == "merged" or (job.lookups == "auto" and helps):
        merge()


def place_towers(job: Job, task: Task, model: Any, runtime: Runtime) -> tuple[Job, Decision | None]:
    """``job`` with what was chosen, and why; as it is where its towers are placed already, or there is one rank."""
    if job.plan.towers != "auto" or runtime.world_size == 1:
        return job, None
    loader = task.loader(schema_of(job, task, model), job.loader, rank=runtime.rank, world_size=runtime.world_size)
    loader.set_epoch(0)
    if job.lookups == "merged":
        merge_lookups(job, model, runtime.world_size)
    flat = dataclasses.replace(job, plan=dataclasses.replace(job.plan, towers=EVERYWHERE))
    everywhere = copy.deepcopy(model)
    merge_lookups(flat, everywhere, runtime.world_size)
    plan, decision = auto_plan(
        model,
        next(iter(loader)),
        runtime,
        job.plan,
        job.optimizer,
        everywhere=everywhere,
        together=why_on_every_rank(job),
    )
    return dataclasses.replace(job, plan=plan), decision


def why_on_every_rank(job: Job) -> str:
    """Why towers must run on every rank, or nothing."""
    if job.sync.mode != "every_step":
        return f"sync.mode={job.sync.mode} averages towers that every rank has"
    if job.sync.table_copies > 1:
        return f"sync.table_copies={job.sync.table_copies}: towers on ranks of their own have one copy"
    return ""


def report_steps(folder: RunFolder, decision: Decision, history: Sequence[Record]) -> None:
    """Prints the measured step beside the foreseen ones, and writes ``placement.json``.

    Args:
        folder: of the run.
        decision: what was chosen before it.
        history: of the training.
    """
    records = [record for record in history if record["kind"] == "train"]
    steps = [
        record["step"] - before
        for record, before in zip(records, [0, *(record["step"] for record in records)], strict=False)
    ]
    times = [1e3 * record["rows"] / record["rows_per_s"] / count for record, count in zip(records, steps, strict=True)]
    measured = statistics.median(times[1:] or times)  # the first steps fill pipelines and pools
    print(f"\n{decision.text(measured)}")
    folder.write(
        "placement.json",
        json.dumps(
            {"measured_ms": measured, "candidates": [dataclasses.asdict(one) for one in decision.candidates]}, indent=2
        ),
    )


_FORMAT = warnings.formatwarning


def run_training(job: Job, run_dir: Path | None = None, *, resume: str = "never") -> None:
    """Trains ``job`` on this process's share of the ranks; rank 0 prints and writes the run folder.

    Args:
        job: what to train.
        run_dir: the run folder; ``runs/RECIPE-DATE`` where not given, or the recipe's newest to resume ``auto``.
        resume: ``never``, ``auto`` or a path, see :func:`resume_from`; a job that torchrun or the scheduler has started
            again goes on in its own run folder by itself.

    Raises:
        RunStoppedError: SIGTERM; the run has been saved.
    """
    quieten_libraries()
    with Runtime.start(job.device, threads=job.threads) as runtime:
        task = load_task(job, runtime)
        job = dataclasses.replace(
            job, data=dataclasses.replace(job.data, name=task.name)
        )  # after a fallback another one
        if runtime.is_main:
            report.report_start(task, runtime)
        torch.manual_seed(job.train.seed)
        model = build_model(job, task)
        job, decision = place_towers(job, task, model, runtime)
        merge_lookups(job, model, runtime.world_size)
        schema = schema_of(job, task, model)
        loader = loader_of(job, task, schema, runtime)
        path, again = _run_folder(job, run_dir, resume, runtime)
        resume = "auto" if again and resume == "never" else resume
        checkpointer = _checkpointer(job, path, runtime) if job.checkpoint.saves or resume != "never" else None
        begin = resume_from(resume, checkpointer, again=again) if checkpointer else None
        folder = _open_folder(job, path, replace=resume != "never") if runtime.is_main else None
        plan, text = _plan(job, model, decision, runtime)
        if folder is not None:
            print(f"\n{text}\n", flush=True)
            folder.write("plan.txt", text)
        parallel, optimizer = hybrid_parallel(
            model, runtime, plan=plan, optimizer=job.optimizer, seed=job.train.seed, table_copies=job.sync.table_copies
        )
        if job.streams and isinstance(told := on_streams(parallel, runtime.device), str) and runtime.is_main:
            print(told)
        if not begin:
            _begin_with(job, parallel, optimizer, schema, runtime)
        torch.manual_seed(job.train.seed + 1 + runtime.rank)  # for dropout, which should differ between ranks
        evaluator = task.evaluator(schema, parallel, runtime)
        start = time.perf_counter()
        with asked_to_stop() as stop, _watched(job, runtime, path) as watchdog, telling_how_to_go_on(checkpointer):
            history = train(
                parallel,
                optimizer,
                loader,
                runtime,
                job.train,
                evaluate=evaluator.validate if task.validates else None,
                log=folder.log if folder is not None else None,
                sync=job.sync,
                timeline=(lambda found: found.write(folder.path)) if folder is not None else None,
                checkpoints=RunCheckpoints(checkpointer, job.checkpoint, resume=begin) if checkpointer else None,
                stop=stop,
                watchdog=watchdog,
            )
        _finish(folder, task, evaluator, decision, history, time.perf_counter() - start, runtime)
        if job.export != "never":
            from torchx_apps.jobs.exporting import (
                BUNDLE,
                end_with_bundle,
            )  # costs a second that other runs need not wait

            details = {"recipe": job.name, "run": str(path), **report.read_warning(path)}
            end_with_bundle(job.export, parallel, task, schema, runtime, path / BUNDLE, details)


def build_model(job: Job, task: Task) -> nn.Module:
    """The untrained model of a job, which predicts the share of positives of its training rows where both tell of one.

    Raises:
        ValueError: its loss cannot learn from the rows that the job's loader makes.
    """
    model: nn.Module = job.build(job.model, task.data)
    if isinstance(model, TowerModel):
        model.expect_rows(negatives=job.loader.negatives, label=job.loader.label)
    if isinstance(model, TowerModel) and isinstance(task, NamedData):
        shares = task.positives(job.loader, model.schema(out_of_range=job.model.out_of_range).tasks)
        if shares:
            model.begin_at(shares)
    return model


def seeded(job: Job) -> LoaderConfig:
    """The loader's settings with the seed that it draws by; train.seed moves everything, loader.seed order and negatives alone."""
    return dataclasses.replace(job.loader, seed=job.train.seed + job.loader.seed)


def loader_of(job: Job, task: Task, schema: BatchSchema, runtime: Runtime) -> Any:
    """This rank's training batches."""
    config = seeded(job)
    loader = task.loader(schema, config, rank=runtime.rank, world_size=runtime.world_size)
    samples = loader.num_samples if isinstance(loader, Epochs) else config.batch_size
    if samples < config.batch_size and runtime.is_main:
        print(
            f"note: loader.batch_size={config.batch_size} is more than an epoch has: each step takes all {samples:,} "
            "samples"
        )
    return IdDropout(loader, schema, job.id_dropout_rates(), seed=config.seed) if job.id_dropout else loader


def _plan(job: Job, model: nn.Module, decision: Decision | None, runtime: Runtime) -> tuple[ShardingPlan, str]:
    """The plan, and what is printed of it."""
    rows = -(-job.loader.batch_size // runtime.world_size) * (1 + job.loader.negatives)
    plan = plan_sharding(
        model,
        runtime,
        job.plan,
        optimizer=job.optimizer,
        batch_size=rows,
        constraints=shard_free_tables(model, job.plan) if job.sync.mode == "semi_sync" else None,
        table_copies=job.sync.table_copies,
        measured=decision.found if decision else None,
    )
    captured = rows if runtime.world_size == 1 and job.train.compile == "require" else 0
    text = explain(plan, model, job.sync.table_ranks(runtime.world_size), captured_rows=captured)
    return plan, text if decision is None else f"{text}\n\n{decision.text()}"


def _finish(
    folder: RunFolder | None,
    task: Task,
    evaluator: Evaluator,
    decision: Decision | None,
    history: Sequence[Record],
    seconds: float,
    runtime: Runtime,
) -> None:
    """Measures on the test part, and says and writes how the run went; every rank calls it, rank 0 with the folder."""
    with watching(EvaluationWatch(runtime)):
        figures, example = evaluator.test(), evaluator.example()
    memory = peak_memory(runtime)
    if folder is None:
        return
    if decision is not None:
        report_steps(folder, decision, history)
    report.finish_training(folder, task, figures, evaluator.baseline("test"), example, history, seconds, memory)
    beside = evaluator.baseline("validation") if task.validates else None
    report.say_end(folder.path, folder.close(beside, baseline_name=task.baseline_name))


def peak_memory(runtime: Runtime) -> float:
    """MiB of resident memory that the largest rank has had at most; on a GPU of device memory."""
    if runtime.device.type == "cuda":
        used = torch.cuda.max_memory_allocated(runtime.device) / 2**20
    else:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    largest = torch.tensor(used, device=runtime.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def load_task(job: Job, runtime: Runtime) -> Task:
    """The job's data on every rank; one rank of each host looks and downloads first, and all share its outcome."""
    reason = None
    if runtime.local_rank == 0:
        try:
            task = job.task(job.data, progress=runtime.is_main)
        except DatasetUnavailable as error:
            reason = str(error)
    reasons: list[str | None] = [None] * runtime.world_size
    dist.all_gather_object(reasons, reason)
    reason = next((found for found in reasons if found), None)
    if reason is None:
        return task if runtime.local_rank == 0 else job.task(job.data, progress=False)
    if job.fallback is None:
        raise DatasetUnavailable(reason)
    if runtime.is_main:
        print(f"note: training on the generated set '{job.fallback}' instead: {reason}")
    return job.task(dataclasses.replace(job.data, name=job.fallback), progress=False)


def quieten_libraries() -> None:
    """Keeps what torch and torchrec say to their own developers, on every rank, out of a user's log; LOGLEVEL=INFO shows it."""
    if os.environ.get("LOGLEVEL", "WARNING").upper() in ("INFO", "DEBUG"):
        return
    warnings.formatwarning = _one_line
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # of torch.profiler's library, which reads it when first used
    logging.getLogger().setLevel(logging.ERROR)
    for library in ("torch", "torchrec", "fbgemm_gpu"):
        logging.getLogger(library).setLevel(logging.ERROR)
        for category in (FutureWarning, DeprecationWarning, UserWarning):
            warnings.filterwarnings("ignore", category=category, module=rf"{library}\b")
    # Of DDP to its caller, which is this package: the argument it would have is not there before torch 2.13.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torchrec_ext\.")


def _one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning to the user without a line of code; others as Python has them."""
    return f"warning: {message}\n" if category is UserWarning else _FORMAT(message, category, filename, lineno, line)


def _run_folder(job: Job, run_dir: Path | None, resume: str, runtime: Runtime) -> tuple[Path, bool]:
    """The run folder, as rank 0 names it, and whether an earlier attempt of this launch was there before."""
    counted: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(counted, restarted())
    named: list[Any] = [None, False]
    if runtime.is_main:
        named = list(where_to_begin(run_dir, resume, partial(newest_run, job.name), job.name, counted=any(counted)))
    dist.broadcast_object_list(named, src=0)
    return named[0], named[1]


def _watched(job: Job, runtime: Runtime, path: Path) -> AbstractContextManager[Watchdog | None]:
    if job.train.hang_s == 0:
        return nullcontext()
    return Watchdog(runtime.rank, job.train.hang_s, path, end_process, world_size=runtime.world_size)


def _begin_with(
    job: Job, model: DistributedModelParallel, optimizer: HybridOptimizer, schema: BatchSchema, runtime: Runtime
) -> None:
    """The vectors and the weights that a new run begins with, and a line for each difference to the earlier run."""
    for name, file in job.pretrained_files().items():
        if name not in (tables := job.optimizer.for_tables(model)):
            raise ValueError(f"pretrained: '{name}' is no table of the model; its tables are {', '.join(tables)}")
        count = load_vectors(model, name, file)
        if runtime.is_main:
            print(f"table '{name}' begins with {count:,} vectors of {file}")
    if not job.start.path:
        return
    together = Together(runtime)
    path = find_checkpoint("start.path=", job.start.path, together)
    tables = [table for _, collection in collections(model) for table in table_configs(collection)]
    features = {table.name: schema.feature(table.feature_names[0]) for table in tables}
    cold = {name: feature.oov_id for name, feature in features.items() if feature is not None}
    said = begin_with(path, model, optimizer, together, job.start, cold)
    if runtime.is_main:
        print(f"{said}\n", flush=True)


def _checkpointer(job: Job, path: Path, runtime: Runtime) -> Checkpointer:
    """Of the run in ``path``; what an earlier job of it left half written is removed."""
    checkpointer = Checkpointer(job.checkpoint.folder or str(path / CHECKPOINTS), runtime, keep=job.checkpoint.keep)
    if runtime.is_main:
        checkpointer.folder.clean()
    return checkpointer


def _open_folder(job: Job, path: Path, *, replace: bool) -> RunFolder:
    config = dataclasses.asdict(dataclasses.replace(job, build=None, task=None))  # type: ignore[arg-type]
    config |= {
        name: f"{made.__module__}:{made.__qualname__}" for name, made in (("build", job.build), ("task", job.task))
    }
    folder = RunFolder(path, config, replace=replace)
    folder.write(LAUNCH, launch_id())
    return folder
