"""Each sampling of the loader: in a step that trains, and the softmax that its own log q corrects."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch

from tests.small_sets import planted_data
from torchrec_ext.data.loader.config import LoaderConfig, Sampling
from torchrec_ext.data.loader.loader import (
    training_negatives,
)
from torchrec_ext.modules.losses import softmax_losses

pytestmark = pytest.mark.unit
DATA = planted_data(users=60, items=50, clusters=4, history_length=1)
EXTRA, EACH = 20, 3


def config_of(name: str, **options: Any) -> LoaderConfig:
    drawn = (
        {"negatives": 0, "shared_negatives": EXTRA}
        if (name == "mixed")
        else {"negatives": EACH}
    )
    return LoaderConfig(
        **{"batch_size": 32, "sampling": name, "prefetch": 0} | drawn | options
    )  # type: ignore[arg-type]


DRAWS, USER = 20_000, 9


def drawn(name: str, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Logits (DRAWS, C), log q likewise, and the sum that they estimate, for queries whose positive is in column 0."""
    sampler: Any = training_negatives(DATA, config_of(name, popularity_exponent=3.0))
    if name == "mixed":
        counts = DATA.popularity
        in_batch = np.random.default_rng(0).choice(
            len(counts), size=(DRAWS, 32), p=counts / counts.sum()
        )
        ids = np.stack(
            [
                np.append(some, sampler.draw(0, step))
                for step, some in enumerate(in_batch)
            ]
        )
        log_q = sampler.log_q(ids.reshape(-1)).reshape(ids.shape)
        return scores[ids], torch.from_numpy(log_q), float(scores[1:].exp().sum())
    taken = DATA.taken("train").items[DATA.taken("train").users == USER]
    ids, log_q = sampler.draw(np.full(DRAWS, USER), np.arange(DRAWS), 1, EACH)
    log_q_of_positive = sampler.log_q(np.array([USER]), taken[:1])
    ids = np.concatenate([np.full((DRAWS, 1), taken[0]), ids], axis=1)
    log_q = np.concatenate([np.full((DRAWS, 1), log_q_of_positive), log_q], axis=1)
    free = np.setdiff1d(np.arange(1, DATA.num_items + 1), taken)
    return scores[ids], torch.from_numpy(log_q), float(scores[free].exp().sum())


@pytest.mark.parametrize("name", get_args(Sampling))
def test_the_corrected_softmax_estimates_that_over_the_whole_catalogue(
    name: str,
) -> None:
    """exp(loss) is a sum of exp(score) / q over the candidates, whose mean is the sum over all that can be drawn.

    A positive with negatives of its own adds its own term, 1; the candidates of a batch have it among them.
    """
    torch.manual_seed(0)
    counts = torch.from_numpy(DATA.popularity)
    scores = torch.randn(len(counts), dtype=torch.float64) + counts / 10
    logits, log_q, whole = drawn(name, scores)
    its_own = 0 if (name == "mixed") else 1

    def estimates(correction: torch.Tensor) -> torch.Tensor:
        losses = softmax_losses(
            logits, torch.zeros(DRAWS, dtype=torch.int64), log_q=correction
        )
        sums = (losses.exp() - its_own) * (logits - correction)[:, 0].exp()
        return sums / (logits.shape[1] - its_own)

    sums = estimates(log_q.double())
    error = float(sums.std()) / math.sqrt(DRAWS)
    assert abs(float(sums.mean()) - whole) < 5 * error
    score = float(logits[0, 0])
    assert math.log1p(float(sums.mean()) * math.exp(-score)) == pytest.approx(
        math.log1p(whole * math.exp(-score)), abs=0.02
    )
    if name != "uniform":
        level = torch.full_like(logits, float(log_q.double().exp().mean().log()))
        assert abs(float(estimates(level).mean()) - whole) > 10 * error, (
            "without the sampler's own q it is another sum"
        )
