"""InteractionData: the positives of a set in memory: who took what, the users' columns in each row, the items' by id.

labelled_rows(): held-out positives with negatives and labels, for AUC and log loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchrec_ext.data.columns import Array, Chunk, Column, Int64
from torchrec_ext.data.datasets.config import PARTS
from torchrec_ext.data.datasets.prepare import Evaluation
from torchrec_ext.data.datasets.splits import (
    TEST,
    TRAIN,
    VALIDATION,
    Pairs,
    Split,
    leave_one_out,
    untaken_items,
)
from torchrec_ext.schema import DataError

# A rating of so many stars or more says that the user liked the item.
LIKED = 4


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
        user_ids: (users + 1,) int64 or text, the files' id of the user in each row, [0] no user's; None if ids are
            rows.
        item_ids: (rows of ``items``,) int64 or text, the files' id of the item in each row, [0] no item's; None if
            ids are rows.
        outside: number of the last rows of ``items`` that are held-out items or candidates, neither trained nor
            described.
        licence: terms of the publisher for users, or None.
        best: figures of the best possible ranking, if known (generated data), such as ``HR@10``.
        evaluation: rule by which the held-out items are ranked.
        prepared: the StreamedData that the rows were read from, with its preprocessor; None if they were made in code.
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
    user_ids: Array | None = None
    item_ids: Array | None = None
    outside: int = 0
    licence: str | None = None
    best: Mapping[str, float] = field(default_factory=dict)
    evaluation: Evaluation = field(default_factory=Evaluation)
    prepared: Any = None

    @property
    def num_items(self) -> int:
        """Number of items in the catalogue, ids 1 to ``num_items``: only these can be recommended."""
        return self.items.num_rows - 1 - self.outside

    @property
    def of_context(self) -> tuple[Sequence[str], Sequence[str]]:
        """Names of the context columns of ids and of numbers: neither the user's nor the item's."""
        if self.prepared is None:
            return (), ()
        features, dense = self.prepared.towers.get("context", ((), ()))
        return features, dense

    @property
    def id_values(self) -> dict[str, Any]:
        """The values behind each column's ids, in the order of the ids; no entry if values are the ids."""
        return {} if self.prepared is None else dict(self.prepared.id_values)

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
        details: ``titles`` and ``licence`` of :class:`InteractionData`.

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
    train, validation, test = (
        _part(split, part, ratings, users) for part in (TRAIN, VALIDATION, TEST)
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
        vocab=vocab,
        dense=dense,
        known=Pairs(train["user_id"].values, train["item_id"].values),
        liked=Column.grouped(item[liked], user[liked], users.num_rows),
        evaluation=evaluation or Evaluation(),
        **details,
    )


def _part(split: Split, part: int, ratings: Chunk, users: Chunk) -> Chunk:
    indices = np.flatnonzero(split.part == part)
    rows = split.rows[indices]
    columns = {
        name: ratings[name].take(rows)
        for name in ("item_id", "timestamp")
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
