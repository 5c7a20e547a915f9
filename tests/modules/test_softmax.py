"""The softmax losses against their closed forms, in float64."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.examples import batches
from torchrec_ext.batch import TowerBatch
from torchrec_ext.modules.losses import (
    in_batch_softmax,
    sampled_softmax,
    softmax_losses,
)
from torchrec_ext.modules.softmax import in_batch_negatives

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def rows(log_q: Tensor | None, weights: list[float], width: int) -> TowerBatch:
    made = next(batches(1, size=len(weights) * width))
    made.weights, made.log_q = torch.tensor(weights).repeat_interleave(width), log_q
    made.total_weight = made.weights.sum()
    return made


def test_sampled_softmax_equals_its_closed_form() -> None:
    logits = torch.tensor([0.5, -0.2, 1.0, 2.0, 0.1, -3.0])
    q = torch.tensor([0.1, 0.3, 0.6, 0.2, 0.2, 0.5])
    made = sampled_softmax(
        logits, rows(q.log(), [1.0, 3.0], 3), negatives=2, temperature=0.5
    )
    expected = 0.0
    for start, weight in ((0, 1.0), (3, 3.0)):
        terms = [
            math.exp(float(logits[start + i]) / 0.5) / float(q[start + i])
            for i in range(3)
        ]
        expected -= weight * math.log(terms[0] / sum(terms))
    assert float(made) == pytest.approx(expected / 4, rel=1e-14)


def test_rows_of_weight_0_count_nothing() -> None:
    logits = torch.tensor([0.5, -0.2, 7.0, 9.0])
    padded = sampled_softmax(logits, rows(torch.zeros(4), [1.0, 0.0], 2), negatives=1)
    assert float(padded) == pytest.approx(math.log1p(math.exp(-0.7)), rel=1e-14)


def test_in_batch_softmax_equals_its_closed_form() -> None:
    queries, items = torch.randn(4, 3), torch.randn(4, 3)
    ids, p = torch.tensor([5, 7, 5, 9]), torch.tensor([0.5, 0.2, 0.5, 0.3])
    weights = torch.tensor([1.0, 2.0, 0.5, 1.0])
    in_batch = in_batch_negatives(items, ids, log_q=p.log())
    made = in_batch_softmax(
        queries, in_batch, weights=weights, total_weight=weights.sum(), temperature=0.7
    )
    expected = 0.0
    for row in range(4):
        terms = (queries[row] @ items.T / 0.7).exp() / p
        kept = [c for c in range(4) if c == row or ids[c] != ids[row]]
        expected -= float(weights[row]) * math.log(
            float(terms[row]) / sum(float(terms[c]) for c in kept)
        )
    assert float(made) == pytest.approx(expected / 4.5, rel=1e-14)


def test_the_correction_makes_repeated_candidates_the_softmax_over_all_items() -> None:
    """Yi et al. 2019: an item that stands in the batch in proportion to p counts once after subtracting log p."""
    scores, copies = torch.randn(2, 5), torch.tensor([1, 4, 2, 1, 7])
    order = torch.arange(5).repeat_interleave(copies)
    made = softmax_losses(
        scores[:, order], torch.tensor([0, 7]), log_q=copies.double().log()[order]
    )
    torch.testing.assert_close(
        made,
        torch.nn.functional.cross_entropy(
            scores, torch.tensor([0, 3]), reduction="none"
        ),
    )
    biased = softmax_losses(scores[:, order], torch.tensor([0, 7]))
    assert float((biased - made).abs().min()) > 0.05


@pytest.mark.parametrize("hardest", [1, 3, 6, 20])
def test_the_hardest_are_those_with_the_greatest_corrected_logits(hardest: int) -> None:
    generator = torch.Generator().manual_seed(hardest)
    logits = torch.randn(5, 8, generator=generator, requires_grad=True)
    log_q = torch.randn(8, generator=generator)
    excluded = torch.rand(5, 8, generator=generator) < 0.3
    targets = torch.tensor([0, 3, 7, 2, 2])
    excluded[torch.arange(5), targets] = False
    made = softmax_losses(
        logits,
        targets,
        log_q=log_q,
        excluded=excluded,
        temperature=0.5,
        hardest=hardest,
    )
    scores = (logits / 0.5 - log_q).double()
    for row, target in enumerate(targets.tolist()):
        others = [
            scores[row, column]
            for column in range(8)
            if column != target and not excluded[row, column]
        ]
        kept = torch.stack([scores[row, target], *sorted(others)[::-1][:hardest]])
        assert float(made[row]) == pytest.approx(
            float(kept.logsumexp(0) - kept[0]), rel=1e-5
        )
    made.sum().backward()
    moved = (logits.grad != 0).sum(dim=1) if logits.grad is not None else None
    assert moved is not None
    assert (moved <= 1 + hardest).all()


def test_wrong_arguments_are_named() -> None:
    in_batch = in_batch_negatives(torch.zeros(3, 4), torch.tensor([1, 2, 3]))
    ones = torch.ones(3)
    with pytest.raises(ValueError, match=r"queries: shape \(3, 5\).*must be \(3, 4\)"):
        in_batch_softmax(
            torch.zeros(3, 5), in_batch, weights=ones, total_weight=ones.sum()
        )
    with pytest.raises(ValueError, match=r"temperature=0.0: must be greater than 0"):
        softmax_losses(torch.zeros(1, 2), torch.tensor([0]), temperature=0.0)
