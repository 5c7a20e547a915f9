from __future__ import annotations

import numpy as np
import pytest

from torchrec_ext.data.negatives.mixed import MixedNegatives

pytestmark = pytest.mark.unit
ITEMS = 80
COUNTS = np.arange(ITEMS + 1)


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_ranks_together_draw_what_one_draws(world_size: int) -> None:
    mixed = MixedNegatives(ITEMS, 10, 32, COUNTS, seed=4)
    whole = mixed.draw(2, 5)
    parts = np.concatenate(
        [
            mixed.draw(2, 5, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
    )
    assert np.array_equal(parts[:10], whole)
    assert not parts[10:].any()
    assert not np.array_equal(whole, mixed.draw(2, 6))
    assert not np.array_equal(whole, mixed.draw(3, 5))


def test_batch_and_extra_together_follow_the_mixture_that_log_q_states() -> None:
    batch, extra, steps = 48, 16, 4000
    counts = 1_000 // np.arange(1, ITEMS + 1)
    p = counts / counts.sum()
    mixed = MixedNegatives(ITEMS, extra, batch, np.append(0, counts), 1)
    positives = np.random.default_rng(1).choice(ITEMS, (steps, batch), p=p) + 1
    candidates = np.concatenate(
        [positives.ravel(), *(mixed.draw(0, step) for step in range(steps))]
    )
    q = np.exp(mixed.log_q(np.arange(1, ITEMS + 1)).astype(np.float64))
    assert q.sum() == pytest.approx(1)
    counts = np.bincount(candidates, minlength=ITEMS + 1)[1:]
    chi_square = ((counts - len(candidates) * q) ** 2 / (len(candidates) * q)).sum()
    assert chi_square < ITEMS - 1 + 5 * np.sqrt(2 * (ITEMS - 1))


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ValueError, match="extra=0: must be 1 or more"):
        MixedNegatives(5, 0, 3, np.ones(6, np.int64))
    with pytest.raises(
        ValueError,
        match=r"counts: shape \(3,\) with sum 3, must be \(num_items \+ 1,\) = \(31,\)",
    ):
        MixedNegatives(30, 5, 8, np.ones(3, np.int64))
