"""Attention without padding equals attention with padding, outputs and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchrec_ext.modules.session_encoder import Packing, attend

pytestmark = pytest.mark.unit
HEADS, WIDTH = 2, 3


def plain(projected: Tensor, lengths: list[int], causal: bool) -> Tensor:
    """One sequence after the other, by the formula."""
    outputs = []
    for part in torch.split(projected, lengths):
        query, key, value = (each.transpose(0, 1) for each in part.unbind(1))
        scores = query @ key.transpose(1, 2) / math.sqrt(WIDTH)
        if causal:
            scores = scores.masked_fill(
                torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf
            )
        outputs.append((scores.softmax(2) @ value).transpose(0, 1))
    return torch.cat(outputs)


def outcome(
    lengths: list[int], causal: bool, *, by_formula: bool
) -> tuple[Tensor, Tensor]:
    """Output and gradient of one and the same projection."""
    generator = torch.Generator().manual_seed(0)
    projected = torch.randn(
        sum(lengths), 3, HEADS, WIDTH, dtype=torch.float64, generator=generator
    ).requires_grad_()
    if by_formula:
        output = plain(projected, lengths, causal)
    else:
        output = attend(projected, Packing(torch.tensor(lengths)), causal=causal)
    (
        output * torch.randn(output.shape, dtype=torch.float64, generator=generator)
    ).sum().backward()
    assert projected.grad is not None
    return output.detach(), projected.grad


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=12), causal=st.booleans()
)
@example(lengths=[3, 0, 17, 1, 1, 8], causal=True)
@example(lengths=[0, 0], causal=True)
@example(lengths=[5], causal=False)
def test_each_step_attends_to_its_own_sequence_alone(
    lengths: list[int], causal: bool
) -> None:
    for result, expected in zip(
        outcome(lengths, causal, by_formula=False),
        outcome(lengths, causal, by_formula=True),
        strict=True,
    ):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


def test_a_packing_by_hand() -> None:
    packing = Packing(torch.tensor([3, 0, 2], dtype=torch.int32))
    assert packing.rows.tolist() == [0, 0, 0, 2, 2]
    assert packing.index.tolist() == [0, 1, 2, 0, 1]
    assert packing.to_end.tolist() == [2, 1, 0, 1, 0]
    assert packing.longest == 3
