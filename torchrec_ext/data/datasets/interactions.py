"""InteractionData: who took what and when, split by time so that no feature looks into the future.

leave_one_out(), with_profiles(): which rows train, validate and test, each with a history that holds no answer.

Evaluation: how the publishers of a set rank its held-out items.

labelled_rows(): held-out positives with negatives and labels, for AUC and log loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchrec_ext.data.columns import Array, Chunk, Column, Int64, Windows
from torchrec_ext.data.datasets.config import PARTS
from torchrec_ext.data.datasets.features import RawColumns, RowContext, SideFeatures
from torchrec_ext.data.negatives.samplers import UniformNegatives
from torchrec_ext.schema import DataError

TRAIN, VALIDATION, TEST = 0, 1, 2


class Split(NamedTuple):
    """M rows sorted by user.

    ``rows`` (M,) are indices into the input, ``part`` (M,) is TRAIN, VALIDATION or TEST, ``history`` has M rows.
    """

    rows: Int64
    part: NDArray[np.int8]
    history: Column


def leave_one_out(
    user: Int64, item: Int64, timestamp: Array, history_length: int
) -> Split:
    """Splits each user's items by time: the last is for test, the one before it for validation, the rest for training.

    Equal times keep the order of the input. Of a pair that occurs more than once only the first is kept, so that no
    held-out pair is also a training pair. A user with fewer than 3 interactions has all of them in training. The
    history of a row holds the user's most recent ``history_length`` items with a *strictly* earlier time than the row's
    own. Nothing is known about the order of events in the same second.

    Args:
        user: (B,) ids.
        item: (B,) ids.
        timestamp: (B,) in any unit.
        history_length: greatest length of a history.
    """
    # lexsort is stable: equal times keep the order of the input.
    rows = np.lexsort((timestamp, user)).astype(np.int64)
    # One number for each pair, so that np.unique compares pairs.
    pair = user[rows] * (item.max(initial=0) + 1) + item[rows]
    # The first row of each pair, in the order of time.
    rows = rows[np.sort(np.unique(pair, return_index=True)[1])]
    user = user[rows]
    item = item[rows]
    timestamp = timestamp[rows]
    first, past_last = _runs(user)
    from_end = past_last - np.arange(len(rows))
    part = np.full(len(rows), TRAIN)
    part[from_end == 2] = VALIDATION
    part[from_end == 1] = TEST
    # With fewer than 3 rows a user would have nothing to train on.
    part[past_last - first < 3] = TRAIN
    # A history ends before the first row of the same time.
    same_time, _ = _runs(user, timestamp)
    history = Column.from_windows(
        item, Windows(np.maximum(first, same_time - history_length), same_time)
    )
    return Split(rows, part.astype(np.int8), history)


def with_profiles(
    user: Int64, item: Int64, part: NDArray[np.int8], length: int, seed: int = 0
) -> Split:
    """Splits rows by given parts, for events in an unknown order.

    A pair that occurs more than once in a part is kept once.

    In place of a history each row has a profile: at most ``length`` of its user's training items in a random order,
    never the row itself, and no held-out item. Rows of a user stand in that order, so that the profile of a training
    row is the ``length`` rows after it; the first row follows the last::

        training items of a user    5 2 9
        profiles of their rows      5: [2, 9]   2: [9, 5]   9: [5, 2]
        profile of a held-out row   [5, 2, 9]

    Args:
        user: (B,) ids.
        item: (B,) ids.
        part: (B,) TRAIN, VALIDATION or TEST.
        length: greatest length of a profile.
        seed: seed of the order.
    """
    # One number for each pair and part, so that np.unique compares both. A pair may be
    # in several parts.
    pair = (user * (item.max(initial=0) + 1) + item) * 3 + part
    shuffled = np.random.default_rng(seed).permutation(
        np.unique(pair, return_index=True)[1]
    )
    rows = shuffled[np.lexsort((part[shuffled], user[shuffled]))].astype(np.int64)
    user = user[rows]
    item = item[rows]
    part = part[rows]
    first, past_last = _runs(user)
    training = part == TRAIN
    # Number of training rows before each row.
    before = np.concatenate([[0], training.cumsum()])
    count = before[past_last] - before[first]
    # A user's training items twice in a row: all of them but the one at place p are the
    # count - 1 items from p + 1 on.
    start = 2 * before[first]
    index = np.arange(len(rows)) - first
    pool = np.zeros(2 * int(training.sum()), dtype=np.int64)
    for copy in (0, 1):
        pool[(start + index + copy * count)[training]] = item[training]
    starts = np.where(training, start + index + 1, start)
    stops = starts + np.minimum(count - training, length)
    return Split(rows, part, Column.from_windows(pool, Windows(starts, stops)))


def _runs(*keys: Array) -> tuple[Int64, Int64]:
    """Returns, for each row, the first index of its run of equal keys, and the index after the run's last."""
    size = len(keys[0])
    changes = np.zeros(size, dtype=bool)
    changes[:1] = True
    for key in keys:
        changes[1:] |= key[1:] != key[:-1]
    starts = np.flatnonzero(changes)
    lengths = np.diff(starts, append=size)
    return starts.repeat(lengths), (starts + lengths).repeat(lengths)


_Figure = Literal["hr", "recall", "ndcg", "mrr"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """Rules of an evaluation: the candidates among which a held-out item is ranked, and the figures to compute.

    Args:
        at: cut-offs K of the ranking.
        figures: figures to compute, of ``hr``, ``recall``, ``ndcg`` and ``mrr``.
        by: ``row``: each held-out row is a question of its own; ``user``: all held-out items of a user are the answers
            to one.
        keep_seen: rank the items that the user has taken before, too.
        candidates: maps a part to (rows of the part, N) item ids, below 0 for none: each row's item is ranked among its
            own N and nothing else. In parts that are not named the candidates are the whole catalogue.
    """

    at: tuple[int, ...] = (10,)
    figures: tuple[_Figure, ...] = ("hr", "ndcg")
    by: Literal["row", "user"] = "row"
    keep_seen: bool = False
    candidates: Mapping[str, Int64] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.at or min(self.at) < 1:
            raise ValueError(
                f"at={self.at}: must be one number of places or more, each 1 or more"
            )
        unknown = sorted(set(self.figures) - set(get_args(_Figure)))
        if unknown or not self.figures:
            raise ValueError(
                f"figures={self.figures}: must be some of {', '.join(get_args(_Figure))}"
            )


# A rating of so many stars or more says that the user liked the item.
LIKED = 4


class Pairs(NamedTuple):
    """Matching (P,) user ids and (P,) item ids."""

    users: Int64
    items: Int64


@dataclass(frozen=True, kw_only=True, eq=False)
class InteractionData:
    """One recommendation data set, split for training and evaluation.

    Args:
        name: name by which the set was loaded.
        train: one row per positive: ``user_id``, ``item_id``, the user's features, ``history`` (ragged item ids, oldest
            first if the times are known) and, with known times, ``timestamp``.
        validation: held-out rows. In a split by time, the last row but one of each user. May have no rows.
        test: held-out rows. In a split by time, the last row of each user.
        items: row i holds the features of item i, its ``item_id`` = i among them; row 0 is the unknown item. The last
            ``outside`` rows are of items that are not in the catalogue: their ``item_id`` is 0, as that of any unknown
            item.
        vocab: number of rows that the table of each sparse feature needs; row 0 is always the unknown value.
        dense: names of the dense columns.
        known: the pairs of ``train``, which negatives must avoid and an evaluation masks.
        liked: row u holds the items that user u rated 4 or higher before the test item, oldest first; for display.
        titles: titles by item id, or None.
        categories: names of each item's categories, such as genres, by item id; or None.
        user_ids: (users + 1,) int64 or text, the files' id of the user in each row, [0] no user's; None if ids are
            rows.
        item_ids: (rows of ``items``,) int64 or text, the files' id of the item in each row, [0] no item's; None if
            ids are rows.
        outside: number of the last rows of ``items`` that are held-out items or candidates, neither trained nor
            described.
        licence: terms of the publisher for users, or None.
        best: figures of the best possible ranking, if known (generated data), such as ``HR@10``.
        evaluation: rules by which the publishers rank the held-out items.
        context: columns of each row that are neither the user's nor the item's; they are among ``vocab`` and ``dense``.
        sides: mapping of the files' values to the features of users and items; other features hold the values
            themselves.
        prepared: the StreamedData that the rows were read from, with its preprocessor; or None.
    """

    name: str
    train: Chunk
    validation: Chunk
    test: Chunk
    items: Chunk
    vocab: Mapping[str, int]
    dense: tuple[str, ...]
    known: Pairs
    liked: Column
    titles: list[str] | None = None
    categories: list[list[str]] | None = None
    user_ids: Array | None = None
    item_ids: Array | None = None
    outside: int = 0
    licence: str | None = None
    best: Mapping[str, float] = field(default_factory=dict)
    evaluation: Evaluation = field(default_factory=Evaluation)
    context: RowContext = field(default_factory=RowContext)
    sides: RowContext = field(default_factory=RowContext)
    prepared: Any = None

    @property
    def num_items(self) -> int:
        """Number of items in the catalogue, ids 1 to ``num_items``: only these can be recommended."""
        return self.items.num_rows - 1 - self.outside

    @property
    def of_context(self) -> tuple[Sequence[str], Sequence[str]]:
        """Names of the context columns of ids and of numbers: neither the user's nor the item's."""
        if self.prepared is not None:
            features, dense = self.prepared.towers.get("context", ((), ()))
            return features, dense
        return tuple(self.context.vocab), tuple(self.context.scales)

    @property
    def id_values(self) -> dict[str, Any]:
        """The values behind each column's ids, in the order of the ids; no entry if values are the ids."""
        if self.prepared is not None:
            return dict(self.prepared.id_values)
        values: dict[str, Any] = (
            self.context.steps.id_values | self.sides.steps.id_values
        )
        if self.user_ids is not None:
            values["user_id"] = self.user_ids
        if self.item_ids is not None:
            values["item_id"] = self.item_ids
        return values

    @property
    def users_by_row(self) -> Array:
        """The files' id of the user in each row, (users + 1,); [0] is no user's."""
        return (
            np.arange(self.vocab["user_id"]) if self.user_ids is None else self.user_ids
        )

    @property
    def items_by_row(self) -> Array:
        """The files' id of the item in each row, (rows of ``items``,); [0] is no item's."""
        return (
            np.arange(self.items.num_rows) if self.item_ids is None else self.item_ids
        )

    def popularity(self) -> Int64:
        """Counts the training rows by item id, (rows of ``items``,); held-out rows are not counted."""
        return np.bincount(self.known.items, minlength=self.items.num_rows).astype(
            np.int64
        )

    def pairs(self, *parts: str) -> Pairs:
        """Returns the (user, item) pairs of the parts named, or of all; items outside the catalogue are left out."""
        chunks = [getattr(self, part) for part in parts or PARTS]
        users = np.concatenate([chunk["user_id"].values for chunk in chunks])
        items = np.concatenate([chunk["item_id"].values for chunk in chunks])
        inside = items <= self.num_items
        return Pairs(users[inside], items[inside])

    def seen(self, users: Int64, *parts: str) -> Column:
        """Returns the items to mask for each of ``users`` (B,): a ragged column of item ids in ``parts`` (train)."""
        pairs = self.pairs(*parts) if parts else self.known
        return Column.grouped(
            pairs.items, pairs.users, 1 + int(users.max(initial=0))
        ).take(users)


def from_ratings(
    *,
    name: str,
    ratings: Chunk,
    users: Chunk,
    items: Chunk,
    vocab: Mapping[str, int],
    dense: tuple[str, ...],
    history_length: int,
    split: Split | None = None,
    evaluation: Evaluation | None = None,
    context: RawColumns | None = None,
    **details: Any,
) -> InteractionData:
    """Builds a set of interactions: puts the user's features and history into each rating, and splits the ratings.

    Args:
        name: name of the set.
        ratings: columns ``user_id``, ``item_id``, ``timestamp`` and, if known, ``rating``; every row is a positive,
            whatever its stars. ``timestamp`` is not needed with ``split``.
        users: row u holds the features of user u, ``user_id`` among them; row 0 is the unknown user.
        items: row i holds the features of item i; row 0 is the unknown item.
        vocab: number of rows of each sparse feature's table.
        dense: names of the dense columns.
        history_length: greatest length of a history.
        split: split of the ratings; :func:`leave_one_out` by default.
        evaluation: see :class:`InteractionData`.
        context: raw columns of context, a row for each of ``ratings``; see
            :func:`torchrec_ext.data.datasets.features.raw_column`.
        details: ``titles``, ``categories``, ``user_ids``, ``item_ids``, ``outside``, ``licence`` and ``sides`` of
            :class:`InteractionData`.

    Raises:
        DataError: a rating names a user or an item that is not in ``users`` or ``items``.
    """
    for column, table in (("user_id", users), ("item_id", items)):
        _check_known(name, column, ratings[column].values, table.num_rows)
    user = ratings["user_id"].values
    item = ratings["item_id"].values
    split = split or leave_one_out(
        user, item, ratings["timestamp"].values, history_length
    )
    fitted, context_columns = _context_of(context, split.rows[split.part == TRAIN])
    ratings = ratings.with_columns(context_columns)
    names = tuple(context_columns)
    train, validation, test = (
        _part(split, part, ratings, users, names) for part in (TRAIN, VALIDATION, TEST)
    )
    # Without stars, an item that was taken is an item that was liked.
    liked = split.rows[split.part != TEST]
    if "rating" in ratings:
        liked = liked[ratings["rating"].values[liked] >= LIKED]
    return InteractionData(
        name=name,
        train=train,
        validation=validation,
        test=test,
        items=items,
        vocab={**vocab, **fitted.vocab},
        dense=(*dense, *fitted.scales),
        known=Pairs(train["user_id"].values, train["item_id"].values),
        liked=Column.grouped(item[liked], user[liked], users.num_rows),
        evaluation=evaluation or Evaluation(),
        context=fitted,
        **details,
    )


def from_sides(
    *,
    ratings: Chunk,
    users: SideFeatures,
    items: SideFeatures,
    user_ids: Array,
    item_ids: Array,
    outside: int = 0,
    **details: Any,
) -> InteractionData:
    """Builds a set of interactions of users and items with features; see :func:`from_ratings`.

    Args:
        ratings: see :func:`from_ratings`.
        users: features by the row of the user.
        items: features by the row of the item.
        user_ids: see :class:`InteractionData`.
        item_ids: see :class:`InteractionData`.
        outside: see :class:`InteractionData`.
        details: further arguments of :func:`from_ratings`.
    """
    catalogue = len(item_ids) - outside
    numbers = np.arange(len(item_ids))
    # Items outside the catalogue share the row of the unknown item.
    item_rows = Column(np.where(numbers < catalogue, numbers, 0))
    return from_ratings(
        ratings=ratings,
        users=Chunk({"user_id": Column(np.arange(len(user_ids))), **users.columns}),
        items=Chunk({"item_id": item_rows, **items.columns}),
        vocab={
            "user_id": len(user_ids),
            **users.words.vocab,
            "history": catalogue,
            "item_id": catalogue,
            **items.words.vocab,
        },
        dense=(*users.words.scales, *items.words.scales),
        user_ids=user_ids,
        item_ids=item_ids,
        outside=outside,
        sides=users.words.joined(items.words),
        **details,
    )


def _context_of(
    context: RawColumns | None, rows: Int64
) -> tuple[RowContext, dict[str, Column]]:
    """Fits context to the training rows ``rows``; returns the mapping, and all rows under it."""
    if not context:
        return RowContext(), {}
    # All rows decide whether a column has missing values; the training rows, by their
    # mean, what these become.
    filled = [name for name, column in context.items() if column.null_count]
    training = {name: column.take(pa.array(rows)) for name, column in context.items()}
    fitted = RowContext.fit(training, filled=filled)
    return fitted, fitted.transform(context)


def _part(
    split: Split, part: int, ratings: Chunk, users: Chunk, context: tuple[str, ...]
) -> Chunk:
    indices = np.flatnonzero(split.part == part)
    rows = split.rows[indices]
    columns = {
        name: ratings[name].take(rows)
        for name in ("item_id", "timestamp", *context)
        if name in ratings
    }
    described_users = users.take(ratings["user_id"].values[rows])
    return described_users.with_columns(
        {"history": split.history.take(indices), **columns}
    )


def _check_known(name: str, column: str, ids: Int64, size: int) -> None:
    bad = (ids < 1) | (ids >= size)
    if bad.any():
        row = int(bad.argmax())
        raise DataError(
            f"set '{name}': {column} {ids[row]} in row {row} of the ratings is not described (known ids: 1 to "
            f"{size - 1}; {int(bad.sum())} such rows); drop these rows or add the missing description"
        )


def rows_among(ids: Int64, values: Int64) -> Int64:
    """Returns (N,) the row of each of ``values`` (N,) among ``ids`` (rows,), -1 for a value without one."""
    order = np.argsort(ids, kind="stable")
    # A value above all ids has no place among them: compared with the last one, it is
    # not found.
    indices = np.minimum(ids[order].searchsorted(values), len(ids) - 1)
    return np.where(ids[order][indices] == values, order[indices], -1)


def untaken_items(
    num_items: int, pairs: Pairs, users: Int64, count: int, seed: int
) -> Int64:
    """Draws items for each of ``users`` (Q,) uniformly from 1 to ``num_items``, outside of ``pairs``; (Q, ``count``).

    The draws are functions of the seed and of the row.
    """
    sampler = UniformNegatives(num_items, pairs.users, pairs.items, seed)
    return sampler.draw(users, np.arange(len(users)), 0, count).ids


def labelled_rows(
    data: InteractionData, part: str = "validation", *, negatives: int = 4
) -> Chunk:
    """Returns the positives of a part with negatives, and a ``label`` column: rows for AUC and log loss.

    Negatives are the same at every call and avoid all pairs of the set, held-out ones too. The rows are loaded with
    ``LoaderConfig(negatives=0, label="label")``.

    Args:
        data: set of interactions.
        part: ``train``, ``validation`` or ``test``.
        negatives: N, the number of negatives per positive.
    """
    chunk: Chunk = getattr(data, part)
    negative_ids = untaken_items(
        data.num_items, data.pairs(), chunk["user_id"].values, negatives, seed=0
    )
    labels = np.zeros((chunk.num_rows, 1 + negatives), dtype=np.float32)
    labels[:, 0] = 1.0
    ids = np.concatenate([chunk["item_id"].values[:, None], negative_ids], axis=1)
    return chunk.take(np.arange(chunk.num_rows).repeat(1 + negatives)).with_columns(
        {"item_id": Column(ids.reshape(-1)), "label": Column(labels.reshape(-1))}
    )
