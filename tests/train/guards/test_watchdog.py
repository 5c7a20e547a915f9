"""A rank without steps says where it stands, a rank that waits for it says so later, and a busy one says nothing."""

import queue
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.contracts import run_ranks
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.guards import watchdog as module
from torchrec_ext.train.guards.watchdog import Watchdog


def stuck_in_a_loader(ends: "queue.SimpleQueue[str]") -> str:
    """Where the user's own code does not come back; it calls no function of Python's, which would be the last line."""
    while ends.empty():
        time.sleep(0.01)
    return ends.get()


@pytest.mark.unit
def test_a_rank_that_hangs_names_its_line_and_leaves_its_stacks(tmp_path: Path) -> None:
    ends: queue.SimpleQueue[str] = queue.SimpleQueue()
    with Watchdog(3, 0.2, tmp_path, ends.put) as watchdog:
        watchdog.beat("step 7 of epoch 0")
        said = stuck_in_a_loader(ends)
    expected = (
        r"rank 3 has made no step for \d+ s since step 7 of epoch 0: it waits for no "
        r"other rank; its last line is "
    )
    assert re.match(expected, said)
    assert "in stuck_in_a_loader" in said
    assert "stuck_in_a_loader" in (tmp_path / "stacks-rank3.txt").read_text()


@pytest.mark.unit
def test_a_rank_that_makes_steps_or_is_told_to_take_its_time_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: queue.SimpleQueue[str] = queue.SimpleQueue()
    clock, looks = [0.0], [0]

    def monotonic() -> float:
        looks[0] += threading.current_thread().name == "watchdog"
        return clock[0]

    def later(seconds: float) -> None:
        """Waits until the watchdog has looked after ``seconds`` of its clock."""
        clock[0] += seconds
        seen = looks[0]
        while looks[0] < seen + 2:
            time.sleep(0.001)

    monkeypatch.setattr(module.time, "monotonic", monotonic)
    with Watchdog(0, 0.4, tmp_path, ends.put) as watchdog:
        for step in range(4):
            watchdog.beat(f"step {step}")
            later(0.3)
        watchdog.pause()
        later(100.0)
    assert ends.empty()
    assert not list(tmp_path.iterdir())
    assert not [thread for thread in threading.enumerate() if thread.name == "watchdog"]


@pytest.mark.unit
def test_without_a_limit_given_the_slowest_of_the_last_steps_says_what_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    watchdog = Watchdog(0, None, tmp_path, print)
    limits = [watchdog.after_s]

    def steps(number: int, seconds: float) -> None:
        for _ in range(number):
            clock[0] += seconds
            watchdog.beat("a step")
        limits.append(watchdog.after_s)

    steps(1, 60.0)  # the first beat: nothing is known yet
    steps(1, 1.5)  # 100 times as long
    steps(400, 0.01)  # a slow first step is forgotten
    steps(1, 900.0)  # and slow ones have their time, up to where collectives give up
    watchdog.pause()
    assert [*limits, watchdog.after_s] == [240, 240, 150, 25, 240, 240]


def waiting(runtime: Runtime, folder: str) -> Any:
    """Rank 0 does not come to a collective: first in a step, then in a pause, in which both have met often before."""
    module._PATIENCE_S = 1.5  # in this process alone
    # A busy machine starves a rank for as long as a stopped one is silent in so short a
    # test; that is another law's.
    Watchdog._standing_still = lambda *_: []  # type: ignore[method-assign, assignment]
    ends: queue.SimpleQueue[str] = queue.SimpleQueue()
    said = []
    for paused in (False, True):
        told = Path(folder, f"told-{paused}")

        def tell(line: str, told: Path = told) -> None:
            ends.put(line)
            if runtime.rank == 1:
                told.touch()

        with Watchdog(runtime.rank, 1.5, Path(folder), tell, world_size=2) as watchdog:
            watchdog.beat("step 1 of epoch 0")
            if paused:
                watchdog.pause()
            for _ in range(40 if paused else 1):
                # longer than one that waits is left alone
                time.sleep(0.1)
                dist.all_reduce(torch.zeros(1))
            if runtime.rank == 0:
                said += [] if paused else [stuck_in_a_loader(ends)]
                while not told.exists():
                    time.sleep(0.01)
            dist.all_reduce(torch.zeros(1))
            said += [ends.get()] if runtime.rank == 1 else []
            assert ends.empty()
    return said


@pytest.mark.slow
def test_the_rank_that_others_wait_for_is_the_first_to_say_so(tmp_path: Path) -> None:
    (cause,), (other, in_pause) = run_ranks(waiting, 2, str(tmp_path))
    assert "it waits for no other rank" in cause
    assert "it waits for other ranks in all_reduce" in other
    assert int(other.split("no step for ")[1].split(" s")[0]) >= 3, (
        "its report leaves the cause time to be told"
    )
    assert re.match(
        r"rank 1 has stood still for \d+ s since step 1 of epoch 0: it waits for other ranks in all_reduce",
        in_pause,
    )
