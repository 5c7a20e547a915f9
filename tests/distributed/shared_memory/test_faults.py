"""No fault of a peer leaves a rank waiting, and what cannot share memory says so in one line."""

import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.contracts import _CONTEXT, run_ranks
from tests.distributed.shared_memory.conftest import needs_library
from torchrec_ext.distributed import share_memory
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.shared_memory import library, sharing

TIMEOUT_S = 3


def dying(
    rank: int, size: int, store: str, end: str, collective: str, answers: Any
) -> None:
    """The last rank ends before a collective; the others answer with the seconds and the error that they get."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    assert share_memory()
    tensor = torch.ones(2_000_000 if "large" in collective else 10)
    dist.all_reduce(tensor)
    if rank == size - 1:
        time.sleep(0.1)
        if end == "exit":
            os._exit(0)
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[end])
    start = time.monotonic()
    try:
        if "future" in collective:
            dist.all_reduce(tensor, async_op=True).get_future().wait()
        elif "broadcast" in collective:
            dist.broadcast(tensor, 0)
        elif "gather" in collective:
            dist.all_gather([torch.empty_like(tensor) for _ in range(size)], tensor)
        else:
            dist.all_reduce(tensor)
        answers.put((rank, time.monotonic() - start, "no error"))
    except RuntimeError as error:
        answers.put(
            (rank, time.monotonic() - start, f"{type(error).__name__}: {error}")
        )
    answers.close()
    answers.join_thread()
    os._exit(0)


def survivors(size: int, end: str, collective: str) -> list[tuple[int, float, str]]:
    answers: Any = _CONTEXT.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            _CONTEXT.Process(
                target=dying,
                args=(rank, size, f"{folder}/store", end, collective, answers),
                daemon=True,
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        try:
            return [answers.get(timeout=60) for _ in range(size - 1)]
        finally:
            for process in processes:
                process.kill()
                process.join()


def check_errors(size: int, end: str, collective: str) -> None:
    """Every survivor has a named error in time: of the victim, or of one that the victim has ended."""
    answers = survivors(size, end, collective)
    for _, seconds, error in answers:
        assert error.startswith("DistBackendError: shared memory: "), error
        assert len(error) < 230
        assert (
            "has ended" in error or f"timed out after {TIMEOUT_S * 1000} ms" in error
        ), error
        assert seconds < TIMEOUT_S + 5 * (end == "stop")
    if end != "stop":
        assert any(f"rank {size - 1} (process " in error for _, _, error in answers), (
            answers
        )


@needs_library
def test_a_killed_peer_is_named() -> None:
    check_errors(2, "kill", "small")


@needs_library
@pytest.mark.slow(minutes=1.5)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    ("end", "collective"),
    [
        *(
            ("kill", name)
            for name in ("small", "large", "large gather", "large broadcast", "future")
        ),
        *(("exit", name) for name in ("small", "large")),
        *(("stop", name) for name in ("small", "large", "large broadcast", "future")),
    ],
)
def test_every_end_of_a_peer_is_an_error_in_time(
    size: int, end: str, collective: str
) -> None:
    check_errors(size, end, collective)


def disagreements(runtime: Runtime) -> dict[str, str]:
    """The first line of the error in each case, on this rank."""
    rank = runtime.rank
    splits = [1, 2] if rank else [2, 2]
    dtype = (torch.float32, torch.int32)[rank]
    cases: dict[str, Callable[[Any], Any]] = {
        "sizes": lambda group: dist.all_reduce(torch.ones(3 + rank), group=group),
        "types": lambda group: dist.all_reduce(torch.ones(4).to(dtype), group=group),
        "collectives": lambda group: (
            dist.all_reduce(torch.ones(3), group=group)
            if rank
            else dist.barrier(group=group)
        ),
        "roots": lambda group: (
            dist.broadcast(torch.ones(3), rank, group=group),
            dist.barrier(group=group),
        ),
        "splits": lambda group: dist.all_to_all_single(
            torch.empty(4), torch.ones(sum(splits)), [2, 2], splits, group
        ),
    }
    found = {}
    for name, call in cases.items():
        group: Any = dist.new_group(timeout=timedelta(seconds=5))
        assert share_memory(group)
        for attempt in (name, f"{name}, again"):
            try:
                call(group)
                found[attempt] = "no error"
            except (RuntimeError, ValueError) as error:
                found[attempt] = str(error).splitlines()[0]
    return found


def after_a_fork(runtime: Runtime) -> dict[str, int]:
    """What is left of shared memory, after a child that called a collective and ended."""
    assert share_memory()
    assert share_memory(), "again"
    dist.barrier()
    child = os.fork()
    if child == 0:
        with suppress(RuntimeError):
            dist.all_reduce(torch.ones(1))
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    value = torch.ones(5)
    dist.all_reduce(value)
    assert (value == 2).all(), "the parent goes on"
    descriptors = 0
    for name in os.listdir("/proc/self/fd"):
        # One of them was that of the listing.
        with suppress(FileNotFoundError):
            descriptors += "memfd:torchrec_ext" in os.readlink(f"/proc/self/fd/{name}")
    tasks = Path("/proc/self/task").glob("*/comm")
    threads = [task.read_text().strip() for task in tasks].count("shared_memory")
    return {"status": status, "descriptors": descriptors, "threads": threads}


@needs_library
def test_ranks_that_disagree_are_told_by_name_and_their_group_is_broken() -> None:
    zero, one = run_ranks(disagreements, 2)
    told = {
        "sizes": "rank 1 sends 16 bytes where 12 are to come",
        "types": "rank 1 called all_reduce of Int as its number 1",
        "collectives": "rank 1 called all_reduce of Float as its number 1",
        "roots": "rank 1 called broadcast of Float from rank 1",
        "splits": "rank 1 sends 4 bytes where 8 are to come",
    }
    for name, text in told.items():
        assert text in zero[name]
        assert zero[f"{name}, again"] == zero[name]
        assert max(len(zero[name]), len(one[name])) < 200


@needs_library
def test_a_child_of_a_rank_takes_nothing_and_no_descriptor_is_left() -> None:
    for found in run_ranks(after_a_fork, 2):
        assert found == {"status": 0, "descriptors": 0, "threads": 1}


def stays_with_gloo(runtime: Runtime) -> list[tuple[bool, list[str]]]:
    """What share_memory() answers and logs in each case; the collectives of the group work."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(sharing.__name__).addHandler(handler)
    unbuilt = mock.Mock(side_effect=library.LibraryError("its library is not built"))
    no_memory = mock.Mock(side_effect=OSError(38, "Function not implemented"))
    other = f"another {sharing._host()}"
    found = []
    for ranks, patch in (
        ([1], mock.patch.object(sharing, "_host", return_value=other)),
        ([0, 1], mock.patch.object(os, "memfd_create", no_memory)),
        ([1], mock.patch.object(library, "load", unbuilt)),
    ):
        told.clear()
        with patch if runtime.rank in ranks else nullcontext():
            answer = share_memory(dist.new_group())
        found.append((answer, list(told)))
    value = torch.ones(3)
    dist.all_reduce(value)
    assert (value == 2).all()
    return found


@needs_library
def test_ranks_that_cannot_share_memory_stay_with_gloo_and_one_says_why() -> None:
    zero, one = run_ranks(stays_with_gloo, 2)
    assert one == [(False, [])] * 3
    assert not any(answer for answer, _ in zero)
    assert [told[0].partition(": ")[2] for _, told in zero] == [
        "rank 1 is on another host than rank 0, or of another user or container",
        "rank 0 cannot make shared memory: Function not implemented",
        "on rank 1: its library is not built",
    ]


@pytest.mark.unit
def test_without_a_group_the_line_to_put_before_is_named() -> None:
    with pytest.raises(
        ValueError,
        match=r"there is no process group; call it after dist\.init_process_group",
    ):
        share_memory()


@pytest.mark.unit
def test_a_broken_or_missing_library_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    read = library.load.__wrapped__
    with pytest.raises(
        library.LibraryError,
        match=r"its library is not built; build it by: .*shared_memory.library$",
    ):
        read()
    path = library.library_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no library")
    with pytest.raises(
        library.LibraryError, match=r"does not load \(.*\); remove it, and build again"
    ) as broken:
        read()
    assert len(str(broken.value)) < 200 + len(str(tmp_path))
