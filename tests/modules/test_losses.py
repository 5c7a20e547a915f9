"""The loss is the mean over the rows of all ranks, whatever rank holds the padding."""

import math

import pytest
import torch

from tests.examples import batches
from torchrec_ext.batch import TowerBatch
from torchrec_ext.modules.losses import bce

pytestmark = pytest.mark.unit


def with_weights(made: TowerBatch, weights: list[float], total: float) -> TowerBatch:
    made.weights, made.total_weight = torch.tensor(weights), torch.tensor(total)
    return made


def test_bce_equals_its_closed_form() -> None:
    made = next(batches(1, size=4))
    made.labels = torch.tensor([1.0, 0.0, 1.0, 0.0])
    made = with_weights(made, [1.0, 2.0, 0.5, 0.0], 3.5)
    logits = torch.tensor([0.3, -1.2, 2.0, 9.0])
    expected = (math.log1p(math.exp(-0.3)) + 2 * math.log1p(math.exp(-1.2)) + 0.5 * math.log1p(math.exp(-2.0))) / 3.5
    assert float(bce(logits, made)) == pytest.approx(expected, rel=1e-6)


def test_ranks_average_to_the_global_mean_however_padding_is_spread() -> None:
    labels, logits = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.1, 0.2, 0.3])
    whole = next(batches(1, size=3))
    whole.labels = labels
    expected = bce(logits, with_weights(whole, [1.0, 1.0, 1.0], 3.0))
    ranks = []
    for rows, weights in ((slice(0, 2), [1.0, 1.0]), (slice(2, 3), [1.0, 0.0])):
        part = next(batches(1, size=2))
        part.labels = torch.zeros(2)
        part.labels[: len(labels[rows])] = labels[rows]
        own = torch.full((2,), 5.0)
        own[: len(logits[rows])] = logits[rows]
        ranks.append(bce(own, with_weights(part, weights, 3.0 / 2)))
    torch.testing.assert_close(sum(ranks) / 2, expected)
