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
    plain = sampled_softmax(
        logits, rows(None, [1.0, 1.0], 3), negatives=2, correct=False
    )
    assert float(plain) == pytest.approx(
        -float(torch.log_softmax(logits.view(2, 3), 1)[:, 0].mean()), rel=1e-14
    )


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


def test_sampling_by_any_law_estimates_the_gradient_of_the_whole_softmax() -> None:
    """Corrected, many popularity draws give the full gradient; uncorrected they do not."""
    generator = torch.Generator().manual_seed(0)
    items, samples = 20, 20_000
    scores = torch.randn(items, generator=generator)
    q = torch.softmax(2 * torch.randn(items, generator=generator), 0)
    whole = torch.softmax(scores, 0)
    drawn = torch.multinomial(q, samples, replacement=True, generator=generator)
    for log_q, close in ((q.log(), True), (torch.zeros(items), False)):
        logits = scores[drawn].requires_grad_()
        softmax_losses(
            logits[None], torch.tensor([0]), log_q=log_q[drawn]
        ).sum().backward()
        assert logits.grad is not None
        logits.grad[0] += 1  # the positive's own share
        estimate = torch.zeros(items).index_add_(0, drawn, logits.grad)
        assert (float((estimate - whole).abs().max()) < 0.02) == close


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


def test_an_excluded_candidate_gets_no_gradient() -> None:
    logits = torch.randn(2, 3, requires_grad=True)
    excluded = torch.tensor([[False, True, False], [False, False, True]])
    softmax_losses(logits, torch.tensor([0, 1]), excluded=excluded).sum().backward()
    assert logits.grad is not None
    assert (logits.grad[excluded] == 0).all()
    assert torch.autograd.gradcheck(
        lambda x: softmax_losses(
            x, torch.tensor([0, 1]), excluded=excluded, temperature=0.3
        ),
        (logits,),
    )


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"negatives=3 with 6 logits: must be those of the loader"
    ):
        sampled_softmax(torch.zeros(6), rows(None, [1.0, 1.0], 3), negatives=3)
    with pytest.raises(
        ValueError, match=r"no log_q to correct by; let the loader draw.*correct=False"
    ):
        sampled_softmax(torch.zeros(6), rows(None, [1.0, 1.0], 3), negatives=2)
    with pytest.raises(ValueError, match=r"temperature=0.0: must be greater than 0"):
        softmax_losses(torch.zeros(1, 2), torch.tensor([0]), temperature=0.0)


def test_shapes_that_do_not_fit_are_named() -> None:
    in_batch = in_batch_negatives(torch.zeros(3, 4), torch.tensor([1, 2, 3]), queries=2)
    ones = torch.ones(2)
    with pytest.raises(
        ValueError,
        match=r"queries: shape \(3, 4\), weights: \(2,\); must be \(B, D\) = \(2, 4\) and \(B,\) = \(2,\)",
    ):
        in_batch_softmax(
            torch.zeros(3, 4), in_batch, weights=ones, total_weight=ones.sum()
        )
    with pytest.raises(
        ValueError, match=r"queries: shape \(2, 5\).*candidates of width 4"
    ):
        in_batch_softmax(
            torch.zeros(2, 5), in_batch, weights=ones, total_weight=ones.sum()
        )
    with pytest.raises(ValueError, match=r"weights: \(2, 1\); must be"):
        in_batch_softmax(
            torch.zeros(2, 4), in_batch, weights=ones[:, None], total_weight=ones.sum()
        )
    with pytest.raises(
        ValueError,
        match=r"log_q: shape \(2,\), logits: \(2, 3\); must be one for each candidate",
    ):
        softmax_losses(torch.zeros(2, 3), torch.tensor([0, 1]), log_q=torch.zeros(2))
    with pytest.raises(ValueError, match=r"excluded: shape \(3,\), logits: \(2, 3\)"):
        softmax_losses(
            torch.zeros(2, 3),
            torch.tensor([0, 1]),
            excluded=torch.zeros(3, dtype=torch.bool),
        )


def vectors(count: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors that bfloat16 holds, and log q that it does not, such as -20.37."""
    generator = torch.Generator().manual_seed(2)
    queries, items = (
        torch.randn(count, 16, generator=generator, dtype=torch.float32).bfloat16()
        for _ in range(2)
    )
    return queries, items, torch.linspace(-20.37, -3.14, count, dtype=torch.float32)


def in_batch_loss(
    queries: Tensor, items: Tensor, log_q: Tensor, autocast: bool
) -> tuple[Tensor, list[Tensor]]:
    queries, items = (vectors.detach().requires_grad_() for vectors in (queries, items))
    weights = torch.ones(len(queries), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        negatives = in_batch_negatives(
            items, torch.arange(1, 1 + len(items)), log_q=log_q
        )
        loss = in_batch_softmax(
            queries,
            negatives,
            weights=weights,
            total_weight=weights.sum(),
            temperature=0.3,
        )
    return loss.detach(), list(torch.autograd.grad(loss, [queries, items]))


def test_under_autocast_the_scores_of_a_batch_are_float32() -> None:
    queries, items, log_q = vectors()
    expected, grads = in_batch_loss(
        queries.float(), items.float(), log_q, autocast=False
    )
    for half in (queries, items), (queries.float(), items.float()):
        loss, own = in_batch_loss(*half, log_q, autocast=True)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        for mine, right in zip(own, grads, strict=True):
            torch.testing.assert_close(mine, right.to(mine.dtype))


def test_under_autocast_the_scores_of_samples_are_float32() -> None:
    queries, _, log_q = vectors()
    for logits, autocast in ((queries[:, :3], True), (queries[:, :3].float(), False)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses = softmax_losses(
                logits,
                torch.zeros(64, dtype=torch.int64),
                log_q=log_q[:3],
                temperature=0.3,
            )
        assert losses.dtype == torch.float32
        expected = torch.log_softmax(
            queries[:, :3].double() / 0.3 - log_q[:3].double(), dim=1
        )[:, 0]
        torch.testing.assert_close(losses.double(), -expected, rtol=1e-5, atol=1e-5)
