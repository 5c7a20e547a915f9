"""Member k of a stack equals the network trained alone; what cannot be stacked is refused by the differing field."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingConfig

from tests.networks.members import (
    ITEMS,
    JOINT,
    PLAIN,
    SHARED,
    WEIGHTED,
    Form,
    batch,
    greatest_difference,
    learn_alone,
    network,
    table,
)
from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.interaction import TopMLP
from torchrec_ext.modules.layers import mlp
from torchrec_ext.modules.tower import Tower
from torchrec_ext.networks.optimizer import StackedOptimizer
from torchrec_ext.networks.skeleton import StackError, first_difference
from torchrec_ext.networks.stack import Stack
from torchrec_ext.train.config import Schedule

# With eps = 1e-8 the last bit of a gradient that is nearly 0 decides the direction of a
# whole step of Adam and Adagrad.
ADAM = OptimizerConfig(tables="adam", tables_lr=2e-3, dense_lr=1e-3, eps=1e-4)
SGD = OptimizerConfig(tables="sgd", dense="sgd", tables_lr=0.05, dense_lr=0.02)


def stacked(
    nets: dict[str, nn.Module],
    batches: Sequence[Sequence[TowerBatch]],
    configs: dict[str, OptimizerConfig],
    **seeds: int,
) -> Stack:
    """A stack of copies of ``nets`` after a step on each of ``batches``, one of each member."""
    stack = Stack(copy.deepcopy(nets), seeds=seeds)
    optimizer = StackedOptimizer(stack, configs)
    for rows in zip(*batches, strict=True):
        stack.backward(rows)
        optimizer.step()
    return stack


def other_rates(
    config: OptimizerConfig, factor: float, **changes: Any
) -> OptimizerConfig:
    return OptimizerConfig(
        **{
            **vars(config),
            "tables_lr": config.tables_lr * factor,
            "dense_lr": config.dense_lr * factor,
            **changes,
        }
    )


@pytest.mark.parametrize(
    "config", [pytest.param(ADAM, marks=pytest.mark.slow), SGD], ids=["adam", "sgd"]
)
def test_each_member_equals_the_same_network_trained_alone_for_200_steps(
    config: OptimizerConfig,
) -> None:
    nets = {
        "a": network(SHARED, seed=1),
        "b": network(SHARED, seed=2, dropout=0.4),
        "c": network(SHARED, seed=3),
    }
    configs = {"a": config, "b": other_rates(config, 3.0), "c": config}
    batches = [
        [batch(SHARED, 1000 * member + step) for step in range(200)]
        for member in range(3)
    ]
    stack = stacked(nets, batches, configs, b=7)
    for (name, net), own in zip(nets.items(), batches, strict=True):
        alone = learn_alone(net, own, configs[name], seed=7)
        assert greatest_difference(stack.state_of(name), alone.state_dict()) < 1e-6, (
            name
        )
        assert greatest_difference(net.state_dict(), alone.state_dict()) > 1e-2, (
            "it has learned"
        )


@pytest.mark.parametrize(
    "form",
    [PLAIN, SHARED, JOINT, WEIGHTED],
    ids=["plain", "shared", "joint", "weighted"],
)
@pytest.mark.parametrize("same", [True, False], ids=["one batch", "own batches"])
def test_every_kind_of_look_up_learns_as_alone(form: Form, same: bool) -> None:
    nets = {"a": network(form, seed=1), "b": network(form, seed=2)}
    own = [
        [batch(form, step + (0 if same else 100 * member)) for step in range(5)]
        for member in range(2)
    ]
    batches = [own[0], own[0]] if same else own
    stack = stacked(nets, batches, {"a": SGD, "b": SGD})
    for (name, net), rows in zip(nets.items(), batches, strict=True):
        assert (
            greatest_difference(
                stack.state_of(name), learn_alone(net, rows, SGD).state_dict()
            )
            < 1e-6
        ), name


@pytest.mark.parametrize(
    ("changes", "of_the_other"),
    [
        ({"clip_norm": 0.05}, {}),
        ({"dense_weight_decay": 0.3, "tables_weight_decay": 0.2}, {"tables_l2": 0.01}),
        (
            {
                "per_table": ("history=lr=0.3",),
                "per_layer": ("towers.user=lr=0.003", "*.bias=weight_decay=0.5"),
            },
            {},
        ),
        (
            {
                "per_table": ("history=sgd lr=0.1", "item_id=row_wise_adagrad"),
                "per_layer": ("interaction=adagrad lr=0.01",),
            },
            {
                "per_table": ("history=sgd", "item_id=row_wise_adagrad"),
                "per_layer": ("interaction=adagrad",),
            },
        ),
    ],
    ids=["clip", "decay", "rates", "kinds"],
)
def test_settings_of_the_optimizer_are_each_members_own(
    changes: dict[str, Any], of_the_other: dict[str, Any]
) -> None:
    nets = {"a": network(PLAIN, seed=1), "b": network(PLAIN, seed=2)}
    configs = {
        name: OptimizerConfig(**{**vars(ADAM), **own})
        for name, own in (("a", changes), ("b", of_the_other))
    }
    batches = [[batch(PLAIN, step) for step in range(10)]] * 2
    stack = stacked(nets, batches, configs)
    for name, net in nets.items():
        alone = learn_alone(net, batches[0], configs[name])
        assert greatest_difference(stack.state_of(name), alone.state_dict()) < 1e-6, (
            name
        )


def test_the_others_go_on_where_they_are_when_a_member_leaves() -> None:
    nets = {
        "a": network(PLAIN, seed=1),
        "b": network(PLAIN, seed=2, dropout=0.3),
        "c": network(PLAIN, seed=3),
    }
    configs = {"a": ADAM, "b": other_rates(ADAM, 2.0), "c": ADAM}
    batches = [batch(PLAIN, step) for step in range(12)]
    stack = Stack(copy.deepcopy(nets), seeds={"b": 5})
    optimizer = StackedOptimizer(stack, configs)
    for step, rows in enumerate(batches):
        if step == 6:
            left = stack.state_of("a")
            stack = stack.without(["a"])
            optimizer = optimizer.kept(stack)
        stack.backward([rows] * len(stack.members))
        optimizer.step()
    assert (
        greatest_difference(
            left, learn_alone(nets["a"], batches[:6], ADAM).state_dict()
        )
        < 1e-6
    )
    for name in ("b", "c"):
        alone = learn_alone(nets[name], batches, configs[name], seed=5)
        assert greatest_difference(stack.state_of(name), alone.state_dict()) < 1e-6, (
            name
        )


def test_schedules_are_each_members_own() -> None:
    nets = {"a": network(PLAIN, seed=1), "b": network(PLAIN, seed=1)}
    stack = Stack(nets)
    schedules = {"b": (Schedule(), Schedule(kind="linear", warmup=2))}
    optimizer = StackedOptimizer(
        stack, {"a": SGD, "b": SGD}, schedules=schedules, steps={"b": 6}
    )
    seen = []
    for step in range(6):
        stack.backward([batch(PLAIN, step)] * 2)
        optimizer.step()
        seen.append(optimizer.rates("b")["dense_lr"])
        assert optimizer.rates("a") == {"tables_lr": 0.05, "dense_lr": 0.02}
    assert seen == pytest.approx([0.01, 0.02, 0.02, 0.02 * 2 / 3, 0.02 / 3, 0.0])


def test_a_member_is_an_ordinary_network_with_the_weights_of_now() -> None:
    nets = {"a": network(PLAIN, seed=1), "b": network(PLAIN, seed=2)}
    rows = batch(PLAIN, 0)
    stack = Stack(nets)
    optimizer = StackedOptimizer(stack, {"a": SGD, "b": SGD})
    before = stack.state_of("a")
    losses = stack.backward([rows, rows])
    optimizer.step()
    fresh = network(PLAIN, seed=9)
    fresh.load_state_dict(stack.state_of("b"))
    assert torch.equal(fresh(rows)[1].logits, nets["b"](rows)[1].logits), (
        "the network itself has the new weights"
    )
    assert float(fresh(rows)[0].detach()) != pytest.approx(
        float(losses.loss[1]), abs=1e-6
    )
    assert greatest_difference(before, stack.state_of("a")) > 0, (
        "a state dict is a copy"
    )
    assert all(
        value.untyped_storage().nbytes() == value.numel() * 4
        for value in stack.state_of("a").values()
    )


def test_losses_and_logits_are_those_of_the_members() -> None:
    nets = {"a": network(SHARED, seed=1), "b": network(SHARED, seed=2)}
    rows = [batch(SHARED, 0), batch(SHARED, 1)]
    expected = [net(own) for net, own in zip(nets.values(), rows, strict=True)]
    found = Stack(nets).backward(rows)
    assert found.loss.tolist() == pytest.approx(
        [float(loss.detach()) for loss, _ in expected], abs=1e-6
    )
    torch.testing.assert_close(
        found.logits, torch.stack([output.logits for _, output in expected])
    )


class Scaled(nn.Module):
    """An interaction with a number of its own that is no weight."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, outputs: list[Tensor]) -> Tensor:
        return self.scale * (outputs[0] * outputs[1]).sum(dim=1)


def with_interaction(
    interaction: nn.Module, dim: int = 4, rows: int = ITEMS
) -> TowerModel:
    towers = {
        "user": Tower([table("user_id", rows)], (dim,)),
        "item": Tower([table("item_id", ITEMS)], (dim,)),
    }
    return TowerModel(towers, interaction)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (
            network(),
            network(widths=(16, 4)),
            "towers.user.mlp.0: out_features is 8 in 'a' and 16 in 'b'",
        ),
        (
            network(),
            network(widths=(8, 8, 4)),
            "is Linear in 'a' and ReLU in 'b'|layers and 'b'|out_features is 4 in 'a'",
        ),
        (
            with_interaction(Scaled(1.0)),
            with_interaction(Scaled(2.0)),
            "interaction: scale is 1.0 in 'a' and 2.0 in 'b'",
        ),
        (
            with_interaction(Scaled(1.0), rows=5),
            with_interaction(Scaled(1.0), rows=6),
            "num_embeddings=5.*num_embeddings=6",
        ),
        (network(PLAIN), network(SHARED), "shared"),
    ],
)
def test_networks_of_different_shapes_are_refused_with_the_field(
    one: nn.Module, other: nn.Module, told: str
) -> None:
    with pytest.raises(
        StackError,
        match=rf"(?s){told}.*give both the same, or train them beside each other",
    ):
        Stack({"a": one, "b": other})


@pytest.mark.unit
def test_dropout_is_no_matter_of_shape() -> None:
    assert first_difference({"a": network(), "b": network(dropout=0.5)}) is None


@pytest.mark.unit
def test_a_stack_of_nothing_or_of_one_network_twice_is_refused() -> None:
    net = network()
    with pytest.raises(StackError, match="at least one network"):
        Stack({})
    with pytest.raises(StackError, match=r"\['a', 'b'\] are one network"):
        Stack({"a": net, "b": net})


def test_batches_of_different_shapes_are_refused() -> None:
    stack = Stack({"a": network(seed=1), "b": network(seed=2)})
    whole = batch(PLAIN, 0)
    part = whole._map(
        lambda column: (
            column[:6] if isinstance(column, Tensor) and column.dim() else column
        )
    )
    with pytest.raises(
        StackError,
        match=r"batch.dense is \(18, 1\) for 'a' and \(6, 1\) for 'b'.*same batch_size and negatives",
    ):
        stack.backward([whole, part])
    with pytest.raises(StackError, match="1 batches for 2 networks"):
        stack.backward([batch(PLAIN, 0)])


def with_attention() -> TowerModel:
    lists = EmbeddingConfig(
        name="history", feature_names=["history"], num_embeddings=ITEMS, embedding_dim=4
    )
    return TowerModel(
        {"user": Tower([lists], (4,)), "item": Tower([table("item_id", ITEMS)], (4,))},
        TopMLP([4, 4]),
    )


def reading_ids() -> TowerModel:
    def loss(logits: Tensor, rows: TowerBatch) -> Tensor:
        return logits.sum() * rows.sparse.values().sum()

    towers = {
        "user": Tower([table("user_id", 31)], (4,)),
        "item": Tower([table("item_id", ITEMS)], (4,)),
    }
    return TowerModel(towers, Scaled(1.0), loss=loss)


class OfOnesOwn(nn.Module):
    def __init__(self, top: TopMLP) -> None:
        super().__init__()
        self.top = top

    def forward(self, outputs: list[Tensor], weights: Tensor | None = None) -> Tensor:
        return self.top(outputs, weights)


def with_batch_norm() -> TowerModel:
    towers = {
        "user": Tower([table("user_id", 31)], (4,)),
        "item": Tower([table("item_id", ITEMS)], (4,)),
    }
    return TowerModel(towers, OfOnesOwn(TopMLP([4, 4], (8,), normalization="batch")))


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (with_attention, "is a EmbeddingCollection: only EmbeddingBagCollections"),
        (
            reading_ids,
            "reads batch.sparse.values, ids outside of an EmbeddingBagCollection",
        ),
        (
            with_batch_norm,
            "is a BatchNorm: only EmbeddingBagCollections and layers that keep no statistics",
        ),
    ],
)
def test_what_cannot_be_stacked_is_told_with_the_layer(made: Any, told: str) -> None:
    stack = Stack({"a": made()})
    with pytest.raises(StackError, match=told):
        stack.backward([batch(PLAIN, 0)])


class Counted(nn.Module):
    """Depends on something that no comparison of layers sees."""

    calls = 0

    def forward(self, outputs: list[Tensor]) -> Tensor:
        Counted.calls += 1
        return (outputs[0] * outputs[1]).sum(dim=1) * Counted.calls


def test_a_network_whose_forward_hides_a_state_is_found_out_at_the_first_step() -> None:
    stack = Stack({"a": with_interaction(Counted(), rows=31)})
    with pytest.raises(
        StackError, match=r"'a' has a loss of .* alone and of .* in the stack"
    ):
        stack.backward([batch(PLAIN, 0)])


@pytest.mark.unit
def test_members_with_other_optimizers_or_none_are_refused() -> None:
    stack = Stack({"a": network(seed=1), "b": network(seed=2)})
    with pytest.raises(
        StackError,
        match=r"is moved by adam in 'a' and by sgd in 'b'.*same optimizer.tables and optimizer.dense",
    ):
        StackedOptimizer(stack, {"a": ADAM, "b": SGD})
    with pytest.raises(StackError, match=r"no OptimizerConfig for \['b'\]"):
        StackedOptimizer(stack, {"a": ADAM})


@pytest.mark.unit
def test_one_setting_for_all_is_one_entry_for_each_table_and_one_for_all_dense_weights() -> (
    None
):
    stack = Stack({name: network(seed=at) for at, name in enumerate("abcd")})
    together = StackedOptimizer(stack, dict.fromkeys("abcd", ADAM))
    apart = StackedOptimizer(
        stack, {name: other_rates(ADAM, at + 1) for at, name in enumerate("abcd")}
    )
    assert (len(together._moved), len(apart._moved)) == (4, 16)


def test_a_layer_of_dense_weights_alone_needs_no_tables() -> None:
    assert first_difference({"a": mlp(3, [2, 1]), "b": mlp(3, [2, 1])}) is None
