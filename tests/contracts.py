"""Laws over real processes: run_ranks() starts R gloo ranks and returns their results, or raises what one raised."""

import multiprocessing
import os
import pickle
import queue
import random
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchrec_ext.capture.errors import CannotCaptureError
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.shared_memory.sharing import share_memory
from torchrec_ext.distributed.tables import local_shards

_CONTEXT = multiprocessing.get_context("forkserver")
# The server imports torchrec once, so that each rank starts in a tenth of a second
# instead of four.
_CONTEXT.set_forkserver_preload(["tests.preload"])


class RankFailedError(AssertionError):
    """A rank raised: its traceback."""


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120
) -> list[Any]:
    """``function(runtime, *args)`` on each of ``world_size`` gloo ranks; their results in rank order."""
    results: Any = _CONTEXT.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            _CONTEXT.Process(
                target=_rank,
                args=(function, rank, world_size, f"{folder}/store", results, args),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(results, world_size, timeout_s)
        finally:
            for process in processes:
                process.join(timeout=10)
                process.kill()


def _collect(results: Any, world_size: int, timeout_s: float) -> list[Any]:
    by_rank: dict[int, Any] = {}
    while len(by_rank) < world_size:
        try:
            rank, error, value = results.get(timeout=timeout_s)
        except queue.Empty:
            raise RankFailedError(
                f"ranks {sorted(set(range(world_size)) - set(by_rank))} gave no result in {timeout_s} s"
            ) from None
        if error is not None:
            raise RankFailedError(f"rank {rank}:\n{error}")
        by_rank[rank] = pickle.loads(value)
    return [by_rank[rank] for rank in range(world_size)]


def _rank(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    results: Any,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
    )
    # TEST_COLLECTIVES=shared_memory runs every law over shared memory instead of gloo.
    if os.environ.get("TEST_COLLECTIVES") == "shared_memory" and world_size > 1:
        assert share_memory()
    try:
        runtime = Runtime(
            rank=rank,
            world_size=world_size,
            local_world_size=world_size,
        )
        # As bytes: a queue hands over a tensor's shared memory, which is gone when the
        # rank has ended.
        results.put((rank, None, pickle.dumps(function(runtime, *args))))
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
    finally:
        results.close()
        results.join_thread()
        if dist.is_initialized():  # an app ends its group itself
            dist.destroy_process_group()


def free_ports(count: int) -> list[int]:
    """Returns ports on which nothing listens, for programs that take them later.

    They are below those that the kernel gives away by itself: of those a connection of a test beside this one, as each
    pair of gloo ranks has, may take one in between.
    """
    given_away = Path("/proc/sys/net/ipv4/ip_local_port_range")
    end = int(given_away.read_text().split()[0]) if given_away.exists() else 32_768
    found: set[int] = set()
    while len(found) < count:
        port = random.SystemRandom().randrange(10_000, max(end, 20_000))
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        found.add(port)
    return list(found)


def leave_group(runtime: Runtime, *, groups: int = 1) -> list[int]:
    """Ends the ranks' group and describes another in the environment, for a function that runs a whole app on them.

    Returns a port for each of ``groups`` that may follow one another; the environment has the first.
    """
    ports: list[Any] = free_ports(groups)
    dist.broadcast_object_list(ports, src=0)
    dist.barrier()
    dist.destroy_process_group()
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[0]), OMP_NUM_THREADS="1"
    )
    return ports


def gather_state(model: nn.Module) -> dict[str, Tensor] | None:
    """Tables and dense parameters as whole CPU tensors on rank 0, None on the others; all ranks call it."""
    parts = [
        (
            s.fqn,
            s.config.num_embeddings,
            s.config.embedding_dim,
            s.row,
            s.column,
            s.tensor.cpu(),
        )
        for s in local_shards(model)
    ]
    received: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(parts, received if dist.get_rank() == 0 else None)
    if dist.get_rank() != 0:
        return None
    tables: dict[str, Tensor] = {}
    for fqn, rows, columns, row, column, shard in [
        part for rank in received for part in rank
    ]:
        table = tables.setdefault(fqn, torch.full((rows, columns), float("nan")))
        table[row : row + shard.shape[0], column : column + shard.shape[1]] = shard
    dense = {
        name: value.detach().cpu().clone()
        for name, value in model.named_parameters()
        if name not in tables
    }
    return {**tables, **dense}


@contextmanager
def pipeline_alone() -> Iterator[None]:
    """Lets every eager step of a training be the pipeline's, also where a plain one would be faster."""
    none_fits = CannotCaptureError("the pipeline alone")
    with mock.patch("torchrec_ext.train.step.choose.PlainStep", side_effect=none_fits):
        yield


def mostly_slow(names: Iterable[str], *usual: str) -> list[Any]:
    """Returns parameters of a law: a few run in every suite, the rest among the slow tests."""
    # Ranks import this module too, and need no pytest.
    import pytest

    slow = pytest.mark.slow
    return [name if name in usual else pytest.param(name, marks=slow) for name in names]
