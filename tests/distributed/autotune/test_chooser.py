"""The chooser: a cost model whose answers are known by hand, what it refuses, and what it measures on real ranks."""

import dataclasses
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.contracts import run_ranks
from tests.examples import META, batches, small_model, table
from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.autotune.choose import (
    Candidate,
    Decision,
    auto_plan,
    choose,
    placements,
    predict_step,
    single_process_ms,
    why_together,
)
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.placement import TowerPlacement
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.draft import PlanError
from torchrec_ext.distributed.plan.measurements import Line, Measurements, TowerCost
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.tower_model import two_tower
from torchrec_ext.schema import Jagged
from torchrec_ext.train.loop import checked_steps
from torchrec_ext.train.step.pipeline import make_pipeline

unit = pytest.mark.unit
NOTHING = Line(fixed=0.0, each=0.0)


def cost(per_row: float, **changes: Any) -> TowerCost:
    """A tower of 100 rows on every rank, ``per_row`` ms for each row's dense layers."""
    base = TowerCost(
        rows=100,
        dense=Line(fixed=0.0, each=per_row),
        look_up=Line(fixed=1.0, each=0.0),
        optimizer=0.5,
        dense_bytes=1_000_000,
        row_bytes=10.0,
        pooled_bytes=256,
        out_bytes=40,
    )
    return dataclasses.replace(base, **changes)


def measured(user: TowerCost | None = None, item: TowerCost | None = None, **changes: Any) -> Measurements:
    """On two ranks: a flat step of 50 ms, 2 of them look-ups."""
    towers = {name: tower for name, tower in (("user", user), ("item", item)) if tower is not None}
    measurements = Measurements(
        world_size=2,
        rows=100,
        all_to_all=NOTHING,
        all_reduce=NOTHING,
        steps={"table_wise": 50.0},
        looked_up=2.0,
        towers=towers,
        dense_bytes=2_000_000,
        memory_rate=1e6,
    )
    return dataclasses.replace(measurements, **changes)


def placed(text: str) -> TowerPlacement:
    return TowerPlacement.parse(text, ["user", "item"], 2)


@unit
def test_a_step_is_the_sum_of_its_parts() -> None:
    measurements = measured(
        cost(0.2), cost(0.1), all_to_all=Line(fixed=0.25, each=1e-3), all_reduce=Line(fixed=9.0, each=1e-6)
    )
    step = predict_step(placed("user:0,item:1"), measurements)
    # 50 less look-ups of 2, less 20 + 0.5 and 10 + 0.5 of the towers, less 2 MB of gradients at 1 ms for a MB
    assert step.besides == pytest.approx(50 - 2 - 20.5 - 10.5 - 2)
    assert step.towers == pytest.approx(200 * 0.2 + 1 + 0.5)
    assert step.within == 0
    # each rank sends 100 rows of 10 bytes and gets as many; outputs of 40 bytes go back and come back, and so do
    # gradients
    assert step.between == pytest.approx(4 * 0.25 + 1e-3 * (2 * 100 * 10 + 2 * 2 * 100 * 40))
    assert step.total == step.besides + step.towers + step.between
    assert single_process_ms(measurements) == pytest.approx(2 * step.besides + 200 * 0.3 + 2 * 1.5)


@unit
def test_a_tower_on_two_ranks_pays_for_its_tables_and_gradients() -> None:
    measurements = measured(
        cost(0.2), cost(0.1), all_to_all=Line(fixed=0.25, each=1e-3), all_reduce=Line(fixed=9.0, each=0.0)
    )
    step = predict_step(placed("user:0-1,item:1"), measurements)
    assert step.towers == pytest.approx(100 * 0.2 + 1.5 + 200 * 0.1 + 1.5)
    assert step.within == pytest.approx(3 * 0.25 + 1e-3 * 50 * (10 + 2 * 256) + 9)
    assert step.between == pytest.approx(4 * 0.25 + 1e-3 * (100 * 10 + 2 * 100 * 40))


@unit
def test_placements_in_proportion_one_beside_it_and_mixed() -> None:
    towers = {"user": cost(0.3), "item": cost(0.1)}
    assert [str(placement) for placement in placements(towers, 2)] == [
        "user:0,item:1",
        "user:1,item:0-1",
        "user:0-1,item:1",
    ]
    texts = [str(placement) for placement in placements(towers, 4)]
    assert texts[:2] == ["user:0-2,item:3", "user:0-1,item:2-3"]
    assert "user:0-3,item:2-3" in texts
    assert placements(towers, 1) == []
    assert placements({}, 2) == []
    for placement in placements({name: cost(0.1) for name in "abcde"}, 3):
        assert all(placement.ranks.values())


def chosen(
    measurements: Measurements, fits: Callable[[Candidate], str] = lambda candidate: "", **options: Any
) -> Decision:
    """The decision where a trial takes what the cost model foresees."""
    return choose(
        measurements, "table_wise", try_out=lambda some: [candidate.ms for candidate in some], fits=fits, **options
    )


@unit
@pytest.mark.parametrize(
    ("found", "taken"),
    [
        # Two equal towers: apart, each rank runs one of them over all rows, and 10 ms of gradients are not exchanged.
        (measured(cost(0.1), cost(0.1), all_reduce=Line(fixed=0.0, each=5e-6)), "user:0,item:1"),
        # A network that takes a ms for 100 bytes: outputs are dearer than gradients.
        (measured(cost(0.1), cost(0.1), all_to_all=Line(fixed=0.0, each=1e-2)), "data_parallel"),
        # One tower is nearly all the work: apart, its rank would do both ranks' share of it.
        (measured(cost(0.3), cost(0.01)), "data_parallel"),
        # A large tower of few gradients and a small one of many: the small one goes to one rank, the large one stays on
        # both.
        (
            measured(
                cost(0.2, dense_bytes=0), cost(0.001, dense_bytes=4_000_000), all_reduce=Line(fixed=0.0, each=5e-6)
            ),
            "user:0-1,item:1",
        ),
    ],
)
def test_the_known_best_is_taken(found: Measurements, taken: str) -> None:
    assert chosen(found).taken.towers == taken


APART = measured(cost(0.1), cost(0.1), all_reduce=Line(fixed=0.0, each=5e-6))


@unit
def test_what_does_not_fit_is_refused_with_its_reason_and_the_next_is_taken() -> None:
    decision = chosen(
        APART, fits=lambda candidate: "" if candidate.towers == "data_parallel" else "tower 'user' needs 9 GiB"
    )
    assert decision.taken.towers == "data_parallel"
    assert decision.candidates[-1].refused == "tower 'user' needs 9 GiB"
    assert "tower 'user' needs 9 GiB" in decision.text()
    with pytest.raises(PlanError, match="too large"):
        chosen(APART, fits=lambda candidate: "too large")


@unit
def test_a_placement_that_cannot_be_tried_is_refused_with_its_reason() -> None:
    def failing(some: Sequence[Candidate]) -> list[float | str]:
        return [
            candidate.ms if candidate.towers == "data_parallel" else "table 'a': 4 columns cannot be split over 2 ranks"
            for candidate in some
        ]

    decision = choose(APART, "column_wise", try_out=failing, fits=lambda candidate: "")
    assert decision.taken.towers == "data_parallel"
    assert decision.candidates[-1].refused == "table 'a': 4 columns cannot be split over 2 ranks"


@unit
def test_towers_that_cannot_be_placed_are_told() -> None:
    decision = chosen(measured(), refused="the towers user and item share table 'item'")
    assert [candidate.towers for candidate in decision.candidates] == ["data_parallel", "tower_parallel"]
    assert "share table 'item'" in decision.text()
    assert "Linear has no Towers to place" in why_together(nn.Linear(2, 2), Runtime(world_size=2))


@unit
def test_only_the_most_hopeful_are_tried_and_what_was_not_is_not_taken() -> None:
    tried: list[str] = []

    def slower(some: Sequence[Candidate]) -> list[float | str]:
        tried.extend(candidate.towers for candidate in some if candidate.towers != "data_parallel")
        return [candidate.ms if candidate.towers == "data_parallel" else 3 * candidate.ms for candidate in some]

    light = cost(0.01, look_up=NOTHING)
    decision = choose(measured(light, light), "table_wise", try_out=slower, fits=lambda candidate: "", tried=1)
    assert tried == ["user:0,item:1"]
    assert decision.taken.towers == "data_parallel"  # of 50 ms, though two placements are foreseen to be faster
    assert any(candidate.trial_ms is None and candidate.ms < 50 for candidate in decision.candidates)
    tried.clear()
    choose(
        dataclasses.replace(APART, all_to_all=Line(fixed=500.0, each=0.0)),
        "auto",
        try_out=slower,
        fits=lambda candidate: "",
    )
    assert tried == []


@unit
def test_the_text_has_every_candidate_and_the_measured_step_beside_the_taken() -> None:
    decision = chosen(APART)
    lines = decision.text(31.5).splitlines()
    assert "measured ms" in lines[0]
    assert [line.split()[0] for line in lines[2:6]] == [candidate.towers for candidate in decision.candidates]
    assert "31.50" in lines[2]
    assert lines[2].rstrip().endswith("taken")
    step = f"towers=user:0,item:1, tables table_wise: {decision.taken.ms:.2f} ms a step"
    why = f"{step}, against 50.00 ms with towers=data_parallel"
    assert why in lines
    assert lines[-1].startswith("one process alone would take about ")
    assert "measured" not in decision.text()


@unit
def test_lines_neither_fall_nor_begin_below_nothing() -> None:
    assert Line.through((1, 1.0), (100, 500.0)).fixed == 0
    assert Line.through((1, 1.0), (100, 0.5)) == Line(fixed=0.5, each=0.0)


def kinds(measurements: Measurements) -> set[str]:
    runtime = Runtime(world_size=2, local_world_size=2)
    with unittest.mock.patch("torch.distributed.broadcast_object_list"):
        plan = plan_sharding(small_model(META), runtime, measured=measurements)
    return {sharding.sharding_type for module in plan.plan.values() for sharding in module.values()}  # type: ignore[attr-defined]


@unit
def test_torchrecs_planner_plans_with_what_was_measured() -> None:
    slow, fast = Line(fixed=0.0, each=1.0), Line(fixed=0.0, each=1e-9)
    assert kinds(measured(all_to_all=slow, all_reduce=fast)) == {"data_parallel"}
    assert "data_parallel" not in kinds(measured(all_to_all=fast, all_reduce=slow))


def told(call: Callable[[], object]) -> str:
    try:
        call()
    except PlanError as error:
        return str(error)
    return ""


def decided(runtime: Runtime) -> dict[str, Any]:
    model, local = small_model(META), list(batches(3, rank=runtime.rank, world_size=runtime.world_size))
    before = {name: (value.shape, value.device) for name, value in model.named_parameters()}
    optimizer = OptimizerConfig()
    config, decision = auto_plan(model, local[0], runtime, PlanConfig(towers="auto"), optimizer)
    unchanged = before == {name: (value.shape, value.device) for name, value in model.named_parameters()}
    plan = plan_sharding(model, runtime, config, optimizer=optimizer, measured=decision.measurements)
    pipeline = make_pipeline(*hybrid_parallel(model, runtime, plan=plan, optimizer=optimizer), runtime.device)
    stream = iter(local)
    sharing = two_tower([table("item", 9), table("u", 9)], [table("item", 9)], device=META)
    ids = {name: Jagged(torch.tensor([1, 2])) for name in ("item", "u")}
    batch = sharing.schema().assemble(ids, labels=torch.ones(2))
    shared = auto_plan(sharing, batch, runtime, PlanConfig(towers="auto", sharding="row_wise"), optimizer)[1]
    return {
        "config": config,
        "text": decision.text(),
        "unchanged": unchanged,
        "losses": [float(pipeline.progress(stream).loss) for _ in local],
        "candidates": list(decision.candidates),
        "shared": [(candidate.towers, candidate.sharding, candidate.refused) for candidate in shared.candidates],
        "memory": told(lambda: auto_plan(small_model(META), local[0], runtime, PlanConfig(memory_gb=1e-7), optimizer)),
    }


def tried_as_trained(runtime: Runtime) -> tuple[list[float | None], list[int]]:
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
        small_model(META), local[0], runtime, PlanConfig(towers="auto"), OptimizerConfig(), more=local[1:], steps=noted
    )
    kinds = [len({tuple(labels.nan_to_num(-1.0).tolist()) for labels in drawn}) for drawn in seen]
    return [candidate.trial_ms for candidate in decision.candidates if not candidate.refused], kinds


@pytest.mark.slow
def test_trials_make_the_steps_of_train_on_several_batches_and_leave_out_a_bad_one() -> None:
    for ms, kinds in run_ranks(tried_as_trained, 2, timeout_s=300):
        assert ms[0] is not None
        assert ms[0] > 0
        assert kinds
        assert set(kinds) == {3}


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(decided, 2, timeout_s=300)


@pytest.mark.slow
def test_all_ranks_decide_alike_and_train_by_it(two_ranks: list[dict[str, Any]]) -> None:
    first, second = two_ranks
    for name in ("config", "text", "candidates"):
        assert first[name] == second[name]
    assert first["unchanged"], "measuring leaves the model as it was"
    assert len(first["losses"]) == 3
    taken = first["candidates"][0]
    assert (first["config"].towers, first["config"].sharding) == (taken.towers, taken.sharding)
    assert {candidate.towers for candidate in first["candidates"]} == {
        "data_parallel",
        "user:0,item:1",
        "user:1,item:0-1",
        "user:0-1,item:1",
    }
    assert all(
        candidate.trial_ms is not None and candidate.trial_ms > 0
        for candidate in first["candidates"]
        if candidate.towers == "data_parallel"
    )
    assert taken.trial_ms is not None


@pytest.mark.slow
def test_a_shared_table_keeps_towers_together(two_ranks: list[dict[str, Any]]) -> None:
    flat, apart = two_ranks[0]["shared"]
    assert flat == ("data_parallel", "row_wise", "")
    assert apart[2].startswith("the towers user and item share table 'item'")


@pytest.mark.slow
def test_tables_that_fit_nowhere_are_refused_on_every_rank(two_ranks: list[dict[str, Any]]) -> None:
    assert two_ranks[0]["memory"] == two_ranks[1]["memory"]
    assert "no sharding plan fits" in two_ranks[0]["memory"]
