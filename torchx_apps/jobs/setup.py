"""A job's parts on its ranks: its data, model and loader, and where its tables are."""

from __future__ import annotations

import dataclasses
import logging
import os
import warnings
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan

from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.data.loader.dynamic_ids import DynamicIdLoader
from torchrec_ext.data.loader.id_dropout import drop_ids
from torchrec_ext.data.loader.loader import ChunkLoader
from torchrec_ext.distributed.optim.hybrid import HybridOptimizer
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.explain import explain
from torchrec_ext.distributed.plan.planner import (
    SMALL_NOTE,
    plan_sharding,
    small_tables_whole,
)
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.retrieval import RetrievalModel
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.config import LOSSES
from torchrec_ext.schema import BatchSchema
from torchx_apps.tasks.dynamic_ids import DataWithTables, check_raw_ids, numbered
from torchx_apps.tasks.job import Job, dynamic_ids_of, schema_of, schema_settings
from torchx_apps.tasks.task import Evaluator, Task

_FORMAT = warnings.formatwarning


class JobParts(NamedTuple):
    """A job as it is loaded and placed, with the parts that it trains.

    Attributes:
        job: the job, with the columns of its labels.
        model: the untrained model, its tables on the meta device.
        schema: schema of the model's batches.
        loader: this rank's training batches.
        plan: where the tables are.
        plan_text: explanation of the plan.
    """

    job: Job
    model: nn.Module
    schema: BatchSchema
    loader: Any
    plan: ShardingPlan
    plan_text: str


def set_up(job: Job, task: Task, runtime: Runtime) -> JobParts:
    """Builds a job's model and loader, and plans where its tables are. Collective.

    Args:
        job: the job.
        task: its loaded data.
        runtime: this rank's runtime.
    """
    job = as_loaded(job, task)
    # Before the model is built: its first weights come from the seed, on all ranks
    # alike.
    torch.manual_seed(job.train.seed)
    model = build_model(job, task)
    schema = schema_of(job, task, model)
    loader = loader_of(job, task, schema, runtime)
    plan, text = plan_job(job, model, runtime)
    return JobParts(job, model, schema, loader, plan, text)


def load_task(job: Job, runtime: Runtime) -> Task:
    """Loads the job's data on every rank.

    Raises:
        ValueError: the set is not to be had, or what the recipe's ``task`` returns is no :class:`Task`.
    """
    task = job.task(job.data)
    if not isinstance(task, Task):
        raise ValueError(
            f"recipe '{job.name}': its task returned a {type(task).__name__}; derive it from "
            "torchx_apps.tasks.task.Task, which has defaults for what it does not say"
        )
    return task.with_evaluation(job.evaluation)


def as_loaded(job: Job, task: Task) -> Job:
    """Returns the job with the columns of its set's labels."""
    return dataclasses.replace(job, loader=task.with_roles(job.loader))


def build_model(job: Job, task: Task) -> nn.Module:
    """Builds the untrained model of a job; it predicts the training rows' share of positives if that is known.

    Raises:
        ValueError: its loss cannot learn from the rows that the job's loader makes, or the job must end with a bundle,
            and rows or towers cannot be served.
    """
    model = untrained_model(job, task)
    if job.export == "require" and (reason := task.unservable(model)):
        raise ValueError(f"export=require: {reason}")
    if job.export == "require" and job.ids.features:
        names = chain.from_iterable(map(task.same_ids, job.ids.features))
        check_raw_ids(task.data.preprocessor, names)
    # Before a checkpoint is loaded: a run that goes on takes the bias that was saved.
    if isinstance(model, TowerModel):
        model.expect_rows(negatives=job.loader.negatives, label=job.loader.label)
        shares = task.positives(job.loader, model.schema(**schema_settings(job)).tasks)
        if shares:
            model.begin_at(shares)
    return model


def untrained_model(job: Job, task: Task) -> nn.Module:
    """Calls ``Job.build``; with dynamic ids a model's counts of items are those of its data, and no checkpoint's."""
    try:
        model: nn.Module = job.build(job.model, data_for_build(job, task))
    except ValueError as error:
        # A module names its argument, which may be a setting by the same name.
        if hasattr(job.model, str(error).partition("=")[0]):
            raise ValueError(f"model.{error}") from None
        raise
    # Another day's catalogue has other counts, of another size.
    if job.ids.features and isinstance(model, RetrievalModel):
        model.leave_out_counts()
    return model


def data_for_build(job: Job, task: Task) -> Any:
    """Returns the data for ``Job.build``; a column with dynamic ids has as many rows as its table's capacity.

    Raises:
        ValueError: the task has no raw ids of a column.
    """
    policies = job.ids.features
    if not policies:
        return task.data
    rows: dict[str, int] = {}
    for name, policy in policies.items():
        # Refuses a task without raw ids by name.
        task.raw_values(name)
        rows |= dict.fromkeys(task.same_ids(name), policy.capacity)
    rows |= {name: policy.capacity for name, policy in policies.items()}
    return DataWithTables(task.data, rows)


def seeded(job: Job) -> LoaderConfig:
    """Returns the loader's settings with both seeds added: loader.seed changes order and negatives, train.seed all."""
    return dataclasses.replace(job.loader, seed=job.train.seed + job.loader.seed)


def loader_of(job: Job, task: Task, schema: BatchSchema, runtime: Runtime) -> Any:
    """Returns the loader of this rank's training batches.

    Raises:
        ValueError: ``loader.device`` is another device than the one that trains.
    """
    config = seeded(job)
    trains = runtime.device.type
    if config.device not in (None, trains):
        raise ValueError(
            f"loader.device={config.device}: the job trains on {trains}; give loader.device={trains}, or leave it out"
        )
    loader = task.loader(
        schema, config, rank=runtime.rank, world_size=runtime.world_size
    )
    samples = (
        loader.num_samples if isinstance(loader, ChunkLoader) else config.batch_size
    )
    if samples < config.batch_size and runtime.is_main:
        print(
            f"note: loader.batch_size={config.batch_size} is more than an epoch has: each step takes all {samples:,} "
            "samples"
        )
    _check_local_steps(job, runtime)
    if job.ids.features:
        raw_ids = {name: numbered(task.raw_values(name)) for name in schema.dynamic}
        policies = dynamic_ids_of(job, task, schema)
        return DynamicIdLoader(
            loader, schema, policies, every=job.ids.every, raw_ids=raw_ids
        )
    if job.id_dropout:
        return drop_ids(loader, schema, job.id_dropout, seed=config.seed)
    return loader


def evaluator_of(
    task: Task,
    schema: BatchSchema,
    loader: Any,
    model: DistributedModelParallel,
    runtime: Runtime,
) -> Evaluator:
    """Returns the task's evaluator; dynamic ids have their rows of training there."""
    evaluator = task.evaluator(schema, model, runtime)
    if isinstance(loader, DynamicIdLoader):
        evaluator.rows = loader.rows
    return evaluator


def _check_local_steps(job: Job, runtime: Runtime) -> None:
    """Refuses a softmax over the catalogue whose item towers drift apart between two exchanges.

    Raises:
        ValueError: naming the settings.
    """
    loss: Any = getattr(job.model, "loss", None)
    local_steps = job.sync.takes_local_steps and runtime.world_size > 1
    if (
        local_steps
        and loss in LOSSES
        and LOSSES[loss].catalogue
        and hasattr(job.model, "tower_widths")
    ):
        raise ValueError(
            f"sync.mode={job.sync.mode} with model.loss=catalogue: item towers drift apart between "
            "exchanges; set sync.mode=every_step, or model.loss=in_batch"
        )


def plan_job(job: Job, model: nn.Module, runtime: Runtime) -> tuple[ShardingPlan, str]:
    """Plans the model's tables; returns the plan and its explanation."""
    rows = job.loader.rank_rows(runtime.world_size)
    config = small_tables_whole(model, runtime, job.plan, job.optimizer, job.sync)
    plan = plan_sharding(
        model, runtime, config, optimizer=job.optimizer, batch_size=rows
    )
    text = explain(plan, model, runtime.world_size, optimizer=job.optimizer)
    return plan, text if config is job.plan else f"{text}\n{SMALL_NOTE}"


def shard_job(
    parts: JobParts, runtime: Runtime
) -> tuple[DistributedModelParallel, HybridOptimizer]:
    """Shards the model over the ranks."""
    job = parts.job
    return hybrid_parallel(
        parts.model,
        runtime,
        plan=parts.plan,
        optimizer=job.optimizer,
        seed=job.train.seed,
    )


def quieten_libraries() -> None:
    """Silences torch's and torchrec's warnings to their developers; LOGLEVEL=INFO shows them."""
    if os.environ.get("LOGLEVEL", "WARNING").upper() in ("INFO", "DEBUG"):
        return
    warnings.formatwarning = _one_line  # type: ignore[assignment]
    # torch.profiler's library reads the variable when first used.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    logging.getLogger().setLevel(logging.ERROR)
    # Of any module: torch names the line that calls it, or one of Python's own.
    for category in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category)
    for library in ("torch", "torchrec", "fbgemm_gpu"):
        logging.getLogger(library).setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", category=UserWarning, module=rf"{library}\b")
    if os.environ.get("RANK", "0") != "0":
        # Every rank loads the same set: what is to be said of it, the first one says.
        # Of a loader each rank reads other files, which it alone may know to be slow.
        warnings.filterwarnings(
            "ignore",
            category=UserWarning,
            module=r"torchrec_ext\.data\.(sets|prepared)\b",
        )


def _one_line(message: Warning | str, category: type[Warning], *place: Any) -> str:
    """Formats a UserWarning without its line of code; other warnings as Python does."""
    if category is UserWarning:
        return f"warning: {message}\n"
    return _FORMAT(message, category, *place)
