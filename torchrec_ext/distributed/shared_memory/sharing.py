"""share_memory(): passes a group's collectives of CPU tensors through memory that its ranks share.

The group stays one of gloo to everybody who asks, so DistributedDataParallel, TorchRec and checkpoints need no change.
Only its backend of CPU tensors is another one, which hands to gloo what it does not do itself. If the ranks cannot
share memory, all of them stay with gloo.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchrec_ext.distributed.shared_memory import library

_CPU = torch.device("cpu")
# Each rank maps a ring of 2 MiB for every other one.
_MOST_RANKS = 64


class _Rank(NamedTuple):
    """What a rank says of itself: its process, what it must have in common with the others, and why it cannot share."""

    pid: int
    host: str
    obstacle: str


def share_memory(group: dist.ProcessGroup | None = None) -> bool:
    """Passes the collectives of ``group`` through shared memory, where its ranks are on one host. Collective.

    One line for a script of DistributedDataParallel or TorchRec on the CPU, after ``init_process_group``. Results are
    gloo's, bit for bit on two ranks; on more, sums are added in the order of the ranks.

    Args:
        group: a group whose CPU tensors go through gloo; the group of all ranks where not given.

    Returns:
        Whether the ranks share memory now. If not, all stay with gloo, and the group's first rank logs why.

    Raises:
        ValueError: there is no process group, this rank is not in it, or it has no gloo.

    Example: (in each rank of ``torchrun --nproc-per-node 2``)
        dist.init_process_group("gloo")
        share_memory()
    """
    if not dist.is_initialized():
        raise ValueError(
            "share_memory(): there is no process group; call it after dist.init_process_group('gloo')"
        )
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            "share_memory(): this rank is not in the group; call it on the group's ranks alone"
        )
    obstacle = obstacle_to_sharing(group)
    if obstacle and group.size() > 1 and group.rank() == 0:
        logging.getLogger(__name__).warning("collectives stay with gloo: %s", obstacle)
    return not obstacle


def shares_memory(group: dist.ProcessGroup) -> bool:
    """Whether the collectives of a group go through shared memory."""
    return (
        _CPU in group._device_types and group._get_backend(_CPU).name() == library.NAME
    )


@contextmanager
def sharing_as_all_ranks_do() -> Iterator[None]:
    """Shares the memory of each group that is made inside, if the group of all ranks does. Collective."""
    groups = dist.distributed_c10d._world.pg_map
    earlier = set(groups)
    yield
    if dist.group.WORLD is not None and shares_memory(dist.group.WORLD):
        # Every rank has made its groups in the same order.
        for group in list(groups):
            if group not in earlier:
                obstacle_to_sharing(group)


def obstacle_to_sharing(group: dist.ProcessGroup) -> str:
    """Shares the memory of a group's ranks, and returns why it could not; empty if it could. Collective.

    Raises:
        ValueError: the group has no gloo.
    """
    if shares_memory(group):
        return ""
    gloo: Any = None
    kind = "no backend of CPU tensors"
    if _CPU in group._device_types:
        gloo = group._get_backend(_CPU)
        kind = f"{gloo.name()} for CPU tensors"
    if not isinstance(gloo, dist.ProcessGroupGloo):
        raise ValueError(
            f"share_memory(): the group has {kind}, and takes the place of gloo alone"
        )
    if group.size() == 1:
        return "the group has one rank"
    memory, pids, obstacle = _common_memory(group)
    # Gloo goes into the backend, which hands it the collectives that it does not do
    # itself.
    if not obstacle:
        ring = library.load()
        mapped = torch.from_file(
            f"/proc/self/fd/{memory}",
            shared=True,
            size=ring.memory_bytes(group.size()),
            dtype=torch.uint8,
        )
        backend = ring.make_backend(mapped, pids, gloo.options._timeout, gloo)
        group._register_backend(_CPU, dist.ProcessGroup.BackendType.CUSTOM, backend)
    # The mapping stays without the descriptor.
    if memory >= 0:
        os.close(memory)
    return obstacle


def _common_memory(group: dist.ProcessGroup) -> tuple[int, list[int], str]:
    """Returns a descriptor of memory that all ranks have open, their processes, and an obstacle. Collective."""
    ranks: list[_Rank] = _gathered(group, _described())
    pids = [rank.pid for rank in ranks]
    if group.size() > _MOST_RANKS:
        return -1, pids, f"the group has {group.size()} ranks, more than {_MOST_RANKS}"
    for number, rank in enumerate(ranks):
        if rank.obstacle:
            return -1, pids, f"on rank {number}: {rank.obstacle}"
        if rank.host != ranks[0].host:
            other = "is on another host than rank 0, or of another user or container"
            return -1, pids, f"rank {number} {other}"
    memory, obstacle = -1, ""
    if group.rank() == 0:
        memory, obstacle = _new_memory(library.load().memory_bytes(group.size()))
    descriptor, obstacle = _gathered(group, (memory, obstacle))[0]
    if not obstacle and group.rank() > 0:
        memory, obstacle = _opened(f"/proc/{pids[0]}/fd/{descriptor}")
    # All ranks take the first one's obstacle, so that none stays with gloo alone.
    obstacle = next(filter(None, _gathered(group, obstacle)), "")
    return memory, pids, obstacle


def _gathered(group: dist.ProcessGroup, value: Any) -> list[Any]:
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def _described() -> _Rank:
    obstacle = ""
    try:
        library.load()
    except library.LibraryError as error:
        obstacle = str(error)
    return _Rank(os.getpid(), _host(), obstacle)


def _host() -> str:
    """Returns the common marks of processes with access to each other's files: kernel, process namespace, user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.geteuid()}"


def _new_memory(size: int) -> tuple[int, str]:
    """Returns a descriptor of new memory, and an obstacle.

    The memory has no name, so it is gone with the last process however that ends, and the size of /dev/shm, 64 MB in
    a container, is no limit.
    """
    try:
        memory = os.memfd_create("torchrec_ext", os.MFD_CLOEXEC)
        os.ftruncate(memory, size)
    except OSError as error:
        return -1, f"rank 0 cannot make shared memory: {error.strerror}"
    return memory, ""


def _opened(path: str) -> tuple[int, str]:
    """Opens rank 0's memory, whose process has its number here too, see :func:`_host`; returns it and an obstacle."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC), ""
    except OSError as error:
        return -1, f"a rank cannot open the memory of rank 0: {error.strerror}"
