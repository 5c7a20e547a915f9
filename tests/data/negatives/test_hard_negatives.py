from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.data.negatives.test_negatives import follows, known_by, random_pairs  # noqa: F401
from torchrec_ext.data.columns import Int64
from torchrec_ext.data.negatives.hard import HardNegatives
from torchrec_ext.data.negatives.known_pairs import KnownPairs
from torchrec_ext.data.negatives.samplers import UniformNegatives
from torchrec_ext.schema import DataError

pytestmark = pytest.mark.unit
USERS, ITEMS, K = 20, 60, 8


def embeddings(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(USERS, 4, generator=generator), torch.randn(
        ITEMS + 1, 4, generator=generator
    )


def best_items(known: KnownPairs) -> Int64:
    """Returns (USERS, K) each user's best items that are not known, by sorting; 0 where there are fewer."""
    queries, vectors = embeddings()
    scores = (queries @ vectors.T).numpy()
    best = np.zeros((USERS, K), dtype=np.int64)
    for user in range(USERS):
        free = np.setdiff1d(np.arange(1, ITEMS + 1), known.of(np.array([user]))[1])
        nearest = free[np.argsort(-scores[user, free], kind="stable")][:K]
        best[user, : len(nearest)] = nearest
    return best


def hard(seed: int = 0, density: float = 0.5, share: float = 0.6) -> HardNegatives:
    easy = UniformNegatives(ITEMS, *random_pairs(USERS, ITEMS, density), seed=seed)
    made = HardNegatives(easy, k=K, share=share)
    best = best_items(easy.known)
    made.refresh(lambda users: best[users], block=7)
    return made


@pytest.mark.usefixtures("known_by")
def test_a_million_draws_hold_no_known_item_and_a_share_of_hard_ones() -> None:
    sampler = hard()
    users = np.arange(1000) % USERS
    draw = sampler.draw(users, np.arange(1000), 0, 1000)
    assert not sampler.easy.known.contains(users[:, None], draw.ids).any()
    best = best_items(sampler.easy.known)
    among = np.mean(
        [
            (best[user] == draw.ids[user][:, None]).any(axis=1).mean()
            for user in users[:USERS]
        ]
    )
    free = sampler.easy.known.free(np.arange(USERS))
    assert among == pytest.approx(0.6 + 0.4 * (K / free).mean(), abs=0.01)


@pytest.mark.parametrize("density", [0.2, 0.95], ids=["K left", "fewer than K left"])
@pytest.mark.parametrize("seed", [0, 1])
def test_draws_follow_the_mixture_that_log_q_states(density: float, seed: int) -> None:
    sampler = hard(seed, density)
    for user in (0, 7, USERS + 3):  # the last one is unknown: uniform
        follows(sampler, sampler.easy.known, user)


def test_slices_draw_what_the_whole_draws_and_a_state_restores_the_hard_ones() -> None:
    sampler, rows = hard(), np.random.default_rng(0).permutation(90)
    whole = sampler.draw(rows % USERS, rows, 3, 4)
    restored = HardNegatives(sampler.easy, k=K, share=0.6)
    before = restored.draw(rows % USERS, rows, 3, 4)
    assert np.array_equal(before.ids, sampler.easy.draw(rows % USERS, rows, 3, 4).ids)
    restored.load_state_dict(sampler.state_dict())
    parts = [
        restored.draw(part % USERS, part, 3, 4) for part in np.split(rows, [1, 40, 40])
    ]
    assert np.array_equal(np.concatenate([part.ids for part in parts]), whole.ids)
    assert np.array_equal(np.concatenate([part.log_q for part in parts]), whole.log_q)
    assert not np.array_equal(before.ids, whole.ids)


def test_a_user_who_has_taken_every_item_is_named() -> None:
    easy = UniformNegatives(3, np.array([7, 7, 7, 8]), np.array([1, 2, 3, 3]))
    sampler = HardNegatives(easy, k=2)
    sampler.refresh(lambda users: np.tile([1, 2, 3], (len(users), 1)))
    assert set(sampler.draw(np.full(50, 8), np.arange(50), 0, 2).ids.ravel()) == {1, 2}
    with pytest.raises(DataError, match="user 7 has taken all 3 items"):
        sampler.draw(np.array([8, 7]), np.arange(2), 0, 1)


def test_wrong_arguments_are_named() -> None:
    easy = UniformNegatives(ITEMS, *random_pairs(USERS, ITEMS, 0.5))
    with pytest.raises(ValueError, match=r"share=1: must be above 0 and below 1"):
        HardNegatives(easy, share=1)
    with pytest.raises(ValueError, match=r"k=0: must be 1 or more"):
        HardNegatives(easy, k=0)
    with pytest.raises(
        DataError,
        match=r"item 61 for user 5; items are 1 to 60: return the ids of the data",
    ):
        HardNegatives(easy).refresh(lambda users: users[:, None] + 56)
    with pytest.raises(
        DataError, match=r"shape \(20,\) for 20 users; it must return \(B, K\) items"
    ):
        HardNegatives(easy).refresh(lambda users: users)
