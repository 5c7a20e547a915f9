"""The whole catalogue gives the exact softmax, a sample of it an unbiased sum."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from torchrec_ext.modules import softmax as module
from torchrec_ext.modules.softmax import catalogue_softmax

pytestmark = pytest.mark.unit
ITEMS, WIDTH = 7, 3


def made(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """States, a table with row 0 unused, and targets."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(5, WIDTH, dtype=torch.float64, generator=generator)
    table = torch.randn(ITEMS + 1, WIDTH, dtype=torch.float64, generator=generator)
    return (
        states.requires_grad_(),
        table.requires_grad_(),
        torch.tensor([3, 1, 7, 7, 2]),
    )


@pytest.fixture(autouse=True, params=[2**20, 16, 1])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All scores at once, two states at a time, and one."""
    monkeypatch.setattr(module, "SCORES_PER_BLOCK", request.param)


def losses(
    states: Tensor, table: Tensor, targets: Tensor, candidates: Tensor
) -> Tensor:
    return catalogue_softmax(
        states, table[targets], targets, table[candidates], candidates, num_items=ITEMS
    )


@pytest.mark.parametrize(
    "candidates",
    [
        list(range(1, ITEMS + 1)),
        [4, 2, 7, 0, 6, 5, 1, 3, 0],  # in any order, filled up
        [*range(1, ITEMS + 1), *range(ITEMS, 0, -1)],  # all of them twice
    ],
)
def test_with_all_items_it_is_the_cross_entropy_and_so_are_its_gradients(
    candidates: list[int],
) -> None:
    states, table, targets = made()
    result = losses(states, table, targets, torch.tensor(candidates))
    expected = cross_entropy(states @ table[1:].T, targets - 1, reduction="none")
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
    weights = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.5], dtype=torch.float64)
    for mine, right in zip(
        torch.autograd.grad((result * weights).sum(), [states, table]),
        torch.autograd.grad((expected * weights).sum(), [states, table]),
        strict=True,
    ):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-12)


def test_the_mean_over_all_samples_is_the_sum_over_the_catalogue() -> None:
    states, table, targets = made()
    scores = states @ table[1:].T
    target_scores = scores.gather(1, targets[:, None] - 1)[:, 0]
    samples = itertools.product(range(1, ITEMS + 1), repeat=2)
    sums = torch.stack(
        [
            (losses(states, table, targets, torch.tensor(sample)) + target_scores).exp()
            for sample in samples
        ]
    )
    torch.testing.assert_close(
        sums.mean(dim=0), scores.exp().sum(dim=1), rtol=1e-12, atol=0
    )


def test_a_sample_of_nothing_but_the_target_gives_no_loss_and_no_nan() -> None:
    states, table, targets = made()
    result = losses(states, table, targets, torch.tensor([7, 0, 7]))
    assert result[2:4].tolist() == [0.0, 0.0]
    gradients = torch.autograd.grad(result.sum(), [states, table])
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
    assert not bool(gradients[0][2:4].any())


def test_without_positions_there_is_no_loss_and_the_graph_is_whole() -> None:
    states, table, _ = made()
    result = losses(
        states[:0], table, torch.zeros(0, dtype=torch.int64), torch.arange(1, ITEMS + 1)
    )
    assert result.shape == (0,)
    assert all(
        not bool(gradient.any())
        for gradient in torch.autograd.grad(result.sum(), [states, table])
    )


def test_under_autocast_scores_and_their_sum_are_float32() -> None:
    states, table, targets = made()
    half = [values.detach().bfloat16() for values in (states, table)]
    results = []
    for autocast, kind in (
        (False, torch.float32),
        (True, torch.float32),
        (True, torch.bfloat16),
    ):
        leaves = [values.to(kind).requires_grad_() for values in half]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            per_target = losses(*leaves, targets, torch.arange(1, ITEMS + 1))
            grads = torch.autograd.grad(per_target.sum(), leaves)
        assert per_target.dtype == torch.float32
        results.append([per_target, *grads])
    for other in results[1:]:
        for mine, right in zip(other, results[0], strict=True):
            # the gradient of a row read twice is added up in bfloat16
            close = 1e-6 if mine.dtype == torch.float32 else 2e-2
            torch.testing.assert_close(
                mine, right.to(mine.dtype), rtol=close, atol=close
            )
