"""Sharded equals unsharded, for every sharding type and number of ranks, over real gloo processes."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType

from tests.contracts import gather_state, run_ranks
from tests.examples import META, batches, small_model
from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig, TablePlan
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.tables import fill_tables, initialise_tables, local_shards
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.interaction import TopMLP
from torchrec_ext.modules.tower import Tower
from torchrec_ext.schema import Jagged
from torchrec_ext.train.step.pipeline import make_pipeline, unpipelined

BY_HOST = ("table_row_wise", "grid_shard")
SHARDINGS = (
    "table_wise",
    "row_wise",
    "column_wise",
    "table_column_wise",
    "data_parallel",
    *BY_HOST,
)
STEPS = 20


def unsharded(optimizer: OptimizerConfig) -> dict[str, Any]:
    """Predictions, and weights after 20 steps, of plain modules and plain torch optimizers in one process."""
    model = small_model()
    initialise_tables(model, seed=7)
    tables = [p for name, p in model.named_parameters() if "embedding_bags" in name]
    dense = [p for name, p in model.named_parameters() if "embedding_bags" not in name]
    (of_tables, *_) = optimizer.for_tables(model).values()
    (of_layers, *_) = optimizer.for_layers(["top"]).values()
    optimizers = [
        make(values, **arguments)
        for values, (make, arguments) in (
            (tables, of_tables.unfused()),
            (dense, of_layers.unfused()),
        )
    ]
    logits, losses = [], []
    for batch in batches(STEPS):
        for o in optimizers:
            o.zero_grad()
        loss, output = model(batch)
        loss.backward()
        for o in optimizers:
            o.step()
        logits.append(output.logits)
        losses.append(float(output.loss))
    return {
        "logits": logits,
        "losses": losses,
        "state": {name: p.detach() for name, p in model.named_parameters()},
    }


def sharded(
    runtime: Runtime, sharding: str, optimizer: OptimizerConfig
) -> dict[str, Any]:
    model = small_model(META)
    plan = plan_sharding(model, runtime, PlanConfig(sharding=sharding))  # type: ignore[arg-type]
    kinds = {
        kind.sharding_type for module in plan.plan.values() for kind in module.values()
    }  # type: ignore[attr-defined]
    parallel, keyed = hybrid_parallel(
        model, runtime, plan=plan, optimizer=optimizer, seed=7
    )
    first = gather_state(parallel)
    pipeline = make_pipeline(parallel, keyed, runtime.device)
    local = batches(STEPS, rank=runtime.rank, world_size=runtime.world_size)
    outputs = [pipeline.progress(local) for _ in range(STEPS)]
    return {
        "kinds": kinds,
        "first": first,
        "logits": [output.logits for output in outputs],
        "losses": [float(output.loss) for output in outputs],
        "state": gather_state(parallel),
        "pipelined": len(pipeline._pipelined_modules),
        "unpipelined": unpipelined(pipeline, parallel),
    }


def on_hosts(runtime: Runtime, local: int) -> Runtime:
    """This rank as one of a job on hosts of ``local`` ranks each, which TorchRec reads from the environment."""
    os.environ.update(LOCAL_WORLD_SIZE=str(local), LOCAL_RANK=str(runtime.rank % local))
    return dataclasses.replace(
        runtime, local_world_size=local, local_rank=runtime.rank % local
    )


def sharded_on_hosts(
    runtime: Runtime, local: int, sharding: str, optimizer: OptimizerConfig
) -> dict[str, Any]:
    return sharded(on_hosts(runtime, local), sharding, optimizer)


def assert_equal(
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


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("kind", ["adagrad", "sgd"])
def test_sharded_equals_unsharded(sharding: str, world_size: int, kind: str) -> None:
    # SGD with rates at which an error of scale shows: doubled gradients would move the
    # tables by much more than the tolerance.
    optimizer = (
        OptimizerConfig(tables=kind, tables_lr=0.1)
        if kind == "adagrad"
        else OptimizerConfig(tables="sgd", tables_lr=5.0, dense="sgd", dense_lr=0.5)
    )
    expected = unsharded(optimizer)
    ranks = run_ranks(sharded, world_size, sharding, optimizer)
    assert ranks[0]["kinds"] == {sharding}
    first = torch.cat([rank["logits"][0] for rank in ranks])
    torch.testing.assert_close(first, expected["logits"][0], rtol=0, atol=1e-5)
    assert_equal(ranks[0]["state"], expected["state"], 1e-4)
    mean = [
        sum(losses) / world_size
        for losses in zip(*(rank["losses"] for rank in ranks), strict=True)
    ]
    torch.testing.assert_close(
        torch.tensor(mean), torch.tensor(expected["losses"]), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("sharding", BY_HOST)
@pytest.mark.parametrize(
    ("world_size", "local"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)]
)
def test_sharded_by_host_equals_unsharded(
    sharding: str, world_size: int, local: int
) -> None:
    optimizer = OptimizerConfig(tables="sgd", tables_lr=5.0, dense="sgd", dense_lr=0.5)
    expected = unsharded(optimizer)
    ranks = run_ranks(sharded_on_hosts, world_size, local, sharding, optimizer)
    assert ranks[0]["kinds"] == {sharding}
    first = torch.cat([rank["logits"][0] for rank in ranks])
    torch.testing.assert_close(first, expected["logits"][0], rtol=0, atol=1e-5)
    assert_equal(ranks[0]["state"], expected["state"], 1e-4)


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "data_parallel"])
def test_row_wise_adagrad_equals_unsharded_where_rows_are_whole(sharding: str) -> None:
    optimizer = OptimizerConfig(tables="row_wise_adagrad", tables_lr=0.1)
    assert_equal(
        run_ranks(sharded, 2, sharding, optimizer)[0]["state"],
        unsharded(optimizer)["state"],
        1e-4,
    )


@pytest.mark.parametrize(
    ("shardings", "most"),
    [
        (("row_wise", "column_wise"), 2),
        pytest.param(SHARDINGS, 3, marks=pytest.mark.slow),
    ],
)
def test_the_seed_alone_decides_the_first_tables(
    shardings: Sequence[str], most: int
) -> None:
    states = [
        run_ranks(sharded, world_size, sharding, OptimizerConfig())[0]["first"]
        for sharding in shardings
        for world_size in range(1, most + 1)
    ]
    for state in states[1:]:
        assert_equal(state, states[0], 0.0)
    tables = [value for name, value in states[0].items() if "embedding_bags" in name]
    assert len(tables) == 3
    assert all(len(value.unique()) > value.numel() // 2 for value in tables)


def test_the_look_ups_of_both_towers_are_pipelined_as_one() -> None:
    for rank in run_ranks(sharded, 2, "row_wise", OptimizerConfig()):
        assert rank["pipelined"] == 1
        assert rank["unpipelined"] == []


def filled(runtime: Runtime, sharding: str) -> dict[str, Tensor] | None:
    model = small_model(META)
    plan = plan_sharding(model, runtime, PlanConfig(sharding=sharding))  # type: ignore[arg-type]
    parallel, _ = hybrid_parallel(model, runtime, plan=plan)
    fill_tables(
        parallel,
        lambda fqn, config, start, stop: _numbered(start, stop, config.embedding_dim),
    )
    return gather_state(parallel)


def _numbered(start: int, stop: int, width: int) -> Tensor:
    return (
        torch.arange(start, stop).float()[:, None] * 100 + torch.arange(width).float()
    )


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_filling_shards_writes_each_row_where_it_belongs(sharding: str) -> None:
    state = run_ranks(filled, 2, sharding)[0]
    for name, value in state.items():
        if "embedding_bags" in name:
            torch.testing.assert_close(
                value, _numbered(0, *value.shape), rtol=0, atol=0
            )


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["fused_uvm", "fused_uvm_caching"])
def test_rows_off_the_gpu_train_as_those_on_it(kernel: str) -> None:
    states = []
    for chosen in ("fused", kernel):
        with Runtime.start("cuda") as runtime:
            model = small_model(META)
            factor = 0.1 if chosen == "fused_uvm_caching" else 0.0
            config = PlanConfig(
                sharding="table_wise", kernel=chosen, cache_load_factor=factor
            )  # type: ignore[arg-type]
            plan = plan_sharding(model, runtime, config)
            parallel, keyed = hybrid_parallel(model, runtime, plan=plan, seed=7)
            for step, batch in enumerate(batches(6)):
                keyed.zero_grad()
                parallel(batch.to(runtime.device))[0].backward()
                keyed.step()
                if step == 2:
                    # what is written into the tables is what the next step reads
                    for shard in local_shards(parallel):
                        shard.tensor.mul_(0.5)
            states.append(gather_state(parallel))
    assert_equal(states[1], states[0], 1e-5)


POOLINGS = {"a": PoolingType.MEAN, "b": PoolingType.MEAN, "c": PoolingType.SUM}


def means_and_sums(device: torch.device) -> TowerModel:
    tables = [
        EmbeddingBagConfig(
            name=name,
            feature_names=[name],
            num_embeddings=20,
            embedding_dim=16,
            pooling=pooling,
        )
        for name, pooling in POOLINGS.items()
    ]
    return TowerModel({"user": Tower(tables, ())}, TopMLP([48]), device=device)


def pooled(model: TowerModel, vectors: Callable[[TowerBatch], list[Tensor]]) -> Tensor:
    lengths = torch.tensor([1, 3, 2])
    ids = {
        name: Jagged(torch.arange(6) + shift, lengths)
        for shift, name in enumerate(POOLINGS)
    }
    with torch.no_grad():
        return vectors(model.schema().assemble(ids, {}, labels=torch.zeros(3)))[0]


def pooled_on_ranks(
    runtime: Runtime, plans: list[dict[str, TablePlan]]
) -> list[Tensor]:
    results = []
    for tables in plans:
        model = means_and_sums(META)
        parallel, _ = hybrid_parallel(
            model,
            runtime,
            plan=plan_sharding(model, runtime, PlanConfig(tables=tables)),
            seed=3,
        )
        results.append(pooled(model, parallel.module.outputs))
    return results


def test_a_mean_beside_row_wise_tables_is_divided_once() -> None:
    # TorchRec 1.8 alone divides the bags of every other table a second time where one
    # row-wise table is pooled by MEAN.
    model = means_and_sums(torch.device("cpu"))
    initialise_tables(model, 3)
    expected = pooled(model, model.outputs)
    kinds = ("row_wise", "table_wise", "column_wise", "data_parallel")
    plans = []
    for chosen in permutations(kinds, 3):
        plans.append(
            {
                name: TablePlan(sharding=kind)  # type: ignore[arg-type]
                for name, kind in zip("abc", chosen, strict=True)
            }
        )
    for ranks in run_ranks(pooled_on_ranks, 2, plans):
        for plan, vectors in zip(plans, ranks, strict=True):
            torch.testing.assert_close(
                vectors,
                expected,
                rtol=0,
                atol=1e-5,
                msg=lambda text, plan=plan: f"{plan}: {text}",
            )


def both_readers(device: torch.device) -> TowerModel:
    tables = [
        EmbeddingBagConfig(
            name=name,
            feature_names=["a"],
            num_embeddings=20,
            embedding_dim=16,
            pooling=PoolingType.MEAN,
        )
        for name in ("one", "other")
    ]
    return TowerModel({"user": Tower(tables, ())}, TopMLP([32]), device=device)


def pooled_by_both(
    model: TowerModel, vectors: Callable[[TowerBatch], list[Tensor]]
) -> Tensor:
    ids = {"a": Jagged(torch.arange(6), torch.tensor([1, 3, 2]))}
    with torch.no_grad():
        return vectors(model.schema().assemble(ids, {}, labels=torch.zeros(3)))[0]


def feature_of_both(runtime: Runtime) -> Tensor:
    model = both_readers(META)
    plan = plan_sharding(
        model,
        runtime,
        PlanConfig(
            tables={
                "one": TablePlan(sharding="row_wise"),
                "other": TablePlan(sharding="table_wise"),
            }
        ),
    )
    parallel, _ = hybrid_parallel(model, runtime, plan=plan, seed=3)
    return pooled_by_both(model, parallel.module.outputs)


def test_a_feature_of_a_row_wise_mean_and_of_another_table_has_the_mean_in_both() -> (
    None
):
    model = both_readers(torch.device("cpu"))
    initialise_tables(model, 3)
    for vectors in run_ranks(feature_of_both, 2):
        torch.testing.assert_close(
            vectors, pooled_by_both(model, model.outputs), rtol=0, atol=1e-5
        )
