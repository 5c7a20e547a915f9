from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_ext.data.negatives import known_pairs
from torchrec_ext.data.negatives.known_pairs import KnownPairs
from torchrec_ext.data.negatives.samplers import (
    Negatives,
    PopularityNegatives,
    UniformNegatives,
)
from torchrec_ext.schema import DataError

pytestmark = pytest.mark.unit
SAMPLERS = [UniformNegatives, PopularityNegatives]
Sampler = type[UniformNegatives] | type[PopularityNegatives]


def random_pairs(
    users: int, items: int, density: float, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    taken = np.random.default_rng(seed).random((users, items)) < density
    taken[:, seed % items] = False  # everyone has at least one item left
    user, item = np.nonzero(taken)
    return user, item + 1


@pytest.fixture(params=["bitmap", "search"])
def known_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "search":
        monkeypatch.setattr(known_pairs, "MOST_BITS", 0)


@pytest.mark.usefixtures("known_by")
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_million_draws_hold_no_known_item(sampler: Sampler) -> None:
    users, items = random_pairs(200, 300, 0.6)
    draw = sampler(300, users, items, seed=5).draw(
        np.arange(1000) % 200, np.arange(1000), 0, 1000
    )
    keys = (np.arange(1000) % 200)[:, None] * 301 + draw.ids
    assert draw.ids.size == 1_000_000
    assert 1 <= draw.ids.min() <= draw.ids.max() <= 300
    assert not np.isin(keys, users * 301 + items).any()


def follows(
    drawer: Negatives, known: KnownPairs, user: int, size: int = 100_000
) -> None:
    """Pearson's chi-square of ``size`` draws for one user against exp(log_q), 5 standard deviations allowed."""
    draw = drawer.draw(np.full(size, user), np.arange(size), 0, 1)
    every = np.arange(1, known.num_items + 1)
    left = every[~known.contains(np.full(len(every), user), every)]
    expected = np.exp(drawer.log_q(np.full(len(left), user), left).astype(float))
    assert expected.sum() == pytest.approx(1, abs=1e-4)
    assert np.array_equal(
        draw.log_q[:, 0], drawer.log_q(np.full(size, user), draw.ids[:, 0])
    )
    counts = np.bincount(draw.ids[:, 0], minlength=known.num_items + 1)[left]
    assert counts.sum() == size
    chi_square = ((counts - size * expected) ** 2 / (size * expected)).sum()
    freedom = len(left) - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom) + 5


@pytest.mark.usefixtures("known_by")
@pytest.mark.parametrize("density", [0.2, 0.97], ids=["few known", "nearly all known"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_draws_follow_the_distribution_that_log_q_states(
    sampler: Sampler, density: float
) -> None:
    drawer = sampler(200, *random_pairs(3, 200, density, seed=3), seed=1)
    for user in range(4):  # the last one is unknown
        follows(drawer, drawer.known, user)


@settings(max_examples=30, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 60), max_size=4),
    epoch=st.integers(0, 9),
    seed=st.integers(0, 1 << 70),
    n=st.integers(1, 5),
)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_slices_draw_what_the_whole_draws(
    sampler: Sampler, cuts: list[int], epoch: int, seed: int, n: int
) -> None:
    users, items = random_pairs(10, 20, 0.5)
    drawer = sampler(20, users, items, seed=seed)
    rows = np.random.default_rng(0).permutation(60)
    whole = drawer.draw(rows % 10, rows, epoch, n)
    parts = [
        drawer.draw(part % 10, part, epoch, n) for part in np.split(rows, sorted(cuts))
    ]
    assert np.array_equal(np.concatenate([part.ids for part in parts]), whole.ids)
    assert np.array_equal(np.concatenate([part.log_q for part in parts]), whole.log_q)


def test_epochs_seeds_rows_and_places_draw_independently() -> None:
    drawer = UniformNegatives(1000, np.array([1]), np.array([1]), seed=0)
    rows = np.arange(2000)
    draws = [drawer.draw(np.zeros(2000, int), rows, epoch, 2).ids for epoch in (0, 1)]
    other = (
        UniformNegatives(1000, np.array([1]), np.array([1]), seed=1)
        .draw(np.zeros(2000, int), rows, 0, 2)
        .ids
    )
    series = [*draws[0].T, *draws[1].T, *other.T, np.roll(draws[0][:, 0], 1)]
    correlation = np.corrcoef(series) - np.eye(len(series))
    assert np.abs(correlation).max() < 5 / np.sqrt(2000)


@given(st.integers(1, 6), st.integers(1, 12), st.integers(0, 99))
def test_the_nth_free_item_is_the_nth_of_those_not_taken(
    users: int, items: int, seed: int
) -> None:
    owner, taken = random_pairs(users, items, 0.6, seed)
    known = KnownPairs(
        items, np.concatenate([owner, owner]), np.concatenate([taken, taken])
    )
    for user in range(users + 2):
        left = np.setdiff1d(np.arange(1, items + 1), taken[owner == user])
        assert known.free(np.array([user]))[0] == len(left)
        assert np.array_equal(
            known.nth_free(np.full(len(left), user), np.arange(len(left))), left
        )
        assert np.array_equal(
            np.flatnonzero(
                ~known.contains(np.full(items, user), np.arange(1, items + 1))
            )
            + 1,
            left,
        )


def test_popularity_counts_the_pairs_and_every_item_can_be_drawn() -> None:
    users, items = np.array([1, 2, 3, 1]), np.array([1, 1, 1, 2])
    drawer = PopularityNegatives(4, users, items, exponent=1.0)
    q = np.exp(drawer.log_q(np.full(4, 9), np.arange(1, 5)))
    np.testing.assert_allclose(q, np.array([4, 2, 1, 1]) / 8, rtol=1e-6)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_user_who_has_taken_every_item_is_named(sampler: Sampler) -> None:
    drawer = sampler(3, np.array([7, 7, 7, 8]), np.array([1, 2, 3, 3]))
    with pytest.raises(
        DataError,
        match=r"user 7 has taken all 3 items, so there is no negative.*1 such users.*loader\.negatives=0",
    ):
        drawer.draw(np.array([8, 7, 7]), np.arange(3), 0, 1)
    assert drawer.draw(np.array([8]), np.arange(1), 0, 50).ids.max() == 2


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(
        DataError,
        match=r"known pair 1 is user 2, item 9; users must be 0 or more, items 1 to 5",
    ):
        KnownPairs(5, np.array([1, 2]), np.array([1, 9]))
    for user, size in ((3 * 10**11, "9,600.0"), (2**62, "147,573,952,589.7")):
        with pytest.raises(
            DataError,
            match=rf"user ids up to {user:,} take {size} GB, a row for each id; this machine has",
        ):
            KnownPairs(5, np.array([1, user]), np.array([1, 2]))


@pytest.mark.usefixtures("known_by")
def test_narrow_ids_and_no_known_pair_at_all() -> None:
    wide = random_pairs(3000, 40, 0.2)
    narrow = KnownPairs(40, wide[0].astype(np.int16), wide[1].astype(np.int16))
    assert narrow.contains(*wide).all()
    nobody = KnownPairs(5, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    assert not nobody.contains(np.array([[0], [3]]), np.arange(1, 6)).any()
