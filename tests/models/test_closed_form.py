"""EASE is the minimum of what it says it minimises, and knows the answer of a checkerboard."""

import pytest
import torch
from torch import Tensor

from torchrec_ext.models import closed_form
from torchrec_ext.models.closed_form import ease

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


@pytest.mark.parametrize("l2", [0.0, -1.0])
def test_a_penalty_of_nothing_has_no_unique_answer(l2: float) -> None:
    with pytest.raises(ValueError, match=rf"l2={l2}: must be above 0, or items"):
        ease(*pairs(taken()), 15, l2=l2)
