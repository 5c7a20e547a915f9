"""Runtime: which rank this is, on which device, over which backend, with how many threads.

available_memory(): bytes that this host, or the container that a process runs in, can still give.

peak_resident(): bytes of the most memory that this process has had resident.

gather_objects(), refuse_differences(): the values of all ranks, on every rank; and that they are the same.

calm_gloo(): keeps gloo's threads from interrupting each other where ranks are as many as cores.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist

from torchrec_ext.distributed.shared_memory.sharing import obstacle_to_sharing
from torchrec_ext.distributed.sync_config import Collectives
from torchrec_ext.schema.validation import check_choice, check_least

DEFAULT_TIMEOUT_S = 300.0
# Thread names that gloo gives to its message loop, and torch to its collectives.
GLOO_THREADS = ("gloo_tcp_loop", "pt_gloo_runloop")


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Rank, device and threads of this process in the job; made by :meth:`start`.

    Args:
        rank: number of this process in the job, 0 <= rank < world_size.
        world_size: R, the number of processes of the job.
        local_world_size: number of processes on this host.
        device: device of tables and dense layers.
        backend: ``gloo`` or ``nccl``.
        threads: compute threads of this process.
        cores: processor cores of this host, shared by all its processes.
        shares_memory: whether the ranks' collectives go through memory that they share.
        obstacle: why they do not, although they were to where possible; empty if they do, or were not to.
    """

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "gloo"
    threads: int = 1
    cores: int = 1
    shares_memory: bool = False
    obstacle: str = ""

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and writes files."""
        return self.rank == 0

    @property
    def oversubscribed(self) -> str | None:
        """Warning line when this host runs more CPU processes than it has cores, else None."""
        if self.device.type != "cpu" or self.local_world_size <= self.cores:
            return None
        return (
            f"{self.local_world_size} processes share {self.cores} cores on this host, so they oversubscribe it: each "
            f"step takes longer than with -j 1x{self.cores}"
        )

    @staticmethod
    @contextmanager
    def start(
        device: str | None = None,
        *,
        threads: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        collectives: Collectives = "auto",
    ) -> Iterator[Runtime]:
        """Joins torchrun's process group; without torchrun makes a group of one.

        Args:
            device: ``cpu``, ``cuda`` for the GPU of the local rank's number, or ``cuda:0`` where each process sees one
                GPU of its own; where not given, ``cuda`` on a host with a GPU for each of its processes, else ``cpu``.
                A job of one host with more processes than GPUs warns.
            threads: compute threads; where not given, OMP_NUM_THREADS, else the cores divided by the local processes,
                and no more than torch has now.
            timeout_s: seconds after which a collective that another rank does not join fails.
            collectives: ``shared_memory`` passes the collectives of CPU tensors through memory that the ranks of one
                host share, see :func:`share_memory`; ``gloo`` does not; ``auto`` does where it is possible.

        Raises:
            ValueError: ``device`` does not exist, ``threads`` is not positive, or the ranks cannot share memory.
        """
        check_choice("collectives", collectives, get_args(Collectives))
        runtime = _describe(device, threads)
        torch.set_num_threads(runtime.threads)
        if runtime.device.type == "cuda":
            torch.cuda.set_device(runtime.device)
        alone: dict[str, Any] = {}
        if "RANK" not in os.environ:
            # A store in memory: one process needs no port.
            alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(
            runtime.backend, timeout=timedelta(seconds=timeout_s), **alone
        )
        try:
            yield _sharing(runtime, collectives)
            devices = None
            if runtime.device.type == "cuda":
                # Else NCCL warns that it guesses the device.
                devices = [runtime.device.index]
            dist.barrier(device_ids=devices)
        except BaseException:
            # NCCL's teardown would wait for peers, which wait for this rank, and hide
            # the error until the timeout.
            if (
                runtime.backend == "nccl"
                and runtime.world_size > 1
                and dist.group.WORLD is not None
            ):
                dist.group.WORLD.abort()
            _leave()
            raise
        _leave()


def _sharing(runtime: Runtime, collectives: Collectives) -> Runtime:
    """Shares the memory of all ranks if asked for, and returns the runtime that says so. Collective."""
    required = collectives == "shared_memory"
    if runtime.device.type == "cuda" and required:
        raise ValueError(
            "collectives=shared_memory: it is for ranks on the CPU, and these are on GPUs; set it to auto"
        )
    if (
        collectives == "gloo"
        or runtime.device.type == "cuda"
        or runtime.world_size == 1
    ):
        return runtime
    assert dist.group.WORLD is not None
    obstacle = obstacle_to_sharing(dist.group.WORLD)
    if obstacle and required:
        raise ValueError(f"collectives=shared_memory: {obstacle}")
    return dataclasses.replace(runtime, shares_memory=not obstacle, obstacle=obstacle)


def _leave() -> None:
    """Ends the process group, and clears TorchRec's groups by host, or the next process group would use them."""
    dist.destroy_process_group()
    comm = sys.modules.get("torchrec.distributed.comm")
    for name in ("_INTRA_PG", "_CROSS_PG", "_INTRA_PG_2D", "_CROSS_PG_2D"):
        if hasattr(comm, name):
            setattr(comm, name, None)


def _describe(device: str | None, threads: int | None) -> Runtime:
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    # The cores that this process may run on: a container or taskset may leave it fewer
    # than the host has.
    cores = len(os.sched_getaffinity(0))
    check_least("threads", threads)
    gpus = 0
    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    own_device = choose_device(
        device,
        local_rank,
        local_world_size,
        gpus,
        one_host=world_size == local_world_size,
    )
    if device is None and gpus and own_device.type == "cpu" and local_rank == 0:
        warnings.warn(
            f"{local_world_size} processes on this host and {gpus} GPU(s): they run on the CPU; launch -j 1x{gpus} "
            "for the GPU, or set device=cuda:0 if each process sees its own",
            stacklevel=4,
        )
    backend = "nccl" if own_device.type == "cuda" else "gloo"
    if threads is None:
        threads = int(os.environ.get("OMP_NUM_THREADS", 0)) or max(
            1, cores // local_world_size
        )
        # A script may have called torch.set_num_threads(1).
        threads = min(threads, torch.get_num_threads())
    return Runtime(
        rank=int(os.environ.get("RANK", "0")),
        world_size=world_size,
        local_world_size=local_world_size,
        device=own_device,
        backend=backend,
        threads=threads,
        cores=cores,
    )


def gather_objects(
    value: Any, world_size: int, group: dist.ProcessGroup | None = None
) -> list[Any]:
    """Returns the values of all ranks, in rank order, on every rank of ``group``, by default of all. Collective."""
    values = [value] * world_size
    # A single rank may have no process group.
    if world_size > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def refuse_differences(mine: Mapping[str, Any], world_size: int) -> None:
    """Refuses, on every rank alike, ranks with other values of some setting. Collective.

    Args:
        mine: this rank's values by name, compared as text.
        world_size: number of ranks.

    Raises:
        ValueError: naming the first difference.
    """
    texts = {name: str(value) for name, value in mine.items()}
    first, *others = gather_objects(texts, world_size)
    for rank, other in enumerate(others, 1):
        # One of them may lack a name.
        for name in {**first, **other}:
            here, there = first.get(name, "missing"), other.get(name, "missing")
            if here != there:
                raise ValueError(
                    f"{name}: {here[:50]} on rank 0, {there[:50]} on rank {rank}; give all ranks the same"
                )


def choose_device(
    name: str | None,
    local_rank: int,
    local_world_size: int,
    gpus: int,
    *,
    one_host: bool = False,
) -> torch.device:
    """Returns the device of a process.

    Args:
        name: device asked for, see :meth:`Runtime.start`.
        local_rank: number of the process on this host.
        local_world_size: number of processes of the job on this host.
        gpus: number of GPUs that this process sees.
        one_host: whether all processes of the job are on this host. Only then do more processes than GPUs run on the
            CPU, if no device was asked for: several hosts could decide differently, and wait for each other.

    Raises:
        ValueError: the name is not a device's, or the device does not exist.

    Example:
        >>> choose_device("cuda", 1, 2, gpus=4), choose_device(None, 0, 1, gpus=0)
        (device(type='cuda', index=1), device(type='cpu'))
        >>> choose_device(None, 1, 2, gpus=1, one_host=True)
        device(type='cpu')
    """
    if name == "cpu" or (name is None and gpus == 0):
        return torch.device("cpu")
    if name not in (None, "cuda", "cuda:0"):
        raise ValueError(f"device={name!r}: must be 'cpu', 'cuda' or 'cuda:0'")
    if name == "cuda:0" and gpus:
        return torch.device("cuda", 0)
    if gpus < local_world_size:
        if name is None and one_host:
            return torch.device("cpu")
        raise ValueError(
            f"{local_world_size} processes on this host, but torch sees {gpus} GPU(s): launch -j "
            f"NODESx{max(gpus, 1)}, or set device=cpu, or cuda:0 if each sees its own"
        )
    return torch.device("cuda", local_rank)


# By version of control groups: where they are mounted, and the names of limit, use and
# reclaimable pages.
_GROUPS = {
    "0": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": (
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
}


def available_memory(root: Path = Path("/")) -> int:
    """Returns the bytes of memory still available to this host, or to this process where it may use less.

    A container, a job of Slurm or a scope of systemd limits a process by its control group, of version 1 or 2, or by
    one above it.

    Args:
        root: where the system's files are.
    """
    limits = [
        _line(root / "proc/meminfo", "MemAvailable:") * 1024
        or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    ]
    for mount, limit_name, used_name, cache_name, group in _control_groups(root):
        # A container may see its own group alone, as the topmost.
        for folder in (mount / group, *(mount / group).parents):
            limit = _number(folder / limit_name)
            used = _number(folder / used_name)
            if limit is not None and used is not None:
                # The kernel gives these pages back when memory is short, so they count
                # as free.
                cache = _line(folder / "memory.stat", cache_name)
                limits.append(max(limit - used + cache, 0))
            if folder == mount:
                break
    return min(limits)


def _control_groups(root: Path) -> Iterator[tuple[Path, str, str, str, str]]:
    """Yields mount, names of files, and path of this process's groups of memory."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        kind = "0" if number == "0" else "memory"
        if number == "0" or "memory" in controllers.split(","):
            mount, *names = _GROUPS[kind]
            limit, used, cache = names
            yield root / mount, limit, used, cache, path.strip("/")


def peak_resident() -> int:
    """Returns the peak resident bytes of this process since its program began.

    Where the kernel does not report it, this is ``ru_maxrss``, which starts from the peak of the process that forked.
    """
    return (
        _line("/proc/self/status", "VmHWM:")
        or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ) * 1024


def _line(path: str | Path, name: str) -> int:
    """Returns the number in the line of a file that begins with ``name``; 0 without such a line."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        words = line.split()
        if words and words[0] == name:
            return int(words[1])
    return 0


def _number(path: Path) -> int | None:
    """Returns the number in a file of the control group; None without the file or a limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def calm_gloo() -> None:
    """Makes the gloo threads of this process wait for a free core instead of preempting a running thread.

    A message wakes the thread that reads it while the thread of the collective holds the connection's lock. Where ranks
    are as many as cores the first interrupts the second, and asks for the lock again and again until the kernel's next
    tick, some milliseconds later. Under Linux's SCHED_BATCH it runs once the second has let go of the lock and waits.
    Nothing changes where the system has no such policy or refuses it.
    """
    for thread in Path("/proc/self/task").glob("*"):
        # The thread may have ended meanwhile.
        with suppress(OSError):
            if (thread / "comm").read_text().strip() in GLOO_THREADS:
                os.sched_setscheduler(
                    int(thread.name), os.SCHED_BATCH, os.sched_param(0)
                )
