"""Uniform, Popular: sampling distributions of negatives, as a user declares them.

NegativeDraws: a distribution over rows of columns, drawn as those of recipes are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.data.negatives.row_draws import RowDraws
from torchrec_ext.data.negatives.samplers import (
    Negatives,
    PopularityNegatives,
    UniformNegatives,
)

Ids = NDArray[np.int64]
TensorColumns: TypeAlias = Mapping[str, Tensor]  # (N, ...) each, by name
Items: TypeAlias = int | Sequence[int] | Ids | Tensor


@dataclass(frozen=True, eq=False)
class Law:
    """A sampling distribution that a user declares; its arguments are those of :class:`Uniform`."""

    items: Items
    _: KW_ONLY
    draws: int = 1
    exclude: tuple[str, str] | None = None
    known: tuple[Any, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("exclude", "known"):
            pair = getattr(self, name)
            if pair is not None and (isinstance(pair, str) or len(pair) != 2):
                raise ValueError(
                    f"{name}={pair!r:.60}: must be two, the user's and the item's, such as exclude=('user', 'item')"
                )
        if self.known is not None and self.exclude is None:
            raise ValueError(
                "known= without exclude=: name the columns of user and item, such as exclude=('user', 'item')"
            )
        if not isinstance(self.draws, int) or self.draws < 1:
            raise ValueError(
                f"draws={self.draws!r}: must be the number of negatives of a row, 1 or more"
            )


@dataclass(frozen=True, eq=False)
class Uniform(Law):
    """Every item is as likely as every other.

    Args:
        items: ids that can be drawn: a number I for 0 to I - 1, or the ids themselves (I,).
        draws: n, the number of negatives of a row.
        exclude: ids that are never drawn. ``("user", "item")``: an item that stands in the column ``item`` of any row
            that has the same ``user``. None: every item can be drawn, the positive too.
        known: users (P,) and items (P,) of further pairs that are never drawn, such as those held out for a test.

    Raises:
        ValueError: ``draws`` is below 1, ``exclude`` or ``known`` is no pair, or ``known`` has no ``exclude``.
    """


@dataclass(frozen=True, eq=False)
class Popular(Law):
    """An item is as likely as its count ** exponent; one that no row has is drawn if all others are excluded.

    Args:
        items: see :class:`Uniform`.
        draws: see :class:`Uniform`.
        exclude: see :class:`Uniform`.
        known: see :class:`Uniform`.
        counted: column in which items are counted.
        exponent: power of the counts, 0.75 in word2vec.
    """

    _: KW_ONLY
    counted: str
    exponent: float = 0.75


def integers(columns: TensorColumns, name: str, argument: str) -> Ids:
    """Returns the (N,) integers of a column that an argument names.

    Raises:
        CannotAdopt: there is no such column.
    """
    able = [column for column, tensor in columns.items() if is_key(tensor)]
    if name not in able:
        raise CannotAdopt(
            f"{argument}='{name}': must be a column of one integer a row: {', '.join(able) or 'none'}"
        )
    return columns[name].reshape(-1).numpy(force=True).astype(np.int64)


def is_key(column: Tensor) -> bool:
    """Says whether a column (N, ...) holds one integer a row."""
    return (
        column.numel() == len(column)
        and not column.is_floating_point()
        and column.dtype != torch.bool
    )


def numbers_of(ids: Ids, values: Ids) -> tuple[Ids, NDArray[np.bool_]]:
    """Returns the numbers, from 1, of ``values`` in ``ids`` (I,) ascending, and whether each is there."""
    numbers = np.minimum(ids.searchsorted(values), len(ids) - 1)
    return numbers + 1, ids[numbers] == values


def _pairs(law: Law, columns: TensorColumns) -> tuple[Ids, Ids, Ids]:
    """Returns the (N,) user of each row, a number from 0, and the users (P,) and items (P,) of pairs not to be drawn.

    Of a distribution that excludes nothing all users are -1, and there are no pairs.

    Raises:
        CannotAdopt: they cannot be read.
    """
    if law.exclude is None:
        rows = len(next(iter(columns.values())))
        nothing = np.zeros(0, np.int64)
        return np.full(rows, -1), nothing, nothing
    users, items = (integers(columns, name, "exclude") for name in law.exclude)
    num_rows = len(users)
    if law.known is not None:
        more_users, more_items = _further_pairs(law.known)
        users = np.concatenate([users, more_users])
        items = np.concatenate([items, more_items])
    # KnownPairs has a row for each number up to the greatest.
    if users.min() < 0 or users.max() > 4 * len(users):
        users = np.unique(users, return_inverse=True)[1].astype(np.int64)
    return users[:num_rows], users, items


def _further_pairs(known: Any) -> tuple[Ids, Ids]:
    """Returns the users (P,) and items (P,) of ``known``.

    Raises:
        CannotAdopt: they are no pairs of integers.
    """
    users, items = (torch.as_tensor(each).numpy(force=True) for each in known)
    kinds = {users.dtype.kind, items.dtype.kind}
    if users.ndim != 1 or users.shape != items.shape or not kinds <= {"i", "u"}:
        raise CannotAdopt(
            f"known has {users.dtype} {users.shape} and {items.dtype} {items.shape}: must be two arrays of integers, "
            "(P,) users and (P,) items"
        )
    return users.astype(np.int64), items.astype(np.int64)


def _sampler(
    law: Law, ids: Ids, columns: TensorColumns, users: Ids, items: Ids
) -> Negatives:
    """Returns what draws the numbers 1 to I of the catalogue ``ids`` (I,), but no pair of users and items (P,)."""
    if not isinstance(law, Popular):
        return UniformNegatives(len(ids), users, items)
    numbers, there = numbers_of(ids, integers(columns, law.counted, "counted"))
    return PopularityNegatives(
        len(ids),
        users,
        items,
        exponent=law.exponent,
        # Its power by a small exponent is next to nothing too.
        smoothing=1e-300,
        counts=np.bincount(numbers[there], minlength=len(ids) + 1),
    )


class NegativeDraws(RowDraws):
    """A distribution over the rows of one set of columns, from which negatives are drawn.

    Args:
        law: the distribution.
        columns: (N, ...) columns by name.
        seed: seed of the draws.

    Attributes:
        catalogue: (I,) ids that can be drawn, ascending.
        known: the excluded numbers, from 1, of these ids by user.

    Raises:
        CannotAdopt: the distribution does not fit the columns.
    """

    def __init__(self, law: Law, columns: TensorColumns, seed: int = 0) -> None:
        self.catalogue = _catalogue(law.items)
        # -1 reads the row of the users who have taken nothing.
        users, owners, items = _pairs(law, columns)
        numbers, there = numbers_of(self.catalogue, items)
        sampler = _sampler(law, self.catalogue, columns, owners[there], numbers[there])
        sampler.seed = seed
        super().__init__(sampler, users, law.draws, self.catalogue)
        self.known = sampler.known
        short = self.known.num_free[self.known.row_of(users)] == 0
        if short.any():
            raise CannotAdopt(
                f"row {int(short.argmax())} has 0 items left to draw from: all {len(self.catalogue)} are excluded; "
                "leave such rows out, or exclude less"
            )

    def can_draw(self, rows: Ids, drawn: Ids) -> NDArray[np.bool_]:
        """Returns (B, n) whether each of the ids (B, n), drawn for ``rows`` (B,), is one that can be drawn."""
        numbers, there = numbers_of(self.catalogue, drawn)
        return there & ~self.known.contains(self.users[rows][:, None], numbers)


def _catalogue(items: Items) -> Ids:
    ids = np.asarray(items)
    # A number of numpy's or torch's too, such as a column's maximum and 1.
    if not ids.ndim and ids.dtype.kind in "iu":
        ids = np.arange(int(ids))
    if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
        raise CannotAdopt(
            f"items={items!r:.60}: must be a number of 1 or more, or ids (I,), whole numbers"
        )
    return np.unique(ids).astype(np.int64)
