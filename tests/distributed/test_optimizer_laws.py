"""Every optimizer, weight decay, clipping and exception: ranks and plans change nothing, over real gloo processes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.contracts import gather_state, run_ranks
from tests.examples import META, USERS, batches, small_model
from torchrec_ext.distributed.optimizers import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.planning import PlanConfig, plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.tables import initialise_tables
from torchrec_ext.train.pipelines import make_pipeline

STEPS = 20
EXCEPTIONS = OptimizerConfig(
    tables="row_wise_adagrad",
    tables_lr=0.1,
    per_table=("user_id=adam lr=0.02", "towers.item=sgd lr=2", "history=weight_decay=0.3"),
    per_layer=("towers.user=sgd lr=0.05", "interaction=lr=0.003 weight_decay=0.1", "*.bias=weight_decay=0"),
    dense_weight_decay=0.2,
)


def cases() -> Iterator[tuple[str, PlanConfig, OptimizerConfig]]:
    """(name, plan, optimizer)."""
    for kind in ("adam", "lazy_adam", "partial_row_wise_adam", "lamb"):
        yield kind, PlanConfig(), OptimizerConfig(tables=kind, tables_lr=0.02)  # type: ignore[arg-type]
    for sharding in ("table_wise", "row_wise", "column_wise", "data_parallel"):
        plan = PlanConfig(sharding=sharding)  # type: ignore[arg-type]
        yield f"decay, {sharding}", plan, OptimizerConfig(tables_lr=0.1, tables_weight_decay=0.5, dense_weight_decay=1.0)
    plan = PlanConfig(sharding="row_wise", tables=("user_id=data_parallel", "item_id=table_wise"))
    yield "exceptions", plan, EXCEPTIONS
    clipped = OptimizerConfig(tables="sgd", tables_lr=1.0, dense="sgd", dense_lr=0.5, clip_norm=0.05)
    yield "clipped", PlanConfig(sharding="data_parallel"), clipped


def unsharded(optimizer: OptimizerConfig) -> dict[str, Tensor]:
    """Weights after 20 steps of plain modules and torch's optimizers in one process, with the decay and the clipping by hand."""
    model = small_model()
    initialise_tables(model, seed=7)
    parameters = dict(model.named_parameters())
    tables = {name: name.split(".")[-2] for name in parameters if "embedding_bags" in name}
    choices = {name: optimizer.for_tables(model)[table] for name, table in tables.items()}
    choices |= optimizer.for_layers([name for name in parameters if name not in tables])
    optimizers = []
    for name, parameter in parameters.items():
        make, arguments = choices[name].unfused()
        optimizers.append(make([parameter], **arguments))
    for batch in batches(STEPS):
        model.zero_grad()
        model(batch)[0].backward()
        if optimizer.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), optimizer.clip_norm)
        for name, parameter in parameters.items():
            rows = parameter.grad.ne(0).any(dim=1) if name in tables else slice(None)  # type: ignore[union-attr]
            with torch.no_grad():
                parameter[rows] *= 1 - choices[name].lr * choices[name].weight_decay
        for o in optimizers:
            o.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def sharded(runtime: Runtime) -> dict[str, Any]:
    """The kinds of sharding and the weights after 20 steps, of each case."""
    learned = {}
    for name, plan_config, optimizer in cases():
        model = small_model(META)
        plan = plan_sharding(model, runtime, plan_config, optimizer=optimizer)
        kinds = {table: kind.sharding_type for module in plan.plan.values() for table, kind in module.items()}  # type: ignore[attr-defined]
        parallel, keyed = hybrid_parallel(model, runtime, plan=plan, optimizer=optimizer, seed=7)
        pipeline = make_pipeline(parallel, keyed, runtime.device)
        own = batches(STEPS, rank=runtime.rank, world_size=runtime.world_size)
        for _ in range(STEPS):
            pipeline.progress(own)
        learned[name] = {"kinds": kinds, "state": gather_state(parallel)}
    return learned


@pytest.fixture(scope="module", params=[1, 2])
def learned(request: pytest.FixtureRequest) -> Any:
    return run_ranks(sharded, request.param)[0]


def test_every_optimizer_learns_the_same_on_any_number_of_ranks_as_unsharded(learned: Any) -> None:
    for name, _, optimizer in cases():
        expected = unsharded(optimizer)
        for key, value in expected.items():
            actual = learned[name]["state"][key]
            torch.testing.assert_close(actual, value, rtol=0, atol=1e-4, msg=lambda text, at=f"{name}, {key}": f"{at}: {text}")


def test_what_no_cpu_kernel_runs_is_kept_on_every_rank_and_the_rest_is_sharded_as_asked(learned: Any) -> None:
    for kind in ("adam", "lazy_adam", "partial_row_wise_adam", "lamb"):
        assert set(learned[kind]["kinds"].values()) == {"data_parallel"}
    assert learned["exceptions"]["kinds"] == {"user_id": "data_parallel", "history": "row_wise", "item_id": "table_wise"}


def shrunk(runtime: Runtime, sharding: str) -> dict[str, Tensor]:
    """The user table before and after one step in which it is read by rows of which the first has weight 0, as padding has."""
    model = small_model(META)
    optimizer = OptimizerConfig(tables="sgd", tables_lr=1e-9, tables_weight_decay=0.5e9)
    plan = plan_sharding(model, runtime, PlanConfig(sharding=sharding))  # type: ignore[arg-type]
    parallel, keyed = hybrid_parallel(model, runtime, plan=plan, optimizer=optimizer)
    (batch,) = batches(1)
    batch.weights[0] = 0
    users = batch.sparse["user_id"].values()
    users[0] = next(user for user in range(USERS) if user not in users.tolist())
    before = next(value for name, value in gather_state(parallel).items() if "user_id" in name)  # type: ignore[union-attr]
    make_pipeline(parallel, keyed, runtime.device).progress(iter([batch]))
    after = next(value for name, value in gather_state(parallel).items() if "user_id" in name)  # type: ignore[union-attr]
    return {"users": users, "before": before, "after": after}


@pytest.mark.parametrize("sharding", ["table_wise", "data_parallel"])
def test_weight_decay_halves_the_rows_that_were_learned_from_and_no_other(sharding: str) -> None:
    (ran,) = run_ranks(shrunk, 1, sharding)
    factor = torch.ones(USERS, 1)
    factor[ran["users"][1:]] = 0.5
    assert factor[ran["users"][0]] == 1, "a row of padding"
    torch.testing.assert_close(ran["after"], ran["before"] * factor, rtol=0, atol=1e-6)


def refused(runtime: Runtime) -> str:
    model = small_model(META)
    plan = plan_sharding(model, runtime, PlanConfig(sharding="table_wise"))
    try:
        hybrid_parallel(model, runtime, plan=plan, optimizer=OptimizerConfig(per_table=("item_id=adam",)))
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_plan_made_for_another_optimizer_is_refused_before_anything_is_sharded() -> None:
    assert run_ranks(refused, 1)[0].startswith(
        "table 'item_id': no kernel of the cpu runs the optimizer adam on a table_wise table"
    )
