"""A run ends with the weights of its best evaluation, and one that is stopped inside an evaluation loses nothing."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.capture.runs import Few
from tests.contracts import gather_state, run_ranks
from tests.examples import META, small_model
from torchrec_ext.capture.executors import as_it_is
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sync import SyncConfig
from torchrec_ext.train.checkpoint.checkpointer import Checkpointer
from torchrec_ext.train.checkpoint.run import CheckpointConfig, RunCheckpoints
from torchrec_ext.train.config import EarlyStop
from torchrec_ext.train.guards import RunStoppedError
from torchrec_ext.train.loop import TrainConfig, train
from torchrec_ext.train.step import choose as steps

TIMES = ("rows_per_s", "data_wait", "ranks_wait")
FIGURES = [0.5, 0.9, 0.3, 0.2, 0.1]  # of each epoch
WATCH = EarlyStop(metric="auc", patience=2)


class Epochs(Few):
    """Three batches, the same in each epoch, of a loader that resumes."""

    def __init__(self) -> None:
        super().__init__([24, 16, 24])
        self._epoch = self._begin = 0

    def __iter__(self) -> Any:
        begin, self._begin = self._begin, 0
        return iter(self._batches[begin:])

    def set_epoch(self, epoch: int) -> None:
        self._epoch, self._begin = epoch, 0

    def state_dict(self, *, step: int | None = None) -> dict[str, Any]:
        return {"epoch": self._epoch, "step": step}

    def load_state_dict(self, state: Any) -> None:
        self._epoch, self._begin = state["epoch"], state["step"]


def run(
    runtime: Runtime,
    folder: str | None,
    *,
    resume: bool = False,
    sharding: str = "auto",
    sync: SyncConfig | None = None,
    saves: CheckpointConfig | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Trains up to five epochs."""
    # Adam has no kernel for sharded tables.
    is_whole = sharding in ("auto", "data_parallel")
    kind: Any = "adam" if is_whole else "adagrad"
    optimizers = OptimizerConfig(tables=kind, tables_lr=0.02)
    model = small_model(META)
    parallel, optimizer = hybrid_parallel(
        model, runtime, plan=PlanConfig(sharding=sharding), optimizer=optimizers, seed=3
    )
    checkpointer = Checkpointer(folder, runtime) if folder is not None else None
    begin = checkpointer.last_good() if checkpointer is not None and resume else None
    states: list[Any] = []
    logged: list[Any] = []
    evaluations, done = 0, epochs_done(begin)

    def evaluate() -> dict[str, float]:
        nonlocal evaluations
        evaluations += 1
        states.append(gather_state(parallel))
        return {"auc": FIGURES[done + evaluations - 1]}

    config = TrainConfig(
        epochs=5, log_every=2, **{"early_stop": WATCH, "compile": "off", **options}
    )
    said, message, history = io.StringIO(), "", []
    with contextlib.redirect_stdout(said):
        try:
            history = train(
                parallel,
                optimizer,
                Epochs(),
                runtime,
                config,
                evaluate=evaluate,
                log=logged.append,
                sync=sync,
                checkpoints=RunCheckpoints(
                    checkpointer, saves or CheckpointConfig(), resume=begin
                )
                if checkpointer
                else None,
            )
        except RunStoppedError as error:
            message = str(error)
    return {
        "history": [
            {name: value for name, value in record.items() if name not in TIMES}
            for record in history
        ],
        "logged": [record["kind"] for record in logged],
        "states": states,
        "end": gather_state(parallel),
        "said": said.getvalue(),
        "message": message,
        "evaluations": evaluations,
    }


def epochs_done(begin: str | None) -> int:
    """Evaluations that a run had made when its checkpoint was used."""
    if begin is None:
        return 0
    return int(begin[-10:]) // 3 - 1


def every_way(runtime: Runtime, folder: str) -> dict[str, dict[str, Any]]:
    local = SyncConfig(mode="local_sgd", every=2)
    found = {
        "saved": run(runtime, f"{folder}/saved"),
        "saved seldom": run(
            runtime, f"{folder}/seldom", saves=CheckpointConfig(epochs=4, keep=1)
        ),
        "row_wise": run(
            runtime,
            f"{folder}/rows",
            sharding="row_wise" if runtime.world_size == 1 else "table_wise",
        ),
        "local_sgd": run(
            runtime, f"{folder}/local", sharding="data_parallel", sync=local
        ),
    }
    if runtime.world_size == 1:
        steps.engine_for = lambda _: (as_it_is, "capturing")
        found["captured"] = run(runtime, f"{folder}/captured", compile="require")
    found["left"] = run(
        runtime, None, early_stop=EarlyStop(metric="auc", patience=2, restore=False)
    )
    found["again"] = run(runtime, f"{folder}/saved", resume=True)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_ends_with_the_weights_of_its_best_evaluation(
    world_size: int, tmp_path: Path
) -> None:
    found = run_ranks(every_way, world_size, str(tmp_path), timeout_s=300)[0]
    ended = found.pop("again")
    left = found.pop("left")
    for name, way in found.items():
        assert [
            record["epoch"] for record in way["history"] if record["kind"] == "eval"
        ] == [1, 2, 3, 4], name
        assert way["history"][-1]["kind"] == "stop", name
        assert way["history"][-1]["best_epoch"] == 2, name
        assert "restored epoch 2 (auc 0.9000)" in way["said"], name
        assert way["logged"][-1] == "restore", name
        assert all(
            torch.equal(way["end"][key], value)
            for key, value in way["states"][1].items()
        ), name
        assert not all(
            torch.equal(way["end"][key], value)
            for key, value in way["states"][3].items()
        ), name
    assert all(
        torch.equal(left["end"][key], value) for key, value in left["states"][3].items()
    )
    assert "restored" not in left["said"]
    # A run that had ended early is not trained further: it evaluates the last epoch
    # once more, and ends with its best weights again.
    assert ended["evaluations"] == 1
    history = ended["history"]
    assert history == found["saved"]["history"][-len(history) :]
    assert all(
        torch.equal(ended["end"][key], value)
        for key, value in found["saved"]["end"].items()
    )
