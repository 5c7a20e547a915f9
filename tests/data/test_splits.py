from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.small_sets import checkerboard_data
from torchrec_ext.data.splits import (
    TEST,
    TRAIN,
    VALIDATION,
    leave_one_out,
)

EVENTS = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(0, 5)), max_size=40
)


def by_hand(
    events: list[tuple[int, int, int]], length: int
) -> dict[int, tuple[int, list[int]]]:
    """Row -> (part, history), the slow and obvious way."""
    answer = {}
    for user in {user for user, _, _ in events}:
        mine = sorted(
            (row for row, event in enumerate(events) if event[0] == user),
            key=lambda row: events[row][2],
        )
        first: dict[int, int] = {}
        for row in mine:
            first.setdefault(events[row][1], row)
        mine = [row for row in mine if first[events[row][1]] == row]
        for place, row in enumerate(mine):
            left = len(mine) - place
            part = TRAIN if len(mine) < 3 else {1: TEST, 2: VALIDATION}.get(left, TRAIN)
            before = [
                events[other][1] for other in mine if events[other][2] < events[row][2]
            ]
            answer[row] = (part, before[max(0, len(before) - length) :])
    return answer


@pytest.mark.unit
@given(events=EVENTS, length=st.integers(0, 4))
def test_the_split_and_the_histories_are_those_made_by_hand(
    events: list[tuple[int, int, int]], length: int
) -> None:
    user, item, time = np.array(events, dtype=np.int64).reshape(-1, 3).T
    split = leave_one_out(user, item, time, length)
    found = {
        int(row): (int(split.part[at]), split.history.row(at).tolist())
        for at, row in enumerate(split.rows)
    }
    assert found == by_hand(events, length)


@pytest.mark.unit
def test_seen_lists_the_items_of_the_parts_that_are_named() -> None:
    data = checkerboard_data(users=20, items=24)
    users = np.array([3, 1, 99])
    train, both = data.seen(users, "train"), data.seen(users, "train", "validation")
    test = data.rows("test")
    own = test["item_id"].values[test["user_id"].values == 3]
    items = data.values_of("item_id")[[*both.row(0), *own]]
    assert sorted(items.tolist()) == list(range(1, 24, 2))
    assert train.lengths.tolist() == [10, 10, 0]
    assert both.lengths.tolist() == [11, 11, 0]
