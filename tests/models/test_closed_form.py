"""EASE and ALS: both are the minimum of what they say they minimise, and know the answer of a checkerboard."""

import itertools

import pytest
import torch
from torch import Tensor

from torchrec_ext.models import closed_form
from torchrec_ext.models.closed_form import als, als_half_step, ease, ease_vectors

pytestmark = pytest.mark.unit


def taken(
    users: int = 40, items: int = 15, seed: int = 0, share: float = 0.3
) -> Tensor:
    """X (U, I) of 0 and 1; its first user and its first item have no pair."""
    drawn = (
        torch.rand(users, items, generator=torch.Generator().manual_seed(seed)) < share
    ).float()
    drawn[0] = drawn[:, 0] = 0
    return drawn


def pairs(matrix: Tensor) -> tuple[Tensor, Tensor]:
    users, items = matrix.nonzero().T
    return users, items


def test_ease_is_the_ridge_regression_of_each_item_on_all_others() -> None:
    matrix, l2 = taken().double(), 3.0
    expected = torch.zeros(15, 15, dtype=torch.float64)
    for item in range(15):
        others = [other for other in range(15) if other != item]
        rest = matrix[:, others]
        expected[others, item] = torch.linalg.solve(
            rest.T @ rest + l2 * torch.eye(14, dtype=torch.float64),
            rest.T @ matrix[:, item],
        )
    weights = ease(*pairs(matrix), 15, l2=l2)
    torch.testing.assert_close(weights.double(), expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(weights.diagonal(), torch.zeros(15))


def test_co_occurrences_are_counted_in_blocks_of_users_of_any_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    matrix = taken()
    for block in (1, 100, 2**20):
        monkeypatch.setattr(closed_form, "_BLOCK", block)
        assert torch.equal(
            closed_form.co_occurrences(*pairs(matrix), 15), matrix.T @ matrix
        )
    assert torch.equal(
        closed_form.co_occurrences(*pairs(torch.zeros(2, 4)), 4), torch.zeros(4, 4)
    )


def test_two_tables_of_as_many_columns_as_items_are_ease_but_for_the_diagonal() -> None:
    matrix = taken()
    weights = ease(*pairs(matrix), 15, l2=5.0)
    whole = ease_vectors(*pairs(matrix), 15, dim=15, l2=5.0)
    torch.testing.assert_close(
        (whole.users @ whole.items.T).fill_diagonal_(0.0), weights, atol=1e-5, rtol=1e-4
    )
    for dim in (2, 6, 20):
        history, candidates = ease_vectors(*pairs(matrix), 15, dim=dim, l2=5.0)
        assert history.shape == candidates.shape == (15, dim)
        assert torch.equal(history[:, :15], whole.users[:, :dim]), (
            "the greatest factors first"
        )
        assert torch.equal(candidates[:, :15], whole.items[:, :dim])
        assert not history[:, 15:].any()
        assert not candidates[:, 15:].any()


def loss_of(
    matrix: Tensor, users: Tensor, items: Tensor, l2: float, unobserved: float
) -> float:
    scores = users @ items.T
    value = (matrix * (1 - scores).square()).sum() + unobserved * scores.square().sum()
    for vectors, counts, others in (
        (users, matrix.sum(1), len(items)),
        (items, matrix.sum(0), len(users)),
    ):
        value += l2 * ((counts + unobserved * others) * vectors.square().sum(1)).sum()
    return float(value)


@pytest.mark.parametrize("block", [1, 200, 2**22])
def test_a_half_step_is_the_direct_solution_and_no_half_step_raises_the_loss(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closed_form, "_BLOCK", block)
    matrix, l2, unobserved = taken(), 0.02, 0.3
    users, items = pairs(matrix)
    by_item = torch.randn(15, 4, generator=torch.Generator().manual_seed(1)) * 0.1
    by_user, losses = torch.zeros(40, 4), []
    for _ in range(5):
        by_user = als_half_step(users, items, 40, by_item, l2=l2, unobserved=unobserved)
        for user in range(40):
            some = by_item[matrix[user] > 0]
            left = some.T @ some + unobserved * by_item.T @ by_item
            left += l2 * (len(some) + unobserved * 15) * torch.eye(4)
            torch.testing.assert_close(
                by_user[user],
                torch.linalg.solve(left, some.sum(0)),
                atol=1e-5,
                rtol=1e-4,
            )
        losses.append(loss_of(matrix, by_user, by_item, l2, unobserved))
        by_item = als_half_step(items, users, 15, by_user, l2=l2, unobserved=unobserved)
        losses.append(loss_of(matrix, by_user, by_item, l2, unobserved))
    assert all(later <= earlier + 1e-4 for earlier, later in itertools.pairwise(losses))
    assert losses[-1] < 0.9 * losses[0]
    assert torch.equal(by_user[0], torch.zeros(4)), "who took nothing has no taste"


def test_als_ends_where_no_small_change_lowers_the_loss() -> None:
    matrix = taken()
    made = als(*pairs(matrix), 40, 15, dim=3, l2=0.05, unobserved=0.5, epochs=200)
    least = loss_of(matrix, *made, 0.05, 0.5)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        moved = [
            vectors + 0.01 * torch.randn(vectors.shape, generator=generator)
            for vectors in made
        ]
        assert loss_of(matrix, moved[0], moved[1], 0.05, 0.5) > least
    again = als(*pairs(matrix), 40, 15, dim=3, l2=0.05, unobserved=0.5, epochs=200)
    assert torch.equal(made.items, again.items)


def checkerboard(size: int = 20) -> Tensor:
    """Users take the items of their own parity, but for the one of their own number."""
    index = torch.arange(size)
    return ((index[:, None] + index) % 2 == 0).float() - torch.eye(size)


def test_on_a_checkerboard_the_first_recommendation_is_the_item_left_out() -> None:
    matrix = checkerboard()
    users, items = pairs(matrix)
    vectors = als(users, items, 20, 20, dim=4)
    history, candidates = ease_vectors(users, items, 20, dim=20, l2=1.0)
    for scores in (
        matrix @ ease(users, items, 20, l2=1.0),
        vectors.users @ vectors.items.T,
        (matrix @ history) @ candidates.T,
    ):
        best = scores.masked_fill(matrix > 0, -torch.inf).argmax(1)
        assert torch.equal(best, torch.arange(20))


@pytest.mark.parametrize("l2", [0.0, -1.0])
def test_a_penalty_of_nothing_has_no_unique_answer(l2: float) -> None:
    users, items = pairs(taken())
    with pytest.raises(ValueError, match=rf"l2={l2}: must be above 0, or items"):
        ease(users, items, 15, l2=l2)
    with pytest.raises(ValueError, match=rf"l2={l2}: must be above 0, or items"):
        ease_vectors(users, items, 15, dim=4, l2=l2)
    with pytest.raises(ValueError, match=rf"l2={l2}: must be above 0, or a user"):
        als(users, items, 40, 15, l2=l2)
