"""Every sync mode trains; which modes equal which, and what ranks exchange, over real gloo processes."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.contracts import gather_state, run_ranks
from tests.examples import META, batches, small_model
from tests.sharded import assert_close
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.optim.hybrid import HybridOptimizer
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sync import (
    WHOLE_WEIGHTS,
    Averager,
    LocalSGD,
    SyncConfig,
    synchronised,
)
from torchrec_ext.modules.layers import BatchNorm
from torchrec_ext.modules.tower import Tower
from torchrec_ext.train.step.pipeline import make_pipeline

SGD = OptimizerConfig(tables="sgd", tables_lr=5.0, dense="sgd", dense_lr=0.5)
ADAM = OptimizerConfig(tables="adam", tables_lr=0.01, dense="adam", dense_lr=0.01)
STEPS = 12
SHARDINGS = ("data_parallel", "row_wise")
DILOCO: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.9}


def made(runtime: Runtime, sharding: str, optimizer: OptimizerConfig = SGD) -> Any:
    model = small_model(META)
    return hybrid_parallel(
        model, runtime, plan=PlanConfig(sharding=sharding), optimizer=optimizer, seed=7
    )


def whole(model: nn.Module, optimizer: HybridOptimizer) -> list[Tensor]:
    """Copies of what this rank holds whole."""
    return [
        parameter.detach().clone()
        for parameter in (*optimizer.replicated_tables, *optimizer.dense_parameters)
    ]


def steps(
    runtime: Runtime,
    parallel: Any,
    optimizer: Any,
    count: int = STEPS,
) -> Callable[[], None]:
    """One step at a call, on TorchRec's pipeline."""
    pipeline = make_pipeline(parallel, optimizer, runtime.device)
    local = batches(count, rank=runtime.rank, world_size=runtime.world_size)
    return lambda: pipeline.progress(local)


def ran(
    runtime: Runtime, sharding: str, sync: SyncConfig, optimizer: OptimizerConfig = SGD
) -> dict[str, Tensor] | None:
    """The weights after 12 steps."""
    parallel, keyed = made(runtime, sharding, optimizer)
    with synchronised(parallel, keyed, sync):
        step = steps(runtime, parallel, keyed)
        for _ in range(STEPS):
            step()
    return gather_state(parallel)


ONE = {"every": 1}
SAME: dict[str, tuple[str, SyncConfig, OptimizerConfig]] = {
    **{
        f"every step, {sharding}": (sharding, SyncConfig(), SGD)
        for sharding in SHARDINGS
    },
    **{
        f"local, k = 1, {sharding}": (
            sharding,
            SyncConfig(mode="local_sgd", **ONE),
            SGD,
        )
        for sharding in SHARDINGS
    },
}
PAIRS = {
    "local, k = 4": SyncConfig(mode="local_sgd", every=4),
    # An outer step of rate 1 from the anchors goes to the average itself, but for what
    # a momentum of next to nothing adds.
    "outer, k = 4": SyncConfig(mode="local_sgd", every=4, outer_momentum=1e-7),
}


def weights_by_mode(runtime: Runtime) -> dict[str, Any]:
    results = {name: ran(runtime, *case) for name, case in SAME.items()}
    results |= {
        name: ran(runtime, "data_parallel", sync, ADAM) for name, sync in PAIRS.items()
    }
    results["adam, every step"] = ran(runtime, "data_parallel", SyncConfig(), ADAM)
    return results | {
        "apart": apart(runtime),
        "exchanged": exchanged(runtime),
        "rows": rows_sent(runtime),
        "normalised": normalised(runtime),
    }


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(weights_by_mode, 2)


@pytest.mark.parametrize("name", list(SAME)[1:])
def test_with_sgd_k_of_1_is_every_step(
    two_ranks: list[dict[str, Any]], name: str
) -> None:
    assert_close(two_ranks[0][name], two_ranks[0]["every step, data_parallel"], 1e-6)


def test_with_adam_an_outer_step_of_rate_1_is_local_sgd_but_not_every_step(
    two_ranks: list[dict[str, Any]],
) -> None:
    local, outer = (two_ranks[0][name] for name in PAIRS)
    assert_close(outer, local, 1e-5)
    every = two_ranks[0]["adam, every step"]
    assert (
        max(float((every[name] - value).abs().max()) for name, value in local.items())
        > 1e-3
    )


def apart(runtime: Runtime) -> dict[str, Any]:
    """What each rank holds whole after every step, for both local modes, with a phase of 3 after the first."""
    results = {}
    for name, sync in {
        "local": SyncConfig(mode="local_sgd", every=3),
        "diloco": SyncConfig(mode="local_sgd", every=3, **DILOCO),
    }.items():
        parallel, keyed = made(runtime, "data_parallel", ADAM)
        after = []
        with synchronised(parallel, keyed, sync) as ranks:
            step = steps(runtime, parallel, keyed)
            for _ in range(9):
                step()
                after.append(whole(parallel, keyed))
            ranks.settle()
            after.append(whole(parallel, keyed))
            step()
        results[name] = [*after, whole(parallel, keyed)]
    return results


@pytest.mark.parametrize("mode", ["local", "diloco"])
def test_ranks_are_equal_after_every_kth_step_when_settled_and_at_the_end_and_only_then(
    two_ranks: list[dict[str, Any]], mode: str
) -> None:
    first, second = (rank["apart"][mode] for rank in two_ranks)
    equal = [
        all(torch.equal(*pair) for pair in zip(*tensors, strict=True))
        for tensors in zip(first, second, strict=True)
    ]
    together, settled, left = True, True, True
    phase = [False, False, True]
    assert equal == [together, *phase, *phase, False, False, settled, left]


def exchanged(runtime: Runtime) -> dict[str, Any]:
    """Collectives of each of four steps under a mode, the last of which ends with a meeting where there is one."""
    results = {}
    for sharding, sync in (
        ("data_parallel", SyncConfig()),
        ("data_parallel", SyncConfig(mode="local_sgd", every=6)),
        ("row_wise", SyncConfig()),
        ("row_wise", SyncConfig(mode="local_sgd", every=6)),
    ):
        parallel, keyed = made(runtime, sharding)
        with synchronised(parallel, keyed, sync) as ranks:
            step = steps(runtime, parallel, keyed)
            for _ in range(3):
                # DDP tells all ranks once how it sorts its buckets, in the third
                step()
            results[f"{sharding}, {sync.mode}"] = [collectives(step) for _ in range(4)]
            assert ranks.silent == (
                sync.mode == "local_sgd" and sharding == "data_parallel"
            )
    return results


def collectives(step: Callable[[], Any]) -> int:
    """How many the backend has run in a step, DDP's included."""
    group = dist.group.WORLD
    before = group._get_sequence_number_for_group()
    step()
    return int(group._get_sequence_number_for_group() - before)


def test_between_two_averages_nothing_is_exchanged_but_the_rows_of_sharded_tables(
    two_ranks: list[dict[str, Any]],
) -> None:
    if os.environ.get("TEST_COLLECTIVES"):
        pytest.skip(
            "collectives are counted by gloo, which does not see those over shared memory"
        )
    results = two_ranks[0]["exchanged"]
    assert results["data_parallel, every_step"] == [2] * 4, (
        "the gradients of the dense layers and of the one collection"
    )
    assert results["data_parallel, local_sgd"] == [0, 0, 0, 2], (
        "when they meet: faults and steps in one, and the weights"
    )
    together, local = results["row_wise, every_step"][0], results["row_wise, local_sgd"]
    assert local == [together - 1] * 3 + [together + 1], (
        "all but the gradient of the dense layers"
    )


def normalised(runtime: Runtime) -> dict[str, Any]:
    """Statistics of a model with batch normalisation around two local steps, and the collectives of those."""
    model = small_model(META)
    model.towers["user"] = Tower(
        model.towers["user"].tables, (16, 8), dense=["age"], normalization="batch"
    )
    parallel, keyed = hybrid_parallel(
        model,
        runtime,
        plan=PlanConfig(sharding="data_parallel"),
        optimizer=ADAM,
        seed=7,
    )
    (layer,) = (
        module for module in parallel.modules() if isinstance(module, BatchNorm)
    )
    with synchronised(
        parallel, keyed, SyncConfig(mode="local_sgd", every=STEPS)
    ) as ranks:
        step = steps(runtime, parallel, keyed)
        for _ in range(3):
            step()
        sent = [collectives(step) for _ in range(2)]
        before = statistics_of(layer)
        ranks.settle()
        after = statistics_of(layer)
    return {
        "sent": sent,
        "before": before,
        "after": after,
        "group": layer.process_group,
    }


def statistics_of(layer: nn.BatchNorm1d) -> dict[str, Tensor]:
    return {
        name: getattr(layer, name).clone() for name in ("running_mean", "running_var")
    }


def test_ranks_that_are_apart_normalise_over_their_own_rows_and_average_the_statistics(
    two_ranks: list[dict[str, Any]],
) -> None:
    first, second = (rank["normalised"] for rank in two_ranks)
    assert first["sent"] == [0, 0], "with batch normalisation too"
    assert first["group"] is None, "after the context they are one batch again"
    for name, value in first["before"].items():
        other = second["before"][name]
        assert not torch.equal(value, other)
        for rank in (first, second):
            torch.testing.assert_close(rank["after"][name], (value + other) / 2)


def rows_sent(runtime: Runtime) -> dict[str, Any]:
    """A large table of which the ranks move three rows, one of them both."""
    table, small = torch.zeros(WHOLE_WEIGHTS // 8 + 1, 8), torch.zeros(4, 8)
    averager = Averager([table, small], [])
    for row in ([5, 9], [9, 2])[runtime.rank]:
        table[row] += runtime.rank + 1.0
    small += runtime.rank
    averager.average()
    first = averager.sent
    averager.average()
    return {"table": table, "small": small, "sent": (first, averager.sent)}


def test_of_a_large_table_only_the_rows_that_some_rank_moved_are_sent(
    two_ranks: list[dict[str, Any]],
) -> None:
    for rank in two_ranks:
        results = rank["rows"]
        assert results["sent"] == (3 * 8 + 4 * 8, 4 * 8)
        assert results["table"][[2, 5, 9], 0].tolist() == [1.0, 0.5, 1.5]
        assert float(results["table"].abs().sum()) == 8 * 3.0
        assert results["small"].unique().tolist() == [0.5]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"mode": "local"},
            "mode='local': must be one of every_step, local_sgd",
        ),
        (
            {"mode": "local_sgd", "every": 0},
            "every=0: must be 1 or more",
        ),
        (
            {"mode": "local_sgd", "outer_lr": 0.0},
            "outer_lr=0.0: must be a positive number",
        ),
        (
            {"mode": "local_sgd", "outer_momentum": 1.0},
            "outer_momentum=1.0: must be at least 0 and below 1",
        ),
        (
            {"every": 8},
            "every=8: only for mode=local_sgd, but mode=every_step",
        ),
    ],
)
def test_settings_that_cannot_be_or_would_do_nothing_are_refused(
    fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError) as error:
        SyncConfig(**fields)
    assert str(error.value) == told


def test_the_optimizer_of_another_model_is_refused() -> None:
    with Runtime.start("cpu") as runtime:
        model, _ = made(runtime, "data_parallel")
        _, other = made(runtime, "data_parallel")
        with pytest.raises(ValueError, match="another model's layers"):
            LocalSGD(model, other, every=8)
