"""StackedMembers: members of one shape on one rank, trained as one stack, each with its run folder, checkpoints and figures."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.networks.saving import is_over
from torchrec_ext.networks.training import Member, train_stack
from torchrec_ext.train.checkpoint.checkpointer import Checkpointer
from torchrec_ext.train.checkpoint.folder import CheckpointFolder
from torchrec_ext.train.checkpoint.reading import newest_good, read_manifest
from torchrec_ext.train.checkpoint.run_checkpoints import Position, RunCheckpoints
from torchrec_ext.train.checkpoint.together import Together
from torchrec_ext.train.config import Record
from torchrec_ext.train.run_folder import RunFolder
from torchx_apps import networks_report as report
from torchx_apps.job import Job, Judge
from torchx_apps.networks_config import NetworksConfig
from torchx_apps.networks_report import Result
from torchx_apps.resuming import CHECKPOINTS, asked_to_stop, common_checkpoints
from torchx_apps.stackable import Built, loaders_of

STACK_FILE = "stack.json"  # in the run folder of each member of a stack: who they are


class _Unsharded:
    """A network in the place of the DistributedModelParallel that a judge asks."""

    def __init__(self, network: nn.Module) -> None:
        self.module = network

    def eval(self) -> None:
        self.module.eval()


class StackedMembers:
    """Members of one shape on one rank."""

    def __init__(self, built: Sequence[Built], runtime: Runtime, config: NetworksConfig, root: Path) -> None:
        self._built = {one.member.name: one for one in built}
        self._runtime, self._config, self._root = runtime, config, root
        self._folders: dict[str, RunFolder] = {}
        self._judges = {name: self._judge(one) for name, one in self._built.items()}
        self._progress = report.StackProgress(list(self._built))

    def _judge(self, one: Built) -> Judge:
        return one.task.judge(one.schema, _Unsharded(one.network), self._runtime)  # type: ignore[arg-type]

    def train(self) -> list[Result]:
        """All of them to their ends, from where they were last saved if so configured.

        Raises:
            StackError: they cannot be stacked after all, which the first step shows.
            RunStoppedError: after SIGTERM; all are saved.
        """
        loaders = loaders_of(list(self._built.values()), self._runtime)
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

    def _folder_of(self, one: Built) -> str:
        return one.job.checkpoint.folder or str(self._root / one.member.name / CHECKPOINTS)

    def _checkpoints(self, one: Built, begin: str | None) -> RunCheckpoints | None:
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
            self._folders[name].write(STACK_FILE, json.dumps(list(self._built)))
        self._folders[name].log(record)
        self._progress.show(name, record)

    def _finish(self, name: str, history: Sequence[Record], seconds: float) -> Result:
        one, folder, judge = self._built[name], self._folders[name], self._judges[name]
        diverged = history[-1]["kind"] == "error"
        with torch.no_grad():
            figures = {} if diverged else judge.test()
        result = report.result_of(name, folder.records, figures, seconds, (self._runtime.rank,), str(folder.path))
        folder.write("summary.json", json.dumps({"data": one.task.name, "test": figures, "seconds": seconds}, indent=2))
        if self._config.weights:
            torch.save({key: value.clone() for key, value in one.network.state_dict().items()}, folder.path / "weights.pt")
        beside = judge.baseline("validation") if one.task.validates else None
        folder.close(beside, baseline_name=one.task.baseline_name)
        return result


def _described(job: Job) -> dict[str, Any]:
    """Every setting of a job, so that `rec.train.hybrid` with the same trains the same."""
    config = dataclasses.asdict(dataclasses.replace(job, build=None, task=None))  # type: ignore[arg-type]
    return config | {name: f"{made.__module__}:{made.__qualname__}" for name, made in (("build", job.build), ("task", job.task))}
