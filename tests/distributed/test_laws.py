"""Sharded equals unsharded, for every sharding type and number of ranks, over real gloo processes."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from itertools import permutations, product
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


# With SGD an error of scale shows: doubled gradients would move the tables by much more
# than the tolerance. One sum a row is that of unsharded rows while these are whole.
OPTIMIZERS = {
    "adagrad": OptimizerConfig(tables="adagrad", tables_lr=0.1),
    "sgd": OptimizerConfig(tables="sgd", tables_lr=5.0, dense="sgd", dense_lr=0.5),
    "row_wise_adagrad": OptimizerConfig(tables="row_wise_adagrad", tables_lr=0.1),
}
CASES = [
    *product(("adagrad", "sgd"), SHARDINGS),
    *product(["row_wise_adagrad"], ("table_wise", "row_wise", "data_parallel")),
]
Found = dict[Any, dict[str, Any]]


def all_sharded(
    runtime: Runtime, cases: Sequence[tuple[str, str]], local: int = 0
) -> Found:
    """Each case, on hosts of ``local`` ranks if that is given."""
    if local:
        # TorchRec reads them from the environment.
        os.environ.update(
            LOCAL_WORLD_SIZE=str(local), LOCAL_RANK=str(runtime.rank % local)
        )
        runtime = dataclasses.replace(
            runtime, local_world_size=local, local_rank=runtime.rank % local
        )
    found: Found = {}
    for kind, sharding in cases:
        found[kind, sharding] = sharded(runtime, sharding, OPTIMIZERS[kind])
        found[kind, sharding]["filled"] = filled(runtime, sharding)
    return found


@pytest.fixture(scope="module")
def by_ranks() -> dict[int, list[Found]]:
    return {ranks: run_ranks(all_sharded, ranks, CASES) for ranks in (1, 2)}


@pytest.fixture(scope="module")
def expected() -> Found:
    return {kind: unsharded(optimizer) for kind, optimizer in OPTIMIZERS.items()}


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


def check_case(case: tuple[str, str], ranks: Sequence[Found], expected: Found) -> None:
    kind, sharding = case
    found = [rank[case] for rank in ranks]
    assert found[0]["kinds"] == {sharding}
    first = torch.cat([rank["logits"][0] for rank in found])
    torch.testing.assert_close(first, expected[kind]["logits"][0], rtol=0, atol=1e-5)
    assert_equal(found[0]["state"], expected[kind]["state"], 1e-4)
    mean = torch.tensor([rank["losses"] for rank in found]).mean(0)
    torch.testing.assert_close(
        mean, torch.tensor(expected[kind]["losses"]), rtol=0, atol=1e-4
    )
    # Both towers' look-ups as one.
    assert all(rank["pipelined"] == 1 for rank in found)
    assert all(rank["unpipelined"] == [] for rank in found)
    for name, value in found[0]["filled"].items():
        if "embedding_bags" in name:
            assert torch.equal(value, _numbered(0, *value.shape)), "a row is elsewhere"


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_sharded_equals_unsharded(
    case: tuple[str, str],
    world_size: int,
    by_ranks: dict[int, list[Found]],
    expected: Found,
) -> None:
    check_case(case, by_ranks[world_size], expected)


@pytest.mark.parametrize(
    ("world_size", "local"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)]
)
def test_sharded_by_host_equals_unsharded(
    world_size: int, local: int, expected: Found
) -> None:
    cases = [("sgd", sharding) for sharding in BY_HOST]
    ranks = run_ranks(all_sharded, world_size, cases, local)
    for case in cases:
        check_case(case, ranks, expected)


def check_first_tables(states: Sequence[dict[str, Tensor]]) -> None:
    for state in states[1:]:
        assert_equal(state, states[0], 0.0)
    tables = [value for name, value in states[0].items() if "embedding_bags" in name]
    assert len(tables) == 3
    assert all(len(value.unique()) > value.numel() // 2 for value in tables)


def test_the_seed_alone_decides_the_first_tables(
    by_ranks: dict[int, list[Found]],
) -> None:
    check_first_tables(
        [case["first"] for ranks in by_ranks.values() for case in ranks[0].values()]
    )


@pytest.mark.slow
def test_the_seed_alone_decides_the_first_tables_on_three_ranks_too(
    by_ranks: dict[int, list[Found]],
) -> None:
    three = run_ranks(all_sharded, 3, CASES)[0]
    one = by_ranks[1][0]
    check_first_tables(
        [*(case["first"] for case in three.values()), one[CASES[0]]["first"]]
    )


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


SHIFTS = {"a": 0, "b": 1, "c": 2}
# Tables by name: feature, pooling.
MEANS = {
    "beside a sum": {
        "a": ("a", PoolingType.MEAN),
        "b": ("b", PoolingType.MEAN),
        "c": ("c", PoolingType.SUM),
    },
    "of one feature": {"a": ("a", PoolingType.MEAN), "b": ("a", PoolingType.MEAN)},
}


def pooling_model(name: str, device: torch.device) -> TowerModel:
    tables = [
        EmbeddingBagConfig(
            name=table,
            feature_names=[feature],
            num_embeddings=20,
            embedding_dim=16,
            pooling=pooling,
        )
        for table, (feature, pooling) in MEANS[name].items()
    ]
    width = 16 * len(tables)
    return TowerModel({"user": Tower(tables, ())}, TopMLP([width]), device=device)


def pooled(model: TowerModel, vectors: Callable[[TowerBatch], list[Tensor]]) -> Tensor:
    lengths = torch.tensor([1, 3, 2])
    ids = {
        name: Jagged(torch.arange(6) + SHIFTS[name], lengths)
        for name in model.schema().keys
    }
    with torch.no_grad():
        return vectors(model.schema().assemble(ids, {}, labels=torch.zeros(3)))[0]


def pooled_on_ranks(
    runtime: Runtime, plans: list[tuple[str, dict[str, TablePlan]]]
) -> list[Tensor]:
    results = []
    for name, tables in plans:
        model = pooling_model(name, META)
        plan = plan_sharding(model, runtime, PlanConfig(tables=tables))
        parallel, _ = hybrid_parallel(model, runtime, plan=plan, seed=3)
        results.append(pooled(model, parallel.module.outputs))
    return results


def test_a_mean_beside_row_wise_tables_is_divided_once() -> None:
    # TorchRec 1.8 alone divides the bags of every other table a second time where one
    # row-wise table is pooled by MEAN.
    expected = {}
    for name in MEANS:
        model = pooling_model(name, torch.device("cpu"))
        initialise_tables(model, 3)
        expected[name] = pooled(model, model.outputs)
    kinds = ("row_wise", "table_wise", "column_wise", "data_parallel")
    plans = []
    for name, tables in MEANS.items():
        for chosen in permutations(kinds, len(tables)):
            of_tables = [TablePlan(sharding=kind) for kind in chosen]  # type: ignore[arg-type]
            plans.append((name, dict(zip(tables, of_tables, strict=True))))
    for ranks in run_ranks(pooled_on_ranks, 2, plans):
        for (name, plan), vectors in zip(plans, ranks, strict=True):
            torch.testing.assert_close(
                vectors,
                expected[name],
                rtol=0,
                atol=1e-5,
                msg=lambda text, plan=plan: f"{plan}: {text}",
            )
