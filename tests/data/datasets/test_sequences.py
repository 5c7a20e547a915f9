"""Sequences: what is held out, what is trained on exactly once, and what is refused in which words."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_ext.data.columns import Column
from torchrec_ext.data.datasets.sequences import (
    SequenceConfig,
    SequenceData,
    from_rows,
    load_sequences,
    most_recent,
    training_windows,
)
from torchrec_ext.schema import DataError

pytestmark = pytest.mark.unit


def ragged(*rows: list[int]) -> Column:
    return Column.from_lengths(
        np.array([value for row in rows for value in row], dtype=np.int64),
        np.array([len(row) for row in rows]),
    )


def rows_of(column: Column) -> list[list[int]]:
    return [column.row(row).tolist() for row in range(len(column))]


def data_of(*rows: list[int], **options: Any) -> SequenceData:
    return SequenceData(
        **{"name": "small", "sequences": ragged(*rows), "num_items": 9} | options
    )


SMALL = data_of([1, 2, 3, 4, 5], [6, 7], [8, 9, 8])


def test_the_last_two_items_of_those_who_have_three_are_held_out() -> None:
    assert rows_of(SMALL.training()) == [[1, 2, 3], [6, 7], [8]]
    validation, test = SMALL.held_out("validation"), SMALL.held_out("test")
    assert validation.users.tolist() == test.users.tolist() == [0, 2]
    assert (rows_of(validation.before), validation.targets.tolist()) == (
        [[1, 2, 3], [8]],
        [4, 9],
    )
    assert (rows_of(test.before), test.targets.tolist()) == (
        [[1, 2, 3, 4], [8, 9]],
        [5, 8],
    )
    assert SMALL.popularity().tolist() == [0, 1, 1, 1, 0, 0, 1, 1, 1, 0], (
        "of training rows alone"
    )
    assert SMALL.vocab == {"item_id": 10}
    with pytest.raises(
        ValueError, match="part='tests': must be one of validation, test"
    ):
        SMALL.held_out("tests")


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    most=st.integers(1, 12),
)
def test_every_item_but_the_first_is_a_target_once_with_what_came_before(
    lengths: list[int], most: int
) -> None:
    values = np.arange(sum(lengths))
    pieces = rows_of(
        training_windows(Column.from_lengths(values, np.array(lengths)), most)
    )
    firsts = np.cumsum(lengths) - lengths
    assert sorted(target for piece in pieces for target in piece[1:]) == sorted(
        set(values.tolist()) - set(firsts.tolist())
    )
    assert all(2 <= len(piece) <= most + 1 for piece in pieces)
    assert all(np.diff(piece).tolist() == [1] * (len(piece) - 1) for piece in pieces), (
        "neighbours of one user"
    )
    assert len(pieces) == sum(-(-(length - 1) // most) for length in lengths), (
        "and no more pieces than needed"
    )


def test_the_most_recent_items() -> None:
    assert rows_of(most_recent(ragged([1, 2, 3], [4], []), 2)) == [[2, 3], [4], []]
    for limited in (most_recent, training_windows):
        with pytest.raises(ValueError, match="=0 of Column"):
            limited(ragged([1, 2]), 0)


def test_rows_in_any_order_with_any_ids_become_sequences() -> None:
    user = np.array([70, 10, 70, 10, 70])
    item = np.array([5, 900, 0, 5, 900])
    order = np.array([3, 1, 1, 1, 2])
    data = from_rows("events", user, item, order, times=True)
    assert data.user_ids is not None
    assert data.item_ids is not None
    assert data.times is not None
    assert data.user_ids.tolist() == [10, 70]
    named = [
        [int(data.item_ids[item]) for item in row] for row in rows_of(data.sequences)
    ]
    assert named == [[900, 5], [0, 900, 5]], "equal times keep the order of the rows"
    assert rows_of(data.times) == [[1, 1], [1, 2, 3]]
    assert data.num_items == 3


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"sequences": ragged([1, 2], [], [3])},
            "set 'small': user 1 has an empty sequence (1 such users); drop them",
        ),
        (
            {"sequences": ragged([], [3]), "user_ids": np.array([40, 50])},
            "set 'small': user 40 has an empty sequence (1 such users)",
        ),
        (
            {"sequences": ragged([1, 2], [3, 10, 4])},
            "item 10 of user 1, place 1 is not in the catalogue (ids 1 to 9; 1 such ids)",
        ),
        (
            {"sequences": ragged([0, 2], [3])},
            "item 0 of user 0, place 0 is not in the catalogue",
        ),
        (
            {
                "sequences": ragged([1, 2], [3, 4, 5]),
                "times": ragged([5, 5], [1, 3, 2]),
            },
            "time 2 of user 1, place 2 is before 3, that of the item before it (1 such places); sort each user's items "
            "by time",
        ),
        (
            {"sequences": ragged([1, 2], [3]), "times": ragged([1], [2, 3])},
            "one for each item of",
        ),
        (
            {"sequences": Column(np.array([1, 2]))},
            "sequences must be a ragged column of 1 or more users, got Column(2 rows",
        ),
    ],
)
def test_what_cannot_be_is_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError) as error:
        data_of(**options)
    assert text in str(error.value)


def test_times_may_fall_from_one_user_to_the_next() -> None:
    data_of(sequences=ragged([1, 2], [3, 4]), times=ragged([8, 9], [1, 1]))


def test_several_test_items_are_found_after_all_items_before_them() -> None:
    data = data_of([1, 2, 3, 4, 5], [6, 7, 8, 9], [1, 2, 3, 6, 5, 5], test_items=2)
    assert rows_of(data.training()) == [[1], [6, 7, 8, 9], [1, 2]]
    validation, test = data.held_out("validation"), data.held_out("test")
    assert validation.users.tolist() == test.users.tolist() == [0, 2]
    assert rows_of(validation.before) == [[1], [1, 2]]
    assert test.target_rows is not None
    assert (test.target_rows.tolist(), test.targets.tolist()) == (
        [0, 0, 1],
        [4, 5, 5],
    ), "an item taken twice counts once"
    assert rows_of(test.before) == [[1, 2, 3], [1, 2, 3, 6]]


def folder_of(
    root: Path, negatives: dict[str, Any], name: str = "test_negatives"
) -> SequenceConfig:
    (root / "mine").mkdir(exist_ok=True)
    rows = {
        "user": list("aaabbbb"),
        "item": [10, 20, 30, 20, 30, 40, 50],
        "position": [0, 1, 2, 0, 1, 2, 3],
    }
    pq.write_table(pa.table(rows), root / "mine" / "inter.parquet")
    pq.write_table(pa.table(negatives), root / "mine" / f"{name}.parquet")
    return SequenceConfig(name="mine", folder=str(root))


GIVEN = {"user": ["b", "a", "a", "nobody"], "negative": [10, 40, 50, 10]}


def test_candidates_are_those_of_the_file_and_validation_items_get_as_many(
    tmp_path: Path,
) -> None:
    data = load_sequences(folder_of(tmp_path, GIVEN))
    assert data.candidates["test"].tolist() == [[4, 5], [1, -1]], "rows of a and b"
    drawn = data.candidates["validation"]
    assert drawn.shape == (2, 2)
    assert set(drawn[0]) <= {4, 5}
    assert set(drawn[1]) == {1}
    config = folder_of(
        tmp_path, {"user": ["a", "b"], "item_id": [50, 10]}, "validation_negatives"
    )
    assert load_sequences(config).candidates["validation"].tolist() == [[5], [1]]


def test_candidates_of_text_ids_are_named_as_in_the_sequences(tmp_path: Path) -> None:
    config = folder_of(tmp_path, {**GIVEN, "negative": ["i10", "i40", "i50", "i10"]})
    rows = pq.read_table(tmp_path / "mine" / "inter.parquet").to_pydict()
    pq.write_table(
        pa.table({**rows, "item": [f"i{item}" for item in rows["item"]]}),
        tmp_path / "mine/inter.parquet",
    )
    assert load_sequences(config).candidates["test"].tolist() == [[4, 5], [1, -1]], (
        "rows of a and b"
    )


@pytest.mark.parametrize(
    ("negatives", "options", "message"),
    [
        (
            {**GIVEN, "negative": [10, 40, 60, 10]},
            {},
            r"row 2: negative 60 is in no sequence of 'mine' \(1 such rows\)",
        ),
        (
            {"user": ["a"], "negative": [40]},
            {},
            r"user b, who has a test item, has no row; write the candidates",
        ),
        (
            {"user": ["a"], "rival": [40]},
            {},
            r"no column negative or item_id or item; the file has",
        ),
        (
            {**GIVEN, "user": [1, 2, 2, 3]},
            {},
            r"test_negatives\.parquet: the ids in 'user' are numbers, and those in the sequences of 'mine' text; write",
        ),
        (
            {**GIVEN, "negative": [10, None, 50, None]},
            {},
            r"column 'negative', row 1: value is null \(2 such rows\), and a candidate has a user and an item; leave",
        ),
        (
            {**GIVEN, "negative": [1.0, 4.5, 5.0, 1.0]},
            {},
            r"column 'negative' is double; ids must be whole numbers or",
        ),
        (
            GIVEN,
            {"test_items": 2},
            r"data\.test_items=2 with .*test_negatives\.parquet: its candidates are those of one",
        ),
    ],
)
def test_candidates_that_cannot_be_are_named(
    tmp_path: Path, negatives: dict[str, Any], options: dict[str, int], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load_sequences(dataclasses.replace(folder_of(tmp_path, negatives), **options))


def test_candidates_of_validation_items_alone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"validation_negatives\.parquet: there is no test_negatives\.parquet beside it",
    ):
        load_sequences(folder_of(tmp_path, GIVEN, "validation_negatives"))
