"""Uniform, Popular: laws by which a Dataset draws negatives, as its user signs them.

NegativeDraws: a law over the rows of one Dataset, drawn from by the samplers of :mod:`torchrec_ext.data.negatives`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.adopt.rows.reading import Ids
from torchrec_ext.data.negatives.known_pairs import KnownPairs
from torchrec_ext.data.negatives.random import stream, uniform
from torchrec_ext.data.negatives.samplers import (
    PROPOSED,
    PopularityNegatives,
    RejectionNegatives,
    UniformNegatives,
)

Floats = NDArray[np.float64]
TensorColumns: TypeAlias = Mapping[str, Tensor]  # of a Dataset, (N, ...) each, by name
Items: TypeAlias = int | range | str | Sequence[int] | Ids | Tensor | None
Taken: TypeAlias = tuple[str, str] | Mapping[Any, Collection[int]] | None


@dataclass(frozen=True, eq=False)
class Law(ABC):
    """A law of draws that a user signs; its arguments are those of :class:`Uniform`."""

    items: Items = None
    exclude: Taken = None
    by: str | None = None
    replace: bool = True

    @abstractmethod
    def text(self) -> str:
        """Returns the law in words."""

    def column_names(self) -> list[tuple[str, str]]:
        """Returns the arguments that name columns, each with the name."""
        names = [("items", self.items), ("by", self.by)]
        if isinstance(self.exclude, tuple):
            names += [("exclude", name) for name in self.exclude]
        return [(argument, name) for argument, name in names if isinstance(name, str)]

    @abstractmethod
    def sampler(
        self, ids: Ids, users: Ids, items: Ids, columns: TensorColumns
    ) -> RejectionNegatives:
        """Returns what draws the numbers 1 to I of the catalogue ``ids`` (I,).

        Args:
            ids: ids of all items, ascending.
            users: (P,) rows of :class:`KnownPairs` of the pairs that are not drawn.
            items: (P,) numbers of their items.
            columns: the columns of the Dataset, (N, ...).
        """


@dataclass(frozen=True, eq=False)
class Uniform(Law):
    """Every item is as likely as every other: the law that a user signs for ``negatives=``.

    Args:
        items: ids that can be drawn: a number I for 0 to I - 1, a range, the ids themselves, or the name of a column
            that holds them. Where not given, the range from the least to the greatest id of the positives and of
            ``exclude``.
        exclude: what is never drawn. ``("user", "item")``: an item that stands in the column ``item`` of any row that
            has the same ``user``. A mapping such as ``{user: {item, ...}}``: the items of the row's user. None: every
            item can be drawn, the positive too.
        by: column whose values are the keys of a mapping ``exclude``; needed where several columns could be.
        replace: whether a row's draws can hold an item twice, as in ``numpy.random.choice``.
    """

    def text(self) -> str:
        """See :meth:`Law.text`."""
        repeats = "with" if self.replace else "without"
        return f"uniform, {repeats} repeats in a row"

    def sampler(
        self, ids: Ids, users: Ids, items: Ids, columns: TensorColumns
    ) -> RejectionNegatives:
        """See :meth:`Law.sampler`."""
        return UniformNegatives(len(ids), users, items)


@dataclass(frozen=True, eq=False)
class Popular(Law):
    """An item is as likely as (its count + smoothing) ** exponent: a law that a user signs for ``negatives=``.

    Args:
        items: see :class:`Uniform`.
        exclude: see :class:`Uniform`.
        by: see :class:`Uniform`.
        counted: column of the Dataset in which items are counted; needed.
        exponent: power of the counts, 0.75 in word2vec.
        smoothing: added to each count, above 0: where an item without a row can never be drawn, leave it out of
            ``items``.
    """

    counted: str = ""
    exponent: float = 0.75
    smoothing: float = 1e-9

    def column_names(self) -> list[tuple[str, str]]:
        """See :meth:`Law.column_names`."""
        return [*super().column_names(), ("counted", self.counted)]

    def text(self) -> str:
        """See :meth:`Law.text`."""
        return f"by popularity in '{self.counted}', (count + {self.smoothing:g}) ** {self.exponent:g}"

    def sampler(
        self, ids: Ids, users: Ids, items: Ids, columns: TensorColumns
    ) -> RejectionNegatives:
        """See :meth:`Law.sampler`."""
        if not self.replace:
            raise CannotAdopt(
                "Popular(replace=False): draws by popularity repeat; use Uniform, or __getitems__"
            )
        numbers, there = numbers_of(ids, integers(columns, self.counted, "counted"))
        counts = np.bincount(numbers[there], minlength=len(ids) + 1)
        return PopularityNegatives(
            len(ids),
            users,
            items,
            exponent=self.exponent,
            smoothing=self.smoothing,
            counts=counts,
        )


def integers(columns: TensorColumns, name: str, argument: str) -> Ids:
    """Returns the (N,) integers of a column that an argument names.

    Raises:
        CannotAdopt: there is no such column.
    """
    able = [column for column, tensor in columns.items() if is_key(tensor)]
    if name not in able:
        remedy = ""
        if name.isidentifier() and name not in columns:
            remedy = (
                f"; if your Dataset has no attribute equal to it, set self.{name} = ..."
            )
        raise CannotAdopt(
            f"{argument}='{name}': must be a column of one integer a row: {', '.join(able) or 'none'}{remedy}"
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
    # Most catalogues are a range, in which nothing needs to be searched.
    if len(ids) == ids[-1] - ids[0] + 1:
        numbers = values - ids[0]
        there = (numbers >= 0) & (numbers < len(ids))
        return np.where(there, numbers, 0) + 1, there
    numbers = np.minimum(ids.searchsorted(values), len(ids) - 1)
    return numbers + 1, ids[numbers] == values


class Exclusion(NamedTuple):
    """Pairs that may be excluded: the key of each row of the Dataset, and (P,) keys and (P,) ids of the pairs.

    Keys are numbers from 0; a row without a pair has -1. ``exclude`` and ``by`` are a law's arguments for it, ``code``
    is what a user writes, and ``text`` its meaning.
    """

    keys: Ids
    users: Ids
    items: Ids
    exclude: Taken
    by: str | None
    code: str
    text: str


def excluded(
    law: Law,
    columns: TensorColumns,
    positive: str | None,
    exclusions: Sequence[Exclusion] = (),
) -> Exclusion:
    """Returns the excluded pairs of ``law``, one of ``exclusions`` if possible.

    Raises:
        CannotAdopt: they cannot be read.
    """
    pairs = law.exclude
    if pairs is None:
        # Of no row: a key below 0 has no pairs.
        none = np.zeros(0, np.int64)
        rows = len(next(iter(columns.values())))
        return Exclusion(
            np.full(rows, -1),
            none,
            none,
            None,
            None,
            "exclude=None",
            "nothing excluded",
        )
    # Pairs of the Dataset itself were read before, under the name that the user knows.
    same = [
        other
        for other in exclusions
        if other.exclude is pairs and law.by in (None, other.by)
    ]
    if len(same) == 1:
        return same[0]
    if isinstance(pairs, Mapping):
        by = law.by or _holder(pairs, columns, positive)
        return of_mapping(pairs, columns, by, "the mapping")
    if (
        isinstance(pairs, tuple)
        and len(pairs) == 2
        and all(isinstance(name, str) for name in pairs)
    ):
        return of_columns(columns, *pairs)
    raise CannotAdopt(
        f"exclude is a {type(pairs).__name__}: must be two names of columns such as ('user', 'item'), a mapping such "
        "as {user: {item, ...}}, or None"
    )


def of_columns(columns: TensorColumns, user: str, item: str) -> Exclusion:
    """Returns the pairs that two columns make."""
    keys = integers(columns, user, "exclude")
    # KnownPairs has a row for each number up to the greatest.
    if keys.min() < 0 or keys.max() > 4 * len(keys):
        keys = np.unique(keys, return_inverse=True)[1].astype(np.int64)
    text = f"without the items that stand in '{item}' with the same '{user}'"
    items = integers(columns, item, "exclude")
    return Exclusion(
        keys, keys, items, (user, item), None, f'exclude=("{user}", "{item}")', text
    )


def of_mapping(
    pairs: Mapping[Any, Collection[int]], columns: TensorColumns, by: str, name: str
) -> Exclusion:
    """Returns the pairs of a mapping from the values of the column ``by`` to items.

    Raises:
        CannotAdopt: it does not map integers to collections of integers.
    """
    users = _keys(pairs)
    try:
        lengths = np.fromiter(map(len, pairs.values()), np.int64, len(pairs))
        items = np.fromiter(
            itertools.chain.from_iterable(pairs.values()), np.int64, int(lengths.sum())
        )
    except (TypeError, ValueError) as error:
        raise CannotAdopt(_NO_MAPPING + f" ({error})") from None
    values = integers(columns, by, "by")
    order = users.argsort()
    keys = np.full(len(values), -1)
    if len(users):
        numbers, there = numbers_of(users[order], values)
        keys = np.where(there, order[numbers - 1], -1)
    text = f"without the items that {name} has for the row's '{by}'"
    of_pairs = np.arange(len(users)).repeat(lengths)
    return Exclusion(
        keys, of_pairs, items, pairs, by, f'exclude={name}, by="{by}"', text
    )


_LOOKED_AT = 1000  # rows by which columns are told apart
_NO_MAPPING = "exclude must map ids to collections of ids, such as {3: {17, 40}}"


def _keys(pairs: Mapping[Any, Any]) -> Ids:
    try:
        return np.fromiter(map(int, pairs), np.int64, len(pairs))
    except (TypeError, ValueError) as error:
        raise CannotAdopt(f"{_NO_MAPPING} ({error})") from None


def _holder(
    pairs: Mapping[Any, Collection[int]], columns: TensorColumns, positive: str | None
) -> str:
    """Returns the column that holds a mapping's keys: its values are keys, and the rows' positives are their items."""
    users = _keys(pairs)
    names = []
    for name, tensor in columns.items():
        if (
            is_key(tensor)
            and name != positive
            and np.isin(integers(columns, name, "by"), users).all()
        ):
            names.append(name)
    # Of several columns with such values, the one whose rows have their positives in
    # the mapping.
    if positive is not None and len(names) > 1:
        items = integers(columns, positive, "positive")[:_LOOKED_AT].tolist()
        candidates = names
        names = []
        for name in candidates:
            keys = integers(columns, name, "by")[:_LOOKED_AT].tolist()
            if _hold(pairs, keys, items):
                names.append(name)
    if len(names) != 1:
        many = f"each of {', '.join(names)}" if names else "no column"
        raise CannotAdopt(
            f"exclude is a mapping, and {many} could hold its keys: name the column, by='user'"
        )
    return names[0]


def _hold(
    pairs: Mapping[Any, Collection[int]], keys: list[int], items: list[int]
) -> bool:
    """Says whether a mapping has each of the items (C,) under its key."""
    return all(item in pairs[key] for key, item in zip(keys, items, strict=True))


class NegativeDraws:
    """A law over the rows of one Dataset, from which negatives are drawn.

    A draw is a function of (seed, epoch, row): any rank can draw any row's, and a resumed run draws what the
    uninterrupted run would have drawn.

    Args:
        law: law that the user signed.
        columns: (N, ...) columns by name.
        positive: column of the positives, from which ids are known where the law gives none.
        count: n, the number of draws in a row.
        seed: seed of the draws.
        known: pairs that were read before.

    Raises:
        CannotAdopt: the law does not fit the columns.
    """

    def __init__(
        self,
        law: Law,
        columns: TensorColumns,
        positive: str | None,
        count: int,
        seed: int = 0,
        exclusions: Sequence[Exclusion] = (),
    ) -> None:
        self.law = law
        self.count = count
        self.exclusion = excluded(law, columns, positive, exclusions)
        self.ids = _catalogue(law.items, columns, positive, self.exclusion)
        numbers, there = numbers_of(self.ids, self.exclusion.items)
        self._sampler = law.sampler(
            self.ids, self.exclusion.users[there], numbers[there], columns
        )
        self._sampler.seed = seed
        self.known: KnownPairs = self._sampler.known
        # A key above those of the pairs reads the row of the users who have taken
        # nothing, as -1 does.
        self.keys = self.exclusion.keys
        counts = self.known.known(self.keys)
        least = 1 if self.law.replace else self.count
        short = len(self.ids) - counts < least
        if short.any():
            row = int(short.argmax())
            raise CannotAdopt(
                f"row {row} of the Dataset has {len(self.ids) - counts[row]} items left to draw from ({len(self.ids)} "
                f"items, {self.exclusion.text}), {least} are needed: leave such rows out, or exclude less"
            )

    def draw(self, rows: Ids, epoch: int) -> Ids:
        """Returns (B, n) ids for ``rows`` (B,)."""
        keys = self.keys[rows]
        if self.law.replace:
            return self.ids[self._sampler.draw(keys, rows, epoch, self.count).ids - 1]
        # Draws the j-th item among the free ones left by the draws before it; every
        # order is as likely.
        numbers = uniform(
            stream(self._sampler.seed, epoch, PROPOSED),
            rows[:, None],
            np.arange(self.count),
        )
        free = self.known.free(keys)
        ranks = np.empty((len(rows), self.count), np.int64)
        for index in range(self.count):
            free_left = free - index
            rank = np.minimum(
                (numbers[:, index] * free_left).astype(np.int64), free_left - 1
            )
            # From the least on: each item drawn before moves the free ones above it
            # down by one.
            for before in np.sort(ranks[:, :index], axis=1).T:
                rank += rank >= before
            ranks[:, index] = rank
        return self.ids[self.known.nth_free(keys[:, None], ranks) - 1]

    @cached_property
    def share(self) -> Floats:
        """(I + 1,) probability of each item's number before anything is excluded; that of number 0 is 0."""
        if isinstance(self._sampler, PopularityNegatives):
            return self._sampler.share
        return np.concatenate([[0.0], np.full(len(self.ids), 1 / len(self.ids))])

    def moments(self, rows: Ids) -> Floats:
        """Returns (3, C): the sums of the first, second and third powers of the items' probabilities in each row.

        The first is that before the excluded items are left out, less these; the others are of the law itself.
        """
        users, items = self.known.pairs
        size = self.known.num_users + 1
        sums = []
        for power in (1, 2, 3):
            weights = self.share**power
            sums.append(
                weights.sum()
                - np.bincount(users, weights[items], size)[
                    self.known.row_of(self.keys[rows])
                ]
            )
        return np.stack([sums[0], sums[1] / sums[0] ** 2, sums[2] / sums[0] ** 3])

    def chances(self, rows: Ids, bins: Ids, count: int) -> Floats:
        """Returns (C, count), the probability of each bin in ``rows`` (C,); ``bins`` (I + 1,) are those of numbers."""
        keys, inverse = np.unique(
            self.known.row_of(self.keys[rows]), return_inverse=True
        )
        users, items = self.known.of(keys)
        known_shares = np.bincount(
            users * count + bins[items], self.share[items], len(keys) * count
        )
        free_shares = np.bincount(
            bins[1:], self.share[1:], count
        ) - known_shares.reshape(len(keys), count)
        # What rounding leaves of a bin without a free item is no probability.
        free_shares = np.where(free_shares < 1e-12, 0.0, free_shares)
        chances: Floats = (free_shares / free_shares.sum(axis=1, keepdims=True))[
            inverse.reshape(-1)
        ]
        return chances

    def expected(self, rows: Ids, other: Exclusion) -> tuple[KnownPairs, Floats]:
        """Returns the pairs of another exclusion, and (C,) the probability that a draw in ``rows`` (C,) is of them."""
        # Pairs of users without a row here need not be sorted.
        some = np.isin(other.users, other.keys[rows])
        numbers, there = numbers_of(self.ids, other.items[some])
        pairs = KnownPairs(len(self.ids), other.users[some][there], numbers[there])
        which, items = pairs.of(other.keys[rows])
        free = ~self.known.contains(self.keys[rows][which], items)
        weights = np.bincount(which, self.share[items] * free, len(rows))
        chances: Floats = weights / self.moments(rows)[0]
        return pairs, chances

    def describe(self) -> str:
        """Returns the law in words, with its items."""
        return (
            f"{self.law.text()}, over {describe_ids(self.ids)}, {self.exclusion.text}"
        )


def describe_ids(ids: Ids) -> str:
    """Returns the ids of a catalogue in words."""
    if len(ids) == ids[-1] - ids[0] + 1:
        return f"the ids {ids[0]:,} to {ids[-1]:,}"
    return f"{len(ids):,} ids from {ids[0]:,} to {ids[-1]:,}"


def _catalogue(
    items: Items, columns: TensorColumns, positive: str | None, pairs: Exclusion
) -> Ids:
    if items is None:
        if positive is None:
            raise CannotAdopt(
                "items is needed where the row shows no positive beside the draws: Uniform(1000, ...), or the ids"
            )
        values = np.concatenate([integers(columns, positive, "positive"), pairs.items])
        return np.arange(values.min(), values.max() + 1, dtype=np.int64)
    count = items if isinstance(items, int) else len(items)
    # True is an int in Python.
    if isinstance(items, bool) or count < 1:
        raise CannotAdopt(
            f"items={items}: must be a number of 1 or more, a range, ids, or the name of a column"
        )
    if isinstance(items, int):
        return np.arange(items, dtype=np.int64)
    if isinstance(items, str):
        return np.unique(integers(columns, items, "items"))
    values = np.asarray(items)
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        raise CannotAdopt(
            f"items is an array of {values.dtype} {values.shape}: must be (I,) integers"
        )
    return np.unique(values).astype(np.int64)
