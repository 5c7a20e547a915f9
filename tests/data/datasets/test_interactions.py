from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.datasets import synthetic
from torchrec_ext.data.datasets.interactions import InteractionData, from_ratings
from torchrec_ext.data.datasets.splits import (
    TEST,
    TRAIN,
    VALIDATION,
    leave_one_out,
)
from torchrec_ext.schema import DataError

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


def check_laws(data: InteractionData) -> None:
    """No held-out pair is in training, and no history holds what happened at the row's own time or later."""
    held_out = {
        (int(u), int(i)) for u, i in zip(*data.pairs("validation", "test"), strict=True)
    }
    train = {(int(u), int(i)) for u, i in zip(*data.pairs("train"), strict=True)}
    assert not held_out & train
    assert len(train) == data.train.num_rows
    assert data.popularity().sum() == data.train.num_rows
    when = {}
    for chunk in (data.train, data.validation, data.test):
        rows = zip(
            chunk["user_id"].values.tolist(),
            chunk["item_id"].values.tolist(),
            chunk["timestamp"].values.tolist(),
            strict=True,
        )
        when.update({(user, item): time for user, item, time in rows})
    for chunk in (data.train, data.validation, data.test):
        history = chunk["history"]
        users = chunk["user_id"].values.repeat(history.lengths).tolist()
        limits = chunk["timestamp"].values.repeat(history.lengths).tolist()
        assert all(
            when[user, item] < limit
            for user, item, limit in zip(
                users, history.values.tolist(), limits, strict=True
            )
        )


@pytest.mark.unit
def test_no_feature_of_generated_data_looks_into_the_future() -> None:
    data = synthetic.planted(users=50, items=60, clusters=3)
    times = data.train["timestamp"].values
    assert len(np.unique(times)) < len(times), "the data must have ties to be a test"
    check_laws(data)
    check_laws(synthetic.checkerboard(users=10, items=12))


@pytest.mark.unit
def test_seen_lists_the_items_of_the_parts_that_are_named() -> None:
    data = synthetic.checkerboard(users=4, items=8)
    users = np.array([3, 1, 99])
    train, both = data.seen(users), data.seen(users, "train", "validation")
    assert sorted(
        both.row(0).tolist()
        + data.test["item_id"].values[data.test["user_id"].values == 3].tolist()
    ) == [
        1,
        3,
        5,
        7,
    ]
    assert train.lengths.tolist() == [2, 2, 0]
    assert both.lengths.tolist() == [3, 3, 0]


@pytest.mark.unit
def test_liked_holds_what_was_rated_4_or_more_before_the_test_item() -> None:
    ratings = Chunk(
        {
            "user_id": Column(np.array([1, 1, 1, 1, 2])),
            "item_id": Column(np.array([5, 2, 3, 4, 5])),
            "timestamp": Column(np.array([3, 2, 1, 4, 0])),
            "rating": Column(np.array([5, 3, 4, 5, 4])),
        }
    )
    tables = {
        name: Chunk({column: Column(np.arange(6))})
        for name, column in (("users", "user_id"), ("items", "item_id"))
    }
    data = from_ratings(
        name="tiny", ratings=ratings, vocab={}, dense=(), history_length=2, **tables
    )
    assert [data.liked.row(user).tolist() for user in range(3)] == [[], [3, 5], [5]]
    assert data.test["item_id"].values.tolist() == [4]
    assert data.test["history"].row(0).tolist() == [2, 5]


@pytest.mark.unit
def test_a_rating_of_an_item_that_is_not_described_is_named() -> None:
    ids = Column(np.array([1, 9]))
    ratings = Chunk(
        {
            "user_id": Column(np.array([1, 1])),
            "item_id": ids,
            "timestamp": ids,
            "rating": ids,
        }
    )
    table = Chunk({"id": Column(np.arange(6))})
    with pytest.raises(
        DataError,
        match=r"set 'tiny': item_id 9 in row 1 of the ratings is not described \(known ids: 1 to 5",
    ):
        from_ratings(
            name="tiny",
            ratings=ratings,
            users=table,
            items=table,
            vocab={},
            dense=(),
            history_length=2,
        )
