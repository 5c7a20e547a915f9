"""Bytes across hosts: by the formula's closed form, and as many as two real ranks send."""

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagConfig
from torchrec.distributed.model_parallel import get_unwrapped_module

from benchmarks.traffic import HostLayout, Traffic, flat_traffic, tower_traffic
from tests.contracts import run_ranks
from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.placement import TowerPlacement
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.compression import Compression
from torchrec_ext.modules.interaction import interaction_layer
from torchrec_ext.modules.tower import Tower
from torchrec_ext.schema import Jagged

FEATURES, WIDTH, ROWS = 3, 16, 32
# 4 x (3 + 2) = 20 numbers in place of 48
COMPRESS = Compression(dim=4, per_feature=1, flat=2)
NAMES = {
    tower: [f"{tower}{index}" for index in range(FEATURES)]
    for tower in ("user", "item")
}
IDS = {
    name: index % 3 + 1.0
    for names in NAMES.values()
    for index, name in enumerate(names)
}
PARTS = ("rows", "outputs", "gradients")


def towers() -> dict[str, Tower]:
    return {
        tower: Tower(
            [
                EmbeddingBagConfig(
                    name=n, feature_names=[n], num_embeddings=20, embedding_dim=WIDTH
                )
                for n in names
            ],
            [],
            dense=[f"{tower}_dense"],
            compress=COMPRESS,
            device=torch.device("meta"),
        )
        for tower, names in NAMES.items()
    }


@pytest.mark.unit
def test_two_hosts_of_one_rank() -> None:
    layout = HostLayout(world_size=2, local_world_size=1, rows=ROWS)
    owner = {name: rank for rank, names in enumerate(NAMES.values()) for name in names}
    traffic = flat_traffic(list(towers().values()), layout, owner, IDS, dense=100)
    ids = 1 + 2 + 3  # of a row in one tower
    assert traffic == Traffic(
        rows=2 * ROWS * (4 * FEATURES + 8 * ids),
        outputs=2 * ROWS * 4 * FEATURES * WIDTH,
        gradients=2 * ROWS * 4 * FEATURES * WIDTH,
        dense=2 * 4 * 100,
    )
    placed = tower_traffic(
        towers(),
        layout,
        TowerPlacement(ranks={"user": (0,), "item": (1,)}, world_size=2),
        IDS,
        dense=10,
    )
    assert placed == Traffic(
        rows=2 * ROWS * (4 * FEATURES + 8 * ids + 4),
        outputs=2 * ROWS * 4 * 20,
        gradients=2 * ROWS * 4 * 20,
        dense=2 * 4 * 10,
    )
    assert str(placed).endswith(
        "MB a step across hosts (rows 0.004, outputs 0.005, gradients 0.005, dense 0.000)"
    )


@pytest.mark.unit
def test_two_hosts_of_two_ranks_where_half_of_all_goes_across() -> None:
    """Each table's rank is on one host, so that the two ranks of the other send to it; a ring of 4 crosses twice."""
    layout = HostLayout(world_size=4, local_world_size=2, rows=ROWS)
    owner = dict.fromkeys(IDS, 0) | dict.fromkeys(NAMES["item"], 3)
    traffic = flat_traffic(list(towers().values()), layout, owner, IDS, dense=100)
    assert traffic.outputs == 2 * FEATURES * 2 * ROWS * 4 * WIDTH
    assert traffic.dense == 2 * (2 * 3 / 4) * 4 * 100
    placement = TowerPlacement(ranks={"user": (0, 1), "item": (2, 3)}, world_size=4)
    assert (
        tower_traffic(towers(), layout, placement, IDS, dense=0).outputs
        == 4 * ROWS * 4 * 20
    )
    assert (
        tower_traffic(
            towers(),
            HostLayout(world_size=4, local_world_size=4, rows=ROWS),
            placement,
            IDS,
            dense=9,
        ).total
        == 0
    )


@pytest.mark.unit
def test_what_the_formula_does_not_cover_is_refused() -> None:
    layout = HostLayout(world_size=4, local_world_size=2, rows=ROWS)
    placement = TowerPlacement(ranks={"user": (1, 2), "item": (3,)}, world_size=4)
    with pytest.raises(
        ValueError, match=r"tower 'user' on ranks \[1, 2\] spans hosts of 2 ranks"
    ):
        tower_traffic(towers(), layout, placement, IDS, dense=0)
    with pytest.raises(
        ValueError, match="world_size=3: must be a multiple of local_world_size=2"
    ):
        HostLayout(world_size=3, local_world_size=2, rows=1)
    with pytest.raises(ValueError, match="rows=0"):
        HostLayout(world_size=2, local_world_size=2, rows=0)


def batch(model: TowerModel, seed: int) -> TowerBatch:
    generator = torch.Generator().manual_seed(seed)
    columns = {
        name: Jagged(
            torch.randint(20, (ROWS * int(ids),), generator=generator),
            torch.full((ROWS,), int(ids)),
        )
        for name, ids in IDS.items()
    }
    dense = {f"{tower}_dense": torch.rand(ROWS, generator=generator) for tower in NAMES}
    return model.schema().assemble(columns, dense, labels=torch.ones(ROWS))


def sent_by_a_rank(runtime: Runtime) -> dict[str, Any]:
    """Bytes that a step's all-to-alls send to the other rank, ids and numbers apart, flat and tower-parallel."""
    results: dict[str, Any] = {}
    real = dist.all_to_all_single
    for placement in ("data_parallel", "user:0,item:1"):
        own = towers()
        model = TowerModel(
            own,
            interaction_layer(
                "top_nn", [tower.out_features for tower in own.values()], [8]
            ),
        )
        plan = plan_sharding(
            model, runtime, PlanConfig(sharding="table_wise", towers=placement)
        )
        data = batch(model, runtime.rank)
        parallel, optimizer = hybrid_parallel(model, runtime, plan=plan)
        seen = {"ids": 0, "numbers": 0}

        def counted(*args: Any, **kwargs: Any) -> Any:
            call = inspect.signature(real).bind(*args, **kwargs).arguments
            given, send = call["input"], call.get("input_split_sizes")
            if send is not None:  # what tells the sizes goes in equal parts
                across = sum(
                    size for rank, size in enumerate(send) if rank != runtime.rank
                )
                each = given[0].numel() * given.element_size() if len(given) else 0
                seen["numbers" if given.is_floating_point() else "ids"] += across * each  # noqa: B023
            return real(*args, **kwargs)

        for step in range(2):  # what the first makes once is not of a step
            dist.all_to_all_single = counted if step else real
            parallel(data)[0].backward()
            optimizer.zero_grad()
        dist.all_to_all_single = real
        collections = {
            name: module
            for name, module in get_unwrapped_module(parallel).named_modules()
            if name.endswith("embeddings")
        }
        plans = [plan.get_plan_for_module(name) or {} for name in collections]
        results[placement] = {
            **seen,
            "owner": {
                table: own.ranks[0] for plan in plans for table, own in plan.items()
            },
        }
    return results


def test_two_ranks_send_what_the_formula_says() -> None:
    ranks = run_ranks(sent_by_a_rank, 2)
    layout = HostLayout(world_size=2, local_world_size=1, rows=ROWS)
    flat = flat_traffic(
        list(towers().values()),
        layout,
        ranks[0]["data_parallel"]["owner"],
        IDS,
        dense=0,
    )
    placement = TowerPlacement(ranks={"user": (0,), "item": (1,)}, world_size=2)
    placed = tower_traffic(towers(), layout, placement, IDS, dense=0)
    for setting, expected in (("data_parallel", flat), ("user:0,item:1", placed)):
        numbers = sum(rank[setting]["numbers"] for rank in ranks)
        assert numbers == expected.outputs + expected.gradients, setting
        ids = sum(rank[setting]["ids"] for rank in ranks)
        assert expected.rows <= ids <= expected.rows + 200, (
            f"{setting}: and some bytes that tell the sizes"
        )
