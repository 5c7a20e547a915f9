"""Towers on ranks of their own learn what the unsharded model learns, on any ranks, over real gloo processes."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.contracts import run_ranks
from tests.examples import DIM, ITEMS, META, USERS, batches, redrawn, small_model, table
from torchrec_ext.batch import SharedRows, TowerBatch
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.tables import initialise_tables, local_shards
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.interaction import TopMLP
from torchrec_ext.modules.session_tower import SessionTower
from torchrec_ext.modules.tower import Normalization, Tower
from torchrec_ext.train.step.pipeline import make_pipeline, unpipelined

STEPS = 50
SGD = OptimizerConfig(tables="sgd", tables_lr=2.0, dense="sgd", dense_lr=0.2)
# Kernels, ShardedAdam, decay, settings by tower, and a norm of the whole gradient that
# is always exceeded.
MANY = OptimizerConfig(
    tables="row_wise_adagrad",
    tables_lr=0.1,
    per_table=("user_id=lazy_adam lr=0.01", "item_id=adagrad weight_decay=0.1"),
    dense_weight_decay=0.1,
    per_layer=("towers.item=sgd lr=0.1", "towers.user.mlp.2.bias=lr=0.01"),
    clip_norm=0.05,
)


def plain(device: torch.device | None = None) -> TowerModel:
    return small_model(device)


def normed(device: torch.device | None = None) -> TowerModel:
    """With batch norm, whose batch is the global one, and attention over a bag."""
    history = EmbeddingConfig(
        name="history",
        feature_names=["history"],
        num_embeddings=ITEMS,
        embedding_dim=DIM,
    )
    towers = {
        "user": Tower(
            [table("user_id", USERS), history],
            [16, 8],
            dense=["age"],
            normalization="batch",
            device=device,
        ),
        "item": Tower(
            [table("item_id", ITEMS)],
            [8, 8],
            dense=["price"],
            normalization="batch",
            device=device,
        ),
    }
    return redrawn(TowerModel(towers, TopMLP([8, 8], [8])))


def shared(
    device: torch.device | None = None, normalization: Normalization = "none"
) -> TowerModel:
    """Two towers run once for the rows that share a user; one has neither dense columns nor layers."""
    taken = [table("user_id", USERS), table("history", ITEMS)]
    towers = {
        "user": Tower(
            taken, [16, 8], dense=["age"], normalization=normalization, device=device
        ),
        "place": Tower([table("place", 7)], [], device=device),
        "item": Tower([table("item_id", ITEMS)], [8], dense=["price"], device=device),
    }
    return redrawn(
        TowerModel(towers, TopMLP([8, DIM, 8], [8]), shared=["user", "place"])
    )


def shared_normed(device: torch.device | None = None) -> TowerModel:
    """With batch norm in a shared tower, whose rows count as often as they are read."""
    return shared(device, "batch")


def session(device: torch.device | None = None) -> TowerModel:
    """A transformer over a session with its target, whose table is read id by id."""
    items = EmbeddingConfig(
        name="item",
        feature_names=["history", "item_id"],
        num_embeddings=ITEMS,
        embedding_dim=DIM,
    )
    towers = {
        "session": SessionTower(
            [items],
            session=["history"],
            target=["item_id"],
            mlp_widths=[8],
            max_length=3,
            dense=["price"],
            device=device,
        ),
        "user": Tower([table("user_id", USERS)], [8], dense=["age"], device=device),
    }
    made = TowerModel(towers, TopMLP([8, 8], [8]))  # type: ignore[arg-type]
    torch.manual_seed(0)
    for parameter in (
        value for name, value in made.named_parameters() if "embeddings." not in name
    ):
        nn.init.normal_(parameter, std=0.2)
    return made


def session_batches(
    count: int, size: int = 24, *, rank: int, world_size: int
) -> Iterator[TowerBatch]:
    """The dense columns in the order of the towers."""
    for batch in batches(count, size, rank=rank, world_size=world_size):
        yield dataclasses.replace(batch, dense=batch.dense.flip(1))


def shared_batches(
    count: int, size: int = 12, *, rank: int, world_size: int
) -> Iterator[TowerBatch]:
    """``size`` users over all ranks, each beside 3 items."""
    for step, (users, items) in enumerate(
        zip(batches(count, size), batches(count, 3 * size, seed=1), strict=True)
    ):
        local = slice(rank * size // world_size, (rank + 1) * size // world_size)
        rows = slice(3 * local.start, 3 * local.stop)
        places = torch.randint(
            7, (size, 1), generator=torch.Generator().manual_seed(step)
        )
        queries = {
            **{name: users.sparse[name].to_dense() for name in ("user_id", "history")},
            "place": list(places),
        }
        yield TowerBatch(
            sparse=keyed({"item_id": items.sparse["item_id"].to_dense()[rows]}),
            dense=items.dense[rows, 1:],
            labels=items.labels[rows],
            weights=items.weights[rows],
            total_weight=items.weights.sum() / world_size,
            shared=SharedRows(
                keyed({name: bags[local] for name, bags in queries.items()}),
                users.dense[local, :1],
                torch.arange(local.stop - local.start).repeat_interleave(3),
            ),
        )


def keyed(bags: dict[str, list[Tensor]]) -> KeyedJaggedTensor:
    flat = [bag for both in bags.values() for bag in both]
    lengths = torch.tensor([len(bag) for bag in flat], dtype=torch.int32)
    return KeyedJaggedTensor(list(bags), torch.cat(flat).long(), lengths=lengths)


Feed = Callable[..., Iterator[TowerBatch]]
MODELS: dict[str, tuple[Callable[..., TowerModel], Feed]] = {
    "plain": (plain, batches),
    "normed": (normed, batches),
    "shared": (shared, shared_batches),
    "shared_normed": (shared_normed, shared_batches),
    "session": (session, session_batches),
}


class Case(NamedTuple):
    """A model, ``plan.towers``, ``plan.sharding`` and the optimizers."""

    model: str
    towers: str
    sharding: str
    optimizer: OptimizerConfig = SGD


CASES = {
    1: [
        Case("plain", "user:0,item:0", "table_wise"),
        Case("plain", "data_parallel", "row_wise", MANY),
    ],
    2: [
        Case("plain", "user:0,item:1", "auto"),
        Case("plain", "user:0-1,item:1", "row_wise"),
        Case("plain", "user:0-1,item:0-1", "column_wise"),
        Case("plain", "user:0-1,item:0", "row_wise", MANY),
        Case("normed", "user:1,item:0-1", "table_wise"),
        Case("shared", "tower_parallel", "row_wise"),
        Case("shared_normed", "user:1,place:0,item:0-1", "table_wise"),
        Case("session", "session:0-1,user:1", "row_wise"),
    ],
    4: [
        Case("plain", "data_parallel", "table_wise"),
        Case("plain", "user:0-2,item:3", "row_wise"),
        Case("plain", "user:1-3,item:3", "data_parallel"),
        Case("normed", "user:0-2,item:0+2", "column_wise"),
        Case("shared", "user:0-1,place:1,item:2-3", "table_column_wise"),
        Case("plain", "user:1-2,item:0", "row_wise", MANY),
    ],
}


def dense_of(model: nn.Module) -> dict[str, Tensor]:
    """Dense parameters, and the running statistics of batch norm."""
    results = {
        name: value
        for name, value in model.named_parameters()
        if "embeddings." not in name
    }
    return {
        **results,
        **{name: value for name, value in model.named_buffers() if "running" in name},
    }


def embedded(
    model: TowerModel, feed: Feed, rank: int, world_size: int
) -> dict[str, Tensor]:
    """Each tower's outputs of rows that ranks have unequal numbers of."""
    (batch,) = feed(1, 13, rank=rank, world_size=world_size)
    with torch.no_grad():
        return {name: model.eval().embed(name, batch).clone() for name in model._names}


@cache
def unsharded(model: str) -> dict[str, Any]:
    """Of plain modules and torch's SGD in one process."""
    make, feed = MODELS[model]
    made = make()
    initialise_tables(made, seed=7)
    tables = [value for name, value in made.named_parameters() if "embeddings." in name]
    dense = [
        value for name, value in made.named_parameters() if "embeddings." not in name
    ]
    optimizers = [
        torch.optim.SGD(tables, lr=SGD.tables_lr),
        torch.optim.SGD(dense, lr=SGD.dense_lr),
    ]
    results: dict[str, Any] = {"logits": []}
    for batch in feed(STEPS, rank=0, world_size=1):
        made.zero_grad()
        loss, output = made(batch)
        loss.backward()
        results.setdefault(
            "gradients",
            {name: value.grad.clone() for name, value in made.named_parameters()},
        )  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
        results["logits"].append(output.logits)
    state = {
        name: value.detach() for name, value in made.named_parameters()
    } | dense_of(made)
    return {
        **results,
        "state": state,
        "embedded": embedded(made, feed, 0, 1),
        "keys": set(made.state_dict()),
    }


def trained(runtime: Runtime, case: Case) -> dict[str, Any]:
    make, feed = MODELS[case.model]
    made = make(META)
    config = PlanConfig(sharding=case.sharding, towers=case.towers)  # type: ignore[arg-type]
    plan = plan_sharding(made, runtime, config, optimizer=case.optimizer)
    parallel, optimizer = hybrid_parallel(
        made, runtime, plan=plan, optimizer=case.optimizer, seed=7
    )
    pipeline = make_pipeline(parallel, optimizer, runtime.device)
    local = feed(STEPS, rank=runtime.rank, world_size=runtime.world_size)
    first = shards(parallel)
    logits = [pipeline.progress(local).logits]
    norm = optimizer.gradient_norm
    gradients = {
        name: value.grad.clone()
        for name, value in parallel.module.named_parameters()
        if value.grad is not None
    }
    second = shards(parallel)
    logits += [pipeline.progress(local).logits for _ in range(STEPS - 1)]
    modules = [type(module).__name__ for module in pipeline._pipelined_modules]
    results = {"pipelined": modules, "unpipelined": unpipelined(pipeline, parallel)}
    pipeline.detach()
    return {
        **results,
        "norm": norm,
        "logits": logits,
        "gradients": {
            name: value
            for name, value in gradients.items()
            if "embeddings." not in name
        },
        "moved": [
            (*index, before - after)
            for (*index, before), (*_, after) in zip(first, second, strict=True)
        ],
        "shards": shards(parallel),
        "dense": {
            name: value.detach().clone()
            for name, value in dense_of(parallel.module).items()
        },
        "embedded": embedded(parallel.module, feed, runtime.rank, runtime.world_size),
        "keys": set(parallel.state_dict()),
    }


def shards(model: nn.Module) -> list[Any]:
    return [
        (
            s.fqn,
            s.config.num_embeddings,
            s.config.embedding_dim,
            s.row,
            s.column,
            s.tensor.clone(),
        )
        for s in local_shards(model)
    ]


def whole(ranks: list[dict[str, Any]], key: str) -> dict[str, Tensor]:
    """Tables from the shards of all ranks; every cell must be there."""
    tables: dict[str, Tensor] = {}
    for fqn, rows, columns, row, column, shard in (
        shard for rank in ranks for shard in rank[key]
    ):
        table = tables.setdefault(fqn, torch.full((rows, columns), float("nan")))
        table[row : row + shard.shape[0], column : column + shard.shape[1]] = shard
    return tables


def one(ranks: list[dict[str, Any]], key: str) -> dict[str, Tensor]:
    """What ranks hold, which all that hold it hold alike."""
    results: dict[str, Tensor] = {}
    for rank in ranks:
        for name, value in rank[key].items():
            torch.testing.assert_close(
                results.setdefault(name, value), value, rtol=0, atol=1e-6
            )
    return results


def close(
    actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float
) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name],
            value,
            rtol=0,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def all_cases(runtime: Runtime) -> list[dict[str, Any]]:
    return [trained(runtime, case) for case in CASES[runtime.world_size]]


@cache
def ranks_of(world_size: int) -> dict[Case, list[dict[str, Any]]]:
    """By case what each rank found; one set of processes runs all cases of a number of ranks."""
    results = run_ranks(all_cases, world_size, timeout_s=300)
    return {
        case: [rank[index] for rank in results]
        for index, case in enumerate(CASES[world_size])
    }


SLOW_FROM_4: dict[int, list[pytest.MarkDecorator]] = {
    1: [],
    2: [],
    4: [pytest.mark.slow],
}
WITH_SGD = [
    pytest.param(size, case, marks=SLOW_FROM_4[size])
    for size, cases in CASES.items()
    for case in cases
    if case.optimizer is SGD
]


@pytest.mark.parametrize(("world_size", "case"), WITH_SGD)
def test_placed_towers_equal_the_unsharded_model(world_size: int, case: Case) -> None:
    ranks, expected = ranks_of(world_size)[case], unsharded(case.model)
    for step, logits in enumerate(expected["logits"]):
        tolerance = 1e-5 if step == 0 else 1e-4
        torch.testing.assert_close(
            torch.cat([rank["logits"][step] for rank in ranks]),
            logits,
            rtol=0,
            atol=tolerance,
        )
    gradients = {
        name: value / SGD.tables_lr for name, value in whole(ranks, "moved").items()
    } | one(ranks, "gradients")
    close(gradients, expected["gradients"], 1e-6)
    close(whole(ranks, "shards") | one(ranks, "dense"), expected["state"], 1e-4)


@pytest.mark.parametrize(("world_size", "case"), WITH_SGD)
def test_a_placed_tower_embeds_rows_that_ranks_have_unequal_numbers_of(
    world_size: int, case: Case
) -> None:
    ranks = ranks_of(world_size)[case]
    results = {
        name: torch.cat([rank["embedded"][name] for rank in ranks])
        for name in ranks[0]["embedded"]
    }
    close(results, unsharded(case.model)["embedded"], 1e-4)


@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        pytest.param(size, case, marks=SLOW_FROM_4[size])
        for size in (2, 4)
        for case in CASES[size]
        if case.optimizer is MANY
    ],
)
def test_every_optimizer_moves_placed_towers_as_it_moves_the_flat_model(
    world_size: int, case: Case
) -> None:
    """The norm of the whole gradient is limited, though no rank has it; settings hold on ranks without the tower."""
    flat, ranks = ranks_of(1)[CASES[1][1]], ranks_of(world_size)[case]
    assert flat[0]["norm"] > MANY.clip_norm
    for rank in ranks:
        torch.testing.assert_close(rank["norm"], flat[0]["norm"], rtol=1e-5, atol=0)
    close(
        whole(ranks, "shards") | one(ranks, "dense"),
        whole(flat, "shards") | one(flat, "dense"),
        1e-4,
    )


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_towers_are_pipelined_and_the_state_is_that_of_the_unsharded_model(
    world_size: int,
) -> None:
    for case, ranks in ranks_of(world_size).items():
        for rank in ranks:
            assert rank["unpipelined"] == []
            if case.towers != "data_parallel":
                assert rank["pipelined"] == ["ShardedTowers"]
        assert (
            set().union(*(rank["keys"] for rank in ranks))
            == unsharded(case.model)["keys"]
        )
    user, item = ranks_of(2)[CASES[2][0]]
    assert {
        name.split(".")[1] for name in user["keys"] if name.startswith("towers")
    } == {"user"}
    assert {
        name.split(".")[1] for name in item["keys"] if name.startswith("towers")
    } == {"item"}
