"""Copies of the sharded tables (TorchRec's 2D parallelism): at an interval of 1 only the exchange is different."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contracts import gather_state, run_ranks
from tests.distributed.test_laws import assert_equal
from tests.distributed.test_sync import SGD, steps
from tests.examples import META, small_model
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sync import SyncConfig, synchronised
from torchrec_ext.distributed.tables import local_shards

STEPS = 7
SHARDINGS = ("table_wise", "row_wise")
ADAGRAD = OptimizerConfig(tables="adagrad", tables_lr=0.1)


def made(
    runtime: Runtime, sharding: str, optimizer: OptimizerConfig, copies: int
) -> Any:
    model = small_model(META)
    config = PlanConfig(sharding=sharding)  # type: ignore[arg-type]
    plan = plan_sharding(
        model, runtime, config, optimizer=optimizer, table_copies=copies
    )
    return hybrid_parallel(
        model, runtime, plan=plan, optimizer=optimizer, seed=7, table_copies=copies
    )


def ran(
    runtime: Runtime,
    sharding: str,
    optimizer: OptimizerConfig,
    sync: SyncConfig,
    taken: int = STEPS,
) -> dict[str, Any]:
    """A rank's own rows after each step and when settled, and the weights then."""
    parallel, keyed = made(runtime, sharding, optimizer, sync.table_copies)
    rows = []
    with synchronised(parallel, keyed, sync) as ranks:
        step = steps(runtime, parallel, keyed, sync, taken + 1)
        for _ in range(taken):
            step()
            rows.append(own_rows(parallel))
        ranks.settle()
    return {"rows": [*rows, own_rows(parallel)], "state": gather_state(parallel)}


def own_rows(parallel: torch.nn.Module) -> list[tuple[str, int, int, Tensor]]:
    return [
        (shard.fqn, shard.row, shard.column, shard.tensor.clone())
        for shard in local_shards(parallel)
    ]


def laws(runtime: Runtime) -> dict[str, Any]:
    results: dict[str, Any] = {"one": ran(runtime, "row_wise", SGD, SyncConfig())}
    for sharding in SHARDINGS:
        results[f"two, {sharding}"] = ran(
            runtime, sharding, SGD, SyncConfig(table_copies=2)
        )
    results["every 3"] = ran(
        runtime, "row_wise", ADAGRAD, SyncConfig(table_copies=2, tables_every=3)
    )
    results["semi-sync"] = ran(
        runtime,
        "row_wise",
        ADAGRAD,
        SyncConfig(mode="semi_sync", table_copies=2, tables_every=3),
    )
    local = SyncConfig(mode="local_sgd", every=3, table_copies=2, tables_every=3)
    results["local SGD"] = ran(runtime, "row_wise", ADAGRAD, local)
    results["refused"] = refused(runtime)
    return results


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, Any]]:
    return run_ranks(laws, 4)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_with_sgd_two_copies_averaged_in_every_step_are_one(
    four_ranks: list[Any], sharding: str
) -> None:
    assert_equal(
        four_ranks[0][f"two, {sharding}"]["state"], four_ranks[0]["one"]["state"], 1e-5
    )


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("every 3", [1, 0, 0, 1, 0, 0, 1, 1]), ("semi-sync", [1, 0, 0, 1, 0, 0, 1, 1])],
)
def test_copies_are_equal_every_third_step_and_when_settled(
    four_ranks: list[Any], mode: str, expected: list[int]
) -> None:
    # Ranks 0 and 1 hold the same rows, and so do 2 and 3: copies stand side by side on
    # a host.
    for first, second in ((0, 1), (2, 3)):
        pairs = zip(
            four_ranks[first][mode]["rows"],
            four_ranks[second][mode]["rows"],
            strict=True,
        )
        assert [same(one, other) for one, other in pairs] == expected


def test_local_steps_of_the_dense_part_go_with_copies_of_the_tables(
    four_ranks: list[Any],
) -> None:
    *apart, settled = zip(
        four_ranks[0]["local SGD"]["rows"],
        four_ranks[1]["local SGD"]["rows"],
        strict=True,
    )
    assert same(*settled)
    assert not all(same(*pair) for pair in apart)


def same(
    one: list[tuple[str, int, int, Tensor]], other: list[tuple[str, int, int, Tensor]]
) -> int:
    """1 where two ranks hold the same rows with the same values."""
    assert [shard[:3] for shard in one] == [shard[:3] for shard in other]
    return int(
        all(
            torch.equal(first[3], second[3])
            for first, second in zip(one, other, strict=True)
        )
    )


def refused(runtime: Runtime) -> list[str]:
    """What is told of a number of copies that does not divide the ranks, and of tables that adam moves."""
    messages = []
    for copies, kind in ((3, "adagrad"), (2, "adam")):
        with pytest.raises(ValueError, match=r"^sync\.table_copies") as error:
            made(runtime, "row_wise", OptimizerConfig(tables=kind), copies)  # type: ignore[arg-type]
        messages.append(str(error.value))
    return messages


def test_what_cannot_be_copied_is_refused_on_every_rank(four_ranks: list[Any]) -> None:
    for rank in four_ranks:
        ranks, adam = rank["refused"]
        assert ranks == "sync.table_copies=3: must divide the number of ranks, 4"
        assert adam.startswith(
            "sync.table_copies: the state of table 'user_id' (adam) is not averaged; set optimizer.per_table="
        )


@pytest.mark.unit
def test_an_interval_without_copies_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^tables_every=8: only for table_copies of 2 or more$"
    ):
        SyncConfig(tables_every=8)
