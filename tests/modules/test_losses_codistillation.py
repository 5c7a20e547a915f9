"""Codistillation against its closed forms, in float64."""

import math

import pytest
import torch

from tests.examples import batches
from torchrec_ext.batch import TowerBatch
from torchrec_ext.modules.losses import codistillation

pytestmark = pytest.mark.unit

LOGITS = [0.5, -2.0, 40.0, 9.0]
PEERS = [[1.0, -1.0, 30.0, -9.0], [0.0, 2.0, -30.0, -9.0]]
WEIGHTS = [1.0, 2.0, 0.5, 0.0]


def case() -> tuple[torch.Tensor, TowerBatch, torch.Tensor]:
    made = next(batches(1, size=4))
    made.weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    made.total_weight = made.weights.sum()
    return (
        torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True),
        made,
        torch.tensor(PEERS, dtype=torch.float64, requires_grad=True),
    )


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_cross_entropy_to_the_mean_of_the_peers_probabilities() -> None:
    logits, batch, peers = case()
    loss = codistillation(logits, batch, peers)
    targets = [
        (sigmoid(one) + sigmoid(other)) / 2 for one, other in zip(*PEERS, strict=True)
    ]
    each = [
        t * math.log1p(math.exp(-x)) + (1 - t) * math.log1p(math.exp(x))
        for x, t in zip(LOGITS, targets, strict=True)
    ]
    assert float(loss.detach()) == pytest.approx(
        sum(w * loss for w, loss in zip(WEIGHTS, each, strict=True)) / 3.5, rel=1e-14
    )
    loss.backward()
    assert logits.grad is not None
    expected = [
        w * (sigmoid(x) - t) / 3.5
        for x, t, w in zip(LOGITS, targets, WEIGHTS, strict=True)
    ]
    assert logits.grad.tolist() == pytest.approx(expected, rel=1e-12)
    assert peers.grad is None, "the peers are not trained by it"


def test_mean_squared_error_to_the_mean_of_the_peers_logits() -> None:
    logits, batch, peers = case()
    expected = (
        sum(
            w * (x - (one + other) / 2) ** 2
            for w, x, one, other in zip(WEIGHTS, LOGITS, *PEERS, strict=True)
        )
        / 3.5
    )
    assert float(codistillation(logits, batch, peers, measure="mse")) == pytest.approx(
        expected, rel=1e-14
    )


def test_agreement_is_the_least_and_has_no_gradient() -> None:
    logits, batch, _ = case()
    for measure in ("cross_entropy", "mse"):
        logits.grad = None
        agreed = codistillation(logits, batch, logits[None], measure=measure)  # type: ignore[arg-type]
        agreed.backward()
        assert logits.grad is not None
        assert float(logits.grad.abs().max()) < 1e-15
        assert (
            float(codistillation(logits, batch, logits[None] + 0.1, measure=measure))
            > 0
        )  # type: ignore[arg-type]
        for shift in (-0.1, 0.1):
            assert float(
                codistillation(logits + shift, batch, logits[None], measure=measure)
            ) > float(agreed.detach())  # type: ignore[arg-type]


def test_wrong_arguments_are_named() -> None:
    logits, batch, peers = case()
    with pytest.raises(
        ValueError,
        match=r"peers: shape \(4,\), must be \(P, B\) = \(1 or more, 4\).*\[None\]",
    ):
        codistillation(logits, batch, peers[0])
    with pytest.raises(ValueError, match=r"peers: shape \(0, 4\)"):
        codistillation(logits, batch, peers[:0])
    with pytest.raises(ValueError, match=r"peers: shape \(2, 3\)"):
        codistillation(logits, batch, peers[:, :3])
    with pytest.raises(
        ValueError, match=r"measure='kl': must be one of cross_entropy, mse"
    ):
        codistillation(logits, batch, peers, measure="kl")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"logits: shape \(4, 1\) for a batch of 4 rows"
    ):
        codistillation(logits[:, None], batch, peers)
