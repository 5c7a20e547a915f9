"""SequenceData: the items that each user took, in order of time, with the last ones held out.

load_sequences(): sets of sequences by name, from a folder of parquet files or generated with a known answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from torchrec_ext.data.columns import Array, Column, Int64
from torchrec_ext.data.datasets.catalog import (
    FOLDER_VARIABLE,
    DatasetUnavailable,
    data_folder,
)
from torchrec_ext.data.datasets.config import PLANTED, generated_sizes
from torchrec_ext.data.datasets.config import SequenceConfig as SequenceConfig
from torchrec_ext.data.datasets.features import (
    raw_column,
    read_ids,
    refuse_lists,
    spelled,
    times_in,
)
from torchrec_ext.data.datasets.folder import candidates_by_user
from torchrec_ext.data.datasets.interactions import Pairs, untaken_items
from torchrec_ext.schema import DataError
from torchrec_ext.schema.validation import check_choice, check_least

# The group of held-out items, counted from the end.
HELD_OUT = {"validation": 2, "test": 1}


class HeldOut(NamedTuple):
    """Q questions: ``users`` (Q,) rows of the data, ``before`` Q rows of earlier items, ``targets`` (T,) next items.

    Each question has one target, T = Q, unless ``target_rows`` (T,) says which question each target is of, ascending.
    """

    users: Int64
    before: Column
    targets: Int64
    target_rows: Int64 | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceData:
    """U users' items in order of time, split leave-one-out: the last is for test, the one before it for validation.

    With ``test_items`` k it is the last k, and the k before them, all of which are found in one ranking. A user with
    fewer than 2 k + 1 items has all of them in training.

    Args:
        name: name by which the set was loaded.
        sequences: U rows of item ids 1 to ``num_items``, oldest first.
        num_items: number of items in the catalogue; id 0 is the unknown item and padding.
        max_length: S, the greatest number of items, the most recent ones, that a model reads before its target.
        test_items: k, the number of a user's items for test, and for validation.
        candidates: maps ``validation`` or ``test`` to (Q, N) item ids, below 0 for none: each held-out item is ranked
            among its own N and nothing else; the whole catalogue by default.
        times: U rows of the times at which the items were taken, equally long; or None.
        user_ids: (U,) the file's ids of the users.
        item_ids: (num_items + 1,) the file's ids of the items; [0] is unused.
        best: figures of the best possible ranking, if known (generated data), such as ``HR@1``.

    Raises:
        ValueError: ``max_length`` is not positive.
        DataError: a sequence is empty, an id is outside the catalogue, or times fall; the message names user and place.
    """

    name: str
    sequences: Column
    num_items: int
    max_length: int = 50
    test_items: int = 1
    candidates: Mapping[str, Int64] = field(default_factory=dict)
    times: Column | None = None
    user_ids: Array | None = None
    item_ids: Array | None = None
    best: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_least("max_length", self.max_length)
        if not self.sequences.ragged or not len(self.sequences):
            raise DataError(
                f"set '{self.name}': sequences must be a ragged column of 1 or more users, got {self.sequences}"
            )
        lengths = self.sequences.lengths
        if not lengths.all():
            user = int((lengths == 0).argmax())
            raise DataError(
                f"set '{self.name}': {self._user(user)} has an empty sequence ({int((lengths == 0).sum())} such "
                "users); drop them"
            )
        values = self.sequences.values
        bad = (values < 1) | (values > self.num_items)
        if bad.any():
            index = int(bad.argmax())
            raise DataError(
                f"set '{self.name}': item {values[index]} of {self._place(index)} is not in the catalogue "
                f"(ids 1 to {self.num_items}; {int(bad.sum())} such ids); fix the data, or num_items"
            )
        if self.times is not None:
            self._check_times(self.times)

    @property
    def id_values(self) -> dict[str, Array]:
        """The items' values in the order of their ids; empty if values are the ids."""
        return {} if self.item_ids is None else {"item_id": self.item_ids}

    def _check_times(self, times: Column) -> None:
        if not times.ragged or not np.array_equal(
            times.lengths, self.sequences.lengths
        ):
            raise DataError(
                f"set '{self.name}': times are {times}; must be ragged, one for each item of {self.sequences}"
            )
        values = times.values
        falls = np.zeros(len(values), dtype=bool)
        # The first item of a user comes after the last one of another.
        falls[1:] = (values[1:] < values[:-1]) & (times.owners[1:] == times.owners[:-1])
        if falls.any():
            index = int(falls.argmax())
            raise DataError(
                f"set '{self.name}': time {values[index]} of {self._place(index)} is before "
                f"{values[index - 1]}, that of the item before it ({int(falls.sum())} such places); sort each user's "
                "items by time"
            )

    def _user(self, row: int) -> str:
        user = row if self.user_ids is None else self.user_ids[row]
        return f"user {user}"

    def _place(self, index: int) -> str:
        """Names the user and the place in the sequence of one of the values."""
        row = self.sequences.row_of(index)
        place = index - int(self.sequences.lengths[:row].sum())
        return f"{self._user(row)}, place {place}"

    @property
    def vocab(self) -> dict[str, int]:
        """Number of rows of the item table."""
        return {"item_id": self.num_items + 1}

    @property
    def least(self) -> int:
        """The least number of items of a user with held-out items."""
        return 2 * self.test_items + 1

    def training(self) -> Column:
        """Returns U rows: each user's items without those that are held out."""
        starts, stops = self.sequences.windows
        held_out = np.where(self.sequences.lengths < self.least, 0, 2 * self.test_items)
        return self.sequences.windowed(starts, stops - held_out)

    def held_out(self, part: str) -> HeldOut:
        """Returns the questions of ``validation`` or ``test``; the validation items precede the test items."""
        check_choice("part", part, HELD_OUT)
        users = np.flatnonzero(self.sequences.lengths >= self.least)
        k = self.test_items
        starts, stops = self.sequences.take(users).windows
        stops -= k * HELD_OUT[part]
        before = self.sequences.windowed(starts, stops)
        targets = self.sequences.pool[stops[:, None] + np.arange(k)]
        if k == 1:
            return HeldOut(users, before, targets[:, 0])
        rows = np.arange(len(users)).repeat(k)
        # An item that is taken twice is found once in a ranking.
        pairs = np.unique(np.stack([rows, targets.reshape(-1)]), axis=1)
        return HeldOut(users, before, pairs[1].copy(), pairs[0].copy())

    def popularity(self) -> Int64:
        """Counts how often each item is in :meth:`training`, (num_items + 1,)."""
        return np.bincount(self.training().values, minlength=self.num_items + 1).astype(
            np.int64
        )


def training_windows(sequences: Column, max_targets: int) -> Column:
    """Cuts sequences into pieces: each item but a user's first is a target exactly once.

    Pieces are cut from the end, so the last ones are whole, and overlap by one item, the first input of the next. Users
    with a single item have no target and no piece.

    Args:
        sequences: ragged column of item ids.
        max_targets: greatest number of targets of a piece, which has one item more.

    Example:
        >>> cut = training_windows(Column.from_lengths(np.arange(1, 8), np.array([6, 1])), 2)
        >>> [cut.row(piece).tolist() for piece in range(len(cut))]
        [[1, 2], [2, 3, 4], [4, 5, 6]]
    """
    if not sequences.ragged or max_targets < 1:
        raise ValueError(
            f"max_targets={max_targets} of {sequences}: must be 1 or more, of a ragged column"
        )
    targets = np.maximum(sequences.lengths - 1, 0)
    pieces = -(-targets // max_targets)
    rows = np.arange(len(pieces)).repeat(pieces)
    # Counted from the end, so that only the first piece of a user is short: 0 for a
    # user's last piece.
    from_end = np.cumsum(pieces)[rows] - 1 - np.arange(len(rows))
    starts, stops = sequences.take(rows).windows
    stops -= from_end * max_targets
    return sequences.windowed(np.maximum(starts, stops - max_targets - 1), stops)


def most_recent(sequences: Column, limit: int) -> Column:
    """Returns the last ``limit`` items of each row; all items of a shorter row."""
    if not sequences.ragged or limit < 1:
        raise ValueError(
            f"limit={limit} of {sequences}: must be 1 or more, of a ragged column"
        )
    starts, stops = sequences.windows
    return sequences.windowed(np.maximum(starts, stops - limit), stops)


def from_rows(
    name: str, user: Array, item: Array, order: Array, *, times: bool = False
) -> SequenceData:
    """Builds sequences from one row per event, in any order; users and items may have any ids.

    Args:
        name: name of the set.
        user: (E,) ids.
        item: (E,) ids; the catalogue consists of those that occur.
        order: (E,) index in the sequence, or time; a user's events with equal ones keep the order of the rows.
        times: ``order`` is a time, which is kept.
    """
    rows = np.lexsort((order, user))
    user_ids, counts = np.unique(user, return_counts=True)
    item_ids, codes = np.unique(item, return_inverse=True)
    return SequenceData(
        name=name,
        sequences=Column.from_lengths(codes.astype(np.int64)[rows] + 1, counts),
        num_items=len(item_ids),
        times=Column.from_lengths(order[rows], counts) if times else None,
        user_ids=user_ids,
        # [0] is never read. Any value of the ids' type fills it.
        item_ids=np.concatenate([item_ids[:1], item_ids]),
    )


# Length of the longest planted sequence.
LONGEST = 20
_SPELLINGS = {
    "user": ("user", "user_id"),
    "item": ("item", "item_id"),
    "order": ("position", "timestamp", "time"),
}


def load_sequences(config: SequenceConfig) -> SequenceData:
    """Loads the set named by ``config``.

    Raises:
        DatasetUnavailable: there is no such folder, or no file of the layout in it.
        DataError: a file is damaged, lacks a column, or holds a null.
    """
    if config.name == PLANTED:
        data = planted_sequences(seed=config.seed, **generated_sizes(config))
        # The best figures are known of one test item alone.
        best = data.best if config.test_items == 1 else {}
        return dataclasses.replace(
            data, max_length=config.max_length, test_items=config.test_items, best=best
        )
    folder = data_folder(config.name, config.folder)
    if folder is None:
        raise DatasetUnavailable(
            f"set '{config.name}': {FOLDER_VARIABLE} and data.folder are not set; set one to the folder that holds "
            f"{config.name}/, or set data.name={PLANTED}"
        )
    file = _file_in(folder, config.name)
    # Rows may have any order, and ids may be whole numbers or text.
    words = spelled(file, _SPELLINGS)
    columns = read_ids(
        file, words, "an event has a user, an item and an order", order=_order
    )
    values = (column.to_numpy(zero_copy_only=False) for column in columns.values())
    data = from_rows(config.name, *values, times=words["order"] != "position")
    data = dataclasses.replace(
        data, max_length=config.max_length, test_items=config.test_items
    )
    return _with_candidates(data, file.parent, config.seed)


def _order(path: Path, name: str, column: pa.ChunkedArray) -> pa.Array:
    """Reads positions or times; times are whole numbers."""
    order = raw_column(path, name, column)
    refuse_lists(path, name, order)
    if pa.types.is_string(order.type):
        # raw_column keeps text without a first date. This raises an error that names
        # the row.
        times_in(path, name, order)
    return order.cast(pa.int64()) if pa.types.is_timestamp(order.type) else order


def _with_candidates(data: SequenceData, folder: Path, seed: int) -> SequenceData:
    """Returns ``data`` with the candidates of test_negatives.parquet and validation_negatives.parquet in the folder.

    Where the test items alone have candidates, a validation item gets as many, drawn uniformly from the items that the
    user has not taken.

    Raises:
        DataError: a file lacks a column or a user, or names an item that is in no sequence.
    """
    files = {split: folder / f"{split}_negatives.parquet" for split in HELD_OUT}
    if not files["test"].exists():
        if files["validation"].exists():
            raise DataError(
                f"{files['validation']}: there is no test_negatives.parquet beside it; write one, too"
            )
        return data
    if data.test_items > 1:
        raise DataError(
            f"data.test_items={data.test_items} with {files['test']}: its candidates are those of one "
            "test item of a user; leave data.test_items out, or take the file away"
        )
    candidates = {
        split: _negatives(data, split, file)
        for split, file in files.items()
        if file.exists()
    }
    if "validation" not in candidates:
        users = data.held_out("validation").users
        user_pairs = Pairs(data.sequences.owners, data.sequences.values)
        candidates["validation"] = untaken_items(
            data.num_items, user_pairs, users, candidates["test"].shape[1], seed
        )
    return dataclasses.replace(data, candidates=candidates)


def _negatives(data: SequenceData, split: str, file: Path) -> Int64:
    """Reads (Q, N) the candidates of a split's held-out items beside the items themselves, filled up with -1."""
    assert data.user_ids is not None
    assert data.item_ids is not None
    items = data.item_ids[1:]
    words = spelled(
        file, {"user": _SPELLINGS["user"], "negative": ("negative", "item_id", "item")}
    )
    arrays = read_ids(file, words, "a candidate has a user and an item")
    columns: dict[str, Array] = {}
    kinds = {"i": "numbers", "O": "text"}
    for name, ids in (("user", data.user_ids), ("negative", items)):
        values: Array = arrays[name].to_numpy(zero_copy_only=False)
        if values.dtype.kind != ids.dtype.kind:
            raise DataError(
                f"{file}: the ids in '{words[name]}' are {kinds[values.dtype.kind]}, and those in the sequences of "
                f"'{data.name}' {kinds[ids.dtype.kind]}; write one type to both files"
            )
        columns[name] = values
    in_catalogue = np.isin(columns["negative"], items)
    if not in_catalogue.all():
        row = int((~in_catalogue).argmax())
        raise DataError(
            f"{file}: row {row}: negative {columns['negative'][row]} is in no sequence of '{data.name}' "
            f"({int((~in_catalogue).sum()):,} such rows); leave these rows out, since the model knows no such item"
        )
    in_sequences = np.isin(columns["user"], data.user_ids)
    owners = data.user_ids.searchsorted(columns["user"][in_sequences])
    negatives = items.searchsorted(columns["negative"][in_sequences]) + 1
    return candidates_by_user(
        data.held_out(split).users, data.user_ids, owners, negatives
    )


def _file_in(folder: Path, name: str) -> Path:
    files = sorted(folder.glob("*sequences.parquet")) or sorted(
        folder.glob("inter.parquet")
    )
    if len(files) == 1:
        return files[0]
    what = "has no such file" if folder.exists() else "is not there"
    if files:
        what = f"has {', '.join(file.name for file in files)}"
    raise DatasetUnavailable(
        f"set '{name}': {folder} {what}; it needs one file *sequences.parquet or inter.parquet, as in "
        f"docs/recipes.md; or set data.name={PLANTED}"
    )


def planted_sequences(
    *, users: int = 4_000, items: int = 400, seed: int = 0
) -> SequenceData:
    """Generates sequences: with probability .7 an item's fixed successor follows, else any item.

    No item is taken twice. The answer: rank the successor of the last item first, if it has not been taken, and the
    others in any order. ``best`` holds the figures of that rule on the test items, in expectation over the order of the
    others. Popularity knows nothing.

    Args:
        users: number of users.
        items: number of items, at least 30.
        seed: seed of the generator.
    """
    if users < 1 or items < LONGEST + 10:
        raise ValueError(
            f"planted sequences of users={users}, items={items}: needs at least 1 user and {LONGEST + 10} items"
        )
    rng = np.random.default_rng([seed, users, items])
    rows = np.arange(users)
    successor = rng.permutation(items)
    lengths = rng.integers(4, LONGEST + 1, users)
    steps = np.zeros((users, LONGEST), dtype=np.int64)
    available = np.ones((users, items), dtype=bool)
    for step in range(LONGEST):
        # At step 0 this reads the last column, which is still 0; ``follows`` is False
        # there.
        following = successor[steps[:, step - 1]]
        follows = (rng.random(users) < 0.7) & available[rows, following] & (step > 0)
        # The greatest of uniform numbers is a uniform choice among the available items.
        others = (rng.random((users, items)) * available).argmax(axis=1)
        steps[:, step] = np.where(follows, following, others)
        available[rows, steps[:, step]] = False
    inside = np.arange(LONGEST) < lengths[:, None]
    return SequenceData(
        name=PLANTED,
        sequences=Column.from_lengths(steps[inside].astype(np.int64) + 1, lengths),
        num_items=items,
        best=_best(steps, lengths, successor),
    )


def _best(steps: Int64, lengths: Int64, successor: Int64) -> dict[str, float]:
    """Returns the expected figures of the rule on the last items; earlier items are left out of the ranking."""
    rows = np.arange(len(steps))
    last = lengths - 1
    targets = steps[rows, last]
    guesses = successor[steps[rows, last - 1]]
    available = np.ones((len(steps), len(successor)), dtype=bool)
    before = np.arange(steps.shape[1]) < last[:, None]
    available[np.nonzero(before)[0], steps[before]] = False
    # Number of places that the guess takes: none if the user has taken the successor
    # already.
    first = available[rows, guesses].astype(np.int64)
    # Of each figure the sum of its gains at the first n places, for n from 0 to 10.
    gains = {
        "HR@1": np.arange(11.0).clip(max=1),
        "HR@10": np.arange(11.0),
        "NDCG@10": np.concatenate([[0.0], np.cumsum(1 / np.log2(np.arange(2, 12)))]),
    }
    figures = {}
    for name, upto in gains.items():
        # All other items come in any order: each of them has the same share of the
        # gains that are left.
        by_chance = (upto[-1] - upto[first]) / (available.sum(axis=1) - first)
        figures[name] = float(np.where(targets == guesses, upto[1], by_chance).mean())
    return figures
