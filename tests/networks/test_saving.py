"""A stack that is stopped goes on as if it had not been; a member's checkpoint is that of a network of its own."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.networks.members import PLAIN, network
from tests.networks.test_training import STEPS, Rows
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.networks.optimizer import StackedOptimizer
from torchrec_ext.networks.skeleton import StackError
from torchrec_ext.networks.stack import Stack
from torchrec_ext.networks.training import Member, optimizer_of, train_stack
from torchrec_ext.train.checkpoint.checkpointer import Checkpointer
from torchrec_ext.train.checkpoint.folder import CheckpointRanks
from torchrec_ext.train.checkpoint.load import load_checkpoint
from torchrec_ext.train.checkpoint.run import CheckpointConfig, RunCheckpoints
from torchrec_ext.train.checkpoint.state import model_state
from torchrec_ext.train.checkpoint.vectors import publish_weights
from torchrec_ext.train.config import EarlyStop, Record, Schedule
from torchrec_ext.train.guards.finite import RunStoppedError
from torchrec_ext.train.loop import TrainConfig

EPOCHS = 4
ANEW = {"a": None, "b": None}
ADAM = OptimizerConfig(
    tables="row_wise_adagrad",
    dense="adam",
    tables_lr=0.05,
    dense_lr=0.02,
    clip_norm=1.0,
)
OTHER = OptimizerConfig(
    tables="row_wise_adagrad",
    dense="adam",
    tables_lr=0.1,
    dense_lr=0.01,
    dense_weight_decay=0.1,
)
LAZY = OptimizerConfig(
    tables="lazy_adam",
    dense="adagrad",
    tables_lr=0.02,
    dense_lr=0.02,
    per_layer=("*.bias=lr=0.05",),
)


class Stream(Rows):
    """One that knows where it stands."""

    def state_dict(self, *, step: int | None = None) -> dict[str, Any]:
        return {"epoch": self.epoch, "step": step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.first = state["epoch"], state["step"]

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.first = epoch, 0

    def __iter__(self) -> Any:
        for step in range(self.first, self.steps):
            yield self.batch(self.epoch, step)


def members(
    folder: Path,
    optimizers: tuple[OptimizerConfig, OptimizerConfig],
    resume: Mapping[str, int | None] = ANEW,
) -> dict[str, Member]:
    """Members that resume from a step's checkpoints, on one stream, with dropout, a schedule and an early stop."""
    rows, made = Stream(), {}
    for name, step in resume.items():
        at = "ab".index(name)
        optimizer = optimizers[at]
        checkpointer = Checkpointer(str(folder / name), Runtime(), keep=9)
        path = None if step is None else checkpointer.folder.path(step)
        made[name] = Member(
            network=network(PLAIN, seed=at, dropout=0.3),
            loader=rows,  # type: ignore[arg-type]
            optimizer=optimizer,
            seed=at,
            train=TrainConfig(
                epochs=EPOCHS,
                log_every=2,
                dense_schedule=Schedule(kind="cosine", warmup=2),
                early_stop=EarlyStop(metric="auc", patience=2)
                if name == "b"
                else EarlyStop(),
            ),
            checkpoints=RunCheckpoints(
                checkpointer, CheckpointConfig(steps=2), resume=path
            ),
        )
    return made


def judge(name: str) -> Record:
    return {"auc": 0.5}


def after(step: int) -> Callable[[], bool]:
    asked = iter(range(1, 1000))
    return lambda: next(asked) == step


def without_speed(history: dict[str, list[Record]]) -> dict[str, list[Record]]:
    return {
        name: [
            {k: v for k, v in record.items() if k not in ("rows_per_s", "data_wait")}
            for record in own
        ]
        for name, own in history.items()
    }


@pytest.mark.parametrize(
    ("optimizers", "stopped"),
    [
        pytest.param((ADAM, OTHER), STEPS + 1, id="adagrad-4"),
        pytest.param((LAZY, LAZY), 3 * STEPS + 2, id="lazy-11", marks=pytest.mark.slow),
        pytest.param(
            (ADAM, OTHER), 3 * STEPS + 2, id="adagrad-11", marks=pytest.mark.slow
        ),
        pytest.param((LAZY, LAZY), 2, id="lazy-2", marks=pytest.mark.slow),
    ],
)
def test_a_stack_that_was_stopped_equals_one_that_was_not(
    tmp_path: Path, optimizers: Any, stopped: int
) -> None:
    """Weights, optimizers, dropout and records agree bit for bit, in mid-epoch and after a member has left too."""
    whole = members(tmp_path / "whole", optimizers)
    history = train_stack(whole, evaluate=judge)
    assert history["b"][-1]["kind"] == "stop"
    with pytest.raises(
        RunStoppedError,
        match=f"stopped by a signal after step {stopped} of epoch .*, which is saved",
    ):
        train_stack(
            members(tmp_path / "cut", optimizers), evaluate=judge, stop=after(stopped)
        )
    of_b = 3 * STEPS if stopped > 3 * STEPS else stopped  # where it has left by then
    again = members(tmp_path / "cut", optimizers, {"a": stopped, "b": of_b})
    seen: list[tuple[str, Record]] = []
    found = train_stack(
        again, evaluate=judge, log=lambda name, record: seen.append((name, record))
    )
    for name, own in without_speed(found).items():
        assert own == without_speed(history)[name]
        assert [
            record
            for told, record in seen
            if told == name and record["kind"] != "restore"
        ] == found[name]
        state = again[name].network.state_dict()
        expected = whole[name].network.state_dict()
        for key, value in expected.items():
            assert torch.equal(state[key], value), (name, key)


def test_a_members_checkpoint_is_a_network_of_its_own(tmp_path: Path) -> None:
    """It is published under the network's own names, and loads into a network alone, with its optimizers' state."""
    made = members(tmp_path, (ADAM, OTHER))
    train_stack(made, evaluate=judge)
    for name, member in made.items():
        last = Checkpointer(str(tmp_path / name), Runtime())
        # of the member with an early stop, which goes back to it
        best = last.folder.noted("best.json")
        path = last.folder.path(best["step"]) if best else last.last_good()
        last.close()
        assert path is not None
        publish_weights(path, tmp_path / f"{name}.safetensors")
        found = load_file(tmp_path / f"{name}.safetensors")
        expected = member.network.state_dict()
        assert found.keys() == expected.keys()
        alone = network(PLAIN, seed=7, dropout=0.3)
        stack = Stack({"alone": alone})
        optimizer = StackedOptimizer(stack, {"alone": member.optimizer})
        optimizer.begin()
        load_checkpoint(
            path,
            model_state(alone, optimizer_of(stack, optimizer, "alone")),
            CheckpointRanks(Runtime()),
        )
        for key, value in expected.items():
            assert torch.equal(found[key], value)
            assert torch.equal(alone.state_dict()[key], value)


def test_members_whose_checkpoints_stand_apart_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunStoppedError):
        train_stack(
            members(tmp_path, (ADAM, OTHER)), evaluate=judge, stop=after(2 * STEPS)
        )
    made = members(tmp_path, (ADAM, OTHER), {"a": STEPS, "b": 2 * STEPS})
    with pytest.raises(
        StackError,
        match=f"stand apart: 'a' at step {STEPS}, 'b' at step {2 * STEPS}; give those of one step",
    ):
        train_stack(made, evaluate=judge)
