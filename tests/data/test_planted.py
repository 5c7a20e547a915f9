from __future__ import annotations

import numpy as np
import pytest

from tests.small_sets import checkerboard_data, planted_data
from torchrec_ext.data.planted import Planted
from torchrec_ext.data.prepared import Prepared

pytestmark = pytest.mark.unit


def hit_rate(data: Prepared, scores: np.ndarray, k: int) -> float:
    """HR@k of the test items among all items but those of training and validation."""
    users, items = (
        data.rows("test")["user_id"].values,
        data.rows("test")["item_id"].values,
    )
    left = scores[users].astype(float)
    seen = data.seen(users, "train", "validation")
    left[np.arange(len(users)).repeat(seen.lengths), seen.values] = -np.inf
    left[:, 0] = -np.inf
    own = left[np.arange(len(users)), items]
    return float(((left > own[:, None]).sum(axis=1) < k).mean())


def popularity(data: Prepared) -> np.ndarray:
    return np.broadcast_to(
        data.popularity, (data.vocab["user_id"], data.items.num_rows)
    )


def test_the_true_colour_finds_every_held_out_square() -> None:
    data = checkerboard_data(users=20, items=24)
    users, items = np.indices((21, 25))
    assert hit_rate(data, (users + items) % 2 == 0, 1) == 1.0
    assert hit_rate(data, popularity(data), 1) < 0.5


def test_no_ranking_of_planted_data_beats_the_true_preferences_by_more_than_chance() -> (
    None
):
    data = planted_data(users=4_000)
    truth = hit_rate(data, Planted(users=4_000, items=800, clusters=12).preferences, 10)
    noise = np.sqrt(truth * (1 - truth) / 4_000)
    assert abs(truth - data.best["HR@10"]) < 4 * noise
    assert hit_rate(data, popularity(data), 10) < data.best["HR@10"] / 3
    assert (
        data.best["HR@1"]
        == data.best["NDCG@1"]
        < data.best["NDCG@10"]
        < data.best["HR@10"]
    )
