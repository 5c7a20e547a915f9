"""InteractionData: who took what and when, split by time so that no feature looks into the future."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from torchrec_ext.data.columns import Chunk, Column, Int64, Windows
from torchrec_ext.data.evaluation import Evaluation
from torchrec_ext.data.row_context import RowContext
from torchrec_ext.data.splits import TEST, TRAIN, VALIDATION, Split, leave_one_out
from torchrec_ext.schema import DataError

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
        train: one row per positive: ``user_id``, ``item_id``, the user's features, ``history`` (ragged item ids, oldest first,
            where the times are known) and ``timestamp`` (likewise).
        validation: held-out rows: where the set is split by time, the last row but one of each user. May have no rows.
        test: held-out rows, likewise the last of each user.
        items: row i holds the item-side features of item i, its ``item_id`` = i among them; row 0 is the unknown item. The last
            ``outside`` rows are of items that are not in the catalogue: their ``item_id`` is 0, as that of any unknown item.
        vocab: rows that the table of each sparse feature needs; row 0 is always the unknown value.
        dense: names of the dense columns.
        known: the pairs of ``train``: what negatives must avoid and an evaluation masks.
        liked: row u holds the items that user u rated 4 or higher before the test item, oldest first; for display.
        titles: by item id, or None.
        categories: by item id the names of what it is one of, such as genres; or None.
        user_ids: (users + 1,) int64, what the files call the user of each row; None where that is the row's number. [0] is unused.
        item_ids: (rows of ``items``,) int64, what the files call the item of each row, in the same way.
        outside: how many of the last rows of ``items`` are held-out items or candidates that are neither trained nor described.
        licence: what the publisher asks of users, or None.
        best: figures of the best possible ranking where they are known (generated data), such as ``HR@10``.
        evaluation: how its publishers rank the held-out items.
        context: columns of each row that are neither the user's nor the item's; they are among ``vocab`` and ``dense``.
        sides: how the features of users and items were made of what the files say; those that are not among them are as there.
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
    user_ids: Int64 | None = None
    item_ids: Int64 | None = None
    outside: int = 0
    licence: str | None = None
    best: Mapping[str, float] = field(default_factory=dict)
    evaluation: Evaluation = field(default_factory=Evaluation)
    context: RowContext = field(default_factory=RowContext)
    sides: RowContext = field(default_factory=RowContext)

    @property
    def num_items(self) -> int:
        """Items that can be recommended, the catalogue: ids 1 to ``num_items``."""
        return self.items.num_rows - 1 - self.outside

    @property
    def users_by_row(self) -> Int64:
        """(users + 1,) what the files call the user of each row; [0] is of none."""
        return np.arange(self.vocab["user_id"]) if self.user_ids is None else self.user_ids

    @property
    def items_by_row(self) -> Int64:
        """(rows of ``items``,) what the files call the item of each row; [0] is of none."""
        return np.arange(self.items.num_rows) if self.item_ids is None else self.item_ids

    def popularity(self) -> Int64:
        """(rows of ``items``,) training rows by item id; the held-out rows are not counted."""
        return np.bincount(self.known.items, minlength=self.items.num_rows).astype(np.int64)

    def pairs(self, *parts: str) -> Pairs:
        """The (user, item) pairs of ``train``, ``validation`` and ``test``, or of those named, whose items are in the catalogue."""
        chunks = [getattr(self, part) for part in parts or ("train", "validation", "test")]
        users, items = (np.concatenate([chunk[name].values for chunk in chunks]) for name in ("user_id", "item_id"))
        inside = items <= self.num_items
        return Pairs(users[inside], items[inside])

    def seen(self, users: Int64, *parts: str) -> Column:
        """The items to mask for each of ``users`` (B,): a ragged column of the item ids in ``parts`` (default: train)."""
        pairs = self.pairs(*(parts or ("train",)))
        order = np.argsort(pairs.users, kind="stable")
        ordered = pairs.users[order]
        windows = Windows(ordered.searchsorted(users), ordered.searchsorted(users, side="right"))
        return Column.from_windows(pairs.items[order], windows)


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
    categories: list[list[str]] | None = None,
    user_ids: Int64 | None = None,
    item_ids: Int64 | None = None,
    outside: int = 0,
    licence: str | None = None,
    split: Split | None = None,
    evaluation: Evaluation | None = None,
    context: Chunk | None = None,
    sides: RowContext | None = None,
) -> InteractionData:
    """Puts the user's features and history into each rating, and the ratings into their parts.

    Args:
        name: of the set.
        ratings: columns ``user_id``, ``item_id``, ``timestamp`` and, where known, ``rating``; every row is a positive, whatever its
            stars. ``timestamp`` is not needed with ``split``.
        users: row u holds the features of user u, ``user_id`` among them; row 0 is the unknown user.
        items: row i holds the features of item i; row 0 is the unknown item.
        vocab: rows by sparse feature.
        dense: names of the dense columns.
        history_length: greatest length of a history.
        titles: by item id.
        categories: by item id.
        user_ids: see :class:`InteractionData`.
        item_ids: see :class:`InteractionData`.
        outside: see :class:`InteractionData`.
        licence: what the publisher asks.
        split: of the ratings; :func:`leave_one_out` where not given.
        evaluation: see :class:`InteractionData`.
        context: a row for each of ``ratings``, as :func:`torchrec_ext.data.row_context.read_context` gives it.
        sides: see :class:`InteractionData`.

    Raises:
        DataError: a rating names a user or an item that is not in ``users`` or ``items``.
    """
    for column, table in (("user_id", users), ("item_id", items)):
        _check_known(name, column, ratings[column].values, table.num_rows)
    user, item = ratings["user_id"].values, ratings["item_id"].values
    split = split or leave_one_out(user, item, ratings["timestamp"].values, history_length)
    fitted = RowContext() if context is None else RowContext.fit(context.take(split.rows[split.part == TRAIN]))
    if context is not None:
        ratings = ratings.with_columns(fitted.transform(context))
    train, validation, test = (_part(split, part, ratings, users, fitted.names) for part in (TRAIN, VALIDATION, TEST))
    past = split.rows[split.part != TEST]
    liked = past[ratings["rating"].values[past] >= LIKED] if "rating" in ratings else past
    return InteractionData(
        name=name,
        train=train,
        validation=validation,
        test=test,
        items=items,
        vocab={**vocab, **fitted.vocab},
        dense=(*dense, *fitted.scales),
        known=Pairs(train["user_id"].values, train["item_id"].values),
        liked=Column.from_lengths(item[liked], np.bincount(user[liked], minlength=users.num_rows)),
        titles=titles,
        categories=categories,
        user_ids=user_ids,
        item_ids=item_ids,
        outside=outside,
        licence=licence,
        evaluation=evaluation or Evaluation(),
        context=fitted,
        sides=sides or RowContext(),
    )


def _part(split: Split, part: int, ratings: Chunk, users: Chunk, context: tuple[str, ...]) -> Chunk:
    places = np.flatnonzero(split.part == part)
    rows = split.rows[places]
    columns = {name: ratings[name].take(rows) for name in ("item_id", "timestamp", *context) if name in ratings}
    return users.take(ratings["user_id"].values[rows]).with_columns({"history": split.history.take(places), **columns})


def _check_known(name: str, column: str, ids: Int64, size: int) -> None:
    bad = (ids < 1) | (ids >= size)
    if bad.any():
        row = int(bad.argmax())
        raise DataError(
            f"set '{name}': {column} {ids[row]} in row {row} of the ratings is not described (known ids: 1 to {size - 1}; "
            f"{int(bad.sum())} such rows); drop these rows or add the missing description"
        )
