from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from tests.data.loader.given import batch_of
from tests.data.stream_sets import schema_by
from tests.small_sets import planted_data
from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.loader.sides import BatchBuilder
from torchrec_ext.data.prepared import Prepared
from torchrec_ext.schema import BatchSchema, DataError

pytestmark = pytest.mark.unit


def data() -> Prepared:
    return planted_data(users=40, items=60, clusters=4)


def schema() -> BatchSchema:
    return schema_by(data().vocab, dense=data().dense)


def bags(batch: object, name: str) -> list[list[int]]:
    return [bag.tolist() for bag in batch.sparse[name].to_dense()]  # type: ignore[attr-defined]


def test_a_user_stands_beside_each_candidate_with_the_candidates_features() -> None:
    rows = data().rows("train").take(np.array([5, 0]))
    candidates = np.array([[3, 1, 2], [9, 9, 0]])
    batch = batch_of(schema(), rows, candidates, items=data().items)
    assert batch.sparse.keys() == schema().keys
    assert batch.labels.tolist() == [1, 0, 0, 1, 0, 0]
    assert bags(batch, "item_id") == [[3], [1], [2], [9], [9], [0]]
    assert bags(batch, "history") == [
        rows["history"].row(at).tolist() for at in (0, 0, 0, 1, 1, 1)
    ]
    assert bags(batch, "genres") == [
        data().items["genres"].row(item).tolist() for item in (3, 1, 2, 9, 9, 0)
    ]
    assert bags(batch, "user_id") == [
        [user] for user in rows["user_id"].values.repeat(3).tolist()
    ]
    assert torch.equal(
        batch.dense[:, 0], torch.from_numpy(rows["age"].values.repeat(3))
    )
    assert batch.total_weight == 6


def test_one_side_alone_has_every_key_and_the_other_side_empty() -> None:
    builder = BatchBuilder(schema(), data().items)
    users = builder.user_batch(data().rows("test").slice(0, 3))
    items = builder.item_batch(np.arange(7))
    assert users.sparse.keys() == items.sparse.keys() == schema().keys
    assert bags(users, "genres") == bags(users, "item_id") == [[]] * 3
    assert bags(users, "history") == [
        data().rows("test")["history"].row(at).tolist() for at in range(3)
    ]
    assert bags(items, "history") == bags(items, "user_id") == [[]] * 7
    assert items.dense.tolist() == [[0.0]] * 7
    assert bags(items, "item_id") == [[item] for item in range(7)]


def test_a_missing_or_mistyped_column_is_named() -> None:
    rows = data().rows("test").slice(0, 2)
    builder = BatchBuilder(schema(), data().items)
    for build in (builder.user_batch, partial(batch_of, schema(), items=data().items)):
        with pytest.raises(DataError, match="column 'gender' is missing"):
            build(rows.select([name for name in rows if name != "gender"]))
    wrong = {
        "gender": [np.array(["M", "F"], dtype=object), np.array([1.0, 2.0])],
        "age": [rows["history"]],
    }
    for name, columns in wrong.items():
        for column in columns:
            given = column if isinstance(column, Column) else Column(column)
            with pytest.raises(DataError, match=f"column '{name}'"):
                builder.user_batch(rows.with_columns({name: given}))


def test_read_only_memory_is_copied_before_torch_owns_it() -> None:
    values = np.array([1, 2])
    values.flags.writeable = False
    plain = schema_by({"id": 3})
    batch = batch_of(plain, Chunk({"id": Column(values)}))
    batch.sparse.values()[0] = 0
    assert values.tolist() == [1, 2]


def test_dense_columns_of_any_number_type_stand_beside_each_candidate() -> None:
    plain = schema_by({"item_id": 9}, dense=["count", "share", "yes"])
    rows = Chunk(
        {
            "count": Column(np.array([3, 4])),
            "share": Column(np.array([0.25, 0.5])),
            "yes": Column(np.array([True, False])),
        }
    )
    items = Chunk({"item_id": Column(np.arange(9))})
    batch = batch_of(plain, rows, np.array([[1, 2], [3, 4]]), items=items)
    assert batch.dense.tolist() == [[3, 0.25, 1]] * 2 + [[4, 0.5, 0]] * 2
