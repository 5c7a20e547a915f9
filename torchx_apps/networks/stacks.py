"""StackedMembers: trains members of one shape on one rank as a stack, each with run folder, checkpoints and figures.

build() makes the networks of a job's members; apart() says why two of them cannot be stacked.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.tables import collections, initialise_tables
from torchrec_ext.networks.skeleton import first_difference
from torchrec_ext.networks.training import Member, is_over, train_stack
from torchrec_ext.schema import BatchSchema
from torchrec_ext.train.checkpoint.checkpointer import Checkpointer
from torchrec_ext.train.checkpoint.folder import (
    CheckpointFolder,
    CheckpointRanks,
    newest_good,
)
from torchrec_ext.train.checkpoint.run import RunCheckpoints, saved_position
from torchrec_ext.train.config import Record
from torchrec_ext.train.loop import Loader
from torchrec_ext.train.report.progress import RunFolder
from torchx_apps.jobs import setup, training
from torchx_apps.jobs.resuming import (
    CHECKPOINTS,
    IDS_FILE,
    MEANING,
    asked_to_stop,
    check_ids_stay,
    common_checkpoints,
    meaning_of_ids,
)
from torchx_apps.jobs.tracking import Tracking
from torchx_apps.networks import report as report
from torchx_apps.networks.config import NetworksConfig as NetworksConfig
from torchx_apps.networks.members import MemberJob
from torchx_apps.networks.report import Result
from torchx_apps.tasks.job import Job, schema_of
from torchx_apps.tasks.task import Evaluator, Task

# In the run folder of each member of a stack: lists the members.
STACK_FILE = "stack.json"
# Keys whose values all members of a stack share; their names say the checkpoints'
# folders.
_SHARED = (
    "loader.batch_size",
    "loader.negatives",
    "loader.sampling",
    "loader.shared_negatives",
    "loader.label",
    "loader.weight",
    "loader.drop_last",
    "data",
    "train.compile",
    "model.out_of_range",
    "checkpoint",
    "optimizer.tables",
    "optimizer.dense",
)
# Settings of a Job, all of a group where none is named, that change how a network is
# trained and that a stack does not have.
_OF_ONE_NETWORK = {"train": ["amp", "trace_steps"], "sync": [], "start": []}


@dataclass(frozen=True)
class Built:
    """A member with its network in memory; ``alone`` gives a reason against every stack."""

    member: MemberJob
    job: Job
    task: Task
    network: nn.Module
    schema: BatchSchema
    alone: str | None


def build(members: Sequence[MemberJob], runtime: Runtime) -> list[Built]:
    """Builds the members' networks with the weights of their seeds; members with the same data share one copy of it."""
    tasks: dict[Any, Task] = {}
    built = []
    for member in members:
        job: Job = member.job
        data_key = (job.data, job.evaluation, job.closed_form)
        if data_key not in tasks:
            tasks[data_key] = setup.load_task(job, runtime)
        task = tasks[data_key]
        job = setup.as_loaded(job, task)
        torch.manual_seed(job.train.seed)
        network = setup.build_model(job, task)
        # Tables are on the meta device until here.
        for _, collection in collections(network):
            collection.to_empty(device=runtime.device)
        initialise_tables(network, job.train.seed)
        network.to(runtime.device)
        built.append(
            Built(
                member,
                job,
                task,
                network,
                schema_of(job, task, network),
                why_alone(job),
            )
        )
    return built


def why_alone(job: Job) -> str | None:
    """Names the first setting unsupported by stacks; None if there is none."""
    if job.export != "never":
        return f"export={job.export} makes a bundle where a network is trained alone; run rec.serve.export afterwards"
    if job.ids.features:
        return f"ids.{job.ids.features[0]} is of networks that are trained alone; leave it out to stack"
    if job.pretrained:
        return f"pretrained={','.join(job.pretrained)} is of networks that are trained alone; leave it out to stack"
    for group, names in _OF_ONE_NETWORK.items():
        settings = getattr(job, group)
        usual = type(settings)()
        for name in names or [field.name for field in dataclasses.fields(settings)]:
            if (value := getattr(settings, name)) != getattr(usual, name):
                return f"{group}.{name}={value} is of networks that are trained alone; leave it out to stack"
    return None


def apart(first: Built, other: Built) -> str | None:
    """Explains why two members cannot be in one stack; None if they can."""
    for key in _SHARED:
        mine = _shared_value(first.job, key)
        theirs = _shared_value(other.job, key)
        if mine != theirs:
            return f"{key} is {mine} in '{first.member.name}' and {theirs} in '{other.member.name}'"
    return first_difference(
        {first.member.name: first.network, other.member.name: other.network}
    )


def _shared_value(job: Job, key: str) -> Any:
    if key == "checkpoint":
        return dataclasses.replace(job.checkpoint, folder="")
    return attrgetter(key)(job)


def loaders_of(built: Sequence[Built], runtime: Runtime) -> dict[str, Loader]:
    """Returns each member's loader, one for all members with the same rows and negatives."""
    by_key: dict[Any, Loader] = {}
    by_member: dict[str, Loader] = {}
    for member in built:
        key = (setup.seeded(member.job), member.job.id_dropout)
        if key not in by_key:
            by_key[key] = setup.loader_of(
                member.job, member.task, member.schema, runtime
            )
        by_member[member.member.name] = by_key[key]
    return by_member


def _is_over(checkpoint: str, epochs: int) -> bool:
    return is_over(saved_position(checkpoint), epochs)


class _Unsharded:
    """Stand-in for the DistributedModelParallel of an Evaluator, around an unsharded network."""

    def __init__(self, network: nn.Module) -> None:
        self.module = network

    def eval(self) -> None:
        self.module.eval()


class StackedMembers:
    """Trains members of one shape on one rank as a stack."""

    def __init__(
        self,
        built: Sequence[Built],
        runtime: Runtime,
        config: NetworksConfig,
        root: Path,
    ) -> None:
        self._built = {member.member.name: member for member in built}
        self._runtime = runtime
        self._config = config
        self._root = root
        self._folders: dict[str, RunFolder] = {}
        self._trackings: dict[str, Tracking] = {}
        self._evaluators: dict[str, Evaluator] = {}
        for name, member in self._built.items():
            self._evaluators[name] = member.task.evaluator(
                member.schema, _Unsharded(member.network), runtime
            )
        self._progress = report.StackProgress(list(self._built))

    def train(self) -> list[Result]:
        """Trains all members to their ends, from their last checkpoints if so configured.

        Raises:
            StackError: the members cannot be stacked after all, as the first step shows.
            RunStoppedError: SIGTERM ended the run; all members are saved.
        """
        loaders = loaders_of(list(self._built.values()), self._runtime)
        first = next(iter(self._built.values()))
        begin = self._begin()
        # Members with the same rows have one loader.
        count = len(set(map(id, loaders.values())))
        report.report_networks_start(
            first.task, self._runtime, list(self._built), count
        )
        members = {}
        for name, member in self._built.items():
            members[name] = Member(
                network=member.network,
                loader=loaders[name],
                optimizer=member.job.optimizer,
                train=member.job.train,
                seed=member.job.train.seed + 1,
                checkpoints=self._checkpoints(member, begin.get(name)),
            )
        start = time.perf_counter()
        with asked_to_stop() as stop:
            history = train_stack(
                members,
                evaluate=self._validate if first.task.validates else None,
                log=self._log,
                codistillation=self._config.codistillation,
                stop=stop,
                say=functools.partial(print, flush=True),
            )
        seconds = time.perf_counter() - start
        return [self._finish(name, history[name], seconds) for name in self._built]

    def _begin(self) -> dict[str, str]:
        """Returns each member's checkpoint to begin from, of the newest step with checkpoints of all."""
        if not self._config.resume:
            return {}
        together = CheckpointRanks(self._runtime)
        over = {}
        unfinished = {}
        for name, member in self._built.items():
            if not member.job.checkpoint.saves:
                continue
            folder = CheckpointFolder(self._folder_of(member))
            path = newest_good(folder, together)
            # A member that has ended takes no step with the others, and keeps its last
            # checkpoint.
            if path is not None and _is_over(path, member.job.train.epochs):
                over[name] = path
            else:
                unfinished[name] = folder
        paths = over | common_checkpoints(unfinished, together)
        # All members of a stack step together, so if one begins anew, all do.
        if len(paths) < len(over) + len(unfinished):
            paths = {}
        for name, path in paths.items():
            check_ids_stay(
                path, self._built[name].task, together, run=self._root / name
            )
        text = "no checkpoint of all to resume from: they begin anew"
        if paths:
            text = f"resuming from {', '.join(paths.values())}"
        print(text, flush=True)
        return paths

    def _folder_of(self, member: Built) -> str:
        return member.job.checkpoint.folder or str(
            self._root / member.member.name / CHECKPOINTS
        )

    def _checkpoints(self, member: Built, begin: str | None) -> RunCheckpoints | None:
        if not member.job.checkpoint.saves:
            return None
        checkpointer = Checkpointer(
            self._folder_of(member), self._runtime, keep=member.job.checkpoint.keep
        )
        checkpointer.folder.clean()
        about = {MEANING: meaning_of_ids(member.task)}
        return RunCheckpoints(
            checkpointer, member.job.checkpoint, resume=begin, about=about
        )

    def _validate(self, name: str) -> Record:
        with torch.no_grad():
            return self._evaluators[name].validate()

    def _log(self, name: str, record: Record) -> None:
        # Folders are made only after the first step, because it shows whether the
        # members can be stacked.
        if name not in self._folders:
            member = self._built[name]
            path = self._root / name
            settings = training.settings_of(member.job)
            self._folders[name] = RunFolder(path, settings, replace=self._config.resume)
            self._trackings[name] = Tracking.start(path, settings, member=name)
            self._folders[name].write(STACK_FILE, json.dumps(list(self._built)))
            self._folders[name].write(
                IDS_FILE, json.dumps(meaning_of_ids(member.task), indent=2)
            )
        self._folders[name].log(record)
        self._trackings[name].log(record)
        self._progress.show(name, record)

    def _finish(self, name: str, history: Sequence[Record], seconds: float) -> Result:
        member = self._built[name]
        folder = self._folders[name]
        evaluator = self._evaluators[name]
        diverged = history[-1]["kind"] == "error"
        with torch.no_grad():
            # Weights that are not finite have no figures.
            figures = {} if diverged else evaluator.test()
        result = report.result_of(
            name,
            folder.records,
            figures,
            seconds,
            (self._runtime.rank,),
            str(folder.path),
        )
        summary = {"data": member.task.name, "test": figures, "seconds": seconds}
        folder.write("summary.json", json.dumps(summary, indent=2))
        if self._config.weights:
            # A member's weights are views of the stack's, and torch.save() would write
            # the whole storage.
            weights = {
                key: value.clone() for key, value in member.network.state_dict().items()
            }
            torch.save(weights, folder.path / "weights.pt")
        baseline = evaluator.baseline("validation") if member.task.validates else None
        folder.close(baseline, baseline_name=member.task.baseline_name)
        self._trackings[name].end()
        return result
