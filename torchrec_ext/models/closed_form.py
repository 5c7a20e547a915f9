"""ease() and als(): recommenders that are solved for, not trained, and whose vectors can begin the tables of towers.

Both read nothing but which user took which item: P pairs of a user (P,) and an item (P,), int64, each pair once. Users
are 0 to U - 1, items 0 to I - 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_BLOCK = 2**22  # numbers of a block of users in memory: 16 MiB of float32


class Factors(NamedTuple):
    """Vectors of users (U, D) and of items (I, D); their product is the score."""

    users: Tensor
    items: Tensor


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
    _check_penalty(l2)
    gram = co_occurrences(users, items, num_items)
    gram.diagonal().add_(l2)
    # With the penalty it is positive definite, so Cholesky's factor gives the inverse.
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    weights = inverse / -inverse.diagonal()
    return weights.fill_diagonal_(0.0)


def ease_vectors(
    users: Tensor, items: Tensor, num_items: int, *, dim: int, l2: float = 500.0
) -> Factors:
    """Returns EASE as two tables of items: what an item adds to the query of its user, and its vector as a candidate.

    The product of the first, ``users`` (I, D), with the second, ``items`` (I, D), is B but for the diagonal, which no
    ranking without the items taken before reads: with X'X = V diag(s) V', the other entries of P are those of
    -V diag(s / (s + l2)) V' / l2. Where D is less than I the greatest of these factors are kept, so that the product is
    an approximation. Takes the memory of five matrices (I, I).

    Args:
        users: see :func:`ease`.
        items: see :func:`ease`.
        num_items: see :func:`ease`.
        dim: columns of the tables, D; the columns beyond I are 0.
        l2: see :func:`ease`.
    """
    _check_penalty(l2)
    values, vectors = torch.linalg.eigh(co_occurrences(users, items, num_items))
    # X'X has no eigenvalue below 0, but rounding may give one.
    values = values.clamp(min=0).flip(0)
    vectors = vectors.flip(1)
    shrinkage = values / (values + l2)
    # l2 times the diagonal of P, which is never quite 0 but by rounding.
    diagonal = 1 - (vectors.square() * shrinkage).sum(1)
    diagonal = diagonal.clamp(min=torch.finfo(shrinkage.dtype).eps)
    factors = torch.zeros(num_items, dim)
    width = min(dim, num_items)
    factors[:, :width] = (vectors * shrinkage.sqrt())[:, :width]
    return Factors(factors, factors / diagonal[:, None])


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


def _check_penalty(l2: float) -> None:
    if not l2 > 0:
        raise ValueError(
            f"l2={l2}: must be above 0, or items with the same users have no unique weights"
        )


def als(
    users: Tensor,
    items: Tensor,
    num_users: int,
    num_items: int,
    *,
    dim: int = 32,
    l2: float = 0.007,
    unobserved: float = 0.5,
    epochs: int = 10,
    seed: int = 0,
) -> Factors:
    """Returns the vectors of users and items of ALS (Hu et al. 2008, "Collaborative filtering for implicit feedback").

    They minimise the sum over the pairs of (1 - w h)^2, plus ``unobserved`` times the sum over all users and items of
    (w h)^2, plus ``l2`` times each squared vector times its number of pairs and ``unobserved`` times that of possible
    ones (Rendle et al. 2021, "Revisiting the performance of iALS on item recommendation benchmarks"). A half step
    solves for all users with the items as they are, or the other way round, by Cholesky.

    Args:
        users: user of each pair, (P,).
        items: item of each pair, (P,).
        num_users: number of users, U; one without pairs has a vector of 0.
        num_items: number of items, I.
        dim: length of the vectors, D.
        l2: penalty, above 0.
        unobserved: weight of a pair that did not occur.
        epochs: number of times that users and items are solved for.
        seed: seed of the items' first vectors.
    """
    generator = torch.Generator().manual_seed(seed)
    factors = Factors(
        torch.zeros(num_users, dim),
        torch.randn(num_items, dim, generator=generator) * 0.1 / math.sqrt(dim),
    )
    for _ in range(epochs):
        # Users first, so that only the items' vectors have to begin somewhere.
        by_user = als_half_step(
            users, items, num_users, factors.items, l2=l2, unobserved=unobserved
        )
        by_item = als_half_step(
            items, users, num_items, by_user, l2=l2, unobserved=unobserved
        )
        factors = Factors(by_user, by_item)
    return factors


def als_half_step(
    rows: Tensor,
    columns: Tensor,
    num_rows: int,
    vectors: Tensor,
    *,
    l2: float = 0.007,
    unobserved: float = 0.5,
) -> Tensor:
    """Returns the best vectors of rows (R, D) for the ``vectors`` (C, D) of columns: of users for those of items, say.

    Args:
        rows: row of each pair, (P,).
        columns: column of each pair, (P,).
        num_rows: number of rows, R.
        vectors: vectors of the columns, (C, D).
        l2: see :func:`als`.
        unobserved: see :func:`als`.
    """
    if not l2 > 0:
        raise ValueError(
            f"l2={l2}: must be above 0, or a user without items has no unique vector"
        )
    dim = vectors.shape[1]
    counts = torch.bincount(rows, minlength=num_rows)
    # The part of all columns is the same for each row, so it is computed once (Hu et
    # al. 2008).
    shared = unobserved * vectors.T @ vectors
    penalty = l2 * (counts + unobserved * len(vectors))
    # A row with fewer columns is padded by one whose vector is 0, which adds nothing to
    # its equations.
    padded = torch.cat([vectors, vectors.new_zeros(1, dim)])
    solution = torch.zeros(num_rows, dim)
    for block, members in _blocks(rows, columns, counts, dim, padding=len(vectors)):
        member_vectors = padded[members]
        matrix = shared + member_vectors.transpose(1, 2) @ member_vectors
        matrix.diagonal(dim1=1, dim2=2).add_(penalty[block, None])
        target = member_vectors.sum(1)[:, :, None]
        solution[block] = torch.cholesky_solve(target, torch.linalg.cholesky(matrix))[
            :, :, 0
        ]
    return solution


def _blocks(
    rows: Tensor, columns: Tensor, counts: Tensor, dim: int, *, padding: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields rows (B,), and their columns (B, L), padded; rows with about as many columns as each other together."""
    ordered = columns[rows.argsort(stable=True)]
    starts = counts.cumsum(0) - counts
    by_count = counts.argsort(stable=True)
    # A row without columns keeps its vector of 0.
    by_count = by_count[counts[by_count] > 0]
    while len(by_count):
        rest = counts[by_count]
        # As many rows as fit, and no more than half of whose places would be padding.
        size = torch.arange(1, len(rest) + 1)
        fits = (size * (rest + dim) * dim <= _BLOCK) & (rest <= 2 * rest[0])
        stop = max(1, int(fits.sum()))
        block = by_count[:stop]
        by_count = by_count[stop:]
        offsets = torch.arange(int(rest[stop - 1]))
        index = (starts[block, None] + offsets).clamp(max=len(ordered) - 1)
        yield block, torch.where(offsets < counts[block, None], ordered[index], padding)
