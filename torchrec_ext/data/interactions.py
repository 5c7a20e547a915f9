"""InteractionData: who took what and when, split by time so that no feature looks into the future."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchrec_ext.data.columns import Array, Chunk, Column, Int64, Windows
from torchrec_ext.schema import DataError

TRAIN, VALIDATION, TEST = 0, 1, 2
LIKED = 4  # stars from which on a rating says that the user liked the item


class Pairs(NamedTuple):
    """(P,) user ids and (P,) item ids that belong together."""

    users: Int64
    items: Int64


@dataclass(frozen=True, kw_only=True, eq=False)
class InteractionData:
    """One recommendation data set, split for training and evaluation.

    Args:
        name: what it was loaded by.
        train: one row per positive: ``user_id``, ``item_id``, the user's features, ``history`` (ragged item ids, oldest first) and
            ``timestamp``.
        validation: the last row but one of each user.
        test: the last row of each user.
        items: row i holds the item-side features of item i, its ``item_id`` = i among them; row 0 is the unknown item.
        vocab: rows that the table of each sparse feature needs; row 0 is always the unknown value.
        dense: names of the dense columns.
        known: the pairs of ``train``: what negatives must avoid and an evaluation masks.
        liked: row u holds the items that user u rated 4 or higher before the test item, oldest first; for display.
        titles: by item id, or None.
        licence: what the publisher asks of users, or None.
        best: figures of the best possible ranking where they are known (generated data), such as ``HR@10``.
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
    licence: str | None = None
    best: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_items(self) -> int:
        """Items that can be recommended: ids 1 to ``num_items``."""
        return self.items.num_rows - 1

    def popularity(self) -> Int64:
        """(num_items + 1,) training rows by item id; the held-out rows are not counted."""
        return np.bincount(self.known.items, minlength=self.items.num_rows).astype(np.int64)

    def pairs(self, *parts: str) -> Pairs:
        """The (user, item) pairs of ``train``, ``validation`` and ``test``, or of those that are named."""
        chunks = [getattr(self, part) for part in parts or ("train", "validation", "test")]
        return Pairs(*(np.concatenate([chunk[name].values for chunk in chunks]) for name in ("user_id", "item_id")))

    def seen(self, users: Int64, *parts: str) -> Column:
        """The items to mask for each of ``users`` (B,): a ragged column of the item ids in ``parts`` (default: train)."""
        pairs = self.pairs(*(parts or ("train",)))
        order = np.argsort(pairs.users, kind="stable")
        ordered = pairs.users[order]
        windows = Windows(ordered.searchsorted(users), ordered.searchsorted(users, side="right"))
        return Column.from_windows(pairs.items[order], windows)


class LeaveOneOut(NamedTuple):
    """The result of :func:`leave_one_out`: M rows sorted by user, then time.

    ``rows`` (M,) are places in the input, ``part`` (M,) is TRAIN, VALIDATION or TEST, ``history`` has M rows.
    """

    rows: Int64
    part: NDArray[np.int8]
    history: Column


def leave_one_out(user: Int64, item: Int64, timestamp: Array, history_length: int) -> LeaveOneOut:
    """Splits by time per user: the last item is for test, the one before it for validation, the rest for training.

    Equal times keep the order of the input. Of a pair that occurs more than once only the first is kept, so that no held-out pair
    is also a training pair. A user with fewer than 3 interactions has all of them in training. The history of a row holds the
    user's most recent ``history_length`` items with a *strictly* earlier time than the row's own: of what happened in the same
    second nothing is known to have come first.

    Args:
        user: (B,) ids.
        item: (B,) ids.
        timestamp: (B,) in any unit.
        history_length: greatest length of a history.
    """
    rows = np.lexsort((timestamp, user)).astype(np.int64)
    pair = user[rows] * (item.max(initial=0) + 1) + item[rows]
    rows = rows[np.sort(np.unique(pair, return_index=True)[1])]
    user, item, timestamp = user[rows], item[rows], timestamp[rows]
    first, past_last = _runs(user)
    from_end = past_last - np.arange(len(rows))
    part = np.where(past_last - first < 3, TRAIN, np.where(from_end == 1, TEST, np.where(from_end == 2, VALIDATION, TRAIN)))
    same_time, _ = _runs(user, timestamp)
    history = Column.from_windows(item, Windows(np.maximum(first, same_time - history_length), same_time))
    return LeaveOneOut(rows, part.astype(np.int8), history)


def _runs(*keys: Array) -> tuple[Int64, Int64]:
    """For each row the first place of its run of equal keys, and the place after its last."""
    size = len(keys[0])
    changes = np.zeros(size, dtype=bool)
    changes[:1] = True
    for key in keys:
        changes[1:] |= key[1:] != key[:-1]
    starts = np.flatnonzero(changes)
    lengths = np.diff(starts, append=size)
    return starts.repeat(lengths), (starts + lengths).repeat(lengths)


def from_ratings(
    *,
    name: str,
    ratings: Chunk,
    users: Chunk,
    items: Chunk,
    vocab: Mapping[str, int],
    dense: tuple[str, ...],
    history_length: int,
    titles: list[str] | None = None,
    licence: str | None = None,
) -> InteractionData:
    """Splits ratings with :func:`leave_one_out` and puts the user's features into each row.

    Args:
        name: of the set.
        ratings: columns ``user_id``, ``item_id``, ``timestamp``, ``rating``; every rating is a positive, whatever its stars.
        users: row u holds the features of user u, ``user_id`` among them; row 0 is the unknown user.
        items: row i holds the features of item i; row 0 is the unknown item.
        vocab: rows by sparse feature.
        dense: names of the dense columns.
        history_length: greatest length of a history.
        titles: by item id.
        licence: what the publisher asks.

    Raises:
        DataError: a rating names a user or an item that is not in ``users`` or ``items``.
    """
    for column, table in (("user_id", users), ("item_id", items)):
        _check_known(name, column, ratings[column].values, table.num_rows)
    user, item = ratings["user_id"].values, ratings["item_id"].values
    split = leave_one_out(user, item, ratings["timestamp"].values, history_length)
    train, validation, test = (_part(split, part, ratings, users) for part in (TRAIN, VALIDATION, TEST))
    past = split.rows[split.part != TEST]
    liked = past[ratings["rating"].values[past] >= LIKED]
    return InteractionData(
        name=name,
        train=train,
        validation=validation,
        test=test,
        items=items,
        vocab=vocab,
        dense=dense,
        known=Pairs(train["user_id"].values, train["item_id"].values),
        liked=Column.from_lengths(item[liked], np.bincount(user[liked], minlength=users.num_rows)),
        titles=titles,
        licence=licence,
    )


def _part(split: LeaveOneOut, part: int, ratings: Chunk, users: Chunk) -> Chunk:
    places = np.flatnonzero(split.part == part)
    rows = split.rows[places]
    return users.take(ratings["user_id"].values[rows]).with_columns(
        {
            "history": split.history.take(places),
            "item_id": ratings["item_id"].take(rows),
            "timestamp": ratings["timestamp"].take(rows),
        }
    )


def _check_known(name: str, column: str, ids: Int64, size: int) -> None:
    bad = (ids < 1) | (ids >= size)
    if bad.any():
        row = int(bad.argmax())
        raise DataError(
            f"set '{name}': {column} {ids[row]} in row {row} of the ratings is not described (known ids: 1 to {size - 1}; "
            f"{int(bad.sum())} such rows); drop these rows or add the missing description"
        )
