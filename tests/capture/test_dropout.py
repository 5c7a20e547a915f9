"""Dropout by hashes: masks as random as torch's, drawn anew in each step from its generator, and one for both ways."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchrec_ext.capture.dropout import (
    hashed_dropout,
    hashed_mask,
    with_hashed_dropout,
)

CPU = torch.device("cpu")


def correlation(one: Tensor, other: Tensor) -> float:
    return float(
        torch.corrcoef(torch.stack([one.flatten().float(), other.flatten().float()]))[
            0, 1
        ]
    )


@pytest.mark.parametrize("probability", [0.5, 0.9])
def test_masks_are_true_as_often_as_they_should_be_and_independent_of_each_other(
    probability: float,
) -> None:
    torch.manual_seed(0)
    mask, later = (
        hashed_mask(torch.Size([1000, 1000]), probability, CPU) for _ in range(2)
    )
    deviation = (probability * (1 - probability)) ** 0.5
    assert mask.float().mean() == pytest.approx(probability, abs=5 * deviation / 1000)
    pairs = {
        "steps": (mask, later),
        "columns": (mask[:, 1:], mask[:, :-1]),
        "rows": (mask[1:], mask[:-1]),
    }
    for name, pair in pairs.items():
        assert abs(correlation(*pair)) < 5e-3, name
    for dim in (
        0,
        1,
    ):
        # neither a row nor a column has more or fewer than chance gives it
        spread = mask.float().mean(dim).std() / (deviation / 1000**0.5)
        assert float(spread) == pytest.approx(1, abs=0.15)


def test_one_seed_gives_one_mask_and_each_step_another() -> None:
    masks = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        masks += [hashed_mask(torch.Size([4, 100]), 0.5, CPU) for _ in range(2)]
    assert torch.equal(masks[0], masks[2])
    assert torch.equal(masks[1], masks[3])
    assert not any(torch.equal(masks[0], masks[later]) for later in (1, 4, 5))


@pytest.mark.parametrize("inplace", [False, True])
def test_a_graphs_dropout_has_one_mask_for_forward_and_backward(inplace: bool) -> None:
    layers = nn.Sequential(
        nn.Linear(100, 100, bias=False), nn.Dropout(0.2), nn.Dropout(0.5, inplace)
    )
    nn.init.eye_(layers[0].weight)  # type: ignore[arg-type]
    graphs = []

    def backend(graph: Any, examples: Any) -> Any:
        graphs.append(with_hashed_dropout(graph))
        return graphs[0]

    # Many compiled forms of one forward, of other tests, would leave it eager.
    torch.compiler.reset()
    x = (torch.rand(300, 100) + 1).requires_grad_()
    dropped = torch.compile(layers, backend=backend)(x)
    (grad,) = torch.autograd.grad(dropped.sum(), x)
    assert not [each for each in graphs[0].graph.nodes if each.target is F.dropout]
    assert torch.allclose(dropped, x * grad)
    assert sorted({round(float(value), 4) for value in grad.flatten()}) == [0, 2.5]
    assert (grad > 0).float().mean() == pytest.approx(0.4, abs=0.02)


def test_an_evaluation_and_the_ends_of_the_probability_draw_nothing() -> None:
    x = torch.rand(3)
    state = torch.get_rng_state()
    assert torch.equal(hashed_dropout(x, 0.5, training=False), x)
    assert torch.equal(hashed_dropout(x, 0.0), x)
    assert not hashed_dropout(x, 1.0).any()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_graph_without_dropout_is_left_as_it_is() -> None:
    graph = torch.fx.symbolic_trace(nn.Linear(3, 1))
    assert with_hashed_dropout(graph) is graph
