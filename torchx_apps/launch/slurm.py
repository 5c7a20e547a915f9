"""TorchX's Slurm scheduler with what it leaves out: no accounting, a partition's limits, causes of an end.

TorchX 0.7.0 needs ``sacct`` for every command after the submission, and without accounting each ends with a traceback
while the job runs. It hands variables to ``srun --export=A=1,B=2``, which cuts a value at its first comma. It puts a
job that failed by its user's mistake into the queue again, shows stderr alone as the log, and submits a job that no
node of the partition can ever run.
"""

from __future__ import annotations

import collections
import getpass
import itertools
import math
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from torchx.schedulers import slurm_scheduler as upstream
from torchx.schedulers.api import (
    AppDryRunInfo,
    DescribeAppResponse,
    ListAppResponse,
    Stream,
    filter_regex,
    split_lines_iterator,
)
from torchx.schedulers.local_scheduler import LogIterator
from torchx.schedulers.slurm_scheduler import SlurmScheduler as TorchxSlurm
from torchx.specs import NONE, AppDef, AppState, ReplicaStatus, Role, RoleStatus

from torchx_apps.cli.process import MISTAKE, MISTAKE_FILE

_STATES: Mapping[str, AppState] = {
    **upstream.SLURM_STATES,
    "COMPLETING": AppState.RUNNING,
    "CONFIGURING": AppState.PENDING,
    "EXPEDITING": AppState.PENDING,
    "LAUNCH_FAILED": AppState.FAILED,
    "RECONFIG_FAIL": AppState.FAILED,
    "REQUEUE_FED": AppState.PENDING,
    "REQUEUE_HOLD": AppState.PENDING,
    "RESV_DEL_HOLD": AppState.PENDING,
    "SIGNALING": AppState.RUNNING,
    "SPECIAL_EXIT": AppState.FAILED,
    "STAGE_OUT": AppState.RUNNING,
    "STOPPED": AppState.RUNNING,
}
# Of a job of several parts: it goes on as long as one runs or waits, and one that
# failed makes it fail.
_ORDER = (
    AppState.RUNNING,
    AppState.PENDING,
    AppState.FAILED,
    AppState.CANCELLED,
    AppState.SUCCEEDED,
)
# Slurm sends it so long before the time limit, or up to a minute earlier; the ranks
# save and end.
_SIGNAL = "TERM@60"


class SlurmScheduler(TorchxSlurm):
    """Slurm, with or without accounting."""

    def _run_opts(self) -> Any:
        options = super()._run_opts()
        options.add(
            "dependency",
            type_=str,
            default=None,
            help="The jobs that this one waits for, such as afterok:7; it is cancelled where they fail.",
        )
        return options

    def _submit_dryrun(self, app: AppDef, cfg: Mapping[str, Any]) -> AppDryRunInfo[Any]:
        info = super()._submit_dryrun(app, cfg)
        request = info.request
        # Without the second option the job would stay in the queue for ever.
        if cfg.get("dependency"):
            request.cmd += [
                f"--dependency={cfg['dependency']}",
                "--kill-on-invalid-dep=yes",
            ]
        for replica in request.replicas.values():
            replica.sbatch_opts.setdefault("signal", _SIGNAL)
        first, *others = [replica.env for replica in request.replicas.values()]
        exports: Mapping[str, str] = {}
        # Lines of the script hold any value, but are the same for all replicas.
        if all(environment == first for environment in others):
            exports = first
            for replica in request.replicas.values():
                replica.env = {}
        return AppDryRunInfo(
            Script(
                **vars(request),
                exports=exports,
                app=app,
                partition=cfg.get("partition"),
            ),
            repr,
        )

    def schedule(self, dryrun_info: AppDryRunInfo[Any]) -> str:
        """Submits the job; returns its number.

        Raises:
            ValueError: no node of the partition can run it, or Slurm's commands are not on this machine.
            SystemExit: sbatch refused it, and has said why.
        """
        request: Script = dryrun_info.request
        try:
            # sbatch chooses the partition in the same way.
            nodes = nodes_of(request.partition or os.environ.get("SBATCH_PARTITION"))
            for role in () if request.app is None else request.app.roles:
                check_partition(role, nodes)
            return str(super().schedule(dryrun_info))
        except subprocess.CalledProcessError:
            sys.exit(1)

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """Returns the job's state: from the queue, the accounting, or the last words of its script in this folder."""
        # The queue knows a job some minutes beyond its end, also without accounting.
        entries = _queued("-j", app_id)
        if entries:
            return _described(app_id, entries)
        answer = _ask("sacct", "--noheader", "-j", app_id)
        if answer.returncode == 0 and answer.stdout.strip():
            return super().describe(app_id)
        return _ended(app_id, Path(upstream._get_job_dirs().get(app_id) or "."))

    def list(self) -> list[ListAppResponse]:
        """Returns the jobs of the accounting; without accounting, this user's jobs in the queue."""
        entries = _accounted()
        if entries is None:
            entries = _queued("-u", getpass.getuser())
        jobs = itertools.groupby(entries, lambda entry: entry.job)
        return [
            ListAppResponse(app_id=job, state=_state(list(entries)))
            for job, entries in jobs
        ]

    def log_iter(
        self,
        app_id: str,
        role_name: str,
        k: int = 0,
        regex: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        should_tail: bool = False,
        streams: Stream | None = None,
    ) -> Iterable[str]:
        """Returns the lines of a node; of both stdout and stderr unless ``streams`` names one."""
        both = streams in (None, Stream.COMBINED)
        name = f"slurm-{app_id}-{role_name}-{k}"
        folder = upstream._get_job_dirs().get(app_id) or "."
        # The job was submitted in another folder.
        if not list(Path(folder).glob(f"{name}.*")):
            folder = next((entry.folder for entry in _queued("-j", app_id)), folder)
        files = []
        if both or streams == Stream.STDOUT:
            files.append(Path(folder, f"{name}.out"))
        if both or streams == Stream.STDERR:
            files.append(Path(folder, f"{name}.err"))
        if should_tail:
            state = _SeldomAsked(self)
            readers = [
                LogIterator(app_id, str(file), state, should_tail) for file in files
            ]
            lines: Iterable[str] = interleaved(
                [split_lines_iterator(reader) for reader in readers]
            )
        else:  # TorchX's iterator goes on until the job has ended here too
            lines = _lines([file for file in files if file.exists()])
        return filter_regex(regex, lines) if regex else lines


class _SeldomAsked:
    """Asks a scheduler for a job's state every five seconds; TorchX's reader of a log asks ten times a second."""

    def __init__(self, scheduler: SlurmScheduler) -> None:
        self._scheduler = scheduler
        self._asked_s = -math.inf
        self._answer: DescribeAppResponse | None = None

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        if time.monotonic() - self._asked_s > 5:
            self._answer = self._scheduler.describe(app_id)
            self._asked_s = time.monotonic()
        return self._answer


@dataclass(repr=False)
class Script(upstream.SlurmBatchRequest):
    """TorchX's script, with the variables in lines of their own, and one more condition for another attempt.

    Args:
        exports: variables of the job.
        app: the job.
        partition: the partition, or None for the default one.
    """

    exports: Mapping[str, str] = field(default_factory=dict)
    app: AppDef | None = None
    partition: str | None = None

    def materialize(self) -> str:
        """Returns the script for sbatch."""
        retries = f"export TORCHX_MAX_RETRIES={self.max_retries}\n"
        exports = f'{retries}export {MISTAKE_FILE}="$PWD/slurm-$SLURM_JOB_ID.mistake"\n'
        for name, value in self.exports.items():
            exports += f"export {name}={upstream._apply_app_id_env(value)}\n"
        changes = {
            retries: exports,
            "exitcode=$?\n": f'exitcode=$?\nif rm "${MISTAKE_FILE}" 2> /dev/null; then exitcode={MISTAKE}; fi\n',
            'if [ "$TORCHX_MAX_RETRIES" -gt ': f'if [ $exitcode -ne {MISTAKE} ] && [ "$TORCHX_MAX_RETRIES" -gt ',
        }
        script = str(super().materialize())
        for line, changed in changes.items():
            assert line in script, f"the script of TorchX 0.7.0 has the line {line!r}"
            script = script.replace(line, changed)
        return script


@dataclass(frozen=True, kw_only=True)
class NodeSize:
    """A node of a partition, by its size.

    Args:
        cpus: CPUs.
        memory: memory, in MiB.
        gpus: GPUs.
    """

    cpus: int
    memory: int
    gpus: int


def nodes_of(partition: str | None) -> list[NodeSize]:
    """Returns the nodes of a partition, by default of the default one; none if Slurm does not answer."""
    answer = _ask(
        "sinfo", "--noheader", "--Node", "--noconvert", "--format", "%P|%c|%m|%G"
    )
    nodes = []
    for name, cpus, memory, gres in _rows(answer, 4):
        # sinfo marks the default partition by a star, and the least of several nodes by
        # a plus.
        if name.rstrip("*") == partition or (partition is None and name.endswith("*")):
            size = NodeSize(
                cpus=int(cpus.rstrip("+")),
                memory=int(memory.rstrip("+M")),
                gpus=count_gpus(gres),
            )
            nodes.append(size)
    return nodes


def count_gpus(gres: str) -> int:
    """Returns the GPUs of a node's generic resources, as sinfo writes them.

    Example:
        >>> count_gpus("gpu:a100:8(S:0-1),nvme:1"), count_gpus("gpu:4"), count_gpus("(null)")
        (8, 4, 0)
    """
    return sum(int(count) for count in re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", gres))


def check_partition(role: Role, nodes: Sequence[NodeSize]) -> None:
    """Refuses a job that would wait for ever, because the partition has too few nodes to run it.

    Args:
        role: the role, each of whose replicas takes a node.
        nodes: the partition's nodes; a partition without nodes is left to Slurm.

    Raises:
        ValueError: they cannot run it.

    Example:
        >>> from torchx.specs import Resource
        >>> role = Role(name="train", image="", resource=Resource(cpu=64, gpu=0, memMB=4096))
        >>> check_partition(role, [NodeSize(cpus=4, memory=8000, gpus=0)])
        Traceback (most recent call last):
        ...
        ValueError: --cpu 64: the partition's largest node has 4; ask for less, or for another one: -cfg partition=NAME
    """
    resource = role.resource
    if not nodes or resource == NONE:
        return
    needs = {"gpus": resource.gpu, "cpus": resource.cpu, "memory": resource.memMB}
    flags = {"cpus": "--cpu", "memory": "--memMB", "gpus": "--gpu"}
    remedy = "ask for less, or for another one: -cfg partition=NAME"
    # TorchX asks for no memory if Slurm was not told of any.
    if max(node.memory for node in nodes) <= 1000:
        needs["memory"] = 0
    for name, count in needs.items():
        largest = max(getattr(node, name) for node in nodes)
        if count > largest:
            raise ValueError(
                f"{flags[name]} {count}: the partition's largest node has {largest}; {remedy}"
            )
    able = 0
    for node in nodes:
        able += all(getattr(node, name) >= count for name, count in needs.items())
    if role.num_replicas > able:
        raise ValueError(
            f"-j: {role.num_replicas} nodes with {needs['cpus']} CPUs, {needs['memory']} MiB and {needs['gpus']} GPUs "
            f"each, and the partition has {able} such nodes; {remedy}"
        )


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A job, or one of the parts of a heterogeneous one, as squeue knows it."""

    job: str
    state: str
    name: str = ""
    folder: str = ""
    reason: str = ""

    @property
    def app_state(self) -> AppState:
        """TorchX's state; UNKNOWN for a state of a newer Slurm."""
        return _STATES.get(self.state, AppState.UNKNOWN)


def _ask(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs one of Slurm's commands, quietly.

    Raises:
        ValueError: it is not on this machine.
    """
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ValueError(
            f"slurm: there is no {words[0]} on this machine; go to a login node of the cluster, or install Slurm's "
            "commands (Debian's package slurm-client)"
        ) from None


def _rows(answer: subprocess.CompletedProcess[str], width: int) -> list[list[str]]:
    """Returns the rows of an answer; a line with another number of columns is no row."""
    rows = [line.strip().split("|") for line in answer.stdout.splitlines()]
    return [row for row in rows if len(row) == width]


def _queued(*which: str) -> list[_Entry]:
    """Returns squeue's entries, also of jobs ended in the last minutes."""
    answer = _ask(
        "squeue", "--noheader", "--states=all", "--format", "%i|%T|%j|%Z|%r", *which
    )
    entries = []
    for job, state, name, folder, reason in sorted(_rows(answer, 5)):
        # The parts of a heterogeneous job are 7+0, 7+1 and so on.
        number = job.partition("+")[0]
        entries.append(
            _Entry(job=number, state=state, name=name, folder=folder, reason=reason)
        )
    return entries


def _accounted() -> list[_Entry] | None:
    """Returns all jobs of the accounting; None if Slurm has none. TorchX's own list ends at a state new to it."""
    answer = _ask(
        "sacct",
        "--noheader",
        "-X",
        "--parsable2",
        "--starttime=1970-01-01",
        "--format=JobID,State",
    )
    if answer.returncode:
        return None
    # A state may have more words, such as CANCELLED by 1000.
    return [
        _Entry(job=job.partition("+")[0], state=state.partition(" ")[0])
        for job, state in _rows(answer, 2)
    ]


def _described(app_id: str, entries: Sequence[_Entry]) -> DescribeAppResponse:
    roles: dict[str, Role] = {}
    statuses: dict[str, RoleStatus] = {}
    for entry in entries:
        name, _, number = entry.name.rpartition("-")
        # Not a job of TorchX.
        if not number.isdecimal():
            continue
        role = roles.setdefault(name, Role(name=name, num_replicas=0, image=""))
        role.num_replicas += 1
        replica = ReplicaStatus(
            id=int(number), role=name, state=entry.app_state, hostname=""
        )
        statuses.setdefault(name, RoleStatus(name, [])).replicas.append(replica)
    waiting = [
        f"{entry.state} ({entry.reason})"
        for entry in entries
        if entry.reason not in ("None", "")
    ]
    return DescribeAppResponse(
        app_id=app_id,
        roles=list(roles.values()),
        roles_statuses=list(statuses.values()),
        state=_state(entries),
        msg=waiting[0] if waiting else entries[0].state,
    )


def _ended(app_id: str, folder: Path) -> DescribeAppResponse | None:
    """Describes a job from its files, after the queue has forgotten it, minutes after its end."""
    output = folder / f"slurm-{app_id}.out"
    if not output.exists():
        return None
    codes = re.findall(
        r"^job exited with code (\d+)$", output.read_text(errors="replace"), re.M
    )
    if not codes:
        return None
    # Names of logs are slurm-ID-ROLE-NUMBER.out.
    logs = folder.glob(f"slurm-{app_id}-*.out")
    replicas = collections.Counter(
        path.name.split("-", 2)[2].rpartition("-")[0] for path in logs
    )
    return DescribeAppResponse(
        app_id=app_id,
        roles=[
            Role(name=name, num_replicas=count, image="")
            for name, count in replicas.items()
        ],
        state=AppState.FAILED if int(codes[-1]) else AppState.SUCCEEDED,
        msg=f"ended with exit code {codes[-1]}, as {output} says; Slurm has forgotten the job",
    )


def _state(entries: Sequence[_Entry]) -> AppState:
    states = {entry.app_state for entry in entries}
    return next((state for state in _ORDER if state in states), AppState.UNKNOWN)


def _lines(files: Sequence[Path]) -> Iterator[str]:
    for path in files:
        with path.open(errors="replace", newline="\n") as file:
            yield from file


def interleaved(sources: Sequence[Iterable[str]]) -> Iterator[str]:
    """Yields the items of all sources as they come, until all have ended.

    Raises:
        Exception: whatever a source raised, after what it had yielded.

    Example:
        >>> sorted(interleaved([["a", "b"], ["c"]]))
        ['a', 'b', 'c']
    """
    items: queue.Queue[str | Exception | None] = queue.Queue()

    def read(source: Iterable[str]) -> None:
        try:
            for item in source:
                items.put(item)
            items.put(None)
        except Exception as error:
            # Raised while the items are read.
            items.put(error)

    for source in sources:
        threading.Thread(target=read, args=(source,), daemon=True).start()
    running = len(sources)
    while running:
        item = items.get()
        if isinstance(item, Exception):
            raise item
        if item is None:
            running -= 1
        else:
            yield item
