"""Which jobs look up the tables of all their towers together."""

import dataclasses
from typing import Any

import pytest
from torch import nn

from tests.examples import META, small_model
from torchrec_ext.distributed.optim.config import OptimizerConfig, Override
from torchrec_ext.distributed.plan.config import PlanConfig
from torchx_apps.jobs.setup import merge_lookups
from torchx_apps.recipes.two_tower import two_tower_job
from torchx_apps.tasks.job import Job

pytestmark = pytest.mark.unit


def merged(world_size: int, **fields: Any) -> bool:
    model = small_model(META)
    merge_lookups(dataclasses.replace(two_tower_job(), **fields), model, world_size)
    return model.shared_tables is not None


def test_auto_merges_where_it_saves_exchanges() -> None:
    assert merged(2)
    assert not merged(1)


def test_auto_leaves_tables_where_a_placement_or_a_path_looks_for_them() -> None:
    assert not merged(2, plan=PlanConfig(towers="user:0,item:1"))
    assert not merged(2, plan=PlanConfig(towers="auto"))
    assert not merged(
        2, optimizer=OptimizerConfig(per_table={"towers.item": Override(kind="sgd")})
    )
    assert merged(
        2, optimizer=OptimizerConfig(per_table={"item_id": Override(kind="sgd")})
    )


def test_what_is_asked_for_is_done_or_refused() -> None:
    assert merged(1, lookups="merged")
    assert not merged(2, lookups="apart")
    with pytest.raises(
        ValueError, match="lookups='fused': must be one of auto, merged, apart"
    ):
        dataclasses.replace(two_tower_job(), lookups="fused")
    assert merged(2, lookups="merged", plan=PlanConfig(towers="tower_parallel"))
    job: Job = dataclasses.replace(two_tower_job(), lookups="merged")
    with pytest.raises(
        ValueError,
        match="lookups=merged: Linear has no look-ups of several towers; leave it at auto",
    ):
        merge_lookups(job, nn.Linear(1, 1), 2)
