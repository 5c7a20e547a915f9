"""leave_one_out(), with_profiles(): which rows train, validate and test, each with a history that holds no answer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchrec_ext.data.columns import Array, Column, Int64, Windows

TRAIN, VALIDATION, TEST = 0, 1, 2


class Pairs(NamedTuple):
    """Matching (P,) user ids and (P,) item ids."""

    users: Int64
    items: Int64


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
