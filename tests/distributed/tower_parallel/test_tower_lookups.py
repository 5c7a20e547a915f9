"""Placed towers that share tables, or whose look-ups are merged, learn what the unsharded model learns."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.contracts import run_ranks
from tests.examples import META, table
from tests.models.merged_models import (
    DIM,
    ITEMS,
    ROWS,
    bags,
    batch,
    by_table,
    is_table,
    model,
)
from torchrec_ext.batch import SharedRows, TowerBatch
from torchrec_ext.distributed.autotune.choose import auto_plan, tower_loads
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.placement import PlacementError
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.explain import explain
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.tables import initialise_tables, local_shards
from torchrec_ext.distributed.tower_parallel.lookups import sharing_groups
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.interaction import TopMLP
from torchrec_ext.modules.tower import Tower
from torchrec_ext.train.checkpoint.state import model_state
from torchrec_ext.train.step.pipeline import make_pipeline, unpipelined

STEPS = 50
SGD = OptimizerConfig(tables="sgd", tables_lr=1.0, dense="sgd", dense_lr=0.1)


class Case(NamedTuple):
    """A model, ``plan.towers``, ``plan.sharding``, and whether all look-ups are merged."""

    model: str
    towers: str
    sharding: str
    merged: bool = False


CASES = {
    2: [
        Case("shared", "user+item:1", "table_wise"),
        Case("shared", "user:0-1,item:0-1", "row_wise"),
        Case("sequences", "session+likes+words:0", "auto"),
        Case("trio", "user+item:0,place:1", "table_wise"),
        Case("trio", "tower_parallel", "auto", merged=True),
        Case("plain", "user:0-1,item:0-1", "column_wise", merged=True),
        Case("plain", "user:0,item:0-1", "row_wise", merged=True),
    ],
    4: [
        Case("sequences", "session+likes+words:1-2", "row_wise"),
        Case("trio", "user+item:0-2,place:2-3", "row_wise"),
        Case("trio", "user+item+place:1+3", "data_parallel", merged=True),
    ],
}


def trio(device: torch.device | None = None) -> TowerModel:
    """Two towers, one of them with other rows, share a table; a third shares none."""
    towers = {
        "user": Tower(
            [bags("user_id"), bags("item", "history", "likes")], [16, 8], device=device
        ),
        "item": Tower(
            [bags("item", "item_id"), bags("genres")], [16, 8], device=device
        ),
        "place": Tower([bags("country")], [8], device=device),
    }
    made = TowerModel(towers, TopMLP([8, 8, 8], [8]), shared=["user"])
    generator = torch.Generator().manual_seed(0)
    for name, value in made.named_parameters():
        if not is_table(name):
            nn.init.normal_(value, std=0.2, generator=generator)
    return made


def made_of(case: Case, device: torch.device | None = None) -> TowerModel:
    made = trio(device) if case.model == "trio" else model(case.model, device)
    return made.merge_lookups() if case.merged else made


def feed(kind: str, pieces: list[int], count: int = STEPS) -> Iterator[TowerBatch]:
    for step in range(count):
        if kind != "trio":
            yield batch(kind, step, pieces)
            continue
        yield trio_batch(step, pieces)


def trio_batch(step: int, pieces: list[int]) -> TowerBatch:
    """That of ``shared``, and a country in each row."""
    local = batch("shared", step, pieces)
    countries = [
        torch.randint(
            ITEMS, (ROWS,), generator=torch.Generator().manual_seed(10 * step + piece)
        )
        for piece in pieces
    ]
    sparse: Any = local.sparse
    joined = type(sparse)(
        [*sparse.keys(), "country"],
        torch.cat([sparse.values(), *countries]),
        lengths=torch.cat(
            [
                sparse.lengths(),
                torch.ones(ROWS * len(pieces), dtype=sparse.lengths().dtype),
            ]
        ),
    )
    assert isinstance(local.shared, SharedRows)
    local.sparse = joined
    return local


@cache
def unsharded(kind: str) -> dict[str, Any]:
    """Plain modules and torch's SGD in one process, over the rows of 4 parts."""
    made = trio() if kind == "trio" else model(kind)
    initialise_tables(made, seed=7)
    parameters = dict(made.named_parameters())
    tables = [value for name, value in parameters.items() if is_table(name)]
    dense = [value for name, value in parameters.items() if not is_table(name)]
    optimizers = [
        torch.optim.SGD(tables, lr=SGD.tables_lr),
        torch.optim.SGD(dense, lr=SGD.dense_lr),
    ]
    logits = []
    for local in feed(kind, [0, 1, 2, 3]):
        made.zero_grad()
        loss, output = made(local)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        logits.append(output.logits)
    state = by_table({name: value.detach() for name, value in parameters.items()})
    return {
        "logits": logits,
        "state": state,
        "embedded": embedded(made, kind, [0, 1, 2, 3]),
    }


def embedded(made: TowerModel, kind: str, pieces: list[int]) -> dict[str, Tensor]:
    (local,) = feed(kind, pieces, 1)
    with torch.no_grad():
        return {name: made.eval().embed(name, local).clone() for name in made._names}


def trained(runtime: Runtime, case: Case) -> dict[str, Any]:
    each = 4 // runtime.world_size
    pieces = list(range(runtime.rank * each, (runtime.rank + 1) * each))
    made = made_of(case, META)
    config = PlanConfig(sharding=case.sharding, towers=case.towers)  # type: ignore[arg-type]
    plan = plan_sharding(made, runtime, config, optimizer=SGD)
    message = explain(plan, made, runtime.world_size)
    parallel, optimizer = hybrid_parallel(
        made, runtime, plan=plan, optimizer=SGD, seed=7
    )
    pipeline = make_pipeline(parallel, optimizer, runtime.device)
    local = feed(case.model, pieces)
    logits = [pipeline.progress(local).logits for _ in range(STEPS)]
    left = unpipelined(pipeline, parallel)
    pipeline.detach()
    return {
        "explained": message,
        "unpipelined": left,
        "paths": model_state(parallel, optimizer).paths,
        "logits": logits,
        "shards": [
            (s.config.name, s.config.num_embeddings, s.row, s.column, s.tensor.clone())
            for s in local_shards(parallel)
        ],
        "dense": {
            name: value.detach()
            for name, value in parallel.module.named_parameters()
            if not is_table(name)
        },
        "embedded": embedded(parallel.module, case.model, pieces),
    }


def auto(runtime: Runtime) -> dict[str, Any]:
    """What plan.towers=auto makes of towers of which two share a table."""
    made = trio(META)
    (local,) = feed("trio", [runtime.rank], 1)
    config, decision = auto_plan(
        made, local, runtime, PlanConfig(towers="auto", sharding="table_wise"), SGD
    )
    return {
        "config": config,
        "candidates": [candidate.towers for candidate in decision.candidates],
        "loads": list(tower_loads(made)),
    }


def all_cases(runtime: Runtime) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    return [trained(runtime, case) for case in CASES[runtime.world_size]], auto(
        runtime
    ) if runtime.world_size == 2 else None


@cache
def ranks_of(world_size: int) -> list[Any]:
    return run_ranks(all_cases, world_size, timeout_s=300)


def whole(ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Tables from the shards of all ranks, every cell of which must be there, and what ranks hold alike."""
    results: dict[str, Tensor] = {}
    for name, rows, row, column, shard in (
        shard for rank in ranks for shard in rank["shards"]
    ):
        whole_table = results.setdefault(name, torch.full((rows, DIM), float("nan")))
        whole_table[row : row + shard.shape[0], column : column + shard.shape[1]] = (
            shard
        )
    for rank in ranks:
        for name, value in rank["dense"].items():
            torch.testing.assert_close(
                results.setdefault(name, value), value, rtol=0, atol=1e-6
            )
    return results


EVERY = [
    pytest.param(
        size,
        index,
        marks=[pytest.mark.slow] if size == 4 else [],
        id="-".join(map(str, case)),
    )
    for size, cases in CASES.items()
    for index, case in enumerate(cases)
]


@pytest.mark.parametrize(("world_size", "place"), EVERY)
def test_towers_that_share_tables_learn_on_their_ranks_what_they_learn_unsharded(
    world_size: int, place: int
) -> None:
    case = CASES[world_size][place]
    ranks = [cases[place] for cases, _ in ranks_of(world_size)]
    expected = unsharded(case.model)
    for step, logits in enumerate(expected["logits"]):
        results = torch.cat([rank["logits"][step] for rank in ranks])
        torch.testing.assert_close(
            results, logits, rtol=0, atol=1e-5 if step == 0 else 1e-4
        )
    results = whole(ranks)
    assert results.keys() == expected["state"].keys()
    for name, value in expected["state"].items():
        torch.testing.assert_close(
            results[name],
            value,
            rtol=0,
            atol=1e-4,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    for name, value in expected["embedded"].items():
        torch.testing.assert_close(
            torch.cat([rank["embedded"][name] for rank in ranks]),
            value,
            rtol=0,
            atol=1e-4,
        )
    assert all(rank["unpipelined"] == [] for rank in ranks)
    paths = {table: path for rank in ranks for table, path in rank["paths"].items()}
    assert set(paths.values()) == {
        name for name, _ in made_of(case, META).named_parameters() if is_table(name)
    }


def test_the_plan_says_where_a_shared_table_is() -> None:
    lines = ranks_of(2)[0][0][3]["explained"].splitlines()
    where = {
        line.split()[0]: line.split("table_wise")[1].strip()
        for line in lines
        if "table_wise" in line
    }
    assert where == dict.fromkeys(("item", "user_id", "genres"), "rank 0") | {
        "country": "rank 1"
    }
    assert lines[-1] == "towers run on the ranks user:0,item:0,place:1"


def test_auto_keeps_towers_together_that_share_a_table() -> None:
    (_, first), (_, second) = ranks_of(2)
    assert first == second
    assert first["loads"] == ["user+item", "place"]
    assert "user+item:0,place:1" in first["candidates"]
    assert all(
        candidate == "data_parallel" or candidate.startswith("user+item:")
        for candidate in first["candidates"]
    )


@pytest.mark.unit
@pytest.mark.parametrize(
    ("make", "towers", "told"),
    [
        (
            lambda: trio(META),
            "user:0,item:1,place:1",
            ": the towers 'user' on rank(s) 0 and 'item' on rank(s) 1 share table 'item', which has one place; give "
            "them the same ranks, as in plan.towers=user:0-1,item:0-1,place:1, or take auto",
        ),
        (
            lambda: model("shared", META),
            "tower_parallel",
            "the towers user and item share table 'item'; give each a table",
        ),
    ],
)
def test_towers_that_share_a_table_are_not_taken_apart(
    make: Callable[[], TowerModel], towers: str, told: str
) -> None:
    with pytest.raises(PlacementError) as error:
        plan_sharding(
            make(), Runtime(world_size=2, local_world_size=2), PlanConfig(towers=towers)
        )
    assert told in str(error.value)


@pytest.mark.unit
def test_towers_are_one_where_a_chain_of_tables_joins_them() -> None:
    def tower(*names: str) -> Tower:
        return Tower([table(name, 9) for name in names], [], device=META)

    towers = {
        "a": tower("x"),
        "b": tower("y"),
        "c": tower("x", "z"),
        "d": tower("z", "w"),
        "e": tower("v"),
    }
    assert sharing_groups(towers) == [["a", "c", "d"], ["b"], ["e"]]
