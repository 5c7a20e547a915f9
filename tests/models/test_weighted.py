"""Bags whose ids have weights: the sum of weight x row, sharded or not, alone or in a table of several towers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec import EmbeddingBagConfig, EmbeddingConfig, PoolingType

from tests.contracts import gather_state, run_ranks
from tests.examples import ITEMS, META, redrawn, table
from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig, TablePlan
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.interaction import TopMLP
from torchrec_ext.modules.tower import Tower
from torchrec_ext.schema import BatchSchema, DataError, Jagged
from torchrec_ext.train.step.pipeline import make_pipeline, unpipelined

QUERIES, WIDTH, STEPS = 6, 4, 8
SHARDINGS = ("table_wise", "row_wise", "column_wise", "data_parallel")
LEARNING = OptimizerConfig(
    tables="adagrad", tables_lr=0.1, dense="adam", dense_lr=1e-3, eps=1e-8
)
# FBGEMM's dense kernel cannot hold what is read id by id
LISTED = {"recent": TablePlan(sharding="table_wise")}
LISTS = {"history": 3, "genres": 2, "likes": 4, "recent": 2}


def items(feature: str) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name="item", feature_names=[feature], num_embeddings=ITEMS, embedding_dim=16
    )


def model(device: torch.device | None = None) -> TowerModel:
    """A weighted history in the item tower's table and weighted genres, beside pooling by sum, mean and attention."""
    recent = EmbeddingConfig(
        name="recent", feature_names=["recent"], num_embeddings=ITEMS, embedding_dim=16
    )
    tables = [
        table("user_id", 40),
        items("history"),
        table("genres", ITEMS),
        table("likes", ITEMS, pooling=PoolingType.MEAN),
        recent,
    ]
    towers = {
        "user": Tower(
            tables,
            [16, 8],
            weights={"history": "ages", "genres": "shares"},
            device=device,
        ),
        "item": Tower([items("item_id")], [16, 8], device=device),
    }
    made = TowerModel(towers, TopMLP([8, 8]), shared=["user"])
    return redrawn(made, 0, tables=3 if device is None else None)


def batches(count: int, rank: int = 0, world_size: int = 1) -> Iterator[TowerBatch]:
    schema = model(META).schema()
    generator = torch.Generator().manual_seed(5)
    local = slice(rank * QUERIES // world_size, (rank + 1) * QUERIES // world_size)
    queries = local.stop - local.start
    for _ in range(count):
        users = torch.randint(40, (QUERIES,), generator=generator)
        lists = {
            name: torch.randint(ITEMS // 5, (QUERIES, size), generator=generator)
            for name, size in LISTS.items()
        }
        weights = {
            name: torch.rand(QUERIES, LISTS[name], generator=generator) * 4 - 1
            for name in ("history", "genres")
        }
        candidates = torch.randint(ITEMS // 5, (QUERIES, WIDTH), generator=generator)
        labels = torch.randint(2, (QUERIES, WIDTH), generator=generator).float()
        bags = {
            name: Jagged(
                ids[local].reshape(-1),
                torch.full((queries,), LISTS[name]),
                weights[name][local].reshape(-1) if name in weights else None,
            )
            for name, ids in lists.items()
        }
        yield schema.assemble(
            {
                "user_id": Jagged(users[local]),
                "item_id": Jagged(candidates[local].reshape(-1)),
                **bags,
            },
            labels=labels[local].reshape(-1),
            total_weight=QUERIES * WIDTH / world_size,
            index=torch.arange(queries).repeat_interleave(WIDTH),
            shared_rows=torch.arange(queries),
        )


@pytest.mark.unit
def test_a_bag_is_the_sum_of_weight_times_row() -> None:
    made = TowerModel(
        {
            "user": Tower(
                [table("genres", 9), table("user_id", 9)],
                (),
                weights={"genres": "shares"},
            )
        },
        torch.nn.Module(),
    )
    schema = made.schema()
    assert schema.feature("genres").weights == "shares"  # type: ignore[union-attr]
    ids, weights = torch.tensor([1, 2, 2, 5]), torch.tensor([0.5, -2.0, 3.0, 1.0])
    columns = {
        "genres": Jagged(ids, torch.tensor([3, 0, 1]), weights),
        "user_id": Jagged(torch.tensor([7, 8, 0])),
    }
    batch = schema.assemble(columns, labels=torch.zeros(3))
    genres, users = (value for name, value in sorted(made.named_parameters()))
    expected = torch.stack(
        [0.5 * genres[1] + 1.0 * genres[2], torch.zeros(16), genres[5]]
    )
    torch.testing.assert_close(
        made.embed("user", batch), torch.cat([expected, users[[7, 8, 0]]], dim=1)
    )


@pytest.mark.unit
def test_weights_stand_apart_from_bags_without() -> None:
    batch = next(batches(1))
    assert batch.weighted is not None
    assert batch.weighted.keys() == ["history|item_id", "genres|"]
    assert batch.joint is None
    assert batch.bags("history").weights().numel() == QUERIES * 3
    assert batch.bags("item_id").weights().tolist() == [1.0] * QUERIES * WIDTH
    assert batch.shared.sparse.keys() == ["user_id", "likes", "recent"]  # type: ignore[union-attr]
    assert batch.shared.sparse.weights_or_none() is None  # type: ignore[union-attr]
    moved = batch.to(torch.device("cpu"))
    assert torch.equal(moved.weighted.weights(), batch.weighted.weights())  # type: ignore[union-attr]


def state_of(made: TowerModel) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in made.named_parameters()}


def unsharded() -> dict[str, Tensor]:
    made = model()
    split = {True: [], False: []}  # type: ignore[var-annotated]
    for name, parameter in made.named_parameters():
        split["embedding_bags" in name or ".embeddings." in name].append(parameter)
    optimizers = [
        torch.optim.Adagrad(split[True], lr=0.1, eps=1e-8),
        torch.optim.Adam(split[False], lr=1e-3, eps=1e-8),
    ]
    for batch in batches(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        made(batch)[0].backward()
        assert all(
            parameter.grad is not None and parameter.grad.abs().sum() > 0
            for parameter in made.parameters()
        )
        for optimizer in optimizers:
            optimizer.step()
    return state_of(made)


def trained(runtime: Runtime) -> dict[str, Any]:
    results = {}
    for sharding in SHARDINGS:
        made = model(META)
        plan = plan_sharding(
            made, runtime, PlanConfig(sharding=sharding, tables=LISTED)
        )
        parallel, optimizer = hybrid_parallel(
            made, runtime, plan=plan, optimizer=LEARNING, seed=3
        )
        pipeline = make_pipeline(parallel, optimizer, runtime.device)
        stream = batches(STEPS, runtime.rank, runtime.world_size)
        for _ in range(STEPS):
            pipeline.progress(stream)
        results[sharding] = gather_state(parallel), unpipelined(pipeline, parallel)
    return results


def test_weighted_bags_trained_on_two_ranks_equal_those_trained_unsharded() -> None:
    """And what is pooled without weights beside them, by sum, mean and attention, is as it was."""
    expected = unsharded()
    for sharding, (state, missed) in run_ranks(trained, 2)[0].items():
        assert missed == [], sharding
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                state[name],
                value,
                rtol=0,
                atol=1e-4,
                msg=lambda text, at=(sharding, name): f"{at}: {text}",
            )


@pytest.mark.unit
@pytest.mark.parametrize(
    ("tables", "weights", "text"),
    [
        (
            [table("a", 5)],
            {"b": "w"},
            "weights: b=w: the tower reads no feature 'b'; name one of its tables' features",
        ),
        (
            [table("a", 5, pooling=PoolingType.MEAN)],
            {"a": "w"},
            "table 'a' pools it by MEAN, must be SUM; for a mean give weights",
        ),
        (
            [
                EmbeddingConfig(
                    name="a", feature_names=["a"], num_embeddings=5, embedding_dim=4
                )
            ],
            {"a": "w"},
            "weights: a=w: table 'a' pools it by attention, must be SUM",
        ),
    ],
)
def test_what_cannot_be_weighted_is_refused(
    tables: list[Any], weights: dict[str, str], text: str
) -> None:
    with pytest.raises(ValueError) as error:
        Tower(tables, [4], weights=weights)
    assert text in str(error.value)


@pytest.mark.unit
def test_a_feature_with_weights_in_one_tower_only_is_refused() -> None:
    towers = {
        "one": Tower(
            [
                table(
                    "a",
                    5,
                )
            ],
            [4],
            weights={"a": "w"},
        ),
        "two": Tower([table("a", 5)], [4]),
    }
    with pytest.raises(
        ValueError,
        match="feature 'a' has weights w in tower 'one' and none in tower 'two'; give it the same",
    ):
        TowerModel(towers, TopMLP([4, 4]))


@pytest.mark.unit
@pytest.mark.parametrize(
    ("weights", "text"),
    [
        (
            None,
            "feature 'genres' has no weights, but the model reads them from a column; give a weight for each id",
        ),
        (
            torch.ones(3),
            "column 'shares': 3 weights, must be 4, one for each id of 'genres'",
        ),
        (
            torch.tensor([1.0, 1.0, float("nan"), 1.0]),
            "column 'shares': value nan in row 1 of the batch is not finite",
        ),
    ],
)
def test_wrong_weights_are_named(weights: Tensor | None, text: str) -> None:
    schema = BatchSchema.from_tables([table("genres", 9)], weights={"genres": "shares"})
    with pytest.raises(DataError) as error:
        schema.assemble(
            {
                "genres": Jagged(
                    torch.tensor([1, 2, 2, 5]), torch.tensor([2, 1, 1]), weights
                )
            },
            labels=torch.zeros(3),
        )
    assert text in str(error.value)
