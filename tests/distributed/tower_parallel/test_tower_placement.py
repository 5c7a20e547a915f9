"""What a placement says, what it costs in collectives, and what is told of one that cannot be."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.contracts import run_ranks
from tests.examples import META, USERS, batches, small_model, table
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.optim.errors import GradientNotFiniteError
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.placement import PlacementError, TowerPlacement
from torchrec_ext.distributed.plan import planner as planning
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.draft import PlanError
from torchrec_ext.distributed.plan.explain import explain
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sync import SyncConfig, synchronised
from torchrec_ext.distributed.tower_parallel.exchange import (
    TowerRows,
    Widths,
    join_rows,
    pack_rows,
    pad_rows,
    slice_rows,
    unpack_rows,
)
from torchrec_ext.models.tower_model import TowerModel, two_tower
from torchrec_ext.modules.interaction import TopMLP
from torchrec_ext.modules.tower import Tower
from torchrec_ext.train.step.pipeline import make_pipeline

STEPS = 5
GATHERED = (
    "all_to_all_single",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_gather",
    "reduce_scatter",
)


@pytest.mark.unit
@pytest.mark.parametrize(
    "text",
    [
        "user:0,item:1",
        "user:0-2,item:3",
        "user:1,item:0-3",
        "user:0+2,item:1+3",
        "user:4,item:4",
    ],
)
@pytest.mark.parametrize("rows", [0, 1, 6, 7])
def test_each_row_goes_to_one_rank_of_a_tower_and_ranks_get_equally_many(
    text: str, rows: int
) -> None:
    placement = TowerPlacement.parse(text, ["user", "item"], 5)
    assert str(placement) == text
    for tower, members in placement.ranks.items():
        got: Counter[int] = Counter()
        for rank in range(5):
            cuts = placement.cuts(tower, rank, rows)
            assert [0, *(stop for _, stop in cuts)] == [
                *(start for start, _ in cuts),
                rows,
            ]
            for target, (start, stop) in zip(
                placement.targets(tower, rank), cuts, strict=True
            ):
                got[target] += stop - start
        assert sum(got.values()) == 5 * rows
        assert set(got) == set(members)
        assert max(got.values()) - min(got.values()) <= 1
        assert placement.busiest(tower, [rows] * 5) == max(got.values())


@pytest.mark.unit
@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "user:0,item:4",
            "tower 'item' is placed on rank 4, but the job has ranks 0 to 3",
        ),
        (
            "user:0,item:",
            "gives the tower 'item' no rank; write data_parallel, tower_parallel, auto, or ranks such as",
        ),
        (
            "user:0",
            "leaves the tower 'item' without a rank; place every one of user, item",
        ),
        ("user:0,items:1", "names the tower 'items'; the towers are user, item"),
        (
            "user:0,user:1",
            "places the tower 'user' twice; join its ranks with '+', as in user:0+2",
        ),
        ("user:0,item:x", "'x' is neither a rank, such as 0, nor a range"),
        ("user:0,item:3-1", "'3-1' is neither a rank"),
        ("user:0+0,item:1", "tower 'user' is placed on [0, 0]; name each rank once"),
        (",item:1", "names no tower"),
    ],
)
def test_a_wrong_placement_is_told(text: str, told: str) -> None:
    with pytest.raises(PlacementError) as error:
        TowerPlacement.parse(text, ["user", "item"], 4)
    assert told in str(error.value)


@pytest.mark.unit
def test_a_config_refuses_what_no_model_could_mean() -> None:
    with pytest.raises(ValueError, match="'user' gives the tower 'user' no rank"):
        PlanConfig(towers="user")


@pytest.mark.unit
@pytest.mark.parametrize(
    ("make", "towers", "told"),
    [
        (
            lambda: small_model(META),
            "user:0,item:1",
            "rank 1, but the job has ranks 0 to 0",
        ),
        (
            lambda: nn.Linear(2, 2),
            "tower_parallel",
            "plan.towers=tower_parallel: Linear has no Towers to place",
        ),
        (
            lambda: TowerModel(
                {
                    "user": Tower(
                        [table("bag", 9)], [4], weights={"bag": "ages"}, device=META
                    )
                },
                TopMLP([4], [4]),
            ),
            "user:0",
            "table 'bag' of tower 'user' pools by weights",
        ),
    ],
)
def test_what_a_model_cannot_place_is_refused(
    make: Any, towers: str, told: str
) -> None:
    with pytest.raises(PlacementError) as error:
        plan_sharding(make(), Runtime(), PlanConfig(towers=towers))
    assert told in str(error.value)


@pytest.mark.unit
@pytest.mark.parametrize(("features", "dense"), [(1, 0), (2, 1), (3, 3)])
def test_rows_survive_the_journey(features: int, dense: int) -> None:
    """Cut, packed, unpacked and joined again, and padded by empty rows."""
    lengths = torch.randint(0, 4, (features, 7), dtype=torch.int32)
    rows = TowerRows(torch.arange(int(lengths.sum())), lengths, torch.rand(7, dense))
    pieces = [slice_rows(rows, start, stop) for start, stop in ((0, 3), (3, 3), (3, 7))]
    widths = Widths(features, dense)
    payload = pack_rows([(piece, widths) for piece in pieces], torch.device("cpu"))
    results, start = [], 0
    for piece in pieces:
        stop = start + len(pack_rows([(piece, widths)], torch.device("cpu")))
        results.append(
            unpack_rows(payload[start:stop], piece.height, len(piece.values), widths)
        )
        start = stop
    assert start == len(payload)
    for again, was in zip(join_rows(results), rows, strict=True):
        assert torch.equal(again, was)
    more = pad_rows(rows, 9)
    assert torch.equal(more.values, rows.values)
    assert more.lengths[:, 7:].sum() == 0
    assert (more.height, more.dense.shape) == (9, (9, dense))


def on_two_ranks(runtime: Runtime) -> dict[str, Any]:
    """All that needs two processes, in one pair of them."""
    results: dict[str, Any] = {
        "calls": {
            towers: calls_per_step(runtime, towers)
            for towers in ("data_parallel", "user:0,item:1")
        }
    }
    model = small_model(META)
    plan = plan_sharding(
        model, runtime, PlanConfig(sharding="table_wise", towers="user:0,item:1")
    )
    results["explained"] = explain(plan, model, 2)
    parallel, optimizer = hybrid_parallel(model, runtime, plan=plan)
    (batch,) = batches(1, rank=runtime.rank, world_size=2)
    parallel(batch)[0].backward()
    if runtime.rank == 1:
        parallel.module.towers.item.mlp[0].weight.grad[0, 0] = float("nan")
    results["gradient"] = told(GradientNotFiniteError, optimizer.step)
    local = SyncConfig(mode="local_sgd", every=2)
    results["sync"] = told(ValueError, lambda: synchronised(parallel, optimizer, local))
    small = PlanConfig(memory_gb=1e-4, towers="user:0,item:1", sharding="table_wise")
    large = two_tower(
        [table("user_id", USERS)], [table("item_id", 10_000)], device=META
    )
    results["too large"] = told(PlanError, lambda: plan_sharding(large, runtime, small))
    planning.draft_towers = failing  # type: ignore[assignment]
    results["planner"] = told(
        RuntimeError,
        lambda: plan_sharding(
            small_model(META), runtime, PlanConfig(towers="user:0,item:1")
        ),
    )
    wrong = OptimizerConfig(per_layer=("towers.place=lr=1",))
    results["pattern"] = told(
        ValueError,
        lambda: hybrid_parallel(small_model(META), runtime, plan=plan, optimizer=wrong),
    )
    return results


def failing(*_: Any) -> None:
    raise KeyError("a planner that breaks")


def told(kind: type[Exception], call: Any) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return "nothing"


def calls_per_step(runtime: Runtime, towers: str) -> dict[str, float]:
    """How often each collective of Python's torch.distributed runs in a step of the pipeline."""
    model = small_model(META)
    plan = plan_sharding(
        model, runtime, PlanConfig(sharding="table_wise", towers=towers)
    )
    pipeline = make_pipeline(
        *hybrid_parallel(model, runtime, plan=plan), runtime.device
    )
    local = batches(3 + STEPS, rank=runtime.rank, world_size=2)
    pipeline.progress(local)
    counts: Counter[str] = Counter()

    def counted(name: str, call: Any) -> Any:
        def count(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return call(*args, **options)

        return count

    originals = {name: getattr(dist, name) for name in GATHERED}
    for name, call in originals.items():
        setattr(dist, name, counted(name, call))
    for _ in range(STEPS):
        # the batches of two further steps are there already, so each of these steps
        # begins one
        pipeline.progress(local)
    for name, call in originals.items():
        setattr(dist, name, call)
    return {name: count / STEPS for name, count in counts.items()}


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, 2)


def test_all_towers_share_one_exchange_each_way(
    two_ranks: list[dict[str, Any]],
) -> None:
    """Header, rows, outputs and their gradient; sharded tables of two towers need nine, with shared announcements."""
    for rank in two_ranks:
        assert rank["calls"]["user:0,item:1"] == {"all_to_all_single": 4.0}
        assert sum(rank["calls"]["data_parallel"].values()) == 9


def test_explain_says_where_towers_run(two_ranks: list[dict[str, Any]]) -> None:
    lines = two_ranks[0]["explained"].splitlines()
    assert lines[-1] == "towers run on the ranks user:0,item:1"
    where = {
        line.split()[0]: line.split("table_wise")[1].strip()
        for line in lines
        if "table_wise" in line
    }
    assert where == {"user_id": "rank 0", "history": "rank 0", "item_id": "rank 1"}


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("gradient", "the gradient of towers.item.mlp.0.weight is not finite"),
        (
            "sync",
            "sync.mode=local_sgd, but plan.towers=user:0,item:1 gives ranks different towers",
        ),
        ("too large", "tower 'item' on rank(s) 1: no sharding plan fits"),
        ("planner", "the planner failed on rank 0: KeyError: 'a planner that breaks'"),
        (
            "pattern",
            "'towers.place=lr=1' fits no dense layer of the model, which are towers.user.mlp.0.weight",
        ),
    ],
)
def test_every_rank_raises_the_same_error(
    two_ranks: list[dict[str, Any]], what: str, text: str
) -> None:
    messages = [rank[what] for rank in two_ranks]
    assert text in messages[0]
    assert messages[1] == messages[0]
