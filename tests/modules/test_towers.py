"""Towers: all towers in one call, as each by itself; what several of them may not read."""

import pytest
import torch

from tests.examples import batches, small_model, table
from torchrec_ext.modules.tower import Reads, Tower, Towers

pytestmark = pytest.mark.unit


def test_one_call_runs_every_tower_on_its_own_columns() -> None:
    model = small_model()
    towers = model.towers
    (batch,) = batches(1)
    vectors = model.look_ups(batch, ["user", "item"])
    outputs = towers(vectors, batch)
    assert list(outputs) == ["user", "item"]
    for name, columns in (("user", slice(1)), ("item", slice(1, None))):
        expected = towers[name](vectors, batch.dense[:, columns])
        torch.testing.assert_close(outputs[name], expected, rtol=0, atol=0)
    (only,) = towers(vectors, batch, ["item"]).items()
    assert only[0] == "item"
    torch.testing.assert_close(only[1], outputs["item"], rtol=0, atol=0)


def test_shared_towers_have_a_dense_matrix_of_their_own() -> None:
    towers = {
        "user": Tower([table("user_id", 5)], [4], dense=["age", "income"]),
        "place": Tower([table("place", 5)], [4], dense=["height"]),
        "item": Tower([table("item_id", 5)], [4], dense=["price"]),
    }
    made = Towers(towers, shared=["user", "place"])
    assert made.reads == {
        "user": Reads(True, slice(0, 2)),
        "place": Reads(True, slice(2, 3)),
        "item": Reads(False, slice(0, 1)),
    }
    assert made.columns(shared=True) == ["user_id", "place", "age", "income", "height"]
    assert made.columns(shared=False) == ["item_id", "price"]
