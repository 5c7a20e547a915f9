"""Towers: all towers in one call, as each by itself; what several of them may not read."""

import pytest
import torch

from tests.examples import batches, small_model, table
from torchrec_ext.modules.tower import Reads, Tower, Towers

pytestmark = pytest.mark.unit


def test_one_call_runs_every_tower_on_its_own_columns() -> None:
    towers = small_model().towers
    (batch,) = batches(1)
    outputs = towers(batch.sparse, batch.dense)
    assert list(outputs) == ["user", "item"]
    torch.testing.assert_close(
        outputs["user"],
        towers["user"](batch.sparse, batch.dense[:, :1]),
        rtol=0,
        atol=0,
    )
    torch.testing.assert_close(
        outputs["item"],
        towers["item"](batch.sparse, batch.dense[:, 1:]),
        rtol=0,
        atol=0,
    )
    (only,) = towers(batch.sparse, batch.dense, names=["item"]).items()
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
    assert (
        sorted(made.state_dict())[0] == "item.embeddings.embedding_bags.item_id.weight"
    )
