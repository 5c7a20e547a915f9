"""A stopped and resumed run equals one without a stop: bit for bit on the same ranks, else sample for sample."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.contracts import gather_state, run_ranks
from tests.small_sets import checkerboard_data
from tests.train.checkpoint.watched import towers
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train import guards
from torchrec_ext.train.checkpoint.checkpointer import Checkpointer
from torchrec_ext.train.checkpoint.run import CheckpointConfig, RunCheckpoints
from torchrec_ext.train.config import EarlyStop, Schedule
from torchrec_ext.train.guards import RunStoppedError
from torchrec_ext.train.loop import TrainConfig, train

EPOCHS = 3


def run(
    runtime: Runtime,
    folder: str,
    resume: bool = False,
    stop_after: int = 0,
    dropout: float = 0.0,
    batch_size: int = 16,
) -> dict[str, Any]:
    """Trains from the newest checkpoint; the last rank asks to stop after so many steps of this attempt."""
    data = checkerboard_data(users=10, items=14)
    optimizers = OptimizerConfig(tables="row_wise_adagrad", tables_lr=0.1)
    rows: dict[tuple[int, int], list[tuple[int, ...]]] = {}

    def note(epoch: int, step: int, own: list[tuple[int, ...]]) -> None:
        rows[epoch, step] = own

    parallel, optimizer, loader = towers(
        runtime,
        data,
        note,
        optimizers,
        plan="row_wise",
        dropout=dropout,
        batch_size=batch_size,
    )
    checkpointer = Checkpointer(folder, runtime)
    path = checkpointer.last_good() if resume else None
    # Ranks meet after every step, not every two seconds.
    guards._MEETING_S = 0.0
    counted = Counted()

    def stop() -> bool:
        is_last = runtime.rank == runtime.world_size - 1
        return is_last and counted.steps >= stop_after > 0

    schedule = Schedule(kind="cosine", warmup=2)
    settings = TrainConfig(
        epochs=EPOCHS,
        log_every=3,
        schedule=schedule,
        early_stop=EarlyStop(metric="hr", patience=9),
        compile="off",
    )
    message, logged = "", []
    try:
        train(
            parallel,
            optimizer,
            loader,
            runtime,
            settings,
            evaluate=lambda: {"hr": float(gather_all(parallel))},
            checkpoints=RunCheckpoints(checkpointer, CheckpointConfig(), resume=path),
            stop=stop,
            observer=counted,
            log=logged.append,
        )
    except RunStoppedError as stopped:
        message = str(stopped)
    history = [record for record in logged if record["kind"] in ("train", "eval")]
    for record in history:
        for name in ("rows_per_s", "data_wait", "ranks_wait"):
            record.pop(name, None)
    return {
        "history": history,
        "state": gather_state(parallel),
        "rows": rows,
        "message": message,
        "steps": counted.steps,
    }


class Counted:
    """Counts the steps of a run."""

    steps = 0

    def see(self, output: Any) -> None:
        self.steps += 1

    def figures(self) -> dict[str, float]:
        return {}


def gather_all(model: Any) -> float:
    """A figure that depends on every weight, the same on all ranks."""
    total = sum(parameter.detach().abs().sum() for parameter in model.parameters())
    dist.all_reduce(total)
    return float(total)


def attempts(
    runtime: Runtime, folder: str, stops: list[int], dropout: float
) -> list[dict[str, Any]]:
    """One run in several attempts."""
    found = []
    for number, stop_after in enumerate([*stops, 0]):
        found.append(
            run(
                runtime,
                folder,
                resume=number > 0,
                stop_after=stop_after,
                dropout=dropout,
            )
        )
        dist.barrier()
    return found


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_stopped_and_resumed_equals_never_stopped_bit_for_bit(
    world_size: int, tmp_path: Path
) -> None:
    whole = run_ranks(run, world_size, str(tmp_path / "whole"), False, 0, 0.3)[0]
    assert whole["steps"] == whole["history"][-1]["step"]
    length = whole["steps"] // EPOCHS
    parts = run_ranks(
        attempts, world_size, str(tmp_path / "parts"), [2, length, 1], 0.3
    )[0]
    said = [part["message"] for part in parts]
    assert (
        said[0]
        == "stopped by a signal after step 2 of epoch 1, which is saved; go on with the same --run_dir"
    )
    assert all(said[:-1])
    assert not said[-1]
    assert sum(part["steps"] for part in parts) == whole["steps"], (
        "no step was made twice"
    )
    history = [record for part in parts for record in part["history"]]
    assert history == whole["history"]
    assert parts[-1]["state"].keys() == whole["state"].keys()
    for name, value in whole["state"].items():
        assert torch.equal(parts[-1]["state"][name], value), name


def test_on_other_ranks_the_same_samples_are_seen_once(tmp_path: Path) -> None:
    folder = str(tmp_path / "moved")
    whole = run_ranks(run, 2, str(tmp_path / "whole"))
    seen: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    history: list[dict[str, Any]] = []
    # The first two stop between two records, which are of three steps each.
    for world_size, stop_after, resume in ((2, 4, False), (1, 6, True), (4, 0, True)):
        ranks = run_ranks(run, world_size, folder, resume, stop_after)
        history += ranks[0]["history"]
        # a pipeline reads ahead of the step at which it stops
        own = list(ranks[0]["rows"])[: ranks[0]["steps"]]
        for step in own:
            assert step not in seen, "a step was made twice"
            seen[step] = [row for rank in ranks for row in rank["rows"][step]]
    assert digest(seen) == digest(
        {
            step: [row for rank in whole for row in rank["rows"][step]]
            for step in whole[0]["rows"]
        }
    )
    for name, value in whole[0]["state"].items():
        torch.testing.assert_close(ranks[0]["state"][name], value, rtol=0, atol=1e-5)
    for record, other in zip(history, whole[0]["history"], strict=True):
        for key in ("kind", "epoch", "step", "rows"):
            assert record.get(key) == other.get(key), (
                "a record that was begun on other ranks is completed"
            )
        assert record.get("loss", 0) == pytest.approx(other.get("loss", 0), rel=1e-3)


def digest(rows: Mapping[tuple[int, int], list[tuple[int, ...]]]) -> str:
    return hashlib.sha256(
        repr(sorted((step, sorted(own)) for step, own in rows.items())).encode()
    ).hexdigest()


def other_batches(runtime: Runtime, folder: str) -> str:
    run(runtime, folder, stop_after=2)
    with pytest.raises(ValueError) as caught:
        run(runtime, folder, resume=True, batch_size=20)
    return str(caught.value)


def test_another_batch_size_is_refused_on_every_rank_with_both_values(
    tmp_path: Path,
) -> None:
    for said in run_ranks(other_batches, 2, str(tmp_path)):
        assert "batch_size was 16 and is 20; put settings and files back" in said
