"""A run killed at any moment and resumed on other ranks has seen the same samples and ends with the same figures."""

import contextlib
import hashlib
import json
import os
import pickle
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.contracts import _CONTEXT, gather_state
from tests.examples import META, small_model
from tests.small_sets import checkerboard_data
from tests.train.checkpoint.watched import towers
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.checkpoint.checkpointer import Checkpointer
from torchrec_ext.train.checkpoint.run import CheckpointConfig, RunCheckpoints
from torchrec_ext.train.checkpoint.state import model_state
from torchrec_ext.train.checkpoint.storage import CheckpointError
from torchrec_ext.train.loop import TrainConfig, train

TRIALS, EPOCHS, LOGGED = 40, 6, 5
CONFIG = CheckpointConfig(steps=3)
PLANS = ("row_wise", "column_wise", "table_wise", "data_parallel")
Step = tuple[int, int]  # of which epoch, and of which step of it


def run(
    runtime: Runtime,
    folder: Path,
    name: str,
    plan: str,
    *,
    resume: bool,
    rate: float = 0.1,
    keep: int = 3,
    epochs: int = EPOCHS,
) -> Any:
    """Trains to the end, from the newest checkpoint; ``rate`` is that of the tables."""
    data = checkerboard_data(users=20, items=28)
    optimizers = OptimizerConfig(tables="adagrad", tables_lr=rate)
    file = folder / f"{name}-{runtime.rank}.jsonl"

    def note(*step: Any) -> None:
        with file.open("a") as stream:
            stream.write(json.dumps(step) + "\n")

    parallel, optimizer, loader = towers(runtime, data, note, optimizers, plan=plan)
    checkpointer = Checkpointer(str(folder / "checkpoints"), runtime, keep=keep)
    if runtime.is_main:
        checkpointer.folder.clean()
    path = checkpointer.last_good() if resume else None
    assert (path is None) != bool(resume)
    history = train(
        parallel,
        optimizer,
        loader,
        runtime,
        TrainConfig(epochs=epochs, log_every=LOGGED, compile="off"),
        checkpoints=RunCheckpoints(checkpointer, CONFIG, resume=path),
    )
    return {
        "losses": {record["step"]: record["loss"] for record in history},
        "state": gather_state(parallel),
        "steps": len(loader),
    }


def rank(
    number: int,
    world_size: int,
    folder: Path,
    name: str,
    plan: str,
    options: dict[str, Any],
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"{name}.store"), world_size)
    dist.init_process_group("gloo", store=store, rank=number, world_size=world_size)
    runtime = Runtime(
        rank=number,
        world_size=world_size,
        local_world_size=world_size,
    )
    found = run(runtime, folder, name, plan, **options)
    if number == 0:
        (folder / f"{name}.part").write_bytes(pickle.dumps(found))
        os.replace(folder / f"{name}.part", folder / f"{name}.end")
    dist.destroy_process_group()


class Attempt:
    """Ranks of a run, as processes; with the options of :func:`run`."""

    def __init__(
        self, folder: Path, name: str, world_size: int, plan: str, **options: Any
    ) -> None:
        self.folder, self.name, self.world_size = folder, name, world_size
        arguments = [
            (number, world_size, folder, name, plan, options)
            for number in range(world_size)
        ]
        self.processes = [
            _CONTEXT.Process(target=rank, args=own, daemon=True) for own in arguments
        ]
        for process in self.processes:
            process.start()

    def until(self, condition: Any, seconds: float = 90) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"not after {seconds} s"
            time.sleep(0.01)

    def ended(self) -> bool:
        """Whether it came to its end."""
        return (self.folder / f"{self.name}.end").exists()

    def over(self) -> bool:
        """Whether no rank runs any more."""
        return all(process.exitcode is not None for process in self.processes)

    def result(self) -> Any:
        """What it came to."""
        self.until(self.over)
        assert self.ended(), (
            f"ranks of {self.name} ended with {[process.exitcode for process in self.processes]}"
        )
        return pickle.loads((self.folder / f"{self.name}.end").read_bytes())

    def kill(self, numbers: list[int]) -> None:
        """By force; the others have to end by themselves."""
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(self.processes[number].pid or 0, signal.SIGKILL)
        self.until(self.over)

    def steps(self) -> dict[Step, list[tuple[int, ...]]]:
        """The rows of each step that every rank has come to, in the order in which it came to them."""
        found: list[dict[Step, Any]] = []
        for number in range(self.world_size):
            lines = (
                (self.folder / f"{self.name}-{number}.jsonl")
                .read_text()
                .splitlines(keepends=True)
            )
            found.append(
                {
                    (epoch, step): own
                    for epoch, step, own in (
                        json.loads(line) for line in lines if line.endswith("\n")
                    )
                }
            )
        return {
            step: sorted(tuple(row) for own in found for row in own[step])
            for step in found[0]
            if all(step in own for own in found)
        }

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def digest(steps: dict[Step, list[tuple[int, ...]]]) -> str:
    return hashlib.sha256(repr(sorted(steps.items())).encode()).hexdigest()


@pytest.mark.slow(minutes=8)
def test_killed_at_a_random_moment_and_resumed_on_other_ranks_nothing_differs(
    tmp_path: Path,
) -> None:
    draw, first_seconds = random.Random(0), {}
    wholes = {}
    for world_size in (1, 2, 4):
        folder = tmp_path / f"whole{world_size}"
        folder.mkdir()
        with Attempt(folder, "whole", world_size, "row_wise", resume=False) as attempt:
            attempt.until(
                lambda folder=folder: list((folder / "checkpoints").glob("step-*[0-9]"))
            )
            start = time.monotonic()
            wholes[world_size] = attempt.result(), attempt.steps()
            first_seconds[world_size] = time.monotonic() - start
    expected, seen = wholes[1]
    resumed_at, kills = set(), 0
    for trial in range(3 * TRIALS):
        folder = tmp_path / str(trial)
        folder.mkdir()
        before, after = draw.sample([1, 2, 4], 2)
        plans = draw.choices(PLANS, k=2)
        with Attempt(folder, "killed", before, plans[0], resume=False) as attempt:
            attempt.until(
                lambda folder=folder: list(
                    (folder / "checkpoints").glob("step-*[0-9]/manifest.json")
                )
            )
            time.sleep(draw.random() * 0.8 * first_seconds[before])
            if attempt.ended():
                continue  # too late to be killed: not a trial
            attempt.kill(
                list(range(before)) if draw.random() < 0.5 else [draw.randrange(before)]
            )
            lost = attempt.steps()
        with Attempt(folder, "resumed", after, plans[1], resume=True) as attempt:
            found = attempt.result()
            if not (folder / "resumed-0.jsonl").exists():
                continue  # its last step had been saved: nothing was left
            gone_on = attempt.steps()
        begin = next(iter(gone_on))
        resumed_at.add(begin)
        lineage = {step: rows for step, rows in lost.items() if step < begin} | gone_on
        assert digest(lineage) == digest(seen), (trial, before, after, plans, begin)
        first = begin[0] * expected["steps"] + begin[1]
        logged = {step for step in expected["losses"] if step > first}
        assert found["losses"].keys() == logged
        # on other ranks a record begins anew where it was cut off
        since = first + LOGGED
        for step, loss in expected["losses"].items():
            if step >= since:
                assert found["losses"][step] == pytest.approx(loss, rel=1e-4), (
                    trial,
                    before,
                    after,
                    plans,
                    begin,
                )
        for name, value in expected["state"].items():
            torch.testing.assert_close(found["state"][name], value, rtol=0, atol=1e-4)
        kills += 1
        print(
            f"{kills}: {before} ranks, {plans[0]}, killed; {after} ranks, {plans[1]}, from step {begin}: the same",
            flush=True,
        )
        if kills == TRIALS:
            break
    assert kills == TRIALS
    assert len(resumed_at) > TRIALS // 3


def waiting(number: int, folder: Path, sender: Any) -> None:
    """Rank 2 dies in a save; rank 1 waits for the save, and rank 0 for rank 1, as in a step."""
    store = dist.FileStore(str(folder / "store"), 3)
    dist.init_process_group("gloo", store=store, rank=number, world_size=3)
    runtime = Runtime(rank=number, world_size=3, local_world_size=3)
    checkpointer = Checkpointer(str(folder / "checkpoints"), runtime)
    model, _ = hybrid_parallel(small_model(device=META), runtime)
    state = model_state(model)
    if number == 2:
        checkpointer.together.on_main(lambda: None)  # as each save begins
        # It tells the size of its plan, and never sends it to rank 0.
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(3)]
        dist.all_gather(sizes, sizes[number] + 100, checkpointer.together.group)
        os._exit(1)
    checkpointer.save(1, state)
    try:
        if number == 1:
            checkpointer.wait()
        else:
            dist.recv(torch.zeros(1), src=1)
    except (CheckpointError, RuntimeError) as error:
        sender.put((number, type(error).__name__))


def test_ranks_that_lose_another_in_a_save_do_not_wait_for_each_other(
    tmp_path: Path,
) -> None:
    sender = _CONTEXT.Queue()
    processes = [
        _CONTEXT.Process(target=waiting, args=(number, tmp_path, sender), daemon=True)
        for number in range(3)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + 60
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        assert process.exitcode is not None, "it waits"
    found = dict(sender.get(timeout=5) for _ in range(2))
    assert found == {0: "RuntimeError", 1: "CheckpointError"}
