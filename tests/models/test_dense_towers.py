"""Towers without tables, and array columns: trained, planned, saved, exported and served as every other model."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.capture.runs import Given
from tests.contracts import gather_state, run_ranks
from tests.examples import redrawn
from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.explain import explain
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sync import SyncConfig
from torchrec_ext.models.tower_model import TowerModel, two_tower
from torchrec_ext.modules.tower import Tower
from torchrec_ext.train.loop import TrainConfig, train

PROFILE, CONTENT, STEPS, ROWS = 60, 40, 6, 24
SGD = OptimizerConfig(dense="sgd", dense_lr=0.5, tables="sgd", tables_lr=0.5)


def dense_model() -> TowerModel:
    """The first user's own: two networks over 60 and 40 numbers."""
    return redrawn(
        two_tower(
            [],
            [],
            user_dense={"profile": PROFILE},
            item_dense={"content": CONTENT},
            tower_widths=(16, 8),
        )
    )


def columns(count: int, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    draw = np.random.default_rng(seed)
    profile = draw.normal(size=(count, PROFILE))
    content = draw.normal(size=(count, CONTENT))
    return {
        "profile": profile.astype(np.float32),
        "content": content.astype(np.float32),
        "label": (profile[:, 0] * content[:, 0] > 0).astype(np.float32),
    }


def batches(
    model: TowerModel, rank: int = 0, world_size: int = 1
) -> Iterator[TowerBatch]:
    schema = model.schema()
    for step in range(STEPS):
        local = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
        made = {
            name: torch.from_numpy(values[local])
            for name, values in columns(ROWS, step).items()
        }
        yield schema.assemble({}, made, labels=made["label"])


def unsharded(model: TowerModel) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in batches(model):
        optimizer.zero_grad()
        model(batch)[0].backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def trained(runtime: Runtime, sync: SyncConfig) -> dict[str, Any]:
    """The weights after an epoch of :func:`train`, and what explain() says."""
    model = dense_model()
    plan = plan_sharding(model, runtime, optimizer=SGD)
    parallel, optimizer = hybrid_parallel(model, runtime, plan=plan, optimizer=SGD)
    config = TrainConfig(epochs=1, compile="off")
    given = Given(list(batches(model, runtime.rank, runtime.world_size)))
    train(parallel, optimizer, given, runtime, config, sync=sync)
    return {
        "state": gather_state(parallel),
        "text": explain(plan, parallel, runtime.world_size),
    }


SYNCS = [
    SyncConfig(),
    SyncConfig(mode="local_sgd", every=1),
]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("sync", SYNCS, ids=lambda sync: sync.mode)
def test_a_model_without_tables_learns_as_one_process_does(
    sync: SyncConfig, world_size: int
) -> None:
    expected = unsharded(dense_model())
    for result in run_ranks(trained, world_size, sync):
        assert result["text"] == "no table to shard: each rank holds all layers"
        if result["state"] is not None:
            assert result["state"].keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(
                    result["state"][name], value, rtol=0, atol=1e-5
                )


def test_an_array_column_has_a_number_in_each_row() -> None:
    with pytest.raises(
        ValueError,
        match=r"dense: profile=0: the column must have 1 number in each row or more",
    ):
        Tower([], (8,), dense={"profile": 0})
