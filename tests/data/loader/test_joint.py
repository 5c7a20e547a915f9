"""A table that shared and other features read: their bags are under one key, from memory, from files, on a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.data.loader.given import batch_of
from tests.data.stream_sets import schema_by
from tests.small_sets import planted_data
from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.prepared import Prepared
from torchrec_ext.schema import BatchSchema

pytestmark = pytest.mark.unit
SIZE = 21


def data() -> Prepared:
    return planted_data(users=40, items=60, clusters=4)


def schema(names: Sequence[str], shared: Sequence[str], **rows: int) -> BatchSchema:
    """Features ``names`` over the table of items, and one table for each of ``rows``."""
    return schema_by({**rows, "item": 61}, features={"item": names}, shared=shared)


def bags(batch: TowerBatch, name: str) -> list[list[int]]:
    return [bag.tolist() for bag in batch.bags(name).to_dense()]


def test_the_user_and_the_candidates_meet_in_one_key() -> None:
    rows = data().rows("train").take(np.array([5, 0]))
    candidates = np.array([[3, 1, 2], [9, 9, 0]])
    made = schema(["history", "item_id"], ["history", "user_id"], user_id=41)
    batch = batch_of(
        made, rows, candidates, items=data().items.select(["item_id"]), padded_rows=3
    )
    assert batch.joint is not None
    assert batch.joint.keys() == ["history|item_id"]
    assert batch.joint.stride() == 3 + 9
    assert bags(batch, "history") == [
        rows["history"].row(0).tolist(),
        rows["history"].row(1).tolist(),
        [],
    ]
    assert bags(batch, "item_id") == [[3], [1], [2], [9], [9], [0], [], [], []]
    assert len(batch) == 9


@pytest.mark.parametrize(
    "names", [["history", "item_id", "user_id"], ["history", "user_id", "item_id"]]
)
def test_a_missing_half_is_empty_bags(names: list[str]) -> None:
    made = schema(names, ["history", "user_id"])
    assert [joint.key for joint in made.joint] == ["history|item_id", "user_id|"]
    columns = {name: Column(np.arange(8)) for name in names}
    batch = batch_of(made, Chunk(columns))
    assert batch.joint is not None
    bags_of_key = [bag.tolist() for bag in batch.joint["user_id|"].to_dense()]
    assert bags_of_key == [[user] for user in range(8)] + [[]] * 8
    assert bags(batch, "user_id") == bags_of_key[:8]
