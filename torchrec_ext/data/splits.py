"""leave_one_out(): which rows train, validate and test, each with a history that holds no answer."""

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
    first, past_last = user.searchsorted(user), user.searchsorted(user, "right")
    places = np.arange(len(rows))
    from_end = past_last - places
    part = np.full(len(rows), TRAIN)
    part[from_end == 2] = VALIDATION
    part[from_end == 1] = TEST
    # With fewer than 3 rows a user would have nothing to train on.
    part[past_last - first < 3] = TRAIN
    # A history ends before the first row of the same time.
    is_later = np.diff(timestamp, prepend=timestamp[:1]) != 0
    same_time = np.maximum.accumulate(np.where(is_later | (first == places), places, 0))
    history = Column.from_windows(
        item, Windows(np.maximum(first, same_time - history_length), same_time)
    )
    return Split(rows, part.astype(np.int8), history)
