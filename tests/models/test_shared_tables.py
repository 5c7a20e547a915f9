"""A table that two towers name is one table: one set of weights, looked up once, however many rows each tower has."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torchrec import EmbeddingBagConfig, PoolingType

from tests.contracts import run_ranks
from tests.examples import (
    DIM,
    ITEMS,
    META,
    USERS,
    gradients,
    pair_batches,
    redrawn,
    table,
)
from tests.sharded import Case, alone, check_equal, on_ranks
from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.interaction import TopMLP
from torchrec_ext.modules.tower import Tower

QUERIES, WIDTH, STEPS = 6, 4, 8
LEARNING = OptimizerConfig(
    tables="adagrad", tables_lr=0.1, dense="adam", dense_lr=1e-3, eps=1e-8
)


def items(*features: str, name: str = "item", **options: Any) -> EmbeddingBagConfig:
    options = {
        "num_embeddings": ITEMS,
        "embedding_dim": DIM,
        "pooling": PoolingType.MEAN,
    } | options
    return EmbeddingBagConfig(name=name, feature_names=list(features), **options)


def model(device: torch.device | None = None, *, separate: bool = False) -> TowerModel:
    """History and candidate over one item table, or over ``separate`` ones with the same first values."""
    names = ("history_items", "candidate_items") if separate else ("item", "item")
    towers = {
        "user": Tower(
            [table("user_id", USERS), items("history", "wishes", name=names[0])],
            [16, 8],
            dense=["age"],
        ),
        "item": Tower([items("item_id", name=names[1])], [16, 8], dense=["price"]),
    }
    torch.manual_seed(0)
    made = TowerModel(towers, TopMLP([8, 8]), device=device)
    return redrawn(made, 0, tables=3 if device is None else None)


def batches(count: int, rank: int = 0, world_size: int = 1) -> Iterator[TowerBatch]:
    """Ids of few items, so that histories, wishes and candidates of a step meet in the same rows."""
    few = ITEMS // 5
    return pair_batches(
        model(META).schema(),
        count,
        {
            "user_id": (USERS, 1),
            "history": (few, 3),
            "wishes": (few, 2),
            "item_id": (few, 1),
        },
        of_query=("user_id", "history", "wishes", "age"),
        queries=QUERIES,
        width=WIDTH,
        rank=rank,
        world_size=world_size,
    )


def tables_of(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name.split(".")[-2]: value
        for name, value in state.items()
        if "embedding_bags" in name
    }


def dense_of(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in state.items() if "embedding_bags" not in name
    }


@pytest.mark.unit
def test_one_table_has_the_gradients_of_two_equal_ones_together() -> None:
    """Its gradient is their sum; all else is equal, and so are the logits."""
    one, two = model(), model(separate=True)
    with torch.no_grad():
        weight = tables_of(dict(one.named_parameters()))["item"]
        for name in ("history_items", "candidate_items"):
            tables_of(dict(two.named_parameters()))[name].copy_(weight)
    logits, grads = gradients(one, next(batches(1)))
    two_logits, two_grads = gradients(two, next(batches(1)))
    torch.testing.assert_close(logits, two_logits, rtol=0, atol=1e-6)
    assert set(tables_of(grads)) == {"user_id", "item"}
    both = (
        tables_of(two_grads)["history_items"] + tables_of(two_grads)["candidate_items"]
    )
    torch.testing.assert_close(tables_of(grads)["item"], both, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        tables_of(grads)["user_id"], tables_of(two_grads)["user_id"], rtol=0, atol=1e-6
    )
    assert (
        dense_of(grads).keys()
        == dense_of(two_grads).keys()
        == dense_of(dict(one.named_parameters())).keys()
    )
    for name, grad in dense_of(two_grads).items():
        assert grad.abs().sum() > 0
        torch.testing.assert_close(dense_of(grads)[name], grad, rtol=0, atol=1e-6)


CASES = {
    sharding: Case(
        model, partial(batches, STEPS), LEARNING, PlanConfig(sharding=sharding), STEPS
    )
    for sharding in ("table_wise", "data_parallel", "row_wise", "column_wise")
}


def test_a_shared_table_trained_on_two_ranks_equals_one_trained_unsharded() -> None:
    """Under Adagrad, so that two updates of a row in a step would not equal one."""
    ranks = run_ranks(on_ranks, 2, CASES)
    expected = alone(CASES["table_wise"])
    for name in CASES:
        check_equal([rank[name] for rank in ranks], expected)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("other", "text"),
    [
        (
            {"num_embeddings": 7, "embedding_dim": 4},
            f"num_embeddings={ITEMS}, embedding_dim=16, init_fn=",
        ),
        (
            {"pooling": PoolingType.SUM},
            "with pooling=PoolingType.MEAN and pooling=PoolingType.SUM: tables of one name share",
        ),
        ({"init_fn": torch.nn.init.ones_}, "init_fn=<function ones_"),
    ],
)
def test_tables_of_one_name_that_differ_are_refused_with_both_shown(
    other: dict[str, Any], text: str
) -> None:
    towers = {
        "user": Tower([items("history")], [8]),
        "item": Tower([items("item_id", **other)], [8]),
    }
    with pytest.raises(ValueError, match="two tables are called 'item'") as error:
        TowerModel(towers, TopMLP([8, 8]))
    assert text in str(error.value)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("shared", "text"),
    [
        (("users",), r"\['users'\], which are not towers; the towers are \['user', 'i"),
        (("user",), r"features \['city'\] are read by a shared tower and by another"),
    ],
)
def test_towers_that_cannot_be_shared_are_named(
    shared: tuple[str, ...], text: str
) -> None:
    of_users = Tower([items("history")], [4])
    one_table = {"user": of_users, "item": Tower([items("item_id")], [4])}
    with pytest.raises(ValueError, match="table 'item': a shared tower and another"):
        TowerModel(one_table, TopMLP([4, 4]), shared=["user"])
    towers = {name: Tower([items("city", name=name)], [4]) for name in ("user", "item")}
    with pytest.raises(ValueError, match=text):
        TowerModel(towers, TopMLP([4, 4]), shared=shared)
