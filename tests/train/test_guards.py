"""A loss that is not finite, or a request to stop, ends all ranks after the same step; a rank that hangs says where."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contracts import run_ranks
from tests.distributed.test_sync import made
from tests.train.test_loop import Batches
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sync import SyncConfig
from torchrec_ext.train.checkpoint.checkpointer import Checkpointer
from torchrec_ext.train.checkpoint.config import CheckpointConfig
from torchrec_ext.train.checkpoint.run import RunCheckpoints
from torchrec_ext.train.checkpoint.state import model_state
from torchrec_ext.train.guards import Guard, RunStoppedError, Watchdog
from torchrec_ext.train.loop import TrainConfig, TrainingDivergedError, train

SYNC = {
    "every_step": SyncConfig(),
    "local_sgd": SyncConfig(mode="local_sgd", every=5),
}
CASES = [
    (fault, sharding, mode)
    for fault in ("label", "gradient", "stop")
    for sharding in ("data_parallel", "row_wise")
    for mode in SYNC
]


class Resumable(Batches):
    """Batches with a position."""

    def state_dict(self, *, step: int | None = None) -> dict[str, Any]:
        return {"step": step}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError(state)


def ended(
    runtime: Runtime, folder: str, fault: str, sharding: str, mode: str
) -> dict[str, Any]:
    """Rank 1 has a fault in step 6 of a run of 9 that is saved after each second step."""
    parallel, optimizer = made(runtime, sharding, OptimizerConfig())
    loader = Resumable(runtime, 9)
    calls: list[int] = []

    def infinite_once(gradient: Tensor) -> Tensor:
        calls.append(1)
        return gradient / 0 if len(calls) == 5 else gradient

    if runtime.rank == 1 and fault == "label":
        list(loader)[5].labels[:2] = float("nan")
    if runtime.rank == 1 and fault == "gradient":
        bias = dict(parallel.named_parameters())["towers.user.mlp.0.bias"]
        bias.register_hook(infinite_once)
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return fault == "stop" and runtime.rank == 1 and len(asked) > 2

    records: list[Any] = []
    checkpointer = Checkpointer(folder, runtime)
    with pytest.raises((TrainingDivergedError, RunStoppedError)) as error:
        train(
            parallel,
            optimizer,
            loader,
            runtime,
            TrainConfig(epochs=2),
            sync=SYNC[mode],
            checkpoints=RunCheckpoints(checkpointer, CheckpointConfig(steps=2)),
            stop=stop,
            log=records.append,
        )
    checkpointer.close()
    newest = checkpointer.last_good()
    state = model_state(parallel, optimizer)
    saved = checkpointer.load(newest or "", state)["step"]
    return {
        "told": str(error.value),
        "step": getattr(error.value, "step", None),
        "last": records[-1] if records else None,
        "saved": saved,
        "newest": newest,
        "finite": all(
            bool(torch.isfinite(part.tensor).all())
            for value in state.tensors.values()
            for part in getattr(value, "parts", ())
        ),
    }


def all_ends(runtime: Runtime, folder: str) -> dict[Any, Any]:
    return {case: ended(runtime, f"{folder}/{'-'.join(case)}", *case) for case in CASES}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run_ranks(all_ends, 2, str(tmp_path_factory.mktemp("ends")), timeout_s=400)


@pytest.mark.parametrize("case", CASES)
def test_both_ranks_end_after_the_same_step_and_what_is_saved_is_good(
    two_ranks: list[Any], case: tuple[str, str, str]
) -> None:
    first, second = (rank[case] for rank in two_ranks)
    assert first["told"] == second["told"]
    assert (first["saved"], first["finite"]) == (second["saved"], True)
    if case[0] == "stop":
        assert first["told"].startswith("stopped by a signal after step ")
        assert f"step {first['saved']} of" in first["told"]
        return
    assert first["step"] == second["step"] == 6
    assert first["told"].startswith("the loss is nan on rank(s) [")
    assert "1] at step 6 of epoch 1; lower optimizer.tables_lr" in first["told"]
    assert first["told"].endswith(f"the last good checkpoint is {first['newest']}")
    assert first["saved"] == 4
    expected = {"kind": "error", "epoch": 1, "step": 6, "message": first["told"]}
    assert first["last"] == expected
    assert second["last"] is None


@pytest.mark.unit
@pytest.mark.parametrize("bad", [1, 1023, 1024, 1025, 2500])
def test_one_rank_names_the_first_bad_step_however_late_it_looks(bad: int) -> None:
    guard = Guard(Runtime(), 1000, step=10)
    for number in range(1, 2501):
        guard.see(torch.tensor(float("inf") if number >= bad else 0.5))
    with pytest.raises(TrainingDivergedError) as error:
        guard.meet()
    assert error.value.step == 10 + bad
    epoch = 1 + (bad + 9) // 1000
    assert f"is inf on rank(s) [0] at step {10 + bad} of epoch {epoch};" in str(
        error.value
    )


def stuck_in_a_loader(file: Path) -> None:
    """Where the user's own code does not come back."""
    while not file.stat().st_size:
        time.sleep(0.01)


@pytest.mark.unit
def test_a_rank_that_hangs_leaves_its_stacks(tmp_path: Path) -> None:
    file = tmp_path / "run" / "stacks-rank3.txt"
    with Watchdog(3, 0.2, tmp_path / "run") as watchdog:
        watchdog.beat()
        stuck_in_a_loader(file)
    assert "in stuck_in_a_loader" in file.read_text()


@pytest.mark.unit
def test_a_rank_that_makes_steps_or_takes_its_time_leaves_nothing(
    tmp_path: Path,
) -> None:
    with Watchdog(0, 5.0, tmp_path) as watchdog:
        for _ in range(100):
            watchdog.beat()
    # Another run in the same process has a watchdog of its own.
    with Watchdog(0, 0.01, tmp_path) as watchdog:
        watchdog.beat()
        watchdog.pause()
        time.sleep(0.05)
    assert not list(tmp_path.iterdir())
