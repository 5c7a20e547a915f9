"""A compiled step of a stack is a step of the stack; what is not compiled is refused with its name."""

import copy
import dataclasses
from typing import Any

import pytest
import torch

from tests.networks.members import PLAIN, batch, greatest_difference, network
from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.models.ncf import ContextualNCF
from torchrec_ext.networks.compiled import CompiledStep
from torchrec_ext.networks.optimizer import StackedOptimizer
from torchrec_ext.networks.skeleton import StackError
from torchrec_ext.networks.stack import Stack
from torchrec_ext.schema import Jagged

ADAM = OptimizerConfig(tables="adam", tables_lr=2e-3, dense_lr=1e-3, eps=1e-4)


def ncf(seed: int) -> ContextualNCF:
    torch.manual_seed(seed)
    return ContextualNCF(
        9,
        7,
        gmf_dim=4,
        mlp_dim=4,
        mlp_widths=(8, 4),
        context_dense=["c"],
        shared=("user",),
        activation="tanh",
        dropout=0.2 * seed,
    )


def rows(seed: int) -> TowerBatch:
    draw = torch.Generator().manual_seed(seed)
    ids = {
        "user_id": Jagged(torch.randint(9, (4,), generator=draw)),
        "item_id": Jagged(torch.randint(7, (8,), generator=draw)),
    }
    labels = torch.randint(2, (8,), generator=draw).float()
    return (
        ncf(0)
        .schema()
        .assemble(ids, {"c": torch.rand(4, generator=draw)}, labels=labels, index=2, shared_rows=torch.arange(4))
    )


def agreed(backend: str, configs: dict[str, OptimizerConfig]) -> float:
    """How far two members are, after five steps compiled or not, of which the first is not."""
    states = []
    for compiled in (True, False):
        stack = Stack({"a": ncf(0), "b": ncf(1)})
        optimizer = StackedOptimizer(stack, configs)
        step: Any = None
        for at in range(5):
            batches = [rows(2 * at), rows(2 * at + 1)]
            if step is None:
                stack.backward(batches)
                optimizer.step()
                step = CompiledStep(stack, optimizer, backend=backend) if compiled else None
            else:
                step(batches)
        states.append({f"{name}.{key}": value for name in "ab" for key, value in stack.state_of(name).items()})
    return greatest_difference(*states)


@pytest.mark.parametrize("rates", [1.0, 3.0], ids=["one rate", "own rates"])
def test_a_compiled_step_is_a_step(rates: float) -> None:
    other = dataclasses.replace(ADAM, tables_lr=rates * ADAM.tables_lr, dense_lr=rates * ADAM.dense_lr)
    assert agreed("aot_eager", {"a": ADAM, "b": other}) < 1e-6


@pytest.mark.slow
def test_inductors_step_is_a_step() -> None:
    assert agreed("inductor", {"a": ADAM, "b": ADAM}) < 1e-6


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"clip_norm": 1.0}, "set optimizer.clip_norm=0"),
        ({"dense": "sgd"}, "is moved by sgd with weight_decay=0.0 and l2=0.0: only adam without either is compiled"),
        ({"tables_weight_decay": 0.1}, "is moved by adam with weight_decay=0.1 and l2=0.0: only adam"),
        ({"tables_l2": 0.1}, "is moved by adam with weight_decay=0.0 and l2=0.1: only adam"),
        ({"per_layer": ("*.bias=lr=0.1",)}, "has settings of its own: a compiled step moves all dense layers alike"),
        ({}, "the optimizer has no moments yet: train one step before the compiled ones"),
    ],
)
def test_what_is_not_compiled_is_told(changes: dict[str, Any], told: str) -> None:
    stack = Stack({"a": ncf(0)})
    with pytest.raises(StackError, match=told):
        CompiledStep(stack, StackedOptimizer(stack, {"a": dataclasses.replace(ADAM, **changes)}))


def test_lists_are_trained_step_by_step() -> None:
    stack = Stack({"a": copy.deepcopy(network())})
    optimizer = StackedOptimizer(stack, {"a": ADAM})
    stack.backward([batch(PLAIN, 0)])
    optimizer.step()
    with pytest.raises(StackError, match="needs features of one id in each row"):
        CompiledStep(stack, optimizer)([batch(PLAIN, 1)])
