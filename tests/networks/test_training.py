"""The loop of a stack: each member's epochs, evaluations and end; one loader read once; codistillation."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.networks.members import (
    PLAIN,
    batch,
    greatest_difference,
    learn_alone,
    network,
)
from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.modules.losses import codistillation
from torchrec_ext.networks.skeleton import StackError
from torchrec_ext.networks.stack import Stack
from torchrec_ext.networks.training import (
    Codistillation,
    Member,
    StalePeers,
    train_stack,
)
from torchrec_ext.train.config import EarlyStop, Record
from torchrec_ext.train.loop import TrainConfig

SGD = OptimizerConfig(tables="sgd", dense="sgd", tables_lr=0.05, dense_lr=0.02)
STEPS = 3


class Rows:
    """A loader that counts how often it is read."""

    def __init__(self, seed: int = 0, steps: int = STEPS) -> None:
        self.seed, self.steps, self.epoch, self.read = seed, steps, 0, 0

    def __len__(self) -> int:
        return self.steps

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[TowerBatch]:
        for step in range(self.steps):
            self.read += 1
            yield self.batch(self.epoch, step)

    def batch(self, epoch: int, step: int) -> TowerBatch:
        return batch(PLAIN, self.seed + 100 * epoch + step)


def member(
    loader: Rows, *, seed: int = 0, optimizer: OptimizerConfig = SGD, **train: Any
) -> Member:
    return Member(
        network=network(PLAIN, seed=seed),
        loader=loader,
        optimizer=optimizer,
        train=TrainConfig(**train),
    )


def test_members_end_each_at_its_own_epoch_and_read_one_loader_once() -> None:
    rows = Rows()
    members = {
        "short": member(rows, seed=1, epochs=1),
        "long": member(rows, seed=2, epochs=3),
    }
    told: list[tuple[str, str, int]] = []
    train_stack(
        members,
        log=lambda name, record: told.append((name, record["kind"], record["step"])),
    )
    assert rows.read == 3 * STEPS
    assert told == [
        ("short", "train", 3),
        ("long", "train", 3),
        ("long", "train", 6),
        ("long", "train", 9),
    ]
    for name, epochs in (("short", 1), ("long", 3)):
        own = [
            rows.batch(epoch, step) for epoch in range(epochs) for step in range(STEPS)
        ]
        alone = learn_alone(network(PLAIN, seed=1 if name == "short" else 2), own, SGD)
        assert (
            greatest_difference(members[name].network.state_dict(), alone.state_dict())
            < 1e-6
        ), name


def test_a_member_stops_early_by_its_own_figure_and_the_others_go_on() -> None:
    rows = Rows()
    stop = EarlyStop(metric="auc", patience=2)
    members = {
        "a": member(rows, seed=1, epochs=6, early_stop=stop),
        "b": member(rows, seed=2, epochs=6),
    }
    seen: list[str] = []

    def evaluate(name: str) -> Record:
        assert not members[name].network.training
        seen.append(name)
        return {"auc": 0.5 if name == "a" else 0.6}

    history = train_stack(members, evaluate=evaluate)
    assert (seen.count("a"), seen.count("b")) == (3, 6)
    assert history["a"][-1]["message"].startswith(
        "stopped early: no auc better than 0.5000, of epoch 1, in 2 evaluation(s)"
    )
    assert [
        record["epoch"]
        for record in history["a"]
        if record["kind"] == "eval" and record.get("best")
    ] == [1]
    assert history["b"][-1] == {"kind": "eval", "epoch": 6, "step": 18, "auc": 0.6}


def test_a_member_whose_loss_is_no_number_ends_and_the_others_are_as_alone() -> None:
    rows = Rows()
    members = {
        "wild": member(rows, seed=1, epochs=3),
        "tame": member(rows, seed=2, epochs=3),
    }
    torch.nn.init.constant_(
        members["wild"].network.get_parameter("interaction.mlp.0.weight"), float("nan")
    )
    history = train_stack(members)
    assert [record["kind"] for record in history["wild"]] == ["error"]
    assert history["wild"][0]["message"].startswith(
        "'wild': the loss is nan at step 1 of epoch 1; nothing was written by this step"
    )
    alone = learn_alone(
        network(PLAIN, seed=2),
        [rows.batch(epoch, step) for epoch in range(3) for step in range(STEPS)],
        SGD,
    )
    assert (
        greatest_difference(members["tame"].network.state_dict(), alone.state_dict())
        < 1e-6
    )


def test_a_run_in_which_every_member_diverges_ends() -> None:
    rows = Rows()
    members = {"a": member(rows, epochs=3)}
    torch.nn.init.constant_(
        members["a"].network.get_parameter("interaction.mlp.0.weight"), float("inf")
    )
    assert [record["kind"] for record in train_stack(members)["a"]] == ["error"]


@pytest.mark.unit
def test_loaders_with_other_numbers_of_steps_are_refused() -> None:
    with pytest.raises(
        StackError,
        match="'a' has 3 steps an epoch and 'b' 4: members of a stack step together",
    ):
        train_stack({"a": member(Rows()), "b": member(Rows(steps=4), seed=1)})


def by_hand(
    nets: list[Any], rows: Rows, config: Codistillation, epochs: int
) -> list[Any]:
    """Codistillation by autograd: stale copies of all, each member towards the mean of the others' predictions."""
    stale: list[dict[str, Tensor]] = []
    steps = [
        rows.batch(epoch, step) for epoch in range(epochs) for step in range(STEPS)
    ]
    for step, own in enumerate(steps):
        distilled = step >= config.burn_in
        if distilled and (step - config.burn_in) % config.every == 0:
            stale = [
                {name: value.clone() for name, value in net.state_dict().items()}
                for net in nets
            ]
        with torch.no_grad():
            said = (
                torch.stack(
                    [
                        torch.func.functional_call(net, old, (own,))[1].logits
                        for net, old in zip(nets, stale, strict=False)
                    ]
                )
                if stale
                else None
            )
        for at, net in enumerate(nets):
            net.zero_grad()
            logits = net.logits(own)
            loss = net.loss(logits, own)
            if distilled and said is not None:
                loss = loss + config.weight * codistillation(
                    logits, own, torch.cat([said[:at], said[at + 1 :]])
                )
            loss.backward()
        with torch.no_grad():
            for net in nets:
                for name, weight in net.named_parameters():
                    weight -= (
                        SGD.tables_lr if "embedding_bags" in name else SGD.dense_lr
                    ) * weight.grad
    return nets


def test_codistillation_draws_members_towards_stale_peers_after_the_burn_in() -> None:
    rows, config = Rows(), Codistillation(weight=2.0, burn_in=4, every=3)
    members = {name: member(rows, seed=at, epochs=4) for at, name in enumerate("abc")}
    train_stack(members, codistillation=config)
    expected = by_hand([network(PLAIN, seed=at) for at in range(3)], rows, config, 4)
    for own, net in zip(members.values(), expected, strict=True):
        assert greatest_difference(own.network.state_dict(), net.state_dict()) < 1e-6
    apart = learn_alone(
        network(PLAIN, seed=0),
        [rows.batch(epoch, step) for epoch in range(4) for step in range(STEPS)],
        SGD,
    )
    assert (
        greatest_difference(members["a"].network.state_dict(), apart.state_dict())
        > 1e-4
    )


def test_codistillation_needs_peers_that_read_the_same_rows() -> None:
    config = Codistillation(weight=1.0, burn_in=0)
    with pytest.raises(StackError, match="between members that read different rows"):
        train_stack(
            {"a": member(Rows()), "b": member(Rows(7), seed=1)}, codistillation=config
        )
    with pytest.raises(StackError, match=r"codistillation with the one member \['a'\]"):
        StalePeers(Stack({"a": network()}), config)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"weight": -1.0}, "weight=-1.0: must be a number of 0 or more"),
        ({"burn_in": -1}, "burn_in=-1: must be 0 steps or more"),
        ({"every": 0}, "every=0: must be 1 step or more"),
    ],
)
def test_settings_of_codistillation_are_checked(
    changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        Codistillation(**changes)
