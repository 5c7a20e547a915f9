"""The loss is the mean over the rows of all ranks, whatever rank holds the padding."""

import math

import pytest
import torch

from tests.examples import batches
from torchrec_ext.batch import TowerBatch
from torchrec_ext.modules.losses import (
    LOSSES,
    bce,
    bpr,
    check_fed,
    sampled_softmax,
)

pytestmark = pytest.mark.unit


def with_weights(made: TowerBatch, weights: list[float], total: float) -> TowerBatch:
    made.weights, made.total_weight = torch.tensor(weights), torch.tensor(total)
    return made


def test_bce_equals_its_closed_form() -> None:
    made = next(batches(1, size=4))
    made.labels = torch.tensor([1.0, 0.0, 1.0, 0.0])
    made = with_weights(made, [1.0, 2.0, 0.5, 0.0], 3.5)
    logits = torch.tensor([0.3, -1.2, 2.0, 9.0])
    expected = (
        math.log1p(math.exp(-0.3))
        + 2 * math.log1p(math.exp(-1.2))
        + 0.5 * math.log1p(math.exp(-2.0))
    ) / 3.5
    assert float(bce(logits, made)) == pytest.approx(expected, rel=1e-6)


def doubled(
    logits: list[float], weights: list[float], width: int
) -> tuple[torch.Tensor, TowerBatch]:
    """Groups of ``width`` rows in float64, each with its weight."""
    made = next(batches(1, size=len(logits)))
    made.labels = torch.zeros(len(logits), dtype=torch.float64)
    made.weights = torch.tensor(weights, dtype=torch.float64).repeat_interleave(width)
    made.total_weight = made.weights.sum()
    return torch.tensor(logits, dtype=torch.float64, requires_grad=True), made


GROUPS = [0.5, -0.2, 1.0, 30.0, 0.1, -300.0, 7.0, 7.0, 7.0]  # the last is padding


def test_bpr_equals_its_closed_form() -> None:
    logits, made = doubled(GROUPS, [1.0, 3.0, 0.0], 3)
    pairs = [
        (0.5 - -0.2, 1.0),
        (0.5 - 1.0, 1.0),
        (30.0 - 0.1, 3.0),
        (30.0 + 300.0, 3.0),
    ]
    expected = sum(weight * math.log1p(math.exp(-gap)) / 2 for gap, weight in pairs) / 4
    loss = bpr(logits, made, negatives=2)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-14)
    loss.backward()
    assert logits.grad is not None
    sigmoid = [-weight / (1 + math.exp(gap)) / 2 / 4 for gap, weight in pairs]
    assert logits.grad.tolist() == pytest.approx(
        [
            sigmoid[0] + sigmoid[1],
            -sigmoid[0],
            -sigmoid[1],
            sigmoid[2] + sigmoid[3],
            -sigmoid[2],
            -sigmoid[3],
            0,
            0,
            0,
        ],
        rel=1e-12,
    )


def test_wrong_arguments_are_named() -> None:
    logits, made = doubled(GROUPS, [1.0, 3.0, 0.0], 3)
    with pytest.raises(
        ValueError,
        match=r"logits: shape \(9, 1\) for a batch of 9 rows; must be \(B,\) = \(9,\): squeeze the last axis",
    ):
        bce(logits[:, None], made)
    for negatives in (0, 3):
        with pytest.raises(ValueError, match=rf"negatives={negatives} with 9 logits"):
            bpr(logits, made, negatives=negatives)
    with pytest.raises(ValueError, match="no log_q to correct by"):
        sampled_softmax(logits, made, negatives=2)


@pytest.mark.parametrize("label", [None, "clicked"])
@pytest.mark.parametrize("negatives", [0, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_rows_that_a_loss_cannot_learn_from_are_named(
    name: str, negatives: int, label: str | None
) -> None:
    kind = LOSSES[name]
    is_refused = bool(negatives) if kind.shared else bool(label or not negatives)
    if not (kind.pairwise or kind.shared) or not is_refused:
        check_fed(name, negatives=negatives, label=label)
        return
    with pytest.raises(ValueError, match=rf"^model\.loss={name} with loader\."):
        check_fed(name, negatives=negatives, label=label)
