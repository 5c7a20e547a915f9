"""run_networks(): trains several networks in one job.

Members of one shape on one rank are stacked, others are trained in turn, and groups of ranks train at once. All members
of a rank that ask for the same rows take the batches of one loader, each batch built once. Ranks read for themselves,
each from its own copy of the set: a batch from memory takes longer to send than to build (4 ms against 1.1, between two
ranks over gloo), and a shared one would make each network wait for the slowest.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from torchrec_ext.capture.policy import TrainingDivergedError
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.networks.gpu_sharing import gpu_sharing
from torchrec_ext.networks.skeleton import StackError
from torchrec_ext.train.checkpoint.folder import check_shared
from torchx_apps.jobs import setup, training
from torchx_apps.jobs.resuming import (
    check_recipe,
    ended,
    new_run,
)
from torchx_apps.networks import report as report
from torchx_apps.networks.members import MemberJob, RankGroup, World, group_of
from torchx_apps.networks.report import Result
from torchx_apps.networks.stacks import (
    STACK_FILE,
    Built,
    NetworksConfig,
    StackedMembers,
    apart,
    build,
)


def run_networks(
    members: Sequence[MemberJob],
    groups: Sequence[RankGroup],
    world: World,
    config: NetworksConfig,
    run_dir: Path | None = None,
) -> bool:
    """Trains the members on the ranks of their groups; rank 0 prints the table and writes it.

    Args:
        members: members of all groups.
        groups: groups of ranks with their members.
        world: the ranks of the job.
        config: settings of the job.
        run_dir: folder of the job, with a folder for each member; by default a new one.

    Returns:
        Whether any member was trained to its end.
    """
    setup.quieten_libraries()
    members = [_in_its_own_folder(member) for member in members]
    root, config = _begin(members[0].job.name, run_dir, config, world)
    mine = group_of(groups, world.rank)
    number = groups.index(mine)
    local = [member for member in members if member.name in mine.members]
    try:
        trained = _Group(local, mine, number, world, config, root).train()
    finally:
        world.widen()
    # Only the first rank of a group has its figures.
    if world.rank == mine.ranks[0]:
        world.send(
            f"results/{number}",
            json.dumps([dataclasses.asdict(result) for result in trained]),
        )
    if world.rank != 0:
        return True
    results: dict[str, Result] = {}
    for number in range(len(groups)):
        for result in json.loads(world.receive(f"results/{number}")):
            results[result["name"]] = Result(**result)
    return report.finish_networks(
        root, members, [results[member.name] for member in members]
    )


def _begin(
    recipe: str, run_dir: Path | None, config: NetworksConfig, world: World
) -> tuple[Path, NetworksConfig]:
    """Makes the job's folder on rank 0; returns it and the settings for all ranks to begin with."""
    if world.rank == 0:
        root = run_dir or new_run(f"networks-{recipe}")
        begun = root.is_dir()
        check_recipe(f"--run_dir {root}", root, recipe)
        root.mkdir(parents=True, exist_ok=True)
        world.send("begin", json.dumps([str(root), begun]))
    folder, begun = json.loads(world.receive("begin"))
    # Nodes without a shared folder would each write a part of the checkpoints, and end
    # without an error.
    if world.size > 1:
        check_shared(folder, world.rank, world.gathered)
    return Path(folder), dataclasses.replace(config, resume=begun)


def _in_its_own_folder(member: MemberJob) -> MemberJob:
    """Gives each network a folder of checkpoints of its own, even if one folder is set for all."""
    saved = member.job.checkpoint
    if not saved.folder:
        return member
    config = dataclasses.replace(
        saved, folder=f"{saved.folder.rstrip('/')}/{member.name}"
    )
    return dataclasses.replace(
        member, job=dataclasses.replace(member.job, checkpoint=config)
    )


class _Group:
    """Trains the members of one rank group on this rank."""

    def __init__(
        self,
        members: Sequence[MemberJob],
        group: RankGroup,
        number: int,
        world: World,
        config: NetworksConfig,
        root: Path,
    ) -> None:
        self._members = members
        self._group = group
        self._number = number
        self._world = world
        self._config = config
        self._root = root
        self._worlds = 0

    def train(self) -> list[Result]:
        results = self._ended()
        # Stacks first: what cannot be stacked is trained alone below.
        if (
            len(self._group.ranks) == 1
            and len(self._members) > 1
            and self._config.stack != "never"
        ):
            earlier = {result.name for result in results}
            results += self._train_stacks(
                [member for member in self._members if member.name not in earlier]
            )
        elif self._config.stack == "require" or self._config.codistillation.weight:
            raise ValueError(
                f"{list(self._group.members)} on ranks {list(self._group.ranks)}: members are stacked on one rank, two "
                "or more of them; place them so with --groups, or leave out --stack require and --codistill"
            )
        finished = {result.name for result in results}
        results += [
            self._train_alone(member)
            for member in self._members
            if member.name not in finished
        ]
        return results

    def _ended(self) -> list[Result]:
        """Results of members trained to the end by an earlier attempt; the group's first rank looks them up."""
        if not self._config.resume:
            return []
        key = f"ended/{self._number}"
        if self._world.rank == self._group.ranks[0]:
            finished = [
                member.name
                for member in self._members
                if ended(self._root / member.name)
            ]
            self._world.send(key, json.dumps(finished))
        names = json.loads(self._world.receive(key))
        members = [member for member in self._members if member.name in names]
        return [
            report.read_result(
                member, self._root / member.name, None, self._group.ranks
            )
            for member in members
        ]

    def _narrow(self) -> None:
        # Each member that is trained alone has a world of its own, which needs a name
        # of its own.
        self._world.narrow(self._group, f"{self._number}/{self._worlds}")
        self._worlds += 1

    def _train_stacks(self, members: Sequence[MemberJob]) -> list[Result]:
        if not members:
            return []
        self._narrow()
        job = self._members[0].job
        with Runtime.start(
            job.device, threads=job.threads, collectives=job.collectives
        ) as runtime:
            if (
                note := gpu_sharing(
                    runtime.device, self._world.processes_per_gpu, os.environ
                )
            ) is not None:
                print(note)
            built = build(members, runtime)
            results = []
            for stack in self._stacks(built):
                try:
                    results += StackedMembers(
                        stack, runtime, self._config, self._root
                    ).train()
                except StackError as error:
                    self._not_stacked(
                        [built_member.member.name for built_member in stack], str(error)
                    )
            return results

    def _stacks(self, built: Sequence[Built]) -> list[list[Built]]:
        """Returns groups of two or more members of one shape, and single last members of a resumed stack."""
        stacks: list[list[Built]] = []
        for candidate in built:
            reasons = [apart(stack[0], candidate) for stack in stacks]
            if None in reasons and not candidate.alone:
                stacks[reasons.index(None)].append(candidate)
                continue
            if reasons or candidate.alone:
                self._not_stacked(
                    [candidate.member.name], candidate.alone or str(reasons[0])
                )
            stacks.append([candidate])
        return [
            stack for stack in stacks if len(stack) > 1 or self._was_stacked(stack[0])
        ]

    def _was_stacked(self, member: Built) -> bool:
        """Whether an earlier attempt stacked this member: the last one that has not ended goes on as a stack of one."""
        return (
            self._config.resume
            and (self._root / member.member.name / STACK_FILE).exists()
        )

    def _not_stacked(self, names: Sequence[str], reason: str) -> None:
        if self._config.stack == "require" or self._config.codistillation.weight:
            raise ValueError(f"{', '.join(names)}: cannot be stacked: {reason}")
        print(f"note: {', '.join(names)}: not stacked: {reason}", flush=True)

    def _train_alone(self, member: MemberJob) -> Result:
        self._narrow()
        start = time.perf_counter()
        folder = self._root / member.name
        if self._world.rank == self._group.ranks[0]:
            print(
                f"\n{member.name}: on rank(s) {', '.join(map(str, self._group.ranks))}",
                flush=True,
            )
        try:
            training.run_training(member.job, folder, member=member.name)
        except TrainingDivergedError as error:
            print(f"{member.name}: {error}", flush=True)
        if self._world.rank != self._group.ranks[0]:
            return Result(name=member.name)
        return report.read_result(
            member, folder, time.perf_counter() - start, self._group.ranks
        )
