"""Which rows of a set train, validate and test, and what each may know of its user: a history that holds no answer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchrec_ext.data.columns import Array, Column, Int64, Windows

TRAIN, VALIDATION, TEST = 0, 1, 2


class Split(NamedTuple):
    """M rows sorted by user.

    ``rows`` (M,) are places in the input, ``part`` (M,) is TRAIN, VALIDATION or TEST, ``history`` has M rows.
    """

    rows: Int64
    part: NDArray[np.int8]
    history: Column


def leave_one_out(user: Int64, item: Int64, timestamp: Array, history_length: int) -> Split:
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
    return Split(rows, part.astype(np.int8), history)


def with_profiles(user: Int64, item: Int64, part: NDArray[np.int8], length: int, seed: int = 0) -> Split:
    """A split that somebody else made, where nothing is known of what came first.

    Of a pair that occurs more than once in a part only one is kept.

    In the place of a history each row has a profile: at most ``length`` of its user's training items in a random order, never the
    row itself. Of held-out rows nothing is in any profile. Rows of a user stand in that order, so that the profile of a training
    row is the ``length`` rows after it, those before the first following the last::

        user's training items  5 2 9    rows: 5 knows [2, 9], 2 knows [9, 5], 9 knows [5, 2]; held-out rows know [5, 2, 9]

    Args:
        user: (B,) ids.
        item: (B,) ids.
        part: (B,) TRAIN, VALIDATION or TEST.
        length: greatest length of a profile.
        seed: of the order.
    """
    pair = (user * (item.max(initial=0) + 1) + item) * 3 + part
    shuffled = np.random.default_rng(seed).permutation(np.unique(pair, return_index=True)[1])
    rows = shuffled[np.lexsort((part[shuffled], user[shuffled]))].astype(np.int64)
    user, item, part = user[rows], item[rows], part[rows]
    first, past_last = _runs(user)
    training = part == TRAIN
    before = np.concatenate([[0], training.cumsum()])
    count = before[past_last] - before[first]
    # A user's training items twice in a row: all of them but the one at place p are the count - 1 items from p + 1 on.
    start = 2 * before[first]
    place = np.arange(len(rows)) - first
    pool = np.zeros(2 * int(training.sum()), dtype=np.int64)
    for copy in (0, 1):
        pool[(start + place + copy * count)[training]] = item[training]
    starts = np.where(training, start + place + 1, start)
    return Split(rows, part, Column.from_windows(pool, Windows(starts, starts + np.minimum(count - training, length))))


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
