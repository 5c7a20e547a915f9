"""TorchRec's semi-sync pipeline: a prediction sees tables exactly one step old, and ranks are equal throughout."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contracts import gather_state, run_ranks
from tests.distributed.test_laws import assert_equal
from tests.examples import META, batches, small_model
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sync import SyncConfig
from torchrec_ext.distributed.tables import initialise_tables
from torchrec_ext.train.step.pipeline import make_pipeline, unpipelined

STEPS = 8
OPTIMIZERS = {
    "sgd": OptimizerConfig(tables="sgd", tables_lr=5.0, dense="sgd", dense_lr=0.5),
    # a table's by ShardedAdam
    "adam": OptimizerConfig(tables="adam", tables_lr=0.02, dense="sgd", dense_lr=0.5),
}
CASES = {
    "sgd, dense at once": ("sgd", False),
    "sgd, stashed": ("sgd", True),
    "adam, dense at once": ("adam", False),
}


def one_step_old(kind: str, stash: bool) -> dict[str, Any]:
    """The definition, in one process: look-ups in tables without the last update, their gradient applied after it."""
    model = small_model()
    initialise_tables(model, seed=7)
    tables = [p for name, p in model.named_parameters() if "embedding_bags" in name]
    dense = [p for name, p in model.named_parameters() if "embedding_bags" not in name]
    (make, arguments), *_ = (
        choice.unfused() for choice in OPTIMIZERS[kind].for_tables(model).values()
    )
    of_tables, of_dense = make(tables, **arguments), torch.optim.SGD(dense, lr=0.5)
    logits, before = [], [table.detach().clone() for table in tables]
    for number, batch in enumerate(batches(STEPS)):
        now = written(tables, before)
        stashed = [p.grad for p in dense]
        model.zero_grad()
        loss, output = model(batch)
        loss.backward()
        logits.append(output.logits)
        before = now
        written(tables, now)
        of_tables.step()
        fresh = [p.grad for p in dense]
        if stash:
            for parameter, gradient in zip(dense, stashed, strict=True):
                parameter.grad = gradient
        if number or not stash:
            of_dense.step()
        for parameter, gradient in zip(dense, fresh, strict=True):
            parameter.grad = gradient
    return {
        "logits": logits,
        "state": {name: p.detach() for name, p in model.named_parameters()},
    }


def written(tables: list[torch.nn.Parameter], values: list[Tensor]) -> list[Tensor]:
    """Writes ``values`` into ``tables`` and returns what stood there."""
    stood = [table.detach().clone() for table in tables]
    for table, value in zip(tables, values, strict=True):
        table.data.copy_(value)
    return stood


def semi_sync(runtime: Runtime) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (kind, stash) in CASES.items():
        model = small_model(META)
        plan = plan_sharding(
            model, runtime, PlanConfig(sharding="row_wise"), optimizer=OPTIMIZERS[kind]
        )
        parallel, keyed = hybrid_parallel(
            model, runtime, plan=plan, optimizer=OPTIMIZERS[kind], seed=7
        )
        pipeline = make_pipeline(
            parallel,
            keyed,
            runtime.device,
            sync=SyncConfig(mode="semi_sync", stash_gradients=stash),
        )
        own = batches(STEPS, rank=runtime.rank, world_size=runtime.world_size)
        logits = [pipeline.progress(own).logits for _ in range(STEPS)]
        found[name] = {
            "logits": logits,
            "state": gather_state(parallel),
            "unpipelined": unpipelined(pipeline, parallel),
        }
        found[name]["dense"] = [
            parameter.detach().clone() for parameter in keyed.dense_parameters
        ]
    model = small_model(META)
    replicated, keyed = hybrid_parallel(
        model,
        runtime,
        plan=plan_sharding(model, runtime, PlanConfig(sharding="data_parallel")),
    )
    with pytest.raises(ValueError, match="semi_sync: table") as refused:
        make_pipeline(
            replicated, keyed, runtime.device, sync=SyncConfig(mode="semi_sync")
        )
    sharded, keyed = hybrid_parallel(
        small_model(META), runtime, plan=plan, optimizer=OPTIMIZERS["adam"]
    )
    with pytest.raises(
        ValueError, match=r"^sync.stash_gradients: no kernel runs this device's adam"
    ):
        make_pipeline(
            sharded,
            keyed,
            runtime.device,
            sync=SyncConfig(mode="semi_sync", stash_gradients=True),
        )
    return {**found, "refused": str(refused.value)}


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(semi_sync, 2)


@pytest.mark.parametrize("name", CASES)
def test_semi_sync_is_its_definition_of_one_step_of_staleness(
    two_ranks: list[dict[str, Any]], name: str
) -> None:
    expected = one_step_old(*CASES[name])
    for step, logits in enumerate(expected["logits"]):
        both = torch.cat([rank[name]["logits"][step] for rank in two_ranks])
        torch.testing.assert_close(both, logits, rtol=0, atol=1e-4)
    assert_equal(two_ranks[0][name]["state"], expected["state"], 1e-4)
    assert two_ranks[0][name]["unpipelined"] == []


def test_dense_layers_are_the_same_on_every_rank(
    two_ranks: list[dict[str, Any]],
) -> None:
    for name in CASES:
        assert all(
            torch.equal(*pair)
            for pair in zip(*(rank[name]["dense"] for rank in two_ranks), strict=True)
        )


def test_a_replicated_table_is_refused_by_name(two_ranks: list[dict[str, Any]]) -> None:
    told = two_ranks[0]["refused"]
    assert all(table in told for table in ("user_id", "history", "item_id"))
    assert told.endswith("set plan.sharding=table_wise, or another sync.mode")
