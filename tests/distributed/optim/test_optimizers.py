"""The optimizers that a config names are torch's of that name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from tests.examples import small_model
from torchrec_ext.distributed.optim.config import OptimizerConfig

MEANT: dict[str, tuple[dict[str, Any], Callable[[list[Tensor]], Optimizer]]] = {
    "adam": ({}, lambda weights: Adam(weights, 0.1)),
    "decay": (
        {"dense_weight_decay": 0.2, "betas": (0.8, 0.9), "eps": 1e-3},
        lambda weights: AdamW(weights, 0.1, (0.8, 0.9), 1e-3, weight_decay=0.2),
    ),
    "l2 of tables": (
        {"tables": "adam", "tables_l2": 0.3, "tables_lr": 0.1},
        lambda weights: Adam(weights, 0.1, weight_decay=0.3),
    ),
}


@pytest.mark.unit
@pytest.mark.parametrize("name", MEANT)
def test_a_weight_learns_as_by_torchs_optimizer(name: str) -> None:
    settings, meant = MEANT[name]
    config = OptimizerConfig(dense_lr=0.1, **settings)
    tables, layers = config.for_tables(small_model()), config.for_layers(["weight"])
    make, arguments = (
        (tables if "tables" in settings else layers).popitem()[1].unfused()
    )
    found = []
    for made in (lambda weights: make(weights, **arguments), meant):
        weight = torch.linspace(-2, 2, 9, requires_grad=True)
        optimizer = made([weight])
        for _ in range(5):
            optimizer.zero_grad()
            weight.sin().sum().backward()
            optimizer.step()
        found.append(weight.detach())
    torch.testing.assert_close(*found, rtol=0, atol=0)
