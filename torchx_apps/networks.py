"""run(): several networks in one job. Members of one shape on one rank are stacked, others are trained in turn, groups at once.

Who reads: all members of a rank that ask for the same rows take the batches of one loader, each batch built once and handed to all
as one object. Ranks read for themselves, each from its own copy of the set: a batch from memory takes longer to hand over than to
build (benchmarks/networks.py, row `one-reader`), and sharing one would make each network wait for the slowest.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchrec_ext.data.id_dropout import IdDropout
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.tables import collections, initialise_tables
from torchrec_ext.networks.gpu_sharing import gpu_sharing
from torchrec_ext.networks.peers import Codistillation
from torchrec_ext.networks.same_shape import difference
from torchrec_ext.networks.saving import is_over
from torchrec_ext.networks.skeleton import StackError
from torchrec_ext.networks.training import Member, train_stack
from torchrec_ext.schema import BatchSchema
from torchrec_ext.train.checkpoint.checkpointer import Checkpointer
from torchrec_ext.train.checkpoint.folder import CheckpointFolder
from torchrec_ext.train.checkpoint.reading import newest_good, read_manifest
from torchrec_ext.train.checkpoint.run_checkpoints import Position, RunCheckpoints
from torchrec_ext.train.checkpoint.together import Together
from torchrec_ext.train.finite import TrainingDivergedError
from torchrec_ext.train.loop import Loader, Record
from torchrec_ext.train.run_folder import RunFolder
from torchx_apps import networks_report as report
from torchx_apps import training
from torchx_apps.job import Job, Judge, Task
from torchx_apps.members import MemberJob
from torchx_apps.networks_report import Result
from torchx_apps.rank_groups import RankGroup, World, group_of
from torchx_apps.resuming import (
    CHECKPOINTS,
    LAUNCH,
    asked_to_stop,
    common_checkpoints,
    ended,
    launch_id,
    newest_networks,
    restarted,
)

_ROWS = ("batch_size", "negatives", "sampling", "shared_negatives", "label", "weight", "drop_last")
# Settings of a Job, all of a group where none is named, that change how a network is trained and that a stack does not have.
_OF_ONE_NETWORK = {"train": ["amp", "on_nan", "trace_steps"], "sync": [], "start": []}
_STACK = "stack.json"  # in the run folder of each member of a stack: who they are


@dataclass(frozen=True, kw_only=True)
class NetworksConfig:
    """How the members are trained.

    Args:
        stack: ``auto``: members of one shape on one rank are stacked, others trained in turn; ``require``: members that cannot be
            stacked are refused; ``never``: all in turn.
        codistillation: how stacked members learn from each other.
        weights: write each stacked member's state dict into its folder as ``weights.pt``.
        resume: ``auto``: members that have ended stay as they are, and the others go on where all of a stack were last saved;
            ``never``: all begin anew.
    """

    stack: str = "auto"
    codistillation: Codistillation = dataclasses.field(default_factory=Codistillation)
    weights: bool = False
    resume: str = "never"

    def __post_init__(self) -> None:
        if self.resume not in ("auto", "never"):
            raise ValueError(
                f"--resume {self.resume}: several networks go on in their own folder; give --resume auto, with --run-dir"
            )
        if self.stack not in ("auto", "require", "never"):
            raise ValueError(f"--stack {self.stack}: must be auto, require or never")
        if self.stack == "never" and self.codistillation.weight:
            raise ValueError("--codistill with --stack never: peers predict for each other inside a stack; use --stack auto")


def run(
    members: Sequence[MemberJob], groups: Sequence[RankGroup], world: World, config: NetworksConfig, run_dir: Path | None = None
) -> bool:
    """Trains the members on the ranks of their groups; rank 0 prints the table and writes it.

    Args:
        members: of all groups.
        groups: which ranks train which.
        world: the ranks of the job.
        config: how.
        run_dir: with a folder for each member.

    Returns:
        Whether any member was trained to its end.
    """
    training.quieten_libraries()
    if restarted():
        config = dataclasses.replace(config, resume="auto")
    members = [_in_its_own_folder(member) for member in members]
    if world.rank == 0:
        world.tell("folder", str(_root(members[0].job.name, run_dir, config)))
    root = Path(world.told(["folder"])[0])
    mine = group_of(groups, world.rank)
    number = groups.index(mine)
    own = [member for member in members if member.name in mine.members]
    try:
        trained = _Group(own, mine, number, world, config, root).train()
    finally:
        world.widen()
    if world.rank == mine.ranks[0]:
        world.tell(f"results/{number}", json.dumps([dataclasses.asdict(result) for result in trained]))
    if world.rank != 0:
        return True
    told = [json.loads(text) for text in world.told([f"results/{number}" for number in range(len(groups))])]
    results = {result["name"]: Result(**result) for own in told for result in own}
    return report.finish(root, members, [results[member.name] for member in members])


def _root(recipe: str, run_dir: Path | None, config: NetworksConfig) -> Path:
    """The folder of the job, which says of which launch it is."""
    newest = newest_networks(recipe, launch=launch_id() if restarted() else None) if config.resume == "auto" else None
    root = run_dir or newest or Path("runs") / f"networks-{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    root.mkdir(parents=True, exist_ok=True)
    (root / LAUNCH).write_text(launch_id() + "\n")
    return root


def _in_its_own_folder(member: MemberJob) -> MemberJob:
    """Each network's checkpoints by themselves, also where one folder is given for all."""
    saved = member.job.checkpoint
    if not saved.folder:
        return member
    own = dataclasses.replace(saved, folder=f"{saved.folder.rstrip('/')}/{member.name}")
    return dataclasses.replace(member, job=dataclasses.replace(member.job, checkpoint=own))


class _Group:
    """The members of one rank group, as this rank trains them."""

    def __init__(
        self, members: Sequence[MemberJob], group: RankGroup, number: int, world: World, config: NetworksConfig, root: Path
    ) -> None:
        self._members, self._group, self._number, self._world = members, group, number, world
        self._config, self._root = config, root
        self._worlds = 0

    def train(self) -> list[Result]:
        found = self._ended()
        if len(self._group.ranks) == 1 and len(self._members) > 1 and self._config.stack != "never":
            found += self._train_stacks([member for member in self._members if member.name not in {one.name for one in found}])
        elif self._config.stack == "require" or self._config.codistillation.weight:
            raise ValueError(
                f"{list(self._group.members)} on ranks {list(self._group.ranks)}: members are stacked on one rank, two or more of "
                "them; place them so with --groups, or leave out --stack require and --codistill"
            )
        done = {result.name for result in found}
        found += [self._train_alone(member) for member in self._members if member.name not in done]
        return found

    def _ended(self) -> list[Result]:
        """The members that an earlier attempt has trained to their end; the first rank looks for all of the group."""
        if self._config.resume == "never":
            return []
        key = f"ended/{self._number}"
        if self._world.rank == self._group.ranks[0]:
            self._world.tell(key, json.dumps([one.name for one in self._members if ended(self._root / one.name)]))
        names = json.loads(self._world.told([key])[0])
        return [
            report.read_result(one, self._root / one.name, None, self._group.ranks) for one in self._members if one.name in names
        ]

    def _narrow(self) -> None:
        self._world.narrow(self._group, f"{self._number}/{self._worlds}")
        self._worlds += 1

    def _train_stacks(self, members: Sequence[MemberJob]) -> list[Result]:
        if not members:
            return []
        self._narrow()
        job = self._members[0].job
        with Runtime.start(job.device, threads=job.threads) as runtime:
            if (note := gpu_sharing(runtime.device, self._world.processes_per_gpu, os.environ)) is not None:
                print(note)
            built = _build(members, runtime)
            results = []
            for stack in self._stacks(built):
                try:
                    results += _Stacked(stack, runtime, self._config, self._root).train()
                except StackError as error:
                    self._not_stacked([one.member.name for one in stack], str(error))
            return results

    def _stacks(self, built: Sequence[_Built]) -> list[list[_Built]]:
        """Members of one shape, two or more; or the last of a stack of which the others have ended before."""
        stacks: list[list[_Built]] = []
        for one in built:
            reasons = [_apart(stack[0], one) for stack in stacks]
            if None in reasons and not one.alone:
                stacks[reasons.index(None)].append(one)
                continue
            if reasons or one.alone:
                self._not_stacked([one.member.name], one.alone or str(reasons[0]))
            stacks.append([one])
        resumed = self._config.resume == "auto"
        return [stack for stack in stacks if len(stack) > 1 or (resumed and (self._root / stack[0].member.name / _STACK).exists())]

    def _not_stacked(self, names: Sequence[str], reason: str) -> None:
        if self._config.stack == "require" or self._config.codistillation.weight:
            raise ValueError(f"{', '.join(names)}: cannot be stacked: {reason}")
        print(f"note: {', '.join(names)}: not stacked: {reason}", flush=True)

    def _train_alone(self, member: MemberJob) -> Result:
        self._narrow()
        start = time.perf_counter()
        folder = self._root / member.name
        if self._world.rank == self._group.ranks[0]:
            print(f"\n{member.name}: on rank(s) {', '.join(map(str, self._group.ranks))}", flush=True)
        try:
            training.run(member.job, folder, resume=self._config.resume)
        except TrainingDivergedError as error:
            print(f"{member.name}: {error}", flush=True)
        if self._world.rank != self._group.ranks[0]:
            return Result(name=member.name)
        return report.read_result(member, folder, time.perf_counter() - start, self._group.ranks)


@dataclass(frozen=True)
class _Built:
    """A member whose network is in memory; ``alone`` says why it cannot be in any stack."""

    member: MemberJob
    job: Job
    task: Task
    network: nn.Module
    schema: BatchSchema
    alone: str | None


def _build(members: Sequence[MemberJob], runtime: Runtime) -> list[_Built]:
    tasks: dict[Any, Task] = {}
    built = []
    for member in members:
        job: Job = member.job
        if job.data not in tasks:
            tasks[job.data] = training.load_task(job, runtime)
        task = tasks[job.data]
        job = dataclasses.replace(job, data=dataclasses.replace(job.data, name=task.name))
        torch.manual_seed(job.train.seed)
        network = job.build(job.model, task.data)
        for _, collection in collections(network):
            collection.to_empty(device=runtime.device)
        initialise_tables(network, job.train.seed)
        network.to(runtime.device)
        built.append(_Built(member, job, task, network, network.schema(out_of_range=job.model.out_of_range), _alone(job)))
    return built


def _alone(job: Job) -> str | None:
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


def _apart(first: _Built, other: _Built) -> str | None:
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


class _Unsharded:
    """A network in the place of the DistributedModelParallel that a judge asks."""

    def __init__(self, network: nn.Module) -> None:
        self.module = network

    def eval(self) -> None:
        self.module.eval()


class _Stacked:
    """Members of one shape on one rank."""

    def __init__(self, built: Sequence[_Built], runtime: Runtime, config: NetworksConfig, root: Path) -> None:
        self._built = {one.member.name: one for one in built}
        self._runtime, self._config, self._root = runtime, config, root
        self._folders: dict[str, RunFolder] = {}
        self._judges = {name: self._judge(one) for name, one in self._built.items()}
        self._progress = report.StackProgress(list(self._built))

    def _judge(self, one: _Built) -> Judge:
        return one.task.judge(one.schema, _Unsharded(one.network), self._runtime)  # type: ignore[arg-type]

    def train(self) -> list[Result]:
        loaders = _loaders(list(self._built.values()), self._runtime)
        first = next(iter(self._built.values()))
        begin = self._begin()
        report.say_start(first.task, self._runtime, list(self._built), len({id(loader) for loader in loaders.values()}))
        members = {
            name: Member(
                network=one.network,
                loader=loaders[name],
                optimizer=one.job.optimizer,
                train=one.job.train,
                seed=one.job.train.seed + 1,
                checkpoints=self._checkpoints(one, begin.get(name)),
            )
            for name, one in self._built.items()
        }
        start = time.perf_counter()
        validate: Callable[[str], Record] | None = self._validate if first.task.validates else None
        with asked_to_stop() as stop:
            history = train_stack(members, evaluate=validate, log=self._log, codistillation=self._config.codistillation, stop=stop)
        seconds = time.perf_counter() - start
        return [self._finish(name, history[name], seconds) for name in self._built]

    def _begin(self) -> dict[str, str]:
        """By member the checkpoint to begin from: of the newest step at which all were saved."""
        if self._config.resume == "never":
            return {}
        folders = {name: CheckpointFolder(self._folder_of(one)) for name, one in self._built.items() if one.job.checkpoint.saves}
        together = Together(self._runtime)
        last = {name: path for name, folder in folders.items() if (path := newest_good(folder, together)) is not None}
        over = {name: path for name, path in last.items() if self._is_over(name, path)}
        left = {name: folder for name, folder in folders.items() if name not in over}
        found = over | common_checkpoints(left, together)
        if len(found) < len(folders):  # some begin anew, and all of a stack step together
            found = {}
        print(
            f"resuming from {', '.join(found.values())}" if found else "no checkpoint of all to resume from: they begin anew",
            flush=True,
        )
        return found

    def _is_over(self, name: str, path: str) -> bool:
        return is_over(Position(**read_manifest(path)["content"]["position"]), self._built[name].job.train.epochs)

    def _folder_of(self, one: _Built) -> str:
        return one.job.checkpoint.folder or str(self._root / one.member.name / CHECKPOINTS)

    def _checkpoints(self, one: _Built, begin: str | None) -> RunCheckpoints | None:
        if not one.job.checkpoint.saves:
            return None
        checkpointer = Checkpointer(self._folder_of(one), self._runtime, keep=one.job.checkpoint.keep)
        checkpointer.folder.clean()
        return RunCheckpoints(checkpointer, one.job.checkpoint, resume=begin)

    def _validate(self, name: str) -> Record:
        with torch.no_grad():
            return self._judges[name].validate()

    def _log(self, name: str, record: Record) -> None:
        if name not in self._folders:  # not before the first step, which shows whether the members can be stacked
            one = self._built[name]
            self._folders[name] = RunFolder(self._root / name, _described(one.job), replace=self._config.resume == "auto")
            self._folders[name].write(_STACK, json.dumps(list(self._built)))
        self._folders[name].log(record)
        self._progress.show(name, record)

    def _finish(self, name: str, history: Sequence[Record], seconds: float) -> Result:
        one, folder, judge = self._built[name], self._folders[name], self._judges[name]
        diverged = history[-1]["kind"] == "error"
        with torch.no_grad():
            figures = {} if diverged else judge.test()
        result = report.result_of(name, history, figures, seconds, (self._runtime.rank,), str(folder.path))
        folder.write("summary.json", json.dumps({"data": one.task.name, "test": figures, "seconds": seconds}, indent=2))
        if self._config.weights:
            torch.save({key: value.clone() for key, value in one.network.state_dict().items()}, folder.path / "weights.pt")
        beside = judge.baseline("validation") if one.task.validates else None
        folder.close(beside, baseline_name=one.task.baseline_name)
        return result


def _loaders(built: Sequence[_Built], runtime: Runtime) -> dict[str, Loader]:
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


def _described(job: Job) -> dict[str, Any]:
    """Every setting of a job, so that `rec.train.hybrid` with the same trains the same."""
    config = dataclasses.asdict(dataclasses.replace(job, build=None, task=None))  # type: ignore[arg-type]
    return config | {name: f"{made.__module__}:{made.__qualname__}" for name, made in (("build", job.build), ("task", job.task))}
