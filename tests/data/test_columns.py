from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_ext.data.columns import Chunk, Column, concatenate

ROWS = st.lists(st.lists(st.integers(-5, 5), max_size=4), min_size=1, max_size=20)
pytestmark = pytest.mark.unit


def ragged(rows: list[list[int]]) -> Column:
    return Column.from_lengths(
        np.array([value for row in rows for value in row], dtype=np.int64),
        np.array([len(row) for row in rows]),
    )


def as_lists(column: Column) -> list[list[int]]:
    return [column.row(index).tolist() for index in range(len(column))]


@given(rows=ROWS, data=st.data())
def test_take_and_slice_do_to_a_ragged_column_what_they_do_to_a_list(
    rows: list[list[int]], data: st.DataObject
) -> None:
    column = ragged(rows)
    indices = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=30))
    taken = column.take(np.array(indices, dtype=np.int64))
    assert as_lists(taken) == [rows[index] for index in indices]
    assert taken.values.tolist() == [
        value for index in indices for value in rows[index]
    ]
    again = Column(taken.values, taken.offsets)
    assert as_lists(concatenate([again, column])) == [*as_lists(taken), *rows]
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    assert as_lists(column.slice(start, stop)) == rows[start:stop]


def test_a_chunk_has_equally_many_rows_in_all_columns() -> None:
    with pytest.raises(ValueError, match=r"equally many rows, got \{'a': 2, 'b': 3\}"):
        Chunk({"a": Column(np.zeros(2)), "b": Column(np.zeros(3))})


@pytest.mark.parametrize(
    "offsets", [[0, 2], [1, 3], [0, 4, 3], [], np.array([0, 3], np.int32)]
)
def test_offsets_must_fit_the_values(offsets: list[int] | np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"int64 and rise from 0 to the 3 values, got"):
        Column(np.arange(3), np.array(offsets, getattr(offsets, "dtype", np.int64)))
