"""Trains a job: its data, model and ranks meet here to load, plan, shard, train, evaluate, report and export."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import time
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan

from torchrec_ext.data.datasets.catalog import DatasetUnavailable
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.data.loader.epochs import Epochs
from torchrec_ext.data.loader.id_dropout import IdDropout
from torchrec_ext.distributed.autotune.choose import Decision
from torchrec_ext.distributed.optim.hybrid import HybridOptimizer
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.explain import explain, placed_bytes
from torchrec_ext.distributed.plan.planner import free_tables, plan_sharding
from torchrec_ext.distributed.runtime import Runtime, available_memory, peak_resident
from torchrec_ext.distributed.sharders import codecs_of
from torchrec_ext.distributed.streams import on_streams
from torchrec_ext.distributed.tables import tables_of
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.config import LOSSES
from torchrec_ext.schema import BatchSchema
from torchrec_ext.schema.validation import listed
from torchrec_ext.train.checkpoint.checkpointer import Checkpointer
from torchrec_ext.train.checkpoint.folder import CheckpointRanks
from torchrec_ext.train.checkpoint.run import RunCheckpoints, begin_with
from torchrec_ext.train.checkpoint.vectors import load_vectors
from torchrec_ext.train.config import Record
from torchrec_ext.train.guards.watchdog import Watchdog
from torchrec_ext.train.loop import train
from torchrec_ext.train.metrics import EvaluationWatch, watching
from torchrec_ext.train.report.progress import RunFolder
from torchx_apps.cli.command_line import most_used_keys
from torchx_apps.cli.errors import end_process
from torchx_apps.jobs import report
from torchx_apps.jobs.placing import merge_lookups, place_towers, report_steps
from torchx_apps.jobs.resuming import (
    CHECKPOINTS,
    IDS,
    LAUNCH,
    MEANING,
    asked_to_stop,
    check_ids_stay,
    find_checkpoint,
    hinting_at_resume,
    launch_id,
    meaning_of_ids,
    newest_run,
    restarted,
    resume_from,
    where_to_begin,
)
from torchx_apps.launch.trackers import Tracking
from torchx_apps.tasks.baselines import FORMS, Beside, ClosedForms
from torchx_apps.tasks.job import Evaluator, Job, Task, schema_of
from torchx_apps.tasks.labelled import LabelledTask
from torchx_apps.tasks.named_data import NamedData
from torchx_apps.tasks.streamed import StreamedTask

_FORMAT = warnings.formatwarning


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

    def log(self, record: Record) -> None:
        """Writes a record into the run folder and to the trackers, on rank 0."""
        if self.folder is not None and self.tracking is not None:
            self.folder.log(record)
            self.tracking.log(record)


def run_training(
    job: Job,
    run_dir: Path | None = None,
    *,
    resume: str = "never",
    member: str = "",
    diagnosis: Sequence[str] = (),
) -> None:
    """Trains a job on this process's rank; every rank calls it, and rank 0 prints and writes the run folder.

    Args:
        job: the job to train.
        run_dir: the run folder; ``runs/RECIPE-DATE`` where not given, or the recipe's newest to resume ``auto``.
        resume: ``never``, ``auto`` or a path, see :func:`resume_from`; a job that torchrun or the scheduler has started
            again continues in its own run folder in any case.
        member: name of this network for trackers, where the job trains several.
        diagnosis: words of the command that says why this job is slow, named where a share of its time is out of order.

    Raises:
        RunStoppedError: SIGTERM came; the run has been saved.
    """
    quieten_libraries()
    with Runtime.start(job.device, threads=job.threads) as runtime:
        task = load_task(job, runtime)
        job = as_loaded(job, task)
        if runtime.is_main:
            report.report_start(task, runtime)
        torch.manual_seed(job.train.seed)
        model = build_model(job, task)
        job, decision = place_towers(job, task, model, runtime)
        merge_lookups(job, model, runtime.world_size)
        schema = schema_of(job, task, model)
        loader = loader_of(job, task, schema, runtime)
        run = _open_run(job, run_dir, resume, runtime, member)
        folder = run.folder
        checkpointer = run.checkpointer
        if run.checkpoint and checkpointer:
            check_ids_stay(run.checkpoint, task, checkpointer.together, run=run.path)
        about = {}
        # Rank 0 also writes the checkpoints' manifests.
        if folder is not None:
            about = {MEANING: meaning_of_ids(task)}
            folder.write(IDS, json.dumps(about[MEANING], indent=2))
        plan, text = plan_job(job, model, decision, runtime)
        if folder is not None:
            print(f"\n{text}\n", flush=True)
            folder.write("plan.txt", text)
            folder.facts = dataclasses.replace(
                folder.facts,
                title=f"{job.name} on {task.name}",
                plan=placed_bytes(plan, model, job.sync.table_ranks(runtime.world_size)),
                settings={key.path: key.value for key in most_used_keys(job, 20)},
            )
        parallel, optimizer = shard_job(job, model, plan, runtime)
        if not run.checkpoint:
            _begin_with(job, task, parallel, optimizer, schema, runtime)
        # Dropout should differ between ranks.
        torch.manual_seed(job.train.seed + 1 + runtime.rank)
        evaluator = task.evaluator(schema, parallel, runtime)
        check_watched(job, task, evaluator)
        checkpoints = None
        if checkpointer:
            checkpoints = RunCheckpoints(checkpointer, job.checkpoint, resume=run.checkpoint, about=about)
        start = time.perf_counter()
        with asked_to_stop() as stop, _watched(job, runtime, run.path) as watchdog, hinting_at_resume(checkpointer):
            history = train(
                parallel,
                optimizer,
                loader,
                runtime,
                job.train,
                evaluate=evaluator.validate if task.validates else None,
                log=run.log if folder is not None else None,
                sync=job.sync,
                timeline=(lambda timeline: timeline.write(folder.path)) if folder is not None else None,
                checkpoints=checkpoints,
                stop=stop,
                watchdog=watchdog,
            )
        seconds = time.perf_counter() - start
        trained = report.Trained(
            history=history,
            seconds=seconds,
            whole=not run.checkpoint,
            threads=runtime.threads,
            launch=f"{runtime.world_size // runtime.local_world_size}x{runtime.local_world_size}",
            diagnosis=diagnosis,
        )
        tested = _tested(folder, task, evaluator, runtime)
        bundle = None
        if job.export != "never":
            # Imported here: it takes a second that other runs need not wait.
            from torchx_apps.jobs.exporting import BUNDLE, bundle_of_run, report_bundle

            worse = report.worse_than(task.baseline_name, tested.figures, tested.baseline)
            details = {"recipe": job.name, "run": str(run.path), **({"warning": worse} if worse else {})}
            bundle = bundle_of_run(parallel, task, schema, runtime, run.path / BUNDLE, details)
        if folder is not None:
            _finish(folder, task, evaluator, decision, trained, tested)
        if bundle is not None:
            report_bundle(job.export, bundle, runtime, run.path / BUNDLE)
        if run.tracking is not None:
            run.tracking.end()


def check_watched(job: Job, task: Task, evaluator: Evaluator) -> None:
    """Refuses an early stop by a figure missing from the evaluations.

    Raises:
        ValueError: naming those that there are.
    """
    watched = job.train.early_stop.metric
    names = getattr(evaluator, "validated", None)
    if watched and names is not None and task.validates and watched not in names:
        remedy = ", or have the catalogue ranked: data.ranked" if "@" in watched and hasattr(job.data, "ranked") else ""
        raise ValueError(
            f"train.early_stop.metric={watched!r}: an evaluation has no such figure; watch one of {listed(names)}"
            f"{remedy}"
        )


def as_loaded(job: Job, task: Task) -> Job:
    """Returns the job with the name of the loaded set, perhaps a fallback's, and the columns of its labels."""
    loader = task.with_roles(job.loader) if isinstance(task, StreamedTask) else job.loader
    return dataclasses.replace(job, data=dataclasses.replace(job.data, name=task.name), loader=loader)


def build_model(job: Job, task: Task) -> nn.Module:
    """Builds the untrained model of a job; it predicts the training rows' share of positives if that is known.

    Raises:
        ValueError: its loss cannot learn from the rows that the job's loader makes, or the job must end with a bundle,
            and rows or towers cannot be served.
    """
    model: nn.Module = job.build(job.model, task.data)
    if job.export == "require" and isinstance(task, LabelledTask | StreamedTask) and (why := task.unservable(model)):
        raise ValueError(f"export=require: {why}")
    if isinstance(model, TowerModel):
        model.expect_rows(negatives=job.loader.negatives, label=job.loader.label)
    if isinstance(model, TowerModel) and isinstance(task, NamedData):
        shares = task.positives(job.loader, model.schema(out_of_range=job.model.out_of_range).tasks)
        if shares:
            model.begin_at(shares)
    return model


def seeded(job: Job) -> LoaderConfig:
    """Returns the loader's settings with both seeds added: loader.seed changes order and negatives, train.seed all."""
    return dataclasses.replace(job.loader, seed=job.train.seed + job.loader.seed)


def loader_of(job: Job, task: Task, schema: BatchSchema, runtime: Runtime) -> Any:
    """Returns the loader of this rank's training batches."""
    config = seeded(job)
    loader = task.loader(schema, config, rank=runtime.rank, world_size=runtime.world_size)
    samples = loader.num_samples if isinstance(loader, Epochs) else config.batch_size
    if samples < config.batch_size and runtime.is_main:
        print(
            f"note: loader.batch_size={config.batch_size} is more than an epoch has: each step takes all {samples:,} "
            "samples"
        )
    _check_scores(job, task, min(samples, config.batch_size), runtime)
    return IdDropout(loader, schema, job.id_dropout_rates(), seed=config.seed) if job.id_dropout else loader


# Measured: 10,000 x 10,000 scores of .4 GB took 1.36 GB more, for scores, corrections, shares and gradient.
_SCORE_COPIES = 4


def _check_scores(job: Job, task: Task, samples: int, runtime: Runtime) -> None:
    """Refuses a softmax over a batch if its scores, one per pair of rows, exceed this host's memory.

    Of rows with labels only those with a label above 0 are scored.

    Raises:
        ValueError: naming the sizes, and a batch that fits.
    """
    loss = getattr(job.model, "loss", None)
    if loss not in LOSSES or not LOSSES[loss].shared:
        return
    local_steps = job.sync.takes_local_steps and runtime.world_size > 1
    if LOSSES[loss].catalogue and local_steps and hasattr(job.model, "tower_widths"):
        raise ValueError(
            f"sync.mode={job.sync.mode} with model.loss=catalogue: item towers drift apart between exchanges, so one "
            "softmax cannot compare them; set sync.mode=every_step, or model.loss=in_batch"
        )
    if runtime.device.type != "cpu":
        return
    if LOSSES[loss].catalogue:
        _check_catalogue(job, task, runtime)
        return
    if job.loader.label and isinstance(task, NamedData):
        samples = math.ceil(samples * task.positives(job.loader)[0])
    each = 4 * _SCORE_COPIES * runtime.local_world_size / runtime.world_size
    size = each * samples * (samples + job.loader.shared_negatives)
    free = available_memory()
    if size > free:
        fits = max(1, int(math.sqrt(free / each)))
        raise ValueError(
            f"loader.batch_size={job.loader.batch_size} with model.loss={loss}: {samples:,} queries by "
            f"{samples + job.loader.shared_negatives:,} candidates take {size / 2**30:,.1f} GiB, {free / 2**30:,.1f} "
            f"are free; set loader.batch_size to {fits:,} or less"
        )


# Vectors of all items on each rank: gathered, their gradient, its copy to send, and the optimizer's.
_VECTOR_COPIES = 4


def _check_catalogue(job: Job, task: Task, runtime: Runtime) -> None:
    """Refuses a softmax over a catalogue if its vectors exceed this host's memory; scores are made in blocks.

    Raises:
        ValueError: naming the sizes.
    """
    items = task.data.num_items
    widths = getattr(job.model, "tower_widths", ()) or (job.model.embedding_dim,)
    vectors = 4 * _VECTOR_COPIES * items * widths[-1] * runtime.local_world_size
    layers = 4 * 2 * items * (job.model.embedding_dim + sum(widths)) * runtime.local_world_size / runtime.world_size
    size = vectors + layers
    free = available_memory()
    if size > free:
        raise ValueError(
            f"model.loss=catalogue: {items:,} vectors of width {widths[-1]} and their layers take "
            f"{size / 2**30:,.1f} GiB on each rank, {free / 2**30:,.1f} are free; set narrower model.tower_widths, "
            "or model.loss=in_batch"
        )


def plan_job(job: Job, model: nn.Module, decision: Decision | None, runtime: Runtime) -> tuple[ShardingPlan, str]:
    """Plans the model's tables; returns the plan and its explanation."""
    rows = job.loader.rank_rows(runtime.world_size)
    constraints, whole = free_tables(model, runtime, job.plan, job.optimizer, job.sync, measured=decision is not None)
    plan = plan_sharding(
        model,
        runtime,
        job.plan,
        optimizer=job.optimizer,
        batch_size=rows,
        constraints=constraints,
        table_copies=job.sync.table_copies,
    )
    captured = rows if runtime.world_size == 1 and job.train.compile == "require" else 0
    text = explain(plan, model, job.sync.table_ranks(runtime.world_size), captured_rows=captured)
    if job.plan.quantised:
        text += (
            f"\nranks send each other embeddings in {job.plan.forward_precision}, their gradients in "
            f"{job.plan.backward_precision}"
            if runtime.world_size > 1
            else "\nplan.forward_precision, plan.backward_precision: one rank sends nothing, and nothing is rounded"
        )
    for line in (whole, hosts_note(job.plan.sharding, runtime.world_size // runtime.local_world_size)):
        text += f"\n{line}" if line else ""
    return plan, text if decision is None else f"{text}\n\n{decision.text()}"


def hosts_note(sharding: str, hosts: int) -> str:
    """Notes in a line that a plan depends on the number of hosts; empty for a plan that does not.

    Example:
        >>> hosts_note("auto", 1), hosts_note("row_wise", 2), hosts_note("auto", 2)[:39]
        ('', '', 'plan.sharding=auto: made for 2 hosts; a')
    """
    if hosts == 1 or sharding != "auto":
        return ""
    return (
        f"plan.sharding=auto: made for {hosts} hosts; another number of hosts may get another plan, which rounds "
        "otherwise; to compare figures, set plan.sharding=row_wise, or another type, for both"
    )


def shard_job(
    job: Job, model: nn.Module, plan: ShardingPlan, runtime: Runtime
) -> tuple[DistributedModelParallel, HybridOptimizer]:
    """Shards the model over the ranks, and puts its towers on CUDA streams if the job sets ``streams``."""
    parallel, optimizer = hybrid_parallel(
        model,
        runtime,
        plan=plan,
        optimizer=job.optimizer,
        seed=job.train.seed,
        table_copies=job.sync.table_copies,
        codecs=codecs_of(job.plan) if runtime.world_size > 1 else None,
    )
    if job.streams:
        message = on_streams(parallel, runtime.device)
        if isinstance(message, str) and runtime.is_main:
            print(message)
    return parallel, optimizer


class _Tested(NamedTuple):
    """Figures of the model and, on rank 0, of the baseline on the test rows; rows for a person; each rank's memory."""

    figures: Record
    baseline: Record
    example: str
    memory: list[float]


def _tested(folder: RunFolder | None, task: Task, evaluator: Evaluator, runtime: Runtime) -> _Tested:
    """Evaluates on the test rows, and writes the figures at once; every rank calls it, rank 0 with the folder."""
    with watching(EvaluationWatch(runtime)):
        figures = evaluator.test()
        example = evaluator.example()
    memory = peak_memory(runtime)
    if folder is None:
        return _Tested(figures, {}, example, memory)
    # What follows may need more memory than there is, and would take the figures with it.
    folder.write("test.json", json.dumps(figures, indent=2))
    return _Tested(figures, evaluator.baseline("test"), example, memory)


def _finish(
    folder: RunFolder,
    task: Task,
    evaluator: Evaluator,
    decision: Decision | None,
    trained: report.Trained,
    tested: _Tested,
) -> None:
    """Solves for the further baselines, and reports how the run went; rank 0 calls it."""
    if decision is not None:
        report_steps(folder, decision, trained.history)
    others = evaluator.beside("test") if hasattr(evaluator, "beside") else Beside({}, {})
    report.finish_training(
        folder, task, tested.figures, tested.baseline, tested.example, trained, tested.memory, others
    )
    baseline = evaluator.baseline("validation") if task.validates else None
    report.say_end(folder.path, folder.close(baseline, baseline_name=task.baseline_name))


def peak_memory(runtime: Runtime) -> list[float]:
    """Returns the peak memory of each rank in MiB: resident memory, or device memory on a GPU. Collective."""
    if runtime.device.type == "cuda":
        used = torch.cuda.max_memory_allocated(runtime.device) / 2**20
    else:
        used = peak_resident() / 2**20
    local = torch.tensor([used], device=runtime.device)
    ranks = [torch.zeros_like(local) for _ in range(runtime.world_size)]
    dist.all_gather(ranks, local)
    return torch.cat(ranks).tolist()  # type: ignore[no-any-return]


def load_task(job: Job, runtime: Runtime) -> Task:
    """Loads the job's data on every rank, after one rank of each host has looked for it or downloaded it. Collective.

    Raises:
        DatasetUnavailable: the set is not to be had, and ``job.fallback`` names no other.
    """
    reason = None
    if runtime.local_rank == 0:
        try:
            task = job.task(job.data, progress=runtime.is_main)
        except DatasetUnavailable as error:
            reason = str(error)
    reasons: list[str | None] = [None] * runtime.world_size
    dist.all_gather_object(reasons, reason)
    reason = next(filter(None, reasons), None)
    if reason is None:
        return _evaluated(task if runtime.local_rank == 0 else job.task(job.data, progress=False), job)
    if job.fallback is None:
        raise DatasetUnavailable(reason)
    if runtime.is_main:
        print(f"note: {reason}\nnote: training on the generated set '{job.fallback}' instead")
    return _evaluated(job.task(dataclasses.replace(job.data, name=job.fallback), progress=False), job)


def _evaluated(task: Task, job: Job) -> Task:
    """Returns the task with the figures and baselines of ``evaluation``, if any are set.

    Raises:
        ValueError: the task ranks nothing.
    """
    evaluation = dataclasses.asdict(job.evaluation)
    texts = [f"evaluation.{name}={','.join(value)}" for name, value in evaluation.items() if value]
    if texts and not hasattr(task, "figures"):
        raise ValueError(
            f"{', '.join(texts)}: the rows of '{task.name}' have labels, which are predicted and not ranked; leave it "
            "out"
        )
    changes: dict[str, Any] = {"closed_form": job.closed_form, "baselines": job.evaluation.baselines}
    if job.evaluation.metrics:
        changes["figures"] = tuple(job.evaluation.figures)
    fields = {field.name for field in dataclasses.fields(task)} if dataclasses.is_dataclass(task) else set()
    return dataclasses.replace(task, **{name: value for name, value in changes.items() if name in fields})  # type: ignore[type-var]


def quieten_libraries() -> None:
    """Silences torch's and torchrec's warnings to their developers; LOGLEVEL=INFO shows them."""
    if os.environ.get("LOGLEVEL", "WARNING").upper() in ("INFO", "DEBUG"):
        return
    warnings.formatwarning = _one_line
    # torch.profiler's library reads the variable when first used.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    logging.getLogger().setLevel(logging.ERROR)
    for library in ("torch", "torchrec", "fbgemm_gpu"):
        logging.getLogger(library).setLevel(logging.ERROR)
        for category in (FutureWarning, DeprecationWarning, UserWarning):
            warnings.filterwarnings("ignore", category=category, module=rf"{library}\b")


def _one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Formats a UserWarning without its line of code; other warnings as Python does."""
    return f"warning: {message}\n" if category is UserWarning else _FORMAT(message, category, filename, lineno, line)


def _open_run(job: Job, run_dir: Path | None, resume: str, runtime: Runtime, member: str) -> _Run:
    """Opens the run folder, and finds the checkpoint to resume from. Collective."""
    path, again = _run_folder(job, run_dir, resume, runtime)
    # A launch that torchrun has started again continues where its last attempt ended.
    if again and resume == "never":
        resume = "auto"
    checkpointer = None
    checkpoint = None
    if job.checkpoint.saves or resume != "never":
        checkpointer = _checkpointer(job, path, runtime)
        checkpoint = resume_from(resume, checkpointer, again=again)
    folder = tracking = None
    if runtime.is_main:
        folder = _open_folder(job, path, replace=resume != "never")
        tracking = Tracking.start(path, settings_of(job), member=member)
    return _Run(path=path, folder=folder, tracking=tracking, checkpointer=checkpointer, checkpoint=checkpoint)


def _run_folder(job: Job, run_dir: Path | None, resume: str, runtime: Runtime) -> tuple[Path, bool]:
    """Returns rank 0's choice of a run folder, and whether an earlier attempt of this launch has used it."""
    counted: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(counted, restarted())
    decided: list[Any] = [None, False]
    if runtime.is_main:
        decided = list(where_to_begin(run_dir, resume, partial(newest_run, job.name), job.name, counted=any(counted)))
    dist.broadcast_object_list(decided, src=0)
    return decided[0], decided[1]


def _watched(job: Job, runtime: Runtime, path: Path) -> AbstractContextManager[Watchdog | None]:
    if job.train.hang_s == 0:
        return nullcontext()
    return Watchdog(runtime.rank, job.train.hang_s, path, end_process, world_size=runtime.world_size)


def _begin_with(
    job: Job,
    task: Task,
    model: DistributedModelParallel,
    optimizer: HybridOptimizer,
    schema: BatchSchema,
    runtime: Runtime,
) -> None:
    """Loads the first vectors and weights of a new run, and prints each difference to the earlier run."""
    for name, file in job.pretrained_files().items():
        tables = job.optimizer.for_tables(model)
        if name not in tables:
            raise ValueError(f"pretrained: '{name}' is no table of the model; its tables are {listed(tables)}")
        if str(file) in FORMS:
            solved = _solved(job, task, model, name, str(file), runtime)
            count = load_vectors(model, name, file, [(torch.arange(len(solved)), solved)])
        else:
            count = load_vectors(model, name, file)
        if runtime.is_main:
            print(f"table '{name}' begins with {count:,} vectors of {file}")
    if not job.start.path:
        return
    together = CheckpointRanks(runtime)
    path = find_checkpoint("start.path=", job.start.path, together)
    check_ids_stay(path, task, together, later=True)
    configs = tables_of(model)
    features = {table.name: schema.feature(table.feature_names[0]) for table in configs}
    cold = {name: feature.oov_id for name, feature in features.items() if feature is not None}
    differences = begin_with(path, model, optimizer, together, job.start, cold)
    if runtime.is_main:
        print(f"{differences}\n", flush=True)


def _solved(
    job: Job, task: Task, model: DistributedModelParallel, table: str, form: str, runtime: Runtime
) -> torch.Tensor:
    """Returns the vectors of EASE or ALS for a table, solved by rank 0. Collective."""
    configs = [config for config in tables_of(model) if config.name == table]
    forms: ClosedForms | None = getattr(task, "closed_forms", None)
    if forms is None:
        raise ValueError(
            f"pretrained: {table}={form}: the rows of '{task.name}' are not pairs of a user and an item; give a file"
        )
    features = [feature for config in configs for feature in config.feature_names]
    feature = forms.feature(form, table, features)
    vectors = torch.empty(forms.rows(feature), configs[0].embedding_dim)
    if runtime.is_main:
        vectors = forms.vectors(form, feature, configs[0].embedding_dim, seed=job.train.seed)
    if runtime.world_size > 1:
        vectors = vectors.to(runtime.device)
        dist.broadcast(vectors, src=0)
    return vectors.cpu()


def _checkpointer(job: Job, path: Path, runtime: Runtime) -> Checkpointer:
    """Returns the checkpointer of the run in ``path``; removes half-written files of an earlier attempt."""
    checkpointer = Checkpointer(job.checkpoint.folder or str(path / CHECKPOINTS), runtime, keep=job.checkpoint.keep)
    if runtime.is_main:
        checkpointer.folder.clean()
    return checkpointer


def _open_folder(job: Job, path: Path, *, replace: bool) -> RunFolder:
    folder = RunFolder(path, settings_of(job), replace=replace)
    folder.write(LAUNCH, launch_id())
    return folder


def settings_of(job: Job) -> dict[str, Any]:
    """Returns every setting of a job, enough for `rec.train.hybrid` to repeat the training."""
    config = dataclasses.asdict(dataclasses.replace(job, build=None, task=None))  # type: ignore[arg-type]
    return config | {
        name: f"{function.__module__}:{function.__qualname__}"
        for name, function in (("build", job.build), ("task", job.task))
    }
