"""Towers that compress what leaves them learn on ranks of their own what they learn in one process."""

from typing import Any

import torch
from torch import Tensor

from tests.contracts import run_ranks
from tests.examples import ITEMS, META, USERS, batches, redrawn, table
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.tables import initialise_tables
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.compression import Compression
from torchrec_ext.modules.interaction import TopMLP
from torchrec_ext.modules.tower import Tower
from torchrec_ext.train.step.pipeline import make_pipeline

STEPS = 30
SGD = OptimizerConfig(tables="sgd", tables_lr=1.0, dense="sgd", dense_lr=0.1)


def compressing(device: torch.device | None = None) -> TowerModel:
    """16 columns a bag: 4 x (2 + 1) numbers leave one tower, 4 and its dense column the other."""
    towers = {
        "user": Tower(
            [table("user_id", USERS), table("history", ITEMS)],
            [],
            dense=["age"],
            compress=Compression(dim=4, per_feature=1, flat=1),
            device=device,
        ),
        "item": Tower(
            [table("item_id", ITEMS)],
            [],
            dense=["price"],
            compress=Compression(dim=4, per_feature=1, flat=0),
            device=device,
        ),
    }
    return redrawn(TowerModel(towers, TopMLP([12, 5], [8])))


def unsharded() -> list[Tensor]:
    model = compressing()
    initialise_tables(model, seed=7)
    tables = [
        value for name, value in model.named_parameters() if "embeddings." in name
    ]
    dense = [
        value for name, value in model.named_parameters() if "embeddings." not in name
    ]
    optimizers = [
        torch.optim.SGD(tables, lr=SGD.tables_lr),
        torch.optim.SGD(dense, lr=SGD.dense_lr),
    ]
    logits = []
    for batch in batches(STEPS):
        model.zero_grad()
        loss, output = model(batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        logits.append(output.logits)
    return logits


def trained(runtime: Runtime) -> dict[str, Any]:
    """The logits of every step, on every rank and apart."""
    results = {}
    for towers in ("data_parallel", "user:0,item:1"):
        model = compressing(META)
        plan = plan_sharding(
            model,
            runtime,
            PlanConfig(sharding="table_wise", towers=towers),
            optimizer=SGD,
        )
        parallel, optimizer = hybrid_parallel(
            model, runtime, plan=plan, optimizer=SGD, seed=7
        )
        pipeline = make_pipeline(parallel, optimizer, runtime.device)
        local = batches(STEPS, rank=runtime.rank, world_size=runtime.world_size)
        results[towers] = [pipeline.progress(local).logits for _ in range(STEPS)]
    return results


def test_towers_that_compress_learn_the_same_apart_on_every_rank_and_unsharded() -> (
    None
):
    ranks = run_ranks(trained, 2)
    expected = unsharded()
    assert float((expected[-1] - expected[0]).abs().max()) > 0.1, (
        "something was learned"
    )
    for towers in ranks[0]:
        for step, logits in enumerate(expected):
            torch.testing.assert_close(
                torch.cat([rank[towers][step] for rank in ranks]),
                logits,
                rtol=0,
                atol=1e-4,
            )
