"""Dropout by hashes: masks as random as torch's, drawn anew in each step from its generator, and one for both ways."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchrec_ext.capture.dropout import hashed_mask, with_hashed_dropout
from torchrec_ext.capture.executors import traced

CPU = torch.device("cpu")


@pytest.mark.parametrize("probability", [0.5, 0.9])
def test_masks_are_true_as_often_as_they_should_be_and_independent_of_each_other(
    probability: float,
) -> None:
    masks = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        masks += [hashed_mask(torch.Size([1000, 1000]), probability, CPU)]
        masks += [hashed_mask(torch.Size([1000, 1000]), probability, CPU)]
    mask, later, again, later_again, *other_seed = masks
    assert torch.equal(mask, again)
    assert torch.equal(later, later_again)
    deviation = (probability * (1 - probability)) ** 0.5
    assert mask.float().mean() == pytest.approx(probability, abs=5 * deviation / 1000)
    pairs = {
        "steps": (mask, later),
        "seeds": (mask, other_seed[0]),
        "columns": (mask[:, 1:], mask[:, :-1]),
        "rows": (mask[1:], mask[:-1]),
    }
    for name, pair in pairs.items():
        both = torch.stack([each.flatten().float() for each in pair])
        assert abs(float(torch.corrcoef(both)[0, 1])) < 5e-3, name


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


def test_a_traced_step_draws_nothing_in_place() -> None:
    nodes = traced(lambda x: [F.dropout(x, 0.3)], [torch.ones(9)]).graph.nodes
    # Inductor has read what this op draws before it was drawn.
    assert torch.ops.aten.bernoulli_.float not in [each.target for each in nodes]
