"""Trains a job: opens its run folder, trains from the beginning or a checkpoint, tests, reports and exports."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_ext.distributed.optim.hybrid import HybridOptimizer
from torchrec_ext.distributed.runtime import Runtime, gather_objects, peak_resident
from torchrec_ext.distributed.tables import tables_of
from torchrec_ext.schema import SparseFeature
from torchrec_ext.schema.validation import listed
from torchrec_ext.sealed import write_whole
from torchrec_ext.train.checkpoint.checkpointer import Checkpointer
from torchrec_ext.train.checkpoint.folder import CheckpointRanks
from torchrec_ext.train.checkpoint.run import RunCheckpoints, begin_with
from torchrec_ext.train.checkpoint.vectors import load_vectors
from torchrec_ext.train.guards import RunStoppedError, Watchdog
from torchrec_ext.train.loop import train
from torchrec_ext.train.report.progress import RunFolder
from torchx_apps.jobs import report
from torchx_apps.jobs.resuming import (
    CHECKPOINTS,
    MEANING,
    asked_to_stop,
    check_ids_stay,
    check_recipe,
    ended,
    find_checkpoint,
    hinting_at_resume,
    meaning_of_ids,
    new_run,
    records_before,
    say_how_to_resume,
)
from torchx_apps.jobs.setup import (
    JobParts,
    evaluator_of,
    load_task,
    quieten_libraries,
    set_up,
    shard_job,
)
from torchx_apps.jobs.tracking import Tracking
from torchx_apps.recipes.saved_job import CONFIG, RECORDS, records_in
from torchx_apps.tasks.evaluator import OutputCheck
from torchx_apps.tasks.job import Job
from torchx_apps.tasks.task import Evaluator, Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """A run's output and its start.

    Args:
        path: the run folder's path.
        folder: the run folder, on rank 0 alone.
        tracking: the run in the trackers of `torchx run`, on rank 0 alone.
        checkpointer: saves and loads the run's checkpoints; None if nothing is saved or resumed.
        checkpoint: path of the checkpoint to resume from, or None.
    """

    path: Path
    folder: RunFolder | None
    tracking: Tracking | None
    checkpointer: Checkpointer | None
    checkpoint: str | None


def run_training(job: Job, run_dir: Path | None = None, *, member: str = "") -> None:
    """Trains a job on this process's rank; every rank calls it, and rank 0 prints and writes the run folder.

    Args:
        job: the job to train.
        run_dir: the run folder; ``runs/RECIPE-DATE`` where not given. A run of the same recipe there goes on from its
            last checkpoint, as a rank that was started again does.
        member: name of this network for trackers, where the job trains several.

    Raises:
        RunStoppedError: SIGTERM came; the run has been saved.
    """
    quieten_libraries()
    with (
        Runtime.start(
            job.device,
            threads=job.threads,
            timeout_s=job.train.hang_s,
            collectives=job.collectives,
        ) as runtime,
        ExitStack() as closing,
    ):
        task = load_task(job, runtime)
        if runtime.is_main:
            report.report_start(task, runtime, job.train.amp)
        parts = set_up(job, task, runtime)
        job = parts.job
        # Before tables take memory, which may not be enough.
        if runtime.is_main:
            print(f"\n{parts.plan_text}\n", flush=True)
        parallel, optimizer = shard_job(parts, runtime)
        evaluator = evaluator_of(task, parts.schema, parts.loader, parallel, runtime)
        # Before there is a run folder.
        check_watched(job, task, evaluator)
        run = open_run(job, run_dir, runtime, closing, member)
        folder = run.folder
        checkpointer = run.checkpointer
        if run.checkpoint and checkpointer:
            check_ids_stay(
                run.checkpoint,
                task,
                checkpointer.together,
                schema=parts.schema,
            )
        about = {}
        # Rank 0 also writes the checkpoints' manifests.
        if folder is not None:
            about = {MEANING: meaning_of_ids(task, parts.schema.dynamic)}
            folder.write("plan.txt", parts.plan_text)
        if not run.checkpoint:
            _begin_with(parts, task, parallel, optimizer, runtime)
        # Dropout should differ between ranks.
        torch.manual_seed(job.train.seed + 1 + runtime.rank)
        checkpoints = None
        if checkpointer:
            checkpoints = RunCheckpoints(
                checkpointer, job.checkpoint, resume=run.checkpoint, about=about
            )
        start = time.perf_counter()
        with (
            asked_to_stop(partial(say_how_to_resume, checkpointer, run.path)) as stop,
            Watchdog(runtime.rank, job.train.hang_s / 2, run.path) as watchdog,
            hinting_at_resume(checkpointer, run.path),
        ):
            history = train(
                parallel,
                optimizer,
                parts.loader,
                runtime,
                job.train,
                evaluate=evaluator.validate if task.validates else None,
                log=folder.log if folder is not None else None,
                sync=job.sync,
                checkpoints=checkpoints,
                stop=stop,
                watchdog=watchdog,
                observer=OutputCheck(task.data),
            )
        seconds = time.perf_counter() - start
        trained = report.Trained(
            history=history,
            seconds=seconds,
            collectives=report.collectives_of(runtime),
        )
        tested = _tested(folder, evaluator, runtime)
        bundle = ""
        try:
            # Before EASE, which may need more memory than there is: a run that ends
            # there has its bundle.
            if job.export != "never":
                bundle = _bundle_of(run.path, parts, parallel, task, tested, runtime)
        finally:
            if folder is not None:
                beside = evaluator.beside("test")
                report.finish_training(folder, task, tested, trained, beside)
                report.say_end(folder.path)
        if bundle and runtime.is_main:
            print(f"\n{bundle}", flush=True)
        if run.tracking is not None:
            run.tracking.end()


def _bundle_of(
    path: Path,
    parts: JobParts,
    model: DistributedModelParallel,
    task: Task,
    tested: report.Tested,
    runtime: Runtime,
) -> str:
    # Imported here: it takes a second that other runs need not wait.
    from torchx_apps.jobs.exporting import BUNDLE, bundle_of_run

    details = {"recipe": parts.job.name, "run": str(path)}
    worse = report.worse_than(task.baseline_name, tested.figures, tested.baseline)
    if worse:
        details["warning"] = worse
    return bundle_of_run(
        parts.job.export,
        model,
        task,
        parts.schema,
        runtime,
        path / BUNDLE,
        details=details,
        loader=parts.loader,
    )


def check_watched(job: Job, task: Task, evaluator: Evaluator) -> None:
    """Refuses an early stop by a figure missing from the evaluations.

    Raises:
        ValueError: naming those that there are.
    """
    watched = job.train.early_stop.metric
    names = evaluator.validated
    if watched and task.validates and watched not in names:
        remedy = (
            f", or have the catalogue ranked: {task.ranked_by}"
            if "@" in watched and task.ranked_by
            else ""
        )
        raise ValueError(
            f"train.early_stop.metric={watched!r}: an evaluation has no such figure; watch one of {listed(names)}"
            f"{remedy}"
        )


def _tested(
    folder: RunFolder | None, evaluator: Evaluator, runtime: Runtime
) -> report.Tested:
    """Evaluates on the test rows, and writes the figures at once; every rank calls it, rank 0 with the folder."""
    figures = evaluator.test()
    example = evaluator.example()
    memory = peak_memory(runtime)
    if folder is None:
        return report.Tested(figures, {}, example, memory)
    # What follows may need more memory than there is, and would take the figures with
    # it.
    folder.write("test.json", json.dumps(figures, indent=2))
    return report.Tested(figures, evaluator.baseline("test"), example, memory)


def peak_memory(runtime: Runtime) -> list[float]:
    """Returns the peak memory of each rank in MiB: resident memory, or device memory on a GPU. Collective."""
    if runtime.device.type == "cuda":
        used = torch.cuda.max_memory_allocated(runtime.device) / 2**20
    else:
        used = peak_resident() / 2**20
    return gather_objects(used, runtime.world_size)


def open_run(
    job: Job,
    run_dir: Path | None,
    runtime: Runtime,
    closing: ExitStack,
    member: str = "",
) -> _Run:
    """Opens the run folder, and finds the checkpoint to go on from; ``closing`` closes what it opens. Collective."""
    # Rank 0 decides: names have the time, and only its host may have the folder yet.
    decided: list[Any] = [None, False]
    if runtime.is_main:
        path = run_dir or new_run(job.name)
        decided = [path, (path / CONFIG).is_file()]
    dist.broadcast_object_list(decided, src=0)
    path, begun = decided
    checkpointer = None
    checkpoint = None
    if job.checkpoint.saves or begun:
        root = job.checkpoint.folder or str(path / CHECKPOINTS)
        checkpointer = Checkpointer(root, runtime, keep=job.checkpoint.keep)
        # A notebook keeps what failed, and so a lock that nobody opens.
        closing.callback(checkpointer.folder.unlock)
        if runtime.is_main:
            # An earlier attempt may have left half-written files.
            checkpointer.folder.clean()
        checkpointer.together.on_main(lambda: check_recipe(path, job.name))
        if begun:
            checkpoint = checkpointer.last_good()
        if runtime.is_main and checkpoint:
            print(f"resuming from {checkpoint}", flush=True)
    folder = tracking = None
    if runtime.is_main:
        # A run that goes on writes its folder anew, also one that was cut short before
        # its first checkpoint. One that has ended without checkpoints is refused.
        unfinished = begun and not ended(path)
        if unfinished and not checkpoint:
            _say_anew(path, root)
        replace = checkpoint is not None or unfinished
        before = records_before(checkpoint, path) if checkpoint else []
        files = [path / name for name in (CONFIG, RECORDS, "plan.txt")]
        saved = {file: file.read_bytes() for file in files if file.is_file()}
        folder = RunFolder(path, settings_of(job), replace=replace, before=before)
        if checkpoint:
            records = (path / RECORDS).read_bytes()
            closing.push(partial(_put_back, saved, path / RECORDS, records))
        closing.callback(folder.close)
        tracking = Tracking(path, settings_of(job), member=member)
        if job.checkpoint.saves and not checkpoint:
            # A grid is named by the folder of all members.
            again = path.parent if member else path
            print(
                f"saving into {root}; if the job is killed, the same command with --run_dir {again} goes on",
                flush=True,
            )
    return _Run(
        path=path,
        folder=folder,
        tracking=tracking,
        checkpointer=checkpointer,
        checkpoint=checkpoint,
    )


def _put_back(
    saved: Mapping[Path, bytes], metrics: Path, records: bytes, error: Any, *_: object
) -> None:
    """After an error before the first record puts the files of a run back: they belong to its checkpoints."""
    # A run that is stopped saves a checkpoint, which has the settings of now.
    is_refused = error not in (None, RunStoppedError)
    if is_refused and metrics.read_bytes() == records:
        for file, content in saved.items():
            write_whole(file, content)


def _say_anew(path: Path, root: str) -> None:
    """Prints that a run with records begins anew, because its checkpoints are gone or none was saved yet."""
    records = len(records_in(path))
    if records:
        print(
            f"warning: {path} has {records:,} records, and {root} no checkpoint: the run begins anew, from nothing",
            file=sys.stderr,
            flush=True,
        )


def _begin_with(
    parts: JobParts,
    task: Task,
    model: DistributedModelParallel,
    optimizer: HybridOptimizer,
    runtime: Runtime,
) -> None:
    """Loads the first vectors and weights of a new run, and prints each difference to the earlier run."""
    job = parts.job
    schema = parts.schema
    column_of: dict[str, SparseFeature] = {}
    for feature in schema.sparse:
        column_of |= dict.fromkeys(feature.tables, feature)
    for name, file in job.pretrained.items():
        tables = job.optimizer.for_tables(model)
        if name not in tables:
            raise ValueError(
                f"pretrained: '{name}' is no table of the model; its tables are {listed(tables)}"
            )
        column = column_of[name]
        if column.dynamic:
            raise ValueError(
                f"pretrained: '{name}' has dynamic ids, which get their rows in training; leave it out"
            )
        count = load_vectors(model, name, file, task.data.raw_values(column.name))
        if not count:
            raise ValueError(
                f"pretrained: no id of {file} is a value of '{column.name}' in the training rows; write the ids as the "
                "log has them"
            )
        if runtime.is_main:
            print(f"table '{name}' begins with {count:,} vectors of {file}")
    if not job.start.path:
        return
    together = CheckpointRanks(runtime)
    path = find_checkpoint("start.path=", job.start.path, together)
    # Later ids may follow, as start.partial takes them.
    check_ids_stay(path, task, together, later=True, schema=schema)
    start_with(path, parts, model, optimizer, together)


def start_with(
    path: str,
    parts: JobParts,
    model: DistributedModelParallel,
    optimizer: HybridOptimizer,
    together: CheckpointRanks,
) -> None:
    """Loads the weights, the optimizer's state and the dynamic ids of a checkpoint, and prints each difference."""
    schema = parts.schema
    cold = {}
    for table in tables_of(model):
        feature = schema.feature(table.feature_names[0])
        if feature is not None:
            cold[table.name] = feature.oov_id
    loader = parts.loader if schema.dynamic else None
    differences = begin_with(
        path, model, optimizer, together, parts.job.start, cold, loader
    )
    if together.rank == 0:
        print(f"{differences}\n", flush=True)


def settings_of(job: Job) -> dict[str, Any]:
    """Returns every setting of a job, enough for `rec.train.hybrid` to repeat the training."""
    # asdict() would copy the functions, which JSON does not take: they are named
    # instead.
    config = dataclasses.asdict(dataclasses.replace(job, build=None, task=None))  # type: ignore[arg-type]
    for name, function in (("build", job.build), ("task", job.task)):
        config[name] = f"{function.__module__}:{function.__qualname__}"
    return config
