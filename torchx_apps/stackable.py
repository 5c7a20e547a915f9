"""Which members of a job can be one stack: build() makes their networks, apart() says why two of them cannot be stacked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchrec_ext.data.id_dropout import IdDropout
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.tables import collections, initialise_tables
from torchrec_ext.networks.same_shape import difference
from torchrec_ext.schema import BatchSchema
from torchrec_ext.train.loop import Loader
from torchx_apps import training
from torchx_apps.job import Job, Task, schema_of
from torchx_apps.members import MemberJob

_ROWS = ("batch_size", "negatives", "sampling", "shared_negatives", "label", "weight", "drop_last")
# Settings of a Job, all of a group where none is named, that change how a network is trained and that a stack does not have.
_OF_ONE_NETWORK = {"train": ["amp", "on_nan", "trace_steps"], "sync": [], "start": []}


@dataclass(frozen=True)
class Built:
    """A member whose network is in memory; ``alone`` says why it cannot be in any stack."""

    member: MemberJob
    job: Job
    task: Task
    network: nn.Module
    schema: BatchSchema
    alone: str | None


def build(members: Sequence[MemberJob], runtime: Runtime) -> list[Built]:
    """Their networks with the weights of their seeds; members with the same data share one copy of it."""
    tasks: dict[Any, Task] = {}
    built = []
    for member in members:
        job: Job = member.job
        if job.data not in tasks:
            tasks[job.data] = training.load_task(job, runtime)
        task = tasks[job.data]
        job = dataclasses.replace(job, data=dataclasses.replace(job.data, name=task.name))
        torch.manual_seed(job.train.seed)
        network = training.build_model(job, task)
        for _, collection in collections(network):
            collection.to_empty(device=runtime.device)
        initialise_tables(network, job.train.seed)
        network.to(runtime.device)
        built.append(Built(member, job, task, network, schema_of(job, task, network), why_alone(job)))
    return built


def why_alone(job: Job) -> str | None:
    """What of the settings no stack has."""
    if job.train.compile == "require":
        return "train.compile=require captures the step of one network; leave it out to stack"
    if job.loader.sampling == "hard" and job.loader.negatives:
        return "loader.sampling=hard asks one model for its hardest items, and a stack has several"
    for group, names in _OF_ONE_NETWORK.items():
        settings = getattr(job, group)
        usual = type(settings)()
        for name in names or [field.name for field in dataclasses.fields(settings)]:
            if (value := getattr(settings, name)) != getattr(usual, name):
                return f"{group}.{name}={value} is of networks that are trained alone; leave it out to stack"
    return None


def apart(first: Built, other: Built) -> str | None:
    """Why two members cannot be one stack."""
    one, two = first.job, other.job
    pairs: list[tuple[str, Any, Any]] = [(f"loader.{name}", getattr(one.loader, name), getattr(two.loader, name)) for name in _ROWS]
    pairs += [("data", one.data, two.data), ("model.out_of_range", one.model.out_of_range, two.model.out_of_range)]
    pairs += [("checkpoint", dataclasses.replace(one.checkpoint, folder=""), dataclasses.replace(two.checkpoint, folder=""))]
    pairs += [(f"optimizer.{name}", getattr(one.optimizer, name), getattr(two.optimizer, name)) for name in ("tables", "dense")]
    for key, mine, theirs in pairs:
        if mine != theirs:
            return f"{key} is {mine} in '{first.member.name}' and {theirs} in '{other.member.name}'"
    return difference({first.member.name: first.network, other.member.name: other.network})


def loaders_of(built: Sequence[Built], runtime: Runtime) -> dict[str, Loader]:
    """One loader for all members whose rows and negatives are the same."""
    made: dict[Any, Loader] = {}
    found: dict[str, Loader] = {}
    for one in built:
        config = dataclasses.replace(one.job.loader, seed=one.job.train.seed + one.job.loader.seed)
        key = (config, one.job.id_dropout)
        if key not in made:
            loader: Any = one.task.loader(one.schema, config, rank=runtime.rank, world_size=runtime.world_size)
            if one.job.id_dropout:
                loader = IdDropout(loader, one.schema, one.job.id_dropout_rates(), seed=config.seed)
            made[key] = loader
        found[one.member.name] = made[key]
    return found
