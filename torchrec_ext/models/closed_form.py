"""ease(): a recommender that is solved for, not trained.

It reads nothing but which user took which item: P pairs of a user (P,) and an item (P,), int64, each pair once. Users
are 0 to U - 1, items 0 to I - 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Numbers of a block of users in memory: 16 MiB of float32.
_BLOCK = 2**22


def ease(users: Tensor, items: Tensor, num_items: int, *, l2: float = 500.0) -> Tensor:
    """Returns the item-to-item weights of EASE (Steck 2019, "Embarrassingly shallow autoencoders for sparse data").

    The score of an item for a user is the sum of its column over the items of the user. The weights B (I, I) minimise
    ``|X - X B|^2 + l2 |B|^2`` with a diagonal of 0, where X (U, I) is 1 for each pair: with P = (X'X + l2)^-1, column j
    is -P[:, j] / P[j, j]. Takes I^3 multiplications and the memory of four such matrices.

    Args:
        users: user of each pair, (P,).
        items: item of each pair, (P,).
        num_items: number of items, I.
        l2: penalty, above 0; 200 to 1,000 in the paper.

    Example:
        >>> weights = ease(torch.tensor([0, 0, 1, 1, 2]), torch.tensor([0, 1, 0, 1, 2]), 3, l2=1.0)
        >>> weights.round(decimals=4) + 0  # some machines compute -0
        tensor([[0.0000, 0.6667, 0.0000],
                [0.6667, 0.0000, 0.0000],
                [0.0000, 0.0000, 0.0000]])
    """
    if not l2 > 0:
        raise ValueError(
            f"l2={l2}: must be above 0, or items with the same users have no unique weights"
        )
    gram = co_occurrences(users, items, num_items)
    gram.diagonal().add_(l2)
    # With the penalty it is positive definite, so Cholesky's factor gives the inverse.
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    weights = inverse / -inverse.diagonal()
    return weights.fill_diagonal_(0.0)


def co_occurrences(users: Tensor, items: Tensor, num_items: int) -> Tensor:
    """Returns X'X (I, I) float32: how many users took both of two items."""
    users, order = users.sort()
    items = items[order]
    count = int(users[-1]) + 1 if len(users) else 0
    product = torch.zeros(num_items, num_items)
    # A block of users at a time, because X as a matrix would take U x I numbers.
    rows = max(1, _BLOCK // num_items)
    for start in range(0, count, rows):
        first, last = torch.searchsorted(
            users, torch.tensor([start, start + rows])
        ).tolist()
        block = torch.zeros(min(rows, count - start), num_items)
        block[users[first:last] - start, items[first:last]] = 1.0
        product.addmm_(block.T, block)
    return product
