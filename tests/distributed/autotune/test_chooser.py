"""The chooser: which placements it tries, which it takes, what it refuses, and what it finds on real ranks."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.contracts import run_ranks
from tests.examples import META, batches, small_model, table
from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.autotune.choose import (
    Candidate,
    auto_plan,
    decide,
    placements,
    tower_loads,
    why_together,
)
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.draft import PlanError
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.tower_model import two_tower
from torchrec_ext.schema import Jagged
from torchrec_ext.train.loop import checked_steps
from torchrec_ext.train.step.pipeline import make_pipeline

unit = pytest.mark.unit


@unit
def test_placements_in_proportion_one_beside_it_and_mixed() -> None:
    loads = {"user": 3.0, "item": 1.0}
    assert [str(placement) for placement in placements(loads, 2)] == [
        "user:0,item:1",
        "user:1,item:0-1",
        "user:0-1,item:1",
    ]
    texts = [str(placement) for placement in placements(loads, 4)]
    assert texts[:2] == ["user:0-2,item:3", "user:0-1,item:2-3"]
    assert "user:0-3,item:2-3" in texts
    assert placements(loads, 1) == []
    assert placements({}, 2) == []
    several = placements(dict.fromkeys("abcde", 1.0), 3)
    assert len(several) == 5
    for placement in several:
        assert all(placement.ranks.values())


@unit
def test_a_towers_load_is_its_layers_and_its_pooled_embeddings() -> None:
    towers = small_model(META).towers
    dense = {
        name: sum(
            p.numel() for n, p in tower.named_parameters() if "embedding" not in n
        )
        for name, tower in towers.items()
    }
    loads = tower_loads(small_model(META))
    assert loads.keys() == dense.keys()
    for name, tower in towers.items():
        pooled = sum(
            table.embedding_dim * len(table.feature_names) for table in tower.tables
        )
        assert loads[name] == dense[name] + pooled


FLAT = Candidate(towers="data_parallel", sharding="table_wise", trial_ms=50.0)
APART = Candidate(towers="user:0,item:1", sharding="table_wise", trial_ms=31.0)


@unit
def test_the_fastest_is_taken_and_what_is_refused_comes_last() -> None:
    too_large = dataclasses.replace(
        APART,
        towers="user:0-1,item:1",
        trial_ms=1.0,
        refused="tower 'user' needs 9 GiB",
    )
    decision = decide([FLAT, too_large, APART])
    assert list(decision.candidates) == [APART, FLAT, too_large]
    assert "tower 'user' needs 9 GiB" in decision.text()
    with pytest.raises(PlanError, match="needs 9 GiB"):
        decide([too_large])


@unit
def test_the_text_has_every_candidate_and_the_measured_step_beside_the_taken() -> None:
    decision = decide([FLAT, APART])
    lines = decision.text(31.5).splitlines()
    assert "measured ms" in lines[0]
    assert [line.split()[0] for line in lines[2:4]] == [
        "user:0,item:1",
        "data_parallel",
    ]
    assert "31.50" in lines[2]
    assert lines[2].rstrip().endswith("taken")
    assert lines[-1] == (
        "towers=user:0,item:1, tables table_wise: 31.00 ms a step, against 50.00 ms with towers=data_parallel"
    )
    assert "measured" not in decision.text()


@unit
def test_a_model_without_towers_is_told() -> None:
    assert "Linear has no Towers to place" in why_together(
        nn.Linear(2, 2), Runtime(world_size=2)
    )


def told(call: Callable[[], object]) -> str:
    try:
        call()
    except PlanError as error:
        return str(error)
    return ""


def decided(runtime: Runtime) -> dict[str, Any]:
    model = small_model(META)
    local = list(batches(3, rank=runtime.rank, world_size=runtime.world_size))
    before = {
        name: (value.shape, value.device) for name, value in model.named_parameters()
    }
    optimizer = OptimizerConfig()
    config, decision = auto_plan(
        model, local[0], runtime, PlanConfig(towers="auto"), optimizer
    )
    unchanged = before == {
        name: (value.shape, value.device) for name, value in model.named_parameters()
    }
    plan = plan_sharding(model, runtime, config, optimizer=optimizer)
    pipeline = make_pipeline(
        *hybrid_parallel(model, runtime, plan=plan, optimizer=optimizer), runtime.device
    )
    stream = iter(local)
    sharing = two_tower(
        [table("item", 9), table("u", 9)], [table("item", 9)], device=META
    )
    ids = {name: Jagged(torch.tensor([1, 2])) for name in ("item", "u")}
    batch = sharing.schema().assemble(ids, labels=torch.ones(2))
    shared = auto_plan(
        sharing,
        batch,
        runtime,
        PlanConfig(towers="auto", sharding="row_wise"),
        optimizer,
    )[1]
    return {
        "config": config,
        "text": decision.text(),
        "unchanged": unchanged,
        "losses": [float(pipeline.progress(stream).loss) for _ in local],
        "candidates": list(decision.candidates),
        "shared": [
            (candidate.towers, candidate.sharding, candidate.refused)
            for candidate in shared.candidates
        ],
        "memory": told(
            lambda: auto_plan(
                small_model(META),
                local[0],
                runtime,
                PlanConfig(memory_gb=1e-7),
                optimizer,
            )
        ),
    }


def tried_as_trained(runtime: Runtime) -> tuple[list[float], list[int]]:
    """The trials' ms with the steps of train(), of a batch whose labels are none, and the batches of each trial."""
    local = list(batches(3, rank=runtime.rank, world_size=runtime.world_size))
    local[1].labels[0] = float("nan")
    seen: list[list[TowerBatch]] = []

    def noted(*given: Any) -> Any:
        pipeline = checked_steps(*given)
        progress, drawn = pipeline.progress, []
        seen.append(drawn)

        def noting(feed: Iterator[TowerBatch]) -> object:
            output = progress(feed)
            drawn.append(output.labels)
            return output

        pipeline.progress = noting  # type: ignore[method-assign, assignment]
        return pipeline

    _, decision = auto_plan(
        small_model(META),
        local[0],
        runtime,
        PlanConfig(towers="auto"),
        OptimizerConfig(),
        more=local[1:],
        steps=noted,
    )
    kinds = [
        len({tuple(labels.nan_to_num(-1.0).tolist()) for labels in drawn})
        for drawn in seen
    ]
    return [
        candidate.trial_ms for candidate in decision.candidates if not candidate.refused
    ], kinds


@pytest.mark.slow
def test_trials_make_the_steps_of_train_on_several_batches_and_leave_out_a_bad_one() -> (
    None
):
    for ms, kinds in run_ranks(tried_as_trained, 2, timeout_s=300):
        assert all(0 < each < float("inf") for each in ms)
        assert kinds
        assert set(kinds) == {3}


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(decided, 2, timeout_s=300)


@pytest.mark.slow
def test_all_ranks_decide_alike_and_train_by_it(
    two_ranks: list[dict[str, Any]],
) -> None:
    first, second = two_ranks
    for name in ("config", "text", "candidates"):
        assert first[name] == second[name]
    assert first["unchanged"], "measuring leaves the model as it was"
    assert len(first["losses"]) == 3
    taken = first["candidates"][0]
    assert (first["config"].towers, first["config"].sharding) == (
        taken.towers,
        taken.sharding,
    )
    assert {candidate.towers for candidate in first["candidates"]} == {
        "data_parallel",
        "user:0,item:1",
        "user:1,item:0-1",
        "user:0-1,item:1",
    }
    assert all(
        0 < candidate.trial_ms < float("inf")
        for candidate in first["candidates"]
        if not candidate.refused
    )


@pytest.mark.slow
def test_a_shared_table_keeps_towers_together(two_ranks: list[dict[str, Any]]) -> None:
    flat, apart = two_ranks[0]["shared"]
    assert flat == ("data_parallel", "row_wise", "")
    assert apart[2].startswith("the towers user and item share table 'item'")


@pytest.mark.slow
def test_tables_that_fit_nowhere_are_refused_on_every_rank(
    two_ranks: list[dict[str, Any]],
) -> None:
    assert two_ranks[0]["memory"] == two_ranks[1]["memory"]
    assert "no sharding plan fits" in two_ranks[0]["memory"]
